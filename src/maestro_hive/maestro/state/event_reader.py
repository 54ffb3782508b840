"""Makes the events of a run from its entries."""

from __future__ import annotations

import contextlib
from operator import attrgetter
from typing import TYPE_CHECKING

from maestro_hive.kernel.errors import CorruptionError
from maestro_hive.maestro.state.events import EVENTS, Source, StepFailed, StepStopped
from maestro_hive.maestro.state.projections import (
    Facts,
    RunState,
    StepState,
    facts_of,
    readable,
)
from maestro_hive.maestro.state.records import Entry, EntryKind

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from maestro_hive.maestro.state.events import RunEvent


class EventReader:
    """Makes the events of one run from its entries, which it is given from the first one on.

    ``load`` is asked for the few values that are needed; without it a large one is left out.
    """

    def __init__(
        self, run_id: str, load: Callable[[Entry], bytes | None] = attrgetter("value")
    ) -> None:
        self.run_id: str = run_id
        self.load: Callable[[Entry], bytes | None] = load
        #: Whether the end of the step's previous attempt has not been read.
        self.was_open: bool = False
        self._state = RunState()
        #: The labels of the steps so far, as ``labels`` of ``projections`` gives them.
        self._labels: dict[int, str] = {}
        self._named: dict[str, int] = {}

    def read(self, entry: Entry) -> RunEvent | None:
        """Return the event of an entry; None for a kind that this version does not know."""
        kind = EVENTS.get(entry.kind)
        if kind is None:
            return None
        with readable(self.run_id):
            facts = facts_of(entry)
            if kind is StepFailed and not facts.get("counts", True):
                kind = StepStopped
            step = self.step(entry)
            self.was_open = step is not None and step.open_attempt > 0
            self.skip([entry])
            return kind.read(Source(entry, facts, self))

    def skip(self, entries: Sequence[Entry]) -> None:
        """Take note of entries whose events are not wanted."""
        with contextlib.suppress(CorruptionError):  # it has an event all the same
            self._state.add_all(entries, lambda _: None)
        for entry in entries:
            if entry.kind == EntryKind.RESTORED:
                self._labels, self._named = {}, {}
            elif entry.kind == EntryKind.ATTEMPT_STARTED and entry.step not in self._labels:
                self._add_label(entry.step)

    def _add_label(self, number: int) -> None:
        step = self._state.steps.get(number)
        if step is not None:  # it may be of before the run was restored
            count = self._named[step.name] = self._named.get(step.name, 0) + 1
            self._labels[number] = step.name if count == 1 else f"{step.name}#{count}"

    # --- for the fields of events ---

    def step(self, entry: Entry) -> StepState | None:
        """Return the step that an entry refers to, by its number or by its identity."""
        if entry.step or entry.identity is None:
            return self._state.steps.get(entry.step)
        return self._state.by_identity.get(entry.identity)

    def name(self, entry: Entry) -> str:
        """Return the name of that step."""
        step = self.step(entry)
        return step.name if step else ""

    def label(self, entry: Entry) -> str:
        """Return what tells that step from others of its name."""
        step = self.step(entry)
        return self._labels.get(step.number, "") if step else ""

    def persona(self, entry: Entry) -> str:
        """Return the persona of that step."""
        step = self.step(entry)
        return step.persona if step else ""

    def round(self, entry: Entry) -> Facts:
        """Return the facts of the latest failed round of that step."""
        rounds = self._state.rounds.get(entry.identity or b"")
        return facts_of(rounds[-1]) if rounds else {}


def latest_events(
    run_id: str, entries: Sequence[Entry], load: Callable[[Entry], bytes | None], most: int
) -> list[RunEvent]:
    """Return the events of the last ``most`` entries of a run."""
    reader, first = EventReader(run_id, load), max(0, len(entries) - most)
    reader.skip(entries[:first])
    events = [reader.read(entry) for entry in entries[first:]]
    return [event for event in events if event is not None]
