"""One statement for the start of an attempt under limits, and one for the end of one that spent.

Each is an insert into a view of the writing connection, whose trigger does all of it inside SQLite: a
transaction of one statement, as an entry alone is. There is a view for each number of accounts, made when
it is first needed, for a trigger that skips what is not given takes half as long again. Where anything is
not as usual (no room, a lease that was taken over, a warning to record, an account without a row) it
refuses, and changes nothing: then the general way decides.
"""

from __future__ import annotations

import json
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from maestro_hive.maestro.state.budgets import WARNED_AT

if TYPE_CHECKING:
    from collections.abc import Sequence

    from maestro_hive.maestro.state.budgets import Limited, Reserve, Settle
    from maestro_hive.maestro.state.records import NewEntry
    from maestro_hive.maestro.state.sqlite.connection import Row
    from maestro_hive.maestro.state.store import Append

#: How many accounts a call may be charged to, and how many of them may be limited; more go the general way.
_ACCOUNTS, _LIMITS = 12, 4

_ENTRY = "key, run, fence, kind, step, attempt, at, facts, value, sha256, identity"
_START = f"{_ENTRY}, namespace, name, version, epoch, names, tokens, usd, unsized"
_END = f"{_ENTRY}, spent, tokens, usd, cached"
_HELD = "names, held_tokens, held_usd, held_unsized"

# The key is expected, and not found: it is known before, and who writes for the run knows it.
_NOT_CURRENT = (
    "NOT EXISTS (SELECT 1 FROM leases WHERE id = NEW.fence) OR NEW.key <> 1 +"
    " (SELECT coalesce(max(id), NEW.run << 32) FROM entries"
    " WHERE id BETWEEN (NEW.run << 32) + 1 AND (NEW.run + 1 << 32) - 1)"
)
_ADD_ENTRY = "INSERT INTO entries (id, kind, step, attempt, at, facts, value, payload, sha256, identity) VALUES"
_THIS = "run = NEW.run AND step = NEW.step AND attempt = NEW.attempt"
#: The part of a limit that is warned of next.
_NEXT = "CASE" + "".join(f" WHEN warned < {each} THEN {each}" for each in WARNED_AT) + " END"
_SPEND = "tokens = tokens + NEW.tokens, usd = usd + NEW.usd, cached = cached + NEW.cached, calls = calls + 1"
#: After the update of an account that was not looked at before: it may have been purged.
_OR_REFUSE = "SELECT RAISE(ABORT, 'refused') WHERE changes() = 0;"


class Statement(NamedTuple):
    """A statement, and what has to be defined for it on the connection that executes it."""

    sql: str
    script: str


def _limit_columns(limits: int) -> str:
    return "".join(f", l{n}, t{n}, u{n}" for n in range(limits))


def _statement(view: str, columns: str, body: str) -> Statement:
    names = columns.split(", ")
    script = (
        f"CREATE TEMP VIEW IF NOT EXISTS {view} AS SELECT {', '.join(f'0 AS {name}' for name in names)};\n"
        f"CREATE TEMP TRIGGER IF NOT EXISTS {view}_insert INSTEAD OF INSERT ON {view} BEGIN\n{body}\nEND;"
    )
    sql = f"INSERT INTO {view} ({columns}) VALUES ({', '.join('?' * len(names))})"
    return Statement(sql, script)


@lru_cache(maxsize=_LIMITS)
def _start(limits: int) -> Statement:
    """Return the statement for a start under so many limits."""
    has_room = " AND ".join(
        f"EXISTS (SELECT 1 FROM accounts WHERE id = NEW.l{n}"
        f" AND (NEW.t{n} IS NULL OR tokens + reserved_tokens + max(1, NEW.tokens) <= NEW.t{n})"
        f" AND (NEW.u{n} IS NULL OR usd + reserved_usd + max(1, NEW.usd) <= NEW.u{n})"
        " AND unsized = 0 AND NOT (NEW.unsized AND in_flight))"
        for n in range(limits)
    )
    reserve = "\n".join(
        "UPDATE accounts SET reserved_tokens = reserved_tokens + NEW.tokens,"
        " reserved_usd = reserved_usd + NEW.usd, in_flight = in_flight + 1,"
        f" unsized = unsized + NEW.unsized WHERE id = NEW.l{n};"
        for n in range(limits)
    )
    body = f"""
  SELECT RAISE(ABORT, 'refused') WHERE {_NOT_CURRENT}
    OR NEW.epoch <> (SELECT epoch FROM limit_epoch)
    OR (NEW.namespace IS NOT NULL AND NEW.version <> coalesce(
      (SELECT version FROM documents WHERE namespace = NEW.namespace AND key = NEW.name), 0))
    OR NOT ({has_room});
  {_ADD_ENTRY} (NEW.key, NEW.kind, NEW.step, NEW.attempt, NEW.at, NEW.facts, NEW.value, NULL, NEW.sha256,
    NEW.identity);
  INSERT INTO reservations VALUES (NEW.run, NEW.step, NEW.attempt, NEW.fence, NEW.names, NEW.tokens,
    NEW.usd, NEW.unsized, 0, NEW.at);
  {reserve}"""
    return _statement(f"start_under_{limits}", _START + _limit_columns(limits), body)


@lru_cache(maxsize=_LIMITS * _ACCOUNTS)
def _end(limits: int, others: int) -> Statement:
    """Return the statement for an end that so many limited accounts are charged for, and others."""
    refused = "".join(
        f" OR NOT EXISTS (SELECT 1 FROM accounts WHERE id = NEW.l{n} AND (warned >= {WARNED_AT[-1]} OR ("
        f"(NEW.t{n} IS NULL OR (tokens + NEW.tokens) * 100 < NEW.t{n} * {_NEXT}) AND"
        f" (NEW.u{n} IS NULL OR (usd + NEW.usd) * 100 < NEW.u{n} * {_NEXT}))))"
        for n in range(limits)
    )
    settle = "\n".join(
        f"UPDATE accounts SET {_SPEND}, reserved_tokens = reserved_tokens - NEW.held_tokens, reserved_usd ="
        " reserved_usd - NEW.held_usd, in_flight = in_flight - 1, unsized = unsized - NEW.held_unsized"
        f" WHERE id = NEW.l{n};"
        for n in range(limits)
    )
    charge = "\n".join(
        f"UPDATE accounts SET {_SPEND} WHERE id = NEW.a{n}; {_OR_REFUSE}" for n in range(others)
    )
    release = ""
    if limits:
        release = (
            f"DELETE FROM reservations WHERE {_THIS} AND accounts = NEW.names AND (tokens, usd, unsized, lost)"
            f" = (NEW.held_tokens, NEW.held_usd, NEW.held_unsized, 0); {_OR_REFUSE}"
        )
    body = f"""
  SELECT RAISE(ABORT, 'refused') WHERE {_NOT_CURRENT}{refused};
  {release}
  {settle}
  {charge}
  {_ADD_ENTRY} (NEW.key, 7, NEW.step, NEW.attempt, NEW.at, NEW.spent, NULL, NULL, NULL, NULL),
    (NEW.key + 1, NEW.kind, NEW.step, NEW.attempt, NEW.at, NEW.facts, NEW.value, NULL, NEW.sha256,
    NEW.identity);"""
    columns = _END + (f", {_HELD}" if limits else "") + _limit_columns(limits)
    columns += "".join(f", a{n}" for n in range(others))
    return _statement(f"end_of_{limits}_and_{others}", columns, body)


class Charged(NamedTuple):
    """The rows of the accounts that a call is charged to: those with a limit, and the others."""

    limits: Row
    others: Row


def charged(
    accounts: tuple[str, ...], limits: tuple[Limited, ...], ids: dict[str, int]
) -> Charged | None:
    """Return the rows of accounts; None if one has none, or if there are too many."""
    limited = {account: (tokens, usd) for account, tokens, usd in limits}
    if (
        len(limited) > _LIMITS
        or len(accounts) > _ACCOUNTS
        or not ids.keys() >= {*limited, *accounts}
    ):
        return None
    columns = tuple(
        part for account, amounts in limited.items() for part in (ids[account], *amounts)
    )
    return Charged(columns, tuple(ids[each] for each in accounts if each not in limited))


@lru_cache(maxsize=1_000)
def _reserved(wanted: Reserve) -> Row:
    """Return the columns of what is reserved."""
    names = json.dumps([account for account, _, _ in wanted.limits])
    return (names, wanted.tokens or 0, wanted.usd or 0, wanted.unsized)


_NO_GUARD = (None, None, None)


def start(
    append: Append, key: int, at: int, wanted: Reserve, rows: Charged
) -> tuple[Statement, Row]:
    """Return the statement that records a start and what it reserves, and its bindings."""
    run, (kind, step, attempt, facts, value, _, identity, _) = append.run, append.entries[0]
    data, sha256 = (None, None) if value is None else value
    head = (key, run.run, run.lease.fence, kind, step, attempt, at, facts, data, sha256, identity)
    more = (*(append.guard or _NO_GUARD), wanted.epoch)
    return _start(len(wanted.limits)), (*head, *more, *_reserved(wanted), *rows.limits)


def is_usual_end(entries: Sequence[NewEntry], spent: Settle) -> bool:
    """Return whether one statement can record an end: what it had reserved is known, and nothing learnt."""
    if len(entries) != 2 or not spent.ended or not spent.accounts or spent.estimate is not None:
        return False
    held = spent.held
    return held.limits == spent.limits if held is not None else not (spent.reserved or spent.limits)


def end(append: Append, key: int, at: int, spent: Settle, rows: Charged) -> tuple[Statement, Row]:
    """Return the statement that records what was spent and how an attempt ended, and its bindings."""
    run, (first, last) = append.run, append.entries
    kind, step, attempt, facts, value, _, identity, _ = last
    data, sha256 = (None, None) if value is None else value
    head = (key, run.run, run.lease.fence, kind, step, attempt, at, facts, data, sha256, identity)
    amounts = (first.facts, spent.tokens, spent.usd, spent.cached)
    held = () if spent.held is None else _reserved(spent.held)
    statement = _end(len(spent.limits), len(rows.others))
    return statement, (*head, *amounts, *held, *rows.limits, *rows.others)
