"""Runs that were stopped while a thread of a step still runs: released when it has ended."""

from __future__ import annotations

import contextlib
import threading
from concurrent.futures import Future
from typing import TYPE_CHECKING

from maestro_hive.journal.effects import Extend
from maestro_hive.journal.store import Append
from maestro_hive.kernel.errors import MaestroError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from maestro_hive.journal.effects import Release
    from maestro_hive.journal.store import RunLease, Store

#: A thread that runs for longer after the stop of its run no longer holds the run.
_LEASE_SECONDS = 600.0


class HeldRuns:
    """The runs of one hive that wait for threads; a thread cannot be stopped."""

    def __init__(self) -> None:
        self._released: dict[str, Future[None]] = {}
        self._close: Callable[[], None] | None = None
        self._mutex = threading.RLock()

    def find(self, run_id: str) -> Future[None] | None:
        """Return what is done when the run is released; None if it is not held."""
        return self._released.get(run_id)

    def hold(
        self, store: Store, lease: RunLease, release: Release, threads: Sequence[Future[object]]
    ) -> None:
        """Release a run when its threads have ended."""
        with self._mutex:
            self._released[lease.name] = Future()
        store.write((Append(lease, (), (Extend(_LEASE_SECONDS),)),))
        left = set(threads)

        def ended(thread: Future[object]) -> None:
            with self._mutex:
                left.discard(thread)
                if left:
                    return
                with contextlib.suppress(MaestroError):  # taken over, or the store has failed
                    store.release(lease, release)
                self._released.pop(lease.name).set_result(None)
                if self._close is not None:
                    self.close_after(self._close)

        for each in threads:
            each.add_done_callback(ended)

    def close_after(self, close: Callable[[], None]) -> None:
        """Close a store now, or when the last run is released."""
        with self._mutex:
            self._close = close
            if not self._released:
                close()
