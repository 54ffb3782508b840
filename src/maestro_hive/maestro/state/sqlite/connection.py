"""SQLite's own checksums on every page of a database: the last 8 bytes, verified on each read."""

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
from maestro_hive.kernel.locks import FileLock, SharedLock
from maestro_hive.maestro.state.sqlite import connection as page_checksums
from maestro_hive.maestro.state.sqlite import wal

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import apsw

    from maestro_hive.maestro.state.records import Damage

_VFS = "cksmvfs"
_BYTES = 8

_registering = threading.Lock()


def connect(path: Path, flags: int) -> apsw.Connection:
    """Open a database so that its checksums are kept and verified."""
    _register()
    return apsw.Connection(str(path), flags=flags, vfs=_VFS)


def switch_on(db: apsw.Connection) -> None:
    """Make room for checksums in a database that has no pages yet."""
    _reserve(db, _BYTES)


def are_on(db: apsw.Connection) -> bool:
    """Return whether the pages of a database have room for checksums."""
    return _reserve(db, -1) == _BYTES


def _reserve(db: apsw.Connection, value: int) -> int:
    number = ctypes.c_int(value)
    db.file_control("main", apsw.SQLITE_FCNTL_RESERVE_BYTES, ctypes.addressof(number))
    return number.value


def _register() -> None:
    """Make the checksums available, once, and leave apsw's default as other users had it."""
    with _registering:
        if _VFS in apsw.vfs_names():
            return
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


def _new_lock_in_child() -> None:
    global _registering  # noqa: PLW0603 - a thread that is not in the child may have held it
    _registering = threading.Lock()


os.register_at_fork(after_in_child=_new_lock_in_child)


# --- migrate ---


#: Marks a SQLite file as ours ("MHIV").
APPLICATION_ID = 0x4D484956

_FOLDER = Path(__file__).parent / "sql"


def migrations() -> list[Path]:
    """Return the migration files in order."""
    return sorted(_FOLDER.glob("[0-9][0-9][0-9][0-9]_*.sql"))


def newest_format() -> int:
    """The format this version writes."""
    return len(migrations())


def migrate(db: apsw.Connection, name: str) -> None:
    """Bring an opened journal to the newest format."""
    found = check_format(db, name)
    for number, step in enumerate(migrations()[found:], start=found + 1):
        script = step.read_text(encoding="utf-8")
        with db:
            db.execute(script)
            db.execute(f"PRAGMA application_id = {APPLICATION_ID}")
            db.execute(f"PRAGMA user_version = {number}")


def check_format(db: apsw.Connection, name: str) -> int:
    """Return a journal's format, 0 for a new file; refuse one that is newer or not ours."""
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


# --- journal_file ---


logger = logging.getLogger(__name__)

ResultT = TypeVar("ResultT")

#: Pages in the log at which it is copied into the database.
CHECKPOINT_PAGES = 1000
#: Pages at which a writer does that itself, because nobody else got to it.
CHECKPOINT_PAGES_MOST = 8 * CHECKPOINT_PAGES

#: Asking SQLite after every commit would cost more than it is worth.
_LOOK_AT_LOG_EVERY = 32
#: What a log that once held large values is cut down to when it starts again.
_LOG_BYTES_MOST = 16 * 1024 * 1024

_BUSY_SECONDS = 30.0
#: How long readers may keep the log from being emptied, and writers waiting meanwhile.
_EMPTYING_MILLISECONDS = 1000


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
        self._busy_seconds = busy_seconds
        self._pid = os.getpid()
        self._mutex = threading.RLock()
        self._read_mutex = threading.Lock()
        self._sync_mutex = threading.Lock()
        self._committed = 0
        self._looked = 0
        self._synced = 0
        self._failure: str | None = None
        self._closed = False
        self._connections: list[apsw.Connection] = []
        try:
            self._queue = FileLock(folder / "journal.lock")
            self._presence = SharedLock(folder / "journal.users")
        except FolderError as error:
            raise FolderError(folder, f"cannot be written ({error.reason})") from error
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

    def _open(self, keep_damaged_log: Callable[[str], Damage]) -> None:
        self._enter_queue()
        try:
            first = self._presence.join()
            if first:
                self._keep_log_without_database(keep_damaged_log)
            files.create_private(self.path)
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
        db.pragma("secure_delete", 1)  # what is purged must not be found in free pages
        return db

    def _keep_log_without_database(self, keep_damaged_log: Callable[[str], Damage]) -> None:
        """Keep a log whose database is gone: SQLite would begin anew and write over it."""
        log = self.path.with_name(f"{self.path.name}-wal")
        gone = not self.path.exists() or self.path.stat().st_size == 0
        if gone and log.exists() and log.stat().st_size > 0:
            self.damage = keep_damaged_log("its database was gone, and only its log was left")
            files.remove(log)

    def _look_at_log(self, keep_damaged_log: Callable[[str], Damage]) -> None:
        """As the first to open it: have a damaged log kept, and move what is good to safety."""
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
            # Pages that a failed fsync left in memory only are written anew, into the database.
            self._db.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_PASSIVE)

    # --- writing ---

    def write(
        self, body: Callable[[apsw.Connection], ResultT], busy_timeout: float | None = None
    ) -> tuple[ResultT, int]:
        """Run ``body`` in one write transaction; return its result, and the ticket for ``sync``.

        A function and not a context manager: an interrupt between two lines of a caller must not
        leave a transaction open. What one leaves behind all the same, the next write clears away.
        """
        self.check_process()
        with self._mutex:
            self._prepare()
            try:
                self._enter_queue(busy_timeout)
                self._db.execute("BEGIN IMMEDIATE")
                result = body(self._db)
                self._db.execute("COMMIT")
                self._committed += 1
            except apsw.Error as error:
                raise self._explain(error, writing=True) from error
            finally:
                self._leave()
            return result, self._committed

    def execute(
        self, sql: str, bindings: tuple[Any, ...], busy_timeout: float | None = None
    ) -> tuple[int, int, int]:
        """Run one statement that is a transaction by itself; return ticket, rows and last rowid.

        The same as ``write`` with that statement in it, in half the time: this is the way of
        every step that is recorded alone, and code is slow just after an fsync.
        """
        self.check_process()
        db = self._db
        with self._mutex:
            if self._failure is not None or self._closed or db.in_transaction:
                self._prepare()
            try:
                self._enter_queue(busy_timeout)
                db.execute(sql, bindings)
                self._committed += 1
            except apsw.Error as error:
                raise self._explain(error, writing=True) from error
            finally:
                self._queue.release()
            return self._committed, db.changes(), db.last_insert_rowid()

    def _prepare(self) -> None:
        self._check_usable()
        if self._db.in_transaction:
            if self._is_nested():
                raise StorageError(
                    f"{self.path}: a function that changes a document must not write to the"
                    " journal itself; write before or after it"
                )
            self._leave()  # what an interrupt left behind

    def _is_nested(self) -> bool:
        """Return whether this thread is inside ``write`` already, further up."""
        frame = sys._getframe(2).f_back  # noqa: SLF001 - Python's own way to look up the stack
        while frame is not None:
            if frame.f_code is JournalFile.write.__code__ and frame.f_locals.get("self") is self:
                return True
            frame = frame.f_back
        return False

    def _leave(self) -> None:
        """Undo what was not committed, and let the next one in."""
        try:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
        except apsw.Error as error:
            raise self._fail(f"a transaction could not be undone ({error})") from error
        finally:
            self._queue.release()

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
                deleted = os.fstat(self._log).st_nlink == 0
            except OSError as error:
                raise self._fail(f"fdatasync failed ({error.strerror})") from error
            if deleted:
                raise self._fail("its files were deleted while it was open")
            took = time.perf_counter() - started
            # A long one may be a busy machine's doing, a short one proves the disk quick.
            self.sync_seconds = min(took, self.sync_seconds + (took - self.sync_seconds) * 0.1)
            self._synced = covers

    def alone(self) -> threading.RLock:
        """Return the lock that keeps other threads from writing, for more than a transaction."""
        self.check_process()
        return self._mutex

    def _enter_queue(self, busy_timeout: float | None = None) -> None:
        seconds = self._busy_seconds if busy_timeout is None else busy_timeout
        if not self._queue.acquire(seconds):
            raise StoreBusyError(
                f"{self.path}: another process has been inside a write for {seconds:g} seconds;"
                f" it may be stopped (see {self._queue.path.name})"
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

    def tend(self) -> None:
        """Look now and then how long the log is; what fails here shows at the next write."""
        if self._committed - self._looked < _LOOK_AT_LOG_EVERY:
            return
        self._looked = self._committed
        try:
            with self._read_mutex:
                self._check_usable()
                self.log_pages, _ = self._reader.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_NOOP)
            if self.log_pages > CHECKPOINT_PAGES_MOST:
                self.checkpoint()
        except (apsw.Error, MaestroError) as error:
            logger.debug("%s: %s", self.path, error)

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

    def empty_log(self) -> bool:
        """Copy the log into the database and cut it to nothing; False if somebody reads from it."""
        with self._mutex:
            self._check_usable()
            self._enter_queue()
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
        source = page_checksums.connect(self.path, apsw.SQLITE_OPEN_READWRITE)
        copy = page_checksums.connect(target, apsw.SQLITE_OPEN_READWRITE)
        try:
            # With a first page that asks for checksums, or pages written before it get none.
            page_checksums.switch_on(copy)
            copy.pragma("user_version", 1)
            copy.close()
            copy = page_checksums.connect(target, apsw.SQLITE_OPEN_READWRITE)
            # In one go and under one read transaction, or every commit would start it again.
            source.execute("BEGIN; SELECT count(*) FROM runs")
            with copy.backup("main", source, "main") as backup:
                backup.step(-1)
            copy.pragma("journal_mode", "delete")
        except apsw.Error as error:
            for leftover in target.parent.glob(f"{target.name}*"):
                leftover.unlink()
            raise self._damage(error) or StorageError(
                f"{self.path} could not be copied to {target}: {error}"
            ) from error
        finally:
            copy.close()
            source.close()

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
        """Return whether it is open, here, and sound."""
        return not self._closed and self._failure is None and self.is_here()

    def is_here(self) -> bool:
        """Return whether this process opened it; a forked child did not."""
        return os.getpid() == self._pid

    def check_process(self) -> None:
        """Raise in a forked child; before any lock, which a thread of the parent may have held."""
        if not self.is_here():
            raise StoreClosedError(
                f"{self.path} was opened by process {self._pid}, and this is a forked child of it;"
                " start the child with 'spawn' or as a program of its own"
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

    def _damage(self, error: apsw.Error) -> CorruptionError | None:
        """Return our error if SQLite's says that the file is not what was written."""
        if getattr(error, "extendedresult", 0) == apsw.SQLITE_IOERR_DATA:
            reason = "a page does not match its checksum"
        elif isinstance(error, apsw.CorruptError | apsw.NotADBError):
            reason = str(error)
        else:
            return None
        return CorruptionError(f"{self.path} is damaged: {reason}; restore a backup")

    def _explain(self, error: apsw.Error, *, writing: bool = False) -> MaestroError:
        """Turn SQLite's error into one of ours."""
        damage = self._damage(error)
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
