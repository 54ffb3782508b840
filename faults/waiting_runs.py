"""Row 21: a folder with very many runs that wait, and a worker on it.

One run of each kind is executed and released from memory; all others are made of its records, as the
same program would have left them. Half of them wait for an answer, half for the next day.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from faults.child_processes import ChildProcesses
from faults.registry import Outcome, Plan, row
from maestro_hive import Hive
from maestro_hive.hive import runs
from maestro_hive.maestro.state.codec import Encoded
from maestro_hive.maestro.state.projections import facts_of
from maestro_hive.maestro.state.records import DispatchState, EntryKind, NewDispatch, NewEntry
from maestro_hive.maestro.state.store import NewRun

if TYPE_CHECKING:
    from collections.abc import Iterator

    from faults.child_processes import ChildProcess, ObservedRun
    from maestro_hive.hive import RunHandle
    from maestro_hive.maestro.state.store import Store

_DAY = 86_400.0
_MEGABYTE = 1024 * 1024
#: How many runs are made in one transaction.
_AT_A_TIME = 2_000
_RELEASE_SECONDS = 1.0
_POLL_SECONDS = 0.01
_MOST_SECONDS = 60.0
#: After these a worker asks less often.
_QUIET_SECONDS = 11.0


# --- in the worker ---------------------------------------------------------------------------------


def make_hive(folder: Path) -> Hive:
    """Return the hive of a worker, whose runs wait; what wakes them is written."""
    hive = Hive(folder / "state")
    log = os.open(folder / "woken", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    @hive.step
    async def prepare() -> str:
        return "prepared"

    @hive.workflow
    async def asks() -> str:
        await prepare()
        number = await hive.wait_for("go", type=int)
        os.write(log, f"{number} {time.monotonic()!r}\n".encode())
        return "answered"

    @hive.workflow
    async def naps(number: int, seconds: float) -> str:
        await prepare()
        await hive.sleep(seconds)
        os.write(log, f"{number} {time.monotonic()!r}\n".encode())
        return "slept"

    return hive


async def serve(observed: ObservedRun) -> None:
    """Take runs until this process is killed; report how long it took to start."""
    started = time.monotonic()
    hive = make_hive(observed.folder)
    async with hive.worker(release_after=_RELEASE_SECONDS):
        first: RunHandle[str] = hive.enqueue("naps", -1, 0.0)
        await first.result()
        observed.report(seconds=time.monotonic() - started)
        await asyncio.Event().wait()


WORKFLOWS = {"worker": serve}


# --- the runs --------------------------------------------------------------------------------------


def make_waiting(folder: Path, count: int) -> list[str]:
    """Make runs that wait and were released from memory; return those that wait for an answer."""
    folder.mkdir(parents=True, exist_ok=True)
    with make_hive(folder) as hive:
        asyncio.run(_make_templates(hive))
        store = hive._open()  # noqa: SLF001 - a program has no such many at once
        asks, naps = (_copy(store, name) for name in ("asks", "naps"))
        names = [f"waits-{number:06}" for number in range(count - 2)]
        made = [
            NewRun(name, "asks", asks, runs.WAITING, NewDispatch(due=None))
            if number % 2
            else NewRun(name, "naps", naps, runs.WAITING, NewDispatch(due=_DAY))
            for number, name in enumerate(names)
        ]
        for first in range(0, len(made), _AT_A_TIME):
            store.create_runs(made[first : first + _AT_A_TIME])
    return ["asks", *(each.name for each in made if each.workflow == "asks")]


async def _make_templates(hive: Hive) -> None:
    store = hive._open()  # noqa: SLF001 - as above
    async with hive.worker(release_after=0.05), asyncio.timeout(_MOST_SECONDS):
        hive.enqueue("asks", run_id="asks")
        hive.enqueue("naps", 0, _DAY, run_id="naps")
        await _until_released(store, "asks", DispatchState.HELD)
        await _until_released(store, "naps", DispatchState.SCHEDULED)


async def _until_released(store: Store, name: str, state: DispatchState) -> None:
    for _ in range(int(_MOST_SECONDS / _POLL_SECONDS)):
        found = store.dispatch(name)
        if found is not None and found.state is state:
            return
        await asyncio.sleep(_POLL_SECONDS)
    raise AssertionError(f"run {name} was not released")


def _copy(store: Store, name: str) -> list[NewEntry]:
    record = store.run(name)
    assert record is not None
    made = []
    for entry in store.entries(record.id):
        value = store.load(entry)
        encoded = None if value is None or entry.sha256 is None else Encoded(value, entry.sha256)
        made.append(
            NewEntry(
                EntryKind(entry.kind),
                step=entry.step,
                attempt=entry.attempt,
                facts=entry.facts,
                value=encoded,
                identity=entry.identity,
            )
        )
    return made


# --- measuring -------------------------------------------------------------------------------------


@dataclass(slots=True)
class Figures:
    """What was measured of one worker."""

    runs: int
    start_seconds: float = 0.0
    megabytes: float = 0.0
    idle_share: float = 0.0
    #: From the call of ``answer`` to the workflow that goes on, each.
    wakes: list[float] = field(default_factory=list)
    #: How late those came back that slept.
    late: list[float] = field(default_factory=list)

    def __str__(self) -> str:
        woken = sorted(self.wakes)
        late = f", by a timer {max(self.late) * 1e3:.0f} ms late at most" if self.late else ""
        idle = f" idle {self.idle_share:.2%} of a core," if self.idle_share else ""
        return (
            f"{self.runs:,} waiting: start {self.start_seconds:.2f} s,"
            f" {self.megabytes:.0f} MB,{idle}"
            f" woken by an answer in {statistics.median(woken) * 1e3:.0f} ms"
            f" (at most {woken[-1] * 1e3:.0f}){late}"
        )


@contextmanager
def _worker(folder: Path, children: ChildProcesses) -> Iterator[ChildProcess]:
    child = children.start("worker", folder)
    try:
        yield child
    finally:
        child.kill()
        child.end()


def measure(
    folder: Path,
    count: int,
    children: ChildProcesses,
    *,
    answers: int,
    naps: int = 3,
    idle_seconds: float = 0.0,
) -> Figures:
    """Make so many runs, start a worker, and measure it; idle only for some seconds, if any."""
    asked = make_waiting(folder, count)
    figures = Figures(count)
    with _worker(folder, children) as child, Hive(folder / "state") as hive:
        figures.start_seconds = child.wait_for_report("seconds", _MOST_SECONDS)["seconds"]
        if idle_seconds:
            figures.idle_share = _idle_share(child.pid, idle_seconds)
        for number in range(answers):
            run_id = asked[number * (len(asked) - 1) // max(1, answers - 1)]
            answered = time.monotonic()
            hive.answer(run_id, "go", number + 1)
            figures.wakes.append(_woken(folder, number + 1) - answered)
            _until_ended(hive, run_id)
        _nap(hive, folder, figures, naps)
        figures.megabytes = _resident_bytes(child.pid) / _MEGABYTE
    return figures


def _nap(hive: Hive, folder: Path, figures: Figures, count: int, seconds: float = 2.5) -> None:
    """Let runs sleep, be released, and come back; with those that wait beside them."""
    names = [f"short-{number}" for number in range(count)]
    for number, run_id in enumerate(names):
        hive.enqueue("naps", 1_000 + number, seconds, run_id=run_id)
    for number, run_id in enumerate(names):
        woken = _woken(folder, 1_000 + number)
        store = hive._open()  # noqa: SLF001 - when its sleep was recorded
        record = store.run(run_id)
        assert record is not None
        waits = [e for e in store.entries(record.id) if e.kind == EntryKind.WAIT_STARTED]
        slept = facts_of(waits[0])["wait"]["boot_seconds"]
        now = time.clock_gettime(time.CLOCK_BOOTTIME) - time.monotonic()
        figures.late.append(woken + now - slept - seconds)


def _woken(folder: Path, number: int) -> float:
    """Return when a workflow went on."""
    deadline = time.monotonic() + _MOST_SECONDS
    path = folder / "woken"
    while time.monotonic() < deadline:
        for line in path.read_text().splitlines() if path.exists() else ():
            found, at = line.split()
            if int(found) == number:
                return float(at)
        time.sleep(_POLL_SECONDS)
    raise AssertionError(f"run {number} was not woken")


def _until_ended(hive: Hive, run_id: str) -> None:
    deadline = time.monotonic() + _MOST_SECONDS
    handle: Any = hive.handle(run_id)
    while handle.status != "success":
        if time.monotonic() > deadline:
            raise AssertionError(f"run {run_id} is {handle.status}")
        time.sleep(_POLL_SECONDS)


def _idle_share(pid: int, seconds: float) -> float:
    """Return which part of a core a worker uses that has had nothing to do for a while."""
    time.sleep(_QUIET_SECONDS)
    used, began = _cpu_seconds(pid), time.monotonic()
    time.sleep(seconds)
    return (_cpu_seconds(pid) - used) / (time.monotonic() - began)


def _cpu_seconds(pid: int) -> float:
    """Return how long the threads of a process have been executed."""
    threads = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(each.read_text().split()[0]) for each in threads) / 1e9


def _resident_bytes(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGESIZE")


@row(
    21,
    "a waiting run costs nothing",
    "100,000 waiting: start within 2 s, 50 MB more, woken within 0.5 s, idle below 1 % of a core",
)
def waiting_runs(plan: Plan, outcome: Outcome) -> None:
    """Measure a worker with few waiting runs, and one with very many."""
    many = plan.amount(quick=5_000, full=100_000)
    answers, idle_seconds = plan.amount(quick=8, full=30), plan.amount(quick=3, full=10)
    with ChildProcesses("faults.waiting_runs") as children:
        few, all_of_them = (
            measure(
                plan.scratch / f"waiting-{count}",
                count,
                children,
                answers=answers,
                idle_seconds=idle_seconds if count == many else 0.0,
            )
            for count in (100, many)
        )
    check_figures(few, all_of_them, outcome, patience=10.0 if plan.quick else 1.0)
    outcome.ran.append(f"{many:,} waiting runs, {answers} answers")


def check_figures(few: Figures, many: Figures, outcome: Outcome, *, patience: float = 1.0) -> None:
    """Compare with what is promised; on a machine that does more, times may be longer."""
    require = outcome.require
    more = many.megabytes - few.megabytes
    require(more <= 50, f"{more:.0f} MB more")
    require(many.start_seconds <= 2 * patience, f"started after {many.start_seconds:.2f} s")
    slowest = max(many.wakes)
    require(slowest <= 0.5 * patience, f"woken after {slowest:.2f} s")
    latest = max(many.late, default=0.0)
    require(latest <= 0.5 * patience, f"a timer was {latest:.2f} s late")
    require(many.idle_share < 0.01, f"an idle worker uses {many.idle_share:.2%} of a core")
    outcome.measured += [str(few), str(many), f"{more:+.0f} MB"]
