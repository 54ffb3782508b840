"""``maestro doctor``: whether a state folder is all right, and what can be mended."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import click

from maestro_hive.cli import screen, words
from maestro_hive.cli.call import require_journal, speak_up
from maestro_hive.cli.endings import FAILED
from maestro_hive.cli.frame import verb

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from maestro_hive.cli.call import Call
    from maestro_hive.cli.examination import Findings
    from maestro_hive.maestro.state.sqlite.store import SqliteStore

#: Unfinished runs that are named one by one before the rest is counted.
_SAID = 10
#: How long a writer may keep it from opening the journal.
_PATIENCE_SECONDS = 3.0


@verb(
    "doctor",
    examples="""
    maestro doctor                    is everything all right? what would be repaired?
    maestro doctor --fix              repair it
    maestro doctor --json | jq .wrong
    """,
    reads=True,
)
@click.option("--fix", is_flag=True, help="Repair what can be repaired; nothing in use is deleted.")
def command(call: Call, *, fix: bool) -> int | None:
    """Examine a state folder, say what is wrong, and mend it.

    Reads everything: every page, value, document and checkpoint; looks at who may read the folder,
    who holds which run, and how much room the disk has. Exits with 1 if anything is wrong. A folder
    that cannot be written, or whose disk is full, is looked at all the same.
    """
    from maestro_hive.cli.examination import examine, look_at_rights  # noqa: PLC0415 - database
    from maestro_hive.cli.mending import mend, mend_rights  # noqa: PLC0415 - as above

    require_journal(call.folder)
    speak_up()
    exposed = look_at_rights(call.folder)
    done = list(mend_rights(exposed)) if fix else []
    unseen: list[str] = []
    with _opened_if_possible(call, unseen) as store:
        found = examine(call.folder, unseen)
        if fix and store is not None:
            done += mend(found, store)
            found = examine(call.folder, unseen)
    found.exposed = look_at_rights(call.folder) if fix else exposed
    found.wrong += [f"{each.path} {each.trouble}" for each in found.exposed]
    if call.wants_json:
        call.answer(**found.as_json(), fixed=done)
    else:
        _print(found, done)
    return FAILED if found.wrong else None


@contextlib.contextmanager
def _opened_if_possible(call: Call, unseen: list[str]) -> Iterator[SqliteStore | None]:
    """Open the store, as whoever uses the folder does; None, and why, if it cannot be written."""
    from maestro_hive.kernel.errors import FolderError, StorageError  # noqa: PLC0415 - as above

    with contextlib.ExitStack() as stack:
        try:
            _refuse_to_wait(call.folder)
            store = stack.enter_context(call.opened())
        except (FolderError, StorageError) as error:
            unseen.append(f"it cannot be opened for writing, only looked at: {error}")
            store = None
        yield store


def _refuse_to_wait(folder: Path) -> None:
    """Raise if somebody is inside a write and stays there: looking is possible all the same."""
    from maestro_hive.kernel.errors import StoreBusyError  # noqa: PLC0415 - as above
    from maestro_hive.kernel.locks import FileLock  # noqa: PLC0415 - as above

    queue = FileLock(folder / "journal.lock")
    try:
        if not queue.acquire(_PATIENCE_SECONDS):
            raise StoreBusyError(
                f"another process has been inside a write for {_PATIENCE_SECONDS:g} seconds; it may"
                " be stopped"
            )
    finally:
        queue.close()


def _print(found: Findings, done: list[str]) -> None:
    from maestro_hive.cli.examination import versions  # noqa: PLC0415 - as above

    _say("state folder", str(found.folder))
    _say("format", f"{found.format}, {', '.join(f'{k} {v}' for k, v in versions().items())}")
    _say("disk", f"{words.size(found.journal_bytes)} used, {words.size(found.free_bytes)} free")
    _say("runs", str(found.runs))
    for lease in found.held:
        holder = lease.holder
        since = f"{holder.since:%Y-%m-%d %H:%M:%S} UTC"
        _say("held", f"{lease.name} by process {holder.pid} on {holder.host} since {since}")
    for run in found.unfinished[:_SAID]:
        _say("unfinished", f"{run.run} ({run.status}): nobody executes it")
    if len(found.unfinished) > _SAID:
        _say("unfinished", f"and {len(found.unfinished) - _SAID:,} more runs")
    for text in done:
        _say("done", text)
    for text in found.unseen:
        _say("unseen", text)
    for text in found.wrong:
        _say("wrong", text)
    for text in found.repairs():
        _say("--fix would", text)
    screen.line("not sound" if found.wrong else "everything that could be checked is sound")


def _say(what: str, text: str) -> None:
    screen.line(f"{what:14}{words.in_one_line(text)}")
