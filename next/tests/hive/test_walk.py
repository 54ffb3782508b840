"""How many of our functions one step calls, and in how many modules they are."""

from __future__ import annotations

from benchmarks import walk


def test_a_step_calls_few_functions_in_few_modules() -> None:
    """Polls between steps are counted too, so the fewest calls of three walks count."""
    walks = [walk.walk() for _ in range(3)]
    first_time = min((each[0] for each in walks), key=lambda each: each.total)
    replay = min((each[1] for each in walks), key=lambda each: each.total)
    assert first_time.total <= 112, first_time.text()
    assert len(first_time.modules) <= 24, first_time.text()
    assert replay.total <= 24, replay.text()
