"""Locks that end with their process: ``flock`` on a file of its own."""

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

if TYPE_CHECKING:
    from pathlib import Path


_EXCLUSIVE_NOW = fcntl.LOCK_EX | fcntl.LOCK_NB


class FileLock:
    """An exclusive ``flock`` on a file of its own; it ends with the process, however that ends.

    A forked child does not inherit it: its copy of the descriptor is closed at the fork.
    """

    def __init__(self, path: Path) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        self.path = path
        self._fd = -1
        try:
            self._fd = os.open(path, flags, 0o600)
            _open_locks.add(self)
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
        """Take the lock if nobody has it, shares it, or looks at it just now (``is_locked``).

        Where lookers must not matter, use ``acquire``: they are gone in a moment.
        """
        return self._flock(fcntl.LOCK_EX | fcntl.LOCK_NB)

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

        It asks again and again instead of waiting in the kernel, where a stopped holder would
        keep us for ever. The pauses stay short, so that nobody starves.
        """
        try:  # the way of every write: nobody is in the way
            fcntl.flock(self._fd, _EXCLUSIVE_NOW)
        except BlockingIOError:
            return self._wait(timeout)
        except (OSError, ValueError):
            return self.try_acquire()  # which says what is wrong
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

    def share(self) -> None:
        """Turn the lock into one that others may share, waiting until that is possible."""
        self._flock(fcntl.LOCK_SH)

    def release(self) -> None:
        """Let the next one have it."""
        try:
            fcntl.flock(self._fd, fcntl.LOCK_UN)
        except (OSError, ValueError):
            self._flock(fcntl.LOCK_UN)  # which says what is wrong

    def write(self, data: bytes) -> None:
        """Say in the lock file who holds it; for people and for error messages."""
        fd = self._open_fd()
        try:
            os.ftruncate(fd, 0)
            os.pwrite(fd, data, 0)
        except OSError as error:
            raise FolderError(self.path, f"cannot be written: {reason_of(error)}") from error

    def close(self) -> None:
        """Release and forget."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        forget = getattr(_open_locks, "discard", None)  # gone before us when the interpreter ends
        if forget is not None:
            forget(self)


class SharedLock:
    """A lock that everybody shares, so that the first one knows that it is alone."""

    def __init__(self, path: Path) -> None:
        self._lock = FileLock(path)

    def join(self) -> bool:
        """Be counted; True if nobody else was. Only one at a time may do this."""
        alone = self._lock.try_acquire()
        self._lock.share()
        return alone

    def close(self) -> None:
        """Be counted no more."""
        self._lock.close()


_open_locks: weakref.WeakSet[FileLock] = weakref.WeakSet()


def is_locked(path: Path) -> bool:
    """Return whether a living process holds the lock file ``path``; raise if nobody can tell.

    A living process must not be taken for dead because there are too many open files, say.
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


#: There is no file, or something that we never made in its place.
_NOT_A_LOCK = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENXIO, errno.EISDIR)


def _unknown(path: Path, error: OSError) -> StorageError:
    return StorageError(
        f"{path}: nobody can tell whether its process lives: {reason_of(error)}; try again"
    )


def _close_locks_in_child() -> None:
    for lock in list(_open_locks):
        lock.close()


os.register_at_fork(after_in_child=_close_locks_in_child)
