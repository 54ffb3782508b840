"""Waits that survive their process, a sleep of the machine, a reboot and a wrong clock."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from maestro_hive.kernel.clock import ManualClock, Wait


def test_a_wait_gets_shorter_and_is_over_once() -> None:
    clock = ManualClock()
    wait = Wait.start(clock, 10)
    assert (wait.remaining(clock), wait.elapsed(clock)) == (10, 0)
    clock.advance(4)
    assert (wait.remaining(clock), wait.elapsed(clock)) == (6, 4)
    clock.advance(7)
    assert (wait.remaining(clock), wait.elapsed(clock)) == (0, 11)


def test_a_wait_can_be_written_down_and_continues() -> None:
    clock = ManualClock()
    wait = Wait.start(clock, 10.25)
    clock.advance(3)
    again = msgspec.json.decode(msgspec.json.encode(wait), type=Wait)
    assert again == wait
    assert again.remaining(clock) == 7.25


def test_a_sleeping_machine_waits_too() -> None:
    clock = ManualClock()
    wait = Wait.start(clock, 10)
    clock.sleep_machine(8)
    assert wait.remaining(clock) == 2


@pytest.mark.parametrize("seconds", [-86_400, 86_400])
def test_within_a_boot_a_wrong_wall_clock_does_not_matter(seconds: float) -> None:
    clock = ManualClock()
    wait = Wait.start(clock, 10)
    clock.jump(seconds)
    assert wait.remaining(clock) == 10


def test_after_a_reboot_the_wall_clock_counts() -> None:
    clock = ManualClock()
    wait = Wait.start(clock, 100)
    clock.reboot(30)
    assert wait.remaining(clock) == 70


def test_after_a_reboot_it_is_never_longer_than_the_whole_wait() -> None:
    clock = ManualClock()
    wait = Wait.start(clock, 100)
    clock.jump(-86_400)
    clock.reboot(30)
    assert wait.remaining(clock) == 100
    clock.jump(3 * 86_400)
    assert wait.remaining(clock) == 0


def test_it_is_waited_out_in_slices() -> None:
    clock = ManualClock()
    asyncio.run(Wait.start(clock, 12).finished(clock))
    assert clock.slept == [5, 5, 2]


def test_a_machine_that_slept_meanwhile_shortens_the_next_slice() -> None:
    clock = ManualClock()
    wait = Wait.start(clock, 12)

    async def main() -> None:
        waiting = asyncio.create_task(wait.finished(clock))
        await asyncio.sleep(0)
        clock.sleep_machine(6)
        await waiting

    asyncio.run(main())
    assert clock.slept == pytest.approx([5, 1])


def test_no_wait_is_over_at_once() -> None:
    clock = ManualClock()
    asyncio.run(Wait.start(clock, 0).finished(clock))
    assert clock.slept == []


@given(
    uptime=st.floats(0, 1e9),
    seconds=st.floats(0, 60, allow_subnormal=False),
)
def test_it_ends_whatever_the_clock_rounds(uptime: float, seconds: float) -> None:
    clock = ManualClock()
    clock.advance(uptime)
    asyncio.run(Wait.start(clock, seconds).finished(clock))
    assert len(clock.slept) <= 14
    assert sum(clock.slept) == pytest.approx(seconds, abs=1e-5)
