"""The budgets of a store in memory."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from maestro_hive.kernel.errors import BudgetRefusedError, StaleLimitsError
from maestro_hive.maestro.state.budgets import (
    EACH,
    LOST_MICROS,
    OF_EACH,
    Account,
    Estimate,
    Limits,
    Reservation,
    Reserve,
    RunBudget,
    Settle,
    StoredLimit,
    refusal,
    released,
    reserved,
    restored_limit,
    warning,
    warning_entry,
    without,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable
    from contextlib import AbstractContextManager

    from maestro_hive.kernel.clock import Clock
    from maestro_hive.maestro.state.records import NewEntry, RunRecord
    from maestro_hive.maestro.state.store import RunLease

_Attempt = tuple[int, int, int]


@dataclass(slots=True)
class BudgetData:
    """What stores that share their data share of budgets."""

    epoch: int = 0
    limits: dict[str, StoredLimit] = field(default_factory=dict)
    accounts: dict[str, Account] = field(default_factory=dict)
    reservations: dict[_Attempt, Reservation] = field(default_factory=dict)
    estimates: dict[tuple[str, str], Estimate] = field(default_factory=dict)

    def refusal(self, wanted: Reserve) -> StaleLimitsError | BudgetRefusedError | None:
        """Return why a call may not start; None if it may."""
        if wanted.epoch != self.epoch:
            return StaleLimitsError(expected=wanted.epoch, epoch=self.epoch)
        if wanted.unknown in self.estimates:
            return StaleLimitsError(expected=wanted.epoch, epoch=self.epoch)
        held = self.reservations.values() if wanted.within else ()
        around = [each for each in held if each.key in wanted.within]
        found = (
            refusal(without(self.account(limit[0]), around), limit, wanted)
            for limit in wanted.limits
        )
        return next((refused for refused in found if refused is not None), None)

    def account(self, account: str) -> Account:
        """Return an account; one that nothing was spent of is empty."""
        return self.accounts.get(account) or Account(account=account)

    def reserve(self, run: RunLease, started: NewEntry, wanted: Reserve, now: int) -> None:
        """Reserve what a call may spend."""
        if not wanted.limits:
            return
        key = (run.run, started.step, started.attempt)
        if key in self.reservations:
            self.end(key)
        accounts = tuple(account for account, _, _ in wanted.limits)
        self.reservations[key] = Reservation(
            run=run.run,
            step=started.step,
            attempt=started.attempt,
            fence=run.lease.fence,
            accounts=accounts,
            tokens=wanted.tokens or 0,
            usd=wanted.usd or 0,
            unsized=wanted.unsized,
            lost=False,
            at=now,
        )
        for account in accounts:
            self.accounts[account] = reserved(self.account(account), wanted)

    def settle(self, run: RunLease, spent: Settle) -> list[NewEntry]:
        """Count what an attempt spent, and release its reservation; return warnings to record."""
        if spent.reserved:
            self._use((run.run, spent.step, spent.attempt), spent)
        for account in spent.accounts:
            known = self.account(account)
            self.accounts[account] = replace(
                known,
                tokens=known.tokens + spent.tokens,
                usd=known.usd + spent.usd,
                cached=known.cached + spent.cached,
                calls=known.calls + 1,
            )
        if spent.estimate is not None:
            self.estimates[spent.estimate.persona, spent.estimate.step] = spent.estimate
        return self._warnings(spent) if spent.accounts else []

    def _warnings(self, spent: Settle) -> list[NewEntry]:
        found: list[NewEntry] = []
        for limit in spent.limits:
            account = self.account(limit[0])
            reached = warning(account, limit)
            if reached is not None:
                self.accounts[account.account] = replace(account, warned=reached[0])
                found.append(warning_entry(spent, account.account, *reached))
        return found

    def _use(self, key: _Attempt, spent: Settle) -> None:
        held = self.reservations.get(key)
        if held is None:
            return
        if spent.ended:
            self.end(key)
            return
        tokens, usd = min(held.tokens, spent.tokens), min(held.usd, spent.usd)
        self.reservations[key] = replace(held, tokens=held.tokens - tokens, usd=held.usd - usd)
        for account in held.accounts:
            self.accounts[account] = released(self.account(account), held, tokens, usd, ended=False)

    def end(self, key: _Attempt) -> None:
        """Release what is left of a reservation."""
        held = self.reservations.pop(key)
        for account in held.accounts:
            self.accounts[account] = released(
                self.account(account), held, held.tokens, held.usd, ended=True
            )

    def lose(self, key: _Attempt) -> None:
        """Note that the process of a reservation has died."""
        held = self.reservations[key]
        for account in held.accounts:
            self.accounts[account] = released(self.account(account), held, 0, 0, ended=True)
        self.reservations[key] = replace(held, lost=True)

    def delete(self, run: str) -> None:
        """Delete the account of a run that is purged, and its limit."""
        account = f"run:{run}"
        self.accounts.pop(account, None)
        if self.limits.pop(account, None) is not None:
            self.epoch += 1
        for key, held in list(self.reservations.items()):
            left = tuple(each for each in held.accounts if each != account)
            if not left:
                del self.reservations[key]
            elif left != held.accounts:
                self.reservations[key] = replace(held, accounts=left)

    def restore(self, run: str, budget: RunBudget) -> None:
        """Give a run the limit and the spending of a copy of it; what was spent since is added."""
        known = self.account(f"run:{run}")
        if budget.calls:
            self.accounts[known.account] = replace(
                known,
                tokens=known.tokens + budget.tokens,
                usd=known.usd + budget.usd,
                cached=known.cached + budget.cached,
                calls=known.calls + budget.calls,
            )
        limit = restored_limit(known.account, self.limits.get(known.account), budget)
        if limit is not None:
            self.set_limit(limit)
            self.epoch += 1

    def set_limit(self, limit: StoredLimit) -> None:
        """Set a limit; what was warned of before is warned of again."""
        self.limits[limit.account] = limit
        scope, _, name = limit.account.partition(":")
        for account in list(self.accounts.values()):
            if account.account == limit.account or (name == EACH and account.scope == scope):
                self.accounts[account.account] = replace(account, warned=0)


class AccountsInMemory:
    """The part of ``MemoryStore`` that is about budgets."""

    clock: Clock

    if TYPE_CHECKING:  # what the store has

        @property
        def _budgets(self) -> BudgetData: ...
        def _locked(self) -> AbstractContextManager[object]: ...
        def _has_lease(self, fence: int) -> bool: ...
        def _wake_bankrupt(self, changed: Collection[str]) -> None: ...
        def run(self, name: str) -> RunRecord | None: ...

    def limits(self, concerning: Collection[str] | None = None) -> Limits:
        with self._locked():
            every = self._budgets.limits
            chosen = every if concerning is None else {*OF_EACH, *concerning} & every.keys()
            found = {account: every[account] for account in chosen}
            some = any(each.tokens is not None or each.usd is not None for each in every.values())
            return Limits(self._budgets.epoch, found, some)

    def account(self, account: str) -> Account:
        with self._locked():
            return self._budgets.account(account)

    def accounts(self, scope: str | None = None) -> list[Account]:
        with self._locked():
            found = sorted(self._budgets.accounts.items())
        return [account for _, account in found if scope in (None, account.scope)]

    def reservations(self) -> list[Reservation]:
        with self._locked():
            return [each for _, each in sorted(self._budgets.reservations.items())]

    def estimate(self, persona: str, step: str) -> Estimate | None:
        with self._locked():
            return self._budgets.estimates.get((persona, step))

    def set_limits(
        self,
        change: Callable[[Limits], Iterable[StoredLimit]],
        concerning: Collection[str] | None = None,
    ) -> list[StoredLimit]:
        with self._locked():
            changed = list(change(self.limits(concerning)))
            for limit in changed:
                self._budgets.set_limit(limit)
            self._budgets.epoch += bool(changed)
            if any(map(self._may_concern, changed)):
                self._wake_bankrupt([each.account for each in changed])
        return changed

    def _may_concern(self, limit: StoredLimit) -> bool:
        """Return whether a run may be under a limit: not yet, if it is that of a run to be started."""
        scope, _, name = limit.account.partition(":")
        return scope != "run" or name == EACH or self.run(name) is not None

    def recover_reservations(self) -> int:
        with self._locked():
            data, old = self._budgets, self.clock.nanos() // 1000 - LOST_MICROS
            dead = [
                key
                for key, each in data.reservations.items()
                if not each.lost and not self._has_lease(each.fence)
            ]
            for key in dead:
                data.lose(key)
            expired = [
                key for key, each in data.reservations.items() if each.lost and each.at < old
            ]
            for key in expired:
                data.end(key)
        return len(dead) + len(expired)

    def release_reservations(self, account: str | None = None) -> list[Reservation]:
        with self._locked():
            self.recover_reservations()
            chosen = {
                key: each
                for key, each in self._budgets.reservations.items()
                if each.lost and (account is None or account in each.accounts)
            }
            for key in chosen:
                self._budgets.end(key)
            self._wake_bankrupt({name for each in chosen.values() for name in each.accounts})
        return list(chosen.values())
