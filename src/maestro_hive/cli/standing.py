"""Where runs stand: found by name, with what listings say of them and who executes them."""

from __future__ import annotations

import shlex
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from collections.abc import Container, Iterable
    from datetime import datetime

    from maestro_hive.cli.call import Call
    from maestro_hive.maestro.state.records import Entry, Lease, RunRecord
    from maestro_hive.maestro.state.store import Store

STYLES = {
    "running": "cyan",
    "waiting": "yellow",
    "retrying": "yellow",
    "success": "green",
    "recovered": "green",
    "failed": "red",
    "bankrupt": "red",
    "help_needed": "red",
    "interrupted": "red",
    "stopped": "magenta",
}
#: More names than this are not compared with a mistyped one.
_COMPARED = 2000


def find_run(store: Store, run_id: str) -> RunRecord:
    """Return a run; if there is none, say which are spelled much like it."""
    found = store.run(run_id)
    if found is not None:
        return found
    from difflib import get_close_matches  # noqa: PLC0415 - needed only after a mistake

    names = [record.name for record in store.runs(limit=_COMPARED)]
    near = [name for name in names if run_id and name.startswith(run_id)][:3]
    near = near or get_close_matches(run_id, names, n=3)
    hint = (
        f" Did you mean {' or '.join(map(repr, near))}?" if near else " 'maestro runs' lists them."
    )
    context = click.get_current_context(silent=True)
    raise click.UsageError(f"There is no run {run_id!r} in {store.location}.{hint}", context)


def where(record: RunRecord, held: Container[str]) -> str:
    """Return where a run stands, given the names of the runs that living processes hold."""
    from maestro_hive.maestro.state.views import standing  # noqa: PLC0415 - not for --help

    return standing(record.workflow, record.status, held=record.name in held)


def holder_of(lease: Lease | None) -> dict[str, Any] | None:
    """Return who executes a run, with the keys of ``--json``."""
    if lease is None:
        return None
    holder = lease.holder
    return {"host": holder.host, "pid": holder.pid, "since": holder.since}


def waits_of(open_waits: Iterable[Entry]) -> list[dict[str, Any]]:
    """Return what a run waits for that somebody must answer, with the keys of ``--json``."""
    from maestro_hive.maestro.state.projections import facts_of  # noqa: PLC0415 - not for --help

    return [
        {
            "name": facts_of(entry).get("name"),
            "since": entry.when,
            "until": _until(entry, facts_of(entry).get("wait")),
            "shape": facts_of(entry).get("shape"),
        }
        for entry in open_waits
    ]


def are_answered(store: Store, run_id: str, open_waits: Iterable[Entry]) -> list[bool]:
    """Tell of each question whether an answer lies there that the run takes when it goes on."""
    from maestro_hive.hive.inbox import Inbox  # noqa: PLC0415 - only for a run that waits
    from maestro_hive.maestro.state.projections import facts_of  # noqa: PLC0415 - not for --help

    messages = Inbox(store).messages(run_id).answers
    to_a_question = {each.question for each in messages if each.question is not None}
    early = [each.name for each in messages if each.question is None]
    answered = []
    for entry in open_waits:
        name = facts_of(entry).get("name")
        found = entry.identity is not None and entry.identity.hex() in to_a_question
        if not found and name in early:
            early.remove(name)
            found = True
        answered.append(found)
    return answered


def expected(shape: Any) -> str:
    """Say in words which kind of answer a question takes."""
    from maestro_hive.hive import answer_types as shapes  # noqa: PLC0415 - only for a run that waits

    try:
        return shapes.describe(shape)
    except (AttributeError, KeyError, TypeError):
        return "of a kind that this version does not know"


def _until(entry: Entry, wait: Any) -> datetime | None:
    seconds = (wait or {}).get("seconds")
    try:
        return None if seconds is None else entry.when + timedelta(seconds=seconds)
    except OverflowError:  # for ever, nearly
        return None


def command_for(call: Call, *words: str) -> str:
    """Return what to type next, for the same store."""
    store = ["--store", str(call.chosen)] if call.chosen is not None else []
    return shlex.join(["maestro", *words, *store])
