"""How an attempt ends when it does not end by itself: too late, stopped, or with its process."""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import subprocess
import sys
import threading
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import pytest

from maestro_hive.engine.context import current
from maestro_hive.engine.errors import ExecutionException
from maestro_hive.maestro.state.projections import fold
from maestro_hive.unified_execution import HelpNeeded, UnrecoverableError
from maestro_hive.unified_execution.persona_executor import (
    ExecutionResult,
    ExecutionStatus,
    PersonaExecutor,
)
from tests.timing import LoopTime
from tests.unified_execution.restarts import (
    Body,
    Restarts,
    any_restarts,  # noqa: F401 - a fixture
    execute,
    failed,
    kill_during,
    killable_restarts,  # noqa: F401 - a fixture
    make_any_executor,  # noqa: F401 - a fixture
    persona_state,
    reported,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from maestro_hive.maestro.state.projections import RunState

NO = ValueError("no")


@pytest.fixture
def loop_time(monkeypatch: pytest.MonkeyPatch) -> LoopTime:
    return LoopTime(monkeypatch)


# --- timeouts ------------------------------------------------------------------------------------


def test_an_async_task_that_takes_too_long_is_cancelled_and_it_is_a_timeout(
    any_executor: PersonaExecutor,
) -> None:
    cancelled: list[bool] = []

    async def slow() -> None:
        try:
            await asyncio.sleep(30)
        finally:
            cancelled.append(True)

    error = failed(any_executor.options(timeout=0.02, max_attempts=2), slow)
    assert cancelled == [True, True]
    assert reported(error).error_category == "TIMEOUT"
    assert reported(error).details == "'step' was not done within 0.02 seconds"
    assert [each.metrics["error_category"] for each in error.result.attempts] == ["TIMEOUT"] * 2


def test_the_timeout_of_the_configuration_holds(restarts: Restarts) -> None:
    restarts.config.timeout_seconds = 0.02
    restarts.config.level1.max_attempts = 1
    over = threading.Event()
    try:
        assert "0.02 seconds" in str(failed(restarts.executor(), lambda: over.wait(30)))
    finally:
        over.set()


def test_a_task_that_will_not_be_cancelled_is_late_all_the_same(
    any_executor: PersonaExecutor,
) -> None:
    async def stubborn() -> str:
        try:
            await asyncio.sleep(30)
        except asyncio.CancelledError:
            return "a late result"
        return "never"

    error = failed(any_executor.options(timeout=0.02, max_attempts=1), stubborn)
    assert reported(error).error_category == "TIMEOUT"


def test_a_timeout_of_the_tasks_own_is_told_as_its_own(any_executor: PersonaExecutor) -> None:
    error = failed(any_executor, Body(TimeoutError("the model is slow")))
    assert reported(error).details == "the model is slow"


def test_the_late_result_of_a_thread_is_refused_and_its_spending_counted(
    restarts: Restarts, loop_time: LoopTime
) -> None:
    release, done = threading.Event(), threading.Event()
    late: list[object] = []
    calls: list[int] = []
    loops: list[asyncio.AbstractEventLoop] = []

    def slow() -> str:
        context = current()
        calls.append(context.attempt)
        if len(calls) > 1:
            return "in time"
        loop_time.advance_from_thread(40, loops[0])
        release.wait(30)
        context.spend(tokens=40)
        wishes: list[Callable[[], None]] = [
            lambda: context.save_progress(current_step="late"),
            lambda: context.history.append("late"),
            lambda: context.memory.update(late=True),
            context.heartbeat,
        ]
        for wish in wishes:
            try:
                wish()
            except ExecutionException as error:
                late.append(str(error))
        done.set()
        return "late"

    async def main(executor: PersonaExecutor) -> ExecutionResult:
        loops.append(asyncio.get_running_loop())
        return await executor.options(timeout=30).execute(slow, "step")

    executor = restarts.executor()
    result = asyncio.run(main(executor))
    assert (result.final_output, calls) == ("in time", [1, 2])
    assert result.attempts[0].error_type == "TimeoutError"
    release.set()
    assert done.wait(30)
    assert len(late) == 4
    assert all("attempt 1 of 'step' is over" in str(each) for each in late)
    assert executor.get_token_usage() == 40
    again = execute(executor, slow)
    assert again.final_output == "in time"
    assert [each.tokens_used for each in again.attempts] == [40, 0]
    assert again.total_tokens_used == 40


def test_a_heartbeat_moves_the_deadline(any_executor: PersonaExecutor, loop_time: LoopTime) -> None:
    async def slow() -> str:
        for _ in range(3):
            loop_time.advance(20)
            current().heartbeat()
            await asyncio.sleep(0.001)
        return "done"

    assert execute(any_executor.options(timeout=30), slow).final_output == "done"


def test_a_heartbeat_from_a_thread_moves_the_deadline(
    any_executor: PersonaExecutor, loop_time: LoopTime
) -> None:
    async def main() -> ExecutionResult:
        loop = asyncio.get_running_loop()

        def slow() -> str:
            for _ in range(3):
                loop_time.advance_from_thread(20, loop)
                current().heartbeat()
            return "done"

        return await any_executor.options(timeout=30).execute(slow, "step")

    assert asyncio.run(main()).final_output == "done"


_HANGS = """
import sys, time
from maestro_hive.unified_execution import ExecutionConfig, StateConfig, UnrecoverableError
from maestro_hive.unified_execution.persona_executor import PersonaExecutor
import asyncio
config = ExecutionConfig(state=StateConfig(state_dir=sys.argv[1]))
executor = PersonaExecutor(config, workflow_id="w").options(timeout=0.1, max_attempts=1)
try:
    asyncio.run(executor.execute(lambda: time.sleep(3600), "hang"))
except UnrecoverableError as error:
    print(error.failure_report.error_category)
"""


def test_a_process_can_end_while_a_thread_hangs(tmp_path: Path) -> None:
    words = [sys.executable, "-c", _HANGS, str(tmp_path / "state")]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=60, check=True)
    assert (ended.stdout, ended.stderr) == ("TIMEOUT\n", "")


# --- being stopped -------------------------------------------------------------------------------


def test_a_cancellation_is_recorded_and_raised_and_counts_as_nothing(
    any_executor: PersonaExecutor, restarts: Restarts
) -> None:
    async def main() -> None:
        started = asyncio.Event()

        async def slow() -> None:
            started.set()
            await asyncio.sleep(30)

        for _ in range(7):
            started.clear()
            running = asyncio.create_task(any_executor.execute(slow, "step"))
            await started.wait()
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
            assert running.cancelled()
            assert any_executor.final_status is ExecutionStatus.CANCELLED
            assert any_executor.attempts[-1].status is ExecutionStatus.CANCELLED
            assert any_executor.attempts[-1].ended_at is not None

    asyncio.run(main())
    body = Body(NO)
    failed(any_executor, body)
    assert body.count == 3


@pytest.mark.parametrize(
    "kind, status", [(KeyboardInterrupt, "interrupted"), (SystemExit, "cancelled")]
)
@pytest.mark.parametrize("sync", [True, False])
def test_an_interrupt_is_recorded_and_raised(
    restarts: Restarts, kind: type[BaseException], status: str, sync: bool
) -> None:
    def interrupted() -> None:
        raise kind

    async def interrupted_too() -> None:
        raise kind

    executor = restarts.executor()
    with pytest.raises(kind):
        execute(executor, interrupted if sync else interrupted_too)
    assert executor.final_status is ExecutionStatus.CANCELLED
    restarts.restart()
    executor = restarts.executor()
    result = execute(executor, Body("yes"))
    assert [each.status.value for each in result.attempts] == [status, "success"]


async def cancels_itself() -> None:
    task = asyncio.current_task()
    assert task is not None
    task.cancel()
    await asyncio.sleep(30)


async def cancels_itself_later() -> None:
    await asyncio.sleep(0)
    await cancels_itself()


@pytest.mark.parametrize(
    "task, kind",
    [
        (Body(KeyboardInterrupt()), KeyboardInterrupt),
        (cancels_itself, asyncio.CancelledError),
        (cancels_itself_later, asyncio.CancelledError),
    ],
)
def test_stops_that_nobody_asked_for_have_the_limit_of_deaths(
    restarts: Restarts, task: Callable[..., Any], kind: type[BaseException]
) -> None:
    restarts.config.level1.max_interruptions = 2
    for _ in range(3):
        with pytest.raises(kind):
            execute(restarts.executor(), task)
        restarts.restart()
    error = failed(restarts.executor(), Body("not called"))
    assert error.result.final_status is ExecutionStatus.INTERRUPTED
    assert error.context["called"] is False


def test_a_task_that_cancelled_itself_and_thought_better_of_it_can_be_cancelled(
    restarts: Restarts,
) -> None:
    restarts.config.level1.max_interruptions = 0

    async def main() -> None:
        started = asyncio.Event()

        async def work() -> None:
            task = asyncio.current_task()
            assert task is not None
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(30)
            task.uncancel()
            started.set()
            await asyncio.sleep(30)

        running = asyncio.create_task(restarts.executor().execute(work, "step"))
        await started.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    asyncio.run(main())
    assert execute(restarts.executor(), Body("yes")).final_output == "yes"


def test_a_signal_handler_that_exits_is_a_stop_that_counts_as_nothing(restarts: Restarts) -> None:
    restarts.config.level1.max_attempts = 1

    def leave(*_: object) -> None:
        sys.exit(0)

    async def busy() -> None:
        signal.raise_signal(signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        for _ in range(7):
            with pytest.raises(SystemExit):
                execute(restarts.executor(), busy)
            restarts.restart()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert execute(restarts.executor(), Body("yes")).final_output == "yes"


def test_an_execution_that_is_dropped_counts_as_nothing(killable: Restarts) -> None:
    killable.config.level1.max_attempts = 1
    killable.config.level1.max_interruptions = 0
    loop = asyncio.new_event_loop()
    started = asyncio.Event()

    async def wait() -> None:
        started.set()
        await asyncio.Event().wait()

    execution = killable.executor().execute(wait, "step")
    thrown_away = loop.create_task(execution)
    loop.run_until_complete(started.wait())
    loop.close()
    execution.close()
    thrown_away._log_destroy_pending = False  # type: ignore[attr-defined]
    assert execute(killable.executor(), Body("yes")).final_output == "yes"


def test_what_a_task_waited_for_being_cancelled_is_a_failure_of_the_task(
    any_executor: PersonaExecutor,
) -> None:
    async def child_is_cancelled() -> None:
        child = asyncio.create_task(asyncio.sleep(30))
        await asyncio.sleep(0)
        child.cancel()
        await child

    error = failed(any_executor, child_is_cancelled)
    assert error.result.attempt_count == 3
    assert "waited for something that was cancelled" in reported(error).details


def test_a_cancelled_future_in_a_thread_is_a_failure_of_the_task(
    any_executor: PersonaExecutor,
) -> None:
    def cancelled() -> None:
        future: Future[None] = Future()
        future.cancel()
        future.result()

    assert failed(any_executor, cancelled).result.attempt_count == 3


def test_a_step_whose_write_was_cancelled_is_stored_all_the_same(restarts: Restarts) -> None:
    async def main() -> None:
        executor = restarts.executor()
        called = asyncio.Event()

        async def work() -> str:
            called.set()
            return "done"

        others = [asyncio.create_task(executor.execute(Body(), f"other {n}")) for n in range(3)]
        running = asyncio.create_task(executor.execute(work, "step"))
        await called.wait()
        running.cancel()
        await asyncio.gather(running, *others, return_exceptions=True)

    asyncio.run(main())
    restarts.restart()
    assert execute(restarts.executor(), Body("again")).final_output == "done"


# --- dying ---------------------------------------------------------------------------------------


def test_deaths_are_no_failures_and_have_their_own_limit(killable: Restarts) -> None:
    for _ in range(6):
        kill_during(killable)
    body = Body("not called")
    executor = killable.executor()
    error = failed(executor, body)
    assert body.count == 0
    assert "step is interrupted: its process died in the middle of it 6 times" in error.message
    assert not reported(error).recoverable
    assert error.result.final_status is ExecutionStatus.INTERRUPTED
    assert error.result.attempt_count == 6
    assert executor.final_status is ExecutionStatus.INTERRUPTED
    assert execute(killable.executor().options(retry=True), Body("yes")).final_output == "yes"


def test_of_an_interrupted_step_every_attempt_was_interrupted(killable: Restarts) -> None:
    killable.config.level1.max_interruptions = 1
    kill_during(killable)
    kill_during(killable)
    error = failed(killable.executor(), Body("not called"))
    assert [each.status.value for each in error.result.attempts] == ["interrupted"] * 2


def test_an_interrupted_step_is_shown_as_interrupted(killable: Restarts) -> None:
    killable.config.level1.max_interruptions = 0
    kill_during(killable)
    executor = killable.executor()
    failed(executor, Body("not called"))
    shown = executor._load_state()
    assert shown is not None
    assert shown["steps"][0]["status"] == "interrupted"


def test_an_interrupted_step_stays_so_in_every_process_until_it_is_retried(
    killable: Restarts,
) -> None:
    killable.config.level1.max_interruptions = 1
    kill_during(killable)
    kill_during(killable)
    body = Body("yes")
    for _ in range(3):
        executor = killable.executor()
        assert "is interrupted" in failed(executor, body).message
        shown = executor._load_state()
        assert shown is not None
        assert (shown["steps"][0]["status"], shown["steps"][0]["interruptions"]) == (
            "interrupted", 2,
        )  # fmt: skip
        killable.restart()
    assert body.count == 0
    kill_during(killable, retry=True)
    assert execute(killable.executor(), body).final_output == "yes"


def test_failures_and_deaths_have_a_limit_each(killable: Restarts) -> None:
    with pytest.raises(KeyboardInterrupt):
        execute(killable.executor(), Body(NO, KeyboardInterrupt()))
    for _ in range(4):
        kill_during(killable)
    body = Body(NO)
    error = failed(killable.executor(), body)
    assert body.count == 2
    assert [each.status.value for each in error.result.attempts] == [
        "retrying", *["interrupted"] * 5, "retrying", "failed",
    ]  # fmt: skip
    assert len(reported(error).context) == 8


def test_no_deaths_may_be_allowed_at_all(killable: Restarts) -> None:
    killable.config.level1.max_interruptions = 0
    kill_during(killable)
    failed(killable.executor(), Body("not called"))


def test_after_a_death_its_progress_and_spending_are_there(killable: Restarts) -> None:
    async def main() -> None:
        reached = asyncio.Event()

        async def work() -> None:
            current().save_progress(files_created=["a.py"])
            current().spend(tokens=70)
            current().history.append("said something")
            current().memory["topic"] = "pages"
            reached.set()
            await asyncio.Event().wait()

        running = asyncio.create_task(killable.executor().execute(work, "step"))
        await reached.wait()
        killable.kill()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    asyncio.run(main())
    executor = killable.executor()
    seen: dict[str, Any] = {}

    def read() -> str:
        context = current()
        seen.update(
            progress=context.progress, history=list(context.history), memory=dict(context.memory)
        )
        return "done"

    result = execute(executor, read)
    assert seen == {
        "progress": {"files_created": ["a.py"]},
        "history": ["said something"],
        "memory": {"topic": "pages"},
    }
    assert executor.get_token_usage() == result.total_tokens_used == 70
    assert [each.tokens_used for each in result.attempts] == [70, 0]


def test_a_retry_does_not_forget_the_deaths_of_a_step_that_continues(killable: Restarts) -> None:
    killable.config.level1.max_interruptions = 1
    kill_during(killable, retry=True)
    kill_during(killable, retry=True)
    assert "is interrupted" in failed(killable.executor(), Body("not called")).message


def test_an_ambiguous_step_runs_again_unless_asked_otherwise(killable: Restarts) -> None:
    kill_during(killable)
    assert execute(killable.executor(), Body("yes")).final_output == "yes"


def test_an_ambiguous_step_can_fail(killable: Restarts) -> None:
    kill_during(killable)
    executor = killable.executor().options(on_ambiguous="fail")
    error = failed(executor, Body("not called"))
    assert "step is ambiguous" in error.message
    report = reported(error)
    assert not report.recoverable
    assert report.suggested_fix is not None
    key = report.suggested_fix.split()[-1]
    body = Body("yes")
    execute(executor.options(retry=True), body)
    assert body.contexts[0].effect_key == key


def test_an_ambiguous_step_can_ask_a_person(killable: Restarts) -> None:
    kill_during(killable)
    executor = killable.executor().options(on_ambiguous="ask")
    with pytest.raises(HelpNeeded, match="step is ambiguous") as caught:
        execute(executor, Body("not called"))
    assert caught.value.total_attempts == 1
    assert caught.value.context["task_name"] == "step"
    assert caught.value.context["called"] is False
    assert executor.state_persistence is not None
    executor.state_persistence.mark_task_completed("step", {"answer": 42})
    assert execute(executor, Body("not called")).final_output == {"answer": 42}


def test_the_time_since_an_attempt_that_died_counts(killable: Restarts) -> None:
    kill_during(killable)
    killable.clock.advance(100)
    body = Body(NO)
    error = failed(killable.executor().options(max_elapsed_seconds=50), body)
    assert body.count == 1
    assert "the limit is 50 s" in error.context["reason"]


def test_a_step_that_was_stopped_in_the_middle_is_ambiguous(restarts: Restarts) -> None:
    executor = restarts.executor().options(on_ambiguous="fail")
    with pytest.raises(KeyboardInterrupt):
        execute(executor, Body(KeyboardInterrupt()))
    body = Body("not called")
    with pytest.raises(UnrecoverableError, match="ambiguous"):
        execute(executor, body)
    assert body.count == 0


# --- at any moment -------------------------------------------------------------------------------


class SlowHealer:
    """Takes some turns of the loop, and heals nothing."""

    async def heal_single(self, _: object) -> None:
        for _turn in range(3):
            await asyncio.sleep(0)


def stopped_after(
    restarts: Restarts,
    turns: int,
    *,
    others: int,
    fails: bool,
    how: Callable[[asyncio.Task[Any]], object],
) -> tuple[bool, bool]:
    """Stop an execution after so many turns of the loop; return whether it was over before, and
    whether its result was acknowledged."""
    starts: list[int] = []

    async def work() -> str:
        starts.append(1)
        current().memory["starts"] = len(starts)
        await asyncio.sleep(0)
        if fails:
            raise NO
        return "done"

    async def main() -> tuple[bool, bool]:
        executor = restarts.executor(healing_engine=SlowHealer())
        other_tasks = [
            asyncio.create_task(executor.execute(Body(NO, "yes"), f"other {number}"))
            for number in range(others)
        ]
        running = asyncio.create_task(executor.execute(work, "step"))
        for _ in range(turns):
            await asyncio.sleep(0)
        over = running.done()
        acknowledged = over and running.exception() is None
        how(running)
        await asyncio.gather(running, *other_tasks, return_exceptions=True)
        return over, acknowledged

    return asyncio.run(main())


class Turns:
    """The turns after which an execution is stopped: all until it is over, and some more.

    How many it takes depends a little on threads, so one that was over is not enough.
    """

    def __init__(self) -> None:
        self._over = 0

    def __iter__(self) -> Iterator[int]:
        for turns in range(40):
            if self._over == 4:
                break
            yield turns

    def stopped(self, over: bool) -> None:
        self._over = self._over + 1 if over else 0


def the_step(restarts: Restarts) -> Any:
    run = restarts.executor()._run
    assert run is not None
    named = [each for each in run.state.steps.values() if b'"step"' in (each.started.facts or b"")]
    return named[0] if named else None


@pytest.mark.parametrize("others", [0, 3])
@pytest.mark.parametrize("fails", [True, False])
def test_whenever_it_is_cancelled_its_attempt_has_an_end_and_no_failure_is_lost(
    tmp_path: Path, others: int, fails: bool
) -> None:
    moments = Turns()
    for turns in moments:
        restarts = Restarts(tmp_path / str(turns), persistent=False)
        cancel = asyncio.Task.cancel
        over, _ = stopped_after(restarts, turns, others=others, fails=fails, how=cancel)
        moments.stopped(over)
        restarts.restart()
        step = the_step(restarts)
        if step is not None:
            assert (step.open_attempt, step.interruptions) == (0, 0), turns
        goes_on(restarts, step, fails=fails)
        restarts.end()


@pytest.mark.parametrize("others", [0, 3])
@pytest.mark.parametrize("fails", [True, False])
def test_whenever_it_is_killed_what_was_acknowledged_stands(
    tmp_path: Path, others: int, fails: bool
) -> None:
    moments = Turns()
    for turns in moments:
        restarts = Restarts(tmp_path / str(turns), persistent=False)

        def kill(running: asyncio.Task[Any], restarts: Restarts = restarts) -> None:
            restarts.kill()
            running.cancel()

        over, acknowledged = stopped_after(restarts, turns, others=others, fails=fails, how=kill)
        moments.stopped(over)
        step = the_step(restarts)
        if acknowledged:
            assert step.completed is not None
        goes_on(restarts, step, fails=fails)
        restarts.end()


def goes_on(restarts: Restarts, step: Any, *, fails: bool) -> None:
    """Check that the next process does what is left to do."""
    before = step.failures if step else 0
    was_completed = step is not None and step.completed is not None
    body = Body(NO if fails else "again")
    if fails:
        failed(restarts.executor(), body)
        assert body.count == 3 - before
    else:
        assert execute(restarts.executor(), body).final_output == (
            "done" if was_completed else "again"
        )
        assert body.count == int(not was_completed)


def test_two_cancellations_leave_no_attempt_open_either(tmp_path: Path) -> None:
    def cancel_twice(running: asyncio.Task[Any]) -> None:
        running.cancel()
        asyncio.get_running_loop().call_soon(running.cancel)

    for turns in range(12):
        restarts = Restarts(tmp_path / str(turns), persistent=False)
        stopped_after(restarts, turns, others=3, fails=False, how=cancel_twice)
        restarts.restart()
        step = the_step(restarts)
        assert step is None or step.open_attempt == 0
        restarts.end()


def plain(state: RunState) -> dict[str, Any]:
    """Return a run's state without the values, which are in memory or in the journal."""
    return {
        "steps": {
            number: (step.starts, step.failures, step.stops, step.last_attempt, step.open_attempt,
                     step.seq, step.tokens, [entry.seq for entry in step.log],
                     step.completed and step.completed.seq, step.progress and step.progress.seq)
            for number, step in state.steps.items()
        },
        "spent": state.spent,
        "histories": {name: [each.seq for each in items] for name, items in state.histories.items()},
        "memories": {name: entry.seq for name, entry in state.memories.items()},
    }  # fmt: skip


def test_with_threads_and_loops_at_once_the_journal_and_the_memory_agree(
    restarts: Restarts,
) -> None:
    restarts.config.level1.base_delay_seconds = 0
    rng = random.Random(1)
    spent: list[int] = []

    def work(number: int) -> str:
        for turn in range(4):
            current().spend(tokens=number)
            spent.append(number)
            current().history.append([number, turn])
            current().save_progress(turn=turn)
            current().memory[f"of {number}"] = turn
        if rng.random() < 0.4:
            raise NO
        return "x" * rng.choice([1, 100, 10_000])

    async def work_too(number: int) -> str:
        await asyncio.sleep(0)
        return work(number)

    executors = [restarts.executor("a"), restarts.executor("b"), restarts.executor("a")]
    outcomes: list[list[object]] = []

    async def main() -> list[object]:
        made = (
            executors[number % 3].execute(work if number % 2 else work_too, "work", number)
            for number in range(30)
        )
        found = await asyncio.gather(*made, return_exceptions=True)
        return [getattr(each, "final_output", type(each)) for each in found]

    threads = [
        threading.Thread(target=lambda: outcomes.append(asyncio.run(main()))) for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outcomes[0] == outcomes[1]
    assert {each for each in outcomes[0] if isinstance(each, type)} <= {UnrecoverableError}
    run = executors[0]._run
    assert run is not None
    assert plain(run.state) == plain(fold(run.store.entries(run.lease.run), run.store.load))
    assert sum(tokens for tokens, _ in run.state.spent.values()) == sum(spent)
    remembered = {**persona_state(executors[0].state_persistence, "a")["memory"]}
    assert remembered == {f"of {number}": 3 for number in range(30) if number % 3 != 1}
