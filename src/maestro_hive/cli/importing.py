"""``maestro import``: a run from one file."""

from __future__ import annotations

import sys
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import click

from maestro_hive.cli import screen
from maestro_hive.cli.call import speak_up
from maestro_hive.cli.frame import verb
from maestro_hive.cli.unwritable import naming_what_is_unwritable

if TYPE_CHECKING:
    from maestro_hive.cli.call import Call


@verb(
    "import",
    examples="""
    maestro import checkout-42.json
    maestro import checkout-42.json --as checkout-43      next to the run it came from
    maestro import checkout-42.json --store other         into another state folder, new or not
    """,
)
@click.argument(
    "source", metavar="FILE", type=click.Path(exists=True, dir_okay=False, allow_dash=True)
)
@click.option("--as", "new_id", metavar="NEW_ID", help="The id it gets here.  [default: its own]")
def command(call: Call, source: str, new_id: str | None) -> None:
    """Take a run in from a file that export wrote.

    The file is checked first: one that is damaged, or written by a newer version, changes nothing.
    An id that is taken is refused. The state folder is made if it is not there. Start the run's
    program on that folder with the same id: steps that are kept do not run again. With --as its
    steps have other effect keys than those of the run it came from. FILE may be - for stdin.
    """
    from maestro_hive.cli import run_file  # noqa: PLC0415 - not for --help
    from maestro_hive.maestro.state.sqlite.store import SqliteStore  # noqa: PLC0415 - as above

    copy = run_file.read(*_read(source))
    run_id = copy.body["workflow_id"] if new_id is None else new_id
    speak_up()
    with naming_what_is_unwritable(call.folder), closing(SqliteStore(call.folder)) as store:
        folders = [call.folder / "runs", *call.checkpoint_folders]
        run_file.take_in(store, copy, run_id, folders)
    screen.line(f"run {run_id!r} is in {call.folder}, as of {copy.saved_at}")


def _read(source: str) -> tuple[bytes, str]:
    """Return the bytes of a file, and what to call it."""
    from maestro_hive.kernel import files  # noqa: PLC0415 - as above

    if source == "-":
        return sys.stdin.buffer.read(files.MAX_FILE_BYTES + 1), "stdin"
    path = Path(source).resolve()  # whoever names a link means what it leads to
    return files.read_whole(path), str(path)
