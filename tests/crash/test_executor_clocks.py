"""Waits on clocks that jump: a sample on manual clocks; ``make faults`` moves the real ones."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING

from faults.manual_clocks import JumpyClock, move_clocks
from faults.registry import Outcome, Plan
from maestro_hive.kernel.clock import ManualClock
from maestro_hive.maestro.state.memory_store import MemoryStore
from maestro_hive.unified_execution.breaker import CircuitBreaker
from maestro_hive.unified_execution.waits import Wait

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

SECONDS, A_DAY = 10.0, 86_400.0


class NamespaceClock(ManualClock):
    """A clock since boot that counts from elsewhere, in the same boot: a time namespace."""

    def __init__(self, ahead: float) -> None:
        super().__init__()
        self._boot_seconds += ahead
        self._awake_seconds += ahead


def test_waits_end_in_time_on_clocks_that_jump(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    outcome = Outcome()
    move_clocks(Plan(quick=True, seed=1, scratch=tmp_path), outcome)
    assert outcome.failures == []


def test_a_wait_out_of_a_namespace_that_is_ahead_is_no_longer_than_whole() -> None:
    facts = Wait.begin(NamespaceClock(A_DAY), SECONDS).to_facts()
    clock = NamespaceClock(0.0)
    asyncio.run(asyncio.wait_for(waited_out(facts, clock), 5))
    assert sum(clock.slept) <= SECONDS


async def waited_out(facts: dict[str, object], clock: ManualClock) -> None:
    """Wait, and give somebody the chance to break it off."""
    waiting = asyncio.ensure_future(Wait.from_facts(facts).over(clock))
    for _ in range(1000):
        await asyncio.sleep(0)
        if waiting.done():
            break
    assert waiting.done() or not waiting.cancel(), f"it still waits after {sum(clock.slept)} s"


def test_a_cooldown_out_of_a_namespace_that_is_ahead_is_no_longer_than_whole() -> None:
    root = MemoryStore(clock=NamespaceClock(A_DAY))
    CircuitBreaker(1, SECONDS, name="b", store=root).record_failure()
    clock = NamespaceClock(0.0)
    breaker = CircuitBreaker(1, SECONDS, name="b", store=MemoryStore(clock=clock, shared_with=root))
    assert breaker.is_open()
    clock.advance(SECONDS)
    assert not breaker.is_open()


def test_the_sample_really_moves_its_clock() -> None:
    clock = JumpyClock(random.Random(1))
    before = clock.now()
    for _ in range(20):
        clock.disturb()
    assert clock.now() != before
    assert clock.true == 0
