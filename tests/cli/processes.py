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
from maestro_hive.maestro.state.state_manager import StateManager
from maestro_hive.unified_execution import (
    ExecutionConfig,
    PersonaExecutor,
    StatePersistence,
    current,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

Done = subprocess.CompletedProcess[str]

COMMAND = [sys.executable, "-m", "maestro_hive"]
#: What would change what is printed, or where is looked.
_IN_THE_WAY = {"NO_COLOR", "FORCE_COLOR", "MAESTRO_STATE_DIR", "MAESTRO_CHECKPOINT_DIR", "COLUMNS"}

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
    try:
        yield
    finally:
        sys.excepthook, warnings.showwarning, logger.handlers, logger.propagate = before


def maestro_process(*arguments: str | Path, stdin: str = "", **changes: str) -> Done:
    """Run a verb as a process of its own, its output in a pipe."""
    return subprocess.run(
        [*COMMAND, *map(str, arguments)],
        input=stdin,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env=environment(**changes),
    )


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


#: Makes the terminal that it is started in the one that Ctrl+C comes from.
_IN_TERMINAL = """
import os, sys
os.close(os.open(os.ttyname(0), os.O_RDWR))
os.execv(sys.argv[1], sys.argv[1:])
"""


def in_terminal_process(
    *arguments: str | Path,
    typed: dict[str, str] | None = None,
    columns: int = 80,
    command: list[str] = COMMAND,
    **changes: str,
) -> Seen:
    """Run a verb as a process in a terminal; after each text in ``typed`` is shown, type its keys."""
    screen, inside = pty.openpty()
    try:
        ioctl(inside, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
        process = subprocess.Popen(
            [sys.executable, "-c", _IN_TERMINAL, *command, *map(str, arguments)],
            stdin=inside,
            stdout=inside,
            stderr=inside,
            start_new_session=True,
            env=environment(**{"TERM": "xterm-256color", **changes}),
        )
        os.close(inside)
        try:
            text = _shown(screen, dict(typed or {}))
            code = process.wait(timeout=60)
        finally:
            process.kill()  # no effect if it has ended
            process.wait()
    finally:
        os.close(screen)
    return Seen(code, text.replace("\r\n", "\n"))


def _shown(screen: int, typed: dict[str, str]) -> str:
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
            time.sleep(_UNTIL_IT_READS)
            os.write(screen, typed.pop(awaited).encode())
    raise TimeoutError(f"the terminal shows, after a minute: {text}")


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


def filled(folder: Path) -> Path:
    """Return a state folder with a run, a value and a checkpoint in it; no process has it open."""
    return copy_of(_fill, folder)


def _fill(folder: Path) -> None:
    manager = StateManager(folder, auto_persist=True)
    manager.set_state("k", "v" * 3000)
    manager.checkpoint("saved")
    with StatePersistence(ExecutionConfig.in_folder(folder), "run") as persistence:
        for number in range(5):
            persistence.mark_task_completed(f"t{number}", {f"a{number}": "x" * 2000})
        persistence._run.store.checkpoint()  # type: ignore[attr-defined]
    manager.shutdown()


def execute_steps(folder: Path, run: str, *steps: str) -> None:
    """Execute steps of a run, and make a checkpoint ``after-NAME`` of it after each."""

    async def all_of_them() -> None:
        config = ExecutionConfig.in_folder(folder)
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
