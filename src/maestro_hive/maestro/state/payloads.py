"""Where values live in SQLite: small ones in their row, larger ones once, grown ones as growth.

A value over ``INLINE_BYTES`` is looked up by its digest and stored only if it is new. One that
grew from the last value of its family is stored as the difference to it, until the differences
since the last whole copy add up to three quarters of the value: so a list that grows for ever is
stored about one and a half times, and no chain is longer than its value is worth.
"""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, NamedTuple

from maestro_hive.kernel.errors import CorruptionError
from maestro_hive.maestro.state import deltas

if TYPE_CHECKING:
    from collections.abc import Callable

    import apsw

    from maestro_hive.maestro.state.codec import Encoded
    from maestro_hive.maestro.state.journal_file import JournalFile

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
