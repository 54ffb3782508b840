"""``maestro gc``: deleting what nothing needs any more."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import click

from maestro_hive.cli import screen, words
from maestro_hive.cli.frame import verb

if TYPE_CHECKING:
    from maestro_hive.cli.call import Call
    from maestro_hive.cli.checkpoint_files import CheckpointFile


@verb(
    "gc",
    examples="""
    maestro gc --dry-run      what would be deleted
    maestro gc                values nothing refers to, and checkpoints that have expired
    maestro gc --keep 3       also all but the three newest checkpoints of each run
    """,
    reads=True,
)
@click.option("--keep", metavar="N", type=click.IntRange(min=1), help="Checkpoints kept per run.")
@click.option("--dry-run", is_flag=True, help="Say what would be deleted, and delete nothing.")
def command(call: Call, keep: int | None, *, dry_run: bool) -> None:
    """Delete what nothing needs any more.

    Stored values that no step refers to, checkpoints that have expired, and files that killed
    processes left half written. No run loses anything it would resume from. The journal keeps its
    size: the room inside it is used again.
    """
    from maestro_hive.cli.beside import leftovers  # noqa: PLC0415 - not for --help
    from maestro_hive.cli.look import Look  # noqa: PLC0415 - as above
    from maestro_hive.kernel import files  # noqa: PLC0415 - as above

    with call.opened() as store:
        with Look(call.folder) as look:
            values, size = look.unused_values()
        doomed = _doomed(call, keep)
        half_written = leftovers([call.folder, *call.checkpoint_folders])
        if not dry_run:
            values = store.collect()
            store.empty_log()
            for path in [*(each.path for each in doomed), *half_written]:
                files.remove(path)
    found = {"values": values, "bytes": size if values else 0}
    found |= {"checkpoints": len(doomed), "leftovers": len(half_written)}
    if call.wants_json:
        call.answer(dry_run=dry_run, **found)
        return
    screen.line(
        f"{'would delete' if dry_run else 'deleted'} {words.many(values, 'stored value')}"
        f" ({words.size(found['bytes'])}), {words.many(len(doomed), 'checkpoint')},"
        f" {words.many(len(half_written), 'leftover file')}"
    )


def _doomed(call: Call, keep: int | None) -> list[CheckpointFile]:
    from maestro_hive.cli.checkpoint_files import all_checkpoints  # noqa: PLC0415 - as above

    now, kept, doomed = time.time(), dict[str, int](), []
    for each in all_checkpoints(call.checkpoint_folders):  # the newest of each run first
        if each.name.expired(now) or (keep is not None and kept.get(each.run, 0) >= keep):
            doomed.append(each)
        else:
            kept[each.run] = kept.get(each.run, 0) + 1
    return doomed
