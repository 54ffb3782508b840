"""``maestro events``: what happened in a run, and what happens."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import click

from maestro_hive.admin.events import Ending, EventFeed, FamilyFeed
from maestro_hive.cli import command, output
from maestro_hive.cli.command import run_ids, verb
from maestro_hive.maestro.state import events
from maestro_hive.maestro.state.plain import to_dict

if TYPE_CHECKING:
    from maestro_hive.cli.command import Call
    from maestro_hive.maestro.state.events import RunEvent

#: How often a run that is followed is read.
_POLL_SECONDS = 0.2


@verb("events", reads=True)
@click.argument("run_id", metavar="RUN", shell_complete=run_ids)
@click.option(
    "--follow", "-f", is_flag=True, help="Continue until the run ends, or nobody executes it."
)
@click.option("--children", is_flag=True, help="With the events of its children, and theirs.")
@click.option(
    "--after", metavar="SEQ", type=click.IntRange(min=0), default=0, help="Start after this entry."
)
def events_command(
    call: Call, run_id: str, *, follow: bool, children: bool, after: int
) -> int | None:
    """Print the events of a run, and follow it.

    Each line is an entry of its journal: its number, when it was recorded, and what it says. Of
    several steps with one name, fetch#2 is the second that was started. With --children the events
    of all runs are in the order of their times, each with its run. With --json each line is an object
    with the keys event, seq, at and run_id, and those of its kind.

    With --follow it continues until the run ends. A run that belongs to workers is followed from one
    to the next, also while none has it; another one only while a living process executes it. The exit
    code is then 0 if it succeeded, 1 if it failed, was cancelled or is not finished, and 75 if it
    waits for a person, has no answer, and nobody executes it.

    Examples:
        maestro events checkout-42                     all events so far
        maestro events checkout-42 --follow            and those from now on
        maestro events checkout-42 -f --children       with those of the runs that it started
        maestro events checkout-42 --after 120         those after entry 120
        maestro events checkout-42 --follow --json     one JSON object per line
    """
    if children and after:
        raise click.UsageError("--after counts the entries of one run: not with --children.")
    with call.reading() as reader:
        feed = (FamilyFeed if children else EventFeed)(reader, run_id)
        while True:
            found, ending = feed.next_batch()
            named = [event for event in found if event.seq > after]
            if call.wants_json:
                lines = [output.to_json(to_dict(event)) for event in named]
            else:
                lines = [event_line(event, with_run=children) for event in named]
            if lines:
                click.echo("\n".join(lines))
            if not follow:
                return None
            if ending is not None:
                return ending_code(run_id, ending)
            time.sleep(_POLL_SECONDS)


def event_line(event: RunEvent, *, with_run: bool = False) -> str:
    """Return an event in a line: its number, when it was recorded, its run if wanted, and its text."""
    text = output.in_one_line(events.describe(event))
    run = output.in_one_line(event.run_id)
    if output.is_terminal():
        of_run = f"{run}  " if with_run else ""
        return f"{event.seq:>5}  {event.at:%Y-%m-%d %H:%M:%S}  {of_run}{text}"
    of_run = f"{run}\t" if with_run else ""
    return f"{event.seq}\t{event.at.isoformat()}\t{of_run}{text}"


_ENDINGS = {
    Ending.COMPLETED: (command.SUCCESS, None),
    Ending.FAILED: (command.FAILED, None),
    Ending.NEEDS_PERSON: (command.PERSON_NEEDED, "needs a person, and no process executes it"),
    Ending.ANSWERED: (command.FAILED, "has its answer, and continues when its program is started"),
    Ending.NOT_FINISHED: (command.FAILED, "is not finished, and no process executes it"),
}


def ending_code(run_id: str, ending: Ending) -> int:
    """Return the exit code for how following a run ended, having noted what the run needs."""
    code, note = _ENDINGS[ending]
    if note is not None:
        output.note(f"run {run_id!r} {note}")
    return code
