"""The limits of a queue: how many of its runs execute at once and start in a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import msgspec

from maestro_hive.engine.rates import Rate, Starts
from maestro_hive.engine.settings import Seconds, Times, checked
from maestro_hive.kernel.files import check_identifier

Whole = Annotated[int, msgspec.Meta(description="a whole number")]

#: A run starts at most so long after it is counted: a part of the window, and seconds.
_AHEAD_PART, _AHEAD_SECONDS = 0.025, 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueLimits:
    """The limits of one queue; None where there is none."""

    name: str
    concurrency: int | None = None
    per_worker: int | None = None
    rate: Rate | str | None = None

    def __post_init__(self) -> None:
        check_identifier(self.name, "queue")
        for option in ("concurrency", "per_worker"):
            value = getattr(self, option)
            if value is not None:
                checked(Times, value, f"{option} of the queue {self.name!r}")
        if self.rate is not None:
            object.__setattr__(self, "rate", Rate.parse(self.rate))

    # --- the window of its rate, in the transaction of a claim ---

    def room(self, starts: str, now: float, most: int) -> int:
        """Return how many runs may start now, at most ``most``."""
        rate, known = Rate.parse(self.rate), self._recent(starts, now)
        for count in range(most):
            if known.wait(rate, now):
                return count
            known = known.with_one(rate, now)
        return most

    def counted(self, starts: str, now: float, count: int) -> str:
        """Return the recent starts with some more."""
        rate, known = Rate.parse(self.rate), self._recent(starts, now)
        ahead = min(rate.seconds * _AHEAD_PART, _AHEAD_SECONDS)
        for _ in range(count):
            known = known.with_one(rate, now, ahead)
        return msgspec.json.encode(known.marks).decode()

    def _recent(self, starts: str, now: float) -> Starts:
        marks = msgspec.json.decode(starts or "[]", type=tuple[tuple[float, int], ...])
        seconds = Rate.parse(self.rate).seconds
        if marks and marks[-1][0] > now + seconds:  # another clock's
            marks = tuple((min(at, now), count) for at, count in marks)
        return Starts(marks)


def check_enqueued(queue: str, priority: object, delay: object, version: str | None) -> None:
    """Raise if a run cannot be enqueued with these options."""
    check_identifier(queue, "queue")
    if version is not None:
        check_identifier(version, "version")
    checked(Whole, priority, "the priority")
    checked(Seconds, delay, "the delay")
