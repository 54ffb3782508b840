"""``maestro runs``: the runs of a state folder, newest first."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from maestro_hive.admin.runs import list_runs
from maestro_hive.cli import output
from maestro_hive.cli.command import verb
from maestro_hive.maestro.state.run_view import to_dict

if TYPE_CHECKING:
    from maestro_hive.admin.runs import RunSummary
    from maestro_hive.cli.command import Call

_LIMIT = 50


@verb(
    "runs",
    examples="""
    maestro runs                                    the newest 50
    maestro runs --status failed --status stopped   those that need attention
    maestro runs --workflow build --limit 0         all runs of one workflow
    maestro runs --json                             for another program
    """,
    reads=True,
)
@click.option(
    "--status",
    "statuses",
    metavar="STATUS",
    multiple=True,
    help="Only runs with this status; may be repeated.",
)
@click.option("--workflow", metavar="NAME", help="Only runs of this workflow.")
@click.option(
    "--limit",
    type=click.IntRange(min=0),
    default=_LIMIT,
    show_default=True,
    help="How many at most; 0 for all.",
)
def runs_command(call: Call, statuses: tuple[str, ...], workflow: str | None, limit: int) -> None:
    """List runs, newest first, with their status.

    A run is pending, running, waiting (for an answer, see 'maestro answer'), success, failed or
    cancelled; and stopped if it is not finished and no living process executes it: start its
    program again, and it is resumed. A run without a workflow has the status that its program set,
    and is running while a process has it open.
    """
    with call.reading() as reader:
        found = list_runs(reader, statuses=statuses, workflow=workflow, limit=limit or None)
    if call.wants_json:
        call.print_json(**to_dict(found))
        return
    columns = ["run", "workflow", "status", "started", "updated", "waits for"]
    filtered = bool(statuses or workflow)
    empty = "there are no such runs" if filtered else "there are no runs"
    output.table(columns, map(_row, found.runs), empty=empty)
    if found.total > len(found.runs):
        output.note(f"… and {found.total - len(found.runs):,} more: --limit 0")


def _row(run: RunSummary) -> list[output.Cell]:
    return [
        run.run_id,
        run.workflow,
        output.status(run.status),
        run.started_at,
        run.updated_at,
        ", ".join(wait.name for wait in run.waits_for),
    ]
