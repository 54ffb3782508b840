"""A program that the tests fork ends as one that they start."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.python_processes import run_python

PROGRAMS = {
    "an exit code": "import sys; sys.exit(5)",
    "a signal": "import os; os.kill(os.getpid(), 9)",
    "Ctrl+C": "import os; os.kill(os.getpid(), 2); import time; time.sleep(9)",
    "an error": "def f(): raise ValueError('no') from KeyError(1)\nf()",
    "a thread and exit handlers": """
import atexit, sys, threading, time
def late(): time.sleep(0.05); print("late", *sys.argv, __name__)
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
