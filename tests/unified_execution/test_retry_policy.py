"""Whether a failed attempt is worth another, and when."""

from __future__ import annotations

import asyncio
import functools
import math
import random
import re
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NoReturn

import pytest
from hypothesis import given
from hypothesis import strategies as st

from maestro_hive.engine import retry_policy
from maestro_hive.engine import retry_policy as error_signs
from maestro_hive.engine.config import Level1Config, Level2Config
from maestro_hive.engine.errors import (
    CircuitBreakerOpen,
    ExecutionException,
    FailureReport,
    GovernanceViolation,
    HelpNeeded,
    RecoverableError,
    TokenBudgetExceeded,
    UnrecoverableError,
)
from maestro_hive.engine.retry_policy import (
    Decision,
    RetryOn,
    asks_for_retry,
    check_retry_on,
    decide,
    delay_before,
    never_retried,
    with_jitter,
)
from maestro_hive.kernel.errors import (
    ConfigurationError,
    EncodeError,
    FencedError,
    MaestroError,
    StorageError,
)
from tests.tables import for_each

if TYPE_CHECKING:
    from collections.abc import Callable

REPORT = FailureReport("developer", "TIMEOUT", "no answer")


def shown(value: object) -> str:
    """Return a name for a test's case, the same in every process."""
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))[:40]


class TheirOwnError(ExecutionException):
    """One that a user derived."""


def test_what_errors_say_is_at_hand_too() -> None:
    assert retry_policy.classify is error_signs.classify
    assert retry_policy.retry_after is error_signs.retry_after


# --- delays ----------------------------------------------------------------------------------


@for_each(
    "config, waits",
    [
        (Level1Config(), [1.0, 1.5, 2.25, 3.375, 5.0, 5.0]),
        (Level2Config(), [5.0, 10.0, 20.0, 40.0, 60.0, 60.0]),
        (Level1Config(base_delay_seconds=0), [0.0, 0.0, 0.0]),
        (Level1Config(backoff_multiplier=1), [1.0, 1.0, 1.0]),
        (Level1Config(base_delay_seconds=9), [5.0, 5.0]),
        (Level1Config(max_delay_seconds=0), [0.0, 0.0]),
    ],
)
def test_each_wait_is_longer_than_the_last_up_to_the_longest(
    config: Level1Config | Level2Config, waits: list[float]
) -> None:
    assert [delay_before(config, n) for n in range(1, len(waits) + 1)] == waits


@for_each("failures", [10_000, 10**400])
@for_each("multiplier", [2, 1.5, 1e308])
def test_after_very_many_failures_the_wait_is_the_longest(failures: int, multiplier: float) -> None:
    config = Level1Config(backoff_multiplier=multiplier)
    assert delay_before(config, failures) == 5.0
    assert delay_before(Level1Config(base_delay_seconds=0), failures) == 0.0


@pytest.mark.parametrize("failures", [0, -1])
def test_without_a_failure_there_is_no_wait(failures: int) -> None:
    assert delay_before(Level1Config(), failures) == 0.0


amounts = st.floats(0, 1e9)


@given(amounts, amounts, st.floats(1, 1e9), st.integers(1, 20_000))
def test_waits_never_shrink_and_never_pass_the_longest(
    base: float, longest: float, multiplier: float, failures: int
) -> None:
    config = Level1Config(
        base_delay_seconds=base, max_delay_seconds=longest, backoff_multiplier=multiplier
    )
    wait, next_wait = delay_before(config, failures), delay_before(config, failures + 1)
    assert 0 <= wait <= next_wait <= longest


@given(amounts, st.floats(0, 10), st.integers())
def test_jitter_only_adds_and_no_more_than_its_share(
    seconds: float, share: float, seed: int
) -> None:
    wait = with_jitter(seconds, share, random.Random(seed))
    assert seconds <= wait <= math.nextafter(seconds * (1 + share), math.inf)


def test_the_same_seed_gives_the_same_jitter_and_another_one_another() -> None:
    waits = [with_jitter(10, 0.1, random.Random(seed)) for seed in (1, 1, 2)]
    assert waits[0] == waits[1] != waits[2]


def test_without_a_share_there_is_no_jitter() -> None:
    assert with_jitter(10, 0, random.Random(1)) == 10


# --- what retry_on may be, and what it may answer --------------------------------------------


def always(error: Exception) -> bool:
    return True


class Judge:
    """A callable object."""

    def __call__(self, error: Exception) -> float:
        return 2.5


class AsyncJudge:
    async def __call__(self, error: Exception) -> bool:
        return True


async def slow_judge(error: Exception) -> bool:
    return True


judge = Judge()


@for_each(
    "given_, taken",
    [
        (ValueError, ValueError),
        (BaseException, BaseException),
        ((ValueError, OSError), (ValueError, OSError)),
        ([ValueError, OSError], (ValueError, OSError)),
        (ValueError | OSError, (ValueError, OSError)),
        ((), ()),
        ([], ()),
        (always, always),
        (judge, judge),
    ],
)
def test_types_and_functions_are_accepted(given_: object, taken: object) -> None:
    assert check_retry_on(given_) == taken


@for_each(
    "value",
    [
        None,
        True,
        3,
        "ValueError",
        int,
        object,
        ValueError("an instance"),
        [ValueError, "OSError"],
        (ValueError, int),
        (ValueError, (OSError,)),
        {ValueError: 3},
        int | str,
        ValueError | None,
        slow_judge,
        functools.partial(slow_judge),
        AsyncJudge(),
    ],
    ids=shown,
)
def test_anything_else_is_refused_by_name(value: object) -> None:
    with pytest.raises(ConfigurationError, match=r"^retry_on is .* must be a type of errors"):
        check_retry_on(value)


@for_each(
    "retry_on, verdict",
    [
        (ValueError, True),
        (Exception, True),
        (OSError, False),
        ((OSError, ValueError), True),
        ((OSError, KeyError), False),
        ((), False),
        (always, True),
        (lambda error: "mine" in str(error), True),
        (lambda error: False, False),
        (lambda error: 0, 0.0),
        (lambda error: 1, 1.0),
        (lambda error: 2.5, 2.5),
        (lambda error: timedelta(minutes=2), 120.0),
        (lambda error: timedelta(0), 0.0),
        (judge, 2.5),
    ],
)
def test_it_answers_yes_no_or_seconds(retry_on: RetryOn, verdict: object) -> None:
    answer = asks_for_retry(retry_on, ValueError("mine"))
    assert answer == verdict
    assert type(answer) is type(verdict)


@for_each(
    "answer, shown",
    [
        (None, "None"),
        ("yes", "'yes'"),
        (-1, "-1"),
        (math.nan, "nan"),
        (math.inf, "inf"),
        (timedelta(seconds=-1), "timedelta"),
        ([], r"\[\]"),
    ],
)
def test_any_other_answer_is_an_error_that_shows_it(answer: Any, shown: str) -> None:
    with pytest.raises(TypeError, match=f"returned .*{shown}.* for a ValueError"):
        asks_for_retry(lambda error: answer, ValueError())


def test_a_coroutine_as_the_answer_is_one_error_and_no_warning() -> None:
    hidden: Callable[[Exception], Any] = lambda error: slow_judge(error)  # noqa: E731, PLW0108
    with pytest.raises(TypeError, match="returned <coroutine object slow_judge"):
        asks_for_retry(hidden, ValueError())


def test_what_the_function_raises_is_raised() -> None:
    def broken(error: Exception) -> NoReturn:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        asks_for_retry(broken, ValueError())


# --- what is never retried -------------------------------------------------------------------

NEVER = [
    UnrecoverableError("m"),
    HelpNeeded("m", REPORT),
    CircuitBreakerOpen("m", 5, 300),
    TokenBudgetExceeded("m", "p", 2, 1),
    GovernanceViolation("m", "forbidden_tool"),
    MaestroError("m"),
    ConfigurationError("m"),
    StorageError("m"),
    EncodeError("$.a", "no"),
    FencedError.__new__(FencedError),
    KeyboardInterrupt(),
    SystemExit(1),
    asyncio.CancelledError(),
]
SOMETIMES = [
    RecoverableError("m"),
    ExecutionException("m"),
    TheirOwnError("m"),
    ValueError("m"),
    MemoryError(),
    TimeoutError(),
    AssertionError(),
]


@for_each("error", NEVER, ids=lambda error: type(error).__name__)
def test_another_attempt_is_out_of_the_question(error: BaseException) -> None:
    assert never_retried(error)
    group = BaseExceptionGroup("inner", [ValueError(), error])
    assert never_retried(group)
    assert never_retried(BaseExceptionGroup("outer", [KeyError(), group]))


@for_each("error", SOMETIMES, ids=lambda error: type(error).__name__)
def test_another_attempt_is_possible(error: Exception) -> None:
    assert not never_retried(error)
    assert not never_retried(ExceptionGroup("group", [ValueError(), error]))


# --- the next move ---------------------------------------------------------------------------


def move(**changes: Any) -> Decision:
    facts: dict[str, Any] = {
        "failures": 1,
        "max_attempts": 3,
        "elapsed": 10.0,
        "max_elapsed": None,
        "wanted": True,
        "asked": None,
        "delay": 1.5,
        "final": False,
    }
    return decide(**(facts | changes))


@for_each(
    "changes, wait, reason",
    [
        ({}, 1.5, "backoff"),
        ({"failures": 2}, 1.5, "backoff"),
        ({"asked": 30.0}, 30.0, "the remote side requested this wait"),
        ({"asked": 1.0}, 1.5, "backoff"),
        ({"asked": 0.0}, 1.5, "backoff"),
        ({"wanted": 0.5}, 0.5, "retry_on returned this wait"),
        ({"wanted": 0.0}, 0.0, "retry_on returned this wait"),
        ({"wanted": 0.5, "asked": 30.0}, 0.5, "retry_on returned this wait"),
        ({"max_elapsed": 11.5}, 1.5, "backoff"),
        ({"max_elapsed": 10.0, "delay": 0.0}, 0.0, "backoff"),
    ],
)
def test_there_is_another_attempt(changes: dict[str, Any], wait: float, reason: str) -> None:
    assert move(**changes)[:3] == (True, wait, reason)


TOO_LATE = "the next attempt would start {} s after the first, and the limit is {} s"


@for_each(
    "changes, reason",
    [
        ({"failures": 3}, "3 of 3 attempts have failed"),
        ({"failures": 4}, "4 of 3 attempts have failed"),
        ({"failures": 1, "max_attempts": 1}, "1 of 1 attempts have failed"),
        ({"failures": 3, "wanted": 0.5}, "3 of 3 attempts have failed"),
        ({"final": True}, "an error of this type is never retried"),
        ({"final": True, "wanted": 0.5}, "an error of this type is never retried"),
        ({"wanted": False}, "retry_on excludes this error"),
        ({"wanted": False, "failures": 3}, "retry_on excludes this error"),
        ({"max_elapsed": 11.4}, TOO_LATE.format("11.5", "11.4")),
        ({"max_elapsed": 9.0, "delay": 0.0}, TOO_LATE.format("10.0", "9")),
        ({"max_elapsed": 20.0, "asked": 30.0}, TOO_LATE.format("40.0", "20")),
        ({"max_elapsed": 20.0, "wanted": 30.0}, TOO_LATE.format("40.0", "20")),
    ],
)
def test_there_is_no_other_attempt(changes: dict[str, Any], reason: str) -> None:
    assert move(**changes) == Decision(retry=False, wait=0.0, reason=reason)


@given(
    failures=st.integers(1, 20),
    max_attempts=st.integers(1, 20),
    elapsed=amounts,
    max_elapsed=st.none() | amounts,
    wanted=st.booleans() | amounts,
    asked=st.none() | amounts,
    delay=amounts,
    final=st.booleans(),
)
def test_no_move_breaks_a_limit(
    failures: int,
    max_attempts: int,
    elapsed: float,
    max_elapsed: float | None,
    wanted: bool | float,
    asked: float | None,
    delay: float,
    final: bool,
) -> None:
    decided = decide(
        failures=failures,
        max_attempts=max_attempts,
        elapsed=elapsed,
        max_elapsed=max_elapsed,
        wanted=wanted,
        asked=asked,
        delay=delay,
        final=final,
    )
    assert decided.reason
    if decided.retry:
        assert failures < max_attempts
        assert not final
        assert wanted is not False
        assert max_elapsed is None or elapsed + decided.wait <= max_elapsed
        if wanted is True:
            assert decided.wait == max(delay, asked or 0)
    else:
        assert decided.wait == 0
        if wanted is True and not final and max_elapsed is None:
            assert failures >= max_attempts
