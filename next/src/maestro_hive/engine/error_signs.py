"""What an error says: its category, when to try again, and whether the remote service is at fault.

Read by attributes and class names, so that the errors of httpx, requests, aiohttp, openai,
anthropic and others are understood without importing any of them. Reading an error never raises,
whatever its class does.
"""

from __future__ import annotations

import errno
import math
import re
from datetime import UTC, datetime, timedelta
from itertools import islice
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from maestro_hive.engine.config import ErrorCategory
from maestro_hive.engine.errors import RecoverableError, TokenBudgetExceeded, UnrecoverableError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

T = TypeVar("T")
P = ParamSpec("P")

#: A longer requested wait is taken for a mistake, such as a date in place of seconds.
MAX_RETRY_AFTER_SECONDS = 7 * 86_400.0

#: How far an error is followed to its causes and group members, and how many are read at each step.
_MAX_DEPTH = 4
_MAX_WIDTH = 100


def retry_after(error: BaseException, now: datetime) -> float | None:
    """Return the seconds that the remote service requested to wait, or None.

    Read from ``error.retry_after`` and from a ``Retry-After`` header of the error or of its
    response, then from its causes and group members: the nearest error counts, and among equally
    near ones the longest wait. A time in the past is 0.
    """
    return max(_nearest(error, _requested, now), default=None)


def classify(error: BaseException) -> ErrorCategory:
    """Return the category of a failure, by the error or else by its causes and group members."""
    return next(iter(_nearest(error, _category)), ErrorCategory.UNKNOWN)


def is_remote_fault(error: BaseException) -> bool:
    """Return whether an error says that a remote service is unwell, and not that code is wrong.

    That is a timeout, a failed connection, a rate limit or a response with a status of 500 or more:
    the error itself, or else its causes and group members.
    """
    return any(_nearest(error, _remote_fault))


# --- requested waits -------------------------------------------------------------------------


def _requested(error: BaseException, now: datetime) -> float | None:
    wait = _guarded(_seconds, _read(error, "retry_after"), now)
    if wait is not None:
        return wait
    for headers in (_read(_read(error, "response"), "headers"), _read(error, "headers")):
        wait = _guarded(_in_headers, headers, now)
        if wait is not None:
            return wait
    return None


def _in_headers(headers: object, now: datetime) -> float | None:
    sent = _header(headers, "retry-after-ms")  # by some providers
    exact = _guarded(lambda: _usable(float(_text(sent)) / 1000))
    return _seconds(_header(headers, "retry-after"), now) if exact is None else exact


def _header(headers: object, name: str) -> object:
    """Return a header's value, in whatever case it is written."""
    found = name, _guarded(_read(headers, "get"), name.title())  # where there is no more
    for key, value in _guarded(_read(headers, "items")) or (found,):
        if (_guarded(_text, key) or "").lower() == name:
            return value
    return None


def _seconds(value: object, now: datetime) -> float | None:
    match value:
        case bool():
            return None
        case int() | float():
            return _usable(value)
        case timedelta():
            return _usable(value.total_seconds())
        case datetime():
            aware = value if value.tzinfo else value.replace(tzinfo=UTC)
            return _usable((aware - now).total_seconds())
        case str() | bytes():
            return _parsed_seconds(_text(value), now)
        case _:
            return None


def _parsed_seconds(text: str, now: datetime) -> float | None:
    number = _guarded(float, text)
    if number is not None:
        return _usable(number)
    from email.utils import parsedate_to_datetime

    return _seconds(_guarded(parsedate_to_datetime, text), now)


def _usable(seconds: float) -> float | None:
    """Return a wait from 0 to the maximum, or None, also for NaN."""
    return float(max(seconds, 0)) if -math.inf < seconds <= MAX_RETRY_AFTER_SECONDS else None


# --- categories ------------------------------------------------------------------------------

# Patterns for names of classes; ``re`` compiles them at their first use.
_RATE_LIMITED = r"(?i)rate_?limit|throttl|too_?many_?requests"
_TIMED_OUT = r"Timeout(Error|Exception|Expired)?$"
_EXHAUSTED = r"^(MemoryError|RecursionError|ResourceWarning)$"
_TEST_FAILED = r"^(AssertionError|DocTestFailure)$"
_PYTEST_FAILURE = {"Failed", "OutcomeException"}
_REMOTE = (
    r"API(Connection|Status|Response)?Error|APIConnection|HTTP(Status)?Error"
    r"|Connect(ion)?(Error|Failure|Closed|Lost)|Overloaded|ServiceUnavailable|BadGateway"
    r"|^(ClientError|RequestException|RpcError|URLError|gaierror|herror|SSLError|IncompleteRead)$"
)
#: Errors of a request that was never sent.
_NOT_SENT = r"^(UnsupportedProtocol|LocalProtocolError|InvalidURL)$"
#: Their ``errno`` is not one of the operating system.
_OTHER_CODES = r"^(gaierror|herror|SSLError)$"

#: EAGAIN comes from `fork`, when no more processes are allowed.
_EXHAUSTED_CODES = frozenset(
    {errno.EAGAIN, errno.EDQUOT, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOSPC}
)
_REMOTE_CODES = frozenset(
    {errno.EADDRNOTAVAIL, errno.EHOSTDOWN, errno.EHOSTUNREACH}
    | {errno.ENETDOWN, errno.ENETRESET, errno.ENETUNREACH, errno.ENOTCONN}
)


def _category(error: BaseException) -> ErrorCategory | None:
    if isinstance(error, RecoverableError) and (given := _guarded(_known_category, error)):
        return given
    names = frozenset(kind.__name__ for kind in type(error).__mro__)

    def named(pattern: str) -> bool:
        return any(re.search(pattern, name) for name in names)

    status = _http_status(error)
    code = _read(error, "errno")
    if not isinstance(error, OSError) or named(_OTHER_CODES) or not isinstance(code, int):
        code = None
    no_thread = isinstance(error, RuntimeError) and error.args == ("can't start new thread",)
    # The first match counts: a connection that timed out is a timeout.
    matches = {
        ErrorCategory.TOKEN_BUDGET: isinstance(error, TokenBudgetExceeded),
        ErrorCategory.SYNTAX: isinstance(error, SyntaxError),
        ErrorCategory.TEST_FAILURE: named(_TEST_FAILED) or names >= _PYTEST_FAILURE,
        ErrorCategory.RATE_LIMIT: status == 429 or named(_RATE_LIMITED),
        ErrorCategory.TIMEOUT: named(_TIMED_OUT),
        ErrorCategory.RESOURCE_ERROR: no_thread or named(_EXHAUSTED) or code in _EXHAUSTED_CODES,
        ErrorCategory.API_ERROR: status is not None or named(_REMOTE) or code in _REMOTE_CODES,
    }
    return next((category for category, found in matches.items() if found), None)


def _remote_fault(error: BaseException) -> bool | None:
    """Return whether an error blames the remote service; None if it says nothing."""
    match _category(error):
        case None:
            return None
        case ErrorCategory.RATE_LIMIT | ErrorCategory.TIMEOUT:
            return True
        case ErrorCategory.API_ERROR:
            status = _http_status(error)
            return _was_sent(error) if status is None else status >= 500 or status == 408
        case _:
            return False


def _was_sent(error: BaseException) -> bool:
    names = [kind.__name__ for kind in type(error).__mro__]
    if "SSLError" in names:  # one of them is a ValueError all the same
        return True
    wrong = isinstance(error, ValueError | TypeError)
    return not wrong and not any(re.search(_NOT_SENT, name) for name in names)


def _known_category(error: RecoverableError) -> ErrorCategory | None:
    """Return the category it was made with, if that is a known one other than UNKNOWN."""
    category = ErrorCategory(_text(error.error_category).upper())
    return None if category is ErrorCategory.UNKNOWN else category


def _http_status(error: BaseException) -> int | None:
    response = _read(error, "response")
    found = [
        *(_read(owner, name) for owner in (error, response) for name in ("status_code", "status")),
        _read(error, "code"),
        _guarded(lambda: response["ResponseMetadata"]["HTTPStatusCode"]),  # of botocore
    ]
    for value in found:
        if isinstance(value, int) and _guarded(lambda number: 100 <= number <= 599, value):
            return value
    return None


# --- attributes and causes -------------------------------------------------------------------


def _nearest(
    error: BaseException,
    read: Callable[Concatenate[BaseException, P], T | None],
    *args: P.args,
    **kwargs: P.kwargs,
) -> list[T]:
    """Return what is read of the error; else of its cause and group members; else of theirs."""
    errors = [error]
    for _ in range(_MAX_DEPTH):
        found = [_guarded(read, each, *args, **kwargs) for each in errors]
        if any(each is not None for each in found):
            return [each for each in found if each is not None]
        errors = list(islice((inner for each in errors for inner in _inside(each)), _MAX_WIDTH))
    return []


def _inside(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        yield from error.exceptions
    causes = [_read(error, "__cause__")]
    if isinstance(error, UnrecoverableError):
        causes.append(_read(error, "original_error"))
    for cause in causes:
        if isinstance(cause, BaseException):
            yield cause


def _read(thing: object, name: str) -> Any:
    return _guarded(getattr, thing, name, None)


def _text(value: object) -> str:
    """Return a text, also one given as bytes; raise TypeError for anything else."""
    match value:
        case str():
            return str(value)
        case bytes():
            return value.decode("latin-1")
        case _:
            raise TypeError(f"{type(value)} is not a text")


def _guarded(read: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | None:
    """Return what ``read`` returns, or None if it raises: it may call code of the error's class."""
    try:
        return read(*args, **kwargs)
    except Exception:  # noqa: BLE001 - reading an error must not raise
        return None
