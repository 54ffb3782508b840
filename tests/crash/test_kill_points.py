"""The storage layer killed, or failed by its disk, at its Nth call: a sample with Python alone.

``fault_injector`` has the fuse; ``make faults`` does the same to every call, from outside, with strace.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
INJECTOR = Path(__file__).with_name("fault_injector.py")
DONE, OURS = 0, 3
#: Every how many calls a scenario is hurt: primes, so that all kinds of call have their turn.
STRIDES = {"first": 11, "steps": 29, "checkpoint": 29, "manager": 19}

Found = list[dict[str, Any]]


def inject(scenario: str, folder: Path, how: str) -> Found:
    words = [sys.executable, str(INJECTOR), scenario, str(folder), str(STRIDES[scenario]), how]
    done = subprocess.run(
        words,
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
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


@pytest.mark.parametrize("scenario", STRIDES)
def test_a_disk_that_fails_at_any_call_is_an_error_of_ours_and_loses_nothing(
    tmp_path: Path, scenario: str
) -> None:
    *failed, last = inject(scenario, tmp_path / "state", "fail")
    assert [each["wrong"] for each in (*failed, last)] == [[]] * (len(failed) + 1)
    strange = [each for each in failed if each["end"] not in {DONE, OURS}]
    assert strange == []
    assert any(each["end"] == OURS for each in failed)
    assert last["end"] == DONE
