"""What the steps of a run write, followed from any process."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import TYPE_CHECKING, NamedTuple

from maestro_hive.engine.settings import Amount, checked
from maestro_hive.hive.handle import is_executed
from maestro_hive.hive.run_control import StepLabels
from maestro_hive.journal import values
from maestro_hive.journal.effects import ENDED
from maestro_hive.journal.entries import AttemptStarted
from maestro_hive.journal.store import RESTARTED
from maestro_hive.kernel.errors import RunInactiveError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from maestro_hive.journal.store import Chunk, RunRow, Store

#: How long to wait for further chunks: less after a new one, more after none.
_SHORTEST_WAIT, _LONGEST_WAIT = 0.005, 0.05


class StreamChunk(NamedTuple):
    """One chunk of what a step wrote, or, without data, that the step starts over."""

    run_id: str
    #: The step's name, or ``name#2`` for the second step of that name.
    step: str
    attempt: int
    #: Its number among all chunks of the run: reading continues ``after`` it.
    seq: int
    at: datetime
    #: What was written, a text or bytes.
    data: str | bytes
    #: Whether a new attempt starts here: what the step wrote before no longer counts.
    restarted: bool = False


async def follow_stream(
    store: Store, run_id: str, step: str | int | None, *, after: int, follow: bool
) -> AsyncIterator[StreamChunk]:
    """Yield what the steps of a run, or one of them, wrote after a number; then what comes.

    It ends when the step, or the run, has its outcome. Without ``follow`` it ends with what there
    is.
    """
    checked(Amount, after, "after")
    reader = _Reader(store, store.find(run_id), step, after)
    pause = _SHORTEST_WAIT
    while True:
        before = reader.after
        for chunk in await asyncio.to_thread(reader.next_chunks):
            yield chunk
        if reader.after > before:
            pause = _SHORTEST_WAIT
            continue
        if reader.is_over or not follow:
            break
        if reader.is_left:
            raise RunInactiveError(run_id)
        await asyncio.sleep(pause)
        pause = min(pause * 1.5, _LONGEST_WAIT)
    if step is not None and not reader.steps:
        raise reader.labels.unknown(run_id, step)


class _Reader:
    """Reads the chunks of a run in order, with the labels of their steps; in a thread."""

    def __init__(self, store: Store, row: RunRow, step: str | int | None, after: int) -> None:
        self._store, self._row, self._wanted, self.after = store, row, step, after
        self.labels = StepLabels()
        self._seq = 0
        #: The labels of the steps that have their outcome.
        self._closed: set[str] = set()
        #: Whether nothing comes after the last chunk, and whether no process executes the run.
        self.is_over = self.is_left = False

    @property
    def steps(self) -> list[int]:
        """Return the numbers of the step that is followed: another one after each retry."""
        return [] if self._wanted is None else self.labels.find(self._wanted)

    def next_chunks(self) -> list[StreamChunk]:
        """Return the next chunks."""
        row = self._store.find(self._row.run_id)  # before the chunks: then nothing follows them
        self.is_left = not is_executed(row)
        self._read_entries()
        steps = self.steps
        is_closed = any(self.labels.known[each] in self._closed for each in steps)
        self.is_over = is_closed or row.status in ENDED
        found: list[Chunk] = []
        if steps or self._wanted is None:
            one = steps[0] if len(steps) == 1 else 0
            found = self._store.chunks(self._row.number, self.after, one)
            self.after = found[-1].number if found else self.after
        return [self._shown(each) for each in found if not steps or each.step in steps]

    def _read_entries(self) -> None:
        for entry in self._store.entries(self._row.number, self._seq):
            self._seq = entry.seq
            label = self.labels.of(entry)
            if isinstance(entry, AttemptStarted):
                self._closed.discard(label)
            elif entry.is_outcome:
                self._closed.add(label)

    def _shown(self, chunk: Chunk) -> StreamChunk:
        data = chunk.data.encode()
        restarted = data == RESTARTED
        return StreamChunk(
            run_id=self._row.run_id,
            step=self.labels.known.get(chunk.step, ""),
            attempt=chunk.attempt,
            seq=chunk.number,
            at=datetime.fromtimestamp(chunk.at / 1e6, UTC),
            data="" if restarted else values.decode(data, "chunk"),
            restarted=restarted,
        )
