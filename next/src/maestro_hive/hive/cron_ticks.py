"""The ticks of a cron expression in a time zone, from one moment to another; no clock is read here.

Daylight saving is as in Debian's cron, by ``cronsim``. A time of day that does not exist on a day
comes at the next minute that does. A time of day that exists twice comes once, the first time.
Where the minute or the hour starts with ``*`` the expression means an interval: then ticks come in
each matching minute that really passes, so none in a gap and those of a repeated hour twice.
"""

from __future__ import annotations

from collections import deque
from datetime import UTC, datetime, timedelta
from difflib import get_close_matches
from functools import lru_cache
from itertools import takewhile
from typing import TYPE_CHECKING

from maestro_hive.kernel.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from datetime import tzinfo

#: The short forms of cron.
_SHORT_FORMS = {
    "@hourly": "0 * * * *",
    "@daily": "0 0 * * *",
    "@weekly": "0 0 * * 0",
    "@monthly": "0 0 1 * *",
    "@yearly": "0 0 1 1 *",
}
_FIELDS = "minute hour day-of-month month day-of-week"
_LONGEST_EXPRESSION = 200
#: From here an expression must have a tick within fifty years; any such time does.
_ANY_TIME = datetime(2000, 1, 1, tzinfo=UTC)


def check_expression(expression: str) -> str:
    """Return a cron expression if it has ticks; raise otherwise."""
    from cronsim import CronSimError

    if not isinstance(expression, str):
        raise _wrong_expression(expression, "it is no text")
    if len(expression) > _LONGEST_EXPRESSION:
        raise _wrong_expression(f"{expression[:40]}…", "it is too long")
    if len(_expanded(expression).split()) != len(_FIELDS.split()):
        raise _wrong_expression(expression, "it does not have five fields")
    try:
        has_ticks = next(_ticks(expression, "UTC", _ANY_TIME), None) is not None
    except CronSimError as error:
        field = str(error).removeprefix("Bad ")
        raise _wrong_expression(expression, f"its {field} is wrong") from error
    if not has_ticks:
        raise _wrong_expression(expression, "no day in fifty years is like that")
    return expression


def _wrong_expression(expression: object, reason: str) -> ConfigurationError:
    return ConfigurationError(
        f"{expression!r} is not a cron expression, as {reason}; write {_FIELDS}, as in"
        f" '0 9 * * 1-5', or one of {', '.join(_SHORT_FORMS)}"
    )


def check_zone(name: str) -> str:
    """Return the name of a time zone if it is known here; raise otherwise."""
    _zone(name)
    return name


@lru_cache(maxsize=1024)
def next_tick(expression: str, tz: str, after: datetime) -> datetime | None:
    """Return the first tick after a moment, in UTC; None if there is none within fifty years."""
    return next(_ticks(expression, tz, after), None)


def newest_ticks(
    expression: str, tz: str, after: datetime, until: datetime, most: int
) -> list[datetime]:
    """Return the ticks after one moment, up to another, in UTC; of many the newest ``most``."""
    first = next_tick(expression, tz, after)
    if first is None or first > until:
        return []
    span = timedelta(hours=1)
    while True:  # until the span is the whole time: it grows fast, so that a long time costs little
        start = max(after, until - span)
        ticks = _ticks(expression, tz, start)
        newest = deque(takewhile(lambda tick: tick <= until, ticks), maxlen=most)
        if start == after or len(newest) == most:
            return list(newest)
        span *= 4


def _ticks(expression: str, tz: str, after: datetime) -> Iterator[datetime]:
    from cronsim import CronSim

    for tick in CronSim(_expanded(expression), after.astimezone(_zone(tz))):
        when = tick.astimezone(UTC)
        # In an hour that exists twice, CronSim counts from the first of the two.
        if when > after:
            yield when


def _expanded(expression: str) -> str:
    return _SHORT_FORMS.get(expression.strip().lower(), expression)


def _zone(name: str) -> tzinfo:
    """Return a time zone; one that is recorded may be unknown on another machine."""
    from zoneinfo import ZoneInfo, available_timezones

    try:
        return UTC if name == "UTC" else ZoneInfo(name)
    except (LookupError, ValueError, TypeError, OSError) as error:
        known = available_timezones()
        near = get_close_matches(str(name), known, n=1) or ["Europe/Berlin"]
        raise ConfigurationError(
            f"{name!r} is not a time zone; it is a name of the IANA database such as {near[0]!r}"
        ) from error
