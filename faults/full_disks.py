"""Disks that are really full, thin or read-only, for row 3."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
from typing import TYPE_CHECKING

from faults import tools
from faults.mounts import LoopDisk, MountError, memory_disk, remount
from faults.scenarios import DONE
from faults.strace import ROOT, acks_of, brief, command, read_acks
from faults.verify import verify

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from faults.registry import Outcome, Plan

_SCENARIOS = ("steps", "long", "checkpoint", "manager", "save", "first")
_SECONDS = 120


def full_disks(plan: Plan, outcome: Outcome) -> None:
    """Run every scenario on every kind of bad disk, mend the disk, and look."""
    names = _SCENARIOS[:4] if plan.quick else _SCENARIOS
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
    for kind, hurt in plan.watch("bad disks", kinds.items(), len(kinds)):
        for name in names:
            try:
                hurt(plan, outcome, name)
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
        outcome.fail(f"{where}: nobody was told")


def _check(
    outcome: Outcome, where: str, name: str, folder: Path, acks: list[str], *, power: bool = False
) -> None:
    for wrong in verify(name, folder, acks, power=power):
        outcome.fail(f"{where}, after mending: {wrong}")


def _short_files(plan: Plan, outcome: Outcome, name: str) -> None:
    """No file may grow over a few pages: a short write, then EFBIG."""
    for pages in (1, 9, 24):
        where = f"{name}, files up to {pages} pages"
        folder = plan.scratch / f"short-{name}-{pages}"
        acks = acks_of(folder)

        def limit(pages: int = pages) -> None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (pages * 4096, pages * 4096))

        done = _run(name, folder, acks, limit)
        said = read_acks(acks)
        _judge(outcome, where, done, said, must_fail=False)
        _check(outcome, where, name, folder, said)
        shutil.rmtree(folder, ignore_errors=True)
        acks.unlink(missing_ok=True)


def _full(plan: Plan, outcome: Outcome, name: str) -> None:
    for size in ("16k", "64k", "112k", "160k"):
        _on_small_disk(plan, outcome, name, f"size={size},mode=700", "size=64m")


def _no_inodes(plan: Plan, outcome: Outcome, name: str) -> None:
    for inodes in (3, 6):
        _on_small_disk(plan, outcome, name, f"nr_inodes={inodes},mode=700", "nr_inodes=10000")


def _on_small_disk(plan: Plan, outcome: Outcome, name: str, small: str, mended: str) -> None:
    where = f"{name} on tmpfs with {small}"
    acks = plan.scratch / "small.acks"
    with memory_disk(plan.scratch / "small", small) as point:
        done = _run(name, point / "state", acks)
        said = read_acks(acks)
        _judge(outcome, where, done, said, must_fail=name != "save" and "16k" in small)
        remount(point, mended)
        _check(outcome, where, name, point / "state", said)
    acks.unlink(missing_ok=True)


def _thin(plan: Plan, outcome: Outcome, name: str) -> None:
    """A file system that promises more than its device holds: writes succeed, fsync does not."""
    acks = plan.scratch / "thin.acks"
    with memory_disk(plan.scratch / "thin", "size=6m,mode=700") as point:
        disk = LoopDisk("ext4", point / "disk.img", plan.scratch / "thin-mount", 64 << 20)
        disk.mount()
        try:
            _fill(disk.point / "ballast", point)
            done = _run(name, disk.point / "state", acks)
            said = read_acks(acks)
            _judge(outcome, f"{name} on a thin disk", done, said, must_fail=False)
            remount(point, "size=128m")
        finally:
            disk.unmount()
        disk.mount()
        try:
            # The device lost pages that the kernel still had: as after a power cut.
            place = disk.point / "state"
            _check(outcome, f"{name} on a thin disk", name, place, said, power=True)
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
            said = read_acks(acks)
            _judge(outcome, where, done, said, must_fail=True)
            kept = [ack for ack in said if ack[0] not in "!~"]
            outcome.require(not kept, f"{where}: it acknowledged {kept[:3]}")
            acks.unlink(missing_ok=True)
