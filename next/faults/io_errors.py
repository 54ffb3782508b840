"""Row 3: an I/O error is never acknowledged: EIO and ENOSPC at the calls, and a full disk."""

from __future__ import annotations

import subprocess
from collections import Counter
from itertools import count
from typing import TYPE_CHECKING

from faults import strace, tools
from faults.kills import clean
from faults.mounts import memory_disk, remount
from faults.registry import Outcome, Plan, row
from faults.scenarios import OURS, verify
from faults.strace import ROOT, command, read_acks
from faults.tools import ahead, evenly

if TYPE_CHECKING:
    from faults.strace import InjectedRun, Point

#: Which error each call may end with; a lost write returns success.
_ERRORS = {
    "EIO": "write pwrite64 fsync fdatasync ftruncate rename openat read pread64".split(),
    "ENOSPC": "write pwrite64 ftruncate openat mkdir".split(),
}
_SCENARIOS = ("first", "steps", "again")


@row(3, "an I/O error is never acknowledged", "≥ 200 errors, 0 false success")
def io_errors(plan: Plan, outcome: Outcome) -> None:
    """Inject an error at each call, and verify that what was acknowledged is there."""
    reason = tools.missing("strace")
    if reason:
        outcome.not_run.append(reason)
    else:
        _inject(plan, outcome)
    reason = tools.unprivileged() or tools.missing("mount")
    if reason:
        outcome.not_run.append(f"full disks: {reason}")
    else:
        _fill(plan, outcome)


def _inject(plan: Plan, outcome: Outcome) -> None:
    faults = [
        (point, error)
        for name in _SCENARIOS
        for error, calls in _ERRORS.items()
        for point in _choose(plan, name, calls)
    ]
    numbers, ends, landed = count(1), Counter[str](), 0

    def inject(fault: tuple[Point, str]) -> tuple[InjectedRun, str]:
        point, error = fault
        folder = plan.scratch / f"error-{next(numbers)}"
        return strace.run(point, folder, f"error={error}"), error

    for run, error in plan.track("errors", ahead(inject, faults), len(faults)):
        where = f"{run.point.scenario}, {error} at {run.point.call} number {run.point.when}"
        landed += run.landed
        if run.code not in {0, OURS}:
            outcome.fail(f"{where}: ended with {run.code}: {run.errors[-300:]}")
        ends["our error" if run.code == OURS else "success"] += 1
        for wrong in verify(run.folder, run.acks):
            outcome.fail(f"{where}: {wrong}")
        clean(run.folder)
    outcome.ran.append(f"{landed} errors at calls")
    outcome.measured.append(f"{ends['our error']} ended with our error, {ends['success']} well")


def _choose(plan: Plan, scenario: str, calls: list[str]) -> list[Point]:
    found = [point for point in strace.points(scenario, plan.scratch) if point.call in calls]
    return evenly(found, plan.amount(quick=8, full=60))


def _fill(plan: Plan, outcome: Outcome) -> None:
    sizes = plan.amount(quick=6, full=40)
    for number in plan.track("full disks", range(sizes), sizes):
        size = 4200 + 16 * number * (40 // sizes)
        with memory_disk(plan.scratch / f"disk-{number}", f"size={size}k") as disk:
            folder, acks = disk / "state", plan.scratch / f"acks-{number}"
            words = command("large", folder, str(acks))
            done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
            if done.returncode != OURS:
                outcome.fail(f"full disk {size}k: {done.returncode}: {done.stderr[-300:]}")
            remount(disk, "size=64m")
            for wrong in verify(folder, read_acks(acks)):
                outcome.fail(f"full disk {size}k: {wrong}")
    outcome.ran.append(f"{sizes} full disks")
    outcome.measured.append(f"{outcome.failed} false success")
