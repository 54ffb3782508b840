"""The three doors of older callers."""

from __future__ import annotations

import asyncio
import importlib
import json
from pathlib import Path
from typing import Any

import pytest

from maestro_hive.engine.config import get_execution_config
from maestro_hive.kernel.errors import ConfigurationError
from maestro_hive.unified_execution.iterative_executor import IterativeExecutor

IMPORT_PATHS = (
    "iterative_executor",
    "maestro_hive.core.execution.iterative_executor",
    "maestro_hive.execution.iterative_executor",
)


@pytest.fixture
def quick() -> None:
    get_execution_config().level1.base_delay_seconds = 0


def made(folder: Path, **options: Any) -> IterativeExecutor:
    with pytest.warns(DeprecationWarning, match="use maestro_hive.unified_execution.PersonaExec"):
        return IterativeExecutor(folder / "output", **options)


@pytest.mark.parametrize("import_path", IMPORT_PATHS)
def test_every_import_path_has_the_same_class(import_path: str) -> None:
    assert importlib.import_module(import_path).IterativeExecutor is IterativeExecutor


def test_its_defaults_are_those_of_older_callers() -> None:
    with pytest.warns(DeprecationWarning, match="PersonaExecutor"):
        executor = IterativeExecutor()
    assert (executor.output_dir, executor.max_iterations) == (Path("output"), 5)


def test_a_requirement_that_is_a_function_is_called(tmp_path: Path) -> None:
    result = made(tmp_path).execute(requirement=lambda: "a page")
    assert (result.success, result.output, result.errors) == (True, "a page", [])
    assert (tmp_path / "output" / "output.txt").read_text() == "a page"


def test_a_worker_is_called_with_the_requirement(tmp_path: Path) -> None:
    async def worker(requirement: str, *, loud: bool) -> dict[str, Any]:
        return {"asked": requirement, "loud": loud}

    result = made(tmp_path, worker=worker).execute(requirement="a page", loud=True)
    assert result.output == {"asked": "a page", "loud": True}
    assert json.loads((tmp_path / "output" / "output.json").read_text()) == result.output


@pytest.mark.usefixtures("quick")
def test_it_continues_until_it_succeeds(tmp_path: Path) -> None:
    calls = []

    def third_time() -> int:
        calls.append(1)
        if len(calls) < 3:
            raise ValueError(f"not yet: {len(calls)}")
        return 3

    result = made(tmp_path).execute(requirement=third_time)
    assert (result.success, result.output, result.iterations) == (True, 3, 3)
    assert result.errors == ["not yet: 1", "not yet: 2"]


@pytest.mark.usefixtures("quick")
def test_it_gives_up_after_its_iterations_and_says_why(tmp_path: Path) -> None:
    def never() -> None:
        raise ValueError("never")

    result = made(tmp_path, max_iterations=2).execute(requirement=never)
    assert (result.success, result.output, result.errors) == (False, None, ["never", "never"])
    assert not (tmp_path / "output").exists()


def test_it_can_be_used_inside_a_loop(tmp_path: Path) -> None:
    async def main() -> tuple[Any, Any]:
        executor = made(tmp_path)
        return executor.execute(lambda: 1).output, (await executor.execute_async(lambda: 2)).output

    assert asyncio.run(main()) == (1, 2)


def test_a_requirement_that_nobody_can_do_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="the requirement 'a page' is not a function"):
        made(tmp_path).execute(requirement="a page")


def test_too_few_iterations_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="max_iterations is 0"):
        made(tmp_path, max_iterations=0)
