"""The pytest plugin: its fixtures, and that it costs nothing where they are not used."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import entry_points
from typing import TYPE_CHECKING

from maestro_hive.testing import MemoryStore

if TYPE_CHECKING:
    from pathlib import Path

    from maestro_hive import Hive
    from maestro_hive.testing import Kit

#: What nobody needs who does not use a fixture.
LATE = ["asyncio", "maestro_hive.hive", "maestro_hive.engine", "maestro_hive.maestro", "apsw"]


def test_the_fixtures_are_there_without_an_import(hive: Hive, hive_kit: Kit) -> None:
    assert hive is hive_kit.hive
    assert hive.runs() == []
    assert isinstance(hive_kit.store, MemoryStore)


def test_the_plugin_is_registered() -> None:
    (found,) = entry_points(group="pytest11", name="maestro_hive")
    assert found.value == "maestro_hive.testing.plugin"


def test_importing_the_plugin_loads_nothing_heavy() -> None:
    code = (
        "import sys, pytest; before = set(sys.modules)\n"
        "import maestro_hive.testing.plugin\n"
        f"print(*(set({LATE}) & (set(sys.modules) - before)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


#: The tests of a user, by file: without a fixture of ours, with one of the same name, with kills.
OF_A_USER = {
    "test_1_without.py": """
import sys

found = set(sys.modules)  # before the other files are imported


def test_without():
    assert "maestro_hive.testing.plugin" in found
    assert not found & {*LATE}
""",
    "test_2_own_name.py": """
import pytest


@pytest.fixture
def hive():
    return "bees"


def test_own_name(hive, hive_kit):
    assert hive == "bees"
    assert hive_kit.hive.runs() == []
""",
    "test_3_kills.py": """
import asyncio
from maestro_hive import Hive

shop = Hive("state")


@shop.step
async def charge():
    return 1


@shop.workflow
async def buy():
    try:
        return await asyncio.gather(charge(), charge(), shop.sleep(60))
    finally:
        print("cleaned up")


def test_kills(hive_kit, capsys):
    hive_kit.kill(charge)
    hive_kit.kill(charge, call=4, when="after")
    assert hive_kit.run(buy) == [1, 1, None]
    assert capsys.readouterr().out == "cleaned up\\n"
""",
}


def test_it_loads_nothing_where_it_is_not_used_and_leaves_nothing_behind(tmp_path: Path) -> None:
    for name, text in OF_A_USER.items():
        tmp_path.joinpath(name).write_text(text.replace("LATE", str(LATE[1:])))
    others = ["cacheprovider", "hypothesispytest", "anyio", "xdist", "xdist.looponfail", "timeout"]
    command = [sys.executable, "-m", "pytest", "-q", "-W", "error", *(f"-pno:{n}" for n in others)]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert "3 passed" in done.stdout
    assert "rror" not in done.stdout
    assert done.stderr == ""  # also at the end of the process
    left = {each.name for each in tmp_path.iterdir()} - {"__pycache__"}
    assert left == set(OF_A_USER)
