"""The tables of budgets: limits, accounts, reservations and estimates.

All that a call changes here is part of the transaction that records its start or its outcome.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, NamedTuple

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
    restored_limit,
    warning,
    warning_entry,
    without,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence

    import apsw

    from maestro_hive.maestro.state.records import NewEntry
    from maestro_hive.maestro.state.sqlite.connection import Row
    from maestro_hive.maestro.state.sqlite.entries import Queries
    from maestro_hive.maestro.state.sqlite.leases import Leases, Presence
    from maestro_hive.maestro.state.store import RunLease

EPOCH = "SELECT epoch FROM limit_epoch"

_LIMIT_COLUMNS = "account, tokens, usd, declared, zone"
# One statement, and so of one moment: the epoch says by which limits a call was admitted.
_LIMITS = (
    f"SELECT epoch, EXISTS (SELECT 1 FROM limits WHERE tokens NOT NULL OR usd NOT NULL), {_LIMIT_COLUMNS}"
    " FROM limit_epoch LEFT JOIN limits ON "
)
_ALL_LIMITS = f"{_LIMITS} TRUE"
_LIMITS_OF = f"{_LIMITS} account IN (SELECT value FROM json_each(?))"
_SET_LIMIT = f"INSERT OR REPLACE INTO limits ({_LIMIT_COLUMNS}) VALUES (?, ?, ?, ?, ?)"
_NEXT_EPOCH = "UPDATE limit_epoch SET epoch = epoch + 1"
_FORGET_WARNING = "UPDATE accounts SET warned = 0 WHERE account = ? AND warned"
_FORGET_WARNINGS = (
    "UPDATE accounts SET warned = 0 WHERE warned AND account BETWEEN ?1 AND ?1 || char(0x10FFFF)"
)

_FIND_ACCOUNT = (
    "SELECT account, tokens, usd, cached, calls, reserved_tokens, reserved_usd, in_flight, unsized, warned"
    " FROM accounts"
)
# One statement for what is spent, what is reserved, and what is released.
_CHARGE = (
    "INSERT INTO accounts VALUES (NULL, ?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, 0) ON CONFLICT (account) DO UPDATE"
    " SET tokens = tokens + ?2, usd = usd + ?3, cached = cached + ?4, calls = calls + ?5,"
    " reserved_tokens = reserved_tokens + ?6, reserved_usd = reserved_usd + ?7,"
    " in_flight = in_flight + ?8, unsized = unsized + ?9"
)
_CHARGE_AND_READ = f"{_CHARGE} RETURNING tokens, usd, warned"
# Of an account that is gone, with its run, nothing is released.
_RELEASE = (
    "UPDATE accounts SET reserved_tokens = reserved_tokens - ?, reserved_usd = reserved_usd - ?,"
    " in_flight = in_flight - ?, unsized = unsized - ? WHERE account = ?"
)
_WARNED = "UPDATE accounts SET warned = ? WHERE account = ?"

_RESERVATIONS = (
    "SELECT run, step, attempt, fence, accounts, tokens, usd, unsized, lost, at FROM reservations"
)
_FIND_OF_STEP = f"{_RESERVATIONS} WHERE run = ? AND step = ?"
_RESERVE = "INSERT INTO reservations VALUES (?, ?, ?, ?, ?, ?, ?, ?, 0, ?) ON CONFLICT DO NOTHING"
_ATTEMPT = " WHERE run = ? AND step = ? AND attempt = ?"
_END_RESERVATION = (
    f"DELETE FROM reservations{_ATTEMPT} RETURNING accounts, tokens, usd, unsized, lost"
)
_FIND_RESERVATION = f"SELECT accounts, tokens, usd, unsized, lost FROM reservations{_ATTEMPT}"
_USE_RESERVATION = f"UPDATE reservations SET tokens = tokens - ?, usd = usd - ?{_ATTEMPT}"
_LOSE = "UPDATE reservations SET lost = 1 WHERE fence = ? AND NOT lost RETURNING accounts, unsized"
_FENCES = "SELECT DISTINCT fence FROM reservations WHERE NOT lost"
_EXPIRED = "SELECT run, step, attempt FROM reservations WHERE lost AND at < ?"

_ESTIMATE = (
    "INSERT OR REPLACE INTO estimates (persona, step, tokens, usd, model) VALUES (?, ?, ?, ?, ?)"
)
_FIND_ESTIMATE = (
    "SELECT persona, step, tokens, usd, model FROM estimates WHERE persona = ? AND step = ?"
)


class AccountReader:
    """The budgets in one journal file."""

    _queries: Queries

    def limits(self, concerning: Collection[str] | None = None) -> Limits:
        """Return all limits, or those that concern some accounts."""
        return _limits(self._queries.rows(*_limits_query(concerning)))

    def account(self, account: str) -> Account:
        """Return an account; one that nothing was spent of is empty."""
        rows = self._queries.rows(f"{_FIND_ACCOUNT} WHERE account = ?", (account,))
        return _account(rows[0]) if rows else Account(account=account)

    def accounts(self, scope: str | None = None) -> list[Account]:
        """Return the accounts that something was spent or reserved of, by name."""
        rows = self._queries.rows(f"{_FIND_ACCOUNT} ORDER BY account")
        return [each for each in map(_account, rows) if scope in (None, each.scope)]

    def reservations(self) -> list[Reservation]:
        """Return what is reserved, by run, step and attempt."""
        return [_reservation(row) for row in self._queries.rows(_RESERVATIONS)]

    def estimate(self, persona: str, step: str) -> Estimate | None:
        """Return what a call of a persona's step is expected to spend; None if that is not known."""
        rows = self._queries.rows(_FIND_ESTIMATE, (persona, step))
        return Estimate(*rows[0]) if rows else None

    def check_accounts(self) -> list[str]:
        """Return the accounts whose sums are not those of their reservations."""
        held: dict[str, list[int]] = {}
        for each in self.reservations():
            for account in each.accounts:
                sums = held.setdefault(account, [0, 0, 0])
                for at, more in enumerate((each.tokens, each.usd, not each.lost)):
                    sums[at] += more
        return [
            f"the account {each.account} does not have the sum of its reservations"
            for each in self.accounts()
            if [each.reserved_tokens, each.reserved_usd, each.in_flight]
            != held.get(each.account, [0, 0, 0])
        ]


class _Held(NamedTuple):
    """What is left of a reservation."""

    accounts: str
    tokens: int
    usd: int
    unsized: int
    lost: int


class AccountWriter:
    """Changes budgets, inside the caller's transaction."""

    def __init__(self, leases: Leases, presence: Presence) -> None:
        self._leases = leases
        self._presence = presence

    # --- with the appends of a run ---

    def refusal(
        self, db: apsw.Connection, wanted: Reserve
    ) -> StaleLimitsError | BudgetRefusedError | None:
        """Return why a call may not start; None if it may."""
        epoch: Any = db.execute(EPOCH).get
        if epoch != wanted.epoch:
            return StaleLimitsError(expected=wanted.epoch, epoch=epoch)
        if wanted.unknown is not None and db.execute(_FIND_ESTIMATE, wanted.unknown).fetchone():
            return StaleLimitsError(expected=wanted.epoch, epoch=epoch)
        around = [
            _reservation(row) for key in wanted.within for row in db.execute(_FIND_OF_STEP, key)
        ]
        for limit in wanted.limits:
            row = db.execute(f"{_FIND_ACCOUNT} WHERE account = ?", limit[:1]).fetchone()
            known = Account(account=limit[0]) if row is None else _account(row)
            if around:
                known = without(known, around)
            refused = refusal(known, limit, wanted)
            if refused is not None:
                return refused
        return None

    def reserve(
        self, db: apsw.Connection, run: RunLease, started: NewEntry, wanted: Reserve, now: int
    ) -> None:
        """Reserve what a call may spend, for an attempt whose start is recorded with it."""
        if not wanted.limits:
            return
        key = (run.run, started.step, started.attempt)
        tokens, usd, unsized = wanted.tokens or 0, wanted.usd or 0, wanted.unsized
        names = json.dumps([account for account, _, _ in wanted.limits])
        row = (*key, run.lease.fence, names, tokens, usd, unsized, now)
        db.execute(_RESERVE, row)
        if not db.changes():  # of a run that was started over, whose steps have their numbers again
            self._end(db, [key])
            db.execute(_RESERVE, row)
        charged = (
            (account, 0, 0, 0, 0, tokens, usd, 1, unsized) for account, _, _ in wanted.limits
        )
        db.executemany(_CHARGE, charged)

    def settle(self, db: apsw.Connection, run: RunLease, spent: Settle) -> list[NewEntry]:
        """Count what an attempt spent, and release its reservation; return warnings to record."""
        charges = {
            each: [spent.tokens, spent.usd, spent.cached, 1, 0, 0, 0, 0] for each in spent.accounts
        }
        if spent.reserved:
            self._use(db, (run.run, spent.step, spent.attempt), spent, charges)
        limits = {limit[0]: limit for limit in spent.limits} if spent.accounts else {}
        warnings: list[NewEntry] = []
        for account, amounts in charges.items():
            limit = limits.get(account)
            if limit is None:
                db.execute(_CHARGE, (account, *amounts))
                continue
            row: Any = db.execute(_CHARGE_AND_READ, (account, *amounts)).fetchone()
            known = Account(account=account, tokens=row[0], usd=row[1], warned=row[2])
            found = warning(known, limit)
            if found is not None:
                db.execute(_WARNED, (found[0], account))
                warnings.append(warning_entry(spent, account, *found))
        if spent.estimate is not None:
            db.execute(_ESTIMATE, spent.estimate)
        return warnings

    def _use(
        self, db: apsw.Connection, key: Row, spent: Settle, charges: dict[str, list[int]]
    ) -> None:
        """Take what was spent from the attempt's reservation; all of it, if the attempt has ended."""
        found = db.execute(_END_RESERVATION if spent.ended else _FIND_RESERVATION, key).fetchone()
        if found is None:
            return
        held = _Held(*found)
        tokens, usd = held.tokens, held.usd
        if not spent.ended:
            tokens, usd = min(tokens, spent.tokens), min(usd, spent.usd)
            db.execute(_USE_RESERVATION, (tokens, usd, *key))
        over = spent.ended and not held.lost
        for account in json.loads(held.accounts):
            charge = charges.setdefault(account, [0] * 8)
            charge[4:] = [-tokens, -usd, -over, -(over and held.unsized)]

    def _release(self, db: apsw.Connection, held: _Held) -> None:
        over = not held.lost
        amounts = (held.tokens, held.usd, over, over and held.unsized)
        db.executemany(_RELEASE, ((*amounts, account) for account in json.loads(held.accounts)))

    # --- by people ---

    def set_limits(
        self,
        db: apsw.Connection,
        change: Callable[[Limits], Iterable[StoredLimit]],
        concerning: Collection[str] | None,
    ) -> list[StoredLimit]:
        """Set limits by those that there are; return those that were set."""
        changed = list(change(_limits(db.execute(*_limits_query(concerning)).fetchall())))
        for limit in changed:
            row = (limit.account, limit.tokens, limit.usd, limit.declared, limit.zone)
            db.execute(_SET_LIMIT, row)
            scope, _, name = limit.account.partition(":")
            if name == EACH:
                db.execute(_FORGET_WARNINGS, (f"{scope}:",))
            else:
                db.execute(_FORGET_WARNING, (limit.account,))
        if changed:
            db.execute(_NEXT_EPOCH)
        return changed

    def recover(self, db: apsw.Connection, now: int) -> int:
        """Note which reservations are of processes that died, and delete those that are too old."""
        fences: Any = db.execute(_FENCES).fetchall()
        lost = 0
        for (fence,) in fences:
            if self._lives(db, fence):
                continue
            rows: Any = db.execute(_LOSE, (fence,)).fetchall()
            for names, unsized in rows:
                lost += 1
                db.executemany(_RELEASE, ((0, 0, 1, unsized, each) for each in json.loads(names)))
        old = db.execute(_EXPIRED, (now - LOST_MICROS,)).fetchall()
        return lost + self._end(db, old)

    def release_lost(self, db: apsw.Connection, account: str | None) -> list[Reservation]:
        """Release what processes that died had reserved, of one account or of all."""
        rows = db.execute(f"{_RESERVATIONS} WHERE lost").fetchall()
        found = [_reservation(row) for row in rows]
        chosen = [each for each in found if account is None or account in each.accounts]
        self._end(db, [(each.run, each.step, each.attempt) for each in chosen])
        return chosen

    def _end(self, db: apsw.Connection, keys: Sequence[Row]) -> int:
        for key in keys:
            row: Any = db.execute(_END_RESERVATION, key).fetchone()
            self._release(db, _Held(*row))
        return len(keys)

    def _lives(self, db: apsw.Connection, fence: int) -> bool:
        row = db.execute("SELECT holder, boot FROM leases WHERE id = ?", (fence,)).fetchone()
        return row is not None and self._presence.lives(*row)

    def may_concern(self, db: apsw.Connection, account: str) -> bool:
        """Return whether a run may be under a limit: not yet, if it is that of a run to be started."""
        scope, _, name = account.partition(":")
        if scope != "run" or name == EACH:
            return True
        return bool(db.execute("SELECT 1 FROM runs WHERE name = ?", (name,)).fetchall())

    def restore(self, db: apsw.Connection, name: str, budget: RunBudget) -> None:
        """Give a run the limit and the spending of a copy of it; what was spent since is added."""
        account = f"run:{name}"
        if budget.calls:
            db.execute(_CHARGE, (account, *budget[1:], 0, 0, 0, 0))
        self.set_limits(
            db,
            lambda limits: filter(
                None, [restored_limit(account, limits.by_account.get(account), budget)]
            ),
            [account],
        )

    def delete(self, db: apsw.Connection, name: str) -> None:
        """Delete the account of a run that is purged, and its limit; what it spent stays in others.

        What a dead process had reserved stays reserved of the others, too.
        """
        account = f"run:{name}"
        db.execute("DELETE FROM accounts WHERE account = ?", (account,))
        db.execute("DELETE FROM limits WHERE account = ?", (account,))
        if db.changes():
            db.execute(_NEXT_EPOCH)
        for row in db.execute(_RESERVATIONS).fetchall():
            held = _reservation(row)
            if account in held.accounts:
                names = json.dumps([each for each in held.accounts if each != account])
                key = (held.run, held.step, held.attempt)
                db.execute(f"UPDATE reservations SET accounts = ?{_ATTEMPT}", (names, *key))
        db.execute("DELETE FROM reservations WHERE accounts = '[]'")


def _limits_query(concerning: Collection[str] | None) -> tuple[str, Row]:
    if concerning is None:
        return _ALL_LIMITS, ()
    return _LIMITS_OF, (json.dumps([*OF_EACH, *concerning]),)


def _limits(rows: Sequence[Row]) -> Limits:
    if not rows:
        return Limits()
    found = {row[2]: _limit(row[2:]) for row in rows if row[2] is not None}
    return Limits(rows[0][0], found, some=bool(rows[0][1]))


def _limit(row: Row) -> StoredLimit:
    account, tokens, usd, declared, zone = row
    return StoredLimit(account=account, tokens=tokens, usd=usd, declared=declared, zone=zone)


def _account(row: Row) -> Account:
    account, tokens, usd, cached, calls, reserved_tokens, reserved_usd, *rest = row
    return Account(
        account=account,
        tokens=tokens,
        usd=usd,
        cached=cached,
        calls=calls,
        reserved_tokens=reserved_tokens,
        reserved_usd=reserved_usd,
        in_flight=rest[0],
        unsized=rest[1],
        warned=rest[2],
    )


def _reservation(row: Row) -> Reservation:
    run, step, attempt, fence, accounts, tokens, usd, unsized, lost, at = row
    return Reservation(
        run=run,
        step=step,
        attempt=attempt,
        fence=fence,
        accounts=tuple(json.loads(accounts)),
        tokens=tokens,
        usd=usd,
        unsized=bool(unsized),
        lost=bool(lost),
        at=at,
    )
