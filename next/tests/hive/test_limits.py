"""Limits of a step: how many bodies are active at once and start in a window, in all processes.

A limit counts bodies: from the moment that one is called until it has really ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

from maestro_hive.hive.hive import Hive
from maestro_hive.journal.entries import AttemptFailed, AttemptStarted
from maestro_hive.kernel.errors import ConfigurationError, RunFailedError
from tests.hive.conftest import quick_config, recorded, store_of
from tests.python_processes import PythonProcess
from tests.stores import SHARED_KINDS, place

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


@pytest.fixture(params=SHARED_KINDS)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A store that several processes share, of each kind."""
    with place(request.param, tmp_path) as made:
        yield made


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
            self.starts.append(time.monotonic())
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


def held(hive: Hive, label: str = "call") -> int:
    return store_of(hive).account(f"limit/{label}")[1]


def entries_of(hive: Hive, run_id: str) -> list[Any]:
    return recorded(hive, run_id)


def many(hive: Hive, bodies: Bodies, count: int, **options: Any) -> Any:
    """Return a workflow that calls a step often, at once."""

    @hive.step(name="call", **options)
    async def call(number: int) -> int:
        with bodies.active_one():
            await asyncio.sleep(0.002)
        return number

    @hive.workflow
    async def build() -> int:
        return sum(await asyncio.gather(*map(call, range(count))))

    return build


# --- at once --------------------------------------------------------------------------------------


def test_never_more_than_so_many_are_active_at_once(hive: Hive, bodies: Bodies) -> None:
    build = many(hive, bodies, 40, max_concurrency=3)
    assert hive.run_sync(build) == sum(range(40))
    assert (len(bodies.starts), bodies.most, held(hive)) == (40, 3, 0)


def test_other_processes_have_their_share_of_the_same_permits(folder: str, bodies: Bodies) -> None:
    async def scene(*hives: Hive) -> None:
        await asyncio.gather(*(h.run(many(h, bodies, 10, max_concurrency=2)) for h in hives))

    with Hive(folder, quick_config()) as one, Hive(folder, quick_config()) as other:
        asyncio.run(scene(one, other))
        assert (len(bodies.starts), bodies.most, held(one)) == (20, 2, 0)


@pytest.mark.parametrize("most", [0, -1, True, 1.5, "3"])
def test_a_number_that_cannot_be_used_is_refused(hive: Hive, most: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"step 'x': max_concurrency is .*, and must be"):
        hive.step(name="x", max_concurrency=most)(until)


def test_cancelled_waiters_hold_nothing_and_spend_no_attempt(hive: Hive, bodies: Bodies) -> None:
    @hive.step(max_concurrency=1)
    async def call(number: int) -> None:
        with bodies.active_one():
            await asyncio.sleep(30)

    @hive.workflow
    async def build() -> None:
        await asyncio.gather(*map(call, range(5)))

    async def scene() -> None:
        run = asyncio.create_task(hive.run(build, run_id="r"))
        await until(lambda: bodies.active)
        run.cancel()
        await asyncio.wait({run})

    asyncio.run(scene())
    started = [each for each in entries_of(hive, "r") if isinstance(each, AttemptStarted)]
    assert len(started) == 1
    assert held(hive) == 0


def test_an_attempt_that_fails_returns_its_permit(hive: Hive, bodies: Bodies) -> None:
    @hive.step(name="call", max_concurrency=1, max_attempts=2)
    async def call(number: int) -> None:
        with bodies.active_one():
            raise ValueError(number)

    @hive.workflow
    async def build() -> None:
        await asyncio.gather(*map(call, range(3)), return_exceptions=True)

    hive.run_sync(build)
    assert (len(bodies.starts), bodies.most, held(hive)) == (6, 1, 0)


_HOLDER = """
import asyncio, sys
from maestro_hive.hive.hive import Hive

hive = Hive(sys.argv[1])

@hive.step(name="call", max_concurrency=1)
async def call():
    print("called", flush=True)
    await asyncio.sleep(60)

@hive.workflow
async def build():
    await call()

hive.run_sync(build)
"""


def test_a_permit_of_a_dead_process_is_released_by_the_next_admission(
    folder: str, hive: Hive, bodies: Bodies
) -> None:
    process = PythonProcess(_HOLDER, folder)
    try:
        assert process.line() == "called"
        assert held(hive) == 1
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()
    assert hive.run_sync(many(hive, bodies, 2, max_concurrency=1)) == 1
    assert (bodies.most, held(hive)) == (1, 0)


# --- bodies that outlive their attempt ------------------------------------------------------------


def test_a_thread_past_its_timeout_keeps_its_permit_until_it_ends(
    hive: Hive, bodies: Bodies
) -> None:
    @hive.step(name="call", max_concurrency=1, timeout=0.2, max_attempts=20)
    def call(number: int) -> int:
        with bodies.active_one() as which:
            if which == 1:
                failed = (isinstance(each, AttemptFailed) for each in entries_of(hive, "r"))
                while not any(failed):
                    time.sleep(0.005)
                    failed = (isinstance(each, AttemptFailed) for each in entries_of(hive, "r"))
                time.sleep(0.2)  # in which another one would be called
        return number

    @hive.workflow
    async def build() -> list[int]:
        return list(await asyncio.gather(*map(call, range(2))))

    assert hive.run_sync(build, run_id="r") == [0, 1]
    assert len(bodies.starts) >= 3
    assert (bodies.most, held(hive)) == (1, 0)


def test_a_permit_outlives_the_run_of_a_thread_that_goes_on(
    folder: str, bodies: Bodies, gate: threading.Event
) -> None:
    def make(hive: Hive, timeout: float) -> Any:
        @hive.step(name="call", max_concurrency=1, timeout=timeout, max_attempts=1)
        def call() -> None:
            with bodies.active_one() as number:
                if number == 1:
                    gate.wait(60)

        @hive.workflow
        async def build() -> None:
            await call()

        return build

    with Hive(folder, quick_config()) as first, Hive(folder, quick_config()) as second:
        with pytest.raises(RunFailedError, match=r"was not done within 0\.3 seconds"):
            first.run_sync(make(first, 0.3))
        assert held(second) == 1

        async def scene() -> None:
            run = asyncio.create_task(second.run(make(second, 60)))
            await asyncio.sleep(0.3)
            assert bodies.active == 1
            gate.set()
            await run

        asyncio.run(scene())
        assert (len(bodies.starts), bodies.most, held(second)) == (2, 1, 0)


def test_a_stopped_run_leaves_its_permit_to_the_thread_that_goes_on(
    hive: Hive, bodies: Bodies, gate: threading.Event
) -> None:
    @hive.step(name="call", max_concurrency=1)
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
        assert held(hive) == 1
        gate.set()
        await until(lambda: not held(hive))

    asyncio.run(scene())


def test_an_async_body_that_refuses_to_be_cancelled_keeps_its_permit(
    hive: Hive, bodies: Bodies
) -> None:
    @hive.step(name="call", max_concurrency=1, timeout=0.1, max_attempts=20)
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

    assert hive.run_sync(build) == [0, 1]
    assert len(bodies.starts) >= 4
    assert bodies.most == 1


# --- in any window --------------------------------------------------------------------------------


def most_in_window(moments: list[float], seconds: float) -> int:
    return max(sum(at <= other < at + seconds for other in moments) for at in moments)


def test_no_window_has_more_starts_than_the_rate_in_all_processes(
    folder: str, bodies: Bodies
) -> None:
    async def scene(*hives: Hive) -> None:
        await asyncio.gather(*(h.run(many(h, bodies, 6, rate="4/500ms")) for h in hives))

    with Hive(folder, quick_config()) as one, Hive(folder, quick_config()) as other:
        asyncio.run(scene(one, other))
    assert len(bodies.starts) == 12
    # Each is counted as up to 12 ms later than the store's clock: so is the window's end.
    assert most_in_window(bodies.starts, 0.47) <= 4


def test_a_wait_for_the_rate_holds_no_permit(hive: Hive, bodies: Bodies) -> None:
    build = many(hive, bodies, 2, rate="1/min", max_concurrency=1)

    async def scene() -> None:
        run = asyncio.create_task(hive.run(build))
        await until(lambda: len(bodies.starts) == 1 and not bodies.active)
        await until(lambda: not held(hive))
        run.cancel()
        await asyncio.wait({run})

    asyncio.run(scene())
    assert (len(bodies.starts), held(hive)) == (1, 0)
