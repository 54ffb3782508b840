"""A step in the body of another: recorded once, and ended with that body."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from maestro_hive.engine.attempt import current
from maestro_hive.kernel.errors import OutsideRunError, RunFailedError
from tests.hive.conftest import quick_hive, recorded

if TYPE_CHECKING:
    from pathlib import Path

    from maestro_hive.hive.hive import Hive


def test_a_nested_step_that_has_completed_does_not_run_again_with_the_next_attempt(
    hive: Hive,
) -> None:
    calls: list[str] = []

    @hive.step
    async def inner(what: str) -> str:
        calls.append(what)
        return what.upper()

    @hive.step
    async def outer() -> list[str]:
        found = [await inner("a"), await inner("a"), await inner("b")]
        if current().attempt < 3:
            raise ValueError("no")
        return found

    @hive.workflow
    async def work() -> Any:
        return await outer()

    assert hive.run_sync(work) == ["A", "A", "B"]
    assert calls == ["a", "a", "b"]


def test_a_nested_step_raises_its_own_error_in_the_body(hive: Hive) -> None:
    calls: list[int] = []

    @hive.step(max_attempts=2)
    async def inner() -> None:
        calls.append(1)
        raise KeyError("inside")

    @hive.step
    async def outer() -> str:
        with pytest.raises(KeyError, match="inside"):
            await inner()
        return "caught"

    @hive.workflow
    async def work() -> Any:
        return await outer()

    assert hive.run_sync(work) == "caught"
    assert len(calls) == 2


def test_a_body_that_ends_in_time_may_leave_a_nested_step_that_runs_again_later(
    folder: Path,
) -> None:
    calls: list[int] = []
    with quick_hive(folder) as hive:

        @hive.step(max_attempts=1)
        async def inner() -> int:
            calls.append(1)
            if len(calls) == 1:
                await asyncio.sleep(60)
            return len(calls)

        @hive.step
        async def outer() -> int:
            if current().attempt == 1:
                async with asyncio.timeout(0.1):
                    return await inner()
            return await inner()

        @hive.workflow
        async def work() -> Any:
            return await outer()

        assert hive.run_sync(work, run_id="r") == 2
        statuses = [getattr(each, "status", "") for each in recorded(hive)]
        assert "stopped" in statuses, "a nested step is not cancelled: it was stopped"


def test_a_step_outside_of_a_run_is_an_error(hive: Hive) -> None:
    @hive.step
    async def alone() -> None: ...

    with pytest.raises(OutsideRunError, match="'alone' is called outside of a workflow"):
        asyncio.run(alone())


def test_limits_and_options_hold_for_nested_steps(hive: Hive) -> None:
    active = most = 0

    @hive.step(max_concurrency=1, returns=int)
    async def inner(number: int) -> Any:
        nonlocal active, most
        active += 1
        most = max(most, active)
        await asyncio.sleep(0)
        active -= 1
        return number if number < 3 else "wrong"

    @hive.step
    async def outer() -> list[int]:
        return list(await asyncio.gather(*map(inner, range(3))))

    @hive.step(max_attempts=1)
    async def wrong() -> Any:
        return await inner(3)

    @hive.workflow
    async def work() -> Any:
        return await outer()

    @hive.workflow
    async def fails() -> Any:
        return await wrong()

    assert hive.run_sync(work) == [0, 1, 2]
    assert most == 1
    with pytest.raises(RunFailedError, match="the result is not a int"):
        hive.run_sync(fails)
