"""A run to hold on to: its result when it comes, where it stands, and its end."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from maestro_hive.hive import orders
from maestro_hive.hive.errors import RunLeftError
from maestro_hive.hive.following import follow
from maestro_hive.hive.run_reading import outcome, read_run, run_info
from maestro_hive.hive.runner import is_under_way_here

if TYPE_CHECKING:
    from maestro_hive.maestro.state.store import Store

R = TypeVar("R")


class RunHandle(Generic[R]):
    """One run, executed here, elsewhere, or by nobody."""

    def __init__(self, store: Store, run_id: str, task: asyncio.Task[R] | None = None) -> None:
        self.run_id = run_id
        self._store = store
        self._task = task

    @property
    def status(self) -> str:
        """Where it stands: as ``hive.runs`` lists it, and pending before it is listed."""
        if self._store.run(self.run_id) is None:
            return "pending"
        return run_info(self._store, self.run_id).status

    async def result(self) -> R:
        """Return the run's result when it is over; raise if it failed, or nobody executes it.

        Not waiting any longer does not stop the run.
        """
        if self._task is not None:
            return await asyncio.shield(self._task)
        here = is_under_way_here(self._store, self.run_id)
        if here is not None:
            done: R = await asyncio.shield(asyncio.wrap_future(here))
            return done
        async for _ in follow(self._store, self.run_id):
            pass
        state = read_run(self._store, self.run_id)
        if state.ended is None:
            raise RunLeftError(self.run_id)
        kept: R = outcome(self.run_id, state.ended, self._store.load)
        return kept

    def cancel(self, reason: str = "") -> bool:
        """End it, and what it started; False if it is over already."""
        return orders.cancel(self._store, self.run_id, reason)

    def __repr__(self) -> str:
        return f"<run {self.run_id!r}>"


def any_handle(store: Store, run_id: str) -> RunHandle[Any]:
    """Return a handle of a run that may be anybody's."""
    run_info(store, run_id)  # or say that there is none
    return RunHandle(store, run_id)
