"""The circuit breaker: after too many failures nothing is called any more, for a while.

closed ── too many failures ──▶ open ── cooldown over ──▶ half open ── the probe succeeds ──▶ closed
                                  ▲                           │
                                  └──── the probe fails ──────┘

Given a store, all breakers of one name are one breaker, in all processes together, and it survives
them. Half open lets exactly one call through, the probe; if its process dies, another one. The
right to make the probe is a lease, and its fencing number stands in the breaker's record: a probe
that was taken for dead decides nothing any more.

A process remembers the record it read last. ``acquire`` reads it again; ``admit_known`` does not, and
gives a guard instead: what is recorded with it is refused if the record has changed meanwhile.
"""

from __future__ import annotations

import os
from dataclasses import replace
from datetime import datetime, timedelta
from functools import partial
from hashlib import sha256
from typing import TYPE_CHECKING, Self

from maestro_hive.engine import settings
from maestro_hive.engine.breaker_rules import BreakerRules, CircuitState
from maestro_hive.engine.errors import CircuitBreakerOpen
from maestro_hive.engine.shared import call_for_collected, shared
from maestro_hive.kernel.clock import Clock, Moment
from maestro_hive.kernel.errors import RunLeasedError, StaleDocumentError
from maestro_hive.maestro.state.memory import MemoryStore
from maestro_hive.maestro.state.records import Breaker
from maestro_hive.maestro.state.shared_records import BREAKERS
from maestro_hive.maestro.state.store import LEASE_SECONDS, DocumentGuard

if TYPE_CHECKING:
    from collections.abc import Callable

    from maestro_hive.maestro.state.codec import Json
    from maestro_hive.maestro.state.records import Lease
    from maestro_hive.maestro.state.store import Store

    Rule = Callable[[Breaker], Breaker]

__all__ = ["CircuitBreaker", "CircuitState", "Permit", "checked_name", "step_breaker"]

_CLOSED = CircuitState.CLOSED.value
_LONGEST_NAME = 200
_DIGEST_LENGTH = 12


class ProbeTakenError(Exception):
    """Another caller makes the probe."""


class BreakerRecord:
    """A breaker's record in a store, and who may make its probe; one object for this process."""

    def __init__(self, store: Store, name: str) -> None:
        self._store = store
        self._name = name
        self._lease_name = f"breaker/{name}/probe"
        self._known: tuple[Breaker, DocumentGuard] | None = None
        # The lease of a store in memory expires while its process lives, and refusing here costs
        # no transaction.
        self._probing: Lease | None = None

    def read(self) -> Breaker:
        """Return the record as it is."""
        document = self._store.document(BREAKERS.namespace, self._name)
        version = 0 if document is None else document.version
        known = self._known
        if known is not None and known[1].version == version:
            return known[0]
        record = Breaker(name=self._name)
        if document is not None:
            record = BREAKERS.decode(document.value, self._name)
        self._known = record, DocumentGuard(BREAKERS.namespace, self._name, version)
        return record

    def known(self) -> tuple[Breaker, DocumentGuard]:
        """Return the record as it was read last, and what refuses a write if it has changed."""
        known = self._known
        while known is None:
            self.read()
            known = self._known
        return known

    def change(self, rule: Rule) -> Breaker:
        """Replace the record by what ``rule`` makes of it; durable on return."""
        unused = Breaker(name=self._name)
        after = BREAKERS.update(self._store, self._name, lambda found: rule(found or unused))
        self._known = None
        return after

    def acquire_probe(self) -> Lease:
        """Become the one who makes the probe, in all processes; each has a larger fencing number."""
        mine = self._probing
        current = self._store.lease(self._lease_name) if mine is not None else None
        if mine is not None and current is not None and current.fence == mine.fence:
            raise ProbeTakenError("in this process")
        try:
            self._probing = lease = self._store.take_lease(self._lease_name)
        except RunLeasedError as taken:
            raise ProbeTakenError(f"by process {taken.pid} on {taken.host}") from taken
        return lease

    def release_probe(self, probe: Lease) -> None:
        """Let another caller make it; nothing happens if one already does."""
        if self._probing is probe:
            self._probing = None
        self._store.release_lease(probe)


class CircuitBreaker:
    """Lets calls through, or not: in memory, or for everybody on a store, by name.

    ``acquire`` gives a permit for one call, which records its outcome. ``is_open`` and
    ``record_…`` do the same without a permit, for one caller at a time.
    """

    def __init__(
        self,
        threshold: int = 5,
        cooldown_seconds: float = 300,
        *,
        name: str = "default",
        store: Store | None = None,
        clock: Clock | None = None,
        failure_rate: float | None = None,
        slow_call_rate: float | None = None,
        slow_call_seconds: float | None = None,
        window: int = 20,
        minimum_calls: int | None = None,
    ) -> None:
        self.name = checked_name("name", name)
        self.rules = BreakerRules(
            threshold=threshold,
            cooldown_seconds=cooldown_seconds,
            failure_rate=failure_rate,
            slow_call_rate=slow_call_rate,
            slow_call_seconds=slow_call_seconds,
            window=window,
            minimum_calls=minimum_calls,
        )
        self.store = store if store is not None else MemoryStore(clock=clock)
        self.clock = clock or self.store.clock
        self._counts_calls = self.rules.counts_calls  # read for every call
        self._record = shared(self.store, BreakerRecord, name, BreakerRecord)
        self._last_success: datetime | None = None
        self._asked: Permit | None = None

    # --- what it is ---

    @property
    def threshold(self) -> int:
        """How many failures in a row open it."""
        return self.rules.threshold

    @threshold.setter
    def threshold(self, failures: int) -> None:
        self.rules = replace(self.rules, threshold=failures)

    @property
    def cooldown_seconds(self) -> float:
        """How long it then stays open; one that is set holds for an open breaker too."""
        return self.rules.cooldown_seconds

    @cooldown_seconds.setter
    def cooldown_seconds(self, seconds: float) -> None:
        self.rules = rules = replace(self.rules, cooldown_seconds=seconds)
        if self._record.read().state == CircuitState.OPEN:
            self._record.change(rules.cooldown_changed)

    @property
    def state(self) -> CircuitState:
        """Closed, open or half open; one that is open half opens when the next call is asked for."""
        return CircuitState(self._record.read().state)

    @property
    def consecutive_failures(self) -> int:
        """Failures since the last success."""
        return self._record.read().consecutive_failures

    @property
    def last_failure_time(self) -> datetime | None:
        """When a call last failed, anywhere."""
        return self._record.read().last_failure_time

    @property
    def last_success_time(self) -> datetime | None:
        """When a call last succeeded: here, or anywhere if that changed anything."""
        known = [self._last_success, self._record.read().last_success_time]
        return max((time for time in known if time is not None), default=None)

    def remaining_seconds(self) -> float:
        """How long nothing will be let through; 0 if the next call may be."""
        return self.rules.remaining(self._record.read(), self._moment())

    def to_dict(self) -> dict[str, Json]:
        """Return it as plain JSON."""
        record = self._record.read()
        remaining = self.rules.remaining(record, self._moment())
        return {
            "name": self.name,
            "state": record.state,
            "consecutive_failures": record.consecutive_failures,
            "threshold": self.threshold,
            "cooldown_seconds": self.cooldown_seconds,
            "remaining_seconds": remaining,
            "opened_because": record.opened_because or None,
            "opened_at": _iso(record.opened_at),
            "last_failure_time": _iso(record.last_failure_time),
            "last_success_time": _iso(self.last_success_time),
        }

    # --- with a permit ---

    def admit_known(self) -> Permit | None:
        """Return the permit for one call if the breaker is closed as this process knows it.

        Its ``guard`` refuses the record of the call's start if the breaker has changed meanwhile;
        then, or without a permit from here, ``acquire`` one.
        """
        record, guard = self._record.known()
        return Permit(self, guard=guard) if record.state == _CLOSED else None

    def current(self) -> tuple[Breaker, DocumentGuard]:
        """Return the record as it is, and what refuses a write if it has changed."""
        self._record.read()
        return self._record.known()

    def acquire(self) -> Permit:
        """Return the permit for one call; raise ``CircuitBreakerOpen`` if there is none."""
        record, guard = self.current()
        if record.state == _CLOSED:
            return Permit(self, guard=guard)
        at = self._moment()
        remaining = self.rules.remaining(record, at)
        if remaining:
            if record.boot != at.boot:
                record = self._record.change(lambda found: self.rules.anchored(found, at))
            raise self._refusal(record, remaining)
        return self._acquire_probe(record)

    def _acquire_probe(self, record: Breaker) -> Permit:
        try:
            probe = self._record.acquire_probe()
        except ProbeTakenError as taken:
            raise self._refusal(record, 0.0, probed=str(taken)) from taken
        admitted = False
        try:
            at = self._moment()
            record = self._record.change(
                lambda found: self.rules.probe_started(found, probe.fence, at)
            )
            admitted = record.state == CircuitState.HALF_OPEN and record.probe == probe.fence
        finally:
            if not admitted:  # others were faster: they closed it, or opened it again
                self._record.release_probe(probe)
        if admitted:
            return Permit(self, probe)
        if record.state == _CLOSED:
            return Permit(self)
        raise self._refusal(record, self.rules.remaining(record, at))

    def _settle(self, probe: Lease | None, seconds: float | None, *, failed: bool) -> None:
        """Record how a call went, and only then let another probe be made."""
        at = self._moment()
        if not failed:
            self.note_success()
        if probe is not None:
            decide = self.rules.probe_failed if failed else self.rules.probe_succeeded
            self._record.change(lambda found: decide(found, probe.fence, at))
            self._record.release_probe(probe)
        elif failed or not self.success_is_no_news():
            count = self.rules.failed if failed else self.rules.succeeded
            self._record.change(lambda found: count(found, at, seconds))

    def note_success(self) -> None:
        """Note, in this process alone, that a call succeeded."""
        self._last_success = self.clock.now()

    def success_is_no_news(self) -> bool:
        """Return whether a success would leave the record, as this process knows it, unchanged."""
        record, _ = self._record.known()
        closed = record.state == _CLOSED and not record.consecutive_failures
        return closed and not self._counts_calls

    def _refusal(
        self, record: Breaker, remaining: float, probed: str | None = None
    ) -> CircuitBreakerOpen:
        cooldown = self.rules.cooldown_of(record)
        # The duration of a probe is unknown: ask again soon.
        wait = remaining or min(cooldown, LEASE_SECONDS)
        retry_at = _later(self.clock.now(), wait).isoformat(timespec="seconds")
        because = record.opened_because or f"{record.consecutive_failures} failures in a row"
        under_way = f", and is being probed {probed}" if probed else ""
        message = (
            f"Circuit breaker is OPEN: {self.name!r} opened after {because}{under_way};"
            f" come back at {retry_at}, in {wait:.3g} s"
        )
        context = {
            "name": self.name,
            "state": record.state,
            "opened_because": because,
            "opened_at": _iso(record.opened_at),
            "retry_at": retry_at,
            "retry_after": wait,
            "probe_in_flight": probed is not None,
        }
        return CircuitBreakerOpen(message, record.consecutive_failures, wait, context)

    # --- without a permit ---

    def is_open(self) -> bool:
        """Return whether the next call must not be made.

        Half open, it is False for the first caller and True for all others, until
        ``record_success`` or ``record_failure``; or until so much time has passed that the first
        caller cannot be expected to call either.
        """
        asked = self._asked
        if asked is not None and asked.age() > max(self.cooldown_seconds, LEASE_SECONDS):
            asked.release()
        if self._record.read().state == _CLOSED:
            return False
        try:
            permit = self.acquire()
        except CircuitBreakerOpen:
            return True
        if permit.probe:
            self._asked = permit
        return False

    def record_success(self) -> None:
        """Record that a call succeeded."""
        if self._asked is None and self.success_is_no_news():
            self.note_success()
        else:
            self._permit_asked_for().succeeded()

    def record_failure(self) -> None:
        """Record that a call failed."""
        self._permit_asked_for().failed()

    def _permit_asked_for(self) -> Permit:
        asked, self._asked = self._asked, None
        return asked if asked is not None and not asked.settled else Permit(self)

    def _moment(self) -> Moment:
        return Moment.of(self.clock)


class Permit:
    """The permission for one call; ``probe`` says that a half-open breaker waits for its outcome.

    The first outcome that is recorded counts. As a context manager it records it itself: an
    exception is a failure, and a call that was interrupted or cancelled is neither. One that is
    dropped is given back.
    """

    __slots__ = ("_breaker", "_pid", "_probe", "_started", "guard", "settled")

    def __init__(
        self,
        breaker: CircuitBreaker,
        probe: Lease | None = None,
        guard: DocumentGuard | None = None,
    ) -> None:
        self.settled = False
        #: What the call's start is to be recorded with.
        self.guard = guard
        self._breaker = breaker
        self._probe = probe
        self._started = breaker.clock.awake_seconds()
        self._pid = os.getpid() if probe is not None else 0

    @property
    def probe(self) -> bool:
        """Return whether the breaker is half open, and this is its one call."""
        return self._probe is not None

    def age(self) -> float:
        """Return how many seconds ago it was given."""
        return self._breaker.clock.awake_seconds() - self._started

    def renewed_guard(self) -> DocumentGuard | None:
        """Return the guard by what the breaker is now, for a call that had to wait.

        ``StaleDocumentError`` if it is closed no more: then ``acquire`` another permit.
        """
        guard = self.guard
        if guard is None:
            return None
        record, self.guard = self._breaker.current()
        if record.state != _CLOSED:
            found = self.guard.version
            raise StaleDocumentError(*guard[:2], expected=guard.version, version=found)
        return self.guard

    def succeeded_without_news(self) -> bool:
        """Note that the call succeeded; False, and nothing done, if that has to be written."""
        breaker = self._breaker
        if self._probe is not None or not breaker.success_is_no_news():
            return False
        breaker.note_success()
        self.settled = True
        return True

    def succeeded(self, seconds: float | None = None) -> None:
        """Record that the call succeeded, and how long it took."""
        self._settle(seconds, failed=False)

    def failed(self, seconds: float | None = None) -> None:
        """Record that the call failed, and how long it took."""
        self._settle(seconds, failed=True)

    def release(self) -> None:
        """Give it back: there was no call, or its end says nothing about the other side."""
        if not self.settled:
            if self._probe is not None:
                self._breaker._record.release_probe(self._probe)  # noqa: SLF001 - one thing, two faces
            self.settled = True

    def _settle(self, seconds: float | None, *, failed: bool) -> None:
        if not self.settled:
            self._breaker._settle(self._probe, seconds, failed=failed)  # noqa: SLF001 - as above
            self.settled = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if error is None:
            self.succeeded(self.age())
        elif isinstance(error, Exception):
            self.failed(self.age())
        else:
            self.release()

    def __del__(self) -> None:
        probe = self._probe
        if self.settled or probe is None or self._pid != os.getpid():
            return
        record = self._breaker._record  # noqa: SLF001 - as above
        call_for_collected(partial(record.release_probe, probe))


#: Accepts what a breaker can be called.
checked_name = settings.rule(
    str,
    f"a text of 1 to {_LONGEST_NAME} printable characters",
    lambda name: name.strip() and name.isprintable() and len(name) <= _LONGEST_NAME,
)


def step_breaker(step: str) -> str:
    """Return the name of the breaker that a step without persona has for itself.

    A step can have any text as its name, so one that is too long or not printable is cut or escaped,
    and made unique by a digest.
    """
    name = f"step/{step}"
    if name.isprintable() and len(name) <= _LONGEST_NAME:
        return name
    digest = sha256(step.encode("utf-8", "surrogatepass")).hexdigest()[:_DIGEST_LENGTH]
    return f"{ascii(name)[1:-1][: _LONGEST_NAME - _DIGEST_LENGTH - 1]}~{digest}"


def _later(now: datetime, seconds: float) -> datetime:
    """Return when that is; the last day of the calendar, if it is later still."""
    last = datetime.max.replace(tzinfo=now.tzinfo)
    left = (last - now).total_seconds()
    return now + timedelta(seconds=seconds) if seconds < left else last


def _iso(when: datetime | None) -> str | None:
    return when.isoformat() if when else None
