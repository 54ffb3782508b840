"""Limits that all processes on a store share: a semaphore, a rate limit, and both for one step.

A permit of a semaphore is a lease of the store, ``semaphore/NAME/NUMBER``. It is released with its
process, however that ends, and by a process that hangs when the lease expires.

In one process tasks are served first come, first served; only the first of them asks the store, and
while no other process waits, a permit goes from task to task without a write. Among processes there
is one more lease, ``semaphore/NAME/next``: its holder has the next permit that is released, and the
others return to the store what their tasks release, and try to be next, with pauses and jitter. So
a process with a thousand tasks leaves permits to one with a single task.

The starts under a rate limit are a document of the store, changed in one transaction.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
import time
from collections import OrderedDict
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import quote

from maestro_hive.engine import settings, values
from maestro_hive.engine.rates import Counted, Moment, Rate, RateLog, count_start
from maestro_hive.engine.shared import shared
from maestro_hive.kernel.clock import Wait
from maestro_hive.kernel.errors import (
    CodecError,
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

#: The documents of rate limits.
NAMESPACE = "$limits"

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

#: What is counted starts a moment later, and a little more or less later each time. So windows are
#: longer than configured by this part of them, and by no more than these seconds.
_GRACE_PART = 0.02
_GRACE_MAX = 0.1
#: How often a start is counted again because writing it took too long: a slow disk stays slow.
_RECOUNTS = 3
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

    async def enter(self, step: object) -> Callable[[], None] | None:
        """Return when one more may start, with what is to be called when it has ended, if anything.

        It holds no thread while it waits, and may be cancelled at any moment. Start right after
        it: the moment counts as the start. If the process dies, it has ended.
        """
        del step  # the limit is the same for every call
        release = None
        if self.max_concurrency is not None:
            release = await self._semaphore.acquire(self.max_concurrency)
        if self.rate is not None:
            try:
                await self._rate_limit.acquire(self.rate)
            except BaseException:
                if release is not None:
                    release()
                raise
        return release


class _Queue:
    """Tasks of this process, of any event loop: the first to come is inside until it leaves."""

    def __init__(self) -> None:
        self._mutex = threading.RLock()
        self._turns: OrderedDict[Future[None], None] = OrderedDict()
        self._occupied = False

    async def __aenter__(self) -> None:
        with self._mutex:
            if not self._occupied:
                self._occupied = True
                return
            turn: Future[None] = Future()
            self._turns[turn] = None
        try:
            await asyncio.wrap_future(turn)
        except BaseException:
            with self._mutex:
                self._turns.pop(turn, None)
                has_turn = not turn.cancel()
            if has_turn:  # it was given at the very moment of the cancellation
                self._leave()
            raise

    async def __aexit__(self, *_: object) -> None:
        self._leave()

    def _leave(self) -> None:
        with self._mutex:
            while self._turns:
                turn, _ = self._turns.popitem(last=False)
                if turn.set_running_or_notify_cancel():
                    turn.set_result(None)
                    return
            self._occupied = False


# --- so many at once -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class _Permit:
    """A permit that one task of this process has; the next task gets another of these objects."""

    number: int
    lease: Lease


class Semaphore:
    """So many at once under one name, over all processes on a store; one object per process."""

    def __init__(self, store: Store, name: str) -> None:
        self._store = store
        self._prefix = f"semaphore/{quote(name, safe='')}"
        self._queue = _Queue()
        self._mutex = threading.RLock()
        #: The permits of this process, by number; None while one is being returned to the store.
        #: The store is not asked about them: a lease in memory expires while its process lives.
        self._held: dict[int, _Permit | None] = {}
        #: Those of them that a task has released and another task of this process may use.
        self._idle: list[_Permit] = []
        self._waiting = 0
        #: The lease that makes this process the next one to get a permit.
        self._next: Lease | None = None
        self._takeover_at = 0.0
        #: How often a permit was released here, and how to wake the task that waits for it.
        self._releases = 0
        self._wake: Callable[[], object] = _nothing

    async def acquire(self, count: int) -> Callable[[], None]:
        """Return when one of ``count`` permits is this task's, with what releases it.

        That may be called from any thread, at any time, and more than once.
        """
        with self._mutex:
            self._waiting += 1
        try:
            async with self._queue:
                permit = await self._search(count)
        finally:
            with self._mutex:
                self._waiting -= 1
                unused = [] if self._waiting else list(self._idle)
            self._return(unused)
        return partial(self._release, permit)

    def _release(self, permit: _Permit) -> None:
        """Give the permit to the next task here, or to all processes; only the first time."""
        with self._mutex:
            if self._held.get(permit.number) is not permit or permit in self._idle:
                return
            if self._waiting:
                self._idle.append(permit)
                self._notify()
                return
        self._return([permit])

    # --- the first task in the queue ---

    async def _search(self, count: int) -> _Permit:
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

    async def _find(self, count: int, *, claim: bool) -> _Permit | None:
        look = partial(self._look, count, claim=claim)
        found = await _in_store(self._store, look, self._undo)
        if found is None and not self._has_all(count) and time.monotonic() >= self._takeover_at:
            # In a thread: the store waits a moment for a holder that is only late to renew.
            look = partial(look, takeover=True)
            found = await _in_store(self._store, look, self._undo, in_thread=True)
            # A holder that died may have had more of them.
            self._takeover_at = 0.0 if found else time.monotonic() + _TAKEOVER_SECONDS
        return found

    def _undo(self, found: _Permit | None) -> None:
        if found is not None:
            self._release(found)
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

    def _look(self, count: int, *, claim: bool, takeover: bool = False) -> _Permit | None:
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

    def _reuse(self, count: int) -> _Permit | None:
        """Return a permit that a task here released."""
        for permit in list(self._idle):
            stored = self._store.lease(permit.lease.name)
            # Another process may have taken it over while this one was stopped.
            is_ours = stored is not None and stored.fence == permit.lease.fence
            with self._mutex:
                if is_ours and permit.number < count and permit in self._idle:
                    self._idle.remove(permit)
                    return self._hold(permit.number, permit.lease)
            self._return([permit])
        return None

    def _take(self, count: int, *, takeover: bool) -> _Permit | None:
        for number in self._candidates(count, takeover=takeover):
            lease = self._try(number)
            if lease is not None:
                return self._hold(number, lease)
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

    def _hold(self, number: int, lease: Lease) -> _Permit:
        permit = self._held[number] = _Permit(number, lease)
        return permit

    def _try(self, what: object) -> Lease | None:
        try:
            return self._store.take_lease(self._name(what))
        except RunLeasedError:
            return None

    def _name(self, what: object) -> str:
        return f"{self._prefix}/{what}"

    def _return(self, permits: list[_Permit]) -> None:
        """Let all processes have those of the permits that no task has."""
        with self._mutex:
            permits = [each for each in permits if self._held.get(each.number) is each]
            self._held.update((each.number, None) for each in permits)
            self._idle = [each for each in self._idle if each not in permits]
        if permits:
            leases = [each.lease for each in permits]
            _release(self._store, leases, partial(self._returned, permits))

    def _returned(self, permits: list[_Permit]) -> None:
        with self._mutex:
            for each in permits:
                del self._held[each.number]
        self._notify()

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


class _FullError(Exception):
    """Raised inside a transaction that has nothing to write."""


class RateLimit:
    """So many starts in any window under one name, over all processes on a store."""

    def __init__(self, store: Store, name: str) -> None:
        self._store = store
        self._name = name
        self._queue = _Queue()

    async def acquire(self, rate: Rate) -> None:
        """Return when one more may start, having counted it."""
        async with self._queue:
            await self._start(rate)

    async def _start(self, rate: Rate) -> None:
        grace = min(rate.seconds * _GRACE_PART, _GRACE_MAX)
        padded = rate.padded(grace)
        late: float | None = None
        recounts = _RECOUNTS
        while True:
            counted = await self._ask(padded, late)
            if counted.at is None:
                late = None
                await self._sleep(rate, counted.wait)
            elif not recounts or self._store.clock.boot_seconds() - counted.at <= grace / 2:
                return
            else:
                late = counted.at
                recounts -= 1

    async def _sleep(self, rate: Rate, seconds: float) -> None:
        jitter = _jitter.uniform(0.1, 1) * min(rate.seconds * _JITTER_PART, _JITTER_MAX)
        clock = self._store.clock
        await Wait.start(clock, seconds + jitter).finished(clock)

    async def _ask(self, rate: Rate, late: float | None) -> Counted:
        """Count one more start, if the rate allows it; ``late`` is when it was counted before."""

        def undo(counted: Counted | None) -> None:
            at = late if counted is None else counted.at
            if at is not None:
                self._forget(rate, at)

        return await _in_store(self._store, lambda: self._count(rate, late), undo)

    def _count(self, rate: Rate, late: float | None) -> Counted:
        counted = Counted(at=None, wait=0.0, log=None)

        def change(before: bytes | None) -> codec.Encoded:
            nonlocal counted
            counted = count_start(self._read(before), rate, self._now(), late)
            if counted.log is None:
                raise _FullError
            return self._encode(counted.log)

        with contextlib.suppress(_FullError):
            self._store.update_document(NAMESPACE, self._name, change)
        return counted

    def _forget(self, rate: Rate, at: float) -> None:
        """Remove a start that was counted, and then cancelled."""

        def change(before: bytes | None) -> codec.Encoded | None:
            log = self._read(before)
            return self._encode(log.without_one(rate, self._now(), at)) if log else None

        # If that fails it counts: one start less, and never one too many.
        with contextlib.suppress(StorageError):
            self._store.update_document(NAMESPACE, self._name, change)

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
            raise DocumentCorruptError(where, f"it is no log of starts ({error})") from error

    def _encode(self, log: RateLog) -> codec.Encoded:
        return codec.encode(log.to_json(), f"{NAMESPACE}/{self._name}")
