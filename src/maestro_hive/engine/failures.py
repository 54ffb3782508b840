"""How an attempt that did not succeed is described: what is recorded of it, and what is reported."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import traceback
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from maestro_hive.engine import retry_policy
from maestro_hive.engine.config import ErrorCategory
from maestro_hive.engine.errors import (
    FailureReport,
    HelpNeeded,
    TokenBudgetExceeded,
    UnrecoverableError,
    parts_of,
    text_of,
    writable,
)
from maestro_hive.engine.recorded_errors import error_tree, is_hidden
from maestro_hive.engine.results import ExecutionAttempt, ExecutionResult, ExecutionStatus
from maestro_hive.kernel.redaction import cut, cut_start, redact_text

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import TracebackType

    from maestro_hive.engine.retry_policy import Decision

ErrorT = TypeVar("ErrorT", bound=BaseException)

#: How much of an error is stored.
_MESSAGE_LENGTH = 2_000
_TRACEBACK_LENGTH = 4_000
_REPORT_TEXT_LENGTH = 4_000
#: What a report says of an attempt, besides its error's message.
_REPORTED = (
    *("attempt_id", "attempt_number", "started_at", "ended_at", "status"),
    *("error_type", "tokens_used"),
)
#: An error that is raised again and again has all its frames, and each costs time.
_FRAMES = 40
#: Packages whose lines a user need not see: between the call and the task there is nothing else.
_OURS = (
    "maestro_hive.engine",
    "maestro_hive.unified_execution",
    "maestro_hive.hive",
    "maestro_hive.kernel",
    "asyncio",
)
#: How many causes of an error are treated.
_MAX_CHAIN = 50


class AttemptEnd(NamedTuple):
    """What is recorded of an attempt that ended without a result."""

    status: ExecutionStatus
    #: Whether it uses up an attempt.
    counts: bool
    error: dict[str, Any]
    reason: str
    wait: float | None = None
    final: bool = False
    #: What healers are asked about: type, fingerprint, place.
    diagnosis: Mapping[str, Any] | None = None
    #: Whether the task was stopped while it was executed, so that it may have had its effect.
    ambiguous: bool = False
    #: Whether a person is asked if it had.
    asked: bool = False
    #: How much of the wait is left after a repair.
    least_wait: float = 0.0


def failed_attempt(
    facts: dict[str, Any], decision: Decision, diagnosis: Mapping[str, Any] | None = None
) -> AttemptEnd:
    """Return what is recorded of an attempt that failed."""
    return AttemptEnd(
        status=ExecutionStatus.RETRYING if decision.retry else ExecutionStatus.FAILED,
        counts=True,
        error=facts,
        reason=decision.reason,
        wait=decision.wait if decision.retry else None,
        final=not decision.retry,
        diagnosis=diagnosis,
        least_wait=decision.least,
    )


def ended_attempt(
    error: BaseException, status: ExecutionStatus, *, counts: bool, ambiguous: bool = False
) -> AttemptEnd:
    """Return what is recorded of an attempt whose error is raised as it is."""
    facts = error_facts(error)
    return AttemptEnd(status, counts, facts, "it is not retried", ambiguous=ambiguous)


# --- errors --------------------------------------------------------------------------------------


def error_facts(error: BaseException) -> dict[str, Any]:
    """Return an error as plain JSON, also one that cannot print itself.

    ``exception`` is what ``recorded_errors.make_error`` makes the error of again.
    """
    cause = error.original_error if isinstance(error, UnrecoverableError) else None
    kind, message = _kind_and_message(error)
    classified = cause if isinstance(cause, BaseException) else error
    category = retry_policy.classify(classified) if isinstance(error, Exception) else "UNKNOWN"
    try:
        frames = _own_frames(error)
        trace = "".join(traceback.format_exception(type(error), error, frames, limit=-_FRAMES))
    except Exception:  # noqa: BLE001 - an error of the user's making
        trace = message
    facts = {
        "type": kind,
        "message": message,
        "category": str(category),
        "traceback": cut_start(writable(trace), _TRACEBACK_LENGTH),
        "exception": error_tree(error),
    }
    return {**facts, "recoverable": False} if is_unrecoverable(error) else facts


def _kind_and_message(error: BaseException) -> tuple[str, str]:
    kind = type(error).__name__
    return kind, cut(text_of(error) or kind, _MESSAGE_LENGTH)


def _own_frames(error: BaseException) -> TracebackType | None:
    """Return an error's traceback from the user's first line on."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_globals.get("__package__") in _OURS:
        trace = trace.tb_next
    return trace or error.__traceback__


def is_unrecoverable(error: BaseException) -> bool:
    """Return whether a task says that another attempt is pointless, by itself or in a group."""
    return any(_is_final(part) for part in parts_of(error) if isinstance(part, UnrecoverableError))


def _is_final(error: UnrecoverableError) -> bool:
    # An executor inside the task that has used up its attempts gets new ones in the next round.
    report: object = error.failure_report
    return not isinstance(report, FailureReport) or not report.recoverable


def passes_through(error: Exception) -> bool:
    """Return whether an error must reach the caller as it is, without another attempt."""
    return any(
        retry_policy.never_retried(part) and not isinstance(part, UnrecoverableError)
        for part in parts_of(error)
    )


def is_interruption(error: BaseException) -> bool:
    """Return whether an end looks like a stop that no caller is known to have requested.

    A Ctrl+C that no event loop handles looks like one that the task raises itself; so does a task
    that cancels itself. They are like the death of a process: no failure, and limited in number.
    """
    return isinstance(error, KeyboardInterrupt | asyncio.CancelledError)


def status_of(error: BaseException) -> ExecutionStatus:
    """Return how an execution ended that raised an error."""
    if isinstance(error, ExceptionGroup):
        inside = (status_of(part) for part in parts_of(error))
        return next((it for it in inside if it != "failed"), ExecutionStatus.FAILED)
    match error:
        case TokenBudgetExceeded():
            return ExecutionStatus.BANKRUPT
        case HelpNeeded():
            return ExecutionStatus.HELP_NEEDED
        case Exception():
            return ExecutionStatus.FAILED
        case _:
            return ExecutionStatus.CANCELLED


def plain_text(error: BaseException) -> str:
    """Return ``Type: message``, also of an error that cannot print itself."""
    kind, message = _kind_and_message(error)
    return kind if message == kind else f"{kind}: {message}"


def note_broken(option: str, error: Exception, broken: Exception) -> None:
    """Say in the task's error, which the caller gets, that a function of its options failed."""
    with contextlib.suppress(Exception):  # an error of the user's making
        note = f"the function given as {option} failed: {redact_text(plain_text(broken))}"
        BaseException.add_note(error, note)


def original_of(error: Exception | None) -> Exception | None:
    """Return the error that level 1 gave up over, if it names one."""
    found: object = error.original_error if isinstance(error, UnrecoverableError) else None
    return found if isinstance(found, Exception) else None


# --- attempts as plain data ----------------------------------------------------------------------


def set_failure(
    attempt: ExecutionAttempt,
    error: Mapping[str, Any],
    *,
    healed: bool = False,
    healing_error: str | None = None,
    feedback: str | None = None,
) -> None:
    """Describe the error that an attempt ended with."""
    attempt.error_message = error.get("message")
    attempt.error_type = error.get("type")
    attempt.error_traceback = error.get("traceback")
    attempt.healing_applied = healed
    metrics = attempt.metrics = {"error_category": error.get("category", "UNKNOWN")}
    if not error.get("recoverable", True):
        metrics["recoverable"] = False
    if healing_error is not None:
        metrics["healing_error"] = healing_error
    if feedback is not None:
        metrics["feedback"] = feedback


def attempt_facts(attempt: ExecutionAttempt) -> dict[str, Any]:
    """Return an attempt as it stands in a report."""
    known = attempt.to_dict()
    message = cut(attempt.error_message or "", _REPORT_TEXT_LENGTH) or None
    return {**{name: known[name] for name in _REPORTED}, "error_message": message}


def attempt_line(attempt: ExecutionAttempt) -> str:
    """Return an attempt as one line of a report."""
    what = attempt.status.value
    if attempt.error_message is not None:
        what = f"{what}: {attempt.error_type}: {attempt.error_message}"
    when = f" at {attempt.started_at.isoformat()}" if attempt.started_at is not None else ""
    return f"attempt {attempt.attempt_number}{when}: {what}"


def last_error(attempts: list[ExecutionAttempt]) -> dict[str, Any]:
    """Return what is known of the last error among these attempts."""
    last = next((each for each in reversed(attempts) if each.error_message), None)
    if last is None:
        return {}
    return {
        "message": last.error_message,
        "category": last.metrics.get("error_category", ErrorCategory.UNKNOWN.value),
        "recoverable": last.metrics.get("recoverable", True),
    }


# --- reports -------------------------------------------------------------------------------------


def report_of(failure: object) -> FailureReport | None:
    """Return the report that an error or a result came with, if it did."""
    found = (
        failure.failure_report
        if isinstance(failure, UnrecoverableError | ExecutionResult)
        else None
    )
    return found if isinstance(found, FailureReport) else None


def report_from(facts: Mapping[str, Any]) -> FailureReport:
    """Return the report that was recorded, or is to be: its texts are texts, and not too long."""
    fix = facts["suggested_fix"]
    texts = {name: _text(facts[name]) for name in ("failed_persona", "error_category", "details")}
    plain = {**copy.deepcopy(dict(facts)), **texts}  # others read the same facts
    return FailureReport(**{**plain, "suggested_fix": _text(fix) if fix else None})


def _text(value: object) -> str:
    return cut(str(value), _REPORT_TEXT_LENGTH)


# --- tracebacks that show the user's code --------------------------------------------------------


def with_own_lines(error: ErrorT) -> ErrorT:
    """Return the error with only the user's frames in its traceback and in those of its causes."""
    _point_at_cause(error)
    each: BaseException | None = error
    for _ in range(_MAX_CHAIN):
        if each is None:
            break
        each.__traceback__ = _own_lines(each.__traceback__)
        if isinstance(each, BaseExceptionGroup):
            for part in each.exceptions:
                with_own_lines(part)
        each = each.__cause__ or each.__context__
    return error


def _point_at_cause(error: BaseException) -> None:
    """Make the exception of the step the direct cause of ``HelpNeeded``, without level 1 in between."""
    cause = error.__cause__
    if not isinstance(error, HelpNeeded) or not isinstance(cause, UnrecoverableError):
        return
    original = cause.original_error
    if isinstance(original, BaseException):
        error.__cause__ = original


def _own_lines(trace: TracebackType | None) -> TracebackType | None:
    first = last = None
    while trace is not None:
        following = trace.tb_next
        if not is_hidden(trace.tb_frame):
            if last is None:
                first = trace
            else:
                last.tb_next = trace
            last = trace
        trace = following
    if last is not None:
        last.tb_next = None
    return first
