"""A run that this process executes: its lease, its folded state, its steps in flight, its copies.

Everybody in the process who opens a run gets the same object. ``record`` is for an event loop,
``append`` for any thread; both return when the entries are recorded and part of ``state``.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from concurrent.futures import Future
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from maestro_hive.engine.accounts import RunAccounts, ledger_of, log_warning
from maestro_hive.engine.copies import RunCopies, copier, document_of, has_copies
from maestro_hive.engine.shared import forget_shared, shared
from maestro_hive.kernel.errors import ConfigurationError, FencedError, StorageError
from maestro_hive.kernel.logs import get_logger
from maestro_hive.kernel.process import without_garbage_collection
from maestro_hive.maestro.state.budgets import RunBudget, Settle
from maestro_hive.maestro.state.checkpoint import automatic_checkpoint_id
from maestro_hive.maestro.state.projections import RunState, StepLabels, facts_of, fold
from maestro_hive.maestro.state.recorder import Recorder, recorder_for
from maestro_hive.maestro.state.records import OUTCOMES, Entry, EntryKind, NewEntry
from maestro_hive.maestro.state.run_document import CopiedEntries, RunText
from maestro_hive.maestro.state.store import Append
from maestro_hive.maestro.state.stores import close_store, open_store, share_store
from maestro_hive.maestro.state.views import run_status, show_fields

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from maestro_hive.engine.budget import Gate
    from maestro_hive.engine.config import StateConfig, StateFolders
    from maestro_hive.engine.definitions import Tasks
    from maestro_hive.maestro.state.budgets import Reserve, StepKey
    from maestro_hive.maestro.state.records import NewDispatch
    from maestro_hive.maestro.state.run_document import RunCopy
    from maestro_hive.maestro.state.store import (
        DocumentChange,
        DocumentGuard,
        RunLease,
        Store,
    )

logger = get_logger(__name__)

_WARNED = EntryKind.BUDGET_WARNED.value
#: The status that a run is listed with while executors make its steps.
RUNNING = "running"
#: How many more times a task may be cancelled while its last write is in flight.
_CANCELLATIONS = 100
#: The copy for resuming is written again only after this many times what it last cost.
_COPY_COST_FACTOR = 33
#: The first copies of a new run are written after this long: a short run has ended by then.
_FIRST_COPY_SECONDS = 0.05
#: The steps that this task is inside of.
_inside: ContextVar[frozenset[tuple[str, bytes]]] = ContextVar("steps_inside", default=frozenset())


class Restored(NamedTuple):
    """Where a run was resumed from when it was not the journal."""

    source: str
    saved_at: str


class Opening(NamedTuple):
    """How a run is opened: as a child, as one that belongs to workers, or by one of these.

    ``dispatch`` gives it to workers, and it is durable when it is open. ``lease`` is what a worker
    has taken.
    """

    dispatch: NewDispatch | None = None
    lease: RunLease | None = None
    parent: str | None = None


class RecordingOrder(Protocol):
    """What delivers outcomes in the order of their record, and so must know what is in flight."""

    def start_recording(self, before: int) -> int:
        """Note that an outcome is being recorded, after this entry; return a number for it."""

    def end_recording(self, number: int) -> None:
        """Note that it is recorded."""


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
        #: Is told which outcomes of its workflow are being recorded.
        self.order: RecordingOrder | None = None
        #: Memories of personas as they were last decoded, and from which entry.
        self.decoded_memories: dict[str, tuple[int, dict[str, Any]]] = {}
        #: The tasks and the calls that this process made, by identity, where that does not say all.
        self.tasks: dict[bytes, Tasks] = {}
        self.calls: dict[bytes, int] = {}
        self._lease: RunLease | None = None
        #: The steps that are executed just now, with who waits for the end of that.
        self.in_flight: dict[bytes, list[Future[None]]] = {}
        self._last_step = 0
        self._labels = StepLabels()
        self._recorder: Recorder | None = None
        self._copies: RunCopies | None = None
        self._config: StateConfig | None = None
        #: When copies may be written again; whether they will be; and up to which entry they were.
        self._copy_due = 0.0
        self._copy_is_planned = True
        self._copied_seq = 0
        #: Whether it was made when it was opened here.
        self._is_new = False
        self._fence_seen = 0
        #: The status that this process last recorded for listings.
        self.listed_status: str | None = None
        #: When workers shall take it after this process; None if not before it is woken.
        self.due: float | None = 0.0
        #: The threads of attempts that were stopped, with the identities of their steps.
        self.threads: list[tuple[bytes | None, Future[Any]]] = []
        #: Is done when the lease is no longer kept for one of them.
        self.held: Future[None] | None = None
        #: The status that it is listed with from then on; None if with that of before.
        self.left_status: str | None = None
        self._accounts: RunAccounts | None = None
        #: Why no more attempts may start: its workflow is about to be suspended.
        self.refusal: Exception | None = None
        #: What calls of this process may spend, where the run itself has a limit.
        self.gate: Gate | None = None

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
        opening: Opening = Opening(),  # noqa: B008 - it is never changed
    ) -> bool:
        """Become a user of the run; False if it was closed, or taken over by another process.

        Its first user keeps the store open for all of them, and the others give theirs back.
        """
        with self.mutex:
            if self._lease is not None and (self.closed or self._is_fenced()):
                return False
            if self.users:
                if opening.lease is not None:
                    self.store.release_run(opening.lease)  # which is shared
                if opening.dispatch is not None:
                    self.dispatch(opening.dispatch)
                close_store(self.store)
            else:
                self._lease = opening.lease or self.store.acquire_run(
                    self.run_id,
                    workflow,
                    entries,
                    status,
                    busy_timeout,
                    dispatch=opening.dispatch,
                    parent=opening.parent,
                    sync=opening.dispatch is not None,
                )
                self._config = config
                #: The budgets of the store.
                self.ledger = ledger_of(self.store)
                self._copy_is_planned = not self._copies_itself  # then there is none to plan
                self._is_new = bool(entries) and self._lease.seq == len(entries)
                if opening.dispatch is not None and not self._lease.dispatched:
                    self._give_to_workers(opening.dispatch)
            self.users += 1
            return True

    def _give_to_workers(self, dispatch: NewDispatch) -> None:
        """Give a run to workers that was its caller's, durably; they wait while it is leased."""
        try:
            self.dispatch(dispatch)
        except BaseException:
            self.store.release_run(self.lease)
            raise

    def dispatch(self, dispatch: NewDispatch) -> None:
        """Let the run belong to workers, durably; nothing changes if it does."""
        if not self.lease.dispatched:
            append_entries(self.store, self.lease, (), dispatch=dispatch)

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
            copier().withdraw(self.store, self.run_id, self._copy_in_thread)
            if not released:
                with contextlib.suppress(StorageError):  # a failed store has no leases any more
                    self._release()
        close_store(self.store)

    def _release(self) -> None:
        """Give the lease back; a run that executors made is listed with how it ended."""
        if self.listed_status == RUNNING and self.state.started is None:
            status = run_status(self.state)
            ended = Append(self.lease, (), status, None, release=True)
            if not isinstance(self.store.append([ended], sync=False)[0], Exception):
                return
        if self.left_status is not None:
            left = Append(self.lease, (), self.left_status, release=True, due=self.due)
            if not isinstance(self.store.append([left], sync=False)[0], Exception):
                return
        self.store.release_run(self.lease, self.due)

    # --- recording ---

    def append(
        self,
        entries: Iterable[NewEntry],
        status: str | None = None,
        *,
        sync: bool = True,
        release: bool = False,
        budget: Settle | None = None,
    ) -> None:
        """Record entries, durably, and take them into account; ``release`` gives the lease back."""
        with self.mutex:
            self.check_open()
            given = [NewEntry(EntryKind.RESTORED), *entries] if self.fresh else list(entries)
            written = append_entries(
                self.store, self.lease, given, status, sync=sync, release=release, budget=budget
            )
            self.fresh = False  # not before it is written
            self.listed_status = status or self.listed_status
            self._take(written)
            if budget is not None:
                self._note_settled(written)

    def record_here(self) -> None:
        """Have what is recorded written by the recorder of the running loop."""
        self._recorder = recorder_for(self.store)

    async def record(
        self,
        entry: NewEntry,
        *,
        sync: bool,
        status: str | None = None,
        guard: DocumentGuard | None = None,
        release: bool = False,
        change: DocumentChange | None = None,
        first: tuple[NewEntry, ...] = (),
        budget: Reserve | Settle | None = None,
    ) -> None:
        """Record an entry from an event loop, together with what others record just now.

        ``first`` are recorded before it, in the same transaction.
        """
        if self.users == 0:
            self.check_open()
        assert self._lease is not None
        if self.fresh:
            self.append(())  # records first, and once, that what came before no longer counts
        recorder = self._recorder
        if recorder is None or not recorder.is_here():
            recorder = self._recorder = recorder_for(self.store)
        # What others record from now on may come after it, and be reported before it.
        before, in_flight = self._lease.seq, None
        try:
            entries = (*first, entry) if first else (entry,)
            append = Append(self._lease, entries, status, guard, release, change, None, 0.0, budget)
            written = recorder.write(append, sync=sync)
            if not isinstance(written, list):
                if entry.kind in OUTCOMES and self.order is not None:
                    in_flight = self.order.start_recording(before)
                written = await written
        except asyncio.CancelledError:
            # The lease may be gone with what was written: then nothing of the run follows it.
            with contextlib.suppress(*((FencedError,) if release else ())):
                await self._finish_writing(recorder, sync=sync)
            raise
        finally:
            if in_flight is not None and self.order is not None:
                self.order.end_recording(in_flight)
        if status is not None:
            self.listed_status = status
        self._take(written)
        if type(budget) is Settle:
            self._note_settled(written)

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

    def _take(self, written: list[Entry]) -> None:
        """Take entries into account that were written; others may have come before them."""
        with self.mutex:
            state = self.state
            if written and state.seq == written[0].seq - 1:
                state.add_all(written, self.store.load)
            elif written and state.seq < written[-1].seq:
                self.catch_up()
            if written and not self._copy_is_planned:
                self._plan_copy()

    def _note_settled(self, written: list[Entry]) -> None:
        """Let those look who wait for a budget, and log what was warned of."""
        self.ledger.settled()
        for entry in written:
            if entry[1] == _WARNED:
                log_warning(self.run_id, facts_of(entry))

    @property
    def accounts(self) -> RunAccounts:
        """The accounts that its steps are charged to."""
        if self._accounts is None:
            self._accounts = RunAccounts(self.store, self.run_id)
        return self._accounts

    def catch_up(self) -> None:
        """Take into account what was appended, here or by another user of the run."""
        with self.mutex:
            if self.state.seq == self.lease.seq or self.fresh or self.closed:
                return
            new = self.store.entries(self.lease.run, after=self.state.seq)
            self.state.add_all(new, self.store.load)

    def new_step_number(self) -> int:
        """Return a number that no step of the run has."""
        with self.mutex:
            self._last_step = max(self._last_step, self.state.last_step) + 1
            return self._last_step

    def label(self, number: int) -> str | None:
        """Return what tells a step from others of its name: ``name``, or ``name#2``."""
        found = self._labels.known(number)
        if found is None:
            with self.mutex:
                found = self._labels.of(self.state, number)
        return found

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

    def open_steps(self, after: int) -> set[StepKey]:
        """Return the steps whose attempts are made just now, and started after an entry."""
        with self.mutex:
            found = [self.state.by_identity.get(identity) for identity in self.in_flight]
        run = self.lease.run
        return {
            (run, each.number) for each in found if each and each.open_attempt and each.seq > after
        }

    # --- from the journal, or from a copy ---

    def load(self) -> bool:
        """Fold the journal, or without one restore the newest good copy; False if there is neither."""
        with self.mutex:
            self.check_open()
            self.fresh = False
            with without_garbage_collection():
                self.state = fold(self.store.entries(self.lease.run), self.store.load)
            if self._is_new and not self._copy_is_planned:
                self._copy_due = time.monotonic() + _FIRST_COPY_SECONDS
                self._plan_copy()
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
            entries = CopiedEntries(found, journal_lost=lost)
            budget = found.budget if lost else None  # the journal knows better
            written = append_entries(self.store, self.lease, entries, found.status, budget=budget)
            self._take(written)

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

    def _plan_copy(self) -> None:
        """Have copies written as soon as they may be."""
        self._copy_is_planned = True
        copier().request(self.store, self.run_id, self._copy_in_thread, self._copy_due)

    def _copy_in_thread(self) -> None:
        """Write a checkpoint and ``execution_state.json``, if there is something new to write."""
        with self.mutex:
            self._copy_is_planned = False  # what is recorded from here on is for the next ones
            if self.closed or self.state.seq == self._copied_seq:
                return
            early = time.monotonic() < self._copy_due
            if early:  # a copy was asked for meanwhile, or the last one took long
                self._plan_copy()
        with contextlib.suppress(FencedError):  # the run is another process's, and so is its file
            if not early:
                self.write_checkpoint(automatic_checkpoint_id(self.store.clock))

    @property
    def _copies_itself(self) -> bool:
        config = self._config
        interval = 0 if config is None else config.auto_checkpoint_interval_seconds
        return bool(config is not None and config.enable_persistence and interval)

    def hold(self) -> Future[None]:
        """Return what is to be done when this user closes the run: later, for a thread goes on.

        Nothing is recorded until then. So the copy is written now, as of a run that is closed.
        """
        with self.mutex:
            if self._copies_itself:
                self._copy_is_planned = False
                copier().request(self.store, self.run_id, self._copy_held)
            held = self.held = Future()
        return held

    def _copy_held(self) -> None:
        with contextlib.suppress(FencedError):  # it was closed, and then its copy was requested
            self.write_copy()

    def copying(self) -> contextlib.AbstractContextManager[None]:
        """Return what keeps the copies of the thread from replacing those written in the block."""
        return copier().paused(self.store, self.run_id)

    def write_checkpoint(self, checkpoint_id: str) -> None:
        """Write the run as it is: a checkpoint, and ``execution_state.json``."""
        with self.copies.writing():
            document = self.as_document()
            self.copies.checkpoints.write(self.run_id, checkpoint_id, document, fence=self.fence)
            self._write_copy(document)

    def write_copy(self) -> None:
        """Write ``execution_state.json``: the run as it is."""
        with self.copies.writing():
            self._write_copy()

    def _write_copy(self, document: RunText | None = None) -> None:
        """Write it; when copies may be written next depends on what this one cost."""
        started = time.monotonic()
        try:
            document = document or self.as_document()
            self.copies.write_state(document)
            self._copied_seq = document.seq  # not the run's: more may have been recorded since
        finally:  # one that failed is tried again
            self._set_copy_due(started)

    def _set_copy_due(self, started: float) -> None:
        assert self._config is not None
        interval = self._config.auto_checkpoint_interval_seconds
        self._copy_due = started + max(interval, (time.monotonic() - started) * _COPY_COST_FACTOR)

    def as_document(self) -> RunText:
        """Return the whole run as JSON."""
        self.check_lease()
        self.catch_up()
        with self.mutex:  # not for long: steps wait for it
            state, fence = self.state.without_steps(), self.fence
        return document_of(self.store, self.lease.run, state, self.run_id, fence)

    def fields(self) -> dict[str, Any]:
        """Return the run's fields, by the names that ``ExecutionState`` has for them."""
        return show_fields(self.state, self.store.load)


class Turn:
    """The right to execute one step of a run; others in this process wait for it."""

    __slots__ = ("_identity", "_name", "_run", "_token")

    def __init__(self, run: OpenRun, identity: bytes, name: str) -> None:
        self._run = run
        self._identity = identity
        self._name = name
        self._token: Any = None

    def take(self) -> bool:
        """Take the turn; False if another task has it: then ``wait`` for that."""
        run, identity = self._run, self._identity
        with run.mutex:
            if identity in run.in_flight:
                return False
            run.in_flight[identity] = []
        self._token = _inside.set(_inside.get() | {(run.run_id, identity)})
        return True

    async def wait(self) -> None:
        """Return after another task's turn: it may have completed the step."""
        run, identity = self._run, self._identity
        if (run.run_id, identity) in _inside.get():
            raise ConfigurationError(
                f"{self._name!r} executes itself, with the same input, and would wait for ever"
            )
        waiter: Future[None] = Future()
        with run.mutex:
            waiters = run.in_flight.get(identity)
            if waiters is None:
                return
            waiters.append(waiter)
        await asyncio.shield(asyncio.wrap_future(waiter))

    def give_back(self) -> None:
        """Let the next one have it."""
        try:  # noqa: SIM105 - on the path of every step
            _inside.reset(self._token)
        except ValueError:  # closed by another context
            pass
        with self._run.mutex:
            waiters = self._run.in_flight.pop(self._identity, ())
        for waiter in waiters:
            if not waiter.done():  # one that was cancelled waits no more
                waiter.set_result(None)


def open_run(
    config: StateConfig,
    run_id: str,
    workflow: str = "",
    entries: Sequence[NewEntry] = (),
    status: str | None = None,
    busy_timeout: float | None = None,
    known: tuple[StateFolders, Store] | None = None,
    opening: Opening = Opening(),  # noqa: B008 - it is never changed
) -> OpenRun:
    """Return the run, leased by this process; everybody here who opens it gets the same.

    ``entries`` and ``status`` are recorded if the run is new: it has no entries yet, and there is
    no copy to restore. ``StoreBusyError`` if that takes longer than ``busy_timeout`` seconds.
    ``known`` are the folders of ``config`` and their store, of a caller who has it open.
    """
    if known is not None and share_store(known[1]):
        folders, store = known
    else:
        folders = config.resolve()
        store = open_store(folders.state, persistent=folders.persistent)
    try:
        if entries and has_copies(folders, run_id):
            entries, status = (), None
        while True:
            run = shared(store, OpenRun, run_id, OpenRun)
            if run.open(config, workflow, entries, status, busy_timeout, opening):
                break
            forget_shared(store, OpenRun, run_id, run)
    except BaseException:
        close_store(store)
        raise
    return run


def append_entries(
    store: Store,
    lease: RunLease,
    entries: Sequence[NewEntry],
    status: str | None = None,
    *,
    sync: bool = True,
    release: bool = False,
    dispatch: NewDispatch | None = None,
    budget: Settle | RunBudget | None = None,
) -> list[Entry]:
    """Record entries of a run that is leased; raise if another process has it by now."""
    append = Append(lease, entries, status, release=release, dispatch=dispatch, budget=budget)
    (written,) = store.append([append], sync=sync)
    if isinstance(written, Exception):
        raise written
    return written
