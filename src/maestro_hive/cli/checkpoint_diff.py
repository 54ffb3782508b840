"""What two checkpoints have that the other has not: fields, steps and memories."""

from __future__ import annotations

from typing import Any, NamedTuple

#: Fields that always differ, or are compared as steps and memories.
_PASSED_OVER = {"created_at", "updated_at", "workflow_id", "steps", "persona_states"}

_ABSENT = object()


class Difference(NamedTuple):
    """One thing that was added, removed or changed: where, what it was, and what it is."""

    part: str
    name: str
    change: str
    before: Any = None
    after: Any = None

    def as_json(self) -> dict[str, Any]:
        """Return it with the keys of ``--json``."""
        return self._asdict()


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[Difference]:
    """Return how one run, as people see it, differs from another."""
    return [
        *_compared("field", _fields(before), _fields(after)),
        *_compared("step", _steps(before), _steps(after)),
        *_compared("memory", _memories(before), _memories(after)),
    ]


def _compared(part: str, before: dict[str, Any], after: dict[str, Any]) -> list[Difference]:
    found = []
    for name in dict.fromkeys([*before, *after]):
        old, new = before.get(name, _ABSENT), after.get(name, _ABSENT)
        if old is _ABSENT:
            found.append(Difference(part, name, "added", after=new))
        elif new is _ABSENT:
            found.append(Difference(part, name, "removed", before=old))
        elif old != new:
            found.append(Difference(part, name, "changed", old, new))
    return found


def _fields(run: dict[str, Any]) -> dict[str, Any]:
    """Return fields by name; those that are objects by the names inside them, one level deep."""
    fields: dict[str, Any] = {}
    for name, value in run.items():
        if name in _PASSED_OVER:
            continue
        if isinstance(value, dict):
            fields |= {f"{name}.{key}": inner for key, inner in value.items()}
        else:
            fields[name] = value
    for persona, shown in run.get("persona_states", {}).items():
        own = {key: value for key, value in shown.items() if key not in {"memory", "last_updated"}}
        fields |= {f"persona_states.{persona}.{key}": value for key, value in own.items()}
    return fields


def _steps(run: dict[str, Any]) -> dict[str, Any]:
    """Return steps by persona and name; equal ones are told apart by their order."""
    steps: dict[str, Any] = {}
    for step in run.get("steps", []):
        name = f"{step.get('persona') or '-'}/{step.get('name') or step['step']}"
        same = sum(1 for known in steps if known == name or known.startswith(f"{name}#"))
        kept = {key: step.get(key) for key in ("status", "attempts", "tokens_used", "output")}
        steps[f"{name}#{same + 1}" if same else name] = kept
    return steps


def _memories(run: dict[str, Any]) -> dict[str, Any]:
    return {
        f"{persona}.{key}": value
        for persona, shown in run.get("persona_states", {}).items()
        for key, value in (shown.get("memory") or {}).items()
    }
