"""Row 1: ``kill -9`` at every call by which a journal touches its folder."""

from __future__ import annotations

import shutil
import signal
from collections import Counter
from itertools import count
from typing import TYPE_CHECKING

from faults import strace, tools
from faults.registry import Outcome, Plan, row
from faults.scenarios import verify
from faults.tools import ahead, evenly

if TYPE_CHECKING:
    from pathlib import Path

    from faults.strace import InjectedRun, Point

SCENARIOS = ("first", "steps", "again", "large")
#: Calls that change nothing on the disk: a few of them are enough.
_PASSIVE = frozenset(
    "read pread64 lseek fstat stat lstat newfstatat statx access faccessat2 readlink readlinkat"
    " close getdents64 munmap".split()
)
_KILLED = {-signal.SIGKILL, 128 + signal.SIGKILL}


@row(
    1,
    "kill -9 loses nothing acknowledged and leaves no folder that cannot be opened",
    "≥ 1,000 points, 0 lost, 0 stuck",
)
def kills(plan: Plan, outcome: Outcome) -> None:
    """Kill each scenario at each of its calls, and verify what is left."""
    reason = tools.missing("strace")
    if reason:
        outcome.not_run.append(reason)
        return
    chosen = [point for name in SCENARIOS for point in choose(plan, name)]
    numbers = count(1)

    def inject(point: Point) -> InjectedRun:
        return strace.run(point, plan.scratch / f"kill-{next(numbers)}", "signal=KILL")

    landed: Counter[str] = Counter()
    for run in plan.track("kill points", ahead(inject, chosen), len(chosen)):
        where = f"{run.point.scenario}, {run.point.call} number {run.point.when}"
        if run.code not in {*_KILLED, 0}:
            outcome.fail(f"{where}: ended with {run.code}: {run.errors[-300:]}")
        for wrong in verify(run.folder, run.acks):
            outcome.fail(f"{where}: {wrong}")
        if run.landed and run.code in _KILLED:
            landed[run.point.call] += 1
        clean(run.folder)
    places = ", ".join(f"{call} {number}" for call, number in landed.most_common())
    outcome.ran.append(f"{landed.total():,} kills over {len(SCENARIOS)} scenarios")
    outcome.measured.append(f"{outcome.failed} lost or stuck")
    outcome.measured.append(f"landed at: {places}")
    least = plan.amount(quick=70, full=1000)
    outcome.require(landed.total() >= least, f"only {landed.total()} landed, of {least}")


def choose(plan: Plan, scenario: str) -> list[Point]:
    """Return the points of a scenario that this layer covers."""
    found = strace.points(scenario, plan.scratch)
    active = [point for point in found if point.call not in _PASSIVE]
    passive = [point for point in found if point.call in _PASSIVE]
    if plan.quick:
        return evenly(active, 22) + evenly(passive, 3)
    return active + evenly(passive, 60)


def clean(folder: Path) -> None:
    """Remove a folder and its file of acknowledgements."""
    shutil.rmtree(folder, ignore_errors=True)
    strace.acks_of(folder).unlink(missing_ok=True)
