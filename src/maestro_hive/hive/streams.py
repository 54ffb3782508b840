"""Following what the steps of a run write, whichever process executes it."""

from __future__ import annotations

import asyncio
from time import monotonic
from typing import TYPE_CHECKING

from maestro_hive.engine import values
from maestro_hive.hive.errors import RunInactiveError, UnknownRunError
from maestro_hive.hive.handle import is_executed, recorded_start
from maestro_hive.hive.runs import find_run
from maestro_hive.kernel.errors import ConfigurationError
from maestro_hive.maestro.state.projections import labels
from maestro_hive.maestro.state.streams import StreamReader
from maestro_hive.maestro.state.views import is_finished

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from maestro_hive.maestro.state.store import Store
    from maestro_hive.maestro.state.streams import StreamChunk

#: How many seconds to wait for further chunks: less after a new one, more after none.
_MIN_WAIT, _MAX_WAIT = 0.005, 0.05
#: How often it is checked whether the run is executed, while nothing comes.
_CHECK_SECONDS = 0.25


async def follow(
    store: Store, run_id: str, step: str | int | None, *, after: int, wait: bool
) -> AsyncIterator[StreamChunk]:
    """Yield the chunks of a run, or of one step, with numbers over ``after``, and the next ones.

    It ends when the step, or the run, has its outcome. Without ``wait`` it ends with what there is.
    """
    await recorded_start(store, run_id)
    feed = _Feed(store, StreamReader(store, find_run(store, run_id), step, after))
    pause = _MIN_WAIT
    while True:
        found = await values.in_thread(feed.next_batch)
        for chunk in found:
            yield chunk
        stream = feed.stream
        if stream.is_over or not (wait or stream.has_more):
            break
        if feed.is_left:
            if is_finished(stream.state):  # of a run without a workflow, which has no end
                break
            raise RunInactiveError(run_id)
        if not stream.has_more:
            pause = _MIN_WAIT if found else min(pause * 1.5, _MAX_WAIT)
            await asyncio.sleep(pause)
    if step is not None and stream.step() is None:
        known = ", ".join(dict.fromkeys(labels(stream.state).values())) or "none"
        raise ConfigurationError(f"run {run_id!r} has no step {step!r}; it has: {known}")


class _Feed:
    """A stream, read in a thread; and whether anything can still come."""

    def __init__(self, store: Store, stream: StreamReader) -> None:
        self.stream = stream
        #: Whether all was read, and no process executes the run, or will by itself.
        self.is_left = False
        self._store = store
        self._checked = 0.0
        self._quiet = False

    def next_batch(self) -> list[StreamChunk]:
        """Return the next chunks."""
        left = False  # found out before the chunks are read: then nothing comes after them
        if self._quiet and monotonic() - self._checked >= _CHECK_SECONDS:
            self._checked = monotonic()
            name = self.stream.run.name
            if find_run(self._store, name).id != self.stream.run.id:  # purged, and started again
                raise UnknownRunError(name, self._store.location)
            left = not is_executed(self._store, name)
        found = self.stream.next_batch()
        self._quiet = not found
        self.is_left = left and not found and not self.stream.has_more
        return found
