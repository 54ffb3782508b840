"""The folder of a demonstration, and the processes in it: the engine is one of its own, to be killed."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import sys
import threading
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

from maestro_hive.admin import folder as folders
from maestro_hive.admin.events import EventFeed
from maestro_hive.demo.proof import completions, read_ledger
from maestro_hive.kernel.errors import MaestroError
from maestro_hive.team.graph_files import load_file
from maestro_hive.team.processes import start_guarded, unguard

if TYPE_CHECKING:
    from collections.abc import Iterator

    from maestro_hive.demo.proof import Start
    from maestro_hive.maestro.state.events import RunEvent

#: The run's id, which is the feature of its graph.
RUN = "shortener"
GRAPH = "task-graph.toml"
#: The state folder, as the commands in the project's folder name it.
STORE = "../state"
#: What is complete, and what is executed, when the engine is killed.
COMPLETED, INTERRUPTED = ("DESIGN", "BACKEND"), ("FRONTEND", "DOCS")
#: How often is looked what was printed or recorded, and how long an engine has to stop, in seconds.
LOOK_SECONDS, _STOP_SECONDS = 0.1, 10.0
#: What users have set for their own runs, which would change this one.
_SETTINGS = ("MAESTRO_", "JIRA_")


class Session:
    """A folder with the project, the state folder and the ledger of one demonstration."""

    def __init__(self, folder: Path) -> None:
        self.project = folder / "project"
        self._state = folder / "state"
        self._ledger = folder / "ledger.txt"

    def prepare(self) -> None:
        """Write the graph and the scripted personas."""
        self.project.mkdir()
        for name in (GRAPH, "personas.py"):
            text = resources.files("maestro_hive.demo").joinpath("project", name).read_bytes()
            (self.project / name).write_bytes(text)

    def tasks(self) -> list[str]:
        """Return the ids of the tasks, in the order of the graph."""
        graph = load_file(self.project / GRAPH).graph
        assert graph is not None, "load_file raises if there is none"
        return [task.id for task in graph.tasks]

    def ledger(self) -> list[Start]:
        """Return the starts that the personas have written down."""
        return read_ledger(self._ledger.read_text("utf-8")) if self._ledger.exists() else []

    def events(self) -> list[RunEvent]:
        """Return the events of the run, from its journal."""
        with folders.reading(self._state) as reader:
            return EventFeed(reader, RUN).next_batch()[0]

    def is_half_way(self) -> bool:
        """Return whether the parts are complete or executed that shall be so at the kill."""
        if not {each.task for each in self.ledger()}.issuperset(INTERRUPTED):
            return False
        with contextlib.suppress(MaestroError):  # the journal is made only now
            return set(completions(self.events())).issuperset(COMPLETED)
        return False

    def command(self, *words: str) -> list[str]:
        """Return what is executed for a verb; nothing of the project can hide a module of ours."""
        return [sys.executable, "-P", "-m", "maestro_hive", *words, "--store", STORE]

    def environment(self) -> dict[str, str]:
        """Return the environment without settings of the user's, and with this Python first."""
        inherited = {
            name: value for name, value in os.environ.items() if not name.startswith(_SETTINGS)
        }
        path = os.pathsep.join(
            [str(Path(sys.executable).parent), inherited.get("PATH", os.defpath)]
        )
        return {**inherited, "PATH": path}

    def start(self, *words: str) -> Engine:
        """Start a process that executes the run."""
        return Engine(self.command(*words), self.project, self.environment())


class Engine:
    """A process that executes the run; signals of a terminal do not reach it, whoever started it does.

    It is killed when this process is: its tasks would wait for a kill that nobody sends any more.
    """

    def __init__(self, command: list[str], folder: Path, environment: dict[str, str]) -> None:
        self._process = start_guarded(command, folder, environment)
        self._printed: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    @property
    def pid(self) -> int:
        """Its process."""
        return self._process.pid

    def _read(self) -> None:
        assert self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        with self._process.stdout, open(descriptor, "rb", closefd=False) as output:
            for line in output:
                self._printed.put(line.decode("utf-8", "replace").rstrip("\n"))
        self._printed.put(None)

    def lines(self) -> Iterator[str | None]:
        """Yield what it prints, line by line, until it ends; None while it prints nothing."""
        while True:
            try:
                line = self._printed.get(timeout=LOOK_SECONDS)
            except queue.Empty:
                yield None
                continue
            if line is None:
                return
            yield line

    def kill(self) -> None:
        """Kill it with SIGKILL, as ``kill -9`` does."""
        os.kill(self.pid, signal.SIGKILL)
        self.wait()

    def wait(self) -> int:
        """Return its exit code, when it has ended."""
        code = self._process.wait()
        unguard(self.pid)
        return code

    def stop(self) -> None:
        """Stop it as Ctrl+C does, if it has not ended: it ends the processes of its tasks."""
        if self._process.poll() is not None:
            unguard(self.pid)
            return
        self._process.terminate()
        try:
            self._process.wait(_STOP_SECONDS)
            unguard(self.pid)
        except subprocess.TimeoutExpired:
            self.kill()
