"""The circuit breaker: alone in memory, and shared through every kind of store."""

from __future__ import annotations

import gc
import threading
import time
import timeit
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest

from maestro_hive.engine.breaker import CircuitBreaker, CircuitState
from maestro_hive.engine.errors import CircuitBreakerOpen
from maestro_hive.testing import ManualClock
from tests.contract.stores import EVERY_STORE

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


# --- opening, cooling down, probing ------------------------------------------------------------


def test_a_new_breaker_lets_everything_through(make: Make) -> None:
    breaker = make()
    assert (breaker.threshold, breaker.cooldown_seconds, breaker.name) == (5, 300, "default")
    assert breaker.state == "closed"
    assert breaker.consecutive_failures == 0
    assert breaker.last_failure_time is None
    assert breaker.last_success_time is None
    assert not breaker.is_open()
    assert not breaker.acquire().probe


def test_its_states_have_the_names_that_callers_know() -> None:
    assert [(state.name, state.value) for state in CircuitState] == [
        ("CLOSED", "closed"),
        ("OPEN", "open"),
        ("HALF_OPEN", "half_open"),
    ]


def test_it_opens_after_as_many_failures_in_a_row_as_it_was_told(
    make: Make, clock: ManualClock
) -> None:
    breaker = make(3, 60)
    for failures in (1, 2):
        breaker.record_failure()
        assert breaker.consecutive_failures == failures
        assert not breaker.is_open()
    breaker.record_failure()
    assert breaker.state == "open"
    assert breaker.is_open()
    assert breaker.last_failure_time == clock.now()


def test_a_success_starts_the_count_again(make: Make, clock: ManualClock) -> None:
    breaker = make(3)
    for _ in range(3):
        breaker.record_failure()
        breaker.record_failure()
        breaker.record_success()
    assert breaker.consecutive_failures == 0
    assert breaker.last_success_time == clock.now()
    assert not breaker.is_open()


def test_the_error_says_which_breaker_why_and_when_to_come_back(
    make: Make, clock: ManualClock
) -> None:
    breaker = opened(make(2, 300, name="anthropic"))
    clock.advance(100)
    error = refused(breaker)
    assert str(error).startswith(
        "Circuit breaker is OPEN: 'anthropic' opened after 2 failures in a row;"
        " come back at 2030-01-01T00:05:00+00:00, in 200 s"
    )
    assert error.consecutive_failures == 2
    assert error.cooldown_seconds == 200
    assert error.context["name"] == "anthropic"
    assert error.context["retry_at"] == "2030-01-01T00:05:00+00:00"
    assert error.context["retry_after"] == 200
    assert not error.context["probe_in_flight"]


def test_half_open_lets_exactly_one_through(make: Make, clock: ManualClock) -> None:
    breaker = opened(make(1, 60))
    clock.advance(59.9)
    assert breaker.is_open()
    clock.advance(0.1)
    probe = breaker.acquire()
    assert probe.probe
    assert breaker.state == "half_open"
    error = refused(breaker)
    assert error.context["probe_in_flight"]
    assert "is being probed in this process" in str(error)
    assert error.cooldown_seconds == 15  # nobody knows how long a probe takes: look again soon
    assert all(breaker.is_open() for _ in range(3))


def test_a_probe_that_succeeds_closes(make: Make, clock: ManualClock) -> None:
    breaker = opened(make(2, 60))
    clock.advance(60)
    breaker.acquire().succeeded(0.5)
    assert breaker.state == "closed"
    assert breaker.consecutive_failures == 0
    assert breaker.last_success_time == clock.now()
    breaker.record_failure()
    assert not breaker.is_open()  # it takes two again


def test_a_probe_that_fails_opens_for_a_full_cooldown(make: Make, clock: ManualClock) -> None:
    breaker = opened(make(5, 60))
    clock.advance(90)
    breaker.acquire().failed(0.5)
    assert breaker.state == "open"
    error = refused(breaker)
    assert error.cooldown_seconds == 60
    assert error.consecutive_failures == 6
    assert "opened after 6 failures in a row, the last a probe" in str(error)
    clock.advance(60)
    assert breaker.acquire().probe


def test_a_probe_that_is_given_back_is_neither_success_nor_failure(
    make: Make, clock: ManualClock
) -> None:
    breaker = opened(make(1, 60))
    clock.advance(60)
    breaker.acquire().release()
    again = breaker.acquire()
    assert again.probe
    assert breaker.consecutive_failures == 1
    again.succeeded()
    assert breaker.state == "closed"


def test_a_permit_is_settled_once(make: Make) -> None:
    breaker = make(2)
    permit = breaker.acquire()
    permit.failed()
    permit.failed()
    permit.succeeded()
    permit.release()
    assert breaker.consecutive_failures == 1


def test_a_probe_that_is_dropped_is_given_back(make: Make, clock: ManualClock) -> None:
    breaker = opened(make(1, 60))
    clock.advance(60)
    breaker.acquire()
    gc.collect()
    for _ in range(3000):
        if not breaker.is_open():
            break
        time.sleep(0.01)
    else:
        pytest.fail("nobody may probe any more")


def test_as_a_context_manager_a_permit_settles_itself(make: Make) -> None:
    breaker = make(9)
    with pytest.raises(ZeroDivisionError), breaker.acquire():
        raise ZeroDivisionError
    assert breaker.consecutive_failures == 1
    with pytest.raises(KeyboardInterrupt), breaker.acquire():
        raise KeyboardInterrupt
    assert breaker.consecutive_failures == 1
    with breaker.acquire() as permit:
        assert not permit.settled
    assert breaker.consecutive_failures == 0


def test_calls_that_end_late_count_and_decide_nothing(make: Make, clock: ManualClock) -> None:
    breaker = make(1, 60)
    late = [breaker.acquire() for _ in range(4)]
    opened(breaker)
    clock.advance(30)
    late[0].failed()
    late[1].succeeded()
    assert breaker.consecutive_failures == 2
    assert refused(breaker).cooldown_seconds == 30  # not longer for that
    clock.advance(30)
    probe = breaker.acquire()
    late[2].succeeded()
    late[3].failed()
    assert breaker.state == "half_open"
    probe.succeeded()
    assert breaker.state == "closed"


def test_without_permits_the_first_who_asks_makes_the_probe(make: Make, clock: ManualClock) -> None:
    breaker = opened(make(1, 60))
    clock.advance(60)
    assert [breaker.is_open() for _ in range(3)] == [False, True, True]
    assert breaker.state == "half_open"
    breaker.record_failure()
    assert breaker.state == "open"
    clock.advance(60)
    assert not breaker.is_open()
    breaker.record_success()
    assert breaker.state == "closed"


def test_who_asked_and_never_said_how_it_went_is_not_waited_for_for_ever(
    make: Make, clock: ManualClock
) -> None:
    breaker = opened(make(1, 60))
    clock.advance(60)
    assert not breaker.is_open()
    clock.advance(60)
    assert breaker.is_open()
    clock.advance(1)
    assert not breaker.is_open()


def test_a_cooldown_of_nothing_still_probes_one_at_a_time(make: Make) -> None:
    breaker = opened(make(1, 0))
    assert [breaker.is_open(), breaker.is_open()] == [False, True]


def test_it_shows_itself_as_plain_json(make: Make, clock: ManualClock) -> None:
    breaker = opened(make(2, 60, name="anthropic"))
    clock.advance(20)
    assert breaker.to_dict() == {
        "name": "anthropic",
        "state": "open",
        "consecutive_failures": 2,
        "threshold": 2,
        "cooldown_seconds": 60,
        "remaining_seconds": 40,
        "opened_because": "2 failures in a row",
        "opened_at": "2030-01-01T00:00:00+00:00",
        "last_failure_time": "2030-01-01T00:00:00+00:00",
        "last_success_time": None,
    }


def test_a_cooldown_beyond_the_calendar_is_shown_as_its_last_day(make: Make) -> None:
    error = refused(opened(make(1, 1e12)))
    assert error.context["retry_at"] == "9999-12-31T23:59:59+00:00"
    assert error.cooldown_seconds == 1e12


def test_threads_of_one_process_make_one_probe(make: Make, clock: ManualClock) -> None:
    breaker = opened(make(1, 60))
    clock.advance(60)
    together = threading.Barrier(8)

    def ask(_: int) -> object:
        together.wait()
        try:
            return breaker.acquire()
        except CircuitBreakerOpen:
            return None

    with ThreadPoolExecutor(8) as pool:
        permits = [permit for permit in pool.map(ask, range(8)) if permit]
    assert len(permits) == 1


def test_in_memory_asking_and_a_success_take_a_microsecond_at_most() -> None:
    breaker = CircuitBreaker()
    for call in (breaker.is_open, breaker.record_success):
        # The best of many short runs: other work on the machine only ever adds.
        seconds = min(timeit.repeat(call, number=1000, repeat=200)) / 1000
        assert seconds <= 1e-6, f"{call.__name__}: {seconds * 1e9:.0f} ns"
