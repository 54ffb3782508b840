"""Notifications: frozen records passed to subscribers, so that no module imports upwards."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Generic, TypeVar

from maestro_hive.kernel.logs import get_logger

if TYPE_CHECKING:
    from collections.abc import Callable

logger = get_logger(__name__)

EventT = TypeVar("EventT")


class Hooks(Generic[EventT]):
    """Callables that receive each event, in the order they were added.

    A hook that raises is logged and the next one is called: an error of a subscriber must not turn
    what was written into a failure.
    """

    def __init__(self) -> None:
        #: Whether there is any, so that events need not be made for none.
        self.active = False
        self._lock = threading.Lock()
        self._hooks: dict[object, Callable[[EventT], object]] = {}

    def __bool__(self) -> bool:
        """Return whether there is any."""
        return self.active

    def add(self, hook: Callable[[EventT], object]) -> Callable[[], None]:
        """Call ``hook`` with every event from now on; the returned function ends that."""
        handle = object()  # the same hook may be added twice, and removed once
        with self._lock:
            self._hooks = {**self._hooks, handle: hook}
            self.active = True

        def remove() -> None:
            with self._lock:
                self._hooks = {key: hook for key, hook in self._hooks.items() if key is not handle}
                self.active = bool(self._hooks)

        return remove

    def emit(self, event: EventT) -> None:
        """Call every hook with ``event``."""
        for hook in self._hooks.values():
            try:
                hook(event)
            except Exception:
                logger.exception("a hook failed on %r", event)
