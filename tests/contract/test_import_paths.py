"""``src.maestro_hive…`` and ``maestro_hive…``, imported in one process, are the same modules."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[2]


def run(program: str) -> str:
    """Run a program in the folder of the project, and return what it prints."""
    made = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        cwd=PROJECT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert made.returncode == 0, made.stderr
    return made.stdout


OURS = "from maestro_hive.{module} import {name} as one"
THEIRS = "from src.maestro_hive.{module} import {name} as other"


@pytest.mark.parametrize("order", [[OURS, THEIRS], [THEIRS, OURS]])
@pytest.mark.parametrize(
    "module, name",
    [
        ("core.state_manager", "StateManager"),
        ("unified_execution", "PersonaExecutor"),
        ("unified_execution.exceptions", "UnrecoverableError"),
        ("maestro.state.checkpoint", "CheckpointManager"),
        ("engine.errors", "MaestroError"),
        ("execution.iterative_executor", "IterativeExecutor"),
    ],
)
def test_both_paths_give_the_same_class(order: list[str], module: str, name: str) -> None:
    lines = [each.format(module=module, name=name) for each in order]
    assert run("\n".join([*lines, "print(one is other, one.__module__)"])).startswith(
        "True maestro_hive."
    )


def test_every_way_of_importing_gives_the_same_module() -> None:
    program = """
import importlib, pickle, sys
import src.maestro_hive.engine.step
import maestro_hive.engine.step as ours
assert src.maestro_hive.engine.step is ours
import src.maestro_hive as package, maestro_hive
assert package is maestro_hive
from src.maestro_hive import PersonaExecutor, StatePersistence
assert PersonaExecutor is maestro_hive.PersonaExecutor
assert importlib.import_module("src.maestro_hive.kernel.files") is sys.modules["maestro_hive.kernel.files"]
for name, module in list(sys.modules.items()):
    if name.startswith("maestro_hive"):
        assert module.__spec__.name == module.__name__ == name, name
assert len([each for each in sys.meta_path if type(each).__name__ == "_Alias"]) == 1
try:
    import src.maestro_hive.nothing
except ModuleNotFoundError as error:
    print(error)
"""
    assert "maestro_hive.nothing" in run(program)


def test_an_error_of_one_path_is_caught_by_the_other() -> None:
    program = """
from src.maestro_hive.unified_execution import PersonaExecutor
from maestro_hive.unified_execution import ExecutionConfig, UnrecoverableError
import asyncio
config = ExecutionConfig()
config.level1.base_delay_seconds = 0
def fail(): raise ValueError("no")
try:
    asyncio.run(PersonaExecutor(config).execute(fail, "t"))
except UnrecoverableError:
    print("caught")
"""
    assert run(program) == "caught\n"
