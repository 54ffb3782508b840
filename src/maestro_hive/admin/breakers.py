"""The circuit breakers that all processes on a state folder share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from maestro_hive.engine.breaker import CircuitBreaker
from maestro_hive.engine.breaker_rules import BreakerRules, closed
from maestro_hive.kernel.clock import Moment
from maestro_hive.kernel.errors import ConfigurationError
from maestro_hive.maestro.state.records import Breaker
from maestro_hive.maestro.state.shared_records import BREAKERS

if TYPE_CHECKING:
    from datetime import datetime

    from maestro_hive.maestro.state.store import Reader, Store


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakerView:
    """A breaker as it is now; ``remaining_seconds`` is the time until a probe is let through."""

    name: str
    state: str
    consecutive_failures: int
    opened_at: datetime | None
    opened_because: str | None
    cooldown_seconds: float | None
    remaining_seconds: float | None
    last_failure_time: datetime | None
    last_success_time: datetime | None


def list_breakers(reader: Reader) -> list[BreakerView]:
    """Return the breakers that have recorded a failure, or were opened by hand."""
    now = Moment.of(reader.clock)
    return [_view(breaker, now) for breaker in BREAKERS.all(reader).values()]


def _view(breaker: Breaker, now: Moment) -> BreakerView:
    return BreakerView(
        name=breaker.name,
        state=breaker.state,
        consecutive_failures=breaker.consecutive_failures,
        opened_at=breaker.opened_at,
        opened_because=breaker.opened_because or None,
        cooldown_seconds=breaker.cooldown_seconds,
        remaining_seconds=BreakerRules().remaining(breaker, now),
        last_failure_time=breaker.last_failure_time,
        last_success_time=breaker.last_success_time,
    )


def breaker_names(reader: Reader, prefix: str, most: int) -> list[str]:
    """Return the names of breakers that start with ``prefix``."""
    found = reader.documents(BREAKERS.namespace)
    return [each.key for each in found if each.key.startswith(prefix)][:most]


def reset_breaker(store: Store, name: str) -> None:
    """Close a breaker and forget its failures, for all processes, from their next call on."""
    _require_known(store, name)
    BREAKERS.update(store, name, lambda found: closed(found or Breaker(name=name)))


def open_breaker(store: Store, name: str, seconds: float, *, create: bool = False) -> None:
    """Open a breaker for a while, for all processes; ``create`` also one that is not listed."""
    CircuitBreaker(name=name, store=store)  # refuses a name that no breaker can have
    if not create:
        _require_known(store, name, " Another one is opened with --new.")
    now = Moment.of(store.clock)
    rules, because = (
        BreakerRules(cooldown_seconds=seconds),
        "opened by hand (maestro breakers open)",
    )
    BREAKERS.update(
        store, name, lambda found: rules.opened(found or Breaker(name=name), now, because)
    )


def _require_known(reader: Reader, name: str, hint: str = "") -> None:
    known = sorted(BREAKERS.all(reader))
    if name in known:
        return
    listed = f"There is: {', '.join(known)}." if known else "There is none yet."
    raise ConfigurationError(f"No breaker is called {name!r}. {listed}{hint}")
