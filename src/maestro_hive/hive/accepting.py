"""Accepting runs for workers: an accepted run is recorded, durably, and executed without a caller."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, cast

from maestro_hive.engine import settings
from maestro_hive.engine.step_record import steps_around
from maestro_hive.hive import runs
from maestro_hive.hive.budgets import declare, run_budget
from maestro_hive.hive.dispatching import (
    belongs_to_workers,
    check_version,
    dispatch_facts,
    give_to_workers,
    wake_workers,
)
from maestro_hive.hive.same_run import check_equal
from maestro_hive.kernel import files
from maestro_hive.kernel.errors import ConfigurationError, RunLeasedError
from maestro_hive.maestro.state.records import NewDispatch
from maestro_hive.maestro.state.store import NewRun

if TYPE_CHECKING:
    from maestro_hive.engine.options import Amount
    from maestro_hive.hive.runs import Input
    from maestro_hive.maestro.state.store import Store
    from maestro_hive.maestro.state.strict_json import Json

_priority = settings.rule(int, "a whole number up to a million", lambda it: abs(it) <= 1_000_000)


class Order(NamedTuple):
    """A run to record for workers."""

    run_id: str
    given: Input
    dispatch: NewDispatch
    #: The run whose workflow enqueues it.
    by: str | None = None
    #: What it may spend with its children.
    budget: Amount | None = None


#: How often it is tried to get a run whose holder leaves it at that moment.
_ATTEMPTS = 10


def enqueue(store: Store, order: Order) -> None:
    """Record a run for workers, durably; one that is recorded is left as it is.

    Raises ``RunMismatchError`` if that has another workflow or other arguments, and ``RunLeasedError``
    if its caller executes it in another process. One that belonged to its caller, who left it, belongs
    to workers from now on.
    """
    run_id, given, dispatch, by, budget = order
    if budget is not None:  # before a worker can take it
        declare(store, run_budget(run_id, budget))
    facts: dict[str, Json] = {**dispatch_facts(dispatch), "enqueued_by": by}
    around = [{"run": each.run, "step": each.step} for each in steps_around()]
    if around:  # what these have reserved of budgets, its calls need not wait for
        facts["enqueued_in"] = around
    first = runs.started(given, **facts)
    new = NewRun(run_id, given.workflow, (first,), runs.PENDING, dispatch)
    if not store.create_runs([new])[0]:
        _take_existing(store, order)
    wake_workers(store)


def _take_existing(store: Store, order: Order) -> None:
    """Check that a run is the one that is recorded already, and let it belong to workers."""
    run_id = order.run_id
    state = runs.read_run(store, run_id)
    if state.started is None:
        raise ConfigurationError(
            f"run {run_id!r} was not started by a workflow, but by executors; give this one"
            " another run_id"
        )
    check_equal(run_id, runs.recorded_input(state.started, store.load), order.given)
    for _ in range(_ATTEMPTS):
        if runs.ended_state(store, run_id) is not None or belongs_to_workers(store, run_id):
            return
        if give_to_workers(store, run_id, order.dispatch):
            return
        lease = store.run_leases().get(run_id)
        if lease is not None and not belongs_to_workers(store, run_id):
            # Stopped by its caller, no worker would have it: so it is not accepted.
            holder = lease.holder
            raise RunLeasedError(run_id, host=holder.host, pid=holder.pid, since=holder.since)


def new_dispatch(
    queue: object, priority: object = 0, delay: object = 0.0, version: object = None
) -> NewDispatch:
    """Return how workers get a run; raise if that is given wrongly."""
    return NewDispatch(
        queue=files.check_identifier(cast("str", queue), "queue"),
        priority=_priority("priority", priority),
        due=float(settings.number(0)("delay", delay)),
        version=check_version(version),
    )
