"""Row 3: a disk that fails is reported as failing, and never as success."""

from __future__ import annotations

from collections import Counter
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

from faults import strace, tools
from faults.full_disks import full_disks
from faults.kills import SCENARIOS, clean
from faults.registry import Outcome, Plan, row
from faults.scenarios import DONE, RAW_ERROR, WENT_ON
from faults.spread import ahead, evenly
from faults.verify import verify

if TYPE_CHECKING:
    from faults.strace import Point, Victim

_ERRORS = ("EIO", "ENOSPC")
#: Calls of which no error may go unnoticed: what they should have done was not done.
_TELLING = frozenset("write pwrite64 fsync fdatasync rename renameat renameat2".split())
#: Calls that cannot fail in these ways on a disk, or whose failure changes nothing.
_HARMLESS = frozenset("lseek fstat close munmap fcntl".split())


@row(
    3,
    "an I/O error is never acknowledged, and is an error of ours; a failed store must be reopened",
    "≥ 200 errors and full disks, 0 false success",
)
def io_errors(plan: Plan, outcome: Outcome) -> None:
    """Let each call fail in turn; then disks that are really full, thin or read-only."""
    reason = tools.missing("strace")
    if reason:
        outcome.not_run.append(f"injected errors: {reason}")
    else:
        _inject(plan, outcome)
    full_disks(plan, outcome)


def _inject(plan: Plan, outcome: Outcome) -> None:
    work = [(point, error) for name in SCENARIOS for point, error in _choose(plan, name)]
    numbers = count(1)

    def hurt(item: tuple[Point, str]) -> tuple[Victim, str]:
        point, error = item
        folder = plan.scratch / f"error-{next(numbers)}"
        return strace.run(point, folder, f"error={error}"), error

    before = outcome.failed
    seen: Counter[str] = Counter()
    for victim, error in plan.watch("injected errors", ahead(hurt, work), len(work)):
        if victim.landed:
            seen[victim.point.call] += 1
            _judge(victim, error, outcome)
        clean(victim.folder)
    outcome.ran.append(f"{seen.total():,} injected errors at {len(seen)} kinds of call")
    outcome.measured.append(f"{outcome.failed - before} wrong")
    least = plan.amount(quick=60, full=200)
    outcome.require(seen.total() >= least, f"only {seen.total()} errors landed, of {least}")


def _choose(plan: Plan, scenario: str) -> list[tuple[Point, str]]:
    found = [p for p in strace.points(scenario, plan.scratch) if p.call not in _HARMLESS]
    chosen = evenly(found, plan.amount(quick=20, full=120))
    return [(point, _ERRORS[number % 2]) for number, point in enumerate(chosen)]


def _is_folder(line: str) -> bool:
    """Return whether the only argument of a call is a descriptor of a folder."""
    return Path(line.partition("<")[2].partition(">")[0]).is_dir()


def _judge(victim: Victim, error: str, outcome: Outcome) -> None:
    point = victim.point
    where = f"{point.scenario}, {error} from {point.call} number {point.when}"
    noticed = any(ack.startswith("!") for ack in victim.acks)
    match victim.code:
        case code if code == RAW_ERROR:
            outcome.fail(f"{where}: a raw error: {strace.brief(victim.errors)}")
        case code if code == WENT_ON:
            outcome.fail(f"{where}: the store went on after a failed write")
        case code if code != DONE:
            outcome.fail(f"{where}: ended with {code}: {strace.brief(victim.errors)}")
    # SQLite syncs the folder and does not look at the result; we sync it again, and do.
    by_sqlite = point.call == "fdatasync" and _is_folder(victim.line)
    silent = not (noticed or victim.closing or by_sqlite) and victim.code == DONE
    if point.call in _TELLING and silent:
        outcome.fail(f"{where}: nobody was told")
    for wrong in verify(point.scenario, victim.folder, victim.acks):
        outcome.fail(f"{where}: {wrong}")
