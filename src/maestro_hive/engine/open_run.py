"""A run that this process holds: its entries, what they add up to, and the right to add more."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from maestro_hive.kernel.errors import FencedError, StorageError
from maestro_hive.maestro.state.projections import RunState, fold
from maestro_hive.maestro.state.recorder import Recorder, recorder_for
from maestro_hive.maestro.state.records import Entry, EntryKind, NewEntry
from maestro_hive.maestro.state.sqlite.store import SqliteStore
from maestro_hive.maestro.state.store import Append
from maestro_hive.maestro.state.stores import borrow_memory_store, borrow_store, return_store
from maestro_hive.maestro.state.views import show_fields

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from maestro_hive.engine.config import StateFolders
    from maestro_hive.maestro.state.store import RunLease, Store

#: How many more times a task may be cancelled while its last write is under way.
_CANCELLATIONS = 100
#: A larger value is not kept in memory: the journal has it.
_SMALL_BYTES = 4096


class OpenRun:
    """One run, taken for this process, and shared by all who use it there.

    ``mutex`` guards ``state``. ``fresh`` says that what is in the journal shall not count: the
    next append says so first.
    """

    def __init__(self, store: Store, run_id: str, workflow: str = "") -> None:
        self.run_id = run_id
        self.store = store
        self.hold: RunLease = store.acquire_run(run_id, workflow)
        self.mutex = threading.RLock()
        self.state = RunState()
        self.fresh = False
        self.users = 1
        #: Steps that are being executed, and who waits for them, by identity.
        self._under_way: dict[bytes, list[Future[None]]] = {}
        self._last_step = 0
        self._recorder: Recorder | None = None
        #: Memories of personas as they were last read, and from which entry.
        self.decoded_memories: dict[str, tuple[int, dict[str, Any]]] = {}

    @property
    def closed(self) -> bool:
        """Return whether the run was let go."""
        return self.users == 0

    def fields(self) -> dict[str, Any]:
        """Return the run's fields as people see them."""
        return show_fields(self.state, self.store.load)

    # --- changes ---

    def append(
        self, entries: Iterable[NewEntry], status: str | None = None, *, sync: bool = True
    ) -> None:
        """Record entries, durably, and take them into account."""
        with self.mutex:
            self.check_open()
            (seq,) = self.store.append([Append(self.hold, self._all(entries), status)], sync=sync)
            if not isinstance(seq, int):
                raise seq
            self.fresh = False  # not before it is written
            self.catch_up()

    async def record(self, entry: NewEntry, *, sync: bool, status: str | None = None) -> None:
        """Record an entry from an event loop, together with what others record just now."""
        if self.users == 0:
            self.check_open()
        if self.fresh:
            self.append(())  # says first, and once, that what came before no longer counts
        entries = (entry,)
        recorder = self._recorder
        if recorder is None or not recorder.is_here():
            recorder = self._recorder = recorder_for(self.store)
        try:
            seq = await recorder.append(self.hold, entries, status=status, sync=sync)
        except asyncio.CancelledError:
            await self._see_it_written(recorder, sync=sync)
            raise
        self._take(entries, seq)

    async def _see_it_written(self, recorder: Recorder, *, sync: bool) -> None:
        """Wait for what was on its way: it is written all the same, and the end comes behind it.

        However often the task is cancelled meanwhile: a write is short.
        """
        for _ in range(_CANCELLATIONS):
            try:
                await recorder.append(self.hold, (), sync=sync)
            except asyncio.CancelledError:
                continue
            break
        self.catch_up()

    def _all(self, entries: Iterable[NewEntry]) -> Sequence[NewEntry]:
        if self.fresh:
            return [NewEntry(EntryKind.RESTORED), *entries]
        return entries if isinstance(entries, Sequence) else list(entries)

    def _take(self, entries: Iterable[NewEntry], seq: int) -> None:
        """Take an entry that was written into account without reading it again, if it can be."""
        with self.mutex:
            state = self.state
            if state.seq >= seq:
                return
            if state.seq == seq - 1:
                (entry,) = entries
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
            if self.state.seq == self.hold.seq or self.fresh or self.closed:
                return
            for entry in self.store.entries(self.hold.run, after=self.state.seq):
                self.state.add(entry, self.store.load)

    def read_again(self) -> None:
        """Forget what is known and read the journal from its beginning."""
        with self.mutex:
            self.check_open()
            self.fresh = False
            with _without_collecting():
                self.state = fold(self.store.entries(self.hold.run), self.store.load)

    def start_afresh(self) -> None:
        """Let what the journal has of the run count no more, from the next change on."""
        with self.mutex:
            self.fresh = self.hold.seq > 0
            self.state = RunState()

    def new_step_number(self) -> int:
        """Return a number that no step of the run has."""
        with self.mutex:
            self._last_step = max(self._last_step, self.state.last_step) + 1
            return self._last_step

    # --- one at a time ---

    def enter(self, identity: bytes) -> bool:
        """Begin to execute a step; False if it is being executed."""
        with self.mutex:
            if identity in self._under_way:
                return False
            self._under_way[identity] = []
            return True

    def wait_for(self, identity: bytes) -> Future[None] | None:
        """Return what is done when the step is no longer being executed; None if it is not."""
        with self.mutex:
            waiters = self._under_way.get(identity)
            if waiters is None:
                return None
            waiters.append(Future())
            return waiters[-1]

    def leave(self, identity: bytes) -> None:
        """Say that a step is no longer being executed."""
        with self.mutex:
            waiters = self._under_way.pop(identity, [])
        for waiter in waiters:
            if not waiter.done():  # one that was cancelled waits no more
                waiter.set_result(None)

    # --- being there ---

    def check_not_taken_over(self) -> None:
        """Raise if another process has the run by now: it must not write files either."""
        (seq,) = self.store.append([Append(self.hold, ())], sync=False)
        if isinstance(seq, FencedError):
            raise seq

    def check_open(self) -> None:
        """Raise if the run was let go."""
        if self.closed:
            raise StorageError(f"run {self.run_id!r} was shut down; open it again to go on")

    def close(self) -> None:
        """Let the run go, if nobody else in this process uses it."""
        with _mutex:
            self.users -= 1
            if self.users > 0:
                return
            for place in [place for place, run in _held.items() if run is self]:
                del _held[place]
            with contextlib.suppress(StorageError):  # a failed store holds nothing any more
                self.store.release_run(self.hold)
            _return(self.store)


@contextlib.contextmanager
def _without_collecting() -> Iterator[None]:
    """Make many objects that all stay, without looking for garbage among them again and again."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


_mutex = threading.RLock()
_held: dict[tuple[int, str], OpenRun] = {}


def open_run(folders: StateFolders, run_id: str, workflow: str = "") -> OpenRun:
    """Return the run, taken for this process; everybody here who opens it gets the same."""
    with _mutex:
        store: Store = (
            borrow_store(folders.state)
            if folders.persistent
            else borrow_memory_store(folders.state)
        )
        try:
            held = _held.get((id(store), run_id))
            if held is not None and _is_still_ours(held):
                held.users += 1
                _return(store)
                return held
            held = _held[id(store), run_id] = OpenRun(store, run_id, workflow)
        except BaseException:
            _return(store)
            raise
        return held


def _is_still_ours(held: OpenRun) -> bool:
    """Return whether a run that was opened before can be used on: another process may have it."""
    try:
        held.check_not_taken_over()
    except FencedError:
        return False
    return True


def _return(store: Store) -> None:
    if isinstance(store, SqliteStore):
        return_store(store)


def _forget_in_child() -> None:
    global _mutex  # noqa: PLW0603 - a thread that is not in the child may have held it
    _mutex = threading.RLock()
    _held.clear()


os.register_at_fork(after_in_child=_forget_in_child)
