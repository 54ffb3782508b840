"""One SQLite file, opened so that it can be trusted: the only module that opens connections.

- Every page carries a checksum (SQLite's ``cksumvfs``), so altered bytes are found on reading.
- Write transactions of all processes queue at a ``flock``: SQLite's own waiting starves some.
- A commit is written without fsync; whoever needs more calls ``sync``, one fdatasync of the log
  that covers every commit before it. It happens outside the queue, so processes sync in parallel.
- After a write that failed nothing is accepted until the file is opened again.
"""

from __future__ import annotations

import os
import threading
import time
from typing import TYPE_CHECKING, Any, Literal, Self

import apsw

from maestro_hive.kernel import files
from maestro_hive.kernel.errors import (
    CorruptionError,
    FolderError,
    MaestroError,
    StorageError,
    StoreBusyError,
    StoreClosedError,
    StoreFailedError,
)
from maestro_hive.kernel.locks import FileLock, SharedLock
from maestro_hive.maestro.state import page_checksums, wal
from maestro_hive.maestro.state.migrate import check_format, migrate

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from types import TracebackType

    from maestro_hive.maestro.state.records import Damage

#: Pages in the log at which it is copied into the database.
CHECKPOINT_PAGES = 1000
#: Pages at which a writer does that itself, because nobody else got to it.
CHECKPOINT_PAGES_MOST = 8 * CHECKPOINT_PAGES

#: Asking SQLite after every commit would cost more than it is worth.
_LOOK_AT_LOG_EVERY = 32
#: What a log that once held large values is cut down to when it starts again.
_LOG_BYTES_MOST = 16 * 1024 * 1024

_BUSY_SECONDS = 30.0


class JournalFile:
    """``journal.db`` in a folder: transactions, reads, sync."""

    def __init__(
        self,
        folder: Path,
        *,
        keep_damaged_log: Callable[[int], Damage],
        busy_seconds: float = _BUSY_SECONDS,
    ) -> None:
        self.path = folder / "journal.db"
        self.damage: Damage | None = None
        self.log_pages = 0
        self.sync_seconds = 0.0
        self._busy_seconds = busy_seconds
        self._pid = os.getpid()
        self._mutex = threading.RLock()
        self._read_mutex = threading.Lock()
        self._sync_mutex = threading.Lock()
        self._committed = 0
        self._synced = 0
        self._failure: str | None = None
        self._closed = False
        self._connections: list[apsw.Connection] = []
        try:
            self._queue = FileLock(folder / "journal.lock")
            self._presence = SharedLock(folder / "journal.users")
        except OSError as error:
            raise FolderError(folder, f"cannot be written: {error.strerror}") from error
        try:
            self._open(keep_damaged_log)
        except BaseException:
            for db in self._connections:
                db.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 1)  # refused is not touched
                db.close()
            self._queue.close()
            self._presence.close()
            raise

    # --- opening ---

    def _open(self, keep_damaged_log: Callable[[int], Damage]) -> None:
        self._enter_queue()
        try:
            files.create_private(self.path)
            first = self._presence.join()
            self._db = self._connect()
            if first:  # and before anything is written over what the log lost
                self._look_at_log(keep_damaged_log)
            migrate(self._db, str(self.path))
            self._reader = self._connect()
            self._log = os.open(f"{self.path}-wal", os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            files.sync_folder(self.path.parent)
        except apsw.Error as error:
            raise self._explain(error) from error
        except OSError as error:
            if isinstance(error, MaestroError):
                raise
            raise StorageError(f"{self.path} cannot be opened: {error.strerror}") from error
        finally:
            self._queue.release()

    def _connect(self) -> apsw.Connection:
        db = page_checksums.connect(self.path, apsw.SQLITE_OPEN_READWRITE)
        self._connections.append(db)
        db.set_busy_timeout(int(self._busy_seconds * 1000))
        if db.pragma("page_count") == 0:
            if self.path.stat().st_size:
                raise CorruptionError(f"{self.path} is no journal of maestro-hive, nor a database")
            page_checksums.switch_on(db)
        check_format(db, str(self.path))  # before the file is changed in any way
        if db.pragma("journal_mode", "wal") != "wal":
            raise FolderError(self.path, "is on a file system that cannot share a write-ahead log")
        if not page_checksums.are_on(db):
            raise CorruptionError(f"{self.path}: its page checksums have been switched off")
        db.pragma("synchronous", "normal")
        db.pragma("wal_autocheckpoint", 0)
        db.pragma("journal_size_limit", _LOG_BYTES_MOST)
        db.pragma("cache_size", -16_000)
        return db

    def _look_at_log(self, keep_damaged_log: Callable[[int], Damage]) -> None:
        """As the first to open it: have a damaged log kept, and move what is good to safety."""
        page_size = int(self._db.pragma("page_size"))
        self._db.pragma("user_version")  # a read, so that the log is recovered
        recovered, _ = self._db.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_NOOP)
        log = self.path.with_name(self.path.name + "-wal")
        lost = wal.lost_frames(log, max(0, recovered), page_size)
        if lost:
            self.damage = keep_damaged_log(lost)
        if recovered > 0:
            # Pages that a failed fsync left in memory only are written anew, into the database.
            self._db.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_PASSIVE)

    # --- writing ---

    def transaction(self) -> _Transaction:
        """Return a context manager whose body is one write transaction."""
        return _Transaction(self)

    def execute(self, sql: str, bindings: tuple[Any, ...]) -> tuple[int, int]:
        """Run one statement that is a transaction by itself; return its ticket and rows changed.

        The same as ``transaction`` with that statement in it, in half the time: this is the way
        of every step that is recorded alone, and code is slow just after an fsync.
        """
        self.check_process()
        with self._mutex:
            self._check_usable()
            self._refuse_nesting()
            self._enter_queue()
            try:
                self._db.execute(sql, bindings)
                changed = self._db.changes()
            except apsw.Error as error:
                raise self._explain(error, writing=True) from error
            finally:
                self._queue.release()
            return self._count_commit(), changed

    def sync(self, ticket: int) -> None:
        """Return when the commit with this number would survive a power cut."""
        self._check_usable()
        with self._sync_mutex:
            if self._synced >= ticket:
                return
            self._check_usable()
            covers = self._committed
            started = time.perf_counter()
            try:
                os.fdatasync(self._log)
            except OSError as error:
                raise self._fail(f"fdatasync failed ({error.strerror})") from error
            took = time.perf_counter() - started
            # A long one may be a busy machine's doing, a short one proves the disk quick.
            self.sync_seconds = min(took, self.sync_seconds + (took - self.sync_seconds) * 0.1)
            self._synced = covers

    def alone(self) -> threading.RLock:
        """Return the lock that keeps other threads from writing, for more than a transaction."""
        self.check_process()
        return self._mutex

    def begin(self) -> apsw.Connection:
        """Start a write transaction; ``commit`` or ``roll_back`` must follow."""
        self.check_process()
        self._mutex.acquire()
        try:
            self._check_usable()
            self._refuse_nesting()
            self._enter_queue()
            try:
                self._db.execute("BEGIN IMMEDIATE")
            except apsw.Error as error:
                self._queue.release()
                raise self._explain(error) from error
        except BaseException:
            self._mutex.release()
            raise
        return self._db

    def _refuse_nesting(self) -> None:
        if self._db.in_transaction:
            raise StorageError(
                f"{self.path}: a function that changes a document must not write to the journal"
                " itself; write before or after it"
            )

    def commit(self) -> int:
        """End the transaction; return the number to give to ``sync``."""
        try:
            try:
                self._db.execute("COMMIT")
            except apsw.Error as error:
                self._roll_back()
                raise self._explain(error, writing=True) from error
            finally:
                self._queue.release()
            return self._count_commit()
        finally:
            self._mutex.release()

    def _count_commit(self) -> int:
        self._committed += 1
        if self._committed % _LOOK_AT_LOG_EVERY == 0:
            self.log_pages, _ = self._db.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_NOOP)
            if self.log_pages > CHECKPOINT_PAGES_MOST:
                self.checkpoint()
        return self._committed

    def roll_back(self) -> None:
        """Undo the transaction."""
        try:
            self._roll_back()
        finally:
            self._queue.release()
            self._mutex.release()

    def _roll_back(self) -> None:
        if self._db.in_transaction:
            self._db.execute("ROLLBACK")

    def _enter_queue(self) -> None:
        if not self._queue.acquire(self._busy_seconds):
            raise StoreBusyError(
                f"{self.path}: another process has been inside a write for"
                f" {self._busy_seconds:g} seconds; it may be stopped (see {self._queue.path.name})"
            )

    # --- reading ---

    def rows(self, sql: str, bindings: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
        """Run a query on the reading connection and return all of it."""
        self.check_process()
        with self._read_mutex:
            self._check_usable()
            try:
                return self._reader.execute(sql, bindings).fetchall()
            except apsw.Error as error:
                raise self._explain(error) from error

    # --- upkeep ---

    def checkpoint(self) -> None:
        """Copy the log into the database, most of it without keeping anybody waiting."""
        try:
            with self._read_mutex:
                self._check_usable()
                self._reader.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_PASSIVE)
            # The rest with writers kept out, so that the log can start again from its head.
            with self._mutex:
                self._check_usable()
                self._enter_queue()
                try:
                    self._db.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_PASSIVE)
                finally:
                    self._queue.release()
        except apsw.BusyError:
            return  # another process is doing it
        except apsw.Error as error:
            raise self._explain(error, writing=True) from error
        self.log_pages = 0

    def copy_to(self, target: Path) -> None:
        """Write a consistent copy of the live file to ``target``, a new one."""
        files.create_private(target)
        try:
            copy = page_checksums.connect(target, apsw.SQLITE_OPEN_READWRITE)
            with self._read_mutex, copy.backup("main", self._reader, "main") as backup:
                while not backup.done:
                    backup.step(256)
            copy.pragma("journal_mode", "delete")
            copy.close()
        except apsw.Error as error:
            raise self._explain(error) from error

    def integrity(self) -> list[str]:
        """Let SQLite read every page and say what is wrong."""
        found = self.rows("PRAGMA integrity_check(20)")
        return [str(row[0]) for row in found if row[0] != "ok"]

    def close(self) -> None:
        """Close; what was committed is in the log or the database."""
        if not self.is_here():
            return
        with self._mutex, self._read_mutex, self._sync_mutex:
            if self._closed:
                return
            self._closed = True
            self._reader.close()
            self._db.close()
            os.close(self._log)
            self._presence.close()
            self._queue.close()

    # --- trouble ---

    @property
    def usable(self) -> bool:
        """Tell whether it is open, here, and sound."""
        return not self._closed and self._failure is None and self.is_here()

    def is_here(self) -> bool:
        """Tell whether this process opened it; a forked child did not."""
        return os.getpid() == self._pid

    def check_process(self) -> None:
        """Raise in a forked child; before any lock, which a thread of the parent may have held."""
        if not self.is_here():
            raise StoreClosedError(
                f"{self.path} was opened by process {self._pid}, and this is a forked child of it;"
                " open the store again in the child"
            )

    def _check_usable(self) -> None:
        if os.getpid() == self._pid and self._failure is None and not self._closed:
            return
        self.check_process()
        if self._failure is not None:
            raise StoreFailedError(self.path, self._failure)
        if self._closed:
            raise StoreClosedError(f"{self.path} has been closed; open the store again")

    def _fail(self, reason: str) -> StoreFailedError:
        self._failure = reason
        return StoreFailedError(self.path, reason)

    def _explain(self, error: apsw.Error, *, writing: bool = False) -> MaestroError:
        """Turn SQLite's error into one of ours."""
        extended = getattr(error, "extendedresult", 0)
        text = str(error)
        match error:
            case apsw.BusyError() | apsw.LockedError():
                return StoreBusyError(f"{self.path} is locked by another program: {text}")
            case apsw.CorruptError() | apsw.NotADBError():
                return CorruptionError(f"{self.path} is damaged: {text}; restore a backup")
            case apsw.IOError() if extended == apsw.SQLITE_IOERR_DATA:
                return CorruptionError(
                    f"{self.path} is damaged: a page does not match its checksum; restore a backup"
                )
            case apsw.FullError():
                return self._fail("the disk is full")
            case apsw.ReadOnlyError() | apsw.CantOpenError() if not writing:
                return FolderError(self.path, f"cannot be opened for writing: {text}")
            case _:
                return self._fail(text)


class _Transaction:
    """``with file.transaction() as tx``: commits at the end, rolls back on any error."""

    __slots__ = ("_file", "db", "ticket")

    def __init__(self, file: JournalFile) -> None:
        self._file = file
        self.ticket = 0

    def __enter__(self) -> Self:
        self.db = self._file.begin()
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        error: BaseException | None,
        _trace: TracebackType | None,
    ) -> Literal[False]:
        if error is None:
            self.ticket = self._file.commit()
            return False
        self._file.roll_back()
        if isinstance(error, apsw.Error):
            raise self._file._explain(error, writing=True) from error  # noqa: SLF001
        return False
