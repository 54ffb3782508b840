"""Programs in processes of their own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

_SUSPEND_SECONDS = 30.0
_POLL_SECONDS = 0.002


class PythonProcess(subprocess.Popen[str]):
    """A process that executes Python code; its input and output are pipes."""

    def __init__(
        self,
        code: str,
        *arguments: object,
        stderr: bool = False,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
    ) -> None:
        """Start it; its standard error is a pipe, too, if ``stderr``."""
        super().__init__(
            [sys.executable, "-c", code, *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE if stderr else None,
            text=True,
            env=env,
            cwd=cwd,
        )

    def line(self) -> str:
        """Return the next line that it prints, without its end."""
        assert self.stdout is not None
        line = b""  # without a buffer, in which ``communicate`` would not find the next line
        while not line.endswith(b"\n") and (byte := os.read(self.stdout.fileno(), 1)):
            line += byte
        return line.decode().rstrip("\n")


def run_python(
    code: str, *arguments: object, check: bool = False, timeout: float = 60
) -> subprocess.CompletedProcess[str]:
    """Execute code in a process and return how it ended, as ``subprocess.run`` does."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=timeout)
    assert not check or done.returncode == 0, done.stderr
    return done


def suspend(pid: int) -> None:
    """Send SIGSTOP, and return when no thread of the process executes anything.

    A thread that writes to a slow disk takes the signal late, and the others run until then.
    """
    os.kill(pid, signal.SIGSTOP)
    threads = Path(f"/proc/{pid}/task")
    deadline = time.monotonic() + _SUSPEND_SECONDS
    while any(_state_of(each) not in "TtZX" for each in threads.glob("*")):
        assert time.monotonic() < deadline, f"process {pid} does not stop"
        time.sleep(_POLL_SECONDS)


def _state_of(thread: Path) -> str:
    try:
        text = (thread / "stat").read_text("utf-8", "replace")
    except OSError:  # it has ended
        return "X"
    return text.rpartition(")")[2].split()[0]
