"""What an error says about itself: what kind of failure it was, and when to come back.

It is read from attributes and from the names of classes, so that the errors of httpx, requests,
aiohttp, openai, anthropic and others are understood without importing any of them. Reading an
error never raises, however odd it is.
"""

from __future__ import annotations

import errno
import inspect
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from itertools import islice
from types import UnionType
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, TypeAlias, TypeVar, get_args

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

__all__ = [
    "Backoff",
    "Decision",
    "RandomSource",
    "RetryOn",
    "Verdict",
    "asks_for_retry",
    "check_retry_on",
    "classify",
    "decide",
    "delay_before",
    "never_retried",
    "retry_after",
    "with_jitter",
]

T = TypeVar("T")
P = ParamSpec("P")

#: A longer wait is a mistake of whoever asks for it, like a date where seconds were due.
LONGEST_ASKED_SECONDS = 7 * 86_400.0

_RINGS = 4
_WIDEST = 100


def retry_after(error: BaseException, now: datetime) -> float | None:
    """Return the seconds that the other side asked to wait, or None if it did not.

    Looked for in ``error.retry_after`` and in a ``Retry-After`` header of the error or of its
    response, then in the errors that it was raised from or is a group of: the nearest one counts,
    and among equally near ones the longest wait. What lies in the past is 0.
    """
    for ring in _rings(error):
        asked = [wait for each in ring if (wait := _guarded(_asked_by, each, now)) is not None]
        if asked:
            return max(asked)
    return None


def classify(error: BaseException) -> ErrorCategory:
    """Tell what kind of failure it was, from the error or else from what it was raised from."""
    for ring in _rings(error):
        for each in ring:
            category = _guarded(_category, each)
            if category:
                return category
    return ErrorCategory.UNKNOWN


# --- when to come back -----------------------------------------------------------------------


def _asked_by(error: BaseException, now: datetime) -> float | None:
    said = _guarded(_seconds, _read(error, "retry_after"), now)
    if said is not None:
        return said
    for headers in (_read(_read(error, "response"), "headers"), _read(error, "headers")):
        said = _guarded(_in_headers, headers, now)
        if said is not None:
            return said
    return None


def _in_headers(headers: object, now: datetime) -> float | None:
    exact = _guarded(_milliseconds, _header(headers, "Retry-After-Ms"))  # some providers' own
    return _seconds(_header(headers, "Retry-After"), now) if exact is None else exact


def _header(headers: Any, name: str) -> object:
    """Return a header's value; a plain dict does not know that case does not matter."""
    for spelling in (name, name.lower()):
        value: object = _guarded(_read(headers, "get"), spelling)
        if value is not None:
            return value
    return _guarded(_in_any_case, headers, name.lower())


def _in_any_case(headers: Any, name: str) -> object:
    for key, value in headers.items():
        if (_guarded(_text, key) or "").lower() == name:
            return value
    return None


def _seconds(value: object, now: datetime) -> float | None:
    match value:
        case bool():
            return None
        case int() | float():
            return _sensible(value)
        case timedelta():
            return _sensible(value.total_seconds())
        case datetime():
            aware = value if value.tzinfo else value.replace(tzinfo=UTC)
            return _sensible((aware - now).total_seconds())
        case str() | bytes():
            return _spoken_seconds(_text(value), now)
        case _:
            return None


def _spoken_seconds(text: str, now: datetime) -> float | None:
    number = _guarded(float, text)
    if number is not None:
        return _sensible(number)
    return _seconds(_guarded(parsedate_to_datetime, text), now)


def _milliseconds(value: object) -> float | None:
    return _sensible(float(_text(value)) / 1000)


def _sensible(seconds: float) -> float | None:
    """Return a wait that can be waited, or None; NaN is on neither side of anything."""
    return float(max(seconds, 0)) if -math.inf < seconds <= LONGEST_ASKED_SECONDS else None


# --- what kind of failure it was -------------------------------------------------------------

_RATE_LIMITED = re.compile(r"(?i)rate_?limit|throttl|too_?many_?requests")
_LATE = re.compile(r"Timeout(Error|Exception|Expired)?$")
_USED_UP = re.compile(r"^(MemoryError|RecursionError|ResourceWarning)$")
_TEST_FAILED = re.compile(r"^(AssertionError|DocTestFailure)$")
_REMOTE = re.compile(
    r"API(Connection|Status|Response)?Error|APIConnection|HTTP(Status)?Error"
    r"|^(ConnectionError|ClientError|RequestException|RpcError|URLError|gaierror|herror|SSLError)$"
)
#: Their ``errno`` counts in numbers of its own.
_OTHER_NUMBERS = re.compile(r"^(gaierror|herror|SSLError)$")

_USED_UP_CODES = frozenset(
    {
        errno.EAGAIN,  # what `fork` says when there may be no more processes
        errno.EDQUOT,
        errno.EMFILE,
        errno.ENFILE,
        errno.ENOMEM,
        errno.ENOSPC,
    }
)
_REMOTE_CODES = frozenset(
    {
        errno.EADDRNOTAVAIL,
        errno.EHOSTDOWN,
        errno.EHOSTUNREACH,
        errno.ENETDOWN,
        errno.ENETRESET,
        errno.ENETUNREACH,
        errno.ENOTCONN,
    }
)


@dataclass(frozen=True, slots=True)
class _Signs:
    error: BaseException
    names: frozenset[str]
    status: int | None
    code: int | None

    def named(self, pattern: re.Pattern[str]) -> bool:
        return any(pattern.search(name) for name in self.names)


def _signs_of(error: BaseException) -> _Signs:
    names = frozenset(kind.__name__ for kind in type(error).__mro__)
    signs = _Signs(error, names, _http_status(error), None)
    if not isinstance(error, OSError) or signs.named(_OTHER_NUMBERS):
        return signs
    code = _read(error, "errno")
    return replace(signs, code=code) if isinstance(code, int) else signs


def _is_test_failure(signs: _Signs) -> bool:
    return signs.named(_TEST_FAILED) or signs.names >= {"Failed", "OutcomeException"}  # pytest's


def _is_used_up(signs: _Signs) -> bool:
    if isinstance(signs.error, RuntimeError) and signs.error.args == ("can't start new thread",):
        return True
    return signs.named(_USED_UP) or signs.code in _USED_UP_CODES


def _is_remote(signs: _Signs) -> bool:
    return signs.status is not None or signs.named(_REMOTE) or signs.code in _REMOTE_CODES


#: The first that holds is it: a connection that timed out is a timeout.
_KINDS: dict[ErrorCategory, Callable[[_Signs], bool]] = {
    ErrorCategory.SYNTAX: lambda signs: isinstance(signs.error, SyntaxError),
    ErrorCategory.TEST_FAILURE: _is_test_failure,
    ErrorCategory.RATE_LIMIT: lambda signs: signs.status == 429 or signs.named(_RATE_LIMITED),
    ErrorCategory.TIMEOUT: lambda signs: signs.named(_LATE),
    ErrorCategory.RESOURCE_ERROR: _is_used_up,
    ErrorCategory.API_ERROR: _is_remote,
}


def _category(error: BaseException) -> ErrorCategory | None:
    if isinstance(error, RecoverableError):
        said = _guarded(_known_category, error)
        if said:
            return said
    signs = _signs_of(error)
    return next((category for category, holds in _KINDS.items() if holds(signs)), None)


def _known_category(error: RecoverableError) -> ErrorCategory | None:
    """Return the category it was made with, if that is one of ours and says anything."""
    category = ErrorCategory(_text(error.error_category).upper())
    return None if category is ErrorCategory.UNKNOWN else category


def _http_status(error: BaseException) -> int | None:
    response = _read(error, "response")
    for owner, name in (
        (error, "status_code"),
        (error, "status"),
        (response, "status_code"),
        (response, "status"),
        (error, "code"),
    ):
        value = _read(owner, name)
        if isinstance(value, int) and _guarded(lambda number: 100 <= number <= 599, value):
            return value
    return None


# --- reading errors --------------------------------------------------------------------------


def _rings(error: BaseException) -> Iterator[list[BaseException]]:
    """Yield the error alone, then what it was raised from or is a group of, and so on inwards."""
    ring = [error]
    for _ in range(_RINGS):
        yield ring
        ring = list(islice((inner for each in ring for inner in _inside(each)), _WIDEST))


def _inside(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        yield from error.exceptions
    cause = _read(error, "__cause__")
    if isinstance(cause, BaseException):
        yield cause


def _read(thing: object, name: str) -> Any:
    return _guarded(getattr, thing, name, None)


def _text(value: object) -> str:
    """Return a text, also one that came as bytes; raise TypeError for anything else."""
    match value:
        case str():
            return str(value)
        case bytes():
            return value.decode("latin-1")
        case _:
            raise TypeError(f"{type(value)} is no text")


def _guarded(read: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | None:
    """Return what ``read`` returns, or None: what an error does when looked at is anybody's code."""
    try:
        return read(*args, **kwargs)
    except Exception:  # noqa: BLE001 - a failure must not fail while it is looked at
        return None


# --- retry_policy ---


#: Yes, no, or yes after so many seconds.
Verdict: TypeAlias = bool | float
#: Which errors are worth another attempt: their types, or a function that answers for each.
RetryOn: TypeAlias = (
    type[BaseException]
    | tuple[type[BaseException], ...]
    | Callable[[Exception], bool | float | timedelta]
)


# --- how long to wait ------------------------------------------------------------------------


class Backoff(Protocol):
    """How waits grow: ``Level1Config`` and ``Level2Config`` say it."""

    @property
    def base_delay_seconds(self) -> float:
        """The first wait."""
        ...

    @property
    def backoff_multiplier(self) -> float:
        """How many times as long each further one is."""
        ...

    @property
    def max_delay_seconds(self) -> float:
        """What none is longer than."""
        ...


class RandomSource(Protocol):
    """What ``random.Random`` is needed for."""

    def random(self) -> float:
        """Return a number from 0 up to, and not including, 1."""
        ...


def delay_before(config: Backoff, failures: int) -> float:
    """Return the wait after that many failures, without jitter; none without a failure."""
    if failures < 1 or config.base_delay_seconds == 0:
        return 0.0
    try:
        growth = float(config.backoff_multiplier) ** (failures - 1)
    except OverflowError:
        growth = math.inf
    return float(min(config.base_delay_seconds * growth, config.max_delay_seconds))


def with_jitter(seconds: float, share: float, random: RandomSource) -> float:
    """Return ``seconds`` and up to ``share`` of it more, so that a crowd does not come at once."""
    return seconds * (1 + share * random.random())


# --- whether to try again --------------------------------------------------------------------

_FINAL = (
    CircuitBreakerOpen,
    GovernanceViolation,
    HelpNeeded,
    TokenBudgetExceeded,
    UnrecoverableError,
)


@dataclass(frozen=True, slots=True)
class Decision:
    """What comes after a failure: another attempt in ``wait`` seconds, or none; and why."""

    retry: bool
    wait: float
    reason: str


def check_retry_on(value: object) -> RetryOn:
    """Return ``value`` as ``asks_for_retry`` takes it; a list of types, or ``A | B``, is a tuple.

    Raises ConfigurationError for what is neither types of errors nor a function that can answer.
    """
    kinds = get_args(value) if isinstance(value, UnionType) else value
    if isinstance(kinds, list | tuple) and all(_is_error_type(kind) for kind in kinds):
        return tuple(kinds)
    if _is_error_type(value):
        return value  # type: ignore[return-value]
    if isinstance(value, type) or not callable(value) or _is_async(value):
        raise refused(
            "retry_on",
            value,
            "a type of errors, several of them in a tuple, or a function, not async, that takes"
            " the error and returns True, False or the seconds to wait",
        )
    return value


def _is_error_type(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, BaseException)


def _is_async(value: Callable[..., object]) -> bool:
    call = type(value).__call__  # of an object that is called like a function
    return inspect.iscoroutinefunction(value) or inspect.iscoroutinefunction(call)


def asks_for_retry(retry_on: RetryOn, error: Exception) -> Verdict:
    """Return whether ``retry_on`` wants another attempt after ``error``, or after how many seconds.

    Raises TypeError if its function answers anything else, and what the function itself raises.
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
            if inspect.iscoroutine(answer):
                answer.close()  # or its never having been awaited would be a second complaint
            raise TypeError(
                f"the function given as retry_on answered {answer!r} to a {type(error).__name__},"
                " and must answer True, False or the seconds to wait, 0 or more"
            )


def never_retried(error: BaseException) -> bool:
    """Return whether another attempt is out of the question, whatever ``retry_on`` says.

    So it is for what was decided above a single attempt, for a journal that cannot be trusted, for
    what is no ``Exception`` at all, and for a group with one of these in it.
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
    """Decide what comes after a failure, the ``failures``-th one, ``elapsed`` seconds in.

    The wait is the one that ``retry_on`` named (``wanted``), else the longer one of what the other
    side ``asked`` for and the backoff's ``delay``.
    """
    if final:
        return _give_up("another attempt is out of the question")
    if wanted is False:
        return _give_up("retry_on answered no")
    if failures >= max_attempts:
        return _give_up(f"{failures} of {max_attempts} attempts have failed")
    wait, reason = _wait(wanted, asked, delay)
    if max_elapsed is not None and elapsed + wait > max_elapsed:
        return _give_up(
            f"the next attempt would begin {elapsed + wait:.1f} s after the first,"
            f" and the limit is {max_elapsed:g} s"
        )
    return Decision(retry=True, wait=wait, reason=reason)


def _wait(wanted: Verdict, asked: float | None, delay: float) -> tuple[float, str]:
    if not isinstance(wanted, bool):
        return float(wanted), "retry_on named the wait"
    if asked is not None and asked > delay:
        return float(asked), "the other side asked for this wait"
    return float(delay), "backoff"


def _give_up(reason: str) -> Decision:
    return Decision(retry=False, wait=0.0, reason=reason)
