"""One limit and several real processes, which are killed and stopped."""

from __future__ import annotations

import itertools
import select
import signal
import textwrap
import time
from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

import pytest

from maestro_hive.engine.rates import Rate
from maestro_hive.maestro.state.sqlite.store import SqliteStore
from tests.python_processes import PythonProcess

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

_TIMEOUT = 60.0
_LONG = 600.0
#: A lease lasts for 15 s, and who waits looks every tenth of a second.
_AT_ONCE = 2.0

_CHILD = textwrap.dedent("""
    import asyncio, os, sys, time
    from pathlib import Path
    from maestro_hive.engine.limits import Limit
    from maestro_hive.engine.rates import Rate
    from maestro_hive.maestro.state.sqlite.store import SqliteStore

    folder, rate, most, tasks, seconds, lease = sys.argv[1:]
    store = SqliteStore(Path(folder) / "state", lease_seconds=float(lease))
    rate = None if rate == "-" else Rate.parse(rate)
    most = None if most == "-" else int(most)
    log = os.open(folder + "/log", os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def record(word, now):
        os.write(log, f"{word} {os.getpid()} {now!r}\\n".encode())

    async def work(limit):
        while True:
            entered = await limit.enter(None)
            # Before it is asked whether it may start: afterwards, this process may be stopped.
            now = time.clock_gettime(time.CLOCK_BOOTTIME)
            while not entered.is_current():
                await entered.renew()
                now = time.clock_gettime(time.CLOCK_BOOTTIME)
            record("started", now)
            await asyncio.sleep(float(seconds))
            record("ended", time.clock_gettime(time.CLOCK_BOOTTIME))
            entered.leave()

    async def main():
        limit = Limit(store, "step", rate=rate, max_concurrency=most)
        await asyncio.gather(*(work(limit) for _ in range(int(tasks))))

    print("ready", flush=True)
    sys.stdin.readline()
    asyncio.run(main())
""")


class Child:
    """A process whose tasks enter the limit, work and end, over and over."""

    def __init__(
        self,
        folder: Path,
        *,
        rate: str = "-",
        most: str = "-",
        tasks: int = 1,
        seconds: float = 0.0,
        lease: float = 15.0,
    ) -> None:
        self._process = PythonProcess(_CHILD, folder, rate, most, tasks, seconds, lease)
        self.pid = self._process.pid

    def go(self) -> None:
        readable, _, _ = select.select([self._process.stdout], [], [], _TIMEOUT)
        assert readable, "a child does not start"
        assert self._process.stdout.readline() == "ready\n"
        self._process.stdin.write("\n")
        self._process.stdin.flush()

    def send(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def kill(self) -> float:
        """Kill it, and return when it was dead."""
        assert self._process.poll() in {None, -signal.SIGKILL}, "it ended by itself"
        self.killed_at = now()
        self.send(signal.SIGKILL)
        self._process.communicate()
        return now()


@pytest.fixture(name="start")
def starter(tmp_path: Path) -> Iterator[Callable[..., list[Child]]]:
    """Start children that are ready and go at the same moment; kill them in the end."""
    children: list[Child] = []

    def start(count: int = 1, **given: object) -> list[Child]:
        new = [Child(tmp_path, **given) for _ in range(count)]  # type: ignore[arg-type]
        children.extend(new)
        for child in new:
            child.go()
        return new

    yield start
    for child in children:
        child.send(signal.SIGKILL)
        child._process.communicate()


class Event(NamedTuple):
    word: str
    pid: int
    at: float


def now() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def events(folder: Path) -> list[Event]:
    path = folder / "log"
    lines = path.read_text().splitlines() if path.exists() else []
    return [Event(word, int(pid), float(at)) for word, pid, at in map(str.split, lines)]


def start_times(folder: Path, pid: int | None = None) -> list[float]:
    return sorted(
        event.at for event in events(folder) if event.word == "started" and pid in {None, event.pid}
    )


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _TIMEOUT
    while not condition():
        assert time.monotonic() < deadline, "the condition was not met in time"
        time.sleep(0.01)


def has_each(folder: Path, children: list[Child], starts: int) -> bool:
    """Return whether each of them has started so many times."""
    return all(len(start_times(folder, child.pid)) >= starts for child in children)


def next_in_line(folder: Path) -> int | None:
    """Return the process that is the next one to get a permit."""
    store = SqliteStore(folder / "state")
    try:
        lease = store.lease("semaphore/step/next")
        return None if lease is None or not store.is_alive(lease) else lease.holder.pid
    finally:
        store.close()


def most_active(folder: Path, killed: list[Child]) -> int:
    """Return how many were active at once; those of a killed process while it surely lived.

    When it was seen to be dead, others may have had its permits for some time.
    """
    changes = [(event.at, 1 if event.word == "started" else -1) for event in events(folder)]
    for child in killed:
        own = [event for event in events(folder) if event.pid == child.pid]
        words = Counter(event.word for event in own)
        lived = max(child.killed_at, *(event.at for event in own))
        changes += [(lived, -1)] * (words["started"] - words["ended"])
    active = most = 0
    for _, change in sorted(changes):
        active += change
        most = max(most, active)
    return most


def test_a_rate_is_never_exceeded_over_four_processes_and_a_kill(
    tmp_path: Path, start: Callable[..., list[Child]]
) -> None:
    rate = Rate.parse("30/1.5s")
    children = start(4, rate=str(rate), tasks=3, seconds=0.01)
    until(lambda: len(start_times(tmp_path)) > rate.times and has_each(tmp_path, children, 1))
    children[0].kill()
    until(lambda: len(start_times(tmp_path)) > 4 * rate.times)
    for child in children[1:]:
        child.kill()
    moments = start_times(tmp_path)
    for first, after_a_window in zip(moments, moments[rate.times :], strict=False):
        assert after_a_window - first > rate.seconds
    # The best of some whole windows; a rate that is not used up loses time in each of them.
    full = range(0, 4 * rate.times + 1, rate.times)
    took = [moments[last] - moments[first] for first, last in itertools.pairwise(full)]
    assert rate.seconds / min(took) > 0.8


def test_a_rate_counts_what_a_killed_process_started(
    tmp_path: Path, start: Callable[..., list[Child]]
) -> None:
    (first,) = start(rate="3/1500ms", tasks=3, seconds=_LONG)
    until(lambda: len(start_times(tmp_path)) == 3)
    first.kill()
    start(rate="3/1500ms")
    until(lambda: len(start_times(tmp_path)) > 3)
    moments = start_times(tmp_path)
    assert moments[3] - moments[0] > 1.5


def test_never_more_than_three_are_active_over_four_processes_and_a_kill(
    tmp_path: Path, start: Callable[..., list[Child]]
) -> None:
    children = start(4, most="3", tasks=3, seconds=0.05)
    until(lambda: has_each(tmp_path, children, 3))
    children[0].kill()
    before = len(start_times(tmp_path))
    until(lambda: len(start_times(tmp_path)) >= before + 30)
    for child in children[1:]:
        child.kill()
    assert most_active(tmp_path, children) == 3


@pytest.mark.timing
def test_the_permit_of_a_killed_process_is_free_at_once(
    tmp_path: Path, start: Callable[..., list[Child]]
) -> None:
    (holder,) = start(most="1", seconds=_LONG)
    until(lambda: len(start_times(tmp_path)) == 1)
    (first_waiter,) = start(most="1", seconds=_LONG)
    until(lambda: next_in_line(tmp_path) == first_waiter.pid)
    (second_waiter,) = start(most="1", seconds=_LONG)
    time.sleep(1.0)  # long enough for their pauses to have grown
    assert start_times(tmp_path) == start_times(tmp_path, holder.pid)
    died = holder.kill()
    until(lambda: len(start_times(tmp_path)) == 2)
    (moment,) = start_times(tmp_path, first_waiter.pid)  # who came first
    assert moment - died < _AT_ONCE
    died = first_waiter.kill()
    until(lambda: len(start_times(tmp_path)) == 3)
    (moment,) = start_times(tmp_path, second_waiter.pid)
    assert moment - died < _AT_ONCE


@pytest.mark.timing
def test_the_death_of_the_process_that_was_next_delays_no_other(
    tmp_path: Path, start: Callable[..., list[Child]]
) -> None:
    (holder,) = start(most="1", seconds=_LONG)
    until(lambda: len(start_times(tmp_path)) == 1)
    (first_waiter,) = start(most="1", seconds=_LONG)
    until(lambda: next_in_line(tmp_path) == first_waiter.pid)
    start(most="1", seconds=_LONG)
    time.sleep(0.3)
    first_waiter.kill()
    died = holder.kill()
    until(lambda: len(start_times(tmp_path)) == 2)
    assert start_times(tmp_path)[-1] - died < _AT_ONCE


@pytest.mark.timing
def test_a_stopped_process_loses_its_permit_and_does_not_release_that_of_another(
    tmp_path: Path, start: Callable[..., list[Child]]
) -> None:
    (stopped,) = start(most="1", seconds=1.5, lease=0.6)
    until(lambda: len(start_times(tmp_path)) == 1)
    time.sleep(0.4)  # and its lease was renewed, so that it is as short as configured
    stopped.send(signal.SIGSTOP)
    (other,) = start(most="1", seconds=_LONG)
    until(lambda: len(start_times(tmp_path, other.pid)) == 1)
    stopped.send(signal.SIGCONT)
    until(lambda: any(event.word == "ended" for event in events(tmp_path)))
    time.sleep(0.7)  # its task waits to enter again, and must not
    assert len(start_times(tmp_path, stopped.pid)) == 1
    died = other.kill()
    until(lambda: len(start_times(tmp_path, stopped.pid)) == 2)
    assert start_times(tmp_path)[-1] - died < _AT_ONCE
