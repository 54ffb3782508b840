"""An execution's state that survives its process: a view of the journal, with JSON copies beside.

Every change is one entry in the journal, durable when the method returns, and costs the same for
the ten-thousandth task as for the first. ``checkpoint`` writes the whole run down as JSON; when
the journal is gone, the newest of those is resumed from.
"""

from __future__ import annotations

import copy
import secrets
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Self, get_args, get_origin, get_type_hints

from maestro_hive.engine.config import ExecutionConfig, frozen_config, get_execution_config
from maestro_hive.engine.copies import RunCopies
from maestro_hive.engine.open_run import OpenRun, Restored, open_run
from maestro_hive.engine.shared import release, retain, retained
from maestro_hive.kernel.errors import (
    ConfigurationError,
    CorruptionError,
    DocumentCorruptError,
    MaestroError,
    StorageError,
)
from maestro_hive.kernel.logs import get_logger
from maestro_hive.kernel.process import run_at_exit
from maestro_hive.maestro.state import codec
from maestro_hive.maestro.state.checkpoint import CheckpointNotFoundError, new_checkpoint_id
from maestro_hive.maestro.state.projections import FIELDS, fold
from maestro_hive.maestro.state.records import EntryKind, NewEntry, from_micros
from maestro_hive.maestro.state.run_document import fold_copy
from maestro_hive.maestro.state.state_manager import check_text
from maestro_hive.maestro.state.stores import (
    DEFAULT_CHECKPOINT_DIR,
    DEFAULT_STATE_DIR,
    close_store,
    open_store,
)
from maestro_hive.maestro.state.strict_json import member
from maestro_hive.maestro.state.views import (
    retry_count,
    show_fields,
    show_persona,
    without_derived_fields,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from pathlib import Path

    from maestro_hive.maestro.state.projections import RunState
    from maestro_hive.maestro.state.records import Entry


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

logger = get_logger(__name__)

DEFAULT_STATE_PATH = DEFAULT_STATE_DIR
DEFAULT_CHECKPOINT_PATH = DEFAULT_CHECKPOINT_DIR


class StateCorruptionError(CorruptionError):
    """A state is not valid: a field is missing or wrong, or its checksum does not match."""


def _now() -> str:
    return datetime.now(UTC).isoformat()


@dataclass
class ExecutionState:
    """The state of an execution; times are ISO texts.

    ``checksum`` is a SHA-256 over all other fields: ``to_dict`` sets it, and ``from_dict`` checks it
    if there is one.
    """

    workflow_id: str
    phase: str = "initializing"
    step: int = 0
    status: str = "pending"
    persona_states: dict[str, dict[str, Any]] = field(default_factory=dict)
    retry_counts: dict[str, int] = field(default_factory=dict)
    completed_tasks: list[str] = field(default_factory=list)
    pending_tasks: list[str] = field(default_factory=list)
    artifacts: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, Any] = field(default_factory=dict)
    created_at: str = field(default_factory=_now)
    updated_at: str = field(default_factory=_now)
    checksum: str = ""

    def update(self, **changes: object) -> None:
        """Set fields by name, and the time of the change."""
        for name, value in changes.items():
            if name not in _FIELDS:
                raise TypeError(f"an ExecutionState has no field {name!r}")
            setattr(self, name, value)
        self.updated_at = _now()

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as a dictionary, copied, with a new checksum."""
        fields = {name: copy.deepcopy(getattr(self, name)) for name in _FIELDS}
        fields["checksum"] = _checksum(fields)
        return fields

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Self:
        """Return the state that these fields describe, or raise ``StateCorruptionError``."""
        if not isinstance(data, dict):
            raise StateCorruptionError(f"a state is an object, not a {type(data).__name__}")
        unknown = sorted(map(str, data.keys() - _FIELDS.keys()))
        if unknown:
            raise StateCorruptionError(f"a state has no field {', '.join(unknown)}")
        if "workflow_id" not in data:
            raise StateCorruptionError("a state must have the field workflow_id")
        try:
            check_fields(data)
        except TypeError as error:
            raise StateCorruptionError(str(error)) from None
        if data.get("checksum") and data["checksum"] != _checksum(data):
            raise StateCorruptionError(
                f"the state of {data['workflow_id']!r} does not match its checksum"
            )
        return cls(**data)


def _types_in(hint: object) -> tuple[type, ...]:
    """Return the type of a field and that of what is in it, where it has one."""
    kinds = (get_origin(hint) or hint, *get_args(hint)[-1:])
    return tuple(object if kind is Any else get_origin(kind) or kind for kind in kinds)


_FIELDS = {name: _types_in(hint) for name, hint in get_type_hints(ExecutionState).items()}


def check_fields(fields: Mapping[str, object]) -> None:
    """Raise a ``TypeError`` that names the first value of another type than is declared.

    Types are compared exactly: a bool is not a number, and an enum is not a text; they would be
    decoded as another type, or, in a process without the enum's class, not at all.
    """
    for name, value in fields.items():
        path, (kind, *inside) = f"state.{name}", _FIELDS[name]
        _check_type(value, kind, path)
        items: Iterable[tuple[object, object]] = ()
        if isinstance(value, dict):
            items = value.items()
        elif isinstance(value, list):
            items = enumerate(value)
        for key, item in items:
            if isinstance(value, dict) and type(key) is not str:
                raise TypeError(
                    f"{path} has the key {key!r}, a {type(key).__name__},"
                    " and must have only str keys"
                )
            _check_type(item, inside[0], path, key)


def _check_type(value: object, kind: type, path: str, key: object = None) -> None:
    if type(value) is not kind and kind is not object:
        where = path if key is None else path + member(key)
        raise TypeError(f"{where} is a {type(value).__name__}, and must be a {kind.__name__}")


def merge_edit(before: object, edited: object, current: object) -> object:
    """Return ``current`` with the changes from ``before`` to ``edited``: the changes of both sides."""
    if isinstance(before, dict) and isinstance(edited, dict) and isinstance(current, dict):
        merged = {k: v for k, v in current.items() if k in edited or k not in before}
        for key, value in edited.items():
            if key not in before or before[key] != value:
                merged[key] = merge_edit(before.get(key), value, current.get(key))
        return merged
    if isinstance(before, list) and isinstance(edited, list) and isinstance(current, list):
        removed = [item for item in before if item not in edited]
        left = [item for item in current if item not in removed]
        return left + [item for item in edited if item not in before and item not in left]
    return edited


def _checksum(fields: Mapping[str, object]) -> str:
    rest = {name: value for name, value in fields.items() if name != "checksum"}
    return codec.canonical_digest(rest, "state", depth=codec.WHOLE_DEPTH).hex()


# --- the state of one execution, in the journal ----------------------------------------------------


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
        self.config = frozen_config(config)
        self.workflow_id = f"wf_{secrets.token_hex(8)}" if workflow_id is None else workflow_id
        self._is_shut = False
        self._run = open_run(self.config.state, self.workflow_id, workflow)
        self._mutex = self._run.mutex
        #: The one object that callers get, its fields as they were read, and up to which entry.
        self._state = ExecutionState(self.workflow_id)
        self._fields: dict[str, object] = {}
        self._seq = -1
        try:
            if auto_restore:
                self._run.load()
            else:
                self._run.start_fresh()
        except BaseException:
            self._run.close()
            raise
        retain(self)  # not weakly: one that is never shut down has its copy written at the end

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
            if self._seq != self._run.state.seq:
                self._refresh()
            return self._state

    def _refresh(self) -> None:
        state, self._fields = self._run.state, self._run.fields()
        for name, value in copy.deepcopy(self._fields).items():
            setattr(self._state, name, value)
        created = from_micros(state.created_at) if state.seq else self._run.store.clock.now()
        self._state.created_at = created.isoformat()
        if state.seq:
            self._state.updated_at = from_micros(state.updated_at).isoformat()
        self._seq = state.seq

    def _record_edits(self) -> None:
        """Record the fields that callers edited, merged with the changes since they read them."""
        before, shown = self._fields, vars(self._state)
        edits = {name: shown[name] for name, value in before.items() if shown[name] != value}
        if not edits:
            return
        self._run.catch_up()
        latest = self._run.fields()
        self._fields = before | edits  # a subscriber may come here again
        try:
            self._set_fields(
                {name: merge_edit(before[name], edit, latest[name]) for name, edit in edits.items()}
            )
        except BaseException:
            self._fields = before
            raise
        self._fields = before | copy.deepcopy(edits)

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

    def get_persona_state(self, persona: str) -> dict[str, Any] | None:
        """Return a copy of what is known of a persona; None if nothing is."""
        with self._mutex:
            self._run.catch_up()
            return copy.deepcopy(show_persona(self._run.state, persona, self._run.store.load))

    # --- changes ---

    def update_state(
        self,
        phase: str | None = None,
        step: int | None = None,
        status: str | None = None,
        **fields: object,
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
        facts = {"task": check_text("task id", task_id)}
        with self._mutex:
            self._run.catch_up()
            known = self._run.state
            if task_id not in known.pending_tasks and task_id not in known.completed_tasks:
                self._record(EntryKind.TASK_PENDING, facts)

    def mark_task_completed(self, task_id: str, artifacts: dict[str, Any] | None = None) -> None:
        """Note that a task is done, and what it made."""
        facts = {"task": check_text("task id", task_id)}
        if artifacts is not None:
            check_fields({"artifacts": artifacts})
        self._record(EntryKind.TASK_COMPLETED, facts, artifacts or None, "artifacts")

    def increment_retry(self, persona: str) -> int:
        """Count one more retry of a persona; return how many there were."""
        with self._mutex:
            self._record(EntryKind.RETRY_COUNTED, {"persona": check_text("persona", persona)})
            return self.get_retry_count(persona)

    def update_persona_state(self, persona: str, state: dict[str, Any]) -> None:
        """Set what a persona shows of itself; keys that are not given stay as they are."""
        facts = {"persona": check_text("persona", persona)}
        given: object = state
        shown = dict(given) if isinstance(given, dict) else given  # a defaultdict is welcome
        check_fields({"persona_states": {persona: shown}})
        self._record(EntryKind.PERSONA_SET, facts, shown, "persona_state")

    def _set_fields(self, changes: dict[str, object]) -> None:
        check_fields(changes)
        with self._mutex:
            self._run.catch_up()
            own = without_derived_fields(self._run.state, changes)
            self._record(EntryKind.FIELDS_SET, None, own, "state", own.get("status"))

    def _record(
        self,
        kind: EntryKind,
        facts: dict[str, str] | None,
        value: object = None,
        path: str = "value",
        status: str | None = None,
    ) -> None:
        entry = NewEntry(
            kind,
            facts=codec.dump_canonical(facts) if facts else None,
            value=None if value is None else codec.encode(value, path),
            family=path,
        )
        with self._mutex:
            self._check_open()
            self._run.append([entry], status)

    # --- copies ---

    def checkpoint(self, checkpoint_id: str | None = None) -> str:
        """Write the whole run as a checkpoint and as ``execution_state.json``; return its id."""
        with self._run.copying(), self._mutex:
            self._check_open()
            self._record_edits()
            if self._run.fresh:
                self._run.append(())
            clock = self._run.store.clock
            name = new_checkpoint_id(clock) if checkpoint_id is None else checkpoint_id
            self._run.write_checkpoint(name)
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
            self._state, self._fields = ExecutionState(self.workflow_id), {}
            self._seq = -1
            self._run.restore(found)
            return True

    def restore_latest(self) -> bool:
        """Resume from the journal, or without one from the newest good copy; False if neither."""
        with self._mutex:
            self._check_open()
            self._seq = -1  # the object is refreshed at its next use
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
        with self._run.copying(), self._mutex:
            if self._is_shut:
                return
            try:
                self._record_edits()
                if self._run.state.seq:
                    self._run.write_copy()
            finally:
                self._is_shut = True
                release(self)
                self._run.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()


def _shut_down_all() -> None:
    """Write the copies of runs that were never shut down, while the journal is still open."""
    for state in retained(StatePersistence):
        try:
            state.shutdown()
        except (MaestroError, TypeError) as error:  # a TypeError: an edit that cannot be recorded
            logger.error("run %s: %s", state.workflow_id, error)  # noqa: TRY400 - one sentence


run_at_exit(0, _shut_down_all)


def get_state_persistence(
    workflow_id: str | None = None, auto_restore: bool = True
) -> StatePersistence:
    """Open an execution's state with the shared configuration."""
    return StatePersistence(workflow_id=workflow_id, auto_restore=auto_restore)


def save_state(
    state: ExecutionState | dict[str, Any], workflow_id: str | None = None, checkpoint: bool = True
) -> str:
    """Record a whole state under its workflow id; return the checkpoint's id, or the workflow's."""
    given = ExecutionState.from_dict(state) if isinstance(state, dict) else state
    name = given.workflow_id if workflow_id is None else workflow_id
    persistence = StatePersistence(workflow_id=name)
    with persistence.run.copying(), persistence:  # no checkpoint but the one that is asked for
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
        return _execution_state(workflow_id, run, store.load)
    finally:
        close_store(store)


def _execution_state(
    workflow_id: str, run: RunState, load: Callable[[Entry], bytes | None]
) -> ExecutionState:
    return ExecutionState(
        workflow_id,
        **show_fields(run, load),
        created_at=from_micros(run.created_at).isoformat(),
        updated_at=from_micros(run.updated_at).isoformat(),
    )


def _state_of_copy(copies: RunCopies) -> ExecutionState | None:
    found = copies.newest()
    if found is None:
        return None
    run = fold_copy(found, found.load)
    return _execution_state(found.run_id, run, found.load)
