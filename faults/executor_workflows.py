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

    from faults.child_processes import ObservedRun, Workflow
    from maestro_hive.unified_execution.persona_executor import PersonaExecutor

#: The steps of a busy run: two async ones, one that fails once, three concurrent, one in a thread.
FLAKY, IN_THREAD = "s3", "s7"
SEQUENTIAL, CONCURRENT = ("s1", "s2", FLAKY), ("s4", "s5", "s6")
STEPS = (*SEQUENTIAL, *CONCURRENT, IN_THREAD)
#: Seconds that a step works, and that it waits after its failure.
WORK, BACKOFF = 0.04, 0.08
BREAKER = "provider"
#: A file that is written just before the failure after which is waited: no wait starts earlier.
FAILING = "failing"
_POLL_EVERY = 0.01


# --- graceful stops ------------------------------------------------------------------------------


async def busy(observed: ObservedRun) -> int:
    """Execute sequential and concurrent steps, and one in a thread; stop on a signal."""

    async def work(name: str) -> str:
        starts = observed.started(name)
        await asyncio.sleep(WORK)
        if name == FLAKY and not observed.options.get("failed"):
            observed.options["failed"] = True
            observed.report(fails=name, starts=starts)
            raise ConnectionError("the first attempt fails")
        return name.upper()

    def work_in_a_thread(name: str) -> str:
        observed.started(name)
        time.sleep(WORK)
        return name.upper()

    async def steps(executor: PersonaExecutor) -> None:
        for name in SEQUENTIAL:
            await step(executor, work, name)
        await asyncio.gather(*(step(executor, work, name) for name in CONCURRENT))
        await step(executor, work_in_a_thread, IN_THREAD)

    async def step(executor: PersonaExecutor, body: Callable[[str], object], name: str) -> None:
        result = await executor.execute(body, name, name)
        observed.report(step_completed=name, output=result.final_output)

    observed.options["failed"] = any("fails" in line for line in observed.reports())
    return await _until_stopped(observed, steps)


async def sleeping(observed: ObservedRun) -> int:
    """Execute one step that sleeps for a minute, in a thread."""

    def sleep() -> str:
        observed.started("s1")
        observed.report(sleeps=True)
        time.sleep(0 if observed.options.get("awake") else 60)
        return "S1"

    async def steps(executor: PersonaExecutor) -> None:
        result = await executor.execute(sleep, "s1")
        observed.report(step_completed="s1", output=result.final_output)

    return await _until_stopped(observed, steps)


async def _until_stopped(
    observed: ObservedRun, steps: Callable[[PersonaExecutor], Awaitable[None]]
) -> int:
    stop = stop_politely()
    try:
        async with stop:
            observed.report(up=True)
            # One failure and no interruption are allowed: a stop that used up either would end the run.
            executor = observed.executor(
                base_delay_seconds=BACKOFF, max_attempts=2, max_interruptions=0
            )
            await steps(executor)
            observed.report(over=True)
    except asyncio.CancelledError:
        if stop.signal is None:
            raise
        return 128 + stop.signal
    observed.show(executor)
    return 0


# --- waits ---------------------------------------------------------------------------------------


def clocks_here() -> dict[str, Any]:
    """Return the clocks of this process."""
    boot = time.clock_gettime(time.CLOCK_BOOTTIME)  # not through our own clock
    return {"wall": time.time(), "boot": boot, "boot_id": _boot_id()}


def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")


async def backoff(observed: ObservedRun) -> None:
    """Fail once, wait, and succeed."""
    seconds = observed.options["seconds"]

    async def body() -> str:
        if observed.started(RUN) == 1:
            (observed.folder / FAILING).write_text("", encoding="ascii")
            observed.report(fails=True)
            raise ConnectionError("not yet")
        return "done"

    executor = observed.executor(base_delay_seconds=seconds, max_delay_seconds=seconds)
    observed.report(up=True)
    await executor.execute(body, RUN)
    observed.report(done=True, **clocks_here())


async def cooldown(observed: ObservedRun) -> None:
    """Open a breaker, or call it until it admits a call."""
    seconds = observed.options["seconds"]
    store = SqliteStore(observed.folder / "state")
    breaker = CircuitBreaker(1, seconds, name=BREAKER, store=store)
    observed.report(up=True)
    if not observed.starts():
        (observed.folder / FAILING).write_text("", encoding="ascii")
        breaker.record_failure()
        observed.started(BREAKER)
        observed.report(fails=True)
    permit = None
    while permit is None:
        try:
            permit = breaker.acquire()
        except CircuitBreakerOpen:
            await asyncio.sleep(_POLL_EVERY)
    observed.started(BREAKER)
    permit.succeeded()
    observed.report(done=True, **clocks_here())
    store.close()


async def holding(observed: ObservedRun) -> None:
    """Lease the run, or report its holder; hold it until the process ends."""
    store = SqliteStore(observed.folder / "state")
    try:
        hold = store.acquire_run(RUN)
    except RunLeasedError as error:
        observed.report(refused=error.pid, answer=True)
    else:
        observed.report(leased=hold.lease.fence, answer=True)
    await asyncio.sleep(60)


WORKFLOWS: dict[str, Workflow] = {
    each.__name__: each for each in (busy, sleeping, backoff, cooldown, holding)
}
