"""Workers: they take what is due, go on with what others left, and stop politely."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from maestro_hive.engine.config import Level2Config, StateConfig
from maestro_hive.hive import runs
from maestro_hive.hive.hive import Hive
from maestro_hive.hive.live_workers import LiveWorker, live_workers, record_worker
from maestro_hive.journal.entries import RunSuspended
from maestro_hive.kernel.errors import (
    ConfigurationError,
    InvalidIdentifierError,
    RunCancelledError,
    RunFailedError,
)
from tests.hive.conftest import quick_config, quick_hive, recorded, status, store_of, until
from tests.hive.worker_programs import Programs, kill, programs_in, until_true
from tests.tables import for_each
from tests.timing import least

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from maestro_hive.hive.handle import RunHandle


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
    until_true(lambda: len(programs.notes("part")) >= 6)
    kill(first)
    done = len(programs.notes("part"))
    programs.worker()
    assert [result(programs, name) for name in "abc"] == [[0, 1, 2, 3]] * 3
    # Of each run at most the step that was interrupted is called again.
    assert done <= len(programs.notes("part")) <= 12 + 3


def test_a_polite_stop_lets_go_and_the_next_has_it_at_once(programs: Programs) -> None:
    programs.hive.enqueue("hangs", "x", run_id="r")
    first = programs.start("""
        from maestro_hive.kernel.signals import until_signal
        asyncio.run(until_signal(serve(), "stopped"))
    """)
    until_true(lambda: programs.notes("hanging"))
    first.send_signal(signal.SIGTERM)
    first.wait(60)
    programs.touch("free")
    found = store_of(programs.hive).find("r")
    assert (found.status, found.deaths) == ("pending", 0)
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
            assert handle.status == "running"
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
    with Hive(folder) as other:
        assert status(other) == "running"
        blocking.open.set()
        until_true(lambda: status(other) == "pending")


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
            await until(lambda: handle.status == "waiting")
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
        await until(is_said)
        gate.open.set()

    async def main() -> list[str]:
        async with hive.worker(grace=20):
            handles = [hive.enqueue(gate.workflow, str(number)) for number in range(count)]
            await until(lambda: gate.active == count)
            opening = asyncio.create_task(open_when_said())
        await opening
        return [handle.status for handle in handles]

    assert asyncio.run(main()) == ["success"] * count
    assert is_said()


def test_a_worker_that_is_cancelled_again_while_it_stops_leaves_its_runs(hive: Hive) -> None:
    active: list[str] = []
    is_stopping = asyncio.Event()

    @hive.step
    async def slow_to_stop() -> None:
        active.append("x")
        try:
            await asyncio.Event().wait()
        finally:
            is_stopping.set()
            await asyncio.sleep(0.2)
            active.clear()

    @hive.workflow
    async def work() -> None:
        await slow_to_stop()

    async def serve() -> None:
        async with hive.worker(grace=0):
            hive.enqueue(work, run_id="r")
            await asyncio.Event().wait()

    async def main() -> None:
        task = asyncio.create_task(serve())
        await until(lambda: active)
        task.cancel()
        await is_stopping.wait()
        task.cancel()
        await asyncio.wait({task})
        assert not active
        assert status(hive) == "pending"
        assert live_workers(store_of(hive)) == []

    asyncio.run(main())


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
    until_true(lambda: programs.notes("hanging", "stopped") and programs.notes("hanging", "dead"))
    kill(dead)
    assert stopped.stdin is not None
    stopped.stdin.write("stop\n")
    stopped.stdin.flush()
    assert stopped.wait(20) == 0
    programs.touch("free")
    first = programs.worker()
    until_true(lambda: programs.status("dead") == "success")
    assert programs.status("stopped") == "stopped"
    kill(first)
    programs.worker(adopt=True)
    until_true(lambda: programs.status("stopped") == "success")


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
    with quick_hive(folder) as one, quick_hive(folder) as other:
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
                    await until(lambda: "no workflow 'strange'" in caplog.text)
                    assert handle.status == "pending"
                    async with other.worker():
                        assert await handle.result() == "known here"

        asyncio.run(main())


def test_a_run_whose_arguments_do_not_fit_says_so_once(
    hive: Hive, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "_FIRST_PAUSE", 0.05)
    pauses: list[float] = []

    @hive.workflow
    async def nap(n: int) -> int:
        return n

    with quick_hive(folder) as without:
        without.enqueue("nap", run_id="r")

    async def main() -> None:
        async with hive.worker():
            found = hive._runs().suspensions  # noqa: SLF001 - how long each pause is

            def is_third() -> bool:
                pauses.append(found["r"][1] if "r" in found else 0.0)
                return pauses[-1] >= 0.2

            await until(is_third)

    asyncio.run(main())
    assert max(pauses) == 0.2  # longer each time
    assert status(hive) == "waiting"
    (event,) = [each for each in recorded(hive) if isinstance(each, RunSuspended)]
    assert event.message == (
        "run 'r' cannot start: its arguments do not fit the workflow nap(n: 'int') -> 'int':"
        " missing a required argument: 'n'; cancel it with `maestro cancel r` and enqueue it again"
    )


def test_a_run_may_ask_for_a_version(folder: Path) -> None:
    with quick_hive(folder) as hive:

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
            assert [each.queues for each in live_workers(store_of(hive))] == [("mail",)]
        assert live_workers(store_of(hive)) == []

    asyncio.run(main())


# --- queues -------------------------------------------------------------------------------------


def test_a_worker_takes_no_more_than_it_may_at_once(hive: Hive) -> None:
    gate = Gate(hive)

    async def main() -> None:
        async with hive.worker(concurrency=3):
            handles = [hive.enqueue(gate.workflow, str(number)) for number in range(8)]
            await until(lambda: gate.active == 3)
            gate.open.set()
            assert len([await handle.result() for handle in handles]) == 8
        assert gate.most == 3

    asyncio.run(main())


def test_a_queue_s_concurrency_holds_over_all_workers(folder: Path) -> None:
    with quick_hive(folder) as hive:
        gate = Gate(hive)
        hive.queue("mail", concurrency=3, per_worker=2)

        async def main() -> None:
            async with hive.worker(), hive.worker():
                handles = [hive.enqueue(gate.workflow, str(n), queue="mail") for n in range(9)]
                await until(lambda: gate.active == 3)
                await asyncio.sleep(0.2)
                assert gate.most == 3
                gate.open.set()
                assert len([await handle.result() for handle in handles]) == 9
            assert gate.most == 3

        asyncio.run(main())


def most_in_window(times: list[float], seconds: float) -> int:
    """Return how many of some times are in one window of that length at most."""
    return max(sum(0 <= each - first < seconds for each in times) for first in times)


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
        return most_in_window(gate.times, 0.25)

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
    store = store_of(hive)
    dead = LiveWorker(id="dead", holder="0 1 1 host", queues=None, workflows=(), concurrency=1)
    record_worker(store, dead)

    async def main() -> None:
        async with hive.worker() as one, hive.worker() as two:
            assert store.documents("workers").keys() == {one.id, two.id}

    asyncio.run(main())
    assert store.documents("workers") == {}


def test_a_lifespan_is_a_worker_for_the_life_of_an_application(hive: Hive) -> None:
    @hive.workflow
    async def work() -> str:
        return "done"

    async def main() -> None:
        async with hive.lifespan(object()):
            assert await hive.enqueue(work).result() == "done"
        assert live_workers(store_of(hive)) == []

    asyncio.run(main())


def test_why_a_run_is_left_is_shown_and_it_can_be_cancelled(folder: Path) -> None:
    with quick_hive(folder) as sender:
        for name in ("r", "s"):
            sender.enqueue("job", "one", "too many", run_id=name)
    with quick_hive(folder) as hive:

        @hive.workflow
        async def job(name: str) -> str:
            return name

        def suspensions(run_id: str) -> list[str]:
            found = recorded(hive, run_id)
            return [each.message for each in found if isinstance(each, RunSuspended)]

        async def main() -> None:
            async with hive.worker(), asyncio.timeout(60):
                await until(lambda: suspensions("r") and suspensions("s"))
                await until(lambda: hive.cancel("s", "it was a mistake") or status(hive, "s"))
                with pytest.raises(RunCancelledError):
                    await hive.handle("s").result()

        asyncio.run(main())
        (shown,) = suspensions("r")  # once
        assert "too many positional arguments" in shown


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
    with pytest.raises((ConfigurationError, InvalidIdentifierError)):
        hive.worker(**options)


@pytest.mark.timing
def test_an_enqueued_run_starts_within_a_moment_from_another_process(programs: Programs) -> None:
    programs.worker()
    numbers = iter(range(100))

    def seconds() -> float:
        number = str(next(numbers))
        started = time.monotonic()
        programs.hive.enqueue("job", number, 1)
        until_true(lambda: programs.notes("part", number))
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
                return f"{name}: {await hive.wait_for('go')}"

            hive.queue("mail", concurrency=1)
            async with hive.worker(release_after=0.05):
                handles = [
                    hive.enqueue(asks, queue, run_id=queue, queue=queue)
                    for queue in ("default", "mail")
                ]
                store = store_of(hive)
                await until(lambda: {each.status for each in store.runs()} == {"waiting"})
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


def test_a_breaker_s_cooldown_wakes_a_suspended_run(folder: Path) -> None:
    calls: list[str] = []
    level2 = Level2Config(circuit_breaker_threshold=1, circuit_breaker_cooldown_seconds=1)
    with Hive(folder, replace(quick_config(), level2=level2)) as hive:

        @hive.step(breaker="down", max_attempts=1)
        async def call() -> str:
            calls.append("call")
            if len(calls) == 1:
                raise ConnectionError("down")
            return "up"

        @hive.workflow
        async def depends() -> str:
            return await call()

        async def main() -> None:
            async with hive.worker(), asyncio.timeout(60):
                with pytest.raises(RunFailedError):
                    await hive.enqueue(depends).result()
                handle = hive.enqueue(depends, run_id="r")
                await until(lambda: handle.status == "waiting")
                assert calls == ["call"]
                assert await handle.result() == "up"

        asyncio.run(main())


# --- runs that wait for others --------------------------------------------------------------------


def family_of(hive: Hive) -> Any:
    @hive.step
    async def double(number: int) -> int:
        return 2 * number

    @hive.workflow
    async def child(number: int) -> int:
        if number < 0:
            raise ValueError("negative")
        return await double(number)

    @hive.workflow
    async def parent(number: int) -> int:
        return int(await hive.enqueue(child, number).result())

    return parent


def test_many_parents_of_enqueued_children_end_at_a_small_concurrency(hive: Hive) -> None:
    parent, count = family_of(hive), 200

    async def main() -> list[int]:
        handles = [hive.enqueue(parent, number) for number in range(count)]
        async with hive.worker(concurrency=10), asyncio.timeout(100):
            return [await each.result() for each in handles]

    assert asyncio.run(main()) == [2 * number for number in range(count)]


def test_a_parent_that_is_killed_while_it_waits_gets_the_result(programs: Programs) -> None:
    programs.hive.enqueue("waits_for_a_run", "x", run_id="r")
    first = programs.worker()
    until_true(lambda: programs.notes("hanging"))
    kill(first)
    programs.touch("free")
    programs.worker()
    assert result(programs, "r") == ["x", "x"]
    assert len(programs.hive.runs()) == 2


@pytest.mark.parametrize("is_released", [False, True])
def test_the_end_of_a_run_wakes_the_run_that_waits_for_it(hive: Hive, *, is_released: bool) -> None:
    gate = Gate(hive)

    @hive.workflow
    async def waits() -> str:
        return str(await hive.enqueue(gate.workflow, "x", run_id="child").result())

    async def main() -> str:
        async with hive.worker(release_after=0.02 if is_released else 60):
            handle = hive.enqueue(waits, run_id="r")
            await until(lambda: handle.status == "waiting" and gate.active)
            if is_released:
                await until(lambda: store_of(hive).find("r").holder is None)
            gate.open.set()
            return str(await handle.result())

    assert asyncio.run(main()) == "x"


def test_the_failure_and_the_cancellation_of_an_awaited_run_are_errors(hive: Hive) -> None:
    parent = family_of(hive)

    @hive.workflow
    async def waits(run_id: str) -> str:
        try:
            await hive.handle(run_id).result()
        except Exception as error:  # noqa: BLE001 - looked at
            return type(error).__name__
        return "no error"

    async def main() -> None:
        with pytest.raises(RunFailedError, match="negative"):
            async with hive.worker():
                await hive.enqueue(parent, -1).result()
        hive.enqueue("strange", run_id="strange")
        assert hive.cancel("strange")
        assert await hive.run(waits, "strange") == "RunCancelledError"
        assert await hive.run(waits, "nobody") == "UnknownRunError"

    asyncio.run(main())


def test_a_run_that_only_waits_holds_no_turn_of_its_queue(hive: Hive) -> None:
    hive.queue("mail", concurrency=2)

    @hive.workflow
    async def asks(name: str) -> str:
        return str(await hive.wait_for("go"))

    async def main() -> None:
        async with hive.worker(concurrency=5), asyncio.timeout(60):
            names = [f"r{number}" for number in range(50)]
            for name in names:
                hive.enqueue(asks, name, run_id=name, queue="mail")
            await until(lambda: {status(hive, name) for name in names} == {"waiting"})
            for name in names:
                hive.answer(name, "go", name)
            assert [await hive.handle(name).result() for name in names] == names

    asyncio.run(main())
