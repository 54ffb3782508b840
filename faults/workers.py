"""Worker processes of rows 5 and 6 on one shared folder; they exchange lines of JSON.

``python -m faults.workers ROLE FOLDER NUMBER`` sends "ready", waits for a line, and starts.
"""

from __future__ import annotations

import dataclasses
import json
import select
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from faults.strace import ROOT
from maestro_hive.kernel.errors import FencedError, MaestroError, RunLeasedError
from maestro_hive.maestro.state import codec
from maestro_hive.maestro.state.records import Breaker, EntryKind, NewEntry
from maestro_hive.maestro.state.shared_records import BREAKERS, SharedRecords
from maestro_hive.maestro.state.sqlite.store import SqliteStore
from maestro_hive.maestro.state.state_manager import StateManager
from maestro_hive.maestro.state.store import Append

if TYPE_CHECKING:
    from collections.abc import Callable

    from maestro_hive.maestro.state.store import RunLease


#: The lease of a run in row 6.
LEASE_SECONDS = 0.25
_MOST_APPENDS = 100_000


#: Counts of tokens, by name.
TOKENS = SharedRecords("tokens", int, int)


def send(**facts: Any) -> None:
    """Send a line to the process that started this one."""
    sys.stdout.write(json.dumps(facts) + "\n")
    sys.stdout.flush()


def update(folder: Path, number: int) -> None:
    """Update one key, one breaker and one count of tokens, ``number`` times each."""
    values = StateManager(persistence_dir=folder, auto_persist=True)
    store = values.store
    longest, errors = 0.0, []
    send(ready=True)
    sys.stdin.readline()
    for _ in range(number):
        started = time.perf_counter()
        try:
            values.update_state("total", lambda before: (before or 0) + 1)
            BREAKERS.update(store, "anthropic", _one_more_failure)
            TOKENS.update(store, "shared", lambda before: (before or 0) + 3)
        except MaestroError as error:
            errors.append(f"{type(error).__name__}: {error}")
        longest = max(longest, time.perf_counter() - started)
    values.shutdown()
    send(longest=longest, errors=errors[:3], count=len(errors))


def _one_more_failure(before: Breaker | None) -> Breaker:
    known = before or Breaker(name="anthropic")
    return dataclasses.replace(known, consecutive_failures=known.consecutive_failures + 1)


def stale(folder: Path, rounds: int) -> None:
    """Lease a run per round and append to it until another process has it."""
    store = SqliteStore(folder, lease_seconds=LEASE_SECONDS, busy_seconds=10)
    send(ready=True)
    for number in range(rounds):
        sys.stdin.readline()
        hold = store.acquire_run(f"round-{number}")
        send(held=number, fence=hold.lease.fence)
        send(**_append_until_refused(store, hold))
    store.close()


def _append_until_refused(store: SqliteStore, hold: RunLease) -> dict[str, Any]:
    entry = NewEntry(EntryKind.SPENT, value=codec.encode({"by": "stale holder"}))
    for done in range(_MOST_APPENDS):
        try:
            (refused,) = store.append([Append(hold, [entry])], sync=done % 8 == 0)
        except MaestroError as error:
            return {"error": f"{type(error).__name__}: {error}", "appended": done}
        if isinstance(refused, FencedError):
            return {"fenced": refused.fence, "current": refused.current, "appended": done}
        time.sleep(0.0003)  # as long as a short step works
    return {"error": "no append was refused", "appended": _MOST_APPENDS}


def holder(folder: Path, _number: int) -> None:
    """Lease a run until this process ends."""
    store = SqliteStore(folder)
    store.acquire_run("held")
    send(ready=True)
    sys.stdin.readline()


def opener(folder: Path, _number: int) -> None:
    """Try to lease the run that another process holds."""
    store = SqliteStore(folder)
    send(ready=True)
    sys.stdin.readline()
    started = time.perf_counter()
    try:
        hold = store.acquire_run("held")
        send(fence=hold.lease.fence, seconds=time.perf_counter() - started)
    except RunLeasedError as error:
        send(host=error.host, pid=error.pid, since=error.since.isoformat())
    store.close()


_ROLES: dict[str, Callable[[Path, int], None]] = {
    "update": update,
    "stale": stale,
    "holder": holder,
    "opener": opener,
}


class NoAnswerError(Exception):
    """A worker did not answer in time, or ended."""


class Worker:
    """One process of this module; leaving the context kills it."""

    def __init__(self, role: str, folder: Path, number: int = 0) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "faults.workers", role, str(folder), str(number)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
        )
        self._rest = b""

    def start(self) -> None:
        """Let it start its work."""
        assert self.process.stdin is not None
        self.process.stdin.write(b"go\n")

    def receive(self, seconds: float) -> dict[str, Any]:
        """Return the next line that it sends."""
        assert self.process.stdout is not None
        while b"\n" not in self._rest:
            ready, _, _ = select.select([self.process.stdout], [], [], seconds)
            more = self.process.stdout.read(65536) if ready else b""
            if not more:
                raise NoAnswerError(f"a worker sent nothing for {seconds:g} s: {self._stderr()}")
            self._rest += more
        line, _, self._rest = self._rest.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _stderr(self) -> str:
        self.process.kill()
        _, errors = self.process.communicate()
        return errors.decode(errors="replace")[-400:]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()


if __name__ == "__main__":
    _ROLES[sys.argv[1]](Path(sys.argv[2]), int(sys.argv[3]))
