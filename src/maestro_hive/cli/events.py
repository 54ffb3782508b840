"""``maestro events``: what happened in a run, and what happens in it now."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import click

from maestro_hive.cli import endings, screen
from maestro_hive.cli.completion import run_ids
from maestro_hive.cli.frame import verb
from maestro_hive.cli.standing import are_answered, find_run
from maestro_hive.cli.words import in_one_line

if TYPE_CHECKING:
    from collections.abc import Iterator

    from maestro_hive.cli.call import Call
    from maestro_hive.maestro.state.events import RunEvent
    from maestro_hive.maestro.state.projections import RunState
    from maestro_hive.maestro.state.records import RunRecord
    from maestro_hive.maestro.state.store import Store

#: How long news may lie when somebody follows.
_LOOK_EVERY = 0.2


@verb(
    "events",
    examples="""
    maestro events checkout-42                     all that happened
    maestro events checkout-42 --follow            and what happens from now on
    maestro events checkout-42 --after 120         what happened since entry 120
    maestro events checkout-42 --follow --json     one JSON object per line
    """,
    reads=True,
)
@click.argument("run_id", metavar="RUN", shell_complete=run_ids)
@click.option("--follow", "-f", is_flag=True, help="Go on until the run ends, or is left.")
@click.option(
    "--after", metavar="SEQ", type=click.IntRange(min=0), default=0, help="Begin behind this entry."
)
def command(call: Call, run_id: str, *, follow: bool, after: int) -> int | None:
    """Tell what happened in a run, or what happens now.

    Each line is an entry of its journal: its number, when it was recorded, and what it says. With
    --follow it goes on until the run ends or no living process executes it; the exit code is then 0
    if it is done, 1 if it failed, was cancelled or was left unfinished, and 75 if it waits for a
    person, has no answer, and nobody executes it. With --json each line is an object with the keys event, seq, at
    and run_id, and those of its kind.
    """
    with call.reading() as store:
        record = find_run(store, run_id)
        feed = _Feed(store, record)
        while True:
            held = record.name in store.run_leases()  # first: what it wrote before it left is read
            _print(
                (event for event in feed.notifications() if event.seq > after),
                as_json=call.wants_json,
            )
            if not follow:
                return None
            if feed.state.ended is not None or not held:
                return _ending(store, record, feed.state)
            time.sleep(_LOOK_EVERY)


class _Feed:
    """The events of a run, as far as they were not told before, and what it has come to."""

    def __init__(self, store: Store, record: RunRecord) -> None:
        from maestro_hive.cli.plain_values import plainly  # noqa: PLC0415 - not for --help
        from maestro_hive.maestro.state.events import EventReader  # noqa: PLC0415 - as above
        from maestro_hive.maestro.state.projections import RunState  # noqa: PLC0415 - as above

        self._store = store
        self._load = plainly(store.load)
        self._number = record.id
        self._reader = EventReader(record.name, store.load)
        self.state = RunState()

    def notifications(self) -> Iterator[RunEvent]:
        """Yield what is new."""
        entries = self._store.entries(self._number, after=self.state.seq)
        self.state.add_all(entries, self._load)
        for entry in entries:
            event = self._reader.read(entry)
            if event is not None:
                yield event


def _print(events: Iterator[RunEvent], *, as_json: bool) -> None:
    from maestro_hive.maestro.state.events import to_dict  # noqa: PLC0415 - not for --help

    if as_json:
        lines = [screen.to_json(to_dict(event)) for event in events]
    else:
        lines = [_line(event) for event in events]
    if lines:
        click.echo("\n".join(lines))


def _line(event: RunEvent) -> str:
    from maestro_hive.maestro.state.events import describe  # noqa: PLC0415 - as above

    text = in_one_line(describe(event))
    if screen.is_terminal():
        return f"{event.seq:>5}  {event.at:%Y-%m-%d %H:%M:%S}  {text}"
    return f"{event.seq}\t{event.at.isoformat()}\t{text}"


# --- the end ---------------------------------------------------------------------------------------


def _ending(store: Store, record: RunRecord, state: RunState) -> int:
    """Return the exit code of a run that is over or left, and say which."""
    from maestro_hive.maestro.state.views import open_waits, run_status  # noqa: PLC0415 - as above

    status = run_status(state) if state.started is not None else _status_by_hand(store, record)
    if status in ("failed", "cancelled"):
        return endings.FAILED
    if state.ended is not None or _is_done(state):
        return endings.DONE
    asked = open_waits(state)
    if asked and all(are_answered(store, record.name, asked)):
        screen.note(f"run {record.name!r} has its answer, and goes on when its program is started")
        return endings.FAILED
    if asked or state.escalated:
        screen.note(f"run {record.name!r} needs a person, and nobody executes it")
        return endings.PERSON_NEEDED
    screen.note(f"run {record.name!r} is not done, and nobody executes it")
    return endings.FAILED


def _status_by_hand(store: Store, record: RunRecord) -> str:
    latest = store.run(record.name)
    return latest.status if latest is not None else record.status


def _is_done(state: RunState) -> bool:
    """Return whether a run without a workflow has nothing left to do, as far as anybody knows."""
    return state.started is None and not any(state.unfinished.values()) and not state.pending
