"""Row 18: ``kill -9`` right after ``start``, ``enqueue`` or the answer to a request."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from faults.registry import Outcome, Plan, row
from faults.service.load import kill_under_load
from maestro_hive import ExecutionConfig, Hive
from maestro_hive.unified_execution import Level1Config, Level2Config

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

_ROOT = Path(__file__).resolve().parent.parent
_CALLS = ("start", "enqueue", "aenqueue")
#: Every so many kills, one of the workers is killed, too.
_WORKER_EVERY = 20
_FINISH_SECONDS = 120.0


@row(
    18,
    "accepted is kept: what start, enqueue or a service has answered is finished by workers",
    "500 kills, 0 lost, 0 twice",
)
def accepted(plan: Plan, outcome: Outcome) -> None:
    """Kill who enqueues and starts, and a service under load, and see that workers finish all."""
    _kill_callers(plan, outcome)
    _kill_service(plan, outcome)


# --- a service -----------------------------------------------------------------------------------


def _kill_service(plan: Plan, outcome: Outcome) -> None:
    kills = plan.amount(quick=3, full=20)
    seen = kill_under_load(plan.scratch / "service", kills=kills, seed=plan.seed)
    for wrong in seen.wrong:
        outcome.fail(wrong)
    outcome.require(seen.accepted > kills, f"only {seen.accepted} requests were accepted")
    where = ", ".join(f"{count} of the {name}" for name, count in seen.kills.items())
    outcome.ran.append(f"a service under load, killed {kills} times ({where})")
    outcome.measured.append(
        f"{seen.accepted:,} of {seen.sent:,} requests accepted, {len(seen.wrong)} lost or twice"
    )
    outcome.measured.append(f"{seen.in_a_step} of {kills} kills while a step was executed")
    outcome.measured.append(f"{seen.interrupted} interrupted bodies were called again")
    outcome.measured.append(f"SIGTERM: {seen.stop_seconds:.1f} s, grace 1 s")


# --- start and enqueue ---------------------------------------------------------------------------


def _kill_callers(plan: Plan, outcome: Outcome) -> None:
    kills, rng = plan.amount(quick=22, full=480), random.Random(plan.seed)
    folder = plan.scratch / "accepted"
    folder.mkdir()
    promised: dict[str, str] = {}
    with _Processes(folder) as processes:
        workers = [processes.fork("work") for _ in range(2)]
        for number in plan.track("kills after an answer", range(kills), kills):
            name, call = f"run-{number}", _CALLS[number % len(_CALLS)]
            pid = processes.fork(call, name, itself=rng.random() < 0.5)
            if processes.answer(pid):
                promised[name] = call
                time.sleep(rng.choice((0.0, 0.0, rng.uniform(0, 0.03))))
            processes.kill(pid)
            if number % _WORKER_EVERY == _WORKER_EVERY - 1:
                processes.kill(workers.pop(0))
                workers.append(processes.fork("work"))
        lost = _unfinished(folder, promised)
    for name, status in lost.items():
        outcome.fail(f"{name}, accepted by {promised[name]}, is {status}")
    for name in _repeated(folder):
        outcome.fail(f"a completed step of {name} was executed again")
    outcome.require(len(promised) == kills, f"only {len(promised)} of {kills} were accepted")
    calls = ", ".join(f"{call} {count}" for call, count in Counter(promised.values()).items())
    outcome.ran.append(f"{kills} kills right after an answer ({calls})")
    outcome.measured.append(f"{len(promised)} accepted, {len(lost)} lost or unfinished")


def _unfinished(folder: Path, promised: dict[str, str]) -> dict[str, str]:
    """Return the promised runs that do not end, with their statuses."""
    deadline = time.monotonic() + _FINISH_SECONDS
    with _hive(folder) as hive:
        while True:
            found = {run.run_id: run.status for run in hive.runs()}
            left = {name: found.get(name, "lost") for name in promised}
            left = {name: status for name, status in left.items() if status != "success"}
            if not left or time.monotonic() > deadline:
                return left
            time.sleep(0.05)


def _repeated(folder: Path) -> list[str]:
    """Return the runs of which a step was executed after its result had been recorded."""
    recorded: set[str] = set()
    wrong: list[str] = []
    for line in (folder / "notes").read_text(encoding="utf-8").splitlines():
        what, _, name = line.partition(" ")
        if what == "recorded":
            recorded.add(name)
        elif name in recorded:
            wrong.append(name)
    return wrong


class _Processes:
    """Processes forked from one that has imported everything: a start takes milliseconds."""

    def __init__(self, folder: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "faults.accepted", str(folder)],
            cwd=_ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def fork(self, call: str, name: str = "", *, itself: bool = False) -> int:
        """Fork a process that makes a call; it kills itself after it, or waits to be killed."""
        return int(self._ask(call=call, name=name, itself=itself))

    def answer(self, pid: int) -> bool:
        """Return whether the call of a process returned."""
        return bool(self._ask(answer=pid))

    def kill(self, pid: int) -> None:
        """Kill a process, and wait for its end."""
        self._ask(kill=pid)

    def _ask(self, **command: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(30)
        self._process.stdout.close()


# --- inside the processes ------------------------------------------------------------------------


def _hive(folder: Path) -> Hive:
    levels = {
        "level1": Level1Config(base_delay_seconds=0, max_interruptions=1_000),
        "level2": Level2Config(base_delay_seconds=0),
    }
    return Hive(folder / "state", ExecutionConfig(**levels))  # type: ignore[arg-type]


class _Child:
    """What a forked process does."""

    def __init__(self, folder: Path, answer: int, command: dict[str, Any]) -> None:
        self.hive = _hive(folder)
        self._notes = folder / "notes"
        self._answer = answer
        self._command = command
        step = self.hive.step(name="part")(self._part)

        @self.hive.workflow(name="job")
        async def job(name: str) -> str:
            done = await step(name)
            self._note("recorded", name)
            return str(done)

        self._job = job

    def execute(self) -> None:
        """Make the call, say that it returned, and wait to be killed; or kill this process."""
        calls: dict[str, Callable[[], Coroutine[Any, Any, None]]] = {
            "work": self._work,
            "start": self._start,
            "enqueue": self._enqueue,
            "aenqueue": self._aenqueue,
        }
        asyncio.run(calls[self._command["call"]]())

    async def _part(self, name: str) -> str:
        self._note("starts", name)
        await asyncio.sleep(0.005)
        return name

    def _note(self, what: str, name: str) -> None:
        file = os.open(self._notes, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.write(file, f"{what} {name}\n".encode())
        os.close(file)

    async def _work(self) -> None:
        async with self.hive.worker(release_after=0.5):
            await asyncio.sleep(3_600)

    async def _start(self) -> None:
        name = self._command["name"]
        await self.hive.start(self._job, name, run_id=name)
        await self._accepted()

    async def _enqueue(self) -> None:
        name = self._command["name"]
        self.hive.enqueue(self._job, name, run_id=name)
        await self._accepted()

    async def _aenqueue(self) -> None:
        name = self._command["name"]
        await self.hive.aenqueue(self._job, name, run_id=name)
        await self._accepted()

    async def _accepted(self) -> None:
        os.write(self._answer, b"1")
        if self._command["itself"]:
            os.kill(os.getpid(), signal.SIGKILL)
        await asyncio.sleep(3_600)


def _serve(folder: Path) -> None:
    """Fork, wait for answers and kill, as the lines of the input say."""
    answers: dict[int, int] = {}
    for line in sys.stdin:
        command = json.loads(line)
        said: int | bool = True
        if "call" in command:
            said = _fork(folder, command, answers)
        elif "answer" in command:
            said = os.read(answers[command["answer"]], 1) == b"1"
        else:
            _kill(command["kill"], answers)
        sys.stdout.write(f"{json.dumps(said)}\n")
        sys.stdout.flush()
    for pid in list(answers):
        _kill(pid, answers)


def _fork(folder: Path, command: dict[str, Any], answers: dict[int, int]) -> int:
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        _Child(folder, writing, command).execute()
        os._exit(0)
    os.close(writing)
    answers[pid] = reading
    return pid


def _kill(pid: int, answers: dict[int, int]) -> None:
    os.kill(pid, signal.SIGKILL)  # one that has killed itself waits to be reaped
    os.waitpid(pid, 0)
    os.close(answers.pop(pid))


if __name__ == "__main__":
    _serve(Path(sys.argv[1]))
