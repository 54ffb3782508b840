"""Taking a run back to a checkpoint: what that means, and doing it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from maestro_hive.cli.checkpoint_files import run_of
from maestro_hive.kernel.errors import DocumentCorruptError
from maestro_hive.maestro.state.run_state import RunState, StepState, fold
from maestro_hive.unified_execution.config import ExecutionConfig, StateConfig
from maestro_hive.unified_execution.state_persistence import StatePersistence

if TYPE_CHECKING:
    from maestro_hive.cli.checkpoint_files import CheckpointFile
    from maestro_hive.maestro.state.sqlite_store import SqliteStore
    from maestro_hive.maestro.state.store import Hold


class Restoring:
    """A run and one of its checkpoints; the run is held meanwhile, so what is said stays true."""

    def __init__(self, store: SqliteStore, checkpoint: CheckpointFile) -> None:
        self._store = store
        self._checkpoint = checkpoint
        self._hold: Hold | None = None
        copy = checkpoint.run_copy(checkpoint.read())
        if copy is None:
            reason = "it is not a copy of a run, and only such can be restored"
            raise DocumentCorruptError(str(checkpoint.path), reason)
        self._then, _ = run_of(copy)

    def __enter__(self) -> Self:
        if self._store.run(self._checkpoint.run) is not None:  # or holding it would create it
            self._hold = self._store.hold_run(self._checkpoint.run)
        return self

    def __exit__(self, *_: object) -> None:
        if self._hold is not None:
            self._store.release_run(self._hold)

    def will_run_again(self) -> list[str]:
        """Return the steps and tasks that are finished now and were not in the checkpoint."""
        if self._hold is None:
            return []
        now = fold(self._store.entries(self._hold.run), self._store.load)
        then = _kept(self._then)
        steps = [step for key, step in _kept(now).items() if key not in then]
        tasks = [task for task in now.completed if task not in self._then.completed]
        return [*(_named(step) for step in steps), *tasks]

    def restore(self) -> None:
        """Do it."""
        state = StateConfig(
            state_dir=str(self._store.folder),
            checkpoint_dir=str(self._checkpoint.path.parent.parent),
        )
        # Without a journal it resumes from its newest copy first: fencing numbers must go on.
        with StatePersistence(ExecutionConfig(state=state), self._checkpoint.run) as persistence:
            persistence.restore(self._checkpoint.id)


def _kept(state: RunState) -> dict[object, StepState]:
    return {
        step.identity or (step.persona, step.name, step.number): step
        for step in state.steps.values()
        if step.kept is not None
    }


def _named(step: StepState) -> str:
    return step.name or f"step {step.number}"
