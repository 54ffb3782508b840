"""``maestro runs``: the runs of a state folder, newest first."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from maestro_hive.cli import screen
from maestro_hive.cli.frame import verb
from maestro_hive.cli.screen import Styled
from maestro_hive.cli.standing import STYLES, holder_of, waits_of, where

if TYPE_CHECKING:
    from maestro_hive.cli.call import Call
    from maestro_hive.maestro.state.records import Lease, RunRecord
    from maestro_hive.maestro.state.store import Store

_LIMIT = 50


@verb(
    "runs",
    examples="""
    maestro runs                                  the newest 50
    maestro runs --status failed --status stopped what needs a look
    maestro runs --workflow build --limit 0       all runs of one workflow
    maestro runs --json                           for another program
    """,
    reads=True,
)
@click.option(
    "--status",
    "statuses",
    metavar="STATUS",
    multiple=True,
    help="Only runs that stand so; may be said several times.",
)
@click.option("--workflow", metavar="NAME", help="Only runs of this workflow.")
@click.option(
    "--limit",
    type=click.IntRange(min=0),
    default=_LIMIT,
    show_default=True,
    help="How many at most; 0 for all.",
)
def command(call: Call, statuses: tuple[str, ...], workflow: str | None, limit: int) -> None:
    """List runs, newest first, and where they stand.

    A run is pending, running, waiting (for an answer, see 'maestro answer'), success, failed or
    cancelled; and stopped if it is under way, but no living process executes it: start its program
    again, and it goes on. A run without a workflow has the status that its program gave it, and is
    running while a process has it open.
    """
    with call.reading() as store:
        held = store.run_leases()
        found = [
            (record, status)
            for record, status in ((each, where(each, held)) for each in store.runs())
            if (not statuses or status in statuses) and workflow in (None, record.workflow)
        ]
        shown = found[:limit] if limit else found
        runs = [_facts(store, record, status, held) for record, status in shown]
    if call.wants_json:
        call.answer(total=len(found), runs=runs)
        return
    columns = ["run", "workflow", "status", "begun", "updated", "waits for"]
    chosen = bool(statuses or workflow)
    empty = "there are no such runs" if chosen else "there are no runs"
    screen.table(columns, map(_row, runs), empty=empty)
    if len(found) > len(runs):
        screen.note(f"… and {len(found) - len(runs):,} more: --limit 0")


def _facts(store: Store, record: RunRecord, status: str, held: dict[str, Lease]) -> dict[str, Any]:
    return {
        "run_id": record.name,
        "workflow": record.workflow or None,
        "status": status,
        "started_at": record.created_at,
        "updated_at": record.updated_at,
        "holder": holder_of(held.get(record.name)),
        "waits_for": _awaited(store, record) if status == "waiting" else [],
    }


def _awaited(store: Store, record: RunRecord) -> list[dict[str, Any]]:
    """Return what a run waits for; of its entries only those are added up that speak of waits."""
    from maestro_hive.maestro.state.projections import fold  # noqa: PLC0415 - as above
    from maestro_hive.maestro.state.records import EntryKind  # noqa: PLC0415 - not for --help
    from maestro_hive.maestro.state.views import open_waits  # noqa: PLC0415 - as above

    telling = {EntryKind.WAIT_STARTED, EntryKind.WAIT_ENDED, EntryKind.RETRIED, EntryKind.RESTORED}
    entries = [entry for entry in store.entries(record.id) if entry.kind in telling]
    return waits_of(open_waits(fold(entries, store.load)))


def _row(run: dict[str, Any]) -> list[screen.Cell]:
    status = run["status"]
    return [
        run["run_id"],
        run["workflow"],
        Styled(status, STYLES.get(status, "")),
        run["started_at"],
        run["updated_at"],
        ", ".join(wait["name"] for wait in run["waits_for"]),
    ]
