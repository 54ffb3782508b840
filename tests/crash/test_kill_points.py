"""The storage layer killed, or failed by its disk, at its Nth call: a sample with Python alone.

``fault_injector`` has the fuse; ``make faults`` does the same to every call, from outside, with strace.
"""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.python_processes import run_python

ROOT = Path(__file__).resolve().parents[2]
INJECTOR = """
import sys
sys.path.insert(0, sys.argv[1])
from tests.crash.fault_injector import main
main(*sys.argv[2:])
"""
DONE, OURS = 0, 3
#: Every how many calls a scenario is hurt: primes, so that all kinds of call have their turn.
STRIDES = {"first": 23, "steps": 59, "checkpoint": 61, "manager": 41, "imported": 37}

Found = list[dict[str, Any]]


def inject(scenario: str, folder: Path, how: str) -> Found:
    done = run_python(INJECTOR, ROOT, scenario, folder, STRIDES[scenario], how, timeout=100)
    assert (done.returncode, done.stderr) == (0, "")
    found: Found = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("scenario", STRIDES)
def test_nothing_acknowledged_is_lost_when_killed_at_any_call(
    tmp_path: Path, scenario: str
) -> None:
    *killed, last = inject(scenario, tmp_path / "state", "kill")
    assert [each["wrong"] for each in (*killed, last)] == [[]] * (len(killed) + 1)
    assert {each["end"] for each in killed} == {-signal.SIGKILL}
    assert any(at.startswith("x") for each in killed for at in each["at"])  # in SQLite, too
    assert last["end"] == DONE


#: An import closes the folder itself, where a VFS in Python cannot keep quiet as SQLite does.
@pytest.mark.parametrize("scenario", [each for each in STRIDES if each != "imported"])
def test_a_disk_that_fails_at_any_call_is_an_error_of_ours_and_loses_nothing(
    tmp_path: Path, scenario: str
) -> None:
    *failed, last = inject(scenario, tmp_path / "state", "fail")
    assert [each["wrong"] for each in (*failed, last)] == [[]] * (len(failed) + 1)
    strange = [each for each in failed if each["end"] not in {DONE, OURS}]
    assert strange == []
    assert any(each["end"] == OURS for each in failed)
    assert last["end"] == DONE
