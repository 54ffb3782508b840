"""The locks of a journal: ``flock``s on files of their own, in the order they are taken.

SQLite's locks belong to the process (POSIX), and whatever code of the process opens and closes
``journal.db`` or ``journal.db-shm``, to search or to pack the folder, drops them. A ``flock`` stays.
So nothing here depends on SQLite's locks:

- the queue (``journal.lock``): who writes, opens the journal, or lets the log start again;
- the users (``journal.users``): shared while the journal is open, so that the first and the last
  user know that they are alone; asked for inside the queue only;
- the readers: shared by every query, exclusive for who copies the log into the database, since that
  changes pages under a query, and for who opens the journal, since that may build the log's index
  again. Taken after the queue, and nothing is waited for while it is held exclusively.

Two of SQLite's own locks are held besides, by descriptors of our own (``IndexGuard`` and
``DatabaseGuard``), so that other programs that use SQLite find them, too.
"""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING

from maestro_hive.kernel.files import FileLock, RangeLock

if TYPE_CHECKING:
    from pathlib import Path

#: Where SQLite's programs lock: those that use a database, and those that use a log's index.
_DATABASE_IN_USE = (0x4000_0002, 510)
_INDEX_IN_USE = (128, 1)


def log_of(database: Path) -> Path:
    """Return the write-ahead log of a database."""
    return database.with_name(f"{database.name}-wal")


def index_of(database: Path) -> Path:
    """Return the index of a database's log, which is shared memory."""
    return database.with_name(f"{database.name}-shm")


class ReadersLock:
    """Shared by queries, and exclusive for what would change what they read.

    Who wants it exclusively first takes the turnstile, which every query passes, so that queries
    that overlap do not keep it out for ever. One object is for one thread at a time.
    """

    def __init__(self, folder: Path, *, create: bool = True) -> None:
        self._turnstile = FileLock(folder / "journal.turnstile", create=create)
        self._readers = FileLock(folder / "journal.readers", create=create)

    def share(self, timeout: float) -> bool:
        """Keep the journal from changing under a query; False if that is not possible in time."""
        try:
            return self._turnstile.share(timeout) and self._readers.share(timeout)
        except BaseException:  # Ctrl+C too must not leave it locked
            self._readers.release()
            raise
        finally:
            self._turnstile.release()

    def exclude(self, timeout: float) -> bool:
        """Keep queries out; False if those that run now do not end in time."""
        try:
            return self._turnstile.acquire(timeout) and self._readers.acquire(timeout)
        except BaseException:  # or all queries of all processes would fail
            self._readers.release()
            raise
        finally:
            self._turnstile.release()

    def release(self) -> None:
        """End either."""
        self._readers.release()

    def close(self) -> None:
        """Release it and close its files."""
        self._readers.close()
        self._turnstile.close()


class IndexGuard(RangeLock):
    """Keeps every program from taking the index of the log for unused, and building it again."""

    def __init__(self, database: Path) -> None:
        super().__init__(index_of(database), *_INDEX_IN_USE)

    @classmethod
    def is_used(cls, database: Path) -> bool:
        """Return whether SQLite would find the index in use, and not build it again."""
        with contextlib.suppress(FileNotFoundError), contextlib.closing(cls(database)) as guard:
            return guard.is_held_elsewhere()
        return False


class DatabaseGuard(RangeLock):
    """Keeps every program from taking the database for unused, and deleting its log at its end."""

    def __init__(self, database: Path) -> None:
        super().__init__(database, *_DATABASE_IN_USE)


def restore_size(index: Path, size: int) -> None:
    """Make an index that was built again at least as long as before.

    A process that mapped the longer one would be killed by the system (SIGBUS) when it writes
    there. By name: no descriptor is closed, which would drop locks.
    """
    with contextlib.suppress(OSError):
        if index.stat().st_size < size:
            os.truncate(index, size)
