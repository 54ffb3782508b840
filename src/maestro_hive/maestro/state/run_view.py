"""The read model of a run: typed views, made from its entries.

``maestro show``, ``--json`` and the dashboard are made from it. One step in a line, and the fields
of a run, are those of ``views``, from which the JSON copies and the ``workflows`` namespace of
``StateManager`` are made too.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from maestro_hive.maestro.state import codec, events
from maestro_hive.maestro.state.projections import (
    effective_entries,
    facts_of,
    feedback_of,
    labels,
    status_of,
)
from maestro_hive.maestro.state.records import EntryKind, from_micros
from maestro_hive.maestro.state.views import (
    COMPLETED,
    effective_status,
    open_waits,
    seconds_between,
    step_facts,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Sequence
    from datetime import datetime

    from maestro_hive.maestro.state.projections import Load, RunState, StepState
    from maestro_hive.maestro.state.records import Entry, Lease, RunRecord

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
    """One attempt at a step; ``retry_in`` is the wait before the next one.

    ``options`` are those that the step was executed with, as far as they are recorded.
    """

    attempt: int
    status: str
    started_at: datetime
    ended_at: datetime | None = None
    tokens: int
    round: int | None = None
    error: dict[str, Any] | None = None
    healed: bool = False
    retry_in: float | None = None
    options: dict[str, Any] = field(default_factory=dict)


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


def to_dict(result: Any) -> Any:
    """Return a typed result as plain data for JSON: tuples as lists, all other values unchanged."""
    match result:
        case events.RunEvent():
            return events.to_dict(result)
        case StepDetails():
            details = _fields_of(result)
            return {"run_id": result.run_id, **details.pop("step"), **details}
        case _ if dataclasses.is_dataclass(result) and not isinstance(result, type):
            return _fields_of(result)
        case tuple():
            return [to_dict(each) for each in result]
        case _:
            return result


def _fields_of(result: Any) -> dict[str, Any]:
    return {each.name: to_dict(getattr(result, each.name)) for each in dataclasses.fields(result)}


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
        took_seconds=seconds_between(started_at, ended_at or run.executed_until or updated_at),
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
        latest_events=tuple(
            events.latest_events(run.record.name, run.entries, run.load, most_events)
        ),
    )


def _times(run: RecordedRun) -> tuple[datetime, datetime, datetime | None]:
    state, record = run.state, run.record
    started_at = from_micros(state.created_at) if state.seq else record.created_at
    if state.started is not None:  # a fork has entries that are older than itself
        started_at = state.started.when
    updated_at = max(started_at, from_micros(state.updated_at) if state.seq else record.updated_at)
    return started_at, updated_at, state.ended.when if state.ended is not None else None


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


# --- steps ----------------------------------------------------------------------------------------


def _chosen_steps(run: RecordedRun, most: int | None) -> tuple[StepView, ...]:
    steps, names = list(run.state.steps.values()), labels(run.state)
    if most is not None:
        open_ones = [step for step in steps if status_of(step) not in COMPLETED][-most:]
        wanted = {step.number for step in (*steps[-most:], *open_ones)}
        steps = [step for step in steps if step.number in wanted]
    held, until = run.lease is not None, run.executed_until
    return tuple(
        StepView(**step_facts(step, names[step.number], held=held, until=until)) for step in steps
    )


def step_details(run: RecordedRun, step: StepState) -> StepDetails:
    """Return a step with all that is recorded of it."""
    state = run.state
    label, held = labels(state)[step.number], run.lease is not None
    return StepDetails(
        run_id=run.record.name,
        step=StepView(**step_facts(step, label, held=held, until=run.executed_until)),
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
            tokens = (step.tokens or {}).get(entry.attempt, 0)
            attempts.append(
                AttemptView(  # interrupted, unless its end is found
                    attempt=entry.attempt,
                    status="interrupted",
                    started_at=entry.when,
                    tokens=tokens,
                    options=dict(facts_of(entry).get("options") or {}),
                )
            )
        elif entry.kind == EntryKind.ATTEMPT_FAILED and attempts:
            attempts[-1] = _failed_attempt(attempts[-1], entry)
        elif entry.kind == EntryKind.STEP_COMPLETED and attempts:
            ended = dataclasses.replace(attempts[-1], status="success", ended_at=entry.when)
            attempts[-1] = ended
    if attempts and step.open_attempt and run.lease is not None:
        attempts[-1] = dataclasses.replace(attempts[-1], status="running")
    return tuple(attempts)


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
