"""Row 3: an I/O error is reported, and never acknowledged as success."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
from collections import Counter
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

from faults import strace, tools
from faults.kills import SCENARIOS, clean
from faults.mounts import LoopDisk, MountError, memory_disk, remount
from faults.registry import Outcome, Plan, row
from faults.scenarios import DONE, RAW_ERROR, WENT_ON
from faults.strace import ROOT, acks_of, brief, command, read_acks
from faults.tools import ahead, evenly
from faults.verify import verify

if TYPE_CHECKING:
    from collections.abc import Callable

    from faults.strace import InjectedRun, Point


_ERRORS = ("EIO", "ENOSPC")
#: Calls whose error must be reported: what they should have done was not done.
_REPORTED = frozenset("write pwrite64 fsync fdatasync rename renameat renameat2".split())
#: Calls that cannot fail in these ways on a disk, or whose failure changes nothing.
_HARMLESS = frozenset("lseek fstat close munmap fcntl".split())


@row(
    3,
    "an I/O error is never acknowledged and raises our error; a failed store must be reopened",
    "≥ 200 errors and full disks, 0 false success",
)
def io_errors(plan: Plan, outcome: Outcome) -> None:
    """Let each call fail in turn; then use full, thin and read-only disks."""
    reason = tools.missing("strace")
    if reason:
        outcome.not_run.append(f"injected errors: {reason}")
    else:
        _inject(plan, outcome)
    _full_disks(plan, outcome)


def _inject(plan: Plan, outcome: Outcome) -> None:
    work = [(point, error) for name in SCENARIOS for point, error in _choose(plan, name)]
    numbers = count(1)

    def inject(item: tuple[Point, str]) -> tuple[InjectedRun, str]:
        point, error = item
        folder = plan.scratch / f"error-{next(numbers)}"
        return strace.run(point, folder, f"error={error}"), error

    before = outcome.failed
    seen: Counter[str] = Counter()
    for run, error in plan.track("injected errors", ahead(inject, work), len(work)):
        if run.landed:
            seen[run.point.call] += 1
            _judge_injected(run, error, outcome)
        clean(run.folder)
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


def _judge_injected(run: InjectedRun, error: str, outcome: Outcome) -> None:
    point = run.point
    where = f"{point.scenario}, {error} from {point.call} number {point.when}"
    noticed = any(ack.startswith("!") for ack in run.acks)
    match run.code:
        case code if code == RAW_ERROR:
            outcome.fail(f"{where}: a raw error: {strace.brief(run.errors)}")
        case code if code == WENT_ON:
            outcome.fail(f"{where}: the store continued after a failed write")
        case code if code != DONE:
            outcome.fail(f"{where}: ended with {code}: {strace.brief(run.errors)}")
    # SQLite syncs the folder and ignores the result; we sync it again and check.
    by_sqlite = point.call == "fdatasync" and _is_folder(run.line)
    # A copy of a run that could not be written is an error when the hive is closed, unless a later
    # one took its place.
    excused = run.closing or by_sqlite or run.redone
    silent = not (noticed or excused) and run.code == DONE
    if point.call in _REPORTED and silent:
        outcome.fail(f"{where}: no error was reported")
    for wrong in verify(point.scenario, run.folder, run.acks):
        outcome.fail(f"{where}: {wrong}")


# --- full, thin and read-only disks ------------------------------------------------------------

_ON_DISKS = ("steps", "long", "checkpoint", "manager", "save", "first")
_SECONDS = 120


def _full_disks(plan: Plan, outcome: Outcome) -> None:
    """Run every scenario on every kind of bad disk, repair the disk, and verify."""
    names = _ON_DISKS[:4] if plan.quick else _ON_DISKS
    kinds: dict[str, Callable[[Plan, Outcome, str], None]] = {"ulimit -f": _short_files}
    reason = tools.unprivileged() or tools.missing("mount", "mkfs.ext4")
    if reason:
        outcome.not_run.append(f"full, thin and read-only disks: {reason}")
    else:
        kinds |= {
            "full tmpfs": _full,
            "no inodes": _no_inodes,
            "thin disk": _thin,
            "read-only": _read_only,
        }
    before, done = outcome.failed, 0
    for kind, run in plan.track("bad disks", kinds.items(), len(kinds)):
        for name in names:
            try:
                run(plan, outcome, name)
                done += 1
            except MountError as error:
                outcome.not_run.append(f"{kind}: {error}")
    outcome.ran.append(f"{done} runs on bad disks ({', '.join(kinds)})")
    outcome.measured.append(f"bad disks: {outcome.failed - before} wrong")


def _run(
    name: str, folder: Path, acks: Path, prepare: Callable[[], None] | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(name, folder, str(acks)),
        cwd=ROOT,
        check=False,
        capture_output=True,
        text=True,
        timeout=_SECONDS,
        preexec_fn=prepare,
    )


def _judge(
    outcome: Outcome,
    where: str,
    done: subprocess.CompletedProcess[str],
    acks: list[str],
    *,
    must_fail: bool,
) -> None:
    if done.returncode != DONE:
        outcome.fail(f"{where}: ended with {done.returncode}: {brief(done.stderr)}")
    if must_fail and not any(ack.startswith("!") for ack in acks):
        outcome.fail(f"{where}: no error was reported")


def _check(
    outcome: Outcome, where: str, name: str, folder: Path, acks: list[str], *, power: bool = False
) -> None:
    for wrong in verify(name, folder, acks, power=power):
        outcome.fail(f"{where}, after the repair: {wrong}")


def _short_files(plan: Plan, outcome: Outcome, name: str) -> None:
    """No file may grow over a few pages: a short write, then EFBIG."""
    for pages in (1, 9, 24):
        where = f"{name}, files up to {pages} pages"
        folder = plan.scratch / f"short-{name}-{pages}"
        acks = acks_of(folder)

        def limit(pages: int = pages) -> None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (pages * 4096, pages * 4096))

        done = _run(name, folder, acks, limit)
        acks_read = read_acks(acks)
        _judge(outcome, where, done, acks_read, must_fail=False)
        _check(outcome, where, name, folder, acks_read)
        shutil.rmtree(folder, ignore_errors=True)
        acks.unlink(missing_ok=True)


def _full(plan: Plan, outcome: Outcome, name: str) -> None:
    for size in ("16k", "64k", "112k", "160k"):
        _on_small_disk(plan, outcome, name, f"size={size},mode=700", "size=64m")


def _no_inodes(plan: Plan, outcome: Outcome, name: str) -> None:
    for inodes in (3, 6):
        _on_small_disk(plan, outcome, name, f"nr_inodes={inodes},mode=700", "nr_inodes=10000")


def _on_small_disk(plan: Plan, outcome: Outcome, name: str, small: str, repaired: str) -> None:
    where = f"{name} on tmpfs with {small}"
    acks = plan.scratch / "small.acks"
    with memory_disk(plan.scratch / "small", small) as point:
        done = _run(name, point / "state", acks)
        acks_read = read_acks(acks)
        _judge(outcome, where, done, acks_read, must_fail=name != "save" and "16k" in small)
        remount(point, repaired)
        _check(outcome, where, name, point / "state", acks_read)
    acks.unlink(missing_ok=True)


def _thin(plan: Plan, outcome: Outcome, name: str) -> None:
    """A file system larger than its device: writes succeed, fsync fails."""
    acks = plan.scratch / "thin.acks"
    with memory_disk(plan.scratch / "thin", "size=6m,mode=700") as point:
        disk = LoopDisk("ext4", point / "disk.img", plan.scratch / "thin-mount", 64 << 20)
        disk.mount()
        try:
            _fill(disk.point / "ballast", point)
            done = _run(name, disk.point / "state", acks)
            acks_read = read_acks(acks)
            _judge(outcome, f"{name} on a thin disk", done, acks_read, must_fail=False)
            remount(point, "size=128m")
        finally:
            disk.unmount()
        disk.mount()
        try:
            # The device lost pages that the kernel still had, as after a power cut.
            place = disk.point / "state"
            _check(outcome, f"{name} on a thin disk", name, place, acks_read, power=True)
        finally:
            disk.unmount()
    acks.unlink(missing_ok=True)


def _fill(ballast: Path, device: Path) -> None:
    """Leave only a few hundred kilobytes on the device."""
    free = shutil.disk_usage(device).free
    ballast.write_bytes(b"x" * max(0, free - (300 << 10)))
    with ballast.open("rb") as file:
        os.fsync(file.fileno())


def _read_only(plan: Plan, outcome: Outcome, name: str) -> None:
    """The folder was written once, and is on a read-only file system now."""
    acks = plan.scratch / "read-only.acks"
    with memory_disk(plan.scratch / "read-only", "size=64m,mode=700") as point:
        for prepared in (False, True):
            where = f"{name} on a read-only mount, {'used' if prepared else 'new'}"
            if prepared:
                remount(point, "rw")
                _run("first", point / "state", acks)
                acks.unlink()
            remount(point, "ro")
            done = _run(name, point / "state", acks)
            acks_read = read_acks(acks)
            _judge(outcome, where, done, acks_read, must_fail=True)
            acknowledged = [ack for ack in acks_read if ack[0] not in "!~"]
            outcome.require(not acknowledged, f"{where}: it acknowledged {acknowledged[:3]}")
            acks.unlink(missing_ok=True)
