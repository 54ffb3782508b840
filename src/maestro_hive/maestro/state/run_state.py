"""What a run's entries add up to. Pure: it is given entries and values, and remembers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from maestro_hive.kernel.errors import CorruptionError, MaestroError
from maestro_hive.maestro.state import codec
from maestro_hive.maestro.state.records import Entry, EntryKind, from_micros

if TYPE_CHECKING:
    from collections.abc import Callable

#: The fields of a run that may be set by name, and what they are to begin with.
FIELDS: dict[str, Callable[[], Any]] = {
    "phase": lambda: "initializing",
    "step": int,
    "status": lambda: "pending",
    "persona_states": dict,
    "retry_counts": dict,
    "completed_tasks": list,
    "pending_tasks": list,
    "artifacts": dict,
    "metrics": dict,
}


@dataclass(slots=True)
class StepState:
    """One step: what it is, how often it was tried, and its result if it is finished."""

    number: int
    identity: bytes | None
    begun: Entry
    starts: int = 0
    failures: int = 0
    open_attempt: int = 0
    kept: Entry | None = None
    last_failure: Entry | None = None
    progress: Entry | None = None

    @property
    def interruptions(self) -> int:
        """Attempts that began and whose end nobody recorded, the one under way excluded."""
        return self.starts - self.failures - (self.kept is not None) - (self.open_attempt > 0)


@dataclass(slots=True)
class RunState:
    """A run, folded from its entries; ``seq`` is the last of them."""

    seq: int = 0
    created_at: int = 0
    updated_at: int = 0
    phase: str = "initializing"
    step: int = 0
    status: str = "pending"
    persona_states: dict[str, dict[str, Any]] = field(default_factory=dict)
    retry_counts: dict[str, int] = field(default_factory=dict)
    artifacts: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, Any] = field(default_factory=dict)
    # Dictionaries, so that the ten-thousandth task costs what the first did.
    completed: dict[str, None] = field(default_factory=dict)
    pending: dict[str, None] = field(default_factory=dict)
    steps: dict[int, StepState] = field(default_factory=dict)
    by_identity: dict[bytes, StepState] = field(default_factory=dict)
    #: The fencing number that the run's files had reached when this journal began.
    fence_floor: int = 0

    def fields(self) -> dict[str, Any]:
        """Return the run's fields by name, as new containers."""
        return {
            "phase": self.phase,
            "step": self.step,
            "status": self.status,
            "persona_states": {name: dict(state) for name, state in self.persona_states.items()},
            "retry_counts": dict(self.retry_counts),
            "completed_tasks": list(self.completed),
            "pending_tasks": list(self.pending),
            "artifacts": dict(self.artifacts),
            "metrics": dict(self.metrics),
        }

    def set_fields(self, fields: dict[str, Any]) -> None:
        """Replace fields by name; those of tomorrow are passed over."""
        for name, value in fields.items():
            if name not in FIELDS:
                continue
            wanted = type(FIELDS[name]())
            if not isinstance(value, wanted):
                given = type(value).__name__
                raise TypeError(f"state.{name} is a {given}, and must be a {wanted.__name__}")
            if name == "completed_tasks":
                self.completed = dict.fromkeys(value)
            elif name == "pending_tasks":
                self.pending = dict.fromkeys(value)
            elif name == "persona_states":
                self.persona_states = {persona: dict(state) for persona, state in value.items()}
            else:
                setattr(self, name, value)

    def add(self, entry: Entry, load: Callable[[Entry], bytes | None]) -> None:
        """Take one more entry into account; values are loaded only where they matter."""
        handler = _STEP_HANDLERS.get(entry.kind)
        try:
            if handler is not None:
                handler(self, entry)
            else:
                _add_field_entry(self, entry, load)
        except MaestroError:
            raise  # some are a ValueError too, and say already what is wrong
        except KeyError as error:
            raise CorruptionError(
                f"entry {entry.seq} of the run speaks of {error}, which is not there"
            ) from error
        except (TypeError, ValueError, AttributeError) as error:
            raise CorruptionError(
                f"entry {entry.seq} of the run is not one of ours: {error}"
            ) from error
        self.seq = entry.seq
        self.updated_at = entry.at
        # A run restored from a copy began when the copied entries did.
        self.created_at = min(self.created_at or entry.at, entry.at)

    def to_dict(self, run_id: str) -> dict[str, Any]:
        """Return the run as plain data, with its steps; what listings and views show."""
        return {
            "workflow_id": run_id,
            **self.fields(),
            "created_at": from_micros(self.created_at).isoformat(),
            "updated_at": from_micros(self.updated_at).isoformat(),
            "steps": [_step_dict(step) for step in self.steps.values()],
        }


def fold(entries: list[Entry], load: Callable[[Entry], bytes | None]) -> RunState:
    """Return what these entries add up to."""
    state = RunState()
    for entry in entries:
        state.add(entry, load)
    return state


def _begun(state: RunState, entry: Entry) -> None:
    step = state.steps.get(entry.step)
    if step is None:
        step = state.steps[entry.step] = StepState(entry.step, entry.identity, entry)
        if entry.identity is not None:
            state.by_identity[entry.identity] = step
    step.starts += 1
    step.open_attempt = entry.attempt


def _failed(state: RunState, entry: Entry) -> None:
    step = state.steps[entry.step]
    step.failures += 1
    step.open_attempt = 0
    step.last_failure = entry


def _kept(state: RunState, entry: Entry) -> None:
    step = state.steps[entry.step]
    step.open_attempt = 0
    step.kept = entry


def _progressed(state: RunState, entry: Entry) -> None:
    state.steps[entry.step].progress = entry


_STEP_HANDLERS: dict[int, Callable[[RunState, Entry], None]] = {
    EntryKind.ATTEMPT_BEGUN: _begun,
    EntryKind.ATTEMPT_FAILED: _failed,
    EntryKind.STEP_KEPT: _kept,
    EntryKind.PROGRESS_SAVED: _progressed,
}


def _add_field_entry(state: RunState, entry: Entry, load: Callable[[Entry], bytes | None]) -> None:
    facts = codec.parse(entry.facts, "facts") if entry.facts else {}
    data = load(entry)
    value = codec.decode(data) if data is not None else None
    match entry.kind:
        case EntryKind.FIELDS_CHANGED:
            state.set_fields(value or {})
        case EntryKind.TASK_PENDING:
            state.pending[facts["task"]] = None
        case EntryKind.TASK_COMPLETED:
            state.pending.pop(facts["task"], None)
            state.completed[facts["task"]] = None
            state.artifacts.update(value or {})
        case EntryKind.RETRY_COUNTED:
            persona = facts["persona"]
            state.retry_counts[persona] = state.retry_counts.get(persona, 0) + 1
        case EntryKind.PERSONA_CHANGED:
            state.persona_states.setdefault(facts["persona"], {}).update(value or {})
        case EntryKind.RESTORED:
            kept = (state.seq, state.created_at, state.updated_at)
            floor = max(state.fence_floor, facts.get("fence", 0))
            state.__init__(*kept, fence_floor=floor)  # type: ignore[misc]
        case _:
            pass  # spending, memory and history are read by whoever needs them


def _step_dict(step: StepState) -> dict[str, Any]:
    facts = codec.parse(step.begun.facts, "facts") if step.begun.facts else {}
    if step.kept is not None:
        status = "success"
    elif step.open_attempt:
        status = "running"
    else:
        status = "failed" if step.failures else "interrupted"
    return {
        "step": step.number,
        **facts,
        "status": status,
        "attempts": step.starts,
        "failures": step.failures,
    }
