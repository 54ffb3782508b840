"""Where a breaker's record lies, and who may make the probe: in this process alone, or in a store.

In a store, the probe's permission is a lease: it ends with its process. Its fencing number goes
into the record, so that a probe that was taken for dead has nothing more to say.
"""

from __future__ import annotations

import _thread
import contextlib
import os
import threading
import weakref
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, Self

from maestro_hive.engine import settings
from maestro_hive.engine.breaker_rules import BreakerRules, CircuitState, Moment
from maestro_hive.engine.errors import CircuitBreakerOpen
from maestro_hive.kernel.clock import Clock, SystemClock
from maestro_hive.kernel.errors import DocumentCorruptError, RunLeasedError, StorageError
from maestro_hive.maestro.state import shared_records as shelves
from maestro_hive.maestro.state.records import Breaker
from maestro_hive.maestro.state.store import LEASE_SECONDS

if TYPE_CHECKING:
    from collections.abc import Callable

    from maestro_hive.maestro.state.records import Lease
    from maestro_hive.maestro.state.store import Store

    Rule = Callable[[Breaker], Breaker]
    from types import TracebackType

    from maestro_hive.maestro.state.records import Breaker

__all__ = ["CircuitBreaker", "CircuitState", "Permit"]


class ProbeLease(NamedTuple):
    """The permission to make the probe; each new one has a larger number."""

    number: int
    lease: Lease | None = None


class ProbeTakenError(Exception):
    """Somebody makes the probe already."""


class BreakerBackend(Protocol):
    """A breaker's record, and the one ticket for its probe."""

    def read(self) -> Breaker:
        """Return the record as it stands."""
        ...

    def change(self, rule: Rule) -> Breaker:
        """Replace the record by what ``rule`` makes of it, atomically; return what it is now.

        Nothing is written if that is the very same one.
        """
        ...

    def acquire_probe(self) -> ProbeLease:
        """Become the one who makes the probe; ``TakenError`` if somebody is."""
        ...

    def release_probe(self, ticket: ProbeLease) -> None:
        """Let somebody else make it; nothing happens if somebody already does."""
        ...


class MemoryBackend:
    """In this process alone; ``quiet`` while the breaker is closed and nothing has failed."""

    def __init__(self, name: str) -> None:
        self.record = Breaker(name=name)
        self.quiet = True
        self._mutex = threading.RLock()
        self._numbers = 0
        self._taken = False

    def read(self) -> Breaker:
        """Return the record as it stands."""
        return self.record

    def change(self, rule: Rule) -> Breaker:
        """Replace the record by what ``rule`` makes of it."""
        with self._mutex:
            record = self.record = rule(self.record)
            self.quiet = record.state == CircuitState.CLOSED and not record.consecutive_failures
            return record

    def acquire_probe(self) -> ProbeLease:
        """Become the one who makes the probe."""
        with self._mutex:
            if self._taken:
                raise ProbeTakenError("in this process")
            self._taken = True
            self._numbers += 1
            return ProbeLease(self._numbers)

    def release_probe(self, ticket: ProbeLease) -> None:
        """Let somebody else make it."""
        with self._mutex:
            if ticket.number == self._numbers:
                self._taken = False


#: The leases of probes that this process makes, by store and lease name. The lease of a store in
#: memory runs out while its process lives, and refusing here costs no transaction.
_probing: weakref.WeakKeyDictionary[Store, dict[str, Lease]] = weakref.WeakKeyDictionary()


class StoreBackend:
    """In a store, for every process that uses it."""

    def __init__(self, store: Store, name: str) -> None:
        self._store = store
        self._name = name
        self._lease_name = f"breaker/{name}/probe"
        self._shelf = shelves.breakers(store)

    def read(self) -> Breaker:
        """Return the record as it stands."""
        return self._checked(self._shelf.get(self._name))

    def change(self, rule: Rule) -> Breaker:
        """Replace the record by what ``rule`` makes of it; durable on return."""

        def changed(before: Breaker | None) -> Breaker:
            record = self._checked(before)
            after = rule(record)
            if after is record:
                raise _UnchangedError(record)
            return after

        try:
            return self._shelf.update(self._name, changed)
        except _UnchangedError as unchanged:
            return unchanged.record

    def acquire_probe(self) -> ProbeLease:
        """Become the one who makes the probe, in all processes together."""
        mine = _probing.get(self._store, {}).get(self._lease_name)
        if mine is not None and self._is_held(mine):
            raise ProbeTakenError("in this process")
        try:
            lease = self._store.take_lease(self._lease_name)
        except RunLeasedError as held:
            raise ProbeTakenError(f"by process {held.pid} on {held.host}") from held
        _probing.setdefault(self._store, {})[self._lease_name] = lease
        return ProbeLease(lease.fence, lease)

    def release_probe(self, ticket: ProbeLease) -> None:
        """Let somebody else make it."""
        assert ticket.lease is not None
        probing = _probing.get(self._store, {})
        if probing.get(self._lease_name) is ticket.lease:
            del probing[self._lease_name]
        self._store.release_lease(ticket.lease)

    def _is_held(self, lease: Lease) -> bool:
        current = self._store.lease(self._lease_name)
        return current is not None and current.fence == lease.fence

    def _checked(self, record: Breaker | None) -> Breaker:
        if record is None:
            return Breaker(name=self._name)
        if record.state not in list(CircuitState):
            where = f"{shelves.BREAKERS}/{self._name}"
            raise DocumentCorruptError(where, f"{record.state!r} is no state of a breaker")
        return record


class _UnchangedError(Exception):
    """Raised inside a transaction that has nothing to write."""

    def __init__(self, record: Breaker) -> None:
        super().__init__()
        self.record = record


# --- breaker ---


_CLOSED = CircuitState.CLOSED.value
_LONGEST_NAME = 200


class CircuitBreaker:
    """Lets calls through, or not: in memory, or for everybody on a store, by name.

    ``acquire`` gives a permit for one call; say to it how the call went. ``is_open`` and
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
        self.name = _checked_name(name)
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
        self._counts_calls = self.rules.counts_calls
        self._own = MemoryBackend(name) if store is None else None
        self._backend: BreakerBackend = self._own or StoreBackend(store, name)  # type: ignore[arg-type]
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

    def acquire(self) -> Permit:
        """Return the permission for one call; raise ``CircuitBreakerOpen`` if there is none."""
        record = self._backend.read()
        if record.state == _CLOSED:
            return Permit(self)
        at = self._moment()
        remaining = self.rules.remaining(record, at)
        if remaining:
            if record.boot != at.boot:
                record = self._backend.change(lambda found: self.rules.anchored(found, at))
            raise self._refusal(record, remaining)
        return self._acquire_probe(record)

    def _acquire_probe(self, record: Breaker) -> Permit:
        try:
            ticket = self._backend.acquire_probe()
        except ProbeTakenError as taken:
            raise self._refusal(record, 0.0, probed=str(taken)) from taken
        admitted = False
        try:
            at = self._moment()
            record = self._backend.change(
                lambda found: self.rules.probe_started(found, ticket.number, at)
            )
            admitted = record.state == CircuitState.HALF_OPEN and record.probe == ticket.number
        finally:
            if not admitted:  # others were faster: they closed it, or opened it again
                self._backend.release_probe(ticket)
        if admitted:
            return Permit(self, ticket)
        if record.state == _CLOSED:
            return Permit(self)
        raise self._refusal(record, self.rules.remaining(record, at))

    def _settle(self, ticket: ProbeLease | None, seconds: float | None, *, failed: bool) -> None:
        """Record how a call went, and only then let another probe be made."""
        if not failed:
            self._last_success = self.clock.now()
        if ticket is None:
            self._count(seconds, failed=failed)
            return
        at, number = self._moment(), ticket.number
        rule = self.rules.probe_failed if failed else self.rules.probe_succeeded
        self._backend.change(lambda record: rule(record, number, at))
        self._backend.release_probe(ticket)

    def _count(self, seconds: float | None, *, failed: bool) -> None:
        rule = self.rules.failed if failed else self.rules.succeeded
        at, record = self._moment(), self._backend.read()
        if rule(record, at, seconds) is not record:  # looked at first: most successes say nothing
            self._backend.change(lambda found: rule(found, at, seconds))

    def _release_probe(self, ticket: ProbeLease) -> None:
        self._backend.release_probe(ticket)

    def _refusal(
        self, record: Breaker, remaining: float, probed: str | None = None
    ) -> CircuitBreakerOpen:
        cooldown = self.rules.cooldown_of(record)
        # How long a probe takes nobody knows: have a look again soon.
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

        Half open, the first who asks is told that it may, and everybody else that they must not,
        until ``record_success`` or ``record_failure``; or until so long has passed that whoever
        asked must have forgotten about it.
        """
        own = self._own
        if own is not None and own.quiet:
            return False
        asked = self._asked
        if asked is not None and asked.age() > max(self.cooldown_seconds, LEASE_SECONDS):
            asked.release()
        try:
            permit = self.acquire()
        except CircuitBreakerOpen:
            return True
        if permit.probe:
            self._asked = permit
        return False

    def record_success(self) -> None:
        """Say that a call went well."""
        own = self._own
        if own is not None and own.quiet and not self._counts_calls:
            self._last_success = self.clock.now()
        else:
            self._permit_asked_for().succeeded()

    def record_failure(self) -> None:
        """Say that a call failed."""
        self._permit_asked_for().failed()

    def _permit_asked_for(self) -> Permit:
        asked, self._asked = self._asked, None
        return asked if asked is not None and not asked.settled else Permit(self)

    def _moment(self) -> Moment:
        return Moment.of(self.clock)


class Permit:
    """The permission for one call; ``probe`` says that a half-open breaker waits for its outcome.

    Say how it went, once: what is said after that changes nothing. As a context manager it says it
    itself: an exception is a failure, and a call that was interrupted or cancelled is neither. One
    that is dropped is given back.
    """

    __slots__ = ("_begun", "_breaker", "_pid", "_ticket", "settled")

    def __init__(self, breaker: CircuitBreaker, ticket: ProbeLease | None = None) -> None:
        self.settled = False
        self._breaker = breaker
        self._ticket = ticket
        self._begun = breaker.clock.awake_seconds()
        self._pid = os.getpid() if ticket is not None else 0

    @property
    def probe(self) -> bool:
        """Return whether the breaker is half open, and this is its one call."""
        return self._ticket is not None

    def age(self) -> float:
        """Return how many seconds ago it was given."""
        return self._breaker.clock.awake_seconds() - self._begun

    def succeeded(self, seconds: float | None = None) -> None:
        """Say that the call went well, and how long it took."""
        self._settle(seconds, failed=False)

    def failed(self, seconds: float | None = None) -> None:
        """Say that the call failed, and how long it took."""
        self._settle(seconds, failed=True)

    def release(self) -> None:
        """Say that there was no call, or that it says nothing about the other side."""
        if not self.settled:
            if self._ticket is not None:
                self._breaker._release_probe(self._ticket)  # noqa: SLF001 - one thing, two faces
            self.settled = True

    def _settle(self, seconds: float | None, *, failed: bool) -> None:
        if not self.settled:
            self._breaker._settle(self._ticket, seconds, failed=failed)  # noqa: SLF001 - as above
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
        ticket = self._ticket
        if self.settled or ticket is None or self._pid != os.getpid():
            return
        # In a thread: the collector may have come here from inside the store, with its locks held.
        with contextlib.suppress(RuntimeError):  # the process ends, and the permission with it
            _thread.start_new_thread(_release_quietly, (self._breaker, ticket))


def _release_quietly(breaker: CircuitBreaker, ticket: ProbeLease) -> None:
    with contextlib.suppress(StorageError):  # a store that failed or was closed holds nothing
        breaker._release_probe(ticket)  # noqa: SLF001 - for the permit


def _checked_name(name: object) -> str:
    usable = isinstance(name, str) and name.strip() and name.isprintable()
    if not usable or len(str(name)) > _LONGEST_NAME:
        raise settings.refused("name", name, f"a text of 1 to {_LONGEST_NAME} printable characters")
    return str(name)


def _later(now: datetime, seconds: float) -> datetime:
    """Return when that is; the last day of the calendar, if it is later still."""
    last = datetime.max.replace(tzinfo=now.tzinfo)
    left = (last - now).total_seconds()
    return now + timedelta(seconds=seconds) if seconds < left else last


def _iso(when: datetime | None) -> str | None:
    return when.isoformat() if when else None
