"""Row 23: many runs in flight, and workers that are killed: all runs are executed again at once.

Each body of a step writes when it starts and when it ends, with the life of its worker, to a file.
From that follows which worker executes most and is killed next, and how many steps each kill cut
off.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from faults.child_processes import ChildProcesses
from faults.registry import Outcome, Plan, row
from maestro_hive import Hive

if TYPE_CHECKING:
    from pathlib import Path

    from faults.child_processes import ChildProcess, ObservedRun
    from maestro_hive.maestro.state.store import Store

_WORKERS = 2
_STEP_SECONDS = 1.0
_FRESH_SECONDS = 3.0
_MOST_SECONDS = 300.0
_POLL_SECONDS = 0.05


# --- in the workers -----------------------------------------------------------------------------


async def serve(observed: ObservedRun) -> None:
    """Take runs until this process is killed."""
    hive = Hive(observed.folder / "state")
    life, most = observed.options["life"], observed.options["concurrency"]
    log = os.open(observed.folder / "steps", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    @hive.step
    async def rest(run: int, number: int) -> None:
        os.write(log, f"started {life} {run}/{number} {time.monotonic()!r}\n".encode())
        await asyncio.sleep(_STEP_SECONDS)
        os.write(log, f"ended {life} {run}/{number} {time.monotonic()!r}\n".encode())

    @hive.step
    async def note(number: int) -> None:
        os.write(log, f"fresh {life} {number} {time.monotonic()!r}\n".encode())

    @hive.workflow
    async def long(run: int, steps: int) -> None:
        for number in range(steps):
            await rest(run, number)

    @hive.workflow
    async def fresh(number: int) -> None:
        await note(number)

    async with hive.worker(concurrency=most):
        await asyncio.Event().wait()


WORKFLOWS = {"worker": serve}


# --- the runs, and the kills --------------------------------------------------------------------


@dataclass(slots=True)
class Seen:
    """What came of the runs."""

    seconds: float = 0.0
    #: How many steps each kill cut off.
    cut_off: list[int] = field(default_factory=list)
    #: How long after it was enqueued each fresh run was executed.
    fresh: list[float] = field(default_factory=list)
    statuses: Counter[str] = field(default_factory=Counter)


class _Attack:
    """Runs of steps that take a second each, and workers that are killed meanwhile."""

    def __init__(self, children: ChildProcesses, folder: Path, runs: int, steps: int) -> None:
        folder.mkdir(parents=True)
        self._children = children
        self._folder = folder
        self._runs = runs
        self._steps = steps
        self._lives = itertools.count(1)
        self._alive: dict[int, ChildProcess] = {}

    def make(self, kills: int) -> Seen:
        """Execute the runs to their ends, and kill the worker that executes most so many times."""
        seen, enqueued = Seen(), dict[int, float]()
        with Hive(self._folder / "state") as hive:
            for number in range(self._runs):
                hive.enqueue("long", number, self._steps, run_id=f"long-{number}")
            for _ in range(_WORKERS):
                self._start()
            started = self._until_executed()
            time.sleep(_STEP_SECONDS / 2)  # the first kill is in the middle of a step
            for number in range(kills):
                time.sleep(_STEP_SECONDS * (self._steps - 1) / kills if number else 0.0)
                seen.cut_off.append(self._kill_busiest())
                self._start()
                enqueued[number] = time.monotonic()
                hive.enqueue("fresh", number, run_id=f"fresh-{number}")
            self._until_ended(hive._open())  # noqa: SLF001 - the rows of those that have not ended
            seen.seconds = time.monotonic() - started
            for child in self._alive.values():
                child.kill()
                child.end()
            seen.statuses = Counter(each.status for each in hive.runs())
        done = {int(place): at for what, _, place, at in self._lines() if what == "fresh"}
        seen.fresh = [done[number] - at for number, at in enqueued.items() if number in done]
        return seen

    def _start(self) -> None:
        life = next(self._lives)
        self._alive[life] = self._children.start(
            "worker", self._folder, life=life, concurrency=2 * self._runs
        )

    def _kill_busiest(self) -> int:
        """Kill the worker that executes most steps; return how many these are."""
        active = Counter[int]()
        for what, life, _, _ in self._lines():
            active[life] += {"started": 1, "ended": -1}.get(what, 0)
        busiest = max(self._alive, key=lambda life: active[life])
        child = self._alive.pop(busiest)
        child.kill()
        child.end()
        return active[busiest]

    def _lines(self) -> list[tuple[str, int, str, float]]:
        path = self._folder / "steps"
        text = path.read_text() if path.exists() else ""
        words = (line.split() for line in text[: text.rfind("\n") + 1].splitlines())
        return [(what, int(life), place, float(at)) for what, life, place, at in words]

    def _until_executed(self) -> float:
        """Return when the first step started, once each run has one in flight."""
        deadline = time.monotonic() + _MOST_SECONDS
        while len({place.split("/")[0] for _, _, place, _ in self._lines()}) < self._runs:
            assert time.monotonic() < deadline, "not all runs were taken"
            time.sleep(_POLL_SECONDS)
        return min(at for _, _, _, at in self._lines())

    def _until_ended(self, store: Store) -> None:
        deadline = time.monotonic() + _MOST_SECONDS
        while store.dispatch_counts() and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)


@row(
    23,
    "recovery is all at once",
    "200 runs in flight, 5 kills: within 1.5 x the unkilled time + 2 s and one step a kill,"
    " none interrupted; a fresh run within 3 s",
)
def recovery(plan: Plan, outcome: Outcome) -> None:
    """Execute the same runs with and without kills, and compare."""
    runs, steps = plan.amount(quick=50, full=200), plan.amount(quick=6, full=10)
    kills = plan.amount(quick=2, full=5)
    with ChildProcesses("faults.recovery") as children:
        unkilled = _Attack(children, plan.scratch / "unkilled", runs, steps).make(0)
        killed = _Attack(children, plan.scratch / "killed", runs, steps).make(kills)
    most = 1.5 * unkilled.seconds + 2 + kills * _STEP_SECONDS
    require = outcome.require
    for each, count in ((unkilled, runs), (killed, runs + kills)):
        require(each.statuses == {"success": count}, f"not all ended: {each.statuses}")
    require(killed.seconds <= most, f"{killed.seconds:.1f} s, and at most {most:.1f} s")
    require(min(killed.cut_off) > 0, f"kills that cut off no step: {killed.cut_off}")
    latest = max(killed.fresh, default=_MOST_SECONDS)
    require(len(killed.fresh) == kills, f"only {len(killed.fresh)} fresh runs were executed")
    require(latest <= _FRESH_SECONDS, f"a fresh run was executed after {latest:.1f} s")
    outcome.ran.append(f"{runs} runs of {steps} steps of {_STEP_SECONDS:g} s, {kills} kills")
    fresh = ", ".join(f"{each:.2f}" for each in killed.fresh)
    outcome.measured.append(
        f"{unkilled.seconds:.1f} s without kills, {killed.seconds:.1f} s with them (at most"
        f" {most:.1f}); steps cut off: {killed.cut_off}; {dict(killed.statuses)}; fresh runs after"
        f" {fresh} s"
    )
