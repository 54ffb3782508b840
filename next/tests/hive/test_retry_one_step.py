"""One step is tried again, after both levels gave up: that one, and what depends on it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from maestro_hive.engine.config import ExecutionConfig, Level1Config, Level2Config
from maestro_hive.hive.hive import Hive
from maestro_hive.kernel.errors import ConfigurationError, RunFailedError
from tests.hive.conftest import asks, leave, until

if TYPE_CHECKING:
    from pathlib import Path


class Program:
    """A workflow of steps that are broken until they are repaired, and their calls."""

    def __init__(self, folder: Path) -> None:
        self.calls: list[str] = []
        self.broken = {"b", "c"}
        config = ExecutionConfig(
            level1=Level1Config(base_delay_seconds=0, max_attempts=2),
            level2=Level2Config(base_delay_seconds=0, circuit_breaker_threshold=100),
        )
        self.hive = Hive(folder, config)

        @self.hive.step
        async def work(name: str) -> str:
            self.calls.append(name)
            if name in self.broken:
                raise ValueError(f"{name} is broken")
            return name.upper()

        @self.hive.step
        async def join(parts: list[str]) -> str:
            self.calls.append("join")
            return "".join(parts)

        @self.hive.workflow
        async def build() -> str:
            parts = [await work("a")]
            outcomes = await asyncio.gather(work("b"), work("c"), return_exceptions=True)
            failed = [each for each in outcomes if isinstance(each, BaseException)]
            if failed:
                raise failed[0]
            return await join([*parts, *map(str, outcomes)])

        self.build = build

    def run(self) -> Any:
        """Run or resume it; the calls are those of this start alone."""
        self.calls.clear()
        return self.hive.run_sync(self.build, run_id="r")


@pytest.fixture
def program(tmp_path: Path) -> Program:
    """Return a program whose run failed: b and c were given up by both levels."""
    made = Program(tmp_path / "state")
    with pytest.raises(RunFailedError, match="b is broken"):
        made.run()
    assert sorted(made.calls) == ["a", *["b"] * 4, *["c"] * 4]
    return made


@pytest.mark.parametrize("wanted", ["work#2", 2, "2"])
def test_exactly_that_step_runs_again(program: Program, wanted: str | int) -> None:
    program.hive.retry("r", wanted)
    program.broken.clear()
    with pytest.raises(RunFailedError, match="c is broken"):
        program.run()
    assert program.calls == ["b"]  # a is completed, and c's failure stands
    program.hive.retry("r", "work#3")
    assert program.run() == "ABC"
    assert program.calls == ["c", "join"]


def test_a_retried_step_has_all_its_attempts_and_rounds_again(program: Program) -> None:
    program.hive.retry("r", "work#2")
    with pytest.raises(RunFailedError, match="b is broken"):
        program.run()
    assert program.calls == ["b"] * 4
    with pytest.raises(RunFailedError, match="b is broken"):
        program.run()
    assert program.calls == []


def test_a_run_without_a_retry_calls_nothing(program: Program) -> None:
    program.broken.clear()
    with pytest.raises(RunFailedError, match="b is broken"):
        program.run()
    assert program.calls == []


def test_retrying_the_run_retries_every_step_that_failed(program: Program) -> None:
    program.hive.retry("r")
    program.broken.clear()
    assert program.run() == "ABC"
    assert sorted(program.calls) == ["b", "c", "join"]


def test_a_completed_step_is_not_retried(program: Program) -> None:
    with pytest.raises(ConfigurationError, match=r"'work' of run 'r' is completed"):
        program.hive.retry("r", "work")
    with pytest.raises(ConfigurationError, match="has no step 'other'"):
        program.hive.retry("r", "other")


def test_a_step_is_retried_while_the_run_waits_for_an_answer(tmp_path: Path) -> None:
    config = ExecutionConfig(
        level1=Level1Config(base_delay_seconds=0, max_attempts=1),
        level2=Level2Config(base_delay_seconds=0, max_attempts=1),
    )
    hive = Hive(tmp_path / "state", config)
    calls: list[str] = []
    broken = {"draft"}

    @hive.step
    async def work(name: str) -> str:
        calls.append(name)
        if name in broken:
            raise ValueError("broken")
        return name

    @hive.workflow
    async def ask() -> list[Any]:
        first = await asyncio.gather(work("draft"), work("other"), return_exceptions=True)
        answer = await hive.wait_for("approve")
        return [isinstance(first[0], Exception), first[1], answer]

    async def until_waiting() -> None:
        running = asyncio.create_task(hive.run(ask, run_id="r"))
        await until(lambda: asks(hive))
        await leave(running)

    async def again() -> list[Any]:
        running = asyncio.create_task(hive.run(ask, run_id="r"))
        await until(lambda: len(calls) == 3)
        hive.answer("r", "approve", True)
        return await running

    asyncio.run(until_waiting())
    broken.clear()
    hive.retry("r", "work")
    assert asyncio.run(again()) == [False, "other", True]
    assert calls == ["draft", "other", "draft"]
