"""A program that the tests fork ends as one that they start."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.python_processes import run_python

if TYPE_CHECKING:
    from pathlib import Path

PROGRAMS = {
    "an exit code": "import sys; sys.exit(5)",
    "a signal": "import os; os.kill(os.getpid(), 9)",
    "Ctrl+C": "import os; os.kill(os.getpid(), 2); import time; time.sleep(9)",
    "an error": "def f(): raise ValueError('no') from KeyError(1)\nf()",
    "a thread and exit handlers": """
import atexit, sys, threading
def late(): threading.main_thread().join(); print("late", *sys.argv, __name__)
atexit.register(print, "over")
threading.Thread(target=late).start()
print("first", sys.stdin.read())
""",
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_forked_program_ends_as_one_that_is_started(name: str) -> None:
    words = [sys.executable, "-c", PROGRAMS[name], "a", "b c"]
    started = subprocess.run(words, input="", capture_output=True, text=True, check=False)
    forked = run_python(PROGRAMS[name], "a", "b c")
    assert forked.returncode == started.returncode
    assert forked.stdout == started.stdout
    assert forked.stderr == started.stderr


EXECUTES_A_STEP = """
import sys
before = set(sys.modules)
from maestro_hive import Hive
from maestro_hive.cli.app import run
with Hive(sys.argv[1]) as hive:
    @hive.step
    def draft(): return "draft"
    @hive.workflow
    async def build(): return await draft()
    hive.run_sync(build, run_id="r")
run(["runs", "--store", sys.argv[1]])
print(sorted(set(sys.modules) - before))
"""


def test_a_forked_program_has_imported_the_package(tmp_path: Path) -> None:
    """Otherwise each of them spends a tenth of a second and more on imports."""
    assert run_python(EXECUTES_A_STEP, tmp_path, check=True).stdout.splitlines()[-1] == "[]"
