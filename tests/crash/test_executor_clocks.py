"""Waits on clocks that jump: a sample on manual clocks; ``make faults`` moves the real ones."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from faults.manual_clocks import JumpyClock, move_clocks
from faults.registry import Outcome, Plan
from maestro_hive.kernel.clock import SystemClock

if TYPE_CHECKING:
    from pathlib import Path

A_DAY = "86400"
READ_CLOCKS = """
from maestro_hive.kernel.clock import SystemClock
clock = SystemClock()
print([clock.boot_seconds(), clock.awake_seconds()])
"""


def test_waits_end_in_time_on_clocks_that_jump(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    outcome = Outcome()
    move_clocks(Plan(quick=True, seed=1, scratch=tmp_path), outcome)
    assert outcome.failures == []


def test_the_sample_really_moves_its_clock() -> None:
    clock = JumpyClock(random.Random(1))
    before = clock.now()
    for _ in range(20):
        clock.disturb()
    assert clock.now() != before
    assert clock.true == 0


def test_clocks_since_boot_are_the_same_in_every_time_namespace() -> None:
    words = ["unshare", "-T", "--boottime", A_DAY, "--monotonic", A_DAY]
    try:
        allowed = subprocess.run([*words, "true"], capture_output=True, check=False).returncode
    except FileNotFoundError:
        allowed = 1
    if allowed != 0:
        pytest.skip("only root on Linux can make a time namespace")
    read = subprocess.run(
        [*words, sys.executable, "-c", READ_CLOCKS], capture_output=True, text=True, check=True
    )
    clock = SystemClock()
    assert json.loads(read.stdout) == pytest.approx(
        [clock.boot_seconds(), clock.awake_seconds()], abs=60
    )
