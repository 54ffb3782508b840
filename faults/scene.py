"""A folder with a run in it, what its processes noted beside the run, and what the run shows."""

from __future__ import annotations

import json
import os
import time
from typing import TYPE_CHECKING, Any

from maestro_hive.engine.config import ExecutionConfig, Level1Config, StateConfig
from maestro_hive.maestro.state.projections import RunState, facts_of, fold
from maestro_hive.maestro.state.sqlite.store import SqliteStore
from maestro_hive.unified_execution.persona_executor import PersonaExecutor

if TYPE_CHECKING:
    from pathlib import Path

RUN = "run-1"
PERSONA = "developer"


class Scene:
    """One run in a folder; what a body does before anything else is to call ``started``."""

    def __init__(self, folder: Path, options: dict[str, Any]) -> None:
        self.folder = folder
        self.options = options

    # --- inside a process ---

    def take_over_output(self) -> None:
        """Send what the process prints to a file of its own."""
        errors = os.open(self.folder / "errors", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(errors, 2)
        os.dup2(errors, 1)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)

    def executor(self, **level1: Any) -> PersonaExecutor:
        """Return an executor of the run."""
        return PersonaExecutor(self.config(**level1), PERSONA, workflow_id=RUN)

    def config(self, **level1: Any) -> ExecutionConfig:
        """Return the configuration of the run; without waits, unless asked for."""
        chosen = {"base_delay_seconds": 0.0, "jitter": 0.0, **level1}
        return ExecutionConfig(
            level1=Level1Config(**chosen),
            state=StateConfig(state_dir=str(self.folder / "state")),
        )

    def say(self, **facts: Any) -> None:
        """Tell the test."""
        _add_line(self.folder / "said", json.dumps(facts))

    def started(self, name: str) -> int:
        """Note that a body starts; return how often it has."""
        _add_line(self.folder / "starts", f"{name} {os.getpid()} {time.monotonic()}")
        return self.starts().count(name)

    def show(self, executor: PersonaExecutor, **facts: Any) -> None:
        """Say how a workflow ended, and what the views show."""
        assert executor.state_persistence is not None
        state = executor.state_persistence.state
        self.say(
            done=True,
            completed=state.completed_tasks,
            pending=state.pending_tasks,
            retries=state.retry_counts,
            persona=state.persona_states.get(PERSONA, {}),
            tokens=executor.get_token_usage(),
            **facts,
        )

    # --- for the test ---

    def said(self) -> list[dict[str, Any]]:
        """Return what was said by all processes so far."""
        return [json.loads(line) for line in _lines(self.folder / "said")]

    def starts(self) -> list[str]:
        """Return the names of the bodies that started, in order."""
        return [line.split()[0] for line in _lines(self.folder / "starts")]

    def start_times(self) -> list[float]:
        """Return when they did, on the clock that all processes share."""
        return [float(line.split()[2]) for line in _lines(self.folder / "starts")]

    def journal(self) -> RunState:
        """Read what the journal has of the run, without taking it."""
        store = SqliteStore(self.folder / "state")
        try:
            record = store.run(RUN)
            return fold(store.entries(record.id) if record else [], store.load)
        finally:
            store.close()

    def errors(self) -> str:
        """Return the end of what went to standard error."""
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
