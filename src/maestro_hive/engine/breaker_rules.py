"""When a circuit breaker opens, half opens and closes. Pure: it is given records and moments.

A rule returns the changed record, or the same object if nothing changes. The outcome of a call that
started before the breaker opened is counted, and does not change the state: once open, only the end
of the cooldown and then the outcome of the probe do.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import timedelta
from enum import StrEnum
from typing import TYPE_CHECKING

from maestro_hive.engine import settings
from maestro_hive.kernel.errors import ConfigurationError

if TYPE_CHECKING:
    from maestro_hive.kernel.clock import Moment
    from maestro_hive.maestro.state.records import Breaker

#: The character of a call in ``Breaker.recent``, by whether it failed and whether it was slow.
_MARKS = {(False, False): ".", (False, True): "s", (True, False): "f", (True, True): "F"}
_FAILURES = "fF"
_SLOW = "sF"

_CHECKS: dict[str, settings.Check[object]] = {
    "threshold": settings.whole(1),
    "cooldown_seconds": settings.number(0),
    "failure_rate": settings.optional(settings.share),
    "slow_call_rate": settings.optional(settings.share),
    "slow_call_seconds": settings.optional(settings.number(0)),
    "window": settings.whole(1),
    "minimum_calls": settings.optional(settings.whole(1)),
}


class CircuitState(StrEnum):
    """Whether calls are admitted."""

    #: All calls are admitted.
    CLOSED = "closed"
    #: No call is admitted until the cooldown is over.
    OPEN = "open"
    #: One call is admitted, the probe.
    HALF_OPEN = "half_open"


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakerRules:
    """The settings of a breaker, and what follows from them; the error for a bad value names it.

    It opens after ``threshold`` failures in a row. With ``failure_rate`` or ``slow_call_rate`` it
    also opens when that share of the last ``window`` calls failed or took ``slow_call_seconds`` or
    longer, once there are ``minimum_calls`` of them (by default a whole window).
    """

    threshold: int = 5
    cooldown_seconds: float = 300
    failure_rate: float | None = None
    slow_call_rate: float | None = None
    slow_call_seconds: float | None = None
    window: int = 20
    minimum_calls: int | None = None

    def __post_init__(self) -> None:
        for name, check in _CHECKS.items():
            check(name, getattr(self, name))
        if (self.slow_call_rate is None) != (self.slow_call_seconds is None):
            raise ConfigurationError(
                "slow_call_rate and slow_call_seconds belong together: give both or neither"
            )
        if self.minimum_calls is not None and self.minimum_calls > self.window:
            wanted = f"no more than the window of {self.window}"
            raise settings.refused("minimum_calls", self.minimum_calls, wanted)

    @property
    def counts_calls(self) -> bool:
        """Return whether calls are counted for a rate."""
        return self.failure_rate is not None or self.slow_call_rate is not None

    # --- outcomes of calls ---

    def succeeded(self, record: Breaker, at: Moment, seconds: float | None = None) -> Breaker:
        """Count a call that succeeded; it ends the failures in a row."""
        if record.state != CircuitState.CLOSED:
            return record  # it started before the breaker opened
        recent = self._with(record.recent, seconds, failed=False)
        if not record.consecutive_failures and recent == record.recent:
            return record
        after = replace(record, consecutive_failures=0, recent=recent, last_success_time=at.now)
        return self._opened_if_due(after, at)

    def failed(self, record: Breaker, at: Moment, seconds: float | None = None) -> Breaker:
        """Count a call that failed, and open if a limit is reached."""
        after = replace(
            record,
            consecutive_failures=record.consecutive_failures + 1,
            last_failure_time=at.now,
            recent=self._with(record.recent, seconds, failed=True),
        )
        return self._opened_if_due(after, at) if record.state == CircuitState.CLOSED else after

    def _with(self, recent: str, seconds: float | None, *, failed: bool) -> str:
        if not self.counts_calls:
            return recent
        limit = self.slow_call_seconds
        slow = limit is not None and seconds is not None and seconds >= limit
        return (recent + _MARKS[failed, slow])[-self.window :]

    def _opened_if_due(self, record: Breaker, at: Moment) -> Breaker:
        because = self._reason_to_open(record)
        return self.opened(record, at, because) if because else record

    def _reason_to_open(self, record: Breaker) -> str | None:
        if record.consecutive_failures >= self.threshold:
            return f"{_count(record.consecutive_failures, 'failure')} in a row"
        calls = len(record.recent)
        if calls < (self.minimum_calls or self.window):
            return None
        failures = sum(mark in _FAILURES for mark in record.recent)
        if self.failure_rate is not None and failures / calls >= self.failure_rate:
            return f"{failures} of the last {_count(calls, 'call')} failed"
        slow = sum(mark in _SLOW for mark in record.recent)
        if self.slow_call_rate is not None and slow / calls >= self.slow_call_rate:
            limit = self.slow_call_seconds
            return f"{slow} of the last {_count(calls, 'call')} took {limit:g} s or longer"
        return None

    def opened(self, record: Breaker, at: Moment, because: str) -> Breaker:
        """Open for a full cooldown."""
        return replace(
            record,
            state=CircuitState.OPEN.value,
            opened_at=at.now,
            opened_because=because,
            cooldown_seconds=self.cooldown_seconds,
            boot=at.boot,
            boot_seconds=at.boot_seconds,
        )

    # --- the probe ---

    def probe_started(self, record: Breaker, number: int, at: Moment) -> Breaker:
        """Admit the probe with this number, if the cooldown is over and no newer one was admitted."""
        due = record.state != CircuitState.CLOSED and not self.remaining(record, at)
        if not due or number <= record.probe:
            return record
        return replace(record, state=CircuitState.HALF_OPEN.value, probe=number)

    def probe_succeeded(self, record: Breaker, number: int, at: Moment) -> Breaker:
        """Close, unless a newer probe was admitted."""
        if not _is_current(record, number):
            return record
        return replace(closed(record), last_success_time=at.now)

    def probe_failed(self, record: Breaker, number: int, at: Moment) -> Breaker:
        """Open again for a full cooldown, unless a newer probe was admitted."""
        if not _is_current(record, number):
            return record
        failures = record.consecutive_failures + 1
        after = replace(record, consecutive_failures=failures, last_failure_time=at.now)
        return self.opened(after, at, f"{_count(failures, 'failure')} in a row, the last a probe")

    # --- the cooldown ---

    def remaining(self, record: Breaker, at: Moment) -> float:
        """Return the seconds until a probe is admitted; 0 if one may be now."""
        if record.state != CircuitState.OPEN:
            return 0.0
        cooldown = self.cooldown_of(record)
        return min(max(0.0, cooldown - self._cooled(record, at)), cooldown)

    def cooldown_of(self, record: Breaker) -> float:
        """Return how long it stays open: the cooldown of the process that opened it."""
        given = record.cooldown_seconds
        return self.cooldown_seconds if given is None else given

    def cooldown_changed(self, record: Breaker) -> Breaker:
        """Let an open breaker stay open for this cooldown, counted from when it opened."""
        if record.state != CircuitState.OPEN:
            return record
        return replace(record, cooldown_seconds=self.cooldown_seconds)

    def _cooled(self, record: Breaker, at: Moment) -> float:
        if record.boot == at.boot:
            return at.boot_seconds - record.boot_seconds
        if record.opened_at is None:
            return 0.0
        return (at.now - record.opened_at).total_seconds()

    def anchored(self, record: Breaker, at: Moment) -> Breaker:
        """Measure the rest of a cooldown on this boot's clock, if it started in another boot.

        Otherwise a wall clock that is set back would make the cooldown longer.
        """
        rest = self.remaining(record, at)
        if record.boot == at.boot or not rest:
            return record
        cooled = self.cooldown_of(record) - rest
        return replace(
            record,
            opened_at=at.now - timedelta(seconds=cooled),
            boot=at.boot,
            boot_seconds=at.boot_seconds - cooled,
        )


def closed(record: Breaker) -> Breaker:
    """Return the record, closed and without failures."""
    return replace(
        record,
        state=CircuitState.CLOSED.value,
        consecutive_failures=0,
        opened_at=None,
        opened_because="",
        cooldown_seconds=None,
        recent="",
    )


def _is_current(record: Breaker, number: int) -> bool:
    return record.state == CircuitState.HALF_OPEN and record.probe == number


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
