"""Processes that execute lives of a run, forked from one that has imported everything.

``python -m faults.twin.processes`` reads commands in lines of JSON and answers each: start a life,
or wait for the end of one.
"""

from __future__ import annotations

import asyncio
import gc
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

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).resolve().parents[2]
#: Seconds that a life may take before it counts as hanging.
MAX_SECONDS = 60.0
#: The exit code of a life that hangs.
HANGS = 98


class Processes:
    """The process that starts the others; a context manager."""

    def __init__(self) -> None:
        source = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")]))
        self._process = subprocess.Popen(
            [sys.executable, "-m", "faults.twin.processes"],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": source},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def start(self, folder: Path, **options: Any) -> int:
        """Start a life; return its process."""
        return int(self._ask(folder=str(folder), options=options))

    def wait(self, pid: int) -> int:
        """Wait for the end of a life; return its exit code, or minus the signal's number."""
        return int(self._ask(wait=pid))

    def _ask(self, **command: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate(timeout=MAX_SECONDS)


def _serve() -> None:
    program = importlib.import_module("faults.twin.program")
    importlib.import_module("faults.twin.comparison")
    gc.freeze()  # so that a collection does not copy what the processes share
    children: set[int] = set()
    for line in sys.stdin:
        command = json.loads(line)
        if "wait" in command:
            answer = _wait(command["wait"])
            children.discard(command["wait"])
        else:
            answer = os.fork()
            if answer == 0:
                _execute(program, Path(command["folder"]), command["options"])
            children.add(answer)
        sys.stdout.write(f"{answer}\n")
        sys.stdout.flush()
    for pid in children:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _execute(program: Any, folder: Path, options: dict[str, Any]) -> None:
    """Execute a life, and end this process with its exit code."""
    errors = os.open(folder / "errors", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(errors, 2)
    os.dup2(errors, 1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    code = 1
    try:
        with asyncio.Runner(loop_factory=_loop_factory(options["kind"])) as runner:
            code = runner.run(program.live(folder, options))
    except BaseException:  # noqa: BLE001 - this process ends here
        sys.excepthook(*sys.exc_info())
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _loop_factory(kind: str) -> Callable[[], asyncio.AbstractEventLoop] | None:
    if kind != "uvloop":
        return None
    import uvloop

    return uvloop.new_event_loop


def _wait(pid: int) -> int:
    deadline = time.monotonic() + MAX_SECONDS
    file = os.pidfd_open(pid)
    try:
        select.select([file], [], [], deadline - time.monotonic())
    finally:
        os.close(file)
    ended, status = os.waitpid(pid, os.WNOHANG)
    if ended:
        return os.waitstatus_to_exitcode(status)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return HANGS


if __name__ == "__main__":
    _serve()
