"""Runs of a state folder: found by name, listed, and filtered."""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches
from typing import TYPE_CHECKING

from maestro_hive.kernel.errors import ConfigurationError
from maestro_hive.maestro.state.projections import fold
from maestro_hive.maestro.state.records import EntryKind
from maestro_hive.maestro.state.run_view import HolderView, WaitView, holder_view, wait_views
from maestro_hive.maestro.state.views import effective_status

if TYPE_CHECKING:
    from collections.abc import Container, Mapping, Sequence
    from datetime import datetime

    from maestro_hive.maestro.state.records import Lease, RunRecord
    from maestro_hive.maestro.state.store import Reader

#: More names than this are not compared with a mistyped one.
_COMPARED = 2000
#: The kinds of entries that say what a run waits for.
_OF_WAITS = {
    EntryKind.WAIT_STARTED,
    EntryKind.WAIT_ENDED,
    EntryKind.RETRIED,
    EntryKind.RESTORED,
}


class RunNotFoundError(ConfigurationError):
    """There is no run of this name; the message suggests similar ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """One run in a listing."""

    run_id: str
    workflow: str | None
    status: str
    started_at: datetime
    updated_at: datetime
    holder: HolderView | None
    waits_for: tuple[WaitView, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunList:
    """The newest runs that were asked for, and how many there are in total."""

    total: int
    runs: tuple[RunSummary, ...]


def list_runs(
    reader: Reader,
    *,
    statuses: Sequence[str] = (),
    workflow: str | None = None,
    limit: int | None = None,
) -> RunList:
    """Return runs, newest first; ``statuses`` are those that are shown, not those recorded."""
    held = reader.run_leases()
    if statuses:
        found = [
            record
            for record in reader.runs(workflow=workflow)
            if status_of_run(record, held) in statuses
        ]
        total, chosen = len(found), found[:limit]
    else:
        chosen = reader.runs(workflow=workflow, limit=limit)
        total = len(chosen) if limit is None else reader.count_runs(workflow=workflow)
    return RunList(total=total, runs=tuple(_summary(reader, each, held) for each in chosen))


def _summary(reader: Reader, record: RunRecord, held: Mapping[str, Lease]) -> RunSummary:
    status = status_of_run(record, held)
    return RunSummary(
        run_id=record.name,
        workflow=record.workflow or None,
        status=status,
        started_at=record.created_at,
        updated_at=record.updated_at,
        holder=holder_view(held.get(record.name)),
        waits_for=_waits_of(reader, record) if status == "waiting" else (),
    )


def _waits_of(reader: Reader, record: RunRecord) -> tuple[WaitView, ...]:
    """Return what a run waits for; of its entries only those are folded that say so."""
    entries = [entry for entry in reader.entries(record.id) if entry.kind in _OF_WAITS]
    return wait_views(fold(entries, reader.load))


def status_of_run(record: RunRecord, held: Container[str]) -> str:
    """Return the status to show, given the names of the runs that living processes hold."""
    return effective_status(record.workflow, record.status, held=record.name in held)


def find_run(reader: Reader, run_id: str) -> RunRecord:
    """Return a run; if there is none, the error names similar ones."""
    found = reader.run(run_id)
    if found is not None:
        return found
    names = [record.name for record in reader.runs(limit=_COMPARED)]
    near = [name for name in names if run_id and name.startswith(run_id)][:3]
    near = near or get_close_matches(run_id, names, n=3)
    hint = f"Did you mean {' or '.join(map(repr, near))}?" if near else "'maestro runs' lists them."
    raise RunNotFoundError(f"There is no run {run_id!r} in {reader.location}. {hint}")


def run_ids(reader: Reader, prefix: str, most: int) -> list[str]:
    """Return the names of the newest runs that start with ``prefix``."""
    names = (record.name for record in reader.runs())
    return [name for name in names if name.startswith(prefix)][:most]
