"""Appending from an event loop: what many tasks record in one tick becomes one transaction.

The transaction runs on the loop while the disk is fast: an fsync takes less time than handing it
to a thread and back, and a thread would wait for a busy loop to release the interpreter. On a slow
disk, or while another process blocks the journal, it runs in a thread, and what is appended
meanwhile makes up the next batch.

A task that records alone does not wait for others to join: its appends are written at once, and it
lets the loop run again every millisecond. As soon as two tasks append in one tick, or take turns,
appends are collected again: each on its own would sync, and they would never get into step.

Where some of a batch need a sync and some do not, the latter are written first and the others wait
one tick for what those tasks append next. So tasks that start and tasks that end get into step, and
share a sync.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Sequence
from time import monotonic
from typing import TYPE_CHECKING, Any, NamedTuple

from maestro_hive.kernel.errors import StoreBusyError
from maestro_hive.kernel.process import PerProcess
from maestro_hive.maestro.state.store import Append, DocumentGuard, RunLease, Store

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Generator
    from concurrent.futures import ThreadPoolExecutor

    from maestro_hive.maestro.state.records import Entry, NewEntry

#: Writing more than this takes too long for an event loop.
_LARGE_BYTES = 256 * 1024
#: How long the loop is blocked by another process that writes; then a thread waits instead.
_BUSY_TIMEOUT = 0.005
#: A task that records alone lets the loop run after so many seconds, not each time: one turn of a
#: loop that has nothing else to do costs as much as encoding a step.
_PAUSE_EVERY = 0.001
#: After so many batches in a thread one is written on the loop, to measure how fast the disk is.
#: The thread cannot: what it measures includes its waiting for a busy loop.
_MEASURE_EVERY = 32
#: After so many appends in a row a task is the only one that records, whoever did before.
_STREAK = 4

_Outcomes = Sequence["list[Entry] | Exception"]


def recorder_for(store: Store) -> Recorder:
    """Return the recorder that all users of this store on the running loop share."""
    loop = asyncio.get_running_loop()
    recorders = _recorders()
    known = recorders.get(loop)
    if known is None:
        known = recorders[loop] = weakref.WeakValueDictionary()
    found = known.get(id(store))
    if found is None or found.store is not store:
        found = known[id(store)] = Recorder(store)
    return found


def _reference(task: asyncio.Task[Any] | None) -> Callable[[], asyncio.Task[Any] | None]:
    """Return what gives a task while it exists: who keeps it would keep its loop alive."""
    return _nobody if task is None else weakref.ref(task)


def _nobody() -> None:
    """Return no task."""


class _Waiting(NamedTuple):
    append: Append
    sync: bool
    large: bool
    task: asyncio.Task[Any] | None
    done: asyncio.Future[list[Entry]]


class Recorder:
    """The appends of one event loop to one store."""

    def __init__(self, store: Store) -> None:
        self.store = store
        # Weakly: the registry finds recorders by their loop, and must not keep the loop alive.
        self._loop = weakref.ref(asyncio.get_running_loop())
        self._waiting: list[_Waiting] = []
        self._scheduled = False
        self._alone = False
        #: The task that appended last, with the number of its appends, and the one before it.
        self._last = self._other = _reference(None)
        self._streak = 0
        self._first: asyncio.Task[Any] | None = None
        self._crowded = True
        self._postponed = False
        self._thread: ThreadPoolExecutor | None = None
        self._in_thread = 0
        self._paused = 0.0

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The loop it belongs to."""
        loop = self._loop()
        assert loop is not None, "its callers run on it"
        return loop

    def is_here(self) -> bool:
        """Return whether it belongs to the loop that is running."""
        return self._loop() is asyncio.get_running_loop()

    def append(
        self,
        run: RunLease,
        entries: Sequence[NewEntry],
        *,
        status: str | None = None,
        sync: bool = True,
        guard: DocumentGuard | None = None,
        release: bool = False,
    ) -> Awaitable[list[Entry]]:
        """Record entries; await them, as they are recorded, before reporting what they record.

        Awaiting raises ``FencedError`` or ``StaleDocumentError`` if the store refused them.
        """
        # Read now: an error in there is this caller's, not that of the whole batch.
        append = Append(run, tuple(entries), status, guard, release)
        try:
            written = self.write(append, sync=sync)
        except Exception as error:  # noqa: BLE001 - whatever it is, who awaits must get it
            return _Written(error)
        return _Written(written) if isinstance(written, list) else written

    def write(self, append: Append, *, sync: bool) -> list[Entry] | Awaitable[list[Entry]]:
        """Do the same as ``append``; return what is written at once without having it awaited."""
        task = asyncio.current_task()
        last = self._last()
        if last is not task:
            self._other, self._last = self._last, _reference(task)
            self._streak = 0
        self._streak += 1
        if not self._scheduled:
            self._schedule(task)
        elif task is not self._first:
            self._crowded = True
        store = self.store
        large = _is_large(append.entries)
        if (
            self._alone
            and not self._crowded
            and not self._waiting
            and not large
            and store.syncs_fast()
        ):
            try:
                (outcome,) = store.append((append,), sync=sync, busy_timeout=_BUSY_TIMEOUT)
            except StoreBusyError:
                pass  # another process writes: a thread waits for it
            else:
                if isinstance(outcome, Exception):
                    raise outcome
                if sync and (now := monotonic()) - self._paused >= _PAUSE_EVERY:
                    self._paused = now
                    return _Written(outcome, pause=True)
                return outcome
        waiting = _Waiting(append, sync, large, task, self.loop.create_future())
        self._waiting.append(waiting)
        return waiting.done

    def _schedule(self, task: asyncio.Task[Any] | None) -> None:
        """Have what is appended in this tick written at its end."""
        self._scheduled = True
        other = self._other()
        is_only_one = self._streak >= _STREAK or other is None or other.done()
        self._alone = is_only_one and not self._crowded
        self._first, self._crowded = task, False
        self.loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._first = None  # or the task, and with it the loop, would be kept alive
        batch = self._next_batch() if self._waiting else []
        if not batch:
            self._scheduled = False
        elif any(waiting.large for waiting in batch):
            self._flush_in_thread(batch)
        elif self.store.syncs_fast() or self._in_thread >= _MEASURE_EVERY:
            self._in_thread = 0
            outcomes = self._write(batch, _BUSY_TIMEOUT)
            if isinstance(outcomes[0], StoreBusyError):
                self._flush_in_thread(batch)
                return
            self._scheduled = bool(self._waiting)
            self._settle(batch, outcomes)
            if self._waiting:
                self.loop.call_soon(self._flush)
        else:
            self._flush_in_thread(batch)

    def _next_batch(self) -> list[_Waiting]:
        """Take what is to be written now; what needs a sync may have to wait, but only once."""
        unsynced = [waiting for waiting in self._waiting if not waiting.sync]
        synced = [waiting for waiting in self._waiting if waiting.sync]
        self._postponed = bool(unsynced and synced) and not self._postponed
        if self._postponed and {w.task for w in unsynced}.isdisjoint(w.task for w in synced):
            self._waiting = synced
            return unsynced
        batch, self._waiting = self._waiting, []
        return batch

    def _flush_in_thread(self, batch: list[_Waiting]) -> None:
        if self._thread is None:
            from concurrent.futures import ThreadPoolExecutor

            self._thread = ThreadPoolExecutor(1, thread_name_prefix="maestro-recorder")
        self._in_thread += 1
        written = self.loop.run_in_executor(self._thread, self._write, batch, None)
        written.add_done_callback(lambda done: self._after_thread(batch, done.result()))

    def _after_thread(self, batch: list[_Waiting], outcomes: _Outcomes) -> None:
        self._settle(batch, outcomes)
        if self._waiting:
            self.loop.call_soon(self._flush)
        else:
            self._scheduled = False

    def _write(self, batch: list[_Waiting], busy_timeout: float | None) -> _Outcomes:
        appends = [waiting.append for waiting in batch]
        sync = any(waiting.sync for waiting in batch)
        try:
            return self.store.append(appends, sync=sync, busy_timeout=busy_timeout)
        except Exception as error:  # noqa: BLE001 - whatever it is, those who await must get it
            return [error] * len(appends)

    @staticmethod
    def _settle(batch: list[_Waiting], outcomes: _Outcomes) -> None:
        for waiting, outcome in zip(batch, outcomes, strict=True):
            done = waiting.done
            if done.done():
                continue  # its task was cancelled; the record is written all the same
            if isinstance(outcome, Exception):
                done.set_exception(outcome)
            else:
                done.set_result(outcome)


def _is_large(entries: Sequence[NewEntry]) -> bool:
    for entry in entries:
        value = entry.value
        if value is not None and len(value[0]) > _LARGE_BYTES:
            return True
    return False


class _Written:
    """The outcome of an append that is written already; awaiting it may let others run first."""

    __slots__ = ("_outcome", "_pause")

    def __init__(self, outcome: list[Entry] | Exception, *, pause: bool = False) -> None:
        self._outcome = outcome
        self._pause = pause

    def __await__(self) -> Generator[None, None, list[Entry]]:
        if self._pause:
            yield
        if isinstance(self._outcome, Exception):
            raise self._outcome
        return self._outcome


#: By loop and store; its users keep a recorder alive, and so does what it has yet to write.
_recorders: PerProcess[
    weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, weakref.WeakValueDictionary[int, Recorder]]
] = PerProcess(weakref.WeakKeyDictionary)
