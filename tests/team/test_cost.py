"""What a task costs beside a step, counted in calls; ``make bench ARGS="--only team"`` has the times."""

from __future__ import annotations

import asyncio
import gc
import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from maestro_hive import Hive
from maestro_hive.maestro.state.sqlite.store import SqliteStore
from maestro_hive.team import state_file
from maestro_hive.team.graph import Frontier, Graph, check_graph
from maestro_hive.team.persona_checks import check_personas
from maestro_hive.team.runner import TeamRunner
from tests.calls import calls_for_each, calls_of
from tests.hive.conftest import quick_config

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

WORKERS = 4
FEW, MANY = 20, 60


def value(number: int) -> dict[str, Any]:
    return {"section": number, "text": f"Section {number} tells how to start it.", "words": 7}


async def work(call: Any) -> dict[str, Any]:
    """Do the work of a task: nothing that takes time."""
    number = int(call.id[1:])
    return {**value(number), "garbage": gc.collect()} if number == MANY - 1 else value(number)


def made_graph(tasks: int) -> bytes:
    """Return a graph whose tasks stand in rows of ten, each after the one above it."""
    return json.dumps(
        {
            "feature": "cost",
            "persona": {"python": f"{__name__}:work"},
            "tasks": [
                {
                    "id": f"T{number}",
                    "title": f"Task {number}",
                    "description": "",
                    "dependencies": [f"T{number - 10}"] if number >= 10 else [],
                }
                for number in range(tasks)
            ],
        }
    ).encode()


def graph_of(tasks: int) -> Graph:
    checked = check_graph(made_graph(tasks))
    assert checked.graph is not None, checked.errors
    return checked.graph


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let nothing depend on time: not whether a disk is fast, nor how often a file is written."""
    monkeypatch.setattr(SqliteStore, "syncs_fast", lambda _: True)
    monkeypatch.setattr(state_file, "_SOON_SECONDS", 3600.0)


@pytest.fixture
def team(tmp_path: Path) -> Callable[[int], Callable[[], Any]]:
    """Return what makes a call that executes a graph with so many tasks."""

    def made(tasks: int) -> Callable[[], Any]:
        graph = graph_of(tasks)
        folder = tmp_path / f"team-{tasks}"
        folder.mkdir(exist_ok=True)

        async def main() -> None:
            async with Hive(folder / "state", quick_config()) as hive:
                runner = TeamRunner(hive, workers=WORKERS)
                result = await runner.run(graph, run_id="r", folder=folder)
                assert len(result["tasks"]) == tasks

        return lambda: asyncio.run(main())

    return made


@pytest.fixture
def steps(tmp_path: Path) -> Callable[[int], Callable[[], Any]]:
    """Return what makes a call of so many steps with values as those of tasks, as many at once."""

    def made(count: int) -> Callable[[], Any]:
        async def main() -> None:
            async with Hive(tmp_path / f"steps-{count}", quick_config()) as hive:

                @hive.step(persona="writer")
                async def draft(given: dict[str, Any], results: dict[str, Any]) -> dict[str, Any]:
                    return {"files": {}, "value": value(given["number"])}

                @hive.workflow
                async def write(count: int) -> None:
                    numbers = iter(range(count))

                    async def chain() -> None:
                        for number in numbers:
                            given = {"id": f"T{number}", "files": [], "number": number}
                            await draft(given, {f"T{number - 10}": {"value": value(number)}})

                    await asyncio.gather(*(chain() for _ in range(WORKERS)))

                await hive.run(write, count)

        return lambda: asyncio.run(main())

    return made


def test_a_task_makes_few_calls_besides_those_of_its_step(
    team: Callable[[int], Callable[[], Any]], steps: Callable[[int], Callable[[], Any]]
) -> None:
    team(1)()  # what is imported and made once
    steps(1)()
    task, step = calls_for_each(team, FEW, MANY), calls_for_each(steps, FEW, MANY)
    # Some 30 of them: the persona is a task of its own, whose end is waited for once.
    assert task - step <= 280


def test_a_schema_and_a_persona_that_many_tasks_have_are_checked_once(tmp_path: Path) -> None:
    def check(tasks: int) -> Callable[[], Any]:
        made = json.loads(made_graph(tasks))
        for each in made["tasks"]:
            each["output_schema"] = {"type": "object", "properties": {"a": {"type": "string"}}}
            each["persona"] = "writer"
        made["personas"] = {"writer": {"command": "true"}}
        graph = check_graph(json.dumps(made).encode()).graph
        assert graph is not None
        return lambda: check_personas(graph, tmp_path)

    check(1)()
    assert calls_for_each(check, FEW, MANY) <= 5


def test_a_task_leaves_nothing_to_the_garbage_collector(tmp_path: Path) -> None:
    graph = graph_of(MANY)

    async def main() -> int:
        async with Hive(tmp_path / "state", quick_config()) as hive:
            runner = TeamRunner(hive, workers=WORKERS)
            gc.collect()
            gc.disable()  # until the last task collects what the others have left
            result = await runner.run(graph, run_id="r", folder=tmp_path)
            return int(result["tasks"][f"T{MANY - 1}"]["value"]["garbage"])

    try:
        assert asyncio.run(main()) < MANY
    finally:
        gc.enable()


def test_the_cost_of_a_task_does_not_grow_with_the_graph(
    team: Callable[[int], Callable[[], Any]],
) -> None:
    team(1)()
    early, late = calls_for_each(team, 20, 30), calls_for_each(team, 90, 100)
    assert late <= 1.3 * early


def test_reading_checking_and_planning_takes_a_fixed_number_of_calls_for_a_task() -> None:
    def check(tasks: int) -> Callable[[], Any]:
        data = made_graph(tasks)
        return lambda: check_graph(data)

    calls_of(check(1))
    early, late = calls_for_each(check, 100, 200), calls_for_each(check, 1000, 1100)
    assert late <= 1.1 * early
    assert late <= 120


def test_the_end_of_a_task_takes_calls_for_its_dependents_alone() -> None:
    def complete(tasks: int) -> Callable[[], Any]:
        checked = check_graph(made_graph(tasks))
        assert checked.plan is not None
        frontier = Frontier(checked.plan)

        def all_of_them() -> None:
            while (task := frontier.take()) is not None:
                frontier.complete(task)

        return all_of_them

    assert calls_for_each(complete, 1000, 1100) <= 1.1 * calls_for_each(complete, 100, 200)


def test_nothing_is_imported_for_the_status_of_a_run_that_executes_runs() -> None:
    program = "import sys, maestro_hive.cli.team_status; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    loaded = set(done.stdout.split())
    executing = ("hive.hive", "hive.steps", "team.runner", "team.personas", "engine.breaker")
    slow = ("engine.config", "engine.recorded_errors", "hive.answers", "maestro.state.events")
    ours = {f"maestro_hive.{each}" for each in (*executing, *slow)}
    assert loaded.isdisjoint({"asyncio", "jsonschema", *ours})
