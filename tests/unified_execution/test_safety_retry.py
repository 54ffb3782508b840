"""Level 2: rounds, the breaker around them, and what is raised when they are used up."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from maestro_hive.engine.config import (
    ExecutionConfig,
    Level1Config,
    Level2Config,
    RecoveryStrategy,
)
from maestro_hive.engine.context import round_number
from maestro_hive.engine.errors import (
    CircuitBreakerOpen,
    FailureReport,
    GovernanceViolation,
    HelpNeeded,
    RecoverableError,
    TokenBudgetExceeded,
    UnrecoverableError,
)
from maestro_hive.engine.results import ExecutionResult, ExecutionStatus
from maestro_hive.kernel.errors import ConfigurationError, StorageError
from maestro_hive.testing import ManualClock, MemoryStore
from maestro_hive.unified_execution.persona_executor import PersonaExecutor
from maestro_hive.unified_execution.safety_retry import (
    SafetyRetryWrapper,
)
from maestro_hive.unified_execution.state_persistence import StatePersistence
from tests.unified_execution.failing_tasks import Task, failing

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def store(clock: ManualClock) -> MemoryStore:
    return MemoryStore(clock=clock)


@pytest.fixture
def quick(config: ExecutionConfig) -> ExecutionConfig:
    """No waiting between attempts; five seconds, without jitter, between rounds."""
    config.level1 = Level1Config(base_delay_seconds=0)
    config.level2 = Level2Config(jitter=0)
    return config


@pytest.fixture
def wrapper(quick: ExecutionConfig, store: MemoryStore) -> SafetyRetryWrapper:
    return SafetyRetryWrapper(quick, store=store)


def run(wrapper: SafetyRetryWrapper, task: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return asyncio.run(wrapper.execute_safe(task, *args, **kwargs))


def raises_help_needed(
    wrapper: SafetyRetryWrapper, task: Any, *args: Any, **kwargs: Any
) -> HelpNeeded:
    with pytest.raises(HelpNeeded) as raised:
        run(wrapper, task, *args, **kwargs)
    return raised.value


# --- rounds ------------------------------------------------------------------------------------


def test_a_plain_function_that_returns_is_a_success(wrapper: SafetyRetryWrapper) -> None:
    task = Task(output=42)
    result = run(wrapper, task, 1, task_name="count", two=2)
    assert task.calls == [(1, ("two", 2))]
    assert result.success
    assert result.final_status is ExecutionStatus.SUCCESS
    assert (result.task_name, result.level2_attempts) == ("count", 1)
    assert [one.final_output for one in result.level1_results] == [42]
    assert result.level1_results[0].attempt_count == 1
    assert result.circuit_breaker_state is not None
    assert result.circuit_breaker_state["state"] == "closed"
    assert result.to_dict()["success"]


def test_a_function_that_is_not_async_will_do(wrapper: SafetyRetryWrapper) -> None:
    assert run(wrapper, lambda: 7).level1_results[0].final_output == 7


def test_a_second_round_is_made_after_a_wait(
    wrapper: SafetyRetryWrapper, clock: ManualClock
) -> None:
    task = failing(1)
    result = run(wrapper, task, task_name="draft")
    assert result.final_status is ExecutionStatus.RECOVERED
    assert result.level2_attempts == 2
    assert sum(clock.slept) == 5
    assert task.rounds == [1, 2]
    assert round_number.get() == 1
    failed, done = result.level1_results
    assert (failed.success, done.success) == (False, True)
    assert failed.failure_report.details == "RuntimeError: no 1"


def test_waits_grow_as_configured(wrapper: SafetyRetryWrapper) -> None:
    assert [wrapper._calculate_delay(n) for n in range(1, 7)] == [5, 10, 20, 40, 60, 60]


@pytest.mark.timeout(60)
def test_jitter_only_ever_adds_and_can_be_repeated(
    quick: ExecutionConfig, store: MemoryStore, clock: ManualClock
) -> None:
    quick.level2 = Level2Config(jitter=0.5, jitter_seed=7, circuit_breaker_threshold=99)
    waits = []
    for _ in range(2):
        before = sum(clock.slept)
        run(SafetyRetryWrapper(quick, store=store), failing(1))
        waits.append(round(sum(clock.slept) - before, 6))
    assert waits[0] == waits[1]
    assert 5 < waits[0] <= 7.5


def test_a_longer_wait_that_the_other_side_asked_for_is_waited(
    wrapper: SafetyRetryWrapper, clock: ManualClock
) -> None:
    run(wrapper, Task(RecoverableError("busy", retry_after=12)))
    assert sum(clock.slept) == 12
    given_up = UnrecoverableError("gave up", original_error=RecoverableError("", retry_after=30))
    run(wrapper, Task(given_up))
    assert sum(clock.slept) == 42


def test_a_result_without_success_is_a_failed_round(wrapper: SafetyRetryWrapper) -> None:
    bad = ExecutionResult("e", "t", "p", final_status=ExecutionStatus.FAILED)
    error = raises_help_needed(wrapper, Task(output=bad), task_name="draft")
    assert error.failure_report.details == "draft ended without a result"
    assert wrapper.circuit_breaker.consecutive_failures == 2


# --- giving up ---------------------------------------------------------------------------------


def test_all_attempts_of_both_levels_are_told(
    quick: ExecutionConfig, wrapper: SafetyRetryWrapper
) -> None:
    executor = PersonaExecutor(quick, "writer")
    task = failing()
    error = raises_help_needed(wrapper, executor.execute, task, task_name="draft")
    assert len(task.calls) == 6
    assert error.total_attempts == 6
    assert str(error).startswith("All retry levels exhausted for draft (6 attempts; ")
    report = error.failure_report
    assert (report.failed_persona, report.attempt_number) == ("writer", 6)
    assert [each["error_message"] for each in report.context] == [
        f"no {number}" for number in range(1, 7)
    ]
    result = error.result
    assert result is not None
    assert result.final_status is ExecutionStatus.HELP_NEEDED
    assert (result.task_name, result.level2_attempts) == ("draft", 2)
    assert [each.attempt_count for each in result.level1_results] == [3, 3]
    assert error.suggested_actions[-1] == "then execute it again"
    assert isinstance(error.__cause__, UnrecoverableError)


@pytest.mark.parametrize(
    "call",
    [
        lambda execute, task: ((execute, task), {"task_name": "draft"}),
        lambda execute, task: ((execute, task, "draft"), {}),
    ],
)
def test_level_1_is_told_the_tasks_name_however_it_is_given(
    quick: ExecutionConfig, wrapper: SafetyRetryWrapper, call: Any
) -> None:
    args, kwargs = call(PersonaExecutor(quick, "writer").execute, Task())
    result = run(wrapper, *args, **kwargs)
    assert result.task_name == "draft"
    assert result.level1_results[0].task_name == "draft"


def test_inputs_follow_the_name(quick: ExecutionConfig, wrapper: SafetyRetryWrapper) -> None:
    task = Task()
    execute = PersonaExecutor(quick, "writer").execute
    run(wrapper, execute, task, "a prompt", 5, task_name="draft", tone="dry")
    run(wrapper, execute, task, "draft", "a prompt", 5, tone="dry")
    assert task.calls == [("a prompt", 5, ("tone", "dry"))] * 2


def test_with_skip_it_is_left_and_nobody_is_asked(
    quick: ExecutionConfig, store: MemoryStore, clock: ManualClock
) -> None:
    quick.level2.recovery_strategy = RecoveryStrategy.SKIP
    result = run(SafetyRetryWrapper(quick, store=store), failing())
    assert not result.success
    assert result.final_status is ExecutionStatus.FAILED
    assert result.level2_attempts == 2


def test_with_retry_same_nothing_is_waited_for(
    quick: ExecutionConfig, store: MemoryStore, clock: ManualClock
) -> None:
    quick.level2.recovery_strategy = RecoveryStrategy.RETRY_SAME
    run(SafetyRetryWrapper(quick, store=store), failing(1))
    assert clock.slept == []


# --- what is not retried -----------------------------------------------------------------------

_REPORT = FailureReport("writer", "UNKNOWN", "hopeless", recoverable=False)


@pytest.mark.parametrize(
    "error",
    [
        GovernanceViolation("forbidden", "path", path="/etc/passwd"),
        TokenBudgetExceeded("bankrupt", "writer", 11, 10),
        StorageError("the disk is full"),
        HelpNeeded("look here", _REPORT),
        CircuitBreakerOpen("another one", 5, 300),
        ExceptionGroup("both", [ValueError(), TokenBudgetExceeded("bankrupt", "w", 2, 1)]),
        asyncio.CancelledError(),
        KeyboardInterrupt(),
    ],
    ids=lambda error: type(error).__name__,
)
def test_what_is_no_failure_of_the_other_side_is_raised_as_it_is_and_not_counted(
    wrapper: SafetyRetryWrapper, error: BaseException
) -> None:
    task = Task(error)
    with pytest.raises(type(error)) as raised:
        run(wrapper, task)
    if not isinstance(error, asyncio.CancelledError | KeyboardInterrupt):
        assert raised.value is error
    assert len(task.calls) == 1
    assert wrapper.circuit_breaker.consecutive_failures == 0


def test_a_forbidden_task_is_not_retried(
    quick: ExecutionConfig, wrapper: SafetyRetryWrapper
) -> None:
    task = Task(*(GovernanceViolation("no", "tool") for _ in range(9)))
    with pytest.raises(GovernanceViolation):
        run(wrapper, PersonaExecutor(quick).execute, task, task_name="draft")
    assert len(task.calls) == 1


def test_what_a_task_marked_unrecoverable_is_raised_as_it_is_and_counted(
    quick: ExecutionConfig, wrapper: SafetyRetryWrapper
) -> None:
    task = Task(UnrecoverableError("hopeless"))
    with pytest.raises(UnrecoverableError):
        run(wrapper, PersonaExecutor(quick).execute, task, task_name="draft")
    assert len(task.calls) == 1
    assert wrapper.circuit_breaker.consecutive_failures == 1
    plain = Task(UnrecoverableError("hopeless", _REPORT))
    with pytest.raises(UnrecoverableError):
        run(wrapper, plain)
    assert len(plain.calls) == 1


def test_a_probe_that_is_cancelled_leaves_the_probe_to_the_next(
    quick: ExecutionConfig, store: MemoryStore, clock: ManualClock
) -> None:
    quick.level2 = Level2Config(circuit_breaker_threshold=1, max_attempts=1)
    wrapper = SafetyRetryWrapper(quick, store=store)
    wrapper.circuit_breaker.record_failure()
    clock.advance(300)

    async def cancel() -> None:
        started = asyncio.Event()

        async def hang() -> None:
            started.set()
            await asyncio.Event().wait()

        probing = asyncio.create_task(wrapper.execute_safe(hang))
        await started.wait()
        with pytest.raises(CircuitBreakerOpen):
            await wrapper.execute_safe(Task())
        probing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await probing

    asyncio.run(cancel())
    assert run(wrapper, Task()).success
    assert wrapper.circuit_breaker.state == "closed"


@pytest.mark.parametrize("kind", [SafetyRetryWrapper, StatePersistence])
def test_what_is_no_configuration_is_refused_by_name(kind: Any) -> None:
    with pytest.raises(ConfigurationError, match="the config is 'state', and must be an Execution"):
        kind("state")
