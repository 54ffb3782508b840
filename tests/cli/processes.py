"""The command ``maestro``: called in this process, as a process of its own, or in a terminal."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import functools
import io
import json
import logging
import os
import pty
import select
import shutil
import struct
import subprocess
import sys
import tempfile
import termios
import threading
import time
import warnings
from fcntl import ioctl
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from maestro_hive.cli import app
from maestro_hive.engine.execution_log import ExecutionLog
from maestro_hive.maestro.state.state_manager import StateManager
from maestro_hive.unified_execution import (
    ExecutionConfig,
    PersonaExecutor,
    StatePersistence,
    current,
)
from tests.python_processes import PythonInTerminal, PythonProcess, run_python

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

Done = subprocess.CompletedProcess[str]

COMMAND = [sys.executable, "-m", "maestro_hive"]
#: What would change what is printed, or where is looked.
_IN_THE_WAY = {
    *("NO_COLOR", "FORCE_COLOR", "COLUMNS", "LINES"),
    *("MAESTRO_STATE_DIR", "MAESTRO_CHECKPOINT_DIR"),
}

#: Python loses a Ctrl+C that is typed between its prompt and its reading.
_UNTIL_IT_READS = 0.2


def environment(**changes: str) -> dict[str, str]:
    """Return the environment of a test, without what would change what is printed."""
    inherited = {name: value for name, value in os.environ.items() if name not in _IN_THE_WAY}
    return {**inherited, **changes}


def maestro(*arguments: str | Path, stdin: str = "", **changes: str) -> Done:
    """Run a verb in this process, as in a pipe, with these environment variables."""
    given = [str(each) for each in arguments]
    streams = [_stream(stdin.encode()), _stream(), _stream()]
    code = _called(given, streams, changes)
    out, err = (_written(stream) for stream in streams[1:])
    return Done(given, code, out, err)


def _called(arguments: list[str], streams: list[Any], changes: dict[str, str]) -> int:
    with _process_state(), pytest.MonkeyPatch.context() as patch:
        for name, stream in zip(("stdin", "stdout", "stderr"), streams, strict=True):
            patch.setattr(sys, name, stream)
        for name in _IN_THE_WAY:
            patch.delenv(name, raising=False)
        for name, value in changes.items():
            patch.setenv(name, value)
        return app.run(arguments)


def _stream(content: bytes = b"") -> io.TextIOWrapper:
    return io.TextIOWrapper(io.BytesIO(content), encoding="utf-8")


def _written(stream: io.TextIOWrapper) -> str:
    stream.flush()
    stream.seek(0)
    return stream.read()


@contextlib.contextmanager
def _process_state() -> Iterator[None]:
    """Put back what a verb changes in its process, which is usually its own."""
    logger = logging.getLogger("maestro_hive")
    before = sys.excepthook, warnings.showwarning, list(logger.handlers), logger.propagate
    level, path = logger.level, list(sys.path)
    try:
        yield
    finally:
        sys.excepthook, warnings.showwarning, logger.handlers, logger.propagate = before
        logger.setLevel(level)
        ExecutionLog.least_of_all = None
        sys.path[:] = path


#: What ``python -m maestro_hive`` executes.
MAIN = "from maestro_hive.cli import main; main()"


def maestro_process(*arguments: str | Path, stdin: str = "", **changes: str) -> Done:
    """Run a verb as a process of its own, its output in a pipe."""
    return run_python(MAIN, *arguments, stdin=stdin, env=environment(**changes))


def start_maestro(*arguments: str | Path, cwd: Path | None = None, **changes: str) -> PythonProcess:
    """Start a verb as a process of its own, its streams pipes."""
    return PythonProcess(MAIN, *arguments, stderr=True, env=environment(**changes), cwd=cwd)


def answer(done: Done, code: int = 0) -> Any:
    """Return the JSON that a verb printed, which must be all that it printed."""
    assert done.returncode == code, done
    return json.loads(done.stdout)


def complaint(done: Done, code: int = 1) -> str:
    """Return the one sentence of a verb that failed; at most the store's line comes with it."""
    assert (done.returncode, done.stdout) == (code, ""), done
    lines = [line for line in done.stderr.splitlines() if not line.startswith("store: ")]
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("maestro: ")
    return lines[0]


class Seen(NamedTuple):
    """What a terminal showed, and how the process in it ended."""

    returncode: int
    text: str


def in_terminal(*arguments: str | Path, columns: int = 80, **changes: str) -> Seen:
    """Run a verb in this process, its streams a terminal of this width."""
    screen, inside = pty.openpty()
    shown: list[str] = []
    reading = threading.Thread(target=lambda: shown.append(_shown(screen, {})))
    reading.start()
    try:
        with contextlib.ExitStack() as streams:
            opened = [
                streams.enter_context(os.fdopen(os.dup(inside), mode)) for mode in ("r", "w", "w")
            ]
            os.close(inside)
            terminal = {"TERM": "xterm-256color", "COLUMNS": str(columns), **changes}
            code = _called([str(each) for each in arguments], opened, terminal)
        reading.join()  # it ends when the last stream is closed
    finally:
        os.close(screen)
    return Seen(code, shown[0].replace("\r\n", "\n"))


def in_terminal_process(
    *arguments: str | Path,
    typed: Mapping[str, str | Callable[[int], object]] | None = None,
    columns: int = 80,
    program: str = MAIN,
    **changes: str,
) -> Seen:
    """Run a verb as a process in a terminal; after each text in ``typed`` is shown, type its keys.

    In place of keys there may be a function, which is given the terminal.
    """
    screen, inside = pty.openpty()
    try:
        resize(inside, 50, columns)
        env = environment(**{"TERM": "xterm-256color", **changes})
        process = PythonInTerminal(program, *arguments, terminal=inside, env=env)
        os.close(inside)
        try:
            text = _shown(screen, dict(typed or {}), process.pid)
            code = process.wait(timeout=60)
        finally:
            process.kill()  # no effect if it has ended
            process.wait()
    finally:
        os.close(screen)
    return Seen(code, text.replace("\r\n", "\n"))


def resize(terminal: int, lines: int, columns: int) -> None:
    """Give a terminal another size."""
    ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))


def _shown(
    screen: int, typed: dict[str, str | Callable[[int], object]], pid: int | None = None
) -> str:
    text, deadline = "", time.monotonic() + 60
    while time.monotonic() < deadline:
        ready, _, _ = select.select([screen], [], [], 1.0)
        if not ready:
            continue
        try:
            piece = os.read(screen, 65536)
        except OSError:  # Linux says so when the last process in the terminal is gone
            return text
        if not piece:
            return text
        text += piece.decode()
        for awaited in [each for each in typed if each in text]:
            _wait_until_it_reads(pid)
            action = typed.pop(awaited)
            if isinstance(action, str):
                os.write(screen, action.encode())
            else:
                action(screen)
    raise TimeoutError(f"the terminal shows, after a minute: {text}")


def _wait_until_it_reads(pid: int | None) -> None:
    """Return when a process has done nothing for a while; where that is not known, after it."""
    time.sleep(_UNTIL_IT_READS)
    path = Path(f"/proc/{pid}/stat")
    quiet, deadline = 0, time.monotonic() + 30
    while path.exists() and quiet < 5 and time.monotonic() < deadline:
        is_asleep = path.read_text().rpartition(")")[2].split()[0] == "S"
        quiet = quiet + 1 if is_asleep else 0
        time.sleep(0.01)


@functools.cache
def _template(make: Callable[[Path], object]) -> Path:
    """Return a folder that was made once for this process, to be copied."""
    place = Path(tempfile.mkdtemp(prefix="maestro-test-"))
    atexit.register(shutil.rmtree, place)
    make(place / "state")
    return place / "state"


def copy_of(make: Callable[[Path], object], folder: Path) -> Path:
    """Return a folder with what ``make`` puts into one, which is made once and then copied."""
    return shutil.copytree(_template(make), folder, dirs_exist_ok=True)


def config_in(folder: Path) -> ExecutionConfig:
    """Return a configuration in which all checkpoints there are were asked for."""
    config = ExecutionConfig.in_folder(folder)
    config.state.auto_checkpoint_interval_seconds = 0
    return config


def filled(folder: Path) -> Path:
    """Return a state folder with a run, a value and a checkpoint in it; no process has it open."""
    return copy_of(_fill, folder)


def _fill(folder: Path) -> None:
    manager = StateManager(folder, auto_persist=True)
    manager.set_state("k", "v" * 3000)
    manager.checkpoint("saved")
    with StatePersistence(config_in(folder), "run") as persistence:
        for number in range(5):
            persistence.mark_task_completed(f"t{number}", {f"a{number}": "x" * 3500})
        persistence._run.store.checkpoint()  # type: ignore[attr-defined]
    manager.shutdown()


def execute_steps(folder: Path, run: str, *steps: str) -> None:
    """Execute steps of a run, and make a checkpoint ``after-NAME`` of it after each."""

    async def all_of_them() -> None:
        config = config_in(folder)
        for step in steps:
            with PersonaExecutor(config, "developer", workflow_id=run) as executor:
                result = await executor.execute(lambda step=step: _remembering(step), step)
            assert result.success, result
            with StatePersistence(config, run) as persistence:
                persistence.checkpoint(f"after-{step}")

    asyncio.run(all_of_them())


def _remembering(step: str) -> str:
    current().memory[step] = "done"
    return f"the output of {step}"
