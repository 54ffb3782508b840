"""Rates: how they are written, and that no window ever has too many starts."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from maestro_hive.engine.rates import Rate, Starts
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
