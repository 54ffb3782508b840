"""What a store does in the background: renewing leases, and copying the log."""

from __future__ import annotations

import threading
import time
import weakref
from typing import Protocol

from maestro_hive.kernel.errors import MaestroError
from maestro_hive.kernel.logs import get_logger

logger = get_logger(__name__)


class _Maintained(Protocol):
    def renew_leases(self) -> None: ...

    def checkpoint(self) -> None: ...


class Maintenance:
    """One daemon thread per store, started when there is something to do.

    What fails here fails again at the store's next write, where a caller waits for the result.
    """

    def __init__(self, store: _Maintained, interval: float) -> None:
        self._store = weakref.ref(store)
        self._interval = interval
        self._wake = threading.Event()
        self._checkpoint_due = False
        self._stopped = False
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread, if it does not run yet."""
        if self._thread is None and not self._stopped:
            name = "maestro-maintenance"
            self._thread = threading.Thread(target=self._work, name=name, daemon=True)
            self._thread.start()

    def ask_for_checkpoint(self) -> None:
        """Have the log copied soon."""
        if not self._checkpoint_due:
            self._checkpoint_due = True
            self.start()
            self._wake.set()

    def stop(self) -> None:
        """Stop the thread, and wait for what it is doing."""
        self._stopped = True
        self._wake.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout=10)

    def _work(self) -> None:
        renewal = time.monotonic() + self._interval
        while not self._stopped:
            self._wake.wait(max(0.0, renewal - time.monotonic()))
            self._wake.clear()
            store = self._store()
            if store is None or self._stopped:
                return
            try:
                # Leases first: frequent checkpoints must not delay them.
                if time.monotonic() >= renewal:
                    renewal = time.monotonic() + self._interval
                    store.renew_leases()
                if self._checkpoint_due:
                    self._checkpoint_due = False
                    store.checkpoint()
            except MaestroError as error:
                logger.debug("maintenance: %s", error)
            finally:
                del store
