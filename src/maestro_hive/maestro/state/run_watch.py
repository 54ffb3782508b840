"""Runs as they stand, for whoever looks at them often: only what is new is read and shown anew."""

from __future__ import annotations

import copy
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from maestro_hive.maestro.state.records import to_micros
from maestro_hive.maestro.state.run_state import RunState, fold
from maestro_hive.maestro.state.run_view import Known, show_run

if TYPE_CHECKING:
    from maestro_hive.maestro.state.records import EntriesAppended, RunRecord
    from maestro_hive.maestro.state.store import Store


@dataclass(slots=True)
class _Watched:
    number: int
    state: RunState
    known: Known = field(default_factory=Known)
    shown: dict[str, Any] = field(default_factory=dict)


class RunWatch:
    """The runs of one store that somebody looked at."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._runs: dict[str, _Watched] = {}
        self._mutex = threading.Lock()

    def view(self, run_id: str) -> dict[str, Any] | None:
        """Return a run as it stands, as a new object; None if there is none."""
        record = self._store.run(run_id)
        if record is None:
            return None
        with self._mutex:
            return copy.deepcopy(self._up_to_date(record).shown)

    def change(self, news: EntriesAppended) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
        """Return a run before and after its latest entries; not to be changed."""
        record = self._store.run(news.run_id)
        if record is None:
            return None, None
        with self._mutex:
            before = self._before(record, news)
            return before, self._up_to_date(record).shown

    def _up_to_date(self, record: RunRecord) -> _Watched:
        watched = self._runs.get(record.name)
        if watched is None or watched.number != record.id:  # purged, and begun anew
            state = RunState(created_at=to_micros(record.created_at))
            watched = self._runs[record.name] = _Watched(record.id, state)
        new = self._store.entries(record.id, after=watched.state.seq)
        for entry in new:
            watched.state.add(entry, self._store.load)
        if new or not watched.shown:
            watched.shown = show_run(watched.state, record.name, self._store.load, watched.known)
        return watched

    def _before(self, record: RunRecord, news: EntriesAppended) -> dict[str, Any] | None:
        if news.first == 1:
            return None
        watched = self._runs.get(record.name)
        if watched and watched.number == record.id and watched.state.seq == news.first - 1:
            return watched.shown
        earlier = self._store.entries(record.id)[: news.first - 1]
        return show_run(fold(earlier, self._store.load), record.name, self._store.load)
