"""The workflows of rows 7 and 9: a busy run, a step that sleeps, a backoff, a breaker's cooldown.

Each resumes its run. ``child_processes`` starts the processes that execute them.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from faults.child_processes import RUN
from maestro_hive.engine.breaker import CircuitBreaker
from maestro_hive.engine.errors import CircuitBreakerOpen
from maestro_hive.kernel.errors import RunLeasedError
from maestro_hive.kernel.signals import stop_politely
from maestro_hive.maestro.state.sqlite.store import SqliteStore

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from faults.child_processes import Scene, Workflow
    from maestro_hive.unified_execution.persona_executor import PersonaExecutor

#: The steps of a busy run: two async ones, one that fails once, three concurrent, one in a thread.
FLAKY, IN_THREAD = "s3", "s7"
SEQUENTIAL, CONCURRENT = ("s1", "s2", FLAKY), ("s4", "s5", "s6")
STEPS = (*SEQUENTIAL, *CONCURRENT, IN_THREAD)
#: Seconds that a step works, and that it waits after its failure.
WORK, BACKOFF = 0.04, 0.08
BREAKER = "provider"
_POLL_EVERY = 0.01


# --- graceful stops ------------------------------------------------------------------------------


async def busy(scene: Scene) -> int:
    """Execute sequential and concurrent steps, and one in a thread; stop on a signal."""

    async def work(name: str) -> str:
        starts = scene.started(name)
        await asyncio.sleep(WORK)
        if name == FLAKY and not scene.options.get("failed"):
            scene.options["failed"] = True
            scene.say(fails=name, starts=starts)
            raise ConnectionError("the first attempt fails")
        return name.upper()

    def work_in_a_thread(name: str) -> str:
        scene.started(name)
        time.sleep(WORK)
        return name.upper()

    async def steps(executor: PersonaExecutor) -> None:
        for name in SEQUENTIAL:
            await step(executor, work, name)
        await asyncio.gather(*(step(executor, work, name) for name in CONCURRENT))
        await step(executor, work_in_a_thread, IN_THREAD)

    async def step(executor: PersonaExecutor, body: Callable[[str], object], name: str) -> None:
        result = await executor.execute(body, name, name)
        scene.say(step_completed=name, output=result.final_output)

    scene.options["failed"] = any("fails" in line for line in scene.said())
    return await _until_stopped(scene, steps)


async def sleeping(scene: Scene) -> int:
    """Execute one step that sleeps for a minute, in a thread."""

    def sleep() -> str:
        scene.started("s1")
        scene.say(sleeps=True)
        time.sleep(0 if scene.options.get("awake") else 60)
        return "S1"

    async def steps(executor: PersonaExecutor) -> None:
        result = await executor.execute(sleep, "s1")
        scene.say(step_completed="s1", output=result.final_output)

    return await _until_stopped(scene, steps)


async def _until_stopped(scene: Scene, steps: Callable[[PersonaExecutor], Awaitable[None]]) -> int:
    stop = stop_politely()
    try:
        async with stop:
            scene.say(up=True)
            # One failure and no interruption are allowed: a stop that used up either would end the run.
            executor = scene.executor(
                base_delay_seconds=BACKOFF, max_attempts=2, max_interruptions=0
            )
            await steps(executor)
            scene.say(over=True)
    except asyncio.CancelledError:
        if stop.signal is None:
            raise
        return 128 + stop.signal
    scene.show(executor)
    return 0


# --- waits ---------------------------------------------------------------------------------------


def clocks_here() -> dict[str, Any]:
    """Return the clocks of this process."""
    boot = time.clock_gettime(time.CLOCK_BOOTTIME)  # not through our own clock
    return {"wall": time.time(), "boot": boot, "boot_id": _boot_id()}


def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")


async def backoff(scene: Scene) -> None:
    """Fail once, wait, and succeed."""
    seconds = scene.options["seconds"]

    async def body() -> str:
        if scene.started(RUN) == 1:
            scene.say(fails=True)
            raise ConnectionError("not yet")
        return "done"

    executor = scene.executor(base_delay_seconds=seconds, max_delay_seconds=seconds)
    scene.say(up=True)
    await executor.execute(body, RUN)
    scene.say(done=True, **clocks_here())


async def cooldown(scene: Scene) -> None:
    """Open a breaker, or call it until it admits a call."""
    seconds = scene.options["seconds"]
    store = SqliteStore(scene.folder / "state")
    breaker = CircuitBreaker(1, seconds, name=BREAKER, store=store)
    scene.say(up=True)
    if not scene.starts():
        breaker.record_failure()
        scene.started(BREAKER)
        scene.say(fails=True)
    permit = None
    while permit is None:
        try:
            permit = breaker.acquire()
        except CircuitBreakerOpen:
            await asyncio.sleep(_POLL_EVERY)
    scene.started(BREAKER)
    permit.succeeded()
    scene.say(done=True, **clocks_here())
    store.close()


async def holding(scene: Scene) -> None:
    """Lease the run, or report its holder; hold it until the process ends."""
    store = SqliteStore(scene.folder / "state")
    try:
        hold = store.acquire_run(RUN)
    except RunLeasedError as error:
        scene.say(refused=error.pid, answer=True)
    else:
        scene.say(leased=hold.lease.fence, answer=True)
    await asyncio.sleep(60)


WORKFLOWS: dict[str, Workflow] = {
    each.__name__: each for each in (busy, sleeping, backoff, cooldown, holding)
}
