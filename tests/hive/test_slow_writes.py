"""The order of outcomes where the disk is slow: they are recorded by a thread, and others meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

from maestro_hive.maestro.state.recorder import Recorder
from maestro_hive.maestro.state.records import EntryKind
from maestro_hive.maestro.state.sqlite.store import SqliteStore

from .test_equivalence import Killed, both_lives

if TYPE_CHECKING:
    from pathlib import Path

    from maestro_hive import Hive

#: How long the thread takes to report an outcome that it has recorded.
_SLOW = 1.0
_OUTCOMES = {EntryKind.STEP_COMPLETED, EntryKind.STEP_FAILED, EntryKind.WAIT_ENDED}


@pytest.fixture
def killed(tmp_path: Path) -> Killed:
    return Killed(tmp_path)


@pytest.fixture(autouse=True)
def _slow_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    write = Recorder._write

    def write_slowly(self: Recorder, batch: Any, busy_timeout: float | None) -> Any:
        written = write(self, batch, busy_timeout)
        kinds = {entry.kind for waiting in batch for entry in waiting.append.entries}
        if threading.current_thread() is not threading.main_thread() and kinds & _OUTCOMES:
            time.sleep(_SLOW)
        return written

    monkeypatch.setattr(Recorder, "_write", write_slowly)
    monkeypatch.setattr(SqliteStore, "syncs_fast", lambda _: False)


def test_what_is_recorded_while_an_outcome_is_written_is_delivered_after_it(
    killed: Killed,
) -> None:
    def program(hive: Hive, killed: Killed) -> Any:
        is_asked = asyncio.Event()

        @hive.step
        async def ask() -> str:
            await is_asked.wait()
            return "answer"

        @hive.step
        async def end() -> None:
            if killed.lives == 1:
                killed.copy()

        @hive.workflow
        async def race() -> list[str]:
            order: list[str] = []

            async def asks() -> None:
                order.append(await ask())

            async def gives_up() -> None:
                pause = asyncio.create_task(hive.sleep(60))
                await asyncio.sleep(0.05)
                is_asked.set()
                await asyncio.sleep(_SLOW / 2)  # the answer is recorded by now, and not reported
                pause.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await pause
                order.append("gave up")

            await asyncio.gather(asks(), gives_up())
            await end()
            return order

        return race

    assert both_lives(killed, program) == (["answer", "gave up"], ["answer", "gave up"])


def test_a_call_that_is_cancelled_while_its_outcome_is_written_ends_in_its_turn(
    killed: Killed,
) -> None:
    def program(hive: Hive, killed: Killed) -> Any:
        @hive.step
        async def answer(seconds: float) -> None:
            await asyncio.sleep(seconds)

        @hive.step
        async def end() -> None:
            if killed.lives == 1:
                killed.copy()

        @hive.workflow
        async def race() -> list[str]:
            order: list[str] = []

            async def asks() -> None:
                try:
                    await answer(_SLOW / 4)  # recorded after the other, which is not reported yet
                finally:
                    order.append("asked")

            async def gives_up() -> None:
                pause = asyncio.create_task(hive.sleep(60))
                await answer(0)
                asking.cancel()
                pause.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await pause
                order.append("gave up")

            asking = asyncio.create_task(asks())
            await asyncio.gather(asking, gives_up(), return_exceptions=True)
            await end()
            return [*order, f"cancelled: {asking.cancelled()}"]

        return race

    first, again = both_lives(killed, program)
    assert first == again
    assert sorted(first) == ["asked", "cancelled: True", "gave up"]
