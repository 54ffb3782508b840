"""``maestro purge``: forgetting runs wholly."""

from __future__ import annotations

from collections import Counter
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, NamedTuple

import click

from maestro_hive.cli import screen, words
from maestro_hive.cli.completion import run_ids
from maestro_hive.cli.endings import FAILED, complain
from maestro_hive.cli.frame import verb
from maestro_hive.cli.kinds import duration
from maestro_hive.kernel.errors import MaestroError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from maestro_hive.cli.call import Call
    from maestro_hive.cli.look import Look
    from maestro_hive.maestro.state.records import RunRecord
    from maestro_hive.maestro.state.sqlite.store import SqliteStore

#: Names that are said one by one before the rest is counted.
_SAID = 10
#: Runs in runs in runs: nobody has more, and a circle would never end.
_MOST_GENERATIONS = 100

_FACTS_OF_FIRST = (
    "SELECT facts FROM entries WHERE id BETWEEN ? AND ? AND kind = ? ORDER BY id LIMIT 1"
)


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

    Name the runs, or choose them by age and by the status that 'maestro runs' shows; you are asked
    first. Refused are runs that a process executes, or that have changed since they were chosen.
    Parts of a run that is not over, which it would execute again, are only forgotten by name.
    Nothing of a purged run can be resumed, and its bytes are overwritten in the journal. Its id
    stays there, with a counter that keeps late writers out, and so it does in runs that began it
    or were forked from it: an id should be no secret. Backups, exports and damaged logs that were
    set aside are not touched.
    """
    if not runs and older_than is None and not statuses:
        raise click.UsageError(
            "Say which runs: by id, or by --older-than and --status.", click.get_current_context()
        )
    from maestro_hive.cli.look import Look  # noqa: PLC0415 - not for --help

    with call.opened() as store:
        with Look(call.folder) as look:
            purging = _Purging(call, store, look, by_name=bool(runs))
            chosen = purging.choose(runs, older_than, statuses)
            if not chosen:
                screen.note("no run is like that")
                return None
            call.agreed(purging.question(chosen), yes=yes)
            refused = [name for name, seen in chosen.items() if not purging.purged(name, seen)]
        if not store.empty_log():
            complain(
                "somebody is reading the journal, so its log still has traces of what was purged;"
                " 'maestro gc' empties it"
            )
    return FAILED if refused else None


class _Seen(NamedTuple):
    """A run as it stood when it was chosen; one that has changed since is not what was meant."""

    run: int
    status: str
    changed_at: datetime


class _NotForgottenError(MaestroError):
    """A run must stay, and the message says why."""


class _Purging:
    """The runs of one call: chosen, asked about, and forgotten if they still are what they were."""

    def __init__(self, call: Call, store: SqliteStore, look: Look, *, by_name: bool) -> None:
        self._call = call
        self._store = store
        self._look = look
        self._by_name = by_name

    def choose(
        self, names: tuple[str, ...], older_than: float | None, statuses: tuple[str, ...]
    ) -> dict[str, _Seen | None]:
        """Return the runs that are meant as they stand; None for one with nothing but copies."""
        # The oldest first: whoever began a run goes before it, and may be refused.
        known = {record.name: record for record in reversed(self._store.runs())}
        _refuse_unknown(self._call, [name for name in names if name not in known])
        held = self._store.run_leases()
        limit = None if older_than is None else datetime.now(UTC) - timedelta(seconds=older_than)
        chosen: dict[str, _Seen | None] = {}
        for name in names or known:
            record = known.get(name)
            seen = self._seen(record, held=name in held) if record else None
            if _is_meant(seen, limit, statuses):
                chosen[name] = seen
        return chosen if self._by_name else self._without_parts(chosen)

    def _seen(self, record: RunRecord, *, held: bool) -> _Seen:
        from maestro_hive.maestro.state.views import standing  # noqa: PLC0415 - as above

        status = standing(record.workflow, record.status, held=held)
        return _Seen(record.id, status, self._look.last_change(record))

    def _without_parts(self, chosen: dict[str, _Seen | None]) -> dict[str, _Seen | None]:
        needed = self._needed(chosen)
        if needed:
            screen.note(
                f"{words.many(len(needed), 'run')} of those stay: they are parts of runs that are"
                f" not over ({_some(list(dict.fromkeys(needed.values())))})"
            )
        return {name: seen for name, seen in chosen.items() if name not in needed}

    def _needed(self, names: Iterable[str]) -> dict[str, str]:
        """Return those that are parts of runs which are not over, and not chosen; and of which."""
        found = {name: self._unfinished_around(name) for name in names}
        return {name: run for name, run in found.items() if run is not None and run not in found}

    def _unfinished_around(self, name: str) -> str | None:
        """Return the run that is not over and has this one as its part, or as a part of a part."""
        from maestro_hive.maestro.state.views import OVER  # noqa: PLC0415 - as above

        record = self._store.run(name)
        for _ in range(_MOST_GENERATIONS):
            began = None if record is None else self._who_began(record)
            record = None if began is None else self._store.run(began)
            if record is None or record.status not in OVER:
                break
        return None if record is None or record.name == name else record.name

    def _who_began(self, record: RunRecord) -> str | None:
        from maestro_hive.maestro.state import codec  # noqa: PLC0415 - as above
        from maestro_hive.maestro.state.records import EntryKind  # noqa: PLC0415 - as above
        from maestro_hive.maestro.state.sqlite.entries import RUN_BITS  # noqa: PLC0415 - as above

        first = record.id << RUN_BITS
        last = first + (1 << RUN_BITS) - 1
        rows = self._look.rows(_FACTS_OF_FIRST, (first, last, EntryKind.RUN_STARTED.value))
        facts = codec.parse(rows[0][0]) if rows and rows[0][0] else {}
        return facts.get("parent")

    def question(self, chosen: dict[str, _Seen | None]) -> str:
        """Return what is to be asked."""
        needed = self._needed(chosen) if self._by_name else {}
        warning = (
            f"Runs that are not over ({_some(list(dict.fromkeys(needed.values())))}) will execute"
            f" their parts again: {_some(list(needed))}. "
        )
        return f"{warning if needed else ''}Forget {_listed(chosen)} for ever?"

    def purged(self, name: str, seen: _Seen | None) -> bool:
        """Forget a run, and say so; False if it must stay."""
        from maestro_hive.kernel.errors import RunLeasedError  # noqa: PLC0415 - as above

        folders = self._call.checkpoint_folders
        try:
            removed = purge(self._store, name, folders, lambda: self._check(name, seen))
        except (RunLeasedError, _NotForgottenError) as refused:
            complain(str(refused))
            return False
        screen.line(
            f"run {name!r} is forgotten, with {words.many(removed, 'copy', 'copies')} of it"
        )
        return True

    def _check(self, name: str, seen: _Seen | None) -> None:
        """Raise unless a run, which we hold now, is what was asked about."""
        record = self._store.run(name)
        now = None if record is None else self._seen(record, held=False)
        if now != seen:
            status = "gone" if now is None else f"{now.status} now"
            raise _NotForgottenError(
                f"run {name!r} has changed since it was chosen and is {status}: it is not forgotten"
            )
        around = None if self._by_name else self._unfinished_around(name)
        if around is not None:
            raise _NotForgottenError(
                f"run {name!r} is a part of run {around!r}, which is not over and would execute it"
                " again: it is not forgotten"
            )


def _is_meant(seen: _Seen | None, limit: datetime | None, statuses: tuple[str, ...]) -> bool:
    if seen is None:
        return limit is None and not statuses
    return (limit is None or seen.changed_at < limit) and (not statuses or seen.status in statuses)


def _refuse_unknown(call: Call, names: list[str]) -> None:
    from maestro_hive.kernel.files import check_identifier  # noqa: PLC0415 - as above

    for name in names:
        check_identifier(name, "run id")
        places = [call.folder / "runs" / name, *(each / name for each in call.checkpoint_folders)]
        if not any(place.is_dir() for place in places):
            raise click.UsageError(f"There is no run {name!r}.", click.get_current_context())


def purge(
    store: SqliteStore,
    name: str,
    checkpoint_folders: list[Path],
    check: Callable[[], None] | None = None,
) -> int:
    """Forget a run; return how many copies of it were deleted. ``check`` may raise to keep it.

    The copies go first and the journal last, with the run held all the while. Killed in between,
    the run is still in the journal, whole, and can be purged again. The other way round its copies
    would be left, and the next execution of that id would resume from them: a run that was
    forgotten would come back.
    """
    from maestro_hive.cli.beside import remove_copies  # noqa: PLC0415 - as above
    from maestro_hive.hive.inbox import NAMESPACE  # noqa: PLC0415 - as above

    removed = [0]

    def first() -> None:
        if check is not None:
            check()
        removed[0] = remove_copies(name, store.folder, checkpoint_folders)
        if store.document(NAMESPACE, name) is not None:
            store.update_document(NAMESPACE, name, lambda _: None)

    if not store.purge_run(name, first):
        lease = store.take_lease(f"run/{name}")  # only copies of it are left
        try:
            first()
        finally:
            store.release_lease(lease)
    return removed[0]


def _listed(chosen: dict[str, _Seen | None]) -> str:
    counted = Counter(seen.status if seen else "without a journal" for seen in chosen.values())
    statuses = ", ".join(f"{count} {status}" for status, count in counted.most_common())
    return f"{words.many(len(chosen), 'run')} ({_some(list(chosen))}; {statuses})"


def _some(names: list[str]) -> str:
    rest = len(names) - _SAID
    return f"{', '.join(names[:_SAID])}{f' and {rest} more' if rest > 0 else ''}"
