"""The code of a user, with the types that ``mypy --strict`` must see in it.

It is checked with the rest of the project, and executed by ``test_typing``: at run time
``assert_type`` only returns its value.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, assert_type

from maestro_hive.engine.config import ExecutionConfig, StateConfig
from maestro_hive.hive.functions import StepFunction, WorkflowFunction
from maestro_hive.hive.handle import Event, RunHandle, RunInfo
from maestro_hive.hive.hive import Hive

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

# In memory: the test that executes this needs no folder.
hive = Hive(config=ExecutionConfig(state=StateConfig(enable_persistence=False)))


@dataclass(frozen=True)
class Part:
    name: str
    size: int


@hive.step
async def bare(feature: str, *, parts: int = 2) -> list[Part]:
    """Design a feature."""
    return [Part(f"{feature}-{number}", number) for number in range(parts)]


@hive.step(persona="developer", max_attempts=5, timeout=120, rate="60/min", max_concurrency=4)
async def implement(part: Part) -> str:
    """Implement a part."""
    return part.name.upper()


@hive.step
def plain(text: str) -> int:
    """Count."""
    return len(text)


@hive.step(retry_on=(OSError,), key="sum-{numbers}")
def plain_with_terms(*numbers: int) -> float:
    """Add up."""
    return float(sum(numbers))


@hive.workflow
async def build(feature: str, loud: bool = False) -> list[str]:
    """Build a feature."""
    parts = await bare(feature, parts=3)
    assert_type(parts, list[Part])
    made = await asyncio.gather(*(implement(part) for part in parts))
    assert_type(made, list[str])
    length = await plain(made[0])
    assert_type(length, int)
    total = await plain_with_terms(1, 2)
    assert_type(total, float)
    async with asyncio.TaskGroup() as group:
        task = group.create_task(plain("in a group"))
    assert_type(task.result(), int)
    return [*made, f"{length}{'!' if loud else ''}"]


@hive.workflow(name="whole-shop")
async def shop(features: list[str]) -> dict[str, int]:
    """Build several features, each as a child."""
    built = [await build(feature) for feature in features]
    assert_type(built, list[list[str]])
    return {feature: len(parts) for feature, parts in zip(features, built, strict=True)}


class Agent:
    """An agent whose methods are steps."""

    step_identity = "agent"

    @hive.step(persona="researcher")
    async def research(self, topic: str) -> list[str]:
        """Research."""
        return [topic]


@hive.workflow
async def ask() -> bool:
    """Call a method."""
    found = await Agent().research("x")
    assert_type(found, list[str])
    await hive.sleep(0)
    return len(found) == 1


def made() -> None:
    assert_type(bare.function("x"), Any)
    step: StepFunction[[Part], str] = implement
    count: StepFunction[[str], int] = plain
    workflow: WorkflowFunction[[list[str]], dict[str, int]] = shop
    del step, count, workflow


async def returned(own: Hive) -> None:
    assert_type(await own.run(build, "page", loud=True), list[str])
    assert_type(await own.run(shop, ["page"], run_id="shop-1"), dict[str, int])
    handle = await own.start(build, "page")
    assert_type(handle, RunHandle[list[str]])
    assert_type(await handle.result(), list[str])
    assert_type(handle.status, str)
    assert_type(own.enqueue(build, "page"), RunHandle[list[str]])
    assert_type(own.runs("success"), list[RunInfo])
    events: AsyncIterator[Event] = own.events("shop-1", follow=False)
    async for event in events:
        assert_type(event.entry.seq, int)


def returned_without_a_loop(own: Hive) -> None:
    assert_type(own.run_sync(build, "page"), list[str])
    assert_type(own.run_sync(ask), bool)
    assert_type(own.fork("shop-1", from_step=1), str)
    assert_type(own.cancel("shop-1"), bool)
