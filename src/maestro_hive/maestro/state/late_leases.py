"""Leases that have expired while their holders live: each gets a last chance to be renewed."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

#: For how long an expired lease must have been seen: what delayed us may have delayed its renewal.
_LAST_CHANCE_SECONDS = 0.5


class LateLeases:
    """Since when one process has seen which leases expired."""

    def __init__(self) -> None:
        self._since: dict[int, float] = {}

    def overdue(self, late: Iterable[int], now: float) -> set[int]:
        """Return those, of the fencing numbers that are late now, which have been so for a while."""
        self._since = {fence: self._since.get(fence, now) for fence in late}
        return {
            fence for fence, since in self._since.items() if now - since >= _LAST_CHANCE_SECONDS
        }
