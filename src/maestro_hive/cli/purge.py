"""``maestro purge``: forgetting runs wholly."""

from __future__ import annotations

from collections import Counter
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import click

from maestro_hive.cli import screen, words
from maestro_hive.cli.completion import run_ids
from maestro_hive.cli.endings import FAILED, complain
from maestro_hive.cli.frame import verb
from maestro_hive.cli.kinds import duration

if TYPE_CHECKING:
    from pathlib import Path

    from maestro_hive.cli.call import Call
    from maestro_hive.maestro.state.sqlite_store import SqliteStore

#: Names that are said one by one before the rest is counted.
_SAID = 10


@verb(
    "purge",
    examples="""
    maestro purge checkout-42
    maestro purge --older-than 30d --status success
    maestro purge --status failed --status cancelled --yes
    """,
)
@click.argument("runs", metavar="[RUN]...", nargs=-1, shell_complete=run_ids)
@click.option(
    "--older-than",
    type=duration,
    help="Runs to which nothing was added for so long: 12h, 30d.",
)
@click.option("--status", "statuses", multiple=True, help="Runs of this status; may be repeated.")
@click.option("--yes", is_flag=True, help="Do not ask.")
def command(
    call: Call,
    runs: tuple[str, ...],
    older_than: float | None,
    statuses: tuple[str, ...],
    *,
    yes: bool,
) -> int | None:
    """Forget runs wholly: journal, copies and checkpoints.

    Name the runs, or choose them by age and status; you are asked first. A run that a process
    executes is refused. Nothing of a purged run can be resumed, and its bytes are overwritten in
    the journal; of its id only a counter stays. Backups, exports and damaged logs that were set
    aside are not touched.
    """
    if not runs and older_than is None and not statuses:
        raise click.UsageError(
            "Say which runs: by id, or by --older-than and --status.", click.get_current_context()
        )
    with call.opened() as store:
        chosen = _chosen(call, store, runs, older_than, statuses)
        if not chosen:
            screen.note("no run is like that")
            return None
        call.agreed(f"Forget {_listed(chosen)} for ever?", yes=yes)
        refused = [name for name in chosen if not _purged(call, store, name)]
        if not store.empty_log():
            complain(
                "somebody is reading the journal, so its log still has traces of what was purged;"
                " 'maestro gc' empties it"
            )
    return FAILED if refused else None


def _chosen(
    call: Call,
    store: SqliteStore,
    names: tuple[str, ...],
    older_than: float | None,
    statuses: tuple[str, ...],
) -> dict[str, str]:
    """Return the runs that are meant, and the status of each."""
    from maestro_hive.cli.look import Look  # noqa: PLC0415 - not for --help

    known = {record.name: record for record in store.runs()}
    chosen = {name: known[name].status if name in known else "" for name in names or known}
    _refuse_unknown(call, [name for name in chosen if name not in known])
    if statuses:
        chosen = {name: status for name, status in chosen.items() if status in statuses}
    if older_than is not None:
        limit = datetime.now(UTC) - timedelta(seconds=older_than)
        with Look(call.folder) as look:
            chosen = {
                name: status
                for name, status in chosen.items()
                if name in known and look.last_change(known[name]) < limit
            }
    return chosen


def _refuse_unknown(call: Call, names: list[str]) -> None:
    from maestro_hive.kernel.files import check_identifier  # noqa: PLC0415 - as above

    for name in names:
        check_identifier(name, "run id")
        places = [call.folder / "runs" / name, *(each / name for each in call.checkpoint_folders)]
        if not any(place.is_dir() for place in places):
            raise click.UsageError(f"There is no run {name!r}.", click.get_current_context())


def _purged(call: Call, store: SqliteStore, name: str) -> bool:
    from maestro_hive.kernel.errors import RunHeldError  # noqa: PLC0415 - as above

    try:
        removed = purge(store, name, call.checkpoint_folders)
    except RunHeldError as held:
        complain(str(held))
        return False
    screen.line(f"run {name!r} is forgotten, with {words.many(removed, 'copy', 'copies')} of it")
    return True


def purge(store: SqliteStore, name: str, checkpoint_folders: list[Path]) -> int:
    """Forget a run; return how many copies of it were deleted.

    The copies go first and the journal last, with the run held all the while. Killed in between,
    the run is still in the journal, whole, and can be purged again. The other way round its copies
    would be left, and the next execution of that id would resume from them: a run that was
    forgotten would come back.
    """
    from maestro_hive.cli.beside import remove_copies  # noqa: PLC0415 - as above
    from maestro_hive.hive.mail import Mail  # noqa: PLC0415 - as above

    removed = [0]

    def first() -> None:
        removed[0] = remove_copies(name, store.folder, checkpoint_folders)
        Mail(store).throw_away(name)

    if not store.purge_run(name, first):
        lease = store.take_lease(f"run/{name}")  # only copies of it are left
        try:
            first()
        finally:
            store.release_lease(lease)
    return removed[0]


def _listed(chosen: dict[str, str]) -> str:
    names, rest = list(chosen)[:_SAID], len(chosen) - _SAID
    more = f" and {rest} more" if rest > 0 else ""
    statuses = ", ".join(
        f"{count} {status or 'without a journal'}"
        for status, count in Counter(chosen.values()).most_common()
    )
    return f"{words.many(len(chosen), 'run')} ({', '.join(names)}{more}; {statuses})"
