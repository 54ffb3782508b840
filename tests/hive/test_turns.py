"""Turns of recorded outcomes, while other threads give the loop something to do."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from maestro_hive import Hive, RunFailedError
from maestro_hive.hive import history

if TYPE_CHECKING:
    from pathlib import Path


def test_turns_are_taken_while_other_threads_call_the_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the callback that takes them fails, and the run waits for ever."""
    hive = Hive(tmp_path)
    looked: list[asyncio.Handle] = []
    broken = [True]

    @hive.step
    async def number(given: int) -> int:
        return given

    @hive.step(max_attempts=1)
    async def last() -> str:
        if broken:
            raise ValueError("not yet")
        return "completed"

    @hive.workflow
    async def numbers() -> str:
        assert sum(await asyncio.gather(number(1), number(2), number(3))) == 6
        return await last()

    history_of = history._history_of

    def history_of_and_more(handle: asyncio.Handle) -> history.History | None:
        looked.append(handle)
        asyncio.get_running_loop().call_soon_threadsafe(bool)  # as another thread, just now
        return history_of(handle)

    with hive:
        with pytest.raises(RunFailedError, match="not yet"):
            hive.run_sync(numbers, run_id="r")
        broken.clear()
        hive.retry("r")
        monkeypatch.setattr(history, "_history_of", history_of_and_more)

        async def keep_busy() -> None:
            while True:  # noqa: ASYNC110 - so that it has something to do in each turn
                await asyncio.sleep(0)

        async def resume() -> str:
            busy = asyncio.create_task(keep_busy())
            try:
                return await asyncio.wait_for(hive.run(numbers, run_id="r"), 30)
            finally:
                busy.cancel()

        assert asyncio.run(resume()) == "completed"
    assert looked
