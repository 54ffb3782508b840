"""One limit and several real processes, which are killed and stopped."""

from __future__ import annotations

import select
import signal
import subprocess
import sys
import textwrap
import time
from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

import pytest

from maestro_hive.engine.rates import Rate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

_BUSY_TIMEOUT = 20.0
_LONG = 600.0

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

    def say(word, now):
        os.write(log, f"{word} {os.getpid()} {now!r}\\n".encode())

    async def work(limit):
        while True:
            give_back = await limit.enter()
            say("began", time.clock_gettime(time.CLOCK_BOOTTIME))
            await asyncio.sleep(float(seconds))
            say("ended", time.clock_gettime(time.CLOCK_BOOTTIME))
            give_back()

    async def main():
        limit = Limit(store, "step", rate=rate, max_concurrency=most)
        await asyncio.gather(*(work(limit) for _ in range(int(tasks))))

    print("ready", flush=True)
    sys.stdin.readline()
    asyncio.run(main())
""")


class Child:
    """A process whose tasks enter, work and leave, over and over."""

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
        words = [str(folder), rate, most, str(tasks), str(seconds), str(lease)]
        self._process = subprocess.Popen(
            [sys.executable, "-c", _CHILD, *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.pid = self._process.pid

    def go(self) -> None:
        assert self._process.stdout is not None
        assert self._process.stdin is not None
        heard, _, _ = select.select([self._process.stdout], [], [], _BUSY_TIMEOUT)
        assert heard, "a child says nothing"
        assert self._process.stdout.readline() == "ready\n"
        self._process.stdin.write("\n")
        self._process.stdin.flush()

    def send(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def kill(self) -> float:
        """Kill it, and return when it was dead."""
        assert self._process.poll() in {None, -signal.SIGKILL}, "it ended by itself"
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


def began(folder: Path, pid: int | None = None) -> list[float]:
    return sorted(
        event.at for event in events(folder) if event.word == "began" and pid in {None, event.pid}
    )


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _BUSY_TIMEOUT
    while not condition():
        assert time.monotonic() < deadline, "it does not happen"
        time.sleep(0.01)


def most_inside(folder: Path, deaths: dict[int, float]) -> int:
    """Return how many were inside at once; who was killed was inside until then."""
    changes = [(event.at, 1 if event.word == "began" else -1) for event in events(folder)]
    for pid, at in deaths.items():
        words = Counter(event.word for event in events(folder) if event.pid == pid)
        changes += [(at, -1)] * (words["began"] - words["ended"])
    inside = most = 0
    for _, change in sorted(changes):
        inside += change
        most = max(most, inside)
    return most


def test_a_rate_is_never_exceeded_over_four_processes_and_a_kill(
    tmp_path: Path, start: Callable[..., list[Child]]
) -> None:
    rate = Rate.parse("30/1.5s")
    children = start(4, rate=str(rate), tasks=3, seconds=0.01)
    time.sleep(2.2)
    children[0].kill()
    time.sleep(3.8)
    for child in children[1:]:
        child.kill()
    moments = began(tmp_path)
    for first, after_a_stretch in zip(moments, moments[rate.times :], strict=False):
        assert after_a_stretch - first > rate.seconds
    # Over whole stretches: the last one was cut off by the end of the test.
    stretches = (len(moments) - 1) // rate.times
    took = moments[stretches * rate.times] - moments[0]
    assert stretches >= 3
    assert stretches * rate.seconds / took > 0.8
    assert all(began(tmp_path, child.pid) for child in children)


def test_a_rate_counts_what_a_killed_process_began(
    tmp_path: Path, start: Callable[..., list[Child]]
) -> None:
    (first,) = start(rate="3/1500ms", tasks=3, seconds=_LONG)
    until(lambda: len(began(tmp_path)) == 3)
    first.kill()
    start(rate="3/1500ms")
    until(lambda: len(began(tmp_path)) > 3)
    moments = began(tmp_path)
    assert 1.5 < moments[3] - moments[0] < 3


def test_never_more_than_three_are_inside_over_four_processes_and_a_kill(
    tmp_path: Path, start: Callable[..., list[Child]]
) -> None:
    children = start(4, most="3", tasks=3, seconds=0.05)
    time.sleep(1.0)
    deaths = {children[0].pid: children[0].kill()}
    time.sleep(1.0)
    deaths |= {child.pid: child.kill() for child in children[1:]}
    assert most_inside(tmp_path, deaths) == 3
    assert all(len(began(tmp_path, child.pid)) >= 3 for child in children)


def test_the_slot_of_a_killed_process_comes_back_at_once(
    tmp_path: Path, start: Callable[..., list[Child]]
) -> None:
    (holder,) = start(most="1", seconds=_LONG)
    until(lambda: len(began(tmp_path)) == 1)
    (first_in_line,) = start(most="1", seconds=_LONG)
    time.sleep(0.3)
    (second_in_line,) = start(most="1", seconds=_LONG)
    time.sleep(1.0)  # long enough for their pauses to have grown
    assert began(tmp_path) == began(tmp_path, holder.pid)
    died = holder.kill()
    until(lambda: len(began(tmp_path)) == 2)
    (moment,) = began(tmp_path, first_in_line.pid)  # who came first
    assert moment - died < 0.5
    died = first_in_line.kill()
    until(lambda: len(began(tmp_path)) == 3)
    (moment,) = began(tmp_path, second_in_line.pid)
    assert moment - died < 0.5


def test_the_death_of_the_first_in_line_holds_nobody_up(
    tmp_path: Path, start: Callable[..., list[Child]]
) -> None:
    (holder,) = start(most="1", seconds=_LONG)
    until(lambda: len(began(tmp_path)) == 1)
    (first_in_line,) = start(most="1", seconds=_LONG)
    time.sleep(0.3)
    start(most="1", seconds=_LONG)
    time.sleep(0.3)
    first_in_line.kill()
    died = holder.kill()
    until(lambda: len(began(tmp_path)) == 2)
    assert began(tmp_path)[-1] - died < 0.5


def test_a_stopped_process_loses_its_slot_and_does_not_give_away_that_of_another(
    tmp_path: Path, start: Callable[..., list[Child]]
) -> None:
    (stopped,) = start(most="1", seconds=1.5, lease=0.6)
    until(lambda: len(began(tmp_path)) == 1)
    time.sleep(0.4)  # and its lease was renewed, so that it is as short as it was told to be
    stopped.send(signal.SIGSTOP)
    (other,) = start(most="1", seconds=_LONG)
    until(lambda: len(began(tmp_path, other.pid)) == 1)
    stopped.send(signal.SIGCONT)
    until(lambda: any(event.word == "ended" for event in events(tmp_path)))
    time.sleep(0.7)  # it wants to enter again, and must not
    assert len(began(tmp_path, stopped.pid)) == 1
    died = other.kill()
    until(lambda: len(began(tmp_path, stopped.pid)) == 2)
    assert began(tmp_path)[-1] - died < 0.5
