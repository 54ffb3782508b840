"""Examining a state folder, and repairing what can be repaired."""

from __future__ import annotations

import os
import platform
import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import apsw

import maestro_hive
from maestro_hive.admin import folder as folders
from maestro_hive.admin.transfer import write_copy
from maestro_hive.kernel import files
from maestro_hive.kernel.errors import (
    CodecError,
    CorruptionError,
    DocumentCorruptError,
    FolderError,
    MaestroError,
    NewerFormatError,
    StorageError,
    StoreBusyError,
)
from maestro_hive.kernel.files import is_locked
from maestro_hive.maestro.state import run_document
from maestro_hive.maestro.state.projections import fold
from maestro_hive.maestro.state.records import BANKRUPT
from maestro_hive.maestro.state.sqlite.wal import (
    COPIED,
    copied_in_use,
    lost_log,
    recorded_damage,
)
from maestro_hive.maestro.state.views import OVER, is_finished, plain_values, run_status

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterator, Sequence
    from datetime import datetime
    from pathlib import Path

    from maestro_hive.maestro.state.records import Lease, RunRecord
    from maestro_hive.maestro.state.store import Reader, Store

#: With less than this the journal's log may not fit any more.
_LEAST_FREE_BYTES = 64 * 1024 * 1024
#: How long a writer may block the repair.
_BUSY_SECONDS = 3.0
_POLL_SECONDS = 0.02
_STUCK = f"another process has been inside a write for {_BUSY_SECONDS:g} seconds; it may be stopped"


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldLease:
    """A lease and the living process that holds it."""

    name: str
    host: str
    pid: int
    since: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class UnfinishedRun:
    """A run that is not finished, that no process executes, and that does not belong to workers."""

    run: str
    status: str
    updated_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class Repair:
    """Something that can be repaired: what would be done, what is reported after, and doing it."""

    plan: str
    report: str
    action: Callable[[Store], object]


@dataclass(slots=True, kw_only=True)
class Findings:
    """A state folder as it was found.

    ``problems`` cannot be trusted, ``warnings`` say what could not be checked and what is not as
    its programs may expect, ``repairs`` what a repair would do, and ``repaired`` what it did.
    """

    folder: Path
    format: int = 0
    versions: dict[str, str]
    runs: int = 0
    free_bytes: int
    journal_bytes: int
    held: tuple[HeldLease, ...] = ()
    unfinished: tuple[UnfinishedRun, ...] = ()
    problems: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    repairs: tuple[str, ...] = ()
    repaired: tuple[str, ...] = ()


def examine(folder: Path) -> Findings:
    """Read all of a state folder and return what was found; nothing is changed."""
    return _Examination(folder).found


def repair(folder: Path) -> Findings:
    """Repair what can be repaired, and examine the folder again; nothing in use is deleted."""
    folders.require_journal(folder)
    # Permissions before the journal is opened, which would make its own files private.
    exposed = [each for each in folders.exposed_files(folder) if each.can_be_repaired]
    repaired = [
        _attempted(f"{each.path} {each.problem}: repaired", each.repair) for each in exposed
    ]
    unwritable = None
    try:
        if _is_writer_stuck(folder):
            raise StoreBusyError(_STUCK)
        with folders.writing(folder) as store:
            repairs = _Examination(folder).repairs
            repaired += [_attempted(each.report, partial(each.action, store)) for each in repairs]
    except (FolderError, StorageError) as error:
        unwritable = f"it cannot be opened for writing, and was only read: {error}"
    found = examine(folder)
    found.repaired = tuple(repaired)
    if unwritable is not None:
        replaced = folders.default_replaced(folder)
        found.warnings = (unwritable,) if replaced is None else (replaced, unwritable)
    return found


def _is_writer_stuck(folder: Path) -> bool:
    """Return whether another process is inside a write and stays there."""
    deadline = time.monotonic() + _BUSY_SECONDS
    while is_locked(folder / "journal.lock"):
        if time.monotonic() > deadline:
            return True
        time.sleep(_POLL_SECONDS)
    return False


def _attempted(report: str, action: Callable[[], object]) -> str:
    try:
        action()
    except MaestroError as error:
        return f"not repaired: {error}"
    except OSError as error:
        return f"not repaired: {error.filename}: {error.strerror}"
    return report


# --- examining ------------------------------------------------------------------------------------


class _Examination:
    """One examination of all of a state folder.

    ``repairs`` are those in an open store; permissions are repaired before it is opened.
    """

    def __init__(self, folder: Path) -> None:
        folders.require_journal(folder)
        space = os.statvfs(folder)
        exposed = folders.exposed_files(folder)
        self.found = found = Findings(
            folder=folder,
            versions=_versions(),
            free_bytes=space.f_bavail * space.f_frsize,
            journal_bytes=sum(map(folders.size_of, folder.glob("journal.db*"))),
            repairs=tuple(f"make {each.path} private" for each in exposed if each.can_be_repaired),
        )
        self.repairs = list(_leftover_repairs(folder))
        self._examine_place()
        with folders.reading(folder) as reader:
            self._examine_journal(reader)
        found.problems += tuple(_damaged_documents(folder))
        found.problems += tuple(f"{each.path} {each.problem}" for each in exposed)
        found.repairs += tuple(each.plan for each in self.repairs)

    def _examine_place(self) -> None:
        folder, free_bytes = self.found.folder, self.found.free_bytes
        if free_bytes < _LEAST_FREE_BYTES:
            self.found.problems += (f"the disk of {folder} has only {free_bytes:,} bytes left",)
        try:
            files.refuse_shared_folder(folder)
        except FolderError as error:
            self.found.problems += (str(error),)
        replaced = folders.default_replaced(folder)
        if replaced is not None:
            self.found.warnings += (replaced,)
        reason = folders.write_error(folder)
        if reason is not None:
            self.found.warnings += (f"it cannot be opened for writing: {reason}",)
        elif _is_writer_stuck(folder):
            self.found.warnings += (_STUCK,)

    def _examine_journal(self, reader: Reader) -> None:
        found = self.found
        found.format = reader.format
        journal = found.folder / "journal.db"
        if lost := lost_log(journal):
            found.problems += (f"{journal}: {lost}",)
        elif reader.partial:
            found.warnings += (reader.partial,)
        elif copied_in_use(journal):
            found.warnings += (f"{found.folder} {COPIED}",)
        found.problems += tuple(recorded_damage(found.folder))
        runs: list[RunRecord] = []
        try:
            found.problems += tuple(reader.check())
            runs = reader.runs()
            self._examine_leases(reader)
            self._examine_values(reader)
        except CorruptionError as error:
            found.problems += (str(error),)
        found.runs = len(runs)
        held = {lease.name.removeprefix("run/") for lease in found.held}
        queued = self._examine_dispatch(reader, runs, held)
        idle = (
            self._examine_run(reader, run, held=run.name in held, queued=run.name in queued)
            for run in runs
        )
        found.unfinished = tuple(run for run in idle if run is not None)

    def _examine_dispatch(
        self, reader: Reader, runs: Sequence[RunRecord], held: Container[str]
    ) -> set[str]:
        """Return the runs that belong to workers; none of those that have ended does."""
        try:
            queued = {each.run_id for each in reader.dispatches()}
        except CorruptionError as error:
            self.found.problems += (str(error),)
            return set()
        over = {run.name for run in runs if run.status in OVER} & queued
        self.repairs += [_dispatch_repair(run) for run in sorted(over) if run not in held]
        return queued

    def _examine_leases(self, reader: Reader) -> None:
        for lease in reader.leases():
            by = lease.holder
            if reader.is_alive(lease):
                held = HeldLease(name=lease.name, host=by.host, pid=by.pid, since=by.since)
                self.found.held += (held,)
            else:
                self.repairs.append(_lease_repair(lease))

    def _examine_values(self, reader: Reader) -> None:
        count, size = reader.unused_values()
        if count:
            values = f"{count:,} stored value{'' if count == 1 else 's'}"
            repair_values = Repair(
                plan=f"delete {values} that nothing refers to ({size:,} bytes)",
                report=f"deleted {values} that nothing refers to",
                action=lambda store: store.collect(),
            )
            self.repairs.append(repair_values)

    def _examine_run(
        self, reader: Reader, run: RunRecord, *, held: bool, queued: bool
    ) -> UnfinishedRun | None:
        """Return the run if it is not finished, and no process executes it, nor will a worker."""
        try:
            state = fold(reader.entries(run.id), plain_values(reader.load))
        except (CorruptionError, CodecError) as error:
            others = (each for each in self.found.problems if each != str(error))
            self.found.problems = (*others, f"run {run.name}: {error}")
            return None
        if held:
            return None
        copy = self.found.folder / "runs" / run.name / "execution_state.json"
        if state.seq and not queued and not copy.exists():  # a worker writes that of a queued one
            self.repairs.append(_copy_repair(self.found.folder, run.name))
        if queued or is_finished(state):
            return None
        changed = reader.last_change(run)
        # That a budget stopped it is in no entry.
        status = BANKRUPT if run.status == BANKRUPT else run_status(state)
        return UnfinishedRun(run=run.name, status=status, updated_at=changed)


def _lease_repair(lease: Lease) -> Repair:
    pid = lease.holder.pid
    return Repair(
        plan=f"release {lease.name}, whose holder (process {pid}) is dead",
        report=f"{lease.name} was held by process {pid}, which is dead: released",
        action=lambda store: store.release_lease(lease),
    )


def _dispatch_repair(run: str) -> Repair:
    return Repair(
        plan=f"withdraw run {run!r}, which has ended, from its queue",
        report=f"run {run!r} has ended, and was still in a queue: withdrawn",
        action=lambda store: store.release_run(store.acquire_run(run)),
    )


def _leftover_repairs(folder: Path) -> Iterator[Repair]:
    found = folders.leftovers(folder)
    if found:
        count = f"{len(found):,} file{'' if len(found) == 1 else 's'}"

        def delete(_: Store) -> None:
            for path in found:
                files.remove(path)

        yield Repair(
            plan=f"delete {count} that killed processes left",
            report=f"deleted {count} that killed processes left: {', '.join(map(str, found))}",
            action=delete,
        )


def _copy_repair(folder: Path, run: str) -> Repair:
    def write(store: Store) -> None:
        lease = store.acquire_run(run)
        try:
            write_copy(store, folder, run)
        finally:
            store.release_run(lease)

    return Repair(
        plan=f"write the missing copy of run {run!r} (execution_state.json)",
        report=f"run {run!r} had no execution_state.json: written",
        action=write,
    )


def _damaged_documents(folder: Path) -> Iterator[str]:
    for path, kind in folders.documents(folder):
        try:
            file = files.open_file(path, run_document.MAX_DOCUMENT_BYTES)
            run_document.unseal(file, kind, str(path), lazy=True)
        except FileNotFoundError:
            continue  # retention deleted it just now
        except PermissionError as error:
            yield f"{path} cannot be read: {files.reason_of(error)}"
        except (DocumentCorruptError, NewerFormatError, StorageError) as error:
            yield str(error)
    for path in folders.damaged_documents(folder):
        yield f"{path} was found damaged and renamed"


def _versions() -> dict[str, str]:
    return {
        "maestro_hive": maestro_hive.__version__,
        "python": platform.python_version(),
        "sqlite": apsw.sqlite_lib_version(),
        "apsw": apsw.apsw_version(),
    }
