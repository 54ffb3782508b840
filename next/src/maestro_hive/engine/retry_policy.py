"""What follows a failed attempt: another one after a wait, the next round, or none.

Pure: decides from a step's rules, the recorded failures and the error; no clock, loop or disk.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from types import UnionType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, get_args

from maestro_hive.engine.config import Level1Config, Level2Config, RecoveryStrategy
from maestro_hive.engine.error_signs import retry_after
from maestro_hive.engine.errors import (
    CircuitBreakerOpen,
    ExecutionException,
    FailureReport,
    GovernanceViolation,
    HelpNeeded,
    TokenBudgetExceeded,
    UnrecoverableError,
)
from maestro_hive.engine.settings import refused
from maestro_hive.kernel.errors import MaestroError

if TYPE_CHECKING:
    from random import Random

    from maestro_hive.engine.config import ExecutionConfig
    from maestro_hive.journal.state import StepState

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

#: So much of a wait is added at random, so that many callers do not retry at the same moment.
_JITTER = 0.1
#: Errors of a step's own code: another attempt executes the same code.
_OWN_CODE = (NameError, ImportError, SyntaxError, NotImplementedError)
_FINAL = (
    CircuitBreakerOpen,
    GovernanceViolation,
    HelpNeeded,
    TokenBudgetExceeded,
    UnrecoverableError,
)
#: How many errors of a group are read.
_MOST_PARTS = 10_000


# --- backoff --------------------------------------------------------------------------------------


def delay_before(level: Level1Config | Level2Config, failures: int) -> float:
    """Return the wait after that many failures, without jitter; 0 after none."""
    if failures < 1 or level.base_delay_seconds == 0:
        return 0.0
    try:
        growth = float(level.backoff_multiplier) ** (failures - 1)
    except OverflowError:
        growth = math.inf
    return float(min(level.base_delay_seconds * growth, level.max_delay_seconds))


def with_jitter(seconds: float, random: Random, share: float = _JITTER) -> float:
    """Return ``seconds`` plus up to ``share`` of it."""
    return seconds * (1 + share * random.random())


# --- the options retry_on and breaker_on ----------------------------------------------------------


def checked_filter(what: str, value: object, returned: str) -> Any:
    """Return types of errors as a tuple, or a function; raise if it is neither."""
    kinds = get_args(value) if isinstance(value, UnionType) else value
    if isinstance(kinds, list | tuple) and all(_is_error_type(kind) for kind in kinds):
        return tuple(kinds)
    if _is_error_type(value):
        return value
    if isinstance(value, type) or not callable(value) or is_async(value):
        raise refused(
            what,
            value,
            "a type of errors, several of them in a tuple, or a function, not async, that takes"
            f" the error and returns {returned}",
        )
    return value


def _is_error_type(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, BaseException)


def is_async(value: Callable[..., object]) -> bool:
    """Return whether calling a function, or an object, gives a coroutine."""
    call = type(value).__call__  # of an object with __call__
    return inspect.iscoroutinefunction(value) or inspect.iscoroutinefunction(call)


def verdict_of(retry_on: RetryOn, error: Exception) -> Verdict:
    """Return whether ``retry_on`` wants another attempt, or after how many seconds.

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
    """Return whether ``breaker_on`` counts ``error``; TypeError if its function returns no bool."""
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


# --- which errors are final -----------------------------------------------------------------------


def never_retried(error: BaseException) -> bool:
    """Return whether an error is final, whatever ``retry_on`` is; so is a group with such a one.

    Errors of storage and configuration are, and what is not an ``Exception``.
    """
    return any(_is_final(part) for part in parts_of(error))


def _is_final(error: BaseException) -> bool:
    if isinstance(error, UnrecoverableError):
        # An executor inside of the step that has used up its attempts gets new ones.
        report: object = error.failure_report
        return not isinstance(report, FailureReport) or not report.recoverable
    if isinstance(error, MaestroError):
        return isinstance(error, _FINAL) or not isinstance(error, ExecutionException)
    return not isinstance(error, Exception)


def parts_of(error: BaseException) -> Iterator[BaseException]:
    """Yield the errors of a group and of the groups in it, however deep; any other error itself."""
    waiting, seen = [error], 0
    while waiting and seen < _MOST_PARTS:
        seen += 1
        found = waiting.pop()
        if isinstance(found, BaseExceptionGroup):
            waiting.extend(reversed(found.exceptions))
        else:
            yield found


def is_own_code(error: BaseException) -> bool:
    """Return whether an error says that the step's code is wrong, and not a text it executes.

    Generated code has no file: its name stands in angle brackets.
    """
    if not isinstance(error, _OWN_CODE):
        return False
    if isinstance(error, SyntaxError):
        return error.filename is not None and not str(error.filename).startswith("<")
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is None or not trace.tb_frame.f_code.co_filename.startswith("<")


# --- the decision ---------------------------------------------------------------------------------


class AttemptLimit(NamedTuple):
    """How often a step may be called: in all, and in how many rounds.

    The rounds are as long as each other; where that cannot be, the first ones are longer by one.
    """

    attempts: int
    rounds: int

    def in_round(self, number: int) -> int:
        """Return how many attempts may fail in a round."""
        each, left = divmod(self.attempts, self.rounds)
        return each + ((number - 1) % self.rounds < left)


class Rules(NamedTuple):
    """A step's rules about its failures."""

    limit: AttemptLimit
    config: ExecutionConfig
    retry_on: RetryOn | None = None

    @property
    def skips(self) -> bool:
        """Return whether a workflow continues without the result of a step that has failed."""
        strategies = (self.config.level1.recovery_strategy, self.config.level2.recovery_strategy)
        return RecoveryStrategy.SKIP in strategies


class Decision(NamedTuple):
    """What follows a failure: the next attempt's round and wait, or, with round 0, none."""

    round: int
    wait: float
    reason: str


def decide(
    rules: Rules, step: StepState, error: Exception, now: datetime, random: Random
) -> Decision:
    """Decide what follows a failure of a step, after those that are recorded.

    The wait is the one that ``retry_on`` returned, else the longer one of the requested wait and
    the backoff. Raises what a wrong function as ``retry_on`` raises.
    """
    limit, config = rules.limit, rules.config
    if never_retried(error):
        return Decision(0, 0.0, "an error of this type is never retried")
    verdict: Verdict = True
    if rules.retry_on is not None:
        verdict = verdict_of(rules.retry_on, error)
    elif is_own_code(error):
        return Decision(0, 0.0, "the step's code is wrong, and another attempt executes the same")
    if verdict is False:
        return Decision(0, 0.0, "retry_on excludes this error")
    strategy, current = config.level1.recovery_strategy, step.round
    in_round = sum(each.round == current for each in step.failed) + (current == 1)
    ends_round = in_round >= limit.in_round(current) or strategy is RecoveryStrategy.ESCALATE
    if ends_round and current >= limit.rounds:
        attempts = step.failures + 1
        return Decision(0, 0.0, f"{attempts} of {limit.attempts} attempts have failed")
    if ends_round:
        delay = delay_before(config.level2, current)
    elif strategy is RecoveryStrategy.RETRY_SAME:
        delay = 0.0
    else:
        delay = delay_before(config.level1, in_round)
    wait, reason = with_jitter(delay, random), "backoff"
    requested = retry_after(error, now)
    if not isinstance(verdict, bool):
        wait, reason = verdict, "retry_on returned this wait"
    elif requested is not None and requested > wait:
        wait, reason = requested, "the remote service requested this wait"
    return Decision(current + ends_round, wait, reason)
