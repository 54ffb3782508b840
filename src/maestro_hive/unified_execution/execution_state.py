"""The state of one execution: the object that callers read and edit, and how edits are recorded."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Self

from maestro_hive.kernel.errors import CorruptionError
from maestro_hive.maestro.state import codec
from maestro_hive.maestro.state.records import from_micros
from maestro_hive.maestro.state.strict_json import member

if TYPE_CHECKING:
    from collections.abc import Callable

    from maestro_hive.engine.open_run import OpenRun


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

    def update(self, **changes: Any) -> None:
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


#: The type of each field, and of the values in it; keys are always texts.
_FIELDS: dict[str, tuple[type, type]] = {
    "workflow_id": (str, object),
    "phase": (str, object),
    "step": (int, object),
    "status": (str, object),
    "persona_states": (dict, dict),
    "retry_counts": (dict, int),
    "completed_tasks": (list, str),
    "pending_tasks": (list, str),
    "artifacts": (dict, object),
    "metrics": (dict, object),
    "created_at": (str, object),
    "updated_at": (str, object),
    "checksum": (str, object),
}


def check_fields(fields: dict[str, Any]) -> None:
    """Raise a ``TypeError`` that names the first value, however deep, of a wrong type.

    Types are compared exactly: a bool is not a number, and an enum is not a text; they would be
    decoded as another type, or, in a process without the enum's class, not at all.
    """
    for name, value in fields.items():
        kind, inside = _FIELDS[name]
        path = f"state.{name}"
        _check_type(value, kind, path)
        if kind is dict:
            for key, item in value.items():
                if type(key) is not str:
                    raise TypeError(
                        f"{path} has the key {key!r}, a {type(key).__name__},"
                        " and must have only str keys"
                    )
                _check_type(item, inside, path, key)
        elif kind is list:
            for at, item in enumerate(value):
                _check_type(item, inside, path, at)


def _check_type(value: object, kind: type, path: str, key: str | int | None = None) -> None:
    if type(value) is not kind and kind is not object:
        where = path if key is None else path + member(key)
        raise TypeError(f"{where} is a {type(value).__name__}, and must be a {kind.__name__}")


def merge_edit(before: Any, edited: Any, current: Any) -> Any:
    """Return ``current`` with the changes from ``before`` to ``edited``: the changes of both sides."""
    if isinstance(before, dict) and isinstance(edited, dict) and isinstance(current, dict):
        merged = {k: v for k, v in current.items() if k in edited or k not in before}
        for key, value in edited.items():
            if key not in before or before[key] != value:
                merged[key] = merge_edit(before.get(key), value, current.get(key))
        return merged
    if isinstance(before, list) and isinstance(edited, list) and before != current:
        removed = [item for item in before if item not in edited]
        left = [item for item in current if item not in removed]
        return left + [item for item in edited if item not in before and item not in left]
    return edited


def _checksum(fields: dict[str, Any]) -> str:
    rest = {name: value for name, value in fields.items() if name != "checksum"}
    return codec.canonical_digest(rest, "state", depth=codec.WHOLE_DEPTH).hex()


# --- the object that callers edit ----------------------------------------------------------------


class SharedState:
    """The one ``ExecutionState`` of a run that all callers get: refreshed in place, edits recorded."""

    def __init__(self, workflow_id: str) -> None:
        self._workflow_id = workflow_id
        self._state: ExecutionState | None = None
        self._fields: dict[str, Any] = {}
        self._seq = -1

    def refreshed(self, run: OpenRun) -> ExecutionState:
        """Return the state object with the current state of the run."""
        if self._state is None or self._seq != run.state.seq:
            self._refresh(run)
        assert self._state is not None
        return self._state

    def _refresh(self, run: OpenRun) -> None:
        state, fields = run.state, run.fields()
        created = from_micros(state.created_at) if state.seq else run.store.clock.now()
        if self._state is None:
            self._state = ExecutionState(self._workflow_id, created_at=created.isoformat())
        for name, value in fields.items():
            setattr(self._state, name, value)
        if state.seq:
            self._state.created_at = created.isoformat()
            self._state.updated_at = from_micros(state.updated_at).isoformat()
        self._fields = copy.deepcopy(fields)
        self._seq = state.seq

    def record_edits(
        self, current: Callable[[], dict[str, Any]], record: Callable[[dict[str, Any]], None]
    ) -> None:
        """Record the fields that callers edited, merged with the changes since they read them."""
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
        self._fields = before | edits  # ``record`` may call this again
        try:
            record(
                {name: merge_edit(before[name], edit, latest[name]) for name, edit in edits.items()}
            )
        except BaseException:
            self._fields = before
            raise
        self._fields = before | copy.deepcopy(edits)

    def forget(self) -> None:
        """Give the next caller a new object: the run was restored to an earlier state."""
        self.__init__(self._workflow_id)  # type: ignore[misc]

    def outdate(self) -> None:
        """Refresh the object at its next use."""
        self._seq = -1
