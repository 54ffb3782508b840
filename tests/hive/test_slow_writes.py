"""The order of outcomes where the disk is slow: they are recorded by a thread, and others meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from typing import TYPE_CHECKING, Any

import pytest

from maestro_hive.maestro.state.recorder import Recorder
from maestro_hive.maestro.state.records import EntryKind
from maestro_hive.maestro.state.sqlite.store import SqliteStore
from tests.timing import PATIENCE_SECONDS

from .test_equivalence import Killed, both_lives
from .test_waits import until

if TYPE_CHECKING:
    from pathlib import Path

    from maestro_hive import Hive

#: How long the thread takes to report the first outcome that it has recorded.
_SLOW = 1.0
_OUTCOMES = {EntryKind.STEP_COMPLETED, EntryKind.STEP_FAILED, EntryKind.WAIT_ENDED}


@pytest.fixture
def killed(tmp_path: Path) -> Killed:
    return Killed(tmp_path)


class SlowWrites:
    """Outcomes that a thread has recorded, and reports later: the first one slowly, others when let."""

    def __init__(self) -> None:
        self.recorded = 0
        self._may_report = threading.Event()

    def start(self) -> None:
        """Report slowly from now on."""
        self.recorded = 0
        self._may_report.clear()

    def report(self) -> None:
        """Report at once from now on."""
        self._may_report.set()

    def wait(self) -> None:
        """Wait in the thread that has recorded an outcome."""
        self.recorded += 1
        self._may_report.wait(_SLOW if self.recorded == 1 else PATIENCE_SECONDS)


@pytest.fixture(autouse=True)
def writes(monkeypatch: pytest.MonkeyPatch) -> SlowWrites:
    write, made = Recorder._write, SlowWrites()

    def write_slowly(self: Recorder, batch: Any, busy_timeout: float | None) -> Any:
        written = write(self, batch, busy_timeout)
        kinds = {entry.kind for waiting in batch for entry in waiting.append.entries}
        if threading.current_thread() is not threading.main_thread() and kinds & _OUTCOMES:
            made.wait()
        return written

    monkeypatch.setattr(Recorder, "_write", write_slowly)
    monkeypatch.setattr(SqliteStore, "syncs_fast", lambda _: False)
    return made


def test_what_is_recorded_while_an_outcome_is_written_is_delivered_after_it(
    killed: Killed, writes: SlowWrites
) -> None:
    def program(hive: Hive, killed: Killed) -> Any:
        is_asked = asyncio.Event()
        writes.start()

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
                if killed.lives == 1:
                    await until(lambda: writes.recorded == 1)  # and it is not reported
                pause.cancel()
                writes.report()
                with contextlib.suppress(asyncio.CancelledError):
                    await pause
                order.append("gave up")

            await asyncio.gather(asks(), gives_up())
            await end()
            return order

        return race

    assert both_lives(killed, program) == (["answer", "gave up"], ["answer", "gave up"])


def test_a_call_that_is_cancelled_while_its_outcome_is_written_ends_in_its_turn(
    killed: Killed, writes: SlowWrites
) -> None:
    def program(hive: Hive, killed: Killed) -> Any:
        writes.start()

        @hive.step
        async def answer(number: int) -> None:
            # Each is recorded while the one before it is not reported yet.
            await until(lambda: writes.recorded >= number)

        @hive.step
        async def end() -> None:
            if killed.lives == 1:
                killed.copy()

        @hive.workflow
        async def race() -> list[str]:
            order: list[str] = []

            async def asks() -> None:
                try:
                    await answer(1)
                finally:
                    order.append("asked")

            async def gives_up() -> None:
                pause = asyncio.create_task(hive.sleep(60))
                await answer(0)
                asking.cancel()
                pause.cancel()
                writes.report()
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
