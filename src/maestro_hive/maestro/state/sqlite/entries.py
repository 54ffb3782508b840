"""The ``entries`` and ``payloads`` tables: what runs recorded, and the values too large for a row.

An entry's key is its run's number and its own in one integer, so a run's entries lie together and
need no second index. A value over ``INLINE_BYTES`` is found by its digest and stored only if it is
new. One that grew from the last value of its family is stored as the difference to it, until the
differences since the last whole copy add up to three quarters of the value: so a list that grows
without end takes about one and a half times its size, and chains stay short.
"""

from __future__ import annotations

import hashlib
import json
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast

from maestro_hive.kernel.clock import from_micros, to_micros
from maestro_hive.kernel.errors import CorruptionError, FencedError, StaleDocumentError
from maestro_hive.maestro.state import deltas
from maestro_hive.maestro.state.records import Entry, StoredValue

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from datetime import datetime
    from pathlib import Path

    import apsw

    from maestro_hive.kernel.clock import Clock
    from maestro_hive.maestro.state.codec import Encoded
    from maestro_hive.maestro.state.records import NewEntry, RunRecord
    from maestro_hive.maestro.state.sqlite.connection import JournalFile, Row
    from maestro_hive.maestro.state.sqlite.leases import Leases
    from maestro_hive.maestro.state.store import Append, DocumentGuard, RunLease

    Outcome = int | FencedError | StaleDocumentError

#: Values up to this size stay in the row of their entry.
INLINE_BYTES = 1024

#: The key of entry ``seq`` of run ``run`` is ``run << RUN_BITS | seq``.
RUN_BITS = 32

_SEQ_MASK = (1 << RUN_BITS) - 1

_COLUMNS = "(id, kind, step, attempt, at, facts, value, payload, sha256, identity)"
_INSERT = f"INSERT INTO entries {_COLUMNS} VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"  # noqa: S608
# One entry alone takes one statement: it also finds the number and checks the lease, and the guard
# if there is one. If either fails it writes nothing.
_INSERT_ALONE = (
    f"INSERT INTO entries {_COLUMNS} SELECT"  # noqa: S608
    " (SELECT coalesce(max(id), ?1 << 32) + 1 FROM entries"
    " WHERE id BETWEEN (?1 << 32) + 1 AND (?1 + 1 << 32) - 1),"
    " ?2, ?3, ?4, ?5, ?6, ?7, NULL, ?8, ?9 WHERE EXISTS (SELECT 1 FROM leases WHERE id = ?10)"
)
_VERSION = "SELECT version FROM documents WHERE namespace = ? AND key = ?"
_INSERT_GUARDED = _INSERT_ALONE + (  # noqa: S608
    " AND ?13 = coalesce((SELECT version FROM documents WHERE namespace = ?11 AND key = ?12), 0)"
)
_READ = (
    f"SELECT id & {_SEQ_MASK}, kind, step, attempt, at, facts, value, payload, sha256, identity"  # noqa: S608
    " FROM entries WHERE id BETWEEN ? AND ? ORDER BY id"
)
_USED_VALUES = (
    "WITH RECURSIVE used (id) AS ("
    " SELECT payload FROM entries WHERE payload IS NOT NULL AND id BETWEEN ? AND ?"
    " UNION SELECT base FROM payloads JOIN used USING (id) WHERE base IS NOT NULL)"
)
_VALUES_OF_RUN = f"{_USED_VALUES} SELECT id FROM used ORDER BY id"  # noqa: S608
_UNUSED_VALUES = (
    f"{_USED_VALUES} SELECT count(*), coalesce(sum(length(data)), 0) FROM payloads"  # noqa: S608
    " WHERE id NOT IN (SELECT id FROM used)"
)
_DELETE_UNUSED = f"{_USED_VALUES} DELETE FROM payloads WHERE id NOT IN (SELECT id FROM used)"  # noqa: S608
_EVERY_ENTRY = (0, 1 << 62)

_FIND_VALUE = "SELECT id, added FROM payloads WHERE hash = ? AND sha256 = ?"
# A difference builds on an older value, so a chain has an end.
_READ_CHAIN = (
    "WITH RECURSIVE chain (id, size, base, data) AS ("
    " SELECT id, size, base, data FROM payloads WHERE id = ?"
    " UNION ALL SELECT payloads.id, payloads.size, payloads.base, payloads.data"
    " FROM payloads JOIN chain ON payloads.id = chain.base WHERE chain.base < chain.id)"
    " SELECT size, base, data FROM chain"
)
_INSERT_VALUE = (
    "INSERT INTO payloads (hash, family, size, added, base, sha256, data)"
    " VALUES (?, ?, ?, ?, ?, ?, ?)"
)
_LATEST_VALUES = (
    "SELECT payloads.family, payloads.id, payloads.added FROM entries"
    " JOIN payloads ON payloads.id = entries.payload"
    " WHERE entries.id BETWEEN ? AND ? AND entries.payload IS NOT NULL ORDER BY entries.id"
)

_ROWS_AT_A_TIME = 10_000
#: Makes an entry of a row as it is: half the time of calling the class, for tens of thousands.
_as_entry = cast("Callable[[Iterable[Any]], Entry]", partial(tuple.__new__, Entry))


class Queries(Protocol):
    """A journal file, as far as reading goes."""

    path: Path

    def rows(self, sql: str, bindings: Row = ()) -> list[Row]:
        """Run a query and return all of it."""


class EntryReader:
    """The entries of one journal file, and the values they refer to."""

    def __init__(self, file: Queries) -> None:
        self._queries = file

    def entries(self, run: int, after: int = 0) -> list[Entry]:
        """Return a run's entries in order, making sure that none is missing."""
        rows = self._queries.rows(_READ, _keys(run, after))
        entries: list[Entry] = []
        for start in range(0, len(rows), _ROWS_AT_A_TIME):  # or other threads would have to wait
            entries += map(_as_entry, rows[start : start + _ROWS_AT_A_TIME])
        if entries and entries[-1].seq != after + len(entries):
            raise CorruptionError(f"{self._queries.path}: entries of run number {run} are missing")
        return entries

    def load(self, entry: Entry) -> bytes | None:
        """Return an entry's value, checked."""
        if entry.sha256 is None:
            return None
        data = entry.value if entry.payload is None else self._large(entry.payload)
        if data is None or hashlib.sha256(data).digest() != entry.sha256:
            where = f"{self._queries.path}: the value of entry {entry.seq} of a run"
            raise CorruptionError(f"{where} does not match its SHA-256; restore a backup")
        return data

    def _large(self, number: int) -> bytes:
        return _resolve(number, self._queries.rows(_READ_CHAIN, (number,)))

    def values_of(self, run: int) -> Iterator[StoredValue]:
        """Yield a run's large values as they are stored, each after the one it builds on."""
        sql = (
            "SELECT own.sha256, base.sha256, own.data FROM payloads AS own"
            " LEFT JOIN payloads AS base ON base.id = own.base WHERE own.id = ?"
        )
        for number in self._queries.rows(_VALUES_OF_RUN, _keys(run)):
            for row in self._queries.rows(sql, number):
                yield StoredValue(*row)

    def last_change(self, run: RunRecord) -> datetime:
        """Return when something was last recorded of a run."""
        sql = "SELECT at FROM entries WHERE id BETWEEN ? AND ? ORDER BY id DESC LIMIT 1"
        found = self._queries.rows(sql, _keys(run.id))
        return max(run.updated_at, from_micros(found[0][0])) if found else run.updated_at

    def unused_values(self) -> tuple[int, int]:
        """Return how many stored values no entry refers to, and their bytes."""
        ((count, size),) = self._queries.rows(_UNUSED_VALUES, _EVERY_ENTRY)
        return int(count), int(size)


class EntryWriter:
    """Appends to the entries of one journal file; the caller holds the file's mutex."""

    def __init__(self, file: JournalFile, leases: Leases, clock: Clock) -> None:
        self._file = file
        self._leases = leases
        self._clock = clock
        self._values = _Values()

    def append_alone(self, append: Append, busy_timeout: float | None) -> int | None:
        """Write one small entry in one statement; None if that is not possible, or refused."""
        run, entries, status, guard, release = append
        if len(entries) != 1 or status is not None or release:
            return None
        kind, step, attempt, facts, value, _, identity, at = entries[0]
        if value is None:
            data = sha256 = None
        else:
            data, sha256 = value
            if len(data) > INLINE_BYTES:
                return None
        if at is None:
            at = to_micros(self._clock.now())
        fence = run.lease.fence
        row = (run.run, kind, step, attempt, at, facts, data, sha256, identity, fence)
        if guard is None:
            key = self._file.insert(_INSERT_ALONE, row, busy_timeout)
        else:
            key = self._file.insert(_INSERT_GUARDED, row + guard, busy_timeout)
        if key is None:
            return None
        run.seq = seq = key & _SEQ_MASK
        return seq

    def append(
        self, appends: Sequence[Append], busy_timeout: float | None
    ) -> tuple[list[Outcome], list[RunLease]]:
        """Write entries in one transaction; return the outcomes, and the releases."""
        batch = _Batch(appends)
        committed = False
        try:
            self._file.write(lambda db: self._write(db, batch), busy_timeout)
            committed = True
        finally:
            self._values.settle(committed=committed)
        for run, seq in batch.last.items():
            run.seq = seq
        return batch.outcome, batch.releases

    def append_first(
        self, db: apsw.Connection, run: int, entries: Sequence[NewEntry], now: int
    ) -> None:
        """Write the first entries of a run, inside the caller's transaction."""
        rows = [
            (run << RUN_BITS | seq, *_row(entry, now, self._place(db, run, entry, is_new=True)))
            for seq, entry in enumerate(entries, start=1)
        ]
        db.executemany(_INSERT, rows)

    def settle(self, *, committed: bool) -> None:
        """Remember which values the caller's transaction stored, if it was committed."""
        self._values.settle(committed=committed)

    def _write(self, db: apsw.Connection, batch: _Batch) -> None:
        batch.start()
        now = to_micros(self._clock.now())
        for append in batch.appends:
            refused = self._refusal(db, append, batch)
            if refused is not None:
                batch.outcome.append(refused)
                continue
            run, entries, status, _, release = append
            # The journal knows the number, whatever happened to this process in between.
            seq = batch.last[run] if run in batch.last else last_seq(db, run.run)
            for entry in entries:
                seq += 1
                payload = self._place(db, run.run, entry, is_new=run.created)
                batch.rows.append((run.run << RUN_BITS | seq, *_row(entry, now, payload)))
            batch.last[run] = seq
            batch.outcome.append(seq)
            if status is not None:
                sql = "UPDATE runs SET status = ?, updated_at = ? WHERE id = ?"
                db.execute(sql, (status, now, run.run))
            if release and batch.is_last_user(run):
                self._leases.release(db, run.lease)
                batch.verdicts.pop(run)  # whatever follows in this batch is refused
        db.executemany(_INSERT, batch.rows)

    def _refusal(
        self, db: apsw.Connection, append: Append, batch: _Batch
    ) -> FencedError | StaleDocumentError | None:
        run = append.run
        if run not in batch.verdicts:
            batch.verdicts[run] = self._leases.refusal(db, run.lease)
        fenced = batch.verdicts[run]
        if fenced is not None or append.guard is None:
            return fenced
        return _stale(db, append.guard)

    def _place(self, db: apsw.Connection, run: int, entry: NewEntry, *, is_new: bool) -> int | None:
        """Store a value that is too large for its row; return its key."""
        value = entry.value
        if value is None or len(value.data) <= INLINE_BYTES:
            return None
        return self._values.place(db, value, run, entry.family, is_new=is_new)

    def delete(self, db: apsw.Connection, run: int) -> None:
        """Delete a run's entries, inside the caller's transaction."""
        db.execute("DELETE FROM entries WHERE id BETWEEN ? AND ?", _keys(run))

    def collect(self) -> int:
        """Delete values that no entry refers to, directly or through a difference."""

        def body(db: apsw.Connection) -> int:
            db.execute(_DELETE_UNUSED, _EVERY_ENTRY)
            return db.changes()

        with self._file.locked():  # no append in between may build on a deleted value
            count = self._file.write(body)
            self._values.forget()
            commit = self._file.committed
        self._file.sync(commit)
        return count


class _Batch:
    """What one transaction appends, and what came of it; ``start`` allows the body to run again."""

    def __init__(self, appends: Sequence[Append]) -> None:
        self.appends = appends
        self.start()

    def start(self) -> None:
        self.outcome: list[Outcome] = []
        self.rows: list[Row] = []
        self.last: dict[RunLease, int] = {}
        self.verdicts: dict[RunLease, FencedError | None] = {}
        self.releases: list[RunLease] = []

    def is_last_user(self, run: RunLease) -> bool:
        """Count one release of this lease; return whether no user of it is left."""
        self.releases.append(run)
        return self.releases.count(run) >= run.users


def _stale(db: apsw.Connection, guard: DocumentGuard) -> StaleDocumentError | None:
    namespace, key, expected = guard
    row = db.execute(_VERSION, (namespace, key)).fetchone()
    version = int(row[0]) if row else 0
    if version == expected:
        return None
    return StaleDocumentError(namespace, key, expected=expected, version=version)


def _row(entry: NewEntry, now: int, payload: int | None) -> Row:
    """Return the columns of an entry behind its key."""
    kind, step, attempt, facts, value, _, identity, then = entry
    data, sha256 = (None, None) if value is None else value
    at = now if then is None else then
    small = data if payload is None else None
    return kind, step, attempt, at, facts, small, payload, sha256, identity


def last_seq(db: apsw.Connection, run: int) -> int:
    """Return the number of a run's last entry; 0 if it has none."""
    last: Any = db.execute("SELECT max(id) FROM entries WHERE id BETWEEN ? AND ?", _keys(run)).get
    return (last or 0) & _SEQ_MASK


def _keys(run: int, after: int = 0) -> tuple[int, int]:
    return (run << RUN_BITS) + after + 1, ((run + 1) << RUN_BITS) - 1


# --- values ---

#: Last values of families in memory to compare the next one with, in bytes over all of them.
_REMEMBERED_BYTES = 64 * 1024 * 1024
#: Families whose last value is known.
_REMEMBERED_FAMILIES = 10_000
#: How many entries of a resumed run are searched for the last values of its families.
_SEARCHED_ENTRIES = 2000


class _Last(NamedTuple):
    """The last value of a family; ``misses`` counts differences in a row that were too long."""

    id: int
    added: int
    misses: int = 0


class _Values:
    """The ``payloads`` table and the last value of each family, in the caller's transaction."""

    def __init__(self) -> None:
        self._last: dict[int, _Last] = {}
        self._data: dict[int, bytes] = {}
        self._bytes = 0
        self._staged: dict[int, tuple[_Last, bytes]] = {}
        self._searched: set[int] = set()

    def place(
        self, db: apsw.Connection, value: Encoded, run: int, family: str, *, is_new: bool
    ) -> int:
        """Store a large value; return its key."""
        if run not in self._searched:
            self._search(db, run, is_new=is_new)
        data, sha256 = value
        key = family_key(run, family)
        hash_ = int.from_bytes(sha256[:8], "big", signed=True)
        known = db.execute(_FIND_VALUE, (hash_, sha256)).fetchone()
        if known is not None:
            self._staged[key] = (_Last(int(known[0]), int(known[1])), data)
            return int(known[0])
        base, added, stored, misses = self._shortest(db, key, data)
        db.execute(_INSERT_VALUE, (hash_, key, len(data), added, base, sha256, stored))
        number = db.last_insert_rowid()
        self._staged[key] = (_Last(number, added, misses), data)
        return number

    def _shortest(
        self, db: apsw.Connection, key: int, data: bytes
    ) -> tuple[int | None, int, bytes, int]:
        """Choose between a difference and the whole: base, bytes added, stored bytes, misses."""
        last, older = self._staged.get(key) or (self._last.get(key), self._data.get(key))
        if last is None:
            return None, 0, data, 0
        misses = last.misses
        if misses & (misses - 1):  # values that never resemble each other are compared rarely
            return None, 0, data, misses + 1
        if older is None:
            older = _resolve(last.id, db.execute(_READ_CHAIN, (last.id,)))
        if len(older) < len(data) // 2:
            return None, 0, data, misses + 1
        instructions = deltas.difference(older, data)
        if deltas.literal_size(instructions) >= len(data) // 2:
            return None, 0, data, misses + 1
        stored = json.dumps(deltas.to_json(instructions), ensure_ascii=False).encode()
        added = last.added + len(stored)
        if added >= len(data) * 3 // 4:
            return None, 0, data, 0
        return last.id, added, stored, 0

    def _search(self, db: apsw.Connection, run: int, *, is_new: bool) -> None:
        """Find the last values of the families of a run that was resumed."""
        if len(self._searched) >= _REMEMBERED_FAMILIES:
            self._searched.clear()
        self._searched.add(run)
        if is_new:
            return
        first, last = _keys(run)
        end = max(first, run << RUN_BITS | last_seq(db, run))
        rows = db.execute(_LATEST_VALUES, (max(first, end - _SEARCHED_ENTRIES), min(end, last)))
        found = {int(key): _Last(int(number), int(added)) for key, number, added in rows}
        self._last = found | self._last

    def settle(self, *, committed: bool) -> None:
        """Remember what the transaction stored, or forget it if it was undone."""
        if not self._staged:
            return
        if committed:
            for key, (last, data) in self._staged.items():
                self._last.pop(key, None)  # so that it moves to the end: the newest
                self._last[key] = last
                self._drop_data(key)
                self._data[key] = data
                self._bytes += len(data)
            while self._bytes > _REMEMBERED_BYTES and len(self._data) > 1:
                self._drop_data(next(iter(self._data)))
            while len(self._last) > _REMEMBERED_FAMILIES:
                oldest = next(iter(self._last))
                del self._last[oldest]
                self._drop_data(oldest)
        self._staged.clear()

    def _drop_data(self, key: int) -> None:
        self._bytes -= len(self._data.pop(key, b""))

    def forget(self) -> None:
        """Search the table again for what the next values grew from."""
        self._last.clear()
        self._data.clear()
        self._searched.clear()
        self._bytes = 0


def family_key(run: int, family: str) -> int:
    """Return the number under which a family of a run's values is stored."""
    digest = hashlib.blake2b(f"{run}/{family}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big", signed=True)


def _resolve(number: int, chain: Iterable[Row]) -> bytes:
    """Put a value together from the chain of differences it is stored as, newest first."""
    pieces: deltas.Pieces | None = None
    part: int | None = number
    try:
        for size, base, data in chain:
            if base is None:
                return cast("bytes", data) if pieces is None else pieces.finish(data)
            pieces = pieces or deltas.Pieces(size)
            pieces.apply(deltas.from_json(json.loads(data)))
            part = base
    except (ValueError, RecursionError) as error:
        raise CorruptionError(f"value {number} of the journal cannot be read: {error}") from error
    raise CorruptionError(f"value {number} of the journal is missing its part {part}")
