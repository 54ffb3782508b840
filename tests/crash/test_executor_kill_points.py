"""A run through level 1, killed or failed by its disk at its Nth call: a sample with Python alone.

``make faults`` does the same to every call, from outside, with strace.
"""

from __future__ import annotations

import json
import signal
from typing import TYPE_CHECKING, Any

from tests.crash.test_kill_points import DONE, INJECTOR, OURS, ROOT
from tests.python_processes import run_python

if TYPE_CHECKING:
    from pathlib import Path

#: Every how many calls it is hurt: a prime, so that all kinds of call have their turn.
STRIDE = 71


def inject(folder: Path, how: str) -> list[dict[str, Any]]:
    done = run_python(INJECTOR, ROOT, "execute", folder, STRIDE, how, timeout=100)
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
