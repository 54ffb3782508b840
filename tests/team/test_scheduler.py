"""What starts when: dependencies, workers, priority, gates and failures, in real runs."""

from __future__ import annotations

import asyncio
import json
import sys
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from maestro_hive.admin.breakers import open_breaker, reset_breaker
from maestro_hive.admin.folder import writing
from maestro_hive.admin.teams import team_view
from maestro_hive.engine.errors import TokenBudgetExceeded
from maestro_hive.hive.errors import RunFailedError
from maestro_hive.kernel.errors import ConfigurationError
from maestro_hive.maestro.state.stores import open_reader
from maestro_hive.team import scheduler
from maestro_hive.team.errors import GraphFailedError, TaskCancelledError
from maestro_hive.team.plans import gate_name, plan_of
from maestro_hive.team.runner import ChosenRun
from maestro_hive.team.scheduler import Execution, Slot, WorkerSlots
from maestro_hive.team.state import ExecutionState
from maestro_hive.team.state_file import PATH
from tests.team.conftest import SHELL, graph, statuses, task

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from maestro_hive.engine.step import StepExecution
    from maestro_hive.maestro.state.store import Store
    from tests.team.conftest import Team

SAY = 'echo "$MAESTRO_TASK_ID" >> log'


def test_a_task_starts_when_its_dependencies_are_complete(team: Team) -> None:
    made = graph(
        task("LAST", SAY, "LEFT RIGHT"),
        task("LEFT", SAY, "FIRST"),
        task("RIGHT", SAY, "FIRST"),
        task("FIRST", SAY),
    )
    result = team.run(made)
    lines = team.lines()
    assert (lines[0], lines[-1], sorted(lines[1:3])) == ("FIRST", "LAST", ["LEFT", "RIGHT"])
    assert list(result["tasks"]) == ["LAST", "LEFT", "RIGHT", "FIRST"]


def test_no_more_tasks_run_at_once_than_there_are_workers(team: Team) -> None:
    # Each one fails if it sees more than one other between its start and its end.
    does = (
        'echo "+" >> log; sleep 0.05; n=$(grep -c + log); m=$(grep -c - log);'
        " test $((n - m)) -le 2 && echo - >> log"
    )
    made = graph(*(task(f"T{number}", does) for number in range(6)), retry=1)
    team.run(made, workers=2)
    assert len(team.lines()) == 12


def test_the_longest_remaining_path_is_first(team: Team) -> None:
    made = graph(
        task("SHORT", SAY, estimate_minutes=5),
        task("LONG", SAY, estimate_minutes=5),
        task("AFTER", SAY, "LONG", estimate_minutes=50),
    )
    team.run(made, workers=1)
    assert team.lines() == ["LONG", "AFTER", "SHORT"]


def entering(slots: WorkerSlots, name: str) -> asyncio.Task[Slot]:
    step = cast("StepExecution", SimpleNamespace(name=name))
    return asyncio.ensure_future(slots.enter(step))


def test_a_free_worker_takes_the_most_urgent_task_that_waits() -> None:
    async def main() -> None:
        slots = WorkerSlots(1, {"LOW": (-1.0, 0), "HIGH": (-9.0, 1)})
        first = await entering(slots, "FIRST")
        low, high, gone = (entering(slots, name) for name in ("LOW", "HIGH", "GONE"))
        await asyncio.sleep(0)
        gone.cancel()
        first.leave()
        slots.settled("FIRST", [])
        slot = await high
        assert (slots.worker_of("HIGH"), low.done()) == (1, False)
        slot.leave()  # and nobody says what follows from its end
        await low

    asyncio.run(main())


def test_a_worker_waits_for_the_task_that_its_last_one_lets_start() -> None:
    async def main() -> None:
        slots = WorkerSlots(1, {"LOW": (-1.0, 0), "HIGH": (-9.0, 1)})
        first = await entering(slots, "FIRST")
        low = entering(slots, "LOW")
        await asyncio.sleep(0)
        first.leave()
        slots.settled("FIRST", ["HIGH"])
        await asyncio.sleep(0)
        assert not low.done()
        (await entering(slots, "HIGH")).leave()
        await low

    asyncio.run(main())


def test_a_worker_that_was_given_to_a_cancelled_attempt_takes_the_next() -> None:
    async def main() -> None:
        slots = WorkerSlots(1, {})
        first = await entering(slots, "A")
        waiting = entering(slots, "B")
        await asyncio.sleep(0)
        first.leave()
        slots.settled("A", [])
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await entering(slots, "C")

    asyncio.run(main())


def test_no_worker_is_lost_when_a_task_ends_twice_in_a_moment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(scheduler, "_REST_SECONDS", 600.0)  # a busy machine is slow

    async def main() -> None:
        slots = WorkerSlots(2, {})
        for number in (1, 2):  # the second attempt is made before the first worker is given away
            slot = await entering(slots, "A")
            assert slot.number == number
            slot.leave()
        slots.settled("A", [])
        async with asyncio.timeout(30):
            both = [await entering(slots, name) for name in ("B", "C")]
        assert {slot.number for slot in both} == {1, 2}

    asyncio.run(main())


def gated(first: str, command: str, *, required: bool = True) -> Any:
    gate = {"name": "check", "command": command, "required": required}
    return graph(
        task("ONE", first, level=1),
        task("TWO", SAY, level=2),
        levels={"1": {"name": "one", "tasks": ["ONE"], "gates": [gate]}},
    )


@pytest.mark.parametrize("cancelled", ["A", "gate:1:G"])
def test_a_call_that_was_cancelled_ends_the_run_with_an_error_that_names_it(cancelled: str) -> None:
    level = {"1": {"name": "one", "gates": [{"name": "G", "command": "true", "required": True}]}}
    tasks = task("A", level=1), task("B", level=1), task("C", after="A", level=2)
    plan = plan_of(graph(*tasks, levels=level).to_document())
    called = []

    async def call(name: str) -> bool:
        called.append(name)
        if name == cancelled:
            raise asyncio.CancelledError
        return True

    async def main() -> None:
        execution = Execution(
            plan,
            lambda name, _: call(name),
            lambda level, gate, _: call(gate_name(level, gate)),
            WorkerSlots(2, {}),
        )
        async with asyncio.timeout(30):
            with pytest.raises(GraphFailedError, match=f"failed: {cancelled}") as failed:
                await execution.run()
        group = failed.value.__cause__
        assert isinstance(group, ExceptionGroup)
        assert [type(each) for each in group.exceptions] == [TaskCancelledError]

    asyncio.run(main())
    assert "B" in called
    assert "C" not in called


def test_nothing_after_a_required_gate_starts_before_it_has_passed(team: Team) -> None:
    made = gated(SAY, "test -f mended && echo GATE >> log")
    with pytest.raises(RunFailedError, match="gate:1:check") as failed:
        team.run(made)
    assert isinstance(failed.value.__cause__, GraphFailedError)
    assert team.lines() == ["ONE"]
    with pytest.raises(RunFailedError):  # until it is retried
        team.run(made)
    (team.folder / "mended").touch()
    team.hive.retry("r")
    assert team.run(made)["gates"] == {"gate:1:check": True}
    assert team.lines() == ["ONE", "GATE", "TWO"]


def test_a_gate_that_is_not_required_stops_nothing(team: Team) -> None:
    assert team.run(gated(SAY, "false", required=False))["gates"] == {"gate:1:check": False}
    assert sorted(team.lines()) == ["ONE", "TWO"]


def test_what_does_not_depend_on_a_failed_task_is_executed(team: Team) -> None:
    made = graph(
        task("BAD", "test -f mended && echo BAD >> log"),
        task("AFTER", SAY, "BAD"),
        task("OTHER", SAY),
        retry=2,
    )
    with pytest.raises(RunFailedError, match="failed: BAD; 1 of 3 tasks were not started"):
        team.run(made)
    assert team.lines() == ["OTHER"]
    assert statuses(team) == {"BAD": "failed", "AFTER": "blocked", "OTHER": "complete"}
    (team.folder / "mended").touch()
    team.hive.retry("r", "BAD")
    team.run(made)
    assert team.lines() == ["OTHER", "BAD", "AFTER"]
    state = ExecutionState.load(team.folder / PATH)
    assert state is not None
    assert {each.status.value for each in state.tasks.values()} == {"complete"}
    assert state.tasks["OTHER"].completed_at < state.tasks["BAD"].completed_at  # type: ignore[operator]
    assert sum(each.tasks_completed for each in state.workers.values()) == 2  # in this life


def test_a_run_is_resumed_with_another_number_of_workers(team: Team) -> None:
    tasks = [task(f"T{number}", SAY, estimate_minutes=9 - number) for number in range(6)]
    made = graph(*tasks, task("LAST", "test -f mended", "T0 T1 T2 T3 T4 T5"), retry=1)
    with pytest.raises(RunFailedError):
        team.run(made, workers=6)
    (team.folder / "mended").touch()
    team.hive.retry("r")
    team.run(made, workers=1)
    assert sorted(team.lines()) == [f"T{number}" for number in range(6)]


def test_a_changed_graph_goes_on_with_what_is_unchanged(team: Team) -> None:
    say = SAY.replace("log", "../log")  # A owns one file alone
    first = graph(
        task("A", "echo a > a; echo A >> ../log", files=["a"]),
        task("B", say, "A"),
        task("C", say),
    )
    team.run(first, "test")
    changed = graph(
        task("C", "echo new C >> ../log"),
        task("A", "echo a > a; echo A again >> ../log", files=["a"]),
        task("B", say, "A"),
        task("D", say, "B"),
    )
    runner = team.hive_runner()
    chosen = runner.choose(changed, team.folder)
    assert chosen == ChosenRun("test-2", exists=False, forked_from="test")
    runner.fork(chosen, changed)
    team.run(changed, "test-2")
    # A made the same file as before, so what depends on it is not executed again.
    assert sorted(team.lines("../log")[3:]) == ["A again", "D", "new C"]
    assert runner.choose(changed, team.folder) == ChosenRun("test-2", exists=True)
    assert runner.choose(changed, team.folder / "elsewhere") == ChosenRun("test-3", exists=False)
    assert runner.choose(changed, team.folder, force=True) == ChosenRun("test-3", exists=False)


def test_the_state_file_of_a_fork_has_no_changed_task_as_complete(team: Team) -> None:
    team.run(graph(task("A"), task("B", after="A")), "test")
    changed = graph(task("A"), task("B", f"cp {PATH} ../seen", "A"))
    runner = team.hive_runner()
    runner.fork(runner.choose(changed, team.folder), changed)
    team.run(changed, "test-2")
    seen = json.loads((team.folder / "../seen").read_text())
    assert seen["tasks"]["B"]["status"] != "complete"
    assert statuses(team) == {"A": "complete", "B": "complete"}


def test_a_task_over_its_budget_is_blocked_in_the_state_file(team: Team) -> None:
    text = "from maestro_hive import current\n\ndef work(task):\n    current().spend(tokens=100)\n"
    (team.folder / "spends_much.py").write_text(text)
    persona = {"python": "spends_much:work"}
    made = graph(task("A", persona=persona, budget=10), task("B", "exit 1"), retry=1)
    with pytest.raises(RunFailedError):
        team.run(made)
    assert statuses(team) == {"A": "blocked", "B": "failed"}


def test_a_task_of_a_run_over_its_budget_is_blocked_in_the_state_file(team: Team) -> None:
    text = "from maestro_hive import current\n\ndef work(task):\n    current().spend(tokens=100)\n"
    (team.folder / "spends_more.py").write_text(text)
    made = graph(task("A", persona={"python": "spends_more:work"}), budget=10)
    with pytest.raises(TokenBudgetExceeded):
        team.run(made)
    assert statuses(team) == {"A": "blocked"}


def test_a_graph_whose_personas_cannot_be_called_starts_nothing(
    team: Team, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(team.folder))  # the agent may be installed here
    made = graph(
        task("A", SAY),
        task("B", persona={"command": "no-such-program-here {prompt}"}),
        task("C", persona={"python": "no_such_module:work"}),
        task("D", persona={"agent": "claude"}),
    )
    with pytest.raises(ConfigurationError) as refused:
        team.run(made)
    for name in ("B: the program 'no-such", "C: the function no_such", "D: the agent 'claude'"):
        assert name in str(refused.value)
    assert team.lines() == []


def test_programs_and_modules_that_cannot_be_started_start_nothing(
    team: Team, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    (team.folder / "module_that_exits.py").write_text("import sys\nsys.exit(7)\n")
    (team.folder / "script").write_text("#!/bin/sh\n")
    made = graph(
        task("A", SAY),
        task("B", persona={"python": "module_that_exits:build"}),
        task("C", persona={"command": "./script"}),
        *(task(f"D{at}", persona={"command": "./missing"}) for at in range(10)),
    )
    with pytest.raises(ConfigurationError) as refused:
        team.run(made)
    for words in (
        "B: the module of module_that_exits:build cannot be imported: SystemExit: 7",
        "C: the program './script' is not executable",
        "D6, D7 and 2 more: the program './missing' is not there",
    ):
        assert words in str(refused.value)
    assert team.lines() == []


def test_a_folder_that_was_moved_is_not_made_again(team: Team) -> None:
    made = graph(task("A", "test -f ready && echo A >> log"), retry=1)
    with pytest.raises(RunFailedError):
        team.run(made)
    team.hive.retry("r")
    (team.folder / "ready").touch()
    moved = team.folder.rename(team.folder.with_name("moved"))
    with pytest.raises(ConfigurationError, match=r"nothing was started: .*work, is not there"):
        asyncio.run(team.hive_runner().resume("r"))
    assert not team.folder.exists()
    moved.rename(team.folder)
    asyncio.run(team.hive_runner().resume("r"))
    assert team.lines() == ["A"]


def test_a_task_over_its_budget_that_is_only_retried_is_still_bankrupt(
    team: Team, monkeypatch: pytest.MonkeyPatch
) -> None:
    (team.folder / "spender.py").write_text(
        "from maestro_hive import current\ndef work(task):\n    current().spend(tokens=100)\n"
    )
    monkeypatch.setattr(sys, "path", [*sys.path])
    made = graph(task("A", persona={"python": "spender:work"}, budget=50), task("B", after="A"))
    with pytest.raises(RunFailedError):
        team.run(made)
    team.hive.retry("r")
    with pytest.raises(RunFailedError):
        team.run(made)  # refused before an attempt starts: what it may spend is the same
    monkeypatch.delitem(sys.modules, "spender")
    with open_store_of(team) as store:
        shown = {each.id: each for each in team_view(store, "r").tasks}
    assert (shown["A"].status, shown["A"].attempts) == ("bankrupt", 1)
    assert "100 of 50 tokens used" in (shown["A"].error or "")
    assert (shown["B"].status, shown["B"].blocked_by) == ("blocked", "A")


def test_one_run_at_a_time_is_executed_in_a_folder(team: Team) -> None:
    first = graph(task("A", "echo A >> log; while ! test -f go; do sleep 0.02; done"))
    other = graph(task("B", SAY))

    async def main() -> None:
        running = asyncio.create_task(
            team.hive_runner().run(first, run_id="first", folder=team.folder)
        )
        await until(lambda: team.lines() == ["A"])
        with pytest.raises(ConfigurationError, match="run 'first' is executed in"):
            await team.hive_runner().run(other, run_id="other", folder=team.folder)
        changed = ChosenRun("second", exists=False, forked_from="first")
        with pytest.raises(ConfigurationError, match="run 'first' is executed in"):
            team.hive_runner().fork(changed, other)
        (team.folder / "go").touch()
        await running
        await team.hive_runner().run(other, run_id="other", folder=team.folder)

    asyncio.run(main())
    assert team.lines() == ["A", "B"]


def test_tasks_behind_an_open_breaker_wait_and_spend_no_attempt(team: Team) -> None:
    wait = "while ! test -f go; do sleep 0.02; done"
    flaky: dict[str, Any] = {"persona": "flaky", "estimate_minutes": 5}
    made = graph(
        task("ONE", f"echo ONE >> log; {wait}", **{**flaky, "estimate_minutes": 99}),
        task("TWO", SAY, **flaky),
        task("AFTER", SAY, "TWO", **flaky),
        task("OTHER", SAY),
        personas={"flaky": SHELL},
        retry=1,
    )
    runner = team.hive_runner(workers=1)

    async def main() -> None:
        running = asyncio.create_task(runner.run(made, run_id="r", folder=team.folder))
        await until(lambda: team.lines() == ["ONE"])
        with open_store_of(team) as store:
            open_breaker(store, "flaky", 3600, create=True)  # TWO has its permit, and waits
            (team.folder / "go").touch()
            await until(lambda: team.lines() == ["ONE", "OTHER"])
            await until(lambda: statuses(team)["TWO"] == "blocked")
            with closing(open_reader(team.hive.config.state.state_dir)) as reader:
                shown = {each.id: each.status for each in team_view(reader, "r").tasks}
            assert (shown["TWO"], shown["AFTER"]) == ("parked", "pending")
            assert not running.done()
            reset_breaker(store, "flaky")
        await running

    asyncio.run(main())
    assert team.lines() == ["ONE", "OTHER", "TWO", "AFTER"]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        is_so = False
        while not is_so:
            await asyncio.sleep(0.01)
            is_so = condition()


def open_store_of(team: Team) -> AbstractContextManager[Store]:
    return writing(Path(team.hive.config.state.state_dir))


_CLEANS_UP = """
import asyncio

async def work(task):
    (task.folder / "started").touch()
    try:
        await asyncio.sleep(600)
    finally:
        await asyncio.sleep(600)
"""


def test_a_function_that_cleans_up_for_long_does_not_hold_a_run_that_is_stopped(
    team: Team, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler, "_CLEAN_UP_SECONDS", 0.1)
    (team.folder / "cleans_up.py").write_text(_CLEANS_UP)
    made = graph(task("A"), persona={"python": "cleans_up:work"})

    async def main() -> None:
        running = asyncio.create_task(team.hive_runner().run(made, run_id="r", folder=team.folder))
        await until((team.folder / "started").exists)
        running.cancel()
        async with asyncio.timeout(60):
            await asyncio.wait({running})
        assert running.cancelled()

    asyncio.run(main())
