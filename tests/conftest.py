"""What every test needs of the process that it runs in."""

from __future__ import annotations

import gc
import logging
import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

from maestro_hive.kernel import redaction

if TYPE_CHECKING:
    from collections.abc import Iterator

if sys.dont_write_bytecode:
    # Otherwise each of the processes that tests start compiles every module again.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    _cache = Path(__file__).resolve().parents[1] / "build" / "pycache"
    sys.pycache_prefix = os.environ.setdefault("PYTHONPYCACHEPREFIX", str(_cache))
    sys.dont_write_bytecode = False

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # As in a shell's background job; processes inherit it, and then no Ctrl+C ends them.
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # as of a job of nohup

_MEMORY = Path("/dev/shm")
_ENOUGH = 2 << 30
if "TMPDIR" not in os.environ and _MEMORY.is_dir() and shutil.disk_usage(_MEMORY).free > _ENOUGH:
    # Tests wait for the disk most of the time, and what a kill leaves is the same in memory.
    # `TMPDIR=/var/tmp make test` uses a disk, as the faults that are injected always do.
    os.environ["TMPDIR"] = str(_MEMORY)
    tempfile.tempdir = None

# A busy machine is no failure; a test that hangs is ended by the limit of its command.
settings.register_profile("maestro", deadline=None)
settings.load_profile("maestro")


def pytest_collection_finish() -> None:
    """Take what was collected out of what the garbage collector looks through again and again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _secrets_are_forgotten() -> Iterator[None]:
    """Let no test redact what later tests of its process print."""
    known = redaction._KNOWN
    before = known._marked
    yield
    if known._marked is not before:
        known._marked, known._environment = before, None


@pytest.fixture(autouse=True)
def _loggers_are_left_as_they_were() -> Iterator[None]:
    """Fail a test that calls the command and keeps the log lines of later tests from their handlers."""
    yield
    logger = logging.getLogger("maestro_hive")
    propagate, logger.propagate = logger.propagate, True
    assert propagate, "the loggers of the package no longer pass on their records"
