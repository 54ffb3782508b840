"""Runs of a state folder: found by name, listed, in detail, and their events."""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches
from typing import TYPE_CHECKING

from maestro_hive.admin.children import ChildReader, LatestStates
from maestro_hive.kernel.errors import ConfigurationError, CorruptionError
from maestro_hive.maestro.state import run_view as read_model
from maestro_hive.maestro.state.projections import (
    RunState,
    find_step,
    labels,
    readable,
)
from maestro_hive.maestro.state.records import PERMITS
from maestro_hive.maestro.state.run_view import HolderView, WaitView, holder_view, wait_views
from maestro_hive.maestro.state.views import STATUSES, plain_values, shown_status

if TYPE_CHECKING:
    from collections.abc import Container, Mapping, Sequence
    from datetime import datetime

    from maestro_hive.maestro.state.projections import Load
    from maestro_hive.maestro.state.records import Entry, Lease, RunRecord
    from maestro_hive.maestro.state.run_view import RecordedRun, RunView, StepDetails
    from maestro_hive.maestro.state.store import Reader


#: More names than this are not compared with a mistyped one.
_COMPARED = 2000
#: The status of a run in a listing whose entries cannot be read.
_DAMAGED = "damaged"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """One run in a listing; ``damage`` says why its entries cannot be read.

    ``parent`` is the run that started it as its child; ``executed`` says that a living process
    executes it; ``updated_at`` is when something was last recorded of it.
    """

    run_id: str
    workflow: str | None
    parent: str | None
    status: str
    executed: bool
    started_at: datetime
    updated_at: datetime
    holder: HolderView | None
    waits_for: tuple[WaitView, ...]
    damage: str | None = None


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
    roots: bool = False,
) -> RunList:
    """Return runs, newest first; ``statuses`` are those that are shown, not those recorded.

    With ``roots`` only runs that no other one started as its child.
    """
    held, latest = reader.run_leases(), LatestStates(reader)
    found = reader.runs(workflow=workflow, limit=None if statuses else limit, roots=roots)
    if statuses:
        check_statuses(reader, statuses, held)
        found = [record for record in found if shown_status(record, held) in statuses]
    counted = limit is not None and not statuses
    total = reader.count_runs(workflow=workflow, roots=roots) if counted else len(found)
    shown = tuple(run_summary(reader, each, held, latest) for each in found[:limit])
    return RunList(total=total, runs=shown)


def check_statuses(reader: Reader, statuses: Sequence[str], held: Container[str]) -> None:
    """Raise if there is no such status; a run without a workflow has the one that its program set."""
    unknown = [status for status in statuses if status not in STATUSES]
    if not unknown:
        return
    shown = {shown_status(record, held): None for record in reader.runs()}
    for status in unknown:
        if status not in shown:
            known = ", ".join(dict.fromkeys([*STATUSES, *sorted(shown)]))
            raise ConfigurationError(
                f"{status!r} is not a status of a run; the statuses are {known}"
            )


def run_summary(
    reader: Reader, record: RunRecord, held: Mapping[str, Lease], latest: LatestStates
) -> RunSummary:
    """Return a run as listings show it; ``latest`` has what was read of it before."""
    status, damage, lease = shown_status(record, held), None, held.get(record.name)
    waits: tuple[WaitView, ...] = ()
    updated_at = record.updated_at  # of its status alone
    try:
        with readable(record.name):
            updated_at = reader.last_change(record)
        if status == "waiting":
            state = latest.state_of(record, executed=lease is not None)
            with readable(record.name):
                answered = answered_questions(reader, record.name, state)
                waits = wait_views(state, reader.load, answered)
    except CorruptionError as error:  # of this run alone: the others are listed
        status, damage = _DAMAGED, str(error)
    return RunSummary(
        run_id=record.name,
        workflow=record.workflow or None,
        parent=record.parent,
        status=status,
        executed=lease is not None,
        started_at=record.created_at,
        updated_at=updated_at,
        holder=holder_view(lease),
        waits_for=waits,
        damage=damage,
    )


def find_run(reader: Reader, run_id: str) -> RunRecord:
    """Return a run; if there is none, the error names similar ones."""
    found = reader.run(run_id)
    if found is not None:
        return found
    names = [record.name for record in reader.runs(limit=_COMPARED)]
    near = [name for name in names if run_id and name.startswith(run_id)][:3]
    near = near or get_close_matches(run_id, names, n=3)
    hint = f"Did you mean {' or '.join(map(repr, near))}?" if near else "'maestro runs' lists them."
    raise ConfigurationError(f"There is no run {run_id!r} in {reader.location}. {hint}")


# --- one run in detail -----------------------------------------------------------------------------


#: How many events a view of a run has.
_LATEST_EVENTS = 5


class LiveRun:
    """A run, executed or not, without holding it: ``refresh`` reads what came since the last time."""

    def __init__(self, reader: Reader, run_id: str) -> None:
        self._reader = reader
        self._record: RunRecord = find_run(reader, run_id)
        self._load = plain_values(reader.load)
        self._entries: list[Entry] = []
        self._state = RunState()

    def refresh(self) -> RecordedRun:
        """Return the run as of now; raise if it was purged."""
        reader, name = self._reader, self._record.name
        lease = reader.run_leases().get(name)
        # After the lease: its process may have released it just now.
        record = find_run(reader, name)
        if record.id != self._record.id:  # purged, and started again
            self._entries, self._state = [], RunState()
        self._record = record
        entries = reader.entries(record.id, after=self._state.seq)
        self._state.add_all(entries, self._load)
        self._entries += entries
        return read_model.RecordedRun(
            record=record,
            entries=self._entries,
            state=self._state,
            lease=lease,
            load=reader.load,
            now=reader.clock.now(),
            permits=_held_permits(reader),
        )


def read_run(reader: Reader, run_id: str) -> RecordedRun:
    """Read a run, executed or not, without holding it."""
    return LiveRun(reader, run_id).refresh()


def _held_permits(reader: Reader) -> dict[str, Lease]:
    """Return the leases of all limits whose holders live, by name."""
    found = [lease for lease in reader.leases() if lease.name.startswith(PERMITS)]
    return {lease.name: lease for lease in found if reader.is_alive(lease)}


def run_details(
    reader: Reader, run_id: str, *, most_steps: int | None = None, most_children: int | None = None
) -> RunView:
    """Return one run; of its steps the last ``most_steps``, and those that are not completed.

    ``most_children`` limits its children, with theirs.
    """
    run = read_run(reader, run_id)
    return view_of(reader, run, ChildReader(reader), most_steps, most_children)


def view_of(
    reader: Reader,
    run: RecordedRun,
    children: ChildReader,
    most_steps: int | None,
    most_children: int | None,
    most_events: int = _LATEST_EVENTS,
) -> RunView:
    """Return the view of a run that was read; ``children`` has what was read of its children."""
    name = run.record.name
    with readable(name):
        return read_model.run_view(
            run,
            most_steps=most_steps,
            most_events=most_events,
            answered=answered_questions(reader, name, run.state),
            children=children.children(name, run.state, most_children),
            dispatch=None if run.state.ended is not None else reader.dispatch(name),
        )


def step_details(reader: Reader, run_id: str, step: str) -> StepDetails:
    """Return one step of a run: by its number, its name, or ``name#2``.

    The name of a task of a team run is its newest step: after an answer, or a change of the graph,
    it has another one.
    """
    from maestro_hive.team.plans import WORKFLOW

    run = read_run(reader, run_id)
    found = find_step(run.state, step, newest=run.record.workflow == WORKFLOW)
    if found is not None:
        with readable(run_id):
            return read_model.step_details(run, found)
    raise unknown_step(run.record, step, run.state, run.load)


def unknown_step(record: RunRecord, step: str, state: RunState, load: Load) -> ConfigurationError:
    """Return the error for a step that a run does not have; it names similar ones."""
    from maestro_hive.team.plans import WORKFLOW, planned_names

    run_id, names = record.name, dict.fromkeys(labels(state).values())
    if record.workflow == WORKFLOW:
        planned = planned_names(state, load)
        if step in planned:
            return ConfigurationError(
                f"{step} of run {run_id!r} was not started yet; what it waits for: maestro status {run_id}"
            )
        names |= dict.fromkeys(planned)
    near = get_close_matches(step, names, n=3)
    known = f"it has: {', '.join([*names][:10])}" if names else "it has none"
    hint = f"did you mean {' or '.join(near)}?" if near else known
    return ConfigurationError(f"run {run_id!r} has no step {step!r}; {hint}")


def answered_questions(reader: Reader, run_id: str, state: RunState) -> set[bytes]:
    """Return the identities of the open questions whose answers are in the inbox."""
    if not state.questions:
        return set()
    from maestro_hive.hive.answers import answers_on_their_way
    from maestro_hive.hive.inbox import NAMESPACE, Messages

    document = reader.document(NAMESPACE, run_id)
    messages = Messages.decode(document.value if document is not None else None)
    return set(answers_on_their_way(state, messages))
