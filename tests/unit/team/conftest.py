from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING

import pytest

from maestro_hive.team.state import ExecutionState, TaskState, TaskStatus, WorkerState

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state.json"


@pytest.fixture
def state() -> ExecutionState:
    when = datetime(2030, 1, 2, 3, 4, 5, 678901, tzinfo=UTC)
    made = ExecutionState("naïve 日本 🐝", when, 1)
    made.tasks["T1"] = TaskState("T1", TaskStatus.FAILED, "w1", when, when, 'exit "1"\n')
    made.tasks["T2"] = TaskState("T2")
    made.workers["w1"] = WorkerState("w1", "busy", "T2", 1)
    made.checkpoints = ["T1-w1"]
    return made
