"""A circuit breaker that all processes share: a document, changed in the transactions of attempts.

closed ── too many failures ──▶ open ── cooldown over ──▶ half open ── the probe succeeds ──▶ closed
                                  ▲                           │
                                  └──── the probe fails ──────┘

Half open, one attempt in total is admitted, the probe; when it was stopped or its process died,
another one. Counted are rounds that end with a fault of the remote service.
"""

from __future__ import annotations

import asyncio
import random
import time
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from maestro_hive.engine.attempt import Stage
from maestro_hive.engine.error_signs import is_remote_fault
from maestro_hive.engine.errors import CircuitBreakerOpen, described
from maestro_hive.engine.retry_policy import counts_for_breaker
from maestro_hive.journal.effects import Change
from maestro_hive.kernel.errors import RefusedError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from maestro_hive.engine.attempt import Attempt
    from maestro_hive.journal.effects import Effect, Held, Scope
    from maestro_hive.journal.entries import Entry
    from maestro_hive.journal.store import Store

NAMESPACE = "circuit_breakers"
#: A breaker that was closed so many seconds ago is taken for closed: a start costs no query.
_FRESH_SECONDS = 0.25
#: How often an attempt looks whether the probe of another one has ended.
_POLL_SECONDS = 0.05


class CircuitState(StrEnum):
    """Whether calls are admitted."""

    #: All calls are admitted.
    CLOSED = "closed"
    #: No call is admitted until the cooldown is over.
    OPEN = "open"
    #: One call is admitted, the probe.
    HALF_OPEN = "half_open"


class BreakerRules(NamedTuple):
    """When a breaker opens, and for how long."""

    threshold: int = 5
    cooldown_seconds: float = 300


class BreakerState(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """A breaker as it is stored; times are seconds since 1970 on the clock of the store."""

    state: CircuitState = CircuitState.CLOSED
    consecutive_failures: int = 0
    opened_at: float = 0.0
    cooldown_seconds: float = 0.0
    last_failure_at: float = 0.0
    last_success_at: float = 0.0
    #: The attempt that probes, its process, and until when others wait for it.
    probe: str = ""
    probe_holder: str = ""
    probe_until: float = 0.0

    def remaining(self, now: float) -> float:
        """Return the seconds until a probe is admitted; 0 if one may be now."""
        if self.state is not CircuitState.OPEN:
            return 0.0
        return min(max(0.0, self.opened_at + self.cooldown_seconds - now), self.cooldown_seconds)

    def succeeded(self, now: float, who: str = "") -> BreakerState:
        """Return the state after a success: closed, unless another attempt decides that."""
        if self.state is CircuitState.CLOSED or (who and who == self.probe):
            return BreakerState(last_success_at=now, last_failure_at=self.last_failure_at)
        return self

    def failed(self, rules: BreakerRules, now: float, who: str = "") -> BreakerState:
        """Return the state after a failure, which opens it if it is one too many or the probe's."""
        failures = self.consecutive_failures + 1
        counted = msgspec.structs.replace(self, consecutive_failures=failures, last_failure_at=now)
        is_due = self.state is CircuitState.CLOSED and failures >= rules.threshold
        if not is_due and not (who and who == self.probe):
            return counted
        return BreakerState(
            state=CircuitState.OPEN,
            consecutive_failures=failures,
            opened_at=now,
            cooldown_seconds=rules.cooldown_seconds,
            last_failure_at=now,
            last_success_at=self.last_success_at,
        )

    def freed(self, who: str) -> BreakerState:
        """Return the state after a probe that decided nothing: another one is admitted."""
        if not who or self.probe != who:
            return self
        return msgspec.structs.replace(self, probe="", probe_holder="", probe_until=0.0)


def read_breaker(data: bytes | None) -> BreakerState:
    """Return the state that is stored."""
    return msgspec.json.decode(data, type=BreakerState) if data else BreakerState()


class NotAdmittedError(RefusedError):
    """A breaker does not admit an attempt now; ``probed``: another one probes."""

    def __init__(self, name: str, failures: int, seconds: float, *, probed: bool) -> None:
        under_way = ", and is being probed" if probed else ""
        super().__init__(
            f"Circuit breaker is OPEN: {name!r} opened after {failures} failures in a"
            f" row{under_way}; try again in {seconds:.3g} s"
        )
        self.name, self.failures, self.seconds, self.probed = name, failures, seconds, probed

    def for_caller(self) -> CircuitBreakerOpen:
        """Return the error that a caller gets."""
        return CircuitBreakerOpen(
            str(self), self.failures, self.seconds, {"name": self.name, "probed": self.probed}
        )


class _Changed(NamedTuple):
    """An effect that changes a breaker by the outcome of an attempt."""

    stage: BreakerStage
    who: str
    outcome: str

    def apply(self, scope: Scope, run: Held) -> None:
        version, state = _read(scope, self.stage.name)
        match self.outcome:
            case "succeeded":
                after = state.succeeded(scope.now, self.who)
            case "failed":
                after = state.failed(self.stage.rules, scope.now, self.who)
            case _:
                after = state.freed(self.who)
        if after != state:
            _write(scope, run, self.stage.name, version, after)


class _Probe(NamedTuple):
    """An effect that makes an attempt the probe, or refuses it."""

    stage: BreakerStage
    who: str
    timeout: float

    def apply(self, scope: Scope, run: Held) -> None:
        stage, now = self.stage, scope.now
        version, state = _read(scope, stage.name)
        if state.state is CircuitState.CLOSED or state.probe == self.who:
            return
        failures, remaining = state.consecutive_failures, state.remaining(now)
        if remaining:
            raise NotAdmittedError(stage.name, failures, remaining, probed=False)
        db = stage.store.db
        if state.probe and now < state.probe_until and db.alive(state.probe_holder):
            raise NotAdmittedError(stage.name, failures, _POLL_SECONDS, probed=True)
        after = msgspec.structs.replace(
            state,
            state=CircuitState.HALF_OPEN,
            probe=self.who,
            probe_holder=db.holder(),
            probe_until=now + stage.rules.cooldown_seconds + self.timeout,
        )
        _write(scope, run, stage.name, version, after)


def _read(scope: Scope, name: str) -> tuple[int, BreakerState]:
    found = scope.tx(scope.sql["DOCUMENT"], NAMESPACE, name)
    return (found[0][0], read_breaker(found[0][1].encode())) if found else (0, BreakerState())


def _write(scope: Scope, run: Held, name: str, version: int, state: BreakerState) -> None:
    Change(NAMESPACE, name, version, msgspec.json.encode(state)).apply(scope, run)


class BreakerStage(Stage):
    """Admits attempts while a breaker is closed, and counts how rounds end."""

    def __init__(self, name: str, rules: BreakerRules, store: Store) -> None:
        self.name, self.rules, self.store = name, rules, store
        #: Until when it is taken for closed and without failures, on the clock of this process.
        self._calm_until = 0.0

    def state(self) -> BreakerState:
        """Return the state that is stored."""
        state = read_breaker(self.store.document(NAMESPACE, self.name)[1])
        if state.state is CircuitState.CLOSED and not state.consecutive_failures:
            self._calm_until = time.monotonic() + _FRESH_SECONDS
        return state

    def _is_calm(self) -> bool:
        if time.monotonic() >= self._calm_until:
            self.state()
        return time.monotonic() < self._calm_until

    def enter(self, attempt: Attempt) -> Sequence[Effect]:
        """Return nothing while it is calm; else the claim to be the probe, if it is open."""
        if self._is_calm():
            return ()
        return (_Probe(self, attempt.plan.effect_key, attempt.plan.definition.timeout),)

    def leave(self, attempt: Attempt) -> Sequence[Effect]:
        """Return how the outcome changes it."""
        if attempt.error is None:
            return self._changed(attempt, "succeeded")
        if not attempt.ends_round:
            return ()
        return self._changed(attempt, "failed" if attempt.is_remote_fault else "freed")

    def _counts(self, attempt: Attempt, error: Exception) -> bool:
        """Return whether an error counts; a wrong ``breaker_on`` decides nothing, and is noted."""
        breaker_on = attempt.plan.definition.options.breaker_on
        if breaker_on is not None:
            try:
                return counts_for_breaker(breaker_on, error)
            except Exception as broken:  # noqa: BLE001 - the user's function
                error.add_note(f"the function given as breaker_on failed: {described(broken)}")
        return is_remote_fault(error)

    def stopped(self, attempt: Attempt) -> Sequence[Effect]:
        """Return that another attempt may probe instead."""
        return self._changed(attempt, "freed")

    def _changed(self, attempt: Attempt, outcome: str) -> Sequence[Effect]:
        if outcome != "failed" and self._is_calm():
            return ()
        self._calm_until = 0.0
        return (_Changed(self, attempt.plan.effect_key, outcome),)

    async def refused(self, attempt: Attempt, refusal: RefusedError) -> None:
        """Wait for the probe of another attempt; raise while the cooldown lasts."""
        self._calm_until = 0.0
        if isinstance(refusal, NotAdmittedError) and refusal.name == self.name:
            if not refusal.probed:
                raise refusal.for_caller() from None
            await asyncio.sleep(_POLL_SECONDS * random.uniform(0.5, 1.5))  # noqa: S311 - no secret

    async def on_failure(self, attempt: Attempt) -> Sequence[Entry]:
        """Decide whether the failure counts, while its error is not recorded yet."""
        if attempt.ends_round and attempt.error is not None:
            attempt.is_remote_fault = self._counts(attempt, attempt.error)
        return ()
