"""The journal in a folder: the ``Store`` contract over one SQLite file."""

from __future__ import annotations

import contextlib
import os
import stat
import threading
import time
import warnings
import weakref
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from maestro_hive.kernel import files
from maestro_hive.kernel.clock import Clock, SystemClock
from maestro_hive.kernel.errors import (
    FolderError,
    StorageError,
    StoreBusyError,
    StoreClosedError,
)
from maestro_hive.kernel.hooks import Hooks
from maestro_hive.kernel.logs import get_logger
from maestro_hive.kernel.process import PerProcess, run_at_exit
from maestro_hive.maestro.state.records import (
    Damage,
    Document,
    DocumentChanged,
    EntriesAppended,
    Lease,
    Notification,
)
from maestro_hive.maestro.state.sqlite.accounts import AccountWriter
from maestro_hive.maestro.state.sqlite.chunks import ChunkWriter
from maestro_hive.maestro.state.sqlite.claims import Claims
from maestro_hive.maestro.state.sqlite.dispatch import DispatchTable, Wanted
from maestro_hive.maestro.state.sqlite.documents import DocumentWriter
from maestro_hive.maestro.state.sqlite.entries import EntryWriter, last_seq
from maestro_hive.maestro.state.sqlite.journal_file import JournalFile
from maestro_hive.maestro.state.sqlite.leases import HolderLateError, Leases, run_lease_name
from maestro_hive.maestro.state.sqlite.maintenance import Maintenance
from maestro_hive.maestro.state.sqlite.reader import JournalReader
from maestro_hive.maestro.state.sqlite.wal import DamagedJournalWarning, keep_damaged_log
from maestro_hive.maestro.state.store import LEASE_SECONDS, Append, Change, RunLease

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
    from pathlib import Path

    import apsw

    from maestro_hive.kernel.errors import FencedError
    from maestro_hive.maestro.state.budgets import Limits, Reservation, RunBudget, StoredLimit
    from maestro_hive.maestro.state.codec import Encoded
    from maestro_hive.maestro.state.records import NewDispatch, NewEntry, RunRecord
    from maestro_hive.maestro.state.sqlite.documents import Changed, Where
    from maestro_hive.maestro.state.store import Adopt, ChunkAppend, NewRun, Outcome

logger = get_logger(__name__)

ResultT = TypeVar("ResultT")

#: A disk that takes longer than this for an fsync is waited for in a thread.
_FAST_SYNC_SECONDS = 0.002
#: How long a late holder gets to renew its lease once nothing is in its way any more.
_GRACE_SECONDS = 0.5


#: A join would take three times as long.
_FIND_RUN = "SELECT id, (SELECT deaths FROM dispatch WHERE run = runs.id) FROM runs WHERE name = ?"
_ADD_RUN = (
    "INSERT INTO runs (name, workflow, status, created_at, updated_at, parent)"
    " VALUES (?, ?, ?, ?, ?, ?)"
)
#: An executor may have listed it, without a workflow.
_START_RUN = (
    "UPDATE runs SET status = ?, updated_at = ?, workflow = iif(workflow = '', ?, workflow),"
    " parent = coalesce(parent, ?) WHERE id = ?"
)


class _First(NamedTuple):
    """What a run gets that has no entries yet."""

    workflow: str
    entries: Sequence[NewEntry]
    status: str | None
    dispatch: NewDispatch | None
    parent: str | None
    budget: RunBudget | None = None


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
        _warn_of_writers(folder)
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
        self._chunks = ChunkWriter(self._leases)
        self._dispatch = DispatchTable(clock)
        self._claims = Claims(self._dispatch, self._leases, lease_seconds)
        self._accounts = AccountWriter(self._leases, self._presence)
        self._entries = EntryWriter(
            self._file, self._leases, self._documents, self._dispatch, self._accounts, clock
        )
        #: Held while a run's lease is taken; before the file's mutex, never inside it.
        self._acquiring = threading.RLock()
        #: Guarded by the file's mutex.
        self._run_leases: dict[str, RunLease] = {}
        #: The fencing numbers of leases that are not released by closing.
        self._retained: set[int] = set()
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
        *,
        dispatch: NewDispatch | None = None,
        parent: str | None = None,
        budget: RunBudget | None = None,
        sync: bool = False,
    ) -> RunLease:
        files.check_identifier(name, "run id")
        self._file.check_process()
        first = _First(workflow, entries, status, dispatch, parent, budget)
        with self._acquiring:
            run = self._share_run(name, first)
            is_shared = run is not None
            if run is None:
                run = self._take_run(name, first, busy_timeout)
            commit = self._file.committed
        if sync:
            self._file.sync(commit)
        if is_shared:
            return run
        self._maintenance.start()
        if run.seq and run.created and self.notifications:
            self.notifications.emit(EntriesAppended(run_id=name, first=1, seq=run.seq))
        return run

    def _share_run(self, name: str, first: _First) -> RunLease | None:
        """Return the lease that this process has of a run, with one user more; None if none."""
        with self._file.mutex:
            run = self._run_leases.get(name)
            if run is None or not self._is_current(run):
                return None
            if not run.seq and (first.entries or first.status is not None or first.dispatch):
                self._file.write(lambda db: self._find_or_add(db, name, first))
                append = Append(
                    run, first.entries, first.status, dispatch=first.dispatch, budget=first.budget
                )
                (written,) = self.append([append], sync=False)
                if isinstance(written, Exception):
                    return None
            run.users += 1
            return run

    def _is_current(self, run: RunLease) -> bool:
        return bool(self._file.rows("SELECT 1 FROM leases WHERE id = ?", (run.lease.fence,)))

    def _take_run(self, name: str, first: _First, busy_timeout: float | None) -> RunLease:
        def body(db: apsw.Connection, insist: bool) -> RunLease:
            lease_name = run_lease_name(name)
            lease = self._leases.take(db, lease_name, self._lease_seconds, insist=insist)
            number, seq, deaths = self._find_or_add(db, name, first)
            run = RunLease(number, name, lease, seq, created=not seq)
            if deaths is not None:
                self._dispatch.activate(db, number)
                run.dispatched, run.deaths = True, deaths
            if not seq:
                self._write_first(db, run, first)
            return run

        run = self._take(body, busy_timeout)
        with self._file.mutex:
            self._run_leases[name] = run
        return run

    def _find_or_add(
        self, db: apsw.Connection, name: str, first: _First
    ) -> tuple[int, int, int | None]:
        """Return a run's number, its last entry's, and its deaths if it belongs to workers."""
        found = db.execute(_FIND_RUN, (name,)).fetchone()
        now = self.clock.nanos() // 1000
        if found is None:
            status = first.status or "pending"
            db.execute(_ADD_RUN, (name, first.workflow, status, now, now, first.parent))
            return db.last_insert_rowid(), 0, None
        number, deaths = found
        seq = last_seq(db, number)
        if not seq and first.status is not None:
            db.execute(_START_RUN, (first.status, now, first.workflow, first.parent, number))
        return number, seq, deaths

    def _write_first(self, db: apsw.Connection, run: RunLease, first: _First) -> None:
        """Write the first entries of a run whose lease is taken, and give it to workers."""
        if first.entries:
            self._entries.append_first(db, run.run, first.entries, self.clock.nanos() // 1000)
            run.seq = len(first.entries)
        if first.budget is not None:
            self._accounts.restore(db, run.name, first.budget)
        if first.dispatch is not None:
            self._dispatch.add(db, run.run, first.dispatch, active=True)
            run.dispatched = True

    def release_run(self, run: RunLease, due: float | None = 0.0) -> None:
        with self._file.locked():
            if self._drop_user(run):
                self._release(run, due)

    def _release(self, run: RunLease, due: float | None) -> None:
        """Release the lease that a run's last user had."""
        if not run.dispatched:
            self.release_lease(run.lease)
            return

        def body(db: apsw.Connection) -> None:
            if self._leases.release(db, run.lease):
                self._dispatch.release(db, run.run, due)

        self._retained.discard(run.lease.fence)
        self._file.write(body)

    def create_runs(self, runs: Sequence[NewRun]) -> list[bool]:
        for run in runs:
            files.check_identifier(run.name, "run id")
        committed = False
        with self._file.locked():
            try:
                created = self._file.write(lambda db: [self._create(db, run) for run in runs])
                committed = True
            finally:
                self._entries.settle(committed=committed)
            commit = self._file.committed
        self._file.sync(commit)
        self._shorten_log()
        for run, is_new in zip(runs, created, strict=True) if self.notifications else ():
            if is_new:
                last = len(run.entries)
                self.notifications.emit(EntriesAppended(run_id=run.name, first=1, seq=last))
        return created

    def _create(self, db: apsw.Connection, run: NewRun) -> bool:
        lease = self._leases.find(db, run_lease_name(run.name))
        if lease is not None and self.is_alive(lease):
            return False
        first = _First(run.workflow, run.entries, run.status, run.dispatch, run.parent)
        number, seq, _ = self._find_or_add(db, run.name, first)
        if seq:
            return False
        self._entries.append_first(db, number, run.entries, self.clock.nanos() // 1000)
        self._dispatch.add(db, number, run.dispatch)
        return True

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
    ) -> list[Outcome]:
        file = self._file
        if os.getpid() != file.pid:
            file.check_process()
        changed: Mapping[Where, Changed] = {}
        alone = None
        with file.mutex:  # until the numbers have moved on, or two threads would use the same
            run = appends[0].run if len(appends) == 1 else None
            if run is not None and not (run.root or run).deaths:
                alone = self._entries.append_alone(appends[0], busy_timeout)
            if alone is not None:
                outcome: list[Outcome] = [alone]
            else:
                outcome, releases, changed = self._entries.append(appends, busy_timeout)
                for run in releases:
                    self._drop_user(run)
            commit = file.committed
        if sync:
            file.sync(commit)
        if file.log_pages > file.log_pages_due:
            self._shorten_log()
        if self.notifications.active:
            self._notify(appends, outcome)
            self._notify_of_documents(changed)
        return outcome

    def append_chunks(
        self, appends: Sequence[ChunkAppend], *, busy_timeout: float | None = None
    ) -> list[FencedError | None]:
        outcome = self._file.write(lambda db: self._chunks.append(db, appends), busy_timeout)
        self._shorten_log()
        return outcome

    def _shorten_log(self) -> None:
        if self._file.shorten_log():
            self._maintenance.ask_for_checkpoint()

    def _notify(self, appends: Sequence[Append], outcome: Sequence[Outcome]) -> None:
        """Report each run once, with all that was appended to it."""
        grown: dict[str, tuple[int, int]] = {}
        for append, written in zip(appends, outcome, strict=True):
            if isinstance(written, list) and written:
                name = append.run.name
                first = grown[name][0] if name in grown else written[0].seq
                grown[name] = (first, written[-1].seq)
        for name, (first, seq) in grown.items():
            self.notifications.emit(EntriesAppended(run_id=name, first=first, seq=seq))

    def purge_runs(
        self,
        names: Sequence[str],
        first: Callable[[], None] | None = None,
        documents: Sequence[Where] = (),
    ) -> int:
        leases: list[Lease] = []
        try:
            for name in names:
                leases.append(self.take_lease(run_lease_name(name)))  # noqa: PERF401 - one may fail
            if first is not None:
                first()
            records = [record for record in map(self.run, names) if record is not None]
            changed = self._file.write_and_sync(
                lambda db: self._delete_runs(db, records, documents)
            )
        finally:
            for lease in leases:
                self.release_lease(lease)
        self._notify_of_documents(changed)
        if records:
            self.collect()
        return len(records)

    def _delete_runs(
        self, db: apsw.Connection, records: Sequence[RunRecord], documents: Sequence[Where]
    ) -> dict[Where, Changed]:
        for record in records:
            self._entries.delete(db, record.id)
            self._chunks.delete(db, record.id)
            self._dispatch.delete(db, record.id)
            self._accounts.delete(db, record.name)
            db.execute("DELETE FROM runs WHERE id = ?", (record.id,))
        gone = partial(_constant, None)
        return {where: self._documents.change_in(db, where, gone) for where in documents}

    # --- budgets ---

    def set_limits(
        self,
        change: Callable[[Limits], Iterable[StoredLimit]],
        concerning: Collection[str] | None = None,
    ) -> list[StoredLimit]:
        def body(db: apsw.Connection) -> list[StoredLimit]:
            changed = self._accounts.set_limits(db, change, concerning)
            if any(self._accounts.may_concern(db, each.account) for each in changed):
                self._dispatch.wake_bankrupt(db, {each.account for each in changed})
            return changed

        return self._file.write_and_sync(body)

    def recover_reservations(self) -> int:
        if not self._file.rows("SELECT 1 FROM reservations LIMIT 1"):
            return 0
        now = self.clock.nanos() // 1000
        return self._file.write(lambda db: self._accounts.recover(db, now))

    def release_reservations(self, account: str | None = None) -> list[Reservation]:
        def body(db: apsw.Connection) -> list[Reservation]:
            self._accounts.recover(db, self.clock.nanos() // 1000)
            released = self._accounts.release_lost(db, account)
            changed = {account for each in released for account in each.accounts}
            self._dispatch.wake_bankrupt(db, changed)
            return released

        return self._file.write_and_sync(body)

    # --- documents ---

    def update_document(
        self, namespace: str, key: str, change: Change, wake: str | None = None
    ) -> Document | None:
        then = None if wake is None else partial(self._dispatch.wake, name=wake)
        changed = self._documents.change({(namespace, key): change}, then)
        self._shorten_log()
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

    # --- dispatch ---

    def claim_runs(
        self,
        *,
        queue: str,
        workflows: Collection[str],
        version: str | None = None,
        limit: int = 1,
    ) -> list[RunLease]:
        wanted = Wanted(queue, frozenset(workflows), version, limit)
        if not self._dispatch.has_work(self._file.rows, wanted):
            return []
        self._file.check_process()
        # Until others of this process find the leases.
        with self._acquiring, self._file.locked():
            claimed = self._file.write(lambda db: self._claims.claim(db, wanted))
            self._run_leases.update({run.name: run for run in claimed})
        if claimed:
            self._maintenance.start()
        self._shorten_log()
        return claimed

    def recover_runs(self, adopt: Adopt) -> list[str]:
        table, rows = self._dispatch, self._file.rows
        if table.has_other_boots(rows):
            self._file.write(table.rebase)
        now = self.clock.awake_seconds()
        abandoned = self._claims.abandoned(rows, self._presence.lives, now)
        adopted = {
            each.name: adopt(each.name)
            for each in abandoned
            if not each.dispatched and not each.is_over
        }
        theirs = [each for each in abandoned if each.dispatched or adopted.get(each.name)]
        if not theirs and not table.unleased(rows):
            return []
        return self._file.write(lambda db: self._claims.recover(db, theirs, adopted))

    def wake_run(self, name: str) -> bool:
        with self._file.locked():
            woken = self._file.write(lambda db: self._dispatch.wake(db, name))
            commit = self._file.committed
        if woken:
            self._file.sync(commit)
        return woken

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

    def retain_lease(self, lease: Lease) -> None:
        self._retained.add(lease.fence)

    def release_lease(self, lease: Lease) -> None:
        self._retained.discard(lease.fence)
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
                self._release(run, 0.0)
        self._file.close()
        if not self._retained:  # or this process, alive, would count as dead
            self._presence.close()
        _open_stores().discard(self)


def _constant(value: Encoded | None, _before: bytes | None) -> Encoded | None:
    return value


def _damage_text(found: Damage) -> str:
    copied = f". The log was copied to {found.moved_to}" if found.moved_to else ""
    return f"{found.file}: {found.reason}{copied}"


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


#: Folders that a warning was logged for.
_warned_of: PerProcess[set[Path]] = PerProcess(set)


def _warn_of_writers(folder: Path) -> None:
    """Warn, once, of a folder in which other users may replace the journal by one of their own."""
    try:
        mode = stat.S_IMODE(folder.stat().st_mode)
    except OSError as error:
        raise FolderError(folder, f"cannot be examined ({error.strerror})") from error
    if mode & (stat.S_IWGRP | stat.S_IWOTH) and folder not in _warned_of():
        _warned_of().add(folder)
        logger.warning(
            "%s can be written by other users (mode %04o), who could delete or replace what is"
            " recorded; `maestro doctor --fix` makes it private",
            folder,
            mode,
        )
