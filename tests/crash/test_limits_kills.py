"""Limits under processes that are killed and stopped: row 19 of the faults, a small one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from faults.limits import Attack, attack_limits, check_limits, most_at_once, most_in_window
from faults.registry import Outcome

if TYPE_CHECKING:
    from pathlib import Path


def test_no_limit_is_exceeded_while_processes_are_killed_and_stopped(tmp_path: Path) -> None:
    folder, outcome = tmp_path / "limits", Outcome()
    attack = Attack(seed=4, kills=10, workers=4, burning=1, least=3)
    workers = attack_limits(attack, folder, lambda items: items)
    check_limits(workers, folder, outcome, attack.least)
    assert outcome.failures == []
    assert workers.landed["in a body"] >= 6


def test_those_that_are_active_at_once_are_counted() -> None:
    assert most_at_once([]) == 0
    assert most_at_once([(1, 2), (2, 3), (3, 4)]) == 1
    assert most_at_once([(1, 4), (2, 3), (2.5, 5), (4.5, 6)]) == 3


def test_those_that_start_in_a_window_are_counted() -> None:
    spans = [(at, at + 5) for at in (0.0, 0.4, 0.9, 1.0, 1.2)]
    assert most_in_window(spans, 1.0) == 4  # from 0.4 to 1.2
    assert most_in_window(spans, 0.2) == 2
