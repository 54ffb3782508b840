"""A scenario that kills itself at its Nth call to the disk: from our code, or from SQLite.

``python fault_injector.py SCENARIO FOLDER STRIDE how`` tries every STRIDE-th call, each in a process of
its own that is forked from this one, and prints what was left of each as JSON. SQLite's calls are
counted in a VFS that stands under its page checksums, so nothing but Python is needed.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import apsw

from faults.scenarios import CLOSING, SCENARIOS, ContinuedAfterFailureError
from faults.verify import verify
from maestro_hive.kernel.errors import MaestroError

if TYPE_CHECKING:
    from collections.abc import Callable

#: The calls of our own code that change something on the disk, and those made for it.
CALLS = "open mkdir chmod fchmod write pwrite ftruncate fsync fdatasync rename unlink close".split()
#: Those whose failure on a real disk means that something was not done.
FAILING = ("open", "mkdir", "write", "pwrite", "fsync", "fdatasync", "rename")
DONE, OURS, RAW, WENT_ON = 0, 3, 4, 5
_MOST_POINTS = 3000


class FaultInjector:
    """Counts calls, and at the chosen one ends the process or fails."""

    def __init__(self) -> None:
        self.calls = 0
        self.fail_at = 0
        self.how = "kill"
        self.log = -1

    def tick(self, name: str) -> None:
        """Count a call."""
        self.calls += 1
        if self.calls == self.fail_at:
            _write(self.log, f"@{name}\n".encode())
            if self.how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise OSError(errno.EIO, "Input/output error")


injector = FaultInjector()
_references: list[object] = []  # a VFS that nobody refers to is gone
_write = os.write


class CountingFile(apsw.VFSFile):
    """A file of SQLite's whose changes are counted."""

    def xWrite(self, data: bytes, offset: int) -> None:  # noqa: N802
        _tick_sqlite("xWrite", apsw.IOError)
        super().xWrite(data, offset)

    def xSync(self, flags: int) -> None:  # noqa: N802
        _tick_sqlite("xSync", apsw.IOError)
        super().xSync(flags)

    def xTruncate(self, size: int) -> None:  # noqa: N802
        _tick_sqlite("xTruncate", apsw.IOError)
        super().xTruncate(size)


class CountingVFS(apsw.VFS):
    """The system's VFS, with a fuse in it."""

    def __init__(self) -> None:
        self.base = apsw.vfs_names()[0]
        super().__init__("fuse", self.base, makedefault=True)

    def xOpen(self, name: Any, flags: list[int]) -> CountingFile:  # noqa: N802
        _tick_sqlite("xOpen", apsw.CantOpenError)
        return CountingFile(self.base, name, flags)

    def xDelete(self, name: str, syncdir: bool) -> None:  # noqa: N802
        _tick_sqlite("xDelete", apsw.IOError)
        super().xDelete(name, syncdir)


def _tick_sqlite(name: str, problem: type[apsw.Error]) -> None:
    try:
        injector.tick(name)
    except OSError as error:
        raise problem(f"{name} failed") from error


def _wrap_os(names: tuple[str, ...] | list[str]) -> None:
    def wrap(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **options: Any) -> Any:
            injector.tick(name)
            return real(*args, **options)

        return wrapped

    for name in names:
        setattr(os, name, wrap(name, getattr(os, name)))


def _run(scenario: str, folder: Path, acks: int) -> int:
    reports = ""
    try:
        for reports in SCENARIOS[scenario](folder):
            _write(acks, f"{reports}\n".encode())
    except MaestroError as error:
        _write(acks, f"! {error}\n".encode())
        return OURS
    except ContinuedAfterFailureError:
        return WENT_ON
    except BaseException as error:  # noqa: BLE001 - it is reported
        if reports == CLOSING and isinstance(error, apsw.Error):
            return OURS  # SQLite itself keeps quiet there; a VFS in Python cannot
        _write(acks, f"! a raw {type(error).__name__}: {error}\n".encode())
        return RAW
    return DONE


def _fork(work: Callable[[int], int], seconds: float = 60) -> tuple[int, list[str]]:
    """Do work in a process of its own; return how it ended, and the lines it wrote."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 99
        try:
            os.close(reader)
            signal.alarm(int(seconds))
            code = work(writer)
        finally:
            os._exit(code)
    os.close(writer)
    with os.fdopen(reader) as lines:
        text = lines.read()
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status), text.splitlines()


def _try(scenario: str, folder: Path, number: int, how: str) -> dict[str, Any]:
    def inject(writer: int) -> int:
        _references.append(CountingVFS())
        injector.fail_at, injector.how, injector.log = number, how, writer
        _wrap_os(CALLS if how == "kill" else FAILING)
        return _run(scenario, folder, writer)

    def check(writer: int) -> int:
        wrong = verify(scenario, folder, acks)
        _write(writer, "\n".join(wrong).encode())
        return len(wrong)

    shutil.rmtree(folder, ignore_errors=True)
    end, reports = _fork(inject)
    at = [line[1:] for line in reports if line.startswith("@")]
    acks = [line for line in reports if not line.startswith("@")]
    looked, wrong = _fork(check)
    return {"at": at, "end": end, "acks": acks, "looked": looked, "wrong": wrong}


def main(scenario: str, folder: str, stride: str, how: str) -> None:
    """Try point after point until a scenario comes through unhurt; leave some out if time is up."""
    logging.getLogger("maestro_hive").addHandler(logging.NullHandler())
    deadline = time.monotonic() + 80
    found = []
    for number in range(1, _MOST_POINTS, int(stride)):
        is_late = time.monotonic() > deadline
        each = _try(scenario, Path(folder), 0 if is_late else number, how)  # at 0 nothing happens
        found.append(each)
        if not each["at"]:
            break
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main(*sys.argv[1:])
