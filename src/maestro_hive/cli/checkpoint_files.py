"""The checkpoints of a state folder, found and read without changing anything."""

from __future__ import annotations

import contextlib
import heapq
import re
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from maestro_hive.cli.plain_values import plainly
from maestro_hive.kernel import files
from maestro_hive.kernel.errors import (
    CorruptionError,
    DocumentCorruptError,
    NewerFormatError,
    StorageError,
)
from maestro_hive.maestro.state import run_document as documents
from maestro_hive.maestro.state.checkpoint import (
    KIND,
    CheckpointError,
    CheckpointFolder,
    CheckpointName,
    CheckpointNotFoundError,
)
from maestro_hive.maestro.state.projections import RunState
from maestro_hive.maestro.state.records import Entry
from maestro_hive.maestro.state.run_document import CopiedEntries, RunCopy, read_run
from maestro_hive.maestro.state.views import show_run

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

#: Members are written in the order of their names, so this one stands near the beginning.
_CREATED_AT = re.compile(rb'"created_at":"([^"]{10,40})"')
_HEAD_BYTES = 600


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFile:
    """One checkpoint: which run's, what its name says, and where it is."""

    run: str
    name: CheckpointName
    path: Path

    @property
    def id(self) -> str:
        """What it is called."""
        return self.name.checkpoint_id

    def size(self) -> int | None:
        """Return its bytes; None if it is gone."""
        with contextlib.suppress(OSError):
            return self.path.stat().st_size
        return None

    def created_at(self) -> datetime | None:
        """Return when it was made, as its first bytes say; None if they do not."""
        with contextlib.suppress(OSError, ValueError), self.path.open("rb") as file:
            found = _CREATED_AT.search(file.read(_HEAD_BYTES))
            return datetime.fromisoformat(found[1].decode()) if found else None
        return None

    def facts(self) -> dict[str, Any]:
        """Return what is known without reading it, with the keys of ``--json``."""
        return {
            "run": self.run,
            "id": self.id,
            "created_at": self.created_at(),
            "version": self.name.version,
            "fence": self.name.fence,
            "bytes": self.size(),
            "path": self.path,
        }

    def read(self) -> dict[str, Any]:
        """Return its members, checked; ``DocumentCorruptError`` says what is wrong with it."""
        try:
            body = documents.unseal(files.read_whole(self.path), KIND, str(self.path))
        except FileNotFoundError as error:
            raise CheckpointNotFoundError(f"checkpoint {self.id!r} is gone") from error
        if (body.get("checkpoint_id"), body.get("workflow_id")) != (self.id, self.run):
            raise DocumentCorruptError(str(self.path), "it is the file of another checkpoint")
        return body

    def damage(self) -> str | None:
        """Read all of it and say why it cannot be trusted; None if it can."""
        try:
            self.run_copy(self.read())
        except (CorruptionError, StorageError, NewerFormatError, CheckpointError) as error:
            return str(error)
        return None

    def run_copy(self, body: dict[str, Any]) -> RunCopy | None:
        """Return it as a copy of its run; None for one that somebody made of other data."""
        state = body.get("state")
        if not isinstance(state, dict):
            raise DocumentCorruptError(str(self.path), "it holds no state")
        if "entries" not in state:
            return None
        return read_run(str(self.path), state, plainly(_in_the_entry))


def all_checkpoints(folders: Iterable[Path], run: str | None = None) -> Iterator[CheckpointFile]:
    """Yield the checkpoints of all runs, or of one, newest first within each."""
    places = [CheckpointFolder(root) for root in folders]
    runs = {name for place in places for name in place.workflows()} if run is None else {run}
    for workflow in sorted(runs):
        # Each folder counts its versions by itself: across folders only fence and time tell.
        yield from heapq.merge(
            *(_newest_first(place, workflow) for place in places), key=_age, reverse=True
        )


def _newest_first(place: CheckpointFolder, run: str) -> list[CheckpointFile]:
    return [
        CheckpointFile(run=run, name=name, path=place.path(run, name))
        for name in reversed(place.names(run))
    ]


def _age(checkpoint: CheckpointFile) -> tuple[int, datetime, int]:
    made = checkpoint.created_at() or datetime.min.replace(tzinfo=UTC)
    return checkpoint.name.fence, made, checkpoint.name.version


def find(folders: Iterable[Path], checkpoint_id: str, run: str | None = None) -> CheckpointFile:
    """Return the checkpoint of that id; an error names the runs that have one, or what there is."""
    files.check_identifier(checkpoint_id, "checkpoint id")
    there = list(all_checkpoints(folders, run))
    found = [each for each in there if each.id == checkpoint_id]
    runs = sorted({each.run for each in found})
    if not found:
        of = f" of run {run!r}" if run else ""
        known = ", ".join(each.id for each in there[:5]) or "none"
        raise CheckpointNotFoundError(
            f"there is no checkpoint {checkpoint_id!r}{of}; there is: {known}"
        )
    if len(runs) > 1:
        raise CheckpointNotFoundError(
            f"{len(runs)} runs have a checkpoint {checkpoint_id!r}: {', '.join(runs[:5])}; say which"
            " with --run"
        )
    return found[0]


def run_of(copy: RunCopy) -> tuple[RunState, dict[str, Any]]:
    """Return what a copy's entries add up to, and the run as people see it."""
    state, load = RunState(), plainly(_in_the_entry)
    for seq, new in enumerate(CopiedEntries(copy), start=1):
        data, sha256 = new.value or (None, None)
        rest = (new.step, new.attempt, new.at or 0, new.facts, data, None, sha256, new.identity)
        state.add(Entry(seq, new.kind, *rest), load)
    return state, show_run(state, copy.body["workflow_id"], load)


def _in_the_entry(entry: Entry) -> bytes | None:
    return entry.value
