"""The journal in a folder: the ``Store`` contract over one SQLite file."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import threading
import time
import warnings
import weakref
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from maestro_hive.kernel import files
from maestro_hive.kernel.clock import Clock, SystemClock
from maestro_hive.kernel.errors import (
    CorruptionError,
    FencedError,
    MaestroError,
    StorageError,
    StoreClosedError,
)
from maestro_hive.kernel.files import refuse_shared_folder
from maestro_hive.kernel.hooks import Hooks
from maestro_hive.maestro.state.records import (
    Damage,
    Document,
    DocumentChanged,
    EntriesAppended,
    Entry,
    Lease,
    Notification,
    RunRecord,
    StoredValue,
    from_micros,
    to_micros,
)
from maestro_hive.maestro.state.sqlite.connection import CHECKPOINT_PAGES, JournalFile
from maestro_hive.maestro.state.sqlite.documents import Documents
from maestro_hive.maestro.state.sqlite.entries import Entries, last_seq
from maestro_hive.maestro.state.sqlite.leases import (
    FIND_LEASE,
    FIND_RUN_LEASES,
    HolderLateError,
    Leases,
    Presence,
    read_lease,
)
from maestro_hive.maestro.state.sqlite.wal import DamagedJournalWarning, keep_damaged_log
from maestro_hive.maestro.state.store import LEASE_SECONDS, Append, Change, RunLease

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    import apsw

    from maestro_hive.maestro.state.codec import Encoded


ResultT = TypeVar("ResultT")

_RUN_COLUMNS = "id, name, workflow, status, created_at, updated_at"
#: A disk that takes longer than this for an fsync is left to a thread.
_QUICK_SYNC_SECONDS = 0.002
#: How long a late holder gets to renew once nothing is in its way any more.
_LAST_CHANCE_SECONDS = 0.5


class SqliteStore:
    """A store in a folder; see ``store`` for what it promises.

    ``borrow_store`` gives all users of a folder in one process the same one; use that.
    """

    def __init__(
        self,
        folder: Path,
        *,
        clock: Clock | None = None,
        lease_seconds: float = LEASE_SECONDS,
        busy_seconds: float = 30.0,
    ) -> None:
        self.folder = files.make_private_folder(folder).resolve()
        self.clock: Clock = clock or SystemClock()
        self.notifications: Hooks[Notification] = Hooks()
        refuse_shared_folder(self.folder)
        _refuse_inherited(self.folder)
        self._lease_seconds = lease_seconds
        self._file = JournalFile(
            self.folder, keep_damaged_log=self._keep_damaged_log, busy_seconds=busy_seconds
        )
        self._documents = Documents(self._file, self.clock)
        self._presence = Presence(self.folder, self.clock)
        self._leases = Leases(self._presence, self.clock)
        self._entries = Entries(self._file, self._leases, self.clock)
        self._run_leases: dict[str, RunLease] = {}
        self._run_leases_mutex = threading.RLock()
        self._upkeep = Upkeep(self, lease_seconds / 3)
        self.damage: tuple[Damage, ...] = (self._file.damage,) if self._file.damage else ()
        if self._file.damage:
            warnings.warn(_damage_text(self._file.damage), DamagedJournalWarning, stacklevel=3)
        _open_stores.add(self)

    @property
    def location(self) -> str:
        """The folder."""
        return str(self.folder)

    @property
    def usable(self) -> bool:
        """False once it failed or was closed: open another one."""
        return self._file.usable

    def syncs_fast(self) -> bool:
        """Return whether the disk syncs fast enough for an event loop to wait for it."""
        return self._file.sync_seconds < _QUICK_SYNC_SECONDS

    # --- runs ---

    def acquire_run(self, name: str, workflow: str = "") -> RunLease:
        """Take a run for this process."""
        files.check_identifier(name, "run id")
        self._file.check_process()
        with self._run_leases_mutex:
            hold = self._run_leases.get(name)
            if hold is not None:
                lease = hold.lease
                fenced, _ = self._file.write(lambda db: self._leases.check(db, lease))
                if fenced is None:
                    hold.users += 1
                    return hold
            hold = self._run_leases[name] = self._take_run(name, workflow)
        self._upkeep.start()
        return hold

    def _take_run(self, name: str, workflow: str) -> RunLease:
        now = to_micros(self.clock.now())

        def body(db: apsw.Connection, insist: bool) -> RunLease:
            lease = self._leases.take(db, f"run/{name}", self._lease_seconds, insist=insist)
            db.execute(
                "INSERT INTO runs (name, workflow, status, created_at, updated_at)"
                " VALUES (?, ?, 'pending', ?, ?) ON CONFLICT (name) DO NOTHING",
                (name, workflow, now, now),
            )
            run: Any = db.execute("SELECT id FROM runs WHERE name = ?", (name,)).get
            return RunLease(run=run, name=name, lease=lease, seq=last_seq(db, run))

        return self._take(body)

    def release_run(self, hold: RunLease) -> None:
        """Give a run back when its last user in this process is done."""
        self._file.check_process()
        with self._run_leases_mutex:
            hold.users -= 1
            if hold.users > 0:
                return
            if self._run_leases.get(hold.name) is hold:
                del self._run_leases[hold.name]
        self.release_lease(hold.lease)

    def run(self, name: str) -> RunRecord | None:
        """Find a run by its name."""
        rows = self._file.rows(f"SELECT {_RUN_COLUMNS} FROM runs WHERE name = ?", (name,))  # noqa: S608
        return run_record(rows[0]) if rows else None

    def runs(self, status: str | None = None, limit: int | None = None) -> list[RunRecord]:
        """List runs, newest first."""
        rows = self._file.rows(
            f"SELECT {_RUN_COLUMNS} FROM runs WHERE ?1 IS NULL OR status = ?1"  # noqa: S608
            " ORDER BY id DESC LIMIT ?2",
            (status, -1 if limit is None else limit),
        )
        return [run_record(row) for row in rows]

    # --- entries ---

    def append(
        self, appends: Sequence[Append], *, sync: bool = True, busy_timeout: float | None = None
    ) -> list[int | FencedError]:
        """Record entries in one transaction."""
        with self._file.alone():  # until the numbers have moved on, or two threads use the same
            before = (
                {append.hold: append.hold.seq for append in appends} if self.notifications else {}
            )
            ticket, outcome = self._entries.append(appends, busy_timeout)
            notifications = [
                EntriesAppended(run_id=hold.name, first=seq + 1, seq=hold.seq)
                for hold, seq in before.items()
                if hold.seq > seq
            ]
        if sync:
            self._file.sync(ticket)
        self._tend()
        for each in notifications:
            self.notifications.emit(each)
        return outcome

    def _tend(self) -> None:
        self._file.tend()
        if self._file.log_pages > CHECKPOINT_PAGES:
            self._upkeep.ask_for_checkpoint()

    def entries(self, run: int, after: int = 0) -> list[Entry]:
        """Return a run's entries in order, making sure that none is missing."""
        return self._entries.read(run, after)

    def load(self, entry: Entry) -> bytes | None:
        """Return an entry's value, checked."""
        return self._entries.load(entry)

    def values_of(self, run: int) -> Iterator[StoredValue]:
        """Yield a run's large values as they are stored."""
        return self._entries.values_of(run)

    def purge_run(self, name: str, first: Callable[[], None] | None = None) -> bool:
        """Forget a run, its entries, and the values only it referred to."""
        record = self.run(name)
        if record is None:
            return False
        lease = self.take_lease(f"run/{name}")
        try:
            if first is not None:
                first()
            _, ticket = self._file.write(lambda db: self._forget_run(db, record.id))
            self._file.sync(ticket)
        finally:
            self.release_lease(lease)
        self.collect()
        return True

    def _forget_run(self, db: apsw.Connection, run: int) -> None:
        self._entries.delete(db, run)
        db.execute("DELETE FROM runs WHERE id = ?", (run,))

    # --- documents ---

    def document(self, namespace: str, key: str) -> Document | None:
        """Return a document, checked."""
        return self._documents.get(namespace, key)

    def documents(self, namespace: str | None = None) -> list[Document]:
        """Return documents by namespace and key."""
        return self._documents.all(namespace)

    def update_document(self, namespace: str, key: str, change: Change) -> Document | None:
        """Replace a document by what ``change`` makes of it."""
        before, after = self._documents.update(namespace, key, change)
        self._tend()
        self._tell_document(namespace, key, before, after)
        return after

    def set_documents(self, values: Mapping[tuple[str, str], Encoded | None]) -> None:
        """Set many documents at once."""
        for (namespace, key), (before, after) in self._documents.set_many(values).items():
            self._tell_document(namespace, key, before, after)

    def delete_documents(self, namespace: str | None = None) -> int:
        """Delete documents."""
        gone = self._documents.delete(namespace)
        for document in gone:
            self._tell_document(document.namespace, document.key, document, None)
        return len(gone)

    def _tell_document(
        self, namespace: str, key: str, before: Document | None, after: Document | None
    ) -> None:
        if self.notifications:
            old = before.value if before else None
            new = after.value if after else None
            self.notifications.emit(
                DocumentChanged(namespace=namespace, key=key, before=old, after=new)
            )

    # --- leases ---

    def take_lease(self, name: str, seconds: float = LEASE_SECONDS) -> Lease:
        """Become the only one under this name."""

        def body(db: apsw.Connection, insist: bool) -> Lease:
            return self._leases.take(db, name, seconds, insist=insist)

        lease = self._take(body)
        self._upkeep.start()
        return lease

    def _take(self, body: Callable[[apsw.Connection, bool], ResultT]) -> ResultT:
        """Take a lease, durably; a holder that is late but lives is given a last chance to renew.

        It may have been kept from that by the very write that kept us from asking.
        """
        try:
            taken, ticket = self._file.write(lambda db: body(db, False))
        except HolderLateError:
            time.sleep(min(_LAST_CHANCE_SECONDS, self._lease_seconds / 3))
            taken, ticket = self._file.write(lambda db: body(db, True))
        self._file.sync(ticket)
        return taken

    def renew_leases(self) -> None:
        """Extend everything this store holds."""
        self._file.write(lambda db: self._leases.renew(db, self._lease_seconds))

    def release_lease(self, lease: Lease) -> None:
        """Give a lease back."""
        _, ticket = self._file.write(lambda db: self._leases.release(db, lease))
        self._file.sync(ticket)

    def lease(self, name: str) -> Lease | None:
        """Return a lease as it stands."""
        rows = self._file.rows(FIND_LEASE, (name,))
        return read_lease(rows[0]) if rows else None

    def run_leases(self) -> dict[str, Lease]:
        """Return who holds which runs."""
        return self._leases.run_leases(self._file.rows(FIND_RUN_LEASES))

    # --- the whole ---

    def collect(self) -> int:
        """Delete values that no entry refers to, directly or through a difference."""
        with self._file.alone():  # or a value that is just being appended builds on a deleted one
            return self._entries.collect()

    def checkpoint(self) -> None:
        """Copy the write-ahead log into the database file."""
        self._file.checkpoint()

    def empty_log(self) -> bool:
        """Leave nothing in the write-ahead log; False if somebody is reading from it just now."""
        return self._file.empty_log()

    def check(self) -> list[str]:
        """Read every page, entry, value and document."""
        wrong: list[str] = []
        try:
            wrong += self._file.integrity()
            self.documents()
            for record in self.runs():
                for entry in self.entries(record.id):
                    self.load(entry)
        except CorruptionError as error:
            wrong.append(str(error))
        return wrong

    def backup(self, target: Path) -> None:
        """Copy the live journal to ``target``, complete or not at all."""
        files.make_private_folder(target)
        if any(target.iterdir()):
            raise StorageError(f"{target} exists and is not empty; choose a new folder")
        self._file.copy_to(target / "journal.db")
        files.sync_file(target / "journal.db")

    def close(self) -> None:
        """Give back what is held and close."""
        if not self._file.is_here():
            return  # a forked child has nothing to give back, and its parent still lives
        self._upkeep.stop()
        with self._run_leases_mutex:
            holds = list(self._run_leases.values())
            self._run_leases.clear()
        with contextlib.suppress(StorageError):  # a failed store cannot give anything back
            for hold in holds:
                self.release_lease(hold.lease)
        self._file.close()
        self._presence.close()
        _open_stores.discard(self)

    def _keep_damaged_log(self, reason: str) -> Damage:
        journal = self.folder / "journal.db"
        return keep_damaged_log(self.folder, journal, reason, self.clock.now())


def _damage_text(found: Damage) -> str:
    return f"{found.file}: {found.reason}. The log is kept as {found.moved_to}"


def run_record(row: tuple[Any, ...]) -> RunRecord:
    """Turn a row of ``runs`` into a record."""
    number, name, workflow, status, created_at, updated_at = row
    return RunRecord(
        id=number,
        name=name,
        workflow=workflow,
        status=status,
        created_at=from_micros(created_at),
        updated_at=from_micros(updated_at),
    )


_open_stores: weakref.WeakSet[SqliteStore] = weakref.WeakSet()
_abandoned: list[SqliteStore] = []


@atexit.register
def _close_all() -> None:
    for store in list(_open_stores):
        with contextlib.suppress(StorageError):
            store.close()


def _refuse_inherited(folder: Path) -> None:
    """Raise in a forked child whose parent had this folder open.

    SQLite still believes that the parent's locks are this process's own and takes none: another
    process could start the log anew under it.
    """
    if any(store.folder == folder for store in _abandoned):
        raise StoreClosedError(
            f"{folder} was open when this process was forked, and SQLite cannot open it safely"
            " here again; start the child with 'spawn' or as a program of its own, or close the"
            " store before the fork"
        )


def _abandon_in_child() -> None:
    # Closing a connection that the parent opened would act on the parent's files: never do.
    _abandoned.extend(_open_stores)
    _open_stores.clear()


os.register_at_fork(after_in_child=_abandon_in_child)


# --- upkeep ---


logger = logging.getLogger(__name__)


class _Keeps(Protocol):
    def renew_leases(self) -> None: ...

    def checkpoint(self) -> None: ...


class Upkeep:
    """One daemon thread per store, started when there is something to do.

    What fails here fails again, and loudly, at the store's next write: that is where somebody is
    waiting for an answer.
    """

    def __init__(self, store: _Keeps, interval: float) -> None:
        self._store = weakref.ref(store)
        self._interval = interval
        self._wake = threading.Event()
        self._checkpoint_due = False
        self._stopped = False
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin, if not yet."""
        if self._thread is None and not self._stopped:
            self._thread = threading.Thread(target=self._work, name="maestro-upkeep", daemon=True)
            self._thread.start()

    def ask_for_checkpoint(self) -> None:
        """Have the log copied soon."""
        if not self._checkpoint_due:
            self._checkpoint_due = True
            self.start()
            self._wake.set()

    def stop(self) -> None:
        """End, and wait for what is under way."""
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
                # Leases first: whoever asks for checkpoints without pause must not starve them.
                if time.monotonic() >= renewal:
                    renewal = time.monotonic() + self._interval
                    store.renew_leases()
                if self._checkpoint_due:
                    self._checkpoint_due = False
                    store.checkpoint()
            except MaestroError as error:
                logger.debug("upkeep: %s", error)
            finally:
                del store
