"""Real processes that are killed, stopped, answered and cancelled from outside."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import textwrap
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

from maestro_hive.kernel.errors import RunLeasedError
from tests.hive.conftest import quick_hive, status
from tests.python_processes import PythonProcess

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

_BUSY_TIMEOUT = 60.0
#: Of 1,600 steps; a process that has completed some may complete many more before it dies.
_ENOUGH = 1_200

_PRELUDE = """
    import asyncio, os, sys, time
    from pathlib import Path
    from maestro_hive.engine.attempt import current
    from maestro_hive.engine.config import ExecutionConfig, Level1Config, Level2Config
    from maestro_hive.hive.hive import Hive

    folder = Path(sys.argv[1])
    log = os.open(folder / "log", os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o600)

    def say(*words):
        os.write(log, (" ".join(map(str, words)) + "\\n").encode())

    config = ExecutionConfig(
        level1=Level1Config(base_delay_seconds=0, max_interruptions=1000),
        level2=Level2Config(base_delay_seconds=0),
    )
    hive = Hive(folder / "state", config)
"""

_CONCURRENT = """
    def megabytes():
        return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6

    finished = []

    @hive.step(persona="worker")
    async def work(number, step):
        say("started", number, step)
        await asyncio.sleep(0.05)  # long enough for a kill to come in between
        return step

    @hive.workflow
    async def eight(number):
        total = 0
        for step in range(0, 8, 4):
            for done in await asyncio.gather(*(work(number, step + n) for n in range(4))):
                say("completed", number, done)
                total += done
        return total

    async def one(number):
        assert await hive.run(eight, number, run_id=f"w{number}") == 28
        finished.append(number)
        if len(finished) in (100, 200):
            print(len(finished), megabytes(), flush=True)

    async def main():
        await asyncio.gather(*(one(number) for number in range(200)))

    asyncio.run(main())
    say("all")
"""

_WAITING = """
    @hive.step
    async def slow():
        say("slow started", current().attempt)
        await asyncio.sleep(float(sys.argv[2]))
        return "done"

    @hive.workflow
    async def ask():
        say("asking")
        answer = await hive.wait_for("approve")
        say("answered", answer)
        return [answer, await slow()]

    print(hive.run_sync(ask, run_id="r"), flush=True)
"""


class Program:
    """A program that uses a hive, in a process of its own."""

    def __init__(self, folder: Path, text: str, *words: str) -> None:
        self.folder = folder
        code = textwrap.dedent(_PRELUDE) + textwrap.dedent(text)
        self.process = PythonProcess(code, folder, *words, stderr=True)

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()

    def end(self) -> tuple[int, str, str]:
        out, err = self.process.communicate(timeout=_BUSY_TIMEOUT)
        return self.process.wait(), out, err

    def wait_for(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + _BUSY_TIMEOUT
        while not condition():
            assert self.process.poll() is None, self.end()
            assert time.monotonic() < deadline, "it takes too long"
            time.sleep(0.01)


def printed(folder: Path) -> list[list[str]]:
    log = folder / "log"
    return [line.split() for line in log.read_text().splitlines()] if log.exists() else []


def count(folder: Path, word: str) -> int:
    log = folder / "log"
    return log.read_bytes().count(word.encode()) if log.exists() else 0


def has_printed(folder: Path, *words: str) -> Callable[[], bool]:
    return lambda: any(line[: len(words)] == list(words) for line in printed(folder))


@pytest.fixture
def program(tmp_path: Path) -> Any:
    started: list[Program] = []

    def start(text: str, *words: str) -> Program:
        started.append(Program(tmp_path, text, *words))
        return started[-1]

    yield start
    for each in started:
        if each.process.poll() is None:
            each.kill()


def test_two_hundred_workflows_at_once_survive_ten_kills_and_need_no_more_memory(
    tmp_path: Path, program: Any
) -> None:
    rng = random.Random(4)
    for kill in range(10):
        child = program(_CONCURRENT)
        # Of the 1,600 steps that are to be completed; or of those that this process starts.
        word = ("completed", "started")[kill % 2]
        before = 120 * kill if word == "completed" else count(tmp_path, word)
        enough = before + rng.randrange(1, 120)
        child.wait_for(lambda word=word, enough=enough: count(tmp_path, word) >= enough)
        child.kill()
        if count(tmp_path, "completed") > _ENOUGH:  # the next one might complete all by itself
            break
    code, out, err = program(_CONCURRENT).end()
    assert code == 0, err
    assert printed(tmp_path)[-1] == ["all"]
    acknowledged: set[tuple[str, ...]] = set()
    starts: Counter[tuple[str, ...]] = Counter()
    for word, *rest in printed(tmp_path):
        if word == "all":
            continue
        if word == "completed":
            acknowledged.add(tuple(rest))
        else:
            assert tuple(rest) not in acknowledged, f"{rest} was completed, and started again"
            starts[tuple(rest)] += 1
    assert len(starts) == 200 * 8
    assert sum(starts.values()) > 200 * 8, "no kill came in the middle of a step"
    memory = [float(line.split()[1]) for line in out.splitlines()]
    if len(memory) == 2:  # fewer than 100 were left for the last process
        assert memory[1] - memory[0] < 30, memory


def test_memory_does_not_grow_with_the_workflows_that_are_done(
    tmp_path: Path, program: Any
) -> None:
    code, out, err = program(_CONCURRENT).end()
    assert code == 0, err
    (_, first), (_, last) = (line.split() for line in out.splitlines())
    assert float(last) - float(first) < 30, out


def test_a_waiting_run_is_killed_answered_by_another_process_and_resumed(
    tmp_path: Path, program: Any
) -> None:
    child = program(_WAITING, "0")
    child.wait_for(has_printed(tmp_path, "asking"))
    with quick_hive(tmp_path / "state") as hive:
        child.wait_for(lambda: status(hive) == "waiting")
        child.kill()
        assert status(hive) == "waiting"
        hive.answer("r", "approve", True)
    code, out, err = program(_WAITING, "0").end()
    assert (code, out) == (0, "[True, 'done']\n"), err
    assert printed(tmp_path).count(["answered", "True"]) == 1


def test_a_living_run_is_answered_and_cancelled_from_another_process(
    tmp_path: Path, program: Any
) -> None:
    child = program(_WAITING, "60")
    child.wait_for(has_printed(tmp_path, "asking"))
    with quick_hive(tmp_path / "state") as hive:

        @hive.workflow
        async def ask() -> None: ...

        child.wait_for(lambda: status(hive) == "waiting")
        with pytest.raises(RunLeasedError, match=f"process {child.process.pid}"):
            hive.run_sync(ask, run_id="r")
        hive.answer("r", "approve", False)
        child.wait_for(has_printed(tmp_path, "slow", "started"))
        assert status(hive) == "running"
        assert hive.cancel("r", "from outside")
        code, _, err = child.end()
        assert code == 1
        assert "RunCancelledError: run 'r' was cancelled (from outside)" in err
        assert status(hive) == "cancelled"
        with pytest.raises(Exception, match="from outside"):
            asyncio.run(hive.handle("r").result())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_graceful_stop_is_no_failure_and_ends_the_process_as_usual(
    tmp_path: Path, program: Any, number: signal.Signals
) -> None:
    child = program(_WAITING, "60")
    with quick_hive(tmp_path / "state") as hive:
        child.wait_for(has_printed(tmp_path, "asking"))
        child.wait_for(lambda: status(hive) == "waiting")
        hive.answer("r", "approve", True)
        child.wait_for(has_printed(tmp_path, "slow", "started"))
        os.kill(child.process.pid, number)
        code, _, err = child.end()
        assert code == {signal.SIGINT: -signal.SIGINT, signal.SIGTERM: 143}[number], err
        assert status(hive) == "stopped"
    code, out, err = program(_WAITING, "0").end()
    assert (code, out) == (0, "[True, 'done']\n"), err


def test_events_of_a_run_in_another_process_are_followed_to_its_end(
    tmp_path: Path, program: Any
) -> None:
    child = program(_WAITING, "0.3")
    child.wait_for(has_printed(tmp_path, "asking"))

    async def follow() -> list[str]:
        names = []
        with quick_hive(tmp_path / "state") as hive:
            async for event in hive.events("r"):
                names.append(type(event.entry).__name__)
                if names[-1] == "WaitStarted":
                    hive.answer("r", "approve", True)
        return names

    names = asyncio.run(follow())
    assert names == [
        "RunStarted",
        "WaitStarted",
        "WaitEnded",
        "AttemptStarted",
        "StepCompleted",
        "RunEnded",
    ]
    assert child.end()[0] == 0
