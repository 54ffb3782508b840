"""What ``maestro doctor`` finds out about a state folder. It changes nothing."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import apsw

import maestro_hive
from maestro_hive.cli import beside, words
from maestro_hive.cli.call import checkpoint_folders
from maestro_hive.cli.look import Look
from maestro_hive.cli.plain_values import plainly
from maestro_hive.cli.rights import Exposed, exposed
from maestro_hive.kernel import files
from maestro_hive.kernel.errors import (
    CodecError,
    CorruptionError,
    DocumentCorruptError,
    FolderError,
    NewerFormatError,
    StorageError,
)
from maestro_hive.kernel.files import refuse_shared_folder
from maestro_hive.maestro.state import run_document as documents
from maestro_hive.maestro.state.projections import RunState, fold
from maestro_hive.maestro.state.sqlite.wal import recorded_damage
from maestro_hive.maestro.state.views import run_status

if TYPE_CHECKING:
    from collections.abc import Iterator
    from datetime import datetime
    from pathlib import Path

    from maestro_hive.maestro.state.records import Lease, RunRecord

#: With less than this the journal's log may not fit any more.
_LEAST_FREE_BYTES = 64 * 1024 * 1024


class Unfinished(NamedTuple):
    """A run that has more to do, and that nobody executes."""

    run: str
    status: str
    updated_at: datetime


@dataclass(slots=True)
class Findings:
    """A state folder as it was found: ``wrong`` cannot be trusted, the rest can be mended."""

    folder: Path
    format: int = 0
    runs: int = 0
    free_bytes: int = 0
    journal_bytes: int = 0
    held: list[Lease] = field(default_factory=list)
    unfinished: list[Unfinished] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    #: What could not be looked at, and why.
    unseen: list[str] = field(default_factory=list)
    # What can be mended:
    exposed: list[Exposed] = field(default_factory=list)
    leftovers: list[Path] = field(default_factory=list)
    forsaken: list[Lease] = field(default_factory=list)
    without_copy: list[str] = field(default_factory=list)
    unused_values: int = 0
    unused_bytes: int = 0

    def repairs(self) -> list[str]:
        """Say what ``--fix`` would do."""
        return list(self._repairs())

    def _repairs(self) -> Iterator[str]:
        for each in self.exposed:
            if each.can_be_mended:
                yield f"make {each.path} private"
        if self.leftovers:
            yield f"delete {words.many(len(self.leftovers), 'file')} that killed processes left"
        for lease in self.forsaken:
            holder = lease.holder
            yield f"free {lease.name}, whose holder (process {holder.pid}) is gone"
        if self.unused_values:
            size = words.size(self.unused_bytes)
            yield f"delete {words.many(self.unused_values, 'stored value')} in no use ({size})"
        for name in self.without_copy:
            yield f"write the missing copy of run {name!r} (execution_state.json)"

    def as_json(self) -> dict[str, Any]:
        """Return them with the keys of ``--json``."""
        return {
            "folder": str(self.folder),
            "format": self.format,
            **versions(),
            "runs": self.runs,
            "free_bytes": self.free_bytes,
            "journal_bytes": self.journal_bytes,
            "held": [_held(lease) for lease in self.held],
            "unfinished": [run._asdict() for run in self.unfinished],
            "unseen": self.unseen,
            "wrong": self.wrong,
            "repairs": self.repairs(),
        }


def versions() -> dict[str, str]:
    """Return what takes part, by name."""
    return {
        "maestro_hive": maestro_hive.__version__,
        "python": platform.python_version(),
        "sqlite": apsw.sqlite_lib_version(),
        "apsw": apsw.apsw_version(),
    }


def _held(lease: Lease) -> dict[str, Any]:
    holder = lease.holder
    return {"name": lease.name, "host": holder.host, "pid": holder.pid, "since": holder.since}


def examine(folder: Path, unseen: list[str]) -> Findings:
    """Look at all of a state folder; ``unseen`` is what is known not to be visible."""
    found = Findings(folder, unseen=unseen)
    _look_at_place(found)
    found.wrong += recorded_damage(folder)
    with Look(folder) as look:
        if look.partial:
            found.unseen.append(look.partial)
        found.format = look.format
        _look_at_journal(found, look)
    found.wrong += _damaged_copies(folder)
    return found


def _look_at_place(found: Findings) -> None:
    folder = found.folder
    space = os.statvfs(folder)
    found.free_bytes = space.f_bavail * space.f_frsize
    found.journal_bytes = sum(path.stat().st_size for path in folder.glob("journal.db*"))
    if found.free_bytes < _LEAST_FREE_BYTES:
        found.wrong.append(f"the disk of {folder} has only {words.size(found.free_bytes)} left")
    try:
        refuse_shared_folder(folder)
    except FolderError as error:
        found.wrong.append(str(error))
    found.leftovers = beside.leftovers([folder, *outside_checkpoints(folder)])


def look_at_rights(folder: Path) -> list[Exposed]:
    """Return what is not private; before the journal is opened, because that mends its file."""
    return exposed(folder, outside_checkpoints(folder))


def outside_checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoint folders that do not lie in the state folder."""
    return [each for each in checkpoint_folders(folder) if each.parent != folder]


def _look_at_journal(found: Findings, look: Look) -> None:
    runs: list[RunRecord] = []
    try:
        found.wrong += look.integrity()
        runs = list(look.runs())
        for lease in look.leases():
            (found.held if look.is_alive(lease) else found.forsaken).append(lease)
        found.unused_values, found.unused_bytes = look.unused_values()
        look.documents(None)
    except CorruptionError as error:
        found.wrong.append(str(error))
    found.runs = len(runs)
    held = {lease.name.removeprefix("run/") for lease in found.held}
    for run in runs:
        state = _read(found, look, run)
        if state is not None and run.name not in held:
            _look_at_unheld(found, run, state, look)


def _read(found: Findings, look: Look, run: RunRecord) -> RunState | None:
    """Read a run as whoever resumes it will, with every value it refers to."""
    try:
        entries = look.entries(run.id, 0)
        for entry in entries:
            look.load(entry)
        return fold(entries, plainly(look.load))
    except (CorruptionError, CodecError) as error:
        found.wrong.append(f"run {run.name}: {error}")
        return None


def _look_at_unheld(found: Findings, run: RunRecord, state: RunState, look: Look) -> None:
    if _has_more_to_do(state):
        unfinished = Unfinished(run.name, run_status(state), look.last_change(run))
        found.unfinished.append(unfinished)
    copy = found.folder / "runs" / run.name / "execution_state.json"
    if state.seq and not copy.exists():
        found.without_copy.append(run.name)


def _has_more_to_do(state: RunState) -> bool:
    if state.started is not None:
        return state.ended is None
    return bool(state.pending) or any(state.unfinished.values())


def _damaged_copies(folder: Path) -> Iterator[str]:
    for path, kind in beside.copies(folder):
        try:
            documents.unseal(files.read_whole(path), kind, str(path))
        except FileNotFoundError:
            continue  # retention took it in this moment
        except PermissionError as error:
            yield f"{path} cannot be read: {files.reason_of(error)}"
        except (DocumentCorruptError, NewerFormatError, StorageError) as error:
            yield str(error)
    for path in beside.set_aside(folder):
        yield f"{path} was found damaged and set aside"
