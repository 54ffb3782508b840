"""Reading a journal in a folder: the ``Reader`` contract over one SQLite file.

``SqliteReader`` opens the journal for reading only. It creates and changes nothing in the folder,
and works where nothing can be written: on a read-only or full disk, beside processes that write,
and after a crash.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import threading
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

import apsw

from maestro_hive.kernel.clock import Clock, SystemClock, from_micros
from maestro_hive.kernel.errors import (
    CorruptionError,
    FolderError,
    StorageError,
    StoreBusyError,
    StoreClosedError,
)
from maestro_hive.kernel.files import FileLock
from maestro_hive.maestro.state.records import RunRecord
from maestro_hive.maestro.state.sqlite import wal
from maestro_hive.maestro.state.sqlite.accounts import AccountReader
from maestro_hive.maestro.state.sqlite.chunks import ChunkReader
from maestro_hive.maestro.state.sqlite.connection import (
    FORMAT,
    Row,
    check_format,
    checksum_vfs,
    connect,
    create_tables,
    damage_error,
)
from maestro_hive.maestro.state.sqlite.dispatch import DispatchReader
from maestro_hive.maestro.state.sqlite.documents import DocumentReader
from maestro_hive.maestro.state.sqlite.entries import EntryReader
from maestro_hive.maestro.state.sqlite.leases import FIND_LEASE, LIST_LEASES, Presence, read_lease
from maestro_hive.maestro.state.sqlite.locks import (
    IndexGuard,
    ReadersLock,
    index_of,
    log_of,
    restore_size,
)
from maestro_hive.maestro.state.sqlite.wal import lost_log

if TYPE_CHECKING:
    from collections.abc import Iterator

    from maestro_hive.maestro.state.records import Damage, Lease
    from maestro_hive.maestro.state.sqlite.entries import Queries

_RUNS = "SELECT id, name, workflow, status, created_at, updated_at, parent FROM runs"
_CHOSEN = (
    " WHERE (?1 IS NULL OR status = ?1) AND (?2 IS NULL OR workflow = ?2)"
    " AND (NOT ?3 OR parent IS NULL)"
)
_COUNT_ALL = "SELECT count(*) FROM runs"
_COUNT_CHOSEN = _COUNT_ALL + _CHOSEN
_COUNT_STATUSES = (
    "SELECT status, count(*) FROM runs WHERE (NOT ?1 OR parent IS NULL) GROUP BY status"
)
_LIST_CHOSEN = f"{_RUNS}{_CHOSEN} ORDER BY id DESC LIMIT ?4"

_BUSY_SECONDS = 5.0
#: How long is waited to be the only user of a journal that nobody seems to use.
_ALONE_SECONDS = 1.0
#: How often a query is made again because the files changed during it.
_TRIES = 10


class JournalReader(EntryReader, ChunkReader, DocumentReader, DispatchReader, AccountReader):
    """The reading half of the contract, over anything that runs queries."""

    def __init__(self, folder: Path, file: Queries, clock: Clock) -> None:
        self.folder = folder
        self.clock: Clock = clock
        self.damage: tuple[Damage, ...] = ()
        #: Of a reader, 0 where the first launch was killed before it recorded anything.
        self.format = FORMAT
        self._queries = file
        self._presence = Presence(folder, clock)

    @property
    def location(self) -> str:
        return str(self.folder)

    @property
    def partial(self) -> str | None:
        return None

    # --- runs ---

    def run(self, name: str) -> RunRecord | None:
        rows = self._queries.rows(f"{_RUNS} WHERE name = ?", (name,))
        return _run_record(rows[0]) if rows else None

    def runs(
        self,
        *,
        status: str | None = None,
        workflow: str | None = None,
        limit: int | None = None,
        roots: bool = False,
    ) -> list[RunRecord]:
        bindings = (status, workflow, roots, -1 if limit is None else limit)
        return [_run_record(row) for row in self._queries.rows(_LIST_CHOSEN, bindings)]

    def count_runs(
        self, *, status: str | None = None, workflow: str | None = None, roots: bool = False
    ) -> int:
        if status is None and workflow is None and not roots:
            return int(self._queries.rows(_COUNT_ALL)[0][0])
        return int(self._queries.rows(_COUNT_CHOSEN, (status, workflow, roots))[0][0])

    def status_counts(self, *, roots: bool = False) -> dict[str, int]:
        return dict(self._queries.rows(_COUNT_STATUSES, (roots,)))

    # --- leases ---

    def lease(self, name: str) -> Lease | None:
        rows = self._queries.rows(FIND_LEASE, (name,))
        return read_lease(rows[0]) if rows else None

    def leases(self) -> list[Lease]:
        return [read_lease(row) for row in self._queries.rows(LIST_LEASES)]

    def is_alive(self, lease: Lease) -> bool:
        return self._presence.is_alive(lease)

    def run_leases(self) -> dict[str, Lease]:
        return self._presence.run_leases(self._queries.rows(LIST_LEASES))

    # --- the whole journal ---

    def check(self) -> list[str]:
        wrong: list[str] = []
        try:
            wrong += self.check_pages()
            wrong += self.check_dispatch()
            wrong += self.check_accounts()
            self.documents()
            for record in self.runs():
                for entry in self.entries(record.id):
                    self.load(entry)
        except CorruptionError as error:
            wrong.append(str(error))
        return wrong

    def check_pages(self) -> list[str]:
        """Have SQLite read every page and return what is wrong."""
        rows = self._queries.rows("PRAGMA integrity_check(20)")
        return [str(row[0]) for row in rows if row[0] != "ok"]


class SqliteReader(JournalReader):
    """A journal opened for reading only."""

    def __init__(self, folder: Path, *, clock: Clock | None = None) -> None:
        folder = folder.absolute()
        self._file = _ReadOnlyFile(folder / "journal.db")
        super().__init__(folder, self._file, clock or SystemClock())
        self.format = self._file.format

    @property
    def partial(self) -> str | None:
        return self._file.partial

    def close(self) -> None:
        self._file.close()


class _ReadOnlyFile:
    """A connection that reads ``journal.db``, reopened when the files it depends on change.

    With a log, SQLite reads beside writers. Without one nothing has been written since the journal
    was opened, if it is open, and it is read as an immutable file, which creates no log; what such
    a query returned is valid if the file is still the same afterwards. A log that SQLite cannot
    read in place (no shared memory, and none can be made) is read from a copy in a private
    temporary folder. Each query shares the journal's readers lock, where there is one.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.partial: str | None = None
        self._log = log_of(path)
        self._index = index_of(path)
        self._pid = os.getpid()
        self._mutex = threading.Lock()
        self._copy: tempfile.TemporaryDirectory[str] | None = None
        self._closed = False
        self._lock: ReadersLock | None = None
        self._guard: IndexGuard | None = None
        #: What the files were when they were opened.
        self._seen: tuple[object, ...] = ()
        try:
            self._db = self._connect()
        except apsw.Error as error:
            raise self._explain(error) from error

    def rows(self, sql: str, bindings: Row = ()) -> list[Row]:
        """Run a query and return all of it."""
        if os.getpid() != self._pid:
            raise StoreClosedError(f"{self.path} was opened by the parent of this forked process")
        with self._mutex:
            if self._closed:
                raise StoreClosedError(f"{self.path} has been closed; open it again")
            try:
                return self._steady_rows(sql, bindings)
            except apsw.Error as error:
                raise self._explain(error) from error

    def _steady_rows(self, sql: str, bindings: Row) -> list[Row]:
        for _ in range(_TRIES):
            if self._state() != self._seen:
                self._disconnect()
                self._db = self._connect()
            with self._sharing():
                try:
                    found = self._db.execute(sql, bindings).fetchall()
                except apsw.Error:
                    if self._state() == self._seen:
                        raise
                    continue
                if self._state() == self._seen:
                    return found
        raise StorageError(f"{self.path} changed again and again while it was read; try again")

    def _state(self) -> tuple[object, ...]:
        """Return what tells whether the connection reads the files that are there now.

        Beside writers these only have to be the same files; other views are of one state of them.
        """
        if self._guard is not None:
            return tuple(map(_inode, (self.path, self._log, self._index)))
        return tuple(map(_identity, (self.path, self._log)))

    @contextlib.contextmanager
    def _sharing(self) -> Iterator[None]:
        """Keep the files from being changed by who copies the log, or opens the journal."""
        if self._lock is None:
            yield
            return
        if not self._lock.share(_BUSY_SECONDS):
            raise StoreBusyError(
                f"{self.path}: another process has been copying its log for {_BUSY_SECONDS:g}"
                " seconds; it may be stopped (see journal.readers)"
            )
        try:
            yield
        finally:
            self._lock.release()

    # --- opening ---

    def _connect(self) -> apsw.Connection:
        if self._lock is None:
            # Where there is no lock, no process has opened the journal since it was copied here.
            with contextlib.suppress(FolderError):
                self._lock = ReadersLock(self.path.parent, create=False)
        self.partial = lost_log(self.path)
        shared = self._connect_shared() if _size(self._log) else None
        before = self._state()
        with self._sharing():
            db = shared or self._connect_to_view()
            self.format = check_format(db, str(self.path))
            if self.format == 0:  # its first launch was killed: nothing has been recorded
                self._disconnect(db)
                before = self._state()
                db = apsw.Connection(":memory:")
                create_tables(db, str(self.path))
        self._seen = before
        return db

    def _disconnect(self, db: apsw.Connection | None = None) -> None:
        (db or self._db).close()
        if self._guard is not None:
            self._guard.close()
            self._guard = None

    def _connect_to_view(self) -> apsw.Connection:
        """Open one state of the files: the database alone, or copies."""
        if not _size(self._log):
            return self._connect_immutable(self.path)
        if (copied := self._connect_copy()) is not None:
            return copied
        self.partial = f"{self._log} cannot be read: what was recorded last is not visible"
        return self._connect_immutable(self.path)

    def _connect_shared(self) -> apsw.Connection | None:
        """Open it beside writers, unless SQLite would have to create files for that."""
        try:
            guard = IndexGuard(self.path)
        except OSError:
            return None
        if guard.is_held_elsewhere():
            guard.hold()
            db = self._open_shared()
        else:
            # Then SQLite builds the index again, and nobody may use it meanwhile.
            db = self._open_alone()
            guard.hold()
        if db is None:
            guard.close()
        else:
            self._guard = guard
        return db

    def _open_alone(self) -> apsw.Connection | None:
        folder = self.path.parent
        with contextlib.ExitStack() as stack:
            try:
                queue = stack.enter_context(
                    contextlib.closing(FileLock(folder / "journal.lock", create=False))
                )
                readers = stack.enter_context(contextlib.closing(ReadersLock(folder, create=False)))
            except FolderError:
                return self._open_shared()  # nobody opened it since it was copied here
            if not (queue.acquire(_ALONE_SECONDS) and readers.exclude(_ALONE_SECONDS)):
                return None
            size = _size(self._index)
            db = self._open_shared()
            restore_size(self._index, size)
            return db

    def _open_shared(self) -> apsw.Connection | None:
        db = connect(self.path, apsw.SQLITE_OPEN_READONLY)
        try:
            db.set_busy_timeout(int(_BUSY_SECONDS * 1000))
            db.pragma("schema_version")
        except (apsw.CantOpenError, apsw.ReadOnlyError, apsw.IOError, apsw.FullError):
            db.close()
            return None
        return db

    def _connect_copy(self) -> apsw.Connection | None:
        """Copy database and log to a private folder, and open them there."""
        try:
            if self._copy is not None:
                self._copy.cleanup()
            self._copy = tempfile.TemporaryDirectory(prefix="maestro-")
            for path in (self.path, self._log):
                shutil.copyfile(path, Path(self._copy.name, path.name))
            db = connect(Path(self._copy.name, self.path.name), apsw.SQLITE_OPEN_READWRITE)
            page_size = int(db.pragma("page_size"))
            recovered, _ = db.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_NOOP)
        except (OSError, apsw.CantOpenError, apsw.IOError, apsw.FullError):
            return None
        log = Path(self._copy.name, self._log.name)
        if lost := wal.lost_commits(log, max(0, recovered), page_size):
            self.partial = (
                f"{self._log} is damaged: {lost} commit(s) behind the damage are not seen"
            )
        return db

    def _connect_immutable(self, path: Path) -> apsw.Connection:
        # An ordinary connection first: it makes the VFS know that this file has checksums.
        connect(path, apsw.SQLITE_OPEN_READONLY).close()
        address = f"file:{quote(os.fspath(path))}?immutable=1"
        flags = apsw.SQLITE_OPEN_READONLY | apsw.SQLITE_OPEN_URI
        return apsw.Connection(address, flags=flags, vfs=checksum_vfs())

    # --- the end ---

    def _explain(self, error: apsw.Error) -> CorruptionError | FolderError | StorageError:
        if isinstance(error, apsw.CantOpenError) and not self.path.exists():
            return FolderError(self.path.parent, "is not a state folder: it has no journal.db")
        return damage_error(self.path, error) or StorageError(
            f"{self.path} cannot be read: {error}"
        )

    def close(self) -> None:
        """Close it, and delete the private copy."""
        if os.getpid() != self._pid:
            return
        with self._mutex:
            if not self._closed:
                self._closed = True
                self._disconnect()
                if self._lock is not None:
                    self._lock.close()
                if self._copy is not None:
                    self._copy.cleanup()


def _identity(path: Path) -> tuple[int, ...] | None:
    """Return what distinguishes one state of a file from another."""
    with contextlib.suppress(OSError):
        found = path.stat()
        return found.st_ino, found.st_size, found.st_mtime_ns
    return None


def _inode(path: Path) -> int:
    with contextlib.suppress(OSError):
        return path.stat().st_ino
    return 0


def _size(path: Path) -> int:
    with contextlib.suppress(OSError):
        return path.stat().st_size
    return 0


def _run_record(row: Row) -> RunRecord:
    number, name, workflow, status, created_at, updated_at, parent = row
    return RunRecord(
        id=number,
        name=name,
        workflow=workflow,
        status=status,
        created_at=from_micros(created_at),
        updated_at=from_micros(updated_at),
        parent=parent,
    )
