"""Checkpoints of a state folder: listed, shown, verified, compared, and restored."""

from __future__ import annotations

import contextlib
import heapq
import re
import time
from collections import Counter
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, NamedTuple, Self

from maestro_hive.admin.folder import checkpoint_folders, require_folder
from maestro_hive.admin.transfer import read_export, write_copy
from maestro_hive.engine.copies import FILE
from maestro_hive.engine.open_run import append_entries
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
from maestro_hive.maestro.state.projections import RunState, StepState, fold
from maestro_hive.maestro.state.run_document import CopiedEntries, RunCopy, fold_copy, read_run
from maestro_hive.maestro.state.views import plain_values, show_run

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from maestro_hive.maestro.state.store import RunLease, Store
    from maestro_hive.maestro.state.strict_json import Json

#: Members are written in the order of their names, so this one is near the beginning.
_CREATED_AT = re.compile(rb'"created_at":"([^"]{10,40})"')
_HEAD_BYTES = 600


# --- files ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFile:
    """One checkpoint: what its name, its size and its first bytes say.

    ``expires`` is in seconds since 1970; None for one that does not expire.
    """

    run: str
    id: str
    created_at: datetime | None
    expires: int | None
    version: int
    fence: int
    bytes: int | None
    path: Path

    def read(self) -> dict[str, Json]:
        """Return its members, checked; ``DocumentCorruptError`` says what is wrong with it."""
        try:
            file = files.open_file(self.path, run_document.MAX_DOCUMENT_BYTES)
            body = run_document.unseal(file, KIND, str(self.path), lazy=True)
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

    def run_copy(self, body: dict[str, Json]) -> RunCopy | None:
        """Return it as a copy of its run; None for one that was made of other data."""
        state = body.get("state")
        if not isinstance(state, dict):
            raise DocumentCorruptError(str(self.path), "it holds no state")
        if "entries" not in state:
            return None
        return read_run(str(self.path), state, plain=True)

    def contents(self) -> dict[str, Json]:
        """Return what it holds: a run with its steps, or the data that was put in."""
        body = self.read()
        copy = self.run_copy(body)
        return _run_in(copy)[1] if copy else dict(body["state"])


def _run_in(copy: RunCopy) -> tuple[RunState, dict[str, Json]]:
    """Return the folded state of a copy, and the run as it is shown."""
    load = plain_values(copy.load)
    state = fold_copy(copy, load)
    return state, show_run(state, copy.run_id, load)


def list_checkpoints(folder: Path, run: str | None = None) -> list[CheckpointFile]:
    """Return the checkpoints of all runs, or of one, newest first within each."""
    require_folder(folder)
    return list(_all_checkpoints(checkpoint_folders(folder), run))


def _all_checkpoints(folders: Iterable[Path], run: str | None = None) -> Iterator[CheckpointFile]:
    places = [CheckpointFolder(root) for root in folders]
    runs = {name for place in places for name in place.workflows()} if run is None else {run}
    for workflow in sorted(runs):
        newest_first = (
            [
                _checkpoint(workflow, name, place.path(workflow, name))
                for name in reversed(place.names(workflow))
            ]
            for place in places
        )
        # Each folder counts its versions by itself: across folders only fence and time compare.
        yield from heapq.merge(*newest_first, key=_age, reverse=True)


def _checkpoint(run: str, name: CheckpointName, path: Path) -> CheckpointFile:
    made, size = None, None
    with contextlib.suppress(OSError, ValueError):
        size = path.stat().st_size
        with path.open("rb") as file:
            found = _CREATED_AT.search(file.read(_HEAD_BYTES))
        made = datetime.fromisoformat(found[1].decode()) if found else None
    return CheckpointFile(
        run=run,
        id=name.checkpoint_id,
        created_at=made,
        expires=name.expires,
        version=name.version,
        fence=name.fence,
        bytes=size,
        path=path,
    )


def _age(checkpoint: CheckpointFile) -> tuple[int, datetime, int]:
    made = checkpoint.created_at or datetime.min.replace(tzinfo=UTC)
    return checkpoint.fence, made, checkpoint.version


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


def expired_checkpoints(folder: Path, keep: int | None) -> list[CheckpointFile]:
    """Return the checkpoints that have expired, and those of each run beyond the newest ``keep``."""
    counts, expired, now = Counter[str](), [], time.time()
    for each in _all_checkpoints(checkpoint_folders(folder)):
        is_over = each.expires is not None and each.expires <= now
        if is_over or (keep is not None and counts[each.run] >= keep):
            expired.append(each)
        else:
            counts[each.run] += 1
    return expired


# --- comparing ------------------------------------------------------------------------------------

#: Fields that always differ, or are compared as steps and memories.
_NOT_COMPARED = {"created_at", "updated_at", "workflow_id", "steps", "persona_states"}
_COMPARED_OF_STEPS = ("status", "attempts", "tokens", "output")


class Difference(NamedTuple):
    """One thing that was added, removed or changed: where, what it was, and what it is."""

    part: str
    name: str
    change: str
    before: Json = None
    after: Json = None


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


def _compared(part: str, before: dict[str, Json], after: dict[str, Json]) -> Iterator[Difference]:
    for name in dict.fromkeys([*before, *after]):
        if name not in before:
            yield Difference(part, name, "added", after=after[name])
        elif name not in after:
            yield Difference(part, name, "removed", before=before[name])
        elif before[name] != after[name]:
            yield Difference(part, name, "changed", before[name], after[name])


def _fields(run: dict[str, Json]) -> dict[str, Json]:
    """Return fields by name; those that are objects by the names inside them, one level deep."""
    fields: dict[str, Json] = {}
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


def _steps(run: dict[str, Json]) -> dict[str, Json]:
    """Return steps by persona and name; equal ones are numbered in their order."""
    steps: dict[str, Json] = {}
    for step in run.get("steps", []):
        name = f"{step.get('persona') or '-'}/{step.get('name') or step['step']}"
        same = sum(1 for known in steps if known == name or known.startswith(f"{name}#"))
        facts = {key: step.get(key) for key in _COMPARED_OF_STEPS}
        steps[f"{name}#{same + 1}" if same else name] = facts
    return steps


def _memories(run: dict[str, Json]) -> dict[str, Json]:
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
        self._then, _ = _run_in(copy)

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
        if self._run is None:
            copy = self._copy._replace(fence=self._highest_fence())
            entries = CopiedEntries(copy, journal_lost=True)
            name = self._checkpoint.run
            self._run = self._store.acquire_run(
                name, copy.workflow, entries, copy.status, parent=copy.parent
            )
            append_entries(self._store, self._run, ())  # acquiring alone is not durable
        else:
            append_entries(self._store, self._run, CopiedEntries(self._copy), self._copy.status)
        write_copy(self._store, self._folder, self._checkpoint.run)

    def _highest_fence(self) -> int:
        """Return the highest fencing number of any copy: files from now on must be the newest."""
        run, folder = self._checkpoint.run, self._folder
        places = dict.fromkeys([self._checkpoint.path.parent.parent, folder / "checkpoints"])
        fences = [each.fence for each in _all_checkpoints(places, run)]
        with contextlib.suppress(FileNotFoundError, NotADirectoryError, DocumentCorruptError):
            path = folder / "runs" / run / FILE
            file = files.open_file(path, run_document.MAX_DOCUMENT_BYTES)
            fences.append(read_export(file, str(path)).fence)
        return max(fences)


def _completed(state: RunState) -> dict[object, StepState]:
    return {
        step.identity or (step.persona, step.name, step.number): step
        for step in state.steps.values()
        if step.completed is not None
    }
