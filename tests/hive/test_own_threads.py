"""Nothing of ours waits for the threads of the user: the default pool of a loop may be full."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING

import pytest

from maestro_hive import Hive
from maestro_hive.maestro.state.events import WaitStarted
from maestro_hive.maestro.state.sqlite.store import SqliteStore
from tests.hive.conftest import quick_config
from tests.python_processes import PythonProcess

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

#: More than the default pool of any machine has threads.
_CALLS = 64


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """What the user's calls hang on; open at the end, so that their threads end."""
    made = threading.Event()
    yield made
    made.set()


@pytest.mark.parametrize("slow", [False, True], ids=["fast disk", "slow disk"])
def test_runs_start_and_end_while_the_default_threads_of_the_loop_hang(
    folder: Path, gate: threading.Event, monkeypatch: pytest.MonkeyPatch, *, slow: bool
) -> None:
    if slow:  # then everything is written by threads
        monkeypatch.setattr(SqliteStore, "syncs_fast", lambda _: False)
    done: list[object] = []

    async def scene() -> None:
        hanging = [asyncio.create_task(asyncio.to_thread(gate.wait, 60)) for _ in range(_CALLS)]
        await asyncio.sleep(0.05)
        try:
            async with asyncio.timeout(50):
                done.append(await use(folder))
        finally:
            gate.set()  # or the loop could not be closed either
            await asyncio.gather(*hanging)

    asyncio.run(scene())
    assert done == [("yes", 9, 300_000)]


async def use(folder: Path) -> object:
    """Start a run, follow it, answer what it asks, let it end, and close the hive."""
    async with Hive(folder, quick_config()) as hive:

        @hive.step(max_concurrency=1, rate="100/s")
        async def add(number: int) -> int:
            return number + 1

        @hive.step(max_concurrency=1)
        def square(number: int) -> int:
            return number * number

        @hive.step
        async def long_text() -> str:
            return "x" * 300_000  # is encoded and written in a thread

        @hive.workflow
        async def child() -> int:
            return len(await long_text())

        @hive.workflow
        async def build() -> tuple[str, int, int]:
            answer = await hive.wait_for("go")
            await hive.sleep(0.01)
            return answer, await square(await add(2)), await child()

        run = await hive.start(build, run_id="r")
        answered = False
        async for event in hive.events("r"):
            if not answered and isinstance(event, WaitStarted):
                hive.answer("r", "go", "yes")
                answered = True
        assert [each.status for each in hive.runs(workflow="build")] == ["success"]
        assert await hive.run(build, run_id="r") == await run.result()
        return tuple(await hive.handle("r").result())


_HANGING = """
import asyncio, sys, threading, time
from maestro_hive import Hive

hive = Hive(sys.argv[1])

@hive.step(timeout=0.1, max_attempts=1)
async def call():
    await asyncio.to_thread(threading.Event().wait)

@hive.workflow
async def build():
    try:
        await asyncio.gather(*(call() for _ in range(8)))
    except TimeoutError:
        return "late"

print(hive.run_sync(build), flush=True)
hive.close()
"""


def test_run_sync_and_its_process_end_while_a_thread_of_a_step_hangs(folder: Path) -> None:
    process = PythonProcess(_HANGING, folder)
    try:
        output, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    assert output == "late\n"
    assert process.returncode == 0
