"""A clock that skips: where every run only waits, it is at once as late as the first wait needs.

Time stands still while a step's body runs, and while the event loop has anything else to do. Bodies
that run at the same time can be made to end one after the other, in the order they started or in the
reverse: so the same program gives the same order each time, or another one on purpose.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from contextlib import contextmanager
from contextvars import Context, ContextVar
from datetime import timedelta
from heapq import heappop, heappush
from time import monotonic
from typing import TYPE_CHECKING, NamedTuple, Self

from maestro_hive.hive.branches import branch_of
from maestro_hive.kernel.clock import ManualClock, to_micros

if TYPE_CHECKING:
    from collections.abc import Iterator
    from datetime import datetime

#: How often it is checked whether a body that runs has ended; in seconds.
_POLL_SECONDS = 0.002
#: For how many such checks the end of one body waits for those of others that run. Not for so many
#: seconds: in those that the process does not get, the others cannot end either.
_HOLD_CHECKS = 125
#: Where it cannot be seen what a loop has to do: so many turns of it in which nothing happened.
_QUIET_TURNS = 50
#: How long a worker may take to find what is due; in seconds.
_LOOK_SECONDS = 0.1
#: Times that differ by less are the same, but for rounding.
_SAME_SECONDS = 1e-6


class _Sleeper(NamedTuple):
    until: float
    number: int
    wakes: asyncio.Future[None]

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        return self.wakes.get_loop()


class Body:
    """The body of a step that runs: while there is any, no time passes."""

    __slots__ = ("around", "may_end", "number")

    def __init__(self, number: int, around: Body | None) -> None:
        self.number = number
        #: The body that it was called in, where a step calls another.
        self.around = around
        #: Done when it may end, where it has to wait for that.
        self.may_end: asyncio.Future[None] | None = None


#: The body that is being called here.
_body: ContextVar[Body | None] = ContextVar("testing_body", default=None)


class SkippingClock(ManualClock):
    """A clock that is moved by those who wait: an hour takes no time, and nothing is late.

    Each record has a time of its own, a microsecond after the one before; ``instant`` is the time
    without those.
    """

    #: A wait need not look at the time in between.
    longest_sleep = float("inf")

    def __init__(self, *start: datetime) -> None:
        super().__init__(*start)
        self._mutex = threading.RLock()
        self._ticks = 0
        self._numbers = 0
        self._sleepers: list[_Sleeper] = []
        self._bodies: dict[Body, None] = {}
        self._watched: dict[asyncio.AbstractEventLoop, int] = {}
        #: How often it was checked since the last body came to its end.
        self._checks = 0
        #: When something is due that is looked for, and until when, in real time, that may take.
        self._expected: set[float] = set()
        self._stands_until = 0.0
        #: How many blocks hold the time.
        self._holds = 0
        #: Whether bodies end one after the other, and then whether the last one ends first.
        self.holds_ends = False
        self.last_first = False

    def copied(self) -> Self:
        """Return another clock that is as late as this one."""
        made = type(self)(self._now)
        for name in ("_ticks", "_boot_seconds", "_awake_seconds", "_boot_id"):
            setattr(made, name, getattr(self, name))
        made.holds_ends, made.last_first = self.holds_ends, self.last_first
        return made

    def forget(self) -> None:
        """Forget who sleeps and which bodies run: they were killed."""
        with self._mutex:
            self._sleepers.clear()
            self._expected.clear()
            self._bodies.clear()
            self._watched.clear()

    # --- the time ---

    @property
    def instant(self) -> datetime:
        """The time, which is the same until something waits."""
        return self._now

    def now(self) -> datetime:
        """The time, a microsecond later each time it is asked."""
        with self._mutex:
            self._ticks += 1
            return self._now + timedelta(microseconds=self._ticks)

    def nanos(self) -> int:
        """The same as nanoseconds since 1970."""
        return to_micros(self.now()) * 1000

    async def sleep(self, seconds: float) -> None:
        """Return when so much time has been skipped."""
        loop = asyncio.get_running_loop()
        wakes = loop.create_future()
        body = _body.get()
        with self._mutex:
            self._numbers += 1
            sleeper = _Sleeper(self._boot_seconds + max(0.0, seconds), self._numbers, wakes)
            heappush(self._sleepers, sleeper)
            runs = body is not None and self._bodies.pop(body, self) is None
        self._watch(loop)
        try:
            await wakes
        finally:
            if runs and body is not None:
                self._bodies[body] = None
        self.slept.append(seconds)

    def expect(self, seconds: float) -> None:
        """Let time pass until then, for who looks again and again whether something is due."""
        loop, until = asyncio.get_running_loop(), self._boot_seconds + seconds
        with self._mutex:
            if any(abs(until - each) < _SAME_SECONDS for each in self._expected):
                return
            self._expected.add(until)
            self._numbers += 1
            wakes = loop.create_future()
            heappush(self._sleepers, _Sleeper(until, self._numbers, wakes))
        wakes.add_done_callback(lambda _: self._is_due(until))
        self._watch(loop)

    def _is_due(self, until: float) -> None:
        with self._mutex:
            self._expected.discard(until)
            self._stands_until = monotonic() + _LOOK_SECONDS

    @contextmanager
    def held(self) -> Iterator[None]:
        """Let no time be skipped in this block; what ``advance`` lets pass does pass."""
        with self._mutex:
            self._holds += 1
        try:
            yield
        finally:
            with self._mutex:
                self._holds -= 1

    # --- bodies ---

    def enter(self) -> Body:
        """Note that a body starts in this task."""
        with self._mutex:
            self._numbers += 1
            body = Body(self._numbers, _body.get())
            self._bodies[body] = None
        _body.set(body)
        return body

    async def may_end(self, body: Body) -> None:
        """Return when it is the turn of a body to end."""
        if not self.holds_ends:
            return
        loop = asyncio.get_running_loop()
        self._checks = 0
        body.may_end = loop.create_future()
        self._watch(loop)
        try:
            await body.may_end
        finally:
            body.may_end = None

    def leave(self, body: Body) -> None:
        """Note that a body has ended."""
        with self._mutex:
            self._bodies.pop(body, None)
        _body.set(body.around)

    # --- what there is to do ---

    def only_waits(self, loop: asyncio.AbstractEventLoop) -> bool:
        """Return whether nothing will happen by itself: no body, no timer, nothing to do."""
        with self._mutex:
            self._drop_woken()
            rests = not self._bodies and (not self._sleepers or self._holds > 0)
        return rests and not _has_to_do(loop) and not _has_own_timers(loop)

    def _watch(self, loop: asyncio.AbstractEventLoop) -> None:
        with self._mutex:
            if loop in self._watched:
                return
            self._watched[loop] = 0
        loop.call_soon(self._check, loop, context=Context())

    def _check(self, loop: asyncio.AbstractEventLoop) -> None:
        """Let one body end, or time pass, if nothing else is to be done."""
        with self._mutex:
            self._drop_woken()
            held = [each for each in self._bodies if each.may_end is not None]
            if not held and not self._sleepers:
                del self._watched[loop]
                return
            self._watched[loop] += 1
            if _has_to_do(loop) or (not _is_open(loop) and self._watched[loop] < _QUIET_TURNS):
                loop.call_soon(self._check, loop, context=Context())
                return
            self._watched[loop] = 0
            waits = self._go_on(loop, held)
        if waits:
            loop.call_later(_POLL_SECONDS, self._check, loop, context=Context())
        else:
            loop.call_soon(self._check, loop, context=Context())

    def _go_on(self, loop: asyncio.AbstractEventLoop, held: list[Body]) -> bool:
        """Let the next thing happen; True if that has to be waited for, as for a body that runs."""
        around = {each.around for each in self._bodies}  # they wait for those in them
        runs = any(each.may_end is None and each not in around for each in self._bodies)
        self._checks += 1
        if held and (not runs or self._checks > _HOLD_CHECKS):
            chosen = (max if self.last_first else min)(held, key=lambda each: each.number)
            if chosen.may_end is not None and not chosen.may_end.done():
                chosen.may_end.set_result(None)
            return False
        if self._bodies or _has_own_timers(loop) or monotonic() < self._stands_until:
            return True
        loops = {each.loop for each in self._sleepers} - {loop}
        if any(map(_has_to_do, loops)):
            return True
        if not self._holds:
            self.advance(max(0.0, self._sleepers[0].until - self._boot_seconds))
        rests = True
        while self._sleepers and self._sleepers[0].until <= self._boot_seconds + 1e-9:
            _wake(heappop(self._sleepers).wakes)
            rests = False
        return rests

    def _drop_woken(self) -> None:
        """Forget those who wait no more: they were cancelled, or their loop was closed."""
        while self._sleepers and (
            self._sleepers[0].wakes.done() or self._sleepers[0].loop.is_closed()
        ):
            heappop(self._sleepers)


def _wake(wakes: asyncio.Future[None]) -> None:
    loop = wakes.get_loop()
    try:
        here = asyncio.get_running_loop() is loop
    except RuntimeError:
        here = False
    if not here:
        loop.call_soon_threadsafe(_wake_here, wakes)
    else:
        _wake_here(wakes)


def _wake_here(wakes: asyncio.Future[None]) -> None:
    if not wakes.done():
        wakes.set_result(None)


def _is_open(loop: asyncio.AbstractEventLoop) -> bool:
    """Return whether a loop shows what it has to do."""
    return isinstance(getattr(loop, "_ready", None), deque)


def _has_to_do(loop: asyncio.AbstractEventLoop) -> bool:
    """Return whether a loop has callbacks to call now, as far as it shows that."""
    return bool(getattr(loop, "_ready", None))


def _has_own_timers(loop: asyncio.AbstractEventLoop) -> bool:
    """Return whether the code of a workflow waits for real time, as in ``asyncio.sleep``."""
    timers = getattr(loop, "_scheduled", ())
    branches = [branch_of(each) for each in timers if not each.cancelled()]
    return any(each is not None and each.history is not None for each in branches)
