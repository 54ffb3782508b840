"""Runs that belonged to their callers, and become those of workers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from maestro_hive.hive.dispatching import give_to_workers, recorded_dispatch
from maestro_hive.hive.runs import read_run
from maestro_hive.kernel.logs import get_log
from maestro_hive.maestro.state.records import NewDispatch
from maestro_hive.maestro.state.views import OVER

if TYPE_CHECKING:
    from collections.abc import Container

    from maestro_hive.maestro.state.store import Store

logger = get_log(__name__)

#: The recorded statuses of a run that has not ended.
_UNFINISHED = ("pending", "running", "waiting")


def dispatch_of_dead_caller(
    store: Store, workflows: Container[str], name: str
) -> NewDispatch | None:
    """Return how workers get a run whose caller died; None if it is not for this worker.

    A child is executed by its parent, and a run that executors made by its program.
    """
    record = store.run(name)
    if record is None or record.parent is not None or record.workflow not in workflows:
        return None
    if record.status in OVER:
        return None
    state = read_run(store, name)
    return None if state.started is None else recorded_dispatch(state) or NewDispatch()


def adopt_stopped(store: Store, workflows: Container[str]) -> list[str]:
    """Let workers have the runs that their callers stopped; return their names."""
    held = store.run_leases()
    adopted: list[str] = []
    for status in _UNFINISHED:
        for record in store.runs(status=status, roots=True):
            if record.workflow not in workflows or record.name in held:
                continue
            if store.dispatch(record.name) is not None:
                continue
            state = read_run(store, record.name)
            if state.started is None or state.ended is not None:
                continue
            dispatch = recorded_dispatch(state) or NewDispatch()
            if give_to_workers(store, record.name, dispatch):
                adopted.append(record.name)
    for name in adopted:
        logger.info("run %s is adopted: it was stopped", name, extra={"run_id": name})
    return adopted
