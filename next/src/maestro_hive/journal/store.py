"""What a journal promises, over any ``Database``: runs, entries, queue, messages, documents.

Everything that is written goes through ``Store.write``: operations of one transaction, each of
which succeeds or is refused by itself. Entries alone are one statement that checks the lease.
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

from msgspec import UNSET, Raw

from maestro_hive.journal import entries as kinds
from maestro_hive.journal import sql as texts
from maestro_hive.journal.database import Holder
from maestro_hive.journal.effects import ENDED, Change, Effect, Release, Scope, wake
from maestro_hive.journal.entries import value_text
from maestro_hive.journal.payloads import START, Payloads, reference_of
from maestro_hive.journal.payloads import Row as Payload
from maestro_hive.journal.redacted_entries import without_secrets
from maestro_hive.journal.values import LARGE_BYTES
from maestro_hive.kernel.errors import (
    ConfigurationError,
    CorruptionError,
    FencedError,
    MaestroError,
    RefusedError,
    RunLeasedError,
    RunMismatchError,
    StaleDocumentError,
    StorageError,
    UnknownRunError,
    ValueCorruptError,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from maestro_hive.journal.database import Database, Row, Transaction
    from maestro_hive.journal.entries import Entry, RunStarted, Value

BITS = 32
MASK = (1 << BITS) - 1
#: How long a run stays held by a process that does not renew its leases.
LEASE_SECONDS = 15.0
#: Where runs wait for workers that no other queue is given for.
DEFAULT_QUEUE = "default"
_URLS = ("postgres://", "postgresql://")
#: The conditions of lists for statuses that are not shown as they are stored.
_SHOWN = {"running": "IS_RUNNING", "waiting": "IS_WAITING"}
#: More entries in one transaction are written one by one.
_MOST_ROWS = 128
#: A new transaction for a document that others change at the same time.
_MOST_CHANGES = 1000


class RunLease:
    """The right to append to a run, and the number of its last entry."""

    __slots__ = (
        "deaths",
        "fence",
        "first",
        "name",
        "number",
        "payloads",
        "queue",
        "seq",
        "status",
    )

    def __init__(
        self,
        number: int,
        name: str,
        fence: int,
        seq: int,
        status: str = "running",
        deaths: int = 0,
        queue: str | None = None,
    ) -> None:
        self.number, self.name, self.fence, self.seq = number, name, fence, seq
        #: The queue of the workers that continue it; None: its caller resumes it.
        self.queue = queue
        #: The status that the run had before it was taken.
        self.status = status
        #: How many processes have died while they held the run.
        self.deaths = deaths
        #: The entry of a run that is new: it need not be read back.
        self.first: Entry | None = None
        #: The large values of the run, once it has some.
        self.payloads: Payloads | None = None


#: The lease of effects that belong to no run.
_NO_RUN = RunLease(0, "", 0, 0)


class RunRow(NamedTuple):
    """A run, as lists show it."""

    number: int
    run_id: str
    workflow: str
    parent: str | None
    status: str
    waits_for: str | None
    queue: str | None
    version: str | None
    priority: int
    due: float | None
    deaths: int
    holder: str | None
    fence: int
    expires: float
    created_at: float
    updated_at: float

    @property
    def shown_status(self) -> str:
        """Return the status for people: a run that only waits is waiting, in memory or not."""
        return "waiting" if self.status == "running" and self.waits_for else self.status


class RunFilter(NamedTuple):
    """Which runs a list shows."""

    status: str | None = None
    workflow: str | None = None
    #: Without the runs that other runs called.
    roots: bool = False
    #: Only runs that are older than this one, by number: the next page.
    before: int = 1 << 31


class Enqueued(NamedTuple):
    """A run for workers."""

    name: str
    first: RunStarted
    queue: str
    due: float = 0.0
    priority: int = 0
    version: str | None = None


class Window(Protocol):
    """How many runs of a queue may start in a time, by a text about the recent starts."""

    def room(self, starts: str, now: float, most: int) -> int:
        """Return how many may start now, at most ``most``."""

    def counted(self, starts: str, now: float, count: int) -> str:
        """Return the text after some more starts."""


class Message(NamedTuple):
    """A message from another process to a run."""

    number: int
    run_id: str
    kind: str
    target: str
    data: bytes


class Chunk(NamedTuple):
    """A part of what a step wrote, encoded."""

    number: int
    step: int
    attempt: int
    at: int
    data: str


#: The data of a chunk that says that a new attempt starts over.
RESTARTED = b"null"


# --- operations: what is written in one transaction, each refused by itself -----------------------


class Append(NamedTuple):
    """Entries for one run, with effects: all or none."""

    run: RunLease
    entries: Sequence[Entry]
    effects: Sequence[Effect] = ()
    sync: bool = False

    def apply(self, scope: Scope, store: Store) -> list[Entry]:
        """Write it; part of a transaction with others."""
        run, (tx, sql, *_) = self.run, scope
        placed, rows, apart = store.rows_of(self, run.seq, tx)
        for payload in apart:
            key = run.number << BITS | payload.number
            tx(sql["ADD_PAYLOAD"], key, payload.base, payload.sha256, payload.data)
        written = all(tx(sql["APPEND_ONE"], *row) for row in rows)
        if not written or not (rows or tx(sql["HELD"], run.number, run.fence)):
            raise FencedError(run.name, run.fence)
        for effect in self.effects:
            effect.apply(scope, run)
        run.seq += len(placed)
        if apart:
            scope.payloads.append((run, apart))
        return placed


class Acquire(NamedTuple):
    """Take a run, making it if it is new; one that has ended is returned with that status."""

    name: str
    first: RunStarted
    #: The queue that a new run belongs to, if its process dies; None: its caller resumes it.
    queue: str | None = None
    sync: bool = False
    #: Whether a run that has ended is taken, too.
    is_reopened: bool = False

    def apply(self, scope: Scope, store: Store) -> RunLease:
        """Make the run, or take it over from nobody or from a dead holder."""
        (tx, sql, now, _), first = scope, self.first
        expires, holder = now + LEASE_SECONDS, store.db.holder()
        made = store.add_run(
            scope, Enqueued(self.name, first, self.queue or "", 0.0), "running", self.queue, expires
        )
        if made is not None:
            return made
        row = RunRow(*tx(sql["FIND_RUN"], self.name)[0])
        if row.workflow != first.workflow:
            raise RunMismatchError(
                f"run {self.name!r} belongs to the workflow {row.workflow!r}, not to"
                f" {first.workflow!r}; give this call another run_id"
            )
        last = store.last(tx, row.number)
        if row.status in ENDED and not self.is_reopened:
            return RunLease(row.number, self.name, row.fence, last, row.status, row.deaths)
        died = row.holder is not None  # and a run that only waited is not the reason
        deaths = int(died and row.waits_for is None)
        if row.holder is not None and row.expires > now and store.db.alive(row.holder):
            raise RunLeasedError(self.name, Holder.of(row.holder).description)
        queue = row.queue or self.queue
        who = (holder, expires, now, deaths, queue)
        taken = tx(sql["TAKE_RUN"], *who, row.number, row.fence)
        if not taken:
            raise RunLeasedError(self.name, "another process, which took it just now")
        if died:
            store.drop_holds(tx, row.number)
        deaths += row.deaths
        return RunLease(row.number, self.name, taken[0][0], last, row.status, deaths, queue)


Operation = Append | Acquire
Result = list["Entry"] | RunLease | MaestroError


class Store:
    """A journal."""

    def __init__(self, database: Database, place: str) -> None:
        self.db, self.sql, self.place = database, database.sql, place
        self._mutex = threading.RLock()
        self._append_texts: dict[int, str] = {}

    def now(self) -> float:
        """Return the time on the clock that all holders share."""
        return self.db.now()

    def micros(self) -> int:
        """Return that time as entries have it."""
        return int(self.db.now() * 1e6)

    # --- writing ---

    def write(self, operations: Sequence[Operation]) -> list[Result]:
        """Write operations in one transaction; return the result of each, or its refusal."""
        sync, is_plain = False, True
        for each in operations:
            sync = sync or each.sync
            is_plain = is_plain and type(each) is Append and not each.effects
        with self._mutex:  # until the numbers have moved on
            if is_plain:
                found = self._write_entries(operations, sync=sync)  # type: ignore[arg-type]
                if found is not None:
                    return found
            return self._write_each(operations, sync=sync)

    def _write_entries(self, appends: Sequence[Append], *, sync: bool) -> list[Result] | None:
        """Write entries alone, in one statement; None if it refused, or if they are too many."""
        rows: list[tuple[object, ...]] = []
        results: list[Result] = []
        last: dict[RunLease, int] = {}
        for append in appends:
            seq = last.get(append.run, append.run.seq)
            placed, own, apart = self.rows_of(append, seq, self.db.read)
            if apart:
                return None
            last[append.run] = seq + len(placed)
            rows += own
            results.append(placed)
        if not rows or len(rows) > _MOST_ROWS:
            return None
        if len(rows) == 1:
            written = self.db.once(self.sql["APPEND_ALONE"], rows[0], sync=sync)
        else:
            flat = [value for row in rows for value in row]
            written = self.db.once(self._append_text(len(rows)), flat, sync=sync)
        if written < len(rows):
            return None  # one of the runs was taken over: each by itself says which
        for run, seq in last.items():
            run.seq = seq
        return results

    def rows_of(
        self, append: Append, seq: int, read: Transaction
    ) -> tuple[list[Entry], list[tuple[object, ...]], list[Payload]]:
        """Return entries with their numbers and time, their rows, and the values stored apart."""
        run, at = append.run, int(self.db.now() * 1e6)
        key, fence, number = run.number << BITS, run.fence, run.number
        placed: list[Entry] = []
        rows: list[tuple[object, ...]] = []
        apart: list[Payload] = []
        for given in append.entries:
            each = without_secrets(given) if given.redacted else given
            seq += 1
            entry = kinds.replace(each, seq=seq, at=at)
            for name in each.values:
                text = getattr(each, name)
                if text is not UNSET and len(text) >= LARGE_BYTES:
                    value = self.payloads_of(run, read).place(bytes(text))
                    entry = kinds.replace(entry, **{name: Raw(value.text)})
                    apart += value.rows
            data = kinds.encode(entry)
            rows.append((key | seq, data.decode(), hashlib.sha256(data).digest(), number, fence))
            placed.append(entry)
        return placed, rows, apart

    def _append_text(self, rows: int) -> str:
        found = self._append_texts.get(rows)
        if found is None:
            found = self._append_texts[rows] = texts.append(self.db.dialect, rows)
        return found

    def _write_each(self, operations: Sequence[Operation], *, sync: bool) -> list[Result]:
        before = [(each.run, each.run.seq) for each in operations if isinstance(each, Append)]

        def body(tx: Transaction) -> list[Result]:
            for run, seq in before:  # the body may be called again
                run.seq = seq
            scope = self.scope(tx)
            payloads[:] = [scope.payloads]
            if len(operations) == 1:
                return [operations[0].apply(scope, self)]
            return [self._apply(scope, each) for each in operations]

        payloads: list[list[tuple[RunLease, list[Payload]]]] = []
        try:
            results = self.db.write(body, sync=sync)
        except (StorageError, CorruptionError):
            raise
        except MaestroError as refusal:  # of the only one
            return [refusal]
        for run, rows in payloads[0]:
            self.payloads_of(run, self.db.read).written(rows)
        return results

    def _apply(self, scope: Scope, operation: Operation) -> Result:
        """Apply one operation of several, or undo its changes and return its refusal."""
        scope.tx("SAVEPOINT one")
        found: Result
        try:
            found = operation.apply(scope, self)
        except (RefusedError, RunLeasedError, RunMismatchError) as refusal:
            scope.tx("ROLLBACK TO one")
            found = refusal
        scope.tx("RELEASE one")  # not after an error of SQLite, which has undone all of it
        return found

    def scope(self, tx: Transaction) -> Scope:
        """Return the scope of effects in a transaction."""
        return Scope(tx, self.sql, self.db.now(), [])

    def _change(self, body: Callable[[Scope], object], *, sync: bool) -> None:
        self.db.write(lambda tx: body(self.scope(tx)), sync=sync)

    def last(self, tx: Transaction, number: int) -> int:
        """Return the number of a run's last entry."""
        found = tx(self.sql["LAST"], number << BITS, number << BITS | MASK)[0][0]
        return int(found or 0) & MASK

    def drop_holds(self, tx: Transaction, number: int) -> None:
        """Return what attempts of a run hold whose holder died."""
        self._settle(tx, tx(self.sql["DROP_HOLDS"], number))

    def _settle(self, tx: Transaction, holds: list[Row]) -> None:
        for account, amount in holds:
            tx(self.sql["SETTLE"], amount, 0, account)

    def add_run(
        self, scope: Scope, run: Enqueued, status: str, queue: str | None, expires: float = 0.0
    ) -> RunLease | None:
        """Add a run with its first entry; None if there is one of this name."""
        tx, sql, now, _ = scope
        is_held = status == "running"
        holder = self.db.holder() if is_held else None
        due = None if status == "stopped" else 0.0 if is_held else run.due
        fence = int(now * 1e6)  # higher than that of a purged run whose number comes again
        added = tx(
            sql["ADD_RUN"],
            *(run.name, run.first.workflow, run.first.parent, status, queue, run.version),
            *(run.priority, due, holder, fence, expires, now),
        )
        if not added:
            return None
        lease = RunLease(added[0][0], run.name, fence, 1, queue=queue)
        lease.seq = 0
        (lease.first,) = Append(lease, (run.first,)).apply(scope, self)
        return lease

    # --- runs ---

    def add_stopped(self, name: str, first: RunStarted, entries: Sequence[Entry]) -> bool:
        """Record a run that no process executes yet; False if there is one of this name."""

        def body(tx: Transaction) -> bool:
            scope = self.scope(tx)
            lease = self.add_run(scope, Enqueued(name, first, ""), "stopped", None)
            if lease is not None:
                Append(lease, entries).apply(scope, self)
            return lease is not None

        return self.db.write(body, sync=True)

    def text(self, run: RunLease | str, value: Value) -> bytes:
        """Return the text of a value of a run, also of one that is stored apart."""
        text = value_text(value)
        if not text.startswith(START) or (reference := reference_of(text)) is None:
            return text
        if isinstance(run, str):
            return Payloads().read(reference, partial(self.chain, self.find(run).number))
        known = self.payloads_of(run, self.db.read)
        return known.read(reference, partial(self.chain, run.number))

    def payloads_of(self, run: RunLease, read: Transaction) -> Payloads:
        """Return the large values of a run."""
        if run.payloads is None:
            first, last = run.number << BITS, run.number << BITS | MASK
            found = read(self.sql["LAST_PAYLOAD"], first, last)[0][0]
            run.payloads = Payloads(int(found or 0) & MASK)
        return run.payloads

    def chain(self, number: int, payload: int) -> Iterator[Payload]:
        """Yield the rows of a large value: its own, then that of its base, and so on."""
        at: int | None = payload
        while at is not None:
            found = self.db.read(self.sql["PAYLOAD"], number << BITS | at)
            if not found:
                return
            base, digest, data = found[0]
            yield Payload(at, base, digest, data)
            at = base

    def payloads(self, number: int, page: int = 50) -> Iterator[Payload]:
        """Yield a run's large values as they are stored; whole ones are checked."""
        after, last = number << BITS, number << BITS | MASK
        while found := self.db.read(self.sql["PAYLOADS"], after + 1, last, page):
            for after, base, digest, data in found:
                if base is None and hashlib.sha256(data).digest() != digest:
                    raise ValueCorruptError(after & MASK, "its bytes do not have its digest")
                yield Payload(after & MASK, base, digest, data)

    def entries(self, number: int, after: int = 0, tx: Transaction | None = None) -> list[Entry]:
        """Return a run's entries, checked; without those before it was restored from a copy.

        ``tx``: as a transaction sees them.
        """
        found = [kinds.decode(text) for _, text in self.texts(number, after, tx=tx)]
        restored = [at for at, each in enumerate(found, 1) if type(each) is kinds.Restored]
        return found[restored[-1] :] if restored else found

    def texts(
        self, number: int, after: int = 0, page: int = 2000, tx: Transaction | None = None
    ) -> Iterator[tuple[int, str]]:
        """Yield numbers and texts of entries, checked; in pages, so that writers get their turn."""
        sha256 = hashlib.sha256
        while True:
            first, last = (number << BITS) + after + 1, number << BITS | MASK
            found = (tx or self.db.read)(self.sql["READ"], first, last, page)
            for row, text, digest in found:
                after += 1
                if row & MASK != after or sha256(text.encode()).digest() != digest:
                    raise CorruptionError(
                        f"entry {after} of run number {number} in {self.place} is missing or"
                        " damaged; `maestro doctor` says what can be restored"
                    )
                yield after, text
            if len(found) < page:
                return

    def find(self, name: str) -> RunRow:
        """Return a run."""
        found = self.db.read(self.sql["FIND_RUN"], name)
        if not found:
            raise UnknownRunError(name, self.place)
        return RunRow(*found[0])

    def runs(self, which: RunFilter | None = None, limit: int = 1000) -> list[RunRow]:
        """Return runs, newest first."""
        which = which or RunFilter()
        parameters: list[object] = [which.before]
        statement = self.sql["RUNS"]
        if which.status is not None:
            condition = _SHOWN.get(which.status, "WITH_STATUS")
            statement += f" {self.sql[condition]}"
            parameters.append(which.status)
        if which.workflow is not None:
            parameters.append(which.workflow)
            statement += f" AND workflow = ${len(parameters)}"
        statement += " AND parent IS NULL" if which.roots else ""
        parameters.append(limit)
        statement += f" ORDER BY id DESC LIMIT ${len(parameters)}"
        return [RunRow(*row) for row in self.db.read(statement, *parameters)]

    def count_runs(self) -> dict[str, int]:
        """Return how many runs have each status."""
        return {str(status): int(count) for status, count in self.db.read(self.sql["COUNT_RUNS"])}

    def children(self, name: str) -> list[RunRow]:
        """Return the runs that a run called."""
        return [RunRow(*row) for row in self.db.read(self.sql["CHILDREN"], name)]

    def renew(self) -> None:
        """Renew all leases of this process."""
        expires = self.db.now() + LEASE_SECONDS
        self._change(
            lambda scope: scope.tx(self.sql["RENEW"], expires, self.db.holder()), sync=False
        )

    def release(self, run: RunLease, release: Release, *entries: Entry) -> None:
        """Give back a run that this process does not execute; with entries, they are durable."""
        (result,) = self.write((Append(run, entries, (release,), sync=bool(entries)),))
        if isinstance(result, MaestroError):
            raise result

    # --- the queue ---

    def enqueue(self, *runs: Enqueued, effects: Sequence[Effect] = ()) -> list[bool]:
        """Record runs for workers, durable on return; return which of them are new."""

        def body(tx: Transaction) -> list[bool]:
            scope = self.scope(tx)
            for effect in effects:
                effect.apply(scope, _NO_RUN)
            return [self._enqueue(run, scope) for run in runs]

        added = self.db.write(body, sync=True)
        self.db.notify()
        return added

    def _enqueue(self, run: Enqueued, scope: Scope) -> bool:
        waits = run.due > scope.now
        due = run.due if waits else scope.now - 60 * run.priority
        status = "waiting" if waits else "pending"
        return self.add_run(scope, run._replace(due=due), status, run.queue) is not None

    def accept(self, run: Enqueued) -> bool:
        """Give a run that its caller has left to workers; False if it is not that."""
        due = run.due if run.due > self.now() else self.now() - 60 * run.priority
        values = (run.queue, due, run.priority, run.version, run.name)
        accepted = self.db.write(lambda tx: tx(self.sql["ACCEPT_STOPPED"], *values), sync=True)
        self.db.notify()
        return bool(accepted)

    def next_due(self) -> float | None:
        """Return when the next run is due that waits for its time."""
        due: float | None = self.db.read(self.sql["NEXT_DUE"])[0][0]
        return due

    def pending_queues(self) -> list[str]:
        """Return the queues that have runs which are due."""
        return [queue for (queue,) in self.db.read(self.sql["PENDING_QUEUES"], self.db.now())]

    def pending_workflows(self) -> list[str]:
        """Return the workflows of the runs which are due."""
        return [workflow for (workflow,) in self.db.read(self.sql["PENDING_WORKFLOWS"])]

    def adopt(self, workflows: Sequence[str]) -> None:
        """Give runs to workers that were stopped politely."""
        now = self.db.now()

        def body(tx: Transaction) -> None:
            for workflow in workflows:
                tx(self.sql["ADOPT"], now, DEFAULT_QUEUE, workflow)

        self.db.write(body, sync=False)

    def claim(
        self,
        workflows: Sequence[str],
        queue: str,
        limit: int,
        version: str | None = None,
        concurrency: int | None = None,
        window: Window | None = None,
    ) -> list[tuple[RunLease, str]]:
        """Take runs that are due, first come first, with the names of their workflows.

        ``concurrency`` is how many runs of the queue may execute at once, over all workers, and
        ``window`` how many may start by now.
        """
        places = ", ".join(f"${number}" for number in range(6, len(workflows) + 6))
        statement = self.sql["CLAIM"].replace("{workflows}", places)
        statement = statement.replace("{limit}", f"${len(workflows) + 6}")

        def body(tx: Transaction) -> list[tuple[RunLease, str]]:
            now = self.db.now()
            tx(self.sql["MAKE_DUE"], now)
            most = limit
            starts = ""
            if concurrency is not None or window is not None:
                starts = tx(self.sql["LOCK_QUEUE"], queue)[0][0]
            if concurrency is not None:
                running = tx(self.sql["COUNT_RUNNING"], queue)[0][0]
                most = max(0, min(most, concurrency - running))
            if window is not None:
                most = window.room(starts, now, most)
            who = (self.db.holder(), now + LEASE_SECONDS, now)
            claimed = tx(statement, *who, queue, version or "", *workflows, most)
            if window is not None and claimed:
                tx(self.sql["COUNT_STARTS"], window.counted(starts, now, len(claimed)), queue)
            return [self._claimed(tx, row, queue) for row in sorted(claimed)]

        return self.db.write(body, sync=False)

    def _claimed(self, tx: Transaction, row: Row, queue: str) -> tuple[RunLease, str]:
        number, name, fence, workflow, deaths = row
        last = self.last(tx, number)
        return RunLease(number, name, fence, last, "pending", deaths, queue), workflow

    def recover(self) -> list[str]:
        """Free the runs of processes that died, or whose lease has ended."""
        holders = [holder for (holder,) in self.db.read(self.sql["HOLDERS"])]
        dead = [holder for holder in holders if not self.db.alive(holder)]

        def body(tx: Transaction) -> list[str]:
            names = []
            for holder in dead:
                self._settle(tx, tx(self.sql["DROP_HOLDS_OF"], holder))
            for holder in [*dead, ""]:
                for number, name in tx(self.sql["RECOVER"], DEFAULT_QUEUE, holder, self.db.now()):
                    self.drop_holds(tx, number)
                    names.append(name)
            return names

        return self.db.write(body, sync=False)

    # --- messages ---

    def send(self, name: str, kind: str, target: str = "", data: bytes = b"") -> bool:
        """Send a message to a run, durable on return; False if the run has ended."""

        def unless_ended(_: Transaction, row: RunRow) -> Message | None:
            return None if row.status in ENDED else Message(0, name, kind, target, data)

        return self.post(name, unless_ended)

    def post(self, name: str, make: Callable[[Transaction, RunRow], Message | None]) -> bool:
        """Send the message that ``make`` returns, in the transaction that it decides in.

        The run is locked meanwhile: nothing is appended to it, nor is it released. The message
        wakes it, and the runs that wait for it.
        """

        def body(tx: Transaction) -> bool:
            row = self._locked(tx, name)
            message = make(tx, row)
            if message is None:
                return False
            text = message.data.decode()
            tx(self.sql["ADD_MESSAGE"], row.number, message.kind, message.target, text)
            while row.parent:
                row = self._locked(tx, row.parent)
            wake(self.scope(tx), name)
            return True

        sent = self.db.write(body, sync=True)
        self.db.notify()
        return sent

    def _locked(self, tx: Transaction, name: str) -> RunRow:
        found = tx(self.sql["LOCK_RUN"], name)
        if not found:
            raise UnknownRunError(name, self.place)
        return RunRow(*found[0])

    def messages_of(self, row: RunRow, tx: Transaction | None = None) -> list[Message]:
        """Return the messages to a run, in the order in which they were sent."""
        rows = (tx or self.db.read)(self.sql["MESSAGES_OF_RUN"], row.number)
        return [Message(at, row.run_id, kind, to, data.encode()) for at, kind, to, data in rows]

    def messages(self) -> list[Message]:
        """Return the messages to the runs of this process."""
        rows = self.db.read(self.sql["MESSAGES"], self.db.holder())
        return [Message(at, name, kind, to, data.encode()) for at, name, kind, to, data in rows]

    # --- streams ---

    def append_chunks(
        self, run: RunLease, step: int, attempt: int, chunks: Sequence[bytes]
    ) -> None:
        """Store chunks, in order, after those of the run; they survive the process on return."""
        at = self.micros()

        def body(tx: Transaction) -> None:
            if not tx(self.sql["HELD"], run.number, run.fence):
                raise FencedError(run.name, run.fence)
            key = self._last_chunk(tx, run.number)
            for number, data in enumerate(chunks, key + 1):
                tx(self.sql["ADD_CHUNK"], number, step, attempt, at, data.decode())

        self.db.write(body, sync=False)

    def restart_stream(self, run: RunLease, wrote: int, step: int, attempt: int) -> None:
        """Add a mark where a new attempt starts, if the step ``wrote``, or any (0), has written."""
        if self.chunks(run.number, 0, wrote, 1):
            self.append_chunks(run, step, attempt, [RESTARTED])

    def _last_chunk(self, tx: Transaction, number: int) -> int:
        first, last = number << BITS, number << BITS | MASK
        return int(tx(self.sql["LAST_CHUNK"], first, last)[0][0] or first)

    def chunks(self, number: int, after: int = 0, step: int = 0, limit: int = 1000) -> list[Chunk]:
        """Return what the steps of a run, or one of them, wrote after a number."""
        first, last = number << BITS | min(after, MASK), number << BITS | MASK
        rows = self.db.read(self.sql["CHUNKS"], first + 1, last, step, limit)
        return [Chunk(key & MASK, of, attempt, at, data) for key, of, attempt, at, data in rows]

    # --- documents and accounts ---

    def document(self, namespace: str, key: str) -> tuple[int, bytes | None]:
        """Return a document's version and text; version 0 if there is none."""
        found = self.db.read(self.sql["DOCUMENT"], namespace, key)
        return (found[0][0], found[0][1].encode()) if found else (0, None)

    def documents(self, namespace: str) -> dict[str, bytes]:
        """Return the texts of a namespace by their keys."""
        rows = self.db.read(self.sql["DOCUMENTS"], namespace)
        return {key: value.encode() for key, _, value in rows}

    def update_document(
        self, namespace: str, key: str, change: Callable[[bytes | None], bytes]
    ) -> None:
        """Replace a document; ``change`` is called again if another process was faster."""
        for _ in range(_MOST_CHANGES):
            version, value = self.document(namespace, key)
            effect = Change(namespace, key, version, change(value))
            with contextlib.suppress(StaleDocumentError):
                self._change(partial(_apply_alone, effect), sync=True)
                return
        raise StaleDocumentError(namespace, key)

    def drop_document(self, namespace: str, key: str, version: int) -> bool:
        """Delete a document; False if it was changed meanwhile."""
        sql = self.sql["DROP_DOCUMENT"]
        return bool(self.db.write(lambda tx: tx(sql, namespace, key, version), sync=True))

    def define_account(self, account: str, most: int) -> None:
        """Make an account, or give it another limit."""
        sql = self.sql["DEFINE_ACCOUNT"]
        self._change(lambda scope: scope.tx(sql, account, most), sync=True)

    def account(self, account: str) -> tuple[int, int, int]:
        """Return what is used and held of an account, and its limit."""
        found = self.db.read(self.sql["ACCOUNT"], account)
        used, held, most = found[0] if found else (0, 0, 0)
        return used, held, most


def _apply_alone(effect: Effect, scope: Scope) -> None:
    effect.apply(scope, _NO_RUN)


def is_address(place: str | Path) -> bool:
    """Return whether a place is no folder: the URL of a database, or the memory."""
    return str(place).startswith((*_URLS, ":memory:"))


def open_store(place: str | Path) -> Store:
    """Open a journal by its URL, the path of its folder, or ``:memory:``."""
    place = str(place)
    if place.startswith(_URLS):
        try:
            from maestro_hive.journal.postgres import Postgres
        except ModuleNotFoundError as error:
            raise ConfigurationError(
                "a store on PostgreSQL needs psycopg: pip install 'maestro-hive[postgres]'"
            ) from error
        return Store(Postgres(place), place)
    from maestro_hive.journal.sqlite import Sqlite, SqliteFile

    if place == ":memory:":
        return Store(Sqlite(), place)
    Path(place).mkdir(parents=True, exist_ok=True, mode=0o700)
    return Store(SqliteFile(str(Path(place) / "journal.db")), place)
