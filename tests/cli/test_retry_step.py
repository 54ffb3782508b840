"""``maestro retry RUN STEP``, after both levels gave up: that step, and what depends on it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from maestro_hive.hive import RunFailedError
from tests.cli.processes import complaint, maestro
from tests.hive.test_retry_one_step import Program

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def failed(tmp_path: Path) -> Program:
    """Return a program whose run failed: ``work#2`` and ``work#3`` were given up."""
    program = Program(tmp_path / "state")
    with program.hive, pytest.raises(RunFailedError):
        program.run()
    made = Program(tmp_path / "state")
    made.broken.clear()
    return made


@pytest.mark.parametrize("step", ["work#2", "2"])
def test_a_step_is_retried_by_its_label_and_by_its_number(
    failed: Program, tmp_path: Path, step: str
) -> None:
    done = maestro("retry", "r", step, "--store", tmp_path / "state")
    assert done.returncode == 0, done.stderr
    with pytest.raises(RunFailedError, match="c is broken"):
        failed.run()
    assert failed.calls == ["b"]
    assert maestro("retry", "r", "work#3", "--store", tmp_path / "state").returncode == 0
    assert failed.run() == "ABC"
    assert failed.calls == ["c", "join"]


def test_a_step_that_cannot_be_retried_is_named(failed: Program, tmp_path: Path) -> None:
    store = ("--store", tmp_path / "state")
    assert "'work' of run 'r' is completed" in complaint(maestro("retry", "r", "work", *store), 2)
    assert "has no step 'other'" in complaint(maestro("retry", "r", "other", *store), 2)
    assert failed.calls == []
