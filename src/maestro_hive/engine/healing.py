"""Healing: between two attempts a healer may repair the cause of a failure."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from maestro_hive.engine.attempt import call_in_thread, is_async
from maestro_hive.engine.errors import text_of

if TYPE_CHECKING:
    from maestro_hive.engine.errors import FailureReport


#: How much of a healer's feedback, or of its own error, is recorded.
_MAX_TEXT = 2_000


class Healer(Protocol):
    """Examines a failure, and may repair its cause or say what the next attempt should know."""

    def heal_single(self, failure: FailureReport) -> Any:
        """Return an object with a ``status``, where FIXED means that the cause is repaired.

        If it has a text as ``feedback``, the next attempts find it in ``current().feedback``.
        """
        ...


class Healing(NamedTuple):
    """Whether a failure's cause is repaired, the healer's feedback, and its own error."""

    fixed: bool
    error: str | None = None
    feedback: str | None = None


NOT_HEALED = Healing(fixed=False)


async def heal(healer: Healer, failure: FailureReport, seconds: float) -> Healing:
    """Call the healer; one that raises has repaired nothing, and its error is returned.

    It has the time limit of an attempt. The failure is recorded together with the outcome of the
    healing: if the process is killed in between, the attempt counts as interrupted.
    """
    deadline = asyncio.timeout(seconds)
    try:
        async with deadline:
            call = healer.heal_single
            answer = await (
                call(failure) if is_async(call) else call_in_thread(call, (failure,), {})
            )
        status = getattr(answer, "status", None)
        feedback = getattr(answer, "feedback", None)
        return Healing(
            fixed=str(getattr(status, "value", status)).upper() == "FIXED",
            feedback=feedback[:_MAX_TEXT] if isinstance(feedback, str) and feedback else None,
        )
    except Exception as error:  # noqa: BLE001 - the user's code, like the task
        if deadline.expired() and isinstance(error, TimeoutError):
            return Healing(fixed=False, error=f"it was not finished within {seconds:g} seconds")
        text = f"{type(error).__name__}: {text_of(error)}"
        return Healing(fixed=False, error=text[:_MAX_TEXT])
