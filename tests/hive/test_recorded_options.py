"""The options that a step was executed with are recorded, and are not part of its identity."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Unpack

from maestro_hive import ExecutionConfig, Hive
from maestro_hive.admin.runs import step_details
from maestro_hive.maestro.state.stores import open_reader
from maestro_hive.unified_execution import PersonaExecutor
from tests.cli.processes import maestro
from tests.hive.conftest import quick_config

if TYPE_CHECKING:
    from pathlib import Path

    from maestro_hive.engine.options import StepOptions


def build(folder: Path, calls: list[str], **options: Unpack[StepOptions]) -> list[str]:
    with Hive(folder, quick_config()) as hive:

        @hive.step(**options)
        async def implement(part: str) -> str:
            calls.append(part)
            return part.upper()

        @hive.workflow
        async def work() -> list[str]:
            return [await implement("a"), await implement("a")]

        return hive.run_sync(work, run_id="run-1")


def recorded(folder: Path, step: str, run_id: str = "run-1") -> list[dict[str, Any]]:
    """Return the recorded options of each attempt."""
    reader = open_reader(folder)
    try:
        return [each.options for each in step_details(reader, run_id, step).attempts]
    finally:
        reader.close()


def test_options_that_were_given_are_recorded_with_each_attempt(folder: Path) -> None:
    build(folder, [], max_attempts=5, timeout=120.5, on_ambiguous="rerun", rate="1000/s")
    given = {"max_attempts": 5, "timeout": 120.5}
    assert recorded(folder, "implement") == [given]
    assert recorded(folder, "implement#2") == [given]  # an equal call
    shown = maestro("show", "run-1", "implement", "--store", folder)
    assert "options:       max_attempts=5, timeout=120.5\n" in shown.stdout


def test_a_step_without_options_records_none(folder: Path) -> None:
    build(folder, [])
    assert recorded(folder, "implement") == [{}]
    assert "options:" not in maestro("show", "run-1", "implement", "--store", folder).stdout


def test_a_completed_step_does_not_run_again_when_its_options_change(folder: Path) -> None:
    calls: list[str] = []
    assert build(folder, calls) == build(folder, calls, max_attempts=7, timeout=3) == ["A", "A"]
    assert calls == ["a", "a"]


def test_an_executor_records_the_options_of_each_call(folder: Path) -> None:
    def task(number: int) -> int:
        return number

    with PersonaExecutor(ExecutionConfig.in_folder(folder), "p", workflow_id="run-1") as executor:
        asyncio.run(executor.execute(task, "plain", 1))
        asyncio.run(executor.options(timeout=9).execute(task, "plain", 2))
        asyncio.run(executor.execute(task, "plain", 3))
    found = [recorded(folder, step) for step in ("plain", "plain#2", "plain#3")]
    assert found == [[{}], [{"timeout": 9.0}], [{}]]
