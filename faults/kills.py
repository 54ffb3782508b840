"""Row 1: ``kill -9`` at every call by which the storage layer touches its folder."""

from __future__ import annotations

import shutil
import signal
from collections import Counter
from itertools import count
from typing import TYPE_CHECKING

from faults import strace, tools
from faults.executor_scenario import was_in_a_step
from faults.registry import Outcome, Plan, row
from faults.tools import ahead, evenly
from faults.verify import false_alarm, verify

if TYPE_CHECKING:
    from pathlib import Path

    from faults.strace import InjectedRun, Point

SCENARIOS = ("first", "steps", "checkpoint", "manager", "save", "execute", "hive", "imported")
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
        folder = plan.scratch / f"kill-{next(numbers)}"
        return strace.run(point, folder, "signal=KILL")

    landed: Counter[str] = Counter()
    alarms = in_a_step = 0
    for run in plan.track("kill points", ahead(inject, chosen), len(chosen)):
        alarms += _judge(run, outcome)
        if run.landed and run.code in _KILLED:
            landed[f"{run.point.scenario} {run.point.call}"] += 1
            in_a_step += run.point.scenario == "execute" and was_in_a_step(run.acks)
        clean(run.folder)
    executed = sum(number for name, number in landed.items() if name.startswith("execute "))
    outcome.measured.append(f"{in_a_step} of {executed} kills of the executor were in a step")
    _report(plan, outcome, landed, alarms)


def choose(plan: Plan, scenario: str) -> list[Point]:
    """Return the points of a scenario that this layer covers."""
    found = strace.points(scenario, plan.scratch)
    active = [point for point in found if point.call not in _PASSIVE]
    passive = [point for point in found if point.call in _PASSIVE]
    if plan.quick:
        return evenly(active, 22) + evenly(passive, 3)
    return active + evenly(passive, 60)


def _judge(run: InjectedRun, outcome: Outcome) -> bool:
    point = run.point
    where = f"{point.scenario}, {point.call} number {point.when}"
    if run.code not in {*_KILLED, 0}:
        outcome.fail(f"{where}: ended with {run.code}: {run.errors[-300:]}")
    alarm = False
    for wrong in verify(point.scenario, run.folder, run.acks):
        outcome.fail(f"{where}: {wrong}")
    if run.folder.exists():
        alarm = false_alarm(run.folder)
    return alarm


def clean(folder: Path) -> None:
    """Remove a folder and its file of acknowledgements."""
    shutil.rmtree(folder, ignore_errors=True)
    strace.acks_of(folder).unlink(missing_ok=True)


def _report(plan: Plan, outcome: Outcome, landed: Counter[str], alarms: int) -> None:
    total = landed.total()
    outcome.ran.append(f"{total:,} kills over {len(SCENARIOS)} scenarios")
    by_call: Counter[str] = Counter()
    for name, number in landed.items():
        by_call[name.split()[1]] += number
    places = ", ".join(f"{call} {number}" for call, number in by_call.most_common())
    outcome.measured.append(f"{outcome.failed} lost or stuck; {alarms} false damage reports")
    outcome.measured.append(f"landed at: {places}")
    outcome.require(alarms == 0, f"{alarms} intact folders were reported as damaged")
    least = plan.amount(quick=90, full=1000)
    outcome.require(total >= least, f"only {total} kills landed in the folder, of {least}")
