"""Runs as anybody may read them, without holding them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from maestro_hive.hive import run_entries as entries
from maestro_hive.hive.errors import RunCancelledError, RunFailedError, UnknownRunError
from maestro_hive.kernel.errors import ConfigurationError
from maestro_hive.maestro.state import codec
from maestro_hive.maestro.state.run_state import facts_of, fold
from maestro_hive.maestro.state.run_view import OVER, STOPPED, standing

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import datetime

    from maestro_hive.maestro.state.records import Entry, RunRecord
    from maestro_hive.maestro.state.run_state import RunState
    from maestro_hive.maestro.state.store import Store


STATUSES = ("pending", entries.RUNNING, entries.WAITING, *OVER, STOPPED)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInfo:
    """One run, as listings show it."""

    run_id: str
    workflow: str
    #: pending, running, waiting, success, failed, cancelled, or stopped: nobody executes it.
    status: str
    created_at: datetime
    updated_at: datetime


def find_run(store: Store, run_id: str) -> RunRecord:
    """Return a run's record; raise if there is none."""
    found = store.run(run_id)
    if found is None:
        raise UnknownRunError(run_id, store.location)
    return found


def read_run(store: Store, run_id: str) -> RunState:
    """Return what a run's entries add up to; raise if there is no such run."""
    return fold(store.entries(find_run(store, run_id).id), store.load)


def list_runs(
    store: Store, status: str | None = None, workflow: str | None = None, limit: int | None = None
) -> list[RunInfo]:
    """Return runs, newest first."""
    if status is not None and status not in STATUSES:
        raise ConfigurationError(
            f"no run is ever {status!r}; where runs stand is said by {', '.join(STATUSES)}"
        )
    if limit is not None and limit < 0:
        raise ConfigurationError(f"the limit is {limit}, and must be 0 or more")
    held = store.held_runs()
    shown = [_info(record, record.name in held) for record in store.runs()]
    found = [
        info
        for info in shown
        if status in (None, info.status) and workflow in (None, info.workflow)
    ]
    return found if limit is None else found[:limit]


def run_info(store: Store, run_id: str) -> RunInfo:
    """Return one run as listings show it."""
    return _info(find_run(store, run_id), run_id in store.held_runs())


def _info(record: RunRecord, is_held: bool) -> RunInfo:
    return RunInfo(
        run_id=record.name,
        workflow=record.workflow,
        status=standing(record.workflow, record.status, held=is_held),
        created_at=record.created_at,
        updated_at=record.updated_at,
    )


def ended_state(store: Store, run_id: str) -> RunState | None:
    """Return a run's state if it is over; None if it is not, or if there is no such run."""
    record = store.run(run_id)
    if record is None or record.status not in OVER:
        return None
    state = fold(store.entries(record.id), store.load)
    return state if state.ended is not None else None


def outcome(run_id: str, ended: Entry, load: Callable[[Entry], bytes | None]) -> Any:
    """Return the result that is kept; raise if the run failed, or was cancelled."""
    facts = facts_of(ended)
    match facts.get("status"):
        case entries.SUCCESS:
            data = load(ended)
            return None if data is None else codec.decode(data, f"the result of run {run_id}")
        case entries.CANCELLED:
            raise RunCancelledError(run_id, str(facts.get("reason", "")))
        case _:
            raise failure(run_id, facts.get("error", {}))


def failure(run_id: str, error: dict[str, Any]) -> RunFailedError:
    """Return a failure as it was kept, with the lines that led to it."""
    failed = RunFailedError(run_id, error)
    if failed.error_traceback:
        failed.add_note(f"It failed at:\n{failed.error_traceback}")
    return failed
