"""Level 2 and its breaker: which one it asks, what it is told, and what is held open for it."""

from __future__ import annotations

import asyncio
import gc
import time
from typing import TYPE_CHECKING, Any

import pytest

from maestro_hive.engine.config import (
    ExecutionConfig,
    Level1Config,
    Level2Config,
    StateConfig,
)
from maestro_hive.engine.errors import (
    CircuitBreakerOpen,
    HelpNeeded,
)
from maestro_hive.kernel.errors import ConfigurationError
from maestro_hive.maestro.state.stores import close_store, forget_memory_stores, open_store
from maestro_hive.testing import ManualClock, MemoryStore
from maestro_hive.unified_execution.persona_executor import PersonaExecutor
from maestro_hive.unified_execution.safety_retry import (
    CircuitBreaker,
    SafetyRetryWrapper,
    execute_with_full_retry,
)
from tests.unified_execution.failing_tasks import Task, failing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


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


@pytest.fixture
def in_memory(quick: ExecutionConfig) -> Iterator[ExecutionConfig]:
    quick.state = StateConfig(state_dir=quick.state.state_dir, enable_persistence=False)
    quick.level2 = Level2Config(base_delay_seconds=0, circuit_breaker_threshold=3)
    forget_memory_stores()
    yield quick
    forget_memory_stores()


def run(wrapper: SafetyRetryWrapper, task: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return asyncio.run(wrapper.execute_safe(task, *args, **kwargs))


def raises_help_needed(
    wrapper: SafetyRetryWrapper, task: Any, *args: Any, **kwargs: Any
) -> HelpNeeded:
    with pytest.raises(HelpNeeded) as raised:
        run(wrapper, task, *args, **kwargs)
    return raised.value


def test_a_failed_round_is_one_failure_and_an_open_breaker_lets_nothing_be_called(
    wrapper: SafetyRetryWrapper,
) -> None:
    for _ in range(2):
        raises_help_needed(wrapper, failing())
    assert wrapper.circuit_breaker.consecutive_failures == 4
    wrapper.circuit_breaker.record_failure()
    task = Task()
    with pytest.raises(CircuitBreakerOpen, match="Circuit breaker is OPEN") as raised:
        run(wrapper, task)
    assert task.calls == []
    assert "rounds" not in raised.value.context
    assert raised.value.consecutive_failures == 5


def test_a_breaker_that_opens_meanwhile_stops_the_second_round_without_waiting(
    wrapper: SafetyRetryWrapper, store: MemoryStore, clock: ManualClock
) -> None:
    others = CircuitBreaker(store=store)

    async def fail() -> None:
        for _ in range(5):
            others.record_failure()
        raise RuntimeError("no 1")

    with pytest.raises(CircuitBreakerOpen) as raised:
        run(wrapper, fail, task_name="draft")
    context = raised.value.context
    assert (context["task_name"], context["rounds"], context["attempts"]) == ("draft", 1, 1)
    assert context["last_failure"]["details"] == "RuntimeError: no 1"
    assert clock.slept == []  # it would have been refused after the wait, too


def test_the_breaker_has_the_personas_name_or_the_given_one(
    quick: ExecutionConfig, store: MemoryStore
) -> None:
    task = Task(RuntimeError(), RuntimeError(), RuntimeError())
    wrapper = SafetyRetryWrapper(quick, store=store)
    assert wrapper.circuit_breaker.name == "default"
    run(wrapper, PersonaExecutor(quick, "writer").execute, task, "draft")
    assert wrapper.circuit_breaker.name == "writer"
    named = SafetyRetryWrapper(quick, store=store, breaker="anthropic")
    raises_help_needed(named, PersonaExecutor(quick, "writer").execute, failing(), "draft")
    assert named.circuit_breaker.name == "anthropic"
    assert CircuitBreaker(name="anthropic", store=store).consecutive_failures == 2
    assert CircuitBreaker(name="writer", store=store).consecutive_failures == 0


def test_a_breaker_of_ones_own_is_used_as_it_is(
    quick: ExecutionConfig, clock: ManualClock, tmp_path: Path
) -> None:
    mine = CircuitBreaker(1, 60, name="mine", clock=clock)
    wrapper = SafetyRetryWrapper(quick, breaker=mine)
    assert wrapper.circuit_breaker is mine
    with pytest.raises(CircuitBreakerOpen):
        run(wrapper, failing())
    assert mine.state == "open"
    assert not (tmp_path / "state").exists()  # no journal is opened that nobody needs


@pytest.mark.parametrize("breaker", ["", 7, "a\nb"])
def test_a_breaker_that_cannot_be_is_refused(quick: ExecutionConfig, breaker: Any) -> None:
    with pytest.raises(ConfigurationError):
        SafetyRetryWrapper(quick, breaker=breaker)


def test_full_retries_share_one_breaker(quick: ExecutionConfig) -> None:
    quick.level2 = Level2Config(base_delay_seconds=0, circuit_breaker_threshold=4)
    task = failing()
    for _ in range(2):
        with pytest.raises(HelpNeeded):
            asyncio.run(execute_with_full_retry(task, "draft", "writer", quick))
    assert len(task.calls) == 12
    with pytest.raises(CircuitBreakerOpen, match="'writer'"):
        asyncio.run(execute_with_full_retry(task, "draft", "writer", quick))
    assert len(task.calls) == 12
    assert asyncio.run(execute_with_full_retry(Task(), "draft", "another", quick, 1, x=2)).success


def test_without_persistence_the_breaker_is_shared_in_memory_and_nothing_is_written(
    in_memory: ExecutionConfig, tmp_path: Path
) -> None:
    task = failing()
    with pytest.raises(HelpNeeded):
        asyncio.run(execute_with_full_retry(task, "draft", "writer", in_memory))
    with pytest.raises(CircuitBreakerOpen):
        asyncio.run(execute_with_full_retry(task, "draft", "writer", in_memory))
    assert SafetyRetryWrapper(in_memory, breaker="writer").circuit_breaker.state == "open"
    assert not (tmp_path / "state").exists()


# --- what it holds -----------------------------------------------------------------------------


def test_a_wrapper_that_was_made_and_not_used_opens_nothing(
    quick: ExecutionConfig, tmp_path: Path
) -> None:
    SafetyRetryWrapper(quick, workflow_id="run-1").close()
    assert not (tmp_path / "state").exists()


@pytest.mark.parametrize("how", ["close", "del"])
def test_the_journal_is_returned(quick: ExecutionConfig, how: str) -> None:
    wrapper = SafetyRetryWrapper(quick, workflow_id="run-1")
    run(wrapper, len, "draft", task_name="count")
    store = open_store(quick.state.state_dir)
    close_store(store)
    assert store.run("run-1") is not None
    if how == "close":
        wrapper.close()
        wrapper.close()
    else:
        del wrapper
        gc.collect()
    for _ in range(1000):
        if not store.usable:
            return
        time.sleep(0.01)
    pytest.fail("the journal is still open")


def test_a_store_that_is_given_stays_the_callers(
    quick: ExecutionConfig, store: MemoryStore
) -> None:
    with SafetyRetryWrapper(quick, store=store) as wrapper:
        run(wrapper, Task())
    assert store.documents() == []  # it is open, and a success wrote nothing


def test_a_closed_wrapper_opens_again_what_it_needs(quick: ExecutionConfig) -> None:
    wrapper = SafetyRetryWrapper(quick)
    run(wrapper, Task())
    wrapper.close()
    assert run(wrapper, Task()).success
    wrapper.close()


# --- it counts every failed round, whatever the error --------------------------------------------


@pytest.mark.parametrize("error", [KeyError("mine"), TimeoutError("late"), ValueError("bad")])
def test_a_wrapper_counts_every_failed_round(
    wrapper: SafetyRetryWrapper, quick: ExecutionConfig, error: Exception
) -> None:
    with pytest.raises(HelpNeeded):
        asyncio.run(wrapper.execute_safe(Task(*[error] * 9), task_name="plain"))
    assert wrapper.circuit_breaker.consecutive_failures == 2
    executor = PersonaExecutor(quick, "writer")
    with pytest.raises(HelpNeeded):
        asyncio.run(wrapper.execute_safe(executor.execute, Task(*[error] * 9), task_name="draft"))
    assert wrapper.circuit_breaker.name == "writer"
    assert wrapper.circuit_breaker.consecutive_failures == 2


def test_full_retry_counts_every_failed_round(quick: ExecutionConfig) -> None:
    quick.level2 = Level2Config(base_delay_seconds=0, circuit_breaker_threshold=4)
    for _ in range(2):
        with pytest.raises(HelpNeeded):
            asyncio.run(execute_with_full_retry(failing(), "task", "writer", quick))
    task = failing()
    with pytest.raises(CircuitBreakerOpen, match=r"Circuit breaker is OPEN.*'writer'"):
        asyncio.run(execute_with_full_retry(task, "task", "writer", quick))
    assert not task.calls
