"""So many at once: numbered slots of one name, shared by all processes on a store.

A slot is a lease, ``slot/<name>/<number>``. It comes back with its process, however that ends, and
from a process that hangs when the lease expires.

A process that finds every slot taken stands in a line, whose places are leases, too:
``slot/<name>/line/0`` has the next slot that becomes free, and whoever stands behind moves up.
Nobody takes a slot past the line, so a process with a thousand tasks leaves slots to one with a
single task. It is short: where more processes wait, chance decides who comes to stand in it.

Inside a process tasks wait in a line of their own, of which only the first looks at the journal.
While nobody else stands in the journal's line, a slot goes from task to task without a write.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import threading
import time
from collections import OrderedDict
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import quote

from maestro_hive.kernel.errors import RunHeldError, StorageError, StoreBusyError
from maestro_hive.kernel.threads import threads

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from maestro_hive.maestro.state.records import Lease
    from maestro_hive.maestro.state.store import Store

ResultT = TypeVar("ResultT")

#: How often the first in line looks whether another process gave something back: less and less,
#: so that what is lost by it is a tenth of what was waited anyway.
_FIRST_PAUSE = 0.02
_LAST_PAUSE = 0.25
_PAUSE_GROWS_BY = 1.1
#: How many processes can stand in line.
_PLACES = 8
#: How many slots that others have are tried in one look: their holders may be dead.
_TRIED_AT_ONCE = 8
#: How often giving back is tried where somebody is in the way, each time for half a minute.
_PATIENCE = 20


class Line:
    """A line in this process: one at a time is first, in the order they came, from any loop."""

    def __init__(self) -> None:
        self._mutex = threading.RLock()
        self._turns: OrderedDict[Future[None], None] = OrderedDict()
        self._taken = False

    async def be_first(self) -> None:
        """Return when everybody who came before has left."""
        with self._mutex:
            if not self._taken:
                self._taken = True
                return
            turn: Future[None] = Future()
            self._turns[turn] = None
        try:
            await asyncio.wrap_future(turn)
        except BaseException:
            with self._mutex:
                self._turns.pop(turn, None)
                is_mine = not turn.cancel()
            if is_mine:  # it came at the very moment
                self.leave()
            raise

    def leave(self) -> None:
        """Let the next one be first."""
        with self._mutex:
            while self._turns:
                turn, _ = self._turns.popitem(last=False)
                if turn.set_running_or_notify_cancel():
                    turn.set_result(None)
                    return
            self._taken = False


class Bell:
    """Wakes the one who listens, on whichever loop; what was missed is heard at once."""

    def __init__(self) -> None:
        self._mutex = threading.RLock()
        self._ear: Future[None] | None = None
        self._rung = False

    def ring(self) -> None:
        """Wake whoever listens, or will."""
        with self._mutex:
            self._rung = True
            if self._ear is not None and not self._ear.done():
                self._ear.set_result(None)

    async def heard(self, seconds: float | None) -> bool:
        """Return when it rings, or when so many seconds are over; tell whether it rang."""
        with self._mutex:
            ear: Future[None] = Future()
            if not self._rung:
                self._ear = ear
        try:
            if self._ear is ear:
                await asyncio.wait({asyncio.wrap_future(ear)}, timeout=seconds)
        finally:
            with self._mutex:
                rung, self._rung, self._ear = self._rung, False, None
                ear.cancel()
        return rung


async def in_store(
    store: Store,
    call: Callable[[], ResultT],
    undo: Callable[[ResultT | None], None],
    *,
    in_thread: bool = False,
) -> ResultT:
    """Return what a blocking call of the store's returns; on the loop where the store is quick.

    Who is cancelled does not wait for a thread: ``undo`` is called there with what comes of it, or
    with None if nothing does.
    """
    if not in_thread and store.quick():
        return call()
    under_way = threads.run(call)
    try:
        return await asyncio.wrap_future(under_way)
    except BaseException:
        under_way.add_done_callback(partial(_undo, undo))
        raise


def _undo(undo: Callable[[ResultT | None], None], ended: Future[ResultT]) -> None:
    undo(None if ended.cancelled() or ended.exception() else ended.result())


@dataclass(frozen=True, slots=True, eq=False)
class Slot:
    """A slot that one task of this process has; the next task gets another of these."""

    number: int
    lease: Lease


class Slots:
    """The slots of one name, as this process has them; everybody here shares one of these."""

    def __init__(self, store: Store, name: str) -> None:
        self._store = store
        self._name = name
        self._line = Line()
        self._bell = Bell()
        self._mutex = threading.RLock()
        #: Those in use here, by number. The journal is not asked about them: the lease of a store
        #: in memory runs out while its process lives.
        self._mine: dict[int, Slot] = {}
        #: Those of them that a task here gave back for another one to use.
        self._spare: list[Slot] = []
        self._waiting = 0
        self._thorough_again = 0.0

    async def take(self, most: int) -> Callable[[], None]:
        """Return, when one of ``most`` slots is ours, what gives it back; call it once or often."""
        with self._mutex:
            self._waiting += 1
        try:
            await self._line.be_first()
            try:
                slot = await self._search(most)
            finally:
                self._line.leave()
        finally:
            self._wait_no_more()
        return partial(self._give_back, slot)

    async def _search(self, most: int) -> Slot:
        search = _Search(self._store, self, most)
        pause, place, rung = _FIRST_PAUSE, search.place, True
        try:
            while (found := await search.look()) is None:
                only_we = self._has_all(most)
                # Though slots keep coming back here, others may have died meanwhile.
                if not only_we and (not rung or time.monotonic() > self._thorough_again):
                    found = await search.look_thoroughly()
                    self._thorough_again = 0.0 if found else time.monotonic() + _LAST_PAUSE
                if found is not None:
                    break
                if search.place != place:  # others move up soon, too
                    pause, place = _FIRST_PAUSE, search.place
                seconds = pause * random.uniform(0.75, 1.25)  # noqa: S311 - for jitter alone
                rung = await self._bell.heard(None if only_we else seconds)
                pause = min(pause * _PAUSE_GROWS_BY, _LAST_PAUSE)
            return found
        finally:
            search.end()

    def _has_all(self, most: int) -> bool:
        """Tell whether every slot is ours, so that only we can give one back."""
        return all(number in self._mine for number in range(most))

    def _give_back(self, slot: Slot) -> None:
        """Let another one have the slot; nothing happens the second time."""
        with self._mutex:
            if self._mine.get(slot.number) is not slot or slot in self._spare:
                return
            if self._waiting:
                self._spare.append(slot)
                self._bell.ring()
                return
        self.return_to_store([slot])

    def _wait_no_more(self) -> None:
        with self._mutex:
            self._waiting -= 1
            unwanted = [] if self._waiting else list(self._spare)
        self.return_to_store(unwanted)

    # --- for a search ---

    def lease_name(self, what: object) -> str:
        """Return the name of a slot's lease, or of a place in line."""
        return f"slot/{quote(self._name, safe='')}/{what}"

    def is_mine(self, number: int) -> bool:
        """Tell whether this process has the slot."""
        return number in self._mine

    def took(self, number: int, lease: Lease) -> Slot:
        """Note that the slot is ours."""
        slot = self._mine[number] = Slot(number, lease)
        return slot

    def spare(self) -> list[Slot]:
        """Return what was given back here, for another one here to use."""
        with self._mutex:
            return list(self._spare)

    def handed_on(self, slot: Slot) -> Slot | None:
        """Return a spare slot as the next one's; None if somebody was faster."""
        with self._mutex:
            if slot in self._spare:
                self._spare.remove(slot)
                return self.took(slot.number, slot.lease)
        return None

    def return_to_store(self, slots: list[Slot]) -> None:
        """Let all processes have the slots."""
        with self._mutex:
            self._spare = [slot for slot in self._spare if slot not in slots]
        if slots:
            release(self._store, [slot.lease for slot in slots], partial(self._returned, slots))

    def _returned(self, slots: list[Slot]) -> None:
        with self._mutex:
            for slot in slots:
                if self._mine.get(slot.number) is slot:
                    del self._mine[slot.number]
        self._bell.ring()


class _Search:
    """One task's search for a slot, and where it stands in the journal's line meanwhile."""

    def __init__(self, store: Store, slots: Slots, most: int) -> None:
        self._store = store
        self._slots = slots
        self._most = most
        #: Where it stands in line, and what proves it.
        self.place: int | None = None
        self._standing: Lease | None = None
        self._turn = 0

    async def look(self) -> Slot | None:
        """Return a slot that is free."""
        return await in_store(self._store, partial(self._look, thorough=False), self._undo)

    async def look_thoroughly(self) -> Slot | None:
        """Return a slot that is free, or whose holder is dead; or else, be in line for one.

        In a thread: the store waits a moment for a holder that is only late.
        """
        look = partial(self._look, thorough=True)
        return await in_store(self._store, look, self._undo, in_thread=True)

    def _undo(self, found: Slot | None) -> None:
        if found is not None:
            self._slots.return_to_store([found])
        self.end()

    def _look(self, *, thorough: bool) -> Slot | None:
        if not self._is_next(thorough=thorough):
            self._slots.return_to_store(self._slots.spare())
            return None
        found = self._spare_slot() or self._free_slot(thorough=thorough)
        if found is None and thorough and self.place is None:
            self._join_line()
        return found

    def _is_next(self, *, thorough: bool) -> bool:
        """Tell whether nobody comes before us, having moved up in the line if there is room."""
        if self.place is None:
            # The first two will do: who stands further back has moved up in a moment.
            if not any(self._is_held(_place(number)) for number in (0, 1)):
                return True
            if not thorough or not self._join_line():
                return False
        while thorough and self.place and self._stand(self.place - 1):
            pass
        return self.place == 0

    def _join_line(self) -> bool:
        """Stand behind the last one; or in the last place, whose holder may be dead."""
        held = [number for number in range(_PLACES) if self._is_held(_place(number))]
        return self._stand(min(max(held, default=-1) + 1, _PLACES - 1))

    def _stand(self, number: int) -> bool:
        lease = self._taken(_place(number))
        if lease is None:
            return False
        self.end()
        self.place, self._standing = number, lease
        return True

    def end(self) -> None:
        """Leave the line."""
        standing, self._standing, self.place = self._standing, None, None
        if standing is not None:
            release(self._store, [standing])

    def _spare_slot(self) -> Slot | None:
        for slot in self._slots.spare():
            stored = self._store.lease(slot.lease.name)
            # One that another process took over while this one hung is ours no more.
            is_ours = stored is not None and stored.fence == slot.lease.fence
            if is_ours and slot.number < self._most:
                return self._slots.handed_on(slot)
            self._slots.return_to_store([slot])
        return None

    def _free_slot(self, *, thorough: bool) -> Slot | None:
        for number in self._candidates(thorough=thorough):
            lease = self._taken(number)
            if lease is not None:
                return self._slots.took(number, lease)
        return None

    def _candidates(self, *, thorough: bool) -> Iterator[int]:
        """Yield the numbers of free slots, and some of those whose holders may be dead."""
        held = []
        for number in range(self._most):
            if self._slots.is_mine(number):
                continue
            if self._is_held(number):
                held.append(number)
            else:
                yield number
        if thorough and held:
            first = self._turn % len(held)
            self._turn += _TRIED_AT_ONCE
            yield from itertools.islice(held[first:] + held[:first], _TRIED_AT_ONCE)

    def _is_held(self, what: object) -> bool:
        return self._store.lease(self._slots.lease_name(what)) is not None

    def _taken(self, what: object) -> Lease | None:
        try:
            return self._store.take_lease(self._slots.lease_name(what))
        except RunHeldError:
            return None


def _place(number: int) -> str:
    return f"line/{number}"


def release(store: Store, leases: list[Lease], done: Callable[[], None] = lambda: None) -> None:
    """Give leases back, at once or, where that takes long, by a thread; then call ``done``."""
    if store.quick():
        try:
            _release(store, leases)
        except StoreBusyError:
            pass  # a thread has more patience
        else:
            done()
            return
    threads.run(partial(_release_patiently, store, leases, done))


def _release_patiently(store: Store, leases: list[Lease], done: Callable[[], None]) -> None:
    for _ in range(_PATIENCE):
        with contextlib.suppress(StoreBusyError):
            _release(store, leases)
            break
    done()


def _release(store: Store, leases: list[Lease]) -> None:
    for lease in leases:
        try:
            store.release_lease(lease)
        except StoreBusyError:
            raise
        except StorageError:
            return  # a store that failed or was closed holds nothing any more
