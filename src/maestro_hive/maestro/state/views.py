"""A run as people see it: fields that were set, and what its steps say about tasks and personas.

A task is a step's name, or a name somebody set. Which are pending or done, how often personas were
tried again and what they show of themselves are told from the steps, and kept nowhere else.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from maestro_hive.kernel.errors import DecodeError
from maestro_hive.maestro.state import codec
from maestro_hive.maestro.state.projections import facts_of, status_of, was_healed
from maestro_hive.maestro.state.records import Entry, EntryKind, from_micros

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from maestro_hive.maestro.state.projections import RunState, StepState

    Load = Callable[[Entry], bytes | None]


@dataclass(slots=True)
class Known:
    """What was shown before, by the number of the entry that it came from."""

    steps: dict[int, tuple[int, dict[str, Any]]] = field(default_factory=dict)
    values: dict[int, Any] = field(default_factory=dict)
    memories: dict[str, int] = field(default_factory=dict)

    def remembered(self, load: Load) -> Callable[[Entry | None], Any]:
        """Return a function that reads each value once."""

        def value(entry: Entry | None) -> Any:
            if entry is None:
                return None
            if entry.seq not in self.values:
                self.values[entry.seq] = _value(entry, load)
                if entry.kind == EntryKind.MEMORY_SAVED:  # takes the place of the one before
                    persona = str(facts_of(entry).get("persona", ""))
                    self.values.pop(self.memories.get(persona, -1), None)
                    self.memories[persona] = entry.seq
            return self.values[entry.seq]

        return value


def show_run(
    state: RunState, run_id: str, load: Load, known: Known | None = None
) -> dict[str, Any]:
    """Return a run as plain data, with its steps; what listings and views show.

    What has not changed since it was put into ``known`` is taken from there.
    """
    known = known or Known()
    return {
        "workflow_id": run_id,
        **show_fields(state, load, known),
        "created_at": from_micros(state.created_at).isoformat(),
        "updated_at": from_micros(state.updated_at).isoformat(),
        "steps": [_known_step(step, load, known) for step in state.steps.values()],
    }


def _known_step(step: StepState, load: Load, known: Known) -> dict[str, Any]:
    seq, shown = known.steps.get(step.number, (-1, {}))
    if seq != step.seq:
        shown = _show_step(step, load)
        known.steps[step.number] = (step.seq, shown)
    return shown


def show_fields(state: RunState, load: Load, known: Known | None = None) -> dict[str, Any]:
    """Return the fields of a run by name, with what its steps add to them."""
    value = (known or Known()).remembered(load)
    fields = state.fields()
    if state.started is not None:
        fields["status"] = run_status(state)
    done, waiting = _tasks_of(state)
    fields["completed_tasks"] = list(dict.fromkeys([*state.completed, *done]))
    fields["pending_tasks"] = [
        *(name for name in state.pending if name not in done),
        *(name for name in waiting if name not in state.pending and name not in state.completed),
    ]
    retries = fields["retry_counts"]
    for persona, more in state.restarts.items():
        retries[persona] = retries.get(persona, 0) + more
    for persona in filter(None, state.latest):
        fields["persona_states"][persona] = _persona_fields(state, persona, value)
    return fields


def run_status(state: RunState) -> str:
    """Return where a run stands; without a workflow, what was set by hand."""
    if state.ended is not None:
        return str(facts_of(state.ended).get("status", "failed"))
    if state.started is None:
        return state.status
    return "waiting" if open_waits(state) else "running"


#: Said of a run that its workflow ended.
OVER = ("success", "failed", "cancelled")
#: Under way, and executed by nobody: its process was killed, or left it.
STOPPED = "stopped"


def standing(workflow: str, status: str, *, held: bool) -> str:
    """Return where a run stands, given what is recorded and whether a living process holds it."""
    if not held:
        return STOPPED if status == "running" else status
    if workflow and status in (*OVER, "waiting"):
        return status
    return "running"


def open_waits(state: RunState) -> list[Entry]:
    """Return what the workflow waits for that somebody must answer."""
    return list(state.questions.values())


def without_what_steps_say(state: RunState, changes: dict[str, Any]) -> dict[str, Any]:
    """Return changed fields less what is told from the steps: that is not to be set as well."""
    changes = dict(changes)
    if "completed_tasks" in changes:
        done = _tasks_of(state)[0]
        changes["completed_tasks"] = [
            name
            for name in changes["completed_tasks"]
            if name not in done or name in state.completed
        ]
    if "pending_tasks" in changes:
        waiting = _tasks_of(state)[1]
        changes["pending_tasks"] = [
            name
            for name in changes["pending_tasks"]
            if name not in waiting or name in state.pending
        ]
    if "retry_counts" in changes:
        told = state.restarts
        changes["retry_counts"] = {
            persona: count - told.get(persona, 0)
            for persona, count in changes["retry_counts"].items()
        }
    return changes


def retry_count(state: RunState, persona: str) -> int:
    """Return how often a persona was tried again."""
    return state.retry_counts.get(persona, 0) + state.restarts.get(persona, 0)


def show_persona(state: RunState, persona: str, load: Load) -> dict[str, Any]:
    """Return what one persona shows of itself; empty if nothing."""
    if persona not in state.latest:
        return dict(state.persona_states.get(persona, {}))
    return _persona_fields(state, persona, Known().remembered(load))


# --- tasks and personas, told from steps -----------------------------------------------------------


def _tasks_of(state: RunState) -> tuple[dict[str, None], dict[str, None]]:
    """Return the names whose steps are all done, and those with a step that is not."""
    done = {name: None for name, count in state.unfinished.items() if name and not count}
    return done, {name: None for name, count in state.unfinished.items() if name and count}


def _persona_fields(
    state: RunState, persona: str, value: Callable[[Entry | None], Any]
) -> dict[str, Any]:
    """Return what a persona's steps say of it, and what was set by hand; the newer one wins."""
    step = state.latest[persona]
    told = _told_persona(state, persona, step, value)
    set_by_hand = state.persona_states.get(persona, {})
    newer = state.persona_seqs.get(persona, 0) > step.seq
    return {**told, **set_by_hand} if newer else {**set_by_hand, **told}


def _told_persona(
    state: RunState, persona: str, step: StepState, value: Callable[[Entry | None], Any]
) -> dict[str, Any]:
    error = facts_of(step.last_failure).get("error", {}) if step.last_failure else {}
    return {
        "last_updated": from_micros(_last_entry(step).at).isoformat(),
        "status": status_of(step),
        "current_attempt": step.last_attempt,
        "tokens_used": state.spent.get(persona, (0, 0.0))[0],
        "last_error": error.get("message"),
        "recovery_applied": was_healed(step),
        "memory": value(state.memories.get(persona)) or {},
        "history": [value(entry) for entry in state.histories.get(persona, [])],
    }


def _last_entry(step: StepState) -> Entry:
    known: Iterable[Entry | None] = (step.started, step.completed, step.progress, *step.log)
    return max((entry for entry in known if entry is not None), key=lambda entry: entry.seq)


def _value(entry: Entry | None, load: Load) -> Any:
    data = load(entry) if entry is not None else None
    if data is None:
        return None
    try:
        return codec.decode(data)
    except DecodeError:  # a class that this process does not know; its JSON can be shown
        return codec.parse(data, depth=codec.DOCUMENT_DEPTH)


# --- steps -------------------------------------------------------------------------------------------


def _show_step(step: StepState, load: Load) -> dict[str, Any]:
    error = facts_of(step.last_failure).get("error", {}) if step.last_failure else {}
    return {
        "step": step.number,
        **facts_of(step.started),
        "status": status_of(step),
        "attempts": step.last_attempt,
        "failures": step.failures,
        "interruptions": step.interruptions,
        "tokens_used": sum((step.tokens or {}).values()),
        "last_error": error.get("message"),
        "output": _value(step.completed, load),
    }
