"""A handle of a run, whichever process executes it, and the run's entries as they are recorded."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Generic, NamedTuple, Self, TypeVar, cast

from maestro_hive.hive.commands import AwaitedRunCommand, end_of
from maestro_hive.hive.live_workers import is_taken
from maestro_hive.hive.run_control import StepLabels, cancel
from maestro_hive.hive.workflow_loop import workflow_loop_here
from maestro_hive.kernel.errors import RunInactiveError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from maestro_hive.hive.driver import Driver
    from maestro_hive.hive.runs import Runs
    from maestro_hive.journal.entries import Entry, RunEnded
    from maestro_hive.journal.store import RunRow, Store

R = TypeVar("R")

#: How long to wait for news: less after a new entry, more after none.
_SHORTEST_WAIT, _LONGEST_WAIT = 0.02, 0.25


class RunInfo(NamedTuple):
    """A run, as lists show it."""

    run_id: str
    workflow: str
    #: pending: due for workers; running; waiting; stopped; interrupted: it waits for a retry;
    #: success, failed, cancelled.
    status: str
    created_at: datetime
    updated_at: datetime
    #: The run that called it.
    parent: str | None = None
    queue: str | None = None

    @classmethod
    def of(cls, row: RunRow) -> Self:
        """Return what people see of a run."""
        created = datetime.fromtimestamp(row.created_at, UTC)
        updated = datetime.fromtimestamp(row.updated_at, UTC)
        status = row.shown_status
        return cls(row.run_id, row.workflow, status, created, updated, row.parent, row.queue)


class Event(NamedTuple):
    """An entry of a run, with the label of its step: the name, and ``#2`` for the second one."""

    run_id: str
    entry: Entry
    label: str = ""

    def __str__(self) -> str:
        text = self.entry.text()
        return f"{self.label}: {text}" if self.label else text


class RunHandle(Generic[R]):
    """One run, whether this process executes it, another one, or none."""

    def __init__(
        self,
        store: Callable[[], Store],
        runs: Callable[[], Runs],
        outcome: Callable[[str, RunEnded], R],
        run_id: str,
    ) -> None:
        #: The id of the run: the one that was given, or a new one.
        self.run_id = run_id
        self._store, self._runs, self._outcome = store, runs, outcome

    @property
    def status(self) -> str:
        """Return the run's status, as ``hive.runs`` lists it."""
        return self._store().find(self.run_id).shown_status

    async def result(self) -> R:
        """Return the result when the run has ended; raise if it failed, or no process executes it.

        In a workflow the wait is durable, and lasts until the run has ended. To cancel this call
        does not stop the run.
        """
        if (loop := workflow_loop_here()) is not None:
            result: R = await AwaitedRunCommand(cast("Driver", loop.host), self.run_id)
            return result
        ended = await _follow_end(self._store(), self._runs(), self.run_id)
        return self._outcome(self.run_id, ended)

    def cancel(self, reason: str = "") -> bool:
        """Cancel the run and its children; False if it has ended already."""
        return cancel(self._store(), self.run_id, reason)

    def __repr__(self) -> str:
        return f"<run {self.run_id!r}>"


async def _follow_end(store: Store, runs: Runs, run_id: str) -> RunEnded:
    """Return the end of a run, when it has one."""
    pause = _SHORTEST_WAIT
    while (ended := end_of(store, run_id)) is None:
        row = store.find(run_id)
        if (driver := runs.active.get(run_id)) is not None:
            await asyncio.wait((driver.end,))
            continue
        if row.status != "running" and not is_taken(store, row):
            if run_id in runs.suspensions:
                raise runs.suspensions[run_id][0]
            if not is_executed(row):
                raise RunInactiveError(run_id)
        await asyncio.sleep(pause)
        pause = min(pause * 1.5, _LONGEST_WAIT)
    return ended


def is_executed(row: RunRow) -> bool:
    """Return whether a process executes a run, or a worker will."""
    return row.status == "running" or (row.queue is not None and row.due is not None)


async def follow_events(
    store: Store, run_id: str, *, after: int = 0, follow: bool = True
) -> AsyncIterator[Event]:
    """Yield a run's entries after a number; then the next ones as they are recorded."""
    number, labels = store.find(run_id).number, StepLabels()
    seq, pause = 0, _SHORTEST_WAIT
    while True:
        is_last = not follow or not is_executed(store.find(run_id))  # before the entries are read
        new = await asyncio.to_thread(store.entries, number, seq)
        for entry in new:
            label = labels.of(entry)
            if entry.seq > after:
                yield Event(run_id, entry, label)
        if new:
            seq, pause = new[-1].seq, _SHORTEST_WAIT
        elif is_last:
            return
        else:
            await asyncio.sleep(pause)
            pause = min(pause * 1.5, _LONGEST_WAIT)
