"""A terminal as a reader has it: what is typed there, and what is then to be seen."""

from __future__ import annotations

import contextlib
import os
import pty
import select
import shlex
import struct
import subprocess
import sys
import termios
import time
from fcntl import ioctl
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    Start = Callable[[list[str], Path, Mapping[str, str], int], "Process"]

#: How long a command may take, and how long one that goes on may say nothing; in seconds.
_LONGEST, _QUIET = 60.0, 10.0
#: In how many looks, one after the other, a process that does nothing is seen to wait.
_IDLE_LOOKS = 5
_NEEDS_A_SHELL = set("|>&;$")


class Process(Protocol):
    """What is started; a ``subprocess.Popen`` is one."""

    @property
    def pid(self) -> int:
        """Its number."""

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end, and return its exit code."""

    def kill(self) -> None:
        """Kill it, unless it has ended."""


def start_process(
    words: list[str], folder: Path, environment: Mapping[str, str], terminal: int
) -> Process:
    """Start a command in a terminal."""
    return subprocess.Popen(
        words, cwd=folder, env=environment, stdin=terminal, stdout=terminal, stderr=terminal
    )


class Terminal:
    """A folder and an environment to type commands in; some may be left going on, each by a name.

    ``start`` is given the words of a command, the folder, the environment and the terminal.
    """

    def __init__(
        self,
        folder: Path,
        *,
        columns: int = 100,
        coloured: bool = False,
        start: Start = start_process,
        longest: float = _LONGEST,
    ) -> None:
        self._folder = folder
        self._longest = longest
        self._start_process = start
        self._columns = columns
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        kept = {name: value for name, value in os.environ.items() if "MAESTRO" not in name}
        # A page has lines: what a table that is drawn again and again leaves is not for reading.
        self._environment = {**kept, "PATH": path, "TERM": "xterm-256color", "CI": "true"}
        for name in ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "LINES", "PYTHONUNBUFFERED"):
            self._environment.pop(name, None)
        if not coloured:
            self._environment["NO_COLOR"] = "1"
        self._going: dict[str, _Command] = {}

    def type(self, line: str) -> str:
        """Run a command to its end and return what it printed."""
        word, _, rest = line.partition(" ")
        if word == "export":
            name, _, value = rest.partition("=")
            self._environment[name] = value
            return ""
        return self._start(line).rest()

    def leave(self, line: str, is_enough: Callable[[str], bool], name: str = "") -> tuple[int, str]:
        """Run a command until what it printed is enough, or it is quiet; and let it go on.

        Returns its process, and what it printed.
        """
        assert name not in self._going, "a command of this name goes on already"
        command = self._going[name] = self._start(line)
        return command.pid, command.until(is_enough)

    def rest(self, name: str = "") -> str:
        """Wait for a command that goes on, and return what else it printed."""
        assert name in self._going, "no command of this name goes on"
        return self._going.pop(name).rest()

    def close(self) -> None:
        """End what still goes on."""
        for command in self._going.values():
            command.kill()

    def _start(self, line: str) -> _Command:
        words = ["bash", "-c", line] if _NEEDS_A_SHELL & set(line) else shlex.split(line)
        start = partial(self._start_process, words, self._folder, self._environment)
        return _Command(start, self._columns, self._longest)


class _Command:
    """A process in a pseudo-terminal."""

    def __init__(self, start: Callable[[int], Process], columns: int, longest: float) -> None:
        self._longest = longest
        self._screen, inside = pty.openpty()
        ioctl(inside, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
        try:
            self._process = start(inside)
        finally:
            os.close(inside)
        self._text = ""

    @property
    def pid(self) -> int:
        """The process."""
        return self._process.pid

    def until(self, is_enough: Callable[[str], bool]) -> str:
        """Return what was printed so far, once it is enough, or has not grown for a while."""
        deadline = time.monotonic() + self._longest
        heard = time.monotonic()
        while time.monotonic() < (min(deadline, heard + _QUIET) if self._text else deadline):
            if is_enough(self._text):
                self._wait_until_idle()
                break
            before = len(self._text)
            if not self._read(0.1):
                break
            heard = time.monotonic() if len(self._text) > before else heard
        text, self._text = self._text, ""
        return text

    def _wait_until_idle(self) -> None:
        """Wait until the process waits, too: it may not have recorded yet what it says that it does."""
        path = Path(f"/proc/{self.pid}/stat")
        looks, deadline = 0, time.monotonic() + _QUIET
        while path.exists() and looks < _IDLE_LOOKS and time.monotonic() < deadline:
            is_asleep = path.read_text().rpartition(")")[2].split()[0] == "S"
            looks = looks + 1 if is_asleep else 0
            time.sleep(0.02)

    def rest(self) -> str:
        """Return what is printed until the process ends; as a shell does, say if it was killed."""
        deadline = time.monotonic() + self._longest
        try:
            while time.monotonic() < deadline and self._read(1.0):
                pass
            code = self._process.wait(timeout=max(0.1, deadline - time.monotonic()))
        finally:
            self.kill()
        return self._text + ("Killed\n" if code == -9 else "")

    def kill(self) -> None:
        """End the process, if it has not ended."""
        self._process.kill()
        self._process.wait()
        with contextlib.suppress(OSError):  # it was closed before
            os.close(self._screen)

    def _read(self, seconds: float) -> bool:
        """Read what is there, or comes in time; False when the terminal was left by everybody."""
        ready, _, _ = select.select([self._screen], [], [], seconds)
        if not ready:
            return True
        try:
            piece = os.read(self._screen, 65536)
        except OSError:  # Linux says so when the last process in the terminal is gone
            return False
        self._text += piece.decode().replace("\r\n", "\n")
        return bool(piece)
