"""What a breaker may be told: rates over a window, cooldowns by every clock, and limits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from maestro_hive.engine.breaker import CircuitBreaker
from maestro_hive.engine.errors import CircuitBreakerOpen
from maestro_hive.kernel.errors import ConfigurationError
from maestro_hive.testing import ManualClock
from tests.contract.stores import EVERY_STORE
from tests.tables import for_each

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.contract.stores import Stores

    Make = Callable[..., CircuitBreaker]


@pytest.fixture(params=["alone", *EVERY_STORE], ids=["alone", "sqlite", "memory"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[ManualClock, Any]]:
    """A clock, and a store or None."""
    if request.param == "alone":
        yield ManualClock(), None
        return
    made: Stores = request.param(tmp_path)
    yield made.clock, made.open()
    made.close()


@pytest.fixture
def clock(place: tuple[ManualClock, Any]) -> ManualClock:
    return place[0]


@pytest.fixture
def make(place: tuple[ManualClock, Any]) -> Make:
    clock, store = place
    return lambda *args, **options: CircuitBreaker(*args, clock=clock, store=store, **options)


def refused(breaker: CircuitBreaker) -> CircuitBreakerOpen:
    with pytest.raises(CircuitBreakerOpen) as raised:
        breaker.acquire()
    return raised.value


def opened(breaker: CircuitBreaker) -> CircuitBreaker:
    for _ in range(breaker.threshold):
        breaker.record_failure()
    assert breaker.state == "open"
    return breaker


# --- rates -------------------------------------------------------------------------------------


def test_it_opens_at_a_failure_rate_when_asked_to(make: Make) -> None:
    breaker = make(99, failure_rate=0.7, window=10)
    for _ in range(3):
        breaker.record_success()
    for _ in range(6):
        breaker.record_failure()
    assert breaker.state == "closed"  # nine calls are no window
    breaker.record_failure()
    assert breaker.state == "open"
    assert "opened after 7 of the last 10 calls failed" in str(refused(breaker))


def test_calls_that_left_the_window_no_longer_count(make: Make) -> None:
    breaker = make(99, failure_rate=0.5, window=4, minimum_calls=4)
    for failing in (True, False, False, False) * 5:
        (breaker.record_failure if failing else breaker.record_success)()
    assert breaker.state == "closed"


def test_a_window_counts_from_its_minimum_on(make: Make) -> None:
    breaker = make(99, failure_rate=1.0, window=20, minimum_calls=2)
    breaker.record_failure()
    assert not breaker.is_open()
    breaker.record_failure()
    assert breaker.is_open()


def test_it_opens_when_too_many_calls_are_slow(make: Make, clock: ManualClock) -> None:
    breaker = make(99, 60, slow_call_rate=0.5, slow_call_seconds=2, window=4)
    for seconds in (1.9, 2.0, 0.1, 5.0):
        assert breaker.state == "closed"
        breaker.acquire().succeeded(seconds)
    assert "opened after 2 of the last 4 calls took 2 s or longer" in str(refused(breaker))
    clock.advance(60)
    breaker.acquire().succeeded(0.1)
    breaker.acquire().succeeded(9)
    assert breaker.state == "closed"  # the window began anew


def test_without_being_asked_no_window_is_stored(make: Make) -> None:
    breaker = make(99)
    for _ in range(50):
        breaker.record_failure()
        breaker.record_success()
    assert breaker.state == "closed"
    assert breaker._record.read().recent == ""


# --- time --------------------------------------------------------------------------------------


@pytest.mark.parametrize("seconds", [-86_400 * 365, 86_400 * 365])
def test_a_wall_clock_that_is_set_changes_no_cooldown(
    make: Make, clock: ManualClock, seconds: float
) -> None:
    breaker = opened(make(1, 60))
    clock.advance(20)
    clock.jump(seconds)
    assert refused(breaker).cooldown_seconds == 40
    clock.advance(40)
    assert breaker.acquire().probe


def test_a_machine_that_sleeps_cools_down(make: Make, clock: ManualClock) -> None:
    breaker = opened(make(1, 60))
    clock.sleep_machine(60)
    assert breaker.acquire().probe


def test_after_a_reboot_a_cooldown_continues_by_wall_time(make: Make, clock: ManualClock) -> None:
    breaker = opened(make(1, 100))
    clock.advance(20)
    clock.reboot(30)
    assert refused(breaker).cooldown_seconds == 50
    clock.advance(50)
    assert breaker.acquire().probe


def test_after_a_reboot_with_a_wrong_clock_it_lasts_one_cooldown_at_most(
    make: Make, clock: ManualClock
) -> None:
    breaker = opened(make(1, 100))
    clock.jump(-86_400)
    clock.reboot(30)
    assert refused(breaker).cooldown_seconds == 100
    clock.advance(60)
    assert refused(breaker).cooldown_seconds == 40
    clock.reboot(10)
    assert refused(breaker).cooldown_seconds == 30
    clock.advance(30)
    assert breaker.acquire().probe


def test_after_a_reboot_with_a_fast_clock_it_is_over_early(make: Make, clock: ManualClock) -> None:
    breaker = opened(make(1, 100))
    clock.jump(86_400)
    clock.reboot(30)
    assert breaker.acquire().probe


# --- what it was told --------------------------------------------------------------------------


@for_each(
    "options",
    [
        {"threshold": 0},
        {"threshold": 1.5},
        {"threshold": True},
        {"cooldown_seconds": -1},
        {"cooldown_seconds": float("inf")},
        {"name": ""},
        {"name": "  "},
        {"name": "a\nb"},
        {"name": "a\ud800"},
        {"name": "x" * 201},
        {"name": 7},
        {"failure_rate": 2},
        {"failure_rate": 0},
        {"failure_rate": "half"},
        {"slow_call_rate": 1.01, "slow_call_seconds": 1},
        {"slow_call_seconds": -1, "slow_call_rate": 0.5},
        {"slow_call_rate": 0.5},
        {"slow_call_seconds": 5},
        {"window": 0},
        {"minimum_calls": 0},
        {"minimum_calls": 21},
    ],
)
def test_what_cannot_be_is_refused_by_name(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(options))):
        CircuitBreaker(**options)
