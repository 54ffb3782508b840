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
from maestro_hive.kernel.errors import CorruptionError, FolderError, StorageError, StoreClosedError
from maestro_hive.maestro.state.records import RunRecord
from maestro_hive.maestro.state.sqlite import wal
from maestro_hive.maestro.state.sqlite.connection import (
    Row,
    check_format,
    checksum_vfs,
    connect,
    damage_error,
    migrate,
    newest_format,
)
from maestro_hive.maestro.state.sqlite.documents import DocumentReader
from maestro_hive.maestro.state.sqlite.entries import EntryReader
from maestro_hive.maestro.state.sqlite.leases import FIND_LEASE, LIST_LEASES, Presence, read_lease

if TYPE_CHECKING:
    from maestro_hive.maestro.state.records import Damage, Lease
    from maestro_hive.maestro.state.sqlite.entries import Queries

_RUNS = "SELECT id, name, workflow, status, created_at, updated_at FROM runs"
_CHOSEN = " WHERE (?1 IS NULL OR status = ?1) AND (?2 IS NULL OR workflow = ?2)"
_COUNT_ALL = "SELECT count(*) FROM runs"
_COUNT_CHOSEN = _COUNT_ALL + _CHOSEN
_LIST_CHOSEN = f"{_RUNS}{_CHOSEN} ORDER BY id DESC LIMIT ?3"

_BUSY_MILLISECONDS = 5000
#: How often a query is made again because the files changed during it.
_TRIES = 10


class JournalReader(EntryReader, DocumentReader):
    """The reading half of the contract, over anything that runs queries."""

    def __init__(self, folder: Path, file: Queries, clock: Clock) -> None:
        self.folder = folder
        self.clock: Clock = clock
        self.damage: tuple[Damage, ...] = ()
        #: A store migrates what it opens; a reader finds an older format, too.
        self.format = newest_format()
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
        self, *, status: str | None = None, workflow: str | None = None, limit: int | None = None
    ) -> list[RunRecord]:
        bindings = (status, workflow, -1 if limit is None else limit)
        return [_run_record(row) for row in self._queries.rows(_LIST_CHOSEN, bindings)]

    def count_runs(self, *, status: str | None = None, workflow: str | None = None) -> int:
        if status is None and workflow is None:
            return int(self._queries.rows(_COUNT_ALL)[0][0])
        return int(self._queries.rows(_COUNT_CHOSEN, (status, workflow))[0][0])

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

    With a log, SQLite reads beside writers. Without one no process has the journal open, and it is
    read as an immutable file, which creates no log; what such a query returned is valid if the
    file is still the same afterwards. A log that SQLite cannot read in place (no shared memory,
    and none can be made) is read from a copy in a private temporary folder.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.partial: str | None = None
        self._log = path.with_name(f"{path.name}-wal")
        self._shared_memory = path.with_name(f"{path.name}-shm")
        self._pid = os.getpid()
        self._mutex = threading.Lock()
        self._copy: tempfile.TemporaryDirectory[str] | None = None
        self._closed = False
        #: What the files were when a private or immutable view of them was opened.
        self._seen: tuple[object, ...] | None = None
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
            if self._seen is not None and self._state() != self._seen:
                self._db.close()
                self._db = self._connect()
            try:
                found = self._db.execute(sql, bindings).fetchall()
            except apsw.Error:
                if self._seen is None or self._state() == self._seen:
                    raise
                continue
            if self._seen is None or self._state() == self._seen:
                return found
        raise StorageError(f"{self.path} changed again and again while it was read; try again")

    def _state(self) -> tuple[object, ...]:
        return tuple(map(_identity, (self.path, self._log)))

    # --- opening ---

    def _connect(self) -> apsw.Connection:
        before = self._state()
        self.partial = self._seen = None
        db = self._connect_somehow(before)
        self.format = check_format(db, str(self.path))
        if self.format == 0:  # its first launch was killed: nothing has been recorded
            db.close()
            db, self._seen = apsw.Connection(":memory:"), before
            migrate(db, str(self.path))
        return db

    def _connect_somehow(self, before: tuple[object, ...]) -> apsw.Connection:
        if not _size(self._log):
            db = self._connect_immutable(self.path)
        elif (shared := self._connect_shared()) is not None:
            return shared
        elif (copied := self._connect_copy()) is not None:
            db = copied
        else:
            self.partial = f"{self._log} cannot be read: what was recorded last is not visible"
            db = self._connect_immutable(self.path)
        self._seen = before
        return db

    def _connect_shared(self) -> apsw.Connection | None:
        """Open it beside writers, unless SQLite would have to create files for that."""
        if not self._shared_memory.exists():
            return None
        db = connect(self.path, apsw.SQLITE_OPEN_READONLY)
        try:
            db.set_busy_timeout(_BUSY_MILLISECONDS)
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
                self._db.close()
                if self._copy is not None:
                    self._copy.cleanup()


def _identity(path: Path) -> tuple[int, ...] | None:
    """Return what distinguishes one state of a file from another."""
    with contextlib.suppress(OSError):
        found = path.stat()
        return found.st_ino, found.st_size, found.st_mtime_ns
    return None


def _size(path: Path) -> int:
    with contextlib.suppress(OSError):
        return path.stat().st_size
    return 0


def _run_record(row: Row) -> RunRecord:
    number, name, workflow, status, created_at, updated_at = row
    return RunRecord(
        id=number,
        name=name,
        workflow=workflow,
        status=status,
        created_at=from_micros(created_at),
        updated_at=from_micros(updated_at),
    )
