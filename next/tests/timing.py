"""Limits on time that a busy machine does not break, and a regression does.

The best of several tries has to hold: a regression spoils all of them, a busy moment only some.
Such tests are marked ``timing``; ``make test`` runs them alone, after the others.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


def least(measure: Callable[[], float], enough: float, tries: int = 5) -> float:
    """Return the least of some measurements; one that is less than ``enough`` is the last."""
    best = math.inf
    for _ in range(tries):
        best = min(best, measure())
        if best < enough:
            break
    return best
