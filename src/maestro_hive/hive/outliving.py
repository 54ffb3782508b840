"""Threads that go on after their steps were stopped: the run is not let go before they have ended."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from maestro_hive.hive.dispatching import wake_workers

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future

    from maestro_hive.engine.open_run import OpenRun


def close_after_threads(run: OpenRun, parent: OpenRun | None, close: Callable[[], None]) -> None:
    """Close a run at once; if it belongs to workers and has to go on, when its threads have ended.

    Until then this process has its lease: no worker calls a step while a thread still executes it.
    The threads of a child keep the run at the top of the family, which is the one that workers take.
    """
    threads = _still_running(run)
    if threads and parent is not None:
        parent.threads.extend((None, each) for each in threads)
    if not threads or parent is not None or not run.lease.dispatched:
        close()
        return
    held = run.hold()

    def close_when_ended(_: Future[Any] | None = None) -> None:
        for thread in threads:
            if not thread.done():
                thread.add_done_callback(close_when_ended)
                return
        try:
            close()
        finally:
            held.set_result(None)
        wake_workers(run.store)

    close_when_ended()


async def let_threads_end(run: OpenRun) -> None:
    """Return when no thread of an earlier execution holds the run."""
    if run.held is not None:
        await asyncio.shield(asyncio.wrap_future(run.held))


def _still_running(run: OpenRun) -> list[Future[Any]]:
    """Return the threads of steps that are called again when the run goes on."""
    state = run.state
    if state.ended is not None:
        return []
    found = []
    for identity, thread in run.threads:
        step = None if identity is None else state.by_identity.get(identity)
        has_outcome = identity in state.outcomes or (
            step is not None and step.completed is not None
        )
        if not has_outcome and not thread.done():
            found.append(thread)
    return found
