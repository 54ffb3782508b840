"""Examining a state folder, and repairing what can be repaired."""

from __future__ import annotations

import os
import platform
import time
from dataclasses import dataclass, field, replace
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
from maestro_hive.kernel.locks import is_locked
from maestro_hive.maestro.state import run_document
from maestro_hive.maestro.state.projections import RunState, fold
from maestro_hive.maestro.state.sqlite.wal import recorded_damage
from maestro_hive.maestro.state.views import is_finished, plain_values, run_status

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
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
    """A run that is not finished, and that no process executes."""

    run: str
    status: str
    updated_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class Repair:
    """Something that can be repaired: what would be done, what is reported after, and doing it."""

    plan: str
    report: str
    action: Callable[[Store], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """A state folder as it was found.

    ``problems`` cannot be trusted, ``warnings`` say what could not be checked, ``repairs`` what a
    repair would do, and ``repaired`` what it did.
    """

    folder: Path
    format: int
    versions: dict[str, str]
    runs: int
    free_bytes: int
    journal_bytes: int
    held: tuple[HeldLease, ...]
    unfinished: tuple[UnfinishedRun, ...]
    problems: tuple[str, ...]
    warnings: tuple[str, ...]
    repairs: tuple[str, ...]
    repaired: tuple[str, ...] = ()


def examine(folder: Path) -> Findings:
    """Read all of a state folder and return what was found; nothing is changed."""
    return _Examination(folder).findings()


def repair(folder: Path) -> Findings:
    """Repair what can be repaired, and examine the folder again; nothing in use is deleted."""
    folders.require_journal(folder)
    repaired = list(_repair_permissions(folder))
    warnings: tuple[str, ...] = ()
    try:
        if _is_writer_stuck(folder):
            raise StoreBusyError(_STUCK)
        with folders.writing(folder) as store:
            repairs = _Examination(folder).repairs
            repaired += [_attempted(each.report, partial(each.action, store)) for each in repairs]
    except (FolderError, StorageError) as error:
        warnings = (f"it cannot be opened for writing, and was only read: {error}",)
    found = examine(folder)
    warnings = (*warnings, *(each for each in found.warnings if not warnings))
    return replace(found, repaired=tuple(repaired), warnings=warnings)


def _is_writer_stuck(folder: Path) -> bool:
    """Return whether another process is inside a write and stays there."""
    deadline = time.monotonic() + _BUSY_SECONDS
    while is_locked(folder / "journal.lock"):
        if time.monotonic() > deadline:
            return True
        time.sleep(_POLL_SECONDS)
    return False


def _repair_permissions(folder: Path) -> Iterator[str]:
    """Make files private; before the journal is opened, which would do so for its own."""
    for each in folders.exposed_files(folder):
        if each.can_be_repaired:
            yield _attempted(f"{each.path} {each.problem}: repaired", each.repair)


def _attempted(report: str, action: Callable[[], object]) -> str:
    try:
        action()
    except MaestroError as error:
        return f"not repaired: {error}"
    except OSError as error:
        return f"not repaired: {error.filename}: {error.strerror}"
    return report


# --- examining ------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Journal:
    """What is found in a journal."""

    format: int = 0
    runs: int = 0
    held: list[HeldLease] = field(default_factory=list)
    unfinished: list[UnfinishedRun] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    repairs: list[Repair] = field(default_factory=list)


class _Examination:
    """One examination of all of a state folder."""

    def __init__(self, folder: Path) -> None:
        folders.require_journal(folder)
        self._folder = folder
        self._exposed = folders.exposed_files(folder)
        self._journal = _Journal()
        with folders.reading(folder) as reader:
            self._examine_journal(reader)

    @property
    def repairs(self) -> list[Repair]:
        """What can be repaired in an open store; permissions are repaired before it is opened."""
        return [*_leftover_repairs(self._folder), *self._journal.repairs]

    def findings(self) -> Findings:
        """Return what was found."""
        space, journal = os.statvfs(self._folder), self._journal
        free_bytes = space.f_bavail * space.f_frsize
        paths = self._folder.glob("journal.db*")
        private = [f"make {each.path} private" for each in self._exposed if each.can_be_repaired]
        return Findings(
            folder=self._folder,
            format=journal.format,
            versions=_versions(),
            runs=journal.runs,
            free_bytes=free_bytes,
            journal_bytes=sum(path.stat().st_size for path in paths),
            held=tuple(journal.held),
            unfinished=tuple(journal.unfinished),
            problems=tuple(self._problems(free_bytes)),
            warnings=tuple(self._warnings()),
            repairs=(*private, *(each.plan for each in self.repairs)),
        )

    def _problems(self, free_bytes: int) -> Iterator[str]:
        if free_bytes < _LEAST_FREE_BYTES:
            yield f"the disk of {self._folder} has only {free_bytes:,} bytes left"
        try:
            files.refuse_shared_folder(self._folder)
        except FolderError as error:
            yield str(error)
        yield from self._journal.problems
        yield from _damaged_documents(self._folder)
        yield from (f"{each.path} {each.problem}" for each in self._exposed)

    def _warnings(self) -> Iterator[str]:
        reason = folders.write_error(self._folder)
        if reason is not None:
            yield f"it cannot be opened for writing: {reason}"
        elif _is_writer_stuck(self._folder):
            yield _STUCK
        yield from self._journal.warnings

    # --- the journal ---

    def _examine_journal(self, reader: Reader) -> None:
        found = self._journal
        found.format = reader.format
        if reader.partial:
            found.warnings.append(reader.partial)
        found.problems += recorded_damage(self._folder)
        runs: list[RunRecord] = []
        try:
            found.problems += reader.check()
            runs = reader.runs()
            self._examine_leases(reader)
            self._examine_values(reader)
        except CorruptionError as error:
            found.problems.append(str(error))
        found.runs = len(runs)
        held = {lease.name.removeprefix("run/") for lease in found.held}
        for run in runs:
            self._examine_run(reader, run, held=run.name in held)

    def _examine_leases(self, reader: Reader) -> None:
        for lease in reader.leases():
            holder = lease.holder
            if reader.is_alive(lease):
                held = HeldLease(
                    name=lease.name, host=holder.host, pid=holder.pid, since=holder.since
                )
                self._journal.held.append(held)
            else:
                self._journal.repairs.append(_lease_repair(lease))

    def _examine_values(self, reader: Reader) -> None:
        count, size = reader.unused_values()
        if count:
            values = f"{count:,} stored value{'' if count == 1 else 's'}"
            repair_values = Repair(
                plan=f"delete {values} that nothing refers to ({size:,} bytes)",
                report=f"deleted {values} that nothing refers to",
                action=lambda store: store.collect(),
            )
            self._journal.repairs.append(repair_values)

    def _examine_run(self, reader: Reader, run: RunRecord, *, held: bool) -> None:
        state = self._folded(reader, run)
        if state is None or held:
            return
        if not is_finished(state):
            unfinished = UnfinishedRun(
                run=run.name, status=run_status(state), updated_at=reader.last_change(run)
            )
            self._journal.unfinished.append(unfinished)
        copy = self._folder / "runs" / run.name / "execution_state.json"
        if state.seq and not copy.exists():
            self._journal.repairs.append(_copy_repair(self._folder, run.name))

    def _folded(self, reader: Reader, run: RunRecord) -> RunState | None:
        try:
            return fold(reader.entries(run.id), plain_values(reader.load))
        except (CorruptionError, CodecError) as error:
            problems = [each for each in self._journal.problems if each != str(error)]
            self._journal.problems = [*problems, f"run {run.name}: {error}"]
            return None


def _lease_repair(lease: Lease) -> Repair:
    pid = lease.holder.pid
    return Repair(
        plan=f"release {lease.name}, whose holder (process {pid}) is dead",
        report=f"{lease.name} was held by process {pid}, which is dead: released",
        action=lambda store: store.release_lease(lease),
    )


def _leftover_repairs(folder: Path) -> Iterator[Repair]:
    found = folders.leftovers([folder, *folders.separate_checkpoint_folders(folder)])
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
            run_document.unseal(files.read_whole(path), kind, str(path))
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
