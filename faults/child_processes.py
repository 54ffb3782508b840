"""Processes that execute workflows and are killed: forked from one that has imported it all.

``python -m faults.child_processes MODULE`` reads commands in lines of JSON and answers each: start a
workflow, one of the ``WORKFLOWS`` of that module, in a process of its own, or wait for one to end.
A start costs some milliseconds this way, so that a test can afford hundreds of lives.
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

from faults.scene import Scene

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Mapping, Sequence

    Workflow = Callable[[Scene], Coroutine[Any, Any, int | None]]

ROOT = Path(__file__).resolve().parents[1]
#: How long anything here may take before the test fails.
PATIENCE = 30.0


class SilentError(AssertionError):
    """A process did not say in time what it should have said."""


class Life:
    """One process that executes a workflow."""

    def __init__(self, children: ChildProcesses, pid: int, scene: Scene, said_before: int) -> None:
        self._children = children
        self.pid = pid
        self._scene = scene
        self._said_before = said_before

    def said(self) -> list[dict[str, Any]]:
        """Return what it has said so far."""
        return self._scene.said()[self._said_before :]

    def wait_until_it_says(self, what: str, seconds: float = PATIENCE) -> dict[str, Any]:
        """Return the first line that tells of this."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            for line in self.said():
                if what in line:
                    return line
            time.sleep(0.002)
        raise SilentError(f"{what!r} was never said, only {self.said()}: {self._scene.errors()}")

    def kill(self, how: int = signal.SIGKILL) -> None:
        """Send it a signal."""
        os.kill(self.pid, how)

    def end(self) -> int:
        """Wait for its end, and return its code: minus a signal's number if it was killed."""
        return int(self._children.ask(wait=self.pid)["code"])

    def finish(self) -> dict[str, Any]:
        """Wait for it to end well, and return the last thing it said."""
        code = self.end()
        assert code == 0, f"it ended with {code}: {self._scene.errors()}"
        return self.said()[-1]


class ChildProcesses:
    """The process that starts the others; a context manager.

    ``before`` are words in front of its command, and ``environment`` is added to its own: they
    decide what world its children live in.
    """

    def __init__(
        self,
        module: str,
        *,
        before: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        words = [*before, sys.executable, "-m", "faults.child_processes", module]
        self._process = subprocess.Popen(
            words,
            cwd=ROOT,
            env={**os.environ, **(environment or {})},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def start(self, workflow: str, folder: Path, **options: Any) -> Life:
        """Execute a workflow in a process of its own."""
        folder.mkdir(exist_ok=True)
        scene = Scene(folder, options)
        said_before = len(scene.said())
        pid = self.ask(start=workflow, folder=str(folder), options=options)["pid"]
        return Life(self, pid, scene, said_before)

    def run(self, workflow: str, folder: Path, **options: Any) -> dict[str, Any]:
        """Execute a workflow to its end, and return the last thing it says."""
        return self.start(workflow, folder, **options).finish()

    def ask(self, **command: Any) -> dict[str, Any]:
        """Give a command and return the answer."""
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
        self._process.wait(PATIENCE)
        self._process.stdout.close()


# --- inside the process --------------------------------------------------------------------------


def _serve(workflows: dict[str, Workflow]) -> None:
    children: set[int] = set()
    for line in sys.stdin:
        command = json.loads(line)
        if "start" in command:
            pid = os.fork()
            if pid == 0:
                sys.exit(_active(workflows[command["start"]], command))
            children.add(pid)
            answer = {"pid": pid}
        else:
            answer = {"code": _wait(command["wait"])}
            children.discard(command["wait"])
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()
    for pid in children:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _active(workflow: Workflow, command: dict[str, Any]) -> int:
    """Execute a workflow; the end of the process is the ordinary one."""
    scene = Scene(Path(command["folder"]), command["options"])
    scene.take_over_output()
    return asyncio.run(workflow(scene)) or 0


def _wait(pid: int) -> int:
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        select.select([], [], [], 0.002)  # under libfaketime, time.sleep fails
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return 98


if __name__ == "__main__":
    _serve(importlib.import_module(sys.argv[1]).WORKFLOWS)
