"""A worker on a folder with many waiting runs: row 21 of the faults, a small one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from faults.child_processes import ChildProcesses
from faults.registry import Outcome
from faults.waiting_runs import check_figures, measure

if TYPE_CHECKING:
    from pathlib import Path


def test_runs_that_wait_cost_a_worker_nothing(tmp_path: Path) -> None:
    outcome = Outcome()
    with ChildProcesses("faults.waiting_runs") as children:
        few, many = (
            measure(tmp_path / str(count), count, children, answers=4, naps=0)
            for count in (100, 2_000)
        )
    check_figures(few, many, outcome, patience=10.0)
    assert outcome.failures == []
