"""Processes that execute workflows and are killed, and the folder that they share with the test.

``python -m faults.child_processes MODULE`` reads commands in lines of JSON and answers each: start a
workflow, one of the ``WORKFLOWS`` of that module, in a process of its own, or wait for its end. The
processes are forked from one that has imported everything, so that a start takes milliseconds and a
test can afford hundreds of restarts.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from faults.imports import end_forked, import_all
from maestro_hive.engine.config import ExecutionConfig, Level1Config, StateConfig
from maestro_hive.maestro.state.projections import RunState, facts_of, fold
from maestro_hive.maestro.state.sqlite.store import SqliteStore
from maestro_hive.unified_execution.persona_executor import PersonaExecutor
from tests.python_processes import PythonProcess

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Mapping, Sequence

    Workflow = Callable[["ObservedRun"], Coroutine[Any, Any, int | None]]


RUN = "run-1"
PERSONA = "developer"


class ObservedRun:
    """One run in a folder, and what its processes report; every body calls ``started`` first."""

    def __init__(self, folder: Path, options: dict[str, Any]) -> None:
        self.folder = folder
        self.options = options

    # --- inside a process ---

    def take_over_output(self) -> None:
        """Redirect the output of the process to a file."""
        errors = os.open(self.folder / "errors", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(errors, 2)
        os.dup2(errors, 1)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)

    def executor(self, **level1: Any) -> PersonaExecutor:
        """Return an executor of the run."""
        return PersonaExecutor(self.config(**level1), PERSONA, workflow_id=RUN)

    def config(self, **level1: Any) -> ExecutionConfig:
        """Return the configuration of the run; no waits by default."""
        chosen = {"base_delay_seconds": 0.0, "jitter": 0.0, **level1}
        return ExecutionConfig(
            level1=Level1Config(**chosen),
            state=StateConfig(state_dir=str(self.folder / "state")),
        )

    def report(self, **facts: Any) -> None:
        """Report facts to the test."""
        _add_line(self.folder / "reports", json.dumps(facts))

    def started(self, name: str) -> int:
        """Record that a body starts; return how often it has started."""
        _add_line(self.folder / "starts", f"{name} {os.getpid()} {time.monotonic()}")
        return self.starts().count(name)

    def show(self, executor: PersonaExecutor, **facts: Any) -> None:
        """Report how a workflow ended, and what the views show."""
        assert executor.state_persistence is not None
        state = executor.state_persistence.state
        self.report(
            done=True,
            completed=state.completed_tasks,
            pending=state.pending_tasks,
            retries=state.retry_counts,
            persona=state.persona_states.get(PERSONA, {}),
            tokens=executor.get_token_usage(),
            **facts,
        )

    # --- for the test ---

    def reports(self) -> list[dict[str, Any]]:
        """Return the reports of all processes so far."""
        return [json.loads(line) for line in _lines(self.folder / "reports")]

    def starts(self) -> list[str]:
        """Return the names of the bodies that started, in order."""
        return [line.split()[0] for line in _lines(self.folder / "starts")]

    def start_times(self) -> list[float]:
        """Return their times, on the clock that all processes share."""
        return [float(line.split()[2]) for line in _lines(self.folder / "starts")]

    def journal(self) -> RunState:
        """Return the state of the run in the journal; no lease is taken."""
        store = SqliteStore(self.folder / "state")
        try:
            record = store.run(RUN)
            return fold(store.entries(record.id) if record else [], store.load)
        finally:
            store.close()

    def errors(self) -> str:
        """Return the end of standard error."""
        path = self.folder / "errors"
        return path.read_text()[-2000:] if path.exists() else ""


def _add_line(path: Path, line: str) -> None:
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.write(file, f"{line}\n".encode())
    os.close(file)


def _lines(path: Path) -> list[str]:
    text = path.read_text() if path.exists() else ""
    return text[: text.rfind("\n") + 1].splitlines()


def names_of(run: RunState) -> dict[int, str]:
    """Return the names of a run's steps, by their numbers."""
    return {number: str(facts_of(step.started)["name"]) for number, step in run.steps.items()}


ROOT = Path(__file__).resolve().parents[1]
#: Seconds that anything here may take before the test fails.
MAX_SECONDS = 60.0


class NoReportError(AssertionError):
    """A process did not report in time."""


class ChildProcess:
    """One process that executes a workflow."""

    def __init__(
        self, children: ChildProcesses, pid: int, observed: ObservedRun, reports_before: int
    ) -> None:
        self._children = children
        self.pid = pid
        self._observed = observed
        self._reports_before = reports_before

    def reports(self) -> list[dict[str, Any]]:
        """Return its reports so far."""
        return self._observed.reports()[self._reports_before :]

    def wait_for_report(self, what: str, seconds: float = MAX_SECONDS) -> dict[str, Any]:
        """Return its first report that has this fact."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            for line in self.reports():
                if what in line:
                    return line
            time.sleep(0.002)
        raise NoReportError(
            f"{what!r} was not reported, only {self.reports()}: {self._observed.errors()}"
        )

    def kill(self, how: int = signal.SIGKILL) -> None:
        """Send it a signal."""
        os.kill(self.pid, how)

    def end(self) -> int:
        """Wait for its end and return its exit code: minus the signal's number if it was killed."""
        return int(self._children.ask(wait=self.pid)["code"])

    def poll(self) -> int | None:
        """Return its exit code if it has ended, and None before; once."""
        found = self._children.ask(poll=self.pid)["code"]
        return None if found is None else int(found)

    def finish(self) -> dict[str, Any]:
        """Wait for it to end with code 0, and return its last report."""
        code = self.end()
        assert code == 0, f"it ended with {code}: {self._observed.errors()}"
        return self.reports()[-1]


class ChildProcesses:
    """The process that starts the others; a context manager.

    ``before`` are words in front of its command, and ``environment`` is added to its own: it may be
    what is read when a process starts, as LD_PRELOAD is. Without both it is forked from one that has
    imported the package already.
    """

    def __init__(
        self,
        module: str,
        *,
        before: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        env = {**os.environ, **(environment or {})}
        self._process: PythonProcess | subprocess.Popen[str]
        if not before and not environment:
            self._process = PythonProcess(_SERVE, module, env=env, cwd=ROOT)
            return
        words = [*before, sys.executable, "-m", "faults.child_processes", module]
        self._process = subprocess.Popen(
            words, cwd=ROOT, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def start(self, workflow: str, folder: Path, **options: Any) -> ChildProcess:
        """Execute a workflow in a process of its own."""
        folder.mkdir(exist_ok=True)
        observed = ObservedRun(folder, options)
        reports_before = len(observed.reports())
        pid = self.ask(start=workflow, folder=str(folder), options=options)["pid"]
        return ChildProcess(self, pid, observed, reports_before)

    def run(self, workflow: str, folder: Path, **options: Any) -> dict[str, Any]:
        """Execute a workflow to its end, and return its last report."""
        return self.start(workflow, folder, **options).finish()

    def ask(self, **command: Any) -> dict[str, Any]:
        """Send a command and return the answer."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        return answer

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(MAX_SECONDS)
        self._process.stdout.close()


# --- inside the process --------------------------------------------------------------------------

_SERVE = "import sys; from faults.child_processes import serve; serve(sys.argv[1])"


def serve(module: str) -> None:
    """Read commands and answer them, until there are no more."""
    workflows: dict[str, Workflow] = importlib.import_module(module).WORKFLOWS
    children: set[int] = set()
    for line in sys.stdin:
        command = json.loads(line)
        if "start" in command:
            pid = os.fork()
            if pid == 0:
                end_forked(_execute(workflows[command["start"]], command))
            children.add(pid)
            answer: dict[str, int | None] = {"pid": pid}
        else:
            asked = command["poll"] if "poll" in command else command["wait"]
            code = _ended(asked) if "poll" in command else _wait(asked)
            answer = {"code": code}
            if code is not None:
                children.discard(asked)
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()
    for pid in children:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _execute(workflow: Workflow, command: dict[str, Any]) -> int:
    """Execute a workflow and return the exit code."""
    observed = ObservedRun(Path(command["folder"]), command["options"])
    observed.take_over_output()
    return asyncio.run(workflow(observed)) or 0


def _ended(pid: int) -> int | None:
    ended, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if ended else None


def _wait(pid: int) -> int:
    deadline = time.monotonic() + MAX_SECONDS
    while time.monotonic() < deadline:
        code = _ended(pid)
        if code is not None:
            return code
        select.select([], [], [], 0.002)  # under libfaketime, time.sleep fails
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return 98


if __name__ == "__main__":
    import_all()
    serve(sys.argv[1])
