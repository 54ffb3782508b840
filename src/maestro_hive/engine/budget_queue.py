"""The calls of this process that wait for room in a budget: first come, first served.

The first of all looks into the store, for the others too, when a call here has ended and now and then
for those of other processes; so what waiting costs does not grow with how many wait. Calls inside of
other calls come first: what they wait for must not wait for them.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
import time
import weakref
from bisect import bisect_left, insort
from dataclasses import replace
from operator import attrgetter
from typing import TYPE_CHECKING

from maestro_hive.engine import values
from maestro_hive.kernel.errors import BudgetRefusedError
from maestro_hive.maestro.state.budgets import refusal, reserved, sized, without

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from maestro_hive.engine.accounts import Ledger
    from maestro_hive.engine.errors import BudgetExceeded
    from maestro_hive.maestro.state.budgets import Account, Limited, Reservation, Reserve, StepKey

#: How often it is looked whether another process has settled a call: the first pause and the last.
_FIRST_POLL = 0.005
_LAST_POLL = 0.1
_POLL_GROWTH = 1.3
#: How often it is looked whether a process that has reserved something has died, or limits are others.
_RECOVER_SECONDS = 0.5
#: How often those that do not look see whether they have to: the one that did may be in a closed loop.
_TAKEOVER_SECONDS = 1.0
#: For so long one that may be tried again counts as if it had started: others must not overtake it.
_GRANT_SECONDS = 2.0

_by_ticket = attrgetter("ticket")


class WaitingCall:
    """A call that a budget refused, until it may be tried again."""

    __slots__ = (
        *("_loop", "_woken", "also_within", "error", "is_over", "limit", "persona", "refused"),
        *("ticket", "wanted"),
    )

    def __init__(
        self, refused: BudgetRefusedError, wanted: Reserve, persona: str, ticket: int
    ) -> None:
        self.refused = refused
        self.wanted = wanted
        self.persona = persona
        #: Its place among all that wait; it has the same when it is refused again.
        self.ticket = ticket
        self.limit: Limited = next(limit for limit in wanted.limits if limit[0] == refused.account)
        #: Steps that wait themselves, and next to which it may be made.
        self.also_within: tuple[StepKey, ...] = ()
        self.is_over = False
        self.error: BudgetExceeded | None = None
        self._loop = asyncio.get_running_loop()
        self._woken = asyncio.Event()

    @property
    def is_abandoned(self) -> bool:
        """Whether its loop was closed over it."""
        return self._loop.is_closed()

    def wake(self) -> None:
        """Let it look, or see that it may go on; from any thread."""
        with contextlib.suppress(RuntimeError):  # its loop was closed
            self._loop.call_soon_threadsafe(self._woken.set)

    def end(self, error: BudgetExceeded | None = None) -> None:
        """Let it be tried again, or raise the error."""
        self.error, self.is_over = error, True
        self.wake()

    async def pause(self, seconds: float) -> bool:
        """Return True when it was woken, False after the seconds."""
        try:
            async with asyncio.timeout(seconds):
                await self._woken.wait()
        except TimeoutError:
            return False
        self._woken.clear()
        return True

    def fits(self, account: Account) -> bool:
        """Return whether the account has room for it."""
        return refusal(account, self.limit, self.wanted) is None

    def is_hopeless(self, account: Account, lost: int) -> bool:
        """Return whether there is no room even when all others have ended, and have spent nothing."""
        used, amount, most = (
            (account.tokens, self.wanted.tokens, self.limit[1])
            if self.refused.unit == "tokens"
            else (account.usd, self.wanted.usd, self.limit[2])
        )
        return most is not None and used + lost + max(1, amount or 0) > most


def behind_others(limit: Limited, wanted: Reserve) -> BudgetRefusedError:
    """Return the refusal of a call that is not tried: others wait for this account already."""
    account, tokens, usd = limit
    unit, most, amount = (
        ("tokens", tokens, wanted.tokens) if tokens is not None else ("usd", usd or 0, wanted.usd)
    )
    return BudgetRefusedError(account, unit, 0, 0, amount or 0, most, alone=wanted.unsized)


class _Line:
    """The calls that wait for one account: those inside of other calls, and the others."""

    def __init__(self) -> None:
        self.nested: list[WaitingCall] = []
        self.plain: list[WaitingCall] = []

    def of(self, call: WaitingCall) -> list[WaitingCall]:
        return self.nested if call.wanted.within else self.plain

    def __iter__(self) -> Iterator[WaitingCall]:
        return iter([*self.nested, *self.plain])

    @property
    def first(self) -> WaitingCall:
        return min((calls[0] for calls in (self.nested, self.plain) if calls), key=_by_ticket)


class BudgetQueue:
    """All calls of this process that wait for the budgets of one store, in any loop."""

    def __init__(self, ledger: Ledger) -> None:
        # Weakly: a ledger that is no longer used, and its store, are collected at once.
        self._known_ledger = weakref.ref(ledger)
        self._store = ledger.store
        self._mutex = threading.RLock()
        self._lines: dict[str, _Line] = {}
        self._tickets = itertools.count(1)
        self._recover_at = 0.0
        #: Those that may be tried again, by ticket, and until when they count as started.
        self._granted: dict[int, tuple[WaitingCall, float]] = {}
        #: What processes that died have reserved, as of then.
        self._lost: list[Reservation] = []

    @property
    def _ledger(self) -> Ledger:
        ledger = self._known_ledger()
        assert ledger is not None, "the run of a call that waits has it"
        return ledger

    def ticket(self) -> int:
        """Return the place of one more at the end."""
        return next(self._tickets)

    def first_waited_for(self, limits: tuple[Limited, ...]) -> Limited | None:
        """Return the first of these that calls wait for: one more has to wait behind them.

        Also behind those that may be tried again, and have not been yet.
        """
        if not self._lines and not self._granted:
            return None
        now = time.monotonic()
        granted = list(self._granted.values())
        waited_for = {call.refused.account for call, until in granted if until >= now}
        return next(
            (limit for limit in limits if limit[0] in self._lines or limit[0] in waited_for), None
        )

    def blocked_steps(self) -> set[StepKey]:
        """Return the steps that cannot end, since a call inside of them waits."""
        with self._mutex:
            waiting = [call for line in self._lines.values() for call in line.nested]
        return {key for call in waiting for key in call.wanted.within}

    def note_tried(self, ticket: int) -> None:
        """Note that a call was tried again: it has started, or was refused again."""
        self._granted.pop(ticket, None)

    def settled(self) -> None:
        """Have it looked whether there is room; from any thread."""
        if self._lines:
            first = self._first()
            if first is not None:
                first.wake()

    async def room(self, call: WaitingCall) -> None:
        """Return when there may be room for a call; raise ``BudgetExceeded`` if there will be none."""
        self._add(call)
        try:
            poll = _FIRST_POLL
            while not call.is_over:
                if self._first() is not call:
                    await call.pause(_TAKEOVER_SECONDS)
                    continue
                await self._look()
                if not call.is_over:
                    woken = await call.pause(poll)
                    poll = _FIRST_POLL if woken else min(poll * _POLL_GROWTH, _LAST_POLL)
        finally:
            self._remove(call)
        if call.error is not None:
            raise call.error

    def _add(self, call: WaitingCall) -> None:
        with self._mutex:
            line = self._lines.setdefault(call.refused.account, _Line())
            insort(line.of(call), call, key=_by_ticket)

    def _remove(self, call: WaitingCall) -> None:
        with self._mutex:
            was_first = self._first() is call
            line = self._lines[call.refused.account]
            calls = line.of(call)
            del calls[bisect_left(calls, call.ticket, key=_by_ticket)]
            if not line.nested and not line.plain:
                del self._lines[call.refused.account]
            following = self._first() if was_first else None
        if following is not None:
            following.wake()

    def _first(self) -> WaitingCall | None:
        """Return the call that looks: that which has waited longest, in a loop that lives."""
        with self._mutex:
            first = min((line.first for line in self._lines.values()), key=_by_ticket, default=None)
            if first is None or not first.is_abandoned:
                return first
            living = [
                call for line in self._lines.values() for call in line if not call.is_abandoned
            ]
        return min(living, key=_by_ticket, default=None)

    # --- looking ---

    async def _look(self) -> None:
        """Let those go on for whom there is room, and those for whom there will be none."""
        if time.monotonic() >= self._recover_at:
            self._recover_at = time.monotonic() + _RECOVER_SECONDS
            await self._in_store(self._store.recover_reservations, writes=True)
            if await self._in_store(self._has_other_limits):
                self._retry_all()
                return
        await self._in_store(self._look_at_accounts)

    async def _in_store(
        self, call: Callable[[], values.ResultT], *, writes: bool = False
    ) -> values.ResultT:
        if not writes and self._store.syncs_fast():
            return call()
        return await values.in_thread(call)

    def _has_other_limits(self) -> bool:
        self._read_lost()
        return self._ledger.is_outdated()

    def _grant(self, call: WaitingCall) -> None:
        """Let a call be tried again for which there is room."""
        self._granted[call.ticket] = (call, time.monotonic() + _GRANT_SECONDS)
        call.end()

    def _with_granted(self, account: Account) -> Account:
        """Return an account with what those will reserve that were let go on just now."""
        now = time.monotonic()
        for ticket, (call, until) in list(self._granted.items()):
            if until < now:
                self._granted.pop(ticket, None)
            elif call.refused.account == account.account:
                account = reserved(account, call.wanted)
        return account

    def _retry_all(self) -> None:
        with self._mutex:
            calls = [call for line in self._lines.values() for call in line]
        for call in calls:
            call.end()

    def _look_at_accounts(self) -> None:
        with self._mutex:
            lines = [(name, list(line.nested), line) for name, line in self._lines.items()]
        self._size([call for *_, line in lines for call in line])
        held = self._store.reservations() if any(nested for _, nested, _ in lines) else []
        for name, nested, line in lines:
            if self._ledger.is_of_another_day(name):
                for call in list(line):
                    call.end()  # what it starts is of the present day
                continue
            account = self._with_granted(self._store.account(name))
            for call in nested:
                if not call.is_over:
                    account = self._decide_nested(call, account, held)
            self._decide_in_order(line, account)

    def _size(self, calls: list[WaitingCall]) -> None:
        """Let calls reserve what one of their kind has told since they were refused: not all at once."""
        unknown = {call.wanted.unknown for call in calls if call.wanted.unknown is not None}
        known = {each: self._ledger.estimate(*each) for each in unknown}
        for call in calls:
            estimate = None if call.wanted.unknown is None else known[call.wanted.unknown]
            if estimate is not None:
                call.wanted = sized(call.wanted, estimate)

    def _decide_in_order(self, line: _Line, account: Account) -> None:
        """Let calls go on in their order, as far as there is room."""
        for call in [each for each in line.plain if not each.is_over]:
            if call.fits(account):
                self._grant(call)
                account = reserved(account, call.wanted)
            elif account.in_flight and not self._is_hopeless(call, account):
                return
            else:
                self._refuse(call, account)

    def _decide_nested(
        self, call: WaitingCall, account: Account, held: list[Reservation]
    ) -> Account:
        """Let a call inside of others go on, or raise; return the account with what it reserves."""
        within = call.wanted.within
        seen = without(account, [each for each in held if each.key in within])
        if call.fits(seen):
            self._grant(call)
            return reserved(account, call.wanted)
        if not seen.in_flight or self._is_hopeless(call, account):
            self._refuse(call, account)
            return account
        others = [
            each
            for each in held
            if account.account in each.accounts and not each.lost and each.key not in within
        ]
        # Not if one was let go on just now, or has started or ended since they were read.
        is_all = len(others) == seen.in_flight
        if is_all and {each.key for each in others} <= self.blocked_steps():
            # All of them wait, and it would for ever. If only its size is not known, it may go on.
            if call.fits(replace(seen, in_flight=0, unsized=0)):
                call.also_within = tuple(each.key for each in others)
                self._grant(call)
                return reserved(account, call.wanted)
            self._refuse(call, account, others)
        return account

    def _refuse(
        self, call: WaitingCall, account: Account, waiting: list[Reservation] | None = None
    ) -> None:
        """End a call that there is no room for; where limits are others by now, it is tried again."""
        call.end(None if self._has_other_limits() else self._exceeded(call, account, waiting))

    def _is_hopeless(self, call: WaitingCall, account: Account) -> bool:
        if call.is_hopeless(account, 0):
            return True
        if not self._lost_of(call):
            return False
        self._read_lost()  # it may have been released by now
        return call.is_hopeless(account, self._lost_of(call))

    def _read_lost(self) -> None:
        self._lost = [each for each in self._store.reservations() if each.lost]

    def _lost_of(self, call: WaitingCall) -> int:
        of_account = (each for each in self._lost if call.refused.account in each.accounts)
        return sum(
            each.tokens if call.refused.unit == "tokens" else each.usd for each in of_account
        )

    def _exceeded(
        self, call: WaitingCall, account: Account, waiting: list[Reservation] | None = None
    ) -> BudgetExceeded:
        in_tokens = call.refused.unit == "tokens"
        return self._ledger.exceeded(
            call.refused.account,
            call.refused.unit,
            used=account.tokens if in_tokens else account.usd,
            limit=call.refused.limit,
            lost=self._lost_of(call),
            persona=call.persona,
            amount=max(1, call.refused.amount),
            waiting=sum(each.tokens if in_tokens else each.usd for each in waiting or ()),
        )
