"""SQLite: a database in memory, of this process alone, and a file that processes share.

A commit that has to be durable writes its pages to the log, gives the folder's lock back, and only
then syncs the log: other processes write meanwhile, and one sync covers every commit before it.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import shutil
import struct
import tempfile
import threading
import time
import warnings
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import apsw

from maestro_hive.journal import sql
from maestro_hive.journal.database import FORMAT, Holder, guard_against_fork
from maestro_hive.journal.sqlite_locks import (
    FolderLock,
    Guards,
    Mark,
    Presence,
    inodes,
    open_private,
    sync_fd,
)
from maestro_hive.kernel.clock import SystemClock
from maestro_hive.kernel.errors import (
    ConfigurationError,
    CorruptionError,
    FolderError,
    FormatError,
    MaestroError,
    StorageError,
    StoreClosedError,
    StoreFailedError,
)
from maestro_hive.kernel.files import (
    make_folder_inside,
    make_private_folder,
    refuse_shared_folder,
    sync_folder,
)
from maestro_hive.kernel.logs import get_log

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from datetime import datetime

    from maestro_hive.journal.database import Row, T, Transaction
    from maestro_hive.kernel.clock import Clock

logger = get_log(__name__)

SYSTEM = SystemClock()
#: Marks a SQLite file as a journal of maestro-hive ("MHIV").
APPLICATION_ID = 0x4D484956
#: The log is copied into the database when it is this long.
CHECKPOINT_PAGES = 1000
_PAGE_BYTES = 4096
_LOG_HEADER_BYTES, _FRAME_HEADER_BYTES = 32, 24
_FRAME_BYTES = _FRAME_HEADER_BYTES + _PAGE_BYTES
_LOG_BYTES = CHECKPOINT_PAGES * _FRAME_BYTES + _LOG_HEADER_BYTES
#: A log that had large values is truncated to this when it starts again.
_LOG_BYTES_MOST = 16 << 20
_CHECKSUM_BYTES = 8
#: To check a large table as a whole would keep writers from writing for seconds.
_SMALL_TABLES = """
SELECT name FROM sqlite_schema
WHERE type = 'table' AND name NOT IN ('entries', 'payloads', 'chunks')"""
#: How often the files are looked for: a step that is acknowledged after they were deleted is lost,
#: so this bounds for how long that can happen. ``close`` looks too.
_LOOK_SECONDS = 0.1
#: How often a process that waits looks whether another one has written.
_POLL_SECONDS = 0.02


class DamagedJournalWarning(UserWarning):
    """A journal was opened although steps that were acknowledged are gone."""


class Sqlite:
    """A SQLite database in memory; ``image`` is the content of another one."""

    dialect = "sqlite"

    def __init__(self, image: bytes | None = None, *, clock: Clock = SYSTEM) -> None:
        self._prepare(clock)
        self._db = apsw.Connection(":memory:")
        self._db.deserialize("main", image or _empty_image())
        self._execute = self._db.execute

    def _prepare(self, clock: Clock) -> None:
        self.sql = sql.statements("sqlite")
        self._mutex, self._changed = threading.RLock(), threading.Condition()
        #: Why every call is refused: it is closed, or a sync has failed.
        self._refusal: tuple[type[StorageError], str] | None = None
        self._notices, self._seen = 0, threading.local()
        self._clock, self._offset = clock, clock.now().timestamp() - clock.boot_seconds()
        self._holder = Holder.of_this_process()
        guard_against_fork(self)

    @property
    def is_refusing(self) -> bool:
        """Return whether every call is refused until the database is opened again."""
        return self._refusal is not None

    def serialize(self) -> bytes:
        """Return what is committed: all that a crash leaves."""
        with self._mutex:
            return self._db.serialize("main")

    def copy(self) -> Self:
        """Return a database as a process finds it after the death of this one."""
        return type(self)(self.serialize(), clock=self._clock)

    # --- transactions ---

    def write(self, body: Callable[[Transaction], T], *, sync: bool) -> T:
        """Run ``body`` in one transaction; with ``sync`` it is durable on return."""
        with self._mutex:
            self._check()
            self._enter()
            try:
                self._execute("BEGIN IMMEDIATE")
                try:
                    result = body(self._run)
                    self._execute("COMMIT")
                finally:
                    self._undo()
            except apsw.Error as error:
                raise self._unwritten(error) from error
            finally:
                commit = self._leave()
        if sync:
            self._sync(commit)
        return result

    def once(self, statement: str, parameters: Sequence[Any], *, sync: bool) -> int:
        """Run one statement that is a transaction by itself; return how many rows it wrote."""
        with self._mutex:
            if self._refusal is not None:
                self._check()
            self._enter()
            try:
                # A statement with RETURNING is committed when its rows have been read.
                self._execute(statement, parameters).fetchall()
                written = self._db.changes()
            except apsw.Error as error:
                raise self._unwritten(error) from error
            finally:
                commit = self._leave()
        if sync and written:
            self._sync(commit)
        return written

    def _run(self, statement: str, /, *parameters: Any) -> list[Row]:
        return self._execute(statement, parameters).fetchall()

    def _undo(self) -> None:
        """Undo a transaction that has not ended; the error that ended its body is reported."""
        with contextlib.suppress(apsw.Error):
            if self._db.in_transaction:
                self._execute("ROLLBACK")

    def _unwritten(self, error: apsw.Error) -> MaestroError:
        return _explained("the journal cannot be written", error)

    def _check(self) -> None:
        if self._refusal is not None:
            kind, message = self._refusal
            raise kind(message)

    def _enter(self) -> None:
        """Wait for the turn of this process to write."""

    def _leave(self) -> int:
        """End the turn; return the number of the commit."""
        return 0

    def _sync(self, commit: int) -> None:
        """Make a commit durable, with all before it."""

    def read(self, statement: str, *parameters: Any) -> list[Row]:
        """Run one query."""
        self._check()
        try:
            with self._mutex:
                return self._execute(statement, parameters).fetchall()
        except apsw.Error as error:
            raise _explained("the journal cannot be read", error) from error

    # --- time and processes ---

    def now(self) -> float:
        """Return seconds since 1970 on a clock that cannot be set."""
        return self._offset + self._clock.boot_seconds()

    def wall_time(self) -> datetime:
        """Return the time on the clock that people set."""
        return self._clock.now()

    def holder(self) -> str:
        """Return the text under which this process holds runs."""
        return str(self._holder)

    def alive(self, holder: str) -> bool:
        """Return whether the process of a holder is alive."""
        return holder == str(self._holder)

    def notify(self) -> None:
        """Wake the threads of this process that wait; other processes look by themselves."""
        with self._changed:
            self._notices += 1
            self._changed.notify_all()

    def wait(self, seconds: float) -> bool:
        """Block until something was written since this thread waited last."""
        deadline = time.monotonic() + seconds
        last = getattr(self._seen, "state", None)
        while True:
            self._check()
            left = deadline - time.monotonic()
            with self._changed:
                if left > 0 and (last is None or last[0] == self._notices):
                    self._changed.wait(min(left, _POLL_SECONDS))
            state = (self._notices, self._changes())
            if state != last:
                self._seen.state = state
                return True
            if left <= 0:
                return False

    def _changes(self) -> object:
        """Return something that differs after each commit."""
        with contextlib.suppress(apsw.ConnectionClosedError), self._mutex:
            return self._db.total_changes()
        return None

    # --- the whole ---

    def backup(self, target: Path) -> None:
        """Raise: nothing of this outlives its process anyway."""
        raise ConfigurationError(f"a journal in memory is not copied to {target}; use a folder")

    def check_pages(self) -> list[str]:
        """Return what is wrong with the pages of tables, but those that are read run by run."""
        found: list[str] = []
        try:
            for (table,) in self.read(_SMALL_TABLES):
                rows = self.read(f"PRAGMA integrity_check('{table}')")
                found += [str(row[0]) for row in rows if row[0] != "ok"]
        except CorruptionError as error:
            found.append(str(error))
        return found

    # --- the end ---

    def close(self) -> None:
        """Close it."""
        with self._mutex:
            self._refuse(StoreClosedError, "the journal is closed; open it again")
            self._db.close()

    def _refuse(self, kind: type[StorageError], message: str) -> StorageError:
        """Refuse every later call, and wake the threads that wait; return the error."""
        self._refusal = kind, message
        self.notify()
        return kind(message)

    def disown(self) -> None:
        """Refuse every call, in a forked child."""
        opener = f"process {self._holder.pid}, and this is a forked child of it"
        self._refusal = StoreClosedError, f"the journal was opened by {opener}; open it again here"


class SqliteFile(Sqlite):
    """A SQLite file that processes share, guarded by ``sqlite_locks``.

    ``accept_loss`` opens a journal although steps that were acknowledged are gone.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        clock: Clock = SYSTEM,
        accept_loss: bool = False,
    ) -> None:
        self._prepare(clock)
        self._path = Path(path).parent.resolve() / Path(path).name
        self._log_path, self._index_path = (
            self._path.with_name(self._path.name + end) for end in ("-wal", "-shm")
        )
        self._lock_path = self._path.with_suffix(".lock")
        self._files = (self._path, self._log_path, self._index_path, self._lock_path)
        self._read_mutex, self._sync_mutex = threading.Lock(), threading.Lock()
        #: Numbers of commits.
        self._committed = self._synced = 0
        #: Pages of the log: in it, of the last commit, in the database, when it was last copied.
        self._pages = self._written = self._copied = self._attempted = 0
        self._looked = 0.0
        self._accept_loss = accept_loss
        #: What was lost, if the loss was accepted.
        self.damage: str | None = None
        self._opened = contextlib.ExitStack()
        try:
            self._open()
        except BaseException as error:
            with contextlib.suppress(apsw.Error, OSError):
                self._opened.close()
            if isinstance(error, apsw.Error | OSError) and not isinstance(error, MaestroError):
                raise _explained(f"the journal {path} cannot be opened", error) from error
            raise
        self._execute = self._db.execute

    # --- opening ---

    def _open(self) -> None:
        _check_sqlite()
        _check_format(self._path)  # before anything in the folder is touched
        refuse_shared_folder(make_private_folder(self._path.parent))
        if self._log_path.is_symlink():
            raise FolderError(self._log_path, "is a symbolic link")
        self._queue, self._share = FolderLock(self._lock_path), FolderLock(self._lock_path)
        self._opened.callback(self._queue.close)
        self._opened.callback(self._share.close)
        with self._queue.held():
            self._attach()

    def _attach(self) -> None:
        """Open the files, as the only process that does so now."""
        # Its own file first, or a process that opens next takes this one for dead.
        self._presence = Presence(self._path.parent, self._queue)
        self._opened.callback(self._presence.close)
        self._holder = self._presence.holder
        self._offset = self._queue.clock_offset(self._clock)
        alone = self._presence.is_alone()
        used = self._presence.files_of_others()
        if used and used != {inodes(self._files)}:
            raise StoreFailedError(
                f"files of {self._path.parent} were deleted or replaced while other processes use"
                " them; end those first"
            )
        salts = _salts_of(self._log_path)  # before SQLite opens it
        if not self._path.exists() and not salts and not self._queue.marks():
            self._create()
        _check_whole(self._path)
        self._guards = Guards(self._path, self._index_path)
        self._opened.callback(self._guards.close)
        size = os.fstat(self._guards.index).st_size
        if alone and not self._guards.index_is_used():  # a killed process has left it
            os.truncate(self._guards.index, 0)
        self._guards.lock()
        self._db = self._connect()
        frames, _ = self._db.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_NOOP)
        if alone and (lost := self._presence.lost(salts, max(0, frames))):
            self._report_loss(lost, max(0, frames))  # before anything is written over the files
        if os.fstat(self._guards.index).st_size < size:
            os.truncate(self._guards.index, size)  # a process that mapped more of it would crash
        self._reader = self._connect()
        self._log = open_private(self._log_path)
        self._opened.callback(os.close, self._log)
        # Pages that a failed sync left in memory only are written again, into the database.
        frames, copied = self._db.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_PASSIVE)
        self._salts = os.pread(self._log, 8, 16)
        if any(self._salts):  # else it was voided; an index that is still in use has its old size
            self._pages, self._copied = max(0, frames), max(0, copied)
        self._position = self._looked_at = Mark(self._salts, self._pages, self._copied)
        self._inodes = inodes(self._files)
        self._presence.use(self._inodes)
        self._presence.note(self._position)
        if alone:
            self._presence.leave_mark(void=True)
            self._presence.remove_dead()
        self._db.set_wal_hook(self._count_pages)

    def _create(self) -> None:
        """Create the file under another name: a program that looks into it would undo its start."""
        new = self._path.with_suffix(".new")
        for each in (new, self._log_path):
            each.unlink(missing_ok=True)  # left by a process that was killed here
        log = open_private(self._log_path, os.O_CREAT | os.O_EXCL)
        file = open_private(new, os.O_CREAT | os.O_EXCL)
        try:
            db = apsw.Connection(str(new), flags=apsw.SQLITE_OPEN_READWRITE, vfs=_checksum_vfs())
            with contextlib.closing(db):
                _reserve(db, _CHECKSUM_BYTES)
                db.pragma("synchronous", "off")
                db.pragma("application_id", APPLICATION_ID)
                db.pragma("user_version", FORMAT)
                db.execute(f"BEGIN; {self.sql['SCHEMA']}; COMMIT")
                _use_log(db, new)
            os.pwrite(log, bytes(_LOG_BYTES), 0)  # a log that grows doubles the cost of a commit
            sync_fd(log)
            sync_fd(file)
        finally:
            os.close(log)
            os.close(file)
        new.rename(self._path)
        sync_folder(self._path.parent)

    def _connect(self) -> apsw.Connection:
        flags = apsw.SQLITE_OPEN_READWRITE | apsw.SQLITE_OPEN_NOFOLLOW
        db = apsw.Connection(str(self._path), flags=flags, vfs=_checksum_vfs())
        self._opened.callback(db.close)
        db.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 1)
        db.set_busy_timeout(5000)
        _use_log(db, self._path)
        db.pragma("synchronous", "normal")
        db.pragma("wal_autocheckpoint", 0)
        db.pragma("journal_size_limit", _LOG_BYTES_MOST)
        db.pragma("cache_size", -16_000)
        if _reserve(db, -1) != _CHECKSUM_BYTES:
            raise CorruptionError(f"{self._path}: its page checksums have been switched off")
        db.pragma("user_version")  # a read, so that the log is recovered
        return db

    def _report_loss(self, lost: Mark, frames: int) -> None:
        """Copy the damaged files aside, because opening changes them; raise unless accepted."""
        what = f"{self._log_path} lost {lost.synced - frames} of {lost.synced} synced pages"
        name = f"{lost.salts.hex()}-{frames}-of-{lost.synced}"
        aside = make_folder_inside(self._path.parent, "damaged", name)
        for each in (self._path, self._log_path):
            if each.exists() and not (aside / each.name).exists():
                shutil.copy2(each, aside)
        self.damage = f"{what}: steps that were acknowledged are gone; copied to {aside}"
        logger.error("%s", self.damage)
        if not self._accept_loss:
            raise CorruptionError(
                f"{self.damage}; restore a backup, or accept the loss with `maestro doctor --fix`"
            )
        warnings.warn(self.damage, DamagedJournalWarning, stacklevel=6)

    def _count_pages(self, _db: apsw.Connection, _name: str, pages: int) -> int:
        self._written = pages
        return 0

    # --- writing ---

    def _enter(self) -> None:
        try:
            self._queue.take()
        except OSError as error:  # TimeoutError, too
            raise StoreFailedError(f"the journal cannot be locked: {error}") from error

    def _leave(self) -> int:
        try:
            if os.pread(self._log, 8, 16) != self._salts:  # inside the lock
                self._read_salts()
            if self._written:
                self._pages, self._written = self._written, 0
            self._position = Mark(self._salts, self._pages, self._copied)
            self._committed += 1
        except OSError as error:
            raise self._fail("cannot be read", error) from error
        finally:
            self._queue.release()
        return self._committed

    def _read_salts(self) -> None:
        """Notice that another process has started the log again: none of its frames are known."""
        salts = os.pread(self._log, 8, 16)
        if salts != self._salts:
            if not any(salts):
                raise self._fail("cannot be used", "its log was cut")
            self._salts, self._pages, self._copied, self._attempted = salts, 0, 0, 0

    def _unwritten(self, error: apsw.Error) -> MaestroError:
        if isinstance(error, apsw.IOError):  # SQLite syncs a log's header when it starts it again
            self._fail("cannot be written", error)
        return super()._unwritten(error)

    def _fail(self, what: str, error: object) -> StorageError:
        return self._refuse(StoreFailedError, f"the journal {what}: {error}; open it again")

    def _sync(self, commit: int) -> None:
        with self._sync_mutex:
            if self._refusal is not None:
                self._check()
            if self._synced < commit:
                covers, position = self._committed, self._position
                try:
                    sync_fd(self._log)
                    self._look()
                    self._presence.note(position)
                except OSError as error:
                    raise self._fail("cannot be synced", error) from error
                self._synced = covers
        if self._pages - max(self._copied, self._attempted) > CHECKPOINT_PAGES:
            self._checkpoint()

    def _look(self, *, now: bool = False) -> None:
        """Raise if files were deleted or replaced. A look makes the next sync dearer: be rare."""
        seconds = time.monotonic()
        if now or seconds - self._looked >= _LOOK_SECONDS:
            self._looked = seconds
            if inodes(self._files) != self._inodes:
                raise self._fail("cannot be used", "its files were deleted or replaced")
            (salts, pages, _), self._looked_at = self._looked_at, self._position
            at = _LOG_HEADER_BYTES + (pages - 1) * _FRAME_BYTES + 8
            is_cut = pages and os.pread(self._log, 8, at) != salts
            if is_cut and os.pread(self._log, 8, 16) == salts:  # or it was started again
                raise self._fail("cannot be used", "its log was cut")

    def _checkpoint(self) -> None:
        """Copy the log into the database; no process reads or writes meanwhile."""
        with self._mutex:
            if self._refusal is not None:
                return
            try:
                with self._queue.held():
                    self._copy_log()
            except (apsw.Error, OSError) as error:
                # What was written is durable: the next call is refused.
                self._fail("cannot copy its log", error)

    def _copy_log(self) -> None:
        self._read_salts()
        found = self._db.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_PASSIVE)
        self._pages, self._copied = (max(0, each) for each in found)
        self._attempted = self._pages  # a program that reads for long keeps a part of the log
        self._presence.note(Mark(self._salts, self._pages, self._copied))

    # --- reading ---

    def read(self, statement: str, *parameters: Any) -> list[Row]:
        """Run one query, beside other readers."""
        self._check()
        try:
            with self._read_mutex:
                self._check()
                with self._share.held(fcntl.LOCK_SH):
                    return self._reader.execute(statement, parameters).fetchall()
        except (apsw.Error, OSError) as error:
            raise _explained("the journal cannot be read", error) from error

    def alive(self, holder: str) -> bool:
        """Return whether the process of a holder is alive: its file is locked."""
        return self._presence.lives(holder.partition(" ")[0])

    def _changes(self) -> object:
        with contextlib.suppress(OSError):  # closed just now
            self._look()
            return self._guards.commits()
        return None

    def backup(self, target: Path) -> None:
        """Copy the file, as of one moment, to a new one; writers get their turn meanwhile."""
        self._check()
        source, copy = open_copy(self._path), open_copy(target)
        try:
            source.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 1)
            source.pragma("wal_autocheckpoint", 0)
            with self._share.held(fcntl.LOCK_SH):
                source.execute("BEGIN; SELECT count(*) FROM sqlite_schema").fetchall()
            _reserve(copy, _CHECKSUM_BYTES)
            copy.pragma("journal_mode", "off")  # a copy that is not complete is deleted
            copy.execute("CREATE TABLE first (page)")  # or the first pages get no checksums
            backup = copy.backup("main", source, "main")
            while not backup.done:
                with self._read_mutex, self._share.held(fcntl.LOCK_SH):
                    backup.step(500)
                time.sleep(0.004)  # writers that wait look every 2 ms
            backup.finish()
        except (apsw.Error, OSError) as error:
            raise _explained(f"the journal cannot be copied to {target}", error) from error
        finally:
            copy.close()
            source.close()

    # --- the end ---

    def close(self) -> None:
        """Close it, as the last process with all in the database; raise if its files are gone."""
        with self._mutex, self._sync_mutex, self._read_mutex:
            kind, _ = self._refusal or (None, "")
            if kind is StoreClosedError:
                return
            try:
                if kind is None:
                    self._look(now=True)
            finally:
                self._end(failed=self._refusal is not None)

    def _end(self, *, failed: bool) -> None:
        self._refuse(StoreClosedError, "the journal is closed; open it again")
        with contextlib.suppress(apsw.Error, OSError), self._queue.held():
            copied = not failed and self._presence.is_alone() and self._void_log()
            self._presence.leave_mark(void=copied)
        with contextlib.suppress(apsw.Error, OSError):
            self._opened.close()

    def _void_log(self) -> bool:
        """Copy the log and void it: the first part of one that is damaged later shows old pages."""
        self._copy_log()
        self._presence.leave_mark()
        if self._pages != self._copied:
            return False
        self._presence.remove_dead()
        os.pwrite(self._log, bytes(_LOG_HEADER_BYTES), 0)
        sync_fd(self._log)
        return True

    def disown(self) -> None:
        """In a forked child, close the files that would keep the parent's locks after its death."""
        if self._refusal is None or self._refusal[0] is not StoreClosedError:
            super().disown()
            self._queue.close()
            self._share.close()
            self._guards.close()
            self._presence.close(inherited=True)
            _inherited.append(self._opened.pop_all())


#: Connections of a parent: a child must not close them, which would drop locks or write.
_inherited: list[contextlib.ExitStack] = []


@cache
def _empty_image() -> bytes:
    """Return a journal without runs."""
    db = apsw.Connection(":memory:")
    db.execute(sql.statements("sqlite")["SCHEMA"])
    return db.serialize("main")


def _check_format(path: Path) -> None:
    """Refuse a file of another format or program by its header, without changing anything."""
    try:
        with path.open("rb") as file:
            header = file.read(100)
    except FileNotFoundError:
        return
    if len(header) < 100:
        return  # cut
    version, application = (
        struct.unpack(">I", header[60:64])[0],
        struct.unpack(">I", header[68:72])[0],
    )
    if header[:16] != b"SQLite format 3\0" or application != APPLICATION_ID:
        raise CorruptionError(
            f"{path} is no journal of maestro-hive, or its start is damaged; choose another folder,"
            " or restore a backup"
        )
    if version != FORMAT:
        raise FormatError(str(path), version, FORMAT)


def _check_whole(path: Path) -> None:
    size = path.stat().st_size if path.exists() else 0
    if not size or size % _PAGE_BYTES:
        raise CorruptionError(f"{path} is gone or was cut; restore a backup")


def _explained(what: str, error: Exception) -> MaestroError:
    """Turn an error of SQLite or the system into one of this package."""
    if isinstance(error, apsw.ConnectionClosedError):
        return StoreClosedError("the journal is closed; open it again")
    if (
        isinstance(error, apsw.CorruptError | apsw.NotADBError)
        or getattr(error, "extendedresult", 0) == apsw.SQLITE_IOERR_DATA
    ):
        return CorruptionError(f"{what}: it is damaged ({error}); restore a backup")
    if isinstance(error, apsw.BusyError):
        return StoreFailedError(f"{what}: another program has locked it ({error})")
    return StoreFailedError(f"{what}: {error}")


def _salts_of(log: Path) -> bytes | None:
    """Return the number of this generation of a log; None without a sound header."""
    try:
        with log.open("rb") as file:
            header = file.read(_LOG_HEADER_BYTES)
    except FileNotFoundError:
        return None
    if len(header) < _LOG_HEADER_BYTES or not any(header):
        return None
    order = ">" if header[3] & 1 else "<"
    s0 = s1 = 0
    for x, y in struct.iter_unpack(f"{order}II", header[:24]):
        s0 = (s0 + x + s1) & 0xFFFFFFFF
        s1 = (s1 + y + s0) & 0xFFFFFFFF
    return header[16:24] if struct.pack(">II", s0, s1) == header[24:] else None


def _use_log(db: apsw.Connection, path: Path) -> None:
    if db.pragma("journal_mode", "wal") != "wal":
        raise FolderError(path.parent, "is on a file system where processes cannot share a log")
    for each in ("fullfsync", "checkpoint_fullfsync"):  # matter on macOS only
        db.pragma(each, 1)


@cache
def _check_sqlite() -> None:
    """Check in a folder of its own that SQLite locks and logs as this module assumes."""
    with tempfile.TemporaryDirectory(prefix="maestro-") as folder:
        path = Path(folder) / "journal.db"
        db = apsw.Connection(str(path))
        db.pragma("synchronous", "off")
        db.pragma("journal_mode", "wal")
        db.execute("CREATE TABLE t (x)")
        log, guards = Path(f"{path}-wal").read_bytes(), Guards(path, Path(f"{path}-shm"))
        counts, before = [0], guards.commits()

        def count(_db: apsw.Connection, _name: str, pages: int) -> int:
            counts.append(pages)
            return 0

        db.set_wal_hook(count)
        db.execute("INSERT INTO t VALUES (1)")
        frames = (len(log) - _LOG_HEADER_BYTES) // _FRAME_BYTES
        salts = [log[at + 8 : at + 16] for at in range(_LOG_HEADER_BYTES, len(log), _FRAME_BYTES)]
        as_assumed = (
            guards.sqlite_holds(),
            guards.commits() != before,
            salts == [_salts_of(Path(f"{path}-wal"))] * frames,
            counts == [0, frames + 1],
        )
        guards.close()
        db.close()
    if not all(as_assumed):
        raise StoreFailedError(
            f"SQLite {apsw.sqlite_lib_version()} locks or logs in another way than this version of"
            f" maestro-hive relies on {as_assumed}; install another version of apsw"
        )


def open_copy(path: Path) -> apsw.Connection:
    """Open a copy of a journal's file, whatever state it is in; damaged pages are errors."""
    return apsw.Connection(str(path), vfs=_checksum_vfs())


@cache
def _checksum_vfs() -> str:
    """Load SQLite's page checksums, and leave apsw's default as other users had it."""
    from apsw import sqlite_extra

    if sqlite_extra.has("cksumvfs") is None:
        raise StoreFailedError(
            "this build of apsw lacks SQLite's cksumvfs, which guards the journal's pages; install"
            " apsw from its published wheel"
        )
    default = apsw.vfs_names()[0]
    loader = apsw.Connection(":memory:")
    sqlite_extra.load(loader, "cksumvfs")
    loader.close()
    apsw.set_default_vfs(default)
    return "cksmvfs"


def _reserve(db: apsw.Connection, value: int) -> int:
    """Set how many bytes of each page are its checksum's, or with -1 return it."""
    number = ctypes.c_int(value)
    db.file_control("main", apsw.SQLITE_FCNTL_RESERVE_BYTES, ctypes.addressof(number))
    return number.value
