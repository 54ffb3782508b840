"""The journal's file: opening it, transactions, queries, syncs, and its log.

Writers of all processes queue at a ``flock``; a commit writes without syncing, and ``sync`` makes
every commit so far durable, outside the queue. What guards the file against other processes is in
``locks``; how a log that was damaged, deleted or cut is found, in ``wal``.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from typing import TYPE_CHECKING, Protocol, TypeVar

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
from maestro_hive.kernel.files import FileLock
from maestro_hive.kernel.logs import get_logger
from maestro_hive.maestro.state.sqlite import wal
from maestro_hive.maestro.state.sqlite.connection import (
    Row,
    connect,
    copy_database,
    create_tables,
    damage_error,
    prepare,
)
from maestro_hive.maestro.state.sqlite.locks import (
    DatabaseGuard,
    IndexGuard,
    ReadersLock,
    index_of,
    log_of,
    restore_size,
)
from maestro_hive.maestro.state.sqlite.wal import COPIED, Marks

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from maestro_hive.maestro.state.records import Damage

logger = get_logger(__name__)

ResultT = TypeVar("ResultT")

#: Pages in the log at which it is copied into the database.
CHECKPOINT_PAGES = 1000
#: Pages at which a writer does that itself, because the background thread did not get to it.
CHECKPOINT_PAGES_MOST = 8 * CHECKPOINT_PAGES
#: Pages more, after which it is tried again when the log could not start again.
_TRY_AGAIN_PAGES = CHECKPOINT_PAGES // 4

_BUSY_SECONDS = 30.0
#: How long queries may prevent the log from being copied: other queries wait meanwhile.
_COPYING_SECONDS = 0.05
#: The same while writers wait, too; and when the log is too long.
_RESTARTING_SECONDS = 0.005
_RESTARTING_SECONDS_MOST = 0.1
#: How long they may prevent it from being emptied, and how long closing waits for anything.
_EMPTYING_SECONDS = 1.0

#: The start of the log's index, and what it says: frames in the log, its salts (each generation of
#: a log has others), and how many frames are copied; see "WAL-Index File Format" of SQLite.
_INDEX_BYTES = 100
_FRAMES, _SALTS, _COPIED = slice(16, 20), slice(32, 40), slice(96, 100)


class _Closable(Protocol):
    def close(self) -> None: ...


_ClosableT = TypeVar("_ClosableT", bound=_Closable)


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
        #: Pages in the log at the last commit, and at how many it is due to be copied.
        self.log_pages = 0
        self.log_pages_due = CHECKPOINT_PAGES
        self.sync_seconds = 0.0
        #: How many transactions this process has committed; ``sync`` takes such a number.
        self.committed = 0
        #: Guards the writing connection; see ``locked`` for more than one transaction.
        self.mutex = threading.RLock()
        self.pid = os.getpid()
        self._busy_seconds = busy_seconds
        #: Guards ``_exclusion``; taken before all others.
        self._copying = threading.Lock()
        self._read_mutex = threading.Lock()
        self._second_mutex = threading.Lock()
        self._second_reader: apsw.Connection | None = None
        self._sync_mutex = threading.Lock()
        self._synced = 0
        self._failure: str | None = None
        self._closed = False
        self._connections: list[apsw.Connection] = []
        self._opened: list[_Closable] = []
        self._log = self._index_fd = -1
        self._page_size = 0
        #: Whether another program prevented the log from being copied when it was opened.
        self._needs_log = False
        self._generation = 0
        #: Salts of the log and frames copied, when ``_generation`` was read.
        self._salts = self._copied = b""
        #: The log at the last commit, and at the last sync: the fields of a ``Mark``.
        self._position: tuple[int, bytes, int] = (0, b"", 0)
        self._acknowledged = self._position
        try:
            self._queue = self._keep(FileLock(folder / "journal.lock"))
            self._users = self._keep(FileLock(folder / "journal.users"))
            self._exclusion = self._keep(ReadersLock(folder))
            self._first_share = self._keep(ReadersLock(folder))
            self._second_share = self._keep(ReadersLock(folder))
            self._marks = self._keep(Marks(folder))
            self._open(keep_damaged_log)
        except FolderError as error:
            self._close_all()
            if error.path.parent != folder or error.path == self.path:
                raise
            raise FolderError(folder, f"cannot be written ({error.reason})") from error
        except BaseException:
            self._close_all()
            raise

    def _keep(self, opened: _ClosableT) -> _ClosableT:
        self._opened.append(opened)
        return opened

    def _close_all(self) -> None:
        """Close everything: connections first, since closing their files drops their locks."""
        for db in reversed(self._connections):
            db.close()
        if self._log >= 0:
            os.close(self._log)
        for each in reversed(self._opened):
            each.close()

    # --- opening ---

    def _open(self, keep_damaged_log: Callable[[str], Damage]) -> None:
        self._enter_queue(None)
        try:
            first = self._users.join()
            if first:
                self._keep_log_without_database(keep_damaged_log)
            else:
                self._refuse_replaced_files()
            files.create_private(self.path)
            self._attach(first=first)
            if first:  # before anything is written over what the log lost
                self._examine_log(keep_damaged_log)
            create_tables(self._db, str(self.path))
            self._reader = self._connect()
            self._log = os.open(log_of(self.path), os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            self._page_size = int(self._db.pragma("page_size"))
            self._marks.start(self.path, first=first)
            self._look_at_log()
            self._acknowledged = self._position
            if self._needs_log:
                self._marks.note(self._position)
            files.sync_folder(self.path.parent)
        except apsw.Error as error:
            raise self._explain(error) from error
        except OSError as error:
            if isinstance(error, MaestroError):
                raise
            raise StorageError(f"{self.path} cannot be opened: {error.strerror}") from error
        finally:
            self._exclusion.release()
            self._queue.release()

    def _refuse_replaced_files(self) -> None:
        replaced = self._marks.read().replaced(self.path)
        if replaced is not None:
            raise StorageError(
                f"{replaced} was deleted or replaced while other processes have the journal open;"
                " end them, and open it again"
            )

    def _attach(self, *, first: bool) -> None:
        """Connect, so that the index of the log is built again exactly when it has to be.

        Who opens the journal first has to, whatever a killed process left in it. Whoever finds
        nobody else's lock on it, all having been dropped, does: then nobody may use it meanwhile.
        """
        index = index_of(self.path)
        in_use = not first and IndexGuard.is_used(self.path)
        if not in_use and not self._exclusion.exclude(self._busy_seconds):
            raise self._reader_busy()
        size = index.stat().st_size if index.exists() else 0
        if first and size:
            os.truncate(index, 0)
            os.truncate(index, size)
        self._db = self._connect()
        self._db.pragma("user_version")  # a read, so that the log is recovered
        restore_size(index, size)
        self._index = self._keep(IndexGuard(self.path))
        self._index.hold()
        self._index_fd = self._index.fileno()
        self._guard = self._keep(DatabaseGuard(self.path))
        self._guard.hold()

    def _connect(self) -> apsw.Connection:
        db = connect(self.path, apsw.SQLITE_OPEN_READWRITE)
        self._connections.append(db)
        db.set_busy_timeout(int(self._busy_seconds * 1000))
        prepare(db, self.path)
        return db

    def _keep_log_without_database(self, keep_damaged_log: Callable[[str], Damage]) -> None:
        """Keep a log whose database is gone: SQLite would start a new one and overwrite it."""
        log = log_of(self.path)
        gone = not self.path.exists() or self.path.stat().st_size == 0
        if gone and log.exists() and log.stat().st_size > 0:
            self.damage = keep_damaged_log("its database was gone, and only its log was left")
            files.remove(log)

    def _examine_log(self, keep_damaged_log: Callable[[str], Damage]) -> None:
        """As the first to open the file: keep a damaged log, and checkpoint what is good."""
        page_size = int(self._db.pragma("page_size"))
        recovered, _ = self._db.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_NOOP)
        log = log_of(self.path)
        marked = self._marks.read()
        if lost := wal.lost_commits(log, max(0, recovered), page_size):
            self.damage = keep_damaged_log(
                f"its log is damaged, and {lost} commit(s) behind the damage could not be read:"
                " what was recorded last may be lost"
            )
        elif self.damage is None and (reason := marked.lost(wal.salts_of(log), max(0, recovered))):
            self.damage = keep_damaged_log(reason)
        elif marked.is_copy(self.path):
            logger.warning("%s %s", self.path.parent, COPIED)
        if recovered > 0:
            # Pages that a failed fsync left in memory only are written again, into the database.
            log_pages, copied = self._db.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_PASSIVE)
            self._needs_log = copied < log_pages
        if self.path.stat().st_size % page_size:
            # SQLite reads the rest of such a page as zeros, and has no checksum to compare.
            raise CorruptionError(f"{self.path} ends in the middle of a page; restore a backup")

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
                self._look_at_log()
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
            self._look_at_log()
            return db.last_insert_rowid() if db.changes() else None
        except apsw.Error as error:
            raise self._explain(error, writing=True) from error
        finally:
            queue.release()

    def change(self, sql: str, bindings: Row, busy_timeout: float | None) -> bool:
        """Run one statement that is a transaction by itself; False if it refused, by ``RAISE``.

        The caller holds ``mutex`` and has checked the process.
        """
        db, queue = self._db, self._queue
        if self._failure is not None or self._closed or db.in_transaction:
            self._prepare()
        try:
            if not queue.acquire(self._busy_seconds if busy_timeout is None else busy_timeout):
                raise self._busy(busy_timeout)
            db.execute(sql, bindings)
            self.committed += 1
            self._look_at_log()
        except apsw.ConstraintError:
            return False
        except apsw.Error as error:
            raise self._explain(error, writing=True) from error
        finally:
            queue.release()
        return True

    def define(self, script: str) -> None:
        """Define temporary views and triggers of the writing connection."""
        with self.mutex:
            try:
                self._db.execute(script)
            except apsw.Error as error:
                raise self._explain(error, writing=True) from error

    def _look_at_log(self) -> None:
        """See how long the log is; inside the queue, so that it does not change."""
        try:
            index = os.pread(self._index_fd, _INDEX_BYTES, 0)
            salts, copied = index[_SALTS], index[_COPIED]
            if copied != self._copied or salts != self._salts:
                # Only then may the log have been copied completely since the last look.
                self._salts, self._copied = salts, copied
                self._generation = self._marks.generation()
                self.log_pages_due = CHECKPOINT_PAGES
        except OSError as error:
            raise self._fail(f"its log's index cannot be read ({error.strerror})") from error
        self.log_pages = frames = int.from_bytes(index[_FRAMES], sys.byteorder)
        self._position = (self._generation, salts, frames)

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
            covers, position = self.committed, self._position
            started = time.perf_counter()
            try:
                os.fdatasync(self._log)
                took = time.perf_counter() - started
                wrong = self._find_loss(position[1])
                if wrong is None:
                    self._marks.note(position)
            except OSError as error:
                raise self._fail(f"fdatasync failed ({error.strerror})") from error
            if wrong is not None:
                raise self._fail(wrong)
            # A long one may be due to a busy machine, a short one proves that the disk is fast.
            self.sync_seconds = min(took, self.sync_seconds + (took - self.sync_seconds) * 0.1)
            self._synced, self._acknowledged = covers, position

    def _find_loss(self, salts: bytes) -> str | None:
        """Return what happened to the log since the last sync; None if that is still in it."""
        if os.fstat(self._log).st_nlink == 0:
            return "its files were deleted while it was open"
        _, before, frames = self._acknowledged
        if not frames or before != salts:
            return None
        at = wal.frame_salts_at(frames, self._page_size)
        if os.pread(self._log, len(salts), at) == salts:
            return None
        if os.pread(self._index_fd, _INDEX_BYTES, 0)[_SALTS] != salts:
            return None  # another process has let it start again just now
        return "its log was cut while it was open"

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
                self._check_usable()
                return self._rows(self._reader, self._first_share, sql, bindings)
            finally:
                self._read_mutex.release()
        with self._second_mutex:
            self._check_usable()
            try:
                self._second_reader = self._second_reader or self._connect()
            except apsw.Error as error:
                raise self._explain(error) from error
            return self._rows(self._second_reader, self._second_share, sql, bindings)

    def _rows(self, db: apsw.Connection, lock: ReadersLock, sql: str, bindings: Row) -> list[Row]:
        try:
            if not lock.share(self._busy_seconds):
                raise self._reader_busy()
            return db.execute(sql, bindings).fetchall()
        except apsw.Error as error:
            raise self._explain(error) from error
        finally:
            lock.release()

    def _reader_busy(self) -> StoreBusyError:
        return StoreBusyError(
            f"{self.path}: another process has been reading it or copying its log for"
            f" {self._busy_seconds:g} seconds; it may be stopped (see journal.readers)"
        )

    # --- the log ---

    def shorten_log(self) -> bool:
        """Return whether the log is due to be copied; one that is much too long is copied at once.

        What fails here shows at the next write.
        """
        if self.log_pages > CHECKPOINT_PAGES_MOST:
            try:
                self.checkpoint()
            except (apsw.Error, MaestroError) as error:
                logger.debug("%s: %s", self.path, error)
        return self.log_pages > self.log_pages_due

    def checkpoint(self) -> None:
        """Copy the log into the database, most of it without blocking writers.

        Queries that do not end soon prevent it: then it is tried again when the log has grown.
        """
        self.check_process()
        if not self._copying.acquire(blocking=False):
            return  # another thread is doing it
        try:
            with self._read_mutex:
                self._check_usable()
                self._copy_log(self._reader, _COPYING_SECONDS)
            # The rest with writers blocked, so that the log can start again from its head.
            with self.locked():
                self._check_usable()
                try:
                    self._enter_queue(None)
                    self._finish_copy()
                finally:
                    self._queue.release()
        except apsw.BusyError:
            return  # another program is doing it
        except apsw.Error as error:
            raise self._explain(error, writing=True) from error
        except OSError as error:
            if isinstance(error, MaestroError):
                raise
            raise self._fail(f"its marks could not be written ({error.strerror})") from error
        finally:
            self._copying.release()

    def _copy_log(self, db: apsw.Connection, seconds: float) -> bool:
        """Copy the log while queries are kept out; return whether all of it is in the database.

        False, with nothing copied, if those that run now do not end within so many seconds.
        """
        try:
            if not self._exclusion.exclude(seconds):
                return False
            log, copied = db.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_PASSIVE)
        finally:
            self._exclusion.release()
        return log == copied

    def _finish_copy(self) -> None:
        """Copy the rest, inside the queue; the next commit starts at the log's head."""
        too_long = self.log_pages > CHECKPOINT_PAGES_MOST
        seconds = _RESTARTING_SECONDS_MOST if too_long else _RESTARTING_SECONDS
        if self._copy_log(self._db, seconds):
            self._marks.void()
            self.log_pages, self.log_pages_due = 0, CHECKPOINT_PAGES
        else:
            self.log_pages_due = self.log_pages + _TRY_AGAIN_PAGES

    def empty_log(self) -> bool:
        """Copy the log into the database and truncate it; False if a reader uses it."""
        self.check_process()
        with self._copying, self.locked():
            self._check_usable()
            try:
                self._enter_queue(None)
                return self._exclusion.exclude(_EMPTYING_SECONDS) and self._empty_log()
            except apsw.BusyError:
                return False
            except apsw.Error as error:
                raise self._explain(error, writing=True) from error
            except OSError as error:
                if isinstance(error, MaestroError):
                    raise
                raise self._fail(f"its log could not be emptied ({error.strerror})") from error
            finally:
                self._exclusion.release()
                self._queue.release()

    def _empty_log(self) -> bool:
        self._db.set_busy_timeout(int(_EMPTYING_SECONDS * 1000))
        try:
            log, copied = self._db.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_PASSIVE)
            if log != copied:
                return False
            self._marks.void()
            self._marks.sync()  # or a power cut could leave a mark without a log
            self._db.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_TRUNCATE)
        finally:
            self._db.set_busy_timeout(int(self._busy_seconds * 1000))
        self.log_pages = 0
        return True

    def copy_to(self, target: Path) -> None:
        """Write a consistent copy of the live file to ``target``, a new one, or nothing."""
        self._check_usable()
        share = ReadersLock(self.path.parent)
        try:
            if not share.share(self._busy_seconds):
                raise self._reader_busy()
            copy_database(self.path, target)
        finally:
            share.close()

    def close(self) -> None:
        """Close; what was committed is in the log or the database."""
        if os.getpid() != self.pid:
            return
        with (
            self._copying,
            self.mutex,
            self._read_mutex,
            self._second_mutex,
            self._sync_mutex,
        ):
            if self._closed:
                return
            self._closed = True
            if self._failure is None:
                self._tidy()
            self._close_all()

    def _tidy(self) -> None:
        """As the last user: leave the database alone, without a log, if nobody reads it.

        The log is only in the way of who copies the folder. What fails here is done by the next
        one that opens the journal.
        """
        try:
            last = self._queue.acquire(_EMPTYING_SECONDS) and self._users.try_acquire()
            if last and self._exclusion.exclude(_EMPTYING_SECONDS):
                log, copied = self._db.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_PASSIVE)
                if log == copied:
                    self._marks.finish()
                    self._guard.release()
                    self._index.release()
                    # SQLite deletes the log, unless another program has the database open.
                    self._db.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 0)
        except (apsw.Error, OSError) as error:
            logger.debug("%s: %s", self.path, error)

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
