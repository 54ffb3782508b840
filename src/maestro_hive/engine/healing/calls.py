"""Calls of what users wrote for healing: within the time of an attempt, and without ending the step."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from maestro_hive.engine.attempt import call_in_thread, is_from_a_signal
from maestro_hive.engine.errors import text_of

if TYPE_CHECKING:
    from collections.abc import Callable


class UserCallError(Exception):
    """A call took too long, or ended as if the process, or the step, was to end."""


async def called(
    call: Callable[..., Any], given: tuple[Any, ...], seconds: float, *, in_loop: bool = False
) -> Any:
    """Return what a function returns, in a thread unless ``in_loop``; or raise an ``Exception``.

    What ends a step or its process is raised as it is only if its caller, or a signal, wanted that.
    """
    deadline = asyncio.timeout(seconds)
    try:
        async with deadline:
            return await (call(*given) if in_loop else call_in_thread(call, given, {}))
    except TimeoutError as error:
        if not deadline.expired():
            raise
        raise UserCallError(f"was not finished within {seconds:g} seconds") from error
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is None or task.cancelling() > 0:
            raise
        raise UserCallError("waited for something that was cancelled") from error
    except (Exception, GeneratorExit, KeyboardInterrupt):
        raise
    except BaseException as error:
        if is_from_a_signal(error):
            raise
        raise UserCallError(f"raised {type(error).__name__}: {text_of(error)}") from error
