"""The children of a run, and theirs: read once, and then only what is new of them."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from maestro_hive.maestro.state import views
from maestro_hive.maestro.state.projections import RunState, facts_of, readable
from maestro_hive.maestro.state.records import EntryKind
from maestro_hive.maestro.state.run_view import Children, ChildView, timer_views
from maestro_hive.maestro.state.views import shown_status

if TYPE_CHECKING:
    from collections.abc import Container, Iterable

    from maestro_hive.maestro.state.records import Entry, RunRecord
    from maestro_hive.maestro.state.store import Reader

#: The kinds of entries that say what a run waits for, which children it has, and how it ended.
_NEEDED = {
    EntryKind.RUN_STARTED,
    EntryKind.RUN_ENDED,
    EntryKind.WAIT_STARTED,
    EntryKind.WAIT_ENDED,
    EntryKind.CHILD_STARTED,
    EntryKind.CHILD_ENDED,
    EntryKind.RETRIED,
    EntryKind.RESTORED,
}


class LatestStates:
    """What runs wait for, their children and their ends; of each run, only what is new is read."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._states: dict[int, tuple[RunRecord, int, RunState]] = {}

    def state_of(self, record: RunRecord, *, executed: bool) -> RunState:
        """Return a run's state as of now, without its steps."""
        known, seq, state = self._states.get(record.id, (None, 0, RunState()))
        if known == record and not executed and record.status in views.OVER:
            return state  # whatever changes it, sets its status first
        entries = self._reader.entries(record.id, after=seq)
        with readable(record.name):
            state.add_all([each for each in entries if each.kind in _NEEDED], self._reader.load)
        self._states[record.id] = (record, entries[-1].seq if entries else seq, state)
        return state

    def forget_others(self, records: Iterable[RunRecord]) -> None:
        """Forget what was read of other runs than these."""
        known = {record.id for record in records}
        self._states = {number: it for number, it in self._states.items() if number in known}


@dataclass(slots=True, eq=False)
class _Run:
    """A run whose children are searched."""

    run_id: str
    workflow: str | None = None
    record: RunRecord | None = None
    state: RunState = field(default_factory=RunState)
    children: list[_Run] = field(default_factory=list)
    hidden: int = 0


class ChildReader:
    """Reads the children of one run, and theirs."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._latest = LatestStates(reader)

    def children(self, run_id: str, state: RunState, most: int | None = None) -> Children:
        """Return the children of a run, of each generation first those that have not ended.

        At most ``most`` are shown in all, an older generation before its own children.
        """
        if not state.children:
            return Children((), 0)
        held = self._reader.run_leases()
        root = _Run(run_id, state=state)
        found, waiting = {run_id}, deque([root])
        while waiting:
            run = waiting.popleft()
            room = None if most is None else max(0, most - len(found) + 1)
            for child in self._chosen(run, room):
                if child.run_id not in found:  # each once, whatever is recorded
                    found.add(child.run_id)
                    self._read(child, held)
                    run.children.append(child)
                    waiting.append(child)
        return self._views(root, held)

    def _chosen(self, run: _Run, room: int | None) -> list[_Run]:
        """Return the children to show: those that have not ended, and the last ones."""
        started = list(run.state.children.items())
        if room is not None and len(started) > room:
            run.hidden = len(started) - room
            ended = [each for each in started if each[0] in run.state.outcomes]
            unfinished = [each for each in started if each[0] not in run.state.outcomes]
            chosen = [*ended, *unfinished][len(started) - room :]
            started = sorted(chosen, key=lambda each: each[1].seq)
        return [_child(entry) for _, entry in started]

    def _read(self, child: _Run, held: Container[str]) -> None:
        child.record = self._reader.run(child.run_id)
        if child.record is not None:
            executed = child.run_id in held
            child.state = self._latest.state_of(child.record, executed=executed)

    def _views(self, run: _Run, held: Container[str]) -> Children:
        return Children(tuple(self._view(each, held) for each in run.children), run.hidden)

    def _view(self, run: _Run, held: Container[str]) -> ChildView:
        if run.record is None:
            return ChildView(run_id=run.run_id, workflow=run.workflow, status=None)
        children = self._views(run, held)
        return ChildView(
            run_id=run.run_id,
            workflow=run.workflow,
            status=shown_status(run.record, held),
            took_seconds=self._seconds(run, executed=run.run_id in held),
            waits_for=waits_of(run.state),
            error=views.error_line(run.state.ended),
            children=children.shown,
            hidden_children=children.hidden,
        )

    def _seconds(self, run: _Run, *, executed: bool) -> float:
        assert run.record is not None
        started, ended = run.state.started, run.state.ended
        first = run.record.created_at if started is None else started.when
        now = self._reader.clock.now() if executed else run.record.updated_at
        return views.seconds_between(first, now if ended is None else ended.when)


def _child(entry: Entry) -> _Run:
    facts = facts_of(entry)
    return _Run(str(facts.get("run_id")), facts.get("workflow"))


def waits_of(state: RunState) -> tuple[str, ...]:
    """Return the names of what a run waits for: its questions, and its sleeps."""
    if state.ended is not None:
        return ()
    questions = [str(facts_of(entry).get("name")) for entry in views.open_waits(state)]
    return (*questions, *(each.name for each in timer_views(state) if each.what == "sleep"))
