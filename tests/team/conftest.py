"""A team on a real folder, that does not wait between attempts; its tasks are real processes."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import TYPE_CHECKING, Any

import pytest

from maestro_hive import Hive
from maestro_hive.team.graph import Graph, check_graph
from maestro_hive.team.runner import TeamRunner
from maestro_hive.team.state import ExecutionState
from maestro_hive.team.state_file import PATH
from tests.hive.conftest import quick_config

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

#: A persona that does what the description of its task says, in a shell.
SHELL = {"command": ["sh", "-c", 'eval "$(sed -n 3p)"']}


def task(name: str, does: str = ":", after: str = "", **more: Any) -> dict[str, Any]:
    """Return a task that executes a line of shell."""
    return {
        "id": name,
        "title": name,
        "description": does,
        "dependencies": after.split(),
        **more,
    }


def graph(*tasks: dict[str, Any], **more: Any) -> Graph:
    """Return a graph of these tasks."""
    document = {"feature": "test", "persona": SHELL, "tasks": list(tasks), **more}
    checked = check_graph(json.dumps(document).encode())
    assert checked.graph is not None, checked.errors
    return checked.graph


class Team:
    """Executes graphs in a folder."""

    def __init__(self, hive: Hive, folder: Path) -> None:
        self.hive = hive
        self.folder = folder
        #: As other processes would have; each holds files open until it is closed.
        self._others: list[Hive] = []

    def run(self, made: Graph, run_id: str = "r", workers: int = 4) -> dict[str, Any]:
        """Execute a graph to its end; the same run is resumed."""
        runner = self.hive_runner(workers)
        return asyncio.run(runner.run(made, run_id=run_id, folder=self.folder))

    def run_strictly(self, made: Graph) -> dict[str, Any]:
        """Execute a graph to its end, as ``--strict`` does."""
        runner = TeamRunner(self._other_hive(), strict=True)
        return asyncio.run(runner.run(made, run_id="r", folder=self.folder))

    def hive_runner(self, workers: int = 4) -> TeamRunner:
        """Return a runner on a hive of its own, as another process would have."""
        return TeamRunner(self._other_hive(), workers=workers)

    def _other_hive(self) -> Hive:
        self._others.append(Hive(self.hive.config.state.state_dir, self.hive.config))
        return self._others[-1]

    def close(self) -> None:
        """Close all hives."""
        for each in (*self._others, self.hive):
            each.close()

    def lines(self, name: str = "log") -> list[str]:
        """Return the lines of a file in the folder."""
        path = self.folder / name
        return path.read_text().split("\n")[:-1] if path.exists() else []


def statuses(team: Team) -> dict[str, str]:
    """Return the statuses of tasks in the state file."""
    state = ExecutionState.load(team.folder / PATH)
    return {} if state is None else {name: each.status.value for name, each in state.tasks.items()}


@pytest.fixture
def team(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Team]:
    folder = tmp_path / "work"
    folder.mkdir()
    monkeypatch.setattr(sys, "path", [*sys.path])
    made = Team(Hive(tmp_path / "state", quick_config()), folder)
    yield made
    made.close()
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None)).startswith(str(tmp_path)):
            del sys.modules[name]  # another test has another one by this name
