"""Appending from an event loop: what many tasks record in one tick becomes one transaction.

The transaction runs on the loop while the disk is quick: an fsync takes less time than handing it
to a thread and back, and a thread would wait for a busy loop to let go of the interpreter. On a
slow disk it runs in a thread, and what comes in the meantime makes up the next batch.

While one task alone records, an append that needs no fsync is written at once, the first of each
tick. So a step waits for the loop once, when it ends, and not also when it begins.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from maestro_hive.maestro.state.store import Append, Hold, Store

if TYPE_CHECKING:
    from collections.abc import Iterable
    from concurrent.futures import ThreadPoolExecutor

    from maestro_hive.maestro.state.records import NewEntry


#: After so many batches in a thread one is written on the loop, to see how quick the disk is. The
#: thread cannot tell: what it measures includes its waiting for a busy loop.
_LOOK_AGAIN = 32


class _Waiting(NamedTuple):
    append: Append
    sync: bool
    done: asyncio.Future[None]


class Recorder:
    """The appends of one event loop to one store."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._loop = asyncio.get_running_loop()
        self._waiting: list[_Waiting] = []
        self._scheduled = False
        self._thread: ThreadPoolExecutor | None = None
        self._in_thread = 0
        self._alone = False

    def append(
        self,
        hold: Hold,
        entries: Iterable[NewEntry],
        *,
        status: str | None = None,
        sync: bool = True,
    ) -> asyncio.Future[None]:
        """Record entries; await the result before telling anybody that it happened."""
        # Read now: what fails in there is its caller's trouble, not that of the whole batch.
        append = Append(hold, list(entries), status)
        waiting = _Waiting(append, sync, self._loop.create_future())
        is_first = not self._scheduled
        if is_first:
            self._scheduled = True
            self._loop.call_soon(self._flush)
        if is_first and self._alone and not sync and self._store.quick():
            self._settle([waiting], self._write([waiting]))
        else:
            self._waiting.append(waiting)
        return waiting.done

    def _flush(self) -> None:
        batch, self._waiting = self._waiting, []
        self._alone = len(batch) < 2
        if not batch:
            self._scheduled = False
        elif self._store.quick() or self._in_thread >= _LOOK_AGAIN:
            self._in_thread = 0
            self._scheduled = False
            self._settle(batch, self._write(batch))
        else:
            self._flush_in_thread(batch)

    def _flush_in_thread(self, batch: list[_Waiting]) -> None:
        if self._thread is None:
            from concurrent.futures import ThreadPoolExecutor  # noqa: PLC0415 - slow disks only

            self._thread = ThreadPoolExecutor(1, thread_name_prefix="maestro-recorder")
        self._in_thread += 1
        written = self._loop.run_in_executor(self._thread, self._write, batch)
        written.add_done_callback(lambda done: self._after_thread(batch, done.result()))

    def _after_thread(self, batch: list[_Waiting], outcome: _Outcome) -> None:
        self._settle(batch, outcome)
        if self._waiting:
            self._loop.call_soon(self._flush)
        else:
            self._scheduled = False

    def _write(self, batch: list[_Waiting]) -> _Outcome:
        try:
            return self._store.append(
                [waiting.append for waiting in batch], sync=any(waiting.sync for waiting in batch)
            )
        except Exception as error:  # noqa: BLE001 - whatever it is, those who wait must get it
            return [error] * len(batch)

    @staticmethod
    def _settle(batch: list[_Waiting], outcome: _Outcome) -> None:
        for waiting, error in zip(batch, outcome, strict=True):
            if waiting.done.done():
                continue  # its task was cancelled; the record stands all the same
            if error is None:
                waiting.done.set_result(None)
            else:
                waiting.done.set_exception(error)


_Outcome = Sequence[Exception | None]
