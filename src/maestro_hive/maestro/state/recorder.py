"""Appending from an event loop: what many tasks record in one tick becomes one transaction.

The transaction runs on the loop while the disk is quick: an fsync takes less time than handing it
to a thread and back, and a thread would wait for a busy loop to let go of the interpreter. On a
slow disk, or while another process keeps the journal for long, it runs in a thread, and what comes
in the meantime makes up the next batch.

A task that has the journal for itself does not wait for others to join: its appends are written
at once, and it lets the loop run again every millisecond. As soon as two tasks append in
one tick, appends are gathered again.

Where some of a batch need a sync and some do not, the latter go first and the others wait one tick
for what those will bring. So tasks that begin and tasks that end fall into step, and share a sync.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from maestro_hive.kernel.errors import StoreBusyError
from maestro_hive.maestro.state.store import Append, DocumentGuard, RunLease, Store

if TYPE_CHECKING:
    from collections.abc import Awaitable, Generator
    from concurrent.futures import ThreadPoolExecutor

    from maestro_hive.maestro.state.records import NewEntry


#: How long the loop stands still for another process that is writing; then a thread waits instead.
_BUSY_TIMEOUT = 0.005
#: A task that has the journal for itself lets the loop run after so many seconds, not each time:
#: one turn of a loop that has nothing else to do costs as much as encoding a step.
_PAUSE_EVERY = 0.001
#: After so many batches in a thread one is written on the loop, to see how quick the disk is. The
#: thread cannot tell: what it measures includes its waiting for a busy loop.
_LOOK_AGAIN = 32


#: By loop and store; whoever uses one keeps it alive, and so does what it has yet to write.
_recorders: weakref.WeakKeyDictionary[
    asyncio.AbstractEventLoop, weakref.WeakValueDictionary[int, Recorder]
] = weakref.WeakKeyDictionary()


def recorder_for(store: Store) -> Recorder:
    """Return the recorder that everybody on the running loop shares for this store."""
    loop = asyncio.get_running_loop()
    known = _recorders.get(loop)
    if known is None:
        known = _recorders[loop] = weakref.WeakValueDictionary()
    found = known.get(id(store))
    if found is None or found.store is not store:
        found = known[id(store)] = Recorder(store)
    return found


class _Waiting(NamedTuple):
    append: Append
    sync: bool
    task: asyncio.Task[Any] | None
    done: asyncio.Future[int]


class Recorder:
    """The appends of one event loop to one store."""

    def __init__(self, store: Store) -> None:
        self.store = store
        # Weakly: the registry keeps recorders by their loop, and must not keep the loop alive.
        self._loop = weakref.ref(asyncio.get_running_loop())
        self._waiting: list[_Waiting] = []
        self._scheduled = False
        self._alone = False
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
        assert loop is not None, "who appends runs on it"
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
    ) -> Awaitable[int]:
        """Record entries; await the last one's number before telling anybody that it happened."""
        # Read now: what fails in there is its caller's trouble, not that of the whole batch.
        append = Append(run, tuple(entries), status, guard, release)
        task = asyncio.current_task(self.loop)
        if not self._scheduled:
            self._scheduled = True
            self._alone, self._first, self._crowded = not self._crowded, task, False
            self.loop.call_soon(self._flush)
        elif task is not self._first:
            self._crowded = True
        if self._alone and not self._crowded and not self._waiting and self.store.syncs_fast():
            (outcome,) = self._write([append], sync=sync, busy_timeout=_BUSY_TIMEOUT)
            if not isinstance(outcome, StoreBusyError):
                return _Written(outcome, pause=sync and self._pause_is_due())
        waiting = _Waiting(append, sync, task, self.loop.create_future())
        self._waiting.append(waiting)
        return waiting.done

    def _pause_is_due(self) -> bool:
        """Return whether the loop has stood still for long enough to let others run."""
        now = self.loop.time()
        if now - self._paused < _PAUSE_EVERY:
            return False
        self._paused = now
        return True

    def _flush(self) -> None:
        self._first = None  # or the task, and with it the loop, would be kept alive
        batch = self._next_batch()
        if not batch:
            self._scheduled = False
        elif self.store.syncs_fast() or self._in_thread >= _LOOK_AGAIN:
            self._in_thread = 0
            outcome = self._write_batch(batch, _BUSY_TIMEOUT)
            if isinstance(outcome[0], StoreBusyError):
                self._flush_in_thread(batch)
                return
            self._scheduled = bool(self._waiting)
            self._settle(batch, outcome)
            if self._waiting:
                self.loop.call_soon(self._flush)
        else:
            self._flush_in_thread(batch)

    def _next_batch(self) -> list[_Waiting]:
        """Take what shall be written now; what needs a sync may have to wait, but only once."""
        hurried = [waiting for waiting in self._waiting if not waiting.sync]
        others = [waiting for waiting in self._waiting if waiting.sync]
        self._postponed = bool(hurried and others) and not self._postponed
        if self._postponed and {w.task for w in hurried}.isdisjoint(w.task for w in others):
            self._waiting = others
            return hurried
        batch, self._waiting = self._waiting, []
        return batch

    def _flush_in_thread(self, batch: list[_Waiting]) -> None:
        if self._thread is None:
            from concurrent.futures import ThreadPoolExecutor  # noqa: PLC0415 - slow disks only

            self._thread = ThreadPoolExecutor(1, thread_name_prefix="maestro-recorder")
        self._in_thread += 1
        written = self.loop.run_in_executor(self._thread, self._write_batch, batch)
        written.add_done_callback(lambda done: self._after_thread(batch, done.result()))

    def _after_thread(self, batch: list[_Waiting], outcome: _Outcome) -> None:
        self._settle(batch, outcome)
        if self._waiting:
            self.loop.call_soon(self._flush)
        else:
            self._scheduled = False

    def _write_batch(self, batch: list[_Waiting], busy_timeout: float | None = None) -> _Outcome:
        appends = [waiting.append for waiting in batch]
        return self._write(
            appends, sync=any(waiting.sync for waiting in batch), busy_timeout=busy_timeout
        )

    def _write(self, appends: list[Append], *, sync: bool, busy_timeout: float | None) -> _Outcome:
        try:
            return self.store.append(appends, sync=sync, busy_timeout=busy_timeout)
        except Exception as error:  # noqa: BLE001 - whatever it is, those who wait must get it
            return [error] * len(appends)

    @staticmethod
    def _settle(batch: list[_Waiting], outcome: _Outcome) -> None:
        for waiting, each in zip(batch, outcome, strict=True):
            if waiting.done.done():
                continue  # its task was cancelled; the record stands all the same
            if isinstance(each, Exception):
                waiting.done.set_exception(each)
            else:
                waiting.done.set_result(each)


class _Written:
    """What came of an append that is written already; awaiting it may let others run first."""

    __slots__ = ("_outcome", "_pause")

    def __init__(self, outcome: int | Exception, *, pause: bool) -> None:
        self._outcome = outcome
        self._pause = pause

    def __await__(self) -> Generator[None, None, int]:
        if self._pause:
            yield
        if isinstance(self._outcome, Exception):
            raise self._outcome
        return self._outcome


_Outcome = Sequence[int | Exception]
