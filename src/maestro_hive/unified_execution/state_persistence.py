"""An execution's state that survives its process: a view of the journal, with JSON copies beside.

Every change is one entry in the journal, durable when the method returns, and costs the same for
the ten-thousandth task as for the first. ``checkpoint`` writes the whole run down as JSON; when
the journal is gone, the newest of those is resumed from.
"""

from __future__ import annotations

import atexit
import contextlib
import copy
import logging
import os
import secrets
import threading
import time
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from maestro_hive.kernel.errors import (
    ConfigurationError,
    DocumentCorruptError,
    MaestroError,
    StorageError,
)
from maestro_hive.maestro.state import codec
from maestro_hive.maestro.state.checkpoint import (
    CheckpointManager,
    CheckpointNotFoundError,
    new_checkpoint_id,
)
from maestro_hive.maestro.state.memory_store import MemoryStore
from maestro_hive.maestro.state.opened import borrow_store, return_store
from maestro_hive.maestro.state.records import EntryKind, NewEntry, from_micros
from maestro_hive.maestro.state.run_document import CopiedEntries, RunCopy, write_run
from maestro_hive.maestro.state.run_state import FIELDS, RunState, fold
from maestro_hive.maestro.state.sqlite_store import SqliteStore
from maestro_hive.maestro.state.store import Append
from maestro_hive.unified_execution.config import (
    DEFAULT_CHECKPOINT_DIR,
    DEFAULT_STATE_DIR,
    ExecutionConfig,
    get_execution_config,
)
from maestro_hive.unified_execution.execution_state import (
    ExecutionState,
    StateCorruptionError,
    merge_edit,
)
from maestro_hive.unified_execution.run_copies import RunCopies

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from maestro_hive.maestro.state.store import Hold, Store

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

#: The copy for resuming is written again on its own only after this many times what it last cost.
_COPY_COST_FACTOR = 33


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """Where a run was resumed from when it was not the journal."""

    source: str
    saved_at: str


class StatePersistence:
    """One execution's state. Thread-safe; a context manager.

    A process holds a run: while it does, no other may write to it (``RunHeldError`` names the
    holder). With ``auto_restore=False`` the execution starts afresh, unless ``restore`` or
    ``restore_latest`` is called before the first change.
    """

    def __init__(
        self,
        config: ExecutionConfig | None = None,
        workflow_id: str | None = None,
        auto_restore: bool = True,
    ) -> None:
        self.config = (config or get_execution_config()).frozen()
        self.workflow_id = f"wf_{secrets.token_hex(8)}" if workflow_id is None else workflow_id
        self.restored: Restored | None = None
        self._mutex = threading.RLock()
        self._closed = False
        folders = self.config.state.resolve()
        self._state_dir = folders.state if folders.persistent else None
        self._store: Store = borrow_store(folders.state) if folders.persistent else MemoryStore()
        try:
            self._hold: Hold = self._store.hold_run(self.workflow_id)
        except BaseException:
            self._give_back_store()
            raise
        self._checkpoints = CheckpointManager(
            folders.checkpoints if folders.persistent else None,
            max_checkpoints=self.config.state.max_checkpoints_per_workflow,
            verify_on_read=self.config.state.verify_checksum_on_load,
            clock=self._store.clock,
        )
        self._copies = RunCopies(self.workflow_id, self._state_dir, self._checkpoints)
        self._run = RunState()
        self._shown: ExecutionState | None = None
        self._shown_fields: dict[str, Any] = {}
        self._shown_seq = -1
        self._fresh: NewEntry | None = None
        self._fence_seen = 0
        self._copy_due = 0.0
        try:
            self._begin(auto_restore=auto_restore)
        except BaseException:
            self._let_go()
            raise
        _open_states.add(self)

    def _begin(self, *, auto_restore: bool) -> None:
        interval = self.config.state.auto_checkpoint_interval_seconds
        self._copy_due = time.monotonic() + interval if interval else float("inf")
        self._fence_seen = self._checkpoints.highest_fence(self.workflow_id)
        if auto_restore:
            self.restore_latest()
        else:
            self._begin_afresh()

    def _begin_afresh(self) -> None:
        """Have the first change say that what is there no longer counts."""
        left = None if self._hold.seq else self._copies.newest()
        if left is not None:
            facts = codec.dump_canonical({"fence": left.fence})
            self._fresh = NewEntry(EntryKind.RESTORED, facts=facts)
        elif self._hold.seq:
            self._fresh = NewEntry(EntryKind.RESTORED)

    # --- what there is ---

    @property
    def state(self) -> ExecutionState:
        """The state as it stands. What you change in it is recorded at the next checkpoint."""
        with self._mutex:
            self._absorb_edits()
            self._catch_up()
            if self._shown is None or self._shown_seq != self._run.seq:
                self._show()
            assert self._shown is not None
            return self._shown

    def _show(self) -> None:
        fields = self._run.fields()
        created = from_micros(self._run.created_at) if self._run.seq else self._store.clock.now()
        if self._shown is None:
            self._shown = ExecutionState(self.workflow_id, created_at=created.isoformat())
        for name, value in fields.items():
            setattr(self._shown, name, value)
        if self._run.seq:
            self._shown.created_at = created.isoformat()
            self._shown.updated_at = from_micros(self._run.updated_at).isoformat()
        self._shown_fields = copy.deepcopy(fields)
        self._shown_seq = self._run.seq

    def _absorb_edits(self) -> None:
        """Record what a caller changed directly in the state object."""
        if self._shown is None:
            return
        before = self._shown_fields
        edits = {
            name: getattr(self._shown, name)
            for name, value in before.items()
            if getattr(self._shown, name) != value
        }
        if not edits:
            return
        self._catch_up()
        current = self._run.fields()
        self._shown_fields = before | edits  # recording them may come back here
        try:
            self._set_fields(
                {
                    name: merge_edit(before[name], edit, current[name])
                    for name, edit in edits.items()
                }
            )
        except BaseException:
            self._shown_fields = before
            raise
        self._shown_fields = before | copy.deepcopy(edits)

    def get_state_path(self) -> Path:
        """Return where the run's ``execution_state.json`` is, or will be."""
        path = self._copies.path
        if path is None:
            raise ConfigurationError("with enable_persistence=False there is no state file")
        return path

    def get_retry_count(self, persona: str) -> int:
        """Return how often a persona was tried again."""
        with self._mutex:
            self._catch_up()
        return self._run.retry_counts.get(persona, 0)

    def get_persona_state(self, persona: str) -> dict[str, Any]:
        """Return a copy of what a persona last showed of itself; empty if nothing."""
        with self._mutex:
            self._catch_up()
            return copy.deepcopy(self._run.persona_states.get(persona, {}))

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
        with self._mutex:
            self._catch_up()
            if task_id not in self._run.pending and task_id not in self._run.completed:
                self._record(EntryKind.TASK_PENDING, {"task": _text(task_id, "task id")})

    def mark_task_completed(self, task_id: str, artifacts: dict[str, Any] | None = None) -> None:
        """Note that a task is done, and what it made."""
        facts = {"task": _text(task_id, "task id")}
        self._record(EntryKind.TASK_COMPLETED, facts, artifacts or None, "artifacts")

    def increment_retry(self, persona: str) -> int:
        """Count one more retry of a persona; return how many there were."""
        with self._mutex:
            self._record(EntryKind.RETRY_COUNTED, {"persona": _text(persona, "persona")})
            return self.get_retry_count(persona)

    def update_persona_state(self, persona: str, state: dict[str, Any]) -> None:
        """Set what a persona shows of itself; keys that are not given stay as they are."""
        facts = {"persona": _text(persona, "persona")}
        self._record(EntryKind.PERSONA_CHANGED, facts, dict(state), "persona_state")

    def _set_fields(self, changes: dict[str, Any]) -> None:
        for name, value in changes.items():
            wanted = type(FIELDS[name]())
            if not isinstance(value, wanted):
                given = type(value).__name__
                raise TypeError(f"state.{name} is a {given}, and must be a {wanted.__name__}")
        self._record(EntryKind.FIELDS_CHANGED, None, changes, "state")

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
            self._append([entry], status=(value or {}).get("status") if facts is None else None)
            if time.monotonic() >= self._copy_due:
                self._write_copy()

    def _append(self, entries: Iterable[NewEntry], status: str | None = None) -> None:
        if self._fresh is not None:
            entries, self._fresh = [self._fresh, *entries], None
        (refused,) = self._store.append([Append(self._hold, entries, status)])
        if refused is not None:
            raise refused
        self._catch_up()

    def _catch_up(self) -> None:
        """Take into account what was appended, here or by another user of the run."""
        if self._run.seq == self._hold.seq or self._fresh is not None or self._closed:
            return
        for entry in self._store.entries(self._hold.run, after=self._run.seq):
            self._run.add(entry, self._store.load)

    # --- copies ---

    def checkpoint(self, checkpoint_id: str | None = None) -> str:
        """Write the whole run as a checkpoint and as ``execution_state.json``; return its id."""
        with self._mutex:
            self._check_open()
            self._absorb_edits()
            name = new_checkpoint_id(self._store.clock) if checkpoint_id is None else checkpoint_id
            run = self._run_text()
            self._copies.write_checkpoint(name, run, self._fence)
            self._write_copy(run)
            return name

    def _write_copy(self, run: bytes | None = None) -> None:
        """Write ``execution_state.json``, and plan the next time by what it cost."""
        started = time.monotonic()
        self._copies.write_state(run or self._run_text())
        cost = time.monotonic() - started
        interval = self.config.state.auto_checkpoint_interval_seconds
        pause = max(interval, cost * _COPY_COST_FACTOR) if interval else float("inf")
        self._copy_due = started + pause

    def _run_text(self) -> bytes:
        # A process that was taken over must not write files either.
        (refused,) = self._store.append([Append(self._hold, ())], sync=False)
        if refused is not None:
            raise refused
        saved_at = self._store.clock.now().isoformat()
        return write_run(self._store, self._hold, self.state.to_dict(), saved_at, self._fence)

    @property
    def _fence(self) -> int:
        """The number that files carry: over that of every process before, also after a loss."""
        own = self._hold.lease.fence + self._run.fence_floor
        return own if own >= self._fence_seen else self._fence_seen + 1

    def restore(self, checkpoint_id: str) -> bool:
        """Go back to a checkpoint; False if there is none of that id."""
        with self._mutex:
            self._check_open()
            try:
                found = self._copies.checkpoint(checkpoint_id)
            except CheckpointNotFoundError:
                return False
            except DocumentCorruptError as error:
                raise StateCorruptionError(str(error)) from error
            self._restore_copy(found)
            return True

    def restore_latest(self) -> bool:
        """Resume from the journal, or without one from the newest good copy; False if neither."""
        with self._mutex:
            self._check_open()
            self._fresh = None
            self._run = fold(self._store.entries(self._hold.run), self._store.load)
            self._shown_seq = -1
            if self._run.seq:
                return True
            found = self._copies.newest()
            if found is None:
                return False
            self._restore_copy(found, lost=True)
            self.restored = Restored(source=found.source, saved_at=found.saved_at)
            logger.warning(
                "run %s had no journal: resumed from %s, saved at %s; what came later is lost",
                self.workflow_id,
                found.source,
                found.saved_at,
            )
            return True

    def _restore_copy(self, found: RunCopy, *, lost: bool = False) -> None:
        self._fresh = None
        self._shown, self._shown_fields, self._shown_seq = None, {}, -1
        self._append(CopiedEntries(found, journal_lost=lost), status=_status_of(found))

    def list_checkpoints(self) -> list[str]:
        """Return the ids of this run's checkpoints, newest first."""
        return self._checkpoints.checkpoint_ids(self.workflow_id)

    # --- the end ---

    def shutdown(self) -> None:
        """Write the copy for resuming once more and let the run go; twice is no error."""
        with self._mutex:
            if self._closed:
                return
            try:
                self._absorb_edits()
                if self._run.seq:
                    self._write_copy()
            finally:
                self._let_go()

    def _let_go(self) -> None:
        self._closed = True
        _open_states.discard(self)
        with contextlib.suppress(StorageError):  # a failed store holds nothing any more
            self._store.release_run(self._hold)
        self._give_back_store()

    def _give_back_store(self) -> None:
        if isinstance(self._store, SqliteStore):
            return_store(self._store)

    def _check_open(self) -> None:
        if self._closed:
            raise StorageError(f"run {self.workflow_id!r} was shut down; open it again to go on")

    def __enter__(self) -> Self:
        """Use it in a ``with`` statement."""
        return self

    def __exit__(self, *_: object) -> None:
        """Shut down at the end of it."""
        self.shutdown()


_open_states: weakref.WeakSet[StatePersistence] = weakref.WeakSet()


os.register_at_fork(after_in_child=_open_states.clear)  # the parent's to shut down


@atexit.register
def _shut_down_all() -> None:
    """Write the copies of runs that nobody shut down, while the journal is still open."""
    for state in list(_open_states):
        try:
            state.shutdown()
        except MaestroError as error:
            logger.error("run %s: %s", state.workflow_id, error)  # noqa: TRY400 - one sentence


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
    folders = get_execution_config().state.resolve()
    if not folders.persistent:
        return None
    store = borrow_store(folders.state)
    try:
        record = store.run(workflow_id)
        entries = store.entries(record.id) if record else []
        if not entries:
            return _state_of_copy(workflow_id, folders.state, folders.checkpoints)
        run = fold(entries, store.load)
        return ExecutionState(
            workflow_id,
            **run.fields(),
            created_at=from_micros(run.created_at).isoformat(),
            updated_at=from_micros(run.updated_at).isoformat(),
        )
    finally:
        return_store(store)


def _state_of_copy(
    workflow_id: str, state_dir: Path, checkpoint_dir: Path
) -> ExecutionState | None:
    copies = RunCopies(workflow_id, state_dir, CheckpointManager(checkpoint_dir))
    found = copies.newest()
    if found is None:
        return None
    return ExecutionState.from_dict(codec.revive(found.body["state"], found.source))


def _status_of(found: RunCopy) -> str | None:
    status = found.body.get("state", {}).get("status")
    return status if isinstance(status, str) else None


def _text(value: object, what: str) -> str:
    if not isinstance(value, str) or not value:
        raise ConfigurationError(f"a {what} is a text that is not empty, not {value!r}")
    return value
