"""The ``Store`` contract in memory: for runs that are not persistent, and for tests.

Several stores can share one set of data, as processes share a folder; ``abandon`` is to a store
what ``kill -9`` is to a process.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import os
import socket
import threading
from collections import Counter
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING

from maestro_hive.kernel import files
from maestro_hive.kernel.clock import Clock, SystemClock
from maestro_hive.kernel.errors import (
    FencedError,
    MaestroError,
    RunLeasedError,
    StaleDocumentError,
    StorageError,
    StoreClosedError,
)
from maestro_hive.kernel.hooks import Hooks
from maestro_hive.maestro.state.budgets import Reserve, RunBudget, Settle, concerns, refused_by
from maestro_hive.maestro.state.late_leases import LateLeases
from maestro_hive.maestro.state.memory_accounts import AccountsInMemory, BudgetData
from maestro_hive.maestro.state.memory_dispatch import DispatchesInMemory, Row, Rows
from maestro_hive.maestro.state.records import (
    BANKRUPT,
    OVER,
    RESETS_DEATHS,
    Chunk,
    Damage,
    DispatchState,
    Document,
    DocumentChanged,
    EntriesAppended,
    Entry,
    EntryKind,
    Holder,
    Lease,
    Notification,
    RunRecord,
    StoredValue,
)
from maestro_hive.maestro.state.store import (
    LEASE_SECONDS,
    Append,
    Change,
    ChunkAppend,
    Outcome,
    RunLease,
    Store,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
    from datetime import datetime
    from pathlib import Path

    from maestro_hive.maestro.state.codec import Encoded
    from maestro_hive.maestro.state.records import NewDispatch, NewEntry
    from maestro_hive.maestro.state.store import Adopt, DocumentGuard, NewRun

_RUN = "run/"


@dataclass(slots=True)
class _Data:
    """What stores that share their data share."""

    mutex: threading.RLock = field(default_factory=threading.RLock)
    runs: dict[str, RunRecord] = field(default_factory=dict)
    entries: dict[int, list[Entry]] = field(default_factory=dict)
    chunks: dict[int, list[Chunk]] = field(default_factory=dict)
    documents: dict[tuple[str, str], Document] = field(default_factory=dict)
    leases: dict[str, Lease] = field(default_factory=dict)
    dispatch: dict[str, Row] = field(default_factory=dict)
    budgets: BudgetData = field(default_factory=BudgetData)
    living: set[str] = field(default_factory=set)
    numbers: itertools.count[int] = field(default_factory=lambda: itertools.count(1))


class MemoryStore(DispatchesInMemory, AccountsInMemory, Store):
    """A store that ends with its process; see ``store`` for what it promises until then.

    ``shared_with`` another one, it is to that what a second process is. ``left_by`` another one, it
    starts with a copy of what a kill at this moment would leave of that.
    """

    location = "memory"
    format = 0
    damage: tuple[Damage, ...] = ()
    partial: str | None = None

    def __init__(
        self,
        *,
        clock: Clock | None = None,
        lease_seconds: float = LEASE_SECONDS,
        shared_with: MemoryStore | None = None,
        left_by: MemoryStore | None = None,
    ) -> None:
        self.clock: Clock = clock or (shared_with.clock if shared_with else SystemClock())
        self.notifications: Hooks[Notification] = Hooks()
        self._data: _Data = shared_with._data if shared_with else _Data()  # noqa: SLF001 - one class
        if left_by is not None:
            self._data = _left_by_kill(left_by._data)  # noqa: SLF001 - one class
        self._dispatch = Rows(self.clock, self._data.dispatch)
        self._lease_seconds = lease_seconds
        self._late = LateLeases()
        self._run_leases: dict[str, RunLease] = {}
        self._retained: set[int] = set()
        self._closed = False
        self._holder = Holder(
            id=f"memory-{next(self._data.numbers)}",
            host=socket.gethostname(),
            pid=os.getpid(),
            since=self.clock.now(),
        )
        self._data.living.add(self._holder.id)

    @property
    def usable(self) -> bool:
        return not self._closed and os.getpid() == self._holder.pid

    def syncs_fast(self) -> bool:
        return True

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
        files.check_identifier(name, "run id")
        with self._locked():
            run = self._run_leases.get(name)
            if run is not None and self._fenced(run.lease) is None:
                self._find_or_add(name, workflow, parent)
                run.users += 1
            else:
                lease = self.take_lease(_RUN + name, self._lease_seconds)
                run = self._lease_run(self._find_or_add(name, workflow, parent), lease)
            if not run.seq and (entries or status is not None or dispatch is not None):
                self.append([Append(run, entries, status, dispatch=dispatch, budget=budget)])
            return run

    def _find_or_add(self, name: str, workflow: str, parent: str | None) -> RunRecord:
        record, now = self._data.runs.get(name), self.clock.now()
        if record is None:
            record = RunRecord(
                id=next(self._data.numbers),
                name=name,
                workflow=workflow,
                status="pending",
                created_at=now,
                updated_at=now,
            )
        if not self._data.entries.setdefault(record.id, []):
            # An executor may have listed it, without a workflow.
            workflow, parent = record.workflow or workflow, record.parent or parent
            record = self._data.runs[name] = replace(record, workflow=workflow, parent=parent)
        return record

    def _lease_run(self, record: RunRecord, lease: Lease) -> RunLease:
        """Return a run's lease that was just taken; one that belongs to workers becomes active."""
        name, seq = record.name, len(self._data.entries[record.id])
        run = RunLease(record.id, name, lease, seq, created=not seq)
        row = self._data.dispatch.get(name)
        if row is not None:
            row.activate()
            run.dispatched, run.deaths = True, row.deaths
        self._run_leases[name] = run
        return run

    def release_run(self, run: RunLease, due: float | None = 0.0) -> None:
        with self._locked():
            run.users -= 1
            if run.users > 0:
                return
            if self._run_leases.get(run.name) is run:
                del self._run_leases[run.name]
            row = self._data.dispatch.get(run.name)
            if row is not None and self._fenced(run.lease) is None:
                row.schedule(due, self.clock)
            self.release_lease(run.lease)

    def create_runs(self, runs: Sequence[NewRun]) -> list[bool]:
        for run in runs:
            files.check_identifier(run.name, "run id")
        with self._locked():
            # Read before anything is written: it is all or nothing.
            whole = [run._replace(entries=list(run.entries)) for run in runs]
            created = [self._create(run) for run in whole]
        for run, is_new in zip(runs, created, strict=True):
            if is_new:
                last = len(run.entries)
                self.notifications.emit(EntriesAppended(run_id=run.name, first=1, seq=last))
        return created

    def _create(self, new: NewRun) -> bool:
        lease = self._data.leases.get(_RUN + new.name)
        if lease is not None and self.is_alive(lease):
            return False
        record = self._find_or_add(new.name, new.workflow, new.parent)
        if self._data.entries[record.id]:
            return False
        self._add_entries(record.id, new.entries)
        self._set_status(new.name, new.status)
        self._dispatch.add(record.id, new.name, record.workflow, new.dispatch)
        return True

    def run(self, name: str) -> RunRecord | None:
        self._check_open()
        return self._data.runs.get(name)

    def runs(
        self,
        *,
        status: str | None = None,
        workflow: str | None = None,
        limit: int | None = None,
        roots: bool = False,
    ) -> list[RunRecord]:
        with self._locked():
            found = [
                run
                for run in self._data.runs.values()
                if status in (None, run.status)
                and workflow in (None, run.workflow)
                and not (roots and run.parent)
            ]
        return sorted(found, key=lambda run: -run.id)[:limit]

    def count_runs(
        self, *, status: str | None = None, workflow: str | None = None, roots: bool = False
    ) -> int:
        return len(self.runs(status=status, workflow=workflow, roots=roots))

    def status_counts(self, *, roots: bool = False) -> dict[str, int]:
        return dict(Counter(run.status for run in self.runs(roots=roots)))

    def last_change(self, run: RunRecord) -> datetime:
        last = self.entries(run.id)[-1:]
        return max([run.updated_at, *(entry.when for entry in last)])

    # --- entries ---

    def append(
        self, appends: Sequence[Append], *, sync: bool = True, busy_timeout: float | None = None
    ) -> list[Outcome]:
        del sync, busy_timeout
        with self._locked():
            # Read before anything is written: it is all or nothing.
            whole = [append._replace(entries=list(append.entries)) for append in appends]
            before = {append.run: append.run.seq for append in whole}
            outcome = [self._append(append) for append in whole]
        for run, seq in before.items():
            if run.seq > seq:
                self.notifications.emit(
                    EntriesAppended(run_id=run.name, first=seq + 1, seq=run.seq)
                )
        return outcome

    def _append(self, append: Append) -> Outcome:
        refused = self._refusal(append)
        if refused is not None:
            return refused
        if append.change is not None:
            try:
                self.update_document(*append.change)
            except MaestroError as error:
                return error
        return self._write(append)

    def _refusal(self, append: Append) -> MaestroError | None:
        refused: MaestroError | None = self._fenced(append.run.lease)
        if refused is None and append.guard is not None:
            refused = self._stale(append.guard)
        if refused is None and isinstance(append.budget, Reserve):
            refused = self._budgets.refusal(append.budget)
        return refused

    def _stale(self, guard: DocumentGuard) -> StaleDocumentError | None:
        namespace, key, expected = guard
        document = self._data.documents.get((namespace, key))
        version = document.version if document else 0
        if version == expected:
            return None
        return StaleDocumentError(namespace, key, expected=expected, version=version)

    def _write(self, append: Append) -> list[Entry]:
        run, before = append.run, append.run.seq
        entries = self._add_entries(run.run, self._change_budget(append))
        run.seq = len(entries)
        root = run.root or run
        if root.deaths and any(entry.kind in RESETS_DEATHS for entry in entries[before:]):
            root.deaths = 0
            if root.name in self._data.dispatch:
                self._data.dispatch[root.name].deaths = 0
        if append.status is not None:
            self._set_status(run.name, append.status)
        if append.status in OVER:
            self._data.dispatch.pop(run.name, None)
        due = append.due
        if append.dispatch is not None and append.status not in OVER and not run.dispatched:
            workflow = self._data.runs[run.name].workflow
            self._dispatch.add(run.run, run.name, workflow, append.dispatch).activate()
            due = append.dispatch.due
        if append.release:
            self.release_run(run, due)
        run.dispatched = run.name in self._data.dispatch
        return entries[before:]

    def _change_budget(self, append: Append) -> Sequence[NewEntry]:
        """Reserve or settle what an append says; return its entries, and warnings after them."""
        if isinstance(append.budget, Settle):
            return [*append.entries, *self._budgets.settle(append.run, append.budget)]
        if isinstance(append.budget, RunBudget):
            self._budgets.restore(append.run.name, append.budget)
        elif append.budget is not None:
            now = self.clock.nanos() // 1000
            self._budgets.reserve(append.run, append.entries[-1], append.budget, now)
        return append.entries

    @property
    def _budgets(self) -> BudgetData:
        return self._data.budgets

    def _has_lease(self, fence: int) -> bool:
        """Return whether a lease with this fencing number is held by a store that lives."""
        found = (each for each in self._data.leases.values() if each.fence == fence)
        return any(map(self.is_alive, found))

    def _wake_bankrupt(self, changed: Collection[str]) -> None:
        for name, row in self._data.dispatch.items():
            record = self._data.runs[name]
            if row.state is DispatchState.ACTIVE or (
                record.status == BANKRUPT and concerns(changed, self._refusing_account(record.id))
            ):
                row.wake(self.clock)

    def _refusing_account(self, run: int) -> str | None:
        for entry in reversed(self._data.entries[run]):
            if entry.kind == EntryKind.RUN_SUSPENDED:
                return refused_by(entry.facts)
        return None

    def _add_entries(self, run: int, new: Sequence[NewEntry]) -> list[Entry]:
        entries, now = self._data.entries[run], self.clock.nanos() // 1000
        for kind, step, attempt, facts, value, _, identity, then in new:
            data, sha256 = value if value is not None else (None, None)
            at = now if then is None else then
            row = (kind, step, attempt, at, facts, data, None, sha256, identity)
            entries.append(Entry(len(entries) + 1, *row))
        return entries

    def _set_status(self, name: str, status: str) -> None:
        record = self._data.runs[name]
        self._data.runs[name] = replace(record, status=status, updated_at=self.clock.now())

    def entries(self, run: int, after: int = 0, up_to: int | None = None) -> list[Entry]:
        with self._locked():
            return self._data.entries.get(run, [])[after:up_to]

    def load(self, entry: Entry) -> bytes | None:
        return entry.value

    def values_of(self, run: int) -> Iterator[StoredValue]:
        del run
        self._check_open()
        return iter(())

    def purge_runs(
        self,
        names: Sequence[str],
        first: Callable[[], None] | None = None,
        documents: Sequence[tuple[str, str]] = (),
    ) -> int:
        leases: list[Lease] = []
        with self._locked():
            try:
                for name in names:
                    leases.append(self.take_lease(_RUN + name))  # noqa: PERF401 - one may fail
                if first is not None:
                    first()
                records = [record for record in map(self.run, names) if record is not None]
                for record in records:
                    del self._data.runs[record.name]
                    del self._data.entries[record.id]
                    self._data.chunks.pop(record.id, None)
                    self._data.dispatch.pop(record.name, None)
                    self._budgets.delete(record.name)
                self.set_documents(dict.fromkeys(documents))
            finally:
                for lease in leases:
                    self.release_lease(lease)
            return len(records)

    # --- streams ---

    def append_chunks(
        self, appends: Sequence[ChunkAppend], *, busy_timeout: float | None = None
    ) -> list[FencedError | None]:
        del busy_timeout
        with self._locked():
            refused = [self._fenced(run.lease) for run, _ in appends]
            for (run, chunks), fenced in zip(appends, refused, strict=True):
                known = self._data.chunks.setdefault(run.run, [])
                numbered = enumerate(() if fenced else chunks, start=len(known) + 1)
                known += [Chunk(seq, *chunk) for seq, chunk in numbered]
            return refused

    def chunks(self, run: int, after: int = 0, limit: int | None = None) -> list[Chunk]:
        with self._locked():
            up_to = None if limit is None else after + limit
            return self._data.chunks.get(run, [])[after:up_to]

    def last_chunk(self, run: int) -> int:
        with self._locked():
            return len(self._data.chunks.get(run, ()))

    # --- dispatch ---

    def claim_runs(
        self,
        *,
        queue: str,
        workflows: Collection[str],
        version: str | None = None,
        limit: int = 1,
    ) -> list[RunLease]:
        claimed: list[RunLease] = []
        with self._locked():
            self._dispatch.rebase()
            ready = self._dispatch.ready(queue, workflows, version)
            for row in ready[: max(0, limit)]:
                with contextlib.suppress(RunLeasedError):
                    lease = self.take_lease(_RUN + row.run_id, self._lease_seconds)
                    claimed.append(self._lease_run(self._data.runs[row.run_id], lease))
        return claimed

    def recover_runs(self, adopt: Adopt) -> list[str]:
        with self._locked():
            self._dispatch.rebase()
            dead = [lease for lease in self._data.leases.values() if not self.is_alive(lease)]
            dead += self._hanging()
            adopted = {
                lease.name: adopt(lease.name.removeprefix(_RUN))
                for lease in dead
                if self._is_adoptable(lease)
            }
            found = [self._recover(lease, adopted.get(lease.name)) for lease in dead]
            for name, row in self._data.dispatch.items():
                if row.state is DispatchState.ACTIVE and _RUN + name not in self._data.leases:
                    row.schedule(0.0, self.clock)
                    found.append(name)
        return [name for name in found if name is not None]

    def _hanging(self) -> list[Lease]:
        """Return the leases of active runs that live holders have not renewed for too long."""
        now = self.clock.awake_seconds()
        late = {
            lease.fence: lease
            for name, row in self._data.dispatch.items()
            if row.state is DispatchState.ACTIVE
            and (lease := self._data.leases.get(_RUN + name)) is not None
            and self.is_alive(lease)
            and lease.expires < now
        }
        return [late[fence] for fence in sorted(self._late.overdue(late, now))]

    def _is_adoptable(self, lease: Lease) -> bool:
        """Return whether a lease is of a run that has not ended, and does not belong to workers."""
        name = lease.name.removeprefix(_RUN)
        record = self._data.runs.get(name) if lease.name.startswith(_RUN) else None
        return record is not None and record.status not in OVER and name not in self._data.dispatch

    def _recover(self, lease: Lease, adopted: NewDispatch | None) -> str | None:
        """Let workers take the run that a dead process held; None if they do not get it."""
        if not lease.name.startswith(_RUN):
            return None
        name = lease.name.removeprefix(_RUN)
        row = self._data.dispatch.get(name)
        if adopted is not None:
            record = self._data.runs[name]
            self._dispatch.add(record.id, name, record.workflow, adopted, deaths=1)
        elif row is None:
            return None
        del self._data.leases[lease.name]
        if row is not None:
            if row.state is not DispatchState.ACTIVE:
                return None
            row.deaths += 1
            row.schedule(0.0, self.clock)
        return name

    # --- documents ---

    def document(self, namespace: str, key: str) -> Document | None:
        self._check_open()
        return self._data.documents.get((namespace, key))

    def documents(self, namespace: str | None = None) -> list[Document]:
        with self._locked():
            found = sorted(self._data.documents.items())
        return [document for (space, _), document in found if namespace in (None, space)]

    def update_document(
        self, namespace: str, key: str, change: Change, wake: str | None = None
    ) -> Document | None:
        return self._change({(namespace, key): change}, wake)[0]

    def set_documents(self, values: Mapping[tuple[str, str], Encoded | None]) -> None:
        self._change({where: lambda _, value=value: value for where, value in values.items()})  # type: ignore[misc]

    def delete_documents(self, namespace: str | None = None) -> int:
        with self._locked():  # also between the two: nothing is added meanwhile
            gone = [(document.namespace, document.key) for document in self.documents(namespace)]
            self.set_documents(dict.fromkeys(gone))
        return len(gone)

    def _change(
        self, changes: Mapping[tuple[str, str], Change], wake: str | None = None
    ) -> list[Document | None]:
        """Change documents, all or none, and wake a run; return what they are now."""
        documents = self._data.documents
        with self._locked():
            before = {where: documents.get(where) for where in changes}
            values = {where: change(_value(before[where])) for where, change in changes.items()}
            after = [self._put(*where, value) for where, value in values.items()]
            if wake is not None:
                self._dispatch.wake(wake)
        for (namespace, key), new in zip(changes, after, strict=True):
            old = _value(before[namespace, key])
            self.notifications.emit(
                DocumentChanged(namespace=namespace, key=key, before=old, after=_value(new))
            )
        return after

    def _put(self, namespace: str, key: str, value: Encoded | None) -> Document | None:
        before = self._data.documents.pop((namespace, key), None)
        if value is None:
            return None
        after = self._data.documents[namespace, key] = Document(
            namespace=namespace,
            key=key,
            version=before.version + 1 if before else 1,
            value=value.data,
            sha256=value.sha256,
            updated_at=self.clock.now(),
        )
        return after

    # --- leases ---

    def take_lease(self, name: str, seconds: float = LEASE_SECONDS) -> Lease:
        with self._locked():
            current = self._data.leases.get(name)
            late = current is None or self.clock.awake_seconds() >= current.expires
            if current is not None and self.is_alive(current) and not late:
                held = current.holder
                run = name.removeprefix(_RUN)
                raise RunLeasedError(run, host=held.host, pid=held.pid, since=held.since)
            lease = self._data.leases[name] = Lease(
                name=name,
                fence=next(self._data.numbers),
                holder=replace(self._holder, since=self.clock.now()),
                boot=self.clock.boot_id(),
                expires=self.clock.awake_seconds() + seconds,
            )
            return lease

    def _fenced(self, lease: Lease) -> FencedError | None:
        current = self._data.leases.get(lease.name)
        if current is not None and current.fence == lease.fence:
            return None
        number = current.fence if current else 0
        return FencedError(lease.name.removeprefix(_RUN), fence=lease.fence, current=number)

    def renew_leases(self) -> None:
        with self._locked():
            expires, boot = self.clock.awake_seconds() + self._lease_seconds, self.clock.boot_id()
            for name, lease in self._data.leases.items():
                if lease.holder.id == self._holder.id:
                    self._data.leases[name] = replace(lease, expires=expires, boot=boot)

    def retain_lease(self, lease: Lease) -> None:
        self._retained.add(lease.fence)

    def release_lease(self, lease: Lease) -> None:
        self._retained.discard(lease.fence)
        with self._locked():
            if self._fenced(lease) is None:
                del self._data.leases[lease.name]

    def lease(self, name: str) -> Lease | None:
        self._check_open()
        return self._data.leases.get(name)

    def leases(self) -> list[Lease]:
        with self._locked():
            return sorted(self._data.leases.values(), key=lambda lease: lease.name)

    def is_alive(self, lease: Lease) -> bool:
        return lease.boot == self.clock.boot_id() and lease.holder.id in self._data.living

    def run_leases(self) -> dict[str, Lease]:
        return {
            lease.name.removeprefix(_RUN): lease
            for lease in self.leases()
            if lease.name.startswith(_RUN) and self.is_alive(lease)
        }

    # --- the whole journal ---

    def unused_values(self) -> tuple[int, int]:
        self._check_open()
        return 0, 0

    def collect(self) -> int:
        self._check_open()
        return 0

    def empty_log(self) -> bool:
        self._check_open()
        return True

    def check(self) -> list[str]:
        self._check_open()
        return []

    def backup(self, target: Path) -> None:
        raise StorageError(f"a journal in memory has no files to copy to {target}")

    def abandon(self) -> None:
        """End without releasing anything, as a killed process does."""
        self._data.living.discard(self._holder.id)
        self._closed = True

    def close(self) -> None:
        if not self.usable:
            return  # a forked child has nothing to release
        for run in list(self._run_leases.values()):
            run.users = 1
            self.release_run(run)
        if self._retained:
            self._closed = True
        else:
            self.abandon()

    def _locked(self) -> threading.RLock:
        self._check_open()  # first: in a forked child the lock may never be free
        return self._data.mutex

    def _check_open(self) -> None:
        if os.getpid() != self._holder.pid:
            raise StoreClosedError(
                f"this store in memory belongs to process {self._holder.pid}, and this is a forked"
                " child of it; open another one"
            )
        if self._closed:
            raise StoreClosedError("this store in memory has been closed")


def _left_by_kill(data: _Data) -> _Data:
    """Return a copy of all data, whose holders are dead."""
    with data.mutex:
        made = _Data(numbers=itertools.count(next(data.numbers)))
        made.entries = {run: list(entries) for run, entries in data.entries.items()}
        for each in fields(_Data):
            if each.name not in {"mutex", "numbers", "entries", "living"}:
                setattr(made, each.name, copy.deepcopy(getattr(data, each.name)))
        return made


def _value(document: Document | None) -> bytes | None:
    return document.value if document else None
