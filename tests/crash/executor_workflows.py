"""Workflows that die: each is a run through ``PersonaExecutor`` that goes on where it finds it."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from typing import TYPE_CHECKING, Any

from maestro_hive.engine.attempt import current
from maestro_hive.engine.errors import UnrecoverableError
from maestro_hive.kernel.signals import stop_politely

if TYPE_CHECKING:
    from faults.child_processes import Scene, Workflow


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


# --- the workflows -------------------------------------------------------------------------------


async def three_steps(scene: Scene) -> None:
    """Three steps, one of which may hang."""
    hang_in = scene.options.get("hang_in")

    async def body(name: str) -> str:
        scene.started(name)
        if name == hang_in:
            scene.say(hangs=name)
            await asyncio.sleep(60)
        return f"{name} is done"

    executor = scene.executor()
    outputs = []
    for name in ("plan", "build", "check"):
        outputs.append((await executor.execute(body, name, name)).final_output)
        scene.say(kept=name)
    scene.show(executor, outputs=outputs)


async def backing_off(scene: Scene) -> None:
    """A step that fails once, and has to wait for the second attempt."""

    async def body() -> dict[str, Any]:
        if scene.started("flaky") == 1:
            scene.say(fails=True)
            raise ConnectionError("not yet")
        return {"attempt": current().attempt, "feedback": current().feedback}

    executor = scene.executor(base_delay_seconds=scene.options["delay"])
    scene.say(up=time.monotonic())
    result = await executor.execute(body, "flaky")
    scene.show(executor, output=result.final_output, attempts=result.attempt_count)


async def remembering(scene: Scene) -> None:
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
        if scene.started("second") == 1:
            here.memory["half"] = "done"
            here.history.append({"asked": "second"})
            here.save_progress(current_step="half", files_created=["a.py"])
            here.save_progress(state_data={"line": 7})
            here.spend(tokens=40, usd=0.5)
            _die()
        return {
            "attempt": here.attempt,
            "memory": dict(here.memory),
            "history": list(here.history),
            "progress": here.progress,
            "effect_key": here.effect_key,
        }

    executor = scene.executor()
    await executor.execute(first, "first")
    result = await executor.execute(second, "second")
    scene.show(executor, output=result.final_output, spent=result.total_tokens_used)


async def remembering_at_once(scene: Scene) -> None:
    """Steps of one persona that remember at the same time."""

    async def body(name: str) -> None:
        here = current()
        before = len(here.memory)
        await asyncio.sleep(0)
        here.memory[name] = before
        await asyncio.sleep(0)
        here.history.append(name)

    executor = scene.executor()
    await asyncio.gather(*(executor.execute(body, name, name) for name in ("a", "b", "c")))
    scene.show(executor)


async def scripted(scene: Scene) -> None:
    """One step, whose script says what each of its starts does: fail, die or succeed."""
    script = scene.options["script"]

    async def body() -> str:
        number = scene.started("scripted")
        act = script[number - 1]
        if act == "fail":
            raise ValueError(f"failure of start {number}")
        if act == "die":
            _die()
        return f"done at start {number}"

    with scene.executor() as executor:
        try:
            result = await executor.options(retry=scene.options.get("retry", False)).execute(
                body, "scripted"
            )
        except UnrecoverableError as error:
            report = error.failure_report
            scene.show(
                executor,
                error=str(error),
                status=error.result.final_status,
                report=report.to_dict() if report else None,
                attempts=[each.status for each in error.result.attempts],
            )
        else:
            scene.show(executor, output=result.final_output, attempts=result.attempt_count)


async def crowd(scene: Scene) -> None:
    """Many steps at once, every second one in a thread; some of them fail the first time."""
    rng = random.Random(scene.options["seed"])
    longest = scene.options["longest"]

    async def body(number: int, seconds: float) -> int:
        starts = scene.started(f"s{number}")
        await asyncio.sleep(seconds)
        return end(number, starts)

    def body_in_a_thread(number: int, seconds: float) -> int:
        starts = scene.started(f"s{number}")
        time.sleep(seconds)
        return end(number, starts)

    def end(number: int, starts: int) -> int:
        if number % 7 == 0 and not current().feedback:
            raise ConnectionError("the first time never works")
        current().history.append(number)
        current().memory[str(number)] = starts
        current().spend(tokens=1)
        return number * number

    async def step(number: int) -> int:
        task = body_in_a_thread if number % 2 else body
        mine = executor.options(key=str(number))
        result = await mine.execute(task, f"s{number}", number, rng.uniform(0, longest))
        scene.say(kept=number)
        return int(result.final_output)

    executor = scene.executor(max_interruptions=scene.options["kills"])
    scene.say(up=True)
    squares = await asyncio.gather(*(step(number) for number in range(scene.options["steps"])))
    scene.show(executor, squares=squares)


async def changing(scene: Scene) -> None:
    """A program whose code is another one at every restart: its steps are given from outside.

    A step is its name and its input; one that begins with ``<`` is the result of that step.
    """
    executor = scene.executor()
    known: dict[str, str] = {}

    async def body(name: str, given: str) -> str:
        scene.started(name)
        if name == scene.options.get("dies_in"):
            _die()
        return f"{name}({given.strip().lower()})"

    for name, given in scene.options["steps"]:
        value = known[given[1:]] if given.startswith("<") else given
        known[name] = (await executor.execute(body, name, name, value)).final_output
    scene.show(executor, outputs=known)


async def stopped(scene: Scene) -> int:
    """A step that takes a minute, async or in a thread; unless it is told to be quick."""
    quick = scene.options.get("quick", False)

    async def slow() -> str:
        scene.started("slow")
        scene.say(begun=True)
        await asyncio.sleep(0 if quick else 60)
        return "rested"

    def slow_in_a_thread() -> str:
        scene.started("slow")
        scene.say(begun=True)
        time.sleep(0 if quick else 60)
        return "rested"

    body = slow_in_a_thread if scene.options["kind"] == "sync" else slow
    executor = scene.executor(max_attempts=1, max_interruptions=0)
    stop = stop_politely()
    try:
        async with stop:
            result = await executor.execute(body, "slow")
    except asyncio.CancelledError:
        if stop.signal is None:
            raise
        return 128 + stop.signal
    scene.show(
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
        crowd,
        changing,
        stopped,
    )
}
