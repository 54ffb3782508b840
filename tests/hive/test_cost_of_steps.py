"""What a step costs, counted in calls of ours; and that what is saved changes nothing."""

from __future__ import annotations

import asyncio
import gc
from typing import TYPE_CHECKING, Any

from maestro_hive import Hive
from tests.calls import calls_for_each

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def stopped_after(folder: Path, count: int) -> Callable[[], Any]:
    """Let a run complete so many steps, and be stopped; return what resumes it."""
    hive, stopped = Hive(folder), asyncio.Event()

    @hive.step
    async def work(number: int) -> dict[str, int]:
        return {"number": number}

    @hive.workflow
    async def flow(count: int) -> int:
        found = [await work(number) for number in range(count)]
        if not stopped.is_set():
            stopped.set()
            await asyncio.Event().wait()
        return sum(each["number"] for each in found)

    async def first_life() -> None:
        run = asyncio.create_task(hive.run(flow, count, run_id="run"))
        await asyncio.wait_for(stopped.wait(), 30)
        run.cancel()
        await asyncio.gather(run, return_exceptions=True)

    def second_life() -> None:
        assert hive.run_sync(flow, count, run_id="run") == sum(range(count))
        hive.close()

    asyncio.run(first_life())
    return second_life


def test_a_completed_step_is_returned_by_few_calls(tmp_path: Path) -> None:
    resumed = {count: stopped_after(tmp_path / str(count), count) for count in (10, 110)}
    assert calls_for_each(resumed.__getitem__, 10, 110) <= 36


def test_a_step_leaves_nothing_to_the_garbage_collector(tmp_path: Path) -> None:
    """Which would look through all that is there again and again."""
    hive, left = Hive(tmp_path), []

    @hive.step
    async def work(number: int) -> dict[str, int]:
        return {"number": number}

    @hive.step
    def plain(number: int) -> int:
        return number

    @hive.workflow
    async def flow() -> None:
        for first in (0, 1_000):  # what comes first is not measured: it imports, and fills caches
            gc.collect()
            gc.disable()
            for number in range(first, first + 50):
                await work(number)
                await asyncio.gather(work(-number - 1), plain(number))
            left.append(gc.collect())
            gc.enable()

    try:
        hive.run_sync(flow)
    finally:
        gc.enable()
    hive.close()
    assert left[1] < 50


def test_what_is_recorded_of_a_large_result_is_what_the_step_returned(tmp_path: Path) -> None:
    """It is encoded in a thread, and the loop changes it meanwhile."""
    messages = [{"role": "user", "content": str(number) * 4_000} for number in range(200)]
    given: list[Any] = []
    seen: list[tuple[int, int]] = []
    hive = Hive(tmp_path)

    @hive.step
    async def collect() -> list[Any]:
        given[:] = messages
        asyncio.get_running_loop().call_soon(given.clear)
        return given

    @hive.step
    async def count(found: list[Any]) -> int:
        return len(found)

    @hive.workflow
    async def flow() -> int:
        found = await collect()
        asyncio.get_running_loop().call_soon(found.clear)
        counted = await count(found)
        seen.append((counted, len(found)))
        return counted

    assert hive.run_sync(flow, run_id="run") == 200
    assert seen == [(200, 0)]
    assert hive.run_sync(flow, run_id="run") == 200
    hive.close()
