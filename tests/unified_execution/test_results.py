"""Results of finished steps: their attempts are told late, and nobody notices."""

from __future__ import annotations

import asyncio
import copy
import pickle
from typing import TYPE_CHECKING, Any

import pytest

from maestro_hive.engine.results import ExecutionResult, ExecutionStatus
from maestro_hive.unified_execution import ExecutionConfig, Level1Config, PersonaExecutor

if TYPE_CHECKING:
    from pathlib import Path


class Flaky:
    """A task that fails once."""

    def __init__(self) -> None:
        self.calls = 0

    async def __call__(self) -> str:
        self.calls += 1
        if self.calls == 1:
            raise ValueError("not yet")
        return "done"


def executor(folder: Path) -> PersonaExecutor:
    config = ExecutionConfig.in_folder(folder)
    config.level1 = Level1Config(base_delay_seconds=0)
    return PersonaExecutor(config, "writer", workflow_id="run")


def test_the_attempts_of_a_completed_step_are_those_that_were_made(tmp_path: Path) -> None:
    task = Flaky()
    with executor(tmp_path) as first:
        made = asyncio.run(first.execute(task, "write"))
    with executor(tmp_path) as second:
        completed = asyncio.run(second.execute(task, "write"))
        assert [each.to_dict() for each in second.attempts] == [
            each.to_dict() for each in made.attempts
        ]
    assert completed.attempts == made.attempts
    assert [each.status for each in completed.attempts] == [
        ExecutionStatus.RETRYING,
        ExecutionStatus.SUCCESS,
    ]
    assert completed.attempts[-1].output == "done"
    started, ended = completed.attempts[0].started_at, completed.attempts[-1].ended_at
    assert started is not None
    assert ended is not None
    assert completed.total_duration_seconds == pytest.approx((ended - started).total_seconds())


def test_a_result_does_not_change_when_its_step_is_executed_again(tmp_path: Path) -> None:
    async def task() -> int:
        return 1

    async def twice() -> tuple[ExecutionResult, ExecutionResult]:
        with executor(tmp_path) as one:
            return await one.execute(task, "t"), await one.options(force=True).execute(task, "t")

    first, second = asyncio.run(twice())
    assert [each.attempt_number for each in first.attempts] == [1]
    assert [each.attempt_number for each in second.attempts] == [2]


@pytest.mark.parametrize(
    "how", [copy.copy, copy.deepcopy, lambda result: pickle.loads(pickle.dumps(result))]
)
def test_a_result_can_be_copied_although_its_attempts_were_not_told(
    tmp_path: Path, how: Any
) -> None:
    with executor(tmp_path) as one:
        result = asyncio.run(one.execute(Flaky(), "write"))
    copied = how(result)
    assert copied.to_dict() == result.to_dict()


def test_attempts_can_be_set(tmp_path: Path) -> None:
    with executor(tmp_path) as one:
        result = asyncio.run(one.execute(Flaky(), "write"))
    result.attempts = []
    assert result.attempt_count == 0
