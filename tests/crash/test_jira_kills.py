"""Row 12 of the faults, a sample: one ticket and one of each comment, whatever is killed.

A real Jira on loopback, real processes, ``kill -9``; the answer on the ticket finishes the runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from faults.child_processes import ChildProcesses
from faults.tickets import Attack, Case, quick_cases

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(scope="module")
def children() -> Iterator[ChildProcesses]:
    with ChildProcesses("faults.tickets") as made:
        yield made


@pytest.mark.parametrize("case", quick_cases()[:6], ids=str)
def test_killed_around_a_call_there_is_one_ticket_and_one_of_each_comment(
    tmp_path: Path, children: ChildProcesses, case: Case
) -> None:
    seen = Attack(case, tmp_path / "case", children).make()
    assert seen.wrong == []
    assert seen.killed
    assert (seen.tickets, seen.doubled, seen.missing) == (1, 0, 0)


@pytest.mark.parametrize("version", [3, 2])
def test_a_server_that_does_everything_wrong_gets_one_ticket(
    tmp_path: Path, children: ChildProcesses, version: int
) -> None:
    """Each request that changes something is refused, failed, executed and lost, in turn."""
    faults = tuple(
        f"{call}:{what}"
        for call in ("create", "comment")
        for what in ("401", "429@0", "503", "500", "drop", "cut", "drop-after")
    )
    case = Case(story="wrapped", version=version, faults=faults)
    seen = Attack(case, tmp_path / "case", children).make()
    assert seen.wrong == []
    assert (seen.tickets, seen.comments) == (1, 1)
