"""Keeps the escalations of a store moving while a run waits for one, or a worker lives.

It delivers what is in the outbox, tells tickets how escalations ended, and takes answers from
tickets that were resolved.
"""

from __future__ import annotations

import asyncio
import contextlib
from functools import partial
from typing import TYPE_CHECKING

from maestro_hive.engine import outbox
from maestro_hive.engine.delivery import Delivery
from maestro_hive.engine.outbox import ESCALATIONS
from maestro_hive.hive import escalations
from maestro_hive.hive.branches import detached_task
from maestro_hive.kernel.errors import MaestroError
from maestro_hive.kernel.logs import get_log

if TYPE_CHECKING:
    from collections.abc import Callable

    from maestro_hive.engine.outbox import StoredEscalation
    from maestro_hive.engine.tickets import TicketSystem
    from maestro_hive.maestro.state.store import Store

logger = get_log(__name__)

#: How often it is looked for what other processes escalated.
_POLL_SECONDS = 1.0
#: How long the last look may take, when nobody needs it any more.
_LEAVE_SECONDS = 10.0
#: How long it is waited for another one who looks at the same ticket, and how often it is checked.
_BUSY_SECONDS = 5.0
_BUSY_POLL_SECONDS = 0.02
#: How often a ticket is looked at for its answer.
SYNC_SECONDS = 15.0


class _Loop:
    """The task that keeps escalations moving on one event loop, and for how many users."""

    def __init__(self) -> None:
        self.users = 0
        self.look_now = asyncio.Event()
        self.task: asyncio.Task[None] | None = None
        self.is_ending = False


class EscalationKeeper:
    """The escalations of one store and ticket system; without a system they wait locally."""

    def __init__(self, store: Store, system: TicketSystem | None) -> None:
        self.store = store
        self.system = system
        self._loops: dict[asyncio.AbstractEventLoop, _Loop] = {}
        #: Those that are delivered at once, though they failed before: their run was just resumed.
        self._at_once: set[str] = set()
        #: What is called on a run's loop when a person was told of its escalation, by id.
        self.when_told: dict[str, Callable[[], None]] = {}
        #: When each ticket is looked at again, by escalation, on the loop's clock.
        self._sync_at: dict[str, float] = {}

    # --- what is in the outbox ---

    def add(self, record: StoredEscalation) -> None:
        """Put an escalation into the outbox that is not there any more."""
        outbox.apply(self.store, outbox.added(record))

    def end(self, name: str, outcome: str) -> None:
        """Note how an escalation ended: its ticket is told, if it has one."""
        outbox.apply(self.store, outbox.ended(name, outcome))
        self.look_soon()

    def look_soon(self, name: str | None = None) -> None:
        """Have the outbox looked at now; that escalation is delivered even if it has to wait."""
        if name is not None:
            self._at_once.add(name)
        for loop, each in list(self._loops.items()):
            if not loop.is_closed():
                loop.call_soon_threadsafe(each.look_now.set)

    def has_work(self) -> bool:
        """Return whether there is something to deliver, or a ticket to look at."""
        return self.system is not None and bool(self.store.documents(ESCALATIONS.namespace))

    # --- while it is needed ---

    def enter(self) -> None:
        """Keep escalations moving, until ``leave``."""
        if self.system is None:
            return
        loop = asyncio.get_running_loop()
        found = self._loops.setdefault(loop, _Loop())
        found.users += 1
        if found.task is None:
            found.task = detached_task(loop, self._keep(self.system, found))

    async def leave(self) -> None:
        """Need it no more; what was about to be told is told, within some seconds."""
        loop = asyncio.get_running_loop()
        found = self._loops.get(loop)
        if found is None:
            return
        found.users -= 1
        if found.users or found.task is None:
            return
        del self._loops[loop]
        found.is_ending = True
        found.look_now.set()
        # Cancelled in the middle of a call, it would not be known whether that had its effect.
        await asyncio.wait({found.task}, timeout=_LEAVE_SECONDS)
        found.task.cancel()

    async def _keep(self, system: TicketSystem, mine: _Loop) -> None:
        delivery = Delivery(self.store, system)
        while True:
            is_last = mine.is_ending
            mine.look_now.clear()
            try:
                seconds = await self._look(delivery)
            except MaestroError as error:  # the store's: who executes a run says so
                logger.warning("escalations are not looked at: %s", error)
                seconds = _POLL_SECONDS
            if is_last:
                return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(seconds, _POLL_SECONDS)):
                    await mine.look_now.wait()

    async def _look(self, delivery: Delivery) -> float:
        """Do what is due; return in how many seconds something may be."""
        found = await delivery.in_store(lambda: ESCALATIONS.all(self.store))
        self._sync_at = {name: at for name, at in self._sync_at.items() if name in found}
        waits = [await self._keep_one(delivery, each) for each in found.values()]
        return min(waits, default=_POLL_SECONDS)

    async def _keep_one(self, delivery: Delivery, record: StoredEscalation) -> float:
        if not delivery.takes(record):
            return _POLL_SECONDS
        if not record.delivered or record.outcome is not None:
            at_once = record.id in self._at_once
            self._at_once.discard(record.id)
            left = await delivery.deliver(record.id, at_once=at_once)
            if left is None and record.id in self.when_told:
                self.when_told[record.id]()
            return _POLL_SECONDS if left is None else left
        now = asyncio.get_running_loop().time()
        at = self._sync_at.get(record.id, now)
        if at <= now:
            self._sync_at[record.id] = at = now + SYNC_SECONDS
            end = partial(escalations.end_if_over, self.store, record)
            if not await delivery.in_store(end):
                await escalations.sync_one(delivery, record)
        return at - now


async def sync_all(store: Store, system: TicketSystem) -> list[str]:
    """Deliver everything now, and take the answers from tickets; return which had one."""
    delivery, answered = Delivery(store, system), []
    for record in ESCALATIONS.all(store).values():
        if not delivery.takes(record):
            continue
        if not escalations.end_if_over(store, record) and record.delivered:
            if await _synced(delivery, record):
                answered.append(record.id)
            continue
        await delivery.deliver(record.id, at_once=True)
    return answered


async def _synced(delivery: Delivery, record: StoredEscalation) -> bool:
    """Take the answer from a ticket, when no other one looks at it just now."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_BUSY_SECONDS):
            name = delivery.lease_name(record.label)
            while delivery.store.lease(name) is not None:  # noqa: ASYNC110 - of another process
                await asyncio.sleep(_BUSY_POLL_SECONDS)
    return await escalations.sync_one(delivery, record)
