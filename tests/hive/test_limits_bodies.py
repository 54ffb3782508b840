"""A limit counts bodies: from the moment that one is called until it has really ended."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

from faults.limits import most_in_window
from maestro_hive import Hive
from maestro_hive.admin.runs import run_details, step_details
from maestro_hive.engine.limits import RateLimit
from maestro_hive.engine.step_record import RunStep
from maestro_hive.hive.errors import RunCancelledError, RunFailedError
from maestro_hive.kernel.errors import StoreBusyError
from maestro_hive.maestro.state.records import EntryKind
from maestro_hive.maestro.state.sqlite.store import SqliteStore
from tests.cli.processes import maestro
from tests.hive.conftest import quick_config
from tests.python_processes import PythonProcess
from tests.timing import PassingLoop, least, wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


class Bodies:
    """Counts the bodies that are active at once, and when each started."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self.active = self.most = 0
        self.starts: list[float] = []

    @contextlib.contextmanager
    def active_one(self) -> Iterator[int]:
        with self._mutex:
            self.active += 1
            self.most = max(self.most, self.active)
            self.starts.append(time.clock_gettime(time.CLOCK_BOOTTIME))
            number = len(self.starts)
        try:
            yield number
        finally:
            with self._mutex:
                self.active -= 1


@pytest.fixture
def bodies() -> Bodies:
    return Bodies()


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """What bodies that hang wait for; open at the end, so that their threads end."""
    made = threading.Event()
    yield made
    made.set()


async def until(condition: Callable[[], object], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition was not met in time"
        await asyncio.sleep(0.005)


def permits(folder: Path, name: str = "call") -> list[str]:
    """Return the permits of a step that are held, as another process sees them."""
    store = SqliteStore(folder)
    try:
        found = [each for each in store.leases() if store.is_alive(each)]
        return [each.name for each in found if each.name.startswith(f"semaphore/{name}/")]
    finally:
        store.close()


def show(folder: Path, *words: str) -> str:
    done = maestro("show", *words, "--store", folder)
    assert done.returncode == 0, done.stderr
    return " ".join(done.stdout.split())


# --- at once ------------------------------------------------------------------------------------


def test_a_thread_past_its_timeout_keeps_its_permit_until_it_ends(
    hive: Hive, bodies: Bodies
) -> None:
    @hive.step(max_concurrency=1, timeout=60, max_attempts=3)
    def call(number: int) -> int:
        with bodies.active_one() as which:
            if which <= 2:
                wait_until(lambda: failed_attempts(hive) == which)
                time.sleep(0.2)  # in which another one would be called
        return number

    @hive.workflow
    async def build() -> list[int]:
        return list(await asyncio.gather(*map(call, range(3))))

    assert late_twice(hive, build, bodies) == [0, 1, 2]
    assert (len(bodies.starts), bodies.most) == (5, 1)


def failed_attempts(hive: Hive) -> int:
    """Return how many attempts of the only run have failed."""
    store = hive._open()
    (run,) = store.runs()
    kinds = [entry.kind for entry in store.entries(run.id)]
    return kinds.count(EntryKind.ATTEMPT_FAILED)


def late_twice(hive: Hive, build: Any, bodies: Bodies) -> Any:
    """Run a workflow, and let the first two bodies of its steps be late."""

    async def scene() -> Any:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, PassingLoop)
        running = asyncio.create_task(hive.run(build))
        for number in (1, 2):
            await until(lambda number=number: len(bodies.starts) == number)  # type: ignore[misc]
            loop.advance(60)
        return await running

    with asyncio.Runner(loop_factory=PassingLoop) as runner:
        return runner.run(scene())


def test_a_permit_outlives_the_run_and_the_hive_of_a_thread_that_goes_on(
    folder: Path, bodies: Bodies, gate: threading.Event
) -> None:
    def make(hive: Hive, timeout: float) -> Any:
        @hive.step(max_concurrency=1, timeout=timeout, max_attempts=1)
        def call() -> None:
            with bodies.active_one() as number:
                if number == 1:
                    gate.wait(60)

        @hive.workflow
        async def build() -> None:
            await call()

        return build

    async def late(hive: Hive) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, PassingLoop)
        running = asyncio.create_task(hive.run(make(hive, 30)))
        await until(lambda: bodies.active)
        loop.advance(30)
        await running

    with (
        Hive(folder, quick_config()) as first,
        asyncio.Runner(loop_factory=PassingLoop) as runner,
        pytest.raises(RunFailedError),
    ):
        runner.run(late(first))
    assert permits(folder) == ["semaphore/call/0"]
    with Hive(folder, quick_config()) as second:
        build = make(second, 30)

        async def scene() -> None:
            run = await second.start(build)
            await asyncio.sleep(0.3)
            assert bodies.active == 1
            gate.set()
            await run.result()

        asyncio.run(scene())
    assert (len(bodies.starts), bodies.most) == (2, 1)
    asyncio.run(until(lambda: not permits(folder)))


def test_a_stopped_run_leaves_its_permit_to_the_thread_that_goes_on(
    hive: Hive, folder: Path, bodies: Bodies, gate: threading.Event
) -> None:
    @hive.step(max_concurrency=1)
    def call() -> None:
        with bodies.active_one():
            gate.wait(30)

    @hive.workflow
    async def build() -> None:
        await call()

    async def scene() -> None:
        run = asyncio.create_task(hive.run(build))
        await until(lambda: bodies.active)
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run
        assert permits(folder) == ["semaphore/call/0"]
        gate.set()
        await until(lambda: not permits(folder))

    asyncio.run(scene())


def test_an_async_body_that_refuses_to_be_cancelled_keeps_its_permit(
    hive: Hive, bodies: Bodies
) -> None:
    @hive.step(max_concurrency=1, timeout=60, max_attempts=2)
    async def call(number: int) -> int:
        with bodies.active_one() as which:
            if which <= 2:
                try:
                    await asyncio.Event().wait()
                except asyncio.CancelledError:
                    await asyncio.sleep(0.2)
        return number

    @hive.workflow
    async def build() -> list[int]:
        return list(await asyncio.gather(*map(call, range(2))))

    assert late_twice(hive, build, bodies) == [0, 1]
    assert (len(bodies.starts), bodies.most) == (4, 1)


def test_waiting_for_a_thread_that_hangs_is_shown_costs_no_attempt_and_can_be_cancelled(
    hive: Hive, folder: Path, bodies: Bodies, gate: threading.Event
) -> None:
    @hive.step(max_concurrency=1, timeout=0.05, max_attempts=3)
    def call() -> None:
        with bodies.active_one():
            gate.wait(30)

    @hive.workflow
    async def build() -> None:
        await call()

    def output(*words: str) -> str:
        return show(folder, "build-1", *words)

    async def scene() -> None:
        run = await hive.start(build, run_id="build-1")
        await until(lambda: bodies.active)
        await until(lambda: "still runs" in output() and "call waits for the only" in output())
        shown = output()
        assert "attempt 1 of call is over, but its thread still runs" in shown
        assert "holds a permit of 'call'" in shown
        assert "call waits for the only permit of 'call', held by process" in shown
        assert "its thread still runs" in output("call")
        assert len(bodies.starts) == 1
        assert "retrying" in shown
        assert hive.cancel("build-1", "enough")
        with pytest.raises(RunCancelledError):
            await run.result()
        assert "still runs" in output()
        gate.set()
        await until(lambda: "still runs" not in output())
        assert "still runs" not in output("call")

    asyncio.run(scene())
    assert len(bodies.starts) == 1


_EXITING = """
import asyncio, os, sys, threading, time
from maestro_hive import Hive
from maestro_hive.kernel.errors import MaestroError

hive = Hive(sys.argv[1])

@hive.step(max_concurrency=1, timeout=0.05, max_attempts=1)
def call():
    threading.Event().wait()

@hive.workflow
async def build():
    await call()

try:
    hive.run_sync(build)
except MaestroError:
    pass
import maestro_hive.kernel.process as process
process.run_at_exit(3, lambda: (print("closed", flush=True), time.sleep(30)))
"""


def test_a_permit_is_held_until_its_process_is_dead_and_not_only_closing(folder: Path) -> None:
    process = PythonProcess(_EXITING, folder)
    try:
        assert process.stdout.readline() == "closed\n"
        assert permits(folder) == ["semaphore/call/0"]
    finally:
        process.kill()
        process.communicate()
    assert permits(folder) == []


# --- in any window ------------------------------------------------------------------------------


@pytest.mark.parametrize("is_async", [True, False], ids=["async", "sync"])
def test_a_rate_counts_the_call_of_the_body_however_late_it_is(
    hive: Hive, bodies: Bodies, monkeypatch: pytest.MonkeyPatch, *, is_async: bool
) -> None:
    """The moment used to be taken before the start was recorded, which may take long."""
    start, delays = RunStep.start, list[float]()

    async def slow(record: RunStep, *given: Any) -> None:
        await asyncio.sleep(delays.pop(0) if delays else 0.0)
        await start(record, *given)

    monkeypatch.setattr(RunStep, "start", slow)

    def work() -> None:
        with bodies.active_one():
            pass

    async def work_async() -> None:
        work()

    call = hive.step(name="call", rate="2/500ms")(work_async if is_async else work)

    @hive.workflow
    async def build() -> None:
        await asyncio.gather(*(call() for _ in range(6)))

    names = iter("rstuv")

    def most() -> int:
        delays[:] = [0.4, 0.0, 0.3]
        bodies.starts.clear()
        hive.run_sync(build, run_id=next(names))
        assert len(bodies.starts) == 6
        return most_in_window([(at, at) for at in bodies.starts], 0.5)

    # The best of some tries: a body may look at the clock late.
    assert least(most, 2.5) <= 2
    assert {len(each.attempts) for each in steps_of(hive, "r")} == {1}


def steps_of(hive: Hive, run_id: str) -> list[Any]:
    store = hive._open()
    steps = run_details(store, run_id, most_steps=None).steps
    return [step_details(store, run_id, str(each.step)) for each in steps]


def test_a_body_that_was_not_called_since_its_start_could_not_be_counted_is_not_ambiguous(
    hive: Hive, bodies: Bodies, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = RunStep.start

    async def slow(record: RunStep, *given: Any) -> None:
        await asyncio.sleep(0.3)
        await start(record, *given)

    async def busy(_: RateLimit, __: object) -> Any:
        raise StoreBusyError("the journal is locked by another program")

    @hive.step(rate="2/500ms", on_ambiguous="fail")
    def call() -> str:
        with bodies.active_one():
            return "done"

    @hive.workflow
    async def build() -> str:
        return await call()

    with monkeypatch.context() as patch:
        patch.setattr(RunStep, "start", slow)
        patch.setattr(RateLimit, "count_again", busy)
        with pytest.raises(StoreBusyError):
            hive.run_sync(build, run_id="r")
    assert bodies.starts == []
    assert hive.run_sync(build, run_id="r") == "done"
