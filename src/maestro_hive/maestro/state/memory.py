"""The ``Store`` contract in memory: for runs that are not persistent, and for tests.

Several stores can share one set of data, as processes share a folder; ``abandon`` is to a store
what ``kill -9`` is to a process.
"""

from __future__ import annotations

import itertools
import os
import socket
import threading
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from maestro_hive.kernel import files
from maestro_hive.kernel.clock import Clock, SystemClock, to_micros
from maestro_hive.kernel.errors import (
    FencedError,
    RunLeasedError,
    StaleDocumentError,
    StorageError,
    StoreClosedError,
)
from maestro_hive.kernel.hooks import Hooks
from maestro_hive.maestro.state.records import (
    Damage,
    Document,
    DocumentChanged,
    EntriesAppended,
    Entry,
    Holder,
    Lease,
    Notification,
    RunRecord,
    StoredValue,
)
from maestro_hive.maestro.state.store import LEASE_SECONDS, Append, Change, DocumentGuard, RunLease

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from datetime import datetime
    from pathlib import Path

    from maestro_hive.maestro.state.codec import Encoded
    from maestro_hive.maestro.state.records import NewEntry

_RUN = "run/"


@dataclass(slots=True)
class _Data:
    """What stores that share their data share."""

    mutex: threading.RLock = field(default_factory=threading.RLock)
    runs: dict[str, RunRecord] = field(default_factory=dict)
    entries: dict[int, list[Entry]] = field(default_factory=dict)
    documents: dict[tuple[str, str], Document] = field(default_factory=dict)
    leases: dict[str, Lease] = field(default_factory=dict)
    living: set[str] = field(default_factory=set)
    numbers: itertools.count[int] = field(default_factory=lambda: itertools.count(1))


class MemoryStore:
    """A store that ends with its process; see ``store`` for what it promises until then."""

    def __init__(
        self,
        *,
        clock: Clock | None = None,
        lease_seconds: float = LEASE_SECONDS,
        shared_with: MemoryStore | None = None,
    ) -> None:
        self.clock: Clock = clock or (shared_with.clock if shared_with else SystemClock())
        self.notifications: Hooks[Notification] = Hooks()
        self.damage: tuple[Damage, ...] = ()
        self.format = 0
        self.partial: str | None = None
        self._data: _Data = shared_with._data if shared_with else _Data()  # noqa: SLF001 - one class
        self._lease_seconds = lease_seconds
        self._run_leases: dict[str, RunLease] = {}
        self._closed = False
        self._holder = Holder(
            id=f"memory-{next(self._data.numbers)}",
            host=socket.gethostname(),
            pid=os.getpid(),
            since=self.clock.now(),
        )
        self._data.living.add(self._holder.id)

    @property
    def location(self) -> str:
        """In memory."""
        return "memory"

    @property
    def usable(self) -> bool:
        """Return whether it is open, in this process."""
        return not self._closed and os.getpid() == self._holder.pid

    def syncs_fast(self) -> bool:
        """Memory needs no sync."""
        return True

    # --- runs ---

    def acquire_run(
        self,
        name: str,
        workflow: str = "",
        entries: Sequence[NewEntry] = (),
        status: str | None = None,
        busy_timeout: float | None = None,
    ) -> RunLease:
        """Take a run's lease for this store."""
        files.check_identifier(name, "run id")
        with self._locked():
            run = self._run_leases.get(name)
            if run is not None and self._fenced(run.lease) is None:
                run.users += 1
            else:
                run = self._run_leases[name] = self._take_run(name, workflow)
            if not run.seq and (entries or status is not None):
                self.append([Append(run, entries, status)])
            return run

    def _take_run(self, name: str, workflow: str) -> RunLease:
        lease = self.take_lease(_RUN + name, self._lease_seconds)
        record = self._data.runs.get(name) or self._new_run(name, workflow)
        seq = len(self._data.entries.setdefault(record.id, []))
        return RunLease(run=record.id, name=name, lease=lease, seq=seq, created=not seq)

    def _new_run(self, name: str, workflow: str) -> RunRecord:
        now = self.clock.now()
        record = self._data.runs[name] = RunRecord(
            id=next(self._data.numbers),
            name=name,
            workflow=workflow,
            status="pending",
            created_at=now,
            updated_at=now,
        )
        return record

    def release_run(self, run: RunLease) -> None:
        """Release a run's lease when its last user is done."""
        with self._locked():
            run.users -= 1
            if run.users > 0:
                return
            if self._run_leases.get(run.name) is run:
                del self._run_leases[run.name]
            self.release_lease(run.lease)

    def run(self, name: str) -> RunRecord | None:
        """Find a run by its name."""
        self._check_open()
        return self._data.runs.get(name)

    def runs(
        self, *, status: str | None = None, workflow: str | None = None, limit: int | None = None
    ) -> list[RunRecord]:
        """List runs, newest first."""
        with self._locked():
            found = [
                run
                for run in self._data.runs.values()
                if status in (None, run.status) and workflow in (None, run.workflow)
            ]
        return sorted(found, key=lambda run: -run.id)[:limit]

    def count_runs(self, *, status: str | None = None, workflow: str | None = None) -> int:
        """Return how many runs there are."""
        return len(self.runs(status=status, workflow=workflow))

    def last_change(self, run: RunRecord) -> datetime:
        """Return when something was last recorded of a run."""
        last = self.entries(run.id)[-1:]
        return max([run.updated_at, *(entry.when for entry in last)])

    # --- entries ---

    def append(
        self, appends: Sequence[Append], *, sync: bool = True, busy_timeout: float | None = None
    ) -> list[int | FencedError | StaleDocumentError]:
        """Record entries; memory has nothing to sync, and no other process to wait for."""
        del sync, busy_timeout
        with self._locked():
            # Read before anything is written: it is all or nothing.
            whole = [append._replace(entries=list(append.entries)) for append in appends]
            before = {append.run: append.run.seq for append in whole}
            outcome: list[int | FencedError | StaleDocumentError] = [
                self._refusal(append) or self._write(append) for append in whole
            ]
        for run, seq in before.items():
            if run.seq > seq:
                self.notifications.emit(
                    EntriesAppended(run_id=run.name, first=seq + 1, seq=run.seq)
                )
        return outcome

    def _refusal(self, append: Append) -> FencedError | StaleDocumentError | None:
        fenced = self._fenced(append.run.lease)
        if fenced is not None or append.guard is None:
            return fenced
        return self._stale(append.guard)

    def _stale(self, guard: DocumentGuard) -> StaleDocumentError | None:
        namespace, key, expected = guard
        document = self._data.documents.get((namespace, key))
        version = document.version if document else 0
        if version == expected:
            return None
        return StaleDocumentError(namespace, key, expected=expected, version=version)

    def _write(self, append: Append) -> int:
        run = append.run
        now = self.clock.now()
        entries = self._data.entries[run.run]
        for kind, step, attempt, facts, value, _, identity, then in append.entries:
            run.seq += 1
            data, sha256 = value if value is not None else (None, None)
            at = to_micros(now) if then is None else then
            row = (kind, step, attempt, at, facts, data, None, sha256, identity)
            entries.append(Entry(run.seq, *row))
        if append.status is not None:
            record = self._data.runs[run.name]
            self._data.runs[run.name] = replace(record, status=append.status, updated_at=now)
        if append.release:
            self.release_run(run)
        return run.seq

    def entries(self, run: int, after: int = 0) -> list[Entry]:
        """Return a run's entries in order."""
        with self._locked():
            return self._data.entries.get(run, [])[after:]

    def load(self, entry: Entry) -> bytes | None:
        """Return an entry's value."""
        return entry.value

    def values_of(self, run: int) -> Iterator[StoredValue]:
        """Yield nothing: every value is in its entry."""
        del run
        self._check_open()
        return iter(())

    def purge_run(self, name: str, first: Callable[[], None] | None = None) -> bool:
        """Delete a run and its entries."""
        with self._locked():
            record = self.run(name)
            if record is None:
                return False
            lease = self.take_lease(_RUN + name)
            if first is not None:
                first()
            del self._data.runs[name]
            del self._data.entries[record.id]
            self.release_lease(lease)
            return True

    # --- documents ---

    def document(self, namespace: str, key: str) -> Document | None:
        """Return a document."""
        self._check_open()
        return self._data.documents.get((namespace, key))

    def documents(self, namespace: str | None = None) -> list[Document]:
        """Return documents by namespace and key."""
        with self._locked():
            found = sorted(self._data.documents.items())
        return [document for (space, _), document in found if namespace in (None, space)]

    def update_document(self, namespace: str, key: str, change: Change) -> Document | None:
        """Replace a document by the result of ``change``."""
        return self._change({(namespace, key): change})[0]

    def set_documents(self, values: Mapping[tuple[str, str], Encoded | None]) -> None:
        """Set many documents at once."""
        self._change({where: lambda _, value=value: value for where, value in values.items()})  # type: ignore[misc]

    def delete_documents(self, namespace: str | None = None) -> int:
        """Delete documents."""
        with self._locked():  # also between the two: nothing is added meanwhile
            gone = [(document.namespace, document.key) for document in self.documents(namespace)]
            self.set_documents(dict.fromkeys(gone))
        return len(gone)

    def _change(self, changes: Mapping[tuple[str, str], Change]) -> list[Document | None]:
        """Change documents, all or none; return what they are now."""
        documents = self._data.documents
        with self._locked():
            before = {where: documents.get(where) for where in changes}
            values = {where: change(_value(before[where])) for where, change in changes.items()}
            after = [self._put(*where, value) for where, value in values.items()]
        for (namespace, key), new in zip(changes, after, strict=True):
            old = _value(before[namespace, key])
            self.notifications.emit(
                DocumentChanged(namespace=namespace, key=key, before=old, after=_value(new))
            )
        return after

    def _put(self, namespace: str, key: str, value: Encoded | None) -> Document | None:
        before = self._data.documents.get((namespace, key))
        if value is None:
            self._data.documents.pop((namespace, key), None)
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
        """Take a lease."""
        with self._locked():
            current = self._data.leases.get(name)
            if (
                current is not None
                and self.is_alive(current)
                and self.clock.awake_seconds() < current.expires
            ):
                holder = current.holder
                raise RunLeasedError(
                    name.removeprefix(_RUN), host=holder.host, pid=holder.pid, since=holder.since
                )
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
        """Extend every lease this store holds."""
        with self._locked():
            expires, boot = self.clock.awake_seconds() + self._lease_seconds, self.clock.boot_id()
            for name, lease in self._data.leases.items():
                if lease.holder.id == self._holder.id:
                    self._data.leases[name] = replace(lease, expires=expires, boot=boot)

    def release_lease(self, lease: Lease) -> None:
        """Release a lease."""
        with self._locked():
            if self._fenced(lease) is None:
                del self._data.leases[lease.name]

    def lease(self, name: str) -> Lease | None:
        """Return a lease that was not released."""
        self._check_open()
        return self._data.leases.get(name)

    def leases(self) -> list[Lease]:
        """Return every lease that was not released, by name."""
        with self._locked():
            return sorted(self._data.leases.values(), key=lambda lease: lease.name)

    def is_alive(self, lease: Lease) -> bool:
        """Return whether the store that holds a lease is open."""
        return lease.boot == self.clock.boot_id() and lease.holder.id in self._data.living

    def run_leases(self) -> dict[str, Lease]:
        """Return the leases of runs whose holders live."""
        return {
            lease.name.removeprefix(_RUN): lease
            for lease in self.leases()
            if lease.name.startswith(_RUN) and self.is_alive(lease)
        }

    # --- the whole journal ---

    def unused_values(self) -> tuple[int, int]:
        """Return none: every value is in its entry."""
        self._check_open()
        return 0, 0

    def collect(self) -> int:
        """Delete nothing: every value is in its entry."""
        self._check_open()
        return 0

    def empty_log(self) -> bool:
        """Do nothing: there is no log."""
        self._check_open()
        return True

    def check(self) -> list[str]:
        """Find nothing wrong: memory is not read back from anywhere."""
        self._check_open()
        return []

    def backup(self, target: Path) -> None:
        """Refuse: there is nothing to copy from."""
        raise StorageError(f"a journal in memory has no files to copy to {target}")

    def abandon(self) -> None:
        """End without releasing anything, as a killed process does."""
        self._data.living.discard(self._holder.id)
        self._closed = True

    def close(self) -> None:
        """Release every lease."""
        if not self.usable:
            return  # a forked child has nothing to release
        for run in list(self._run_leases.values()):
            run.users = 1
            self.release_run(run)
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


def _value(document: Document | None) -> bytes | None:
    return document.value if document else None
