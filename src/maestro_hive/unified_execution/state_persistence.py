"""An execution's state that survives its process: a view of the journal, with JSON copies beside.

Every change is one entry in the journal, durable when the method returns, and costs the same for
the ten-thousandth task as for the first. ``checkpoint`` writes the whole run down as JSON; when
the journal is gone, the newest of those is resumed from.
"""

from __future__ import annotations

import copy
import logging
import secrets
from typing import TYPE_CHECKING, Any, Self

from maestro_hive.engine.config import (
    DEFAULT_CHECKPOINT_DIR,
    DEFAULT_STATE_DIR,
    ExecutionConfig,
    get_execution_config,
)
from maestro_hive.engine.copies import RunCopies
from maestro_hive.engine.open_run import OpenRun, Restored, open_run
from maestro_hive.kernel.errors import (
    ConfigurationError,
    DocumentCorruptError,
    MaestroError,
    StorageError,
)
from maestro_hive.kernel.process import PerProcess, run_at_exit
from maestro_hive.maestro.state import codec
from maestro_hive.maestro.state.checkpoint import (
    CheckpointNotFoundError,
    new_checkpoint_id,
)
from maestro_hive.maestro.state.projections import FIELDS, fold
from maestro_hive.maestro.state.records import EntryKind, NewEntry, from_micros
from maestro_hive.maestro.state.stores import close_store, open_store
from maestro_hive.maestro.state.views import (
    retry_count,
    show_fields,
    show_persona,
    without_derived_fields,
)
from maestro_hive.unified_execution.execution_state import (
    ExecutionState,
    SharedState,
    StateCorruptionError,
    check_fields,
)

if TYPE_CHECKING:
    from pathlib import Path

__all__ = [
    "DEFAULT_CHECKPOINT_PATH",
    "DEFAULT_STATE_PATH",
    "ExecutionState",
    "Restored",
    "StateCorruptionError",
    "StatePersistence",
    "get_state_persistence",
    "load_state",
    "save_state",
]

logger = logging.getLogger(__name__)

DEFAULT_STATE_PATH = DEFAULT_STATE_DIR
DEFAULT_CHECKPOINT_PATH = DEFAULT_CHECKPOINT_DIR


class StatePersistence:
    """One execution's state, durable when each method returns. Thread-safe; a context manager.

    A process holds a run: while it does, no other may write to it (``RunLeasedError`` names the
    holder). With ``auto_restore=False`` the execution starts afresh, unless ``restore`` or
    ``restore_latest`` is called before the first change. ``workflow`` is what listings say that a
    new run belongs to.
    """

    def __init__(
        self,
        config: ExecutionConfig | None = None,
        workflow_id: str | None = None,
        auto_restore: bool = True,
        *,
        workflow: str = "",
    ) -> None:
        self.config = (config or get_execution_config()).frozen()
        self.workflow_id = f"wf_{secrets.token_hex(8)}" if workflow_id is None else workflow_id
        self._is_shut = False
        self._run = open_run(self.config.state, self.workflow_id, workflow)
        self._mutex = self._run.mutex
        self._shared = SharedState(self.workflow_id)
        try:
            if auto_restore:
                self._run.load()
            else:
                self._run.start_fresh()
        except BaseException:
            self._run.close()
            raise
        _open_states().add(self)

    # --- what there is ---

    @property
    def run(self) -> OpenRun:
        """The run behind it, for those who execute its steps."""
        return self._run

    @property
    def restored(self) -> Restored | None:
        """Where the run was resumed from when it was not the journal."""
        return self._run.restored

    @property
    def state(self) -> ExecutionState:
        """The state as it is. What you change in it is recorded at the next checkpoint."""
        with self._mutex:
            self._record_edits()
            self._run.catch_up()
            return self._shared.refreshed(self._run)

    def _record_edits(self) -> None:
        self._shared.record_edits(self._current_fields, self._set_fields)

    def _current_fields(self) -> dict[str, Any]:
        self._run.catch_up()
        return self._run.fields()

    def get_state_path(self) -> Path:
        """Return where the run's ``execution_state.json`` is, or will be."""
        path = self._run.copies.path
        if path is None:
            raise ConfigurationError("with enable_persistence=False there is no state file")
        return path

    def get_retry_count(self, persona: str) -> int:
        """Return how often a persona was tried again."""
        with self._mutex:
            self._run.catch_up()
            return retry_count(self._run.state, persona)

    def get_persona_state(self, persona: str) -> dict[str, Any]:
        """Return a copy of what is known of a persona; empty if nothing is."""
        with self._mutex:
            self._run.catch_up()
            return copy.deepcopy(show_persona(self._run.state, persona, self._run.store.load))

    # --- changes ---

    def update_state(
        self,
        phase: str | None = None,
        step: int | None = None,
        status: str | None = None,
        **fields: Any,
    ) -> None:
        """Set fields of the state."""
        unknown = sorted(fields.keys() - FIELDS.keys())
        if unknown:
            raise TypeError(f"an ExecutionState has no field {', '.join(unknown)} to update")
        given = {"phase": phase, "step": step, "status": status}
        changes = {name: value for name, value in given.items() if value is not None} | fields
        if changes:
            self._set_fields(changes)

    def mark_task_pending(self, task_id: str) -> None:
        """Note that a task waits to be done."""
        facts = {"task": _text(task_id, "task id")}
        with self._mutex:
            self._run.catch_up()
            known = self._run.state
            if task_id not in known.pending_tasks and task_id not in known.completed_tasks:
                self._record(EntryKind.TASK_PENDING, facts)

    def mark_task_completed(self, task_id: str, artifacts: dict[str, Any] | None = None) -> None:
        """Note that a task is done, and what it made."""
        facts = {"task": _text(task_id, "task id")}
        if artifacts is not None:
            check_fields({"artifacts": artifacts})
        self._record(EntryKind.TASK_COMPLETED, facts, artifacts or None, "artifacts")

    def increment_retry(self, persona: str) -> int:
        """Count one more retry of a persona; return how many there were."""
        with self._mutex:
            self._record(EntryKind.RETRY_COUNTED, {"persona": _text(persona, "persona")})
            return self.get_retry_count(persona)

    def update_persona_state(self, persona: str, state: dict[str, Any]) -> None:
        """Set what a persona shows of itself; keys that are not given stay as they are."""
        facts = {"persona": _text(persona, "persona")}
        given: Any = state
        shown = dict(given) if isinstance(given, dict) else given  # a defaultdict is welcome
        check_fields({"persona_states": {persona: shown}})
        self._record(EntryKind.PERSONA_SET, facts, shown, "persona_state")

    def _set_fields(self, changes: dict[str, Any]) -> None:
        check_fields(changes)
        with self._mutex:
            self._run.catch_up()
            own = without_derived_fields(self._run.state, changes)
            self._record(EntryKind.FIELDS_SET, None, own, "state")

    def _record(
        self,
        kind: EntryKind,
        facts: dict[str, Any] | None,
        value: dict[str, Any] | None = None,
        path: str = "value",
    ) -> None:
        entry = NewEntry(
            kind,
            facts=codec.dump_canonical(facts) if facts else None,
            value=None if value is None else codec.encode(value, path),
            family=path,
        )
        with self._mutex:
            self._check_open()
            self._run.append([entry], status=(value or {}).get("status") if facts is None else None)
            self._run.copy_if_due()

    # --- copies ---

    def checkpoint(self, checkpoint_id: str | None = None) -> str:
        """Write the whole run as a checkpoint and as ``execution_state.json``; return its id."""
        with self._mutex:
            self._check_open()
            self._record_edits()
            if self._run.fresh:
                self._run.append(())
            clock = self._run.store.clock
            name = new_checkpoint_id(clock) if checkpoint_id is None else checkpoint_id
            document = self._run.as_document()
            checkpoints = self._run.copies.checkpoints
            checkpoints.write(self.workflow_id, name, document, fence=self._run.fence)
            self._run.write_copy(document)
            return name

    def restore(self, checkpoint_id: str) -> bool:
        """Go back to a checkpoint; False if there is none of that id."""
        with self._mutex:
            self._check_open()
            try:
                found = self._run.copies.checkpoint(checkpoint_id)
            except CheckpointNotFoundError:
                return False
            except DocumentCorruptError as error:
                raise StateCorruptionError(str(error)) from error
            self._shared.forget()
            self._run.restore(found)
            return True

    def restore_latest(self) -> bool:
        """Resume from the journal, or without one from the newest good copy; False if neither."""
        with self._mutex:
            self._check_open()
            self._shared.outdate()
            return self._run.load()

    def list_checkpoints(self) -> list[str]:
        """Return the ids of this run's checkpoints, newest first."""
        return self._run.copies.checkpoints.checkpoint_ids(self.workflow_id)

    # --- the end ---

    def _check_open(self) -> None:
        if self._is_shut:
            raise StorageError(f"run {self.workflow_id!r} was shut down; open it again to go on")

    def shutdown(self) -> None:
        """Write the copy for resuming once more and let the run go; twice is no error."""
        with self._mutex:
            if self._is_shut:
                return
            try:
                self._record_edits()
                if self._run.state.seq:
                    self._run.write_copy()
            finally:
                self._is_shut = True
                _open_states().discard(self)
                self._run.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()


#: Not weakly: one that was never shut down still has its run, and its copy is written at the end.
_open_states: PerProcess[set[StatePersistence]] = PerProcess(set)


def _shut_down_all() -> None:
    """Write the copies of runs that were never shut down, while the journal is still open."""
    for state in list(_open_states()):
        try:
            state.shutdown()
        except (MaestroError, TypeError) as error:  # a TypeError: an edit that cannot be recorded
            logger.error("run %s: %s", state.workflow_id, error)  # noqa: TRY400 - one sentence


run_at_exit(0, _shut_down_all)


def get_state_persistence(
    workflow_id: str | None = None,
    auto_restore: bool = True,
) -> StatePersistence:
    """Open an execution's state with the shared configuration."""
    return StatePersistence(workflow_id=workflow_id, auto_restore=auto_restore)


def save_state(
    state: ExecutionState | dict[str, Any],
    workflow_id: str | None = None,
    checkpoint: bool = True,
) -> str:
    """Record a whole state under its workflow id; return the checkpoint's id, or the workflow's."""
    given = ExecutionState.from_dict(state) if isinstance(state, dict) else state
    name = given.workflow_id if workflow_id is None else workflow_id
    with StatePersistence(workflow_id=name) as persistence:
        persistence.update_state(**{field: getattr(given, field) for field in FIELDS})
        return persistence.checkpoint() if checkpoint else name


def load_state(workflow_id: str) -> ExecutionState | None:
    """Return a state as it was last recorded, without taking the run; None if there is none."""
    config = get_execution_config().state
    folders = config.resolve()
    if not folders.persistent:
        return None
    store = open_store(folders.state)
    try:
        record = store.run(workflow_id)
        entries = store.entries(record.id) if record else []
        if not entries:
            return _state_of_copy(RunCopies(config, workflow_id, store.clock))
        run = fold(entries, store.load)
        return ExecutionState(
            workflow_id,
            **show_fields(run, store.load),
            created_at=from_micros(run.created_at).isoformat(),
            updated_at=from_micros(run.updated_at).isoformat(),
        )
    finally:
        close_store(store)


def _state_of_copy(copies: RunCopies) -> ExecutionState | None:
    found = copies.newest()
    if found is None:
        return None
    return ExecutionState.from_dict(
        codec.decode_tree(found.body["state"], found.source, depth=codec.WHOLE_DEPTH)
    )


def _text(value: object, what: str) -> str:
    if not isinstance(value, str) or not value:
        raise ConfigurationError(f"a {what} is a text that is not empty, not {value!r}")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ConfigurationError(
            f"the {what} {value!r} has half a surrogate pair, which has no form in UTF-8"
        ) from None
    return value
