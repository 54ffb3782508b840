"""Level 2 in a run: which call is which, what is forgotten, and calls inside of calls."""

from __future__ import annotations

import asyncio
import threading
import warnings
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from maestro_hive.engine.config import ExecutionConfig, Level1Config, Level2Config
from maestro_hive.engine.context import round_number
from maestro_hive.engine.errors import (
    FailureReport,
    HelpNeeded,
    UnrecoverableError,
)
from maestro_hive.engine.plan import UnencodableInputWarning
from maestro_hive.engine.results import ExecutionStatus
from maestro_hive.kernel.errors import ConfigurationError
from maestro_hive.testing import ManualClock, MemoryStore
from maestro_hive.unified_execution.persona_executor import PersonaExecutor
from maestro_hive.unified_execution.safety_retry import CircuitBreaker, SafetyRetryWrapper
from tests.unified_execution.failing_tasks import Task, failing

if TYPE_CHECKING:
    from collections.abc import Iterator

RUN = "run-1"


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def store(clock: ManualClock) -> MemoryStore:
    return MemoryStore(clock=clock)


@pytest.fixture
def quick(config: ExecutionConfig) -> ExecutionConfig:
    config.level1 = Level1Config(base_delay_seconds=0, max_attempts=1)
    config.level2 = Level2Config(max_attempts=1, base_delay_seconds=0, circuit_breaker_threshold=99)
    return config


@pytest.fixture
def wrapper(quick: ExecutionConfig, store: MemoryStore) -> Iterator[SafetyRetryWrapper]:
    with SafetyRetryWrapper(quick, workflow_id=RUN, store=store) as made:
        yield made


@pytest.fixture
def executor(quick: ExecutionConfig) -> Iterator[PersonaExecutor]:
    with PersonaExecutor(quick, "writer", workflow_id=RUN) as made:
        yield made


def run(wrapper: SafetyRetryWrapper, *args: Any, **kwargs: Any) -> Any:
    return asyncio.run(wrapper.execute_safe(*args, **kwargs))


def output(wrapper: SafetyRetryWrapper, *args: Any, **kwargs: Any) -> Any:
    return run(wrapper, *args, **kwargs).level1_results[-1].final_output


def raises_help_needed(wrapper: SafetyRetryWrapper, *args: Any, **kwargs: Any) -> HelpNeeded:
    with pytest.raises(HelpNeeded) as raised:
        run(wrapper, *args, **kwargs)
    return raised.value


async def ask(part: str) -> str:
    if part == "bad":
        raise ValueError(part)
    return part


def ask_at_once(part: str) -> str:
    if part == "bad":
        raise ValueError(part)
    return part


@dataclass(frozen=True)
class Question:
    part: str

    async def ask(self) -> str:
        return await ask(self.part)


class Asker:
    def __init__(self, part: str) -> None:
        self.part = part

    async def ask(self) -> str:
        return await ask(self.part)


# --- which call is which -------------------------------------------------------------------------


def test_the_arguments_of_a_partial_tell_it_from_others(wrapper: SafetyRetryWrapper) -> None:
    raises_help_needed(wrapper, partial(ask, "bad"), task_name="ask")
    assert output(wrapper, partial(ask, "good"), task_name="ask") == "good"
    assert output(wrapper, partial(ask, part="fine"), task_name="ask") == "fine"
    raises_help_needed(wrapper, partial(ask, "bad"), task_name="ask")
    assert wrapper.circuit_breaker.consecutive_failures == 0  # the last was not called again


def test_what_a_method_belongs_to_tells_it_from_others(wrapper: SafetyRetryWrapper) -> None:
    raises_help_needed(wrapper, Question("bad").ask, task_name="ask")
    assert output(wrapper, Question("good").ask, task_name="ask") == "good"


@pytest.mark.parametrize(
    "function, why",
    [
        (lambda: ask("good"), "what a lambda carries is not part of it"),
        (Asker("good").ask, "self"),
        (Task(), "self"),
    ],
    ids=["lambda", "method", "object"],
)
def test_a_call_that_its_name_alone_tells_from_others_is_warned_of_once(
    wrapper: SafetyRetryWrapper, function: Any, why: str
) -> None:
    async def call() -> None:
        await wrapper.execute_safe(function, task_name="ask")

    with pytest.warns(UnencodableInputWarning, match=why) as warned:
        asyncio.run(call())
    assert warned[0].filename == __file__
    asyncio.run(call())


def test_a_local_function_that_remembers_something_is_warned_of(
    wrapper: SafetyRetryWrapper,
) -> None:
    part = "good"

    async def forgetful() -> int:
        return 1

    async def mindful() -> str:
        return part

    assert output(wrapper, forgetful, task_name="a") == 1
    with pytest.warns(UnencodableInputWarning, match="what mindful, a local function, carries"):
        assert output(wrapper, mindful, task_name="b") == "good"


def test_arguments_without_a_form_in_json_are_warned_of(wrapper: SafetyRetryWrapper) -> None:
    with pytest.warns(UnencodableInputWarning, match=r"args\[0\]"):
        run(wrapper, ask_at_once, Asker("bad"), task_name="ask")


def test_a_call_in_a_run_needs_a_name(wrapper: SafetyRetryWrapper) -> None:
    task = Task()
    with pytest.raises(ConfigurationError, match="needs a name"):
        run(wrapper, task)
    assert task.calls == []


def test_keys_tell_the_calls_of_an_executor_apart(
    wrapper: SafetyRetryWrapper, executor: PersonaExecutor
) -> None:
    raises_help_needed(wrapper, executor.options(key="a").execute, failing(), "draft")
    assert run(wrapper, executor.options(key="b").execute, Task(), "draft").success
    task = Task()
    raises_help_needed(wrapper, executor.options(key="a").execute, task, "draft")
    assert task.calls == []


def test_a_task_by_another_name_in_the_source_is_the_same_call(
    wrapper: SafetyRetryWrapper, executor: PersonaExecutor, quick: ExecutionConfig
) -> None:
    raises_help_needed(wrapper, executor.execute, ask, "draft", "bad")
    raises_help_needed(wrapper, executor.execute, ask_at_once, "draft", "bad")
    raises_help_needed(wrapper, ask, "bad", task_name="ask")
    raises_help_needed(wrapper, ask_at_once, "bad", task_name="ask")
    in_memory = PersonaExecutor(quick, "reader").execute
    raises_help_needed(wrapper, in_memory, ask, "draft", "bad")
    raises_help_needed(wrapper, in_memory, ask_at_once, "draft", "bad")
    counts = [
        CircuitBreaker(name=name, store=wrapper.circuit_breaker.store).consecutive_failures
        for name in ("writer", "default", "reader")
    ]
    assert counts == [1, 1, 1]


def test_after_a_task_name_by_keyword_all_arguments_are_the_tasks(
    wrapper: SafetyRetryWrapper, executor: PersonaExecutor
) -> None:
    task = Task()
    run(wrapper, executor.execute, task, "design", task_name="design")
    run(wrapper, executor.execute, task, "review", "design")
    run(wrapper, executor.execute, task=task, task_name="plan")
    assert task.calls == [("design",), ("design",), ()]


def test_what_cannot_be_called_is_refused_at_once(
    wrapper: SafetyRetryWrapper, executor: PersonaExecutor
) -> None:
    with pytest.raises(ConfigurationError, match="'draft', which cannot be called"):
        run(wrapper, "draft")
    with pytest.raises(ConfigurationError, match="'writer' was given no task"):
        run(wrapper, executor.execute, task_name="draft")


# --- what is forgotten ---------------------------------------------------------------------------


def test_a_success_ends_the_failed_rounds_before_it(
    quick: ExecutionConfig, store: MemoryStore
) -> None:
    quick.level2.max_attempts = 2
    answers = iter([False, True, True, False, True, False, False])

    async def poll() -> None:
        if not next(answers):
            raise ValueError

    with (
        SafetyRetryWrapper(quick, workflow_id=RUN, store=store) as wrapper,
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore", UnencodableInputWarning)
        rounds = [run(wrapper, poll, task_name="poll").level2_attempts for _ in range(3)]
        assert rounds == [2, 1, 2]
        assert raises_help_needed(wrapper, poll, task_name="poll").total_attempts == 2


def test_a_wrapper_told_to_retry_gives_all_rounds_again(
    wrapper: SafetyRetryWrapper, executor: PersonaExecutor
) -> None:
    error = raises_help_needed(wrapper, ask_at_once, "bad", task_name="ask")
    assert error.suggested_actions[-1] == (
        "then retry it: `maestro retry run-1`, or options(retry=True) of an executor; until then, run run-1 raises the same failure again"
    )
    raises_help_needed(wrapper.options(retry=True), ask_at_once, "bad", task_name="ask")
    assert wrapper.circuit_breaker.consecutive_failures == 2
    task = failing(1)
    raises_help_needed(wrapper, executor.execute, task, "draft")
    assert run(wrapper.options(retry=True), executor.execute, task, "draft").success
    with pytest.raises(ConfigurationError):
        wrapper.options(retry=1)  # type: ignore[arg-type]


def test_a_retry_has_as_many_attempts_as_the_first_time(
    quick: ExecutionConfig, store: MemoryStore, executor: PersonaExecutor
) -> None:
    quick.level2.max_attempts = 3
    task = failing()
    with SafetyRetryWrapper(quick, workflow_id=RUN, store=store) as wrapper:
        assert raises_help_needed(wrapper, executor.execute, task, "draft").total_attempts == 3
        again = raises_help_needed(wrapper.options(retry=True), executor.execute, task, "draft")
        assert [each["error_message"] for each in again.failure_report.context] == [
            "no 4",
            "no 5",
            "no 6",
        ]
        raises_help_needed(wrapper, executor.execute, task, "draft")
        assert len(task.calls) == 6


def test_what_a_caller_does_to_an_error_does_not_change_what_is_stored(
    wrapper: SafetyRetryWrapper,
) -> None:
    for _ in range(3):
        error = raises_help_needed(wrapper, ask, "bad", task_name="ask")
        assert error.failure_report.context[0]["error_message"] == "bad"
        error.failure_report.context[0]["error_message"] = "good"
        error.suggested_actions.clear()


# --- the breaker ---------------------------------------------------------------------------------


def test_a_round_in_which_nothing_was_called_does_not_count(
    wrapper: SafetyRetryWrapper, store: MemoryStore, clock: ManualClock
) -> None:
    raises_help_needed(wrapper, partial(_raise, "given up before"), task_name="draft")
    assert wrapper.circuit_breaker.consecutive_failures == 0
    breaker = CircuitBreaker(1, 60, name="default", store=store)
    breaker.record_failure()
    clock.advance(60)
    raises_help_needed(wrapper, partial(_raise, "once more"), task_name="draft")
    assert breaker.consecutive_failures == 1
    assert output(wrapper, ask, "good", task_name="ask") == "good"  # the probe was left for it
    assert breaker.state == "closed"


async def _raise(message: str) -> None:
    raise UnrecoverableError(message, context={"called": False})


def test_a_step_that_was_given_up_before_does_not_count_again(
    quick: ExecutionConfig, store: MemoryStore, executor: PersonaExecutor
) -> None:
    task = failing()
    wrapper = SafetyRetryWrapper(quick, store=store)
    for _ in range(3):
        raises_help_needed(wrapper, executor.execute, task, "draft")
    assert len(task.calls) == 1
    assert wrapper.circuit_breaker.consecutive_failures == 1


# --- calls inside of calls -----------------------------------------------------------------------


@pytest.mark.timeout(60)
def test_a_call_inside_itself_is_an_error_and_does_not_wait_for_ever(
    wrapper: SafetyRetryWrapper,
) -> None:
    async def again() -> Any:
        return await wrapper.execute_safe(again, task_name="again")

    def again_in_a_thread() -> Any:
        return asyncio.run(wrapper.execute_safe(again_in_a_thread, task_name="again"))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UnencodableInputWarning)
        for function in (again, again_in_a_thread):
            with pytest.raises(ConfigurationError, match="'again' executes itself"):
                run(wrapper, function, task_name="again")


@pytest.mark.parametrize("durable", [True, False])
def test_a_round_around_other_rounds_calls_again(
    quick: ExecutionConfig, store: MemoryStore, executor: PersonaExecutor, *, durable: bool
) -> None:
    quick.level2.max_attempts = 2
    leaf = failing()

    class Jira:
        tickets = 0

        async def create_ticket(self, *_: Any, **__: Any) -> str:
            self.tickets += 1
            return f"MD-{self.tickets}"

    jira = Jira()
    with (
        PersonaExecutor(quick, "editor", workflow_id=RUN) as around,
        SafetyRetryWrapper(quick, workflow_id=RUN, store=store) as outer,
        SafetyRetryWrapper(quick, jira, workflow_id=RUN if durable else None, store=store) as inner,
    ):

        async def edit() -> None:
            assert round_number.get() in {1, 2}
            try:
                await inner.execute_safe(executor.execute, leaf, "leaf")
            except HelpNeeded as error:
                raise RuntimeError("the writer gave up") from error

        raises_help_needed(outer, around.execute, edit, "edit")
        assert leaf.rounds == [1, 2, 3, 4]
        assert CircuitBreaker(name="writer", store=store).consecutive_failures == 4
        assert jira.tickets == (1 if durable else 2)
        retried = around.options(retry=True)
        leaf.errors.clear()
        # What was given up inside stays given up, until it is asked for.
        raises_help_needed(outer, retried.execute, edit, "edit")
        assert len(leaf.calls) == 4
        assert run(inner.options(retry=True), executor.execute, leaf, "leaf").success
        assert run(outer, retried.execute, edit, "edit").success


def test_a_function_that_blocks_does_not_stop_the_loop(wrapper: SafetyRetryWrapper) -> None:
    released = threading.Event()

    def block() -> tuple[bool, int]:
        return released.wait(60), round_number.get()

    async def release() -> None:
        released.set()

    async def both() -> Any:
        waiting = asyncio.create_task(wrapper.execute_safe(block, task_name="block"))
        await wrapper.execute_safe(release, task_name="release")
        return await waiting

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UnencodableInputWarning)
        result = asyncio.run(both())
    assert result.level1_results[0].final_output == (True, 1)


# --- errors that are odd themselves --------------------------------------------------------------


def _odd_syntax_error() -> SyntaxError:
    error = SyntaxError("bad")
    error.filename, error.lineno, error.offset, error.text = object(), "x", "y", 5  # type: ignore[assignment]
    return error


@pytest.mark.parametrize(
    "error",
    [
        _odd_syntax_error(),
        SyntaxError("m", ("f", 1, "off", "text")),  # type: ignore[arg-type]
        UnrecoverableError("x", original_error="text"),  # type: ignore[arg-type]
        UnrecoverableError("x", failure_report={"details": "y"}),  # type: ignore[arg-type]
        UnrecoverableError("x", FailureReport("p", "C", "d", suggested_fix=object())),  # type: ignore[arg-type]
        UnrecoverableError("x", FailureReport(None, None, None)),  # type: ignore[arg-type]
        UnrecoverableError("x", FailureReport("p", "C", object(), recoverable=True)),  # type: ignore[arg-type]
        UnrecoverableError("x", context="text"),  # type: ignore[arg-type]
    ],
    ids=range(8),
)
def test_an_odd_error_is_a_failure_like_others(
    wrapper: SafetyRetryWrapper, error: Exception
) -> None:
    tickets: list[Any] = []

    class RecordingEscalation:
        async def escalate(self, case: Any) -> str:
            tickets.append(case)
            return "MD-1"

    async def fail() -> None:
        raise error

    with (
        SafetyRetryWrapper(
            wrapper.config,
            workflow_id=RUN,
            store=wrapper.circuit_breaker.store,
            escalation=RecordingEscalation(),
        ) as asking,
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore", UnencodableInputWarning)
        first = raises_help_needed(asking, fail, task_name="odd")
        again = raises_help_needed(asking, fail, task_name="odd")
    assert first.context.get("escalation_error") is None
    assert str(again) == str(first)
    assert len(tickets) == 1
    assert again.result is not None
    assert again.result.final_status is ExecutionStatus.HELP_NEEDED


@pytest.mark.parametrize("run_id", [None, RUN, "another-run"])
def test_equal_calls_at_once_execute_a_step_once_whatever_run_their_rounds_are_in(
    quick: ExecutionConfig, executor: PersonaExecutor, run_id: str | None
) -> None:
    calls: list[str] = []

    async def write(page: str) -> str:
        calls.append(page)
        await asyncio.sleep(0.02)
        return page

    async def both() -> list[Any]:
        with (
            SafetyRetryWrapper(quick, workflow_id=run_id) as first,
            SafetyRetryWrapper(quick) as second,
        ):
            work = [
                each.execute_safe(executor.execute, write, "write", "a")
                for each in (first, first, second)
            ]
            return await asyncio.gather(*work)

    outputs = [result.level1_results[-1].final_output for result in asyncio.run(both())]
    assert (outputs, calls) == (["a", "a", "a"], ["a"])
