"""The read model of a run: typed views, made from its entries.

``maestro show``, ``--json`` and the dashboard are made from it. One step in a line, and the fields
of a run, are those of ``views``, from which the JSON copies and the ``workflows`` namespace of
``StateManager`` are made too.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from maestro_hive.maestro.state import codec
from maestro_hive.maestro.state.plain import fields_of, to_dict
from maestro_hive.maestro.state.projections import (
    effective_entries,
    facts_of,
    feedback_of,
    labels,
    status_of,
    sum_of_usd,
)
from maestro_hive.maestro.state.records import EntryKind, from_micros, permit_lease
from maestro_hive.maestro.state.views import (
    COMPLETED,
    ambiguous_steps,
    deadline,
    effective_status,
    error_line,
    open_waits,
    question_id,
    seconds_between,
    shown_output,
    step_facts,
    value_of,
)

if TYPE_CHECKING:
    from collections.abc import Container, Mapping, Sequence
    from datetime import datetime

    from maestro_hive.maestro.state.codec import Json
    from maestro_hive.maestro.state.events import RunEvent
    from maestro_hive.maestro.state.projections import Load, RunState, StepState
    from maestro_hive.maestro.state.records import Dispatch, Entry, Lease, RunRecord

# --- the views ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class HolderView:
    """The process that executes a run."""

    host: str
    pid: int
    since: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitView:
    """A question of a run: what it is about, since when, until when, and the shape of its answer.

    ``id`` tells it from others of its name. ``answered`` says that an answer is in the inbox, which
    the run takes when it is resumed.
    """

    id: str
    name: str
    about: Json
    since: datetime
    until: datetime | None
    shape: Json
    answered: bool = False
    #: Of a step that failed for good: what its escalation is answered by; and its ticket, if recorded.
    escalation: str | None = None
    ticket: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AmbiguousView:
    """A step that may have had its effect, of which a person has to say so: and with which result."""

    step: int
    label: str
    shape: Json


@dataclass(frozen=True, slots=True, kw_only=True)
class SuspensionView:
    """Why a run is suspended: no process executes it, and it is resumed when its program is started."""

    at: datetime
    error_type: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TimerView:
    """A sleep or a timeout (``what``) of a run that has not ended, and until when it takes."""

    name: str
    what: str
    since: datetime
    until: datetime | None


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatchView:
    """What a run that belongs to workers waits for: ``state`` is ready, scheduled, active or held.

    A scheduled one is due at ``due_at``; one that is held waits until it is woken. ``deaths`` counts
    the processes that died with it.
    """

    queue: str
    state: str
    priority: int
    enqueued_at: datetime
    due_at: datetime | None
    version: str | None
    deaths: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildView:
    """A run that the workflow started, and those that it started; its status is None if it was purged.

    ``waits_for`` has the names of its questions and sleeps, ``error`` is how it failed. Of many
    children some are left out; ``hidden_children`` counts them.
    """

    run_id: str
    workflow: str | None
    status: str | None
    took_seconds: float | None = None
    waits_for: tuple[str, ...] = ()
    error: str | None = None
    children: tuple[ChildView, ...] = ()
    hidden_children: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PersonaView:
    """What a persona spent in a run, and how long its history is."""

    persona: str
    tokens: int
    usd: float
    history_items: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TriedRepairView:
    """What came of asking healers about a failed attempt, and whether it worked, once that is known.

    ``arguments`` are all that healers changed of the step's input, by name.
    """

    status: str
    failure_type: str | None
    fingerprint: str
    healer: str | None = None
    fix: str | None = None
    feedback: str | None = None
    arguments: Json = None
    files: tuple[str, ...] = ()
    error: str | None = None
    verdict: str | None = None
    reason: str | None = None
    restored: tuple[str, ...] = ()


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
    #: What it reserved of budgets: tokens, usd, and whether that was estimated.
    reserved: dict[str, Json] = field(default_factory=dict)
    round: int | None = None
    error: dict[str, Json] | None = None
    healed: bool = False
    retry_in: float | None = None
    options: dict[str, Json] = field(default_factory=dict)
    #: What tells its failure from others, if that was diagnosed, and what was done about it.
    fingerprint: str | None = None
    repairs: tuple[TriedRepairView, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningThread:
    """The thread of an attempt that is over: it still runs, and holds a permit of the step's limit."""

    attempt: int
    holder: HolderView


@dataclass(frozen=True, slots=True, kw_only=True)
class StepView:
    """One step in a line; ``label`` is ``name#2`` for the second step of a name.

    ``permits_held_by`` are the processes that hold all permits of its limit, if its next attempt
    waits for one.
    """

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
    running_threads: tuple[RunningThread, ...] = ()
    permits_held_by: tuple[HolderView, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDetails:
    """One step with each attempt, its input and output, and the memory of its persona."""

    run_id: str
    step: StepView
    attempts: tuple[AttemptView, ...]
    feedback: tuple[str, ...]
    progress: Json
    input: Json
    output: Json
    memory: Json
    history: tuple[Json, ...]
    events: tuple[RunEvent, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunView:
    """One run: its status, what it waits for, its steps, children and personas.

    ``steps`` may leave out completed ones; ``total_steps`` counts all. ``executed`` says that a
    living process executes it. ``saved_tokens`` and ``saved_usd`` are what its completed steps had
    spent each time it was resumed. ``fields`` are those that the program set by hand, and
    ``latest_events`` the last that were recorded.
    """

    run_id: str
    workflow: str | None
    status: str
    executed: bool
    holder: HolderView | None
    dispatch: DispatchView | None
    parent: str | None
    forked_from: str | None
    from_step: str | None
    started_at: datetime
    updated_at: datetime
    ended_at: datetime | None
    took_seconds: float
    error: dict[str, Json] | None
    reason: str | None
    suspended: SuspensionView | None
    waits_for: tuple[WaitView, ...]
    timers: tuple[TimerView, ...]
    ambiguous: tuple[AmbiguousView, ...]
    input: Json
    result: Json
    fields: dict[str, Json]
    total_steps: int
    steps: tuple[StepView, ...]
    children: tuple[ChildView, ...]
    hidden_children: int
    tokens: int
    usd: float
    saved_tokens: int
    saved_usd: float
    personas: tuple[PersonaView, ...]
    latest_events: tuple[RunEvent, ...]


class Children(NamedTuple):
    """The children of a run that are shown, and how many are left out."""

    shown: tuple[ChildView, ...]
    hidden: int


NO_CHILDREN = Children((), 0)


@to_dict.register(StepDetails)
def _(details: StepDetails) -> dict[str, Json]:
    plain = fields_of(details)
    return {"run_id": details.run_id, **plain.pop("step"), **plain}


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
    #: The permits of limits that living processes hold, by the name of their lease.
    permits: Mapping[str, Lease] = field(default_factory=dict)

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

    def value(self, entry: Entry | None) -> Json:
        """Return an entry's value as plain JSON: its classes may not be importable here."""
        data = self.load(entry) if entry is not None else None
        return None if data is None else codec.parse(data, depth=codec.DOCUMENT_DEPTH)


def run_view(
    run: RecordedRun,
    *,
    most_steps: int | None,
    most_events: int,
    answered: Container[bytes],
    children: Children = NO_CHILDREN,
    dispatch: Dispatch | None = None,
) -> RunView:
    """Return the view of a run: of its steps the last ``most_steps``, and those not completed.

    ``answered`` has the questions that were answered, ``children`` the runs that it started, and
    ``dispatch`` is what it waits for if it belongs to workers.
    """
    state, started, ended = run.state, run.state.started, run.state.ended
    facts = facts_of(started) if started is not None else {}
    end_facts = facts_of(ended) if ended is not None else {}
    started_at, updated_at, ended_at = _times(run)
    return RunView(
        run_id=run.record.name,
        workflow=run.workflow or None,
        status=run.status,
        executed=run.lease is not None,
        holder=holder_view(run.lease),
        dispatch=None if dispatch is None else _dispatch_view(dispatch),
        parent=facts.get("parent"),
        forked_from=facts.get("forked_from"),
        from_step=facts.get("from_step"),
        started_at=started_at,
        updated_at=updated_at,
        ended_at=ended_at,
        took_seconds=seconds_between(started_at, ended_at or run.executed_until or updated_at),
        error=_shown_error(end_facts),
        reason=end_facts.get("reason"),
        suspended=_suspension(run),
        waits_for=wait_views(state, run.load, answered),
        timers=timer_views(state),
        ambiguous=_ambiguous_views(run),
        input=run.value(started),
        result=run.value(ended),
        fields=state.fields(),
        total_steps=len(state.steps),
        steps=_chosen_steps(run, most_steps),
        children=children.shown,
        hidden_children=children.hidden,
        tokens=sum(tokens for tokens, _ in state.spent.values()),
        usd=sum_of_usd(usd for _, usd in state.spent.values()),
        saved_tokens=state.saved[0],
        saved_usd=state.saved[1],
        personas=_persona_views(state),
        latest_events=_latest_events(run, most_events) if most_events else (),
    )


def _latest_events(run: RecordedRun, most: int) -> tuple[RunEvent, ...]:
    from maestro_hive.maestro.state.event_reader import (
        latest_events,
    )

    return tuple(latest_events(run.record.name, run.entries, run.load, most))


def _times(run: RecordedRun) -> tuple[datetime, datetime, datetime | None]:
    state, record = run.state, run.record
    started_at = from_micros(state.created_at) if state.seq else record.created_at
    if state.started is not None:  # a fork has entries that are older than itself
        started_at = state.started.when
    updated_at = max(started_at, from_micros(state.updated_at) if state.seq else record.updated_at)
    return started_at, updated_at, state.ended.when if state.ended is not None else None


def holder_view(lease: Lease | None) -> HolderView | None:
    """Return the process that holds a lease, if there is one."""
    return None if lease is None else holder_of(lease)


def holder_of(lease: Lease) -> HolderView:
    """Return the process that holds a lease."""
    return HolderView(host=lease.holder.host, pid=lease.holder.pid, since=lease.holder.since)


def wait_views(
    state: RunState, load: Load, answered: Container[bytes] = ()
) -> tuple[WaitView, ...]:
    """Return the questions of a run that is not over; ``answered`` are identities."""
    if state.ended is not None:
        return ()
    return tuple(
        WaitView(
            id=question_id(entry),
            about=value_of(entry, load),
            name=str(facts_of(entry).get("name")),
            since=entry.when,
            until=deadline(entry, facts_of(entry)),
            shape=facts_of(entry).get("shape"),
            answered=entry.identity in answered,
            escalation=facts_of(entry).get("escalation"),
            ticket=_ticket_of(state, entry),
        )
        for entry in open_waits(state)
    )


def _ticket_of(state: RunState, wait: Entry) -> str | None:
    told = state.delivered.get(str(facts_of(wait).get("escalation")))
    facts = {} if told is None else facts_of(told)
    return facts.get("address") or facts.get("ticket")


def _ambiguous_views(run: RecordedRun) -> tuple[AmbiguousView, ...]:
    found, names = ambiguous_steps(run.state, held=run.lease is not None), labels(run.state)
    return tuple(
        AmbiguousView(
            step=step.number,
            label=names[step.number],
            shape=facts_of(step.started).get("returns") or {},
        )
        for step in found
    )


def _suspension(run: RecordedRun) -> SuspensionView | None:
    """Return why a run is suspended, if nothing happened since."""
    last = run.entries[-1] if run.entries and run.lease is None else None
    if last is None or last.kind != EntryKind.RUN_SUSPENDED:
        return None
    error = facts_of(last).get("error") or {}
    return SuspensionView(
        at=last.when,
        error_type=str(error.get("type", "")),
        message=str(error.get("message", "")),
    )


def timer_views(state: RunState) -> tuple[TimerView, ...]:
    """Return the sleeps and timeouts of a run that have not ended."""
    if state.ended is not None:
        return ()
    started = [
        entry
        for identity, entry in state.waits.items()
        if identity not in state.answers and identity not in state.questions
    ]
    return tuple(
        TimerView(
            name=str(facts_of(entry).get("name")),
            what=str(facts_of(entry).get("what")),
            since=entry.when,
            until=deadline(entry, facts_of(entry)),
        )
        for entry in started
    )


def _dispatch_view(dispatch: Dispatch) -> DispatchView:
    return DispatchView(
        queue=dispatch.queue,
        state=dispatch.state.name.lower(),
        priority=dispatch.priority,
        enqueued_at=dispatch.enqueued_at,
        due_at=dispatch.due_at,
        version=dispatch.version,
        deaths=dispatch.deaths,
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
    threads = _running_threads(run)
    return tuple(_step_view(run, step, names[step.number], threads) for step in steps)


def _step_view(
    run: RecordedRun, step: StepState, label: str, threads: Mapping[int, Sequence[RunningThread]]
) -> StepView:
    facts = step_facts(step, label, held=run.lease is not None, until=run.executed_until)
    refused = run.state.outcomes.get(step.identity or b"") if not step.log else None
    if refused is not None and refused.kind == EntryKind.STEP_FAILED and not step.completed:
        # It was retried, and failed before another attempt started: as over a budget.
        facts |= {"status": _refused_status(refused), "last_error": error_line(refused)}
    return StepView(
        **facts,
        running_threads=tuple(threads.get(step.number, ())),
        permits_held_by=_permits_awaited(run, step),
    )


def _refused_status(outcome: Entry) -> str:
    error = facts_of(outcome).get("error") or {}
    return "bankrupt" if str(error.get("type")).endswith("BudgetExceeded") else "failed"


def _running_threads(run: RecordedRun) -> dict[int, list[RunningThread]]:
    """Return the threads that outlived their attempts and still hold a permit, by step."""
    found: dict[int, list[RunningThread]] = {}
    for entry in run.entries if run.permits else ():
        if entry.kind != EntryKind.ATTEMPT_FAILED:
            continue
        for held in facts_of(entry).get("still_held", ()):
            lease = run.permits.get(held.get("lease"))
            same = lease and (lease.fence, lease.holder.id) == (held["fence"], held["holder"])
            if lease is not None and same:
                holder = holder_of(lease)
                thread = RunningThread(attempt=entry.attempt, holder=holder)
                found.setdefault(entry.step, []).append(thread)
    return found


def _permits_awaited(run: RecordedRun, step: StepState) -> tuple[HolderView, ...]:
    """Return who holds the permits of a step's limit, if it is to be retried and none is free."""
    if run.lease is None or not run.permits or status_of(step) != "retrying":
        return ()
    started = [entry for entry in step.log if entry.kind == EntryKind.ATTEMPT_STARTED]
    options = facts_of(started[-1]).get("options") if started else None
    count = (options or {}).get("max_concurrency") or 0
    held = [run.permits.get(permit_lease(step.name, number)) for number in range(count)]
    if not held or None in held:
        return ()
    return tuple(holder_of(lease) for lease in held if lease is not None)


def step_details(run: RecordedRun, step: StepState) -> StepDetails:
    """Return a step with all that is recorded of it."""
    state = run.state
    return StepDetails(
        run_id=run.record.name,
        step=_step_view(run, step, labels(state)[step.number], _running_threads(run)),
        attempts=_attempts(run, step),
        feedback=() if step.completed is not None else tuple(feedback_of(step)),
        progress=run.value(step.progress),
        input=run.value(step.started),
        output=shown_output(step, run.value(step.completed)),
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
                    reserved=dict(facts_of(entry).get("reserved") or {}),
                )
            )
        elif entry.kind == EntryKind.ATTEMPT_FAILED and attempts:
            attempts[-1] = _failed_attempt(attempts[-1], entry)
        elif entry.kind in (EntryKind.REPAIR_TRIED, EntryKind.REPAIR_JUDGED):
            _add_repair(run, attempts, entry)
        elif entry.kind == EntryKind.STEP_COMPLETED and attempts:
            ended = dataclasses.replace(attempts[-1], status="success", ended_at=entry.when)
            attempts[-1] = ended
    if attempts and step.open_attempt and run.lease is not None:
        attempts[-1] = dataclasses.replace(attempts[-1], status="running")
    return tuple(attempts)


def _add_repair(run: RecordedRun, attempts: list[AttemptView], entry: Entry) -> None:
    """Add a repair, or the verdict about it, to the attempt that it was for."""
    at = next((n for n, each in enumerate(attempts) if each.attempt == entry.attempt), None)
    if at is None:
        return
    attempt, facts = attempts[at], facts_of(entry)
    healer = facts.get("healer")
    earlier = next((each for each in attempt.repairs if each.healer == healer), None)
    if entry.kind == EntryKind.REPAIR_TRIED:
        ended = facts["status"] != "IN_PROGRESS"
        made = TriedRepairView(
            status=facts["status"],
            failure_type=facts.get("type"),
            fingerprint=facts["fingerprint"],
            healer=healer,
            fix=facts.get("fix"),
            feedback=facts.get("feedback"),
            arguments=run.value(entry) if ended else None,
            files=tuple(facts.get("files") or ()),
            error=facts.get("error"),
        )
    elif earlier is not None:
        made = dataclasses.replace(
            earlier,
            verdict=facts.get("verdict"),
            reason=facts.get("reason"),
            restored=tuple(facts.get("restored") or ()),
        )
    else:
        return
    others = tuple(each for each in attempt.repairs if each is not earlier)
    wait = (facts.get("wait") or {}).get("seconds")
    if made.status == "FIXED" and entry.kind == EntryKind.REPAIR_TRIED:
        attempt = dataclasses.replace(attempt, healed=True, retry_in=wait or 0.0)
    attempts[at] = dataclasses.replace(attempt, repairs=(*others, made))


def _shown_error(facts: Mapping[str, Json]) -> dict[str, Json] | None:
    """Return the error for people to read, without what it is made of again."""
    error = facts.get("error")
    return error and {name: each for name, each in error.items() if name != "exception"}


def _failed_attempt(attempt: AttemptView, entry: Entry) -> AttemptView:
    facts = facts_of(entry)
    return dataclasses.replace(
        attempt,
        status=facts.get("status", "failed"),
        ended_at=entry.when,
        round=facts.get("round", 1),
        error=_shown_error(facts),
        healed=bool(facts.get("healed")),
        retry_in=(facts.get("wait") or {}).get("seconds"),
        fingerprint=(facts.get("diagnosis") or {}).get("fingerprint"),
    )


def _events_of(run: RecordedRun, step: StepState) -> tuple[RunEvent, ...]:
    """Return the events of one step: those with its number, and those with its identity."""
    from maestro_hive.maestro.state.event_reader import EventReader

    reader = EventReader(run.record.name, run.load)
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
