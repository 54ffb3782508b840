"""One breaker and many real processes, released at once and killed."""

from __future__ import annotations

import select
import signal
import textwrap
import time
from typing import TYPE_CHECKING

import pytest

from maestro_hive.engine.breaker import CircuitBreaker
from maestro_hive.maestro.state.shared_records import BREAKERS
from maestro_hive.maestro.state.sqlite.store import SqliteStore
from tests.python_processes import PythonProcess

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

#: How many ask at once.
PROCESSES = 40
#: Nobody here waits for a cooldown that began in a child.
LONG = 600.0
_BUSY_TIMEOUT = 60.0

_CHILD = textwrap.dedent("""
    import asyncio, os, sys, time
    from maestro_hive.engine.config import ExecutionConfig, Level2Config, StateConfig
    from maestro_hive.engine.errors import CircuitBreakerOpen, HelpNeeded
    from maestro_hive.unified_execution.safety_retry import SafetyRetryWrapper

    folder, cooldown = sys.argv[1], float(sys.argv[2])
    config = ExecutionConfig(
        level2=Level2Config(
            max_attempts=1,
            circuit_breaker_threshold=2,
            circuit_breaker_cooldown_seconds=cooldown,
        ),
        state=StateConfig(state_dir=folder + "/state"),
    )
    wrapper = SafetyRetryWrapper(config, breaker="anthropic")

    async def task(seconds, ending):
        with open(folder + "/starts", "a") as log:
            log.write(f"{os.getpid()} {time.monotonic()}\\n")
        await asyncio.sleep(seconds)
        if ending == "fail":
            raise RuntimeError("no")

    print("ready", wrapper.circuit_breaker.state, flush=True)
    for line in sys.stdin:
        seconds, ending = line.split()
        try:
            asyncio.run(wrapper.execute_safe(task, float(seconds), ending, task_name="ask"))
            print("done", time.monotonic(), flush=True)
        except CircuitBreakerOpen as error:
            print("refused", error.cooldown_seconds, flush=True)
        except HelpNeeded:
            print("failed", time.monotonic(), flush=True)
""")


class Child:
    """A process with a wrapper of its own, which executes one task per line it is told."""

    def __init__(self, folder: Path, cooldown: float = LONG) -> None:
        self._process = PythonProcess(_CHILD, folder, cooldown)
        self.pid = self._process.pid

    def send(self, seconds: float, ending: str) -> None:
        self._process.stdin.write(f"{seconds} {ending}\n")
        self._process.stdin.flush()

    def receive(self) -> list[str]:
        received, _, _ = select.select([self._process.stdout], [], [], _BUSY_TIMEOUT)
        assert received, "a child says nothing"
        return self._process.stdout.readline().split()

    def ask(self, seconds: float, ending: str) -> str:
        self.send(seconds, ending)
        return self.receive()[0]

    def kill(self) -> None:
        self._process.send_signal(signal.SIGKILL)
        self._process.communicate()


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[list[Child]]:
    children = [Child(tmp_path) for _ in range(PROCESSES)]
    assert {child.receive()[1] for child in children} == {"closed"}
    yield children
    for child in children:
        child.kill()


def open_for(folder: Path, seconds: float) -> None:
    """Open the breaker as another process would, whatever it was before."""
    store = SqliteStore(folder / "state")
    store.delete_documents(BREAKERS.namespace)
    CircuitBreaker(1, seconds, name="anthropic", store=store).record_failure()
    store.close()


def starts(folder: Path) -> list[tuple[int, float]]:
    path = folder / "starts"
    lines = path.read_text().splitlines() if path.exists() else []
    return [(int(pid), float(when)) for pid, when in (line.split() for line in lines)]


def release(folder: Path, children: list[Child], seconds: float, ending: str) -> None:
    """Let all of them ask at once, when the cooldown is over."""
    (folder / "starts").unlink(missing_ok=True)
    open_for(folder, 0.2)
    time.sleep(0.3)
    for child in children:
        child.send(seconds, ending)


def test_a_breaker_that_one_process_opened_refuses_another(tmp_path: Path) -> None:
    one, two = children = [Child(tmp_path) for _ in range(2)]
    try:
        assert [child.receive()[0] for child in children] == ["ready", "ready"]
        assert [one.ask(0, "fail"), two.ask(0, "fail")] == ["failed", "failed"]
        assert [two.ask(0, "succeed"), one.ask(0, "succeed")] == ["refused", "refused"]
        assert len(starts(tmp_path)) == 2
    finally:
        for child in children:
            child.kill()


def test_an_open_breaker_survives_the_kill_of_who_opened_it(tmp_path: Path) -> None:
    first = Child(tmp_path)
    first.receive()
    assert [first.ask(0, "fail"), first.ask(0, "fail")] == ["failed", "failed"]
    first.kill()
    second = Child(tmp_path)
    try:
        assert second.receive() == ["ready", "open"]
        assert second.ask(0, "succeed") == "refused"
    finally:
        second.kill()


def test_of_a_crowd_exactly_one_makes_the_probe_however_it_ends(
    tmp_path: Path, processes: list[Child]
) -> None:
    """One test: to start forty processes takes longer than all that they do."""
    one_probe_fails(tmp_path, processes)
    one_probe_succeeds(tmp_path, processes)
    one_probe_is_killed_and_one_more_is_made(tmp_path, processes)


def one_probe_fails(folder: Path, processes: list[Child]) -> None:
    release(folder, processes, 2, "fail")
    outcomes = sorted(child.receive()[0] for child in processes)
    assert outcomes == ["failed"] + ["refused"] * (PROCESSES - 1)
    assert len(starts(folder)) == 1


def one_probe_succeeds(folder: Path, processes: list[Child]) -> None:
    release(folder, processes, 2, "succeed")
    received = [child.receive() for child in processes]
    started = sorted(when for _, when in starts(folder))
    assert all(when - started[0] >= 2 for when in started[1:])  # who came late found it closed
    assert {outcome for outcome, _ in received} <= {"done", "refused"}
    assert processes[-1].ask(0, "succeed") == "done"


def one_probe_is_killed_and_one_more_is_made(folder: Path, processes: list[Child]) -> None:
    release(folder, processes, LONG, "succeed")
    deadline = time.monotonic() + _BUSY_TIMEOUT
    while not starts(folder):
        assert time.monotonic() < deadline, "nobody probes"
        time.sleep(0.01)
    ((prober, _),) = starts(folder)
    others = [child for child in processes if child.pid != prober]
    assert {child.receive()[0] for child in others} == {"refused"}
    next(child for child in processes if child.pid == prober).kill()
    for child in others:
        child.send(2, "fail")
    assert sorted(child.receive()[0] for child in others) == ["failed"] + ["refused"] * (
        PROCESSES - 2
    )
    assert len(starts(folder)) == 2
