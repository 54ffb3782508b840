"""Whether a failed attempt is worth another, and when: decided from what is passed in, only."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from types import UnionType
from typing import Protocol, TypeAlias, get_args

from maestro_hive.kernel.errors import MaestroError
from maestro_hive.unified_execution.error_signs import classify, retry_after
from maestro_hive.unified_execution.exceptions import (
    CircuitBreakerOpen,
    ExecutionException,
    GovernanceViolation,
    HelpNeeded,
    TokenBudgetExceeded,
    UnrecoverableError,
    parts_of,
)
from maestro_hive.unified_execution.settings import refused

__all__ = [
    "Backoff",
    "Dice",
    "Move",
    "RetryOn",
    "Verdict",
    "asks_for_retry",
    "check_retry_on",
    "classify",
    "delay_before",
    "never_retried",
    "next_move",
    "retry_after",
    "with_jitter",
]

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


class Dice(Protocol):
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


def with_jitter(seconds: float, share: float, random: Dice) -> float:
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
class Move:
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
    """Tell whether ``retry_on`` wants another attempt after ``error``, or after how many seconds.

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
    """Tell whether another attempt is out of the question, whatever ``retry_on`` says.

    So it is for what was decided above a single attempt, for a journal that cannot be trusted, for
    what is no ``Exception`` at all, and for a group with one of these in it.
    """
    if isinstance(error, BaseExceptionGroup):
        return any(never_retried(part) for part in parts_of(error))
    if isinstance(error, MaestroError):
        return isinstance(error, _FINAL) or not isinstance(error, ExecutionException)
    return not isinstance(error, Exception)


def next_move(
    *,
    failures: int,
    max_attempts: int,
    elapsed: float,
    max_elapsed: float | None,
    wanted: Verdict,
    asked: float | None,
    delay: float,
    final: bool,
) -> Move:
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
    return Move(retry=True, wait=wait, reason=reason)


def _wait(wanted: Verdict, asked: float | None, delay: float) -> tuple[float, str]:
    if not isinstance(wanted, bool):
        return float(wanted), "retry_on named the wait"
    if asked is not None and asked > delay:
        return float(asked), "the other side asked for this wait"
    return float(delay), "backoff"


def _give_up(reason: str) -> Move:
    return Move(retry=False, wait=0.0, reason=reason)
