"""What starting costs: importing the package, and the command's shortest answer."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.contender import Contender, Figures

_TIMES = 11
_COMMANDS = {
    "bare": [sys.executable, "-c", "pass"],
    "package": [sys.executable, "-c", "import maestro_hive"],
    "unified_execution": [sys.executable, "-c", "import maestro_hive.unified_execution"],
    "version": [str(Path(sys.executable).with_name("maestro")), "--version"],
}


def _start(_folder: Path) -> Figures:
    took: dict[str, list[float]] = {name: [] for name in _COMMANDS}
    for _ in range(_TIMES):
        for name, command in _COMMANDS.items():
            started = time.perf_counter()
            subprocess.run(command, check=True, capture_output=True)
            took[name].append(time.perf_counter() - started)
    found = {name: statistics.median(seconds) for name, seconds in took.items()}
    bare = found.pop("bare")
    version = found.pop("version")
    return {name: seconds - bare for name, seconds in found.items()} | {"version": version}


CONTENDERS = (Contender(name="start", group="import", measure=_start, once=True),)
