"""The processes that rows 5 and 6 set upon one folder; they speak in lines of JSON.

``python -m faults.workers ROLE FOLDER NUMBER`` says "ready", waits for a line, and begins.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from maestro_hive.kernel.errors import FencedError, MaestroError, RunLeasedError
from maestro_hive.maestro.state import codec
from maestro_hive.maestro.state import shared_records as shelves
from maestro_hive.maestro.state.records import Breaker, Budget, EntryKind, NewEntry
from maestro_hive.maestro.state.sqlite.store import SqliteStore
from maestro_hive.maestro.state.state_manager import StateManager
from maestro_hive.maestro.state.store import Append

if TYPE_CHECKING:
    from collections.abc import Callable

    from maestro_hive.maestro.state.store import RunLease

#: What row 6 gives a silent holder.
LEASE_SECONDS = 0.25
_MOST_APPENDS = 100_000


def say(**facts: Any) -> None:
    """Tell whoever started this process."""
    sys.stdout.write(json.dumps(facts) + "\n")
    sys.stdout.flush()


def crowd(folder: Path, number: int) -> None:
    """Update one key, one breaker and one budget, ``number`` times each."""
    values = StateManager(persistence_dir=folder, auto_persist=True)
    breakers, budgets = shelves.breakers(values.store), shelves.budgets(values.store)
    longest, errors = 0.0, []
    say(ready=True)
    sys.stdin.readline()
    for _ in range(number):
        started = time.perf_counter()
        try:
            values.update_state("total", lambda before: (before or 0) + 1)
            breakers.update("anthropic", _one_more_failure)
            budgets.update("shared", _three_more_tokens)
        except MaestroError as error:
            errors.append(f"{type(error).__name__}: {error}")
        longest = max(longest, time.perf_counter() - started)
    values.shutdown()
    say(longest=longest, errors=errors[:3], count=len(errors))


def _one_more_failure(before: Breaker | None) -> Breaker:
    known = before or Breaker(name="anthropic")
    return dataclasses.replace(known, consecutive_failures=known.consecutive_failures + 1)


def _three_more_tokens(before: Budget | None) -> Budget:
    known = before or Budget(name="shared")
    return dataclasses.replace(known, tokens=known.tokens + 3)


def zombie(folder: Path, rounds: int) -> None:
    """Hold a run per round and append to it until somebody else has it."""
    store = SqliteStore(folder, lease_seconds=LEASE_SECONDS, busy_seconds=10)
    say(ready=True)
    for number in range(rounds):
        sys.stdin.readline()
        hold = store.acquire_run(f"round-{number}")
        say(held=number, fence=hold.lease.fence)
        say(**_append_until_refused(store, hold))
    store.close()


def _append_until_refused(store: SqliteStore, hold: RunLease) -> dict[str, Any]:
    entry = NewEntry(EntryKind.SPENT, value=codec.encode({"by": "zombie"}))
    for done in range(_MOST_APPENDS):
        try:
            (refused,) = store.append([Append(hold, [entry])], sync=done % 8 == 0)
        except MaestroError as error:
            return {"error": f"{type(error).__name__}: {error}", "appended": done}
        if isinstance(refused, FencedError):
            return {"fenced": refused.fence, "current": refused.current, "appended": done}
        time.sleep(0.0003)  # as a step's own work would
    return {"error": "it was never refused", "appended": _MOST_APPENDS}


def holder(folder: Path, _number: int) -> None:
    """Hold a run for as long as this process is left alive."""
    store = SqliteStore(folder)
    store.acquire_run("held")
    say(ready=True)
    sys.stdin.readline()


def opener(folder: Path, _number: int) -> None:
    """Try to take the run that another process holds."""
    store = SqliteStore(folder)
    say(ready=True)
    sys.stdin.readline()
    started = time.perf_counter()
    try:
        hold = store.acquire_run("held")
        say(fence=hold.lease.fence, seconds=time.perf_counter() - started)
    except RunLeasedError as error:
        say(host=error.host, pid=error.pid, since=error.since.isoformat())
    store.close()


_ROLES: dict[str, Callable[[Path, int], None]] = {
    "crowd": crowd,
    "zombie": zombie,
    "holder": holder,
    "opener": opener,
}

if __name__ == "__main__":
    _ROLES[sys.argv[1]](Path(sys.argv[2]), int(sys.argv[3]))
