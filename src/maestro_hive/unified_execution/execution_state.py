"""The state of one execution as callers see it: a plain object of fields."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Self

from maestro_hive.kernel.errors import CorruptionError
from maestro_hive.maestro.state import codec


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
        for name, value in data.items():
            if type(value) is not _FIELDS[name]:
                wanted = _FIELDS[name].__name__
                raise StateCorruptionError(
                    f"state.{name} is a {type(value).__name__}, and must be a {wanted}"
                )
        if data.get("checksum") and data["checksum"] != _checksum(data):
            raise StateCorruptionError(
                f"the state of {data['workflow_id']!r} does not match its checksum"
            )
        return cls(**data)


_FIELDS: dict[str, type] = {
    "workflow_id": str,
    "phase": str,
    "step": int,
    "status": str,
    "persona_states": dict,
    "retry_counts": dict,
    "completed_tasks": list,
    "pending_tasks": list,
    "artifacts": dict,
    "metrics": dict,
    "created_at": str,
    "updated_at": str,
    "checksum": str,
}


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
    return codec.encode(rest, "state", depth=codec.WHOLE_DEPTH).hexdigest
