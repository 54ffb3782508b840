"""Attempts: how many, when, whether again, and what each is told of those before."""

from __future__ import annotations

import asyncio
import threading
import time
from datetime import timedelta
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from maestro_hive.engine.context import current, round_number
from maestro_hive.engine.errors import ExecutionException
from maestro_hive.engine.healing.failure import Failure, FailureType
from maestro_hive.kernel.errors import ConfigurationError, StorageError
from maestro_hive.unified_execution import (
    CircuitBreakerOpen,
    ExecutionConfig,
    FailureReport,
    GovernanceViolation,
    HelpNeeded,
    Level1Config,
    RecoverableError,
    RecoveryStrategy,
    TokenBudgetExceeded,
    UnrecoverableError,
)
from maestro_hive.unified_execution.persona_executor import ExecutionStatus, PersonaExecutor
from tests.tables import for_each
from tests.unified_execution.restarts import (
    Body,
    Restarts,
    any_restarts,  # noqa: F401 - a fixture
    execute,
    failed,
    make_any_executor,  # noqa: F401 - a fixture
    reported,
    stop_while_waiting,
)

if TYPE_CHECKING:
    from maestro_hive.testing import ManualClock

NO = ValueError("no")


def quick(**level1: Any) -> PersonaExecutor:
    """Return an executor in memory that does not wait."""
    return PersonaExecutor(ExecutionConfig(level1=Level1Config(base_delay_seconds=0, **level1)))


@pytest.fixture
def clock(restarts: Restarts) -> ManualClock:
    return restarts.clock


# --- how many ------------------------------------------------------------------------------------


def test_a_task_is_tried_three_times_with_waits_between(
    any_executor: PersonaExecutor, clock: ManualClock
) -> None:
    body = Body(NO)
    error = failed(any_executor, body)
    assert body.count == 3
    assert clock.slept == pytest.approx([1.0, 1.5])
    assert error.message == "Level 1 retries exhausted for step"
    assert error.original_error is NO
    report = reported(error)
    assert (report.failed_persona, report.error_category, report.details) == (
        "developer", "UNKNOWN", "no",
    )  # fmt: skip
    assert (report.attempt_number, report.recoverable, len(report.context)) == (3, True, 3)
    assert error.result.attempt_count == 3
    assert not error.result.success
    assert [each.status.value for each in error.result.attempts] == [
        "retrying", "retrying", "failed",
    ]  # fmt: skip
    assert any_executor.final_status is ExecutionStatus.FAILED


def test_the_first_success_ends_it(any_executor: PersonaExecutor) -> None:
    body = Body(NO, NO, "yes")
    assert execute(any_executor, body).final_output == "yes"
    assert body.count == 3


def test_a_call_can_have_another_number_of_attempts(any_executor: PersonaExecutor) -> None:
    body = Body(NO)
    failed(any_executor.options(max_attempts=5), body)
    assert body.count == 5


def test_failures_before_a_restart_still_count(restarts: Restarts, monkeypatch: Any) -> None:
    first = Body(NO)
    stop_while_waiting(restarts, first, monkeypatch)
    restarts.restart()
    second = Body(NO)
    error = failed(restarts.executor(), second)
    assert (first.count, second.count) == (1, 2)
    assert [context.attempt for context in second.contexts] == [2, 3]
    assert len(reported(error).context) == 3


def test_what_is_left_of_a_wait_is_waited_in_the_next_process(
    restarts: Restarts, monkeypatch: Any
) -> None:
    restarts.config.level1.base_delay_seconds = restarts.config.level1.max_delay_seconds = 60
    stop_while_waiting(restarts, Body(NO), monkeypatch)
    restarts.restart()
    restarts.clock.advance(20)
    execute(restarts.executor(), Body("yes"))
    assert sum(restarts.clock.slept) == pytest.approx(40)


def test_a_wait_that_is_over_is_not_waited_again(restarts: Restarts, monkeypatch: Any) -> None:
    stop_while_waiting(restarts, Body(NO), monkeypatch)
    restarts.restart()
    restarts.clock.advance(5)
    execute(restarts.executor(), Body("yes"))
    assert restarts.clock.slept == []


def test_asked_for_a_retry_an_unfinished_step_continues_with_what_it_has_left(
    restarts: Restarts, monkeypatch: Any
) -> None:
    stop_while_waiting(restarts, Body(NO), monkeypatch)
    restarts.restart()
    body = Body(NO)
    failed(restarts.executor().options(retry=True), body)
    assert body.contexts[0].attempt == 2
    assert body.count == 2
    assert restarts.clock.slept == pytest.approx([1, 1.5])
    body = Body(NO, NO, "yes")
    assert execute(restarts.executor().options(retry=True), body).final_output == "yes"


def test_each_round_of_level_2_has_its_own_attempts_and_the_feedback_of_all(
    any_executor: PersonaExecutor,
) -> None:
    body = Body(NO)
    failed(any_executor, body)
    token = round_number.set(2)
    try:
        failed(any_executor, body)
    finally:
        round_number.reset(token)
    assert body.count == 6
    if any_executor.workflow_id is not None:
        assert [len(context.feedback) for context in body.contexts] == [0, 1, 2, 3, 4, 5]


# --- whether to try again ------------------------------------------------------------------------


#: What is worth another attempt, and how many there are.
WORTH: list[tuple[Any, int]] = [
    (KeyError, 1),
    (ValueError, 3),
    (Exception, 3),
    ((KeyError, ValueError), 3),
    ([KeyError, ValueError], 3),
    (KeyError | ValueError, 3),
    ((), 1),
    (lambda error: "no" in str(error), 3),
    (lambda error: False, 1),
    (lambda error: 7.5, 3),
    (lambda error: timedelta(minutes=1), 3),
]


def test_retry_on_says_which_errors_are_worth_another_attempt(
    any_executor: PersonaExecutor,
) -> None:
    for number, (retry_on, count) in enumerate(WORTH):
        body = Body(NO)
        failed(any_executor.options(retry_on=retry_on), body, number)
        assert body.count == count, WORTH[number]


def test_retry_on_may_name_the_wait(any_executor: PersonaExecutor, clock: ManualClock) -> None:
    failed(any_executor.options(retry_on=lambda error: 2.5), Body(NO))
    assert clock.slept == pytest.approx([2.5, 2.5])


@pytest.mark.parametrize("answer", [None, "yes", -1, float("nan")])
def test_a_bad_answer_of_retry_on_is_an_error_after_the_failure(
    any_executor: PersonaExecutor, answer: Any
) -> None:
    body = Body(NO)
    with pytest.raises(TypeError, match="given as retry_on returned") as caught:
        execute(any_executor.options(retry_on=lambda error: answer), body)
    assert caught.value.__cause__ is NO
    assert body.count == 1
    assert any_executor.final_status is ExecutionStatus.FAILED
    assert any_executor.attempts[0].error_message == "no"


@pytest.mark.parametrize(
    "error",
    [
        UnrecoverableError("broken for good"),
        UnrecoverableError("because", original_error=TimeoutError("late")),
    ],
)
def test_what_the_task_calls_unrecoverable_is_not_tried_again(
    any_executor: PersonaExecutor, error: UnrecoverableError
) -> None:
    body = Body(error)
    caught = failed(any_executor, body)
    assert body.count == 1
    assert caught.message == "It cannot be recovered for step"
    assert caught.original_error is error
    assert not reported(caught).recoverable


def test_what_was_called_unrecoverable_stays_so_in_the_next_process(restarts: Restarts) -> None:
    first = failed(restarts.executor(), Body(UnrecoverableError("broken for good")))
    restarts.restart()
    again = failed(restarts.executor(), Body("not called"))
    assert again.message == first.message
    assert not reported(again).recoverable
    assert reported(again).to_dict() == reported(first).to_dict()


@pytest.mark.parametrize(
    "error, status",
    [
        (HelpNeeded("help", FailureReport("p", "UNKNOWN", "x")), ExecutionStatus.HELP_NEEDED),
        (CircuitBreakerOpen("open", 5, 300), ExecutionStatus.FAILED),
        (StorageError("the disk is full"), ExecutionStatus.FAILED),
    ],
)
def test_what_another_attempt_cannot_help_passes_through_and_counts(
    any_executor: PersonaExecutor, error: Exception, status: ExecutionStatus
) -> None:
    body = Body(error, NO)
    with pytest.raises(type(error)) as caught:
        execute(any_executor, body)
    assert caught.value is error
    assert body.count == 1
    assert any_executor.final_status is status
    failed(any_executor, body)
    assert body.count == (3 if any_executor.workflow_id else 4)


class OwnEnd(BaseException):
    """No ``Exception``, and nothing that this project knows."""


@pytest.mark.parametrize(
    "error, status",
    [
        (HelpNeeded("help", FailureReport("p", "UNKNOWN", "x")), "help_needed"),
        (CircuitBreakerOpen("open", 5, 300), "failed"),
        (TokenBudgetExceeded("spent", "p", 2, 1), "bankrupt"),
        (GovernanceViolation("no", "path"), "failed"),
        (ConfigurationError("a setting"), "failed"),
        (StorageError("another folder is full"), "failed"),
        (SystemExit(3), "cancelled"),
        (GeneratorExit(), "cancelled"),
        (OwnEnd(), "cancelled"),
        (BaseExceptionGroup("several", [OwnEnd()]), "cancelled"),
    ],
)
def test_however_a_body_ends_a_program_that_is_always_started_again_does_not_start_it_for_ever(
    restarts: Restarts, error: BaseException, status: str
) -> None:
    body = Body(error)
    for _ in range(3):
        if isinstance(error, TokenBudgetExceeded):
            assert execute(restarts.executor(), body).final_status is ExecutionStatus.BANKRUPT
        else:
            with pytest.raises(type(error)):
                execute(restarts.executor(), body)
        restarts.restart()
    failed(restarts.executor(), body)
    restarts.restart()
    caught = failed(restarts.executor(), body)
    assert body.count == 3
    assert [each.status.value for each in caught.result.attempts] == [status] * 3
    assert caught.context["called"] is False
    body = Body("yes")
    assert execute(restarts.executor().options(retry=True), body).final_output == "yes"


def test_an_error_tells_whether_the_task_was_called(restarts: Restarts) -> None:
    assert failed(restarts.executor(), Body(NO)).context["called"] is True
    assert failed(restarts.executor(), Body(NO)).context["called"] is False


@pytest.mark.parametrize(
    "errors, status",
    [
        ([NO, TokenBudgetExceeded("spent", "p", 2, 1)], ExecutionStatus.BANKRUPT),
        ([StorageError("full"), NO], ExecutionStatus.FAILED),
        ([ExceptionGroup("inner", [StorageError("full")])], ExecutionStatus.FAILED),
    ],
)
def test_a_group_with_one_of_these_passes_through(
    any_executor: PersonaExecutor, errors: list[Exception], status: ExecutionStatus
) -> None:
    body = Body(ExceptionGroup("several", errors))
    with pytest.raises(ExceptionGroup, match="several"):
        execute(any_executor, body)
    assert body.count == 1
    assert any_executor.final_status is status


def test_a_group_with_an_unrecoverable_error_is_unrecoverable(
    any_executor: PersonaExecutor,
) -> None:
    body = Body(ExceptionGroup("several", [NO, UnrecoverableError("for good")]))
    error = failed(any_executor, body)
    assert body.count == 1
    assert not reported(error).recoverable


def test_a_group_of_failures_is_a_failure(any_executor: PersonaExecutor) -> None:
    body = Body(ExceptionGroup("several", [NO, TimeoutError("late")]))
    assert reported(failed(any_executor, body)).error_category == "TIMEOUT"
    assert body.count == 3


@pytest.mark.parametrize("error", [RecoverableError("x"), ExecutionException("x"), MemoryError()])
def test_other_errors_are_failures(any_executor: PersonaExecutor, error: Exception) -> None:
    body = Body(error)
    failed(any_executor, body)
    assert body.count == 3


# --- when ----------------------------------------------------------------------------------------


def http_error(after: str) -> Exception:
    error = RuntimeError("429")
    error.response = SimpleNamespace(  # type: ignore[attr-defined]
        status_code=429, headers={"Retry-After": after}
    )
    return error


@pytest.mark.parametrize(
    "error, wait",
    [
        (RecoverableError("x", retry_after=9), 9),
        (RecoverableError("x", retry_after=0.5), 1),
        (http_error("12"), 12),
        (http_error("Tue, 01 Jan 2030 00:00:30 GMT"), 30),
    ],
)
def test_a_wait_that_was_asked_for_is_waited(
    any_executor: PersonaExecutor, clock: ManualClock, error: Exception, wait: float
) -> None:
    result = execute(any_executor, Body(error, "yes"))
    assert sum(clock.slept) == pytest.approx(wait)
    assert result.total_duration_seconds == pytest.approx(wait)


def test_a_wait_is_looked_at_every_few_seconds(
    any_executor: PersonaExecutor, clock: ManualClock
) -> None:
    execute(any_executor, Body(RecoverableError("x", retry_after=12), "yes"))
    assert clock.slept == pytest.approx([5, 5, 2])


def test_jitter_is_on_top_and_the_same_for_the_same_seed(restarts: Restarts) -> None:
    def waits(seed: int | None) -> list[float]:
        restarts.clock.slept.clear()
        restarts.config.level1.jitter = 0.5
        restarts.config.level1.jitter_seed = seed
        failed(restarts.executor().options(force=True), Body(NO))
        return list(restarts.clock.slept)

    first, again, other, unseeded = waits(1), waits(1), waits(2), waits(None)
    assert first == pytest.approx(again)
    assert first != pytest.approx(other)
    assert first != pytest.approx(unseeded)
    for one, two in (first, other, unseeded):
        assert 1.0 <= one <= 1.5
        assert 1.5 <= two <= 2.25


def test_time_can_be_the_limit(any_executor: PersonaExecutor, clock: ManualClock) -> None:
    body = Body(NO)
    error = failed(any_executor.options(max_attempts=50, max_elapsed_seconds=10), body)
    # after 0, 1, 2.5, 4.75 and 8.125 seconds; the next would begin after 13.125
    assert body.count == 5
    assert "the limit is 10 s" in error.context["reason"]


def test_a_limit_of_no_time_allows_one_attempt(any_executor: PersonaExecutor) -> None:
    body = Body(NO)
    failed(any_executor.options(max_elapsed_seconds=0), body)
    assert body.count == 1


def test_a_corrected_clock_does_not_change_the_limit(
    any_executor: PersonaExecutor, clock: ManualClock
) -> None:
    async def jump() -> None:
        clock.jump(86_400)
        raise NO

    with pytest.raises(UnrecoverableError) as caught:
        execute(any_executor.options(max_elapsed_seconds=100), jump)
    assert caught.value.result.attempt_count == 3


def test_the_time_before_a_restart_counts(restarts: Restarts, monkeypatch: Any) -> None:
    options = {"max_elapsed_seconds": 60, "max_attempts": 50}
    stop_while_waiting(restarts, Body(NO), monkeypatch, **options)
    restarts.restart()
    restarts.clock.advance(59)
    body = Body(NO)
    failed(restarts.executor().options(**options), body)  # type: ignore[arg-type]
    assert body.count == 1


# --- strategies ----------------------------------------------------------------------------------


def with_strategy(restarts: Restarts, strategy: RecoveryStrategy, **given: Any) -> PersonaExecutor:
    restarts.config.level1.recovery_strategy = strategy
    return restarts.executor(**given)


def test_the_same_again_does_not_wait_unless_it_was_asked_to(restarts: Restarts) -> None:
    executor = with_strategy(restarts, RecoveryStrategy.RETRY_SAME)
    body = Body(NO, RecoverableError("x", retry_after=3), "yes")
    execute(executor, body)
    assert restarts.clock.slept == pytest.approx([3])


def test_escalating_hands_over_after_the_first_failure(restarts: Restarts) -> None:
    body = Body(NO)
    error = failed(with_strategy(restarts, RecoveryStrategy.ESCALATE), body)
    assert body.count == 1
    assert reported(error).recoverable


def test_skipping_returns_a_result_that_failed_now_and_later(restarts: Restarts) -> None:
    body = Body(NO)
    executor = with_strategy(restarts, RecoveryStrategy.SKIP)
    result = execute(executor, body)
    assert (result.success, result.final_status, result.final_output) == (
        False, ExecutionStatus.FAILED, None,
    )  # fmt: skip
    assert result.failure_report is not None
    assert result.failure_report.details == "no"
    restarts.restart()
    again = execute(restarts.executor(), body)
    assert (again.success, again.attempt_count, body.count) == (False, 3, 3)


# --- healing -------------------------------------------------------------------------------------


class Healer:
    """Answers what it is told, and notes what it was asked."""

    def __init__(self, status: object) -> None:
        self.status = status
        self.asked: list[Failure] = []
        self.threads: set[int] = set()

    def heal_single(self, failure: Failure) -> object:
        self.asked.append(failure)
        self.threads.add(threading.get_ident())
        if isinstance(self.status, Exception):
            raise self.status
        return SimpleNamespace(status=self.status)


@pytest.mark.parametrize("status", ["FIXED", "fixed", SimpleNamespace(value="fixed")])
def test_what_was_fixed_is_tried_again_at_once_and_recovers(
    restarts: Restarts, status: object
) -> None:
    healer = Healer(status)
    executor = restarts.executor(healing_engine=healer)
    result = execute(executor, Body(TimeoutError("late"), "yes"))
    assert (result.final_status, result.recovery_applied, result.success) == (
        ExecutionStatus.RECOVERED, True, True,
    )  # fmt: skip
    assert [each.healing_applied for each in result.attempts] == [True, False]
    assert restarts.clock.slept == []
    (failure,) = healer.asked
    assert isinstance(failure, Failure)
    assert (failure.context["persona"], failure.context["error_category"]) == (
        "developer", "TIMEOUT",
    )  # fmt: skip
    assert (failure.failure_type, failure.error_message, failure.source) == (
        FailureType.RUNTIME_ERROR, "late", "execution",
    )  # fmt: skip
    restarts.restart()
    again = execute(restarts.executor(), Body("not called"))
    assert again.final_status is ExecutionStatus.RECOVERED
    assert again.recovery_applied


@pytest.mark.parametrize("status", ["AWAITING_REVIEW", "FAILED", None, 5])
def test_what_was_not_fixed_waits_and_does_not_recover(restarts: Restarts, status: object) -> None:
    result = execute(restarts.executor(healing_engine=Healer(status)), Body(NO, "yes"))
    assert result.final_status is ExecutionStatus.SUCCESS
    assert restarts.clock.slept == pytest.approx([1])


@pytest.mark.parametrize("durable", [True, False])
def test_what_a_healer_has_to_say_is_given_to_the_next_attempt(
    restarts: Restarts, durable: bool
) -> None:
    class Diagnosis:
        def heal_single(self, failure: Failure) -> object:
            return SimpleNamespace(
                status="FAILED", feedback=f"{failure.error_message}: quote the keys"
            )

    def task() -> list[str]:
        if current().attempt == 1:
            raise NO
        return current().feedback

    healer = Diagnosis()
    executor = (
        restarts.executor(healing_engine=healer)
        if durable
        else PersonaExecutor(restarts.config, healing_engine=healer)
    )
    result = execute(executor, task)
    assert result.final_output == ["Attempt 1 failed: UNKNOWN: no\nno: quote the keys"]
    assert result.attempts[0].metrics["feedback"] == "no: quote the keys"


@pytest.mark.parametrize("feedback", ["", None, 5, ["a"]])
def test_feedback_that_is_no_text_is_none(restarts: Restarts, feedback: object) -> None:
    class Odd:
        def heal_single(self, _: Failure) -> object:
            return SimpleNamespace(status="FAILED", feedback=feedback)

    result = execute(restarts.executor(healing_engine=Odd()), Body(NO, "yes"))
    assert "feedback" not in result.attempts[0].metrics


def test_a_healer_that_fails_is_no_second_failure_and_is_not_forgotten(
    any_executor: PersonaExecutor, restarts: Restarts
) -> None:
    durable = any_executor.workflow_id is not None
    given = {"healing_engine": Healer(KeyError("broken"))}
    executor = restarts.executor(**given) if durable else PersonaExecutor(restarts.config, **given)  # type: ignore[arg-type]
    result = execute(executor, Body(NO, "yes"))
    assert result.final_output == "yes"
    assert result.attempts[0].metrics["healing_error"] == "KeyError: 'broken'"


def test_a_healer_that_blocks_has_a_thread_and_an_async_one_the_loop() -> None:
    healer = Healer("FIXED")
    executor = PersonaExecutor(healing_engine=healer)
    execute(executor, Body(NO, "yes"))
    assert threading.get_ident() not in healer.threads

    class AsyncHealer(Healer):
        async def heal_single(self, failure: Failure) -> object:
            await asyncio.sleep(0)
            return super().heal_single(failure)

    healer = AsyncHealer("FIXED")
    result = execute(PersonaExecutor(healing_engine=healer), Body(NO, "yes"))
    assert result.final_status is ExecutionStatus.RECOVERED
    assert healer.threads == {threading.get_ident()}


class SilentError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("I will not")


class OddAnswer:
    @property
    def status(self) -> str:
        raise SilentError


@pytest.mark.parametrize(
    "answer, caught",
    [
        (ValueError("half \ud800"), "ValueError: half \\ud800"),
        (SilentError(), "SilentError: SilentError, whose __str__ raised an error"),
        (OddAnswer(), "SilentError: SilentError, whose __str__ raised an error"),
    ],
)
def test_whatever_a_healer_raises_is_told(restarts: Restarts, answer: object, caught: str) -> None:
    class Odd:
        def heal_single(self, _: Failure) -> object:
            if isinstance(answer, Exception):
                raise answer
            return answer

    result = execute(restarts.executor(healing_engine=Odd()), Body(NO, "yes"))
    assert result.attempts[0].metrics["healing_error"] == caught


def test_a_healer_has_as_long_as_an_attempt(restarts: Restarts) -> None:
    class Endless:
        async def heal_single(self, _: Failure) -> None:
            await asyncio.sleep(30)

    executor = restarts.executor(healing_engine=Endless()).options(timeout=0.05)
    result = execute(executor, Body(NO, "yes"))
    assert result.attempts[0].metrics["healing_error"] == "it was not finished within 0.05 seconds"


def test_the_last_failure_is_not_healed_for_nobody_would_try_again(restarts: Restarts) -> None:
    healer = Healer("FIXED")
    failed(restarts.executor(healing_engine=healer), Body(NO))
    assert len(healer.asked) == 2


@pytest.mark.parametrize(
    "changed",
    [
        {"enable_self_healing": False},
        {"recovery_strategy": RecoveryStrategy.RETRY_WITH_BACKOFF},
        {"recovery_strategy": RecoveryStrategy.RETRY_SAME},
    ],
)
def test_healing_can_be_turned_off(restarts: Restarts, changed: dict[str, Any]) -> None:
    for name, value in changed.items():
        setattr(restarts.config.level1, name, value)
    healer = Healer("FIXED")
    result = execute(restarts.executor(healing_engine=healer), Body(NO, "yes"))
    assert healer.asked == []
    assert result.final_status is ExecutionStatus.SUCCESS


def test_a_stop_while_healing_leaves_a_failure_and_no_interruption(restarts: Restarts) -> None:
    class Stopped:
        async def heal_single(self, failure: Failure) -> object:
            task = asyncio.current_task()
            assert task is not None
            task.cancel()
            return await asyncio.Event().wait()

    with pytest.raises(asyncio.CancelledError):
        execute(restarts.executor(healing_engine=Stopped()), Body(NO))
    restarts.restart()
    body = Body(NO)
    error = failed(restarts.executor(), body)
    assert body.count == 2
    assert [each.status.value for each in error.result.attempts] == [
        "retrying", "retrying", "failed",
    ]  # fmt: skip


# --- source --------------------------------------------------------------------------------------


@for_each(
    "source",
    [
        "def f(:\n",
        "class A\n  x = 1",
        "import os\nx = = 5",
        "from x import",
        "\n\ndef f(): return (",
    ],
)
def test_source_that_does_not_parse_is_a_failure_that_is_fed_back(
    any_executor: PersonaExecutor, source: str
) -> None:
    body = Body(source, "def f():\n    return 1\n")
    result = execute(any_executor, body, "step", source)
    assert result.final_output == "def f():\n    return 1\n"
    (caught,) = body.contexts[1].feedback
    assert caught.startswith("Attempt 1 failed: SYNTAX: the result is Python source that does not")
    assert result.attempts[0].metrics["error_category"] == "SYNTAX"
    assert result.attempts[0].error_type == "RecoverableError"


def test_indented_source_is_source() -> None:
    text = "    def f():\n        return 1\n"
    assert execute(quick(), Body(text)).final_output == text


def test_warnings_about_source_are_not_ours_to_give(recwarn: pytest.WarningsRecorder) -> None:
    execute(quick(), Body("def f():\n    return '\\d'\n"))
    assert not recwarn.list


def test_source_that_is_too_deep_to_parse_is_a_failure() -> None:
    body = Body("def f(): return " + "-" * 100_000 + "1")
    assert "does not parse" in reported(failed(quick(), body)).details


@for_each("text", ["defer it", "prose: def f(:", "", "classify", "print('x'"])
def test_what_does_not_look_like_source_is_not_parsed(
    any_executor: PersonaExecutor, text: str
) -> None:
    assert execute(any_executor, Body(text), "step", text).final_output == text


def test_parsing_can_be_turned_off() -> None:
    executor = quick(enable_syntax_validation=False)
    assert execute(executor, Body("def f(:")).final_output == "def f(:"


# --- feedback and what is kept of errors ---------------------------------------------------------


def test_each_attempt_is_told_what_failed_before(any_executor: PersonaExecutor) -> None:
    body = Body(KeyError("missing"), ConnectionError("refused"), "yes")
    execute(any_executor, body)
    assert [context.feedback for context in body.contexts] == [
        [],
        ["Attempt 1 failed: UNKNOWN: 'missing'"],
        ["Attempt 1 failed: UNKNOWN: 'missing'", "Attempt 2 failed: API_ERROR: refused"],
    ]


def test_feedback_continues_after_a_restart(restarts: Restarts, monkeypatch: Any) -> None:
    stop_while_waiting(restarts, Body(NO), monkeypatch)
    restarts.restart()
    body = Body("yes")
    execute(restarts.executor(), body)
    assert body.contexts[0].feedback == ["Attempt 1 failed: UNKNOWN: no"]


def test_a_stop_is_no_feedback(restarts: Restarts) -> None:
    with pytest.raises(KeyboardInterrupt):
        execute(restarts.executor(), Body(NO, KeyboardInterrupt()))
    restarts.restart()
    body = Body("yes")
    execute(restarts.executor(), body)
    assert body.contexts[0].feedback == ["Attempt 1 failed: UNKNOWN: no"]


@pytest.mark.parametrize(
    "error, message",
    [
        (SilentError(), "SilentError, whose __str__ raised an error"),
        (ValueError(), "ValueError"),
        (ValueError("half \ud800"), "half \\ud800"),
        (ValueError("x" * 10_000), "x" * 2_000),
    ],
    ids=["its __str__ raises", "it is empty", "a lone surrogate", "it is long"],
)
def test_every_error_can_be_recorded(restarts: Restarts, error: Exception, message: str) -> None:
    failed(restarts.executor(), Body(error))
    restarts.restart()
    caught = failed(restarts.executor(), Body("not called"))
    assert caught.result.attempts[0].error_message == message
    assert len(caught.result.attempts[0].error_traceback or "") <= 4_000


def a_syntax_error_of_odd_parts() -> Exception:
    error = SyntaxError("bad")
    error.lineno, error.text, error.filename = "x", 5, object()  # type: ignore[assignment]
    return error


def a_deep_group() -> Exception:
    error: Exception = ValueError("the leaf")
    for _ in range(3_000):
        error = ExceptionGroup("group", [error])
    return error


@pytest.mark.parametrize(
    "error",
    [
        UnrecoverableError("for good", failure_report={"a": 1}),  # type: ignore[arg-type]
        UnrecoverableError("for good", original_error="oops"),  # type: ignore[arg-type]
        RecoverableError("again", retry_after="soon"),  # type: ignore[arg-type]
        a_syntax_error_of_odd_parts(),
        SyntaxError("m", ("file", 1, "offset", "text")),  # type: ignore[arg-type]
        a_deep_group(),
    ],
)
def test_of_an_odd_error_comes_an_error_that_can_be_shown(
    any_executor: PersonaExecutor, error: Exception
) -> None:
    caught = failed(any_executor, Body(error))
    assert "for step" in str(caught)
    assert caught.to_dict()["context"]["called"] is True


def test_an_error_that_was_raised_very_often_is_recorded_quickly(
    any_executor: PersonaExecutor,
) -> None:
    error = ValueError("the same")
    for _ in range(5_000):
        try:
            raise error
        except ValueError:
            pass

    async def work() -> None:
        raise error

    started = time.process_time()
    caught = failed(any_executor, work)
    assert time.process_time() - started < 1
    assert "ValueError: the same" in (caught.result.attempts[0].error_traceback or "")


@pytest.mark.parametrize("sync", [True, False])
def test_a_task_that_raises_stop_iteration_fails(any_executor: PersonaExecutor, sync: bool) -> None:
    def stop() -> None:
        raise StopIteration

    async def stop_too() -> None:
        raise StopIteration

    error = failed(any_executor, stop if sync else stop_too)
    assert "StopIteration" in reported(error).details


def test_a_class_whose_objects_can_be_awaited_is_called_like_a_function() -> None:
    class Maker:
        async def __call__(self) -> str:
            return "called"

    assert isinstance(execute(quick(), Maker).final_output, Maker)
    assert execute(quick(), Maker()).final_output == "called"


def test_a_function_that_returns_a_coroutine_is_awaited() -> None:
    body = Body("awaited")
    assert execute(quick(), lambda: body("a word")).final_output == "awaited"


def test_a_store_that_fails_ends_the_execution(restarts: Restarts, monkeypatch: Any) -> None:
    executor = restarts.executor()
    assert executor._run is not None

    def full(*_: object, **__: object) -> list[int]:
        raise StorageError("the disk is full")

    monkeypatch.setattr(executor._run.store, "append", full)
    body = Body("done")
    with pytest.raises(StorageError, match="the disk is full"):
        execute(executor, body)
    assert body.count == 0
    assert executor.final_status is ExecutionStatus.FAILED
    monkeypatch.undo()
