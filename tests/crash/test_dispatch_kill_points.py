"""A process is killed at any write while it dispatches runs: none is lost, and none is stuck.

``dispatch_kills`` has the programs; here every so many calls are tried.
"""

from __future__ import annotations

import json
import signal
from pathlib import Path

from tests.python_processes import run_python

ROOT = Path(__file__).resolve().parents[2]
KILLS = """
import sys
sys.path.insert(0, sys.argv[1])
from tests.crash.dispatch_kills import main
main(*sys.argv[2:])
"""


def test_no_run_is_lost_or_stuck_whenever_a_process_is_killed(tmp_path: Path) -> None:
    done = run_python(KILLS, ROOT, tmp_path / "source", tmp_path / "state", 23, timeout=100)
    assert (done.returncode, done.stderr) == (0, "")
    *killed, last = json.loads(done.stdout)
    assert [each for each in (*killed, last) if each["wrong"]] == []
    assert {each["end"] for each in killed} == {-signal.SIGKILL}
    assert any(at.startswith("x") for each in killed for at in each["at"])  # in SQLite, too
    assert last["end"] == 0
