"""How often something may start: so many times in any window of so many seconds.

Pure: from a rate and the recent starts it follows how long to wait. Moments are seconds on the
boot-time clock, which cannot be set.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Self

from maestro_hive.kernel.clock import Moment, from_micros, to_micros
from maestro_hive.kernel.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from maestro_hive.maestro.state.codec import Json

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
        """Read ``60/min``, ``5/s``, ``100/10s`` or ``5 per second``; a rate is returned as it is."""
        if isinstance(text, Rate):
            return text
        found = _RATE.fullmatch(text.lower()) if isinstance(text, str) else None
        unit = _SECONDS.get(found[3]) if found else None
        if found is None or unit is None:
            raise _unreadable(text)
        times, seconds = int(found[1]), float(found[2] or 1) * unit
        if times == 0 or seconds == 0:
            raise _unreadable(text)
        return cls(times, seconds)

    def __str__(self) -> str:
        """Return it as ``parse`` reads it."""
        return f"{self.times}/{self.seconds:.9g}s"

    @property
    def _grain(self) -> float:
        """How long a group lasts; 0 where each start is recorded by itself."""
        return self.seconds / _GROUPS if self.times > _GROUPS else 0.0


def _unreadable(given: object) -> ConfigurationError:
    return ConfigurationError(
        f"the rate {given!r} cannot be used; write how often, and in how long, as in '60/min',"
        " '5/s', '100/10s' or '5 per second'"
    )


@dataclass(frozen=True, slots=True)
class Starts:
    """The recent starts: moments in order, each with how many start by then."""

    marks: tuple[tuple[float, int], ...] = ()

    def wait(self, rate: Rate, now: float) -> float:
        """Return the seconds until one more may start."""
        total = 0
        for at, count in reversed(self.marks):
            total += count
            if total >= rate.times:
                # Not longer: who waits asks again, and a moment may be a little later than now.
                return min(max(0.0, at + rate.seconds - now), rate.seconds)
        return 0.0

    def with_one(self, rate: Rate, now: float, ahead: float = 0.0) -> Starts:
        """Return them with one more, which starts between now and ``ahead`` seconds later.

        It counts as the latest that it can be: so those after it come no sooner than allowed. Those
        that no longer matter are left out.
        """
        at = now + ahead
        # As in ``wait``, and not a rounding error apart from it.
        marks = [mark for mark in self.marks if mark[0] + rate.seconds - now > 0]
        place = self._find(marks, rate, at)
        if place is None:
            return Starts(tuple(sorted([*marks, (at, 1)])))
        latest, count = marks[place]
        marks[place] = (max(latest, at), count + 1)
        return Starts(tuple(sorted(marks)))  # under another rate, there were smaller groups

    @staticmethod
    def _find(marks: Sequence[tuple[float, int]], rate: Rate, moment: float) -> int | None:
        """Return the place of the group that a moment belongs to."""
        grain = rate._grain  # noqa: SLF001 - the same module
        if not grain:
            return None
        group = moment // grain
        return next((place for place, (at, _) in enumerate(marks) if at // grain == group), None)

    def without_one(self, rate: Rate, moment: float) -> Starts:
        """Return them without one that was counted at ``moment`` and did not start after all.

        The group that it was in still counts as started with its last: later is safe.
        """
        moments = [at for at, _ in self.marks]
        if moment in moments:
            place: int | None = moments.index(moment)
        else:
            place = self._find(self.marks, rate, moment)
        if place is None:
            return self
        at, count = self.marks[place]
        rest = ((at, count - 1),) if count > 1 else ()
        return Starts((*self.marks[:place], *rest, *self.marks[place + 1 :]))


@dataclass(frozen=True, slots=True, kw_only=True)
class RateLog:
    """The recent starts as they are stored: with the moment of writing, for after a reboot."""

    written: Moment
    starts: Starts

    def to_json(self) -> Json:
        """Return it as plain JSON."""
        return {
            "boot": self.written.boot,
            "boot_seconds": self.written.boot_seconds,
            "at": to_micros(self.written.now),
            "starts": [[at, count] for at, count in self.starts.marks],
        }

    @classmethod
    def from_json(cls, facts: Json) -> Self:
        """Return the log that was stored; KeyError, TypeError or ValueError if it is not one."""
        return cls(
            written=Moment(
                now=from_micros(facts["at"]),
                boot=str(facts["boot"]),
                boot_seconds=float(facts["boot_seconds"]),
            ),
            starts=Starts(tuple((float(at), int(n)) for at, n in facts["starts"])),
        )

    def is_of(self, now: Moment) -> bool:
        """Return whether its moments are on the clock of ``now``."""
        return (
            self.written.boot == now.boot
            # Where the system has no boot id, a lower count shows a reboot.
            and self.written.boot_seconds <= now.boot_seconds
        )

    def on_clock_of(self, now: Moment) -> Starts:
        """Return the starts on the clock of ``now``; after a reboot they are placed by wall time.

        None is placed in the future: whatever happened to the wall clock, nothing waits for longer
        than one whole window, if what is returned is stored at once.
        """
        if self.is_of(now):
            return self.starts
        ago = (now.now - self.written.now).total_seconds()
        shift = now.boot_seconds - ago - self.written.boot_seconds
        return Starts(
            tuple((min(at + shift, now.boot_seconds), count) for at, count in self.starts.marks)
        )

    def without_one(self, rate: Rate, now: Moment, at: float) -> RateLog:
        """Return the log, as of ``now``, without a start that was counted and did not happen."""
        return RateLog(written=now, starts=self.on_clock_of(now).without_one(rate, at))


class Counted(NamedTuple):
    """When a start counts, or how long to wait; and the log, the same if nothing changed."""

    at: float | None
    wait: float
    log: RateLog


def count_start(
    log: RateLog | None, rate: Rate, now: Moment, ahead: float = 0.0, late: float | None = None
) -> Counted:
    """Count one more start, now or up to ``ahead`` seconds later, if the rate allows it.

    ``late`` is when it was counted before, and did not start.
    """
    starts = Starts() if log is None else log.on_clock_of(now)
    if late is not None:
        starts = starts.without_one(rate, late)
    wait = starts.wait(rate, now.boot_seconds)
    if not wait:
        starts = starts.with_one(rate, now.boot_seconds, ahead)
    elif log is not None and log.is_of(now) and late is None:
        return Counted(None, wait, log)
    at = None if wait else now.boot_seconds + ahead
    return Counted(at, wait, RateLog(written=now, starts=starts))
