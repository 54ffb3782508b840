"""A handle to a run, and its events as they are recorded, whichever process executes it."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from maestro_hive.engine import values
from maestro_hive.engine.shared import release, retain
from maestro_hive.hive import cancelling
from maestro_hive.hive.active_run import active_here, retrieve
from maestro_hive.hive.dispatching import RunReleased, belongs_to_workers, root_of
from maestro_hive.hive.errors import (
    RunCancelledError,
    RunFailedError,
    RunInactiveError,
    RunMismatchError,
)
from maestro_hive.hive.live_workers import is_taken
from maestro_hive.hive.runs import ended_state, find_run, outcome
from maestro_hive.kernel.errors import MaestroError
from maestro_hive.maestro.state.views import OVER, shown_status

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from maestro_hive.maestro.state.events import RunEvent
    from maestro_hive.maestro.state.store import Store

R = TypeVar("R")


class RunHandle(Generic[R]):
    """One run, whether this process executes it, another one, or none."""

    def __init__(self, opened: Callable[[], Store], run_id: str) -> None:
        #: The id of the run: that which was given, or a new one.
        self.run_id = run_id
        self._opened = opened  # called each time: a store that failed is opened again
        #: What executes the run, where it was started.
        self._task: asyncio.Future[R] | None = None

    def keep(self, task: asyncio.Future[R]) -> None:
        """Store what executes the run, until it ends: an event loop has only a weak reference."""
        self._task = task
        retain(task)
        task.add_done_callback(_forget)

    @property
    def status(self) -> str:
        """The run's status, as ``hive.runs`` lists it; pending before it is listed."""
        store = self._opened()
        record = store.run(self.run_id)
        return "pending" if record is None else shown_status(record, store.run_leases())

    async def result(self) -> R:
        """Return the run's result when it has ended; raise if it failed, or nobody executes it.

        A run that belongs to workers is followed over their ends, until it has ended. Where this
        process suspended it, and no worker lives that takes it, the reason is raised. To cancel this
        call does not stop the run.
        """
        if self._task is not None:
            try:
                return await asyncio.shield(self._task)
            except asyncio.CancelledError:
                if not self._task.cancelled():
                    raise
            except MaestroError as error:
                if not self._goes_on_after(error):
                    raise
        return await self._followed()

    def _goes_on_after(self, error: Exception) -> bool:
        """Return whether a worker takes the run after what suspended it here."""
        if isinstance(error, RunFailedError | RunCancelledError | RunMismatchError):
            return False
        store = self._opened()
        root = store.dispatch(root_of(store, self.run_id))
        return root is not None and (isinstance(error, RunReleased) or is_taken(store, root))

    async def _followed(self) -> R:
        """Return the recorded result when there is one."""
        pause = _MIN_WAIT
        while True:
            store = self._opened()
            is_last = not is_executed(store, self.run_id)  # before the end is looked for
            state = ended_state(store, self.run_id)
            if state is not None and state.ended is not None:
                recorded: R = outcome(self.run_id, state.ended, store.load)
                return recorded
            here = active_here(store, self.run_id)
            if here is not None:
                ended = asyncio.wrap_future(here.done)
                ended.add_done_callback(retrieve)  # also if this call is cancelled
                await asyncio.wait({ended})
            elif is_last:
                find_run(store, self.run_id)  # or say that there is none
                raise RunInactiveError(self.run_id)
            else:
                await asyncio.sleep(pause)
                pause = min(pause * 1.5, _MAX_WAIT)

    def cancel(self, reason: str = "") -> bool:
        """Cancel the run and its children; return False if all of them have ended already."""
        return cancelling.cancel(self._opened(), self.run_id, reason)

    def __repr__(self) -> str:
        return f"<run {self.run_id!r}>"


def _forget(task: asyncio.Future[Any]) -> None:
    """Let go of what has executed a run."""
    release(task)
    retrieve(task)


# --- events ----------------------------------------------------------------------------------

#: How many seconds to wait for further events: less after a new one, more after none.
_MIN_WAIT, _MAX_WAIT = 0.02, 0.25
#: How often it is checked whether a run that this process starts is recorded.
_START_CHECKS = 1_500


async def follow(
    store: Store, run_id: str, *, after: int = 0, wait: bool = True
) -> AsyncIterator[RunEvent]:
    """Yield a run's events with numbers over ``after``; then the next ones as they are recorded.

    It ends when the run has ended, or when no process executes it and no worker will. Without
    ``wait`` it ends after the recorded events.
    """
    from maestro_hive.maestro.state.event_reader import EventReader

    await recorded_start(store, run_id)
    reader, run = EventReader(run_id, store.load), find_run(store, run_id).id
    seq, pause = 0, _MIN_WAIT
    while True:
        is_last = not wait or not is_executed(store, run_id)  # before the entries are read
        new = await values.in_thread(partial(store.entries, run, seq))
        for entry in new:
            event = reader.read(entry)
            if event is not None and entry.seq > after:
                yield event
        if new:
            seq, pause = new[-1].seq, _MIN_WAIT
        elif is_last:
            return
        else:
            await asyncio.sleep(pause)
            pause = min(pause * 1.5, _MAX_WAIT)


async def recorded_start(store: Store, run_id: str) -> None:
    """Return when the start of a run that this process starts is recorded; at once for others."""
    for _ in range(_START_CHECKS):
        if store.run(run_id) is not None or active_here(store, run_id) is None:
            break
        await asyncio.sleep(_MIN_WAIT)


def is_executed(store: Store, run_id: str) -> bool:
    """Return whether a process executes a run which has not ended, or a worker will."""
    record = store.run(run_id)
    if record is None or record.status in OVER:
        return False
    if active_here(store, run_id) is not None or belongs_to_workers(store, run_id):
        return True
    return run_id in store.run_leases()
