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
called again if the transaction has to be. It may read the store, and raise, and then nothing is
changed. An append may change a document in its own transaction: an error of ours that the function
raises refuses this append, and the rest of its batch is written. Breakers and rate logs are typed documents
(``shared_records``), in namespaces of their own.

**Budgets.** Accounts count what attempts spent, and limits say how much may be (``budgets``). An append
that records the start of an attempt may reserve what that will spend: in its own transaction settled
and reserved amounts and this one are compared with the limits of all accounts concerned, and where one
leaves no room the append is refused with ``BudgetRefusedError``, or with ``StaleLimitsError`` if the
limits were changed since they were read; the rest of its batch is written. An append that records
spending, or the end of an attempt, settles it in its own transaction. What a process that died had
reserved counts as spent, for a day or until it is released. Setting limits and releasing wake those runs
with the status ``bankrupt`` whose last suspension names an account that this changes, or none; and those
that are executed, when they are released.

**Dispatch.** A run that belongs to workers has a dispatch row until it ends: a queue, and a state
that says what it waits for (``DispatchState``). Taking its lease makes it active; the last user who
releases the lease says when it is due again. Runs without a row belong to their callers. In a queue
runs are taken in the order in which they became due for the first time, a priority counting as so
many minutes earlier; so the ones that wait get ahead of newer ones with a higher priority. Being due
is measured on the clock that cannot be set; after a restart of the machine by wall time, and then it
never takes longer than the whole wait again. A row counts the deaths of the processes that executed
the run. An append of one of ``RESETS_DEATHS`` to it or to a child that it executes resets the count
in its own transaction.

**Events.** A run's entries are its events: ``entries`` continues after any number, so that another
process can follow a run without its lease.

**Streams.** What the steps of a run write is a list of chunks, apart from its entries, numbered
from 1 without gaps. ``append_chunks`` returns when they are visible to every process and would
survive the death of this one; they are durable with the next synced append. Chunks of a run whose
lease is not current are refused. They are deleted with their run.

**Integrity.** What is read is what was written, or ``CorruptionError``. A store written by a newer
version raises ``NewerFormatError`` and is not changed.

Every method may be called from any thread; none may be used in a forked child, which gets
``StoreClosedError``. A child that needs the store is spawned, not forked.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias

if TYPE_CHECKING:
    from datetime import datetime
    from pathlib import Path

    from maestro_hive.kernel.clock import Clock
    from maestro_hive.kernel.errors import FencedError, MaestroError
    from maestro_hive.kernel.hooks import Hooks
    from maestro_hive.maestro.state.budgets import (
        Account,
        Estimate,
        Limits,
        Reservation,
        Reserve,
        RunBudget,
        Settle,
        StoredLimit,
    )
    from maestro_hive.maestro.state.codec import Encoded
    from maestro_hive.maestro.state.records import (
        Chunk,
        Damage,
        Dispatch,
        DispatchState,
        Document,
        Entry,
        Lease,
        NewChunk,
        NewDispatch,
        NewEntry,
        Notification,
        RunRecord,
        StoredValue,
    )

#: How long a lease is valid without being renewed.
LEASE_SECONDS = 15.0

#: Says how workers get a run whose caller died, by its name; None: it is left to its caller.
Adopt: TypeAlias = "Callable[[str], NewDispatch | None]"
Change = Callable[[bytes | None], "Encoded | None"]
#: What came of an append: its entries as they are recorded, or why it was refused.
Outcome: TypeAlias = "list[Entry] | MaestroError"


@dataclass(slots=True, eq=False)
class RunLease:
    """The right to append to a run, with the number of the run's last entry.

    ``created`` is true when the run had no entries before it was acquired. ``users`` counts who
    shares the lease in this process. ``dispatched`` is true while the run has a dispatch row, and
    ``deaths`` are those of that row. ``root`` is the lease of the run at the top of the family, if
    this one is of a child.
    """

    run: int
    name: str
    lease: Lease
    seq: int
    created: bool = False
    users: int = field(default=1)
    dispatched: bool = False
    deaths: int = 0
    root: RunLease | None = None


class NewRun(NamedTuple):
    """A run to create for workers, with its first entries."""

    name: str
    workflow: str
    entries: Sequence[NewEntry]
    status: str
    dispatch: NewDispatch
    parent: str | None = None


class DocumentGuard(NamedTuple):
    """The version that a document must have for an append to be accepted; 0: it does not exist."""

    namespace: str
    key: str
    version: int


class DocumentChange(NamedTuple):
    """A change of a document that is made with an append, in the same transaction.

    ``wake`` names a run that is woken with it.
    """

    namespace: str
    key: str
    change: Change
    wake: str | None = None


class Append(NamedTuple):
    """Entries for one run, and the change of a document: all or none.

    ``status`` becomes the run's status in listings. ``release`` gives the run's lease back in the
    same transaction, as ``release_run`` with ``due`` would after it; a refused append releases
    nothing. ``dispatch`` gives the run to workers from then on, if it has no dispatch row: active
    while the lease is held, and with ``release`` due as it says. A status that is over deletes the
    row. ``budget`` is what an attempt reserves with its start, which is the last of the entries; or
    what it spent; or what a copy of the run has, which is restored.
    """

    run: RunLease
    entries: Sequence[NewEntry]
    status: str | None = None
    guard: DocumentGuard | None = None
    release: bool = False
    change: DocumentChange | None = None
    dispatch: NewDispatch | None = None
    due: float | None = 0.0
    budget: Reserve | Settle | RunBudget | None = None


class ChunkAppend(NamedTuple):
    """Chunks for the stream of one run: all or none."""

    run: RunLease
    chunks: Sequence[NewChunk]


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
        self,
        *,
        status: str | None = None,
        workflow: str | None = None,
        limit: int | None = None,
        roots: bool = False,
    ) -> list[RunRecord]:
        """List runs, newest first, with this recorded status and of this workflow.

        With ``roots`` only those that no other run started as its child.
        """

    def count_runs(
        self, *, status: str | None = None, workflow: str | None = None, roots: bool = False
    ) -> int:
        """Return how many runs ``runs`` would list without a limit."""

    def status_counts(self, *, roots: bool = False) -> dict[str, int]:
        """Return how many runs have each recorded status, without zeros; ``roots`` as in ``runs``."""

    def last_change(self, run: RunRecord) -> datetime:
        """Return when something was last recorded of a run."""

    def entries(self, run: int, after: int = 0, up_to: int | None = None) -> list[Entry]:
        """Return a run's entries with numbers over ``after``, and not over ``up_to``, in order."""

    def load(self, entry: Entry) -> bytes | None:
        """Return the canonical bytes of an entry's value, checked against their digest."""

    def values_of(self, run: int) -> Iterator[StoredValue]:
        """Yield a run's large values as they are stored, each after the one it builds on."""

    # --- streams ---

    def chunks(self, run: int, after: int = 0, limit: int | None = None) -> list[Chunk]:
        """Return chunks of a run with numbers over ``after``, in order, so many at most."""

    def last_chunk(self, run: int) -> int:
        """Return the number of a run's last chunk; 0 if it has none."""

    # --- dispatch ---

    def dispatch(self, name: str) -> Dispatch | None:
        """Return what a run waits for; None if it does not belong to workers, or has ended."""

    def dispatches(
        self,
        *,
        queue: str | None = None,
        state: DispatchState | None = None,
        limit: int | None = None,
    ) -> list[Dispatch]:
        """List unfinished runs that belong to workers, in the order in which they are taken."""

    def dispatch_counts(self) -> dict[tuple[str, DispatchState], int]:
        """Return how many unfinished runs each queue has in each state, without zeros."""

    def ready_queues(self) -> list[str]:
        """Return the queues that have ready runs, of whatever workflow; costs next to nothing.

        Runs that have become due since the last claim, in whatever queue, may be missing.
        """

    def has_ready(
        self, *, queue: str, workflows: Collection[str], version: str | None = None
    ) -> bool:
        """Return whether claiming a run of a queue would take one; runs that have become due may count."""

    def seconds_to_next(self) -> float | None:
        """Return when a worker may have something to take: 0 if now, None if nothing is scheduled.

        Costs next to nothing: made to be asked many times a second.
        """

    # --- budgets ---

    def limits(self, concerning: Collection[str] | None = None) -> Limits:
        """Return all limits; of accounts, their own and those of each of a kind, in the time of these."""

    def account(self, account: str) -> Account:
        """Return an account; one that nothing was spent of is empty."""

    def accounts(self, scope: str | None = None) -> list[Account]:
        """Return the accounts that something was spent or reserved of, by name."""

    def reservations(self) -> list[Reservation]:
        """Return what is reserved, by run, step and attempt."""

    def estimate(self, persona: str, step: str) -> Estimate | None:
        """Return what a call of a persona's step is expected to spend; None if that is not known."""

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
        """Release every lease, but for those retained, and close; closing twice is no error."""


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
        *,
        dispatch: NewDispatch | None = None,
        parent: str | None = None,
        budget: RunBudget | None = None,
        sync: bool = False,
    ) -> RunLease:
        """Take the run's lease, creating the run if it is new.

        ``RunLeasedError`` if another process holds it. If the run has no entries yet, ``entries``
        are appended, ``status`` is set, ``budget`` is restored and ``dispatch`` gives it to workers,
        active at once, in the same transaction; otherwise these are ignored. ``parent`` is recorded of a new run. With
        ``sync`` all that is durable on return. ``StoreBusyError`` if it takes longer than
        ``busy_timeout`` seconds: call it again from a thread that may wait.
        """

    def release_run(self, run: RunLease, due: float | None = 0.0) -> None:
        """Release the run's lease, if this was its last user in this process.

        If it belongs to workers, it is due in so many seconds (None: when it is woken), or at once
        if it was woken since its lease was taken.
        """

    def create_runs(self, runs: Sequence[NewRun]) -> list[bool]:
        """Record new runs for workers in one transaction; durable on return.

        Per run, whether it is new: one that has entries, or whose lease a living process holds, is
        left as it is.
        """

    def append(
        self, appends: Sequence[Append], *, sync: bool = True, busy_timeout: float | None = None
    ) -> list[Outcome]:
        """Record entries in one transaction; per append, its entries or why it was refused.

        ``StoreBusyError`` if another writer blocks it for longer than ``busy_timeout`` seconds
        (by default the store's own): nothing was written, and the same may be tried again.
        """

    def append_chunks(
        self, appends: Sequence[ChunkAppend], *, busy_timeout: float | None = None
    ) -> list[FencedError | None]:
        """Add chunks in one transaction, without a sync; per append, why it was refused, or None.

        ``StoreBusyError`` as of ``append``.
        """

    def purge_runs(
        self,
        names: Sequence[str],
        first: Callable[[], None] | None = None,
        documents: Sequence[tuple[str, str]] = (),
    ) -> int:
        """Delete runs, their entries and streams in one transaction; return how many of them there were.

        ``RunLeasedError`` if one of them is held: then none is deleted. ``first`` is called before
        that, under the leases of all, so that no process starts them. ``documents``, by namespace
        and key, are deleted with them.
        """

    # --- dispatch ---

    def claim_runs(
        self,
        *,
        queue: str,
        workflows: Collection[str],
        version: str | None = None,
        limit: int = 1,
    ) -> list[RunLease]:
        """Take the leases of up to ``limit`` runs of a queue that are due, first come first.

        Of these workflows, and that ask for no version or for this one.
        """

    def recover_runs(self, adopt: Adopt) -> list[str]:
        """Let workers take active runs that nobody executes any more; return their names.

        Those whose process died get one more death, and their leases are deleted. ``adopt`` is asked
        about each run without a dispatch row whose process died: what it returns makes it one, with
        one death. It is asked again each time, before anything is written, and may read the store.
        """

    def wake_run(self, name: str) -> bool:
        """Make a run that belongs to workers due now; return whether that changes anything.

        Durable on return. An active one is due again when its lease is released.
        """

    # --- budgets ---

    def set_limits(
        self,
        change: Callable[[Limits], Iterable[StoredLimit]],
        concerning: Collection[str] | None = None,
    ) -> list[StoredLimit]:
        """Set those limits that ``change`` makes of those that there are, in one transaction; durable.

        It is given what ``limits`` returns. Runs that one of them has made bankrupt are woken.
        ``change`` may be called again if the transaction has to be, and may
        raise: then nothing is changed.
        """

    def recover_reservations(self) -> int:
        """Note which reservations are of processes that died, and release those that did a day ago.

        Return how many there were.
        """

    def release_reservations(self, account: str | None = None) -> list[Reservation]:
        """Release what processes that died had reserved, of one account or of all; wake runs. Durable."""

    # --- documents ---

    def update_document(
        self, namespace: str, key: str, change: Change, wake: str | None = None
    ) -> Document | None:
        """Replace a document by the result of ``change`` (None deletes); durable on return.

        The run that ``wake`` names is woken in the same transaction, as ``wake_run`` does.
        """

    def set_documents(self, values: Mapping[tuple[str, str], Encoded | None]) -> None:
        """Set many documents at once, by namespace and key (None deletes): all or none."""

    def delete_documents(self, namespace: str | None = None) -> int:
        """Delete every document, or those of one namespace; return how many."""

    # --- leases ---

    def take_lease(self, name: str, seconds: float = LEASE_SECONDS) -> Lease:
        """Take a lease; ``RunLeasedError`` names its holder if another one has it."""

    def renew_leases(self) -> None:
        """Extend every lease this store holds; called in the background at a third of a lease."""

    def retain_lease(self, lease: Lease) -> None:
        """Let closing this store not release a lease: what it stands for goes on in this process.

        While the store is open it is renewed, and may be released; after that it ends when it
        expires, or with the process.
        """

    def release_lease(self, lease: Lease) -> None:
        """Release a lease; nothing happens if it was taken over."""

    # --- the whole journal ---

    def collect(self) -> int:
        """Delete values that no entry refers to; return how many."""

    def empty_log(self) -> bool:
        """Leave nothing in the log, so that purged data is gone; False if a reader uses it."""

    def backup(self, target: Path) -> None:
        """Write a copy of the live store to the new folder ``target``."""
