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
import os
import random
import threading
import time
import weakref
from collections import OrderedDict
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, TypeVar
from urllib.parse import quote

from maestro_hive.engine.rates import Moment, Rate, RateLog, Starts
from maestro_hive.engine.waits import Wait
from maestro_hive.kernel.errors import (
    CodecError,
    ConfigurationError,
    DocumentCorruptError,
    RunLeasedError,
    StorageError,
    StoreBusyError,
)
from maestro_hive.kernel.threads import threads
from maestro_hive.maestro.state import codec

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
_BUSY_TIMEOUT = 20


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
    if not in_thread and store.syncs_fast():
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
        return partial(self._release_probe, slot)

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
        """Return whether every slot is ours, so that only we can give one back."""
        return all(number in self._mine for number in range(most))

    def _release_probe(self, slot: Slot) -> None:
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
        """Return whether this process has the slot."""
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
        """Return whether nobody comes before us, having moved up in the line if there is room."""
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
        except RunLeasedError:
            return None


def _place(number: int) -> str:
    return f"line/{number}"


def release(store: Store, leases: list[Lease], done: Callable[[], None] = lambda: None) -> None:
    """Give leases back, at once or, where that takes long, by a thread; then call ``done``."""
    if store.syncs_fast():
        try:
            _release(store, leases)
        except StoreBusyError:
            pass  # a thread has more patience
        else:
            done()
            return
    threads.run(partial(_release_patiently, store, leases, done))


def _release_patiently(store: Store, leases: list[Lease], done: Callable[[], None]) -> None:
    for _ in range(_BUSY_TIMEOUT):
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


# --- limits ---


PartT = TypeVar("PartT")

NAMESPACE = "$limits"

#: What is counted begins a moment later, and a little more or less later each time. So stretches
#: are kept longer than asked for by this part of them, and by no more than these seconds.
_GRACE_PART = 0.02
_GRACE_MOST = 0.1
#: How often a beginning is counted anew because writing it down took too long: a slow disk stays so.
_COUNTED_ANEW = 3
#: Who waits for the same moment asks a little apart.
_JITTER_PART = 0.01
_JITTER_MOST = 0.02


class Limit:
    """So many attempts at once and so many in a stretch of time, for everybody on a store."""

    def __init__(
        self, store: Store, name: str, *, rate: Rate | None, max_concurrency: int | None
    ) -> None:
        if max_concurrency is not None and not _is_count(max_concurrency):
            raise ConfigurationError(
                f"max_concurrency of {name!r} is {max_concurrency!r}, and must be a whole number"
                " from 1 on, or None for as many as come"
            )
        self.name = name
        self.rate = rate
        self.max_concurrency = max_concurrency
        self._slots = _shared(_slots, Slots, store, name)
        self._gate = _shared(_gates, RateGate, store, name)

    async def enter(self, step: object = None) -> Callable[[], None]:
        """Return, when one more may begin, what is to be called when it has ended.

        It holds no thread while it waits, and may be cancelled at any moment. Begin right after
        it: the moment counts as the beginning. If the process dies, it has ended.
        """
        give_back = _nothing
        if self.max_concurrency is not None:
            give_back = await self._slots.take(self.max_concurrency)
        if self.rate is not None:
            try:
                await self._gate.begin(self.rate)
            except BaseException:
                give_back()
                raise
        return give_back


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _nothing() -> None:
    pass


class _Asked(NamedTuple):
    """When it was counted as begun; or, if it was not, how long to wait."""

    moment: float | None
    wait: float


class RateGate:
    """The beginnings of one name; in a process only the first in line asks the journal."""

    def __init__(self, store: Store, name: str) -> None:
        self._store = store
        self._name = name
        self._line = Line()

    async def begin(self, rate: Rate) -> None:
        """Return when one more may begin, having counted it."""
        await self._line.be_first()
        try:
            await self._begin(rate)
        finally:
            self._line.leave()

    async def _begin(self, rate: Rate) -> None:
        grace = min(rate.seconds * _GRACE_PART, _GRACE_MOST)
        padded = rate.padded(grace)
        late: float | None = None
        left = _COUNTED_ANEW
        while True:
            asked = await self._ask(padded, late)
            if asked.moment is None:
                late = None
                await self._rest(rate, asked.wait)
            elif left == 0 or self._store.clock.boot_seconds() - asked.moment <= grace / 2:
                return
            else:
                late = asked.moment
                left -= 1

    async def _rest(self, rate: Rate, seconds: float) -> None:
        jitter = random.uniform(0.1, 1) * min(rate.seconds * _JITTER_PART, _JITTER_MOST)  # noqa: S311
        clock = self._store.clock
        await Wait.begin(clock, seconds + jitter).over(clock)

    async def _ask(self, rate: Rate, late: float | None) -> _Asked:
        """Count one more as begun now, if it may begin; ``late`` is when it was counted before."""

        def undo(asked: _Asked | None) -> None:
            counted = asked.moment if asked is not None else late
            if counted is not None:
                self._forget(rate, counted)

        return await in_store(self._store, lambda: self._count(rate, late), undo)

    def _count(self, rate: Rate, late: float | None) -> _Asked:
        asked = _Asked(None, 0.0)

        def change(before: bytes | None) -> codec.Encoded:
            nonlocal asked
            now = self._now()
            log = self._read(before)
            began = Starts() if log is None else log.on_clock_of(now)
            if late is not None:
                began = began.without_one(rate, late)
            wait = began.wait(rate, now.boot_seconds)
            if not wait:
                asked = _Asked(now.boot_seconds, 0.0)
                began = began.with_one(rate, now.boot_seconds)
            elif log is not None and log.is_of(now) and late is None:
                raise _FullError(wait)
            else:
                asked = _Asked(None, wait)
            return self._written(now, began)

        try:
            self._store.update_document(NAMESPACE, self._name, change)
        except _FullError as full:
            return _Asked(None, full.wait)
        return asked

    def _forget(self, rate: Rate, counted: float) -> None:
        """Let a beginning that was counted, and then cancelled, not count."""

        def change(before: bytes | None) -> codec.Encoded | None:
            now = self._now()
            log = self._read(before)
            if log is None:
                return None
            return self._written(now, log.on_clock_of(now).without_one(rate, counted))

        try:
            self._store.update_document(NAMESPACE, self._name, change)
        except StorageError:
            return  # it counts then: one less begins, and never one too many

    def _now(self) -> Moment:
        clock = self._store.clock
        return Moment(
            boot=clock.boot_id(),
            boot_seconds=clock.boot_seconds(),
            wall_seconds=clock.now().timestamp(),
        )

    def _read(self, value: bytes | None) -> RateLog | None:
        if value is None:
            return None
        where = f"{NAMESPACE}/{self._name}"
        try:
            return RateLog.from_json(codec.decode(value, where))
        except (CodecError, KeyError, TypeError, ValueError) as error:
            raise DocumentCorruptError(where, f"it is no log of beginnings ({error})") from error

    def _written(self, now: Moment, began: Starts) -> codec.Encoded:
        log = RateLog(written=now, beginnings=began)
        return codec.encode(log.to_json(), f"{NAMESPACE}/{self._name}")


class _FullError(Exception):
    """Raised inside a transaction that has nothing to write."""

    def __init__(self, wait: float) -> None:
        super().__init__()
        self.wait = wait


# --- one for all in this process -----------------------------------------------------------------

_mutex = threading.RLock()
_slots: weakref.WeakKeyDictionary[Store, weakref.WeakValueDictionary[str, Slots]] = (
    weakref.WeakKeyDictionary()
)
_gates: weakref.WeakKeyDictionary[Store, weakref.WeakValueDictionary[str, RateGate]] = (
    weakref.WeakKeyDictionary()
)


def _shared(
    known: weakref.WeakKeyDictionary[Store, weakref.WeakValueDictionary[str, PartT]],
    make: Callable[[Store, str], PartT],
    store: Store,
    name: str,
) -> PartT:
    """Return the part that everybody in this process uses for that store and name."""
    with _mutex:
        by_name = known.setdefault(store, weakref.WeakValueDictionary())
        part = by_name.get(name)
        if part is None:
            part = by_name[name] = make(store, name)
        return part


def _forget_in_child() -> None:
    global _mutex  # noqa: PLW0603 - a thread that is not in the child may have held it
    _mutex = threading.RLock()
    _slots.clear()
    _gates.clear()


os.register_at_fork(after_in_child=_forget_in_child)
