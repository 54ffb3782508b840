"""A run to hold on to: its result when it comes, where it stands, and its end."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from maestro_hive.hive import orders, under_way
from maestro_hive.hive.errors import RunLeftError
from maestro_hive.hive.following import follow
from maestro_hive.hive.run_reading import outcome, read_run, run_info

if TYPE_CHECKING:
    from collections.abc import Callable

    from maestro_hive.maestro.state.store import Store

R = TypeVar("R")

#: What was started, until it is done.
_kept: set[asyncio.Future[Any]] = set()


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
        _kept.add(task)
        task.add_done_callback(_kept.discard)

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
        here = under_way.here(store, self.run_id)
        if here is not None:
            done: R = await asyncio.shield(asyncio.wrap_future(here.done))
            return done
        async for _ in follow(store, self.run_id):
            pass
        state = read_run(store, self.run_id)
        if state.ended is None:
            raise RunLeftError(self.run_id)
        kept: R = outcome(self.run_id, state.ended, store.load)
        return kept

    def cancel(self, reason: str = "") -> bool:
        """End it, and what it started; False if it is over already."""
        return orders.cancel(self._opened(), self.run_id, reason)

    def __repr__(self) -> str:
        return f"<run {self.run_id!r}>"
