"""Locks that end with their process: ``flock`` on a file that exists for the lock."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import time
import weakref
from typing import TYPE_CHECKING

from maestro_hive.kernel.errors import FolderError, StorageError, StoreClosedError
from maestro_hive.kernel.files import reason_of
from maestro_hive.kernel.process import PerProcess

if TYPE_CHECKING:
    from pathlib import Path


_EXCLUSIVE_NOW = fcntl.LOCK_EX | fcntl.LOCK_NB


class FileLock:
    """An exclusive ``flock`` on a file that exists for it; it ends with the process.

    A forked child does not inherit it: its copy of the descriptor is closed at the fork.
    """

    def __init__(self, path: Path) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        self.path = path
        self._fd = -1
        try:
            self._fd = os.open(path, flags, 0o600)
            _open_locks().add(self)
            is_regular = stat.S_ISREG(os.fstat(self._fd).st_mode)
            if is_regular:
                os.fchmod(self._fd, 0o600)
        except OSError as error:
            self.close()
            raise FolderError(path, f"cannot be used as a lock: {reason_of(error)}") from error
        if not is_regular:
            self.close()
            raise FolderError(path, "is not a regular file, and must be one")

    def __del__(self) -> None:
        self.close()  # or it would be held as long as the process lives, and by its children

    def try_acquire(self) -> bool:
        """Take the lock if no process has it, shares it, or checks it just now (``is_locked``).

        Where such checks must not matter, use ``acquire``: they are over in a moment.
        """
        return self._flock(_EXCLUSIVE_NOW)

    def _flock(self, kind: int) -> bool:
        try:
            fcntl.flock(self._open_fd(), kind)
        except BlockingIOError:
            return False
        except OSError as error:
            raise FolderError(self.path, f"cannot be locked: {reason_of(error)}") from error
        return True

    def _open_fd(self) -> int:
        if self._fd < 0:
            raise StoreClosedError(
                f"the lock {self.path} has been closed, or belongs to the process that this one"
                " was forked from; open it again"
            )
        return self._fd

    def acquire(self, timeout: float) -> bool:
        """Take the lock, waiting for up to ``timeout`` seconds.

        It polls instead of waiting in the kernel, where a stopped holder would block us for ever.
        The pauses stay short, so that no process starves.
        """
        try:  # at almost every write the lock is free
            fcntl.flock(self._fd, _EXCLUSIVE_NOW)
        except BlockingIOError:
            return self._wait(timeout)
        except (OSError, ValueError):
            return self.try_acquire()  # which explains the error
        return True

    def _wait(self, timeout: float) -> bool:
        deadline = time.monotonic() + timeout
        pause = 0.00005
        while time.monotonic() < deadline:
            time.sleep(pause)
            if self.try_acquire():
                return True
            pause = min(pause * 1.2, 0.001)
        return False

    def join(self) -> bool:
        """Share the lock; True if no other process does. Only one at a time may call this."""
        is_first = self.try_acquire()
        self._flock(fcntl.LOCK_SH)
        return is_first

    def release(self) -> None:
        """Release the lock."""
        try:
            fcntl.flock(self._fd, fcntl.LOCK_UN)
        except (OSError, ValueError):
            self._flock(fcntl.LOCK_UN)  # which explains the error

    def write(self, data: bytes) -> None:
        """Write who holds it into the lock file, for people and for error messages."""
        fd = self._open_fd()
        try:
            os.ftruncate(fd, 0)
            os.pwrite(fd, data, 0)
        except OSError as error:
            raise FolderError(self.path, f"cannot be written: {reason_of(error)}") from error

    def close(self) -> None:
        """Release the lock and close the file."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def is_locked(path: Path) -> bool:
    """Return whether a living process holds the lock file ``path``; raise if that is unknown.

    A living process must not be taken for dead because of too many open files, say.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in _NOT_A_LOCK:
            return False
        raise _unknown(path, error) from error
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError as error:
        raise _unknown(path, error) from error
    finally:
        os.close(fd)
    return False


#: There is no file, or something in its place that is no lock file.
_NOT_A_LOCK = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENXIO, errno.EISDIR)


def _unknown(path: Path, error: OSError) -> StorageError:
    return StorageError(
        f"{path}: whether its process lives is unknown: {reason_of(error)}; try again"
    )


def _close_inherited(locks: weakref.WeakSet[FileLock]) -> None:
    for lock in list(locks):
        lock.close()


#: Closed in a forked child, which would otherwise share them with its parent.
_open_locks: PerProcess[weakref.WeakSet[FileLock]] = PerProcess(
    weakref.WeakSet, inherited=_close_inherited
)
