"""Workers: they take what is due, go on with what others left, and stop politely."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import signal
import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from faults.limits import most_in_window
from maestro_hive import Hive, RunCancelledError
from maestro_hive.admin.breakers import open_breaker
from maestro_hive.admin.runs import run_details
from maestro_hive.engine.config import StateConfig
from maestro_hive.engine.errors import CircuitBreakerOpen, TokenBudgetExceeded, UnrecoverableError
from maestro_hive.hive import dispatching, queues, schedules
from maestro_hive.hive.dispatching import RunReleased, due_after
from maestro_hive.hive.live_workers import live_workers
from maestro_hive.hive.runner import Runner
from maestro_hive.kernel.errors import ConfigurationError, StorageError, StoreBusyError
from maestro_hive.maestro.state.records import DispatchState, EntryKind
from tests.hive.conftest import quick_config
from tests.hive.worker_programs import Programs, kill, programs_in, until
from tests.tables import for_each
from tests.timing import least

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from maestro_hive.engine.limits import Entered
    from maestro_hive.hive import RunHandle
    from maestro_hive.maestro.state.store import Store
    from tests.hive.conftest import PassedTime


@pytest.fixture
def programs(tmp_path: Path) -> Iterator[Programs]:
    with programs_in(tmp_path) as made:
        yield made


def result(programs: Programs, run_id: str) -> Any:
    return asyncio.run(programs.hive.handle(run_id).result())


class Gate:
    """A workflow whose runs are counted, and go on when they are let."""

    def __init__(self, hive: Hive) -> None:
        self.active = self.most = 0
        self.started: list[str] = []
        self.times: list[float] = []
        self.open = asyncio.Event()

        @hive.step
        async def pass_through(name: str) -> str:
            self.active += 1
            self.most = max(self.most, self.active)
            self.started.append(name)
            try:
                await self.open.wait()
                await asyncio.sleep(0.01)
            finally:
                self.active -= 1
            return name

        @hive.workflow
        async def passes(name: str) -> str:
            self.times.append(time.monotonic())
            return await pass_through(name)

        self.workflow = passes


# --- what others left ---------------------------------------------------------------------------


def test_a_worker_dies_and_another_takes_its_runs(programs: Programs) -> None:
    for name in "abc":
        programs.hive.enqueue("job", name, 4, 0.1, run_id=name)
    first = programs.worker()
    until(lambda: len(programs.notes("part")) >= 6)
    kill(first)
    done = len(programs.notes("part"))
    programs.worker()
    assert [result(programs, name) for name in "abc"] == [[0, 1, 2, 3]] * 3
    # Of each run at most the step that was interrupted is called again.
    assert done <= len(programs.notes("part")) <= 12 + 3


def test_a_polite_stop_lets_go_and_the_next_has_it_at_once(programs: Programs) -> None:
    programs.hive.enqueue("hangs", "x", run_id="r")
    first = programs.start("""
        from maestro_hive.kernel.signals import stop_politely
        async def main():
            async with stop_politely():
                await serve()
        asyncio.run(main())
    """)
    until(lambda: programs.notes("hanging"))
    first.send_signal(signal.SIGTERM)
    first.wait(60)
    programs.touch("free")
    found = programs.hive._open().dispatch("r")
    assert found is not None
    assert (found.state, found.deaths) == (DispatchState.READY, 0)
    programs.worker()
    assert result(programs, "r") == "x"
    assert len(programs.notes("hanging")) == 2


class Blocking:
    """A workflow with a step in a thread, of a child or its own, that goes on when it is let."""

    def __init__(self, hive: Hive) -> None:
        self.calls = self.active = self.most = 0
        self.entered, self.open = threading.Event(), threading.Event()

        @hive.step
        def blocks(name: str) -> str:
            self.calls += 1
            self.active += 1
            self.most = max(self.most, self.active)
            self.entered.set()
            self.open.wait(20)
            self.active -= 1
            return name

        @hive.workflow
        async def alone(name: str) -> str:
            return await blocks(name)

        @hive.workflow
        async def parent(name: str) -> str:
            return await alone(name)

        self.alone, self.parent = alone, parent


async def _stop_while_it_blocks(hive: Hive, blocking: Blocking) -> None:
    async with hive.worker(grace=0):
        await asyncio.to_thread(blocking.entered.wait, 30)


@pytest.mark.parametrize("name", ["alone", "parent"])
def test_a_run_is_let_go_when_the_threads_of_its_steps_have_ended(hive: Hive, name: str) -> None:
    blocking = Blocking(hive)
    handle = hive.enqueue(getattr(blocking, name), "x", run_id="r")

    async def main() -> None:
        await _stop_while_it_blocks(hive, blocking)
        async with hive.worker():
            await asyncio.sleep(0.1)
            found = hive._open().dispatch("r")
            assert found is not None
            assert found.state is DispatchState.ACTIVE
            assert blocking.calls == 1
            blocking.open.set()
            assert await handle.result() == "x"

    asyncio.run(main())
    assert (blocking.calls, blocking.most) == (2, 1)


def test_who_resumes_a_run_here_waits_for_its_threads(hive: Hive) -> None:
    blocking = Blocking(hive)
    hive.enqueue(blocking.alone, "x", run_id="r")

    async def main() -> None:
        await _stop_while_it_blocks(hive, blocking)
        resumed = asyncio.create_task(hive.resume("r"))
        await asyncio.sleep(0.05)
        assert blocking.calls == 1
        blocking.open.set()
        assert await resumed == "x"

    asyncio.run(main())
    assert (blocking.calls, blocking.most) == (2, 1)


def test_a_hive_is_closed_at_once_while_a_thread_holds_a_run(hive: Hive, folder: Path) -> None:
    blocking = Blocking(hive)
    hive.enqueue(blocking.alone, "x", run_id="r")
    asyncio.run(_stop_while_it_blocks(hive, blocking))
    started = time.monotonic()
    hive.close()
    assert time.monotonic() - started < 10  # of the 20 s that the thread may hold it
    assert (folder / "runs" / "r" / "execution_state.json").exists()
    with Hive(folder) as other:
        assert "r" in other._open().run_leases()
        blocking.open.set()
        until(lambda: "r" not in other._open().run_leases())


def test_a_step_that_its_workflow_gave_up_does_not_hold_the_run(hive: Hive) -> None:
    blocking = Blocking(hive)

    @hive.workflow
    async def gives_up() -> str:
        with contextlib.suppress(TimeoutError):
            async with hive.timeout(0.05):
                await blocking.alone("x")
        await hive.wait_for("go")
        return "done"

    handle = hive.enqueue(gives_up, run_id="r")

    async def main() -> None:
        async with hive.worker(grace=0):
            await asyncio.to_thread(until, lambda: handle.status == "waiting")
        async with hive.worker():
            hive.answer("r", "go")
            assert await handle.result() == "done"

    asyncio.run(main())
    blocking.open.set()


@pytest.mark.parametrize("count, said", [(1, "waits for 1 run"), (3, "waits for 3 runs")])
def test_a_worker_that_stops_waits_for_its_runs(
    hive: Hive, caplog: pytest.LogCaptureFixture, count: int, said: str
) -> None:
    gate = Gate(hive)
    caplog.set_level(logging.INFO)

    def is_said() -> bool:
        return any(message.endswith(said) for message in caplog.messages)

    async def open_when_said() -> None:
        await _until(is_said)
        gate.open.set()

    async def main() -> list[str]:
        async with hive.worker(grace=20):
            handles = [hive.enqueue(gate.workflow, str(number)) for number in range(count)]
            await _until(lambda: gate.active == count)
            opening = asyncio.create_task(open_when_said())
        await opening
        return [handle.status for handle in handles]

    assert asyncio.run(main()) == ["success"] * count
    assert is_said()


def test_a_worker_that_is_cancelled_again_while_it_stops_leaves_its_runs(
    hive: Hive, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(hive)

    async def keep_for_a_while(_hive: Hive) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.2)

    monkeypatch.setattr(schedules, "keep", keep_for_a_while)

    async def serve() -> None:
        async with hive.worker(grace=0):
            hive.enqueue(gate.workflow, "x", run_id="r")
            await asyncio.Event().wait()

    async def main() -> None:
        task = asyncio.create_task(serve())
        await _until(lambda: gate.active == 1)
        task.cancel()
        await asyncio.sleep(0.05)
        task.cancel()
        await asyncio.wait({task})
        assert gate.active == 0
        found = hive._open().dispatch("r")
        assert found is not None
        assert found.state is DispatchState.READY
        assert live_workers(hive._open()) == []

    asyncio.run(main())


def test_a_queue_whose_limit_cannot_be_asked_is_not_asked_in_a_loop(
    hive: Hive, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(hive)
    gate.open.set()
    hive.queue("mail", concurrency=1)
    enter, asked = queues.enter, 0

    async def fail_at_first(store: Store, queue: queues.QueueSettings) -> Entered | None:
        nonlocal asked
        asked += 1
        if asked <= 3:
            raise StoreBusyError("the disk is slow")
        if asked == 4:
            raise StorageError("full")
        return await enter(store, queue)

    monkeypatch.setattr(queues, "enter", fail_at_first)

    async def main() -> str:
        async with hive.worker():
            handle = hive.enqueue(gate.workflow, "x", queue="mail")
            await _until(lambda: asked >= 4)
            await asyncio.sleep(0.3)
            assert asked == 4
            hive.enqueue(gate.workflow, "y")  # which has the worker look at once
            return await handle.result()

    assert asyncio.run(main()) == "x"


def test_a_dead_caller_s_run_is_taken_and_a_stopped_one_is_not(programs: Programs) -> None:
    code = """
        async def main():
            running = asyncio.create_task(hive.run(hangs, "{name}", run_id="{name}"))
            await asyncio.to_thread(sys.stdin.readline)
            running.cancel()
            await asyncio.wait({{running}})
        asyncio.run(main())
    """
    stopped, dead = (programs.start(code.format(name=name)) for name in ("stopped", "dead"))
    until(lambda: programs.notes("hanging", "stopped") and programs.notes("hanging", "dead"))
    kill(dead)
    stopped.stdin.write("stop\n")
    stopped.stdin.flush()
    assert stopped.wait(20) == 0
    programs.touch("free")
    first = programs.worker()
    until(lambda: programs.status("dead") == "success")
    assert programs.status("stopped") == "stopped"
    kill(first)
    programs.worker(adopt=True)
    until(lambda: programs.status("stopped") == "success")


def test_what_is_retried_goes_to_workers_again(hive: Hive) -> None:
    broken = [True]

    @hive.step(max_attempts=1, rounds=1)
    async def check() -> str:
        if broken:
            raise ValueError("broken")
        return "fine"

    @hive.workflow
    async def checks() -> str:
        return await check()

    async def main() -> str:
        async with hive.worker():
            handle = hive.enqueue(checks, run_id="r")
            with contextlib.suppress(Exception):
                await handle.result()
            assert handle.status == "failed"
            broken.clear()
            hive.retry("r")
            return str(await hive.handle("r").result())

    assert asyncio.run(main()) == "fine"


# --- what is for whom ---------------------------------------------------------------------------


def test_unknown_workflows_are_left_and_shown(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Hive(folder, quick_config()) as one, Hive(folder, quick_config()) as other:
        gate = Gate(one)
        gate.open.set()

        @other.workflow
        async def strange() -> str:
            return "known here"

        async def main() -> None:
            with caplog.at_level(logging.WARNING, "maestro_hive"):
                async with one.worker():
                    handle: RunHandle[str] = one.enqueue("strange", run_id="r")
                    assert await one.enqueue(gate.workflow, "x").result() == "x"
                    await _until(lambda: "no workflow 'strange'" in caplog.text)
                    assert handle.status == "pending"
                    async with other.worker():
                        assert await handle.result() == "known here"

        asyncio.run(main())


def test_a_run_whose_arguments_do_not_fit_says_so_once(
    hive: Hive, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatching, "_FIRST_SECONDS", 0.05)

    @hive.workflow
    async def nap(n: int) -> int:
        return n

    with Hive(folder, quick_config()) as without:
        without.enqueue("nap", run_id="r")
    store = hive._open()

    async def main() -> None:
        for _ in range(2):
            async with hive.worker():
                for _ in range(1000):
                    if hive._runs.failures.get("r", 0) == 2:
                        break
                    await asyncio.sleep(0.01)
            hive._runs.failures.clear()

    asyncio.run(main())
    dispatch = store.dispatch("r")
    assert dispatch is not None
    assert dispatch.state is not DispatchState.READY  # it waits, longer each time
    (info,) = hive.runs()
    assert info.status == "pending"
    (_, event) = [str(each) for each in run_events(hive, "r")]
    assert event.endswith(
        "run 'r' cannot start: its arguments do not fit the workflow nap(n: int): missing n;"
        " cancel it with `maestro cancel r` and enqueue it again"
    )


def run_events(hive: Hive, run_id: str) -> list[Any]:
    async def read() -> list[Any]:
        return [each async for each in hive.events(run_id, follow=False)]

    return asyncio.run(read())


def test_a_run_may_ask_for_a_version(folder: Path) -> None:
    with Hive(folder, quick_config()) as hive:

        @hive.workflow
        async def work() -> str:
            return "done"

        async def main() -> None:
            async with hive.worker(version="1"):
                new = hive.enqueue(work, version="2")
                assert await hive.enqueue(work).result() == "done"
                assert await hive.enqueue(work, version="1").result() == "done"
                assert new.status == "pending"
                async with hive.worker(version="2"):
                    assert await new.result() == "done"

        asyncio.run(main())


def test_a_worker_takes_only_from_its_queues(hive: Hive) -> None:
    @hive.workflow
    async def work() -> str:
        return "done"

    async def main() -> None:
        async with hive.worker(queues=["mail"]):
            other = hive.enqueue(work)
            assert await hive.enqueue(work, queue="mail").result() == "done"
            assert other.status == "pending"
            assert [each.queues for each in live_workers(hive._open())] == [("mail",)]
        assert live_workers(hive._open()) == []

    asyncio.run(main())


# --- queues -------------------------------------------------------------------------------------


def test_a_worker_takes_no_more_than_it_may_at_once(hive: Hive) -> None:
    gate = Gate(hive)

    async def main() -> None:
        async with hive.worker(concurrency=3):
            handles = [hive.enqueue(gate.workflow, str(number)) for number in range(8)]
            await _until(lambda: gate.active == 3)
            gate.open.set()
            assert len([await handle.result() for handle in handles]) == 8
        assert gate.most == 3

    asyncio.run(main())


def test_a_queue_s_concurrency_holds_over_all_workers(folder: Path) -> None:
    with Hive(folder, quick_config()) as hive:
        gate = Gate(hive)
        hive.queue("mail", concurrency=3, per_worker=2)

        async def main() -> None:
            async with hive.worker(), hive.worker():
                handles = [hive.enqueue(gate.workflow, str(n), queue="mail") for n in range(9)]
                await _until(lambda: gate.active == 3)
                await asyncio.sleep(0.2)
                assert gate.most == 3
                gate.open.set()
                assert len([await handle.result() for handle in handles]) == 9
            assert gate.most == 3

        asyncio.run(main())


def test_a_queue_s_rate_counts_runs_when_they_start(
    hive: Hive, monkeypatch: pytest.MonkeyPatch
) -> None:
    starts: list[float] = []
    hive.queue("mail", rate="5/s")

    @hive.workflow
    async def send(number: int) -> None:
        starts.append(time.monotonic())

    opened = Runner._opened

    async def opened_late(runner: Runner, run_id: str, *args: Any) -> Any:
        if int(run_id) % 10 < 5:
            await asyncio.sleep(0.8)
        return await opened(runner, run_id, *args)

    async def main(first: int) -> None:
        names = [str(first + number) for number in range(9)]
        for name in names:
            hive.enqueue(send, int(name), queue="mail", run_id=name)
        async with hive.worker(), asyncio.timeout(60):
            for name in names:
                await hive.handle(name).result()

    firsts = itertools.count(0, 10)

    def most() -> int:
        starts.clear()
        asyncio.run(main(next(firsts)))
        return most_in_window([(at, at) for at in starts], 1.0)

    monkeypatch.setattr(Runner, "_opened", opened_late)
    # The best of some tries: a workflow may look at the clock late.
    assert least(most, 5.5) <= 5


def test_a_queue_s_rate_is_not_exceeded(hive: Hive) -> None:
    gate = Gate(hive)
    gate.open.set()
    hive.queue("mail", rate="5/300ms")

    async def main() -> None:
        async with hive.worker():
            handles = [hive.enqueue(gate.workflow, str(n), queue="mail") for n in range(12)]
            assert len([await handle.result() for handle in handles]) == 12

    def most() -> int:
        gate.times.clear()
        asyncio.run(main())
        return most_in_window([(at, at) for at in gate.times], 0.25)

    # The best of some tries: a workflow may look at the clock late.
    assert least(most, 5.5) <= 5


def test_no_queue_waits_for_another(hive: Hive) -> None:
    gate = Gate(hive)
    gate.open.set()
    for number in range(40):
        hive.enqueue(gate.workflow, f"many-{number}", queue="many")
    few = [hive.enqueue(gate.workflow, f"few-{number}", queue="few") for number in range(3)]

    async def main() -> None:
        async with hive.worker(concurrency=2):
            for handle in few:
                await handle.result()

    asyncio.run(main())
    assert gate.started.index("few-2") < 12


def test_priority_comes_first_in_a_queue(hive: Hive) -> None:
    gate = Gate(hive)
    gate.open.set()
    handles = [hive.enqueue(gate.workflow, f"p{n}", priority=n) for n in (0, 2, 1)]

    async def main() -> None:
        async with hive.worker(concurrency=1):
            for handle in handles:
                await handle.result()

    asyncio.run(main())
    assert gate.started == ["p2", "p1", "p0"]


def test_a_queue_is_limited_once(hive: Hive) -> None:
    hive.queue("mail", rate="30/s")
    hive.queue("mail", rate="30/s")
    with pytest.raises(ConfigurationError, match="other limits"):
        hive.queue("mail", rate="31/s")
    with pytest.raises(ConfigurationError, match="concurrency"):
        hive.queue("other", concurrency=0)


# --- its surroundings -----------------------------------------------------------------------------


def test_a_worker_that_starts_clears_those_that_died(hive: Hive) -> None:
    store: Any = hive._open()
    columns = "(name, holder, host, pid, since, boot, expires)"
    dead = "('worker/dead', 'dead', 'h', 1, 1, 'b', 1)"
    store._file.write(lambda db: db.execute(f"INSERT INTO leases {columns} VALUES {dead}"))

    async def main() -> None:
        async with hive.worker() as one, hive.worker() as two:
            names = {each.name for each in store.leases()}
            assert names == {f"worker/{one.id}", f"worker/{two.id}"}

    asyncio.run(main())
    assert store.leases() == []


def test_a_lifespan_is_a_worker_for_the_life_of_an_application(hive: Hive) -> None:
    @hive.workflow
    async def work() -> str:
        return "done"

    async def main() -> None:
        async with hive.lifespan(object()):
            assert await hive.enqueue(work).result() == "done"
        assert live_workers(hive._open()) == []

    asyncio.run(main())


def test_why_a_run_is_left_is_shown_and_it_can_be_cancelled(folder: Path) -> None:
    with Hive(folder, quick_config()) as sender:
        for name in ("r", "s"):
            sender.enqueue("job", "one", "too many", run_id=name)
    with Hive(folder, quick_config()) as hive:

        @hive.workflow
        async def job(name: str) -> str:
            return name

        def suspensions(run_id: str) -> list[str]:
            run = hive._open().run(run_id)
            assert run is not None
            return [EntryKind(each.kind).name for each in hive._open().entries(run.id, after=1)]

        async def main() -> None:
            async with hive.worker(), asyncio.timeout(60):
                await asyncio.to_thread(until, lambda: suspensions("r") and suspensions("s"), 50)
                for _ in range(2):
                    hive._open().wake_run("r")
                    await asyncio.sleep(0.1)
                assert suspensions("r") == ["RUN_SUSPENDED"]  # once
                assert hive.cancel("s", "it was a mistake")
                with pytest.raises(RunCancelledError):
                    await hive.handle("s").result()

        asyncio.run(main())
        shown = run_details(hive._open(), "r").suspended
        assert shown is not None
        assert "too many positional arguments" in shown.message


@for_each(
    "options",
    [
        {"queues": "mail"},
        {"queues": []},
        {"queues": ()},
        {"queues": 5},
        {"concurrency": 0},
        {"concurrency": 2**63},
        {"grace": -1},
        {"release_after": 0},
        {"adopt": 1},
        {"version": ""},
        {"version": "\ud800"},
    ],
    ids=ascii,
)
def test_wrong_settings_are_refused(hive: Hive, options: Any) -> None:
    with pytest.raises(ConfigurationError):
        hive.worker(**options)


@pytest.mark.timing
def test_an_enqueued_run_starts_within_a_moment_from_another_process(programs: Programs) -> None:
    programs.worker()
    numbers = iter(range(100))

    def seconds() -> float:
        number = str(next(numbers))
        started = time.monotonic()
        programs.hive.enqueue("job", number, 1)
        until(lambda: programs.notes("part", number))
        return time.monotonic() - started

    def median() -> float:
        return sorted(seconds() for _ in range(5))[2]

    assert least(median, 0.25) < 0.25  # half of it is the poll


def test_a_hive_in_memory_has_workers_too() -> None:
    config = replace(quick_config(), state=StateConfig(enable_persistence=False))

    async def main() -> None:
        with Hive(config=config) as hive:

            @hive.workflow
            async def asks(name: str) -> str:
                return f"{name}: {await hive.wait_for('go', type=str)}"

            hive.queue("mail", concurrency=1)
            async with hive.worker(release_after=0.05):
                handles = [
                    hive.enqueue(asks, queue, run_id=queue, queue=queue)
                    for queue in ("default", "mail")
                ]
                store = hive._open()
                await _until(lambda: {each.state.name for each in store.dispatches()} == {"HELD"})
                for handle in handles:
                    hive.answer(handle.run_id, "go", "yes")
                    assert await handle.result() == f"{handle.run_id}: yes"

    asyncio.run(main())


def test_a_limited_queue_loses_no_start_to_runs_that_it_cannot_take(hive: Hive) -> None:
    gate = Gate(hive)
    gate.open.set()
    hive.queue("mail", rate="3/h")
    hive.enqueue("strange", queue="mail")

    async def main() -> None:
        async with hive.worker():
            await asyncio.sleep(0.6)  # in which it looks many times
            handles = [hive.enqueue(gate.workflow, str(n), queue="mail") for n in range(3)]
            async with asyncio.timeout(60):
                assert len([await handle.result() for handle in handles]) == 3

    asyncio.run(main())


# --- when a suspended run is due ------------------------------------------------------------------


@for_each(
    "error, failures, due",
    [
        (asyncio.CancelledError(), 3, 0.0),
        (CircuitBreakerOpen("open", 3, 42.5), 0, 42.5),
        (CircuitBreakerOpen("probed", 3, 0.0), 0, 1.0),
        (RunReleased("r", 600.0), 0, 600.0),
        (RunReleased("r", None), 0, None),
        (UnrecoverableError("interrupted"), 0, None),
        (TokenBudgetExceeded("spent", "p", 2, 1), 0, None),
        (StorageError("full"), 0, 5.0),
        (StorageError("full"), 1, 10.0),
        (StorageError("full"), 99, 300.0),
        (ExceptionGroup("both", [ValueError("x"), CircuitBreakerOpen("open", 3, 7.0)]), 0, 7.0),
    ],
    ids=repr,
)
def test_when_a_suspended_run_is_due(
    error: BaseException, failures: int, due: float | None
) -> None:
    assert due_after(error, failures) == due


def test_a_breaker_s_cooldown_wakes_a_suspended_run(hive: Hive, clock: PassedTime) -> None:
    calls: list[str] = []

    @hive.step(breaker="down")
    async def call() -> str:
        calls.append("call")
        return "up"

    @hive.workflow
    async def depends() -> str:
        return await call()

    async def main() -> None:
        store = hive._open()
        open_breaker(store, "down", 600, create=True)
        async with hive.worker(), asyncio.timeout(60):
            handle = hive.enqueue(depends, run_id="r")
            await _until(
                lambda: (row := store.dispatch("r")) and row.state is DispatchState.SCHEDULED
            )
            assert calls == []
            clock.advance(600)
            assert await handle.result() == "up"

    asyncio.run(main())


async def _until(condition: Any) -> None:
    await asyncio.to_thread(until, condition, 10.0)
