"""Errors whose tracebacks show the user's lines: those of ours are taken out."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from maestro_hive.engine.errors import HelpNeeded, UnrecoverableError

if TYPE_CHECKING:
    from types import TracebackType

ErrorT = TypeVar("ErrorT", bound=BaseException)

_OURS = ("maestro_hive", "asyncio")
#: A chain of causes longer than this is not a user's.
_LONGEST_CHAIN = 50


def with_own_lines(error: ErrorT) -> ErrorT:
    """Return the error; what is left of its traceback, and of its causes', is the user's code."""
    _point_at_cause(error)
    each: BaseException | None = error
    for _ in range(_LONGEST_CHAIN):
        if each is None:
            break
        each.__traceback__ = _own_lines(each.__traceback__)
        if isinstance(each, BaseExceptionGroup):
            for part in each.exceptions:
                with_own_lines(part)
        each = each.__cause__ or each.__context__
    return error


def _point_at_cause(error: BaseException) -> None:
    """Let a call for help come straight from what the step raised: level 1 only handed it on."""
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
        if not _is_ours(trace):
            if last is None:
                first = trace
            else:
                last.tb_next = trace
            last = trace
        trace = following
    if last is not None:
        last.tb_next = None
    return first


def _is_ours(trace: TracebackType) -> bool:
    name = str(trace.tb_frame.f_globals.get("__name__", ""))
    return name.partition(".")[0] in _OURS
