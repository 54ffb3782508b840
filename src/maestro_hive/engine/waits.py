"""A wait that survives its process: begun once, it ends when it would have ended.

Within a boot it is counted on the clock that goes on through sleep and that nobody can set; after
a reboot by wall time, and then it is never longer than the whole wait again, and may be shorter.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Self

from maestro_hive.maestro.state.records import from_micros, to_micros

if TYPE_CHECKING:
    from collections.abc import Mapping

    from maestro_hive.kernel.clock import Clock

#: A loop's own timers stand still while a laptop sleeps: look at the clock that does not.
_LOOK_EVERY = 5.0
#: Less than this is left over by rounding, and no clock may ever reach it.
_NEGLIGIBLE = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """So many seconds from a moment, which is told by three clocks."""

    seconds: float
    boot: str
    boot_seconds: float
    at: datetime

    @classmethod
    def begin(cls, clock: Clock, seconds: float) -> Self:
        """Return a wait that begins now."""
        return cls(
            seconds=seconds,
            boot=clock.boot_id(),
            boot_seconds=clock.boot_seconds(),
            at=clock.now(),
        )

    def to_facts(self) -> dict[str, Any]:
        """Return it as plain JSON."""
        return {
            "seconds": self.seconds,
            "boot": self.boot,
            "boot_seconds": self.boot_seconds,
            "at": to_micros(self.at),
        }

    @classmethod
    def from_facts(cls, facts: Mapping[str, Any]) -> Self:
        """Return the wait that was written down."""
        return cls(
            seconds=facts["seconds"],
            boot=facts["boot"],
            boot_seconds=facts["boot_seconds"],
            at=from_micros(facts["at"]),
        )

    def elapsed(self, clock: Clock) -> float:
        """Return how many seconds ago it began; never less than none."""
        if clock.boot_id() == self.boot:
            return max(0.0, clock.boot_seconds() - self.boot_seconds)
        return max(0.0, (clock.now() - self.at).total_seconds())

    def remaining(self, clock: Clock) -> float:
        """Return how many seconds are still to wait: from none to all of them."""
        return max(0.0, self.seconds - self.elapsed(clock))

    def until(self, clock: Clock) -> datetime:
        """Return the wall time at which it is over, as the clock shows it now."""
        return clock.now() + timedelta(seconds=self.remaining(clock))

    async def over(self, clock: Clock) -> None:
        """Return when it is over."""
        if clock.boot_id() != self.boot:
            # Counted in this boot's time from here on: a wall clock may have been set back.
            await Wait.begin(clock, self.remaining(clock)).over(clock)
            return
        while (left := self.remaining(clock)) > _NEGLIGIBLE:
            await clock.sleep(min(left, _LOOK_EVERY))
