"""How often a step is called: ``max_attempts`` counts all calls, ``rounds`` divides them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from maestro_hive.engine.options import StepOptions
from maestro_hive.hive.hive import Hive
from tests.hive.conftest import quick_config
from tests.tables import for_each

if TYPE_CHECKING:
    from pathlib import Path


def calls_of(hive: Hive, **options: Any) -> list[int]:
    """Return in which round each call of a step was made that always fails."""
    calls: list[int] = []

    @hive.step(**options)
    async def fail() -> None:
        calls.append(1)
        raise ValueError("no")

    @hive.workflow
    async def work() -> None:
        await fail()

    with pytest.raises(Exception, match="no"):
        hive.run_sync(work, run_id="r")
    with pytest.raises(Exception, match="no"):
        hive.run_sync(work, run_id="r")
    return calls


@pytest.mark.parametrize(
    "options, calls",
    [
        ({"max_attempts": 1}, 1),
        ({"max_attempts": 4}, 4),
        ({"max_attempts": 5, "rounds": 2}, 5),
        ({"max_attempts": 6, "rounds": 2}, 6),
        ({"max_attempts": 2, "rounds": 5}, 2),
        ({"rounds": 1}, 3),
        ({"rounds": 3}, 9),
        ({}, 6),
    ],
)
def test_a_step_is_called_as_often_as_it_says(
    hive: Hive, options: dict[str, Any], calls: int
) -> None:
    assert len(calls_of(hive, **options)) == calls


@for_each(
    "options, each",
    [
        ({"max_attempts": 5}, [5]),
        ({"max_attempts": 5, "rounds": 2}, [3, 2]),
        ({"max_attempts": 7, "rounds": 3}, [3, 2, 2]),
        ({"max_attempts": 2, "rounds": 3}, [1, 1]),
        ({}, [3, 3]),
    ],
)
def test_the_calls_are_divided_evenly(options: dict[str, Any], each: list[int]) -> None:
    limit = StepOptions(**options).limit(quick_config())
    assert [limit.in_round(number + 1) for number in range(limit.rounds)] == each
    assert [limit.in_round(limit.rounds + number + 1) for number in range(limit.rounds)] == each
    assert sum(each) == limit.attempts


def test_after_a_restart_the_calls_before_it_count(folder: Path) -> None:
    calls: list[int] = []

    def run(stop: int) -> None:
        with Hive(folder, quick_config()) as hive:

            @hive.step(max_attempts=5, rounds=2)
            async def fail() -> None:
                calls.append(1)
                if len(calls) == stop:
                    raise KeyboardInterrupt
                raise ValueError("no")

            @hive.workflow
            async def work() -> None:
                await fail()

            hive.run_sync(work, run_id="r")

    with pytest.raises(KeyboardInterrupt):
        run(stop=4)
    with pytest.raises(Exception, match="no"):
        run(stop=0)
    assert len(calls) == 6, "one was stopped, and five failed"
