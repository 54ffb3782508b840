"""A change of a value as subscribers see it, and who wants to see which."""

from __future__ import annotations

import fnmatch
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import datetime


@dataclass(frozen=True, slots=True)
class StateChange:
    """One change, as subscribers see it; ``change_type`` is create, update or delete."""

    key: str
    old_value: Any
    new_value: Any
    namespace: str
    timestamp: datetime
    change_type: str


@dataclass(frozen=True, slots=True)
class Subscription:
    """A callback, and the shell-style patterns of the keys and namespaces it is for."""

    callback: Callable[[StateChange], object]
    key_pattern: str
    namespace: str

    def __call__(self, change: StateChange) -> None:
        """Pass a change on, if it is one of those."""
        if fnmatch.fnmatchcase(change.key, self.key_pattern) and fnmatch.fnmatchcase(
            change.namespace, self.namespace
        ):
            self.callback(change)
