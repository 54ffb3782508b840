"""Whether a failed attempt is retried, and after which wait. Pure: no clock, loop or disk.

``decide`` makes the decision. ``classify``, ``retry_after`` and ``is_about_other_side``, by which a
breaker counts, read an error: attributes and class names, so that the errors of httpx, requests,
aiohttp, openai, anthropic and others are understood without importing any of them. Reading an error
never raises, whatever its class does.
"""

from __future__ import annotations

import errno
import inspect
import math
import re
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from itertools import islice
from types import UnionType
from typing import TYPE_CHECKING, Any, NamedTuple, ParamSpec, Protocol, TypeAlias, TypeVar, get_args

from maestro_hive.engine.config import ErrorCategory
from maestro_hive.engine.errors import (
    CircuitBreakerOpen,
    ExecutionException,
    GovernanceViolation,
    HelpNeeded,
    RecoverableError,
    TokenBudgetExceeded,
    UnrecoverableError,
    parts_of,
)
from maestro_hive.engine.settings import refused
from maestro_hive.kernel.errors import MaestroError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from maestro_hive.engine.config import Level1Config, Level2Config

T = TypeVar("T")
P = ParamSpec("P")

#: Whether to retry, or after how many seconds.
Verdict: TypeAlias = bool | float
#: Which errors are retried: their types, or a function that decides for each.
RetryOn: TypeAlias = (
    type[BaseException]
    | tuple[type[BaseException], ...]
    | Callable[[Exception], bool | float | timedelta]
)
#: Which errors a breaker counts: their types, or a function that decides for each.
BreakerOn: TypeAlias = (
    type[BaseException] | tuple[type[BaseException], ...] | Callable[[Exception], bool]
)


# --- backoff ---------------------------------------------------------------------------------


class RandomSource(Protocol):
    """A source of random numbers, such as ``random.Random``."""

    def random(self) -> float:
        """Return a number from 0 to below 1."""
        ...


def delay_before(config: Level1Config | Level2Config, failures: int) -> float:
    """Return the wait after that many failures, without jitter; 0 after none."""
    if failures < 1 or config.base_delay_seconds == 0:
        return 0.0
    try:
        growth = float(config.backoff_multiplier) ** (failures - 1)
    except OverflowError:
        growth = math.inf
    return float(min(config.base_delay_seconds * growth, config.max_delay_seconds))


def with_jitter(seconds: float, share: float, random: RandomSource) -> float:
    """Return ``seconds`` plus up to ``share`` of it, so that many callers do not retry at once."""
    return seconds * (1 + share * random.random())


# --- the decision ----------------------------------------------------------------------------

_FINAL = (
    CircuitBreakerOpen,
    GovernanceViolation,
    HelpNeeded,
    TokenBudgetExceeded,
    UnrecoverableError,
)


class Decision(NamedTuple):
    """What follows a failure: another attempt in ``wait`` seconds, or none; and the reason."""

    retry: bool
    wait: float
    reason: str
    #: What of the wait is no backoff: a repair does not shorten it.
    least: float = 0.0


def check_retry_on(value: object) -> RetryOn:
    """Return ``value`` as ``asks_for_retry`` takes it: a list of types, or ``A | B``, as a tuple.

    Raises ConfigurationError for what is neither types of errors nor a function that is not async.
    """
    checked: RetryOn = _checked_filter("retry_on", value, "True, False or the seconds to wait")
    return checked


def check_breaker_on(value: object) -> BreakerOn:
    """Return ``value`` as ``counts_for_breaker`` takes it; it has the forms of ``retry_on``."""
    checked: BreakerOn = _checked_filter("breaker_on", value, "True or False")
    return checked


def _checked_filter(name: str, value: object, returned: str) -> Any:
    kinds = get_args(value) if isinstance(value, UnionType) else value
    if isinstance(kinds, list | tuple) and all(_is_error_type(kind) for kind in kinds):
        return tuple(kinds)
    if _is_error_type(value):
        return value
    if isinstance(value, type) or not callable(value) or _is_async(value):
        raise refused(
            name,
            value,
            "a type of errors, several of them in a tuple, or a function, not async, that takes"
            f" the error and returns {returned}",
        )
    return value


def _is_error_type(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, BaseException)


def _is_async(value: Callable[..., object]) -> bool:
    call = type(value).__call__  # of an object with __call__
    return inspect.iscoroutinefunction(value) or inspect.iscoroutinefunction(call)


def asks_for_retry(retry_on: RetryOn, error: Exception) -> Verdict:
    """Return whether ``retry_on`` requests another attempt after ``error``, or after how many seconds.

    Raises TypeError if its function returns anything else, and what the function itself raises.
    """
    if isinstance(retry_on, type | tuple):
        return isinstance(error, retry_on)
    answer: object = retry_on(error)
    match answer:
        case bool():
            return answer
        case timedelta() if answer >= timedelta(0):
            return answer.total_seconds()
        case int() | float() if 0 <= answer < math.inf:
            return float(answer)
        case _:
            wanted = "True, False or the seconds to wait, 0 or more"
            raise _wrong_answer("retry_on", answer, error, wanted)


def counts_for_breaker(breaker_on: BreakerOn, error: Exception) -> bool:
    """Return whether ``breaker_on`` lets a breaker count ``error``.

    Raises TypeError if its function returns anything else, and what the function itself raises.
    """
    if isinstance(breaker_on, type | tuple):
        return isinstance(error, breaker_on)
    answer: object = breaker_on(error)
    if not isinstance(answer, bool):
        raise _wrong_answer("breaker_on", answer, error, "True or False")
    return answer


def _wrong_answer(name: str, answer: object, error: Exception, wanted: str) -> TypeError:
    if inspect.iscoroutine(answer):
        answer.close()  # otherwise Python also warns that it was never awaited
    return TypeError(
        f"the function given as {name} returned {answer!r} for a {type(error).__name__},"
        f" and must return {wanted}"
    )


def never_retried(error: BaseException) -> bool:
    """Return whether an error is never retried, whatever ``retry_on`` is.

    That holds for the final errors of both levels, errors of storage and configuration, what is not
    an ``Exception``, and a group that contains one of these.
    """
    if isinstance(error, BaseExceptionGroup):
        return any(never_retried(part) for part in parts_of(error))
    if isinstance(error, MaestroError):
        return isinstance(error, _FINAL) or not isinstance(error, ExecutionException)
    return not isinstance(error, Exception)


def decide(
    *,
    failures: int,
    max_attempts: int,
    elapsed: float,
    max_elapsed: float | None,
    wanted: Verdict,
    asked: float | None,
    delay: float,
    final: bool,
) -> Decision:
    """Decide what follows the ``failures``-th failure, ``elapsed`` seconds after the first start.

    The wait is the one that ``retry_on`` returned (``wanted``), else the longer one of what the
    remote side requested (``asked``) and the backoff's ``delay``.
    """
    if final:
        return _give_up("an error of this type is never retried")
    if wanted is False:
        return _give_up("retry_on excludes this error")
    if failures >= max_attempts:
        return _give_up(f"{failures} of {max_attempts} attempts have failed")
    wait, reason = _wait(wanted, asked, delay)
    if max_elapsed is not None and elapsed + wait > max_elapsed:
        return _give_up(
            f"the next attempt would start {elapsed + wait:.1f} s after the first,"
            f" and the limit is {max_elapsed:g} s"
        )
    least = wait if not isinstance(wanted, bool) else asked or 0.0
    return Decision(retry=True, wait=wait, reason=reason, least=least)


def _wait(wanted: Verdict, asked: float | None, delay: float) -> tuple[float, str]:
    if not isinstance(wanted, bool):
        return float(wanted), "retry_on returned this wait"
    if asked is not None and asked > delay:
        return float(asked), "the remote side requested this wait"
    return float(delay), "backoff"


def _give_up(reason: str) -> Decision:
    return Decision(retry=False, wait=0.0, reason=reason)


# --- reading an error ------------------------------------------------------------------------

#: A longer requested wait is taken for a mistake, such as a date in place of seconds.
MAX_RETRY_AFTER_SECONDS = 7 * 86_400.0

#: How far an error is followed to its causes and group members, and how many are read at each step.
_MAX_DEPTH = 4
_MAX_WIDTH = 100


def retry_after(error: BaseException, now: datetime) -> float | None:
    """Return the seconds that the remote side requested to wait, or None.

    Read from ``error.retry_after`` and from a ``Retry-After`` header of the error or of its
    response, then from its causes and group members: the nearest error counts, and among equally
    near ones the longest wait. A time in the past is 0.
    """
    for errors in _by_distance(error):
        waits = [wait for each in errors if (wait := _guarded(_requested, each, now)) is not None]
        if waits:
            return max(waits)
    return None


def classify(error: BaseException) -> ErrorCategory:
    """Return the category of a failure, by the error or else by its causes and group members."""
    for errors in _by_distance(error):
        for each in errors:
            category = _guarded(_category, each)
            if category:
                return category
    return ErrorCategory.UNKNOWN


def is_about_other_side(error: BaseException) -> bool:
    """Return whether an error says that the remote side is not well, and not that the code is wrong.

    That is a timeout, a failed connection, a rate limit or a response with a status of 500 or more:
    the error itself, or else its causes and group members.
    """
    for errors in _by_distance(error):
        answers = [found for each in errors if (found := _guarded(_other_side, each)) is not None]
        if answers:
            return any(answers)
    return False


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
    exact = _guarded(_milliseconds, _header(headers, "Retry-After-Ms"))  # sent by some providers
    return _seconds(_header(headers, "Retry-After"), now) if exact is None else exact


def _header(headers: object, name: str) -> object:
    """Return a header's value, in whatever case it is written; a plain dict compares case."""
    for spelling in (name, name.lower()):
        value: object = _guarded(_read(headers, "get"), spelling)
        if value is not None:
            return value
    return _guarded(_in_any_case, headers, name.lower())


def _in_any_case(headers: object, name: str) -> object:
    for key, value in _read(headers, "items")():
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


def _milliseconds(value: object) -> float | None:
    return _usable(float(_text(value)) / 1000)


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


def _other_side(error: BaseException) -> bool | None:
    """Return whether an error speaks for or against the remote side; None if it says nothing."""
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


def _by_distance(error: BaseException) -> Iterator[list[BaseException]]:
    """Yield the error alone, then its cause and group members, then theirs, and so on."""
    errors = [error]
    for _ in range(_MAX_DEPTH):
        yield errors
        errors = list(islice((inner for each in errors for inner in _inside(each)), _MAX_WIDTH))


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
