"""``maestro budget`` and ``costs``: what may be spent, and what was."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from maestro_hive.admin.runs import find_run
from maestro_hive.cli import output
from maestro_hive.cli.command import Call, verb, verb_group
from maestro_hive.hive.budgets import (
    COSTS_BY,
    Budgets,
    BudgetView,
    CostView,
    list_budgets,
    list_costs,
)
from maestro_hive.kernel.errors import ConfigurationError
from maestro_hive.maestro.state.budgets import SCOPES
from maestro_hive.maestro.state.plain import to_dict

if TYPE_CHECKING:
    from collections.abc import Callable

_COLUMNS = ("budget", "name", "tokens", "usd", "reserved", "limit", "used", "")
#: How wide the bar of what is used is, and how many runs and days are shown.
_BAR = 20
_MOST = 20
_PARTS = " ▏▎▍▌▋▊▉"


@verb_group("budget", alone=True)
@click.option("--all", "every", is_flag=True, help="Show every run and every day.")
def budget_command(call: Call, *, every: bool) -> None:
    """Show what was spent and the limits; set, raise or release one.

    Listed are personas, runs, queues and days. A run is shown with what its children spent.
    Reserved is what calls that are being made may spend; what a process that died had reserved
    counts as spent for a day, or until it is released. Of runs and days the latest are shown.

    Examples:
        maestro budget                                      what was spent, and the limits
        maestro budget --json                               the same, for another program
        maestro budget set persona architect --tokens 500000
        maestro budget set day --usd 20                     for each day
        maestro budget raise run checkout-42 --usd 5        let it go on
        maestro budget release                              what processes that died had reserved
    """
    with call.reading() as reader:
        found = list_budgets(reader)
        zone = reader.limits(()).zone
    if call.wants_json:
        call.print_json(budgets=[_as_dict(each) for each in found], day_zone=zone or "UTC")
        return
    shown = found if every else _latest(found)
    output.table(_COLUMNS, [_row(each) for each in shown], empty="nothing was spent so far")
    if len(shown) < len(found):
        output.note(f"… and {len(found) - len(shown):,} more: --all")


def _latest(found: list[BudgetView]) -> list[BudgetView]:
    """Return all personas and queues, runs that are limited or the first ones, and the last days."""
    runs = [each for each in found if each.scope == "run"]
    days = [each for each in found if each.scope == "day"]
    chosen = sorted(runs, key=lambda each: each.used is None)[:_MOST]
    left_out = {id(each) for each in runs} - {id(each) for each in chosen}
    left_out |= {id(each) for each in days[:-_MOST]}
    return [each for each in found if id(each) not in left_out]


def _as_dict(view: BudgetView) -> dict[str, object]:
    shown: dict[str, object] = to_dict(view)
    return {**shown, "used": view.used}


def _row(view: BudgetView) -> list[output.Cell]:
    used = view.used
    return [
        view.scope,
        view.name,
        f"{view.tokens:,}",
        _dollars(view.usd),
        _both(view.reserved_tokens or None, view.reserved_usd or None) or None,
        _both(view.token_limit, view.usd_limit),
        None if used is None else f"{used:.0%}",
        None if used is None else bar(used),
    ]


def _dollars(usd: float) -> str:
    return f"{usd:,.4f}"


def _both(tokens: int | None, usd: float | None) -> str:
    parts = [
        None if tokens is None else f"{tokens:,}",
        None if usd is None else f"${usd:,.4f}".rstrip("0").rstrip("."),
    ]
    return ", ".join(part for part in parts if part)


def _amount(tokens: int | None, usd: float | None) -> str:
    parts = [
        None if tokens is None else output.many(tokens, "token"),
        _both(None, usd) or None,
    ]
    return " and ".join(part for part in parts if part)


def bar(used: float, width: int = _BAR) -> output.Styled:
    """Return a bar of how much of a limit is used."""
    eighths = round(max(0.0, min(1.0, used)) * width * 8)
    whole, part = divmod(eighths, 8)
    text = "█" * whole + (_PARTS[part] if part else "")
    colour = "red" if used >= 0.95 else "yellow" if used >= 0.8 else "green"
    return output.Styled(text.ljust(width, "·"), colour)


def _amounts(function: Callable[..., None]) -> Callable[..., None]:
    usd = click.option(
        "--usd", type=click.FloatRange(min=0, min_open=True), help="US dollars, over 0."
    )
    tokens = click.option("--tokens", type=click.IntRange(min=1), help="A number of tokens.")
    return tokens(usd(function))


def _account(scope: str, name: str | None) -> dict[str, str]:
    """Return the account that two words name; a kind alone is each account of it."""
    return {scope: "*" if name is None else name}


_scope = click.argument("scope", metavar="KIND", type=click.Choice(SCOPES))


@verb("set", group=budget_command, reads=True)
@_scope
@click.argument("name", metavar="[NAME]", required=False)
@_amounts
@click.option("--none", "none", is_flag=True, help="No limit.")
@click.option("--zone", metavar="ZONE", help="The time zone of days, as in Europe/Berlin.")
def set_budget(
    call: Call,
    scope: str,
    name: str | None,
    tokens: int | None,
    usd: float | None,
    zone: str | None,
    *,
    none: bool,
) -> None:
    """Set how much a persona, a run, a queue or a day may spend, in all.

    KIND is persona, run, queue or day. Without a name it is the limit of each that has none of its
    own. It holds for all processes from their next call on, and what was spent before counts. A limit
    in tokens stays when one in US dollars is set, and the other way round.

    Examples:
        maestro budget set persona architect --tokens 500000
        maestro budget set run --usd 2                      for each run, its children included
        maestro budget set day --usd 20 --zone Europe/Berlin
        maestro budget set day 2026-11-17 --usd 50          for this day
        maestro budget set queue mail --none                no limit
    """
    if (tokens is None and usd is None) is not none:
        raise ConfigurationError("give --tokens, --usd or both; or --none for no limit")
    if zone is not None and scope != "day":
        raise ConfigurationError("--zone is of days: maestro budget set day --usd 20 --zone ZONE")
    with call.writing() as store:
        budgets = Budgets(lambda: store)
        limit = budgets.set_limit(tokens=tokens, usd=usd, zone=zone, **_account(scope, name))
        if scope == "run" and name is not None and store.run(name) is None:
            output.note(f"there is no run {name!r} yet: its limit holds from its start on")
    if call.wants_json:
        call.print_json(budget=to_dict(limit))
        return
    which = f"{scope} {name}" if name else f"each {scope}"
    allowed = _amount(limit.token_limit, limit.usd_limit)
    output.line(f"{which} may spend {allowed}" if allowed else f"{which} has no limit")


@verb("raise", group=budget_command, reads=True)
@_scope
@click.argument("name", metavar="[NAME]", required=False)
@_amounts
def raise_budget(
    call: Call, scope: str, name: str | None, tokens: int | None, usd: float | None
) -> None:
    """Let a persona, a run, a queue or a day spend so much more than its limit.

    Runs of workers that a budget has stopped go on by themselves; another one when it is started
    again. NAME of a day may be today.

    Examples:
        maestro budget raise run checkout-42 --tokens 20000
        maestro budget raise persona architect --usd 5
        maestro budget raise day today --usd 10
    """
    if tokens is None and usd is None:
        raise ConfigurationError("give --tokens, --usd or both: how much more")
    with call.writing() as store:
        budgets = Budgets(lambda: store)
        try:
            limit = budgets.raise_limit(tokens=tokens, usd=usd, **_account(scope, name))
        except ConfigurationError:
            if scope == "run" and name is not None:
                find_run(store, name)  # if there is none, that is what is wrong
            raise
    if call.wants_json:
        call.print_json(budget=to_dict(limit))
        return
    which = f"{scope} {name}" if name else f"each {scope}"
    output.line(f"{which} may spend {_amount(tokens, usd)} more")


@verb("release", group=budget_command, reads=True)
@click.argument("scope", metavar="[KIND]", type=click.Choice(SCOPES), required=False)
@click.argument("name", metavar="[NAME]", required=False)
def release_budget(call: Call, scope: str | None, name: str | None) -> None:
    """Release what processes that died had reserved: of one budget, or of all.

    Nobody knows what their calls did spend, so it counts as spent, for a day. Release it if you know
    that it was not.

    Examples:
        maestro budget release
        maestro budget release persona architect
    """
    if scope is not None and name is None:
        raise ConfigurationError(f"which {scope}? Give its name, or leave out {scope} for all")
    with call.writing() as store:
        chosen = {} if scope is None else _account(scope, name)
        count = Budgets(lambda: store).release(**chosen)
    if call.wants_json:
        call.print_json(released=count)
        return
    output.line(f"released {output.many(count, 'reservation')}")


@verb("costs", reads=True)
@click.option("--by", type=click.Choice(COSTS_BY), default="persona", show_default=True)
def costs_command(call: Call, by: str) -> None:
    """Show what was spent, by persona, workflow, day or model.

    Runs that were purged count, too. Cached tokens are those that a provider read from its cache:
    they are counted apart from the others.

    Examples:
        maestro costs
        maestro costs --by model
        maestro costs --by day --json
    """
    with call.reading() as reader:
        found = list_costs(reader, by)
    if call.wants_json:
        call.print_json(by=by, costs=[to_dict(each) for each in found])
        return
    columns = (by, "calls", "tokens", "cached", "usd")
    output.table(columns, [_cost_row(each) for each in found], empty="nothing was spent so far")


def _cost_row(view: CostView) -> list[output.Cell]:
    name = view.name or "(unknown)"
    return [
        name,
        f"{view.calls:,}",
        f"{view.tokens:,}",
        f"{view.cached_tokens:,}",
        _dollars(view.usd),
    ]
