"""The stores that must keep the contract. Another one joins by another class in ``EVERY_STORE``."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from maestro_hive.maestro.state.codec import encode
from maestro_hive.maestro.state.records import EntryKind, NewEntry
from maestro_hive.maestro.state.sqlite.store import SqliteStore
from maestro_hive.maestro.state.store import Append
from maestro_hive.testing import ManualClock, MemoryStore
from tests.python_processes import PythonProcess

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from maestro_hive.maestro.state.records import Entry
    from maestro_hive.maestro.state.store import RunLease, Store

#: So long that no store renews by itself, by real time, while a test moves the clock by hand.
LEASE = 3000.0


class Process(Protocol):
    """Another process that holds a run."""

    pid: int

    def kill(self) -> None:
        """End it as ``kill -9`` does."""
        ...


class Stores(Protocol):
    """Stores on the same data: each plays another process."""

    clock: ManualClock

    def open(self) -> Store:
        """Open one more."""
        ...

    def process_holding(self, run: str, tasks: int = 0) -> Process:
        """Start a process that holds the run, having appended so many tasks without a sync."""
        ...

    def close(self) -> None:
        """End all of them."""
        ...


_CHILD = """
import sys
from pathlib import Path
from maestro_hive.maestro.state.sqlite.store import SqliteStore
from maestro_hive.testing import ManualClock
from tests.contract.stores import add_tasks
store = SqliteStore(Path(sys.argv[1]), clock=ManualClock(), lease_seconds=float(sys.argv[2]))
hold = store.acquire_run(sys.argv[3])
add_tasks(store, hold, int(sys.argv[4]), sync=False)
print("ready", flush=True)
sys.stdin.read()
"""


class _Child:
    def __init__(self, folder: Path, run: str, tasks: int) -> None:
        self._process = PythonProcess(_CHILD, folder, LEASE, run, tasks)
        self.pid = self._process.pid
        assert self._process.stdout.readline() == "ready\n"

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()


class SqliteStores:
    """Stores in one folder; the other process is a real one."""

    def __init__(self, folder: Path) -> None:
        self.clock = ManualClock()
        self._folder = folder / "state"
        self._opened: list[SqliteStore] = []
        self._children: list[_Child] = []

    def open(self) -> SqliteStore:
        store = SqliteStore(self._folder, clock=self.clock, lease_seconds=LEASE)
        self._opened.append(store)
        return store

    def process_holding(self, run: str, tasks: int = 0) -> _Child:
        child = _Child(self._folder, run, tasks)
        self._children.append(child)
        return child

    def close(self) -> None:
        for child in self._children:
            child.kill()
        for store in self._opened:
            store.close()


class _Pretended:
    def __init__(self, store: MemoryStore) -> None:
        self.pid = os.getpid()
        self.kill = store.abandon


class MemoryStores:
    """Stores that share their data."""

    def __init__(self, folder: Path) -> None:
        self.clock = ManualClock()
        self._first: MemoryStore | None = None

    def open(self) -> MemoryStore:
        store = MemoryStore(clock=self.clock, lease_seconds=LEASE, shared_with=self._first)
        self._first = self._first or store
        return store

    def process_holding(self, run: str, tasks: int = 0) -> _Pretended:
        store = self.open()
        add_tasks(store, store.acquire_run(run), tasks, sync=False)
        return _Pretended(store)

    def close(self) -> None:
        pass


EVERY_STORE: tuple[type[Stores], ...] = (SqliteStores, MemoryStores)


# --- words that the tests share ---------------------------------------------------------------


def task(name: object, value: Any = None, family: str = "") -> NewEntry:
    """Return an entry to append."""
    return NewEntry(
        EntryKind.TASK_COMPLETED,
        facts=encode({"task": str(name)}).data,
        value=None if value is None else encode(value),
        family=family,
    )


class Made(Sequence[NewEntry]):
    """Entries that are made one by one, when they are read."""

    def __init__(self, items: Sequence[Any], make: Callable[[Any], NewEntry]) -> None:
        self._items = items
        self._make = make

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index: Any) -> Any:
        return self._make(self._items[index])


def add_tasks(store: Store, hold: RunLease, count: int, *, sync: bool = True) -> None:
    """Append so many entries, one by one."""
    for _ in range(count):
        (written,) = store.append([Append(hold, [task(hold.seq + 1)])], sync=sync)
        assert written == store.entries(hold.run, after=hold.seq - 1)


def tasks(entries: list[Entry]) -> list[str]:
    """Return what ``task`` named."""
    found = []
    for entry in entries:
        assert entry.facts is not None
        found.append(entry.facts.decode().split('"')[3])
    return found


def numbers(entries: list[Entry]) -> list[int]:
    """Return the entries' numbers within their run."""
    return [entry.seq for entry in entries]
