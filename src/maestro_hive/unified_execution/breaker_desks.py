"""Where a breaker's record lies, and who may make the probe: in this process alone, or in a store.

In a store, the probe's permission is a lease: it ends with its process. Its fencing number goes
into the record, so that a probe that was taken for dead has nothing more to say.
"""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING, NamedTuple, Protocol

from maestro_hive.kernel.errors import DocumentCorruptError, RunHeldError
from maestro_hive.maestro.state import shelves
from maestro_hive.maestro.state.records import Breaker
from maestro_hive.unified_execution.breaker_rules import CircuitState

if TYPE_CHECKING:
    from collections.abc import Callable

    from maestro_hive.maestro.state.records import Lease
    from maestro_hive.maestro.state.store import Store

    Rule = Callable[[Breaker], Breaker]


class Ticket(NamedTuple):
    """The permission to make the probe; each new one has a larger number."""

    number: int
    lease: Lease | None = None


class TakenError(Exception):
    """Somebody makes the probe already."""


class Desk(Protocol):
    """A breaker's record, and the one ticket for its probe."""

    def read(self) -> Breaker:
        """Return the record as it stands."""
        ...

    def change(self, rule: Rule) -> Breaker:
        """Replace the record by what ``rule`` makes of it, atomically; return what it is now.

        Nothing is written if that is the very same one.
        """
        ...

    def take_ticket(self) -> Ticket:
        """Become the one who makes the probe; ``TakenError`` if somebody is."""
        ...

    def return_ticket(self, ticket: Ticket) -> None:
        """Let somebody else make it; nothing happens if somebody already does."""
        ...


class OwnDesk:
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

    def take_ticket(self) -> Ticket:
        """Become the one who makes the probe."""
        with self._mutex:
            if self._taken:
                raise TakenError("in this process")
            self._taken = True
            self._numbers += 1
            return Ticket(self._numbers)

    def return_ticket(self, ticket: Ticket) -> None:
        """Let somebody else make it."""
        with self._mutex:
            if ticket.number == self._numbers:
                self._taken = False


#: The leases of probes that this process makes, by store and lease name. The lease of a store in
#: memory runs out while its process lives, and refusing here costs no transaction.
_probing: weakref.WeakKeyDictionary[Store, dict[str, Lease]] = weakref.WeakKeyDictionary()


class SharedDesk:
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

    def take_ticket(self) -> Ticket:
        """Become the one who makes the probe, in all processes together."""
        mine = _probing.get(self._store, {}).get(self._lease_name)
        if mine is not None and self._is_held(mine):
            raise TakenError("in this process")
        try:
            lease = self._store.take_lease(self._lease_name)
        except RunHeldError as held:
            raise TakenError(f"by process {held.pid} on {held.host}") from held
        _probing.setdefault(self._store, {})[self._lease_name] = lease
        return Ticket(lease.fence, lease)

    def return_ticket(self, ticket: Ticket) -> None:
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
