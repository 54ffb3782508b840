"""What steps write while they are executed: collected, and written in batches by a thread.

``write`` puts a chunk into memory and returns. A thread writes what came together, without a sync,
at most every ``INTERVAL`` seconds, for all steps on a store at once. Before an attempt's outcome is
recorded, what it wrote is written: so whoever reads the outcome can read all of the stream, and the
sync of the outcome covers it.
"""

from __future__ import annotations

import asyncio
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple, Protocol

from maestro_hive.engine import values
from maestro_hive.engine.errors import ExecutionException
from maestro_hive.engine.shared import shared
from maestro_hive.kernel.errors import ConfigurationError, EncodeError, MaestroError, StoreBusyError
from maestro_hive.kernel.process import threads
from maestro_hive.maestro.state.records import ChunkKind, NewChunk
from maestro_hive.maestro.state.store import ChunkAppend

if TYPE_CHECKING:
    from maestro_hive.maestro.state.store import RunLease, Store

#: How many bytes a chunk has at most.
MOST_BYTES = 64 * 1024
#: How many seconds pass between two batches.
INTERVAL = 0.01
#: Who writes faster than the disk waits when so many bytes, or chunks, are in memory.
_WAITING_BYTES, _WAITING_CHUNKS = 4 * 1024 * 1024, 20_000
#: What is written on an event loop: not more than this, and not behind another process.
_BYTES_ON_LOOP, _BUSY_ON_LOOP = 256 * 1024, 0.005


class Stream(Protocol):
    """Where the chunks of one attempt go."""

    def write(self, chunk: str | bytes) -> None:
        """Add a chunk."""

    def close(self) -> None:
        """Accept nothing more: the attempt is over."""


class DiscardedStream:
    """A stream that is not stored; what could not be written to another one is refused, too."""

    def write(self, chunk: str | bytes) -> None:
        """Check a chunk."""
        _encoded(chunk)

    def close(self) -> None:
        """Do nothing."""


class AttemptStream:
    """The stream of one attempt at a step of a run."""

    __slots__ = ("_attempt", "_closed", "_lock", "_step", "_writer", "error", "lease", "unwritten")

    def __init__(self, store: Store, lease: RunLease, step: int, attempt: int) -> None:
        self.lease = lease
        #: Why its chunks are not written; raised by whoever writes or records next.
        self.error: MaestroError | None = None
        #: How many of its chunks are in memory alone; changed by the writer.
        self.unwritten = 0
        self._step = step
        self._attempt = attempt
        self._closed = False
        self._lock = threading.Lock()
        self._writer = shared(store, StreamWriter, "", _writer)

    def write(self, chunk: str | bytes) -> None:
        """Add a chunk: at the latest, it is written before the attempt's outcome is."""
        self._add(*_encoded(chunk))

    def restart(self) -> None:
        """Say that the step starts over."""
        self._add(ChunkKind.RESTARTED, b"")

    def _add(self, kind: ChunkKind, data: bytes) -> None:
        with self._lock:  # so that nothing follows ``close``
            if self._closed:
                raise ExecutionException(
                    f"attempt {self._attempt} is over, and cannot write to its stream any more:"
                    " it took too long, or was stopped"
                )
            if self.error is not None:
                raise self.error
            at = self._writer.store.clock.nanos() // 1000
            self._writer.add(self, NewChunk(self._step, self._attempt, at, kind, data))

    def close(self) -> None:
        """Accept nothing more."""
        with self._lock:
            self._closed = True

    def flush(self) -> None:
        """Write what is in memory; return when it would survive a kill. Raises what prevents it."""
        if self.unwritten:
            self._writer.flush()
        if self.error is not None:
            raise self.error

    async def flushed(self) -> None:
        """Do the same from an event loop, which is not blocked for long.

        A cancellation is raised when all is written.
        """
        if self.unwritten and not self._writer.flush_on_loop():
            try:
                await values.in_thread(self._writer.flush)
            except asyncio.CancelledError:
                self.flush()  # waits for the thread
                raise
        self.flush()


class _Waiting(NamedTuple):
    stream: AttemptStream
    chunk: NewChunk


class StreamWriter:
    """The chunks of one store that are not written yet, from every step in this process."""

    def __init__(self, store: Store) -> None:
        self.store = store
        #: Guards what is below, for moments only.
        self._lock = threading.Lock()
        self._waiting: list[_Waiting] = []
        self._bytes = 0
        self._is_active = False
        #: Held by who writes, so that batches are written in order.
        self._writing = threading.Lock()

    def add(self, stream: AttemptStream, chunk: NewChunk) -> None:
        """Have a chunk written soon; wait for that only if there are too many."""
        with self._lock:
            self._waiting.append(_Waiting(stream, chunk))
            stream.unwritten += 1
            self._bytes += len(chunk.data)
            start, self._is_active = not self._is_active, True
            full = self._bytes > _WAITING_BYTES or len(self._waiting) > _WAITING_CHUNKS
        if start:
            threads.run(self._work)
        if full:
            self.flush()

    def _work(self) -> None:
        """Write batches until there is nothing more to write."""
        goes_on = True
        while goes_on:
            try:
                with suppress(StoreBusyError):  # what was to be written waits for the next time
                    self.flush()
                time.sleep(INTERVAL)
            except BaseException:
                with self._lock:
                    self._is_active = False  # the next chunk starts another thread
                raise
            with self._lock:
                goes_on = self._is_active = bool(self._waiting)

    def flush(self) -> None:
        """Write what is in memory; what fails is an error of the streams it belongs to."""
        with self._writing:
            self._write(None)

    def flush_on_loop(self) -> bool:
        """Do the same, if it takes no time; return whether it was done."""
        if self._bytes > _BYTES_ON_LOOP or not self._writing.acquire(blocking=False):
            return False
        try:
            self._write(_BUSY_ON_LOOP)
        except StoreBusyError:
            return False
        finally:
            self._writing.release()
        return True

    def _write(self, busy_timeout: float | None) -> None:
        with self._lock:
            batch, self._waiting, self._bytes = self._waiting, [], 0
        if not batch:
            return
        by_lease: dict[RunLease, list[NewChunk]] = {}
        for stream, chunk in batch:
            by_lease.setdefault(stream.lease, []).append(chunk)
        failed: dict[RunLease, MaestroError | None]
        try:
            appends = [ChunkAppend(lease, chunks) for lease, chunks in by_lease.items()]
            outcome = self.store.append_chunks(appends, busy_timeout=busy_timeout)
            failed = dict(zip(by_lease, outcome, strict=True))
        except BaseException as error:
            if isinstance(error, StoreBusyError) or not isinstance(error, MaestroError):
                self._take_back(batch)
                raise
            failed = dict.fromkeys(by_lease, error)
        with self._lock:
            for stream, _ in batch:
                stream.unwritten -= 1
                stream.error = stream.error or failed[stream.lease]

    def _take_back(self, batch: list[_Waiting]) -> None:
        with self._lock:
            self._waiting = batch + self._waiting
            self._bytes += sum(len(chunk.data) for _, chunk in batch)


def _writer(store: Store, _name: str) -> StreamWriter:
    return StreamWriter(store)


def _encoded(chunk: object) -> tuple[ChunkKind, bytes]:
    """Return a chunk as it is stored; raise if it is too large, or of another type."""
    if type(chunk) is bytes:
        kind, data = ChunkKind.BYTES, chunk
    elif isinstance(chunk, str):
        try:
            kind, data = ChunkKind.TEXT, chunk.encode()
        except UnicodeEncodeError as error:
            raise EncodeError("chunk", f"a text without a form in UTF-8 ({error.reason})") from None
    else:
        raise ConfigurationError(
            f"write() takes a text or bytes, not {type(chunk).__name__}; turn a value into a text"
            " first, by json.dumps for instance"
        )
    if len(data) > MOST_BYTES:
        raise ConfigurationError(
            f"a chunk of a stream has at most {MOST_BYTES:,} bytes, and this one has {len(data):,};"
            " write it in parts, or return it as the step's result"
        )
    return kind, data
