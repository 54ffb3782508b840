"""Workers that are killed while they execute queued runs: row 20 of the faults, a small one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from faults.registry import Outcome
from faults.worker_kills import Attack, attack_workers, check_workers

if TYPE_CHECKING:
    from pathlib import Path


def test_queued_runs_end_once_while_workers_are_killed(tmp_path: Path) -> None:
    outcome = Outcome()
    attack = Attack(seed=7, runs=24, kills=6, workers=3, pause=0.4, step_seconds=0.2)
    seen = attack_workers(attack, tmp_path / "workers")
    check_workers(seen, outcome, most_seconds=20.0)
    assert outcome.failures == []
    assert seen.pool.landed["in a run"] >= 1
