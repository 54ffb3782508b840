"""The ``maestro`` command: parse, call one function, print."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import click

import maestro_hive
from maestro_hive.kernel.errors import MaestroError

_STORE = click.option(
    "--store",
    "folder",
    type=click.Path(path_type=Path),
    envvar="MAESTRO_STATE_DIR",
    show_default="/var/maestro/state, or ~/.maestro/state where that cannot be used",
    show_envvar=True,
    help="The state folder.",
)


@click.group()
@click.version_option(maestro_hive.__version__, prog_name="maestro")
def cli() -> None:
    """Look after a state folder: check it, and copy it while it is in use."""


@cli.command()
@_STORE
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def doctor(folder: Path | None, *, as_json: bool) -> None:
    """Read everything in a state folder and say what is wrong with it.

    Exits with 1 if anything is.
    """
    from maestro_hive.cli.examine import default_folder, examine  # noqa: PLC0415 - loads the store

    found = examine(folder or default_folder())
    if as_json:
        click.echo(json.dumps(found, indent=2))
    else:
        _print_findings(found)
    if found["wrong"]:
        sys.exit(1)


def _print_findings(found: dict[str, Any]) -> None:
    click.echo(f"state folder  {found['folder']}")
    click.echo(f"format        {found['format']}, SQLite {found['sqlite']}")
    click.echo(f"runs          {found['runs']}")
    for line in found["wrong"]:
        click.echo(f"wrong         {line}")
    click.echo("everything that could be checked is sound" if not found["wrong"] else "not sound")


@cli.command()
@click.argument("target", type=click.Path(path_type=Path))
@_STORE
def backup(target: Path, folder: Path | None) -> None:
    """Copy a state folder, in use or not, to the new folder TARGET."""
    from maestro_hive.cli.examine import copy_folder, default_folder  # noqa: PLC0415 - as above

    folder = folder or default_folder()
    copied = copy_folder(folder, target)
    click.echo(f"{folder} was copied to {target} ({copied} files)")


def main() -> None:
    """Run the command; an error of ours is one sentence, and exit code 1."""
    try:
        cli(prog_name="maestro")
    except MaestroError as error:
        click.echo(f"maestro: {error}", err=True)
        sys.exit(1)
