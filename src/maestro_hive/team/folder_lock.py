"""One team run at a time in a folder: its tasks change the files there, and its state file is one.

The folder itself is locked: a file in it could be deleted by a task, and the next process would make and
lock another one. A file says who holds it. It is written under an exclusive lock and read under a shared
one, so it is always that of the run which holds the folder now. All processes that execute this run share
the lock, since one may take over the run of another that is stopped.
"""

from __future__ import annotations

import random
import time
from contextlib import closing, contextmanager
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING

from maestro_hive.kernel.errors import ConfigurationError, FolderError, StorageError
from maestro_hive.kernel.files import FileLock, FolderLock, make_private_folder, reason_of

if TYPE_CHECKING:
    from collections.abc import Iterator

PATH = Path(".mahabharatha") / "run.lock"
#: How many bytes of it are read: it has the id of a run, and in another line its state folder.
_MOST_BYTES = 10_000
#: For how many seconds it is tried: others share the lock for a moment, to see whose it is.
_SECONDS = 0.3
_PAUSE_SECONDS = 0.02


@contextmanager
def held_for(folder: Path, run_id: str, store: Path) -> Iterator[None]:
    """Hold a folder for a run of a state folder; raise if another run is executed there, by any process.

    Who executes the same run is told by its lease, which may also be taken over.
    """
    path = folder.resolve() / PATH
    make_private_folder(path.parent)
    run = f"{run_id}\n{store}"
    with closing(_lock_for(path)) as lock:
        deadline = time.monotonic() + _SECONDS
        while (holder := _held_by(lock, path, run)) != run:
            if time.monotonic() > deadline:
                raise _refused(folder, holder, store)
            time.sleep(random.uniform(0, _PAUSE_SECONDS))  # noqa: S311 - no secret
        yield


def _lock_for(path: Path) -> FileLock:
    """Return the lock of a folder; of the file where folders cannot be locked, as on network file systems."""
    try:
        lock = FolderLock(path.parent.parent)
        if lock.try_acquire():
            lock.release()
    except FolderError:
        return FileLock(path)
    return lock


def _held_by(lock: FileLock, path: Path, run: str) -> str | None:
    """Take the lock if it is free, or share it with the same run; return whose it is, if that is known."""
    if lock.try_acquire():
        _write(path, run)
    # The exclusive lock may be lost before it is a shared one, to another run: the file says so.
    holder = _read(path) if lock.share(_SECONDS) else None
    if holder != run:
        lock.release()
    return holder


def _refused(folder: Path, holder: str | None, store: Path) -> ConfigurationError:
    which, stop = "another run", "maestro stop"
    if holder is not None:
        run_id, _, other = holder.partition("\n")
        which, stop = f"run {run_id!r}", f"maestro stop {run_id}"
        if other != str(store):
            which, stop = f"{which} of the state folder {other}", f"{stop} --store {quote(other)}"
    return ConfigurationError(
        f"nothing was started: {which} is executed in {folder}, and its tasks change the files there;"
        f" wait for it, or stop it: '{stop}'"
    )


def _write(path: Path, run: str) -> None:
    with closing(FileLock(path)) as file:
        file.write(run.encode())


def _read(path: Path) -> str | None:
    """Return what the file says; None if it was deleted."""
    try:
        return path.read_bytes()[:_MOST_BYTES].decode("utf-8", "replace") or None
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StorageError(f"{path} could not be read: {reason_of(error)}") from error
