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

import _thread
import contextlib
import dataclasses
import os
import threading
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from maestro_hive.engine import settings
from maestro_hive.engine.breaker_rules import BreakerRules, CircuitState, Moment
from maestro_hive.engine.errors import CircuitBreakerOpen
from maestro_hive.engine.shared import shared
from maestro_hive.kernel.clock import Clock, SystemClock
from maestro_hive.kernel.errors import (
    DocumentCorruptError,
    RunLeasedError,
    StaleDocumentError,
    StorageError,
)
from maestro_hive.maestro.state import codec
from maestro_hive.maestro.state.records import Breaker
from maestro_hive.maestro.state.shared_records import BREAKERS
from maestro_hive.maestro.state.store import LEASE_SECONDS, DocumentGuard

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from maestro_hive.maestro.state.records import Lease
    from maestro_hive.maestro.state.store import Store

    Rule = Callable[[Breaker], Breaker]

__all__ = ["CircuitBreaker", "CircuitState", "Permit", "checked_name"]

_CLOSED = CircuitState.CLOSED.value
_LONGEST_NAME = 200


class ProbeLease(NamedTuple):
    """The right to make the probe; each new one has a larger number."""

    number: int
    lease: Lease | None = None


class ProbeTakenError(Exception):
    """Another caller makes the probe."""


class MemoryBackend:
    """Where a breaker's record is, and who may make its probe: in this process alone."""

    def __init__(self, name: str) -> None:
        self.record = Breaker(name=name)
        self._mutex = threading.RLock()
        self._numbers = 0
        self._taken = False

    def read(self) -> Breaker:
        """Return the record as it is."""
        return self.record

    def known(self) -> tuple[Breaker, DocumentGuard | None]:
        """Return the record as it was read last, and what refuses a write if it has changed."""
        return self.record, None

    def change(self, rule: Rule) -> Breaker:
        """Replace the record by what ``rule`` makes of it, atomically; return what it is now."""
        with self._mutex:
            self.record = rule(self.record)
            return self.record

    def acquire_probe(self) -> ProbeLease:
        """Become the one who makes the probe; ``ProbeTakenError`` if another caller does."""
        with self._mutex:
            if self._taken:
                raise ProbeTakenError("in this process")
            self._taken = True
            self._numbers += 1
            return ProbeLease(self._numbers)

    def release_probe(self, probe: ProbeLease) -> None:
        """Let another caller make it; nothing happens if one already does."""
        with self._mutex:
            if probe.number == self._numbers:
                self._taken = False


class StoreBackend:
    """The same in a store, for every process that uses it; one object for this process.

    Nothing is written where a rule returns the very record that it was given.
    """

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
        document = self._store.document(BREAKERS, self._name)
        version = 0 if document is None else document.version
        known = self._known
        if known is not None and known[1].version == version:
            return known[0]
        record = self._decode(None if document is None else document.value)
        self._remember(record, version)
        return record

    def _remember(self, record: Breaker, version: int) -> tuple[Breaker, DocumentGuard]:
        self._known = record, DocumentGuard(BREAKERS, self._name, version)
        return self._known

    def known(self) -> tuple[Breaker, DocumentGuard | None]:
        """Return the record as it was read last."""
        known = self._known
        if known is None:
            self.read()
            known = self._known
            assert known is not None
        return known

    def change(self, rule: Rule) -> Breaker:
        """Replace the record by what ``rule`` makes of it; durable on return."""
        made: list[Breaker] = []

        def changed(before: bytes | None) -> codec.Encoded:
            record = self._decode(before)
            after = rule(record)
            if after is record:
                raise _UnchangedError(record)
            made[:] = [after]
            return codec.encode(dataclasses.asdict(after), f"{BREAKERS}/{self._name}")

        try:
            document = self._store.update_document(BREAKERS, self._name, changed)
        except _UnchangedError as unchanged:
            return unchanged.record
        assert document is not None
        return self._remember(made[0], document.version)[0]

    def acquire_probe(self) -> ProbeLease:
        """Become the one who makes the probe, in all processes together."""
        mine = self._probing
        if mine is not None and self._is_current(mine):
            raise ProbeTakenError("in this process")
        try:
            lease = self._store.take_lease(self._lease_name)
        except RunLeasedError as taken:
            raise ProbeTakenError(f"by process {taken.pid} on {taken.host}") from taken
        self._probing = lease
        return ProbeLease(lease.fence, lease)

    def release_probe(self, probe: ProbeLease) -> None:
        """Let another caller make it."""
        assert probe.lease is not None
        if self._probing is probe.lease:
            self._probing = None
        self._store.release_lease(probe.lease)

    def _is_current(self, lease: Lease) -> bool:
        current = self._store.lease(self._lease_name)
        return current is not None and current.fence == lease.fence

    def _decode(self, value: bytes | None) -> Breaker:
        if value is None:
            return Breaker(name=self._name)
        where = f"{BREAKERS}/{self._name}"
        try:
            record = Breaker(**codec.decode(value, where))
        except TypeError as error:
            raise DocumentCorruptError(where, str(error)) from error
        if record.state not in list(CircuitState):
            raise DocumentCorruptError(where, f"{record.state!r} is no state of a breaker")
        return record


class _UnchangedError(Exception):
    """Raised inside a transaction that has nothing to write."""

    def __init__(self, record: Breaker) -> None:
        super().__init__()
        self.record = record


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
        self.store = store
        self.clock = clock or (store.clock if store is not None else SystemClock())
        self._counts_calls = self.rules.counts_calls  # read for every call
        self._backend = (
            MemoryBackend(name)
            if store is None
            else shared(store, StoreBackend, name, StoreBackend)
        )
        self._last_success: datetime | None = None
        self._asked: Permit | None = None

    # --- what it is ---

    @property
    def threshold(self) -> int:
        """How many failures in a row open it."""
        return self.rules.threshold

    @property
    def cooldown_seconds(self) -> float:
        """How long it then stays open."""
        return self.rules.cooldown_seconds

    @property
    def state(self) -> CircuitState:
        """Closed, open or half open; one that is open half opens when the next call is asked for."""
        return CircuitState(self._backend.read().state)

    @property
    def consecutive_failures(self) -> int:
        """Failures since the last success."""
        return self._backend.read().consecutive_failures

    @property
    def last_failure_time(self) -> datetime | None:
        """When a call last failed, anywhere."""
        return self._backend.read().last_failure_time

    @property
    def last_success_time(self) -> datetime | None:
        """When a call last succeeded: here, or anywhere if that changed anything."""
        known = [self._last_success, self._backend.read().last_success_time]
        return max((time for time in known if time is not None), default=None)

    def remaining_seconds(self) -> float:
        """How long nothing will be let through; 0 if the next call may be."""
        return self.rules.remaining(self._backend.read(), self._moment())

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain JSON."""
        record = self._backend.read()
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
        record, guard = self._backend.known()
        return Permit(self, guard=guard) if record.state == _CLOSED else None

    def current(self) -> tuple[Breaker, DocumentGuard | None]:
        """Return the record as it is, and what refuses a write if it has changed."""
        self._backend.read()
        return self._backend.known()

    def acquire(self) -> Permit:
        """Return the permit for one call; raise ``CircuitBreakerOpen`` if there is none."""
        record, guard = self.current()
        if record.state == _CLOSED:
            return Permit(self, guard=guard)
        at = self._moment()
        remaining = self.rules.remaining(record, at)
        if remaining:
            if record.boot != at.boot:
                record = self._backend.change(lambda found: self.rules.anchored(found, at))
            raise self._refusal(record, remaining)
        return self._acquire_probe(record)

    def _acquire_probe(self, record: Breaker) -> Permit:
        try:
            probe = self._backend.acquire_probe()
        except ProbeTakenError as taken:
            raise self._refusal(record, 0.0, probed=str(taken)) from taken
        admitted = False
        try:
            at = self._moment()
            record = self._backend.change(
                lambda found: self.rules.probe_started(found, probe.number, at)
            )
            admitted = record.state == CircuitState.HALF_OPEN and record.probe == probe.number
        finally:
            if not admitted:  # others were faster: they closed it, or opened it again
                self._backend.release_probe(probe)
        if admitted:
            return Permit(self, probe)
        if record.state == _CLOSED:
            return Permit(self)
        raise self._refusal(record, self.rules.remaining(record, at))

    def _settle(self, probe: ProbeLease | None, seconds: float | None, *, failed: bool) -> None:
        """Record how a call went, and only then let another probe be made."""
        if not failed:
            self.note_success()
        if probe is None:
            self._count(seconds, failed=failed)
            return
        at, number = self._moment(), probe.number
        rule = self.rules.probe_failed if failed else self.rules.probe_succeeded
        self._backend.change(lambda record: rule(record, number, at))
        self._backend.release_probe(probe)

    def _count(self, seconds: float | None, *, failed: bool) -> None:
        if not failed and self.success_is_no_news():
            return
        rule = self.rules.failed if failed else self.rules.succeeded
        at = self._moment()
        if failed or rule(record := self._backend.read(), at, seconds) is not record:
            self._backend.change(lambda found: rule(found, at, seconds))

    def note_success(self) -> None:
        """Note, in this process alone, that a call succeeded."""
        self._last_success = self.clock.now()

    def success_is_no_news(self) -> bool:
        """Return whether a success would leave the record, as this process knows it, unchanged."""
        record, _ = self._backend.known()
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
        if self._backend.read().state == _CLOSED:
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
        probe: ProbeLease | None = None,
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
            version = self.guard.version if self.guard is not None else 0
            raise StaleDocumentError(*guard[:2], expected=guard.version, version=version)
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
                self._breaker._backend.release_probe(self._probe)  # noqa: SLF001 - one thing, two faces
            self.settled = True

    def _settle(self, seconds: float | None, *, failed: bool) -> None:
        if not self.settled:
            self._breaker._settle(self._probe, seconds, failed=failed)  # noqa: SLF001 - as above
            self.settled = True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
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
        # In a thread: the collector may have come here from inside the store, with its locks held.
        with contextlib.suppress(RuntimeError):  # the process ends, and the permission with it
            _thread.start_new_thread(_release_quietly, (self._breaker, probe))


def _release_quietly(breaker: CircuitBreaker, probe: ProbeLease) -> None:
    with contextlib.suppress(StorageError):  # a store that failed or was closed holds nothing
        breaker._backend.release_probe(probe)  # noqa: SLF001 - for the permit


def checked_name(what: str, name: object) -> str:
    """Return the name of a breaker; raise if it cannot be one."""
    usable = isinstance(name, str) and name.strip() and name.isprintable()
    if not usable or len(str(name)) > _LONGEST_NAME:
        raise settings.refused(what, name, f"a text of 1 to {_LONGEST_NAME} printable characters")
    return str(name)


def _later(now: datetime, seconds: float) -> datetime:
    """Return when that is; the last day of the calendar, if it is later still."""
    last = datetime.max.replace(tzinfo=now.tzinfo)
    left = (last - now).total_seconds()
    return now + timedelta(seconds=seconds) if seconds < left else last


def _iso(when: datetime | None) -> str | None:
    return when.isoformat() if when else None
