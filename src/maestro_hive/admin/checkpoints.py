"""Checkpoints of a state folder: listed, shown, verified, compared, and restored."""

from __future__ import annotations

import contextlib
import heapq
import re
from dataclasses import dataclass
from datetime import UTC, datetime
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from maestro_hive.admin.folder import checkpoint_folders, require_folder
from maestro_hive.admin.transfer import append_copy, read_export, write_copy
from maestro_hive.engine.copies import FILE
from maestro_hive.kernel import files
from maestro_hive.kernel.errors import (
    CorruptionError,
    DocumentCorruptError,
    NewerFormatError,
    StorageError,
)
from maestro_hive.maestro.state import run_document
from maestro_hive.maestro.state.checkpoint import (
    KIND,
    CheckpointError,
    CheckpointFolder,
    CheckpointName,
    CheckpointNotFoundError,
)
from maestro_hive.maestro.state.projections import RunState, StepState, facts_of, fold
from maestro_hive.maestro.state.records import Entry
from maestro_hive.maestro.state.run_document import CopiedEntries, RunCopy, read_run
from maestro_hive.maestro.state.views import plain_values, show_run

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from maestro_hive.maestro.state.store import RunLease, Store

#: Members are written in the order of their names, so this one is near the beginning.
_CREATED_AT = re.compile(rb'"created_at":"([^"]{10,40})"')
_HEAD_BYTES = 600


# --- files ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointView:
    """What is known of a checkpoint without reading all of it."""

    run: str
    id: str
    created_at: datetime | None
    version: int
    fence: int
    bytes: int | None
    path: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFile:
    """One checkpoint: its run, what its name says, and where it is."""

    run: str
    name: CheckpointName
    path: Path

    @property
    def id(self) -> str:
        """Its id."""
        return self.name.checkpoint_id

    def created_at(self) -> datetime | None:
        """Return when it was made, as its first bytes say; None if they do not."""
        with contextlib.suppress(OSError, ValueError), self.path.open("rb") as file:
            found = _CREATED_AT.search(file.read(_HEAD_BYTES))
            return datetime.fromisoformat(found[1].decode()) if found else None
        return None

    def view(self) -> CheckpointView:
        """Return what is known of it without reading all of it."""
        size = None
        with contextlib.suppress(OSError):
            size = self.path.stat().st_size
        return CheckpointView(
            run=self.run,
            id=self.id,
            created_at=self.created_at(),
            version=self.name.version,
            fence=self.name.fence,
            bytes=size,
            path=self.path,
        )

    def read(self) -> dict[str, Any]:
        """Return its members, checked; ``DocumentCorruptError`` says what is wrong with it."""
        try:
            body = run_document.unseal(files.read_whole(self.path), KIND, str(self.path))
        except FileNotFoundError as error:
            raise CheckpointNotFoundError(f"checkpoint {self.id!r} is gone") from error
        if (body.get("checkpoint_id"), body.get("workflow_id")) != (self.id, self.run):
            raise DocumentCorruptError(str(self.path), "it is the file of another checkpoint")
        return body

    def damage(self) -> str | None:
        """Read all of it and return why it cannot be trusted; None if it can."""
        try:
            self.run_copy(self.read())
        except (CorruptionError, StorageError, NewerFormatError, CheckpointError) as error:
            return str(error)
        return None

    def run_copy(self, body: dict[str, Any]) -> RunCopy | None:
        """Return it as a copy of its run; None for one that was made of other data."""
        state = body.get("state")
        if not isinstance(state, dict):
            raise DocumentCorruptError(str(self.path), "it holds no state")
        if "entries" not in state:
            return None
        return read_run(str(self.path), state, plain_values(attrgetter("value")))

    def contents(self) -> dict[str, Any]:
        """Return what it holds: a run with its steps, or the data that was put in."""
        body = self.read()
        copy = self.run_copy(body)
        return _run_in(copy)[1] if copy else dict(body["state"])


def _run_in(copy: RunCopy) -> tuple[RunState, dict[str, Any]]:
    """Return the folded state of a copy, and the run as it is shown."""
    state, load = RunState(), plain_values(attrgetter("value"))
    for seq, new in enumerate(CopiedEntries(copy), start=1):
        data, sha256 = new.value or (None, None)
        rest = (new.step, new.attempt, new.at or 0, new.facts, data, None, sha256, new.identity)
        state.add(Entry(seq, new.kind, *rest), load)
    return state, show_run(state, copy.body["workflow_id"], load)


def list_checkpoints(folder: Path, run: str | None = None) -> list[CheckpointFile]:
    """Return the checkpoints of all runs, or of one, newest first within each."""
    require_folder(folder)
    return list(_all_checkpoints(checkpoint_folders(folder), run))


def _all_checkpoints(folders: Iterable[Path], run: str | None = None) -> Iterator[CheckpointFile]:
    places = [CheckpointFolder(root) for root in folders]
    runs = {name for place in places for name in place.workflows()} if run is None else {run}
    for workflow in sorted(runs):
        # Each folder counts its versions by itself: across folders only fence and time compare.
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


def find_checkpoint(folder: Path, checkpoint_id: str, run: str | None = None) -> CheckpointFile:
    """Return the checkpoint of that id; an error names the runs that have one, or known ids."""
    files.check_identifier(checkpoint_id, "checkpoint id")
    there = list_checkpoints(folder, run)
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
            f"{len(runs)} runs have a checkpoint {checkpoint_id!r}: {', '.join(runs[:5])}; choose"
            " one with --run"
        )
    return found[0]


def expired_checkpoints(folder: Path, now: float, keep: int | None) -> list[CheckpointFile]:
    """Return the checkpoints that have expired, and those of each run beyond the newest ``keep``."""
    counts, expired = dict[str, int](), []
    for each in _all_checkpoints(checkpoint_folders(folder)):
        if each.name.expired(now) or (keep is not None and counts.get(each.run, 0) >= keep):
            expired.append(each)
        else:
            counts[each.run] = counts.get(each.run, 0) + 1
    return expired


# --- comparing ------------------------------------------------------------------------------------

#: Fields that always differ, or are compared as steps and memories.
_NOT_COMPARED = {"created_at", "updated_at", "workflow_id", "steps", "persona_states"}
_COMPARED_OF_STEPS = ("status", "attempts", "tokens", "output")
_ABSENT = object()


class Difference(NamedTuple):
    """One thing that was added, removed or changed: where, what it was, and what it is."""

    part: str
    name: str
    change: str
    before: Any = None
    after: Any = None


def diff_checkpoints(
    folder: Path, first: str, second: str, run: str | None = None
) -> list[Difference]:
    """Return the differences between two checkpoints: fields, steps and memories."""
    before, after = (find_checkpoint(folder, each, run).contents() for each in (first, second))
    return [
        *_compared("field", _fields(before), _fields(after)),
        *_compared("step", _steps(before), _steps(after)),
        *_compared("memory", _memories(before), _memories(after)),
    ]


def _compared(part: str, before: dict[str, Any], after: dict[str, Any]) -> list[Difference]:
    found = []
    for name in dict.fromkeys([*before, *after]):
        old, new = before.get(name, _ABSENT), after.get(name, _ABSENT)
        if old is _ABSENT:
            found.append(Difference(part, name, "added", after=new))
        elif new is _ABSENT:
            found.append(Difference(part, name, "removed", before=old))
        elif old != new:
            found.append(Difference(part, name, "changed", old, new))
    return found


def _fields(run: dict[str, Any]) -> dict[str, Any]:
    """Return fields by name; those that are objects by the names inside them, one level deep."""
    fields: dict[str, Any] = {}
    for name, value in run.items():
        if name in _NOT_COMPARED:
            continue
        if isinstance(value, dict):
            fields |= {f"{name}.{key}": inner for key, inner in value.items()}
        else:
            fields[name] = value
    for persona, shown in run.get("persona_states", {}).items():
        own = {key: value for key, value in shown.items() if key not in {"memory", "last_updated"}}
        fields |= {f"persona_states.{persona}.{key}": value for key, value in own.items()}
    return fields


def _steps(run: dict[str, Any]) -> dict[str, Any]:
    """Return steps by persona and name; equal ones are numbered in their order."""
    steps: dict[str, Any] = {}
    for step in run.get("steps", []):
        name = f"{step.get('persona') or '-'}/{step.get('name') or step['step']}"
        same = sum(1 for known in steps if known == name or known.startswith(f"{name}#"))
        facts = {key: step.get(key) for key in _COMPARED_OF_STEPS}
        steps[f"{name}#{same + 1}" if same else name] = facts
    return steps


def _memories(run: dict[str, Any]) -> dict[str, Any]:
    return {
        f"{persona}.{key}": value
        for persona, shown in run.get("persona_states", {}).items()
        for key, value in (shown.get("memory") or {}).items()
    }


# --- restoring ------------------------------------------------------------------------------------


class Restore:
    """A run and one of its checkpoints; the run is leased meanwhile, so nothing changes in it."""

    def __init__(self, store: Store, folder: Path, checkpoint: CheckpointFile) -> None:
        self._store = store
        self._folder = folder
        self._checkpoint = checkpoint
        self._run: RunLease | None = None
        copy = checkpoint.run_copy(checkpoint.read())
        if copy is None:
            reason = "it is not a copy of a run, and only such can be restored"
            raise DocumentCorruptError(str(checkpoint.path), reason)
        self._copy = copy
        self._then, shown = _run_in(copy)
        self._status = str(shown["status"])

    def __enter__(self) -> Self:
        if self._store.run(self._checkpoint.run) is not None:  # acquiring it would create it
            self._run = self._store.acquire_run(self._checkpoint.run)
        return self

    def __exit__(self, *_: object) -> None:
        if self._run is not None:
            self._store.release_run(self._run)

    def will_run_again(self) -> list[str]:
        """Return the steps and tasks that are completed now and were not in the checkpoint."""
        if self._run is None:
            return []
        now = fold(self._store.entries(self._run.run), plain_values(self._store.load))
        then = _completed(self._then)
        steps = [step for key, step in _completed(now).items() if key not in then]
        tasks = [task for task in now.completed_tasks if task not in self._then.completed_tasks]
        return [*(step.name or f"step {step.number}" for step in steps), *tasks]

    def restore(self) -> None:
        """Append the checkpoint's entries to the journal, and write the run's JSON copy."""
        lost = self._run is None
        if self._run is None:
            started = self._then.started
            workflow = str(facts_of(started).get("workflow", "")) if started else ""
            self._run = self._store.acquire_run(self._checkpoint.run, workflow)
        copy = self._copy._replace(fence=self._highest_fence()) if lost else self._copy
        append_copy(self._store, self._run, copy, status=self._status, journal_lost=lost)
        write_copy(self._store, self._folder, self._checkpoint.run)

    def _highest_fence(self) -> int:
        """Return the highest fencing number of any copy: files from now on must be the newest."""
        run, folder = self._checkpoint.run, self._folder
        places = dict.fromkeys([self._checkpoint.path.parent.parent, folder / "checkpoints"])
        fences = [each.name.fence for each in _all_checkpoints(places, run)]
        with contextlib.suppress(FileNotFoundError, NotADirectoryError, DocumentCorruptError):
            path = folder / "runs" / run / FILE
            fences.append(read_export(files.read_whole(path), str(path)).fence)
        return max(fences)


def _completed(state: RunState) -> dict[object, StepState]:
    return {
        step.identity or (step.persona, step.name, step.number): step
        for step in state.steps.values()
        if step.completed is not None
    }
