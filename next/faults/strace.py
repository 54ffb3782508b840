"""Running a scenario under strace: where it touches its folder, and injecting a fault there."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from faults.scenarios import CLOSING

ROOT = Path(__file__).resolve().parents[1]

#: Every call by which a program can touch files; strace skips those that the machine lacks.
CALLS = (
    "openat open creat mkdir mkdirat write pwrite64 writev pwritev fsync fdatasync rename renameat"
    " renameat2 ftruncate fallocate unlink unlinkat rmdir flock fcntl mmap munmap read pread64"
    " lseek fchmod chmod fchmodat getdents64 fstat stat lstat newfstatat statx access faccessat2"
    " readlink readlinkat close"
).split()
_LINE = re.compile(r"^(?:(\d+)\s+)?(\w+)\((.*)$")
_SECONDS = 60
#: The exit code of a scenario that did not end by itself.
STUCK = 99


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """The ``when``-th call of one name that a scenario makes."""

    scenario: str
    call: str
    when: int


@dataclass(slots=True, kw_only=True)
class InjectedRun:
    """A scenario with a fault: how it ended, what it acknowledged, and the call that failed."""

    point: Point
    folder: Path
    code: int
    acks: list[str] = field(default_factory=list)
    errors: str = ""
    landed: bool = False
    closing: bool = False
    line: str = ""


def acks_of(folder: Path) -> Path:
    """Return the file of acknowledgements, which is next to the folder and not in it."""
    return folder.with_name(f"{folder.name}.acks")


def read_acks(path: Path) -> list[str]:
    """Return the complete lines of acknowledgements."""
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    return text[: text.rfind("\n") + 1].splitlines()


def command(scenario: str, folder: Path, acks: str) -> list[str]:
    """Return the command of a scenario; the real interpreter, not a shim."""
    return [sys.executable, "-m", "faults.scenarios", scenario, str(folder), acks]


@cache
def points(scenario: str, scratch: Path) -> tuple[Point, ...]:
    """Run a scenario without a fault and return its calls that touch its folder."""
    folder, log = scratch / f"{scenario}-unharmed", scratch / f"{scenario}.strace"
    names = ",".join(f"?{call}" for call in CALLS)
    words = ["strace", "-f", "-y", "-s", "4096", "-o", str(log), "-e", f"trace={names}"]
    words += command(scenario, folder, str(acks_of(folder)))
    subprocess.run(words, cwd=ROOT, check=True, capture_output=True, timeout=_SECONDS)
    seen: Counter[tuple[str, str]] = Counter()
    found: set[Point] = set()
    for line in log.read_text(encoding="utf-8", errors="replace").splitlines():
        match = _LINE.match(line)
        if not match:
            continue
        thread, call, rest = match.groups()
        seen[thread, call] += 1
        if touches(rest, folder):
            found.add(Point(scenario=scenario, call=call, when=seen[thread, call]))
    return tuple(sorted(found, key=lambda point: (point.call, point.when)))


def touches(text: str, folder: Path) -> bool:
    """Return whether the arguments of a call name the folder or something in it."""
    return f'"{folder}"' in text or f"<{folder}>" in text or f"{folder}/" in text


def run(point: Point, folder: Path, fault: str, *, seconds: float = _SECONDS) -> InjectedRun:
    """Run a scenario and inject a fault at one call; ``fault`` is in strace's syntax."""
    log = folder.with_name(f"{folder.name}.strace")
    inject = f"inject={point.call}:{fault}:when={point.when}"
    traced = f"trace={point.call},write"
    words = ["strace", "-f", "-y", "-o", str(log), "-e", traced, "-e", inject]
    words += command(point.scenario, folder, str(acks_of(folder)))
    code, errors = _run(words, seconds)
    acks = read_acks(acks_of(folder))
    line, closing = _failed_line(log, point)
    log.unlink()
    return InjectedRun(
        point=point,
        folder=folder,
        code=code,
        acks=acks,
        errors=errors,
        landed=touches(line, folder),
        closing=closing,
        line=line,
    )


def _run(words: list[str], seconds: float) -> tuple[int, str]:
    with subprocess.Popen(
        words,
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            _, errors = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            return STUCK, f"it was still running after {seconds:g} s"
    return process.returncode, errors


def _failed_line(log: Path, point: Point) -> tuple[str, bool]:
    """Return the arguments of the call with the fault, and whether the scenario was closing."""
    seen: Counter[str] = Counter()
    closing = False
    for line in log.read_text(encoding="utf-8", errors="replace").splitlines():
        match = _LINE.match(line)
        if not match:
            continue
        closing = closing or f'"{CLOSING}' in match[3]
        if match[2] == point.call:
            seen[match[1]] += 1
            if seen[match[1]] == point.when:
                return match[3], closing
    return "", closing
