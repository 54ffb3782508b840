"""The ``entries`` and ``payloads`` tables: what runs recorded, and the values too large for a row.

An entry's key is its run's number and its own in one integer, so a run's entries lie together and
need no second index. A value over ``INLINE_BYTES`` is stored on its own, one over ``SHARED_BYTES``
only if it is new: it is found by its digest. One that grew from the last value of its family is
stored as the difference to it, until the differences since the last whole copy add up to three
quarters of the value: so a list that grows without end takes about one and a half times its size,
and chains stay short.
"""

from __future__ import annotations

import hashlib
import json
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast

from maestro_hive.kernel.clock import from_micros
from maestro_hive.kernel.errors import (
    CorruptionError,
    FencedError,
    MaestroError,
    StaleDocumentError,
    StorageError,
)
from maestro_hive.maestro.state import codec, deltas
from maestro_hive.maestro.state.budgets import Reserve, RunBudget, Settle
from maestro_hive.maestro.state.records import OVER, RESETS_DEATHS, Entry, StoredValue
from maestro_hive.maestro.state.sqlite import budget_statements as statements

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from datetime import datetime
    from pathlib import Path

    import apsw

    from maestro_hive.kernel.clock import Clock
    from maestro_hive.maestro.state.budgets import Limited
    from maestro_hive.maestro.state.codec import Encoded
    from maestro_hive.maestro.state.records import NewEntry, RunRecord
    from maestro_hive.maestro.state.sqlite.accounts import AccountWriter
    from maestro_hive.maestro.state.sqlite.connection import Row
    from maestro_hive.maestro.state.sqlite.dispatch import DispatchTable
    from maestro_hive.maestro.state.sqlite.documents import Changed, DocumentWriter, Where
    from maestro_hive.maestro.state.sqlite.journal_file import JournalFile
    from maestro_hive.maestro.state.sqlite.leases import Leases
    from maestro_hive.maestro.state.store import Append, DocumentGuard, Outcome, RunLease

#: Values up to this size stay in the row of their entry, which then fits in a page.
INLINE_BYTES = 3 * 1024
#: From this size on, a value is indexed by its digest; the partial index has the same number.
SHARED_BYTES = 16 * 1024

#: The key of entry ``seq`` of run ``run`` is ``run << RUN_BITS | seq``.
RUN_BITS = 32

_SEQ_MASK = (1 << RUN_BITS) - 1

_COLUMNS = "(id, kind, step, attempt, at, facts, value, payload, sha256, identity)"
_INSERT = f"INSERT INTO entries {_COLUMNS} VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
# One entry alone takes one statement: it also finds the number and checks the lease, and the guard
# if there is one. If either fails it writes nothing.
_INSERT_ALONE = (
    f"INSERT INTO entries {_COLUMNS} SELECT"
    " (SELECT coalesce(max(id), ?1 << 32) + 1 FROM entries"
    " WHERE id BETWEEN (?1 << 32) + 1 AND (?1 + 1 << 32) - 1),"
    " ?2, ?3, ?4, ?5, ?6, ?7, NULL, ?8, ?9 WHERE EXISTS (SELECT 1 FROM leases WHERE id = ?10)"
)
_VERSION = "SELECT version FROM documents WHERE namespace = ? AND key = ?"
_INSERT_GUARDED = _INSERT_ALONE + (
    " AND ?13 = coalesce((SELECT version FROM documents WHERE namespace = ?11 AND key = ?12), 0)"
)
#: A start of an attempt that reserves nothing: the limits are the ones that say so.
_AND_LIMITS = " AND ?{} = (SELECT epoch FROM limit_epoch)"
_INSERT_UNLIMITED = _INSERT_ALONE + _AND_LIMITS.format(11)
_INSERT_GUARDED_UNLIMITED = _INSERT_GUARDED + _AND_LIMITS.format(14)
_READ = (
    f"SELECT id & {_SEQ_MASK}, kind, step, attempt, at, facts, value, payload, sha256, identity"
    " FROM entries WHERE id BETWEEN ? AND ? ORDER BY id"
)
_USED_VALUES = (
    "WITH RECURSIVE used (id) AS ("
    " SELECT payload FROM entries WHERE payload IS NOT NULL AND id BETWEEN ? AND ?"
    " UNION SELECT base FROM payloads JOIN used USING (id) WHERE base IS NOT NULL)"
)
_PAYLOADS_AT_A_TIME = 1_000
_PAYLOADS = (
    f"SELECT id & {_SEQ_MASK}, payload FROM entries"
    f" WHERE id BETWEEN ? AND ? AND payload IS NOT NULL ORDER BY id LIMIT {_PAYLOADS_AT_A_TIME}"
)
_READ_VALUE = (
    "SELECT own.base, own.sha256, base.sha256, own.data FROM payloads AS own"
    " LEFT JOIN payloads AS base ON base.id = own.base WHERE own.id = ?"
)
_UNUSED_VALUES = (
    f"{_USED_VALUES} SELECT count(*), coalesce(sum(length(data)), 0) FROM payloads"
    " WHERE id NOT IN (SELECT id FROM used)"
)
_DELETE_UNUSED = f"{_USED_VALUES} DELETE FROM payloads WHERE id NOT IN (SELECT id FROM used)"
_EVERY_ENTRY = (0, 1 << 62)

_FIND_VALUE = (
    f"SELECT id, added FROM payloads WHERE hash = ? AND sha256 = ? AND size >= {SHARED_BYTES}"
)
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

_ACCOUNT_ROWS = "SELECT account, id FROM accounts WHERE account IN (SELECT value FROM json_each(?))"
#: All accounts that a call is charged to, and those that are limited.
_Charges = tuple[tuple[str, ...], "tuple[Limited, ...]"]
_REMEMBERED_CHARGES = 1_000

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

    def entries(self, run: int, after: int = 0, up_to: int | None = None) -> list[Entry]:
        """Return a run's entries in order, making sure that none is missing."""
        rows = self._queries.rows(_READ, keys_of(run, after, up_to))
        entries: list[Entry] = []
        for start in range(0, len(rows), _ROWS_AT_A_TIME):  # or other threads would have to wait
            entries += map(_as_entry, rows[start : start + _ROWS_AT_A_TIME])
        for number, row in enumerate(rows, start=after + 1):
            if row[0] != number or row[1] is None:
                raise CorruptionError(
                    f"{self._queries.path}: entry {number} of run number {run} is missing"
                )
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
        seen: set[bytes] = set()
        known: set[int] = set()
        for number in self._payloads(run):
            chain: list[StoredValue] = []
            at: int | None = number
            while at is not None and at not in known:
                known.add(at)
                at, value = self._value_at(at, run)
                chain.append(value)
            for each in reversed(chain):
                if each.sha256 not in seen:  # the first of equal ones builds on what came before
                    seen.add(each.sha256)
                    yield each

    def _value_at(self, number: int, run: int) -> tuple[int | None, StoredValue]:
        """Return the number of the value that one builds on, and the value."""
        rows = self._queries.rows(_READ_VALUE, (number,))
        if not rows:
            raise StorageError(
                f"a value of run number {run} is gone: the run was purged while it was read, or its"
                " journal is damaged, as `maestro doctor` would say"
            )
        base, *value = rows[0]
        return base, StoredValue(*value)

    def _payloads(self, run: int) -> Iterator[int]:
        """Yield the numbers of the values that entries of a run refer to, a few at a time."""
        last = 0
        while True:
            rows = self._queries.rows(_PAYLOADS, keys_of(run, last))
            yield from (number for _, number in rows)
            if len(rows) < _PAYLOADS_AT_A_TIME:
                return
            last = rows[-1][0]

    def last_change(self, run: RunRecord) -> datetime:
        """Return when something was last recorded of a run."""
        sql = "SELECT at FROM entries WHERE id BETWEEN ? AND ? ORDER BY id DESC LIMIT 1"
        found = self._queries.rows(sql, keys_of(run.id))
        return max(run.updated_at, from_micros(found[0][0])) if found else run.updated_at

    def unused_values(self) -> tuple[int, int]:
        """Return how many stored values no entry refers to, and their bytes."""
        ((count, size),) = self._queries.rows(_UNUSED_VALUES, _EVERY_ENTRY)
        return int(count), int(size)


class EntryWriter:
    """Appends to the entries of one journal file; the caller holds the file's mutex."""

    def __init__(
        self,
        file: JournalFile,
        leases: Leases,
        documents: DocumentWriter,
        dispatch: DispatchTable,
        accounts: AccountWriter,
        clock: Clock,
    ) -> None:
        self._file = file
        self._dispatch = dispatch
        self._accounts = accounts
        self._leases = leases
        self._documents = documents
        self._clock = clock
        self._values = _Values()
        #: Statements that the writing connection knows, and accounts whose rows are known.
        self._defined: set[statements.Statement] = set()
        self._charged: dict[_Charges, statements.Charged] = {}

    def append_alone(self, append: Append, busy_timeout: float | None) -> list[Entry] | None:
        """Write one small entry in one statement; None if that is not possible, or refused."""
        run, entries, status, guard, release, change, dispatch, _, budget = append
        if status is not None or release or change is not None or dispatch is not None:
            return None
        if type(budget) is Settle or (type(budget) is Reserve and budget[1]):
            return self._append_budgeted(append, busy_timeout)
        if len(entries) != 1 or type(budget) is RunBudget:
            return None
        kind, step, attempt, facts, value, _, identity, at = entries[0]
        if value is None:
            data = sha256 = None
        else:
            data, sha256 = value
            if len(data) > INLINE_BYTES:
                return None
        if at is None:
            at = self._clock.nanos() // 1000
        fence = run.lease.fence
        row: Row = (run.run, kind, step, attempt, at, facts, data, sha256, identity, fence)
        sql = _INSERT_ALONE
        if guard is not None:
            sql, row = _INSERT_GUARDED, (*row, *guard)
        if budget is not None:
            sql = _INSERT_UNLIMITED if guard is None else _INSERT_GUARDED_UNLIMITED
            row = (*row, budget[0])
        key = self._file.insert(sql, row, busy_timeout)
        if key is None:
            return None
        run.seq = seq = key & _SEQ_MASK
        return [_as_entry((seq, kind, step, attempt, at, facts, data, None, sha256, identity))]

    def _append_budgeted(self, append: Append, busy_timeout: float | None) -> list[Entry] | None:
        """Write what starts under a limit, or ends and has spent, in one statement; or None."""
        run, entries, _, guard, _, _, _, _, budget = append
        last = entries[-1]
        if last.value is not None and len(last.value[0]) > INLINE_BYTES:
            return None
        seq = run.seq + 1
        key = run.run << RUN_BITS | seq
        at = self._clock.nanos() // 1000 if last.at is None else last.at
        if type(budget) is Reserve:
            charged: _Charges = ((), budget.limits)
            usual = len(entries) == 1 and not budget.within and budget.unknown is None
            rows = self._rows_of(charged) if usual else None
            if rows is None:
                return None
            statement, row = statements.start(append, key, at, budget, rows)
        else:
            assert type(budget) is Settle
            charged = (budget.accounts, budget.limits)
            usual = guard is None and statements.is_usual_end(entries, budget)
            rows = self._rows_of(charged) if usual else None
            if rows is None:
                return None
            statement, row = statements.end(append, key, at, budget, rows)
        if statement not in self._defined:
            self._file.define(statement.script)
            self._defined.add(statement)
        if not self._file.change(statement.sql, row, busy_timeout):
            del self._charged[charged]  # one of the rows may be gone
            return None
        run.seq = seq + len(entries) - 1
        return [_placed(seq + number, at, entry) for number, entry in enumerate(entries)]

    def _rows_of(self, charged: _Charges) -> statements.Charged | None:
        """Return the rows of the accounts that a call is charged to; None if it has to find them."""
        found = self._charged.get(charged)
        if found is None:
            accounts, limits = charged
            names = [*accounts, *(account for account, _, _ in limits)]
            ids: dict[str, int] = dict(self._file.rows(_ACCOUNT_ROWS, (json.dumps(names),)))
            found = statements.charged(accounts, limits, ids)
            if found is not None:
                if len(self._charged) >= _REMEMBERED_CHARGES:
                    self._charged.clear()
                self._charged[charged] = found
        return found

    def append(self, appends: Sequence[Append], busy_timeout: float | None) -> Appended:
        """Write entries in one transaction, and the changes of documents that come with them."""
        batch = _Batch(appends)
        committed = False
        try:
            self._file.write(lambda db: self._write(db, batch), busy_timeout)
            committed = True
        finally:
            self._values.settle(committed=committed)
        for run, seq in batch.last.items():
            run.seq = seq
        for run, dispatched in batch.dispatched.items():
            run.dispatched = dispatched
        for run in batch.cleared:
            run.deaths = 0
        return Appended(batch.outcome, batch.releases, batch.documents)

    def append_first(
        self, db: apsw.Connection, run: int, entries: Sequence[NewEntry], now: int
    ) -> None:
        """Write the first entries of a run, inside the caller's transaction."""
        placed = self._place(db, run, entries, 0, now, is_new=True)
        db.executemany(_INSERT, _rows(run, placed))

    def settle(self, *, committed: bool) -> None:
        """Remember which values the caller's transaction stored, if it was committed."""
        self._values.settle(committed=committed)

    def _write(self, db: apsw.Connection, batch: _Batch) -> None:
        batch.start()
        now = self._clock.nanos() // 1000
        for append in batch.appends:
            refused = self._refusal(db, append, batch) or self._change_document(db, append, batch)
            if refused is not None:
                batch.outcome.append(refused)
                continue
            run, entries, status = append[:3]
            # The journal knows the number, whatever happened to this process in between.
            seq = batch.last[run] if run in batch.last else last_seq(db, run.run)
            if append.budget is not None:
                entries = self._change_budget(db, append, now)
            placed = self._place(db, run.run, entries, seq, now, is_new=run.created)
            batch.rows += _rows(run.run, placed)
            batch.last[run] = seq + len(placed)
            batch.outcome.append(placed)
            if status is not None:
                sql = "UPDATE runs SET status = ?, updated_at = ? WHERE id = ?"
                db.execute(sql, (status, now, run.run))
            root = run.root or run
            if root.deaths and any(entry.kind in RESETS_DEATHS for entry in placed):
                self._dispatch.clear_deaths(db, root.run)
                batch.cleared.append(root)
            released = append.release and batch.is_last_user(run)
            if released:
                self._leases.release(db, run.lease)
                batch.verdicts.pop(run)  # whatever follows in this batch is refused
            if run.dispatched or append.dispatch is not None or run in batch.dispatched:
                self._change_dispatch(db, append, batch, released=released)
        db.executemany(_INSERT, batch.rows)

    def _change_budget(self, db: apsw.Connection, append: Append, now: int) -> Sequence[NewEntry]:
        """Reserve or settle what an append says; return its entries, and warnings after them."""
        if isinstance(append.budget, Settle):
            warnings = self._accounts.settle(db, append.run, append.budget)
            return [*append.entries, *warnings] if warnings else append.entries
        if isinstance(append.budget, Reserve):
            self._accounts.reserve(db, append.run, append.entries[-1], append.budget, now)
        elif append.budget is not None:
            self._accounts.restore(db, append.run.name, append.budget)
        return append.entries

    def _change_dispatch(
        self, db: apsw.Connection, append: Append, batch: _Batch, *, released: bool
    ) -> None:
        """Do to a run's dispatch row what an append asks for."""
        run, dispatched = append.run, batch.is_dispatched(append.run)
        if append.status in OVER:
            self._dispatch.delete(db, run.run)
            batch.dispatched[run] = False
        elif append.dispatch is not None and not dispatched:
            self._dispatch.add(db, run.run, append.dispatch, active=not released)
            batch.dispatched[run] = True
        elif released and dispatched:
            self._dispatch.release(db, run.run, append.due)

    def _refusal(self, db: apsw.Connection, append: Append, batch: _Batch) -> MaestroError | None:
        run = append.run
        if run not in batch.verdicts:
            batch.verdicts[run] = self._leases.refusal(db, run.lease)
        refused: MaestroError | None = batch.verdicts[run]
        if refused is None and append.guard is not None:
            refused = _stale(db, append.guard)
        if refused is None and isinstance(append.budget, Reserve):
            refused = self._accounts.refusal(db, append.budget)
        return refused

    def _change_document(
        self, db: apsw.Connection, append: Append, batch: _Batch
    ) -> MaestroError | None:
        """Change the document that an append names; return why that is refused, if it is."""
        if append.change is None:
            return None
        namespace, key, change, wake = append.change
        try:
            changed = self._documents.change_in(db, (namespace, key), change)
        except MaestroError as refused:
            return refused
        if wake is not None:
            self._dispatch.wake(db, wake)
        batch.documents[namespace, key] = changed
        return None

    def _place(
        self,
        db: apsw.Connection,
        run: int,
        entries: Sequence[NewEntry],
        seq: int,
        now: int,
        *,
        is_new: bool,
    ) -> list[Entry]:
        """Store the values that are too large for a row; return the entries that follow ``seq``."""
        placed: list[Entry] = []
        for kind, step, attempt, facts, value, family, identity, then in entries:
            seq += 1
            at = now if then is None else then
            data, sha256 = (None, None) if value is None else value
            payload = None
            if value is not None and len(value[0]) > INLINE_BYTES:
                data, payload = None, self._values.place(db, value, run, family, is_new=is_new)
            row = (seq, kind, step, attempt, at, facts, data, payload, sha256, identity)
            placed.append(_as_entry(row))
        return placed

    def delete(self, db: apsw.Connection, run: int) -> None:
        """Delete a run's entries, inside the caller's transaction."""
        db.execute("DELETE FROM entries WHERE id BETWEEN ? AND ?", keys_of(run))

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


class Appended(NamedTuple):
    """What came of one transaction: the outcomes, the releases, and the changed documents."""

    outcome: list[Outcome]
    releases: list[RunLease]
    documents: dict[Where, Changed]


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
        self.documents: dict[Where, Changed] = {}
        self.dispatched: dict[RunLease, bool] = {}
        self.cleared: list[RunLease] = []

    def is_dispatched(self, run: RunLease) -> bool:
        """Return whether a run belongs to workers at this point of the batch."""
        return self.dispatched.get(run, run.dispatched)

    def is_last_user(self, run: RunLease) -> bool:
        """Count one release of this lease; return whether no user of it is left."""
        self.releases.append(run)
        return self.releases.count(run) >= run.users


def _placed(seq: int, at: int, entry: NewEntry) -> Entry:
    """Return an entry whose value, if any, is in its row."""
    kind, step, attempt, facts, value, _, identity, _ = entry
    data, sha256 = (None, None) if value is None else value
    return _as_entry((seq, kind, step, attempt, at, facts, data, None, sha256, identity))


def _stale(db: apsw.Connection, guard: DocumentGuard) -> StaleDocumentError | None:
    namespace, key, expected = guard
    row = db.execute(_VERSION, (namespace, key)).fetchone()
    version = int(row[0]) if row else 0
    if version == expected:
        return None
    return StaleDocumentError(namespace, key, expected=expected, version=version)


def _rows(run: int, entries: list[Entry]) -> list[Row]:
    """Return entries as they are stored, each with its key."""
    return [(run << RUN_BITS | entry[0], *entry[1:]) for entry in entries]


def last_seq(db: apsw.Connection, run: int) -> int:
    """Return the number of a run's last entry; 0 if it has none."""
    last: Any = db.execute("SELECT max(id) FROM entries WHERE id BETWEEN ? AND ?", keys_of(run)).get
    return (last or 0) & _SEQ_MASK


def keys_of(run: int, after: int = 0, up_to: int | None = None) -> tuple[int, int]:
    """Return the first and the last key of a run's rows with these numbers."""
    last = _SEQ_MASK if up_to is None else up_to
    after = min(after, _SEQ_MASK)  # no row has a higher number, and SQLite has no larger integers
    return (run << RUN_BITS) + after + 1, (run << RUN_BITS) + last


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
        if len(data) >= SHARED_BYTES:
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
        stored = codec.dump(deltas.to_json(instructions))
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
        first, last = keys_of(run)
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
