"""``maestro fork``: a new run from what another has kept."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from maestro_hive.cli import completion, screen
from maestro_hive.cli.frame import verb
from maestro_hive.cli.standing import find_run
from maestro_hive.kernel.errors import DecodeError

if TYPE_CHECKING:
    from maestro_hive.cli.call import Call


@verb(
    "fork",
    examples="""
    maestro fork checkout-42 --from-step implement        that step again, and what depends on it
    maestro fork checkout-42 --set feature='"cart page"'  another input, as JSON
    maestro fork checkout-42 --as checkout-43             under a name of your own
    """,
)
@click.argument("run", metavar="RUN", shell_complete=completion.run_ids)
@click.option(
    "--from-step", metavar="STEP", help="Execute this step anew: its number, name, or name#2."
)
@click.option(
    "--set",
    "settings",
    metavar="NAME=VALUE",
    multiple=True,
    help="Replace an argument of the workflow; VALUE is JSON, or else text.",
)
@click.option("--as", "name", metavar="NEW_RUN", help="The new run's name.  [default: made up]")
def command(
    call: Call, run: str, from_step: str | None, settings: tuple[str, ...], name: str | None
) -> None:
    """Begin a new run with what another has kept.

    Steps before STEP are kept, STEP is executed anew, and those after it run again exactly when
    their input changes. The original stays as it is. Nothing is executed yet: the program that has
    the workflow goes on with hive.resume(NEW_RUN).
    """
    from maestro_hive.hive.control import fork  # noqa: PLC0415 - not for --help

    changed = dict(_setting(each) for each in settings)
    with call.opened() as store:
        record = find_run(store, run)
        made = fork(store, record.name, from_step=from_step, changed=changed, new_id=name)
    screen.line(f"run {made} was begun from {record.name}; hive.resume({made!r}) goes on with it")


def _setting(text: str) -> tuple[str, Any]:
    from maestro_hive.maestro.state.strict_json import parse  # noqa: PLC0415 - not for --help

    name, separator, value = text.partition("=")
    if not separator or not name:
        raise click.UsageError(
            f"--set takes NAME=VALUE, and {text!r} is not that.",
            click.get_current_context(silent=True),
        )
    try:
        return name, parse(value.encode(), name)
    except DecodeError:
        return name, value
