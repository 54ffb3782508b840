"""The settings of every test: bytecode, signals, temporary folders, hypothesis."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path

from hypothesis import settings

if sys.dont_write_bytecode:
    # Otherwise each of the processes that tests start compiles every module again.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # As in a shell's background job; processes inherit it, and then no Ctrl+C ends them.
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # as of a job of nohup

_MEMORY = Path("/dev/shm")
_ENOUGH = 2 << 30
if "TMPDIR" not in os.environ and _MEMORY.is_dir() and shutil.disk_usage(_MEMORY).free > _ENOUGH:
    # Tests wait for the disk most of the time, and a kill leaves the same files in memory.
    # `TMPDIR=/var/tmp make test` uses a disk, as the fault tests always do.
    os.environ["TMPDIR"] = str(_MEMORY)
    tempfile.tempdir = None

# A busy machine is no failure; a test that hangs is ended by the timeout of pytest.
# The same examples every time: a change is judged by its effect, not by the examples drawn for it.
settings.register_profile("same", deadline=None, derandomize=True)
settings.load_profile("same")
