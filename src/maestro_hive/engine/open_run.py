"""A run that this process executes: its lease, its folded state, its steps in flight, its copies.

Everybody in the process who opens a run gets the same object. ``record`` is for an event loop,
``append`` for any thread; both return when the entries are recorded and part of ``state``.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import threading
import time
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, NamedTuple

from maestro_hive.engine.copies import RunCopies, copier, has_copies
from maestro_hive.engine.shared import forget_shared, shared
from maestro_hive.kernel.errors import FencedError, StorageError
from maestro_hive.maestro.state.projections import RunState, fold
from maestro_hive.maestro.state.recorder import Recorder, recorder_for
from maestro_hive.maestro.state.records import Entry, EntryKind, NewEntry, from_micros
from maestro_hive.maestro.state.run_document import CopiedEntries, RunText
from maestro_hive.maestro.state.store import Append
from maestro_hive.maestro.state.stores import close_store, open_store
from maestro_hive.maestro.state.views import show_fields

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from maestro_hive.engine.config import StateConfig
    from maestro_hive.maestro.state.run_document import RunCopy
    from maestro_hive.maestro.state.store import DocumentGuard, Reader, RunLease, Store

logger = logging.getLogger(__name__)

#: How many more times a task may be cancelled while its last write is in flight.
_CANCELLATIONS = 100
#: A larger value is not held in memory: the journal has it.
_SMALL_BYTES = 4096
#: The copy for resuming is written again only after this many times what it last cost.
_COPY_COST_FACTOR = 33
#: A run that is shorter than this is copied once, at its end.
_FIRST_COPY_SECONDS = 1.0


class Restored(NamedTuple):
    """Where a run was resumed from when it was not the journal."""

    source: str
    saved_at: str


class OpenRun:
    """One run, leased by this process and shared by all its users there.

    ``mutex`` guards ``state``. ``fresh`` says that what is in the journal shall not count: the
    next append records that first.
    """

    def __init__(self, store: Store, run_id: str) -> None:
        self.run_id = run_id
        self.store = store
        self.mutex = threading.RLock()
        self.state = RunState()
        self.fresh = False
        self.users = 0
        self.restored: Restored | None = None
        #: Memories of personas as they were last decoded, and from which entry.
        self.decoded_memories: dict[str, tuple[int, dict[str, Any]]] = {}
        self._lease: RunLease | None = None
        self._in_flight: dict[bytes, list[Future[None]]] = {}
        self._last_step = 0
        self._recorder: Recorder | None = None
        self._copies: RunCopies | None = None
        self._config: StateConfig | None = None
        self._copy_due = float("inf")
        self._fence_seen = 0

    @property
    def lease(self) -> RunLease:
        """The right to append to the run."""
        assert self._lease is not None, "it was opened"
        return self._lease

    # --- opening and closing ---

    def open(
        self,
        config: StateConfig,
        workflow: str = "",
        entries: Sequence[NewEntry] = (),
        status: str | None = None,
        busy_timeout: float | None = None,
    ) -> bool:
        """Become a user of the run; False if another process has taken it over meanwhile."""
        with self.mutex:
            if self.users and self._is_fenced():
                return False
            if not self.users:
                self._lease = self.store.acquire_run(
                    self.run_id, workflow, entries, status, busy_timeout
                )
                self._config = config
                interval = config.auto_checkpoint_interval_seconds
                first = min(interval, _FIRST_COPY_SECONDS) if interval else float("inf")
                self._copy_due = time.monotonic() + first
            self.users += 1
            return True

    def _is_fenced(self) -> bool:
        try:
            self.check_lease()
        except FencedError:
            return True
        return False

    @property
    def closed(self) -> bool:
        """Return whether no user is left."""
        return self.users == 0

    def check_open(self) -> None:
        """Raise if the run was closed."""
        if self.closed:
            raise StorageError(f"run {self.run_id!r} was closed; open it again to go on")

    def check_lease(self) -> None:
        """Raise if another process has the run by now: then this one must write no files either."""
        append_entries(self.store, self.lease, (), sync=False)

    def close(self, *, released: bool = False) -> None:
        """Stop using the run; the last user gives its lease back, unless that was ``released``."""
        with self.mutex:
            self.users -= 1
            if self.users > 0:
                return
            forget_shared(self.store, OpenRun, self.run_id, self)
            if not released:
                with contextlib.suppress(StorageError):  # a failed store has no leases any more
                    self.store.release_run(self.lease)
        close_store(self.store)

    # --- recording ---

    def append(
        self, entries: Iterable[NewEntry], status: str | None = None, *, sync: bool = True
    ) -> None:
        """Record entries, durably, and take them into account."""
        with self.mutex:
            self.check_open()
            given = [NewEntry(EntryKind.RESTORED), *entries] if self.fresh else list(entries)
            append_entries(self.store, self.lease, given, status, sync=sync)
            self.fresh = False  # not before it is written
            self.catch_up()

    async def record(
        self,
        entry: NewEntry,
        *,
        sync: bool,
        status: str | None = None,
        guard: DocumentGuard | None = None,
        release: bool = False,
    ) -> None:
        """Record an entry from an event loop, together with what others record just now."""
        if self.users == 0:
            self.check_open()
        assert self._lease is not None
        if self.fresh:
            self.append(())  # records first, and once, that what came before no longer counts
        recorder = self._recorder
        if recorder is None or not recorder.is_here():
            recorder = self._recorder = recorder_for(self.store)
        try:
            seq = await recorder.append(
                self._lease, (entry,), status=status, sync=sync, guard=guard, release=release
            )
        except asyncio.CancelledError:
            # The lease may be gone with what was written: then nothing of the run follows it.
            with contextlib.suppress(*((FencedError,) if release else ())):
                await self._finish_writing(recorder, sync=sync)
            raise
        self._take(entry, seq)

    async def _finish_writing(self, recorder: Recorder, *, sync: bool) -> None:
        """Wait for what is being written: it is recorded all the same, and more follows it.

        However often the task is cancelled meanwhile: a write is short.
        """
        for _ in range(_CANCELLATIONS):
            try:
                await recorder.append(self.lease, (), sync=sync)
            except asyncio.CancelledError:
                continue
            break
        self.catch_up()

    def _take(self, entry: NewEntry, seq: int) -> None:
        """Take an entry that was written into account without reading it again, if it can be."""
        with self.mutex:
            state = self.state
            if state.seq >= seq:
                return
            if state.seq == seq - 1:
                kind, step, attempt, facts, value, _, identity, at = entry
                data, sha256 = (None, None) if value is None else value
                if at is not None and (data is None or len(data) <= _SMALL_BYTES):
                    written = (seq, kind, step, attempt, at, facts, data, None, sha256, identity)
                    state.add(Entry(*written), self.store.load)
                    return
            self.catch_up()

    def catch_up(self) -> None:
        """Take into account what was appended, here or by another user of the run."""
        with self.mutex:
            if self.state.seq == self.lease.seq or self.fresh or self.closed:
                return
            for entry in self.store.entries(self.lease.run, after=self.state.seq):
                self.state.add(entry, self.store.load)

    def new_step_number(self) -> int:
        """Return a number that no step of the run has."""
        with self.mutex:
            self._last_step = max(self._last_step, self.state.last_step) + 1
            return self._last_step

    def recorded(self, identity: bytes, name: str) -> bytes | None:
        """Return the encoded result of a completed step, empty if it has none; None if it is not.

        A step is also completed when a task of its name was marked so by hand.
        """
        found = self.state.by_identity.get(identity)
        if found is not None and found.completed is not None:
            return self.store.load(found.completed) or b""
        if name in self.state.completed_tasks:
            entry = self.state.completed_tasks[name]
            return b"" if entry is None else self.store.load(entry) or b""
        return None

    # --- steps in flight ---

    def enter(self, identity: bytes) -> bool:
        """Start to execute a step; False if it is being executed."""
        with self.mutex:
            if identity in self._in_flight:
                return False
            self._in_flight[identity] = []
            return True

    def wait_for(self, identity: bytes) -> Future[None] | None:
        """Return what is done when the step is no longer being executed; None if it is not."""
        with self.mutex:
            waiters = self._in_flight.get(identity)
            if waiters is None:
                return None
            waiters.append(Future())
            return waiters[-1]

    def leave(self, identity: bytes) -> None:
        """Note that a step is no longer being executed."""
        with self.mutex:
            waiters = self._in_flight.pop(identity, ())
        for waiter in waiters:
            if not waiter.done():  # one that was cancelled waits no more
                waiter.set_result(None)

    # --- from the journal, or from a copy ---

    def load(self) -> bool:
        """Fold the journal, or without one restore the newest good copy; False if there is neither."""
        with self.mutex:
            self.check_open()
            self.fresh = False
            with _without_garbage_collection():
                self.state = fold(self.store.entries(self.lease.run), self.store.load)
            if self.state.seq:
                return True
            found = self.copies.newest()
            if found is None:
                return False
            self.restore(found, lost=True)
            self.restored = Restored(source=found.source, saved_at=found.saved_at)
            logger.warning(
                "run %s had no journal: resumed from %s, saved at %s; what came later is lost",
                self.run_id,
                found.source,
                found.saved_at,
            )
            return True

    def start_fresh(self) -> None:
        """Let what the journal has of the run count no more, from the next change on."""
        with self.mutex:
            self.fresh = self.lease.seq > 0
            self.state = RunState()

    def restore(self, found: RunCopy, *, lost: bool = False) -> None:
        """Go back to a copy of the run; ``lost`` says that there was no journal."""
        with self.mutex:
            self.fresh = False
            status = found.body.get("state", {}).get("status")
            known = status if isinstance(status, str) else None
            self.append(CopiedEntries(found, journal_lost=lost), status=known)

    # --- copies ---

    @property
    def copies(self) -> RunCopies:
        """The JSON copies of the run."""
        if self._copies is None:
            assert self._config is not None
            self._copies = RunCopies(self._config, self.run_id, self.store.clock)
            self._fence_seen = self._copies.checkpoints.highest_fence(self.run_id)
        return self._copies

    @property
    def fence(self) -> int:
        """The number that files carry: over that of every process before, also after a loss."""
        own = self.lease.lease.fence + self.state.fence_floor
        return own if own >= self._fence_seen else self._fence_seen + 1

    def copy_if_due(self) -> None:
        """Have ``execution_state.json`` written, in a thread, if the last one is old enough."""
        if time.monotonic() >= self._copy_due:
            self._copy_due = float("inf")
            copier().request(self.store, self.run_id, self._copy_in_thread)

    def _copy_in_thread(self) -> None:
        with contextlib.suppress(FencedError):  # the run is another process's, and so is its file
            if not self.closed:
                self.write_copy()

    def write_copy(self, document: RunText | None = None) -> None:
        """Write ``execution_state.json``, and plan the next time by what it cost."""
        started = time.monotonic()
        self.copies.write_state(document or self.as_document())
        assert self._config is not None
        interval = self._config.auto_checkpoint_interval_seconds
        cost = time.monotonic() - started
        pause = max(interval, cost * _COPY_COST_FACTOR) if interval else float("inf")
        self._copy_due = started + pause

    def as_document(self) -> RunText:
        """Return the whole run as JSON."""
        self.check_lease()
        self.catch_up()
        with self.mutex:  # for the fields alone: reading a long run's entries takes time
            state, seq, fence, shown = self.state, self.state.seq, self.fence, self.fields()
        entries = [each for each in self.store.entries(self.lease.run) if each.seq <= seq]
        return document_of(self.store, self.lease.run, entries, state, self.run_id, fence, shown)

    def fields(self) -> dict[str, Any]:
        """Return the run's fields, by the names that ``ExecutionState`` has for them."""
        return show_fields(self.state, self.store.load)


@contextlib.contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Make many objects that all stay, without looking for garbage among them again and again."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def open_run(
    config: StateConfig,
    run_id: str,
    workflow: str = "",
    entries: Sequence[NewEntry] = (),
    status: str | None = None,
    busy_timeout: float | None = None,
) -> OpenRun:
    """Return the run, leased by this process; everybody here who opens it gets the same.

    ``entries`` and ``status`` are recorded if the run is new: it has no entries yet, and there is
    no copy to restore. ``StoreBusyError`` if that takes longer than ``busy_timeout`` seconds.
    """
    folders = config.resolve()
    if entries and has_copies(folders, run_id):
        entries, status = (), None
    store = open_store(folders.state, persistent=folders.persistent)
    try:
        while True:
            run = shared(store, OpenRun, run_id, OpenRun)
            if run.open(config, workflow, entries, status, busy_timeout):
                break
            forget_shared(store, OpenRun, run_id, run)
    except BaseException:
        close_store(store)
        raise
    if run.users > 1:
        close_store(store)  # its first user has it open
    return run


def append_entries(
    store: Store,
    lease: RunLease,
    entries: Sequence[NewEntry],
    status: str | None = None,
    *,
    sync: bool = True,
) -> None:
    """Record entries of a run that is leased; raise if another process has it by now."""
    (written,) = store.append([Append(lease, entries, status)], sync=sync)
    if isinstance(written, Exception):
        raise written


def copy_finished(config: StateConfig, store: Store, run_id: str, fence: int) -> None:
    """Write ``execution_state.json`` of a run that this process has closed, unless it goes on."""
    record = store.run(run_id) if store.usable else None
    if record is None or run_id in store.run_leases():
        return
    entries = store.entries(record.id)
    if entries:
        with _without_garbage_collection():
            state = fold(entries, store.load)
        document = document_of(store, record.id, entries, state, run_id, fence)
        RunCopies(config, run_id, store.clock).write_state(document)


def document_of(
    reader: Reader,
    run: int,
    entries: list[Entry],
    state: RunState,
    run_id: str,
    fence: int,
    shown: dict[str, Any] | None = None,
) -> RunText:
    """Return a whole run as JSON; ``shown`` are its fields, where their classes may be unknown."""
    fields = {
        "workflow_id": run_id,
        **(show_fields(state, reader.load) if shown is None else shown),
        "created_at": from_micros(state.created_at).isoformat(),
        "updated_at": from_micros(state.updated_at).isoformat(),
    }
    saved_at = reader.clock.now().isoformat()
    return RunText(reader, run, run_id, entries, fields, saved_at, fence)
