"""The ``Store`` contract in memory: for runs that keep nothing, and for tests.

Several of them can share one set of data, as processes share a folder; ``abandon`` is what a
``kill -9`` is to a process.
"""

from __future__ import annotations

import itertools
import os
import socket
import threading
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from maestro_hive.kernel import files
from maestro_hive.kernel.clock import Clock, SystemClock
from maestro_hive.kernel.errors import FencedError, RunLeasedError, StorageError, StoreClosedError
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
    to_micros,
)
from maestro_hive.maestro.state.store import LEASE_SECONDS, Append, Change, RunLease

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from maestro_hive.maestro.state.codec import Encoded


@dataclass(slots=True)
class _Data:
    """What stores that share their data share."""

    mutex: threading.RLock = field(default_factory=threading.RLock)
    runs: dict[str, RunRecord] = field(default_factory=dict)
    entries: dict[int, list[Entry]] = field(default_factory=dict)
    documents: dict[tuple[str, str], Document] = field(default_factory=dict)
    leases: dict[str, Lease] = field(default_factory=dict)
    release: set[str] = field(default_factory=set)
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
        self._data: _Data = shared_with._data if shared_with else _Data()  # noqa: SLF001 - one of us
        self._lease_seconds = lease_seconds
        self._run_leases: dict[str, RunLease] = {}
        self._closed = False
        self._me = Holder(
            id=f"memory-{next(self._data.numbers)}",
            host=socket.gethostname(),
            pid=os.getpid(),
            since=self.clock.now(),
        )
        self._data.living.add(self._me.id)

    @property
    def location(self) -> str:
        """In memory."""
        return "memory"

    def syncs_fast(self) -> bool:
        """Memory always is."""
        return True

    # --- runs ---

    def acquire_run(self, name: str, workflow: str = "") -> RunLease:
        """Take a run for this store."""
        files.check_identifier(name, "run id")
        with self._alone():
            hold = self._run_leases.get(name)
            if hold is not None and self._refusal(hold.lease) is None:
                hold.users += 1
                return hold
            lease = self.take_lease(f"run/{name}", self._lease_seconds)
            record = self._data.runs.get(name) or self._new_run(name, workflow)
            last = len(self._data.entries.setdefault(record.id, []))
            hold = self._run_leases[name] = RunLease(
                run=record.id, name=name, lease=lease, seq=last
            )
            return hold

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

    def release_run(self, hold: RunLease) -> None:
        """Give a run back when its last user is done."""
        with self._alone():
            hold.users -= 1
            if hold.users > 0:
                return
            if self._run_leases.get(hold.name) is hold:
                del self._run_leases[hold.name]
            self.release_lease(hold.lease)

    def run(self, name: str) -> RunRecord | None:
        """Find a run by its name."""
        self._check_open()
        return self._data.runs.get(name)

    def runs(self, status: str | None = None, limit: int | None = None) -> list[RunRecord]:
        """List runs, newest first."""
        with self._alone():
            found = [run for run in self._data.runs.values() if status in (None, run.status)]
        return sorted(found, key=lambda run: -run.id)[:limit]

    # --- entries ---

    def append(
        self, appends: Sequence[Append], *, sync: bool = True, busy_timeout: float | None = None
    ) -> list[int | FencedError]:
        """Record entries; memory has nothing to sync, and nobody to wait for."""
        del sync, busy_timeout
        with self._alone():
            # Read before anything is written: it is all or nothing.
            whole = [append._replace(entries=list(append.entries)) for append in appends]
            before = {append.hold: append.hold.seq for append in whole}
            outcome = [self._refusal(append.hold.lease) or self._write(append) for append in whole]
        for hold, seq in before.items():
            if hold.seq > seq:
                self.notifications.emit(
                    EntriesAppended(run_id=hold.name, first=seq + 1, seq=hold.seq)
                )
        return outcome

    def _write(self, append: Append) -> int:
        hold = append.hold
        now = self.clock.now()
        at = to_micros(now)
        entries = self._data.entries[hold.run]
        for kind, step, attempt, facts, value, _, identity, then in append.entries:
            hold.seq += 1
            data, sha256 = value if value is not None else (None, None)
            when = at if then is None else then
            told = (kind, step, attempt, when, facts, data, None, sha256, identity)
            entries.append(Entry(hold.seq, *told))
        if append.status is not None:
            record = self._data.runs[hold.name]
            self._data.runs[hold.name] = replace(record, status=append.status, updated_at=now)
        return hold.seq

    def entries(self, run: int, after: int = 0) -> list[Entry]:
        """Return a run's entries in order."""
        with self._alone():
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
        """Forget a run and its entries."""
        with self._alone():
            record = self.run(name)
            if record is None:
                return False
            lease = self.take_lease(f"run/{name}")
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
        with self._alone():
            found = sorted(self._data.documents.items())
        return [document for (space, _), document in found if namespace in (None, space)]

    def update_document(self, namespace: str, key: str, change: Change) -> Document | None:
        """Replace a document by what ``change`` makes of it."""
        with self._alone():
            before = self._data.documents.get((namespace, key))
            after = self._put(namespace, key, change(before.value if before else None))
        self._tell(namespace, key, before, after)
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

    def set_documents(self, values: Mapping[tuple[str, str], Encoded | None]) -> None:
        """Set many documents at once."""
        with self._alone():
            before = {where: self._data.documents.get(where) for where in values}
            after = {where: self._put(*where, value) for where, value in values.items()}
        for where in values:
            self._tell(*where, before[where], after[where])

    def delete_documents(self, namespace: str | None = None) -> int:
        """Delete documents."""
        with self._alone():
            gone = self.documents(namespace)
            for document in gone:
                del self._data.documents[document.namespace, document.key]
        for document in gone:
            self._tell(document.namespace, document.key, document, None)
        return len(gone)

    def _tell(
        self, namespace: str, key: str, before: Document | None, after: Document | None
    ) -> None:
        self.notifications.emit(
            DocumentChanged(
                namespace=namespace,
                key=key,
                before=before.value if before else None,
                after=after.value if after else None,
            )
        )

    # --- leases ---

    def take_lease(self, name: str, seconds: float = LEASE_SECONDS) -> Lease:
        """Become the only one under this name."""
        with self._alone():
            current = self._data.leases.get(name)
            if current is not None and self._stands(current):
                holder = current.holder
                raise RunLeasedError(
                    name.removeprefix("run/"), host=holder.host, pid=holder.pid, since=holder.since
                )
            lease = self._data.leases[name] = Lease(
                id=current.id if current else next(self._data.numbers),
                name=name,
                fence=current.fence + 1 if current else 1,
                holder=replace(self._me, since=self.clock.now()),
                boot=self.clock.boot_id(),
                expires=self.clock.awake_seconds() + seconds,
            )
            self._data.release.discard(name)
            return lease

    def _stands(self, lease: Lease) -> bool:
        return self._is_held(lease) and self.clock.awake_seconds() < lease.expires

    def _is_held(self, lease: Lease) -> bool:
        return (
            lease.name not in self._data.release
            and lease.boot == self.clock.boot_id()
            and lease.holder.id in self._data.living
        )

    def _refusal(self, lease: Lease) -> FencedError | None:
        current = self._data.leases.get(lease.name)
        if current and current.fence == lease.fence and lease.name not in self._data.release:
            return None
        number = current.fence if current else 0
        return FencedError(lease.name.removeprefix("run/"), fence=lease.fence, current=number)

    def renew_leases(self) -> None:
        """Extend everything this store holds."""
        with self._alone():
            expires = self.clock.awake_seconds() + self._lease_seconds
            for name, lease in self._data.leases.items():
                if lease.holder.id == self._me.id:
                    self._data.leases[name] = replace(
                        lease, expires=expires, boot=self.clock.boot_id()
                    )

    def release_lease(self, lease: Lease) -> None:
        """Give a lease back."""
        with self._alone():
            if self._refusal(lease) is None:
                self._data.release.add(lease.name)

    def lease(self, name: str) -> Lease | None:
        """Return a lease as it stands."""
        self._check_open()
        return None if name in self._data.release else self._data.leases.get(name)

    def run_leases(self) -> dict[str, Lease]:
        """Return who holds which runs."""
        with self._alone():
            held = [lease for lease in self._data.leases.values() if self._is_held(lease)]
        return {
            lease.name.removeprefix("run/"): lease
            for lease in held
            if lease.name.startswith("run/")
        }

    # --- the whole ---

    def collect(self) -> int:
        """Nothing is ever left over."""
        self._check_open()
        return 0

    def check(self) -> list[str]:
        """Nothing can be wrong."""
        self._check_open()
        return []

    def backup(self, target: Path) -> None:
        """Refuse: there is nothing to copy from."""
        raise StorageError(f"a journal in memory has no files to copy to {target}")

    def abandon(self) -> None:
        """Vanish without giving anything back, as a killed process does."""
        self._data.living.discard(self._me.id)
        self._closed = True

    def close(self) -> None:
        """Give back what is held."""
        if self._closed or os.getpid() != self._me.pid:
            return  # a forked child has nothing to give back
        for hold in list(self._run_leases.values()):
            hold.users = 1
            self.release_run(hold)
        self.abandon()

    def _alone(self) -> threading.RLock:
        self._check_open()  # first: in a forked child the lock may never be free
        return self._data.mutex

    def _check_open(self) -> None:
        if os.getpid() != self._me.pid:
            raise StoreClosedError(
                f"this store in memory belongs to process {self._me.pid}, and this is a forked"
                " child of it; open another one"
            )
        if self._closed:
            raise StoreClosedError("this store in memory has been closed")
