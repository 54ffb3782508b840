"""The contract of a store: what every journal must do, whichever database is under it.

**Runs and entries.** A run is a name and an append-only list of entries: attempts begun and ended
(from which steps are told), saved progress, fields, tasks. Entries of one run are numbered from 1
without gaps. Whoever wants to append holds the run.

**Durability.** ``append(…, sync=True)`` returns when the entries would survive a power cut;
``sync=False`` when they would survive the death of this process. Entries are visible to every
other process as soon as ``append`` returns. A failed write raises ``StoreFailedError``, and the
store refuses everything but ``close`` from then on: after a failed fsync nobody knows what is on
the disk, and opening the store again finds out.

**Holding.** One process at a time holds a run; within a process holding is shared and counted.
A hold is a lease with a fencing number: it ends when its process ends (at once, where the system
can tell), when it expires without being renewed, or when it is given back. Taking over raises the
number; an append made with an older one is refused with ``FencedError``, and only that one, not
the batch it came with. An expired lease that nobody took goes on. Leases live on the store's
clock and time, so that processes with wrong clocks agree.

**Documents.** A value under a namespace and a key. ``update_document`` is atomic over threads and
processes: the function sees the latest value and nobody writes in between; it may be called again
if the transaction has to be. Breakers, budgets and escalations are documents with a type
(``shelves``), in namespaces of their own.

**Feed.** A run's entries are its events: ``entries`` reads on from any number, so that another
process can follow a run, living or dead, without holding it.

**Trust.** What is read is what was written, or ``CorruptionError``. A store written by a newer
version raises ``NewerFormatError`` and is not touched.

Every method may be called from any thread; none is for use in a forked child, which gets
``StoreClosedError``. A child that needs the store is spawned, not forked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from pathlib import Path

    from maestro_hive.kernel.clock import Clock
    from maestro_hive.kernel.errors import FencedError
    from maestro_hive.kernel.hooks import Hooks
    from maestro_hive.maestro.state.codec import Encoded
    from maestro_hive.maestro.state.records import (
        Damage,
        Document,
        Entry,
        Lease,
        NewEntry,
        Notification,
        RunRecord,
        StoredValue,
    )

#: How long a silent holder keeps what it holds.
LEASE_SECONDS = 15.0

Change = Callable[[bytes | None], "Encoded | None"]


@dataclass(slots=True, eq=False)
class RunLease:
    """The right to append to a run, with the number of the last entry in it."""

    run: int
    name: str
    lease: Lease
    seq: int
    users: int = field(default=1)


class Append(NamedTuple):
    """Entries for one run, all or none; ``status`` also becomes the run's in listings."""

    hold: RunLease
    entries: Iterable[NewEntry]
    status: str | None = None


class Store(Protocol):
    """A journal. The module's docstring is the contract; these are its words."""

    clock: Clock
    notifications: Hooks[Notification]

    @property
    def location(self) -> str:
        """Where it is, for people."""
        ...

    @property
    def damage(self) -> tuple[Damage, ...]:
        """What could not be read when the store was opened; also told to ``news``."""
        ...

    def syncs_fast(self) -> bool:
        """Return whether an append is short enough to be made on an event loop."""
        ...

    # --- runs ---

    def acquire_run(self, name: str, workflow: str = "") -> RunLease:
        """Take the run, creating it if it is new; ``RunLeasedError`` if another process has it."""
        ...

    def release_run(self, hold: RunLease) -> None:
        """Give the run back; the last of the users in this process really does."""
        ...

    def run(self, name: str) -> RunRecord | None:
        """Find a run by its name."""
        ...

    def runs(self, status: str | None = None, limit: int | None = None) -> list[RunRecord]:
        """List runs, newest first."""
        ...

    def append(
        self, appends: Sequence[Append], *, sync: bool = True, busy_timeout: float | None = None
    ) -> list[int | FencedError]:
        """Record entries in one transaction; per append, its last number or why it was refused.

        ``StoreBusyError`` if another writer is in the way for longer than ``patience`` seconds (by
        default the store's own): nothing was written, and the same may be tried again.
        """
        ...

    def entries(self, run: int, after: int = 0) -> list[Entry]:
        """Return a run's entries with numbers over ``after``, in order."""
        ...

    def load(self, entry: Entry) -> bytes | None:
        """Return the canonical bytes of an entry's value, checked against their digest."""
        ...

    def values_of(self, run: int) -> Iterator[StoredValue]:
        """Yield a run's large values as they are stored, each after the one it builds on."""
        ...

    def purge_run(self, name: str, first: Callable[[], None] | None = None) -> bool:
        """Forget a run and its entries; False if there is none, ``RunLeasedError`` if it is held.

        ``first`` is called before that, with the run held, so that nobody begins it meanwhile.
        """
        ...

    # --- documents ---

    def document(self, namespace: str, key: str) -> Document | None:
        """Return a document."""
        ...

    def documents(self, namespace: str | None = None) -> list[Document]:
        """Return every document, or those of one namespace, by namespace and key."""
        ...

    def update_document(self, namespace: str, key: str, change: Change) -> Document | None:
        """Replace a document by what ``change`` makes of it (None deletes); durable on return."""
        ...

    def set_documents(self, values: Mapping[tuple[str, str], Encoded | None]) -> None:
        """Set many documents at once, by namespace and key (None deletes): all or none."""
        ...

    def delete_documents(self, namespace: str | None = None) -> int:
        """Delete every document, or those of one namespace; return how many."""
        ...

    # --- leases ---

    def take_lease(self, name: str, seconds: float = LEASE_SECONDS) -> Lease:
        """Become the only one under this name; ``RunLeasedError`` tells who is."""
        ...

    def renew_leases(self) -> None:
        """Extend everything this store holds; done by itself every third of a lease."""
        ...

    def release_lease(self, lease: Lease) -> None:
        """Give a lease back; nothing happens if it was taken over."""
        ...

    def lease(self, name: str) -> Lease | None:
        """Return a lease as it stands, whoever has it; None if it is free."""
        ...

    def run_leases(self) -> dict[str, Lease]:
        """Return who holds which runs, by name: processes that live, also one that is late."""
        ...

    # --- the whole ---

    def collect(self) -> int:
        """Delete values that nothing refers to any more; return how many."""
        ...

    def check(self) -> list[str]:
        """Read everything and return what is wrong with it, in words; empty is good."""
        ...

    def backup(self, target: Path) -> None:
        """Write a copy of the live store to the new folder ``target``."""
        ...

    def close(self) -> None:
        """Give back what is held and close; closing twice is no error."""
        ...
