"""Programs with workflows and workers, in processes that are killed."""

from __future__ import annotations

import contextlib
import os
import signal
import textwrap
import time
from typing import TYPE_CHECKING, Any

from tests.hive.conftest import quick_hive
from tests.python_processes import PythonProcess

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

PROGRAM = textwrap.dedent("""
    import asyncio, os, signal, sys, time
    from pathlib import Path
    from maestro_hive.engine.attempt import current
    from maestro_hive.engine.config import ExecutionConfig, Level1Config, Level2Config
    from maestro_hive.hive.hive import Hive

    folder = Path(sys.argv[1])
    log = folder.parent / "log"
    hive = Hive(folder, ExecutionConfig(
        level1=Level1Config(base_delay_seconds=0),
        level2=Level2Config(base_delay_seconds=0),
    ))

    def note(*words):
        with log.open("a") as file:
            file.write(" ".join(map(str, words)) + "\\n")

    def count_notes(*words):
        lines = log.read_text().splitlines() if log.exists() else []
        return sum(line.startswith(" ".join(map(str, words))) for line in lines)

    def kill():
        os.kill(os.getpid(), signal.SIGKILL)

    @hive.step
    async def part(name, number, seconds=0.0):
        note("part", name, number)
        await asyncio.sleep(seconds)
        return number

    @hive.workflow
    async def job(name, parts=3, seconds=0.0):
        return [await part(name, number, seconds) for number in range(parts)]

    @hive.step
    async def once_hanging(name):
        is_free = (folder.parent / "free").exists()
        note("hanging", name)
        if not is_free:
            await asyncio.sleep(60)
        return name

    @hive.workflow
    async def hangs(name):
        return await once_hanging(name)

    async def wait_for_beside(name):
        before = count_notes("part beside")
        while name != "alone" and count_notes("part beside") < min(before + 2, 12):
            await asyncio.sleep(0.002)

    @hive.step
    async def poison(name):
        await wait_for_beside(name)
        note("poison", name)
        kill()

    @hive.workflow
    async def poisoned(name):
        await part(name, 0)
        return await poison(name)

    @hive.workflow
    async def kills_outside(name):
        first = await part(name, 0)
        if not (folder.parent / "cured").exists():
            await wait_for_beside(name)
            note("outside", name)
            kill()
        return [first, await part(name, 1)]

    @hive.workflow
    async def kills_inside_first(name):
        if count_notes("poison", name):
            note("outside", name)
            kill()
        await poison(name)

    @hive.workflow
    async def kills_after_each(name, parts):
        for number in range(parts):
            await part(name, number)
            if not count_notes("after", name, number):
                note("after", name, number)
                kill()
        return list(range(parts))

    @hive.workflow
    async def calls_one_that_kills(name, parts):
        return await kills_after_each(name, parts)

    @hive.workflow
    async def asks(name):
        await part(name, 0)
        answer = await hive.wait_for("go")
        return [answer, await part(name, 1)]

    @hive.workflow
    async def naps(name, seconds):
        note("starts", name)
        await hive.sleep(seconds)
        return await part(name, 0)

    @hive.workflow
    async def spawns(name):
        handle = hive.enqueue(job, name + "-child", 1)
        also = await hive.aenqueue(job, name + "-child", 1)
        await once_hanging(name)
        return [handle.run_id, also.run_id]

    @hive.workflow
    async def waits_for_a_run(name):
        handle = hive.enqueue(hangs, name)
        return [await handle.result(), await hive.handle(handle.run_id).result()]

    async def serve(**options):
        options = {"release_after": 0.2, "grace": 0.5, **options}
        async with hive.worker(**options):
            print("ready", flush=True)
            await asyncio.sleep(60)

""")


class Programs:
    """A state folder, programs that use it, and what their steps noted."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.folder = place / "state"
        self._started: list[PythonProcess] = []
        self.hive = quick_hive(self.folder)

    def start(self, code: str) -> PythonProcess:
        process = PythonProcess(PROGRAM + textwrap.dedent(code), self.folder)
        self._started.append(process)
        return process

    def worker(self, **options: Any) -> PythonProcess:
        """Return a process with a worker."""
        process = self.start(f"asyncio.run(serve(**{options!r}))")
        assert process.line() == "ready"
        return process

    def notes(self, *words: str) -> list[str]:
        """Return the lines that start with these words."""
        log = self.place / "log"
        lines = log.read_text().splitlines() if log.exists() else []
        return [line for line in lines if line.split()[: len(words)] == [*words]]

    def touch(self, name: str) -> None:
        (self.place / name).touch()

    def status(self, run_id: str) -> str:
        return next((run.status for run in self.hive.runs() if run.run_id == run_id), "none")

    def end(self) -> None:
        for process in self._started:
            process.kill()
            with process:
                pass
        self.hive.close()


@contextlib.contextmanager
def programs_in(place: Path) -> Iterator[Programs]:
    made = Programs(place)
    try:
        yield made
    finally:
        made.end()


def until_true(condition: Callable[[], object], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        time.sleep(0.01)


def kill(process: PythonProcess) -> None:
    os.kill(process.pid, signal.SIGKILL)
    process.wait(60)
