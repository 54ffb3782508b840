"""Healing between attempts: what an engine is handed, and what the next attempt gets of its answer."""

from __future__ import annotations

import signal
import textwrap
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from maestro_hive import Hive, current
from maestro_hive.core.self_reflection.self_healing_engine import (
    Failure,
    FailureType,
    Fix,
    HealingResult,
    HealingStatus,
    SelfHealingEngine,
    Severity,
    Workspace,
)
from maestro_hive.maestro.state.projections import facts_of
from maestro_hive.unified_execution import ExecutionStatus, PersonaExecutor, RecoverableError
from tests.hive.conftest import quick_config
from tests.python_processes import PythonProcess
from tests.unified_execution.restarts import (
    Body,
    Restarts,
    any_restarts,  # noqa: F401 - a fixture
    execute,
    killable_restarts,  # noqa: F401 - a fixture
)

if TYPE_CHECKING:
    from collections.abc import Callable


class Engine:
    """An engine as callers wrote them: a whole failure comes in, and a result goes out."""

    def __init__(self, *fixes: Any, status: HealingStatus = HealingStatus.FIXED) -> None:
        self.fixes = list(fixes)
        self.status = status
        self.asked: list[Failure] = []

    def heal_single(self, failure: Failure) -> HealingResult:
        self.asked.append(failure)
        fix = self.fixes.pop(0) if self.fixes else None
        feedback = "look at the keys" if fix is None else None
        return HealingResult(failure, fix, self.status, feedback=feedback)


class Called:
    """A task that fails unless its arguments are right, and notes what it was called with."""

    def __init__(self, **right: Any) -> None:
        self.right = right
        self.calls: list[dict[str, Any]] = []
        self.feedback: list[list[str]] = []

    def task(self) -> Callable[..., Any]:
        def work(path: str, depth: int = 1, *, mode: str = "r", **more: Any) -> str:
            given = {"path": path, "depth": depth, "mode": mode, **more}
            self.calls.append(given)
            self.feedback.append(list(current().feedback))
            if any(given.get(name) != value for name, value in self.right.items()):
                raise KeyError(path)
            return f"{path} {depth} {mode}"

        return work


def made(restarts: Restarts, engine: Any, *, durable: bool = True) -> PersonaExecutor:
    if durable:
        return restarts.executor(healing_engine=engine)
    return PersonaExecutor(restarts.config, "developer", engine)


# --- what it is handed -------------------------------------------------------------------------------


@pytest.mark.parametrize("durable", [True, False])
def test_an_engine_gets_a_whole_failure_and_can_answer_fixed(
    restarts: Restarts, durable: bool
) -> None:
    engine, called = Engine(), Called(depth=1, path="never")
    called.right = {"path": "a"}

    def work(path: str) -> str:
        if current().attempt == 1:
            return {"x": 1}[path]  # type: ignore[return-value]
        return "done"

    result = execute(made(restarts, engine, durable=durable), work, "read", "a")
    assert (result.final_status, result.recovery_applied) == (ExecutionStatus.RECOVERED, True)
    assert [each.healing_applied for each in result.attempts] == [True, False]
    (failure,) = engine.asked
    assert isinstance(failure, Failure)
    assert failure.failure_type is FailureType.KEY_ERROR
    assert failure.severity is Severity.MEDIUM
    assert failure.error_message == "'a'"
    assert failure.file_path == str(Path(__file__).relative_to(Path.cwd()))
    assert failure.line_number == work.__code__.co_firstlineno + 2
    assert failure.function_name == "work"
    assert failure.source == "execution"
    assert failure.stack_trace is not None
    assert "KeyError: 'a'" in failure.stack_trace
    assert "maestro_hive" not in failure.stack_trace  # as in what is recorded: the user's lines
    assert failure.failure_id.endswith(".1")
    assert failure.get_hash()
    context = failure.context
    assert {name: context[name] for name in ("persona", "task_name", "attempt")} == {
        "persona": "developer", "task_name": "read", "attempt": 1,
    }  # fmt: skip
    assert context["arguments"] == {"path": "a"}
    assert context["error_category"] == "UNKNOWN"


@pytest.mark.parametrize(
    "error, kind",
    [
        (RecoverableError("m", "SYNTAX", "a.py", 7), FailureType.SYNTAX_ERROR),
        (RecoverableError("m", "TEST_FAILURE"), FailureType.TEST_FAILURE),
        (RecoverableError("m", "BDV_VIOLATION"), FailureType.TEST_FAILURE),
        (AssertionError("3 != 4"), FailureType.ASSERTION_ERROR),
        (ImportError("no"), FailureType.IMPORT_ERROR),
        (ModuleNotFoundError("no"), FailureType.IMPORT_ERROR),
        (AttributeError("no"), FailureType.ATTRIBUTE_ERROR),
        (TypeError("no"), FailureType.TYPE_ERROR),
        (UnboundLocalError("no"), FailureType.NAME_ERROR),
        (IndexError("no"), FailureType.INDEX_ERROR),
        (TimeoutError("late"), FailureType.RUNTIME_ERROR),
        (RecursionError("deep"), FailureType.RUNTIME_ERROR),
    ],
)
def test_an_error_has_its_type(restarts: Restarts, error: Exception, kind: FailureType) -> None:
    engine = Engine()
    execute(made(restarts, engine, durable=False), Body(error, "yes"))
    (failure,) = engine.asked
    assert failure.failure_type is kind
    if kind is FailureType.SYNTAX_ERROR:
        assert (failure.file_path, failure.line_number) == ("a.py", 7)


# --- what the next attempt gets ------------------------------------------------------------------------


@pytest.mark.parametrize("durable", [True, False])
@pytest.mark.parametrize("as_dict", [True, False])
def test_changed_arguments_reach_the_next_attempt(
    restarts: Restarts, durable: bool, as_dict: bool
) -> None:
    changes = {"depth": 5, "mode": "w", "extra": ["x"]}
    fix = {"arguments": changes} if as_dict else Fix("deeper", arguments=changes)
    called = Called(depth=5, mode="w", extra=["x"])
    engine = Engine(fix)
    result = execute(made(restarts, engine, durable=durable), called.task(), "read", "a")
    assert result.final_output == "a 5 w"
    assert called.calls == [
        {"path": "a", "depth": 1, "mode": "r"},
        {"path": "a", "depth": 5, "mode": "w", "extra": ["x"]},
    ]
    assert result.final_status is ExecutionStatus.RECOVERED


@pytest.mark.parametrize("durable", [True, False])
def test_changes_of_later_attempts_are_added(restarts: Restarts, durable: bool) -> None:
    called = Called(depth=5, mode="w")
    engine = Engine(Fix("deeper", arguments={"depth": 5}), Fix("write", arguments={"mode": "w"}))
    execute(made(restarts, engine, durable=durable), called.task(), "read", "a")
    assert [(each["depth"], each["mode"]) for each in called.calls] == [
        (1, "r"),
        (5, "r"),
        (5, "w"),
    ]
    assert [each.context["arguments"].get("depth") for each in engine.asked] == [1, 5]


def test_arguments_of_a_fix_that_awaits_review_are_not_used(restarts: Restarts) -> None:
    called = Called(mode="w")
    fix = Fix("write", arguments={"mode": "w"})
    engine = Engine(fix, fix, status=HealingStatus.AWAITING_REVIEW)
    with pytest.raises(Exception, match="retries exhausted"):
        execute(made(restarts, engine), called.task(), "read", "a")
    assert {each["mode"] for each in called.calls} == {"r"}


@pytest.mark.parametrize(
    "changes, options, said",
    [
        ({"colour": 1}, {}, "TypeError: the task has no argument 'colour' to change; it has path"),
        ({"path": object()}, {}, "EncodeError: arguments.path"),
        ({"path": "b"}, {"store_input": False}, "the step has store_input=False"),
    ],
)
def test_arguments_that_cannot_be_used_are_told_and_the_failure_is_not_fixed(
    restarts: Restarts, changes: dict[str, Any], options: Any, said: str
) -> None:
    paths: list[str] = []

    def work(path: str) -> str:
        paths.append(path)
        if len(paths) == 1:
            raise KeyError(path)
        return "done"

    executor = made(restarts, Engine(Fix("other", arguments=changes))).options(**options)
    result = execute(executor, work, "read", "a")
    assert paths == ["a", "a"]
    assert result.final_status is ExecutionStatus.SUCCESS
    assert said in result.attempts[0].metrics["healing_error"]


def test_feedback_reaches_the_next_attempt(restarts: Restarts) -> None:
    called = Called(path="a", depth=9)
    engine = Engine(None, Fix("deeper", arguments={"depth": 9}, feedback="it is deeper"))
    execute(made(restarts, engine), called.task(), "read", "a")
    assert called.feedback[1] == ["Attempt 1 failed: UNKNOWN: 'a'\nlook at the keys"]
    assert called.feedback[2][1] == "Attempt 2 failed: UNKNOWN: 'a'\nit is deeper"


def test_our_own_engine_feeds_back_where_source_does_not_parse(restarts: Restarts) -> None:
    body = Body("def f(:\n    pass\n", "def f():\n    pass\n")
    execute(made(restarts, SelfHealingEngine()), body)
    (feedback,) = body.contexts[1].feedback
    assert "Python cannot parse the source in line 1" in feedback
    assert ">    1 def f(:" in feedback


def test_our_own_engine_takes_a_healer_that_changes_arguments(restarts: Restarts) -> None:
    class DeeperHealer:
        handles = frozenset({FailureType.KEY_ERROR})

        def propose(self, failure: Failure, workspace: Workspace) -> Fix | None:
            return Fix("deeper", arguments={"depth": failure.context["arguments"]["depth"] + 1})

    called = Called(depth=3)
    engine = SelfHealingEngine(healers=[DeeperHealer()])
    result = execute(made(restarts, engine), called.task(), "read", "a")
    assert result.final_status is ExecutionStatus.RECOVERED
    assert [each["depth"] for each in called.calls] == [1, 2, 3]
    assert engine.get_stats()["fixed"] == 2


# --- what is recorded ----------------------------------------------------------------------------------


def test_the_diagnosis_is_in_the_journal(restarts: Restarts) -> None:
    engine = Engine(Fix("deeper", arguments={"depth": 5}, healer="DepthHealer"))
    executor = made(restarts, engine)
    execute(executor, Called(depth=5).task(), "read", "a")
    assert executor.run is not None
    (step,) = executor.run.state.steps.values()
    assert step.last_failure is not None
    fingerprint = engine.asked[0].get_hash()
    diagnosis = facts_of(step.last_failure)["diagnosis"]
    assert (diagnosis["type"], diagnosis["fingerprint"]) == ("key_error", fingerprint)
    assert diagnosis["file"] == str(Path(__file__).relative_to(Path.cwd()))
    assert step.repairs is not None
    tried, judged = map(facts_of, step.repairs)
    assert tried == {
        "status": "FIXED",
        "type": "key_error",
        "fingerprint": fingerprint,
        "fix": "deeper",
        "healer": "DepthHealer",
    }
    assert judged == {
        "verdict": "worked",
        "fingerprint": fingerprint,
        "healer": "DepthHealer",
        "reason": "the step was completed",
    }


def test_a_healed_step_comes_back_healed(restarts: Restarts) -> None:
    called = Called(depth=5)
    execute(
        made(restarts, Engine(Fix("deeper", arguments={"depth": 5}))), called.task(), "read", "a"
    )
    restarts.restart()
    again = execute(restarts.executor(), Called(depth=7).task(), "read", "a")
    assert (again.final_status, again.recovery_applied) == (ExecutionStatus.RECOVERED, True)
    assert again.final_output == "a 5 r"
    assert [each.healing_applied for each in again.attempts] == [True, False]


def test_changed_arguments_survive_a_kill(killable: Restarts) -> None:
    """Killed in the second attempt: the next process calls it with the changed arguments."""
    called = Called(depth=5)
    task = called.task()

    class KilledError(BaseException):
        pass

    def killed(path: str, depth: int = 1, *, mode: str = "r") -> str:
        if depth == 5:
            killable.kill()
            raise KilledError
        return str(task(path, depth, mode=mode))

    engine = Engine(Fix("deeper", arguments={"depth": 5}))
    with pytest.raises(BaseException):  # noqa: B017, PT011 - the process is dead
        execute(made(killable, engine), killed, "read", "a")
    result = execute(killable.executor(), called.task(), "read", "a")
    assert result.final_output == "a 5 r"
    assert [each["depth"] for each in called.calls] == [1, 5]
    assert result.final_status is ExecutionStatus.RECOVERED


def test_after_a_forced_start_the_arguments_are_the_callers_again(restarts: Restarts) -> None:
    called = Called(depth=5)
    engine = Engine(Fix("deeper", arguments={"depth": 5}))
    execute(made(restarts, engine), called.task(), "read", "a")
    called.right = {}
    execute(restarts.executor().options(force=True), called.task(), "read", "a")
    assert [each["depth"] for each in called.calls] == [1, 5, 1]


# --- in a hive -----------------------------------------------------------------------------------------


def test_a_step_of_a_hive_is_healed_and_its_workflow_keeps_its_own_arguments(folder: Path) -> None:
    seen: list[Any] = []

    class Greedy:
        """Changes what it is shown, which must not reach the workflow."""

        def heal_single(self, failure: Failure) -> object:
            rows = failure.context["arguments"]["rows"]
            rows.append("healed")
            return SimpleNamespace(status="FIXED", fix={"arguments": {"rows": rows}})

    with Hive(folder, quick_config(), healing_engine=Greedy()) as hive:

        @hive.step
        async def count(rows: list[str]) -> int:
            seen.append(list(rows))
            rows.append("changed by the step")
            if "healed" not in rows:
                raise ValueError("too few")
            return len(rows)

        @hive.workflow
        async def work() -> list[Any]:
            rows = ["a"]
            return [await count(rows), rows]

        assert hive.run_sync(work, run_id="r") == [3, ["a"]]
        assert hive.run_sync(work, run_id="r") == [3, ["a"]]
    assert seen == [["a"], ["a", "healed"]]


_PROGRAM = """
    import os, signal, sys
    from types import SimpleNamespace
    from maestro_hive import ExecutionConfig, Hive
    from maestro_hive.unified_execution import Level1Config, Level2Config

    class Engine:
        def heal_single(self, failure):
            print("healing", flush=True)
            return SimpleNamespace(status="FIXED", fix={"arguments": {"depth": 5}})

    config = ExecutionConfig(
        level1=Level1Config(base_delay_seconds=0), level2=Level2Config(base_delay_seconds=0)
    )
    with Hive(sys.argv[1], config, healing_engine=Engine()) as hive:

        @hive.step
        async def read(path, depth=1):
            print("reading", path, depth, flush=True)
            if depth == 1:
                raise KeyError(path)
            if sys.argv[2] == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            return depth

        @hive.workflow
        async def work():
            return await read("a")

        print(hive.run_sync(work, run_id="r"), flush=True)
"""


def test_a_killed_process_goes_on_with_the_changed_arguments(tmp_path: Path) -> None:
    code = textwrap.dedent(_PROGRAM)
    killed = PythonProcess(code, tmp_path / "state", "kill")
    output, _ = killed.communicate()
    assert killed.returncode == -signal.SIGKILL
    assert output.splitlines() == ["reading a 1", "healing", "reading a 5"]
    resumed = PythonProcess(code, tmp_path / "state", "go on")
    output, _ = resumed.communicate()
    assert output.splitlines() == ["reading a 5", "5"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "state"


# --- what worked before ----------------------------------------------------------------------------


class Deeper:
    """A healer that changes the depth; a subclass is another healer."""

    handles = frozenset({FailureType.KEY_ERROR})
    depth = 0

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []

    def propose(self, failure: Failure, workspace: Workspace) -> Fix | None:
        self.asked.append(failure.context)
        return Fix("deeper", arguments={"depth": self.depth})


class WrongHealer(Deeper):
    depth = 3


class RightHealer(Deeper):
    depth = 5


def healers() -> tuple[WrongHealer, RightHealer, SelfHealingEngine]:
    wrong, right = WrongHealer(), RightHealer()
    return wrong, right, SelfHealingEngine(healers=[wrong, right])


def test_a_repair_that_did_not_help_is_tried_last(restarts: Restarts) -> None:
    wrong, right, engine = healers()
    called = Called(depth=5)
    execute(made(restarts, engine), called.task(), "read", "a")
    assert [each["depth"] for each in called.calls] == [1, 3, 5]
    assert [each["tried"] for each in wrong.asked + right.asked] == [[], ["WrongHealer"]]


def test_a_repair_that_worked_before_is_tried_first_in_any_run(restarts: Restarts) -> None:
    execute(made(restarts, healers()[2]), Called(depth=5).task(), "read", "a")
    restarts.restart()
    wrong, right, engine = healers()  # another process knows nothing but the journal
    called = Called(depth=5)
    executor = restarts.executor(healing_engine=engine, workflow_id="run-2")
    execute(executor, called.task(), "read", "a")
    assert [each["depth"] for each in called.calls] == [1, 5]
    assert (len(wrong.asked), len(right.asked)) == (0, 1)
    assert right.asked[0]["worked_before"] == "RightHealer"


def test_a_kill_forgets_no_repair_that_did_not_help(killable: Restarts) -> None:
    class KilledError(BaseException):
        pass

    def killed(path: str, depth: int = 1) -> str:
        if depth == 3:
            killable.kill()
            raise KilledError
        raise KeyError(path)

    with pytest.raises(BaseException):  # noqa: B017, PT011 - the process is dead
        execute(made(killable, healers()[2]), killed, "read", "a")
    wrong, right, engine = healers()
    depths: list[int] = []

    def work(path: str, depth: int = 1) -> str:
        depths.append(depth)
        if depth != 5:
            raise KeyError(path)
        return path

    work.__code__ = work.__code__.replace(co_name="killed")  # the same function, as after a restart
    execute(made(killable, engine), work, "read", "a")
    assert depths == [3, 5]
    assert (len(wrong.asked), len(right.asked)) == (0, 1)
