"""The budgets of a store, as the steps of this process use them: limits, sizes of calls, and waiting.

A step under a limit reserves what it may spend with the record of its start. Where a budget has no
room, it waits for calls that are made to be settled; and where those cannot help, it is bankrupt.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from datetime import UTC, datetime, timedelta, tzinfo
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from maestro_hive.engine import values
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
)
from maestro_hive.maestro.state.projections import facts_of
from maestro_hive.maestro.state.records import EntryKind

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from maestro_hive.engine.prices import Prices
    from maestro_hive.engine.usage import Usage
    from maestro_hive.kernel.errors import BudgetRefusedError
    from maestro_hive.maestro.state.records import Entry
    from maestro_hive.maestro.state.store import Reader, Store

logger = get_log("maestro_hive.budgets")

#: How deep children are nested, at most.
_DEEPEST = 1_000
#: How often it is looked whether another process has settled a call: the first pause and the last.
_FIRST_POLL = 0.005
_LAST_POLL = 0.1
_POLL_GROWTH = 1.3
#: How often it is looked whether a process that has reserved something has died.
_RECOVER_SECONDS = 0.5
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


UNSIZED = Sizing()


class Days:
    """Which day a moment is in: of UTC, or of a time zone that was set."""

    def __init__(self, zone: str | None) -> None:
        self.zone: tzinfo = UTC
        if zone is not None:
            from zoneinfo import ZoneInfo  # noqa: PLC0415 - where a zone is set

            self.zone = ZoneInfo(zone)
        self._first = self._end = 0
        self._name = ""

    def name(self, at: int) -> str:
        """Return the day of a moment, as in ``2026-11-17``."""
        if not self._first <= at < self._end:
            start, end = self._bounds(at)
            self._first, self._end = (int(each.timestamp() * MICROS) for each in (start, end))
            self._name = start.date().isoformat()
        return self._name

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
        queue = None if root is None else _queue_of(store.entries(root.id, up_to=2))
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


def _queue_of(first: list[Entry]) -> str | None:
    for entry in first:
        if entry.kind == EntryKind.RUN_STARTED:
            queue = facts_of(entry).get("queue")
            return queue if isinstance(queue, str) else None
    return None


class Ledger:
    """The budgets of one store in this process; one object for all its runs."""

    def __init__(self, store: Store, _name: str = "") -> None:
        self.store = store
        self._mutex = threading.Lock()
        self._estimates: dict[tuple[str, str], Estimate] = {}
        self._limited: dict[tuple[str, ...], tuple[Limited, ...]] = {}
        self._facts: dict[object, bytes] = {}
        self._waiting: set[Callable[[], object]] = set()
        #: The fencing numbers of the runs that this process has open.
        self.fences: set[int] = set()
        self.refresh()

    def refresh(self) -> None:
        """Read the limits again: those of each of a kind; others when a call concerns them."""
        limits = self.store.limits(())
        with self._mutex:
            self.limits, self._limited = limits, {}
            self.days = Days(limits.zone)
            #: What a start reserves where nothing at all is limited.
            self.unlimited: Reserve | None = None if limits.some else Reserve(limits.epoch)

    def limited(self, accounts: tuple[str, ...]) -> tuple[Limited, ...]:
        """Return those of the accounts that have a limit, with it."""
        if self.unlimited is not None:
            return ()
        known = self._limited  # a refresh replaces it: what is added below is of no older epoch
        found = known.get(accounts)
        if found is None:
            found = known[accounts] = self.store.limits(accounts).limited(accounts)
        return found

    # --- before a call ---

    def reserve(
        self, accounts: tuple[str, ...], persona: str, step: str, sizing: Sizing
    ) -> tuple[Reserve, bool]:
        """Return what a call reserves, and whether that is an estimate."""
        epoch = self.limits.epoch  # first: limits that are newer than it are found out
        limits = self.limited(accounts)
        if not limits:
            return Reserve(epoch), False
        tokens, in_money = sizing.max_tokens, is_in_money(limits)
        if tokens is not None and not in_money:
            return Reserve(epoch, limits, tokens, 0), False
        estimate = self.estimate(persona, step)
        if tokens is None and estimate is not None:
            tokens = estimate.tokens
        usd = most_usd(persona, step, sizing, estimate) if in_money else 0
        return Reserve(epoch, limits, tokens, usd), sizing.max_tokens is None

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
        if not self._waiting:
            return
        for wake in list(self._waiting):
            with contextlib.suppress(RuntimeError):  # its loop was closed
                wake()

    def check_spent(self, limits: tuple[Limited, ...], persona: str) -> None:
        """Raise ``BudgetExceeded`` if more than a limit was spent."""
        for account, tokens, usd in limits:
            known = self.store.account(account)
            for unit, most, used in (("tokens", tokens, known.tokens), ("usd", usd, known.usd)):
                if most is not None and used > most:
                    raise self._exceeded(account, unit, used, most, 0, persona)

    def tokens_left(self, accounts: tuple[str, ...]) -> float:
        """Return how many tokens the limits of accounts leave, with what is reserved taken away."""
        self.refresh()  # another process may have set one
        left = float("inf")
        for account, tokens, _ in self.limited(accounts):
            if tokens is not None:
                known = self.store.account(account)
                left = min(left, tokens - known.tokens - known.reserved_tokens)
        return max(0.0, left)

    # --- waiting ---

    async def room(self, refused: BudgetRefusedError, persona: str, *, nested: bool) -> None:
        """Return when there may be room for a call that was refused; raise if there will be none.

        ``nested``: it is made inside another one, whose own reservation must not be waited for.
        """
        poll, recover_at, lost = _FIRST_POLL, 0.0, 0
        while True:
            if time.monotonic() >= recover_at:
                recover_at = time.monotonic() + _RECOVER_SECONDS
                if await self._in_store(self.store.recover_reservations, writes=True):
                    return
                lost = await self._in_store(partial(self._lost, refused))
            account = await self._in_store(partial(self.store.account, refused.account))
            used, held = (
                (account.tokens, account.reserved_tokens)
                if refused.unit == "tokens"
                else (account.usd, account.reserved_usd)
            )
            amount = 0 if refused.alone else max(1, refused.amount)
            blocked = account.unsized > 0 or (refused.alone and account.in_flight > 0)
            if used + held + amount <= refused.limit and not blocked:
                return
            full = not refused.alone and used + lost + amount > refused.limit
            # What this process has in flight is paid for: to be suspended would lose it.
            full = full and not await self._in_store(partial(self._own_in_flight, refused.account))
            if full or nested or not account.in_flight:
                raise self._exceeded(
                    refused.account, refused.unit, used, refused.limit, lost, persona, amount
                )
            if await self._in_store(self._has_other_limits):
                return
            await self._pause(poll)
            poll = min(poll * _POLL_GROWTH, _LAST_POLL)

    def _has_other_limits(self) -> bool:
        return self.store.limits(()).epoch != self.limits.epoch

    def _lost(self, refused: BudgetRefusedError) -> int:
        """Return how much of an account processes that died had reserved."""
        return sum(
            each.tokens if refused.unit == "tokens" else each.usd
            for each in self.store.reservations()
            if each.lost and refused.account in each.accounts
        )

    def _own_in_flight(self, account: str) -> bool:
        """Return whether calls of this process are made that have reserved something of an account."""
        return any(
            account in each.accounts and not each.lost and each.fence in self.fences
            for each in self.store.reservations()
        )

    async def _pause(self, seconds: float) -> None:
        settled = asyncio.Event()
        wake = partial(asyncio.get_running_loop().call_soon_threadsafe, settled.set)
        self._waiting.add(wake)
        try:
            async with asyncio.timeout(seconds):
                await settled.wait()
        except TimeoutError:
            pass
        finally:
            self._waiting.discard(wake)

    async def _in_store(
        self, call: Callable[[], values.ResultT], *, writes: bool = False
    ) -> values.ResultT:
        if not writes and self.store.syncs_fast():
            return call()
        return await values.in_thread(call)

    def _exceeded(
        self,
        account: str,
        unit: str,
        used: int,
        limit: int,
        lost: int,
        persona: str,
        amount: int = 0,
    ) -> BudgetExceeded:
        return BudgetExceeded(
            account,
            unit,
            used=used,
            limit=limit,
            lost=lost,
            amount=amount,
            persona_id=persona,
            retry_in=self._seconds_to_room(account, lost),
        )

    def _seconds_to_room(self, account: str, lost: int) -> float | None:
        """Return after how many seconds there is room by itself; None if a person has to make it."""
        now = self.store.clock.micros()
        waits: list[float] = []
        if account == f"day:{self.days.name(now)}":
            waits.append(self.days.seconds_left(now))
        if lost:
            since = [each.at for each in self.store.reservations() if each.lost]
            waits += [(at + LOST_MICROS - now) / MICROS for at in since]
        return max(1.0, min(waits)) if waits else None


def most_usd(
    persona: str, step: str, sizing: Sizing, estimate: Estimate | None = None
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
    return None if estimate is None else estimate.usd


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
