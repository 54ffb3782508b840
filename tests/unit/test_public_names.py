"""The public names are those of the reference, and are loaded at their first use."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import maestro_hive
from maestro_hive.cli import cli
from tests.tables import for_each

REFERENCE = Path(__file__).parents[2] / "docs" / "reference"
PAGE = (REFERENCE / "api.md").read_text(encoding="utf-8")
LATE = ["apsw", "asyncio", "click", "rich", "jsonschema", "pydantic", "maestro_hive.maestro"]


def documented() -> dict[str, list[str]]:
    """Return the names on the page, by the module that its heading gives."""
    found: dict[str, list[str]] = {}
    for section in re.split(r"^## ", PAGE, flags=re.MULTILINE)[1:]:
        heading, _, rest = section.partition("\n")
        module = re.fullmatch(r"`([\w.]+)`", heading)
        if module:
            found[module[1]] = re.findall(
                r"^- \[?`(\w+)`(?:\]\(#[\w-]+\))?: \S", rest.partition("\n### ")[0], re.MULTILINE
            )
    return found


def in_a_new_process(*arguments: str) -> str:
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.strip()


@for_each(
    "module",
    [
        "maestro_hive",
        "maestro_hive.hive",
        "maestro_hive.unified_execution",
        "maestro_hive.core.state_manager",
        "maestro_hive.core.self_reflection.self_healing_engine",
        "maestro_hive.core.self_reflection.failure_detector",
        "maestro_hive.testing",
    ],
)
def test_the_names_a_module_offers_are_the_documented_ones(module: str) -> None:
    offered = import_module(module).__all__
    assert sorted(offered) == sorted(documented()[module])
    assert len(offered) == len(set(offered))


@pytest.mark.parametrize(
    "module", ["maestro_hive.maestro.state.checkpoint", "maestro_hive.kernel.errors"]
)
def test_the_classes_of_a_module_are_the_documented_ones(module: str) -> None:
    classes = [
        name
        for name, each in vars(import_module(module)).items()
        if inspect.isclass(each) and each.__module__ == module and not name.startswith("_")
    ]
    assert sorted(classes) == sorted(documented()[module])


@for_each("module", documented())
def test_every_documented_name_can_be_imported_and_says_what_it_is(module: str) -> None:
    home = import_module(module)
    for name in documented()[module]:
        found = getattr(home, name)
        assert isinstance(found, str) or inspect.getdoc(found), name


def test_no_module_with_public_names_is_forgotten() -> None:
    assert list(documented()) == [
        "maestro_hive",
        "maestro_hive.hive",
        "maestro_hive.unified_execution",
        "maestro_hive.core.state_manager",
        "maestro_hive.core.self_reflection.self_healing_engine",
        "maestro_hive.core.self_reflection.failure_detector",
        "maestro_hive.maestro.state.checkpoint",
        "maestro_hive.kernel.errors",
        "maestro_hive.team.runner",
        "maestro_hive.team.personas",
        "maestro_hive.team.progress",
        "maestro_hive.team.graph",
        "maestro_hive.team.graph_files",
        "maestro_hive.testing",
    ]


def test_what_programs_need_for_task_graphs_is_documented() -> None:
    found = {name for module in documented() if ".team" in module for name in documented()[module]}
    assert {"TeamRunner", "Assignment", "ContextFull", "check_graph", "load_file"} <= found
    section = PAGE.partition("\n### `TeamRunner`\n")[2].partition("\n### ")[0]
    assert "\nasync run(" in section
    assert "\nchoose(" not in section  # for the command


def test_the_commands_are_the_documented_ones() -> None:
    page = (REFERENCE / "cli.md").read_text(encoding="utf-8")
    assert set(cli.commands) == set(re.findall(r"^### `maestro (\w+)`$", page, re.MULTILINE))


@pytest.mark.parametrize(
    "module", ["maestro_hive", "maestro_hive.hive", "maestro_hive.unified_execution"]
)
def test_type_checkers_see_the_names_that_are_loaded_lazily(module: str) -> None:
    home = import_module(module)
    imports = [
        node
        for node in ast.walk(ast.parse(inspect.getsource(home)))
        if type(node) is ast.ImportFrom
    ]
    seen = {each.asname: node.module for node in imports for each in node.names if each.asname}
    assert set(seen) == set(home.__all__) - {"__version__"}
    for name, origin in seen.items():
        assert getattr(home, name) is getattr(import_module(str(origin)), name)


def test_the_same_name_is_the_same_thing_wherever_it_is_imported_from() -> None:
    once: dict[str, object] = {}
    for module in (
        "maestro_hive",
        "maestro_hive.hive",
        "maestro_hive.unified_execution",
        "maestro_hive.core.state_manager",
    ):
        for name in documented()[module]:
            found = getattr(import_module(module), name)
            assert once.setdefault(name, found) is found


def test_dir_shows_the_public_names_before_they_are_loaded() -> None:
    code = "import maestro_hive; print(*dir(maestro_hive))"
    assert in_a_new_process("-c", code).split() == sorted(documented()["maestro_hive"])


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="'maestro_hive' has no attribute 'Hivee'"):
        _ = maestro_hive.Hivee  # type: ignore[attr-defined]


def test_importing_the_package_loads_nothing_heavy() -> None:
    code = f"import sys, maestro_hive; print(*(set({LATE}) & set(sys.modules)))"
    assert in_a_new_process("-c", code) == ""


def test_importing_hive_loads_its_methods_and_not_what_they_use() -> None:
    """Within 150 ms over a bare interpreter; what executes runs would take twice that."""
    code = "import sys; from maestro_hive import Hive; print(*sys.modules)"
    loaded = set(in_a_new_process("-c", code).split())
    assert loaded.isdisjoint({*LATE, "dataclasses", "inspect", "logging"})
    assert {each for each in loaded if each.startswith("maestro_hive")} == {
        "maestro_hive",
        *("maestro_hive.kernel", "maestro_hive.kernel.errors"),
        *(f"maestro_hive.{each}" for each in ("hive", "hive.hive", "hive.enqueuing")),
        "maestro_hive.hive.definitions",
    }


def test_a_run_loads_only_what_every_run_needs(tmp_path: Path) -> None:
    rarely = [
        *("click", "rich", "jsonschema", "pydantic", "httpx2", "email", "http"),
        *("maestro_hive.maestro.state.events", "maestro_hive.unified_execution"),
        *("maestro_hive.engine.audit", "maestro_hive.engine.tickets.http"),
    ]
    code = (
        "import asyncio, sys\n"
        "from maestro_hive import Hive\n"
        f"with Hive({str(tmp_path)!r}) as hive:\n"
        "    @hive.step\n"
        "    async def work(): return 1\n"
        "    @hive.workflow\n"
        "    async def flow(): return await work()\n"
        "    asyncio.run(hive.run(flow))\n"
        f"print(*(set({rarely}) & set(sys.modules)))"
    )
    assert in_a_new_process("-c", code) == ""


def test_the_configuration_and_the_errors_load_no_database() -> None:
    code = (
        "import sys\n"
        "from maestro_hive import ExecutionConfig, MaestroError\n"
        "import maestro_hive.kernel.files\n"
        "print(*({'asyncio', 'click', 'rich', 'jsonschema', 'pydantic'} & set(sys.modules)))"
    )
    assert in_a_new_process("-c", code) == ""


def test_the_module_is_the_command() -> None:
    version = f"maestro, version {maestro_hive.__version__}"
    assert in_a_new_process("-m", "maestro_hive", "--version") == version


def test_asking_for_the_version_opens_no_database() -> None:
    code = (
        "import sys\n"
        "sys.argv = ['maestro', '--version']\n"
        "from maestro_hive.cli import main\n"
        "try: main()\n"
        "except SystemExit: print(*({'apsw', 'asyncio', 'jsonschema', 'rich'} & set(sys.modules)))"
    )
    assert in_a_new_process("-c", code) == f"maestro, version {maestro_hive.__version__}"


def test_types_are_shipped() -> None:
    assert (Path(str(maestro_hive.__file__)).parent / "py.typed").exists()
