"""Workflows that die: each is a run through ``PersonaExecutor`` that goes on where it finds it."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import signal
import threading
import time
from typing import TYPE_CHECKING, Any

from maestro_hive.engine.context import current
from maestro_hive.engine.errors import UnrecoverableError
from maestro_hive.kernel.signals import stop_politely

if TYPE_CHECKING:
    from faults.child_processes import ObservedRun, Workflow


def _kill_self() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


# --- the workflows -------------------------------------------------------------------------------


async def three_steps(observed: ObservedRun) -> None:
    """Three steps, one of which may hang."""
    hang_in = observed.options.get("hang_in")

    async def body(name: str) -> str:
        observed.started(name)
        if name == hang_in:
            observed.report(hangs=name)
            await asyncio.sleep(60)
        return f"{name} is done"

    executor = observed.executor()
    outputs = []
    for name in ("plan", "build", "check"):
        outputs.append((await executor.execute(body, name, name)).final_output)
        observed.report(acknowledged=name)
    observed.show(executor, outputs=outputs)


async def backing_off(observed: ObservedRun) -> None:
    """A step that fails once, and has to wait for the second attempt."""

    async def body() -> dict[str, Any]:
        if observed.started("flaky") == 1:
            observed.report(fails=True)
            raise ConnectionError("not yet")
        return {"attempt": current().attempt, "feedback": current().feedback}

    executor = observed.executor(base_delay_seconds=observed.options["delay"])
    observed.report(up=time.monotonic())
    result = await executor.execute(body, "flaky")
    observed.show(executor, output=result.final_output, attempts=result.attempt_count)


async def remembering(observed: ObservedRun) -> None:
    """A step that saves all it can, and dies."""

    async def first() -> str:
        current().memory["language"] = "Python"
        current().memory["style"] = {"names": ["nouns"]}
        current().memory["style"]["names"].append("promises")  # noticed when the attempt ends
        current().history.append({"asked": "first"})
        current().spend(tokens=100, usd=0.25)
        return "done"

    async def second() -> dict[str, Any]:
        here = current()
        if observed.started("second") == 1:
            here.memory["half"] = "done"
            here.history.append({"asked": "second"})
            here.save_progress(current_step="half", files_created=["a.py"])
            here.save_progress(state_data={"line": 7})
            here.spend(tokens=40, usd=0.5)
            _kill_self()
        return {
            "attempt": here.attempt,
            "memory": dict(here.memory),
            "history": list(here.history),
            "progress": here.progress,
            "effect_key": here.effect_key,
        }

    executor = observed.executor()
    await executor.execute(first, "first")
    result = await executor.execute(second, "second")
    observed.show(executor, output=result.final_output, spent=result.total_tokens_used)


async def remembering_at_once(observed: ObservedRun) -> None:
    """Steps of one persona that remember at the same time."""

    async def body(name: str) -> None:
        here = current()
        before = len(here.memory)
        await asyncio.sleep(0)
        here.memory[name] = before
        await asyncio.sleep(0)
        here.history.append(name)

    executor = observed.executor()
    await asyncio.gather(*(executor.execute(body, name, name) for name in ("a", "b", "c")))
    observed.show(executor)


async def scripted(observed: ObservedRun) -> None:
    """One step, whose script says what each of its starts does: fail, die or succeed."""
    script = observed.options["script"]

    async def body() -> str:
        number = observed.started("scripted")
        act = script[number - 1]
        if act == "fail":
            raise ValueError(f"failure of start {number}")
        if act == "die":
            _kill_self()
        return f"done at start {number}"

    with observed.executor() as executor:
        try:
            result = await executor.options(retry=observed.options.get("retry", False)).execute(
                body, "scripted"
            )
        except UnrecoverableError as error:
            report = error.failure_report
            observed.show(
                executor,
                error=str(error),
                status=error.result.final_status,
                report=report.to_dict() if report else None,
                attempts=[each.status for each in error.result.attempts],
            )
        else:
            observed.show(executor, output=result.final_output, attempts=result.attempt_count)


async def concurrent_steps(observed: ObservedRun) -> None:
    """Many steps at once, every second one in a thread; some of them fail the first time.

    No more of them end than ``most``: the others wait until the process is killed, however late.
    """
    rng = random.Random(observed.options["seed"])
    longest, ends = observed.options["longest"], itertools.count(1)

    async def body(number: int, seconds: float) -> int:
        starts = observed.started(f"s{number}")
        await asyncio.sleep(seconds)
        fail_once(number)
        if next(ends) > observed.options["most"]:
            await asyncio.Event().wait()
        return end(number, starts)

    def body_in_a_thread(number: int, seconds: float) -> int:
        starts = observed.started(f"s{number}")
        time.sleep(seconds)
        fail_once(number)
        if next(ends) > observed.options["most"]:
            threading.Event().wait()
        return end(number, starts)

    def fail_once(number: int) -> None:
        if number % 7 == 0 and not current().feedback:
            raise ConnectionError("the first time never works")

    def end(number: int, starts: int) -> int:
        current().history.append(number)
        current().memory[str(number)] = starts
        current().spend(tokens=1)
        return number * number

    async def step(number: int) -> int:
        task = body_in_a_thread if number % 2 else body
        mine = executor.options(key=str(number))
        result = await mine.execute(task, f"s{number}", number, rng.uniform(0, longest))
        observed.report(acknowledged=number)
        return int(result.final_output)

    executor = observed.executor(max_interruptions=observed.options["kills"])
    observed.report(up=True)
    squares = await asyncio.gather(*(step(number) for number in range(observed.options["steps"])))
    observed.show(executor, squares=squares)


async def changing(observed: ObservedRun) -> None:
    """A program whose code is another one at every restart: its steps are given from outside.

    A step is its name and its input; one that begins with ``<`` is the result of that step.
    """
    executor = observed.executor()
    known: dict[str, str] = {}

    async def body(name: str, given: str) -> str:
        observed.started(name)
        if name == observed.options.get("dies_in"):
            _kill_self()
        return f"{name}({given.strip().lower()})"

    for name, given in observed.options["steps"]:
        value = known[given[1:]] if given.startswith("<") else given
        known[name] = (await executor.execute(body, name, name, value)).final_output
    observed.show(executor, outputs=known)


async def stopped(observed: ObservedRun) -> int:
    """A step that takes a minute, async or in a thread; unless it is told to be quick."""
    quick = observed.options.get("quick", False)

    async def slow() -> str:
        observed.started("slow")
        observed.report(started=True)
        await asyncio.sleep(0 if quick else 60)
        return "rested"

    def slow_in_a_thread() -> str:
        observed.started("slow")
        observed.report(started=True)
        time.sleep(0 if quick else 60)
        return "rested"

    body = slow_in_a_thread if observed.options["kind"] == "sync" else slow
    executor = observed.executor(max_attempts=1, max_interruptions=0)
    stop = stop_politely()
    try:
        async with stop:
            result = await executor.execute(body, "slow")
    except asyncio.CancelledError:
        if stop.signal is None:
            raise
        return 128 + stop.signal
    observed.show(
        executor,
        output=result.final_output,
        attempts=[each.status for each in result.attempts],
    )
    return 0


WORKFLOWS: dict[str, Workflow] = {
    each.__name__: each
    for each in (
        three_steps,
        backing_off,
        remembering,
        remembering_at_once,
        scripted,
        concurrent_steps,
        changing,
        stopped,
    )
}
