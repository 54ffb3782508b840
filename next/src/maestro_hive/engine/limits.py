"""Limits that all processes share: a semaphore and a rate, claimed with the start of an attempt.

A permit of a semaphore is a hold of an account. It belongs to a body until that has really ended: a
thread that goes on after its attempt keeps the permit, and the next admission releases those of
dead processes. The recent starts under a rate are a document.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from maestro_hive.engine.attempt import Stage
from maestro_hive.engine.rates import Rate, Starts
from maestro_hive.journal.effects import Change, Hold, Scope, Settle
from maestro_hive.kernel.errors import MaestroError, NoRoomError, RefusedError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from maestro_hive.engine.attempt import Attempt
    from maestro_hive.journal.effects import Effect, Held
    from maestro_hive.journal.store import Store

NAMESPACE = "rates"
_POLL_SECONDS = 0.02
#: How often those that wait look for dead holders.
_RECOVER_SECONDS = 0.25
#: A body is called at most so long after its start is counted: a part of the window, and seconds.
_AHEAD_PART, _AHEAD_SECONDS = 0.025, 0.02


class ConcurrencyStage(Stage):
    """At most a number of attempts at once."""

    def __init__(self, name: str, most: int, store: Store) -> None:
        self._account, self._store = f"limit/{name}", store
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._recovered_at = 0.0
        if store.account(self._account)[2] != most:
            store.define_account(self._account, most)

    def enter(self, attempt: Attempt) -> Sequence[Effect]:
        """Return the claim of a permit."""
        return (Hold(attempt.hold, self._account, 1),)

    def leave(self, attempt: Attempt) -> Sequence[Effect]:
        """Return the permit, or have its thread return it."""
        settle = Settle(attempt.hold, self._account)
        if attempt.thread is not None and not attempt.thread.done():  # it goes on
            late = partial(self._settle_late, settle, attempt.journal.lease)
            attempt.thread.add_done_callback(lambda _: late())
            return ()
        self._wake()
        return (settle,)

    def _settle_late(self, settle: Settle, run: Held) -> None:
        """Return the permit of a thread that has ended, whoever holds its run by now."""
        store = self._store
        with suppress(MaestroError):  # of a store that was closed: the hold ended with it
            store.db.write(lambda tx: settle.apply(store.scope(tx), run), sync=False)
        self._wake()

    def _wake(self) -> None:
        """Wake the call that has waited longest, of this process."""
        while self._waiting:
            with suppress(IndexError, RuntimeError):  # taken by another thread; its loop was closed
                waiter = self._waiting.popleft()
                waiter.get_loop().call_soon_threadsafe(_finish, waiter)
                return

    async def refused(self, attempt: Attempt, refusal: RefusedError) -> None:
        """Wait for a permit of this process, or for a moment; the later it came, the longer."""
        if not isinstance(refusal, NoRoomError) or refusal.account != self._account:
            return
        now = self._store.now()
        if now - self._recovered_at > _RECOVER_SECONDS:
            self._recovered_at = now
            self._store.recover()
        waiter = asyncio.get_running_loop().create_future()
        self._waiting.append(waiter)
        seconds = _POLL_SECONDS * len(self._waiting) * random.uniform(0.5, 1.5)  # noqa: S311
        try:
            async with asyncio.timeout(seconds):
                await waiter
        except TimeoutError:
            pass
        finally:
            if waiter in self._waiting:
                self._waiting.remove(waiter)


def _finish(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


class RateReachedError(RefusedError):
    """A rate admits no start now, but in ``seconds``."""

    def __init__(self, name: str, rate: Rate, seconds: float) -> None:
        super().__init__(
            f"the rate {rate} of {name!r} is reached; it admits one in {seconds:.3g} s"
        )
        self.name, self.seconds = name, seconds


class _CountStart(NamedTuple):
    """An effect that counts a start, or refuses it."""

    name: str
    rate: Rate

    def apply(self, scope: Scope, run: Held) -> None:
        found = scope.tx(scope.sql["DOCUMENT"], NAMESPACE, self.name)
        version, marks = found[0] if found else (0, "[]")
        starts = Starts(msgspec.json.decode(marks, type=tuple[tuple[float, int], ...]))
        now = scope.now
        if starts.marks and starts.marks[-1][0] > now + self.rate.seconds:  # another clock's
            starts = Starts(tuple((min(at, now), count) for at, count in starts.marks))
        if wait := starts.wait(self.rate, now):
            raise RateReachedError(self.name, self.rate, wait)
        ahead = min(self.rate.seconds * _AHEAD_PART, _AHEAD_SECONDS)
        value = msgspec.json.encode(starts.with_one(self.rate, now, ahead).marks)
        Change(NAMESPACE, self.name, version, value).apply(scope, run)


class RateStage(Stage):
    """At most a number of starts in any window."""

    def __init__(self, name: str, rate: Rate) -> None:
        self._name, self._rate = name, rate

    def enter(self, attempt: Attempt) -> Sequence[Effect]:
        """Return the count of a start."""
        return (_CountStart(self._name, self._rate),)

    async def refused(self, attempt: Attempt, refusal: RefusedError) -> None:
        """Wait until a start is admitted, and a little longer than others that wait for it."""
        if isinstance(refusal, RateReachedError) and refusal.name == self._name:
            jitter = min(self._rate.seconds * 0.01, 0.02) * random.random()  # noqa: S311
            await asyncio.sleep(refusal.seconds + jitter)
