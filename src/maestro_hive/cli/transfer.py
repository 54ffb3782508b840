"""``maestro export`` and ``maestro import``: a run as one file."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from maestro_hive.admin.transfer import check_target, export_run, import_run, write_export
from maestro_hive.cli import output
from maestro_hive.cli.command import verb
from maestro_hive.cli.completion import run_ids
from maestro_hive.kernel import files

if TYPE_CHECKING:
    from maestro_hive.cli.command import Call


@verb(
    "export",
    examples="""
    maestro export checkout-42 checkout-42.json
    maestro export checkout-42 checkout-42.json --force    replacing an existing file
    maestro export checkout-42 - | ssh other maestro import -
    """,
)
@click.argument("run_id", metavar="RUN", shell_complete=run_ids)
@click.argument("target", metavar="FILE", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--force", is_flag=True, help="Replace FILE if it exists.")
def export_command(call: Call, run_id: str, target: Path, *, force: bool) -> None:
    """Write a run to one file, to be imported elsewhere.

    The file has everything that is recorded, with a SHA-256 over all of it: completed steps,
    attempts, memory, history, waits. The run may be executed meanwhile: the file has it as of one
    moment. Inputs and results are in plain text; only you may read the file. FILE may be - for
    stdout. Children are runs of their own, and exported separately.
    """
    to_stdout = str(target) == "-"
    if not to_stdout:
        check_target(target, force=force)
    with call.reading() as reader:
        exported = export_run(reader, run_id)
    what = f"{output.many(exported.steps, 'step')}, {output.size(len(exported.text))}"
    if to_stdout:
        sys.stdout.buffer.write(exported.text)
        sys.stdout.buffer.flush()
        output.note(f"run {run_id!r}: {what}")
    else:
        write_export(target, exported.text, force=force)
        output.line(f"run {run_id!r} was exported to {target}: {what}")
    if exported.children:
        children = output.many(exported.children, "child run")
        output.note(f"it has {children}: export them separately")


@verb(
    "import",
    examples="""
    maestro import checkout-42.json
    maestro import checkout-42.json --as checkout-43      next to the run it was exported from
    maestro import checkout-42.json --store other         into another state folder, new or not
    """,
)
@click.argument(
    "source", metavar="FILE", type=click.Path(exists=True, dir_okay=False, allow_dash=True)
)
@click.option("--as", "new_id", metavar="NEW_ID", help="Its id in this folder.  [default: its own]")
def import_command(call: Call, source: str, new_id: str | None) -> None:
    """Import a run from a file that export wrote.

    The file is checked first: one that is damaged, or of a newer version, changes nothing. An id
    that exists is refused. The state folder is created if needed. Start the run's program on that
    folder with the same id: completed steps do not run again. With --as its steps have other effect
    keys than those of the original. FILE may be - for stdin.
    """
    if source == "-":
        text, name = sys.stdin.buffer.read(files.MAX_FILE_BYTES + 1), "stdin"
    else:
        path = Path(source).resolve()  # a link stands for its target
        text, name = files.read_whole(path), str(path)
    imported = import_run(call.folder, text, name, run_id=new_id)
    output.line(
        f"run {imported.run_id!r} was imported into {call.folder}, as of {imported.saved_at}"
    )
