"""Export runs, import them under their id or another, and restore them from copies."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from maestro_hive.journal import documents, entries
from maestro_hive.journal.database import Holder
from maestro_hive.journal.entries import Restored, Spent
from maestro_hive.journal.run_document import run_in, state_of, take_copy
from maestro_hive.journal.store import BITS, RunRow
from maestro_hive.kernel import files
from maestro_hive.kernel.errors import ConfigurationError, RunLeasedError, RunMismatchError

if TYPE_CHECKING:
    from maestro_hive.journal.database import Transaction
    from maestro_hive.journal.run_document import RunCopy
    from maestro_hive.journal.store import Store


def export_run(store: Store, run_id: str) -> bytes:
    """Return a run as of now as the text of a file, checked; it may be executed meanwhile."""
    text = take_copy(store, store.find(run_id)).data
    run_in(documents.unseal(text, f"the export of run {run_id!r}"))
    return text


def read_run(data: bytes, name: str) -> RunCopy:
    """Return the run in the text of a file; raise if it is damaged, or no run."""
    return run_in(documents.unseal(data, name))


def import_run(store: Store, copy: RunCopy, source: str, run_id: str | None = None) -> str:
    """Add a run, completely or not at all; return its id. A run that exists is not replaced."""
    name = copy.run_id if run_id is None else run_id
    for part in name.split("/"):
        files.check_identifier(part, "run id")
    if not _put(store, copy, source, name, replaces=False):
        raise ConfigurationError(
            f"{store.place} has a run {name!r} already; import this one under another id, or"
            f" purge that one first: `maestro purge {name}`"
        )
    return name


def restore_run(store: Store, copy: RunCopy, source: str) -> None:
    """Let a run continue from a copy, whatever was recorded since; a new journal gets the run."""
    _put(store, copy, source, copy.run_id, replaces=True)


def add_run(store: Store, copy: RunCopy, source: str) -> bool:
    """Add the run of a copy to a journal that was lost; False if another process was faster.

    A run of workers is pending again.
    """
    left = "stopped" if copy.queue is None else "pending"
    return _put(store, copy, source, copy.run_id, replaces=False, left=left)


def _put(
    store: Store, copy: RunCopy, source: str, name: str, *, replaces: bool, left: str = "stopped"
) -> bool:
    """Write a copy's entries behind a mark that earlier ones no longer count."""
    state = state_of(copy, source)
    status = state.ended.status if state.ended is not None else left
    mark = Restored(source=source, saved_at=max(0, int(copy.saved_at.timestamp() * 1e6)))

    def body(tx: Transaction) -> bool:
        now, sql = store.now(), store.sql
        found = tx(sql["FIND_RUN"], name)
        if found and not replaces:
            return False
        if found:
            number, fence = _freed(store, tx, RunRow(*found[0]), copy, status)
        else:
            fence = int(now * 1e6)
            row = (name, copy.workflow, copy.parent, status, copy.queue, copy.version)
            due = now if status == "pending" else None
            added = tx(sql["ADD_RUN"], *row, copy.priority, due, None, fence, 0.0, now)
            if not added:
                return False
            number = added[0][0]
            _add_usage(store, tx, number, copy)
        _add_values(store, tx, number, copy)
        for seq, entry in enumerate([mark, *copy.entries], store.last(tx, number) + 1):
            placed = entries.replace(entry, seq=seq, at=entry.at or int(now * 1e6))
            data = entries.encode(placed)
            digest = hashlib.sha256(data).digest()
            tx(sql["APPEND_ONE"], number << BITS | seq, data.decode(), digest, number, fence)
        return True

    return store.db.write(body, sync=True)


def _freed(
    store: Store, tx: Transaction, row: RunRow, copy: RunCopy, status: str
) -> tuple[int, int]:
    """Take a run from whoever had it, unless its process lives; return its number and fence."""
    if row.workflow != copy.workflow:
        raise RunMismatchError(f"run {row.run_id!r} is one of {row.workflow!r}, not of the copy's")
    now = store.now()
    if row.holder is not None and row.expires > now and store.db.alive(row.holder):
        raise RunLeasedError(row.run_id, Holder.of(row.holder).description)
    freed = tx(store.sql["RESTORE_RUN"], status, now, row.number, row.fence)
    if not freed:
        raise RunLeasedError(row.run_id, "another process, which took it just now")
    store.drop_holds(tx, row.number)
    return row.number, freed[0][0]


def _add_values(store: Store, tx: Transaction, number: int, copy: RunCopy) -> None:
    """Add the values of a copy that the run does not have; those of this very run are there."""
    for value in copy.payloads:
        key, digest = number << BITS | value.number, bytes.fromhex(value.sha256)
        found = tx(store.sql["PAYLOAD"], key)
        if found and found[0][1] != digest:
            raise RunMismatchError(
                f"run {copy.run_id!r} has recorded other large values than the copy; import the"
                " copy under another id"
            )
        if not found:
            data = value.whole() if value.base is None else value.data
            tx(store.sql["ADD_PAYLOAD"], key, value.base, digest, data)


def _add_usage(store: Store, tx: Transaction, number: int, copy: RunCopy) -> None:
    """Count again what the run has spent, by persona, model and day."""
    for each in copy.entries:
        if isinstance(each, Spent):
            day, amounts = each.at // 86_400_000_000, (each.tokens, each.cached, each.micros)
            tx(store.sql["ADD_USAGE"], number, each.persona, each.model, day, *amounts)
