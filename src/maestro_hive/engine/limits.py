"""Limits that all processes on a store share: a semaphore, a rate limit, and both for one step.

A permit of a semaphore is a lease of the store, ``semaphore/NAME/NUMBER``. It is released with its
process, however that ends, and by a process that hangs when the lease expires.

In one process tasks are served first come, first served; only the first of them asks the store, and
while no other process waits, a permit goes from task to task without a write. Among processes there
is one more lease, ``semaphore/NAME/next``: its holder has the next permit that is released, and the
others return to the store what their tasks release, and try to be next, with pauses and jitter. So
a process with a thousand tasks leaves permits to one with a single task.

A permit belongs to a body until that has really ended. A thread that goes on when its attempt is over
keeps it, and so do the end of its run and the closing of its hive: it is released by the thread's
end, or by the death of the process.

The starts under a rate limit are a document of the store, changed in one transaction. A start is
counted as late as it may be: some time ahead, for what is to be done before the body is called. One
that is later still is not called, and counted again. So what is counted is the call of the body.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
import time
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from maestro_hive.engine import settings, values
from maestro_hive.engine.rates import Counted, Rate, RateLog, Starts, count_start
from maestro_hive.engine.shared import shared
from maestro_hive.kernel.clock import Moment, Wait
from maestro_hive.kernel.errors import RunLeasedError, StorageError, StoreBusyError
from maestro_hive.kernel.process import threads
from maestro_hive.maestro.state.records import permit_lease
from maestro_hive.maestro.state.shared_records import SharedRecords
from maestro_hive.maestro.state.stores import close_store, share_store

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from maestro_hive.maestro.state.codec import Json
    from maestro_hive.maestro.state.records import Lease
    from maestro_hive.maestro.state.store import Store

ResultT = TypeVar("ResultT")

#: The recent starts under each rate limit.
RATE_LOGS = SharedRecords("$limits", RateLog.to_json, RateLog.from_json)

#: The pauses of the process that is next. They grow: a permit is unused for a tenth of the time that
#: was waited anyway.
_FIRST_POLL = 0.005
_LAST_POLL = 0.1
_POLL_GROWTH = 1.1
#: The pauses of those that try to be next. They shrink: who has waited longest tries most often.
_FIRST_CLAIM = 0.1
_LAST_CLAIM = 0.02
_CLAIM_GROWTH = 0.9
#: How often leases that others hold are tried, since their holders may have died; and how many.
_TAKEOVER_SECONDS = 0.2
_TAKEOVERS = 8
#: How often a release is tried while the store is busy, each time for as long as the store waits.
_RELEASE_ATTEMPTS = 20

#: How long after it was counted a body may be called: a part of the window, and these seconds at
#: least and at most. A start that is late is given twice as long; so are the next ones where twice is
#: not enough, and it shrinks by so much with each of them.
_AHEAD_PART = 0.025
_AHEAD_MIN = 0.005
_AHEAD_MAX = 0.1
_AHEAD_SHRINKS = 0.95
#: How long the call itself may take, from the last look at the clock to the body's first line.
_CALL_PART = 0.025
_CALL_MIN = 0.005
_CALL_MAX = 0.1
#: Processes that wait for the same moment ask a little apart.
_JITTER_PART = 0.01
_JITTER_MAX = 0.02
_jitter = random.SystemRandom()  # which forked processes do not share


class Limit:
    """At most so many attempts at once, and so many starts in any window: a stage of a step."""

    def __init__(
        self, store: Store, name: str, *, rate: Rate | None, max_concurrency: int | None
    ) -> None:
        settings.optional(settings.whole(1))(f"max_concurrency of {name!r}", max_concurrency)
        self.name = name
        self.rate = rate
        self.max_concurrency = max_concurrency
        self._semaphore = shared(store, Semaphore, name, Semaphore)
        self._rate_limit = shared(store, RateLimit, name, RateLimit)

    async def enter(self, step: object) -> Entered | None:
        """Return when one more may start, with what holds its place; None if nothing is limited.

        It holds no thread while it waits, and may be cancelled at any moment. If the process dies,
        what has entered has ended.
        """
        del step  # the limit is the same for every call
        permit = start = None
        if self.max_concurrency is not None:
            permit = await self._semaphore.acquire(self.max_concurrency)
        if self.rate is not None:
            try:
                start = await self._rate_limit.acquire(self.rate)
            except BaseException:
                if permit is not None:
                    permit.release()
                raise
        return None if permit is None and start is None else Entered(permit, start)


class Entered:
    """One that has entered a limit: its permit and its counted start, as far as it needs them."""

    def __init__(self, permit: Permit | None, start: CountedStart | None) -> None:
        self._permit = permit
        self._start = start

    def is_current(self) -> bool:
        """Return whether its body may be called this very moment."""
        permit, start = self._permit, self._start
        return (permit is None or permit.is_current()) and (start is None or start.is_current())

    async def renew(self) -> None:
        """Return when its body may be called after all: a process may have been stopped for long."""
        if self._permit is not None and not self._permit.is_current():
            self._permit = await self._permit.renewed()
        if self._start is not None and not self._start.is_current():
            self._start = await self._start.renewed()

    def leave(self) -> None:
        """Note that its body has ended; from any thread, at any time, and more than once."""
        if self._permit is not None:
            self._permit.release()

    async def withdraw(self) -> None:
        """Give its place back: its body is not called."""
        self.leave()
        if self._start is not None:
            await self._start.withdraw()

    def outlive(self) -> Json:
        """Let the permit be held by a body that goes on; return by what lease, for people to see."""
        return None if self._permit is None else self._permit.outlive()


class _Queue:
    """Tasks of this process, of any event loop: the first to come is inside until it leaves."""

    def __init__(self) -> None:
        self._mutex = threading.RLock()
        self._turns: deque[Future[None]] = deque()
        self._occupied = False

    async def __aenter__(self) -> None:
        with self._mutex:
            if not self._occupied:
                self._occupied = True
                return
            turn: Future[None] = Future()
            self._turns.append(turn)
        try:
            await asyncio.wrap_future(turn)
        except BaseException:
            if not turn.cancel():  # it was given at the very moment of the cancellation
                self._leave()
            raise

    async def __aexit__(self, *_: object) -> None:
        self._leave()

    def _leave(self) -> None:
        with self._mutex:
            while self._turns:
                turn = self._turns.popleft()
                if turn.set_running_or_notify_cancel():
                    turn.set_result(None)
                    return
            self._occupied = False


# --- so many at once -----------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class Permit:
    """A permit that one task of this process has; the next task gets another of these objects."""

    semaphore: Semaphore
    number: int
    #: As it was last read: until it expires, no other process can take it over.
    lease: Lease
    #: Of how many permits it is one.
    count: int
    #: Whether a body holds it that goes on after its attempt; and then has the store open.
    outlives: bool = False
    opened: bool = False

    def is_current(self) -> bool:
        """Return whether it is certain that no other process has it by now."""
        return self.semaphore.clock.awake_seconds() < self.lease.expires

    async def renewed(self) -> Permit:
        """Return it if it is still this task's, or when another one is."""
        return await self.semaphore.renewed(self)

    def release(self) -> None:
        """Let the next one have it; from any thread, at any time, and more than once."""
        self.semaphore.release(self)

    def outlive(self) -> Json:
        """Keep it until its body ends, even if the run and the hive end before; return its lease."""
        self.semaphore.let_outlive(self)
        lease = self.lease
        return {"lease": lease.name, "fence": lease.fence, "holder": lease.holder.id}


class Semaphore:
    """So many at once under one name, over all processes on a store; one object per process."""

    def __init__(self, store: Store, name: str) -> None:
        self._store = store
        self.clock = store.clock
        self._name = partial(permit_lease, name)
        self._queue = _Queue()
        self._mutex = threading.RLock()
        #: The permits of this process, by number; None while one is being returned to the store.
        #: The store is not asked about them: a lease in memory expires while its process lives.
        self._held: dict[int, Permit | None] = {}
        #: Those of them that a task has released and another task of this process may use.
        self._idle: list[Permit] = []
        self._waiting = 0
        #: The lease that makes this process the next one to get a permit.
        self._next: Lease | None = None
        self._takeover_at = 0.0
        #: How often a permit was released here, and how to wake the task that waits for it.
        self._releases = 0
        self._wake: Callable[[], object] = _nothing

    async def acquire(self, count: int) -> Permit:
        """Return when one of ``count`` permits is this task's; it is to be released."""
        with self._mutex:
            self._waiting += 1
        try:
            async with self._queue:
                return await self._search(count)
        finally:
            with self._mutex:
                self._waiting -= 1
                unused = [] if self._waiting else list(self._idle)
            self._return(unused)

    def release(self, permit: Permit) -> None:
        """Give the permit to the next task here, or to all processes; only the first time."""
        with self._mutex:
            if self._held.get(permit.number) is not permit or permit in self._idle:
                return
            # One that was held by a body after its attempt is known by its lease: that has to end.
            if self._waiting and not permit.outlives:
                self._idle.append(permit)
                self._notify()
                return
        self._return([permit])

    async def renewed(self, permit: Permit) -> Permit:
        """Return a permit that is still this task's, or when another one is."""
        extend = partial(self._extend, permit)
        if await _in_store(self._store, extend, lambda _: None):
            return permit
        self.release(permit)
        return await self.acquire(permit.count)

    def let_outlive(self, permit: Permit) -> None:
        """Let a permit be held until its body ends: by a store that is open and renews its lease."""
        if not permit.outlives:
            permit.outlives = True
            permit.opened = share_store(self._store)
            self._store.retain_lease(permit.lease)

    # --- the first task in the queue ---

    async def _search(self, count: int) -> Permit:
        poll, pause = _FIRST_POLL, _FIRST_CLAIM
        claim = not self._held  # a process that has a permit already leaves others a pause to claim
        try:
            while True:
                seen = self._releases
                found = await self._find(count, claim=claim)
                if found is not None:
                    return found
                seconds = _jitter.uniform(0.75, 1.25) * (poll if self._next else pause)
                # Where every permit is held here, no other process can release one.
                if not await self._released(seen, None if self._has_all(count) else seconds):
                    claim = True
                if self._next:
                    poll = min(poll * _POLL_GROWTH, _LAST_POLL)
                else:
                    pause = max(pause * _CLAIM_GROWTH, _LAST_CLAIM)
        finally:
            self._release_next()

    async def _find(self, count: int, *, claim: bool) -> Permit | None:
        look = partial(self._look, count, claim=claim)
        found = await _in_store(self._store, look, self._undo)
        if found is None and not self._has_all(count) and time.monotonic() >= self._takeover_at:
            # In a thread: the store waits a moment for a holder that is only late to renew.
            look = partial(look, takeover=True)
            found = await _in_store(self._store, look, self._undo, in_thread=True)
            # A holder that died may have had more of them.
            self._takeover_at = 0.0 if found else time.monotonic() + _TAKEOVER_SECONDS
        return found

    def _undo(self, found: Permit | None) -> None:
        if found is not None:
            self.release(found)
        self._release_next()

    def _has_all(self, count: int) -> bool:
        return all(number in self._held for number in range(count))

    async def _released(self, seen: int, seconds: float | None) -> bool:
        """Return True when a permit was released here since ``seen``; False after the seconds."""
        released = asyncio.Event()
        with self._mutex:
            if self._releases != seen:
                return True
            self._wake = partial(asyncio.get_running_loop().call_soon_threadsafe, released.set)
        try:
            async with asyncio.timeout(seconds):
                return await released.wait()
        except TimeoutError:
            return False
        finally:
            self._wake = _nothing

    def _notify(self) -> None:
        with self._mutex, contextlib.suppress(RuntimeError):  # its loop was closed
            self._releases += 1
            self._wake()

    # --- in the store ---

    def _look(self, count: int, *, claim: bool, takeover: bool = False) -> Permit | None:
        """Return a permit, unless another process is next; if there is none, ``claim`` to be next.

        ``takeover`` also tries leases whose holders may be dead.
        """
        if self._next is None and self._store.lease(self._name("next")) is not None:
            if takeover:
                self._next = self._try("next")
            if self._next is None:
                self._return(list(self._idle))
                return None
        found = self._reuse(count) or self._take(count, takeover=takeover)
        if found is None and claim and self._next is None and not self._has_all(count):
            self._next = self._try("next")
        return found

    def _reuse(self, count: int) -> Permit | None:
        """Return a permit that a task here released."""
        for permit in list(self._idle):
            stored = self._store.lease(permit.lease.name)
            # Another process may have taken it over while this one was stopped.
            is_ours = stored is not None and stored.fence == permit.lease.fence
            with self._mutex:
                if is_ours and permit.number < count and permit in self._idle:
                    self._idle.remove(permit)
                    return self._hold(permit.number, stored or permit.lease, count)
            self._return([permit])
        return None

    def _take(self, count: int, *, takeover: bool) -> Permit | None:
        for number in self._candidates(count, takeover=takeover):
            lease = self._try(number)
            if lease is not None:
                return self._hold(number, lease, count)
        return None

    def _candidates(self, count: int, *, takeover: bool) -> Iterator[int]:
        """Yield the numbers of free permits, then one of each of the other holders."""
        others: dict[str, int] = {}
        for number in range(count):
            if number in self._held:
                continue
            lease = self._store.lease(self._name(number))
            if lease is None:
                yield number
            else:
                others[lease.holder.id] = number
        if takeover:
            yield from _jitter.sample(list(others.values()), min(len(others), _TAKEOVERS))

    def _hold(self, number: int, lease: Lease, count: int) -> Permit:
        permit = self._held[number] = Permit(self, number, lease, count)
        return permit

    def _extend(self, permit: Permit) -> bool:
        """Return whether the lease is still this process's, and will be for a while."""
        self._store.renew_leases()
        stored = self._store.lease(permit.lease.name)
        if stored is None or stored.fence != permit.lease.fence:
            return False
        permit.lease = stored
        return True

    def _try(self, what: object) -> Lease | None:
        try:
            return self._store.take_lease(self._name(what))
        except RunLeasedError:
            return None

    def _return(self, permits: list[Permit]) -> None:
        """Let all processes have those of the permits that no task has."""
        with self._mutex:
            permits = [each for each in permits if self._held.get(each.number) is each]
            self._held.update((each.number, None) for each in permits)
            self._idle = [each for each in self._idle if each not in permits]
        if permits:
            leases = [each.lease for each in permits]
            _release(self._store, leases, partial(self._returned, permits))

    def _returned(self, permits: list[Permit]) -> None:
        with self._mutex:
            for each in permits:
                del self._held[each.number]
        self._notify()
        for each in permits:
            if each.opened:
                close_store(self._store)

    def _release_next(self) -> None:
        with self._mutex:
            lease, self._next = self._next, None
        if lease is not None:
            _release(self._store, [lease])


def _nothing() -> None:
    pass


async def _in_store(
    store: Store,
    call: Callable[[], ResultT],
    undo: Callable[[ResultT | None], None],
    *,
    in_thread: bool = False,
) -> ResultT:
    """Return what a blocking call of the store returns; made on the loop where the store is quick."""
    if not in_thread and store.syncs_fast():
        return call()
    return await values.in_thread(call, undo)


def _release(store: Store, leases: list[Lease], done: Callable[[], None] = _nothing) -> None:
    """Release leases, at once or, where that takes long, in a thread; then call ``done``."""

    def release(attempts: int) -> bool:
        for _ in range(attempts):
            try:
                for lease in leases:
                    store.release_lease(lease)
            except StoreBusyError:
                continue
            except StorageError:
                pass  # a store that failed or was closed holds nothing any more
            return True
        return False

    def release_in_thread() -> None:
        release(_RELEASE_ATTEMPTS)
        done()

    if store.syncs_fast() and release(1):
        done()
    else:
        threads.run(release_in_thread)


# --- so many in any window -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CountedStart:
    """A start that is counted, and may be made until a moment of the boot-time clock."""

    limit: RateLimit
    rate: Rate
    at: float
    until: float
    #: How many times longer than usual it was given to be called.
    slowness: float

    def is_current(self) -> bool:
        """Return whether the body may be called this very moment."""
        return self.limit.clock.boot_seconds() <= self.until

    async def renewed(self) -> CountedStart:
        """Return when it may be made after all, counted again."""
        return await self.limit.count_again(self)

    async def withdraw(self) -> None:
        """Count it no more: it is not made."""
        await self.limit.withdraw(self)


class RateLimit:
    """So many starts in any window under one name, over all processes on a store."""

    def __init__(self, store: Store, name: str) -> None:
        self._store = store
        self.clock = store.clock
        self._name = name
        self._queue = _Queue()
        #: How many times longer than usual it takes, on this machine at present, to call a body.
        self._slowness = 1.0

    async def acquire(self, rate: Rate) -> CountedStart:
        """Return when one more may start, having counted it."""
        async with self._queue:
            self._slowness = max(1.0, self._slowness * _AHEAD_SHRINKS)
            return await self._start(rate, self._slowness)

    async def count_again(self, late: CountedStart) -> CountedStart:
        """Return when one that was too late may start; it still has its turn."""
        # One that is late by itself, as in a process that was stopped, says nothing about the next.
        self._slowness = max(self._slowness, late.slowness)
        return await self._start(late.rate, late.slowness * 2, late.at)

    async def withdraw(self, counted: CountedStart) -> None:
        """Let another one start instead of one that was counted."""
        forget = partial(self._forget, counted.rate, counted.at)
        await _in_store(self._store, forget, lambda _: None)

    async def _start(self, rate: Rate, slowness: float, late: float | None = None) -> CountedStart:
        call = _part(rate, _CALL_PART, _CALL_MIN, _CALL_MAX)
        ahead = call + _part(rate, _AHEAD_PART, _AHEAD_MIN, _AHEAD_MAX) * slowness
        while True:
            counted = await self._ask(rate, ahead, late)
            if counted.at is not None:
                return CountedStart(self, rate, counted.at, counted.at - call, slowness)
            late = None
            await self._sleep(rate, counted.wait)

    async def _sleep(self, rate: Rate, seconds: float) -> None:
        jitter = _jitter.uniform(0.1, 1) * min(rate.seconds * _JITTER_PART, _JITTER_MAX)
        await Wait.start(self.clock, seconds + jitter).finished(self.clock)

    async def _ask(self, rate: Rate, ahead: float, late: float | None) -> Counted:
        """Count one more start, if the rate allows it; ``late`` is when it was counted before."""

        def undo(counted: Counted | None) -> None:
            at = late if counted is None else counted.at
            if at is not None:
                self._forget(rate, at)

        return await _in_store(self._store, lambda: self._count(rate, ahead, late), undo)

    def _count(self, rate: Rate, ahead: float, late: float | None) -> Counted:
        counted: list[Counted] = []

        def change(log: RateLog | None) -> RateLog:
            counted[:] = [count_start(log, rate, Moment.of(self.clock), ahead, late)]
            return counted[0].log

        RATE_LOGS.update(self._store, self._name, change)
        return counted[0]

    def _forget(self, rate: Rate, at: float) -> None:
        """Remove a start that was counted, and then cancelled."""

        def change(log: RateLog | None) -> RateLog:
            now = Moment.of(self.clock)
            return (log or RateLog(written=now, starts=Starts())).without_one(rate, now, at)

        # If that fails it counts: one start less, and never one too many.
        with contextlib.suppress(StorageError):
            RATE_LOGS.update(self._store, self._name, change)


def _part(rate: Rate, part: float, least: float, most: float) -> float:
    """Return a part of the window, within limits."""
    return min(max(rate.seconds * part, least), most)
