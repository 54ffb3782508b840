"""A run as one file: exported from one state folder, and imported into another.

It is the document that is next to a journal as ``execution_state.json``, with the same checksum.
"""

from __future__ import annotations

import contextlib
import stat
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING

from maestro_hive.admin.folder import checkpoint_folders, writing
from maestro_hive.admin.runs import find_run
from maestro_hive.engine.copies import FILE, KIND
from maestro_hive.engine.open_run import append_entries, document_of
from maestro_hive.kernel import files
from maestro_hive.kernel.errors import (
    AtomicWriteError,
    ConfigurationError,
    DocumentCorruptError,
    RunLeasedError,
    StorageError,
)
from maestro_hive.maestro.state import run_document
from maestro_hive.maestro.state.projections import fold
from maestro_hive.maestro.state.run_document import CopiedEntries, read_run
from maestro_hive.maestro.state.views import plain_values, show_fields

if TYPE_CHECKING:
    from pathlib import Path

    from maestro_hive.maestro.state.records import RunRecord
    from maestro_hive.maestro.state.run_document import RunCopy
    from maestro_hive.maestro.state.store import Reader, RunLease, Store

# --- export ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportedRun:
    """The text of a file, and how many steps and children the run in it has."""

    run_id: str
    text: bytes
    steps: int
    children: int


def export_run(reader: Reader, run_id: str) -> ExportedRun:
    """Return a run as of now, as the text of a file; it may be executed meanwhile."""
    return _export(reader, find_run(reader, run_id))


def _export(reader: Reader, record: RunRecord) -> ExportedRun:
    lease = reader.lease(f"run/{record.name}")
    entries = reader.entries(record.id)
    load = plain_values(reader.load)
    state = fold(entries, load)
    shown = show_fields(state, load)
    if state.started is None:
        shown["status"] = record.status
    fence = state.fence_floor + (lease.fence if lease is not None else 0)
    run = document_of(reader, record.id, entries, state, record.name, fence, shown)
    text = run_document.seal(KIND, {}, raw={"run": run})
    if len(text) > files.MAX_FILE_BYTES:
        raise StorageError(
            f"run {record.name!r} would be a file of {len(text):,} bytes, and no more than"
            f" {files.MAX_FILE_BYTES:,} can be imported; 'maestro backup' copies the whole folder"
        )
    read_export(text, f"the file of run {record.name!r}")  # incomplete if it was purged meanwhile
    return ExportedRun(
        run_id=record.name, text=text, steps=len(state.steps), children=len(state.children)
    )


def write_copy(store: Store, folder: Path, run_id: str) -> None:
    """Write the ``execution_state.json`` of a run whose lease this process has."""
    record = store.run(run_id)
    if record is not None:
        inside = files.make_folder_inside(folder, "runs", run_id)
        files.write_atomically(inside / FILE, _export(store, record).text)


def check_target(target: Path, *, force: bool) -> None:
    """Raise if something is there that must not be replaced; only regular files ever are."""
    try:
        mode = target.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISREG(mode):
        what = "is a symbolic link" if stat.S_ISLNK(mode) else "is not a regular file"
        raise ConfigurationError(
            f"{target} {what}, and is not replaced. Choose another file, or - for stdout."
        )
    if not force:
        raise _exists_already(target)


def write_export(target: Path, text: bytes, *, force: bool) -> None:
    """Write a file; without ``force`` only if there is none, also none made meanwhile."""
    check_target(target, force=force)
    if force:
        files.write_atomically(target.absolute(), text)
        return
    try:
        target.touch(mode=0o600, exist_ok=False)  # from now on no other process can create it
    except FileExistsError:
        raise _exists_already(target) from None
    except OSError as error:
        raise AtomicWriteError(target, files.reason_of(error)) from error
    try:
        files.write_atomically(target.absolute(), text)
    except BaseException:
        with contextlib.suppress(OSError):
            if not target.lstat().st_size:
                target.unlink()
        raise


def _exists_already(target: Path) -> ConfigurationError:
    return ConfigurationError(f"{target} exists already. Choose another file, or use --force.")


# --- import ---------------------------------------------------------------------------------------


def read_export(text: bytes, name: str) -> RunCopy:
    """Return the run in a file; raise if the file is damaged, or of a newer version."""
    body = run_document.unseal(text, KIND, name)
    run = body.get("run")
    if not isinstance(run, dict):
        raise DocumentCorruptError(name, "there is no run in it")
    return read_run(name, run, plain_values(attrgetter("value")))


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportedRun:
    """A run that was imported, as of the time it was saved."""

    run_id: str
    saved_at: str


def import_run(folder: Path, text: bytes, name: str, *, run_id: str | None = None) -> ImportedRun:
    """Add the run in a file to a state folder, completely or not at all.

    The file is checked before the folder is touched; ``name`` names it in errors.
    """
    copy = read_export(text, name)
    new_id = str(copy.body["workflow_id"]) if run_id is None else run_id
    with writing(folder, create=True) as store:
        files.check_identifier(new_id, "run id")
        _refuse_existing(store, new_id, folder)
        _add(store, copy, new_id)
    return ImportedRun(run_id=new_id, saved_at=copy.saved_at)


def _add(store: Store, copy: RunCopy, run_id: str) -> None:
    """Append all entries in one transaction.

    A kill before it leaves a run without entries, which does not prevent importing the file again.
    """
    run = store.acquire_run(run_id, _workflow_of(copy))
    try:
        _require_empty(store, run)
        append_copy(store, run, copy, status=_status_of(copy), journal_lost=True)
    except BaseException:
        store.release_run(run)
        with contextlib.suppress(StorageError, RunLeasedError):  # a failed store refuses everything
            _purge_empty(store, run_id)
        raise
    store.release_run(run)


def _require_empty(store: Store, run: RunLease) -> None:
    if run.seq:  # another process started it just now
        raise _is_taken(run.name, store.location)


def append_copy(
    store: Store, run: RunLease, copy: RunCopy, *, status: str | None, journal_lost: bool
) -> None:
    """Append the entries of a copy to a run, behind a mark that earlier ones no longer count."""
    append_entries(store, run, list(CopiedEntries(copy, journal_lost=journal_lost)), status)


def _refuse_existing(store: Store, run_id: str, folder: Path) -> None:
    _purge_empty(store, run_id)
    if store.run(run_id) is not None:
        raise _is_taken(run_id, store.location)
    for place in (folder / "runs", *checkpoint_folders(folder)):
        if (place / run_id).exists():
            raise _is_taken(run_id, str(place / run_id))


def _is_taken(run_id: str, where: str) -> ConfigurationError:
    return ConfigurationError(
        f"there is a run {run_id!r} already, in {where}; import this one under another id with"
        f" --as, or purge that one first: 'maestro purge {run_id}'"
    )


def _purge_empty(store: Store, run_id: str) -> None:
    """Purge a run that has no entries: an import or a first start that was killed."""
    record = store.run(run_id)
    if record is not None and not store.entries(record.id):
        store.purge_run(run_id)


def _workflow_of(copy: RunCopy) -> str:
    started = [entry for entry in copy.body["entries"] if entry["kind"] == "run_started"]
    return str((started[-1]["facts"] or {}).get("workflow", "")) if started else ""


def _status_of(copy: RunCopy) -> str | None:
    state = copy.body.get("state")
    status = state.get("status") if isinstance(state, dict) else None
    return status if isinstance(status, str) else None
