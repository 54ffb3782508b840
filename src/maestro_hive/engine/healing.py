"""Between two attempts: a healer may repair what failed."""

from __future__ import annotations

import asyncio
import inspect
from contextvars import copy_context
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from maestro_hive.engine.errors import text_of
from maestro_hive.kernel.threads import threads

if TYPE_CHECKING:
    from maestro_hive.engine.errors import FailureReport


#: How much of what went wrong with a healer is recorded.
_LONGEST_ERROR = 2_000


class Healer(Protocol):
    """Examines a failure, and may repair its cause; its answer has a ``status``."""

    def heal_single(self, failure: FailureReport) -> Any:
        """Try to repair what failed; an answer with the status FIXED says that it is repaired."""
        ...


class Healing(NamedTuple):
    """Whether a failure's cause is repaired, and what went wrong with the healer itself."""

    fixed: bool
    error: str | None = None


NOT_HEALED = Healing(fixed=False)


async def heal(healer: Healer, failure: FailureReport, seconds: float) -> Healing:
    """Ask the healer; one that fails itself has repaired nothing, and its error is given.

    It has as long as an attempt has. The failure is recorded together with what came of the
    healing: a process that is killed meanwhile leaves an attempt that was interrupted.
    """
    deadline = asyncio.timeout(seconds)
    try:
        async with deadline:
            answer = await _ask(healer, failure)
        status = getattr(answer, "status", None)
        return Healing(fixed=str(getattr(status, "value", status)).upper() == "FIXED")
    except Exception as error:  # noqa: BLE001 - the user's own code, like the task itself
        if deadline.expired() and isinstance(error, TimeoutError):
            return Healing(fixed=False, error=f"it was not done within {seconds:g} seconds")
        text = f"{type(error).__name__}: {text_of(error)}"
        return Healing(fixed=False, error=text[:_LONGEST_ERROR])


async def _ask(healer: Healer, failure: FailureReport) -> Any:
    """Return its answer; one that is not async may take long, so it has a thread."""
    if inspect.iscoroutinefunction(healer.heal_single):
        return await healer.heal_single(failure)
    call = partial(copy_context().run, healer.heal_single, failure)
    answer = await asyncio.wrap_future(threads.run(call))
    return await answer if inspect.isawaitable(answer) else answer
