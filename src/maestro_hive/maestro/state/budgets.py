"""What is stored of budgets: accounts, limits and reservations, and the rules between them.

An account counts what was spent: of a persona, of a run with all its children, of a queue, of a day; also
of a workflow and of a model, which cannot be limited.
It is a text such as ``persona:architect``. A call that starts under a limit reserves what it will
spend at most; when it ends, what it did spend is settled. Nothing here touches a disk or a clock.
Money is in millionths of a US dollar.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from maestro_hive.kernel.errors import BudgetRefusedError
from maestro_hive.maestro.state import codec
from maestro_hive.maestro.state.records import EntryKind, NewEntry

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

#: The kinds of accounts that can be limited; and those that are only counted.
SCOPES = ("persona", "run", "queue", "day")
COUNTED = ("workflow", "model")
#: The name that stands for each account of a kind, in limits.
EACH = "*"
#: The limits of each account of a kind.
OF_EACH = tuple(f"{scope}:{EACH}" for scope in SCOPES)
#: Millionths of a US dollar.
MICROS = 1_000_000
#: The percentages of a limit that are warned of.
WARNED_AT = (50, 80, 95)
#: For so long, in microseconds, what a process that died had reserved counts as spent.
LOST_MICROS = 24 * 3600 * MICROS

#: An account with its limits: in tokens, and in money.
Limited: TypeAlias = tuple[str, int | None, int | None]
#: A step that is executed: the number of its run, and its own.
StepKey: TypeAlias = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredLimit:
    """How much may be spent of an account; None where there is no limit.

    ``declared`` is what a program last asked for: the same again leaves what was raised since.
    """

    account: str
    tokens: int | None = None
    usd: int | None = None
    declared: str | None = None
    #: Of ``day:*``: the time zone of days.
    zone: str | None = None


class Limits(NamedTuple):
    """Limits of a store, all or those of some accounts; ``epoch`` grows with each change."""

    epoch: int = 0
    by_account: Mapping[str, StoredLimit] = MappingProxyType({})
    #: Whether anything in the store is limited.
    some: bool = False

    @property
    def zone(self) -> str | None:
        """The time zone of days; None for UTC."""
        each = self.by_account.get(f"day:{EACH}")
        return None if each is None else each.zone

    def of(self, account: str) -> StoredLimit | None:
        """Return the limit of an account: its own, or that of each account of its kind."""
        found = self.by_account.get(account)
        if found is None:
            found = self.by_account.get(f"{account.partition(':')[0]}:{EACH}")
        return found

    def limited(self, accounts: tuple[str, ...]) -> tuple[Limited, ...]:
        """Return those of the accounts that have a limit, with it."""
        found = ((each, self.of(each)) for each in accounts)
        return tuple(
            (account, limit.tokens, limit.usd)
            for account, limit in found
            if limit is not None and (limit.tokens is not None or limit.usd is not None)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """What was spent of an account, and what is reserved."""

    account: str
    tokens: int = 0
    usd: int = 0
    cached: int = 0
    #: How often something was spent.
    calls: int = 0
    reserved_tokens: int = 0
    reserved_usd: int = 0
    #: Reservations of calls that are made; of these, such of unknown size.
    in_flight: int = 0
    unsized: int = 0
    warned: int = 0

    @property
    def scope(self) -> str:
        """What kind of account it is."""
        return self.account.partition(":")[0]

    @property
    def name(self) -> str:
        """The name of the persona, run or queue, or the day."""
        return self.account.partition(":")[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reservation:
    """What an attempt may spend until it is settled; ``lost`` if its process died before that."""

    run: int
    step: int
    attempt: int
    fence: int
    accounts: tuple[str, ...]
    tokens: int
    usd: int
    unsized: bool
    lost: bool
    at: int

    @property
    def key(self) -> StepKey:
        """The step whose attempt it is of."""
        return self.run, self.step


class Reserve(NamedTuple):
    """What a call that starts reserves; refused where a limit leaves no room for it.

    ``epoch`` is that of the limits it was made by: of others, ``StaleLimitsError``. ``limits`` are the
    accounts concerned that have a limit; with none, nothing is reserved. None as an amount: it is not
    known what the call will spend, and it is made alone. ``within`` are the steps that it is made
    inside of: what these have reserved does not count against it. ``unknown`` is the persona and the
    step that nothing was learned of yet: if something is by now, ``StaleLimitsError``.
    """

    epoch: int
    limits: tuple[Limited, ...] = ()
    tokens: int | None = 0
    usd: int | None = 0
    within: tuple[StepKey, ...] = ()
    unknown: tuple[str, str] | None = None

    @property
    def unsized(self) -> bool:
        """Whether it is not known what it will spend of something that is limited."""
        return any(
            (tokens is not None and self.tokens is None) or (usd is not None and self.usd is None)
            for _, tokens, usd in self.limits
        )


class Estimate(NamedTuple):
    """What a call of a persona's step is expected to spend, by what its calls spent before."""

    persona: str
    step: str
    tokens: int
    usd: int
    model: str = ""


class Settle(NamedTuple):
    """What an attempt spent, for its ``accounts``; and whether it has ended.

    What is left of its reservation is released when it has. ``limits`` are those of the accounts
    that have one: a warning is recorded where the spending reaches a part of one for the first time.
    """

    step: int
    attempt: int
    ended: bool = True
    #: Whether it has a reservation.
    reserved: bool = False
    #: What is left of that, where it is known: with it, it is settled in less time.
    held: Reserve | None = None
    accounts: tuple[str, ...] = ()
    tokens: int = 0
    usd: int = 0
    cached: int = 0
    limits: tuple[Limited, ...] = ()
    estimate: Estimate | None = None


class RunBudget(NamedTuple):
    """What a copy of a run has of its budget: its own limit, and what it and its children spent."""

    limit: StoredLimit | None = None
    tokens: int = 0
    usd: int = 0
    cached: int = 0
    calls: int = 0

    @classmethod
    def of(cls, limit: StoredLimit | None, account: Account) -> RunBudget:
        """Return the budget of a run by its limit and its account."""
        return cls(limit, account.tokens, account.usd, account.cached, account.calls)

    @classmethod
    def from_json(cls, body: dict[str, Any]) -> RunBudget:
        """Return the budget that a document has."""
        limit, amounts = body["limit"], (body[name] for name in cls._fields[1:])
        if limit is None:
            return cls(None, *amounts)
        known = {name: limit[name] for name in ("tokens", "usd", "declared")}
        return cls(StoredLimit(account="", **known), *amounts)

    def to_json(self) -> dict[str, Any]:
        """Return it for a document; money is in millionths there, too."""
        known, limit = self.limit, None
        if known is not None:
            limit = {"tokens": known.tokens, "usd": known.usd, "declared": known.declared}
        return {**self._asdict(), "limit": limit}


# --- rules ---------------------------------------------------------------------------------------


def unless_above(estimate: int, limits: Iterable[int]) -> int | None:
    """Return an estimate; None if it is above a limit, where one large call would lock out all others."""
    return None if any(estimate > limit for limit in limits) else estimate


def sized(wanted: Reserve, estimate: Estimate) -> Reserve:
    """Return what a call reserves by an estimate that there is since it was refused."""
    tokens, usd = wanted.tokens, wanted.usd
    if tokens is None:
        tokens = unless_above(
            estimate.tokens, (most for _, most, _ in wanted.limits if most is not None)
        )
    if usd is None:
        usd = unless_above(estimate.usd, (most for *_, most in wanted.limits if most is not None))
    return wanted._replace(tokens=tokens, usd=usd, unknown=None)


def refusal(account: Account, limit: Limited, wanted: Reserve) -> BudgetRefusedError | None:
    """Return why a call may not start that would spend so much of an account; None if it may."""
    _, tokens, usd = limit
    for unit, most, used, reserved, amount in (
        ("tokens", tokens, account.tokens, account.reserved_tokens, wanted.tokens),
        ("usd", usd, account.usd, account.reserved_usd, wanted.usd),
    ):
        # What costs nothing is not called either when a budget is used up.
        if most is not None and used + reserved + max(1, amount or 0) > most:
            return BudgetRefusedError(account.account, unit, used, reserved, amount or 0, most)
    if account.unsized or (account.in_flight and wanted.unsized):
        most, used, reserved, unit = (
            (tokens, account.tokens, account.reserved_tokens, "tokens")
            if tokens is not None
            else (usd or 0, account.usd, account.reserved_usd, "usd")
        )
        return BudgetRefusedError(account.account, unit, used, reserved, 0, most, alone=True)
    return None


def without(account: Account, held: Iterable[Reservation]) -> Account:
    """Return an account as it is without some of its reservations; others do not change it."""
    ours = [each for each in held if account.account in each.accounts and not each.lost]
    return replace(
        account,
        reserved_tokens=account.reserved_tokens - sum(each.tokens for each in ours),
        reserved_usd=account.reserved_usd - sum(each.usd for each in ours),
        in_flight=account.in_flight - len(ours),
        unsized=account.unsized - sum(each.unsized for each in ours),
    )


def concerns(changed: Iterable[str], account: str | None) -> bool:
    """Return whether changes of these accounts, or of each of a kind, may concern one; None may be any."""
    if account is None:
        return True
    return not {account, f"{account.partition(':')[0]}:{EACH}"}.isdisjoint(changed)


def refused_by(suspension: bytes | None) -> str | None:
    """Return the account that suspended a run, by the facts of its suspension; None if none is named."""
    account = codec.parse(suspension).get("account") if suspension else None
    return account if isinstance(account, str) else None


def reserved(account: Account, wanted: Reserve) -> Account:
    """Return an account with a reservation."""
    return replace(
        account,
        reserved_tokens=account.reserved_tokens + (wanted.tokens or 0),
        reserved_usd=account.reserved_usd + (wanted.usd or 0),
        in_flight=account.in_flight + 1,
        unsized=account.unsized + wanted.unsized,
    )


def released(
    account: Account, known: Reservation, tokens: int, usd: int, *, ended: bool
) -> Account:
    """Return an account with so much of a reservation less; with all of it, if it has ``ended``."""
    over = ended and not known.lost
    return replace(
        account,
        reserved_tokens=account.reserved_tokens - tokens,
        reserved_usd=account.reserved_usd - usd,
        in_flight=account.in_flight - over,
        unsized=account.unsized - (over and known.unsized),
    )


def restored_limit(
    account: str, known: StoredLimit | None, copied: RunBudget
) -> StoredLimit | None:
    """Return the limit that a run gets from a copy of it; None if that which is known stays.

    A program that declares the same again leaves what was raised since, as it would have before.
    """
    limit = copied.limit
    if limit is None or (
        known is not None and (known.declared is None or known.declared != limit.declared)
    ):
        return None
    return replace(limit, account=account)


def warning(account: Account, limit: Limited) -> tuple[int, str, int, int] | None:
    """Return what is to be warned of: the percentage, the unit, what was spent, and the limit."""
    _, tokens, usd = limit
    found: tuple[int, str, int, int] | None = None
    for unit, most, used in (("tokens", tokens, account.tokens), ("usd", usd, account.usd)):
        if most is None:
            continue
        reached = max((each for each in WARNED_AT if used * 100 >= most * each), default=0)
        if reached > account.warned and (found is None or reached > found[0]):
            found = (reached, unit, used, most)
    return found


def warning_entry(
    spent: Settle, account: str, percent: int, unit: str, used: int, limit: int
) -> NewEntry:
    """Return the entry that says how much of a budget is used up."""
    facts = {"account": account, "percent": percent, "unit": unit, "used": used, "limit": limit}
    data = codec.dump_canonical(facts)
    return NewEntry(EntryKind.BUDGET_WARNED, spent.step, spent.attempt, data)
