"""A run's events as they come, from the journal: whoever executes it, and also if nobody does."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from maestro_hive.hive import under_way
from maestro_hive.hive.run_reading import find_run
from maestro_hive.maestro.state.run_events import EventReader
from maestro_hive.maestro.state.run_view import OVER

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from maestro_hive.maestro.state.run_events import RunEvent
    from maestro_hive.maestro.state.store import Store

#: How long to wait for news, from a run that is busy to one that is quiet.
_SHORTEST, _LONGEST = 0.02, 0.25
#: How often it is looked whether a run that was just started is listed.
_BEGINNING = 1_500


async def follow(
    store: Store, run_id: str, *, after: int = 0, wait: bool = True
) -> AsyncIterator[RunEvent]:
    """Yield a run's events with numbers over ``after``; then, as they come, the next ones.

    It ends when the run is over, or when no process executes it. Without ``wait`` it ends with
    what there is.
    """
    for _ in range(_BEGINNING):
        if store.run(run_id) is not None or under_way.here(store, run_id) is None:
            break
        await asyncio.sleep(_SHORTEST)  # it begins in this moment
    reader, run = EventReader(run_id, store.load), find_run(store, run_id).id
    seq, pause = 0, _SHORTEST
    while True:
        is_last = not wait or not _goes_on(store, run_id)  # looked at before the entries are
        new = await asyncio.to_thread(store.entries, run, seq)
        for entry in new:
            event = reader.read(entry)
            if event is not None and entry.seq > after:
                yield event
        if new:
            seq, pause = new[-1].seq, _SHORTEST
        elif is_last:
            return
        else:
            await asyncio.sleep(pause)
            pause = min(pause * 1.5, _LONGEST)


def _goes_on(store: Store, run_id: str) -> bool:
    record = store.run(run_id)
    if record is None or record.status in OVER:
        return False
    return under_way.here(store, run_id) is not None or run_id in store.held_runs()
