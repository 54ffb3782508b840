"""``hive.budget``: what may be spent, by personas, runs, queues and days, and what was.

Each function is durable when it returns, and holds for all processes on the store.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import date
from functools import partial
from typing import TYPE_CHECKING, Any

from maestro_hive.engine.accounts import Days
from maestro_hive.engine.budget import amounts, checked_amount
from maestro_hive.engine.settings import refused
from maestro_hive.hive.dispatching import wake_workers
from maestro_hive.kernel.errors import ConfigurationError
from maestro_hive.maestro.state.budgets import (
    EACH,
    LOST_MICROS,
    MICROS,
    SCOPES,
    Account,
    Limits,
    Reservation,
    StoredLimit,
    released,
)

if TYPE_CHECKING:
    from maestro_hive.engine.options import Amount
    from maestro_hive.maestro.state.store import Reader, Store

_BOTH = "an amount for each run, or amounts by persona, run, queue and day"


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetView:
    """What was spent of an account, what is reserved, and its limit; money in US dollars.

    ``lost_tokens`` and ``lost_usd`` are the part of what is reserved whose processes died; it lapses
    after a day. ``in_flight`` counts the reservations of living processes.
    """

    scope: str
    name: str
    tokens: int
    usd: float
    cached_tokens: int
    reserved_tokens: int
    reserved_usd: float
    lost_tokens: int
    lost_usd: float
    in_flight: int
    token_limit: int | None
    usd_limit: float | None

    @property
    def used(self) -> float | None:
        """The part of the limit that is spent or reserved, 1 for all of it; None without a limit."""
        parts = []
        if self.token_limit is not None:
            parts.append((self.tokens + self.reserved_tokens) / self.token_limit)
        if self.usd_limit is not None:
            parts.append((self.usd + self.reserved_usd) / self.usd_limit)
        return max(parts, default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitView:
    """How much may be spent, in all: ``*`` as a name is each of its kind; None is no limit."""

    scope: str
    name: str
    token_limit: int | None
    usd_limit: float | None


class Budgets:
    """The budgets of a store: limits, spending, and what processes that died had reserved."""

    def __init__(self, store: Callable[[], Store]) -> None:
        self._store = store

    def set_limit(
        self,
        amount: Amount | None = None,
        *,
        tokens: int | None = None,
        usd: float | None = None,
        persona: str | None = None,
        run: str | None = None,
        queue: str | None = None,
        day: str | bool | None = None,
        zone: str | None = None,
    ) -> LimitView:
        """Set how much a persona, a run with its children, a queue or a day may spend, in all.

        Give one of them: a name, or ``*`` for each that has no limit of its own; ``day=True`` is each
        day. ``amount`` is tokens, or money as in ``"$2.50"``: a limit in the other one stays. Without
        any amount there is no limit. ``zone`` is the time zone of days, as in ``Europe/Berlin``; without
        it, UTC. Return the limit that holds now.
        """
        store = self._store()
        given = _amount(amount, tokens, usd)
        account = account_of(store, persona=persona, run=run, queue=queue, day=day)
        return self._change(
            account, partial(_with_limit, account, *given, zone=_zone(zone, account))
        )

    def raise_limit(
        self,
        amount: Amount | None = None,
        *,
        tokens: int | None = None,
        usd: float | None = None,
        persona: str | None = None,
        run: str | None = None,
        queue: str | None = None,
        day: str | bool | None = None,
    ) -> LimitView:
        """Let so much more be spent than the limit says; bankrupt runs of workers go on by themselves.

        What only has the limit of each, as every persona, gets one of its own. ``day="today"`` is the
        present day. Return the limit that holds now.
        """
        store = self._store()
        given = _amount(amount, tokens, usd)
        if given == (None, None):
            raise ConfigurationError("raise_limit() takes tokens=, usd= or both: how much more")
        account = account_of(store, persona=persona, run=run, queue=queue, day=day)
        return self._change(account, partial(_raised, account, *given))

    def release(
        self,
        *,
        persona: str | None = None,
        run: str | None = None,
        queue: str | None = None,
        day: str | bool | None = None,
    ) -> int:
        """Release what processes that died had reserved, of one budget or of all; return how many.

        Until then, or for a day, it counts as spent: nobody knows what their calls did spend.
        """
        store = self._store()
        account = None
        if (persona, run, queue, day) != (None, None, None, None):
            account = account_of(store, persona=persona, run=run, queue=queue, day=day)
        released = store.release_reservations(account)
        wake_workers(store)
        return len(released)

    def spent(self, scope: str | None = None) -> list[BudgetView]:
        """Return what was spent by each persona, run, queue and day, and their limits."""
        return list_budgets(self._store(), scope)

    def _change(self, account: str, change: Callable[[Limits], Iterable[StoredLimit]]) -> LimitView:
        store = self._store()
        (limit,) = store.set_limits(change, [account])
        wake_workers(store)
        scope, _, name = account.partition(":")
        return LimitView(
            scope=scope,
            name=name,
            token_limit=limit.tokens,
            usd_limit=None if limit.usd is None else limit.usd / MICROS,
        )


# --- changes of limits ---------------------------------------------------------------------------


def account_of(
    store: Reader,
    *,
    persona: str | None = None,
    run: str | None = None,
    queue: str | None = None,
    day: str | bool | None = None,
) -> str:
    """Return the account that one of these names; raise if it is not one of them."""
    given = {"persona": persona, "run": run, "queue": queue, "day": day}
    named = {scope: name for scope, name in given.items() if name is not None}
    if len(named) != 1:
        raise ConfigurationError(
            "a budget is of a persona, a run, a queue or a day: give one of persona=, run=, queue="
            f" and day=, not {', '.join(named) or 'none'}"
        )
    ((scope, name),) = named.items()
    if scope == "day":
        name = _day(store, name)
    if not isinstance(name, str) or not name:
        raise refused(scope, name, "a name")
    return f"{scope}:{name}"


def _day(store: Reader, name: str | bool) -> str:
    if name is True or name == EACH:
        return EACH
    if name == "today":
        return Days(store.limits(()).zone).name(store.clock.nanos() // 1000)
    if isinstance(name, str) and _is_date(name):
        return name
    raise refused("day", name, "a date as in 2026-11-17, 'today', or True for each day")


def _is_date(name: str) -> bool:
    with contextlib.suppress(ValueError):
        return date.fromisoformat(name).isoformat() == name  # and not 20261117, say
    return False


def _zone(zone: str | None, account: str) -> str | None:
    if zone is None:
        return None
    if account != f"day:{EACH}":
        raise ConfigurationError("zone= is for day=True: all days have the same time zone")
    from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

    try:
        ZoneInfo(zone)
    except (ZoneInfoNotFoundError, ValueError, TypeError) as error:
        raise ConfigurationError(
            f"{zone!r} is not the name of a time zone; one is Europe/Berlin"
        ) from error
    return zone


def _amount(
    amount: Amount | None, tokens: int | None, usd: float | None
) -> tuple[int | None, int | None]:
    if amount is not None:
        if tokens is not None or usd is not None:
            raise ConfigurationError("give an amount, or tokens= and usd=, and not both")
        return amounts(checked_amount("the amount", amount))
    both = {"tokens": tokens, "usd": usd}
    known = {unit: value for unit, value in both.items() if value is not None}
    return amounts(checked_amount("the amount", known)) if known else (None, None)


def _with_limit(
    account: str, tokens: int | None, usd: int | None, limits: Limits, *, zone: str | None = None
) -> list[StoredLimit]:
    known = limits.by_account.get(account) or StoredLimit(account=account)
    if (tokens, usd) != (None, None):  # with neither, there is no limit
        tokens = known.tokens if tokens is None else tokens
        usd = known.usd if usd is None else usd
    return [replace(known, tokens=tokens, usd=usd, zone=zone or known.zone)]


def _raised(account: str, tokens: int | None, usd: int | None, limits: Limits) -> list[StoredLimit]:
    known = limits.of(account)
    for unit, more in (("tokens", tokens), ("usd", usd)):
        if more is not None and (known is None or getattr(known, unit) is None):
            scope, _, name = account.partition(":")
            shown, words = f"each {scope}", scope
            if name != EACH:
                shown, words = f"the {scope} {name!r}", f"{scope} {name}"
            raise ConfigurationError(
                f"{shown} has no limit in {unit} that could be raised; set one by"
                f" `maestro budget set {words} --{unit} N`"
            )
    assert known is not None
    own = limits.by_account.get(account)
    return [
        StoredLimit(
            account=account,
            tokens=known.tokens if tokens is None else (known.tokens or 0) + tokens,
            usd=known.usd if usd is None else (known.usd or 0) + usd,
            declared=None if own is None else own.declared,
            zone=None if own is None else own.zone,
        )
    ]


# --- what programs declare -----------------------------------------------------------------------


def declared_budgets(given: object) -> dict[str, Any]:
    """Return the limits that a program gives its hive, by account; raise if they are none."""
    if not isinstance(given, Mapping) or given.keys() <= {"tokens", "usd"}:
        return {f"run:{EACH}": checked_amount("the budget of each run", given)}
    found: dict[str, Any] = {}
    for scope, value in given.items():
        if scope not in SCOPES:
            raise refused("budget", given, _BOTH)
        by_name = value if _is_by_name(value) else {EACH: value}
        for name, amount in by_name.items():
            _check_declared(scope, name)
            found[f"{scope}:{name}"] = checked_amount(f"the budget of {scope} {name!r}", amount)
    return found


def _check_declared(scope: str, name: object) -> None:
    """Raise if nothing can ever have the name: its limit would hold for nobody."""
    if not isinstance(name, str) or not name:
        raise refused(f"a {scope} in the budget", name, "a name")
    if scope == "day" and name != EACH and not _is_date(name):
        raise refused("a day in the budget", name, f"a date as in 2026-11-17, or {EACH!r} for each")


def _is_by_name(value: object) -> bool:
    return isinstance(value, Mapping) and not value.keys() <= {"tokens", "usd"}


def declare(store: Store, budgets: Mapping[str, Any]) -> None:
    """Set limits that a program asks for, unless it asked for the same before: one may be raised since."""
    texts = {account: json.dumps(amount, sort_keys=True) for account, amount in budgets.items()}

    def new(limits: Limits) -> list[StoredLimit]:
        made = []
        for account, text in texts.items():
            known = limits.by_account.get(account) or StoredLimit(account=account)
            if known.declared != text:
                tokens, usd = amounts(budgets[account])
                made.append(replace(known, tokens=tokens, usd=usd, declared=text))
        return made

    if new(store.limits(texts)):  # nothing is written for what is known
        store.set_limits(new, texts)
        wake_workers(store)


def run_budget(run_id: str, amount: object) -> dict[str, Any]:
    """Return the limit that the starter of a run gives it, by account."""
    return {f"run:{run_id}": checked_amount(f"the budget of run {run_id!r}", amount)}


# --- reading -------------------------------------------------------------------------------------


def list_budgets(reader: Reader, scope: str | None = None) -> list[BudgetView]:
    """Return the accounts that something was spent of, or that have a limit, by kind and name."""
    limits = reader.limits()
    found_accounts = (each for each in reader.accounts(scope) if each.scope in SCOPES)
    known = {each.account: each for each in found_accounts}
    for account, limit in limits.by_account.items():
        kind, _, name = account.partition(":")
        is_limited = limit.tokens is not None or limit.usd is not None
        if is_limited and name != EACH and scope in (None, kind):
            known.setdefault(account, Account(account=account))
    dead = _dead(reader)
    lapsed = reader.clock.nanos() // 1000 - LOST_MICROS
    order = {name: at for at, name in enumerate(SCOPES)}
    found = sorted(known.values(), key=lambda each: (order.get(each.scope, 9), each.name))
    return [
        _view(each, limits.of(each.account), dead.get(each.account, []), lapsed) for each in found
    ]


def _dead(reader: Reader) -> dict[str, list[Reservation]]:
    """Return the reservations of processes that died, by account."""
    found: dict[str, list[Reservation]] = {}
    reservations = reader.reservations()
    living = {lease.fence for lease in reader.run_leases().values()}
    for each in reservations:
        if each.lost or each.fence not in living:
            for account in each.accounts:
                found.setdefault(account, []).append(each)
    return found


def _view(
    account: Account, limit: StoredLimit | None, dead: list[Reservation], lapsed: int
) -> BudgetView:
    """Return an account as it is once the store has recovered its reservations."""
    tokens, usd = 0, 0
    for each in dead:
        if each.at < lapsed:
            account = released(account, each, each.tokens, each.usd, ended=True)
        else:
            account = released(account, each, 0, 0, ended=True)
            tokens, usd = tokens + each.tokens, usd + each.usd
    return BudgetView(
        scope=account.scope,
        name=account.name,
        tokens=account.tokens,
        usd=account.usd / MICROS,
        cached_tokens=account.cached,
        reserved_tokens=account.reserved_tokens,
        reserved_usd=account.reserved_usd / MICROS,
        lost_tokens=tokens,
        lost_usd=usd / MICROS,
        in_flight=account.in_flight,
        token_limit=None if limit is None else limit.tokens,
        usd_limit=None if limit is None or limit.usd is None else limit.usd / MICROS,
    )


#: What costs are listed by.
COSTS_BY = ("persona", "workflow", "day", "model")


@dataclass(frozen=True, slots=True, kw_only=True)
class CostView:
    """What was spent in all by one persona, workflow, day or model; money in US dollars."""

    name: str
    calls: int
    tokens: int
    cached_tokens: int
    usd: float


def list_costs(reader: Reader, by: str = "persona") -> list[CostView]:
    """Return what was spent, also by runs that are purged: the most expensive first, days in order."""
    if by not in COSTS_BY:
        raise refused("by", by, f"one of {', '.join(COSTS_BY)}")
    rows = [
        CostView(
            name=each.name,
            calls=each.calls,
            tokens=each.tokens,
            cached_tokens=each.cached,
            usd=each.usd / MICROS,
        )
        for each in reader.accounts(by)
        if each.calls
    ]
    if by == "day":
        return sorted(rows, key=lambda row: row.name)
    return sorted(rows, key=lambda row: (-row.usd, -row.tokens, row.name))
