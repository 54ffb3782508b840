"""Row 2: the power is cut after an acknowledgement, on real file systems."""

from __future__ import annotations

import ctypes
import os
import random
import select
import shutil
import subprocess
import time
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING

from faults import tools
from faults.mounts import LoopDisk, MountError, loop_disk
from faults.registry import Outcome, Plan, row
from faults.scenarios import NO_SYNCS, verify
from faults.strace import ROOT, command

if TYPE_CHECKING:
    from pathlib import Path

#: Scenario, how many acknowledgements it gives, and which one writes at the same time.
_CUTS = (
    ("steps", 40, None),
    ("steps", 80, "second"),
    ("again", 16, None),
    ("large", 12, None),
    ("steps", 80, "second"),
    ("first", 1, None),
)
_PAGE = 4096
_WRITE_AND_WAIT = 7  # SYNC_FILE_RANGE_WAIT_BEFORE | WRITE | WAIT_AFTER
_SECONDS = 30


@row(
    2,
    "a power cut loses nothing acknowledged and leaves no folder that cannot be opened",
    "≥ 300 cuts on ext4 and on XFS, 0 lost",
)
def power_cuts(plan: Plan, outcome: Outcome) -> None:
    """Cut the power of both file systems many times."""
    reason = tools.unprivileged() or tools.missing("mount", "mkfs.ext4")
    if reason:
        outcome.not_run.append(reason)
        return
    for kind in ("ext4", "xfs"):
        reason = tools.missing(f"mkfs.{kind}")
        if reason:
            outcome.not_run.append(f"{kind}: {reason}")
            continue
        try:
            with loop_disk(kind, plan.scratch) as disk:
                _cut_often(plan, outcome, disk)
                _control(plan, outcome, disk)
        except MountError as error:
            outcome.not_run.append(f"{kind}: {error}")


def _cut_often(plan: Plan, outcome: Outcome, disk: LoopDisk) -> None:
    rng = random.Random(f"{plan.seed}/{disk.kind}")
    cuts = plan.amount(quick=16, full=304)
    before, written = outcome.failed, 0
    for number in plan.track(f"cuts on {disk.kind}", range(cuts), cuts):
        name, most, concurrent = _CUTS[number % len(_CUTS)]
        folder = disk.point / f"cut-{number}"
        after = rng.randrange(1, most + 1)
        names = [name, *([concurrent] if concurrent else [])]
        acks = _run_and_cut(disk, folder, names, after, rng)
        written += len(acks)
        disk.unmount()
        disk.mount()
        for wrong in verify(folder, acks):
            outcome.fail(f"{disk.kind}, {name} cut after {len(acks)}: {wrong}")
        shutil.rmtree(folder)
    outcome.ran.append(f"{cuts} cuts on {disk.kind}")
    outcome.measured.append(
        f"{disk.kind}: {outcome.failed - before} lost of {written:,} acknowledged"
    )


def _control(plan: Plan, outcome: Outcome, disk: LoopDisk) -> None:
    """Run without syncs, and check that losses are found: the test can fail."""
    rng = random.Random(plan.seed)
    cuts = plan.amount(quick=4, full=12)
    lost = 0
    for number in range(cuts):
        folder = disk.point / f"control-{number}"
        acks = _run_and_cut(disk, folder, ["steps"], 30, rng, {NO_SYNCS: "1"})
        disk.unmount()
        disk.mount()
        lost += bool(verify(folder, acks))
        shutil.rmtree(folder, ignore_errors=True)
    outcome.measured.append(f"control without syncs: {lost} of {cuts} lost")
    outcome.require(
        lost, f"{disk.kind}: no loss without syncs: the cuts have no effect, or the control syncs"
    )


def _run_and_cut(
    disk: LoopDisk,
    folder: Path,
    names: list[str],
    after: int,
    rng: random.Random,
    environment: dict[str, str] | None = None,
) -> list[str]:
    """Run scenarios until they have acknowledged ``after`` times, and cut.

    Return what was acknowledged before the cut: a sync that runs during it may return success, to
    a process that would not exist any more.
    """
    reader, writer = os.pipe()
    with ExitStack() as stack:
        stack.callback(os.close, reader)
        processes = [
            stack.enter_context(
                subprocess.Popen(
                    command(name, folder, "-"),
                    cwd=ROOT,
                    stdout=writer,
                    stderr=subprocess.DEVNULL,
                    env=os.environ | (environment or {}),
                )
            )
            for name in names
        ]
        os.close(writer)
        certain = _read_until(reader, after)
        if rng.random() < 0.5:
            time.sleep(rng.uniform(0, 0.002))
        if rng.random() < 0.3:
            _write_out_of_order(folder / "journal.db-wal", rng)
        certain += _read_now(reader)
        disk.cut()
        for process in processes:
            process.kill()
            process.wait()
    return certain[: certain.rfind(b"\n") + 1].decode().splitlines()


def _read_now(reader: int) -> bytes:
    ready, _, _ = select.select([reader], [], [], 0)
    return os.read(reader, 65536) if ready else b""


def _read_until(reader: int, lines: int) -> bytes:
    text = b""
    deadline = time.monotonic() + _SECONDS
    while text.count(b"\n") < lines and time.monotonic() < deadline:
        ready, _, _ = select.select([reader], [], [], 1)
        more = os.read(reader, 65536) if ready else b"-"
        if not more:
            break
        text += more if ready else b""
    return text


def _write_out_of_order(log: Path, rng: random.Random) -> None:
    """Write some pages of the WAL to the disk before others, as a kernel may."""
    libc = ctypes.CDLL(None, use_errno=True)
    with suppress(OSError):
        fd = os.open(log, os.O_RDONLY)
        try:
            pages = os.fstat(fd).st_size // _PAGE
            for page in range(pages):
                if rng.random() < 0.5:
                    start = ctypes.c_int64(page * _PAGE)
                    libc.sync_file_range(fd, start, ctypes.c_int64(_PAGE), _WRITE_AND_WAIT)
        finally:
            os.close(fd)
