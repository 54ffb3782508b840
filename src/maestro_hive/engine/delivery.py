"""Delivery of escalations to a ticket system: one ticket or comment each, whatever is killed.

What is about to be made is recorded before the call, and what was made after it. Where neither a
success nor a refusal is known, since the response was lost or the process died, the effect is looked
for until the index of the system must have it; only then is it made again. Exactly one process
delivers the escalations of one failure: who has the lease of their label.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from maestro_hive.engine import values
from maestro_hive.engine.failures import plain_text
from maestro_hive.engine.outbox import (
    TICKETS,
    Effect,
    KnownTicket,
    StoredEscalation,
    found_escalation,
    update,
)
from maestro_hive.engine.tickets import TicketMissingError, TicketRefusedError
from maestro_hive.kernel.clock import Wait
from maestro_hive.kernel.errors import FencedError, MaestroError, RunLeasedError
from maestro_hive.kernel.logs import get_log
from maestro_hive.kernel.redaction import redact_text

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from maestro_hive.engine.tickets import Comment, Ticket, TicketSystem
    from maestro_hive.maestro.state.records import Lease
    from maestro_hive.maestro.state.store import Store

ResultT = TypeVar("ResultT")

logger = get_log(__name__)

#: The waits after failures: the first, the longest, and after a refusal that a person has to remove.
_FIRST_SECONDS = 5.0
_LAST_SECONDS = 900.0
_PERMANENT_SECONDS = 3600.0
#: How often it is looked for an effect that may have been made: so many times while its index lags.
_LOOKS = 8
_FIRST_LOOK = 0.25
#: When another process delivers it is asked again.
_BUSY_SECONDS = 1.0


class LaterError(Exception):
    """It is not known yet whether an effect was made; look again after so many seconds."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds


@dataclass(slots=True)
class Progress:
    """Where an effect that is made once is recorded: what is known of it, and how to record more."""

    effect: Effect | None
    save: Callable[[Effect | None], Awaitable[None]]


class Delivery:
    """Delivers the escalations of a store to one ticket system."""

    def __init__(self, store: Store, system: TicketSystem) -> None:
        self.store = store
        self.system = system
        self._clock = store.clock

    def takes(self, record: StoredEscalation) -> bool:
        """Return whether an escalation is for this system."""
        return record.system in (None, self.system.name)

    async def deliver(self, name: str, *, at_once: bool = False) -> float | None:
        """Bring an escalation on its way; return in how many seconds to go on, None if it is done.

        ``at_once``: also if it failed before, and the wait since then is not over.
        """
        record = await self.read(name)
        if record is None or not self.takes(record) or self._is_done(record):
            return None
        left = record.due_in(self._clock)
        if left and not at_once:
            return left
        try:
            async with self.leased(record.label) as lease:
                record = await self.read(name)  # another one may have delivered it meanwhile
                if record is None or self._is_done(record):
                    return None
                return await self._try(_Pass(self, record, lease))
        except RunLeasedError:
            return _BUSY_SECONDS

    @staticmethod
    def _is_done(record: StoredEscalation) -> bool:
        return record.delivered and record.outcome is None

    async def _try(self, one: _Pass) -> float | None:
        try:
            await one.make()
        except LaterError as later:
            await one.postpone(later.seconds, one.record.problem, failed=False)
            return later.seconds
        except TicketRefusedError as error:
            return await self._failed(one, error, error.retry_after, permanent=error.permanent)
        except FencedError:
            return _BUSY_SECONDS  # another process has taken it over
        except MaestroError as error:
            if not _is_tickets(error):
                raise  # the store's: nothing is known to be recorded
            return await self._failed(one, error)
        except Exception as error:  # noqa: BLE001 - the user's own client
            return await self._failed(one, error)
        return None

    async def _failed(
        self,
        one: _Pass,
        error: Exception,
        retry_after: float | None = None,
        *,
        permanent: bool = False,
    ) -> float:
        problem, tries = plain_text(error), one.record.tries
        seconds = min(_FIRST_SECONDS * 2.0 ** min(tries, 20), _LAST_SECONDS)
        seconds = max(seconds, retry_after or 0.0, _PERMANENT_SECONDS if permanent else 0.0)
        await one.postpone(seconds, problem, failed=True)
        logger.warning(
            "escalation %s is not delivered to %s, and is tried again in %.0f s: %s",
            one.record.id,
            self.system.name,
            seconds,
            problem,
        )
        return seconds

    # --- an effect that is made once ---

    async def once(
        self,
        progress: Progress,
        look: Callable[[], Awaitable[ResultT | None]],
        make: Callable[[], Awaitable[ResultT]],
    ) -> ResultT:
        """Return what ``look`` finds, or ``make`` makes where it is certain that nothing was made."""
        effect = progress.effect
        since = self._clock.nanos() // 1000 if effect is None else effect.since
        if effect is not None and effect.wait is None:  # whoever was making it is gone
            effect = await self._doubt(progress, since)
        if self.system.finds:
            found = await look()
            if found is not None:
                return found
            left = 0.0 if effect is None else effect.remaining(self._clock) or 0.0
            if left:
                raise LaterError(self._look_in(left))
        await progress.save(Effect(since=since))
        try:
            return await make()
        except TicketRefusedError:
            await progress.save(None)
            raise
        except Exception:
            await self._doubt(progress, since)
            raise

    async def _doubt(self, progress: Progress, since: int | None) -> Effect:
        """Record that an effect may have been made, up to now."""
        wait = Wait.start(self._clock, self.system.index_lag).to_json()
        effect = Effect(wait=wait, since=since)
        await progress.save(effect)
        return effect

    def _look_in(self, left: float) -> float:
        """Return in how many seconds to look again: soon at first, then a few times."""
        lag = self.system.index_lag
        passed = max(lag - left, 0.0)
        return min(left, max(_FIRST_LOOK, min(passed, lag / _LOOKS)))

    # --- the store ---

    @contextlib.asynccontextmanager
    async def leased(self, label: str) -> AsyncIterator[Lease]:
        """Be the one who delivers the escalations of a label; ``RunLeasedError`` if another one is."""
        name = self.lease_name(label)
        lease = await self.in_store(lambda: self.store.take_lease(name), self._release)
        try:
            yield lease
        finally:
            self._release(lease)

    @staticmethod
    def lease_name(label: str) -> str:
        """Return the name of the lease under which the escalations of a label are delivered."""
        return f"escalation/{label}"

    def _release(self, lease: Lease | None) -> None:
        with contextlib.suppress(MaestroError):  # a failed store has no leases any more
            if lease is not None:
                self.store.release_lease(lease)

    async def in_store(
        self, call: Callable[[], ResultT], undo: Callable[[ResultT | None], object] | None = None
    ) -> ResultT:
        """Return what a blocking call of the store returns."""
        return call() if self.store.syncs_fast() else await values.in_thread(call, undo)

    async def read(self, name: str) -> StoredEscalation | None:
        """Return an escalation as it is recorded; None if there is none any more."""
        return await self.in_store(lambda: found_escalation(self.store, name))


def _is_tickets(error: MaestroError) -> bool:
    return type(error).__module__.startswith("maestro_hive.engine.tickets")


class _Pass:
    """One pass over an escalation, under the lease of its label."""

    def __init__(self, delivery: Delivery, record: StoredEscalation, lease: Lease) -> None:
        self._delivery = delivery
        self._system = delivery.system
        self._store = delivery.store
        self._lease = lease
        self.record = record
        self._case = record.told_case

    async def make(self) -> None:
        """Tell a person of the failure; and of its end, if it is over."""
        is_unheard = self.record.outcome is not None and not self.record.delivered
        if is_unheard and not await self._may_exist():
            await self._change(lambda _: None)  # nobody was told of it, and nobody needs to be
            return
        if not self.record.delivered:
            await (self._deliver() if self._system.finds else self._send())
        if self.record.outcome is not None:
            await self._tell_outcome(self.record.outcome)

    # --- its beginning ---

    async def _send(self) -> None:
        """Send a message to a system that cannot be searched."""
        progress = Progress(self.record.effect, self._save_effect)
        made = await self._delivery.once(
            progress, _nothing, lambda: self._system.create(self._case)
        )
        await self._delivered(made.key or None, made.address)

    async def _deliver(self) -> None:
        """Create the ticket of the failure, or add a comment to the one that it has."""
        known = await self._ticket()
        try:
            comment = await self._comment_again(known)
        except TicketMissingError:  # it was deleted just now
            await self._forget_ticket()
            known = await self._ticket()
            comment = await self._comment_again(known)
        await self._delivered(known.key, known.address, comment)

    async def _comment_again(self, known: KnownTicket) -> str | None:
        """Add a comment to a ticket that was not created for this escalation; return its id."""
        if known.maker == self.record.id:
            return None
        assert known.key is not None
        text = f"It failed again.\n\n{self._case.description}"
        return await self._comment(known.key, text, self._case.effect_key)

    async def _ticket(self) -> KnownTicket:
        """Return the ticket of the failure: as it is known, found, or created; open, if not ours."""
        known = await self._known()
        if known is not None and await self._has_delivered_maker(known):
            known = await self._known()
        if known is not None and known.key is not None:
            if await self._is_usable(known, known.key):
                return known
            await self._forget_ticket()
            known = None
        effect = None if known is None else known.effect
        maker = "" if known is None or effect is None else known.maker
        created = False

        async def create() -> Ticket:
            nonlocal created
            ticket = await self._system.create(self._case)
            created = True
            return ticket

        async def save(effect: Effect | None) -> None:
            await self._save_ticket(
                None if effect is None else self._known_as(maker=self.record.id, effect=effect)
            )

        progress, label = Progress(effect, save), self.record.label
        # A person may have resolved it already, with an answer.
        since = effect.in_doubt_since if effect is not None and maker == self.record.id else None

        async def find() -> Ticket | None:
            return await (
                self._system.find(label) if since is None else self._system.find(label, since)
            )

        ticket = await self._delivery.once(progress, find, create)
        maker = self.record.id if created else maker
        made = self._known_as(key=ticket.key, address=ticket.address, maker=maker)
        await self._save_ticket(made)
        return made

    async def _has_delivered_maker(self, known: KnownTicket) -> bool:
        """Deliver the escalation first that the ticket is made for; False if it is this, or over.

        Otherwise a ticket that was made for it, and is resolved, would be given up with its answer.
        """
        if known.maker in ("", self.record.id):
            return False
        maker = await self._delivery.read(known.maker)
        if maker is None or maker.delivered:
            return False
        await _Pass(self._delivery, maker, self._lease).make()
        return True

    async def _is_usable(self, known: KnownTicket, key: str) -> bool:
        """Return whether a ticket is the one of this escalation, has our comment on it, or is open."""
        if known.maker == self.record.id:
            return True
        try:
            if not (await self._system.ticket(key)).resolved:
                return True
            if self.record.effect is None:
                return False
            return await self._comment_on(key, marker_of(self._case.effect_key)) is not None
        except TicketMissingError:
            return False

    async def _forget_ticket(self) -> None:
        """Use the ticket of the failure no more; a comment on it that is in doubt is none on another."""
        if self.record.effect is not None:
            await self._save_effect(None)
        await self._save_ticket(None)

    def _known_as(self, **facts: Any) -> KnownTicket:
        return KnownTicket(system=self._system.name, **facts)

    async def _may_exist(self) -> bool:
        """Return whether a ticket or a message was about to be made for this escalation."""
        known = await self._known()
        return self.record.effect is not None or (
            known is not None and known.maker == self.record.id
        )

    async def _comment(self, key: str, text: str, effect_key: str) -> str:
        """Add a comment with a line that it is recognized by; return its id."""
        marker = marker_of(effect_key)
        progress = Progress(self.record.effect, self._save_effect)
        text = f"{redact_text(text)}\n\n{marker}"
        return await self._delivery.once(
            progress,
            lambda: self._comment_on(key, marker),
            lambda: self._system.comment(key, text),
        )

    async def _comment_on(self, key: str, marker: str) -> str | None:
        """Return the id of the comment of ours with this line; None if there is none."""
        comments = await self._system.comments(key)
        return next((each.id for each in comments if has_line(each, marker)), None)

    async def _delivered(
        self, ticket: str | None, address: str | None, comment: str | None = None
    ) -> None:
        await self._change(
            lambda record: replace(
                record,
                system=self._system.name,
                finds=self._system.finds,
                ticket=ticket,
                address=address,
                comment=comment,
                delivered=True,
                effect=None,
                tries=0,
                problem=None,
                wait=None,
            )
        )
        logger.info("escalation %s: %s", self.record.id, ticket or "sent")

    # --- its end ---

    async def _tell_outcome(self, outcome: str) -> None:
        """Tell the ticket how it ended; then it is no longer needed here."""
        if self._system.finds and self.record.ticket is not None:
            try:
                await self._comment(self.record.ticket, outcome, f"{self._case.effect_key}/outcome")
            except TicketMissingError:
                # Unless the whole system is not where it was: then this raises, and it is tried again.
                await self._system.find(self.record.label)
        await self._change(lambda _: None)

    # --- what is recorded ---

    async def postpone(self, seconds: float, problem: str | None, *, failed: bool) -> None:
        """Record when delivery is tried again, and why it was not done."""
        wait = Wait.start(self._store.clock, seconds).to_json()
        await self._change(
            lambda record: replace(
                record, wait=wait, problem=problem, tries=record.tries + bool(failed)
            )
        )

    async def _save_effect(self, effect: Effect | None) -> None:
        system = self._system
        await self._change(
            lambda record: replace(record, effect=effect, system=system.name, finds=system.finds)
        )

    async def _change(self, change: Callable[[StoredEscalation], StoredEscalation | None]) -> None:
        def changed(record: StoredEscalation) -> StoredEscalation | None:
            self._check_lease()
            return change(record)

        call = self._delivery.in_store
        made = await call(lambda: update(self._store, self.record.id, changed))
        self.record = made or self.record

    async def _known(self) -> KnownTicket | None:
        label = self.record.label

        def read() -> KnownTicket | None:
            found = self._store.document(TICKETS.namespace, label)
            known = None if found is None else TICKETS.decode(found.value, label)
            return known if known is not None and known.system == self._system.name else None

        return await self._delivery.in_store(read)

    async def _save_ticket(self, known: KnownTicket | None) -> None:
        encoded = None if known is None else TICKETS.encoded(known, self.record.label)

        def change(_: bytes | None) -> Any:
            self._check_lease()
            return encoded

        name = self.record.label
        call = self._delivery.in_store
        await call(lambda: self._store.update_document(TICKETS.namespace, name, change))

    def _check_lease(self) -> None:
        """Raise if another process has taken over, as this one seemed to hang."""
        current = self._store.lease(self._lease.name)
        if current is None or current.fence != self._lease.fence:
            fence = 0 if current is None else current.fence
            raise FencedError(self._lease.name, fence=self._lease.fence, current=fence)


async def _nothing() -> None:
    await asyncio.sleep(0)


def marker_of(effect_key: str) -> str:
    """Return the line by which a comment of ours is recognized."""
    return f"maestro-hive effect: {effect_key}"


def has_line(comment: Comment, line: str) -> bool:
    """Return whether a comment has this line."""
    return any(each.strip() == line for each in comment.text.splitlines())
