"""What every test needs of the process that it runs in."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path

if sys.dont_write_bytecode:
    # Otherwise each of the processes that tests start compiles every module again.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    _cache = Path(__file__).resolve().parents[1] / "build" / "pycache"
    sys.pycache_prefix = os.environ.setdefault("PYTHONPYCACHEPREFIX", str(_cache))
    sys.dont_write_bytecode = False

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # As in a shell's background job; processes inherit it, and then no Ctrl+C ends them.
    signal.signal(signal.SIGINT, signal.default_int_handler)

_MEMORY = Path("/dev/shm")
_ENOUGH = 2 << 30
if "TMPDIR" not in os.environ and _MEMORY.is_dir() and shutil.disk_usage(_MEMORY).free > _ENOUGH:
    # Tests wait for the disk most of the time, and what a kill leaves is the same in memory.
    # `TMPDIR=/var/tmp make test` uses a disk, as the faults that are injected always do.
    os.environ["TMPDIR"] = str(_MEMORY)
    tempfile.tempdir = None
