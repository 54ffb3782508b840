"""A run's tasks, personas and retries as others see them: told from its steps, kept nowhere else."""

from __future__ import annotations

import asyncio
import itertools
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from maestro_hive.engine.context import current
from maestro_hive.unified_execution import (
    ExecutionResult,
    StatePersistence,
    UnrecoverableError,
    load_state,
    save_state,
)
from maestro_hive.unified_execution.persona_executor import ExecutionStatus
from tests.unified_execution.restarts import (
    RUN,
    Body,
    Restarts,
    any_restarts,  # noqa: F401 - a fixture
    execute,
    kill_during,
    killable_restarts,  # noqa: F401 - a fixture
    persona_state,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from maestro_hive.maestro.state.state_manager import StateChange
    from maestro_hive.unified_execution.persona_executor import PersonaExecutor

NO = ValueError("no")


def state_of(executor: PersonaExecutor) -> StatePersistence:
    assert executor.state_persistence is not None
    return executor.state_persistence


def fail(executor: PersonaExecutor, name: str = "step", *args: Any) -> None:
    with pytest.raises(UnrecoverableError):
        execute(executor, Body(NO), name, *args)


# --- marks ---------------------------------------------------------------------------------------


def test_a_task_marked_as_completed_is_skipped_with_its_artifacts_as_output(
    restarts: Restarts,
) -> None:
    executor = restarts.executor()
    state_of(executor).mark_task_completed("design", {"file": "a.py", "pages": [1, 2]})
    body = Body()
    for each in (executor, restarts.executor("other")):
        result = execute(each, body, "design", "any", input=True)
        assert result.success
        assert result.final_output == {"file": "a.py", "pages": [1, 2]}
        assert (result.attempts, result.attempt_count) == ([], 0)
        assert each.final_status is ExecutionStatus.SUCCESS
    restarts.restart()
    assert execute(restarts.executor(), body, "design").final_output == {
        "file": "a.py", "pages": [1, 2],
    }  # fmt: skip
    assert body.count == 0


def test_a_task_marked_without_artifacts_has_no_output(restarts: Restarts) -> None:
    executor = restarts.executor()
    state_of(executor).mark_task_completed("design")
    assert execute(executor, Body(), "design").final_output is None


def test_a_task_in_a_list_that_was_set_is_skipped_too(restarts: Restarts) -> None:
    executor = restarts.executor()
    state_of(executor).update_state(completed_tasks=["design"])
    body = Body()
    assert execute(executor, body, "design").final_output is None
    assert body.count == 0


def test_force_executes_a_marked_task_and_then_its_result_counts(restarts: Restarts) -> None:
    executor = restarts.executor()
    state_of(executor).mark_task_completed("design", {"old": 1})
    assert execute(executor.options(force=True), Body("new"), "design").final_output == "new"
    assert execute(executor, Body(NO), "design").final_output == "new"
    assert execute(executor, Body(NO), "design", "other").final_output == {"old": 1}


def test_a_step_that_failed_can_be_marked_as_completed(restarts: Restarts) -> None:
    executor = restarts.executor()
    fail(executor, "design")
    state_of(executor).mark_task_completed("design", {"by": "hand"})
    result = execute(executor, Body(NO), "design")
    assert (result.success, result.final_output) == (True, {"by": "hand"})
    state = state_of(executor).state
    assert (state.completed_tasks, state.pending_tasks) == (["design"], [])


# --- views ---------------------------------------------------------------------------------------


def test_finished_steps_are_completed_tasks_and_others_are_pending(restarts: Restarts) -> None:
    executor = restarts.executor()
    state = state_of(executor)
    state.mark_task_pending("write")
    state.mark_task_pending("publish")
    execute(executor, Body(), "design")
    fail(executor, "review")
    execute(executor, Body(), "write")
    assert state.state.completed_tasks == ["design", "write"]
    assert state.state.pending_tasks == ["publish", "review"]
    restarts.restart()
    state = state_of(restarts.executor())
    assert state.state.completed_tasks == ["design", "write"]
    assert state.state.pending_tasks == ["publish", "review"]


def test_a_task_is_completed_when_all_its_steps_are(restarts: Restarts) -> None:
    executor = restarts.executor()
    execute(executor, Body(), "part", 1)
    fail(executor, "part", 2)
    state = state_of(executor)
    assert (state.state.completed_tasks, state.state.pending_tasks) == ([], ["part"])
    execute(executor.options(retry=True), Body(), "part", 2)
    assert (state.state.completed_tasks, state.state.pending_tasks) == (["part"], [])


def test_a_task_running_is_pending(restarts: Restarts) -> None:
    executor = restarts.executor()
    seen: list[list[str]] = []
    execute(executor, lambda: seen.append(list(state_of(executor).state.pending_tasks)), "design")
    assert seen == [["design"]]


def test_retries_are_counted_with_those_that_were_counted_by_hand(restarts: Restarts) -> None:
    executor = restarts.executor()
    state = state_of(executor)
    assert state.increment_retry("developer") == 1
    execute(executor, Body(NO, "yes"), "one")
    fail(executor, "two")
    assert state.get_retry_count("developer") == 1 + 1 + 2
    assert state.state.retry_counts == {"developer": 4}
    assert state.increment_retry("developer") == 5
    assert state.get_retry_count("other") == 0


def test_a_persona_shows_itself(restarts: Restarts) -> None:
    executor = restarts.executor()

    def work() -> str:
        current().spend(tokens=5)
        current().memory["a"] = 1
        current().history.append("b")
        if current().attempt == 1:
            raise NO
        return "done"

    execute(executor, work)
    shown = persona_state(state_of(executor), "developer")
    assert shown.pop("last_updated") == restarts.clock.now().isoformat()
    assert shown == {
        "status": "success",
        "current_attempt": 2,
        "tokens_used": 10,
        "last_error": "no",
        "recovery_applied": False,
        "memory": {"a": 1},
        "history": ["b", "b"],
    }
    assert state_of(executor).state.persona_states.keys() == {"developer"}
    assert state_of(executor).get_persona_state("nobody") is None


def test_what_was_set_by_hand_is_shown_until_the_persona_works_again(restarts: Restarts) -> None:
    executor = restarts.executor()
    state = state_of(executor)
    state.update_persona_state("developer", {"status": "idle", "mood": "good"})
    execute(executor, Body(), "one")
    shown = persona_state(state, "developer")
    assert (shown["status"], shown["mood"]) == ("success", "good")
    state.update_persona_state("developer", {"status": "on holiday"})
    shown = persona_state(state, "developer")
    assert (shown["status"], shown["mood"], shown["current_attempt"]) == ("on holiday", "good", 1)
    fail(executor, "two")
    assert persona_state(state, "developer")["status"] == "failed"


# --- edits of the state object -------------------------------------------------------------------


def test_an_edit_does_not_make_a_mark_of_a_steps_name(restarts: Restarts) -> None:
    executor = restarts.executor()
    body = Body()
    execute(executor, body, "part", 1)
    state = state_of(executor)
    state.state.completed_tasks.append("by hand")
    state.checkpoint()
    state.update_state(completed_tasks=[*state.state.completed_tasks, "by update"])
    assert state.state.completed_tasks.count("part") == 1
    assert {"part", "by hand", "by update"} == set(state.state.completed_tasks)
    execute(executor, body, "part", 2)
    assert body.count == 2
    restarts.restart()
    execute(restarts.executor(), body, "part", 3)
    execute(restarts.executor(), body, "by hand")
    assert body.count == 3


def test_an_edit_of_pending_tasks_leaves_those_of_steps_alone(restarts: Restarts) -> None:
    executor = restarts.executor()
    fail(executor, "design")
    state = state_of(executor)
    state.state.pending_tasks.append("publish")
    state.checkpoint()
    assert sorted(state.state.pending_tasks) == ["design", "publish"]
    execute(executor.options(retry=True), Body(), "design")
    assert state.state.pending_tasks == ["publish"]


def test_an_edit_of_retry_counts_is_not_counted_twice(restarts: Restarts) -> None:
    executor = restarts.executor()
    fail(executor)
    state = state_of(executor)
    assert state.state.retry_counts == {"developer": 2}
    state.state.retry_counts["developer"] += 1
    state.state.retry_counts["other"] = 7
    state.checkpoint()
    assert state.state.retry_counts == {"developer": 3, "other": 7}
    execute(executor, Body(NO, "yes"), "second")
    assert state.state.retry_counts == {"developer": 4, "other": 7}


def test_an_edit_of_what_a_persona_shows_is_shown(restarts: Restarts) -> None:
    executor = restarts.executor()
    execute(executor, Body())
    state = state_of(executor)
    state.state.persona_states["developer"]["status"] = "on holiday"
    state.checkpoint()
    assert persona_state(state, "developer")["status"] == "on holiday"


def test_an_edit_of_one_persona_does_not_freeze_another(restarts: Restarts) -> None:
    executor = restarts.executor()
    execute(executor, lambda: current().memory.update(a=1), "one")
    state = state_of(executor)
    state.state.persona_states["architect"] = {"mood": "good"}
    state.checkpoint()
    execute(executor, lambda: current().memory.update(a=2), "two")
    assert persona_state(state, "developer")["memory"] == {"a": 2}
    assert state.get_persona_state("architect") == {"mood": "good"}


def test_edits_and_steps_at_the_same_time_are_both_kept(restarts: Restarts) -> None:
    executor = restarts.executor()
    state = state_of(executor)
    shown = state.state
    shown.completed_tasks.append("by hand")
    shown.metrics["n"] = 1
    execute(executor, Body(), "design")
    assert set(state.state.completed_tasks) == {"by hand", "design"}
    assert state.state.metrics == {"n": 1}


# --- the whole run -------------------------------------------------------------------------------


def test_the_state_of_a_run_has_its_steps(restarts: Restarts) -> None:
    executor = restarts.executor()
    assert executor._load_state() is None
    execute(executor, Body(NO, {"pages": 3}), "design")
    fail(executor, "review")
    shown = executor._load_state()
    assert shown is not None
    assert shown["workflow_id"] == RUN
    assert (shown["completed_tasks"], shown["pending_tasks"]) == (["design"], ["review"])
    for step in shown["steps"]:
        assert step.pop("started_at").endswith("+00:00")
        assert step.pop("took_seconds") >= 0
    assert shown["steps"] == [
        {
            "step": 1,
            "name": "design",
            "label": "design",
            "persona": "developer",
            "status": "success",
            "attempts": 2,
            "failures": 1,
            "interruptions": 0,
            "tokens": 0,
            "last_error": "ValueError: no",
            "output": {"pages": 3},
        },
        {
            "step": 2,
            "name": "review",
            "label": "review",
            "persona": "developer",
            "status": "failed",
            "attempts": 3,
            "failures": 3,
            "interruptions": 0,
            "tokens": 0,
            "last_error": "ValueError: no",
            "output": None,
        },
    ]
    json.dumps(shown)
    shown["steps"].clear()
    assert executor._load_state() != shown


def test_what_is_shown_cannot_be_changed(restarts: Restarts) -> None:
    executor = restarts.executor()
    state_of(executor).mark_task_completed("a", {"deep": {"list": [1]}})
    shown = executor._load_state()
    assert shown is not None
    shown["artifacts"]["deep"]["list"].append(2)
    again = executor._load_state()
    assert again is not None
    assert again["artifacts"] == {"deep": {"list": [1]}}


def test_saving_writes_the_copies_to_resume_from(tmp_path: Path) -> None:
    restarts = Restarts(tmp_path, persistent=True)
    executor = restarts.executor()
    execute(executor, Body({"pages": 3}), "design")
    fail(executor, "review")
    executor._save_state()
    copy = json.loads(state_of(executor).get_state_path().read_text())
    assert RUN in json.dumps(copy)
    assert state_of(executor).list_checkpoints()
    restarts.end()


def test_a_run_without_a_journal_continues_from_its_copy(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    restarts = Restarts(tmp_path, persistent=True)
    executor = restarts.executor()
    execute(executor, Body({"pages": 3}), "design", 1)
    fail(executor, "review")
    executor._save_state()
    restarts.end()
    state = Path(restarts.config.state.state_dir)
    for found in [each for each in state.iterdir() if each.is_file()]:
        found.unlink()
    restarts._open()
    with caplog.at_level("WARNING"):
        executor = restarts.executor()
    assert "had no journal" in caplog.text
    body = Body("again")
    assert execute(executor, body, "design", 1).final_output == {"pages": 3}
    with pytest.raises(UnrecoverableError):
        execute(executor, body, "review")
    assert body.count == 0
    assert execute(executor, body, "design", 2).final_output == "again"
    restarts.end()


def test_a_state_saved_by_another_program_marks_its_tasks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    restarts = Restarts(tmp_path, persistent=True)
    executor = restarts.executor()
    execute(executor, Body(), "design", 1)
    restarts.restart()
    monkeypatch.setenv("MAESTRO_STATE_DIR", restarts.config.state.state_dir)
    monkeypatch.setenv("MAESTRO_CHECKPOINT_DIR", restarts.config.state.checkpoint_dir)
    from maestro_hive.unified_execution import reset_execution_config

    reset_execution_config()
    found = load_state(RUN)
    assert found is not None
    assert found.completed_tasks == ["design"]
    found.completed_tasks.append("draw")
    save_state(found)
    body = Body()
    executor = restarts.executor()
    execute(executor, body, "design", 2)
    execute(executor, body, "draw")
    assert body.count == 1
    restarts.end()


def test_persisting_an_attempt_shows_it(restarts: Restarts) -> None:
    executor = restarts.executor()
    result = execute(executor, Body(NO, "yes"))
    attempt = result.attempts[0]
    executor._persist_state(ExecutionResult("e", "t", "developer"), attempt)
    shown = persona_state(state_of(executor), "developer")
    assert (shown["status"], shown["current_attempt"], shown["last_error"]) == (
        "retrying", 1, "no",
    )  # fmt: skip
    assert state_of(executor).list_checkpoints()


# --- the state manager ---------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Restarts]:
    restarts = Restarts(tmp_path, persistent=True)
    yield restarts
    restarts.executor().state_manager.shutdown()
    restarts.end()


def test_the_state_manager_shows_the_run(folder: Restarts) -> None:
    executor = folder.executor()
    manager = executor.state_manager
    assert manager is executor.options(timeout=1).state_manager
    assert manager.get_state(RUN, "workflows")["steps"] == []
    execute(executor, Body({"a": 1}), "design")
    shown = manager.get_state(RUN, "workflows")
    assert shown == executor._load_state()
    assert shown["steps"][0]["output"] == {"a": 1}
    assert "workflows" in manager.get_namespaces()


def test_subscribers_are_told_of_every_change(folder: Restarts) -> None:
    executor = folder.executor()
    caught: list[StateChange] = []
    manager = executor.state_manager
    subscription = manager.subscribe(caught.append, RUN, "workflows")

    def work() -> str:
        current().spend(tokens=7)
        if current().attempt == 1:
            raise NO
        return "done"

    execute(executor, work, "design")
    stages = [
        (step["status"], step["attempts"], step["failures"], step["tokens"], step["output"])
        for change in caught
        for step in change.new_value["steps"]
    ]
    assert stages == [
        ("running", 1, 0, 0, None),
        ("running", 1, 0, 7, None),
        ("retrying", 1, 1, 7, None),
        ("running", 2, 1, 7, None),
        ("running", 2, 1, 14, None),
        ("success", 2, 1, 14, "done"),
    ]
    assert [change.change_type for change in caught] == ["set"] * 6
    for earlier, later in itertools.pairwise(caught):
        assert later.old_value == earlier.new_value
    assert manager.unsubscribe(subscription)
    execute(executor, Body(), "other")
    assert len(caught) == 6


def test_a_subscriber_that_fails_disturbs_nothing(folder: Restarts) -> None:
    executor = folder.executor()

    def broken(_: StateChange) -> None:
        raise RuntimeError("no")

    executor.state_manager.subscribe(broken)
    assert execute(executor, Body(), "design").success


def test_without_persistence_the_state_manager_shows_the_run_too(killable: Restarts) -> None:
    executor = killable.executor()
    execute(executor, Body(), "design")
    manager = executor.state_manager
    try:
        assert manager.get_state(RUN, "workflows") is not None
    finally:
        manager.shutdown()


# --- after a death -------------------------------------------------------------------------------


def test_a_step_whose_process_died_is_pending(killable: Restarts) -> None:
    kill_during(killable, "design")
    executor = killable.executor()
    assert state_of(executor).state.pending_tasks == ["design"]
    shown = executor._load_state()
    assert shown is not None
    assert (shown["steps"][0]["attempts"], shown["steps"][0]["failures"]) == (1, 0)
    execute(executor, Body(), "design")
    shown = executor._load_state()
    assert shown is not None
    assert (shown["steps"][0]["interruptions"], shown["steps"][0]["status"]) == (1, "success")


def test_looking_while_steps_are_executed_disturbs_nothing(restarts: Restarts) -> None:
    async def main() -> None:
        executor = restarts.executor()

        async def read() -> None:
            for _ in range(20):
                await asyncio.to_thread(executor._load_state)
                await asyncio.to_thread(getattr, state_of(executor), "state")

        async def work(number: int) -> int:
            await asyncio.sleep(0)
            return number

        steps = [executor.execute(work, "work", number) for number in range(100)]
        await asyncio.gather(read(), *steps)
        assert state_of(executor).state.completed_tasks == ["work"]

    asyncio.run(main())
