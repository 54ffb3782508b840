"""Runs of a store in memory that belong to workers, and what they wait for."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from maestro_hive.kernel.clock import Wait
from maestro_hive.maestro.state.records import (
    Dispatch,
    DispatchState,
    rank_of,
    state_of,
    wait_of,
)

if TYPE_CHECKING:
    from collections.abc import Collection
    from contextlib import AbstractContextManager
    from datetime import datetime

    from maestro_hive.kernel.clock import Clock
    from maestro_hive.maestro.state.records import NewDispatch


@dataclass(slots=True)
class Row:
    """A run that belongs to workers; it is scheduled while there is a ``wait``."""

    run_id: str
    workflow: str
    new: NewDispatch
    rank: tuple[int, int]
    enqueued_at: datetime
    state: DispatchState
    wait: Wait | None = None
    deaths: int = 0
    woken: bool = False

    def activate(self) -> None:
        """Say that who holds the run's lease executes it."""
        self.state, self.wait, self.woken = DispatchState.ACTIVE, None, False

    def schedule(self, due: float | None, clock: Clock) -> None:
        """Say when it is due; one that was woken meanwhile is due now."""
        due = 0.0 if self.woken else due
        wait = wait_of(due)
        self.state, self.woken = state_of(due), False
        self.wait = Wait.start(clock, wait) if wait else None

    def wake(self, clock: Clock) -> bool:
        """Make it due now, or as soon as it is released; return whether that changes it."""
        if self.state is DispatchState.READY or self.woken:
            return False
        if self.state is DispatchState.ACTIVE:
            self.woken = True
        else:
            self.schedule(0.0, clock)
        return True

    def seconds(self, clock: Clock) -> float | None:
        """Return in how many seconds it is due; None if that is not known."""
        if self.state is DispatchState.READY:
            return 0.0
        return None if self.wait is None else self.wait.remaining(clock)

    def record(self) -> Dispatch:
        """Return it as it is shown."""
        return Dispatch(
            run_id=self.run_id,
            workflow=self.workflow,
            queue=self.new.queue,
            priority=self.new.priority,
            state=self.state,
            due_at=None if self.wait is None else self.wait.ends_at,
            version=self.new.version,
            enqueued_at=self.enqueued_at,
            deaths=self.deaths,
        )


@dataclass(slots=True)
class Rows:
    """All such runs, by name; under the store's lock."""

    clock: Clock
    rows: dict[str, Row] = field(default_factory=dict)

    def add(self, run: int, name: str, workflow: str, new: NewDispatch, *, deaths: int = 0) -> Row:
        """Give a run to workers, unless it is theirs already."""
        if name not in self.rows:
            rank = (rank_of(new, self.clock.nanos() // 1000), run)
            row = Row(name, workflow, new, rank, self.clock.now(), DispatchState.READY)
            row.deaths = deaths
            row.schedule(new.due, self.clock)
            self.rows[name] = row
        return self.rows[name]

    def wake(self, name: str) -> bool:
        """Make a run due now; return whether that changes anything."""
        row = self.rows.get(name)
        return row is not None and row.wake(self.clock)

    def rebase(self) -> None:
        """Measure by the present boot's time what was scheduled before the machine was restarted."""
        for row in self.rows.values():
            if row.wait is not None and row.wait.boot != self.clock.boot_id():
                row.schedule(row.wait.remaining(self.clock), self.clock)

    def ready(self, queue: str, workflows: Collection[str], version: str | None) -> list[Row]:
        """Return the runs that are next, first come first."""
        found = [
            row
            for row in self.listed(queue, None)
            if row.workflow in workflows
            and row.new.version in (None, version)
            and row.seconds(self.clock) == 0
        ]
        for row in found:
            row.schedule(0.0, self.clock)
        return found

    def listed(self, queue: str | None, state: DispatchState | None) -> list[Row]:
        """Return the rows of a queue and in a state, in the order in which they are taken."""
        found = [
            row
            for row in self.rows.values()
            if queue in (None, row.new.queue) and state in (None, row.state)
        ]
        return sorted(found, key=lambda row: row.rank)


class DispatchesInMemory:
    """What a store in memory shows of these runs, and changes in one of them."""

    clock: Clock
    _dispatch: Rows

    if TYPE_CHECKING:  # what the store has

        def _locked(self) -> AbstractContextManager[object]: ...

    def dispatch(self, name: str) -> Dispatch | None:
        """Return what a run waits for."""
        with self._locked():
            row = self._dispatch.rows.get(name)
            return None if row is None else row.record()

    def dispatches(
        self,
        *,
        queue: str | None = None,
        state: DispatchState | None = None,
        limit: int | None = None,
    ) -> list[Dispatch]:
        """List such runs in the order in which they are taken."""
        with self._locked():
            return [row.record() for row in self._dispatch.listed(queue, state)[:limit]]

    def dispatch_counts(self) -> dict[tuple[str, DispatchState], int]:
        """Return how many each queue has in each state."""
        with self._locked():
            return Counter((row.new.queue, row.state) for row in self._dispatch.rows.values())

    def ready_queues(self) -> list[str]:
        """Return the queues that have ready runs, or such that are due."""
        with self._locked():
            rows = self._dispatch.rows.values()
            return sorted({row.new.queue for row in rows if row.seconds(self.clock) == 0})

    def has_ready(
        self, *, queue: str, workflows: Collection[str], version: str | None = None
    ) -> bool:
        """Return whether a queue has a ready run of these workflows, and of this version."""
        with self._locked():
            return bool(self._dispatch.ready(queue, workflows, version))

    def seconds_to_next(self) -> float | None:
        """Return when something is due: 0 if now, None if nothing is."""
        with self._locked():
            waits = [row.seconds(self.clock) for row in self._dispatch.rows.values()]
        return min((wait for wait in waits if wait is not None), default=None)

    def wake_run(self, name: str) -> bool:
        """Make a run due now; return whether that changes anything."""
        with self._locked():
            return self._dispatch.wake(name)
