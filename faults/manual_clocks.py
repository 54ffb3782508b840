"""Manual clocks that are moved at random, under a backoff and under a breaker's cooldown."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING

from maestro_hive.engine.breaker import CircuitBreaker
from maestro_hive.engine.errors import CircuitBreakerOpen
from maestro_hive.kernel.clock import ManualClock, Wait
from maestro_hive.maestro.state.memory import MemoryStore

if TYPE_CHECKING:
    from collections.abc import Callable

    from faults.registry import Outcome, Plan


class CrashedError(Exception):
    """Raised by a body whose process has crashed: it is never seen outside."""


class TrueTimeClock(ManualClock):
    """A manual clock that also counts the time that really passed, whatever was set."""

    def __init__(self) -> None:
        super().__init__()
        self.true = 0.0

    def sleep_machine(self, seconds: float) -> None:
        """Let time pass."""
        super().sleep_machine(seconds)
        self.true += seconds

    def reboot(self, seconds: float = 60.0) -> None:
        """Reboot the machine."""
        super().reboot(seconds)
        self.true += seconds


class CrashingClock(TrueTimeClock):
    """A clock during whose sleep a process can crash."""

    def __init__(self) -> None:
        super().__init__()
        self.crash_in_sleep: list[Callable[[], None]] = []

    async def sleep(self, seconds: float) -> None:
        """Let time pass, or half of it and crash."""
        if self.crash_in_sleep:
            self.advance(seconds / 2)
            self.crash_in_sleep.pop()()
            raise CrashedError
        await super().sleep(seconds)


_AN_HOUR = 3600.0
#: Rounding errors of clock arithmetic are smaller than this.
_TINY = 1e-3
#: The interval between two calls to an open breaker.
_CALL_EVERY = 0.5


class JumpyClock(TrueTimeClock):
    """A clock that is set, and whose machine sleeps and reboots, during a wait."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self.reboots = 0
        self.last_reboot = 0.0
        self._rng = rng

    def reboot(self, seconds: float = 60.0) -> None:
        """Reboot the machine; every process ends with it."""
        super().reboot(seconds)
        self.reboots += 1
        self.last_reboot = self.true

    async def sleep(self, seconds: float) -> None:
        """Let time pass, and set the wall clock sometimes."""
        await super().sleep(seconds)
        self.disturb()

    def disturb(self) -> None:
        """Set the wall clock, with a probability of 0.4."""
        if self._rng.random() < 0.4:
            self.jump(self._rng.choice((-1, 1)) * self._rng.uniform(0, 2 * _AN_HOUR))


def move_clocks(plan: Plan, outcome: Outcome) -> None:
    """Wait many times on clocks that jump."""
    rounds = plan.amount(quick=300, full=20_000)
    rng = random.Random(plan.seed)
    before, rebooted = outcome.failed, 0
    for number in plan.track("waits on a manual clock", range(rounds), rounds):
        seconds = rng.choice((0.3, 4.0, 60.0, 300.0))
        reboots = rng.choice((0, 0, 1, 2))
        rebooted += reboots > 0
        for wrong in (_back_off(rng, seconds, reboots), _cool_down(rng, seconds, reboots)):
            if wrong:
                outcome.fail(f"manual clock, round {number}, {seconds:g} s: {wrong}")
    outcome.ran.append(f"{rounds:,} backoffs and cooldowns on a manual clock moved at random")
    outcome.measured.append(f"{outcome.failed - before} wrong, {rebooted:,} over a reboot")


def _back_off(rng: random.Random, seconds: float, reboots: int) -> str:
    """Start a wait, crash during it a few times, and wait for its end."""
    clock = JumpyClock(rng)
    facts = Wait.start(clock, seconds).to_json()
    started = clock.true
    crashes = [True] * reboots + [False] * rng.choice((0, 1, 3))
    rng.shuffle(crashes)
    for is_reboot in crashes:
        clock.sleep_machine(rng.uniform(0, seconds / 2))
        clock.disturb()
        if is_reboot:
            clock.reboot()
            clock.disturb()
    up = clock.true
    asyncio.run(Wait.from_json(facts).finished(clock))
    return _judge(clock, started, up, seconds, 0.0)


def _cool_down(rng: random.Random, seconds: float, reboots: int) -> str:
    """Open a breaker, and call it at intervals, from one process after another."""
    clock = JumpyClock(rng)
    root = MemoryStore(clock=clock)
    CircuitBreaker(1, seconds, name="b", store=root).record_failure()
    started = clock.true
    up = started
    for _ in range(reboots):
        if rng.random() < 0.5:
            clock.sleep_machine(rng.uniform(0, seconds / 2))
        clock.reboot()
        clock.disturb()
        up = clock.true
    every = max(_CALL_EVERY, seconds / 100)
    for _ in range(400):
        store = MemoryStore(clock=clock, shared_with=root)
        try:
            CircuitBreaker(1, seconds, name="b", store=store).acquire().succeeded()
        except CircuitBreakerOpen:
            clock.advance(every)
            clock.disturb()
        else:
            return _judge(clock, started, up, seconds, every)
        finally:
            store.abandon()
    return f"still open after {clock.true - started:g} s"


def _judge(clock: JumpyClock, started: float, up: float, seconds: float, step: float) -> str:
    """Return what was wrong with a wait that ended now, or an empty text."""
    now = clock.true
    if clock.reboots:
        late = now - up - seconds
        return f"{late:g} s longer than one full wait" if late > step + _TINY else ""
    early, late = started + seconds - now, now - max(started + seconds, up)
    if early > _TINY:
        return f"{early:g} s early"
    return f"{late:g} s late" if late > step + _TINY else ""
