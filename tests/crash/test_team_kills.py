"""A team run whose engine is killed: row 22 of the faults, a small one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from faults.registry import Outcome
from faults.team_kills import Attack, attack_team, check_team

if TYPE_CHECKING:
    from pathlib import Path


def test_a_killed_team_run_does_no_task_twice_and_leaves_no_process(tmp_path: Path) -> None:
    outcome = Outcome()
    seen = attack_team(Attack(seed=3, kills=3), tmp_path)
    check_team(seen, outcome)
    assert outcome.failures == []
    assert seen.cut_off >= 3
