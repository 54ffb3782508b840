"""News: frozen records handed to whoever asked, never an import upwards."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

logger = logging.getLogger(__name__)

EventT = TypeVar("EventT")


class Hooks(Generic[EventT]):
    """Callables that receive each event, in the order they were added.

    A hook that raises is logged and the next one is called: what was written is written, and a
    listener must not be able to turn it into a failure.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._hooks: dict[object, Callable[[EventT], object]] = {}

    def __bool__(self) -> bool:
        """Return whether anybody listens, so that nobody builds events for no one."""
        return bool(self._hooks)

    def add(self, hook: Callable[[EventT], object]) -> Callable[[], None]:
        """Call ``hook`` with every event from now on; the returned function ends that."""
        handle = object()  # the same hook may be added twice, and removed once
        with self._lock:
            self._hooks = {**self._hooks, handle: hook}

        def remove() -> None:
            with self._lock:
                self._hooks = {key: hook for key, hook in self._hooks.items() if key is not handle}

        return remove

    def emit(self, event: EventT) -> None:
        """Hand ``event`` to every hook."""
        for hook in self._hooks.values():
            try:
                hook(event)
            except Exception:
                logger.exception("a hook failed on %r", event)
