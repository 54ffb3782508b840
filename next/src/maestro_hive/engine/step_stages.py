"""The stages of each step of one store: those of its rooms, its limits, its breaker."""

from __future__ import annotations

from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from maestro_hive.engine.breaker import BreakerRules, BreakerStage
from maestro_hive.engine.limits import ConcurrencyStage, RateStage
from maestro_hive.engine.rates import Rate

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from maestro_hive.engine.attempt import Stage
    from maestro_hive.engine.plan import StepDefinition
    from maestro_hive.journal.store import Store


class StoreStages:
    """Makes the stages of steps, once each; steps that name the same breaker share it."""

    def __init__(
        self, store: Store, rooms: Sequence[Callable[[StepDefinition], Stage | None]] = ()
    ) -> None:
        self._store, self._rooms = store, rooms
        self._known: WeakKeyDictionary[StepDefinition, tuple[Stage, ...]] = WeakKeyDictionary()
        self._breakers: dict[tuple[str, BreakerRules], BreakerStage] = {}

    def of(self, definition: StepDefinition) -> Sequence[Stage]:
        """Return the stages of a step, in the order of their admission."""
        found = self._known.get(definition)
        if found is None:
            found = self._known[definition] = tuple(self._make(definition))
        return found

    def _make(self, definition: StepDefinition) -> list[Stage]:
        options, label, store = definition.options, definition.label, self._store
        found = [stage for room in self._rooms if (stage := room(definition)) is not None]
        if options.max_concurrency is not None:
            found.append(ConcurrencyStage(label, options.max_concurrency, store))
        if options.rate is not None:
            found.append(RateStage(label, Rate.parse(options.rate)))
        level2 = definition.config.level2
        rules = BreakerRules(
            level2.circuit_breaker_threshold, level2.circuit_breaker_cooldown_seconds
        )
        name = options.breaker_name()
        breaker = BreakerStage(name, rules, store)
        found.append(self._breakers.setdefault((name, rules), breaker))
        return found
