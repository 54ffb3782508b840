"""A run through level 1, killed or failed by its disk at its Nth call: a sample with Python alone.

``make faults`` does the same to every call, from outside, with strace.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
INJECTOR = Path(__file__).with_name("fault_injector.py")
DONE, OURS = 0, 3
#: Every how many calls it is hurt: a prime, so that all kinds of call have their turn.
STRIDE = 37


def inject(folder: Path, how: str) -> list[dict[str, Any]]:
    words = [sys.executable, str(INJECTOR), "execute", str(folder), str(STRIDE), how]
    done = subprocess.run(
        words,
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert (done.returncode, done.stderr) == (0, "")
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found


def test_a_run_killed_at_any_call_continues_and_repeats_nothing(tmp_path: Path) -> None:
    *killed, last = inject(tmp_path / "run", "kill")
    assert [each["wrong"] for each in (*killed, last)] == [[]] * (len(killed) + 1)
    assert {each["end"] for each in killed} == {-signal.SIGKILL}
    started = [any(ack.startswith("started") for ack in each["acks"]) for each in killed]
    assert sum(started) >= 0.5 * len(killed), "most of them should die in a step"
    assert last["end"] == DONE


def test_a_run_whose_disk_fails_at_any_call_ends_with_an_error_of_ours(tmp_path: Path) -> None:
    *failed, last = inject(tmp_path / "run", "fail")
    assert [each["wrong"] for each in (*failed, last)] == [[]] * (len(failed) + 1)
    assert [each for each in failed if each["end"] not in {DONE, OURS}] == []
    assert any(each["end"] == OURS for each in failed)
    assert last["end"] == DONE
