"""The contract of a store: what every journal promises, whichever database is under it.

``Reader`` reads a journal, ``Store`` also writes it.

**Runs and entries.** A run is a name and an append-only list of entries: attempts that started and
ended, saved progress, fields, tasks. The entries of one run are numbered from 1 without gaps. To
append to a run, a process holds its lease.

**Durability.** ``append(…, sync=True)`` returns when the entries would survive a power cut;
``sync=False`` when they would survive the death of this process. Entries are visible to every
other process as soon as ``append`` returns. A failed write raises ``StoreFailedError``, and the
store then refuses everything but ``close``: after a failed fsync the content of the disk is
unknown until the store is opened again. Taking and releasing leases is not synced: the first
synced append covers it, and after a power cut an unsynced lease is free, as its process is dead.

**Leases and fencing.** At most one process holds a lease; within a process a run's lease is shared
and counted. Every acquisition gets a fencing number (the epoch) that is higher than all fencing
numbers this store gave out before under the same name. A lease ends when its process ends (at
once, where that can be detected), when it expires without being renewed and another process takes
it, or when it is released. Every append checks, in its own transaction, that its lease is still
the current one; otherwise it is refused with ``FencedError``; the rest of its batch is written.
An expired lease that no process took stays valid. Leases use the store's clock, so that processes
with wrong clocks agree.

**Guards.** An append may name a document and the version it expects. If the document has another
version in that transaction, the append is refused with ``StaleDocumentError``; the rest of its
batch is written.

**Documents.** A value under a namespace and a key. ``update_document`` is atomic over threads and
processes: the function receives the latest value and no other write comes in between; it may be
called again if the transaction has to be. Breakers and budgets are typed documents
(``shared_records``), in namespaces of their own.

**Events.** A run's entries are its events: ``entries`` continues after any number, so that another
process can follow a run without its lease.

**Integrity.** What is read is what was written, or ``CorruptionError``. A store written by a newer
version raises ``NewerFormatError`` and is not changed.

Every method may be called from any thread; none may be used in a forked child, which gets
``StoreClosedError``. A child that needs the store is spawned, not forked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from datetime import datetime
    from pathlib import Path

    from maestro_hive.kernel.clock import Clock
    from maestro_hive.kernel.errors import FencedError, StaleDocumentError
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

#: How long a lease is valid without being renewed.
LEASE_SECONDS = 15.0

Change = Callable[[bytes | None], "Encoded | None"]


@dataclass(slots=True, eq=False)
class RunLease:
    """The right to append to a run, with the number of the run's last entry.

    ``created`` is true when the run had no entries before it was acquired. ``users`` counts who
    shares the lease in this process.
    """

    run: int
    name: str
    lease: Lease
    seq: int
    created: bool = False
    users: int = field(default=1)


class DocumentGuard(NamedTuple):
    """The version that a document must have for an append to be accepted; 0: it does not exist."""

    namespace: str
    key: str
    version: int


class Append(NamedTuple):
    """Entries for one run, all or none.

    ``status`` becomes the run's status in listings. ``release`` gives the run's lease back in the
    same transaction, as ``release_run`` would after it; a refused append releases nothing.
    """

    run: RunLease
    entries: Sequence[NewEntry]
    status: str | None = None
    guard: DocumentGuard | None = None
    release: bool = False


class Reader(Protocol):
    """A journal opened for reading. The module's docstring is the contract."""

    clock: Clock

    @property
    def location(self) -> str:
        """Where the journal is, as shown to people."""

    @property
    def format(self) -> int:
        """The format in which the journal is stored; 0 if it is not stored."""

    @property
    def damage(self) -> tuple[Damage, ...]:
        """What could not be read when the journal was opened."""

    @property
    def partial(self) -> str | None:
        """Why this reader does not see everything that is recorded; None if it does."""

    # --- runs ---

    def run(self, name: str) -> RunRecord | None:
        """Find a run by its name."""

    def runs(
        self, *, status: str | None = None, workflow: str | None = None, limit: int | None = None
    ) -> list[RunRecord]:
        """List runs, newest first, with this recorded status and of this workflow."""

    def count_runs(self, *, status: str | None = None, workflow: str | None = None) -> int:
        """Return how many runs ``runs`` would list without a limit."""

    def last_change(self, run: RunRecord) -> datetime:
        """Return when something was last recorded of a run."""

    def entries(self, run: int, after: int = 0) -> list[Entry]:
        """Return a run's entries with numbers over ``after``, in order."""

    def load(self, entry: Entry) -> bytes | None:
        """Return the canonical bytes of an entry's value, checked against their digest."""

    def values_of(self, run: int) -> Iterator[StoredValue]:
        """Yield a run's large values as they are stored, each after the one it builds on."""

    # --- documents ---

    def document(self, namespace: str, key: str) -> Document | None:
        """Return a document."""

    def documents(self, namespace: str | None = None) -> list[Document]:
        """Return every document, or those of one namespace, by namespace and key."""

    # --- leases ---

    def lease(self, name: str) -> Lease | None:
        """Return a lease that was not released, whether or not its holder lives."""

    def leases(self) -> list[Lease]:
        """Return every lease that was not released, by name."""

    def is_alive(self, lease: Lease) -> bool:
        """Return whether the process that holds a lease lives."""

    def run_leases(self) -> dict[str, Lease]:
        """Return the leases of runs whose holders live, expired or not, by the run's name."""

    # --- the whole journal ---

    def unused_values(self) -> tuple[int, int]:
        """Return how many stored values no entry refers to, and their bytes."""

    def check(self) -> list[str]:
        """Read everything and return a description of each thing that is wrong."""

    def close(self) -> None:
        """Release every lease and close; closing twice is no error."""


class Store(Reader, Protocol):
    """A journal opened for writing. The module's docstring is the contract."""

    notifications: Hooks[Notification]

    @property
    def usable(self) -> bool:
        """False once it failed, was closed or was inherited by a fork: open another one."""

    def syncs_fast(self) -> bool:
        """Return whether an append is short enough to be made on an event loop."""

    # --- runs ---

    def acquire_run(
        self,
        name: str,
        workflow: str = "",
        entries: Sequence[NewEntry] = (),
        status: str | None = None,
        busy_timeout: float | None = None,
    ) -> RunLease:
        """Take the run's lease, creating the run if it is new.

        ``RunLeasedError`` if another process holds it. If the run has no entries yet, ``entries``
        are appended and ``status`` is set in the same transaction; otherwise both are ignored.
        ``StoreBusyError`` if that takes longer than ``busy_timeout`` seconds: call it again from a
        thread that may wait.
        """

    def release_run(self, run: RunLease) -> None:
        """Release the run's lease, if this was its last user in this process."""

    def append(
        self, appends: Sequence[Append], *, sync: bool = True, busy_timeout: float | None = None
    ) -> list[int | FencedError | StaleDocumentError]:
        """Record entries in one transaction; per append, its last number or why it was refused.

        ``StoreBusyError`` if another writer blocks it for longer than ``busy_timeout`` seconds
        (by default the store's own): nothing was written, and the same may be tried again.
        """

    def purge_run(self, name: str, first: Callable[[], None] | None = None) -> bool:
        """Delete a run and its entries; False if there is none, ``RunLeasedError`` if it is held.

        ``first`` is called before that, under the run's lease, so that no process starts it.
        """

    # --- documents ---

    def update_document(self, namespace: str, key: str, change: Change) -> Document | None:
        """Replace a document by the result of ``change`` (None deletes); durable on return."""

    def set_documents(self, values: Mapping[tuple[str, str], Encoded | None]) -> None:
        """Set many documents at once, by namespace and key (None deletes): all or none."""

    def delete_documents(self, namespace: str | None = None) -> int:
        """Delete every document, or those of one namespace; return how many."""

    # --- leases ---

    def take_lease(self, name: str, seconds: float = LEASE_SECONDS) -> Lease:
        """Take a lease; ``RunLeasedError`` names its holder if another one has it."""

    def renew_leases(self) -> None:
        """Extend every lease this store holds; called in the background at a third of a lease."""

    def release_lease(self, lease: Lease) -> None:
        """Release a lease; nothing happens if it was taken over."""

    # --- the whole journal ---

    def collect(self) -> int:
        """Delete values that no entry refers to; return how many."""

    def empty_log(self) -> bool:
        """Leave nothing in the log, so that purged data is gone; False if a reader uses it."""

    def backup(self, target: Path) -> None:
        """Write a copy of the live store to the new folder ``target``."""
