"""A run as one file: written from one state folder, and taken in by another.

It is the document that lies beside a journal as ``execution_state.json``, with the same checksum.
"""

from __future__ import annotations

import contextlib
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

from maestro_hive.cli.plain_values import plainly
from maestro_hive.engine.copies import KIND
from maestro_hive.kernel import files
from maestro_hive.kernel.errors import (
    ConfigurationError,
    DocumentCorruptError,
    FencedError,
    RunLeasedError,
    StorageError,
)
from maestro_hive.maestro.state import run_document as documents
from maestro_hive.maestro.state.projections import fold
from maestro_hive.maestro.state.records import from_micros
from maestro_hive.maestro.state.run_document import (
    CopiedEntries,
    RunCopy,
    read_run,
    write_snapshot,
)
from maestro_hive.maestro.state.store import Append
from maestro_hive.maestro.state.views import show_fields

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from maestro_hive.maestro.state.projections import RunState
    from maestro_hive.maestro.state.records import Lease, RunRecord
    from maestro_hive.maestro.state.store import RunLease, Store


class Written(NamedTuple):
    """The text of a file, and how many steps and children the run in it has."""

    text: bytes
    steps: int
    children: int


def write(store: Store, record: RunRecord) -> Written:
    """Return a run as of now, as the text of a file; it may be executed meanwhile."""
    lease = store.lease(f"run/{record.name}")
    entries = store.entries(record.id)
    state = fold(entries, plainly(store.load))
    fields = {
        "workflow_id": record.name,
        **show_fields(state, plainly(store.load)),
        "created_at": from_micros(state.created_at).isoformat(),
        "updated_at": from_micros(state.updated_at).isoformat(),
    }
    if state.started is None:
        fields["status"] = record.status
    saved_at, fence = store.clock.now().isoformat(), _fence(state, lease)
    run = write_snapshot(store, record.id, record.name, entries, fields, saved_at, fence)
    text = documents.seal(KIND, {}, raw={"run": run})
    if len(text) > files.MAX_FILE_BYTES:
        raise StorageError(
            f"run {record.name!r} would be a file of {len(text):,} bytes, and no more than"
            f" {files.MAX_FILE_BYTES:,} are read again; 'maestro backup' copies the whole folder"
        )
    read(text, f"the file of run {record.name!r}")  # purged in between, it would not be whole
    return Written(text, len(state.steps), len(state.children))


def _fence(state: RunState, lease: Lease | None) -> int:
    return state.fence_floor + (lease.fence if lease is not None else 0)


def read(text: bytes, name: str) -> RunCopy:
    """Return the run that a file holds; raise if it is damaged, or newer than this version."""
    body = documents.unseal(text, KIND, name)
    run = body.get("run")
    if not isinstance(run, dict):
        raise DocumentCorruptError(name, "there is no run in it")
    return read_run(name, run, plainly(attrgetter("value")))


def take_in(store: Store, copy: RunCopy, run_id: str, folders: Iterable[Path]) -> None:
    """Add a run to a store, wholly or not at all; ``folders`` are where copies of it may lie."""
    files.check_identifier(run_id, "run id")
    _refuse_existing(store, run_id, folders)
    hold = store.acquire_run(run_id, _workflow_of(copy))
    try:
        _append(store, hold, copy)
    except BaseException:
        store.release_run(hold)
        with contextlib.suppress(StorageError, RunLeasedError):  # a failed store does nothing more
            _forget_empty(store, run_id)
        raise
    store.release_run(hold)


def _append(store: Store, hold: RunLease, copy: RunCopy) -> None:
    """Write all entries in one transaction.

    A kill before it leaves a run without entries, which is as good as none: whoever imports the
    file again, or begins the run, finds nothing in the way.
    """
    if hold.seq:  # begun by another process just now
        raise _exists(hold.name, store.location)
    entries = CopiedEntries(copy, journal_lost=True)
    (written,) = store.append([Append(hold, entries, _status_of(copy))])
    if isinstance(written, FencedError):
        raise written


def _refuse_existing(store: Store, run_id: str, folders: Iterable[Path]) -> None:
    _forget_empty(store, run_id)
    if store.run(run_id) is not None:
        raise _exists(run_id, store.location)
    for folder in folders:
        if (folder / run_id).exists():
            raise _exists(run_id, str(folder / run_id))


def _exists(run_id: str, where: str) -> ConfigurationError:
    return ConfigurationError(
        f"there is a run {run_id!r} already, in {where}; import this one under another id with"
        f" --as, or forget that one first: 'maestro purge {run_id}'"
    )


def _forget_empty(store: Store, run_id: str) -> None:
    """Forget a run that has no entries: an import or a first start that was killed at once."""
    record = store.run(run_id)
    if record is not None and not store.entries(record.id):
        store.purge_run(run_id)


def _workflow_of(copy: RunCopy) -> str:
    begun = [entry for entry in copy.body["entries"] if entry["kind"] == "run_started"]
    return str((begun[-1]["facts"] or {}).get("workflow", "")) if begun else ""


def _status_of(copy: RunCopy) -> str | None:
    state = copy.body.get("state")
    status = state.get("status") if isinstance(state, dict) else None
    return status if isinstance(status, str) else None
