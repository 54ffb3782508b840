"""Limits on time that a busy machine does not break, and a regression does.

What costs work is measured in CPU time: a machine that does something else as well adds nothing to
it. Where the wall clock is the point, the best of several tries has to hold: a regression spoils all
of them, a busy moment only some. Such tests are marked ``timing``; ``make test`` runs them alone,
after the others.

Where something has to take too long, no clock is waited for: ``LoopTime`` and ``PassingLoop`` let
the time of timers pass, of all loops and of one, and the fixture ``clock`` of ``tests/hive`` that of durable waits.
"""

from __future__ import annotations

import asyncio
import math
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest

#: What a condition is waited for that must come true: only what hangs takes that long.
PATIENCE_SECONDS = 30.0
_POLL_SECONDS = 0.005


def wait_until(condition: Callable[[], object], seconds: float = PATIENCE_SECONDS) -> None:
    """Return when something is so; fail if it does not come true."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come true in time"
        time.sleep(_POLL_SECONDS)


def cpu_seconds(call: Callable[[], object], enough: float = 0.0, tries: int = 5) -> float:
    """Return the least CPU time that this thread spent on a call; ``enough`` ends the tries."""

    def measure() -> float:
        started = time.thread_time()
        call()
        return time.thread_time() - started

    return least(measure, enough, tries)


def least(measure: Callable[[], float], enough: float, tries: int = 5) -> float:
    """Return the least of some measurements; one that is less than ``enough`` is the last."""
    best = math.inf
    for _ in range(tries):
        best = min(best, measure())
        if best < enough:
            break
    return best


def is_within(
    times: float,
    call: Callable[[], object],
    reference: Callable[[], object],
    tries: int = 10,
) -> bool:
    """Return whether a call takes less than so many times the CPU time of another one.

    Both are measured in turns, since a processor that is shared is slower at some moments.
    """
    best = best_reference = math.inf
    for _ in range(tries):
        best = min(best, cpu_seconds(call, tries=1))
        best_reference = min(best_reference, cpu_seconds(reference, tries=1))
        if best < times * best_reference:
            return True
    return False


class LoopTime:
    """The time of event loops, which a test lets pass at once.

    So a limit may be long enough for a machine that stalls, and still be exceeded in no time.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._passed = 0.0
        real = asyncio.BaseEventLoop.time
        monkeypatch.setattr(asyncio.BaseEventLoop, "time", lambda loop: real(loop) + self._passed)

    def advance(self, seconds: float) -> None:
        """Let time pass; a loop that waits does not notice before its next turn."""
        self._passed += seconds

    def advance_from_thread(self, seconds: float, loop: asyncio.AbstractEventLoop) -> None:
        """Let time pass after what the loop just does, and return when it has ended what is late."""
        let_turn(loop)
        self.advance(seconds)
        let_turn(loop)


def let_turn(loop: asyncio.AbstractEventLoop) -> None:
    """Return, in another thread, when a loop has done what it was doing, and looked at the time."""

    async def turn() -> None:
        for _ in range(3):
            await asyncio.sleep(0)

    asyncio.run_coroutine_threadsafe(turn(), loop).result(PATIENCE_SECONDS)


class PassingLoop(asyncio.SelectorEventLoop):
    """An event loop whose time a test lets pass: what is to be late is so, and nothing else is.

    ``with asyncio.Runner(loop_factory=PassingLoop) as runner``; its timers are those of steps, too.
    """

    _passed = 0.0

    def time(self) -> float:
        """Return the time of its timers."""
        return super().time() + self._passed

    def advance(self, seconds: float) -> None:
        """Let time pass, in a coroutine on this loop."""
        self._passed += seconds
