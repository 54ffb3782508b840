"""The ``chunks`` table: what steps write while they are executed, in the order in which they wrote it.

A chunk's key is its run's number and its own in one integer, as that of an entry. Chunks have no
digest of their own: the checksum of their page guards them.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, cast

from maestro_hive.kernel.errors import CorruptionError
from maestro_hive.maestro.state.records import Chunk
from maestro_hive.maestro.state.sqlite.entries import RUN_BITS, keys_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    import apsw

    from maestro_hive.kernel.errors import FencedError
    from maestro_hive.maestro.state.sqlite.entries import Queries
    from maestro_hive.maestro.state.sqlite.leases import Leases
    from maestro_hive.maestro.state.store import ChunkAppend

_SEQ_MASK = (1 << RUN_BITS) - 1

_INSERT = "INSERT INTO chunks (id, step, attempt, at, kind, data) VALUES (?, ?, ?, ?, ?, ?)"
_READ = (
    f"SELECT id & {_SEQ_MASK}, step, attempt, at, kind, data FROM chunks"
    " WHERE id BETWEEN ? AND ? ORDER BY id LIMIT ?"
)
_LAST = "SELECT max(id) FROM chunks WHERE id BETWEEN ? AND ?"

#: Makes a chunk of a row as it is.
_as_chunk = cast("Callable[[Iterable[Any]], Chunk]", partial(tuple.__new__, Chunk))


class ChunkReader:
    """The chunks of one journal file."""

    _queries: Queries

    def chunks(self, run: int, after: int = 0, limit: int | None = None) -> list[Chunk]:
        """Return chunks of a run, making sure that none is missing."""
        most = -1 if limit is None else limit
        found = [*map(_as_chunk, self._queries.rows(_READ, (*keys_of(run, after), most)))]
        if found and (found[0].seq, found[-1].seq) != (after + 1, after + len(found)):
            raise CorruptionError(
                f"{self._queries.path}: a chunk of run number {run} after {after} is missing"
            )
        return found

    def last_chunk(self, run: int) -> int:
        """Return the number of a run's last chunk; 0 if it has none."""
        rows = self._queries.rows(_LAST, keys_of(run))
        return (rows[0][0] or 0) & _SEQ_MASK


class ChunkWriter:
    """Adds chunks, inside the caller's transaction."""

    def __init__(self, leases: Leases) -> None:
        self._leases = leases

    def append(
        self, db: apsw.Connection, appends: Sequence[ChunkAppend]
    ) -> list[FencedError | None]:
        """Add chunks of runs whose lease is current; return why others are refused."""
        outcome: list[FencedError | None] = []
        for run, chunks in appends:
            refused = self._leases.refusal(db, run.lease)
            outcome.append(refused)
            if refused is None:
                first, _ = keys_of(run.run, last_chunk(db, run.run))
                rows = ((key, *chunk) for key, chunk in enumerate(chunks, start=first))
                db.executemany(_INSERT, rows)
        return outcome

    def delete(self, db: apsw.Connection, run: int) -> None:
        """Delete a run's chunks."""
        db.execute("DELETE FROM chunks WHERE id BETWEEN ? AND ?", keys_of(run))


def last_chunk(db: apsw.Connection, run: int) -> int:
    """Return the number of a run's last chunk; 0 if it has none."""
    last: Any = db.execute(_LAST, keys_of(run)).get
    return (last or 0) & _SEQ_MASK
