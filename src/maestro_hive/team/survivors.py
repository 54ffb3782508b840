"""Process groups that outlived the engine that started them, and its guard: found and ended.

Each is recorded in a file of its run, by boot id, process id and start time, before it may begin. The
next start of a run in the same folder, and of the same state folder, ends what is left.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import NamedTuple

from maestro_hive.kernel.clock import SystemClock
from maestro_hive.kernel.errors import StorageError
from maestro_hive.kernel.files import make_private_folder, reason_of

#: Where the groups of a run are recorded, in its folder.
PROCESSES = "processes"
#: For how many seconds the end of survivors is waited for after SIGKILL.
_SURVIVOR_SECONDS = 10.0
_PROC = Path("/proc")


class _Status(NamedTuple):
    """What the system says of a process."""

    group: int
    start: str
    is_dead: bool
    is_suspended: bool


class Survivors:
    """The groups of a run that have not ended, in a folder: a file for each, made before it starts."""

    def __init__(self, folder: Path, run_id: str) -> None:
        self._folder = folder
        self._mark = f"MAESTRO_RUN_ID={run_id}".encode()
        self._boot = SystemClock().boot_id()
        #: The processes that were found in groups with their leaders, by number and start.
        self._known: set[tuple[int, str]] = set()

    def add(self, pid: int) -> None:
        """Record a group that is about to start. A power cut ends it, so nothing is synced."""
        status = _status(pid)
        text = f"{self._boot} {status.start if status is not None else '?'}\n"
        try:
            make_private_folder(self._folder)
            path = self._folder / str(pid)
            path.touch(mode=0o600)
            path.write_text(text, encoding="ascii")
        except OSError as error:
            raise StorageError(
                f"process {pid} could not be recorded in {self._folder}: {reason_of(error)}"
            ) from error

    def remove(self, pid: int) -> None:
        """Note that a group has ended."""
        with contextlib.suppress(OSError):  # what is left is looked at, at the next start
            (self._folder / str(pid)).unlink(missing_ok=True)

    def end(self) -> int:
        """Kill the groups that an earlier life has left, wait for their end; return how many."""
        left = [path for path in self._recorded() if self._members(path)]
        deadline = time.monotonic() + _SURVIVOR_SECONDS
        for path in left:
            while members := self._members(path):
                if time.monotonic() > deadline:
                    raise StorageError(
                        f"process {members[0]} of an earlier start of this run does not end; end it,"
                        " and resume the run"
                    )
                _kill(int(path.name), members)
                time.sleep(0.005)
        for path in self._recorded():
            path.unlink(missing_ok=True)
        return len(left)

    def _recorded(self) -> list[Path]:
        if not self._folder.is_dir():
            return []
        return sorted(each for each in self._folder.iterdir() if each.name.isdecimal())

    def _members(self, path: Path) -> list[int]:
        """Return the processes of a recorded group that are alive."""
        boot, _, start = path.read_text("ascii", "replace").strip().partition(" ")
        group = int(path.name)
        if boot != self._boot:
            return []
        leader = _status(group)
        if leader is not None and leader.start != start:
            return []  # the number is another's
        if leader is not None and not _PROC.is_dir():
            return [] if leader.is_dead else [group]
        members = _group_members(group)
        if leader is not None:  # then the group is the one that was recorded
            self._known.update((pid, status.start) for pid, status in members.items())
            return list(members)
        # Its leader has ended before them. Then the number may be another group's by now, so they must
        # have the environment that they were started with, which programs may have cleared.
        return [
            pid
            for pid, status in members.items()
            if (pid, status.start) in self._known or self._is_ours(pid)
        ]

    def _is_ours(self, pid: int) -> bool:
        with contextlib.suppress(OSError):
            return self._mark in (_PROC / str(pid) / "environ").read_bytes().split(b"\0")
        return False


def is_suspended(pid: int) -> bool:
    """Return whether a process was suspended by a signal, and does nothing until it is continued."""
    status = _status(pid)
    return status is not None and status.is_suspended


def runs_with_processes(runs: Path) -> list[Path]:
    """Return the folders of the runs of which processes are recorded that have not ended."""
    return sorted({each.parent.parent for each in runs.glob(f"*/{PROCESSES}/*")})


def _status(pid: int) -> _Status | None:
    """Return what the system says of a process; None if there is none."""
    if not _PROC.is_dir():
        return _status_by_ps(pid)
    try:
        text = (_PROC / str(pid) / "stat").read_text("utf-8", "replace")
    except OSError:
        return None
    words = text.rpartition(")")[2].split()
    return _Status(
        group=int(words[2]),
        start=words[19],
        is_dead=words[0] in "ZX",
        is_suspended=words[0] in "Tt",
    )


def _status_by_ps(pid: int) -> _Status | None:
    found = subprocess.run(  # noqa: S603 - a number
        ["/bin/ps", "-o", "pgid=,stat=,lstart=", "-p", str(pid)],
        capture_output=True,
        text=True,
        check=False,
    )
    words = found.stdout.split()
    if len(words) < 3:
        return None
    return _Status(
        group=int(words[0]),
        start="-".join(words[2:]),
        is_dead=words[1].startswith("Z"),
        is_suspended=words[1].startswith("T"),
    )


def _group_members(group: int) -> dict[int, _Status]:
    """Return the processes of a group that are alive."""
    numbers = [int(each.name) for each in _PROC.iterdir() if each.name.isdecimal()]
    found = {pid: status for pid in numbers if (status := _status(pid)) is not None}
    return {
        pid: status for pid, status in found.items() if status.group == group and not status.is_dead
    }


def _kill(group: int, members: list[int]) -> None:
    """Kill processes of a group; with its leader, all at once, also those that they start just now."""
    if group in members:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)
        return
    for pid in members:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
