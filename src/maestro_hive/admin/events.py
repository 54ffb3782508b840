"""The events of runs of a state folder, followed in batches, and how following one ends."""

from __future__ import annotations

from enum import Enum
from operator import attrgetter
from typing import TYPE_CHECKING

from maestro_hive.admin.runs import answered_questions, find_run
from maestro_hive.hive.dispatching import belongs_to_workers
from maestro_hive.maestro.state import views
from maestro_hive.maestro.state.event_reader import EventReader
from maestro_hive.maestro.state.projections import RunState, facts_of
from maestro_hive.maestro.state.views import plain_values

if TYPE_CHECKING:
    from maestro_hive.maestro.state.events import RunEvent
    from maestro_hive.maestro.state.records import RunRecord
    from maestro_hive.maestro.state.store import Reader


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


class EventFeed:
    """The events of a run in batches, from the first one on."""

    def __init__(self, reader: Reader, run_id: str) -> None:
        self.run_id = run_id
        self._reader = reader
        self._record: RunRecord = find_run(reader, run_id)
        self._load = plain_values(reader.load)
        self._events = EventReader(run_id, reader.load)
        self._state = RunState()

    def next_batch(self) -> tuple[list[RunEvent], Ending | None]:
        """Return what was recorded since the last batch, and how following the run ends.

        The ending is None while more events may come by themselves: a process executes the run, or
        a worker will.
        """
        # Who has it first: so what a process wrote before it left is read.
        name = self._record.name
        held = name in self._reader.run_leases() or belongs_to_workers(self._reader, name)
        entries = self._reader.entries(self._record.id, after=self._state.seq)
        self._state.add_all(entries, self._load)
        events = [self._events.read(entry) for entry in entries]
        is_open = held and self._state.ended is None
        ending = None if is_open else ending_of(self._reader, self._record, self._state)
        return [event for event in events if event is not None], ending

    @property
    def children(self) -> list[str]:
        """The runs that it started, as far as was read; those of a run that it is a fork of are not."""
        started = map(facts_of, self._state.children.values())
        return [str(facts.get("run_id")) for facts in started if not facts.get("copied")]


class FamilyFeed:
    """The events of a run and of its children, and theirs, in batches, in the order of their times."""

    def __init__(self, reader: Reader, run_id: str) -> None:
        self._reader = reader
        self._root = EventFeed(reader, run_id)
        self._children: dict[str, EventFeed] = {}
        #: The children that are over, and are read again when there is something new of a parent.
        self._over: set[str] = set()

    def next_batch(self) -> tuple[list[RunEvent], Ending | None]:
        """Return what was recorded since the last batch, and how following the run ends."""
        events, ending = self._root.next_batch()
        if events:
            self._over.clear()
        parents = [self._root, *self._children.values()]
        for feed in parents:  # which grows
            found = [] if feed is self._root else self._batch_of(feed)
            if found:
                self._over -= set(feed.children)
            events += found
            parents += self._new_children(feed)
        return sorted(events, key=attrgetter("at")), ending

    def _batch_of(self, child: EventFeed) -> list[RunEvent]:
        if child.run_id in self._over:
            return []
        events, ending = child.next_batch()
        if ending in (Ending.COMPLETED, Ending.FAILED):
            self._over.add(child.run_id)
        return events

    def _new_children(self, parent: EventFeed) -> list[EventFeed]:
        names = [each for each in parent.children if each not in self._children]
        new = {
            name: EventFeed(self._reader, name)
            for name in names
            if name != self._root.run_id and self._reader.run(name) is not None
        }
        self._children |= new
        return list(new.values())


def ending_of(reader: Reader, record: RunRecord, state: RunState) -> Ending:
    """Return how following a run ends that has ended, or that no process executes."""
    recorded = reader.run(record.name) or record
    status = views.run_status(state) if state.started is not None else recorded.status
    if status in ("failed", "cancelled"):
        return Ending.FAILED
    if views.is_finished(state):
        return Ending.COMPLETED
    questions = views.open_waits(state)
    if questions:
        answered = answered_questions(reader, record.name, state)
        return Ending.ANSWERED if len(answered) == len(questions) else Ending.NEEDS_PERSON
    needs_person = state.escalated or views.ambiguous_steps(state, held=False)
    return Ending.NEEDS_PERSON if needs_person else Ending.NOT_FINISHED
