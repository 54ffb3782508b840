"""``maestro breakers``: the circuit breakers that all processes on a state folder share."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from maestro_hive.cli import screen, words
from maestro_hive.cli.completion import breaker_names
from maestro_hive.cli.frame import sub_verb, verb_group
from maestro_hive.cli.kinds import duration
from maestro_hive.cli.screen import Styled

if TYPE_CHECKING:
    from maestro_hive.cli.call import Call
    from maestro_hive.maestro.state.records import Breaker
    from maestro_hive.maestro.state.shared_records import SharedRecords
    from maestro_hive.maestro.state.sqlite.store import SqliteStore

_STYLES = {"open": "red", "half_open": "yellow", "closed": "green"}


@verb_group(
    "breakers",
    examples="""
    maestro breakers                            which are open, and for how long
    maestro breakers --json                     the same, for another program
    maestro breakers reset anthropic            let calls through again, now
    maestro breakers open anthropic --for 2h    let none through for two hours
    """,
    alone=True,
)
def command(call: Call) -> None:
    """Show the circuit breakers; open or reset one.

    After too many failures a breaker opens, and nothing behind it is called until its time is
    over; then one call is let through to find out. It is one breaker for all processes on the
    folder, and what is changed here holds for all of them from their next call on. A breaker behind
    which nothing has failed so far is not listed.
    """
    with call.opened() as store:
        found = [_shown(store, breaker) for breaker in _shelf(store).all().values()]
    if call.wants_json:
        call.answer(breakers=found)
        return
    screen.table(
        ["name", "state", "failures", "opened", "comes back in", "because"],
        [_row(breaker) for breaker in found],
        empty="no breaker has anything to tell: nothing has failed behind one",
    )


def _shelf(store: SqliteStore) -> SharedRecords[Breaker]:
    from maestro_hive.maestro.state import shared_records as shelves  # noqa: PLC0415 - not for --help

    return shelves.breakers(store)


def _shown(store: SqliteStore, breaker: Breaker) -> dict[str, Any]:
    from maestro_hive.engine.breaker_rules import (  # noqa: PLC0415 - not for --help
        BreakerRules,
        Moment,
    )

    return {
        "name": breaker.name,
        "state": breaker.state,
        "consecutive_failures": breaker.consecutive_failures,
        "opened_at": breaker.opened_at,
        "opened_because": breaker.opened_because or None,
        "cooldown_seconds": breaker.cooldown_seconds,
        "remaining_seconds": BreakerRules().remaining(breaker, Moment.of(store.clock)),
        "last_failure_time": breaker.last_failure_time,
        "last_success_time": breaker.last_success_time,
    }


def _row(shown: dict[str, Any]) -> list[screen.Cell]:
    state, remaining = shown["state"], shown["remaining_seconds"]
    back = words.duration(remaining) if remaining else "at the next call"
    return [
        shown["name"],
        Styled(state.replace("_", " "), _STYLES.get(state, "")),
        shown["consecutive_failures"],
        shown["opened_at"],
        None if state == "closed" else back,
        shown["opened_because"],
    ]


@sub_verb(command, "reset", examples="maestro breakers reset anthropic")
@click.argument("name", metavar="NAME", shell_complete=breaker_names)
def reset(call: Call, name: str) -> None:
    """Close a breaker: its calls are let through again.

    Its failures are forgotten. If the other side still fails, it opens again after as many
    failures as it did the first time. A probe that is under way has no say any more.
    """
    with call.opened() as store:
        _refuse_unknown(_shelf(store), name)
        _shelf(store).update(name, lambda found: _closed(_known(found, name)))
    screen.line(f"breaker {name!r} is closed: its calls are let through")


@sub_verb(
    command,
    "open",
    examples="""
    maestro breakers open anthropic             for five minutes
    maestro breakers open anthropic --for 2h
    maestro breakers open billing --new         nothing has failed behind it so far
    """,
)
@click.argument("name", metavar="NAME", shell_complete=breaker_names)
@click.option("--for", "seconds", type=duration, default="5m", show_default=True)
@click.option("--new", is_flag=True, help="Open also one that is not listed yet.")
def open_breaker(call: Call, name: str, seconds: float, *, new: bool) -> None:
    """Open a breaker: its calls fail at once, without being made.

    For a while: then one call is let through to find out, as after failures. To end it earlier,
    reset it.
    """
    from maestro_hive.engine.breaker import CircuitBreaker  # noqa: PLC0415 - as above

    with call.opened() as store:
        shelf = _shelf(store)
        CircuitBreaker(name=name, store=store)  # refuses a name that no breaker can have
        if not new:
            _refuse_unknown(shelf, name, " Another one is opened with --new.")
        shelf.update(name, lambda found: _opened(_known(found, name), store, seconds))
    lasts = words.duration(seconds)
    screen.line(f"breaker {name!r} is open for {lasts}: nothing behind it is called")


def _refuse_unknown(shelf: SharedRecords[Breaker], name: str, way_out: str = "") -> None:
    known = sorted(shelf.all())
    if name in known:
        return
    listed = f"There is: {', '.join(known)}." if known else "There is none so far."
    raise click.UsageError(
        f"No breaker is called {name!r}. {listed}{way_out}", click.get_current_context()
    )


def _known(found: Breaker | None, name: str) -> Breaker:
    from maestro_hive.maestro.state.records import Breaker  # noqa: PLC0415 - not for --help

    return found or Breaker(name=name)


def _closed(breaker: Breaker) -> Breaker:
    return replace(
        breaker,
        state="closed",
        consecutive_failures=0,
        opened_at=None,
        opened_because="",
        cooldown_seconds=None,
        recent="",
    )


def _opened(breaker: Breaker, store: SqliteStore, seconds: float) -> Breaker:
    from maestro_hive.engine.breaker_rules import Moment  # noqa: PLC0415 - as above

    at = Moment.of(store.clock)
    return replace(
        breaker,
        state="open",
        opened_at=at.now,
        opened_because="somebody's decision (maestro breakers open)",
        cooldown_seconds=seconds,
        boot=at.boot,
        boot_seconds=at.boot_seconds,
    )
