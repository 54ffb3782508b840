"""The package: its names are loaded late, and both of its import paths are the same package."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import maestro_hive

ROOT = Path(__file__).parents[2]

OURS = "from maestro_hive.kernel.errors import MaestroError as one"
THEIRS = "from src.maestro_hive.kernel.errors import MaestroError as other"

LATE = ["asyncio", "apsw", "click", "jsonschema", "logging", "msgspec", "rich"]


def printed(program: str) -> str:
    """Return the output of a program that is started in the project's folder."""
    command = [sys.executable, "-W", "error", "-c", program]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_type_checkers_and_programs_find_the_same_names() -> None:
    tree = ast.parse((ROOT / "src/maestro_hive/__init__.py").read_text(encoding="utf-8"))
    checked = {
        name.asname
        for block in tree.body
        if isinstance(block, ast.If)
        for each in block.body
        if isinstance(each, ast.ImportFrom)
        for name in each.names
        if name.asname
    }
    assert checked | {"__version__"} == set(maestro_hive.__all__)
    assert dir(maestro_hive) == maestro_hive.__all__
    for name in maestro_hive.__all__:
        assert getattr(maestro_hive, name) is not None


def test_a_name_that_does_not_exist_is_an_error_that_names_the_package() -> None:
    with pytest.raises(AttributeError, match="module 'maestro_hive' has no attribute 'Nothing'"):
        getattr(maestro_hive, "Nothing".strip())


def test_importing_the_package_imports_no_library() -> None:
    program = f"import sys, maestro_hive; print([each for each in {LATE} if each in sys.modules])"
    assert printed(program) == "[]\n"


@pytest.mark.parametrize("order", [[OURS, THEIRS], [THEIRS, OURS]])
def test_both_paths_give_the_same_class(order: list[str]) -> None:
    lines = [*order, "print(one is other, one.__module__)"]
    assert printed("\n".join(lines)) == "True maestro_hive.kernel.errors\n"


def test_every_way_of_importing_gives_the_same_module() -> None:
    program = """
import importlib, sys
import src.maestro_hive.kernel.files
import maestro_hive.kernel.files as ours
assert src.maestro_hive.kernel.files is ours
import src.maestro_hive as package, maestro_hive
assert package is maestro_hive
assert importlib.import_module("src.maestro_hive.kernel.clock") is maestro_hive.kernel.clock
for name, module in list(sys.modules.items()):
    if name.startswith("maestro_hive"):
        assert module.__spec__.name == module.__name__ == name, name
try:
    import src.maestro_hive.nothing
except ModuleNotFoundError as error:
    print(error)
"""
    assert "maestro_hive.nothing" in printed(program)
