"""The end of a run: its entry, why a run is suspended, and the answers that it did not take."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from msgspec import Raw

from maestro_hive.engine.errors import ExecutionException, RecoverableError
from maestro_hive.hive.answers import read_answer
from maestro_hive.hive.positions import name_of
from maestro_hive.journal import values
from maestro_hive.journal.entries import AnswerDropped, ReplayDiffered, RunEnded, WaitEnded
from maestro_hive.journal.recorded_errors import encode_error
from maestro_hive.kernel.errors import RunInterruptedError

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Iterable

    from maestro_hive.hive.positions import Unclaimed
    from maestro_hive.journal.recorder import RunJournal

#: The attribute of an error that names the call which raised it in the workflow; not encoded.
CALL = "__maestro_call__"


def error_of(root: asyncio.Task[Any]) -> BaseException | None:
    """Return the error that a workflow raised."""
    if root.cancelled():
        return RecoverableError("the workflow waited for something that was cancelled")
    return root.exception()


def successful_end(result: object) -> RunEnded:
    """Return the end of a run by its result; one that is no JSON is a failure."""
    try:
        return RunEnded(status="success", result=Raw(values.encode(result, "result").data))
    except Exception as wrong:  # noqa: BLE001 - a result of the user's that is no JSON
        return failed_end(wrong)


def failed_end(error: Exception) -> RunEnded:
    """Return the end of a run by an error."""
    failed = tuple(failed_calls(error))
    return RunEnded(status="failed", error=Raw(encode_error(error)), failed=failed)


def failed_calls(error: BaseException) -> list[str]:
    """Return the identities of the calls by whose errors a workflow failed.

    Not those of errors that it caught before: a retry must not let it take another branch.
    """
    found: dict[str, None] = {}
    left: list[BaseException | None] = [error]
    seen: set[int] = set()
    while left:
        each = left.pop()
        if each is None or id(each) in seen:
            continue
        seen.add(id(each))
        if (identity := getattr(each, CALL, None)) is not None:
            found[identity] = None
        elif isinstance(each, BaseExceptionGroup):
            left += each.exceptions
        else:
            left += [each.__cause__, each.__context__]
    return list(found)


def suspension_reason(
    error: Exception,
) -> Literal["interrupted", "breaker", "budget", "person", "error"]:
    """Return why an error suspends a run."""
    if isinstance(error, RunInterruptedError):
        return "interrupted"
    return (error.suspends if isinstance(error, ExecutionException) else "") or "error"


def differences(unclaimed: Unclaimed) -> tuple[ReplayDiffered, ...]:
    """Return the report of a resumed workflow that did not make the recorded calls."""
    missing, new = tuple(unclaimed.missing), tuple(unclaimed.new)
    return (ReplayDiffered(missing=missing, new=new),) if missing or new else ()


def unused_answers(journal: RunJournal, *, has_asked: bool) -> Iterable[AnswerDropped]:
    """Return the answers that no question has taken, recorded or on their way."""
    for each in journal.state.outcomes.values():
        if isinstance(each.entry, WaitEnded):
            yield _unused(each.identity, name_of(each.identity), each.entry.by)
    for message in journal.recorder.store.messages() if has_asked else ():
        if message.run_id == journal.lease.name and message.kind in {"answer", "early"}:
            target, by = message.target, read_answer(message.data).by
            yield _unused(target, name_of(target) if message.kind == "answer" else target, by)


def _unused(identity: str, name: str, by: str) -> AnswerDropped:
    reason = "the run has ended without its question"
    return AnswerDropped(identity=identity, name=name, by=by, reason=reason)
