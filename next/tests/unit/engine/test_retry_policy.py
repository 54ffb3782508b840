"""Whether a failed attempt is worth another, and when."""

from __future__ import annotations

import asyncio
import functools
import math
import random
import re
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, NoReturn

import pytest
from hypothesis import given
from hypothesis import strategies as st

from maestro_hive.engine.config import (
    ExecutionConfig,
    Level1Config,
    Level2Config,
    RecoveryStrategy,
)
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
    AttemptLimit,
    Decision,
    RetryOn,
    Rules,
    checked_filter,
    decide,
    delay_before,
    never_retried,
    verdict_of,
    with_jitter,
)
from maestro_hive.journal.entries import AttemptFailed
from maestro_hive.journal.state import StepState
from maestro_hive.kernel.errors import (
    ConfigurationError,
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
    wait = with_jitter(seconds, random.Random(seed), share)
    assert seconds <= wait <= math.nextafter(seconds * (1 + share), math.inf)


def test_the_same_seed_gives_the_same_jitter_and_another_one_another() -> None:
    waits = [with_jitter(10, random.Random(seed), 0.1) for seed in (1, 1, 2)]
    assert waits[0] == waits[1] != waits[2]


def test_without_a_share_there_is_no_jitter() -> None:
    assert with_jitter(10, random.Random(1), 0) == 10


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
    assert checked_filter("retry_on", given_, "yes") == taken


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
        checked_filter("retry_on", value, "yes")


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
    answer = verdict_of(retry_on, ValueError("mine"))
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
        verdict_of(lambda error: answer, ValueError())


def test_a_coroutine_as_the_answer_is_one_error_and_no_warning() -> None:
    hidden: Callable[[Exception], Any] = lambda error: slow_judge(error)  # noqa: E731, PLW0108
    with pytest.raises(TypeError, match="returned <coroutine object slow_judge"):
        verdict_of(hidden, ValueError())


def test_what_the_function_raises_is_raised() -> None:
    def broken(error: Exception) -> NoReturn:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        verdict_of(broken, ValueError())


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


def test_an_executor_inside_of_a_step_that_gave_up_gets_another_attempt() -> None:
    report = FailureReport("developer", "TIMEOUT", "no answer", recoverable=True)
    assert not never_retried(UnrecoverableError("m", report))
    report.recoverable = False
    assert never_retried(UnrecoverableError("m", report))


# --- the decision ---------------------------------------------------------------------------------

NOW = datetime(2030, 1, 1, tzinfo=UTC)


class NoJitter(random.Random):
    def random(self) -> float:
        return 0.0


def decisions(errors: list[Exception], retry_on: Any = None, **given: Any) -> list[Decision]:
    """Return what is decided about each of a step's failures, which are recorded one by one."""
    config = ExecutionConfig(**{k: v for k, v in given.items() if k in ("level1", "level2")})
    limit = AttemptLimit(given.get("attempts", 6), given.get("rounds", 2))
    step, found = StepState(1, "s"), []
    for number, error in enumerate(errors, 1):
        decided = decide(Rules(limit, config, retry_on), step, error, NOW, NoJitter())
        found.append(decided)
        if not decided.round:
            break
        step.failed.append(AttemptFailed(step=1, attempt=number, round=decided.round))
    return found


def test_waits_grow_in_a_round_and_between_rounds() -> None:
    found = decisions([ValueError()] * 9, attempts=9, rounds=3)
    assert [(each.round, each.wait) for each in found] == [
        (1, 1.0), (1, 1.5), (2, 5.0), (2, 1.0), (2, 1.5), (3, 10.0), (3, 1.0), (3, 1.5), (0, 0.0),
    ]  # fmt: skip
    assert found[-1].reason == "9 of 9 attempts have failed"


def test_rounds_of_different_length_use_all_attempts() -> None:
    found = decisions([ValueError()] * 9, attempts=5, rounds=2)
    assert [each.round for each in found] == [1, 1, 2, 2, 0]


def test_a_requested_wait_is_waited_for_if_it_is_longer() -> None:
    errors = [RecoverableError("m", retry_after=wait) for wait in (30.0, 0.5)]
    assert [(each.wait, each.reason) for each in decisions([*errors])] == [
        (30.0, "the remote service requested this wait"),
        (1.5, "backoff"),
    ]


@for_each(
    "retry_on, found",
    [
        (KeyError, (0, "retry_on excludes this error")),
        (ValueError, (1, "backoff")),
        (lambda _: False, (0, "retry_on excludes this error")),
        (lambda _: 7, (1, "retry_on returned this wait")),
    ],
)
def test_retry_on_decides(retry_on: Any, found: tuple[int, str]) -> None:
    (decided,) = decisions([ValueError()], retry_on)
    assert (decided.round, decided.reason) == found


def raised(source: str, name: str) -> Exception:
    try:
        exec(compile(source, name, "exec"), {})
    except Exception as error:  # noqa: BLE001 - that is asked for
        return error
    raise AssertionError


OWN = ["missing", "import nowhere", "raise NotImplementedError", "import math; math.nope"]


@for_each("source", OWN[:3])
def test_an_error_of_the_steps_own_code_is_not_retried_unless_it_says_so(source: str) -> None:
    (decided,) = decisions([raised(source, "steps.py")])
    assert (decided.round, decided.reason[:17]) == (0, "the step's code i")
    (decided,) = decisions([raised(source, "steps.py")], Exception)
    assert decided.round == 1


def test_a_syntax_error_of_a_module_is_not_retried_and_that_of_a_text_is() -> None:
    assert decisions([raised("def f(:", "steps.py")])[0].round == 0
    assert decisions([raised("def f(:", "<answer>")])[0].round == 1


@for_each("source", OWN)
def test_an_error_of_generated_code_is_retried(source: str) -> None:
    assert decisions([raised(source, "<answer>")])[0].round == 1


def test_strategies_change_the_wait_or_end_the_round() -> None:
    same = Level1Config(recovery_strategy=RecoveryStrategy.RETRY_SAME)
    assert [each.wait for each in decisions([ValueError()] * 3, level1=same)] == [0, 0, 5.0]
    escalate = Level1Config(recovery_strategy=RecoveryStrategy.ESCALATE)
    assert [each.round for each in decisions([ValueError()] * 3, level1=escalate)] == [2, 0]
