"""Time: the machine's, and one that tests move by hand."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import pytest

from maestro_hive.kernel import clock as clock_module
from maestro_hive.kernel.clock import Clock, ManualClock, SystemClock, from_micros, to_micros

if TYPE_CHECKING:
    from collections.abc import Iterator

IN_ANOTHER_PROCESS = """
from maestro_hive.kernel.clock import SystemClock
clock = SystemClock()
print(clock.boot_id(), clock.boot_seconds(), clock.awake_seconds())
"""


@pytest.fixture
def fresh_boot_id() -> Iterator[None]:
    clock_module._system_boot_id.cache_clear()  # noqa: SLF001 - read once per process
    yield
    clock_module._system_boot_id.cache_clear()  # noqa: SLF001 - ditto


@pytest.mark.parametrize("clock", [SystemClock(), ManualClock()], ids=["system", "manual"])
def test_a_clock_tells_aware_utc_and_both_counts(clock: Clock) -> None:
    assert clock.now().utcoffset() == timedelta(0)
    assert clock.boot_seconds() > 0
    assert clock.awake_seconds() > 0
    assert clock.boot_id() == clock.boot_id()
    assert clock.boot_id()


def test_a_stored_time_is_read_back_to_the_microsecond() -> None:
    for when in (datetime(1969, 7, 20, 20, 17, 40, 1, UTC), datetime(9999, 12, 31, tzinfo=UTC)):
        assert from_micros(to_micros(when)) == when
    clock = ManualClock()
    assert from_micros(clock.micros()) == clock.now()
    before = to_micros(SystemClock().now())
    assert before <= SystemClock().micros() <= to_micros(SystemClock().now())


# --- the machine's ---------------------------------------------------------------------------


def test_the_system_clock_tells_the_time_of_day() -> None:
    before = datetime.now(UTC)
    assert before <= SystemClock().now() <= datetime.now(UTC)


def test_the_system_clock_counts_forward() -> None:
    clock = SystemClock()
    boot, awake = clock.boot_seconds(), clock.awake_seconds()
    time.sleep(0.01)
    assert clock.boot_seconds() - boot >= 0.01
    assert clock.awake_seconds() - awake >= 0.009


def test_the_machine_was_never_awake_longer_than_it_runs() -> None:
    clock = SystemClock()
    awake = clock.awake_seconds()
    assert awake <= clock.boot_seconds() + 0.001


def test_another_process_counts_from_the_same_start() -> None:
    clock = SystemClock()
    boot, awake = clock.boot_seconds(), clock.awake_seconds()
    command = [sys.executable, "-c", IN_ANOTHER_PROCESS]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    its_id, its_boot, its_awake = output.split()
    assert its_id == clock.boot_id()
    assert boot <= float(its_boot) <= clock.boot_seconds()
    assert awake <= float(its_awake) <= clock.awake_seconds()


def missing(*args: object, **kwargs: object) -> NoReturn:
    raise FileNotFoundError


def test_a_mac_is_asked_which_start_it_is_in(
    monkeypatch: pytest.MonkeyPatch, fresh_boot_id: None
) -> None:
    def answer(command: list[str], **options: object) -> bytes:
        assert command[-1] == "kern.bootsessionuuid"
        return b"1B4E-28BA\n"

    monkeypatch.setattr(Path, "read_text", missing)
    monkeypatch.setattr(subprocess, "check_output", answer)
    assert SystemClock().boot_id() == "1B4E-28BA"


def test_where_no_system_knows_its_start_the_host_is_named(
    monkeypatch: pytest.MonkeyPatch, fresh_boot_id: None
) -> None:
    monkeypatch.setattr(Path, "read_text", missing)
    monkeypatch.setattr(subprocess, "check_output", missing)
    assert SystemClock().boot_id() == socket.gethostname()


# --- the manual one --------------------------------------------------------------------------


def facts(clock: ManualClock) -> tuple[datetime, float, float, str]:
    return clock.now(), clock.boot_seconds(), clock.awake_seconds(), clock.boot_id()


def test_a_manual_clock_starts_where_it_is_told() -> None:
    start = datetime(2031, 2, 3, tzinfo=UTC)
    assert ManualClock(start).now() == start


def test_a_manual_clock_stands_still_until_it_is_moved() -> None:
    clock = ManualClock()
    assert [facts(clock) for _ in range(1000)] == [facts(clock)] * 1000


def test_when_time_passes_every_count_goes_on() -> None:
    clock = ManualClock()
    now, boot, awake, boot_id = facts(clock)
    clock.advance(1.5)
    assert facts(clock) == (now + timedelta(seconds=1.5), boot + 1.5, awake + 1.5, boot_id)


def test_a_sleeping_machine_is_not_awake() -> None:
    clock = ManualClock()
    now, boot, awake, boot_id = facts(clock)
    clock.sleep_machine(3600)
    assert facts(clock) == (now + timedelta(hours=1), boot + 3600, awake, boot_id)


@pytest.mark.parametrize("seconds", [3600, -3600])
def test_a_corrected_wall_clock_changes_no_count(seconds: float) -> None:
    clock = ManualClock()
    now, boot, awake, boot_id = facts(clock)
    clock.jump(seconds)
    assert facts(clock) == (now + timedelta(seconds=seconds), boot, awake, boot_id)


def test_after_a_reboot_the_counts_start_over_under_a_new_id() -> None:
    clock = ManualClock()
    clock.advance(10_000)
    now, boot, awake, first_id = facts(clock)
    clock.reboot(90)
    assert clock.now() == now + timedelta(seconds=90)
    assert 0 < clock.boot_seconds() < 90 < boot
    assert 0 < clock.awake_seconds() < 90 < awake
    second_id = clock.boot_id()
    clock.reboot()
    assert len({first_id, second_id, clock.boot_id()}) == 3


def test_sleeping_lets_that_much_time_pass_and_others_run() -> None:
    clock = ManualClock()
    now, boot, awake, boot_id = facts(clock)
    order: list[str] = []

    async def sleeper(name: str, seconds: float) -> None:
        order.append(f"{name} sleeps")
        await clock.sleep(seconds)
        order.append(f"{name} wakes")

    async def scene() -> None:
        await asyncio.gather(sleeper("one", 60), sleeper("other", 0.5))

    asyncio.run(scene())
    assert facts(clock) == (now + timedelta(seconds=60.5), boot + 60.5, awake + 60.5, boot_id)
    assert clock.slept == [60, 0.5]
    assert order == ["one sleeps", "other sleeps", "one wakes", "other wakes"]


def test_the_system_clock_sleeps_on_the_loop() -> None:
    async def scene() -> float:
        started = time.monotonic()
        await asyncio.gather(*(SystemClock().sleep(0.1) for _ in range(200)))
        return time.monotonic() - started

    assert 0.1 <= asyncio.run(scene()) < 10  # 20 if they slept one after the other


def test_two_manual_clocks_are_independent() -> None:
    one, other = ManualClock(), ManualClock()
    one.advance(5)
    one.reboot()
    assert facts(other) == facts(ManualClock())
