"""``maestro backup``: a state folder, copied while it is in use."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from maestro_hive.cli import screen, words
from maestro_hive.cli.frame import verb

if TYPE_CHECKING:
    from collections.abc import Iterator

    from maestro_hive.cli.call import Call


@verb(
    "backup",
    examples="""
    maestro backup /backups/monday
    maestro backup /backups/monday && maestro doctor --store /backups/monday
    """,
)
@click.argument("target", type=click.Path(path_type=Path))
def command(call: Call, target: Path) -> None:
    """Copy a state folder, in use or not, to a new folder.

    The journal is copied as of one moment, whoever writes to it, and the checkpoints beside it. The
    copy is a state folder of its own: choose it with --store, and its runs go on from there.
    """
    with call.opened() as store:
        store.backup(target)
    copied = 1
    for source, place in _documents(call):
        copied += _copy(source, target, place)
    count = words.many(copied, "file")
    screen.line(f"{call.folder} was copied to {target} ({count})")


def _documents(call: Call) -> Iterator[tuple[Path, Path]]:
    """Yield what lies beside the journal, and where it belongs in a copy."""
    from maestro_hive.cli.beside import copies  # noqa: PLC0415 - not for --help

    for path, _ in copies(call.folder):
        yield path, path.relative_to(call.folder)
    for folder in call.checkpoint_folders:
        if folder != call.folder / "checkpoints":  # chosen by itself; the copy has it inside
            for path in sorted(folder.glob("*/*.json")):
                yield path, Path("checkpoints") / path.relative_to(folder)


def _copy(source: Path, target: Path, place: Path) -> int:
    from maestro_hive.kernel import files  # noqa: PLC0415 - as above

    try:
        text = files.read_whole(source)
    except FileNotFoundError:
        return 0  # retention took it in this moment
    inside = files.make_folder_inside(target, *place.parent.parts)
    files.write_atomically(inside / place.name, text)
    return 1
