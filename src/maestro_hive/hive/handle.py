"""A run's events as they come, from the journal: whoever executes it, and also if nobody does."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from maestro_hive.hive import control
from maestro_hive.hive.errors import RunInactiveError
from maestro_hive.hive.runner import active_here
from maestro_hive.hive.runs import find_run, outcome, read_run, run_info
from maestro_hive.maestro.state.events import EventReader
from maestro_hive.maestro.state.views import OVER

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from maestro_hive.maestro.state.events import RunEvent
    from maestro_hive.maestro.state.store import Store


#: How long to wait for news, from a run that is busy to one that is quiet.
_SHORTEST, _LONGEST = 0.02, 0.25
#: How often it is looked whether a run that was just started is listed.
_BEGINNING = 1_500


async def follow(
    store: Store, run_id: str, *, after: int = 0, wait: bool = True
) -> AsyncIterator[RunEvent]:
    """Yield a run's events with numbers over ``after``; then, as they come, the next ones.

    It ends when the run is over, or when no process executes it. Without ``wait`` it ends with
    what there is.
    """
    for _ in range(_BEGINNING):
        if store.run(run_id) is not None or active_here(store, run_id) is None:
            break
        await asyncio.sleep(_SHORTEST)  # it begins in this moment
    reader, run = EventReader(run_id, store.load), find_run(store, run_id).id
    seq, pause = 0, _SHORTEST
    while True:
        is_last = not wait or not _goes_on(store, run_id)  # looked at before the entries are
        new = await asyncio.to_thread(store.entries, run, seq)
        for entry in new:
            event = reader.read(entry)
            if event is not None and entry.seq > after:
                yield event
        if new:
            seq, pause = new[-1].seq, _SHORTEST
        elif is_last:
            return
        else:
            await asyncio.sleep(pause)
            pause = min(pause * 1.5, _LONGEST)


def _goes_on(store: Store, run_id: str) -> bool:
    record = store.run(run_id)
    if record is None or record.status in OVER:
        return False
    return active_here(store, run_id) is not None or run_id in store.run_leases()


# --- handle ---


R = TypeVar("R")

#: What was started, until it is done.
_started: set[asyncio.Future[Any]] = set()


class RunHandle(Generic[R]):
    """One run, executed here, elsewhere, or by nobody."""

    def __init__(self, opened: Callable[[], Store], run_id: str) -> None:
        self.run_id = run_id
        self._opened = opened  # asked each time: a store that failed is opened again
        #: Set where the run was started: it keeps the run going.
        self._task: asyncio.Future[R] | None = None

    def keep(self, task: asyncio.Future[R]) -> None:
        """Hold on to what executes the run: a loop itself keeps its tasks but weakly."""
        self._task = task
        _started.add(task)
        task.add_done_callback(_started.discard)

    @property
    def status(self) -> str:
        """Where it stands: as ``hive.runs`` lists it, and pending before it is listed."""
        store = self._opened()
        if store.run(self.run_id) is None:
            return "pending"
        return run_info(store, self.run_id).status

    async def result(self) -> R:
        """Return the run's result when it is over; raise if it failed, or nobody executes it.

        Not waiting any longer does not stop the run.
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
        """End it, and what it started; False if it is over already."""
        return control.cancel(self._opened(), self.run_id, reason)

    def __repr__(self) -> str:
        return f"<run {self.run_id!r}>"
