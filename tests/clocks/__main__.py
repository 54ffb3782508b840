"""Runs the tests that depend on a clock at other dates: ``make test-dates``.

``offset_clock.c``, which is compiled and preloaded, shifts the wall clock of the tests and of all
processes that they start. The clock since boot stays the real one, as on a machine whose date is set.
libfaketime is not used: it fakes sleeps and the locks of threads too, and breaks some of both.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from datetime import UTC, datetime, time, timedelta
from pathlib import Path
from zoneinfo import ZoneInfo

HERE = Path(__file__).resolve().parent
TESTS = HERE.parent
_MISSING = (
    "make test-dates needs Linux and a C compiler: install the Debian packages gcc and libc6-dev"
    " (apt-get install gcc libc6-dev)"
)
#: What a file of tests contains that depend on a clock: its name, a call, or what is about days.
_ABOUT_CLOCKS = re.compile(
    r"Clock\(|clock\.advance|datetime\.now|time\.time\(|_mtime|\butime\b"
    r"|cron|schedules|lease_seconds|today|\bday=|\"day|golden"
)
_ZONE = "Europe/Berlin"
#: The tests have started when a change comes so long after their processes.
_BEFORE = timedelta(seconds=30)


def clocks() -> dict[str, datetime]:
    """Return the times to run the tests at, by name."""
    now = datetime.now(UTC)
    midnight = datetime.combine(now.date() + timedelta(days=1), time(), UTC)
    return {
        "in 2 days": now + timedelta(days=2),
        "in 400 days": now + timedelta(days=400),
        "over midnight": midnight - _BEFORE,
        "over the change to daylight saving": daylight_saving(midnight) - _BEFORE,
    }


def daylight_saving(after: datetime) -> datetime:
    """Return when clocks are next put forward."""
    zone, hour = ZoneInfo(_ZONE), timedelta(hours=1)
    before = after
    while not _offset(before, zone) < _offset(before + hour, zone):
        before += hour
    return before + hour


def _offset(when: datetime, zone: ZoneInfo) -> timedelta:
    return when.astimezone(zone).utcoffset() or timedelta()


def selected() -> list[str]:
    """Return the files of tests that depend on a clock."""
    return [
        str(path)
        for path in sorted(TESTS.rglob("test_*.py"))
        if _ABOUT_CLOCKS.search(path.read_text(encoding="utf-8"))
    ]


def compiled(folder: Path) -> Path | None:
    """Return the library that shifts the clock; None without a compiler."""
    library, compiler = folder / "offset_clock.so", shutil.which("cc") or shutil.which("gcc")
    if compiler is None or sys.platform != "linux":
        return None
    command = [compiler, "-shared", "-fPIC", "-O2", "-Wall", "-Werror", "-o", str(library)]
    subprocess.run([*command, str(HERE / "offset_clock.c"), "-ldl"], check=True)
    return library


def run(library: Path, at: datetime, arguments: list[str]) -> int:
    """Run the selected tests at another time; return the exit code of pytest."""
    seconds = round((at - datetime.now(UTC)).total_seconds())
    changes = {
        "CLOCK_OFFSET": str(seconds),
        "LD_PRELOAD": str(library),
        "TZ": _ZONE,
    }
    command = [sys.executable, "-m", "pytest", *selected(), "-q", "-m", "not timing", *arguments]
    return subprocess.run(command, env={**os.environ, **changes}, check=False).returncode


def main() -> int:
    """Run the tests at each time; return an exit code."""
    with tempfile.TemporaryDirectory() as folder:
        library = compiled(Path(folder))
        if library is None:
            sys.stderr.write(f"{_MISSING}\n")
            return 1 if os.environ.get("CI") == "true" else 0
        failed = []
        for name, at in clocks().items():
            sys.stdout.write(f"\n{name}: {at:%Y-%m-%d %H:%M:%S} UTC\n")
            sys.stdout.flush()
            if run(library, at, sys.argv[1:]):
                failed.append(name)
    if failed:
        sys.stderr.write(f"tests fail {', '.join(failed)}\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
