"""Level 2 with a workflow id: rounds, the wait between them and the end survive a restart."""

from __future__ import annotations

import asyncio
import textwrap
from typing import TYPE_CHECKING, Any

import pytest

from maestro_hive.engine.config import ExecutionConfig, Level1Config, Level2Config
from maestro_hive.engine.errors import (
    CircuitBreakerOpen,
    HelpNeeded,
    UnrecoverableError,
)
from maestro_hive.engine.open_run import open_run
from maestro_hive.maestro.state.records import EntryKind, NewEntry
from maestro_hive.testing import ManualClock, MemoryStore
from maestro_hive.unified_execution.persona_executor import PersonaExecutor
from maestro_hive.unified_execution.safety_retry import CircuitBreaker, SafetyRetryWrapper
from tests.python_processes import run_python
from tests.unified_execution.failing_tasks import Task, failing

if TYPE_CHECKING:
    import subprocess

    from maestro_hive.engine.escalation import EscalationCase

RUN = "run-1"


class RecordingEscalation:
    """Takes cases, and answers with a ticket, or with what it was told to raise."""

    def __init__(self, *answers: str | BaseException) -> None:
        self.answers = list(answers)
        self.cases: list[EscalationCase] = []

    async def escalate(self, case: EscalationCase) -> str | None:
        self.cases.append(case)
        answer = self.answers.pop(0) if self.answers else f"MD-{len(self.cases)}"
        if isinstance(answer, BaseException):
            raise answer
        return answer


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def quick(config: ExecutionConfig) -> ExecutionConfig:
    config.level1 = Level1Config(base_delay_seconds=0)
    config.level2 = Level2Config(jitter=0, circuit_breaker_threshold=99)
    return config


class Process:
    """What a process does with a run: each ``run`` is another one's life, from start to end."""

    def __init__(self, config: ExecutionConfig, clock: ManualClock) -> None:
        self.config = config
        self.escalation = RecordingEscalation()
        self.store = MemoryStore(clock=clock)
        self.waiting = asyncio.Event()
        self.options: dict[str, Any] = {}

    def run(
        self, task: Any, *args: Any, name: str = "draft", stop_when_it_waits: bool = False
    ) -> Any:
        return asyncio.run(self._run(task, args, name, stop=stop_when_it_waits))

    async def _run(self, task: Any, args: tuple[Any, ...], name: str, *, stop: bool) -> Any:
        with (
            PersonaExecutor(self.config, "writer", workflow_id=RUN) as executor,
            SafetyRetryWrapper(
                self.config, workflow_id=RUN, store=self.store, escalation=self.escalation
            ) as wrapper,
        ):
            execute = executor.options(**self.options).execute
            making = wrapper.execute_safe(execute, task, name, *args)
            if not stop:
                return await making
            doing = asyncio.create_task(making)
            await self.waiting.wait()
            doing.cancel()
            with pytest.raises(asyncio.CancelledError):
                await doing
            return None


@pytest.fixture
def process(quick: ExecutionConfig, clock: ManualClock) -> Process:
    return Process(quick, clock)


def raises_help_needed(process: Process, task: Any, *args: Any, **options: Any) -> HelpNeeded:
    with pytest.raises(HelpNeeded) as raised:
        process.run(task, *args, **options)
    return raised.value


def test_rounds_made_and_the_wait_started_count_after_a_restart(
    process: Process, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def sleep_for_ever(seconds: float) -> None:
        process.waiting.set()
        await asyncio.Event().wait()

    task = failing()
    monkeypatch.setattr(clock, "sleep", sleep_for_ever)
    process.run(task, stop_when_it_waits=True)
    assert len(task.calls) == 3
    monkeypatch.undo()
    clock.advance(2)
    error = raises_help_needed(process, task)
    assert sum(clock.slept) == 3  # of five, two had passed
    assert task.rounds == [1, 1, 1, 2, 2, 2]
    assert error.total_attempts == 6
    assert [each["error_message"] for each in error.failure_report.context] == [
        f"no {number}" for number in range(1, 7)
    ]


def test_an_exhausted_execution_raises_the_recorded_failure_and_calls_nothing(
    process: Process,
) -> None:
    task = failing()
    first = raises_help_needed(process, task)
    assert first.jira_ticket == "MD-1"
    again = raises_help_needed(process, task)
    assert len(task.calls) == 6
    assert len(process.escalation.cases) == 1
    assert str(again) == str(first)
    for name in ("jira_ticket", "total_attempts", "suggested_actions", "failure_report"):
        assert getattr(again, name) == getattr(first, name)
    assert again.result is not None
    assert again.result.jira_ticket == "MD-1"
    assert [each.attempt_count for each in again.result.level1_results] == [3, 3]
    assert again.suggested_actions[-1] == (
        "then retry it: `maestro retry run-1`, or options(retry=True) of an executor; until then, run run-1 raises the same failure again"
    )


def test_the_end_that_was_not_recorded_comes_after_the_restart(process: Process) -> None:
    process.escalation = RecordingEscalation(
        asyncio.CancelledError()
    )  # killed while the ticket is made
    task = failing()
    with pytest.raises(asyncio.CancelledError):
        process.run(task)
    first = process.escalation.cases[0]
    process.escalation = RecordingEscalation()
    assert raises_help_needed(process, task).jira_ticket == "MD-1"
    assert len(task.calls) == 6
    assert process.escalation.cases[0].effect_key == first.effect_key
    assert process.escalation.cases[0].description == first.description


def test_a_retry_starts_the_rounds_again(process: Process, quick: ExecutionConfig) -> None:
    task = failing(6)
    raises_help_needed(process, task)
    held = open_run(quick.state, RUN)
    held.append([NewEntry(EntryKind.RETRIED)])
    held.close()
    result = process.run(task)
    assert result.success
    assert len(task.calls) == 7


@pytest.mark.parametrize("option", ["retry", "force"])
def test_an_executor_told_to_start_over_starts_the_rounds_again(
    process: Process, option: str
) -> None:
    task = failing(6)
    raises_help_needed(process, task)
    process.options = {option: True}
    result = process.run(task)
    assert result.success
    assert result.level2_attempts == 1
    assert len(task.calls) == 7


def test_another_input_or_name_is_another_execution(process: Process) -> None:
    raises_help_needed(process, failing(), 1)
    assert process.run(Task(), 2).success
    assert process.run(Task(), 1, name="final").success
    task = Task()
    raises_help_needed(process, task, 1)
    assert task.calls == []


def test_a_step_that_is_completed_is_returned_and_not_called(process: Process) -> None:
    task = failing(4)
    assert process.run(task).level2_attempts == 2
    again = process.run(task)
    assert len(task.calls) == 5
    assert again.success
    assert [each.attempt_count for each in again.level1_results] == [3, 2]
    assert again.level1_results[-1].final_output == "done"


def test_the_same_execution_twice_at_once_is_one(process: Process) -> None:
    task = failing()

    async def both() -> list[Any]:
        return await asyncio.gather(
            *(process._run(task, (), "draft", stop=False) for _ in range(2)),
            return_exceptions=True,
        )

    errors = asyncio.run(both())
    assert [type(error) for error in errors] == [HelpNeeded, HelpNeeded]
    assert len(task.calls) == 6
    assert len(process.escalation.cases) == 1


def test_a_refusal_of_the_second_round_leaves_it_for_later(
    process: Process, clock: ManualClock
) -> None:
    breaker = CircuitBreaker(3, name="writer", store=process.store)
    process.config.level2 = Level2Config(jitter=0, circuit_breaker_threshold=3)
    breaker.record_failure()
    breaker.record_failure()
    task = failing(3)
    with pytest.raises(CircuitBreakerOpen) as raised:
        process.run(task)
    assert raised.value.context["rounds"] == 1
    clock.advance(300)
    result = process.run(task)
    assert result.success
    assert task.rounds == [1, 1, 1, 2]
    assert breaker.state == "closed"


def test_what_was_marked_unrecoverable_is_not_retried_after_a_restart_either(
    process: Process,
) -> None:
    task = Task(UnrecoverableError("hopeless"))
    for _ in range(2):
        with pytest.raises(UnrecoverableError):
            process.run(task)
    assert len(task.calls) == 1


@pytest.mark.filterwarnings("ignore::maestro_hive.engine.plan.UnencodableInputWarning")
def test_texts_that_no_journal_can_hold_are_stored_readable(process: Process) -> None:
    class OddError(Exception):
        def __str__(self) -> str:
            raise ZeroDivisionError

    task = Task(OddError(), RuntimeError("half \ud800" + "x" * 10_000))

    async def run() -> None:
        with SafetyRetryWrapper(
            process.config, workflow_id=RUN, store=process.store, escalation=process.escalation
        ) as wrapper:
            await wrapper.execute_safe(task, task_name="odd")

    for _ in range(2):
        with pytest.raises(HelpNeeded) as raised:
            asyncio.run(run())
        assert "half \\ud800xxx" in raised.value.failure_report.details
    assert len(process.escalation.cases) == 1
    assert len(task.calls) == 2


def test_what_is_recorded_needs_no_permit_and_makes_no_probe(
    process: Process, clock: ManualClock
) -> None:
    process.run(Task(output="kept"))
    breaker = CircuitBreaker(1, 60, name="writer", store=process.store)
    breaker.record_failure()
    again = Task()
    for _ in range(2):
        result = process.run(again)
        assert result.level1_results[0].final_output == "kept"
        clock.advance(60)
    assert again.calls == []
    assert breaker.state == "open"  # a result of yesterday proves nothing about today


# --- with real processes -----------------------------------------------------------------------

_PROGRAM = textwrap.dedent("""
    import asyncio, os, signal, sys
    from maestro_hive.engine.config import (
        ExecutionConfig, Level1Config, Level2Config, StateConfig)
    from maestro_hive.engine.errors import HelpNeeded
    from maestro_hive.unified_execution.persona_executor import PersonaExecutor
    from maestro_hive.unified_execution.safety_retry import SafetyRetryWrapper

    folder, die_at = sys.argv[1], int(sys.argv[2])
    config = ExecutionConfig(
        level1=Level1Config(base_delay_seconds=0, max_attempts=2),
        level2=Level2Config(base_delay_seconds=0.01, jitter=0),
        state=StateConfig(state_dir=folder + "/state"),
    )

    async def work():
        with open(folder + "/calls", "a") as log:
            log.write("call\\n")
        with open(folder + "/calls") as log:
            number = len(log.readlines())
        if number == die_at:
            os.kill(os.getpid(), signal.SIGKILL)
        raise RuntimeError(f"no {number}")

    class Jira:
        async def create_ticket(self, project_key, summary, description, issue_type, labels):
            with open(folder + "/tickets", "a") as log:
                log.write(summary + "\\n")
            return "MD-7"

    async def main():
        executor = PersonaExecutor(config, "writer", workflow_id="run-1")
        wrapper = SafetyRetryWrapper(config, Jira(), workflow_id="run-1")
        try:
            await wrapper.execute_safe(executor.execute, work, task_name="draft")
        except HelpNeeded as error:
            print(error.total_attempts, error.jira_ticket)

    asyncio.run(main())
""")


@pytest.mark.parametrize("kill_at", [1, 2, 3, 4, 5])
def test_killed_in_any_attempt_the_rounds_continue_where_they_were(
    tmp_path: Any, kill_at: int
) -> None:
    def start() -> subprocess.CompletedProcess[str]:
        return run_python(_PROGRAM, tmp_path, kill_at)

    first = start()
    assert first.returncode == (-9 if kill_at < 5 else 0), first.stderr
    second, third = start(), start()
    interrupted = kill_at < 5
    assert second.stdout.split() == [str(4 + interrupted), "MD-7"], second.stderr
    assert third.stdout == second.stdout
    assert len((tmp_path / "calls").read_text().split()) == 4 + interrupted
    assert len((tmp_path / "tickets").read_text().splitlines()) == 1
