"""``maestro repairs``: which repairs have proven themselves."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from maestro_hive.admin import repairs
from maestro_hive.cli import output
from maestro_hive.cli.command import verb
from maestro_hive.maestro.state.plain import to_dict

if TYPE_CHECKING:
    from maestro_hive.admin.repairs import RepairView
    from maestro_hive.cli.command import Call


@verb("repairs", reads=True)
@click.option("--all", "everything", is_flag=True, help="Also those that never worked.")
def repairs_command(call: Call, everything: bool) -> None:
    """List the repairs that have proven themselves, with counts.

    A repair is what a healer did about a failed attempt. It worked if the step was completed then, and
    failed if the same failure came again. For each failure, by its fingerprint, the healer that is listed
    first is asked first in all runs of this folder.

    Examples:
        maestro repairs            what has worked, and how often
        maestro repairs --all      also what never did
        maestro repairs --json     the same, for another program
    """
    with call.reading() as reader:
        found = repairs.list_repairs(reader, failed=everything)
    if call.wants_json:
        call.print_json(repairs=[to_dict(each) for each in found])
        return
    output.table(
        ["failure", "type", "step", "healer", "worked", "failed", "last used", "what it does"],
        [_row(each) for each in found],
        empty="no repair has worked yet",
    )


def _row(repair: RepairView) -> list[output.Cell]:
    return [
        repair.fingerprint,
        repair.failure_type,
        repair.step,
        repair.healer,
        repair.worked,
        repair.failed,
        repair.last_used,
        output.in_one_line(repair.fix or ""),
    ]
