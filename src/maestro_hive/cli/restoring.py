"""Taking a run back to a checkpoint: what that means, and doing it."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Self

from maestro_hive.cli import run_file
from maestro_hive.cli.checkpoint_files import all_checkpoints, run_of
from maestro_hive.cli.plain_values import plainly
from maestro_hive.engine.copies import FILE
from maestro_hive.kernel import files
from maestro_hive.kernel.errors import DocumentCorruptError, FencedError
from maestro_hive.maestro.state.projections import RunState, StepState, facts_of, fold
from maestro_hive.maestro.state.run_document import CopiedEntries
from maestro_hive.maestro.state.store import Append

if TYPE_CHECKING:
    from maestro_hive.cli.checkpoint_files import CheckpointFile
    from maestro_hive.maestro.state.sqlite.store import SqliteStore
    from maestro_hive.maestro.state.store import RunLease


class Restoring:
    """A run and one of its checkpoints; the run is held meanwhile, so what is said stays true."""

    def __init__(self, store: SqliteStore, checkpoint: CheckpointFile) -> None:
        self._store = store
        self._checkpoint = checkpoint
        self._hold: RunLease | None = None
        copy = checkpoint.run_copy(checkpoint.read())
        if copy is None:
            reason = "it is not a copy of a run, and only such can be restored"
            raise DocumentCorruptError(str(checkpoint.path), reason)
        self._copy = copy
        self._then, shown = run_of(copy)
        self._status = str(shown["status"])

    def __enter__(self) -> Self:
        if self._store.run(self._checkpoint.run) is not None:  # or holding it would create it
            self._hold = self._store.acquire_run(self._checkpoint.run)
        return self

    def __exit__(self, *_: object) -> None:
        if self._hold is not None:
            self._store.release_run(self._hold)

    def will_run_again(self) -> list[str]:
        """Return the steps and tasks that are finished now and were not in the checkpoint."""
        if self._hold is None:
            return []
        now = fold(self._store.entries(self._hold.run), plainly(self._store.load))
        then = _kept(self._then)
        steps = [step for key, step in _kept(now).items() if key not in then]
        tasks = [task for task in now.completed if task not in self._then.completed]
        return [*(_named(step) for step in steps), *tasks]

    def restore(self) -> None:
        """Do it: what the checkpoint has is added to the journal, and a copy is written of that."""
        lost = self._hold is None
        if self._hold is None:
            workflow = (
                facts_of(self._then.started).get("workflow", "") if self._then.started else ""
            )
            self._hold = self._store.acquire_run(self._checkpoint.run, workflow)
        copy = self._copy._replace(fence=self._highest_fence()) if lost else self._copy
        entries = CopiedEntries(copy, journal_lost=lost)
        (written,) = self._store.append([Append(self._hold, entries, self._status)])
        if isinstance(written, FencedError):
            raise written
        write_copy(self._store, self._checkpoint.run)

    def _highest_fence(self) -> int:
        """Return the highest number of any copy: files from now on must still be the newest."""
        run, folder = self._checkpoint.run, self._store.folder
        places = dict.fromkeys([self._checkpoint.path.parent.parent, folder / "checkpoints"])
        fences = [each.name.fence for each in all_checkpoints(places, run)]
        with contextlib.suppress(FileNotFoundError, NotADirectoryError, DocumentCorruptError):
            path = folder / "runs" / run / FILE
            fences.append(run_file.read(files.read_whole(path), str(path)).fence)
        return max(fences)


def write_copy(store: SqliteStore, run: str) -> None:
    """Write the ``execution_state.json`` of a run that is held; nobody needs to know its classes."""
    record = store.run(run)
    if record is not None:
        folder = files.make_folder_inside(store.folder, "runs", run)
        files.write_atomically(folder / FILE, run_file.write(store, record).text)


def _kept(state: RunState) -> dict[object, StepState]:
    return {
        step.identity or (step.persona, step.name, step.number): step
        for step in state.steps.values()
        if step.completed is not None
    }


def _named(step: StepState) -> str:
    return step.name or f"step {step.number}"
