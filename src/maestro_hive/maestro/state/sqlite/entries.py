"""Where values live in SQLite: small ones in their row, larger ones once, grown ones as growth.

A value over ``INLINE_BYTES`` is looked up by its digest and stored only if it is new. One that
grew from the last value of its family is stored as the difference to it, until the differences
since the last whole copy add up to three quarters of the value: so a list that grows for ever is
stored about one and a half times, and no chain is longer than its value is worth.
"""

from __future__ import annotations

import hashlib
import json
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from maestro_hive.kernel.errors import CorruptionError
from maestro_hive.maestro.state import deltas
from maestro_hive.maestro.state.records import Entry, StoredValue, to_micros

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    import apsw

    from maestro_hive.kernel.clock import Clock
    from maestro_hive.kernel.errors import FencedError
    from maestro_hive.maestro.state.codec import Encoded
    from maestro_hive.maestro.state.records import NewEntry
    from maestro_hive.maestro.state.sqlite.connection import JournalFile
    from maestro_hive.maestro.state.sqlite.leases import Leases
    from maestro_hive.maestro.state.store import Append, RunLease

#: Values up to this size stay in the row of their entry.
INLINE_BYTES = 1024

#: Values of families kept in memory to compare the next one with, in bytes over all of them.
_REMEMBERED_BYTES = 64 * 1024 * 1024


class _Last(NamedTuple):
    id: int
    added: int
    data: bytes


class Payloads:
    """The ``payloads`` table, and the last value of each family."""

    def __init__(self, file: JournalFile) -> None:
        self._file = file
        self._last: dict[int, _Last] = {}
        self._staged: dict[int, _Last] = {}

    def place(self, db: apsw.Connection, value: Encoded, family: int) -> int:
        """Store a large value inside the open transaction; return its id."""
        known = self._find(db, value)
        last = self._last_of(db, family)
        if known is not None:
            added = db.execute("SELECT added FROM payloads WHERE id = ?", (known,)).get
            self._staged[family] = _Last(known, int(added), value.data)
            return known
        base, added, data = _shortest(last, value.data)
        db.execute(
            "INSERT INTO payloads (hash, family, size, added, base, data, sha256)"
            " VALUES (?, ?, ?, ?, ?, ?, ?)",
            (_first_bytes(value.sha256), family, len(value.data), added, base, data, value.sha256),
        )
        number = db.last_insert_rowid()
        self._staged[family] = _Last(number, added, value.data)
        return number

    def _find(self, db: apsw.Connection, value: Encoded) -> int | None:
        sql = "SELECT id, sha256 FROM payloads WHERE hash = ?"
        for number, sha256 in db.execute(sql, (_first_bytes(value.sha256),)):
            if sha256 == value.sha256:
                return int(number)
        return None

    def _last_of(self, db: apsw.Connection, family: int) -> _Last | None:
        last = self._staged.get(family) or self._last.get(family)
        if last is None:
            # After a restart: what this family's values grew to before.
            sql = "SELECT id, added FROM payloads WHERE family = ? ORDER BY id DESC LIMIT 1"
            row = db.execute(sql, (family,)).fetchone()
            if row is not None:
                last = _Last(int(row[0]), int(row[1]), self._build(db, int(row[0])))
        return last

    def settle(self, *, committed: bool) -> None:
        """Remember what the transaction stored, or forget it if it was undone."""
        if not self._staged:
            return
        if committed:
            for family, last in self._staged.items():
                self._last.pop(family, None)  # so that it moves to the end: the newest
                self._last[family] = last
            total = sum(len(last.data) for last in self._last.values())
            while total > _REMEMBERED_BYTES and len(self._last) > 1:
                total -= len(self._last.pop(next(iter(self._last))).data)
        self._staged.clear()

    def forget(self) -> None:
        """Compare the next values with what is in the table, not with what is remembered."""
        self._last.clear()

    def load(self, number: int) -> bytes:
        """Return a whole value; its digest is the caller's to check."""

        def row(at: int) -> tuple[int, int | None, bytes] | None:
            found = self._file.rows("SELECT size, base, data FROM payloads WHERE id = ?", (at,))
            return found[0] if found else None

        return _resolve(number, row)

    def _build(self, db: apsw.Connection, number: int) -> bytes:
        sql = "SELECT size, base, data FROM payloads WHERE id = ?"
        return _resolve(number, lambda at: db.execute(sql, (at,)).fetchone())


def family_key(run: int, family: str) -> int:
    """Return the number under which a family of a run's values is found."""
    digest = hashlib.blake2b(f"{run}/{family}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big", signed=True)


def _first_bytes(sha256: bytes) -> int:
    return int.from_bytes(sha256[:8], "big", signed=True)


def _shortest(last: _Last | None, data: bytes) -> tuple[int | None, int, bytes]:
    """Choose between the difference to ``last`` and the whole: (base, added so far, stored)."""
    if last is not None:
        instructions = deltas.difference(last.data, data)
        if deltas.literal_size(instructions) < len(data) // 2:
            stored = json.dumps(deltas.to_json(instructions), ensure_ascii=False).encode()
            added = last.added + len(stored)
            if added < len(data) * 3 // 4:
                return last.id, added, stored
    return None, 0, data


def _resolve(number: int, row: Callable[[int], tuple[int, int | None, bytes] | None]) -> bytes:
    pieces: deltas.Pieces | None = None
    at: int | None = number
    try:
        while True:
            found = row(at) if at is not None else None
            if found is None:
                raise CorruptionError(f"value {number} of the journal is missing its part {at}")
            size, base, data = found
            if base is None:
                return data if pieces is None else pieces.finish(data)
            pieces = pieces or deltas.Pieces(size)
            pieces.apply(deltas.from_json(json.loads(data)))
            at = base if at is not None and base < at else None  # never round in a circle
    except (ValueError, RecursionError) as error:
        raise CorruptionError(f"value {number} of the journal cannot be read: {error}") from error


# --- sqlite_entries ---


#: The key of entry ``seq`` of run ``run`` is ``run << RUN_BITS | seq``.
RUN_BITS = 32

_COLUMNS = "(id, kind, step, attempt, at, facts, value, payload, sha256, identity)"
_INSERT = f"INSERT INTO entries {_COLUMNS} VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"  # noqa: S608
# For one entry alone there is no second statement: this one also finds the number, and checks the
# lease. A lease that was taken over writes nothing.
_INSERT_ONE = (
    f"INSERT INTO entries {_COLUMNS} SELECT"  # noqa: S608
    " (SELECT coalesce(max(id), ?1) + 1 FROM entries WHERE id BETWEEN ?1 + 1 AND ?2),"
    " ?3, ?4, ?5, ?6, ?7, ?8, NULL, ?9, ?10"
    " WHERE EXISTS (SELECT 1 FROM leases WHERE id = ?11 AND fence = ?12 AND holder = ?13)"
)
_READ = (
    f"SELECT id & {(1 << RUN_BITS) - 1}, kind, step, attempt, at, facts, value, payload, sha256,"  # noqa: S608
    " identity FROM entries WHERE id BETWEEN ? AND ? ORDER BY id"
)
_USED_VALUES = (
    "WITH RECURSIVE used (id) AS ("
    " SELECT payload FROM entries WHERE payload IS NOT NULL AND id BETWEEN ? AND ?"
    " UNION SELECT base FROM payloads JOIN used USING (id) WHERE base IS NOT NULL)"
)
_VALUES_OF_RUN = f"{_USED_VALUES} SELECT id FROM used ORDER BY id"  # noqa: S608
_DELETE_UNUSED = f"{_USED_VALUES} DELETE FROM payloads WHERE id NOT IN (SELECT id FROM used)"  # noqa: S608


#: Makes an entry of a row as it is: half of what calling the class takes, for tens of thousands.
_as_entry = cast("Callable[[Iterable[Any]], Entry]", partial(tuple.__new__, Entry))


class Entries:
    """The entries of one journal file, and the values they refer to."""

    def __init__(self, file: JournalFile, leases: Leases, clock: Clock) -> None:
        self._file = file
        self._leases = leases
        self._clock = clock
        self._payloads = Payloads(file)

    def append(
        self, appends: Sequence[Append], busy_timeout: float | None = None
    ) -> tuple[int, list[int | FencedError]]:
        """Write entries in one transaction; return its ticket, and numbers or refusals."""
        if _is_single(appends):
            return self._append_one(appends[0], busy_timeout)
        committed = False
        grown: dict[RunLease, int] = {}
        try:
            outcome, ticket = self._file.write(
                lambda db: self._write(db, appends, grown), busy_timeout
            )
            committed = True
        finally:
            self._payloads.settle(committed=committed)
        for hold, seq in grown.items():
            hold.seq = seq
        return ticket, outcome

    def _append_one(
        self, append: Append, busy_timeout: float | None
    ) -> tuple[int, list[int | FencedError]]:
        hold, (entry,), _ = append
        lease = hold.lease
        first, last = _keys(hold.run)
        row = _row(entry, to_micros(self._clock.now()))
        ticket, written, key = self._file.execute(
            _INSERT_ONE,
            (first - 1, last, *row[:6], *row[7:], lease.id, lease.fence, lease.holder.id),
            busy_timeout,
        )
        if written:
            hold.seq = key & (1 << RUN_BITS) - 1
            return ticket, [hold.seq]
        refused, ticket = self._file.write(lambda db: self._leases.check(db, lease))
        assert refused is not None, "a statement that found no lease of ours wrote nothing"
        return ticket, [refused]

    def _write(
        self, db: apsw.Connection, appends: Sequence[Append], grown: dict[RunLease, int]
    ) -> list[int | FencedError]:
        now = to_micros(self._clock.now())
        verdicts: dict[RunLease, FencedError | None] = {}
        outcome: list[int | FencedError] = []
        rows: list[tuple[Any, ...]] = []
        for hold, entries, status in appends:
            if hold not in verdicts:
                verdicts[hold] = self._leases.check(db, hold.lease)
            refused = verdicts[hold]
            if refused is not None:
                outcome.append(refused)
                continue
            # The journal knows the number, whatever happened to this process in between.
            seq = grown[hold] if hold in grown else last_seq(db, hold.run)
            for entry in entries:
                seq += 1
                payload = self._place(db, hold, entry)
                rows.append((hold.run << RUN_BITS | seq, *_row(entry, now, payload)))
            grown[hold] = seq
            outcome.append(seq)
            if status is not None:
                sql = "UPDATE runs SET status = ?, updated_at = ? WHERE id = ?"
                db.execute(sql, (status, now, hold.run))
        db.executemany(_INSERT, rows)
        return outcome

    def _place(self, db: apsw.Connection, hold: RunLease, entry: NewEntry) -> int | None:
        """Store a value that is too large for its row; return where."""
        if entry.value is None or len(entry.value.data) <= INLINE_BYTES:
            return None
        return self._payloads.place(db, entry.value, family_key(hold.run, entry.family))

    def read(self, run: int, after: int) -> list[Entry]:
        """Return a run's entries in order, making sure that none is missing."""
        rows = self._file.rows(_READ, _keys(run, after))
        entries = list(map(_as_entry, rows))
        if entries and entries[-1].seq != after + len(entries):
            raise CorruptionError(f"{self._file.path}: entries of run number {run} are missing")
        return entries

    def load(self, entry: Entry) -> bytes | None:
        """Return an entry's value, checked."""
        if entry.sha256 is None:
            return None
        data = entry.value if entry.payload is None else self._payloads.load(entry.payload)
        if data is None or hashlib.sha256(data).digest() != entry.sha256:
            where = f"{self._file.path}: the value of entry {entry.seq} of a run"
            raise CorruptionError(f"{where} does not match its SHA-256; restore a backup")
        return data

    def values_of(self, run: int) -> Iterator[StoredValue]:
        """Yield a run's large values as they are stored, each after the one it builds on."""
        numbers = self._file.rows(_VALUES_OF_RUN, _keys(run))
        sql = (
            "SELECT own.sha256, base.sha256, own.data FROM payloads AS own"
            " LEFT JOIN payloads AS base ON base.id = own.base WHERE own.id = ?"
        )
        for number in numbers:
            for row in self._file.rows(sql, number):
                yield StoredValue(*row)

    def delete(self, db: apsw.Connection, run: int) -> None:
        """Forget a run's entries, inside the caller's transaction."""
        db.execute("DELETE FROM entries WHERE id BETWEEN ? AND ?", _keys(run))

    def collect(self) -> int:
        """Delete values that no entry refers to, directly or through a difference."""

        def body(db: apsw.Connection) -> int:
            db.execute(_DELETE_UNUSED, (0, 1 << 62))
            return db.changes()

        count, ticket = self._file.write(body)
        self._payloads.forget()
        self._file.sync(ticket)
        return count


def _row(entry: NewEntry, now: int, payload: int | None = None) -> tuple[Any, ...]:
    """Return the columns of an entry behind its key."""
    kind, step, attempt, facts, value, _, identity, then = entry
    data, sha256 = (None, None) if value is None else value
    at = now if then is None else then
    small = data if payload is None else None
    return kind, step, attempt, at, facts, small, payload, sha256, identity


def _is_single(appends: Sequence[Append]) -> bool:
    """Return whether writing this takes no more than one statement."""
    if len(appends) != 1 or appends[0].status is not None:
        return False
    entries = appends[0].entries
    if not isinstance(entries, list | tuple) or len(entries) != 1:
        return False
    value = entries[0].value
    return value is None or len(value.data) <= INLINE_BYTES


def last_seq(db: apsw.Connection, run: int) -> int:
    """Return the number of a run's last entry; 0 if it has none."""
    last: Any = db.execute("SELECT max(id) FROM entries WHERE id BETWEEN ? AND ?", _keys(run)).get
    return (last or 0) & (1 << RUN_BITS) - 1


def _keys(run: int, after: int = 0) -> tuple[int, int]:
    return (run << RUN_BITS) + after + 1, ((run + 1) << RUN_BITS) - 1
