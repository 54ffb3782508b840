"""``maestro retry``: let what failed be tried again."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from maestro_hive.cli import completion, screen
from maestro_hive.cli.frame import verb
from maestro_hive.cli.standing import find_run

if TYPE_CHECKING:
    from maestro_hive.cli.call import Call


@verb(
    "retry",
    examples="""
    maestro retry checkout-42              what failed in it, and in its children
    maestro retry checkout-42 implement    one step that was given up or interrupted
    """,
)
@click.argument("run", metavar="RUN", shell_complete=completion.run_ids)
@click.argument("step", metavar="[STEP]", required=False)
def command(call: Call, run: str, step: str | None) -> None:
    """Let what failed in a run be tried again.

    Failed, interrupted and cancelled runs stay as they are until somebody asks for this. Steps that
    are kept stay kept; the others get new attempts. The run goes on when its program is started
    again. STEP is a step's number, its name, or name#2.
    """
    from maestro_hive.hive import control as orders  # noqa: PLC0415 - not for --help

    with call.opened() as store:
        record = find_run(store, run)
        orders.retry(store, record.name, step)
    what = f"step {step} of run {record.name}" if step else f"run {record.name}"
    screen.line(f"{what} may be tried again: start its program, and it goes on")
