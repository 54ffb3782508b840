"""How often something may start: so many times in any window of so many seconds. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple, Self

from maestro_hive.kernel.errors import ConfigurationError

_RATE = re.compile(r"\s*(\d{1,9})\s*(?:/|per\b)\s*(\d{1,9}(?:\.\d{1,9})?)?\s*([a-z]+)\s*")
_SECONDS = {
    **dict.fromkeys(("ms", "millisecond", "milliseconds"), 0.001),
    **dict.fromkeys(("s", "sec", "second", "seconds"), 1.0),
    **dict.fromkeys(("m", "min", "minute", "minutes"), 60.0),
    **dict.fromkeys(("h", "hour", "hours"), 3600.0),
    **dict.fromkeys(("d", "day", "days"), 86_400.0),
}
#: More starts than this are recorded in so many groups: what is written for each start must not
#: grow with the rate. A group counts as started with its last, so nothing starts too early, and at
#: most one part in so many of the rate is lost.
_GROUPS = 128


@dataclass(frozen=True, slots=True)
class Rate:
    """``times`` in any ``seconds``."""

    times: int
    seconds: float

    def __post_init__(self) -> None:
        if self.times < 1 or not 0 < self.seconds < float("inf"):
            raise _unreadable(f"{self.times}/{self.seconds:g}s")

    @classmethod
    def parse(cls, text: object) -> Rate:
        """Read ``60/min``, ``5/s``, ``100/10s``, ``5 per second``; return a rate as it is."""
        if isinstance(text, Rate):
            return text
        found = _RATE.fullmatch(text.lower()) if isinstance(text, str) else None
        unit = _SECONDS.get(found[3]) if found else None
        if found is None or unit is None or not (int(found[1]) and float(found[2] or 1)):
            raise _unreadable(text)
        return cls(int(found[1]), float(found[2] or 1) * unit)

    def __str__(self) -> str:
        """Return it as ``parse`` reads it."""
        return f"{self.times}/{self.seconds:.9g}s"

    @property
    def grain(self) -> float:
        """Return how long a group of starts lasts; 0 where each is recorded by itself."""
        return self.seconds / _GROUPS if self.times > _GROUPS else 0.0


def _unreadable(given: object) -> ConfigurationError:
    return ConfigurationError(
        f"the rate {given!r} cannot be used; write how often, and in how long, as in '60/min',"
        " '5/s', '100/10s' or '5 per second'"
    )


class Starts(NamedTuple):
    """The recent starts: moments in order, each with how many start by then."""

    marks: tuple[tuple[float, int], ...] = ()

    def wait(self, rate: Rate, now: float) -> float:
        """Return the seconds until one more may start; never more than one window."""
        total = 0
        for at, count in reversed(self.marks):
            total += count
            if total >= rate.times:
                return min(max(0.0, at + rate.seconds - now), rate.seconds)
        return 0.0

    def with_one(self, rate: Rate, now: float, ahead: float = 0.0) -> Self:
        """Return them with one more, which starts between now and ``ahead`` seconds later.

        It counts as the latest that it can be, so those after it come no sooner than allowed.
        Starts that no longer matter are left out.
        """
        at = now + ahead
        marks = [mark for mark in self.marks if mark[0] + rate.seconds - now > 0]  # as in ``wait``
        for place, (latest, count) in enumerate(marks):
            if rate.grain and latest // rate.grain == at // rate.grain:
                marks[place] = (max(latest, at), count + 1)
                break
        else:
            marks.append((at, 1))
        return type(self)(tuple(sorted(marks)))
