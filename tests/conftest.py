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
from typing import TYPE_CHECKING, Any

import pytest
from _pytest.assertion import rewrite
from hypothesis import settings

from maestro_hive.kernel import redaction

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

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
    # Tests wait for the disk most of the time, and what a kill leaves is the same in memory.
    # `TMPDIR=/var/tmp make test` uses a disk, as the faults that are injected always do.
    os.environ["TMPDIR"] = str(_MEMORY)
    tempfile.tempdir = None

# A busy machine is no failure; a test that hangs is ended by the limit of its command.
# The same examples every time: a change is judged by what it does, not by what was drawn for it.
# `make fuzz` draws others.
settings.register_profile("same", deadline=None, derandomize=True)
settings.register_profile("others", deadline=None)
settings.load_profile("same")


def pytest_xdist_setupnodes(config: pytest.Config) -> None:
    """Rewrite the asserts of test files once, on all cores, before each worker does it for itself.

    After a checkout that is most of what collecting the tests costs.
    """
    places = [config.invocation_params.dir / arg.partition("::")[0] for arg in config.args]
    files = [
        path for place in places for path in (place.rglob("*.py") if place.is_dir() else [place])
    ]
    missing = [
        path
        for path in files
        if path.name.startswith(("test_", "conftest")) and not _rewritten(path).exists()
    ]
    processes = os.cpu_count() or 1
    started = []
    for number in range(min(processes, len(missing))):
        pid = os.fork()
        if pid == 0:
            try:
                for path in missing[number::processes]:
                    _rewrite(config, path)
            finally:
                os._exit(0)  # what it could not do, the workers do, or report
        started.append(pid)
    for pid in started:
        os.waitpid(pid, 0)


def _rewritten(path: Path) -> Path:
    return rewrite.get_cache_dir(path) / (path.stem + rewrite.PYC_TAIL)


def _rewrite(config: pytest.Config, path: Path) -> None:
    target = _rewritten(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    digest, code = rewrite._rewrite_test(path, config)
    rewrite._write_pyc(config.stash[rewrite.assertstate_key], code, digest, target)


def pytest_sessionstart(session: pytest.Session) -> None:
    """Send the main process no report that says nothing: of a setup or teardown that passed.

    Each costs both processes half a millisecond. ``--durations`` and the like ask for all of them.
    """
    options = session.config.option
    if options.durations is not None or options.xmlpath:
        return
    for plugin in session.config.pluginmanager.get_plugins():
        if type(plugin).__name__ == "WorkerInteractor":
            plugin.sendevent = _telling(plugin.sendevent)


def _telling(send: Callable[..., None]) -> Callable[..., None]:
    def send_if_it_tells(name: str, **content: Any) -> None:
        report = content["data"] if name == "testreport" else {}
        passed = report.get("outcome") == "passed" and not report["sections"]
        if not passed or report["when"] == "call":
            send(name, **content)

    return send_if_it_tells


def pytest_collection_finish() -> None:
    """Take what was collected out of what the garbage collector looks through again and again."""
    gc.collect()
    gc.freeze()


class _Descriptors:
    """How many files the process has open, and with how many it looks for those that were dropped."""

    folder = "/dev/fd"
    more = 200
    limit = more

    @classmethod
    def count(cls) -> int:
        try:
            return len(os.listdir(cls.folder))  # noqa: PTH208 - after every test: three times as quick
        except OSError:
            return 0


def pytest_runtest_logfinish() -> None:
    """Close the stores that tests have dropped: each holds files, and select() takes 1,024 of them.

    The garbage collector does, but comes rarely to a process that lasts.
    """
    if _Descriptors.count() > _Descriptors.limit:
        gc.collect()
        _Descriptors.limit = _Descriptors.count() + _Descriptors.more


@pytest.fixture(autouse=True)
def _what_a_process_shares_is_left_as_it_was() -> Iterator[None]:
    """Let no test redact what later tests of its process print, or keep their log lines.

    Both in one fixture, because each costs a tenth of a millisecond in every test.
    """
    known = redaction._KNOWN
    before = known._marked
    yield
    if known._marked is not before:
        known._marked, known._environment = before, None
    logger = logging.getLogger("maestro_hive")
    propagate, logger.propagate = logger.propagate, True
    assert propagate, "the loggers of the package no longer pass on their records"
