"""``maestro cancel``: end a run and what it started."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from maestro_hive.cli import completion, screen
from maestro_hive.cli.frame import verb
from maestro_hive.cli.standing import find_run

if TYPE_CHECKING:
    from maestro_hive.cli.call import Call


@verb(
    "cancel",
    examples="""
    maestro cancel checkout-42
    maestro cancel checkout-42 --reason "wrong page" --yes
    """,
)
@click.argument("run", metavar="RUN", shell_complete=completion.run_ids)
@click.option("--reason", metavar="TEXT", default="", help="Why; whoever waits for it is told.")
@click.option("--yes", is_flag=True, help="Do not ask.")
def command(call: Call, run: str, reason: str, *, yes: bool) -> None:
    """End a run, and what it started.

    A process that executes it stops what it is doing, also in the run's children, and records the
    end; where no process does, the end is recorded at once. What is kept stays kept: 'maestro
    retry' lets the run go on after all.
    """
    from maestro_hive.hive import control as orders  # noqa: PLC0415 - not for --help

    with call.opened() as store:
        record = find_run(store, run)
        if record.status in ("success", "failed", "cancelled"):
            screen.line(f"run {record.name} is over already: {record.status}")
            return
        call.agreed(f"End run {record.name!r} and what it started?", yes=yes)
        orders.cancel(store, record.name, reason)
        over = store.run(record.name)
    done = over is not None and over.status == "cancelled"
    told = "is cancelled" if done else "was asked to end, by the process that executes it"
    screen.line(f"run {record.name} {told}")
