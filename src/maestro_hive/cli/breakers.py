"""``maestro breakers``: the circuit breakers that all processes on a state folder share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from maestro_hive.admin import breakers as admin
from maestro_hive.cli import output
from maestro_hive.cli.command import breaker_names, duration, sub_verb, verb_group
from maestro_hive.maestro.state.run_view import to_dict

if TYPE_CHECKING:
    from maestro_hive.admin.breakers import BreakerView
    from maestro_hive.cli.command import Call


@verb_group(
    "breakers",
    examples="""
    maestro breakers                            which are open, and for how long
    maestro breakers --json                     the same, for another program
    maestro breakers reset anthropic            allow calls again, now
    maestro breakers open anthropic --for 2h    allow none for two hours
    """,
    alone=True,
)
def breakers_command(call: Call) -> None:
    """Show the circuit breakers; open or reset one.

    After too many failures a breaker opens, and nothing behind it is called until its cooldown is
    over; then one call is allowed as a probe. All processes on the folder share it, and a change
    made here applies to all of them from their next call on. A breaker without a failure so far is
    not listed.
    """
    with call.reading() as reader:
        found = admin.list_breakers(reader)
    if call.wants_json:
        call.print_json(breakers=[to_dict(each) for each in found])
        return
    output.table(
        ["name", "state", "failures", "opened", "probe in", "because"],
        [_row(each) for each in found],
        empty="there are no breakers: nothing has failed behind one",
    )


def _row(breaker: BreakerView) -> list[output.Cell]:
    remaining = breaker.remaining_seconds
    probe = output.duration(remaining) if remaining else "at the next call"
    return [
        breaker.name,
        output.status(breaker.state),
        breaker.consecutive_failures,
        breaker.opened_at,
        None if breaker.state == "closed" else probe,
        breaker.opened_because,
    ]


@sub_verb(breakers_command, "reset", examples="maestro breakers reset anthropic")
@click.argument("name", metavar="NAME", shell_complete=breaker_names)
def reset(call: Call, name: str) -> None:
    """Close a breaker: its calls are allowed again.

    Its failures are forgotten. If the calls still fail, it opens again after as many failures as
    the first time. The result of a probe that has started is ignored.
    """
    with call.writing() as store:
        admin.reset_breaker(store, name)
    output.line(f"breaker {name!r} is closed: its calls are allowed")


@sub_verb(
    breakers_command,
    "open",
    examples="""
    maestro breakers open anthropic             for five minutes
    maestro breakers open anthropic --for 2h
    maestro breakers open billing --new         nothing has failed behind it so far
    """,
)
@click.argument("name", metavar="NAME", shell_complete=breaker_names)
@click.option("--for", "seconds", type=duration, default="5m", show_default=True)
@click.option("--new", is_flag=True, help="Open also one that is not listed.")
def open_breaker(call: Call, name: str, seconds: float, *, new: bool) -> None:
    """Open a breaker: its calls fail at once, without being made.

    When the time is over one call is allowed as a probe, as after failures. To end it earlier,
    reset it.
    """
    with call.writing() as store:
        admin.open_breaker(store, name, seconds, create=new)
    output.line(f"breaker {name!r} is open for {output.duration(seconds)}: its calls fail at once")
