"""The budgets of a store, as the steps of this process use them: limits, sizes of calls, and waiting.

A step under a limit reserves what it may spend with the record of its start. Where a budget has no
room, it waits for calls that are made to be settled; and where those cannot help, it is bankrupt.
"""

from __future__ import annotations

import threading
from datetime import UTC, datetime, timedelta, tzinfo
from typing import TYPE_CHECKING, Any, NamedTuple

from maestro_hive.engine.budget_queue import BudgetQueue, WaitingCall
from maestro_hive.engine.errors import BudgetExceeded, UnpricedModel
from maestro_hive.engine.shared import shared
from maestro_hive.kernel.clock import from_micros
from maestro_hive.kernel.logs import get_log
from maestro_hive.maestro.state import codec
from maestro_hive.maestro.state.budgets import (
    LOST_MICROS,
    MICROS,
    Estimate,
    Limited,
    Reserve,
    unless_above,
)
from maestro_hive.maestro.state.projections import facts_of
from maestro_hive.maestro.state.records import EntryKind

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from maestro_hive.engine.prices import Prices
    from maestro_hive.engine.usage import Usage
    from maestro_hive.kernel.errors import BudgetRefusedError
    from maestro_hive.maestro.state.budgets import StepKey
    from maestro_hive.maestro.state.records import Entry
    from maestro_hive.maestro.state.store import Reader, Store

logger = get_log("maestro_hive.budgets")

#: How deep children are nested, at most.
_DEEPEST = 1_000
#: An estimate follows what calls spend: at once if that is more, by such a part of it if it is less.
_SLOWNESS = 8
#: Facts of starts with what they reserve that are remembered; they are few where sizes are stable.
_REMEMBERED = 1_000


class Sizing(NamedTuple):
    """What is known of a step's calls before they are made."""

    max_tokens: int | None = None
    #: In millionths.
    max_usd: int | None = None
    model: str = ""
    prices: Prices | None = None
    #: Whether limits hold for them; if not, what they spend is only counted.
    is_enforced: bool = True
    #: The name under which what they spend is known, where steps of several names spend alike.
    alike: str = ""


UNSIZED = Sizing()


class Days:
    """Which day a moment is in: of UTC, or of a time zone that was set."""

    def __init__(self, zone: str | None) -> None:
        self.zone: tzinfo = UTC
        if zone is not None:
            from zoneinfo import ZoneInfo

            self.zone = ZoneInfo(zone)
        #: A day that was asked for: its first moment, its end, and its name; replaced as a whole.
        self._known = (0, 0, "")

    def name(self, at: int) -> str:
        """Return the day of a moment, as in ``2026-11-17``."""
        first, end, name = self._known
        if not first <= at < end:
            start, after = self._bounds(at)
            first, end = (int(each.timestamp() * MICROS) for each in (start, after))
            name = start.date().isoformat()
            self._known = (first, end, name)
        return name

    def seconds_left(self, at: int) -> float:
        """Return in how many seconds the next day starts."""
        return (self._bounds(at)[1] - from_micros(at)).total_seconds()

    def _bounds(self, at: int) -> tuple[datetime, datetime]:
        zone = self.zone
        day = from_micros(at).astimezone(zone).date()
        start = datetime(day.year, day.month, day.day, tzinfo=zone)
        after = day + timedelta(days=1)
        end = datetime(after.year, after.month, after.day, tzinfo=zone)
        return start, end


class RunAccounts:
    """The accounts that the steps of a run are charged to, apart from persona and day."""

    def __init__(self, store: Reader, run_id: str) -> None:
        chain, name, root = [], run_id, None
        for _ in range(_DEEPEST):
            chain.append(f"run:{name}")
            record = store.run(name)
            if record is None:
                break
            if name == run_id:
                self.workflow = record.workflow
            root = record
            if record.parent is None:
                break
            name = record.parent
        else:
            root = None
        facts = {} if root is None else _first_facts(store.entries(root.id, up_to=2))
        queue = facts.get("queue")
        #: The steps that the run, or the one that it is a child of, was enqueued in.
        self.enqueued_in = tuple(_known_steps(store, facts.get("enqueued_in") or ()))
        self.chain = (*chain, f"queue:{queue}") if queue is not None else tuple(chain)
        self._known: dict[tuple[str, str], tuple[str, ...]] = {}
        self._counted: dict[tuple[tuple[str, ...], str], tuple[str, ...]] = {}

    workflow = ""

    def of(self, persona: str, day: str) -> tuple[str, ...]:
        """Return all accounts that a step of a persona is charged to that starts on this day."""
        found = self._known.get((persona, day))
        if found is None:
            found = self._known[persona, day] = (f"persona:{persona}", *self.chain, f"day:{day}")
        return found

    def counted(self, accounts: tuple[str, ...], model: str) -> tuple[str, ...]:
        """Return accounts with those that are only counted: of the workflow, and of a model."""
        found = self._counted.get((accounts, model))
        if found is None:
            more = (f"workflow:{self.workflow}", f"model:{model}")
            found = self._counted[accounts, model] = (*accounts, *more)
        return found


class StepAround(NamedTuple):
    """A step that something is executed inside of: the name and the number of its run, and its own."""

    run: str
    number: int
    step: int


def _first_facts(first: list[Entry]) -> Mapping[str, Any]:
    """Return what is recorded of how a run was started."""
    for entry in first:
        if entry.kind == EntryKind.RUN_STARTED:
            return facts_of(entry)
    return {}


def _known_steps(store: Reader, recorded: Iterable[Mapping[str, Any]]) -> Iterator[StepAround]:
    """Yield the steps that a run was enqueued in; not those of runs that are purged."""
    for each in recorded:
        record = store.run(each["run"])
        if record is not None:
            yield StepAround(record.name, record.id, each["step"])


class KnownLimits:
    """The limits of a store as they were read once: what a call needs of them belongs together."""

    def __init__(self, store: Store) -> None:
        limits = store.limits(())
        self.epoch = limits.epoch
        self.days = Days(limits.zone)
        self.is_empty = not limits.some
        self._store = store
        self._limited: dict[tuple[str, ...], tuple[Limited, ...]] = {}

    def limited(self, accounts: tuple[str, ...]) -> tuple[Limited, ...]:
        """Return those of the accounts that have a limit, with it."""
        if self.is_empty:
            return ()
        found = self._limited.get(accounts)
        if found is None:
            # If these are newer than its epoch, the start that names that epoch is refused.
            found = self._store.limits(accounts).limited(accounts)
            if len(self._limited) >= _REMEMBERED:
                self._limited.clear()
            self._limited[accounts] = found
        return found


class Ledger:
    """The budgets of one store in this process; one object for all its runs, in any thread."""

    def __init__(self, store: Store, _name: str = "") -> None:
        self.store = store
        self._mutex = threading.Lock()
        self._estimates: dict[tuple[str, str], Estimate] = {}
        self._facts: dict[object, bytes] = {}
        #: The calls that wait.
        self.queue = BudgetQueue(self)
        self.refresh()

    def refresh(self) -> None:
        """Read the limits again: those of each of a kind; others when a call concerns them."""
        known = KnownLimits(self.store)
        with self._mutex:
            self.known = known
            #: What a start reserves where nothing at all is limited.
            self.unlimited: Reserve | None = Reserve(known.epoch) if known.is_empty else None

    def is_outdated(self) -> bool:
        """Return whether limits were set or raised since they were read."""
        return self.store.limits(()).epoch != self.known.epoch

    # --- before a call ---

    def reserve(
        self,
        known: KnownLimits,
        accounts: tuple[str, ...],
        persona: str,
        step: str,
        sizing: Sizing,
    ) -> tuple[Reserve, bool]:
        """Return what a call reserves, and whether that is an estimate."""
        limits = known.limited(accounts)
        if not limits or not sizing.is_enforced:
            return Reserve(known.epoch), False
        tokens, in_money = sizing.max_tokens, is_in_money(limits)
        if tokens is not None and not in_money:
            return Reserve(known.epoch, limits, tokens, 0), False
        estimate = self.estimate(persona, step)
        if tokens is None and estimate is not None:
            most = [tokens for _, tokens, _ in limits if tokens is not None]
            tokens = unless_above(estimate.tokens, most)
        usd: int | None = 0
        if in_money:
            most = [usd for _, _, usd in limits if usd is not None]
            usd = most_usd(persona, step, sizing, estimate, most)
        made = Reserve(known.epoch, limits, tokens, usd)
        if estimate is None and made.unsized:
            made = made._replace(unknown=(persona, step))
        return made, sizing.max_tokens is None

    def estimate(self, persona: str, step: str) -> Estimate | None:
        """Return what a call of a step is expected to spend; None if that is not known."""
        found = self._estimates.get((persona, step))
        if found is None:
            found = self.store.estimate(persona, step)
            if found is not None:
                self._estimates[persona, step] = found
        return found

    def facts(self, facts: bytes, wanted: Reserve, *, estimated: bool) -> bytes:
        """Return the facts of a start, with what it reserves."""
        key = (facts, wanted.tokens, wanted.usd, estimated)
        known = self._facts.get(key)
        if known is None:
            shown: dict[str, float] = {}
            if wanted.tokens is not None:
                shown["tokens"] = wanted.tokens
            if wanted.usd:
                shown["usd"] = wanted.usd / MICROS
            more = {"reserved": shown | ({"estimated": True} if estimated and shown else {})}
            known = codec.dump_canonical(codec.parse(facts) | more)
            if len(self._facts) >= _REMEMBERED:
                self._facts.clear()
            self._facts[key] = known
        return known

    # --- after a call ---

    def cost(self, usage: Usage, sizing: Sizing, limits: tuple[Limited, ...]) -> int:
        """Return what a usage costs, in millionths of a dollar; 0 where nobody knows.

        Without a price it is the most that a call of its step may cost.
        """
        if usage.usd is not None:
            return usage.usd
        model = usage.model or sizing.model
        price = None if sizing.prices is None else sizing.prices.of(model)
        if price is not None:
            return price.cost(usage)
        if usage.tokens and sizing.max_usd is not None:
            return sizing.max_usd
        if usage.tokens and is_in_money(limits):
            logger.warning(
                "%s tokens of %s were spent under a limit in money, and have no price: the next call"
                " is refused",
                f"{usage.tokens:,}",
                f"the model {model!r}" if model else "an unknown model",
            )
        return 0

    def learn(self, persona: str, step: str, tokens: int, usd: int, model: str) -> Estimate | None:
        """Return what a step's calls are expected to spend from now on, if that is something new."""
        known = self._estimates.get((persona, step)) or self.estimate(persona, step)
        if known is not None and known[2:] == (tokens, usd, model):
            return None
        made = Estimate(persona, step, tokens, usd, model)
        if known is not None:
            made = Estimate(
                persona,
                step,
                _towards(known.tokens, tokens),
                _towards(known.usd, usd) if usd or not tokens else 0,  # 0: its price is not known
                model or known.model,
            )
            if made == known:
                return None
        self._estimates[persona, step] = made
        return made

    def settled(self) -> None:
        """Let those look again who wait in this process; from any thread."""
        self.queue.settled()

    def check_spent(self, accounts: RunAccounts, persona: str, started: int) -> None:
        """Raise ``BudgetExceeded`` if a call that started then has spent more than a limit."""
        try:
            self._check_spent(accounts, persona, started)
        except BudgetExceeded:
            if not self.is_outdated():
                raise
            self.refresh()  # a limit may have been raised since the call started
            self._check_spent(accounts, persona, started)

    def _check_spent(self, accounts: RunAccounts, persona: str, started: int) -> None:
        limits = self.known.limited(accounts.of(persona, self.known.days.name(started)))
        for account, tokens, usd in limits:
            known = self.store.account(account)
            for unit, most, used in (("tokens", tokens, known.tokens), ("usd", usd, known.usd)):
                if most is not None and used > most:
                    raise self.exceeded(account, unit, used=used, limit=most, persona=persona)

    def tokens_left(self, accounts: tuple[str, ...]) -> float:
        """Return how many tokens the limits of accounts leave, with what is reserved taken away."""
        self.refresh()  # another process may have set one
        left = float("inf")
        for account, tokens, _ in self.known.limited(accounts):
            if tokens is not None:
                known = self.store.account(account)
                left = min(left, tokens - known.tokens - known.reserved_tokens)
        return max(0.0, left)

    # --- waiting ---

    async def room(
        self, refused: BudgetRefusedError, wanted: Reserve, persona: str, ticket: int
    ) -> tuple[StepKey, ...]:
        """Return when there may be room for a call that was refused; raise if there will be none.

        What is returned are steps that wait themselves, next to which it may be made.
        """
        call = WaitingCall(refused, wanted, persona, ticket)
        await self.queue.room(call)
        return call.also_within

    def is_of_another_day(self, account: str) -> bool:
        """Return whether an account is that of a day, and not of the present one."""
        today = f"day:{self.known.days.name(self.store.clock.nanos() // 1000)}"
        return account.startswith("day:") and account != today

    def exceeded(
        self,
        account: str,
        unit: str,
        *,
        used: int,
        limit: int,
        persona: str,
        lost: int = 0,
        amount: int = 0,
        waiting: int = 0,
    ) -> BudgetExceeded:
        """Return the error of a call that a budget has no room for, with when there is some by itself."""
        return BudgetExceeded(
            account,
            unit,
            used=used,
            limit=limit,
            lost=lost,
            amount=amount,
            waiting=waiting,
            persona_id=persona,
            retry_in=self._seconds_to_room(account, lost),
        )

    def _seconds_to_room(self, account: str, lost: int) -> float | None:
        """Return after how many seconds there is room by itself; None if a person has to make it."""
        now = self.store.clock.nanos() // 1000
        waits: list[float] = []
        if self.is_of_another_day(account):
            waits.append(0.0)
        elif account.startswith("day:"):
            waits.append(self.known.days.seconds_left(now))
        if lost:
            since = [each.at for each in self.store.reservations() if each.lost]
            waits += [(at + LOST_MICROS - now) / MICROS for at in since]
        return max(1.0, min(waits)) if waits else None


def most_usd(
    persona: str,
    step: str,
    sizing: Sizing,
    estimate: Estimate | None = None,
    limits: Sequence[int] = (),
) -> int | None:
    """Return what a call costs at most; None if nobody knows. A model needs a price."""
    if sizing.max_usd is not None:
        return sizing.max_usd
    model = sizing.model or (estimate.model if estimate is not None else "")
    price = None if sizing.prices is None else sizing.prices.of(model)
    unknown = estimate is not None and estimate.tokens > 0 and not estimate.usd
    if price is None and (model or unknown) and (estimate is None or not estimate.usd):
        raise UnpricedModel(step, persona, model)
    if sizing.max_tokens is not None and price is not None:
        return -(-sizing.max_tokens * price.highest // MICROS)
    return None if estimate is None else unless_above(estimate.usd, limits)


def is_in_money(limits: tuple[Limited, ...]) -> bool:
    """Return whether one of the limits is in money."""
    for _, _, usd in limits:  # noqa: SIM110 - with each call: a generator takes three times as long
        if usd is not None:
            return True
    return False


def _towards(known: int, used: int) -> int:
    """Return an estimate that follows what was used: up at once, down slowly."""
    return used if used >= known else known - (known - used) // _SLOWNESS


def log_warning(run_id: str, facts: Mapping[str, Any]) -> None:
    """Log that a part of a budget is used up."""
    scale, unit = (1, "tokens") if facts["unit"] == "tokens" else (MICROS, "USD")
    logger.warning(
        "%s%% of the budget of %s is used up: %s of %s %s",
        facts["percent"],
        str(facts["account"]).replace(":", " ", 1),
        f"{facts['used'] / scale:,.6g}" if scale > 1 else f"{facts['used']:,}",
        f"{facts['limit'] / scale:,.6g}" if scale > 1 else f"{facts['limit']:,}",
        unit,
        extra={"run_id": run_id},
    )


def ledger_of(store: Store) -> Ledger:
    """Return the budgets of a store in this process."""
    return shared(store, Ledger, "", Ledger)
