"""One statement for the start of an attempt under a limit, and one for the end of one that spent.

Each is an insert into a view of the writing connection, whose trigger does all of it inside SQLite: a
transaction of one statement, as an entry alone is, in a third of the time of single statements. Where
anything is not as usual (no room, a lease that was taken over, a warning to record) it refuses, and
changes nothing: then the general way decides.
"""

from __future__ import annotations

import json
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from maestro_hive.maestro.state.budgets import WARNED_AT

if TYPE_CHECKING:
    from maestro_hive.maestro.state.budgets import Limited, Reserve, Settle
    from maestro_hive.maestro.state.records import NewEntry
    from maestro_hive.maestro.state.sqlite.connection import Row
    from maestro_hive.maestro.state.store import Append

#: How many accounts a call may be charged to, and how many of them may be limited; more go the general way.
_ACCOUNTS, _LIMITS = 8, 3

_ENTRY = "kind, step, attempt, at, facts, value, sha256, identity"
_LIMIT_COLUMNS = ", ".join(f"l{n}, t{n}, u{n}" for n in range(_LIMITS))
_ACCOUNT_COLUMNS = ", ".join(f"a{n}" for n in range(_ACCOUNTS))
_START = (
    f"key, run, fence, {_ENTRY}, epoch, names, count, tokens, usd, unsized, namespace, name, version,"
    f" {_LIMIT_COLUMNS}"
)
_END = (
    f"key, run, fence, {_ENTRY}, spent, tokens, usd, cached, reserved, names, held_tokens, held_usd,"
    f" held_unsized, count, {_ACCOUNT_COLUMNS}, {_LIMIT_COLUMNS}"
)

# The key is expected, and not found: it is known before, and who writes for the run knows it.
_NOT_CURRENT = (
    "NOT EXISTS (SELECT 1 FROM leases WHERE id = NEW.fence) OR NEW.key <> 1 +"
    " (SELECT coalesce(max(id), NEW.run << 32) FROM entries"
    " WHERE id BETWEEN (NEW.run << 32) + 1 AND (NEW.run + 1 << 32) - 1)"
)
_ADD_ENTRY = "INSERT INTO entries (id, kind, step, attempt, at, facts, value, payload, sha256, identity) VALUES"
_LIMITED = ", ".join(f"NEW.l{n}" for n in range(_LIMITS))
_CHARGED = ", ".join(f"NEW.a{n}" for n in range(_ACCOUNTS))
_THIS = "run = NEW.run AND step = NEW.step AND attempt = NEW.attempt"
#: Of a limited account: whether there is room; and whether a part of it is reached for the first time.
_HAS_ROOM = " OR ".join(
    f"(account = NEW.l{n}"
    f" AND (NEW.t{n} IS NULL OR tokens + reserved_tokens + max(1, NEW.tokens) <= NEW.t{n})"
    f" AND (NEW.u{n} IS NULL OR usd + reserved_usd + max(1, NEW.usd) <= NEW.u{n}))"
    for n in range(_LIMITS)
)
_NEXT = "CASE" + "".join(f" WHEN warned < {each} THEN {each}" for each in WARNED_AT) + " END"
_WARNS = " OR ".join(
    f"(account = NEW.l{n} AND warned < {WARNED_AT[-1]} AND ("
    f"(tokens + NEW.tokens) * 100 >= NEW.t{n} * {_NEXT} OR (usd + NEW.usd) * 100 >= NEW.u{n} * {_NEXT}))"
    for n in range(_LIMITS)
)

# One by one: SQLite updates a single row in place, and collects several before it does.
_RESERVE = "\n".join(
    "  UPDATE accounts SET reserved_tokens = reserved_tokens + NEW.tokens,"  # noqa: S608 - as below
    " reserved_usd = reserved_usd + NEW.usd, in_flight = in_flight + 1, unsized = unsized + NEW.unsized"
    f" WHERE account = NEW.l{n};"
    for n in range(_LIMITS)
)
_CHARGE = "\n".join(
    "  UPDATE accounts SET tokens = tokens + NEW.tokens, usd = usd + NEW.usd, cached = cached + NEW.cached,"  # noqa: S608 - as below
    f" calls = calls + 1 WHERE account = NEW.a{n};"
    for n in range(_ACCOUNTS)
)
_RELEASE = "\n".join(
    "  UPDATE accounts SET reserved_tokens = reserved_tokens - NEW.held_tokens, reserved_usd ="  # noqa: S608 - as below
    " reserved_usd - NEW.held_usd, in_flight = in_flight - 1, unsized = unsized - NEW.held_unsized"
    f" WHERE NEW.reserved AND account = NEW.l{n};"
    for n in range(_LIMITS)
)


def _columns(names: str) -> str:
    return ", ".join(f"0 AS {name}" for name in names.split(", "))


#: For the writing connection.
SCRIPT = f"""
CREATE TEMP VIEW attempt_starts AS SELECT {_columns(_START)};
CREATE TEMP TRIGGER start_attempt INSTEAD OF INSERT ON attempt_starts BEGIN
  SELECT RAISE(ABORT, 'refused') WHERE {_NOT_CURRENT}
    OR NEW.epoch <> (SELECT coalesce(max(id), 0) FROM limits)
    OR (NEW.namespace IS NOT NULL AND NEW.version <> coalesce(
      (SELECT version FROM documents WHERE namespace = NEW.namespace AND key = NEW.name), 0))
    OR NEW.count <> (SELECT count(*) FROM accounts WHERE account IN ({_LIMITED})
      AND ({_HAS_ROOM}) AND unsized = 0 AND NOT (NEW.unsized AND in_flight));
  {_ADD_ENTRY} (NEW.key, NEW.kind, NEW.step, NEW.attempt, NEW.at, NEW.facts, NEW.value, NULL, NEW.sha256,
    NEW.identity);
  INSERT INTO reservations VALUES (NEW.run, NEW.step, NEW.attempt, NEW.fence, NEW.names, NEW.tokens,
    NEW.usd, NEW.unsized, 0, NEW.at);
  {_RESERVE}
END;
CREATE TEMP VIEW attempt_ends AS SELECT {_columns(_END)};
CREATE TEMP TRIGGER end_attempt INSTEAD OF INSERT ON attempt_ends BEGIN
  SELECT RAISE(ABORT, 'refused') WHERE {_NOT_CURRENT}
    OR NEW.count <> (SELECT count(*) FROM accounts WHERE account IN ({_CHARGED}))
    OR (NEW.l0 IS NOT NULL AND EXISTS (SELECT 1 FROM accounts WHERE account IN ({_LIMITED}) AND ({_WARNS})))
    OR (NEW.reserved AND NOT EXISTS (SELECT 1 FROM reservations WHERE {_THIS} AND accounts = NEW.names
      AND (tokens, usd, unsized, lost) = (NEW.held_tokens, NEW.held_usd, NEW.held_unsized, 0)));
  DELETE FROM reservations WHERE NEW.reserved AND {_THIS};
  {_CHARGE}
  {_RELEASE}
  {_ADD_ENTRY} (NEW.key, 7, NEW.step, NEW.attempt, NEW.at, NEW.spent, NULL, NULL, NULL, NULL),
    (NEW.key + 1, NEW.kind, NEW.step, NEW.attempt, NEW.at, NEW.facts, NEW.value, NULL, NEW.sha256,
    NEW.identity);
END;
"""  # noqa: S608 - all of it is from here

START = f"INSERT INTO attempt_starts ({_START}) VALUES ({', '.join('?' * len(_START.split(', ')))})"  # noqa: S608
END = f"INSERT INTO attempt_ends ({_END}) VALUES ({', '.join('?' * len(_END.split(', ')))})"  # noqa: S608


@lru_cache(maxsize=1_000)
def _names(limits: tuple[Limited, ...]) -> str:
    return json.dumps([account for account, _, _ in limits])


@lru_cache(maxsize=1_000)
def _limit_row(limits: tuple[Limited, ...]) -> Row:
    """Return the columns of limits, as many as there are."""
    flat = [part for limit in limits for part in limit]
    return (*flat, *[None] * (3 * _LIMITS - len(flat)))


@lru_cache(maxsize=1_000)
def _account_row(accounts: tuple[str, ...]) -> Row:
    return (len(accounts), *accounts, *[None] * (_ACCOUNTS - len(accounts)))


def start_row(append: Append, key: int, entry: NewEntry, at: int, wanted: Reserve) -> Row | None:
    """Return what ``START`` takes: an attempt that starts, and what it reserves; None if it cannot."""
    run, limits = append.run, wanted.limits
    if len(limits) > _LIMITS or wanted.within or wanted.unknown is not None:
        return None
    return (
        *(key, run.run, run.lease.fence, *_fields(entry, at), wanted.epoch, _names(limits)),
        *(len(limits), wanted.tokens or 0, wanted.usd or 0, wanted.unsized),
        *(append.guard or (None, None, None)),
        *_limit_row(limits),
    )


def end_row(append: Append, key: int, at: int, spent: Settle) -> Row | None:
    """Return what ``END`` takes: what was spent, and how an attempt ended; None if it cannot.

    It can if that is all: what was reserved is known, and nothing is learned from it.
    """
    run, entries = append.run, append.entries
    usual = len(entries) == 2 and spent.ended and spent.accounts and spent.estimate is None
    if not usual or len(spent.accounts) > _ACCOUNTS or len(spent.limits) > _LIMITS:
        return None
    held = spent.held
    if spent.reserved and (held is None or held.limits != spent.limits):
        return None
    amounts: tuple[Any, ...] = (None, 0, 0, 0)
    if held is not None:
        amounts = (_names(held.limits), held.tokens or 0, held.usd or 0, held.unsized)
    return (
        *(key, run.run, run.lease.fence, *_fields(entries[1], at), entries[0].facts),
        *(spent.tokens, spent.usd, spent.cached, spent.reserved),
        *amounts,
        *_account_row(spent.accounts),
        *_limit_row(spent.limits),
    )


def _fields(entry: NewEntry, at: int) -> Row:
    data, sha256 = (None, None) if entry.value is None else entry.value
    return (entry.kind, entry.step, entry.attempt, at, entry.facts, data, sha256, entry.identity)
