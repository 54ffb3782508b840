"""One team run at a time in a folder: its tasks change the files there, and its state file is one."""

from __future__ import annotations

from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from maestro_hive.kernel.errors import ConfigurationError, StorageError
from maestro_hive.kernel.files import FileLock, make_private_folder, reason_of

if TYPE_CHECKING:
    from collections.abc import Iterator

PATH = Path(".mahabharatha") / "run.lock"
#: How many bytes of a lock file are read: it has the id of a run.
_MOST_BYTES = 1_000


@contextmanager
def held_for(folder: Path, run_id: str) -> Iterator[None]:
    """Hold a folder for a run; raise if another run is executed there, by whatever process.

    Who executes the same run is told by its lease, which may also be taken over.
    """
    path = folder / PATH
    make_private_folder(path.parent)
    with closing(FileLock(path)) as lock:
        if lock.try_acquire():
            _write(path, run_id)
        elif (other := _read(path)) != run_id:
            raise ConfigurationError(
                f"nothing was started: run {other!r} is executed in {folder}, and its tasks change the"
                f" files there; wait for it, or stop it: 'maestro stop {other}'"
            )
        yield


def _write(path: Path, run_id: str) -> None:
    try:
        path.write_text(run_id, encoding="utf-8")
    except OSError as error:
        raise StorageError(f"{path} was not written: {reason_of(error)}") from error


def _read(path: Path) -> str:
    try:
        return path.read_bytes()[:_MOST_BYTES].decode("utf-8", "replace")
    except OSError as error:
        raise StorageError(f"{path} could not be read: {reason_of(error)}") from error
