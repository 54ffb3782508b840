"""Group commit: what the runs of one event loop write in one tick is one transaction.

A step that is alone is written at once, without a turn of the loop. The order in which a run's
entries are delivered is the order of the log: the commit itself delivers them, before any task
that waits for it continues.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any

from maestro_hive.journal.state import Outcome, RunState
from maestro_hive.journal.store import Acquire, Append, Operation, Result, RunLease, Store
from maestro_hive.kernel.errors import MaestroError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Future

    from maestro_hive.journal.effects import Effect
    from maestro_hive.journal.entries import Entry, RunStarted, Value


class Written(asyncio.Future[Any]):
    """A record under way: a task that is cancelled meanwhile is cancelled when it is written."""

    def cancel(self, msg: object = None) -> bool:
        """Refuse: the task is cancelled at its next step, when it is known what is recorded."""
        return False


class Recorder:
    """Writes for the runs of one event loop, on that loop."""

    def __init__(
        self,
        store: Store,
        loop: asyncio.AbstractEventLoop,
        changed: Callable[[int], None] | None = None,
    ) -> None:
        self.store = store
        #: Called with the number of a run after each commit of its entries.
        self.changed = changed
        #: How many steps are under way on this loop; one alone need not wait for others.
        self.busy = 0
        self._loop = loop
        #: What the next commit writes.
        self.waiting: list[tuple[Operation, RunJournal | None, asyncio.Future[Any] | None]] = []

    def acquire(self, name: str, first: RunStarted, queue: str | None = None) -> Written:
        """Take a run; return the future of its lease."""
        done = Written(loop=self._loop)
        self._submit(Acquire(name, first, queue), None, done)
        return done

    def append(self, append: Append, journal: RunJournal) -> Written:
        """Append to a run with others; return the future of its entries."""
        done = Written(loop=self._loop)
        self._submit(append, journal, done)
        return done

    def append_soon(
        self, append: Append, journal: RunJournal, done: asyncio.Future[Any] | None = None
    ) -> None:
        """Append to a run, from a plain callback; a refusal goes to ``done``, or to the journal."""
        self._submit(append, journal, done)

    def _submit(
        self, operation: Operation, journal: RunJournal | None, done: asyncio.Future[Any] | None
    ) -> None:
        if not self.waiting:
            self._loop.call_soon(self._flush)
        self.waiting.append((operation, journal, done))

    def _flush(self) -> None:
        waiting, self.waiting = self.waiting, []
        results: Sequence[Result | Exception]
        try:
            results = self.store.write([each[0] for each in waiting])
        except Exception as error:  # noqa: BLE001 - whatever it is, nothing of this was recorded
            results = [error] * len(waiting)
        for (_, journal, done), found in zip(waiting, results, strict=True):
            refusal = found if isinstance(found, Exception) else None
            if journal is not None and isinstance(found, list):
                journal.written(found)
            if done is not None and not done.done():
                if refusal is not None:
                    done.set_exception(refusal)
                else:
                    done.set_result(found)
            elif refusal is not None and journal is not None:
                journal.failed(refusal)


class RunJournal:
    """A run of this process: its lease, its folded state, and the receiver of its outcomes."""

    def __init__(
        self,
        recorder: Recorder,
        lease: RunLease,
        deliver: Callable[[Outcome], None],
        failed: Callable[[Exception], None],
    ) -> None:
        self.recorder, self.lease, self.state = recorder, lease, RunState()
        self._deliver = deliver
        #: Threads of attempts that were stopped, and still run.
        self.left: list[Future[Any]] = []
        self.failed = failed
        #: Returns the text of a value of the run, also of one that is stored apart.
        self.text: Callable[[Value], bytes] = partial(recorder.store.text, lease)

    def load(self) -> RunState:
        """Read and fold what is recorded."""
        first, store = self.lease.first, self.recorder.store
        self.state.add([first] if first is not None else store.entries(self.lease.number))
        return self.state

    def now(self) -> float:
        """Return the time on the clock that all holders share."""
        return self.recorder.store.db.now()

    async def record(self, *entries: Entry, effects: Sequence[Effect] = ()) -> Entry:
        """Record entries in one transaction with their effects, and return the last, as written."""
        recorder, append = (
            self.recorder,
            Append(self.lease, entries, effects, entries[-1].is_synced),
        )
        if recorder.busy > 1 or recorder.waiting:
            placed: list[Entry] = await recorder.append(append, self)
            return placed[-1]
        (found,) = recorder.store.write((append,))
        if isinstance(found, MaestroError):
            raise found
        assert isinstance(found, list)
        self.written(found)
        return found[-1]

    def record_now(self, *entries: Entry) -> None:
        """Record before anything else is done, on the loop."""
        (found,) = self.recorder.store.write((Append(self.lease, entries),))
        if isinstance(found, MaestroError):
            raise found
        assert isinstance(found, list)
        self.written(found)

    def record_soon(
        self,
        *entries: Entry,
        effects: Sequence[Effect] = (),
        done: asyncio.Future[Any] | None = None,
    ) -> None:
        """Record from a plain callback."""
        sync = bool(entries) and entries[-1].is_synced
        self.recorder.append_soon(Append(self.lease, entries, effects, sync), self, done)

    def written(self, entries: Sequence[Entry]) -> None:
        """Fold what was written, and deliver the outcomes."""
        state = self.state
        for entry in entries:
            entry.fold(state)
            state.seq = entry.seq
            if entry.is_outcome:
                assert state.latest is not None
                self._deliver(state.latest)
        if entries and (changed := self.recorder.changed) is not None:
            changed(self.lease.number)
