"""The state of one execution as callers see it: a plain object of fields."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Self

from maestro_hive.kernel.errors import CorruptionError
from maestro_hive.maestro.state import codec
from maestro_hive.maestro.state.strict_json import member


class StateCorruptionError(CorruptionError):
    """A state cannot be trusted: a field is missing or wrong, or its checksum does not match."""


def _now() -> str:
    return datetime.now(UTC).isoformat()


@dataclass
class ExecutionState:
    """Where an execution stands; times are ISO texts.

    ``checksum`` is a SHA-256 over everything else; it is filled in by ``to_dict``, and checked by
    ``from_dict`` where there is one.
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
        """Return the fields as a dictionary, copied, with a fresh checksum."""
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
            raise StateCorruptionError("a state without a workflow_id is nobody's")
        try:
            check_fields(data)
        except TypeError as error:
            raise StateCorruptionError(str(error)) from None
        if data.get("checksum") and data["checksum"] != _checksum(data):
            raise StateCorruptionError(
                f"the state of {data['workflow_id']!r} does not match its checksum"
            )
        return cls(**data)


#: What each field is, and what is inside it; keys are always texts.
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
    """Raise a ``TypeError`` that names what is not as its field has to be, however deep inside.

    Types are compared exactly: a bool is no number, and an enum is no text; they would come back
    as something else, or in a process that does not know the enum not at all.
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
    """Return ``current`` with what changed from ``before`` to ``edited``: neither side is lost."""
    if isinstance(before, dict) and isinstance(edited, dict) and isinstance(current, dict):
        merged = {k: v for k, v in current.items() if k in edited or k not in before}
        for key, value in edited.items():
            if key not in before or before[key] != value:
                merged[key] = merge_edit(before.get(key), value, current.get(key))
        return merged
    if isinstance(before, list) and isinstance(edited, list) and before != current:
        gone = [item for item in before if item not in edited]
        kept = [item for item in current if item not in gone]
        return kept + [item for item in edited if item not in before and item not in kept]
    return edited


def _checksum(fields: dict[str, Any]) -> str:
    rest = {name: value for name, value in fields.items() if name != "checksum"}
    return codec.canonical_digest(rest, "state", depth=codec.WHOLE_DEPTH).hex()
