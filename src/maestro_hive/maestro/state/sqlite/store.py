"""The journal in a folder: the ``Store`` contract over one SQLite file."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
import warnings
import weakref
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from maestro_hive.kernel import files
from maestro_hive.kernel.clock import Clock, SystemClock, to_micros
from maestro_hive.kernel.errors import (
    FencedError,
    MaestroError,
    StorageError,
    StoreBusyError,
    StoreClosedError,
)
from maestro_hive.kernel.hooks import Hooks
from maestro_hive.kernel.process import PerProcess, run_at_exit
from maestro_hive.maestro.state.records import (
    Damage,
    Document,
    DocumentChanged,
    EntriesAppended,
    Lease,
    Notification,
)
from maestro_hive.maestro.state.sqlite.connection import JournalFile
from maestro_hive.maestro.state.sqlite.documents import DocumentWriter
from maestro_hive.maestro.state.sqlite.entries import EntryWriter, last_seq
from maestro_hive.maestro.state.sqlite.leases import HolderLateError, Leases, run_lease_name
from maestro_hive.maestro.state.sqlite.reader import JournalReader
from maestro_hive.maestro.state.sqlite.wal import DamagedJournalWarning, keep_damaged_log
from maestro_hive.maestro.state.store import LEASE_SECONDS, Append, Change, RunLease

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    import apsw

    from maestro_hive.kernel.errors import StaleDocumentError
    from maestro_hive.maestro.state.codec import Encoded
    from maestro_hive.maestro.state.records import NewEntry
    from maestro_hive.maestro.state.sqlite.documents import Changed, Where

logger = logging.getLogger(__name__)

ResultT = TypeVar("ResultT")

#: A disk that takes longer than this for an fsync is waited for in a thread.
_FAST_SYNC_SECONDS = 0.002
#: How long a late holder gets to renew its lease once nothing is in its way any more.
_GRACE_SECONDS = 0.5


class SqliteStore(JournalReader):
    """A store in a folder; see ``store`` for what it promises.

    ``stores.open_store`` gives all users of a folder in one process the same one; use that.
    """

    def __init__(
        self,
        folder: Path,
        *,
        clock: Clock | None = None,
        lease_seconds: float = LEASE_SECONDS,
        busy_seconds: float = 30.0,
    ) -> None:
        folder = files.make_private_folder(folder).resolve()
        clock = clock or SystemClock()
        files.refuse_shared_folder(folder)
        _refuse_inherited(folder)
        self._file = JournalFile(
            folder,
            keep_damaged_log=lambda reason: keep_damaged_log(
                folder, folder / "journal.db", reason, clock.now()
            ),
            busy_seconds=busy_seconds,
        )
        super().__init__(folder, self._file, clock)
        self.notifications: Hooks[Notification] = Hooks()
        self._lease_seconds = lease_seconds
        self._documents = DocumentWriter(self._file, clock)
        self._leases = Leases(self._presence, clock)
        self._entries = EntryWriter(self._file, self._leases, clock)
        #: Held while a run's lease is taken; before the file's mutex, never inside it.
        self._acquiring = threading.RLock()
        #: Guarded by the file's mutex.
        self._run_leases: dict[str, RunLease] = {}
        self._maintenance = Maintenance(self, lease_seconds / 3)
        if self._file.damage:
            self.damage = (self._file.damage,)
            warnings.warn(_damage_text(self._file.damage), DamagedJournalWarning, stacklevel=3)
        _open_stores().add(self)

    @property
    def usable(self) -> bool:
        return self._file.usable

    def syncs_fast(self) -> bool:
        return self._file.sync_seconds < _FAST_SYNC_SECONDS

    # --- runs ---

    def acquire_run(
        self,
        name: str,
        workflow: str = "",
        entries: Sequence[NewEntry] = (),
        status: str | None = None,
        busy_timeout: float | None = None,
    ) -> RunLease:
        files.check_identifier(name, "run id")
        self._file.check_process()
        with self._acquiring:
            run = self._share_run(name, entries, status)
            if run is not None:
                return run
            run = self._take_run(name, workflow, entries, status, busy_timeout)
        self._maintenance.start()
        if run.seq and run.created and self.notifications:
            self.notifications.emit(EntriesAppended(run_id=name, first=1, seq=run.seq))
        return run

    def _share_run(
        self, name: str, entries: Sequence[NewEntry], status: str | None
    ) -> RunLease | None:
        """Return the lease that this process has of a run, with one user more; None if none."""
        with self._file.mutex:
            run = self._run_leases.get(name)
            if run is None or not self._is_current(run):
                return None
            if not run.seq and (entries or status is not None):
                (written,) = self.append([Append(run, entries, status)], sync=False)
                if not isinstance(written, int):
                    return None
            run.users += 1
            return run

    def _is_current(self, run: RunLease) -> bool:
        return bool(self._file.rows("SELECT 1 FROM leases WHERE id = ?", (run.lease.fence,)))

    def _take_run(
        self,
        name: str,
        workflow: str,
        entries: Sequence[NewEntry],
        status: str | None,
        busy_timeout: float | None,
    ) -> RunLease:
        now = to_micros(self.clock.now())
        first = status or "pending"

        def body(db: apsw.Connection, insist: bool) -> RunLease:
            lease_name = run_lease_name(name)
            lease = self._leases.take(db, lease_name, self._lease_seconds, insist=insist)
            found: Any = db.execute("SELECT id FROM runs WHERE name = ?", (name,)).get
            if found is None:
                db.execute(
                    "INSERT INTO runs (name, workflow, status, created_at, updated_at)"
                    " VALUES (?, ?, ?, ?, ?)",
                    (name, workflow, first, now, now),
                )
                found = db.last_insert_rowid()
                seq = 0
            else:
                seq = last_seq(db, found)
                if not seq and status is not None:
                    sql = "UPDATE runs SET status = ?, updated_at = ? WHERE id = ?"
                    db.execute(sql, (status, now, found))
            run = RunLease(run=found, name=name, lease=lease, seq=seq, created=not seq)
            if not seq and entries:
                self._entries.append_first(db, found, entries, now)
                run.seq = len(entries)
            return run

        run = self._take(body, busy_timeout)
        with self._file.mutex:
            self._run_leases[name] = run
        return run

    def release_run(self, run: RunLease) -> None:
        with self._file.locked():
            if self._drop_user(run):
                self.release_lease(run.lease)

    def _drop_user(self, run: RunLease) -> bool:
        """Count one user less; return whether that was the last one."""
        run.users -= 1
        if run.users > 0:
            return False
        if self._run_leases.get(run.name) is run:
            del self._run_leases[run.name]
        return True

    def append(
        self, appends: Sequence[Append], *, sync: bool = True, busy_timeout: float | None = None
    ) -> list[int | FencedError | StaleDocumentError]:
        file = self._file
        if os.getpid() != file.pid:
            file.check_process()
        with file.mutex:  # until the numbers have moved on, or two threads would use the same
            seq = (
                self._entries.append_alone(appends[0], busy_timeout) if len(appends) == 1 else None
            )
            if seq is not None:
                outcome: list[int | FencedError | StaleDocumentError] = [seq]
            else:
                outcome, releases = self._entries.append(appends, busy_timeout)
                for run in releases:
                    self._drop_user(run)
            commit = file.committed
        if sync:
            file.sync(commit)
        if commit >= file.log_check_due:
            self._check_log()
        if self.notifications.active:
            self._notify(appends, outcome)
        return outcome

    def _check_log(self) -> None:
        if self._file.check_log():
            self._maintenance.ask_for_checkpoint()

    def _notify(
        self, appends: Sequence[Append], outcome: Sequence[int | FencedError | StaleDocumentError]
    ) -> None:
        """Report each run once, with all that was appended to it."""
        grown: dict[str, tuple[int, int]] = {}
        for append, seq in zip(appends, outcome, strict=True):
            if isinstance(seq, int) and append.entries:
                name = append.run.name
                first = grown[name][0] if name in grown else seq - len(append.entries) + 1
                grown[name] = (first, seq)
        for name, (first, seq) in grown.items():
            self.notifications.emit(EntriesAppended(run_id=name, first=first, seq=seq))

    def purge_run(self, name: str, first: Callable[[], None] | None = None) -> bool:
        record = self.run(name)
        if record is None:
            return False
        lease = self.take_lease(run_lease_name(name))
        try:
            if first is not None:
                first()
            self._file.write_and_sync(lambda db: self._delete_run(db, record.id))
        finally:
            self.release_lease(lease)
        self.collect()
        return True

    def _delete_run(self, db: apsw.Connection, run: int) -> None:
        self._entries.delete(db, run)
        db.execute("DELETE FROM runs WHERE id = ?", (run,))

    # --- documents ---

    def update_document(self, namespace: str, key: str, change: Change) -> Document | None:
        changed = self._documents.change({(namespace, key): change})
        self._check_log()
        self._notify_of_documents(changed)
        return changed[namespace, key][1]

    def set_documents(self, values: Mapping[tuple[str, str], Encoded | None]) -> None:
        changes: dict[tuple[str, str], Change]
        changes = {where: partial(_constant, value) for where, value in values.items()}
        self._notify_of_documents(self._documents.change(changes))

    def delete_documents(self, namespace: str | None = None) -> int:
        gone = self._documents.delete(namespace)
        self._notify_of_documents(gone)
        return len(gone)

    def _notify_of_documents(self, changed: Mapping[Where, Changed]) -> None:
        for (namespace, key), (before, after) in changed.items() if self.notifications else ():
            old, new = before.value if before else None, after.value if after else None
            self.notifications.emit(
                DocumentChanged(namespace=namespace, key=key, before=old, after=new)
            )

    # --- leases ---

    def take_lease(self, name: str, seconds: float = LEASE_SECONDS) -> Lease:

        def body(db: apsw.Connection, insist: bool) -> Lease:
            return self._leases.take(db, name, seconds, insist=insist)

        lease = self._take(body)
        self._maintenance.start()
        return lease

    def _take(
        self, body: Callable[[apsw.Connection, bool], ResultT], busy_timeout: float | None = None
    ) -> ResultT:
        """Take a lease; a holder that is late but lives is given a last chance to renew it.

        The write that delayed us may have delayed its renewal, too.
        """
        try:
            return self._try_to_take(body, busy_timeout, insist=False)
        except HolderLateError as late:
            if busy_timeout is not None:
                raise StoreBusyError(f"{self.folder}: a lease is about to expire") from late
            time.sleep(min(_GRACE_SECONDS, self._lease_seconds / 3))
            return self._try_to_take(body, busy_timeout, insist=True)

    def _try_to_take(
        self,
        body: Callable[[apsw.Connection, bool], ResultT],
        busy_timeout: float | None,
        *,
        insist: bool,
    ) -> ResultT:
        committed = False
        with self._file.locked():
            try:
                taken = self._file.write(lambda db: body(db, insist), busy_timeout)
                committed = True
            finally:
                self._entries.settle(committed=committed)
        return taken

    def renew_leases(self) -> None:
        self._file.write(lambda db: self._leases.renew(db, self._lease_seconds))

    def release_lease(self, lease: Lease) -> None:
        self._file.write(lambda db: self._leases.release(db, lease))

    # --- the whole journal ---

    def collect(self) -> int:
        return self._entries.collect()

    def checkpoint(self) -> None:
        """Copy the write-ahead log into the database file."""
        self._file.checkpoint()

    def empty_log(self) -> bool:
        return self._file.empty_log()

    def backup(self, target: Path) -> None:
        files.make_private_folder(target)
        if any(target.iterdir()):
            raise StorageError(f"{target} exists and is not empty; choose a new folder")
        self._file.copy_to(target / "journal.db")
        files.sync_file(target / "journal.db")

    def close(self) -> None:
        if os.getpid() != self._file.pid:
            return  # a forked child has nothing to release, and its parent still lives
        self._maintenance.stop()
        with self._file.mutex:
            runs = list(self._run_leases.values())
            self._run_leases.clear()
        with contextlib.suppress(StorageError):  # a failed store cannot release anything
            for run in runs:
                self.release_lease(run.lease)
        self._file.close()
        self._presence.close()
        _open_stores().discard(self)


def _constant(value: Encoded | None, _before: bytes | None) -> Encoded | None:
    return value


def _damage_text(found: Damage) -> str:
    return f"{found.file}: {found.reason}. The log was copied to {found.moved_to}"


# --- the stores of this process ---

#: Stores that the parent of this forked process had open. Never closed here: that would act on the
#: parent's files.
_inherited: list[SqliteStore] = []
_open_stores: PerProcess[weakref.WeakSet[SqliteStore]] = PerProcess(
    weakref.WeakSet, inherited=_inherited.extend
)


def _close_all() -> None:
    for store in list(_open_stores()):
        with contextlib.suppress(StorageError):
            store.close()


run_at_exit(2, _close_all)


def _refuse_inherited(folder: Path) -> None:
    """Raise in a forked child whose parent had this folder open.

    SQLite still counts the parent's locks as this process's own and takes none: another process
    could restart the log under it.
    """
    if any(store.folder == folder for store in _inherited):
        raise StoreClosedError(
            f"{folder} was open when this process was forked, and SQLite cannot open it safely"
            " here again; start the child with 'spawn' or as a program of its own, or close the"
            " store before the fork"
        )


# --- maintenance ---


class _Maintained(Protocol):
    def renew_leases(self) -> None: ...

    def checkpoint(self) -> None: ...


class Maintenance:
    """One daemon thread per store, started when there is something to do.

    What fails here fails again at the store's next write, where a caller waits for the result.
    """

    def __init__(self, store: _Maintained, interval: float) -> None:
        self._store = weakref.ref(store)
        self._interval = interval
        self._wake = threading.Event()
        self._checkpoint_due = False
        self._stopped = False
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread, if it does not run yet."""
        if self._thread is None and not self._stopped:
            name = "maestro-maintenance"
            self._thread = threading.Thread(target=self._work, name=name, daemon=True)
            self._thread.start()

    def ask_for_checkpoint(self) -> None:
        """Have the log copied soon."""
        if not self._checkpoint_due:
            self._checkpoint_due = True
            self.start()
            self._wake.set()

    def stop(self) -> None:
        """Stop the thread, and wait for what it is doing."""
        self._stopped = True
        self._wake.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout=10)

    def _work(self) -> None:
        renewal = time.monotonic() + self._interval
        while not self._stopped:
            self._wake.wait(max(0.0, renewal - time.monotonic()))
            self._wake.clear()
            store = self._store()
            if store is None or self._stopped:
                return
            try:
                # Leases first: frequent checkpoints must not delay them.
                if time.monotonic() >= renewal:
                    renewal = time.monotonic() + self._interval
                    store.renew_leases()
                if self._checkpoint_due:
                    self._checkpoint_due = False
                    store.checkpoint()
            except MaestroError as error:
                logger.debug("maintenance: %s", error)
            finally:
                del store
