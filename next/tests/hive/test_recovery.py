"""The runs of a dead process are due at once; one that kills its process is interrupted."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from maestro_hive.journal.entries import AttemptStarted, RunSuspended
from tests.hive.conftest import recorded, status
from tests.hive.worker_programs import Programs, kill, programs_in, until_true

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def programs(tmp_path: Path) -> Iterator[Programs]:
    with programs_in(tmp_path) as made:
        yield made


def result(programs: Programs, run_id: str) -> Any:
    return asyncio.run(programs.hive.handle(run_id).result())


def is_held(programs: Programs, run_id: str) -> bool:
    return status(programs.hive, run_id) == "interrupted"


def let_workers_die(programs: Programs, run_id: str) -> None:
    """Start a worker again each time one dies, until a person has to decide about the run."""
    while not is_held(programs, run_id):
        process = programs.start("asyncio.run(serve())")
        until_true(lambda: process.poll() is not None or is_held(programs, run_id))  # noqa: B023


def test_recovered_runs_are_executed_together_and_beside_new_ones(programs: Programs) -> None:
    names = [f"r{number}" for number in range(12)]
    for name in names:
        programs.hive.enqueue("hangs", name, run_id=name)
    first = programs.worker()
    until_true(lambda: len(programs.notes("hanging")) == len(names))
    kill(first)
    programs.hive.enqueue("job", "new", run_id="new")
    programs.worker()
    assert result(programs, "new") == [0, 1, 2]
    # None of their steps ends, so all of them are executed at once.
    until_true(lambda: len(programs.notes("hanging")) == 2 * len(names))
    assert {status(programs.hive, name) for name in names} == {"running"}


def test_a_step_that_kills_its_process_is_interrupted_and_others_complete(
    programs: Programs,
) -> None:
    programs.hive.enqueue("poisoned", "p", run_id="p")
    programs.hive.enqueue("job", "beside", 12, 0.05, run_id="beside")
    let_workers_die(programs, "p")
    programs.worker()
    assert result(programs, "beside") == list(range(12))
    assert programs.status("p") == "interrupted"
    assert len(programs.notes("poison")) == 6  # the first, and as many as may be interrupted


def test_code_outside_of_steps_that_kills_its_process_is_interrupted_and_others_complete(
    programs: Programs,
) -> None:
    programs.hive.enqueue("kills_outside", "p", run_id="p")
    programs.hive.enqueue("job", "beside", 12, 0.05, run_id="beside")
    let_workers_die(programs, "p")
    programs.worker()
    assert result(programs, "beside") == list(range(12))
    assert len(programs.notes("outside")) == 6
    assert programs.status("p") == "interrupted"
    (suspended,) = [each for each in recorded(programs.hive, "p") if isinstance(each, RunSuspended)]
    assert "6 processes died in the workflow's own code of run 'p'" in suspended.message

    programs.touch("cured")
    programs.hive.retry("p")
    assert result(programs, "p") == [0, 1]


def test_a_death_in_a_step_is_none_outside_of_it(programs: Programs) -> None:
    """The step kills the first process; then the code before it does."""
    programs.hive.enqueue("kills_inside_first", "alone", run_id="p")
    let_workers_die(programs, "p")
    assert len(programs.notes("outside")) == 6
    starts = [each for each in recorded(programs.hive, "p") if isinstance(each, AttemptStarted)]
    assert len(starts) == 1


def test_an_outcome_lets_deaths_count_from_0_again(programs: Programs) -> None:
    programs.hive.enqueue("kills_after_each", "alone", 8, run_id="p")
    for _ in range(8):
        assert programs.start("asyncio.run(serve())").wait(60) == -9
    programs.worker()
    assert result(programs, "p") == list(range(8))


def test_an_outcome_of_a_child_lets_deaths_of_its_parent_count_from_0_again(
    programs: Programs,
) -> None:
    programs.hive.enqueue("calls_one_that_kills", "alone", 8, run_id="p")
    for _ in range(8):
        assert programs.start("asyncio.run(serve())").wait(60) == -9
    programs.worker()
    assert result(programs, "p") == list(range(8))


def test_an_interrupted_run_can_be_cancelled(programs: Programs) -> None:
    programs.hive.enqueue("kills_outside", "alone", run_id="p")
    let_workers_die(programs, "p")
    programs.worker()
    programs.hive.cancel("p", "it is poison")
    until_true(lambda: programs.status("p") == "cancelled")
    assert len(programs.notes("outside")) == 6
