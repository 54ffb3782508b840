"""The machine: what it is, and waiting until nobody else uses it."""

from __future__ import annotations

import os
import platform
import time
from pathlib import Path
from typing import NamedTuple

import apsw

#: A machine with this share of its processor time in use counts as quiet.
_QUIET_SHARE = 0.2
_LOOK_SECONDS = 0.25


class Quiet(NamedTuple):
    """How quiet it was in the end, and how long that took."""

    busy_share: float | None
    waited: float

    @property
    def reached(self) -> bool:
        """False if somebody else kept the machine busy."""
        return self.busy_share is None or self.busy_share <= _QUIET_SHARE


def wait_until_quiet(at_most: float) -> Quiet:
    """Wait until the processors are idle, for up to ``at_most`` seconds."""
    started = time.monotonic()
    while True:
        share = _busy_share()
        waited = time.monotonic() - started
        if share is None or share <= _QUIET_SHARE or waited >= at_most:
            return Quiet(share, waited)


def _busy_share() -> float | None:
    before = _ticks()
    if before is None:
        return None  # a system without /proc: nobody can tell
    time.sleep(_LOOK_SECONDS)
    after = _ticks()
    assert after is not None
    return 1 - (after[0] - before[0]) / max(1, after[1] - before[1])


def _ticks() -> tuple[int, int] | None:
    """Return idle and all ticks of all processors."""
    try:
        line = Path("/proc/stat").read_text(encoding="ascii").partition("\n")[0]
    except OSError:
        return None
    ticks = [int(word) for word in line.split()[1:9]]
    return ticks[3] + ticks[4], sum(ticks)


def describe(folder: Path) -> str:
    """Return the machine in one line."""
    return (
        f"{platform.system()} {platform.machine()}, {os.cpu_count()} processors,"
        f" {_file_system(folder)}, Python {platform.python_version()},"
        f" SQLite {apsw.sqlite_lib_version()}"
    )


def _file_system(folder: Path) -> str:
    try:
        mounts = Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines()
    except OSError:
        return "a file system of unknown type"
    place = f"{folder.resolve()}/"
    found = [
        (len(where), kind)
        for _, where, kind, *_ in (line.split() for line in mounts)
        if place.startswith(where.rstrip("/") + "/")
    ]
    return max(found)[1] if found else "a file system of unknown type"
