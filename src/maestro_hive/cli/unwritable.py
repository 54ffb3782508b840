"""Folders in which nothing can be written: why, in words."""

from __future__ import annotations

import contextlib
import errno
import os
from typing import TYPE_CHECKING

from maestro_hive.kernel.errors import FolderError, StoreFailedError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

#: What opening a journal takes: the index of its log, and some pages of it.
_ROOM_TO_OPEN = 64 * 1024
_REFUSALS = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the quota is used up",
    errno.EROFS: "the file system is read-only",
    errno.EACCES: "you have no right to",
    errno.EPERM: "you have no right to",
}


class UnwritableError(FolderError):
    """A state folder in which nothing can be written now, whatever it is."""


@contextlib.contextmanager
def naming_what_is_unwritable(folder: Path) -> Iterator[None]:
    """Say of a store that failed why its folder cannot be written, where that is the reason."""
    try:
        yield
    except (FolderError, StoreFailedError) as error:
        number = _refusal(folder)
        if not number:
            raise
        words = _REFUSALS.get(number) or os.strerror(number)
        name = errno.errorcode.get(number, str(number))
        raise UnwritableError(folder, f"cannot be written: {words} ({name})") from error


def _refusal(folder: Path) -> int:
    """Return the number of the error with which the system refuses to write here; 0 if it does not."""
    import tempfile  # noqa: PLC0415 - only after something failed

    try:
        with tempfile.TemporaryFile(dir=folder) as probe:  # which has no name to be left behind
            probe.write(bytes(_ROOM_TO_OPEN))
            probe.flush()
            os.fsync(probe.fileno())
    except OSError as error:
        return error.errno or errno.EIO
    ours = folder.glob("journal.*")
    return 0 if all(os.access(path, os.W_OK) for path in ours) else errno.EACCES
