"""The state object that callers are given, and what they changed in it."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from maestro_hive.maestro.state.records import from_micros
from maestro_hive.unified_execution.execution_state import ExecutionState, merge_edit

if TYPE_CHECKING:
    from collections.abc import Callable

    from maestro_hive.engine.open_run import OpenRun


class ShownState:
    """One ``ExecutionState`` for all callers, refreshed in place; direct edits are noticed."""

    def __init__(self, workflow_id: str) -> None:
        self._workflow_id = workflow_id
        self._state: ExecutionState | None = None
        self._fields: dict[str, Any] = {}
        self._seq = -1

    def refreshed(self, held: OpenRun) -> ExecutionState:
        """Return the state object, brought up to what the run is."""
        if self._state is None or self._seq != held.state.seq:
            self._refresh(held)
        assert self._state is not None
        return self._state

    def _refresh(self, held: OpenRun) -> None:
        run, fields = held.state, held.fields()
        created = from_micros(run.created_at) if run.seq else held.store.clock.now()
        if self._state is None:
            self._state = ExecutionState(self._workflow_id, created_at=created.isoformat())
        for name, value in fields.items():
            setattr(self._state, name, value)
        if run.seq:
            self._state.created_at = created.isoformat()
            self._state.updated_at = from_micros(run.updated_at).isoformat()
        self._fields = copy.deepcopy(fields)
        self._seq = run.seq

    def absorb(
        self, current: Callable[[], dict[str, Any]], record: Callable[[dict[str, Any]], None]
    ) -> None:
        """Record what callers changed directly, merged with what changed meanwhile."""
        if self._state is None:
            return
        before = self._fields
        edits = {
            name: getattr(self._state, name)
            for name, value in before.items()
            if getattr(self._state, name) != value
        }
        if not edits:
            return
        latest = current()
        self._fields = before | edits  # recording them may come back here
        try:
            record(
                {name: merge_edit(before[name], edit, latest[name]) for name, edit in edits.items()}
            )
        except BaseException:
            self._fields = before
            raise
        self._fields = before | copy.deepcopy(edits)

    def forget(self) -> None:
        """Give the next caller a new object: the run was set back."""
        self.__init__(self._workflow_id)  # type: ignore[misc]

    def outdate(self) -> None:
        """Refresh the object when it is next asked for."""
        self._seq = -1
