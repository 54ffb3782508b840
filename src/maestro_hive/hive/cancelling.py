"""Cancel a run and its children from outside, whoever executes them, or nobody."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from maestro_hive.engine.open_run import append_entries
from maestro_hive.hive import runs
from maestro_hive.hive.active_run import active_here
from maestro_hive.hive.dispatching import root_of, wake_root
from maestro_hive.hive.inbox import Inbox, check_text
from maestro_hive.hive.live_workers import is_taken
from maestro_hive.hive.runs import find_run, read_run
from maestro_hive.kernel.clock import Wait
from maestro_hive.kernel.errors import ConfigurationError, RunLeasedError
from maestro_hive.maestro.state.projections import facts_of, fold
from maestro_hive.maestro.state.views import OVER

if TYPE_CHECKING:
    from collections.abc import Iterator

    from maestro_hive.maestro.state.projections import RunState
    from maestro_hive.maestro.state.records import RunRecord
    from maestro_hive.maestro.state.store import Reader, RunLease, Store


def cancel(store: Store, run_id: str, reason: str = "") -> bool:
    """Cancel a run and its children, to any depth; False if all of them have ended already.

    If a process executes the run, or a worker would, that gets a message, and its workflow may clean
    up; otherwise the end is recorded here.
    """
    check_text("reason", reason)
    return _cancel(store, run_id, reason, is_child=False)


def _cancel(store: Store, run_id: str, reason: str, *, is_child: bool) -> bool:
    if active_here(store, run_id) is not None and Inbox(store).cancel(run_id, reason):
        return True
    record = find_run(store, run_id)
    if record.status in OVER:
        return cancel_children(store, read_run(store, run_id), reason)
    if not record.workflow and read_run(store, run_id).started is None:
        raise ConfigurationError(
            f"run {run_id!r} was not started by a workflow; stop the program that executes it"
        )
    if not is_child and is_taken_to_clean_up(store, run_id) and Inbox(store).cancel(run_id, reason):
        return True
    try:
        with leased(store, run_id) as (lease, state):
            if state.ended is None:
                # A child is resumed by its parent alone, which is ended now.
                if is_child or not _cleans_up(state, store):
                    end_cancelled(store, lease, state, reason)
                return True
    except RunLeasedError:
        if Inbox(store).cancel(run_id, reason):
            return True
    return cancel_children(store, read_run(store, run_id), reason)  # it ended meanwhile


def end_cancelled(store: Store, lease: RunLease, state: RunState, reason: str) -> None:
    """Record the end of a run that no process executes."""
    # The children first: after a kill in between, the same request cancels the rest.
    cancel_children(store, state, reason)
    ended = runs.ended(runs.CANCELLED, reason=reason or None)
    append_entries(store, lease, [ended], runs.CANCELLED)
    Inbox(store).clear(lease.name, runs.CANCELLED)


def is_taken_to_clean_up(store: Store, run_id: str) -> bool:
    """Return whether a worker lives that takes a run which waits, and has started its work."""
    root = store.dispatch(root_of(store, run_id))
    record = store.run(run_id)
    if root is None or record is None or not store.entries(record.id, after=1):
        return False
    return is_taken(store, root)


def _cleans_up(state: RunState, store: Store) -> bool:
    """Return whether a run was cancelled before, and has time left to clean up."""
    requested = state.cancel_requested
    if requested is None:
        return False
    return Wait.from_json(facts_of(requested)["wait"]).remaining(store.clock) > 0


def cancel_children(store: Store, state: RunState, reason: str) -> bool:
    """Cancel the children of a run that have not ended, and theirs; False if there are none."""
    found = False
    for child in children_of(store, state):
        found = _cancel(store, child.name, reason, is_child=True) or found
    return found


def unfinished(store: Store, run_id: str) -> list[str]:
    """Return the names of those that have not ended: of a run and its children, to any depth."""
    found, left = [], [run_id]
    while left:
        record = store.run(left.pop())
        if record is None or record.name in found:
            continue
        if record.status not in OVER:
            found.append(record.name)
        state = fold(store.entries(record.id), store.load)
        left += [child.name for child in children_of(store, state)]
    return found


def children_of(store: Reader, state: RunState) -> list[RunRecord]:
    """Return a run's own children that were started, and not purged; not those of another's fork."""
    names = [
        str(facts_of(each).get("run_id"))
        for each in state.children.values()
        if not facts_of(each).get("copied")
    ]
    return [record for record in map(store.run, names) if record is not None]


@contextmanager
def leased(store: Store, run_id: str) -> Iterator[tuple[RunLease, RunState]]:
    """Lease a run that no process executes; ``RunLeasedError`` names the one that does."""
    lease = store.acquire_run(run_id)
    try:
        if lease.users > 1:
            holder = lease.lease.holder
            raise RunLeasedError(run_id, host=holder.host, pid=holder.pid, since=holder.since)
        yield lease, fold(store.entries(lease.run), store.load)
    finally:
        store.release_run(lease)
        if lease.users == 0:
            wake_root(store, run_id)
