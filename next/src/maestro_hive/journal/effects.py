"""Effects: what an append changes besides its entries, in the same transaction.

An effect raises ``RefusedError`` if it cannot be applied: then nothing of its append is written.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from maestro_hive.kernel.errors import NoRoomError, StaleDocumentError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from maestro_hive.journal.database import Transaction

#: The statuses of a run that has ended.
ENDED = ("success", "failed", "cancelled")


class Held(Protocol):
    """A run that this process holds."""

    name: str
    number: int
    fence: int


class Scope(NamedTuple):
    """The transaction that an effect is applied in."""

    tx: Transaction
    sql: Mapping[str, str]
    now: float
    #: The runs that were appended to with the large values that were written for them.
    payloads: list[tuple[Any, list[Any]]]


class Effect(Protocol):
    """A change in the transaction of an append."""

    def apply(self, scope: Scope, run: Held) -> None:
        """Apply it, or raise ``RefusedError``."""


class Hold(NamedTuple):
    """Claim an amount of an account for a step, until it is settled."""

    step: int
    account: str
    amount: int

    def apply(self, scope: Scope, run: Held) -> None:
        """Claim it, or refuse if there is no room."""
        tx, sql, *_ = scope
        if not tx(sql["HOLD"], self.amount, self.account):
            found = tx(sql["ACCOUNT"], self.account) or [(0, 0, 0)]
            used, held, most = found[0]
            raise NoRoomError(self.account, used=used, held=held, most=most, wanted=self.amount)
        tx(sql["ADD_HOLD"], run.number, self.step, self.account, self.amount)


class Settle(NamedTuple):
    """Return what a step holds of an account, less what it spent."""

    step: int
    account: str
    spent: int = 0

    def apply(self, scope: Scope, run: Held) -> None:
        """Settle it; a hold that is gone already counts as nothing."""
        tx, sql, *_ = scope
        held = tx(sql["DROP_HOLD"], run.number, self.step, self.account)
        tx(sql["SETTLE"], held[0][0] if held else 0, self.spent, self.account)


class Change(NamedTuple):
    """Replace a document, if it has the version that was read; 0: there was none."""

    namespace: str
    key: str
    version: int
    value: bytes

    def apply(self, scope: Scope, run: Held) -> None:
        """Replace it, or refuse if it was changed."""
        tx, sql, *_ = scope
        value, where = self.value.decode(), (self.namespace, self.key)
        if self.version:
            done = tx(sql["CHANGE_DOCUMENT"], value, *where, self.version)
        else:
            done = tx(sql["ADD_DOCUMENT"], *where, value)
        if not done:
            raise StaleDocumentError(self.namespace, self.key)


class Take(NamedTuple):
    """Consume a message, once."""

    message: int

    def apply(self, scope: Scope, run: Held) -> None:
        """Delete it, or refuse if it was taken."""
        if not scope.tx(scope.sql["TAKE_MESSAGE"], self.message):
            raise StaleDocumentError("message", str(self.message))


class Usage(NamedTuple):
    """Add to what a persona has spent in a run."""

    persona: str
    model: str = ""
    tokens: int = 0
    cached: int = 0
    micros: int = 0

    def apply(self, scope: Scope, run: Held) -> None:
        """Add it to the day of the transaction."""
        tx, sql, now, _ = scope
        amounts = (self.tokens, self.cached, self.micros)
        tx(sql["ADD_USAGE"], run.number, self.persona, self.model, int(now // 86_400), *amounts)


class Waits(NamedTuple):
    """Show in lists of runs what a run waits for that stays in memory."""

    waits_for: str | None

    def apply(self, scope: Scope, run: Held) -> None:
        """Show it; the run is still held."""
        scope.tx(scope.sql["SHOW_WAIT"], self.waits_for, scope.now, run.number, run.fence)


class Accept(NamedTuple):
    """Give a run that is executed to the workers of a queue, if its process does not end it."""

    queue: str

    def apply(self, scope: Scope, run: Held) -> None:
        """Record the queue; one that the run has already stays."""
        scope.tx(scope.sql["ACCEPT_HELD"], self.queue, run.number)


class Extend(NamedTuple):
    """Hold a run for longer than its lease, without renewing it."""

    seconds: float

    def apply(self, scope: Scope, run: Held) -> None:
        """Set the end of the lease."""
        scope.tx(scope.sql["EXTEND"], scope.now + self.seconds, run.number)


class Watch(NamedTuple):
    """Send this run a message when another one has ended, or at once if it has."""

    target: str

    def apply(self, scope: Scope, run: Held) -> None:
        """Record it with the other run."""
        tx, sql, *_ = scope
        found = tx(sql["WATCHED"], self.target)
        if found and found[0][1] not in ENDED:
            tx(sql["ADD_WATCH"], run.name, found[0][0])
        else:
            tx(sql["ADD_MESSAGE"], run.number, "ended", self.target, "")


def wake(scope: Scope, name: str) -> None:
    """Make a run due that waits, and the runs that wait for it."""
    tx, sql, now, _ = scope
    waiting: str | None = name
    while waiting:
        tx(sql["WAKE"], now, waiting)
        found = tx(sql["PARENT"], waiting)
        waiting = found[0][0] if found else None


class Release(NamedTuple):
    """Give the run back: ended, stopped, or waiting until it is due or is sent a message."""

    status: str
    due: float | None = None
    waits_for: str | None = None

    def apply(self, scope: Scope, run: Held) -> None:
        """Release it; of a run that has ended messages are dropped, and its watchers woken."""
        tx, sql, now, _ = scope
        tx(sql["RELEASE_RUN"], self.status, run.number, self.waits_for, self.due, now)
        if self.status in ENDED:
            for (watcher,) in tx(sql["WATCHERS"], run.number):
                for number, status in tx(sql["WATCHED"], watcher):
                    if status not in ENDED:
                        tx(sql["ADD_MESSAGE"], number, "ended", run.name, "")
                        wake(scope, watcher)
        if self.status == "success":
            tx(sql["DROP_MESSAGES"], run.number)
        elif self.status in ENDED:
            tx(sql["DROP_REQUESTS"], run.number)
