"""How many of our functions one step calls, and in how many modules they are."""

from __future__ import annotations

import pytest

from benchmarks import walk


def test_a_step_calls_few_functions_in_few_modules() -> None:
    """Background threads may be counted, too: the fewest of a few walks count, as in ``make bench-walk``."""
    missed: list[str] = []
    for _ in range(3):
        missed = [
            walk.summary(what, found)
            for what, found in walk.walk().items()
            if walk.misses(what, found)
        ]
        if not missed:
            return
    pytest.fail("\n".join(missed))
