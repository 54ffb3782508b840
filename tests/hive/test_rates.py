"""Rates: how they are written, and that no window ever has too many starts."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from maestro_hive.engine.rates import Rate, RateLog, Starts, count_start
from maestro_hive.kernel.clock import Moment
from maestro_hive.kernel.errors import ConfigurationError
from tests.tables import for_each


@for_each(
    "text, times, seconds",
    [
        ("60/min", 60, 60),
        ("5/s", 5, 1),
        ("100/10s", 100, 10),
        ("1000/hour", 1000, 3600),
        ("5 per second", 5, 1),
        (" 2 / 3 Minutes ", 2, 180),
        ("30/1.5s", 30, 1.5),
        ("3/500ms", 3, 0.5),
        ("7/day", 7, 86_400),
    ],
)
def test_a_rate_is_written_as_people_write_it(text: str, times: int, seconds: float) -> None:
    assert Rate.parse(text) == Rate(times, seconds)


def test_a_rate_is_parsed_as_itself() -> None:
    rate = Rate(3, 2.0)
    assert Rate.parse(rate) is rate


@given(st.integers(1, 10**6), st.integers(1, 10**6))
def test_what_a_rate_prints_is_read_as_the_same_rate(times: int, seconds: int) -> None:
    rate = Rate(times, float(seconds))
    assert Rate.parse(str(rate)) == rate


@for_each(
    "text", ["", "60", "60/", "/min", "0/min", "5/0s", "-5/s", "5/fortnight", "5 s", 60, None, 5.0]
)
def test_what_is_no_rate_is_refused_with_how_to_write_one(text: object) -> None:
    with pytest.raises(ConfigurationError, match=r"'60/min', '5/s', '100/10s'") as refused:
        Rate.parse(text)
    assert repr(text) in str(refused.value)


@pytest.mark.parametrize("times, seconds", [(0, 1.0), (1, 0.0), (1, float("inf"))])
def test_a_rate_made_by_hand_is_checked_too(times: int, seconds: float) -> None:
    with pytest.raises(ConfigurationError):
        Rate(times, seconds)


def start_all(rate: Rate, pauses: list[float], start: float = 1000.0) -> list[float]:
    """Start after each pause as soon as the rate allows it; return the moments."""
    started, now, log = [], start, Starts()
    for pause in pauses:
        now += pause
        while wait := log.wait(rate, now):
            now += wait
        log = log.with_one(rate, now)
        assert len(log.marks) <= min(rate.times, 130)
        started.append(now)
    return started


@given(
    st.integers(1, 6),
    st.sampled_from([1.0, 0.5, 60.0]),
    st.lists(st.floats(0, 2), max_size=60),
)
def test_no_window_has_more_starts_than_the_rate(
    times: int, seconds: float, pauses: list[float]
) -> None:
    started = start_all(Rate(times, seconds), pauses)
    for first, last in zip(started, started[times:], strict=False):
        assert last - first >= seconds * (1 - 1e-9)


@given(
    st.integers(1, 6),
    st.lists(st.tuples(st.floats(0, 2), st.floats(0, 0.5), st.floats(0, 1)), max_size=60),
    st.booleans(),
)
def test_no_window_has_too_many_however_much_later_than_counted_each_of_them_starts(
    times: int, pauses: list[tuple[float, float, float]], grouped: bool
) -> None:
    rate = Rate(times * 40 if grouped else times, 1.0)
    started, now, log = [], 1000.0, Starts()
    for pause, ahead, part in pauses:
        now += pause / (40 if grouped else 1)
        while wait := log.wait(rate, now):
            now += wait
        log = log.with_one(rate, now, ahead)
        started.append(now + ahead * part)
    started.sort()
    for first, last in zip(started, started[rate.times :], strict=False):
        assert last - first >= 1 - 1e-9


@settings(max_examples=25)
@given(st.lists(st.sampled_from([0.0, 0.0, 0.0001, 0.003, 0.02]), min_size=400, max_size=400))
def test_a_high_rate_that_is_recorded_in_groups_is_never_exceeded_either(
    pauses: list[float],
) -> None:
    rate = Rate(150, 1.0)
    started = start_all(rate, pauses)
    for first, last in zip(started, started[150:], strict=False):
        assert last - first >= 1 - 1e-9


def test_a_high_rate_loses_little_by_being_recorded_in_groups() -> None:
    rate = Rate(5000, 60.0)
    started = start_all(rate, [60 / 5000] * 20_000)
    assert len(started) / (started[-1] - started[0]) > 0.98 * 5000 / 60


def test_nothing_waits_while_the_rate_is_not_reached() -> None:
    rate = Rate(3, 10.0)
    assert start_all(rate, [0, 0, 0]) == [1000.0] * 3
    assert start_all(rate, [0, 0, 0, 0]) == [1000.0] * 3 + [1010.0]


def test_a_lower_rate_counts_what_started_under_a_higher_one() -> None:
    log = Starts()
    for _ in range(60):
        log = log.with_one(Rate(60, 60.0), 1000.0)
    assert log.wait(Rate(10, 60.0), 1001.0) == 59.0
    assert log.wait(Rate(100, 60.0), 1001.0) == 0.0


def test_a_start_that_did_not_happen_can_be_removed() -> None:
    rate = Rate(2, 10.0)
    log = Starts().with_one(rate, 1.0).with_one(rate, 2.0)
    assert log.without_one(rate, 2.0).wait(rate, 3.0) == 0.0
    assert log.without_one(rate, 2.5) == log


def test_a_start_in_a_group_can_be_removed_too() -> None:
    rate = Rate(200, 128.0)
    log = Starts()
    for number in range(200):
        log = log.with_one(rate, 1000.0 + number / 400)
    assert len(log.marks) == 1
    assert log.wait(rate, 1001.0) > 0
    assert log.without_one(rate, 1000.1).wait(rate, 1001.0) == 0.0


# --- over a reboot ------------------------------------------------------------------------------


def at(boot: str, boot_seconds: float, wall_seconds: float) -> Moment:
    return Moment(
        boot=boot, boot_seconds=boot_seconds, now=datetime.fromtimestamp(wall_seconds, UTC)
    )


def logged(now: Moment, *moments: float) -> RateLog:
    return RateLog(written=now, starts=Starts(tuple((each, 1) for each in moments)))


def test_a_log_is_the_same_after_it_was_stored() -> None:
    log = logged(at("a", 100.25, 5000.125), 99.5, 100.25)
    assert RateLog.from_json(json.loads(json.dumps(log.to_json()))) == log


def test_within_a_boot_the_wall_clock_does_not_matter() -> None:
    log = logged(at("a", 100, 5000), 90, 100)
    for wall in (0.0, 5010.0, 1e9):
        assert log.on_clock_of(at("a", 110, wall)) == log.starts


def test_after_a_reboot_starts_are_as_long_ago_as_the_wall_clock_says() -> None:
    log = logged(at("a", 100, 5000), 90, 100)
    moved = log.on_clock_of(at("b", 7, 5030))
    assert [moment for moment, _ in moved.marks] == [7 - 40, 7 - 30]


@given(st.floats(-1e6, 1e6), st.floats(0, 1e5))
@example(-1.0, 16324.571415363678)  # where the sum is rounded up
def test_after_a_reboot_nothing_waits_for_more_than_one_window(ahead: float, up: float) -> None:
    rate = Rate(2, 60.0)
    log = logged(at("a", 100, 5000), 99, 100)
    moved = log.on_clock_of(at("b", up, 5000 + ahead))
    assert 0 <= moved.wait(rate, up) <= 60
    assert all(one <= two for (one, _), (two, _) in pairwise(moved.marks))


def test_a_lower_count_is_another_boot_even_under_the_same_id() -> None:
    log = logged(at("host", 90_000, 5000), 89_990, 90_000)
    assert not log.is_of(at("host", 20, 5030))
    assert log.on_clock_of(at("host", 20, 5030)).wait(Rate(2, 60.0), 20) == 20.0


# --- counting -----------------------------------------------------------------------------------


def test_a_start_is_counted_at_the_moment_of_the_change() -> None:
    counted = count_start(None, Rate(1, 60.0), at("a", 100, 5000))
    assert (counted.at, counted.wait) == (100, 0)
    assert counted.log == logged(at("a", 100, 5000), 100)


def test_a_start_that_has_to_wait_changes_nothing() -> None:
    log = logged(at("a", 100, 5000), 100)
    counted = count_start(log, Rate(1, 60.0), at("a", 110, 5010))
    assert (counted.at, counted.wait) == (None, 50)
    assert counted.log is log


def test_a_start_that_is_counted_again_counts_once() -> None:
    log = logged(at("a", 100, 5000), 100)
    counted = count_start(log, Rate(1, 60.0), at("a", 110, 5010), late=100)
    assert counted.at == 110
    assert counted.log == logged(at("a", 110, 5010), 110)


def test_a_log_of_the_boot_before_is_stored_on_the_clock_of_this_one() -> None:
    counted = count_start(logged(at("a", 100, 5000), 100), Rate(1, 60.0), at("b", 7, 5030))
    assert (counted.at, counted.wait) == (None, 30)
    assert counted.log == logged(at("b", 7, 5030), 7 - 30)
