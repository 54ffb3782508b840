"""Tracebacks that show the user's code: the frames of this package and of asyncio are removed."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from maestro_hive.engine.errors import HelpNeeded, UnrecoverableError

if TYPE_CHECKING:
    from types import TracebackType

ErrorT = TypeVar("ErrorT", bound=BaseException)

_HIDDEN = ("maestro_hive", "asyncio")
#: How many causes of an error are treated.
_MAX_CHAIN = 50


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
        if not _is_hidden(trace):
            if last is None:
                first = trace
            else:
                last.tb_next = trace
            last = trace
        trace = following
    if last is not None:
        last.tb_next = None
    return first


def _is_hidden(trace: TracebackType) -> bool:
    name = str(trace.tb_frame.f_globals.get("__name__", ""))
    return name.partition(".")[0] in _HIDDEN
