"""What is shown of a run: statuses, steps in a line, and the fields that its program sees.

It follows from the entries, and is not stored: which tasks are pending or completed, how often a
persona was retried and in which state it is follow from the steps. ``run_view`` has the typed views
that are made from it; this module is imported by every program, and theirs would cost it time.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta
from operator import attrgetter
from typing import TYPE_CHECKING

from maestro_hive.kernel.errors import DecodeError
from maestro_hive.maestro.state import codec
from maestro_hive.maestro.state.projections import facts_of, labels, status_of, was_healed
from maestro_hive.maestro.state.records import BANKRUPT, Entry, EntryKind, from_micros
from maestro_hive.maestro.state.records import OVER as OVER  # noqa: PLC0414 - for callers

if TYPE_CHECKING:
    from collections.abc import Callable, Container
    from datetime import datetime

    from maestro_hive.maestro.state.codec import Json
    from maestro_hive.maestro.state.projections import Facts, Load, RunState, StepState
    from maestro_hive.maestro.state.records import RunRecord

#: The status of a run that is not finished and not executed: its process was killed, or left it.
STOPPED = "stopped"
#: The statuses of runs that have a workflow.
STATUSES = ("pending", "running", "waiting", *OVER, STOPPED, BANKRUPT)
#: The statuses of a step that is completed.
COMPLETED = ("success", "recovered")


# --- statuses -------------------------------------------------------------------------------------


def run_status(state: RunState) -> str:
    """Return the status of a run; without a workflow, what its steps or its program say."""
    if state.ended is not None:
        return str(facts_of(state.ended).get("status", "failed"))
    if state.started is None:
        return _status_without_workflow(state)
    return "waiting" if open_waits(state) else "running"


def _status_without_workflow(state: RunState) -> str:
    """Return what follows from the steps, or what the program has set.

    A program that sets the status itself also says itself when it has succeeded: completed steps
    may not be all. What fails or runs later than it was set, counts.
    """
    follows = _status_of_steps(state)
    set_by_hand = state.field_seqs.get("status", 0)
    if follows is None or (set_by_hand and follows == "success"):
        return state.status
    newest = max((step.seq for step in state.latest.values()), default=0)
    return state.status if set_by_hand > newest else follows


def _status_of_steps(state: RunState) -> str | None:
    """Return the status that follows from the steps; None if there are none.

    One that was stopped goes on when its run does: that is not finished, and did not fail.
    """
    found = {status_of(step) for step in state.steps.values() if step.completed is None}
    if found & {"running", "retrying"}:
        return "running"
    if found & {"failed", "bankrupt", "help_needed"} or state.escalated:
        return "failed"
    if found:
        return "running"
    return "success" if state.steps else None


def effective_status(workflow: str, status: str, *, held: bool) -> str:
    """Return the status to show, given the recorded one and whether a living process holds it."""
    if not held:
        return STOPPED if status == "running" else status
    if workflow and status in (*OVER, "waiting"):
        return status
    return "running"


def shown_status(record: RunRecord, held: Container[str]) -> str:
    """Return the status of a run to show, given the names of those that living processes hold."""
    return effective_status(record.workflow, record.status, held=record.name in held)


def open_waits(state: RunState) -> list[Entry]:
    """Return the questions that have no answer."""
    return list(state.questions.values())


def question_id(question: Entry) -> str:
    """Return what tells a question from others of its name: the digits of its position."""
    return question.identity[-8:].hex() if question.identity is not None else ""


def is_finished(state: RunState) -> bool:
    """Return whether nothing is left to do; without a workflow, as far as is recorded."""
    if state.started is not None:
        return state.ended is not None
    return not state.pending_tasks and not any(state.unfinished.values())


def ambiguous_steps(state: RunState, *, held: bool) -> list[StepState]:
    """Return the steps of which a person has to say whether they had their effect.

    An attempt without an end is one of a process that died, unless the run is ``held``.
    """
    if state.ended is not None:
        return []
    return [
        step
        for step in state.steps.values()
        if _is_ambiguous(step, held=held) and step.identity not in state.outcomes
    ]


def _is_ambiguous(step: StepState, *, held: bool) -> bool:
    if step.completed is not None or not step.log:
        return False
    last = facts_of(step.log[-1])
    if last.get("asked"):
        return True
    was_stopped = last.get("ambiguous", False) or (step.open_attempt > 0 and not held)
    return bool(was_stopped) and options_of(step).get("on_ambiguous") == "ask"


def options_of(step: StepState) -> Json:
    """Return the options that a step was last started with, as far as they are recorded."""
    starts = [entry for entry in step.log if entry.kind == EntryKind.ATTEMPT_STARTED]
    return (facts_of(starts[-1]).get("options") if starts else None) or {}


# --- fields: what a program sees of its own run ---------------------------------------------------


@dataclass(slots=True)
class ViewCache:
    """What was shown of a run before, by the number of the entry that it came from."""

    steps: dict[int, tuple[int, dict[str, Json]]] = field(default_factory=dict)
    values: dict[int, Json] = field(default_factory=dict)
    memories: dict[str, int] = field(default_factory=dict)

    def cached(self, load: Load) -> Callable[[Entry | None], Json]:
        """Return a function that reads each value once."""

        def value(entry: Entry | None) -> Json:
            if entry is None:
                return None
            if entry.seq not in self.values:
                self.values[entry.seq] = value_of(entry, load)
                if entry.kind == EntryKind.MEMORY_SAVED:  # takes the place of the previous one
                    persona = str(facts_of(entry).get("persona", ""))
                    self.values.pop(self.memories.get(persona, -1), None)
                    self.memories[persona] = entry.seq
            return self.values[entry.seq]

        return value


def show_run(
    state: RunState, run_id: str, load: Load, cache: ViewCache | None = None
) -> dict[str, Json]:
    """Return a run as plain data: its fields, and its steps with their outputs.

    What has not changed since it was put into ``cache`` is taken from there.
    """
    cache = cache or ViewCache()
    names = labels(state)
    return {
        "workflow_id": run_id,
        **show_fields(state, load, cache),
        "created_at": from_micros(state.created_at).isoformat(),
        "updated_at": from_micros(state.updated_at).isoformat(),
        "steps": [
            _cached_step(step, names[number], load, cache) for number, step in state.steps.items()
        ],
    }


def shown_output(step: StepState, output: Json) -> Json:
    """Return the result of a step as it is shown: not at all if all of the step is redacted."""
    return "[redacted]" if step.completed is not None and is_redacted(step) else output


def is_redacted(step: StepState) -> bool:
    """Return whether the result of a step is shown nowhere."""
    return options_of(step).get("redact") is True


def _cached_step(step: StepState, label: str, load: Load, cache: ViewCache) -> dict[str, Json]:
    seq, shown = cache.steps.get(step.number, (-1, {}))
    if seq != step.seq:
        shown = step_facts(step, label)
        shown["started_at"] = shown["started_at"].isoformat()
        shown["output"] = shown_output(step, value_of(step.completed, load))
        cache.steps[step.number] = (step.seq, shown)
    return shown


def show_fields(state: RunState, load: Load, cache: ViewCache | None = None) -> dict[str, Json]:
    """Return the fields of a run by name, with what follows from its steps."""
    value = (cache or ViewCache()).cached(load)
    fields = state.fields()
    fields["status"] = run_status(state)
    if state.steps:
        latest = max(state.latest.values(), key=attrgetter("seq"))
        follows = {"phase": latest.name, "step": len(state.steps)}
        fields |= {name: it for name, it in follows.items() if name not in state.field_seqs}
    completed, pending = _tasks_of(state)
    fields["completed_tasks"] = list(dict.fromkeys([*state.completed_tasks, *completed]))
    fields["pending_tasks"] = [
        *(name for name in state.pending_tasks if name not in completed),
        *(
            name
            for name in pending
            if name not in state.pending_tasks and name not in state.completed_tasks
        ),
    ]
    retries = fields["retry_counts"]
    for persona, more in state.restarts.items():
        retries[persona] = retries.get(persona, 0) + more
    for persona in filter(None, state.latest):
        fields["persona_states"][persona] = _persona_fields(state, persona, value)
    return fields


def show_persona(state: RunState, persona: str, load: Load) -> dict[str, Json] | None:
    """Return the state of one persona; None if there is none."""
    if persona not in state.latest:
        return state.persona_states.get(persona)
    return _persona_fields(state, persona, ViewCache().cached(load))


def retry_count(state: RunState, persona: str) -> int:
    """Return how often a persona was retried."""
    return state.retry_counts.get(persona, 0) + state.restarts.get(persona, 0)


def without_derived_fields(state: RunState, changes: dict[str, Json]) -> dict[str, Json]:
    """Return changed fields less what follows from the steps, which is not to be set as well."""
    changes = dict(changes)
    completed, pending = _tasks_of(state)
    derived: dict[str, tuple[Container[str], Container[str]]] = {
        "completed_tasks": (completed, state.completed_tasks),
        "pending_tasks": (pending, state.pending_tasks),
    }
    for name in derived.keys() & changes.keys():
        follows, set_by_hand = derived[name]
        changes[name] = [
            task for task in changes[name] if task not in follows or task in set_by_hand
        ]
    if "retry_counts" in changes:
        changes["retry_counts"] = {
            persona: count - state.restarts.get(persona, 0)
            for persona, count in changes["retry_counts"].items()
        }
    return changes


def _tasks_of(state: RunState) -> tuple[dict[str, None], dict[str, None]]:
    """Return the names whose steps are all completed, and those with a step that is not."""
    completed = {name: None for name, count in state.unfinished.items() if name and not count}
    return completed, {name: None for name, count in state.unfinished.items() if name and count}


def _persona_fields(
    state: RunState, persona: str, value: Callable[[Entry | None], Json]
) -> dict[str, Json]:
    """Return what follows from a persona's steps, and what was set by hand; the newer one wins."""
    step = state.latest[persona]
    derived = _derived_persona(state, persona, step, value)
    set_by_hand = state.persona_states.get(persona, {})
    newer = state.persona_seqs.get(persona, 0) > step.seq
    return {**derived, **set_by_hand} if newer else {**set_by_hand, **derived}


def _derived_persona(
    state: RunState, persona: str, step: StepState, value: Callable[[Entry | None], Json]
) -> dict[str, Json]:
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
    known = (step.started, step.completed, step.progress, *step.log)
    return max((entry for entry in known if entry is not None), key=attrgetter("seq"))


def value_of(entry: Entry | None, load: Load) -> Json:
    """Return an entry's value; plain JSON, if its class is not known here."""
    data = load(entry) if entry is not None else None
    if data is None:
        return None
    try:
        return codec.decode(data)
    except DecodeError:  # a class that this process does not know; its JSON can be shown
        return codec.parse(data, depth=codec.DOCUMENT_DEPTH)


def plain_values(load: Load) -> Load:
    """Return ``load``, which gives a value as plain JSON that cannot be decoded here.

    Its class may not be importable, or be another one by now.
    """

    def loaded(entry: Entry) -> bytes | None:
        data = load(entry)
        if data is None:
            return None
        try:
            codec.decode(data)
        except DecodeError:
            tree = codec.parse(data, depth=codec.DOCUMENT_DEPTH)
            return codec.encode(tree, depth=codec.WHOLE_DEPTH).data
        return data

    return loaded


# --- steps ----------------------------------------------------------------------------------------


def step_facts(
    step: StepState, label: str, *, held: bool = True, until: datetime | None = None
) -> dict[str, Json]:
    """Return a step in a line; an open attempt is interrupted unless the run is ``held``.

    ``until`` is the time up to which it is executed; by default, that of its latest entry.
    """
    first = step.log[0] if step.log else step.started
    last = step.completed or (step.log[-1] if step.log else step.started)
    ended = (until or last.when) if step.open_attempt else last.when
    status = status_of(step)
    return {
        "step": step.number,
        "name": step.name,
        "label": label,
        "persona": step.persona,
        "status": STOPPED if status == "running" and not held else status,
        "attempts": step.last_attempt,
        "failures": step.failures,
        "interruptions": step.interruptions + bool(step.open_attempt and not held),
        "tokens": sum((step.tokens or {}).values()),
        "started_at": first.when,
        "took_seconds": seconds_between(first.when, ended),
        "last_error": error_line(_last_failure(step)),
    }


def seconds_between(started: datetime, ended: datetime) -> float:
    """Return how long something took; a clock may have been set back."""
    return max(0.0, (ended - started).total_seconds())


def _last_failure(step: StepState) -> Entry | None:
    """Return its latest failure; one interruption too many is recorded as no failure of the task."""
    last = step.log[-1] if step.log else None
    if last is not None and last.kind == EntryKind.ATTEMPT_FAILED:
        return last
    return step.last_failure


def error_line(entry: Entry | None) -> str | None:
    """Return an entry's error as ``Type: message``."""
    error = facts_of(entry).get("error") if entry is not None else None
    if not error:
        return None
    kind, message = error.get("type"), error.get("message")
    return ": ".join(str(part) for part in (kind, message if message != kind else None) if part)


# --- waits ----------------------------------------------------------------------------------------


def wait_seconds(facts: Facts) -> float | None:
    """Return how long is waited, if it is."""
    wait = facts.get("wait")
    seconds = wait.get("seconds") if isinstance(wait, dict) else None
    return None if seconds is None else float(seconds)


def deadline(entry: Entry, facts: Facts) -> datetime | None:
    """Return when a wait ends at the latest; None if it has no limit."""
    seconds = wait_seconds(facts)
    try:
        return None if seconds is None else entry.when + timedelta(seconds=seconds)
    except OverflowError:  # as good as no limit
        return None
