"""The last call for an object that is collected, and the end of its process."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import atexit, time, weakref

{before}
from maestro_hive.engine.shared import call_for_collected
{after}

class Holder:
    def __init__(self, call):
        weakref.finalize(self, call_for_collected, call).atexit = False

def last_call():
    time.sleep(0.3)
    print("called", flush=True)
    raise ValueError("not one of our errors")
"""


def run(program: str, before: str = "", after: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", PROGRAM.format(before=before, after=after) + program],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_a_process_waits_for_the_last_call_of_a_collected_object() -> None:
    done = run("Holder(last_call)")
    assert (done.returncode, done.stdout) == (0, "called\n")
    assert "ValueError: not one of our errors" in done.stderr


def test_no_last_call_is_made_once_the_process_ends() -> None:
    """A thread that is started then could be ended by the interpreter while it holds a lock."""
    done = run("", before="atexit.register(lambda: Holder(last_call))")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_last_call_that_hangs_delays_the_end_only_for_a_while() -> None:
    done = run(
        "Holder(lambda: time.sleep(60))",
        after="import maestro_hive.engine.shared as shared; shared.PATIENCE = 0.2",
    )
    assert done.returncode == 0
