"""How long the attempt after a repair waits, and how many healers are asked."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import pytest

from maestro_hive import ExecutionConfig, Fix, Hive, PersonaExecutor, current
from maestro_hive.engine.healing.engine import SelfHealingEngine
from maestro_hive.engine.healing.failure import FailureType
from maestro_hive.testing import use
from maestro_hive.unified_execution import Level1Config, Level2Config
from tests.tables import for_each


def config(**level1: Any) -> ExecutionConfig:
    return ExecutionConfig(
        level1=Level1Config(jitter=0, **level1),
        level2=Level2Config(max_attempts=1, circuit_breaker_threshold=1000),
    )


class BusyError(Exception):
    """What a client raises that was told when to come again."""

    retry_after: float = 60


#: A backoff longer than what the remote side requested, and one shorter: it is dropped either way.
@for_each("backoff", [5.0, 100.0])
@for_each(
    "fix, least",
    [
        (Fix(arguments={"depth": 5}), 60),
        (Fix(wait=0), 60),
        (Fix(wait=90), 90),
    ],
    ids=["arguments", "no wait", "a longer wait"],
)
def test_a_repair_does_not_shorten_what_the_remote_side_requested(
    fix: Fix, least: float, backoff: float
) -> None:
    hive = Hive("never-made", config(base_delay_seconds=backoff, max_delay_seconds=1000))
    started: list[float] = []

    with use(hive) as kit:

        @hive.step
        async def work(depth: int = 1) -> int:
            started.append(kit.clock.now().timestamp())
            if len(started) == 1:
                raise BusyError("come again")
            return depth

        @hive.workflow
        async def flow() -> int:
            return await work()

        hive.healer(BusyError, name="fix")(lambda: fix)
        kit.run(flow, run_id="r")
    assert started[1] - started[0] == pytest.approx(least, abs=2)


def test_in_memory_too_a_repair_does_not_shorten_what_was_requested() -> None:
    started: list[float] = []

    class Healer:
        name = "fix"
        handles = frozenset(FailureType)

        def propose(self, failure: Any, workspace: Any) -> Fix:
            del failure, workspace
            return Fix(wait=0)

    async def work() -> str:
        started.append(time.monotonic())
        if len(started) == 1:
            error = BusyError("come again")
            error.retry_after = 0.3
            raise error
        return "done"

    engine = SelfHealingEngine(healers=[Healer()])
    executor = PersonaExecutor(config(base_delay_seconds=0), healing_engine=engine)
    asyncio.run(executor.execute(work, "t"))
    assert started[1] - started[0] >= 0.29


def test_healers_of_the_user_that_have_nothing_do_not_switch_off_those_that_ship() -> None:
    hive = Hive("never-made", config(base_delay_seconds=0, max_attempts=2))

    @hive.step
    def work() -> Any:
        return json.loads('{"a": 1}' if told() else '{"a": }')

    def told() -> bool:
        return any('{"a": }' in each for each in current().feedback)

    @hive.workflow
    async def flow() -> Any:
        return await work()

    for number in range(4):
        hive.healer(Exception, name=f"silent{number}")(lambda: None)
    with use(hive) as kit:
        assert kit.run(flow, run_id="r") == {"a": 1}
