"""A sample of the fuzzer over exports, checkpoints and copies, whose digests are valid."""

from __future__ import annotations

import json
import subprocess
import sys

from faults.strace import ROOT


def test_mutated_copies_raise_only_our_errors_and_harm_no_other_run() -> None:
    line = [sys.executable, "-m", "faults.hostile_copies", "--count", "20", "--seed", "1", "--json"]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=True, timeout=120)
    found = json.loads(done.stdout)
    assert found["wrong"] == []
    assert found["tried"] == 20
    assert found["refused"] > 10
    assert found["accepted"] > 2
