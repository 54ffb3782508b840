"""The ticks of cron expressions: daylight saving, long times, and what is no expression."""

from __future__ import annotations

import zoneinfo
from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import pytest

from maestro_hive.hive.cron_ticks import check_expression, check_zone, newest_ticks, next_tick
from maestro_hive.kernel.errors import ConfigurationError
from tests.tables import for_each

BERLIN, NEW_YORK = "Europe/Berlin", "America/New_York"
#: The nights in which the clocks are set forward or back, by their local date.
CHANGES = {
    (BERLIN, "forward"): "2026-03-29",
    (BERLIN, "back"): "2026-10-25",
    (NEW_YORK, "forward"): "2026-03-08",
    (NEW_YORK, "back"): "2026-11-01",
}


def utc(text: str) -> datetime:
    return datetime.fromisoformat(text).replace(tzinfo=UTC)


def local_ticks(expression: str, tz: str, first: datetime, until: datetime) -> list[str]:
    """Return the ticks from one moment until another as local times, with their offset in hours."""
    zone = ZoneInfo(tz)
    ticks = newest_ticks(expression, tz, first - timedelta(seconds=1), until, 1000)
    return [f"{tick.astimezone(zone):%H:%M%z}"[:-2] for tick in ticks]


def night(tz: str, change: str) -> tuple[datetime, datetime]:
    """Return the midnight before a change of the clocks, and six hours later."""
    midnight = datetime.fromisoformat(CHANGES[tz, change]).replace(tzinfo=ZoneInfo(tz))
    return midnight.astimezone(UTC), midnight.astimezone(UTC) + timedelta(hours=6)


@for_each(
    "tz, change, expression, ticks",
    [
        # A time that does not exist comes at the next minute that does.
        (BERLIN, "forward", "30 2 * * *", "03:00+02"),
        (BERLIN, "forward", "0,30 2 * * *", "03:00+02"),
        (BERLIN, "forward", "30 2,3 * * *", "03:00+02 03:30+02"),
        (BERLIN, "forward", "0 3 * * *", "03:00+02"),
        (NEW_YORK, "forward", "30 2 * * *", "03:00-04"),
        (NEW_YORK, "forward", "0 1-3 * * *", "01:00-05 03:00-04"),
        # A time that exists twice comes once, the first time.
        (BERLIN, "back", "30 2 * * *", "02:30+02"),
        (BERLIN, "back", "0 2,3 * * *", "02:00+02 03:00+01"),
        (NEW_YORK, "back", "30 1 * * *", "01:30-04"),
        (NEW_YORK, "back", "0 1,2 * * *", "01:00-04 02:00-05"),
        # Intervals go on by the minutes that really pass.
        (
            BERLIN,
            "forward",
            "0 * * * *",
            "00:00+01 01:00+01 03:00+02 04:00+02 05:00+02 06:00+02 07:00+02",
        ),
        (
            BERLIN,
            "back",
            "0 * * * *",
            "00:00+02 01:00+02 02:00+02 02:00+01 03:00+01 04:00+01 05:00+01",
        ),
        (BERLIN, "forward", "*/20 2 * * *", ""),
        (BERLIN, "back", "*/30 2 * * *", "02:00+02 02:30+02 02:00+01 02:30+01"),
        (NEW_YORK, "forward", "0 */2 * * *", "00:00-05 04:00-04 06:00-04"),
        (NEW_YORK, "back", "*/30 1 * * *", "01:00-04 01:30-04 01:00-05 01:30-05"),
    ],
)  # fmt: skip
def test_daylight_saving_is_as_in_cron(tz: str, change: str, expression: str, ticks: str) -> None:
    assert local_ticks(expression, tz, *night(tz, change)) == ticks.split()


@pytest.mark.parametrize("tz, change", CHANGES)
@pytest.mark.parametrize(
    "expression", ["30 2 * * *", "0,30 1-3 * * *", "*/20 * * * *", "5 0 * * *"]
)
def test_ticks_do_not_depend_on_where_counting_starts(
    tz: str, change: str, expression: str
) -> None:
    """A worker that is restarted in the night has the ticks of one that is not."""
    start, end = night(tz, change)
    ticks = newest_ticks(expression, tz, start, end + timedelta(days=1), 1000)
    for minutes in range(0, 360, 17):
        after = start + timedelta(minutes=minutes, seconds=13)
        counted = newest_ticks(expression, tz, after, end + timedelta(days=1), 1000)
        assert counted == [tick for tick in ticks if tick > after]


@for_each("tz, change", CHANGES)
def test_ticks_of_an_interval_are_all_minutes_that_match(tz: str, change: str) -> None:
    start, end = night(tz, change)
    minutes = (start + timedelta(minutes=number) for number in range(1, 361))
    local = [(tick, tick.astimezone(ZoneInfo(tz))) for tick in minutes]
    expected = [tick for tick, at in local if at.minute % 15 == 0 and at.hour in {1, 2, 3}]
    assert newest_ticks("*/15 1-3 * * *", tz, start, end, 1000) == expected


def test_a_tick_is_after_one_moment_and_not_after_the_other() -> None:
    nine, ten = utc("2026-11-17T09:00"), utc("2026-11-17T10:00")
    assert newest_ticks("0 * * * *", "UTC", nine, ten, 10) == [ten]
    assert next_tick("0 * * * *", "UTC", nine) == ten
    assert next_tick("0 * * * *", "UTC", nine - timedelta(microseconds=1)) == nine
    assert newest_ticks("0 * * * *", "UTC", nine, ten - timedelta(microseconds=1), 10) == []


def test_of_many_ticks_the_newest_are_returned_soon() -> None:
    now = utc("2026-11-17T10:00")
    ticks = newest_ticks("* * * * *", BERLIN, utc("2016-11-17T10:00"), now, 3)
    assert ticks == [now - timedelta(minutes=minutes) for minutes in (2, 1, 0)]


def test_of_few_ticks_in_a_long_time_all_are_found() -> None:
    ticks = newest_ticks("0 0 29 2 *", "UTC", utc("2020-03-01"), utc("2033-01-01"), 10)
    assert ticks == [utc("2024-02-29"), utc("2028-02-29"), utc("2032-02-29")]


@pytest.mark.parametrize(
    "short, long",
    [("@hourly", "0 * * * *"), ("@daily", "0 0 * * *"), (" @Weekly ", "0 0 * * 7")],
)
def test_the_short_forms_of_cron_are_known(short: str, long: str) -> None:
    start = utc("2026-11-17T10:00")
    assert next_tick(check_expression(short), BERLIN, start) == next_tick(long, BERLIN, start)


@for_each(
    "expression, reason",
    [
        ("61 9 * * *", "its minute is wrong"),
        ("0 9 * * sat-sun", "its day-of-week is wrong"),
        ("0 0 30 2 *", "its day-of-month is wrong"),
        ("0 9 * *", "it does not have five fields"),
        ("0 0 9 * * *", "it does not have five fields"),
        ("", "it does not have five fields"),
        ("@never", "it does not have five fields"),
        ("0 9 * * 1 " + 300 * " ", "it is too long"),
        (5, "it is no text"),
    ],
)
def test_what_is_no_expression_is_refused_with_what_is_wrong(expression: str, reason: str) -> None:
    with pytest.raises(ConfigurationError, match="is not a cron expression") as caught:
        check_expression(expression)
    assert reason in str(caught.value)
    assert "'0 9 * * 1-5'" in str(caught.value)


@for_each("tz", ["Europe/Berln", "", "../Europe/Berlin", "/etc/localtime", 5, None])
def test_what_is_no_time_zone_is_refused_with_one_that_is(tz: str) -> None:
    with pytest.raises(ConfigurationError, match="is not a time zone") as caught:
        check_zone(tz)
    assert "/" in str(caught.value)


def test_time_zones_are_there_where_the_system_has_none() -> None:
    zoneinfo.reset_tzpath(to=[])
    zoneinfo.ZoneInfo.clear_cache()
    try:
        assert check_zone(NEW_YORK) == NEW_YORK
        tick = next_tick("0 9 * * *", NEW_YORK, utc("2026-07-01T00:00"))
        assert tick == utc("2026-07-01T13:00")
    finally:
        zoneinfo.reset_tzpath()
        zoneinfo.ZoneInfo.clear_cache()
