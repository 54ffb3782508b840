"""Runs of a state folder: found by name, listed, in detail, and their events."""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches
from enum import Enum
from typing import TYPE_CHECKING

from maestro_hive.hive.inbox import NAMESPACE, Messages
from maestro_hive.kernel.errors import ConfigurationError
from maestro_hive.maestro.state import run_view as read_model
from maestro_hive.maestro.state import views
from maestro_hive.maestro.state.events import EventReader, RunEvent
from maestro_hive.maestro.state.projections import RunState, facts_of, find_step, fold, labels
from maestro_hive.maestro.state.records import EntryKind
from maestro_hive.maestro.state.run_view import HolderView, WaitView, holder_view, wait_views
from maestro_hive.maestro.state.views import effective_status, plain_values

if TYPE_CHECKING:
    from collections.abc import Container, Mapping, Sequence
    from datetime import datetime

    from maestro_hive.maestro.state.records import Lease, RunRecord
    from maestro_hive.maestro.state.run_view import RecordedRun, RunView, StepDetails
    from maestro_hive.maestro.state.store import Reader


#: More names than this are not compared with a mistyped one.
_COMPARED = 2000
#: The kinds of entries that say what a run waits for.
_OF_WAITS = {
    EntryKind.WAIT_STARTED,
    EntryKind.WAIT_ENDED,
    EntryKind.RETRIED,
    EntryKind.RESTORED,
}


class RunNotFoundError(ConfigurationError):
    """There is no run of this name; the message suggests similar ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """One run in a listing."""

    run_id: str
    workflow: str | None
    status: str
    started_at: datetime
    updated_at: datetime
    holder: HolderView | None
    waits_for: tuple[WaitView, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunList:
    """The newest runs that were asked for, and how many there are in total."""

    total: int
    runs: tuple[RunSummary, ...]


def list_runs(
    reader: Reader,
    *,
    statuses: Sequence[str] = (),
    workflow: str | None = None,
    limit: int | None = None,
) -> RunList:
    """Return runs, newest first; ``statuses`` are those that are shown, not those recorded."""
    held = reader.run_leases()
    if statuses:
        found = [
            record
            for record in reader.runs(workflow=workflow)
            if status_of_run(record, held) in statuses
        ]
        total, chosen = len(found), found[:limit]
    else:
        chosen = reader.runs(workflow=workflow, limit=limit)
        total = len(chosen) if limit is None else reader.count_runs(workflow=workflow)
    return RunList(total=total, runs=tuple(_summary(reader, each, held) for each in chosen))


def _summary(reader: Reader, record: RunRecord, held: Mapping[str, Lease]) -> RunSummary:
    status = status_of_run(record, held)
    return RunSummary(
        run_id=record.name,
        workflow=record.workflow or None,
        status=status,
        started_at=record.created_at,
        updated_at=record.updated_at,
        holder=holder_view(held.get(record.name)),
        waits_for=_waits_of(reader, record) if status == "waiting" else (),
    )


def _waits_of(reader: Reader, record: RunRecord) -> tuple[WaitView, ...]:
    """Return what a run waits for; of its entries only those are folded that say so."""
    entries = [entry for entry in reader.entries(record.id) if entry.kind in _OF_WAITS]
    return wait_views(fold(entries, reader.load))


def status_of_run(record: RunRecord, held: Container[str]) -> str:
    """Return the status to show, given the names of the runs that living processes hold."""
    return effective_status(record.workflow, record.status, held=record.name in held)


def find_run(reader: Reader, run_id: str) -> RunRecord:
    """Return a run; if there is none, the error names similar ones."""
    found = reader.run(run_id)
    if found is not None:
        return found
    names = [record.name for record in reader.runs(limit=_COMPARED)]
    near = [name for name in names if run_id and name.startswith(run_id)][:3]
    near = near or get_close_matches(run_id, names, n=3)
    hint = f"Did you mean {' or '.join(map(repr, near))}?" if near else "'maestro runs' lists them."
    raise RunNotFoundError(f"There is no run {run_id!r} in {reader.location}. {hint}")


def run_ids(reader: Reader, prefix: str, most: int) -> list[str]:
    """Return the names of the newest runs that start with ``prefix``."""
    names = (record.name for record in reader.runs())
    return [name for name in names if name.startswith(prefix)][:most]


# --- one run in detail -----------------------------------------------------------------------------


#: How many events a view of a run has.
_LATEST_EVENTS = 5


def read_run(reader: Reader, run_id: str) -> RecordedRun:
    """Read a run, executed or not, without holding it."""
    record = find_run(reader, run_id)
    lease = reader.run_leases().get(run_id)
    record = reader.run(run_id) or record  # as of now: its process may have released it just now
    entries = reader.entries(record.id)
    load = plain_values(reader.load)
    return read_model.RecordedRun(
        record=record,
        entries=entries,
        state=fold(entries, load),
        lease=lease,
        load=reader.load,
        now=reader.clock.now(),
    )


def run_details(reader: Reader, run_id: str, *, most_steps: int | None = None) -> RunView:
    """Return one run; of its steps the last ``most_steps``, and those that are not completed."""
    run = read_run(reader, run_id)
    held = reader.run_leases() if run.state.children else {}

    def child_status(name: str) -> str | None:
        record = reader.run(name)
        return None if record is None else status_of_run(record, held)

    return read_model.run_view(
        run,
        most_steps=most_steps,
        most_events=_LATEST_EVENTS,
        answered=answered_questions(reader, run_id, run.state),
        child_status=child_status,
    )


def step_details(reader: Reader, run_id: str, step: str) -> StepDetails:
    """Return one step of a run: by its number, its name, or ``name#2``."""
    run = read_run(reader, run_id)
    found = find_step(run.state, step)
    if found is not None:
        return read_model.step_details(run, found)
    names = labels(run.state).values()
    near = get_close_matches(step, names, n=3) or list(dict.fromkeys(names))[:10]
    known = f"it has: {', '.join(near)}" if near else "it has none"
    raise ConfigurationError(f"run {run_id!r} has no step {step!r}; {known}")


def answered_questions(reader: Reader, run_id: str, state: RunState) -> set[bytes]:
    """Return the identities of the open questions whose answers are in the inbox."""
    questions = views.open_waits(state)
    document = reader.document(NAMESPACE, run_id) if questions else None
    answers = Messages.decode(document.value).answers if document is not None else []
    answered = {each.question for each in answers}
    early = [each.name for each in answers if each.question is None]
    found = set()
    for entry in questions:
        assert entry.identity is not None  # or it would not have been folded
        name = facts_of(entry).get("name")
        if entry.identity.hex() in answered:
            found.add(entry.identity)
        elif name in early:
            early.remove(name)
            found.add(entry.identity)
    return found


# --- events ---------------------------------------------------------------------------------------


class Ending(Enum):
    """How following a run ends."""

    #: It succeeded; without a workflow: nothing is left to do.
    COMPLETED = "completed"
    #: It failed or was cancelled.
    FAILED = "failed"
    #: It waits for an answer or for help, and no process executes it.
    NEEDS_PERSON = "needs_person"
    #: Its answers are in the inbox, and no process executes it.
    ANSWERED = "answered"
    #: It is not finished, and no process executes it.
    NOT_FINISHED = "not_finished"


@dataclass(frozen=True, slots=True, kw_only=True)
class EventBatch:
    """The events since the last batch; ``ending`` is set when no more will come by themselves."""

    events: tuple[RunEvent, ...]
    ending: Ending | None


class EventFeed:
    """The events of a run in batches, from the first one on."""

    def __init__(self, reader: Reader, run_id: str) -> None:
        self._reader = reader
        self._record: RunRecord = find_run(reader, run_id)
        self._load = plain_values(reader.load)
        self._events = EventReader(run_id, reader.load)
        self._state = RunState()

    def next_batch(self) -> EventBatch:
        """Return what was recorded since the last batch, maybe nothing."""
        # The lease first: so what a process wrote before it left is read.
        held = self._record.name in self._reader.run_leases()
        entries = self._reader.entries(self._record.id, after=self._state.seq)
        self._state.add_all(entries, self._load)
        events = [self._events.read(entry) for entry in entries]
        return EventBatch(
            events=tuple(event for event in events if event is not None),
            ending=None if held and self._state.ended is None else self._ending(),
        )

    def _ending(self) -> Ending:
        state = self._state
        if self._status() in ("failed", "cancelled"):
            return Ending.FAILED
        if views.is_finished(state):
            return Ending.COMPLETED
        questions = views.open_waits(state)
        if questions:
            answered = answered_questions(self._reader, self._record.name, state)
            return Ending.ANSWERED if len(answered) == len(questions) else Ending.NEEDS_PERSON
        return Ending.NEEDS_PERSON if state.escalated else Ending.NOT_FINISHED

    def _status(self) -> str:
        if self._state.started is not None:
            return views.run_status(self._state)
        return (self._reader.run(self._record.name) or self._record).status
