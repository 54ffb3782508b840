"""The read model of a run: typed views, folded from its entries.

``maestro show``, ``--json``, exports, the ``workflows`` namespace of ``StateManager`` and the JSON
copies of runs are all made from what is here. Nothing of it is stored: which tasks are pending or
completed, how often a persona was retried and in which state it is follow from the steps.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from maestro_hive.kernel.errors import DecodeError
from maestro_hive.maestro.state import codec, events
from maestro_hive.maestro.state.projections import (
    effective_entries,
    facts_of,
    feedback_of,
    labels,
    status_of,
    was_healed,
)
from maestro_hive.maestro.state.records import Entry, EntryKind, from_micros

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Sequence
    from datetime import datetime

    from maestro_hive.maestro.state.projections import Load, RunState, StepState
    from maestro_hive.maestro.state.records import Lease, RunRecord

#: The statuses of a run whose workflow ended.
OVER = ("success", "failed", "cancelled")
#: The status of a run that is not finished and not executed: its process was killed, or left it.
STOPPED = "stopped"
#: The statuses of a step that is completed.
COMPLETED = ("success", "recovered")

# --- the views ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class HolderView:
    """The process that executes a run."""

    host: str
    pid: int
    since: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitView:
    """A question of a run: since when, until when, and the shape of the answer it takes.

    ``answered`` says that an answer is in the inbox, which the run takes when it is resumed.
    """

    name: str
    since: datetime
    until: datetime | None
    shape: Any
    answered: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildView:
    """A run that the workflow started; its status is None if it was purged."""

    run_id: str
    workflow: str | None
    status: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PersonaView:
    """What a persona spent in a run, and how long its history is."""

    persona: str
    tokens: int
    usd: float
    history_items: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptView:
    """One attempt at a step; ``retry_in`` is the wait before the next one."""

    attempt: int
    status: str
    started_at: datetime
    ended_at: datetime | None
    tokens: int
    round: int | None
    error: dict[str, Any] | None
    healed: bool
    retry_in: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepView:
    """One step in a line; ``label`` is ``name#2`` for the second step of a name."""

    step: int
    name: str
    label: str
    persona: str
    status: str
    attempts: int
    failures: int
    interruptions: int
    tokens: int
    started_at: datetime
    took_seconds: float
    last_error: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDetails:
    """One step with each attempt, its input and output, and the memory of its persona."""

    run_id: str
    step: StepView
    attempts: tuple[AttemptView, ...]
    feedback: tuple[str, ...]
    progress: Any
    input: Any
    output: Any
    memory: Any
    history: tuple[Any, ...]
    events: tuple[events.RunEvent, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunView:
    """One run: its status, what it waits for, its steps, children and personas.

    ``steps`` may leave out completed ones; ``total_steps`` counts all. ``fields`` are those that
    the program set by hand, and ``latest_events`` the last that were recorded.
    """

    run_id: str
    workflow: str | None
    status: str
    holder: HolderView | None
    parent: str | None
    forked_from: str | None
    from_step: str | None
    started_at: datetime
    updated_at: datetime
    ended_at: datetime | None
    took_seconds: float
    error: dict[str, Any] | None
    reason: str | None
    waits_for: tuple[WaitView, ...]
    input: Any
    result: Any
    fields: dict[str, Any]
    total_steps: int
    steps: tuple[StepView, ...]
    children: tuple[ChildView, ...]
    personas: tuple[PersonaView, ...]
    latest_events: tuple[events.RunEvent, ...]


def to_dict(view: Any) -> Any:
    """Return a view as plain data for JSON: views as objects, tuples as lists, all else as it is."""
    match view:
        case events.RunEvent():
            return events.to_dict(view)
        case StepDetails():
            parts = {each.name: to_dict(getattr(view, each.name)) for each in _FIELDS_OF_DETAILS}
            return {"run_id": view.run_id, **parts.pop("step"), **parts}
        case _ if dataclasses.is_dataclass(view) and not isinstance(view, type):
            fields = dataclasses.fields(view)
            return {each.name: to_dict(getattr(view, each.name)) for each in fields}
        case tuple():
            return [to_dict(each) for each in view]
        case _:
            return view


_FIELDS_OF_DETAILS = dataclasses.fields(StepDetails)


def plain_values(load: Load) -> Load:
    """Return ``load``, which gives a value of a class that is not importable here as plain JSON."""

    def loaded(entry: Entry) -> bytes | None:
        data = load(entry)
        if data is None:
            return None
        try:
            codec.decode(data)
        except codec.UnknownClassError:
            tree = codec.parse(data, depth=codec.DOCUMENT_DEPTH)
            return codec.encode(tree, depth=codec.WHOLE_DEPTH).data
        return data

    return loaded


# --- a run, read ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedRun:
    """A run as a reader found it, with what its views are made from; nothing holds it."""

    record: RunRecord
    entries: Sequence[Entry]
    state: RunState
    lease: Lease | None
    load: Load
    now: datetime

    @property
    def status(self) -> str:
        """Its status as listings show it."""
        record = self.record
        return effective_status(record.workflow, record.status, held=self.lease is not None)

    @property
    def workflow(self) -> str:
        """The name of its workflow; empty if it has none."""
        started = self.state.started
        if started is None:
            return self.record.workflow
        return str(facts_of(started).get("workflow", ""))

    @property
    def executed_until(self) -> datetime | None:
        """Now, if a process executes it."""
        return self.now if self.lease is not None else None

    def value(self, entry: Entry | None) -> Any:
        """Return an entry's value as plain JSON: its classes may not be importable here."""
        data = self.load(entry) if entry is not None else None
        return None if data is None else codec.parse(data, depth=codec.DOCUMENT_DEPTH)


def run_view(
    run: RecordedRun,
    *,
    most_steps: int | None,
    most_events: int,
    answered: Container[bytes],
    child_status: Callable[[str], str | None],
) -> RunView:
    """Return the view of a run: of its steps the last ``most_steps``, and those not completed.

    ``answered`` has the questions that were answered, and ``child_status`` finds other runs.
    """
    state, started, ended = run.state, run.state.started, run.state.ended
    facts = facts_of(started) if started is not None else {}
    end_facts = facts_of(ended) if ended is not None else {}
    started_at, updated_at, ended_at = _times(run)
    return RunView(
        run_id=run.record.name,
        workflow=run.workflow or None,
        status=run.status,
        holder=holder_view(run.lease),
        parent=facts.get("parent"),
        forked_from=facts.get("forked_from"),
        from_step=facts.get("from_step"),
        started_at=started_at,
        updated_at=updated_at,
        ended_at=ended_at,
        took_seconds=_seconds(started_at, ended_at or run.executed_until or updated_at),
        error=end_facts.get("error"),
        reason=end_facts.get("reason"),
        waits_for=wait_views(state, answered),
        input=run.value(started),
        result=run.value(ended),
        fields=state.fields(),
        total_steps=len(state.steps),
        steps=_chosen_steps(run, most_steps),
        children=_child_views(state, child_status),
        personas=_persona_views(state),
        latest_events=_latest_events(run, most_events),
    )


def _times(run: RecordedRun) -> tuple[datetime, datetime, datetime | None]:
    state, record = run.state, run.record
    started_at = from_micros(state.created_at) if state.seq else record.created_at
    if state.started is not None:  # a fork has entries that are older than itself
        started_at = state.started.when
    updated_at = max(started_at, from_micros(state.updated_at) if state.seq else record.updated_at)
    return started_at, updated_at, state.ended.when if state.ended is not None else None


def _seconds(started: datetime, ended: datetime) -> float:
    return max(0.0, (ended - started).total_seconds())  # a clock may have been set back


def holder_view(lease: Lease | None) -> HolderView | None:
    """Return the process that holds a lease."""
    if lease is None:
        return None
    return HolderView(host=lease.holder.host, pid=lease.holder.pid, since=lease.holder.since)


def wait_views(state: RunState, answered: Container[bytes] = ()) -> tuple[WaitView, ...]:
    """Return the questions of a run that is not over; ``answered`` are identities."""
    if state.ended is not None:
        return ()
    return tuple(
        WaitView(
            name=str(facts_of(entry).get("name")),
            since=entry.when,
            until=events.deadline(entry, facts_of(entry)),
            shape=facts_of(entry).get("shape"),
            answered=entry.identity in answered,
        )
        for entry in open_waits(state)
    )


def _child_views(
    state: RunState, status_of_run: Callable[[str], str | None]
) -> tuple[ChildView, ...]:
    children = [facts_of(entry) for entry in state.children.values()]
    names = [str(facts.get("run_id")) for facts in children]
    return tuple(
        ChildView(run_id=name, workflow=facts.get("workflow"), status=status_of_run(name))
        for name, facts in zip(names, children, strict=True)
    )


def _persona_views(state: RunState) -> tuple[PersonaView, ...]:
    names = dict.fromkeys([*state.latest, *state.spent, *state.memories, *state.histories])
    return tuple(
        PersonaView(
            persona=name,
            tokens=state.spent.get(name, (0, 0.0))[0],
            usd=state.spent.get(name, (0, 0.0))[1],
            history_items=len(state.histories.get(name, ())),
        )
        for name in names
        if name
    )


def _latest_events(run: RecordedRun, most: int) -> tuple[events.RunEvent, ...]:
    return tuple(events.latest_events(run.record.name, run.entries, run.load, most))


# --- steps ----------------------------------------------------------------------------------------


def _chosen_steps(run: RecordedRun, most: int | None) -> tuple[StepView, ...]:
    steps, names = list(run.state.steps.values()), labels(run.state)
    if most is not None:
        open_ones = [step for step in steps if status_of(step) not in COMPLETED][-most:]
        wanted = {step.number for step in (*steps[-most:], *open_ones)}
        steps = [step for step in steps if step.number in wanted]
    held, until = run.lease is not None, run.executed_until
    return tuple(step_view(step, names[step.number], held=held, until=until) for step in steps)


def step_view(
    step: StepState, label: str, *, held: bool = True, until: datetime | None = None
) -> StepView:
    """Return a step in a line; an open attempt is interrupted unless the run is ``held``."""
    first = step.log[0] if step.log else step.started
    last = step.completed or (step.log[-1] if step.log else step.started)
    ended = (until or last.when) if step.open_attempt else last.when
    status = status_of(step)
    return StepView(
        step=step.number,
        name=step.name,
        label=label,
        persona=step.persona,
        status=STOPPED if status == "running" and not held else status,
        attempts=step.last_attempt,
        failures=step.failures,
        interruptions=step.interruptions + bool(step.open_attempt and not held),
        tokens=sum((step.tokens or {}).values()),
        started_at=first.when,
        took_seconds=_seconds(first.when, ended),
        last_error=_error_line(_last_failure(step)),
    )


def _last_failure(step: StepState) -> Entry | None:
    """Return its latest failure; one interruption too many is recorded as no failure of the task."""
    last = step.log[-1] if step.log else None
    if last is not None and last.kind == EntryKind.ATTEMPT_FAILED:
        return last
    return step.last_failure


def _error_line(entry: Entry | None) -> str | None:
    """Return an entry's error as ``Type: message``."""
    error = facts_of(entry).get("error") if entry is not None else None
    if not error:
        return None
    kind, message = error.get("type"), error.get("message")
    return ": ".join(str(part) for part in (kind, message if message != kind else None) if part)


def step_details(run: RecordedRun, step: StepState) -> StepDetails:
    """Return a step with all that is recorded of it."""
    state = run.state
    label, held = labels(state)[step.number], run.lease is not None
    return StepDetails(
        run_id=run.record.name,
        step=step_view(step, label, held=held, until=run.executed_until),
        attempts=_attempts(run, step),
        feedback=() if step.completed is not None else tuple(feedback_of(step)),
        progress=run.value(step.progress),
        input=run.value(step.started),
        output=run.value(step.completed),
        memory=run.value(state.memories.get(step.persona)),
        history=tuple(run.value(entry) for entry in state.histories.get(step.persona, [])),
        events=_events_of(run, step),
    )


def _attempts(run: RecordedRun, step: StepState) -> tuple[AttemptView, ...]:
    """Return every attempt since the run was last restored, those before a retry included."""
    attempts: list[AttemptView] = []
    for entry in effective_entries(run.entries):
        if entry.step != step.number:
            continue
        if entry.kind == EntryKind.ATTEMPT_STARTED:
            attempts.append(_open_attempt(entry, step))
        elif entry.kind == EntryKind.ATTEMPT_FAILED and attempts:
            attempts[-1] = _failed_attempt(attempts[-1], entry)
        elif entry.kind == EntryKind.STEP_COMPLETED and attempts:
            ended = dataclasses.replace(attempts[-1], status="success", ended_at=entry.when)
            attempts[-1] = ended
    if attempts and step.open_attempt and run.lease is not None:
        attempts[-1] = dataclasses.replace(attempts[-1], status="running")
    return tuple(attempts)


def _open_attempt(entry: Entry, step: StepState) -> AttemptView:
    return AttemptView(
        attempt=entry.attempt,
        status="interrupted",  # unless its end is found
        started_at=entry.when,
        ended_at=None,
        tokens=(step.tokens or {}).get(entry.attempt, 0),
        round=None,
        error=None,
        healed=False,
        retry_in=None,
    )


def _failed_attempt(attempt: AttemptView, entry: Entry) -> AttemptView:
    facts = facts_of(entry)
    return dataclasses.replace(
        attempt,
        status=facts.get("status", "failed"),
        ended_at=entry.when,
        round=facts.get("round", 1),
        error=facts.get("error"),
        healed=bool(facts.get("healed")),
        retry_in=(facts.get("wait") or {}).get("seconds"),
    )


def _events_of(run: RecordedRun, step: StepState) -> tuple[events.RunEvent, ...]:
    """Return the events of one step: those with its number, and those with its identity."""
    reader = events.EventReader(run.record.name, run.load)
    found = []
    for entry in run.entries:
        own = entry.step == step.number or (
            entry.identity is not None and entry.identity == step.identity
        )
        if not own and entry.kind != EntryKind.RESTORED:
            continue
        if (event := reader.read(entry)) is not None and own:
            found.append(event)
    return tuple(found)


# --- statuses -------------------------------------------------------------------------------------


def run_status(state: RunState) -> str:
    """Return the status of a run; without a workflow, the one that was set by hand."""
    if state.ended is not None:
        return str(facts_of(state.ended).get("status", "failed"))
    if state.started is None:
        return state.status
    return "waiting" if open_waits(state) else "running"


def effective_status(workflow: str, status: str, *, held: bool) -> str:
    """Return the status to show, given the recorded one and whether a living process holds it."""
    if not held:
        return STOPPED if status == "running" else status
    if workflow and status in (*OVER, "waiting"):
        return status
    return "running"


def open_waits(state: RunState) -> list[Entry]:
    """Return the questions that have no answer."""
    return list(state.questions.values())


def is_finished(state: RunState) -> bool:
    """Return whether nothing is left to do; without a workflow, as far as is recorded."""
    if state.started is not None:
        return state.ended is not None
    return not state.pending_tasks and not any(state.unfinished.values())


# --- fields: what a program sees of its own run ---------------------------------------------------


@dataclass(slots=True)
class ViewCache:
    """What was shown of a run before, by the number of the entry that it came from."""

    steps: dict[int, tuple[int, dict[str, Any]]] = field(default_factory=dict)
    values: dict[int, Any] = field(default_factory=dict)
    memories: dict[str, int] = field(default_factory=dict)

    def cached(self, load: Load) -> Callable[[Entry | None], Any]:
        """Return a function that reads each value once."""

        def value(entry: Entry | None) -> Any:
            if entry is None:
                return None
            if entry.seq not in self.values:
                self.values[entry.seq] = _value(entry, load)
                if entry.kind == EntryKind.MEMORY_SAVED:  # takes the place of the previous one
                    persona = str(facts_of(entry).get("persona", ""))
                    self.values.pop(self.memories.get(persona, -1), None)
                    self.memories[persona] = entry.seq
            return self.values[entry.seq]

        return value


def show_run(
    state: RunState, run_id: str, load: Load, cache: ViewCache | None = None
) -> dict[str, Any]:
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


def _cached_step(step: StepState, label: str, load: Load, cache: ViewCache) -> dict[str, Any]:
    seq, shown = cache.steps.get(step.number, (-1, {}))
    if seq != step.seq:
        view = step_view(step, label)
        shown = {name: getattr(view, name) for name in _FIELDS_OF_STEP}
        shown["started_at"] = view.started_at.isoformat()
        shown["output"] = _value(step.completed, load)
        cache.steps[step.number] = (step.seq, shown)
    return shown


_FIELDS_OF_STEP = tuple(each.name for each in dataclasses.fields(StepView))


def show_fields(state: RunState, load: Load, cache: ViewCache | None = None) -> dict[str, Any]:
    """Return the fields of a run by name, with what follows from its steps."""
    value = (cache or ViewCache()).cached(load)
    fields = state.fields()
    if state.started is not None:
        fields["status"] = run_status(state)
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


def show_persona(state: RunState, persona: str, load: Load) -> dict[str, Any]:
    """Return the state of one persona; empty if there is none."""
    if persona not in state.latest:
        return dict(state.persona_states.get(persona, {}))
    return _persona_fields(state, persona, ViewCache().cached(load))


def retry_count(state: RunState, persona: str) -> int:
    """Return how often a persona was retried."""
    return state.retry_counts.get(persona, 0) + state.restarts.get(persona, 0)


def without_derived_fields(state: RunState, changes: dict[str, Any]) -> dict[str, Any]:
    """Return changed fields less what follows from the steps, which is not to be set as well."""
    changes = dict(changes)
    completed, pending = _tasks_of(state)
    if "completed_tasks" in changes:
        changes["completed_tasks"] = [
            name
            for name in changes["completed_tasks"]
            if name not in completed or name in state.completed_tasks
        ]
    if "pending_tasks" in changes:
        changes["pending_tasks"] = [
            name
            for name in changes["pending_tasks"]
            if name not in pending or name in state.pending_tasks
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
    state: RunState, persona: str, value: Callable[[Entry | None], Any]
) -> dict[str, Any]:
    """Return what follows from a persona's steps, and what was set by hand; the newer one wins."""
    step = state.latest[persona]
    derived = _derived_persona(state, persona, step, value)
    set_by_hand = state.persona_states.get(persona, {})
    newer = state.persona_seqs.get(persona, 0) > step.seq
    return {**derived, **set_by_hand} if newer else {**set_by_hand, **derived}


def _derived_persona(
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
    known = (step.started, step.completed, step.progress, *step.log)
    return max((entry for entry in known if entry is not None), key=attrgetter("seq"))


def _value(entry: Entry | None, load: Load) -> Any:
    data = load(entry) if entry is not None else None
    if data is None:
        return None
    try:
        return codec.decode(data)
    except DecodeError:  # a class that this process does not know; its JSON can be shown
        return codec.parse(data, depth=codec.DOCUMENT_DEPTH)
