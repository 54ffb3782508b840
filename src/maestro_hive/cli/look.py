"""A journal that is read and never written: also where nothing can be written.

``SqliteStore`` is for those who may write. This is for looking at what it shows to nobody else, and
at folders on read-only or full disks.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Self, cast
from urllib.parse import quote

import apsw

from maestro_hive.kernel.clock import SystemClock
from maestro_hive.kernel.errors import CorruptionError, StorageError
from maestro_hive.kernel.locks import is_locked
from maestro_hive.maestro.state.records import RunRecord, from_micros
from maestro_hive.maestro.state.sqlite import connection as page_checksums
from maestro_hive.maestro.state.sqlite.connection import check_format
from maestro_hive.maestro.state.sqlite.documents import Documents
from maestro_hive.maestro.state.sqlite.entries import RUN_BITS, Entries
from maestro_hive.maestro.state.sqlite.leases import (
    FIND_LEASE,
    FIND_RUN_LEASES,
    Leases,
    Presence,
    read_lease,
)
from maestro_hive.maestro.state.sqlite.store import run_record

if TYPE_CHECKING:
    from datetime import datetime
    from pathlib import Path

    from maestro_hive.maestro.state.records import Document, Entry, Lease

_LEASES = (
    "SELECT id, name, fence, holder, host, pid, since, boot, expires FROM leases"
    " WHERE holder <> '' ORDER BY name"
)
_UNUSED = (
    "WITH RECURSIVE used (id) AS (SELECT payload FROM entries WHERE payload IS NOT NULL"
    " UNION SELECT base FROM payloads JOIN used USING (id) WHERE base IS NOT NULL)"
    " SELECT count(*), coalesce(sum(length(data)), 0) FROM payloads"
    " WHERE id NOT IN (SELECT id FROM used)"
)


_RUNS = "SELECT id, name, workflow, status, created_at, updated_at FROM runs"


class Look:
    """An open journal, to be looked at; a context manager.

    Where a ``Store`` is only read it may stand for one.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / "journal.db"
        #: Why not all of it can be seen, where that is so.
        self.partial: str | None = None
        try:
            self._db = self._connect()
            self.format = check_format(self._db, str(self.path))
        except apsw.Error as error:
            raise self._explained(error) from error
        # Their reading halves need no more than ``rows`` and ``path``.
        file, self.clock = cast("Any", self), SystemClock()
        self._documents = Documents(file, self.clock)
        self._leases = Leases(Presence(folder, self.clock), self.clock)
        self._entries = Entries(file, self._leases, self.clock)
        self.document, self.load = self._documents.get, self._entries.load
        self.values_of = self._entries.values_of

    @property
    def location(self) -> str:
        """The folder."""
        return str(self.folder)

    def _connect(self) -> apsw.Connection:
        log = self.path.with_name(f"{self.path.name}-wal")
        if log.exists():
            try:
                db = page_checksums.connect(self.path, apsw.SQLITE_OPEN_READONLY)
                db.set_busy_timeout(5000)
                db.pragma("schema_version")
            except (apsw.CantOpenError, apsw.ReadOnlyError, apsw.IOError, apsw.FullError):
                if log.stat().st_size:
                    self.partial = f"{log} cannot be read here: what was recorded last is not seen"
            else:
                return db
        # Nobody has it open, or nobody can write: it stays as it is while we look, and looking
        # leaves no files behind.
        page_checksums.connect(self.path, apsw.SQLITE_OPEN_READONLY).close()  # knows the checksums
        flags = apsw.SQLITE_OPEN_READONLY | apsw.SQLITE_OPEN_URI
        address = f"file:{quote(os.fspath(self.path.absolute()))}?immutable=1"
        return apsw.Connection(address, flags=flags, vfs="cksmvfs")

    def rows(self, sql: str, bindings: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
        """Run a query and return all of it."""
        try:
            return self._db.execute(sql, bindings).fetchall()
        except apsw.Error as error:
            raise self._explained(error) from error

    def integrity(self) -> list[str]:
        """Let SQLite read every page and say what is wrong."""
        found = self.rows("PRAGMA integrity_check(20)")
        return [str(row[0]) for row in found if row[0] != "ok"]

    def run(self, name: str) -> RunRecord | None:
        """Find a run by its name."""
        found = self.rows(f"{_RUNS} WHERE name = ?", (name,))
        return run_record(found[0]) if found else None

    def runs(self, status: str | None = None, limit: int | None = None) -> list[RunRecord]:
        """List runs, newest first."""
        sql = f"{_RUNS} WHERE ?1 IS NULL OR status = ?1 ORDER BY id DESC LIMIT ?2"
        return [run_record(row) for row in self.rows(sql, (status, -1 if limit is None else limit))]

    def entries(self, run: int, after: int = 0) -> list[Entry]:
        """Return a run's entries in order, making sure that none is missing."""
        return self._entries.read(run, after)

    def documents(self, namespace: str | None = None) -> list[Document]:
        """Return documents by namespace and key."""
        return self._documents.all(namespace)

    def last_change(self, run: RunRecord) -> datetime:
        """Return when something was last added to a run."""
        first = run.id << RUN_BITS
        sql = "SELECT at FROM entries WHERE id BETWEEN ? AND ? ORDER BY id DESC LIMIT 1"
        found = self.rows(sql, (first, first + (1 << RUN_BITS) - 1))
        return max(run.updated_at, from_micros(found[0][0])) if found else run.updated_at

    def leases(self) -> list[Lease]:
        """Return the leases that were not given back, by name."""
        return [read_lease(row) for row in self.rows(_LEASES)]

    def lease(self, name: str) -> Lease | None:
        """Return a lease as it stands."""
        found = self.rows(FIND_LEASE, (name,))
        return read_lease(found[0]) if found else None

    def run_leases(self) -> dict[str, Lease]:
        """Return who holds which runs."""
        return self._leases.run_leases(self.rows(FIND_RUN_LEASES))

    def is_alive(self, lease: Lease) -> bool:
        """Return whether the process that has a lease lives, on this machine."""
        holder = self.folder / "holders" / f"{lease.holder.id}.json"
        return lease.boot == SystemClock().boot_id() and is_locked(holder)

    def unused_values(self) -> tuple[int, int]:
        """Return how many stored values nothing refers to, and their bytes."""
        ((count, size),) = self.rows(_UNUSED)
        return int(count), int(size)

    def _explained(self, error: apsw.Error) -> CorruptionError | StorageError:
        if getattr(error, "extendedresult", 0) == apsw.SQLITE_IOERR_DATA:
            reason = "a page does not match its checksum"
        elif isinstance(error, apsw.CorruptError | apsw.NotADBError):
            reason = str(error)
        else:
            return StorageError(f"{self.path} cannot be read: {error}")
        return CorruptionError(f"{self.path} is damaged: {reason}; restore a backup")

    def close(self) -> None:
        """Stop looking."""
        self._db.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
