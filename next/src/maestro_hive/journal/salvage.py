"""What can be read of a damaged journal in a folder, as a new journal.

Of a run, entries count up to the first that is damaged: its steps run again from there. A JSON copy
that has more of them is used instead.
"""

from __future__ import annotations

import contextlib
import hashlib
import shutil
import tempfile
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import apsw

from maestro_hive.journal import sql, transfer
from maestro_hive.journal.maintenance import Finding
from maestro_hive.journal.sqlite import open_copy
from maestro_hive.journal.store import BITS, MASK
from maestro_hive.kernel.errors import ConfigurationError, DocumentCorruptError

if TYPE_CHECKING:
    from maestro_hive.journal.copies import CopyFolder, FoundCopy
    from maestro_hive.journal.database import Transaction
    from maestro_hive.journal.store import Store

_PAGE_BYTES, _MOST_PAGES = 4096, 1 << 28
#: Of the tables of runs, the column that has the number of the run.
_OF_RUNS = {"payloads": "id", "chunks": "id", "messages": "run", "usage": "run"}
#: Columns that have other values in the new journal: no process holds anything there.
_NO_HOLDER: dict[str, object] = {"holder": None, "expires": 0.0, "held": 0}


class Salvaged(NamedTuple):
    """The runs of the new journal, and what was lost."""

    runs: list[str]
    lost: list[Finding]


def salvage_journal(source: Path, target: Store, copies: CopyFolder | None = None) -> Salvaged:
    """Write what can be read of the damaged file ``source``, and of copies, into a new journal."""
    if target.db.dialect != "sqlite" or target.count_runs():
        raise ConfigurationError(f"{target.place}: a journal is salvaged into a new folder")
    salvage = _Salvage(target, copies)
    with tempfile.TemporaryDirectory(dir=source.parent) as scratch:
        copy = Path(scratch) / source.name
        for end in ("", "-wal"):
            with contextlib.suppress(FileNotFoundError):
                shutil.copyfile(f"{source}{end}", f"{copy}{end}")
        _fill(copy)
        try:
            with contextlib.closing(open_copy(copy)) as db:
                # The schema is every journal's: its pages are read whatever their checksums say.
                db.pragma("checksum_verification", "off")
                db.execute("SELECT count(*) FROM sqlite_schema").fetchall()
                db.pragma("checksum_verification", "on")
                salvage.tables(_Damaged(db))
        except apsw.Error as error:
            salvage.lost.append(Finding("pages", "", f"nothing of {source} can be read: {error}"))
    salvage.copied_runs()
    return Salvaged(salvage.runs, salvage.lost)


def _fill(path: Path) -> None:
    """Make a file that was cut as long as its header says: SQLite opens no shorter one."""
    with path.open("r+b") as file:
        pages = int.from_bytes(file.read(32)[28:], "big")
        file.truncate(max(path.stat().st_size, min(pages, _MOST_PAGES) * _PAGE_BYTES))


class _Damaged:
    """A damaged database, read as far as possible."""

    def __init__(self, db: apsw.Connection) -> None:
        self._db = db
        self.columns = {
            table: [str(row[1]) for row in db.execute(f"PRAGMA table_info({table})")]
            for table in ("runs", "entries", "documents", "accounts", *_OF_RUNS)
        }

    def rows(self, table: str, where: str = "1") -> tuple[list[Any], bool]:
        """Return the rows before and behind what cannot be read, and whether that is all."""
        found: dict[int, Any] = {}
        is_all = False
        for order in ("ASC", "DESC"):
            if not is_all:
                with contextlib.suppress(apsw.Error):
                    for number, *row in self._db.execute(sql.rows_of(table, where, order)):
                        if number in found:
                            break
                        found[number] = row
                    is_all = order == "ASC"
        return [found[number] for number in sorted(found)], is_all


class _Salvage:
    """What was salvaged so far."""

    def __init__(self, target: Store, copies: CopyFolder | None) -> None:
        self._target, self._copies = target, copies
        self.runs: list[str] = []
        self.lost: list[Finding] = []

    def tables(self, damaged: _Damaged) -> None:
        """Write what the tables have."""
        self._damaged = damaged
        for row in self._read("runs"):
            self._run(dict(zip(self._damaged.columns["runs"], row, strict=True)))
        shared = {table: self._read(table) for table in ("documents", "accounts")}
        self._target.db.write(partial(self._insert, shared), sync=True)

    def _read(self, table: str, where: str = "1", name: str = "") -> list[Any]:
        rows, is_all = self._damaged.rows(table, where)
        if not is_all:
            self.lost.append(Finding("pages", name, f"rows of the table {table} cannot be read"))
        return rows

    def _insert(self, tables: dict[str, list[Any]], tx: Transaction) -> None:
        for table, rows in tables.items():
            columns = self._damaged.columns[table]
            for row in rows:
                own = (_NO_HOLDER.get(name, each) for name, each in zip(columns, row, strict=True))
                tx(sql.insert_into(table, columns), *own)

    def _run(self, run: dict[str, Any]) -> None:
        name, number = run["name"], run["id"]
        within = f"BETWEEN {number << BITS} AND {number << BITS | MASK}"
        entries, is_all = self._damaged.rows("entries", f"id {within}")
        sound = _sound(number, entries)
        found = None
        if not (is_all and sound == entries and sound):
            problem = f"what it recorded behind its entry {len(sound)} is lost, and runs again"
            self.lost.append(Finding("run", name, problem))
            found = self._copy(name)
        if found is not None and found.copy.seq > len(sound):
            transfer.add_run(self._target, found.copy, found.source)
        elif sound:
            if run["status"] == "running":
                run.update(status="stopped", due=None)
            tables = {"runs": [list(run.values())], "entries": sound}
            for table, column in _OF_RUNS.items():
                where = f"id {within}" if column == "id" else f"run = {number}"
                tables[table] = self._read(table, where, name)
            self._target.db.write(partial(self._insert, tables), sync=False)
        else:
            return
        self.runs.append(name)

    def _copy(self, name: str) -> FoundCopy | None:
        try:
            return self._copies.newest(name) if self._copies is not None else None
        except DocumentCorruptError as error:
            self.lost.append(Finding("copy", name, str(error)))
            return None

    def copied_runs(self) -> None:
        """Add the runs of which only a copy is left."""
        for name in self._copies.run_ids() if self._copies is not None else ():
            found = self._copy(name) if name not in self.runs else None
            if found is not None and transfer.add_run(self._target, found.copy, found.source):
                self.runs.append(name)


def _sound(number: int, rows: list[Any]) -> list[Any]:
    """Return the entries before the first that is missing or damaged."""
    for seq, (key, text, digest) in enumerate(rows, 1):
        is_next = key == number << BITS | seq
        if not is_next or hashlib.sha256(text.encode()).digest() != digest:
            return rows[: seq - 1]
    return rows
