"""What happens in a run, as events: here, from another process, and of a run that is dead."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from maestro_hive import Hive, RunFailedError, current
from maestro_hive.hive import UnknownRunError
from maestro_hive.hive.runs import read_run
from maestro_hive.maestro.state.events import (
    RunEnded,
    RunEvent,
    RunStarted,
    StepCompleted,
    StepFailed,
    StepStarted,
)
from tests.hive.conftest import quick_config
from tests.hive.test_waits import status, until

if TYPE_CHECKING:
    from pathlib import Path


def names(events: list[RunEvent]) -> list[str]:
    return [type(event).__name__ for event in events]


async def all_events(hive: Hive, run_id: str = "r", **options: object) -> list[RunEvent]:
    return [event async for event in hive.events(run_id, **options)]  # type: ignore[arg-type]


def test_events_come_while_the_run_continues_and_end_with_it(hive: Hive) -> None:
    go = asyncio.Event()

    @hive.step(persona="worker")
    async def work() -> int:
        if current().attempt == 1:
            raise ValueError("once")
        await go.wait()
        return 1

    @hive.workflow
    async def job() -> int:
        return await work()

    async def main() -> list[RunEvent]:
        handle = await hive.start(job, run_id="r")
        await until(lambda: status(hive) == "running")
        seen: list[RunEvent] = []
        async for event in hive.events("r"):
            seen.append(event)
            if isinstance(event, StepStarted) and event.attempt == 2:
                go.set()
        await handle.result()
        return seen

    seen = asyncio.run(main())
    kinds = [RunStarted, StepStarted, StepFailed, StepStarted, StepCompleted, RunEnded]
    assert [type(event) for event in seen] == kinds
    assert [event.seq for event in seen] == sorted(event.seq for event in seen)
    failed = seen[2]
    assert isinstance(failed, StepFailed)
    assert (failed.name, failed.persona) == ("work", "worker")


def test_the_events_of_a_dead_run_are_told_and_end(folder: Path) -> None:
    async def leave() -> None:
        with Hive(folder, quick_config()) as hive:

            @hive.workflow
            async def nap() -> None:
                await hive.sleep(60)

            running = asyncio.create_task(hive.run(nap, run_id="r"))
            async with asyncio.timeout(30):
                while not (hive.runs() and read_run(hive._open(), "r").waits):  # noqa: ASYNC110 - it is in a journal
                    await asyncio.sleep(0.01)
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running

    asyncio.run(leave())
    with Hive(folder, quick_config()) as hive:
        assert names(asyncio.run(all_events(hive))) == ["RunStarted", "WaitStarted"]


def test_events_can_be_read_on_from_where_one_was(hive: Hive) -> None:
    @hive.workflow
    async def fail() -> None:
        raise ValueError("no")

    with pytest.raises(RunFailedError):
        hive.run_sync(fail, run_id="r")
    first, last = asyncio.run(all_events(hive, follow=False))
    assert isinstance(last, RunEnded)
    assert last.status == "failed"
    assert asyncio.run(all_events(hive, after=first.seq)) == [last]
    assert asyncio.run(all_events(hive, after=last.seq)) == []


def test_events_of_no_run_say_so(hive: Hive) -> None:
    with pytest.raises(UnknownRunError, match="'nobody'"):
        asyncio.run(all_events(hive, "nobody"))
