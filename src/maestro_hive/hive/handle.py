"""A handle to a run, and its events as they are recorded, whichever process executes it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Generic, TypeVar

from maestro_hive.engine.shared import release, retain
from maestro_hive.hive import control
from maestro_hive.hive.errors import RunInactiveError
from maestro_hive.hive.runner import active_here
from maestro_hive.hive.runs import find_run, outcome, read_run, run_info
from maestro_hive.maestro.state.views import OVER

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from maestro_hive.maestro.state.events import RunEvent
    from maestro_hive.maestro.state.store import Store

R = TypeVar("R")


class RunHandle(Generic[R]):
    """One run, whether this process executes it, another one, or none."""

    def __init__(self, opened: Callable[[], Store], run_id: str) -> None:
        self.run_id = run_id
        self._opened = opened  # called each time: a store that failed is opened again
        #: What executes the run, where it was started.
        self._task: asyncio.Future[R] | None = None

    def keep(self, task: asyncio.Future[R]) -> None:
        """Store what executes the run, until it ends: an event loop has only a weak reference."""
        self._task = task
        retain(task)
        task.add_done_callback(release)

    @property
    def status(self) -> str:
        """The run's status, as ``hive.runs`` lists it; pending before it is listed."""
        store = self._opened()
        if store.run(self.run_id) is None:
            return "pending"
        return run_info(store, self.run_id).status

    async def result(self) -> R:
        """Return the run's result when it has ended; raise if it failed, or no process executes it.

        To cancel this call does not stop the run.
        """
        if self._task is not None:
            return await asyncio.shield(self._task)
        store = self._opened()
        here = active_here(store, self.run_id)
        if here is not None:
            done: R = await asyncio.shield(asyncio.wrap_future(here.done))
            return done
        async for _ in follow(store, self.run_id):
            pass
        state = read_run(store, self.run_id)
        if state.ended is None:
            raise RunInactiveError(self.run_id)
        recorded: R = outcome(self.run_id, state.ended, store.load)
        return recorded

    def cancel(self, reason: str = "") -> bool:
        """Cancel the run and its children; return False if it has ended already."""
        return control.cancel(self._opened(), self.run_id, reason)

    def __repr__(self) -> str:
        return f"<run {self.run_id!r}>"


# --- events ----------------------------------------------------------------------------------

#: How many seconds to wait for further events: less after a new one, more after none.
_MIN_WAIT, _MAX_WAIT = 0.02, 0.25
#: How often it is checked whether a run that this process starts is recorded.
_START_CHECKS = 1_500


async def follow(
    store: Store, run_id: str, *, after: int = 0, wait: bool = True
) -> AsyncIterator[RunEvent]:
    """Yield a run's events with numbers over ``after``; then the next ones as they are recorded.

    It ends when the run has ended, or when no process executes it. Without ``wait`` it ends after
    the recorded events.
    """
    from maestro_hive.maestro.state.events import EventReader  # noqa: PLC0415 - slow to import

    for _ in range(_START_CHECKS):
        if store.run(run_id) is not None or active_here(store, run_id) is None:
            break
        await asyncio.sleep(_MIN_WAIT)  # its start is being recorded
    reader, run = EventReader(run_id, store.load), find_run(store, run_id).id
    seq, pause = 0, _MIN_WAIT
    while True:
        is_last = not wait or not _is_executed(store, run_id)  # before the entries are read
        new = await asyncio.to_thread(store.entries, run, seq)
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


def _is_executed(store: Store, run_id: str) -> bool:
    record = store.run(run_id)
    if record is None or record.status in OVER:
        return False
    return active_here(store, run_id) is not None or run_id in store.run_leases()
