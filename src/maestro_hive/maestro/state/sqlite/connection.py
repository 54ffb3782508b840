"""One SQLite file with page checksums: opening it, transactions, reads, syncs, checkpoints.

SQLite's own ``cksumvfs`` puts a checksum into the last 8 bytes of every page and verifies it on
each read. Writers of all processes queue at a ``flock``; a commit writes without syncing, and
``sync`` makes every commit so far durable, outside the queue.
"""

from __future__ import annotations

import ctypes
import logging
import os
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import apsw

from maestro_hive.kernel import files
from maestro_hive.kernel.errors import (
    CorruptionError,
    FolderError,
    MaestroError,
    NewerFormatError,
    StorageError,
    StoreBusyError,
    StoreClosedError,
    StoreFailedError,
)
from maestro_hive.kernel.locks import FileLock
from maestro_hive.kernel.process import PerProcess
from maestro_hive.maestro.state.sqlite import wal

if TYPE_CHECKING:
    from collections.abc import Callable

    from maestro_hive.maestro.state.records import Damage

logger = logging.getLogger(__name__)

ResultT = TypeVar("ResultT")
Row = tuple[Any, ...]

#: Marks a SQLite file as a journal of maestro-hive ("MHIV").
APPLICATION_ID = 0x4D484956

#: Pages in the log at which it is copied into the database.
CHECKPOINT_PAGES = 1000
#: Pages at which a writer does that itself, because the background thread did not get to it.
CHECKPOINT_PAGES_MOST = 8 * CHECKPOINT_PAGES

#: Commits between two looks at the log's length: asking after each would cost too much.
_CHECK_LOG_EVERY = 32
#: A log that had large values is truncated to this when it starts again.
_LOG_BYTES_MOST = 16 * 1024 * 1024

_BUSY_SECONDS = 30.0
#: How long readers may prevent the log from being emptied while writers wait.
_EMPTYING_MILLISECONDS = 1000

_MIGRATIONS = Path(__file__).parent / "sql"

# --- page checksums ---

_VFS = "cksmvfs"
_CHECKSUM_BYTES = 8


def connect(path: Path, flags: int) -> apsw.Connection:
    """Open a database so that its page checksums are written and verified."""
    return apsw.Connection(str(path), flags=flags, vfs=checksum_vfs())


def _register_vfs() -> str:
    """Load SQLite's checksum extension, and leave apsw's default as other users had it."""
    if _VFS in apsw.vfs_names():
        return _VFS
    from apsw import sqlite_extra  # noqa: PLC0415 - slow to import, needed once

    if sqlite_extra.has("cksumvfs") is None:
        raise StorageError(
            "this build of apsw lacks SQLite's cksumvfs extension, which guards the journal's"
            " pages; install apsw from its published wheel"
        )
    default = apsw.vfs_names()[0]
    loader = apsw.Connection(":memory:")
    sqlite_extra.load(loader, "cksumvfs")
    loader.close()
    apsw.set_default_vfs(default)
    return _VFS


#: Returns the name of the VFS, registering it when first called.
checksum_vfs = PerProcess(_register_vfs)


def enable_checksums(db: apsw.Connection) -> None:
    """Reserve room for checksums in a database that has no pages yet."""
    _reserve(db, _CHECKSUM_BYTES)


def has_checksums(db: apsw.Connection) -> bool:
    """Return whether the pages of a database have room for checksums."""
    return _reserve(db, -1) == _CHECKSUM_BYTES


def _reserve(db: apsw.Connection, value: int) -> int:
    number = ctypes.c_int(value)
    db.file_control("main", apsw.SQLITE_FCNTL_RESERVE_BYTES, ctypes.addressof(number))
    return number.value


# --- formats ---


def migrations() -> list[Path]:
    """Return the migration files in order."""
    return sorted(_MIGRATIONS.glob("[0-9][0-9][0-9][0-9]_*.sql"))


def newest_format() -> int:
    """Return the format this version writes."""
    return len(migrations())


def migrate(db: apsw.Connection, name: str) -> None:
    """Bring an opened journal to the newest format, one transaction per step."""
    found = check_format(db, name)
    for number, step in enumerate(migrations()[found:], start=found + 1):
        script = step.read_text(encoding="utf-8")
        with db:
            db.execute(script)
            db.execute(f"PRAGMA application_id = {APPLICATION_ID}")
            db.execute(f"PRAGMA user_version = {number}")


def check_format(db: apsw.Connection, name: str) -> int:
    """Return a journal's format, 0 for a new file; refuse a newer one and other databases."""
    found = int(db.pragma("user_version"))
    ours = int(db.pragma("application_id")) == APPLICATION_ID
    empty = db.execute("SELECT count(*) FROM sqlite_schema").get == 0
    if not ours and not (empty and found == 0):
        raise CorruptionError(
            f"{name} is a SQLite database, but not a journal of maestro-hive;"
            " choose another state folder"
        )
    if found > newest_format():
        raise NewerFormatError(name, found, newest_format())
    return found


# --- errors ---


def damage_error(path: Path, error: apsw.Error) -> CorruptionError | None:
    """Return our error if SQLite's means that the file is not what was written."""
    if getattr(error, "extendedresult", 0) == apsw.SQLITE_IOERR_DATA:
        reason = "a page does not match its checksum"
    elif isinstance(error, apsw.CorruptError | apsw.NotADBError):
        reason = str(error)
    else:
        return None
    return CorruptionError(f"{path} is damaged: {reason}; restore a backup")


# --- the file ---


class JournalFile:
    """``journal.db`` in a folder: transactions, reads, sync."""

    def __init__(
        self,
        folder: Path,
        *,
        keep_damaged_log: Callable[[str], Damage],
        busy_seconds: float = _BUSY_SECONDS,
    ) -> None:
        self.path = folder / "journal.db"
        self.damage: Damage | None = None
        self.log_pages = 0
        self.sync_seconds = 0.0
        #: How many transactions this process has committed; ``sync`` takes such a number.
        self.committed = 0
        #: The number of commits at which ``check_log`` asks SQLite again.
        self.log_check_due = _CHECK_LOG_EVERY
        #: Guards the writing connection; see ``locked`` for more than one transaction.
        self.mutex = threading.RLock()
        self.pid = os.getpid()
        self._busy_seconds = busy_seconds
        self._read_mutex = threading.Lock()
        self._second_mutex = threading.Lock()
        self._second_reader: apsw.Connection | None = None
        self._sync_mutex = threading.Lock()
        self._synced = 0
        self._failure: str | None = None
        self._closed = False
        self._connections: list[apsw.Connection] = []
        try:
            self._queue = FileLock(folder / "journal.lock")
            # Shared by all users, so that the first one knows that it is the only one.
            self._users = FileLock(folder / "journal.users")
        except FolderError as error:
            raise FolderError(folder, f"cannot be written ({error.reason})") from error
        try:
            self._open(keep_damaged_log)
        except BaseException:
            for db in self._connections:
                db.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 1)  # a refused file is unchanged
                db.close()
            self._queue.close()
            self._users.close()
            raise

    # --- opening ---

    def _open(self, keep_damaged_log: Callable[[str], Damage]) -> None:
        self._enter_queue(None)
        try:
            first = self._users.join()
            if first:
                self._keep_log_without_database(keep_damaged_log)
            files.create_private(self.path)
            self._db = self._connect()
            if first:  # before anything is written over what the log lost
                self._examine_log(keep_damaged_log)
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
        db = connect(self.path, apsw.SQLITE_OPEN_READWRITE)
        self._connections.append(db)
        db.set_busy_timeout(int(self._busy_seconds * 1000))
        if db.pragma("page_count") == 0:
            if self.path.stat().st_size:
                raise CorruptionError(f"{self.path} is not a SQLite database")
            enable_checksums(db)
        check_format(db, str(self.path))  # before the file is changed in any way
        if db.pragma("journal_mode", "wal") != "wal":
            raise FolderError(self.path, "is on a file system that cannot share a write-ahead log")
        if not has_checksums(db):
            raise CorruptionError(f"{self.path}: its page checksums have been switched off")
        db.pragma("synchronous", "normal")
        db.pragma("wal_autocheckpoint", 0)
        db.pragma("journal_size_limit", _LOG_BYTES_MOST)
        db.pragma("cache_size", -16_000)
        db.pragma("secure_delete", 1)  # what is purged must not be found in free pages
        return db

    def _keep_log_without_database(self, keep_damaged_log: Callable[[str], Damage]) -> None:
        """Keep a log whose database is gone: SQLite would start a new one and overwrite it."""
        log = self.path.with_name(f"{self.path.name}-wal")
        gone = not self.path.exists() or self.path.stat().st_size == 0
        if gone and log.exists() and log.stat().st_size > 0:
            self.damage = keep_damaged_log("its database was gone, and only its log was left")
            files.remove(log)

    def _examine_log(self, keep_damaged_log: Callable[[str], Damage]) -> None:
        """As the first to open the file: keep a damaged log, and checkpoint what is good."""
        page_size = int(self._db.pragma("page_size"))
        self._db.pragma("user_version")  # a read, so that the log is recovered
        recovered, _ = self._db.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_NOOP)
        log = self.path.with_name(self.path.name + "-wal")
        lost = wal.lost_commits(log, max(0, recovered), page_size)
        if lost:
            self.damage = keep_damaged_log(
                f"its log is damaged, and {lost} commit(s) behind the damage could not be read:"
                " what was recorded last may be lost"
            )
        if recovered > 0:
            # Pages that a failed fsync left in memory only are written again, into the database.
            self._db.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_PASSIVE)

    # --- writing ---

    def write(
        self, body: Callable[[apsw.Connection], ResultT], busy_timeout: float | None = None
    ) -> ResultT:
        """Run ``body`` in one write transaction and return its result; ``committed`` is its number.

        A function and not a context manager: an interrupt between two lines of a caller must not
        leave a transaction open. One that is left open all the same is undone by the next write.
        """
        if os.getpid() != self.pid:
            self.check_process()
        with self.mutex:
            self._prepare()
            try:
                self._enter_queue(busy_timeout)
                self._db.execute("BEGIN IMMEDIATE")
                result = body(self._db)
                self._db.execute("COMMIT")
                self.committed += 1
            except apsw.Error as error:
                raise self._explain(error, writing=True) from error
            finally:
                self._leave()
            return result

    def insert(self, sql: str, bindings: Row, busy_timeout: float | None) -> int | None:
        """Run one INSERT that is a transaction by itself; return the new key, None for no row.

        The same as ``write`` with that statement in it, in half the time: every step that is
        recorded alone comes this way. The caller holds ``mutex`` and has checked the process.
        """
        db, queue = self._db, self._queue
        if self._failure is not None or self._closed or db.in_transaction:
            self._prepare()
        try:
            if not queue.acquire(self._busy_seconds if busy_timeout is None else busy_timeout):
                raise self._busy(busy_timeout)
            db.execute(sql, bindings)
            self.committed += 1
            return db.last_insert_rowid() if db.changes() else None
        except apsw.Error as error:
            raise self._explain(error, writing=True) from error
        finally:
            queue.release()

    def _prepare(self) -> None:
        self._check_usable()
        if self._db.in_transaction:
            if self._is_nested():
                raise StorageError(
                    f"{self.path}: a function that changes a document must not write to the"
                    " journal itself; write before or after it"
                )
            self._leave()  # an interrupt left it open

    def _is_nested(self) -> bool:
        """Return whether this thread is inside ``write`` already, further up the stack."""
        frame = sys._getframe(2).f_back  # noqa: SLF001 - Python's own way to walk the stack
        while frame is not None:
            if frame.f_code is JournalFile.write.__code__ and frame.f_locals.get("self") is self:
                return True
            frame = frame.f_back
        return False

    def _leave(self) -> None:
        """Undo what was not committed, and release the queue."""
        try:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
        except apsw.Error as error:
            raise self._fail(f"a transaction could not be undone ({error})") from error
        finally:
            self._queue.release()

    def sync(self, commit: int) -> None:
        """Return when the commit with this number would survive a power cut."""
        if os.getpid() != self.pid:
            self.check_process()
        with self._sync_mutex:
            if self._failure is not None or self._closed:
                self._check_usable()
            if self._synced >= commit:
                return
            covers = self.committed
            started = time.perf_counter()
            try:
                os.fdatasync(self._log)
                deleted = os.fstat(self._log).st_nlink == 0
            except OSError as error:
                raise self._fail(f"fdatasync failed ({error.strerror})") from error
            if deleted:
                raise self._fail("its files were deleted while it was open")
            took = time.perf_counter() - started
            # A long one may be due to a busy machine, a short one proves that the disk is fast.
            self.sync_seconds = min(took, self.sync_seconds + (took - self.sync_seconds) * 0.1)
            self._synced = covers

    def write_and_sync(self, body: Callable[[apsw.Connection], ResultT]) -> ResultT:
        """Run ``body`` in one write transaction and return its result when it is durable."""
        with self.locked():
            result = self.write(body)
            commit = self.committed
        self.sync(commit)
        return result

    def locked(self) -> threading.RLock:
        """Return ``mutex``, to be held for more than one transaction."""
        self.check_process()  # first: a thread of the parent may hold it in a forked child
        return self.mutex

    def _enter_queue(self, busy_timeout: float | None) -> None:
        seconds = self._busy_seconds if busy_timeout is None else busy_timeout
        if not self._queue.acquire(seconds):
            raise self._busy(busy_timeout)

    def _busy(self, busy_timeout: float | None) -> StoreBusyError:
        seconds = self._busy_seconds if busy_timeout is None else busy_timeout
        return StoreBusyError(
            f"{self.path}: another process has been inside a write for {seconds:g} seconds;"
            f" it may be stopped (see {self._queue.path.name})"
        )

    # --- reading ---

    def rows(self, sql: str, bindings: Row = ()) -> list[Row]:
        """Run a query and return all of it; a second one need not wait for one that takes long."""
        self.check_process()
        if self._read_mutex.acquire(blocking=False):
            try:
                return self._rows(self._reader, sql, bindings)
            finally:
                self._read_mutex.release()
        with self._second_mutex:
            self._check_usable()
            try:
                self._second_reader = self._second_reader or self._connect()
            except apsw.Error as error:
                raise self._explain(error) from error
            return self._rows(self._second_reader, sql, bindings)

    def _rows(self, db: apsw.Connection, sql: str, bindings: Row) -> list[Row]:
        self._check_usable()
        try:
            return db.execute(sql, bindings).fetchall()
        except apsw.Error as error:
            raise self._explain(error) from error

    # --- the log ---

    def check_log(self) -> bool:
        """Return whether the log is due to be copied, asking SQLite only now and then.

        What fails here shows at the next write.
        """
        if self.committed < self.log_check_due:
            return False
        self.log_check_due = self.committed + _CHECK_LOG_EVERY
        try:
            with self._read_mutex:
                self._check_usable()
                self.log_pages, _ = self._reader.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_NOOP)
            if self.log_pages > CHECKPOINT_PAGES_MOST:
                self.checkpoint()
        except (apsw.Error, MaestroError) as error:
            logger.debug("%s: %s", self.path, error)
        return self.log_pages > CHECKPOINT_PAGES

    def checkpoint(self) -> None:
        """Copy the log into the database, most of it without blocking writers."""
        self.check_process()
        try:
            with self._read_mutex:
                self._check_usable()
                self._reader.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_PASSIVE)
            # The rest with writers blocked, so that the log can start again from its head.
            with self.locked():
                self._check_usable()
                self._enter_queue(None)
                try:
                    self._db.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_PASSIVE)
                finally:
                    self._queue.release()
        except apsw.BusyError:
            return  # another process is doing it
        except apsw.Error as error:
            raise self._explain(error, writing=True) from error
        self.log_pages = 0

    def empty_log(self) -> bool:
        """Copy the log into the database and truncate it; False if a reader uses it."""
        with self.locked():
            self._check_usable()
            self._enter_queue(None)
            try:
                self._db.set_busy_timeout(_EMPTYING_MILLISECONDS)
                self._db.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_TRUNCATE)
            except apsw.BusyError:
                return False
            except apsw.Error as error:
                raise self._explain(error, writing=True) from error
            finally:
                self._db.set_busy_timeout(int(self._busy_seconds * 1000))
                self._queue.release()
        self.log_pages = 0
        return True

    def copy_to(self, target: Path) -> None:
        """Write a consistent copy of the live file to ``target``, a new one, or nothing."""
        self._check_usable()
        files.create_private(target)
        source = connect(self.path, apsw.SQLITE_OPEN_READWRITE)
        copy = connect(target, apsw.SQLITE_OPEN_READWRITE)
        try:
            # With a first page that asks for checksums, or pages written before it get none.
            enable_checksums(copy)
            copy.pragma("user_version", 1)
            copy.close()
            copy = connect(target, apsw.SQLITE_OPEN_READWRITE)
            # In one go and under one read transaction, or every commit would start it again.
            source.execute("BEGIN; SELECT count(*) FROM runs")
            with copy.backup("main", source, "main") as backup:
                backup.step(-1)
            copy.pragma("journal_mode", "delete")
        except apsw.Error as error:
            for leftover in target.parent.glob(f"{target.name}*"):
                leftover.unlink()
            raise damage_error(self.path, error) or StorageError(
                f"{self.path} could not be copied to {target}: {error}"
            ) from error
        finally:
            copy.close()
            source.close()

    def close(self) -> None:
        """Close; what was committed is in the log or the database."""
        if os.getpid() != self.pid:
            return
        with self.mutex, self._read_mutex, self._second_mutex, self._sync_mutex:
            if self._closed:
                return
            self._closed = True
            if self._second_reader is not None:
                self._second_reader.close()
            self._reader.close()
            self._db.close()
            os.close(self._log)
            self._users.close()
            self._queue.close()

    # --- failures ---

    @property
    def usable(self) -> bool:
        """Return whether it is open, in this process, and did not fail."""
        return not self._closed and self._failure is None and os.getpid() == self.pid

    def check_process(self) -> None:
        """Raise in a forked child; before any lock, which a thread of the parent may hold."""
        if os.getpid() != self.pid:
            raise StoreClosedError(
                f"{self.path} was opened by process {self.pid}, and this is a forked child of it;"
                " start the child with 'spawn' or as a program of its own"
            )

    def _check_usable(self) -> None:
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
        damage = damage_error(self.path, error)
        if damage is not None:
            return damage
        text = str(error)
        match error:
            case apsw.BusyError() | apsw.LockedError():
                return StoreBusyError(f"{self.path} is locked by another program: {text}")
            case apsw.FullError():
                return self._fail("the disk is full")
            case apsw.ReadOnlyError() | apsw.CantOpenError() if not writing:
                return FolderError(self.path, f"cannot be opened for writing: {text}")
            case _:
                return self._fail(text)
