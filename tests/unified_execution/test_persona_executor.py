"""Level 1 as its callers see it: what is kept, what runs again, and what an executor offers."""

from __future__ import annotations

import asyncio
import dataclasses
import enum
import gc
import inspect
import sys
import threading
import time
import tracemalloc
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from uuid import UUID

import pydantic
import pytest

import maestro_hive.unified_execution as package
from maestro_hive.engine.context import current
from maestro_hive.engine.plan import UnencodableInputWarning
from maestro_hive.kernel.errors import ConfigurationError, EncodeError, StorageError
from maestro_hive.unified_execution import (
    ErrorCategory,
    ExecutionConfig,
    Level1Config,
    StateConfig,
    StatePersistence,
    TokenBudgetExceeded,
    UnrecoverableError,
    get_execution_config,
)
from maestro_hive.unified_execution.persona_executor import (
    ExecutionAttempt,
    ExecutionResult,
    ExecutionStatus,
    PersonaExecutor,
    execute_with_level1_retry,
)
from tests.tables import for_each
from tests.unified_execution.restarts import (
    RUN,
    Body,
    Restarts,
    any_restarts,  # noqa: F401 - a fixture
    execute,
    persona_state,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from maestro_hive.maestro.state.projections import StepState


def quick(**level1: Any) -> ExecutionConfig:
    """Return a configuration that does not wait."""
    return ExecutionConfig(level1=Level1Config(base_delay_seconds=0, **level1))


def steps_of(executor: PersonaExecutor) -> list[StepState]:
    assert executor._run is not None
    return list(executor._run.state.steps.values())


# --- names, parameters, defaults -----------------------------------------------------------------


@for_each(
    "name",
    [
        "ExecutionAttempt",
        "ExecutionResult",
        "ExecutionStatus",
        "PersonaExecutor",
        "execute_with_level1_retry",
    ],
)
def test_the_names_are_those_of_the_package_too(name: str) -> None:
    module = inspect.getmodule(PersonaExecutor)
    assert getattr(package, name) is getattr(module, name)


def test_the_statuses_are_the_documented_ones() -> None:
    assert [status.value for status in ExecutionStatus] == [
        "pending", "running", "success", "failed", "retrying", "recovered", "help_needed",
        "bankrupt", "interrupted", "cancelled",
    ]  # fmt: skip
    assert all(status.name == status.value.upper() for status in ExecutionStatus)


def signature(function: Callable[..., Any]) -> list[tuple[str, Any]]:
    found = inspect.signature(function).parameters.values()
    return [
        (str(each).partition(":")[0], each.default)
        for each in found
        if each.name != "self" and each.kind is not each.KEYWORD_ONLY
    ]


EMPTY = inspect.Parameter.empty


def test_an_executor_takes_what_it_always_took() -> None:
    assert signature(PersonaExecutor.__init__) == [
        ("config", None),
        ("persona_id", "default"),
        ("healing_engine", None),
        ("workflow_id", None),
        ("state_persistence", None),
        ("enforcer", None),
        ("audit_log_path", None),
        ("persona_role", "developer_agent"),
    ]
    only = inspect.signature(PersonaExecutor).parameters["execution_id"]
    assert (only.kind, only.default) == (only.KEYWORD_ONLY, None)


def test_execute_takes_what_it_always_took() -> None:
    assert signature(PersonaExecutor.execute) == [
        ("task", EMPTY), ("task_name", "unnamed_task"), ("*args", EMPTY), ("**kwargs", EMPTY),
    ]  # fmt: skip
    assert [name for name, _ in signature(execute_with_level1_retry)] == [
        "task", "task_name", "persona_id", "max_attempts", "*args", "**kwargs",
    ]  # fmt: skip


def test_an_attempt_and_a_result_have_the_documented_fields() -> None:
    assert [field.name for field in dataclasses.fields(ExecutionAttempt)] == [
        "attempt_id", "attempt_number", "started_at", "ended_at", "status", "error_message",
        "error_type", "error_traceback", "output", "tokens_used", "healing_applied", "metrics",
    ]  # fmt: skip
    assert [field.name for field in dataclasses.fields(ExecutionResult)] == [
        "execution_id", "task_name", "persona_id", "final_status", "attempts",
        "total_duration_seconds", "total_tokens_used", "final_output", "recovery_applied",
        "failure_report", "created_at",
    ]  # fmt: skip


def test_a_result_tells_what_happened(restarts: Restarts) -> None:
    executor = restarts.executor()
    result = execute(executor, Body(ValueError("no"), {"a": 1}), "design", 7)
    assert result.success
    assert (result.execution_id, result.task_name, result.persona_id) == (
        RUN, "design", "developer",
    )  # fmt: skip
    assert (result.final_status, result.final_output) == (ExecutionStatus.SUCCESS, {"a": 1})
    assert (result.attempt_count, result.recovery_applied, result.failure_report) == (
        2, False, None,
    )  # fmt: skip
    first, second = result.attempts
    assert (first.attempt_number, first.status, first.error_type, first.error_message) == (
        1, ExecutionStatus.RETRYING, "ValueError", "no",
    )  # fmt: skip
    assert "ValueError: no" in (first.error_traceback or "")
    assert "maestro_hive" not in (first.error_traceback or "")
    assert (second.attempt_number, second.status, second.output) == (
        2, ExecutionStatus.SUCCESS, {"a": 1},
    )  # fmt: skip
    assert first.attempt_id != second.attempt_id
    assert result.total_duration_seconds == pytest.approx(1.0)
    shown = result.to_dict()
    assert shown["final_status"] == "success"
    assert [each["status"] for each in shown["attempts"]] == ["retrying", "success"]
    assert executor.attempts == result.attempts
    assert executor.final_status is ExecutionStatus.SUCCESS


def test_a_new_executor_has_done_nothing() -> None:
    executor = PersonaExecutor()
    assert (executor.attempts, executor.final_status) == ([], ExecutionStatus.PENDING)
    assert (executor.persona_id, executor.workflow_id) == ("default", None)
    assert executor.get_token_usage() == 0


@pytest.mark.parametrize("persona", ["", None, 5])
def test_a_persona_has_a_name(persona: Any) -> None:
    with pytest.raises(ConfigurationError, match="persona_id is a text that is not empty"):
        PersonaExecutor(persona_id=persona)


@for_each(
    "given, caught",
    [
        ({"config": "state"}, "the config is 'state', and must be an ExecutionConfig"),
        ({"config": {}}, "the config is {}, and must be an ExecutionConfig"),
        ({"workflow_id": []}, r"the workflow_id is \[\], and must be a text"),
        ({"execution_id": 5}, "the execution_id is 5, and must be a text"),
        ({"state_persistence": "x"}, "the state_persistence is 'x', and must be a StatePersist"),
        ({"healing_engine": 5}, "the healing_engine is 5, and must be .* heal_single"),
        ({"enforcer": 5}, "the enforcer is 5, and must be .* check"),
    ],
)
def test_an_executor_is_made_of_what_it_takes(given: dict[str, Any], caught: str) -> None:
    with pytest.raises(ConfigurationError, match=caught):
        PersonaExecutor(**given)


def test_in_memory_a_name_is_a_text_too() -> None:
    with pytest.raises(ConfigurationError, match="task_name is 5, and must be a text"):
        execute(PersonaExecutor(), Body(), 5)  # type: ignore[arg-type]


def identity(executor: PersonaExecutor, task: Any, name: str, *args: Any) -> bytes | None:
    plan = executor.plan(task, name, args, {}).plan
    return None if plan is None else plan.identity


def test_a_step_has_an_identity_by_name_input_and_key_and_in_memory_none(
    restarts: Restarts,
) -> None:
    executor, body = restarts.executor(), Body()
    known = identity(executor, body, "step", 1)
    assert known == identity(restarts.executor(), Body(), "step", 1)
    assert executor._run is not None
    execute(executor, body, "step", 1)
    assert list(executor._run.state.by_identity) == [known]
    keyed = executor.options(key="k")
    others = [
        identity(executor, body, "step", 2),
        identity(executor, body, "other", 1),
        identity(restarts.executor("another"), body, "step", 1),
        identity(keyed, body, "step", 1),
    ]
    assert len({known, *others}) == 5
    assert identity(keyed, body, "step", object()) == others[-1]
    assert identity(PersonaExecutor(), body, "step", 1) is None


def test_a_run_that_is_set_back_while_a_step_is_executed_is_told_and_stays_readable(
    restarts: Restarts,
) -> None:
    executor = restarts.executor()
    state = executor.state_persistence
    assert state is not None
    execute(executor, Body("first"), "first")
    before = state.checkpoint()

    def set_back() -> None:
        state.restore(before)

    with pytest.raises(StorageError, match="was reset while"):
        execute(executor, set_back, "second")
    restarts.restart()
    assert execute(restarts.executor(), Body("not called"), "first").final_output == "first"
    assert execute(restarts.executor(), Body("again"), "second").final_output == "again"


def test_the_id_of_an_execution_is_that_of_its_workflow(restarts: Restarts) -> None:
    restarts.executor(workflow_id=None, execution_id=RUN)
    assert restarts.executor(workflow_id=RUN, execution_id=RUN).workflow_id == RUN
    with pytest.raises(ConfigurationError, match=r"one run, and was given.*'run-1'.*'other'"):
        restarts.executor(workflow_id=RUN, execution_id="other")


def test_an_executor_can_share_the_state_of_a_run(restarts: Restarts) -> None:
    with StatePersistence(restarts.config, "given") as state:
        with PersonaExecutor(restarts.config, "p", state_persistence=state) as executor:
            assert executor.workflow_id == "given"
            execute(executor, Body(), "design")
        assert state.state.completed_tasks == ["design"]
        with pytest.raises(ConfigurationError, match="one run"):
            PersonaExecutor(restarts.config, "p", workflow_id="other", state_persistence=state)


def test_the_configuration_is_a_frozen_copy(restarts: Restarts) -> None:
    executor = restarts.executor()
    restarts.config.level1.max_attempts = 9
    assert executor.config.level1.max_attempts == 3
    with pytest.raises(ConfigurationError, match="frozen copy"):
        executor.config.level1.max_attempts = 1


def test_what_cannot_be_called_is_no_task(restarts: Restarts) -> None:
    with pytest.raises(ConfigurationError, match=r"'design' is 5, and cannot be called"):
        execute(restarts.executor(), 5, "design")  # type: ignore[arg-type]


# --- kept is kept --------------------------------------------------------------------------------


def test_a_completed_step_is_returned_without_a_call(restarts: Restarts) -> None:
    body = Body({"answer": [1, 2]})
    first = execute(restarts.executor(), body, "design", "page", size=3)
    again = execute(restarts.executor(), body, "design", "page", size=3)
    assert body.count == 1
    assert again.final_output == first.final_output == {"answer": [1, 2]}
    assert (again.success, again.attempt_count) == (True, 1)
    assert again.attempts[0].output == {"answer": [1, 2]}


def test_a_completed_step_is_completed_in_the_next_process(restarts: Restarts) -> None:
    body = Body(ValueError("no"), "the result")
    first = execute(restarts.executor(), body, "design", "page")
    restarts.restart()
    executor = restarts.executor()
    again = execute(executor, body, "design", "page")
    assert body.count == 2
    assert again.final_output == "the result"
    assert [each.to_dict() for each in again.attempts] == [
        each.to_dict() for each in first.attempts
    ]
    assert again.total_duration_seconds == first.total_duration_seconds
    assert executor.final_status is ExecutionStatus.SUCCESS
    assert executor.attempts == again.attempts


def test_none_can_be_stored(restarts: Restarts) -> None:
    body = Body(None)
    execute(restarts.executor(), body)
    assert execute(restarts.executor(), body).final_output is None
    assert body.count == 1


def test_a_recorded_result_cannot_be_changed(restarts: Restarts) -> None:
    body = Body({"list": [1]})
    execute(restarts.executor(), body).final_output["list"].append(2)
    execute(restarts.executor(), body).final_output["list"].append(3)
    assert execute(restarts.executor(), body).final_output == {"list": [1]}


#: A name, its arguments and its keywords: of no two of them is it the same step.
DIFFERENT: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
    ("design", ("page",), {"size": 1}),
    ("design", ("other",), {"size": 1}),
    ("design", ("page",), {"size": 2}),
    ("design", ("page",), {"size": True}),
    ("design", ("page",), {"size": 1.0}),
    ("design", ("page",), {}),
    ("design", ("page", 1), {}),
    ("design", (("page",),), {"size": 1}),
    ("draw", ("page",), {"size": 1}),
]


def test_another_name_or_input_is_another_step(restarts: Restarts) -> None:
    body = Body()
    executor = restarts.executor()
    for number, (name, args, kwargs) in enumerate(DIFFERENT):
        execute(executor, body, name, *args, **kwargs)
        assert body.count == number + 1, (name, args, kwargs)
        assert repr(body.calls[number]) == repr((args, kwargs))


def test_another_persona_is_another_step(restarts: Restarts) -> None:
    body = Body("one", "two")
    results = [execute(restarts.executor(name), body, "design") for name in ("a", "b", "a", "b")]
    assert [result.final_output for result in results] == ["one", "two", "one", "two"]
    assert body.count == 2


def test_the_order_of_keywords_and_of_sets_is_no_change(restarts: Restarts) -> None:
    body = Body()
    executor = restarts.executor()
    execute(executor, body, "design", {"x", "y", "z"}, a=1, b={"c": 1, "d": 2})
    execute(executor, body, "design", {"z", "y", "x"}, b={"d": 2, "c": 1}, a=1)
    assert body.count == 1


def test_steps_may_come_in_another_order_and_between_new_ones(restarts: Restarts) -> None:
    body = Body()
    for number in range(5):
        execute(restarts.executor(), body, f"step {number}", number)
    restarts.restart()
    executor = restarts.executor()
    for number in (4, 7, 0, 2, 6, 1, 3):
        execute(executor, body, f"step {number}", number)
    assert [args[0] for args, _ in body.calls] == [0, 1, 2, 3, 4, 7, 6]


def test_steps_at_once_keep_their_results_apart(restarts: Restarts) -> None:
    async def double(number: int) -> int:
        await asyncio.sleep(0.001 * (number % 3))
        return number * 2

    async def main() -> list[int]:
        executor = restarts.executor()
        made = (executor.execute(double, "double", number) for number in range(50))
        return [result.final_output for result in await asyncio.gather(*made)]

    assert asyncio.run(main()) == asyncio.run(main()) == [number * 2 for number in range(50)]


def test_a_durable_step_needs_a_name(restarts: Restarts) -> None:
    body = Body()
    names: list[Any] = ["unnamed_task", "", None, 5, []]
    for name in names:
        with pytest.raises(ConfigurationError, match="needs a name"):
            execute(restarts.executor(), body, name)
    with pytest.raises(ConfigurationError, match="needs a name"):
        asyncio.run(restarts.executor().execute(body))
    assert body.count == 0
    assert asyncio.run(PersonaExecutor().execute(body)).task_name == "unnamed_task"


# --- inputs and results in JSON ------------------------------------------------------------------


def test_an_input_without_a_form_in_json_is_warned_about_once_and_shares_no_result(
    restarts: Restarts,
) -> None:
    body = Body("first", "second", "third", "fourth")
    executor = restarts.executor()
    with pytest.warns(UnencodableInputWarning, match=r"'design'.*input\.args\[1\]") as caught:
        assert execute(executor, body, "design", 1, object()).final_output == "first"
    assert len(caught) == 1
    assert execute(executor, body, "design", 2, object()).final_output == "second"
    assert execute(executor, body, "design", 1, object()).final_output == "third"
    with pytest.warns(UnencodableInputWarning, match="'draw'"):
        assert execute(executor, body, "draw", object()).final_output == "fourth"
    assert body.count == 4


def test_after_a_restart_such_calls_are_told_apart_by_the_rest_and_by_their_order(
    restarts: Restarts,
) -> None:
    body = Body("cat 1", "dog", "cat 2")

    def draw(*animals: str) -> list[str]:
        executor = restarts.executor()
        return [execute(executor, body, "draw", each, object()).final_output for each in animals]

    with pytest.warns(UnencodableInputWarning):
        assert draw("cat", "dog", "cat") == ["cat 1", "dog", "cat 2"]
    restarts.restart()
    with pytest.warns(UnencodableInputWarning):
        assert draw("dog", "cat", "cat") == ["dog", "cat 1", "cat 2"]
    assert body.count == 3


class Tool:
    def __init__(self, name: str) -> None:
        self.name = name

    def use(self, what: str) -> str:
        return f"{self.name} {what}"


def test_tasks_of_one_name_that_carry_other_values_have_each_their_own_result(
    restarts: Restarts,
) -> None:
    def made(name: str) -> Any:
        return lambda what: f"{name} {what}"

    def outputs(name: str, tasks: list[Any]) -> list[str]:
        return [execute(executor, task, name, "x").final_output for task in tasks]

    one, two = Tool("a"), Tool("b")
    for _ in range(2):
        executor = restarts.executor()
        with pytest.warns(UnencodableInputWarning, match="what its tasks carry") as caught:
            methods = outputs("use", [one.use, two.use, one.use, two.use])
        assert len(caught) == 1
        with pytest.warns(UnencodableInputWarning, match="what its tasks carry"):
            closures = outputs("make", [made(name) for name in "abab"])
        assert methods == closures == ["a x", "b x", "a x", "b x"]
        restarts.restart()


@pytest.mark.filterwarnings("ignore::maestro_hive.engine.plan.UnencodableInputWarning")
def test_the_same_call_in_threads_at_once_is_one_step(tmp_path: Path) -> None:
    factor = 2
    restarts = Restarts(tmp_path, persistent=False)
    executor = restarts.executor()
    together = threading.Barrier(4, timeout=30)
    identities: list[set[bytes | None]] = [set() for _ in range(500)]

    def identity_of(number: int) -> bytes | None:
        plan = executor.plan(lambda times: factor * times, "work", (number,), {}).plan
        return plan and plan.identity

    def plan_all() -> None:
        for number, found in enumerate(identities):
            together.wait()
            found.add(identity_of(number))

    threads = [threading.Thread(target=plan_all) for _ in range(4)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert [len(found) for found in identities] == [1] * len(identities)
    restarts.end()


def test_the_warning_points_to_the_call(restarts: Restarts) -> None:
    async def main() -> None:
        await restarts.executor().execute(Body(), "design", object())

    with pytest.warns(UnencodableInputWarning) as caught:
        asyncio.run(main())
    assert caught[0].filename == __file__


def test_with_a_key_the_input_does_not_matter(restarts: Restarts) -> None:
    body = Body("a", "b")
    executor = restarts.executor()
    outputs = [
        execute(executor.options(key=key), body, "design", given).final_output
        for key, given in [("k1", 1), ("k1", 2), ("k2", 1), ("k1", object()), ("k2", object())]
    ]
    assert outputs == ["a", "a", "b", "a", "b"]
    assert body.count == 2


def test_a_result_without_a_form_in_json_is_an_error_that_names_the_place(
    restarts: Restarts,
) -> None:
    body = Body({"users": [1, {"photo": object()}]})
    executor = restarts.executor()
    with pytest.raises(EncodeError, match=r"result\.users\[1\]\.photo"):
        execute(executor, body, "design")
    assert body.count == 1
    assert executor.final_status is ExecutionStatus.FAILED
    assert [each.status for each in executor.attempts] == [ExecutionStatus.FAILED]


def test_in_memory_any_result_will_do() -> None:
    result = object()
    assert execute(PersonaExecutor(), Body(result)).final_output is result


class Colour(enum.Enum):
    RED = "red"


@dataclasses.dataclass
class Point:
    x: int
    where: Path


class Pair(NamedTuple):
    left: int
    right: str


class Model(pydantic.BaseModel):
    name: str
    when: datetime


RESULTS: list[object] = [
    None, True, 0, -5, 10**30, 1.5, "", "text ä 🎼", b"\x00\xff", [1, [2]], {"a": {"b": []}},
    (1, (2,)), {1: "a", None: 2}, {"$": 1}, {1, 2}, frozenset({"a"}),
    datetime(2030, 1, 1, tzinfo=UTC), date(2030, 1, 1), timedelta(seconds=1.5),
    Decimal("1.10"), UUID(int=5), Path("a/b"), Colour.RED, Point(1, Path("x")),
    Pair(1, "b"), Model(name="n", when=datetime(2030, 1, 1, tzinfo=UTC)),
    [Point(2, Path("y")), {"c": Colour.RED}],
]  # fmt: skip


def test_a_result_comes_back_as_it_was(restarts: Restarts) -> None:
    executor = restarts.executor()
    for number, value in enumerate(RESULTS):
        execute(executor, Body(value), "step", number)
    restarts.restart()
    executor = restarts.executor()
    for number, value in enumerate(RESULTS):
        body = Body(AssertionError("it ran again"))
        again = execute(executor, body, "step", number).final_output
        assert again == value
        assert type(again) is type(value)


def test_a_large_result_comes_back_and_is_not_kept_in_memory(tmp_path: Path) -> None:
    restarts = Restarts(tmp_path, persistent=True)

    async def main() -> None:
        executor = restarts.executor()
        for number in range(20):
            await executor.execute(lambda n: f"{n:07}" * 150_000, "large", number)

    tracemalloc.start()
    try:
        asyncio.run(main())
        gc.collect()
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < 5_000_000  # of 21 MB
    again = execute(restarts.executor(), Body(AssertionError("it ran again")), "large", 3)
    assert again.final_output == "0000003" * 150_000
    restarts.end()


def test_an_input_is_stored_unless_asked_not_to(restarts: Restarts) -> None:
    executor = restarts.executor()
    execute(executor, Body(), "open", "a secret?")
    execute(executor.options(store_input=False), Body(), "closed", "a secret!")
    opened, closed = steps_of(executor)
    assert opened.started.value == b'{"args":["a secret?"],"kwargs":{}}'
    assert closed.started.value is None
    body = Body()
    execute(executor, body, "closed", "a secret!")
    assert body.count == 0
    execute(executor, body, "closed", "another")
    assert body.count == 1


# --- force and retry -----------------------------------------------------------------------------


def test_force_executes_again_and_keeps_the_new_result(restarts: Restarts) -> None:
    body = Body("old", "new")
    executor = restarts.executor()
    execute(executor, body)
    assert execute(executor.options(force=True), body).final_output == "new"
    restarts.restart()
    assert execute(restarts.executor(), body).final_output == "new"
    assert body.count == 2


def test_a_forced_step_has_all_its_attempts_again(restarts: Restarts) -> None:
    executor = restarts.executor()
    execute(executor, Body(ValueError("1"), ValueError("2"), "old"))
    body = Body(ValueError("3"), ValueError("4"), "new")
    result = execute(executor.options(force=True), body)
    assert (result.final_output, body.count) == ("new", 3)
    assert [context.attempt for context in body.contexts] == [4, 5, 6]
    assert body.contexts[0].feedback == []
    assert result.attempt_count == 3


def test_when_a_forced_step_fails_the_old_result_is_gone(restarts: Restarts) -> None:
    executor = restarts.executor()
    execute(executor, Body("old"))
    with pytest.raises(UnrecoverableError):
        execute(executor.options(force=True), Body(ValueError("no")))
    with pytest.raises(UnrecoverableError):
        execute(executor, Body("not called"))


def test_a_step_that_was_given_up_raises_until_it_is_retried(restarts: Restarts) -> None:
    with pytest.raises(UnrecoverableError) as first:
        execute(restarts.executor(), Body(ValueError("no")))
    restarts.restart()
    body = Body("at last")
    with pytest.raises(UnrecoverableError, match="Level 1 retries exhausted for step") as again:
        execute(restarts.executor(), body)
    assert body.count == 0
    assert again.value.failure_report is not None
    assert first.value.failure_report is not None
    assert again.value.failure_report.to_dict() == first.value.failure_report.to_dict()
    assert again.value.result.attempt_count == 3
    assert execute(restarts.executor().options(retry=True), body).final_output == "at last"
    assert execute(restarts.executor(), body).final_output == "at last"
    assert body.count == 1


def test_a_retry_of_what_is_recorded_changes_nothing(restarts: Restarts) -> None:
    body = Body("a", "b")
    execute(restarts.executor(), body)
    assert execute(restarts.executor().options(retry=True), body).final_output == "a"
    assert body.count == 1


def test_a_retry_starts_with_all_attempts_and_all_the_time_there_is(restarts: Restarts) -> None:
    restarts.config.level1.max_elapsed_seconds = 10
    with pytest.raises(UnrecoverableError):
        execute(restarts.executor(), Body(ValueError("no")))
    restarts.clock.advance(3600)
    restarts.restart()
    body = Body(ValueError("no"), ValueError("no"), "yes")
    assert execute(restarts.executor().options(retry=True), body).final_output == "yes"


# --- options -------------------------------------------------------------------------------------


def test_options_are_those_of_the_calls_that_follow_and_add_up() -> None:
    executor = PersonaExecutor(quick())
    both = executor.options(max_attempts=2).options(timeout=5)
    assert (both._spec.options.max_attempts, both._spec.options.timeout) == (2, 5)
    assert executor._spec.options.max_attempts is None
    body = Body(ValueError("no"))
    with pytest.raises(UnrecoverableError):
        execute(both, body)
    assert body.count == 2
    assert both.final_status is executor.final_status is ExecutionStatus.FAILED
    assert executor.attempts == both.attempts


def test_an_unknown_option_is_named_with_those_there_are() -> None:
    with pytest.raises(
        ConfigurationError, match=r"no option retries, tries; the options are force"
    ):
        PersonaExecutor().options(tries=3, retries=1)  # type: ignore[call-arg]


def test_an_option_that_is_a_setting_is_named_with_where_it_is_set() -> None:
    wanted = r"max_interruptions is a setting.*level1=Level1Config\(max_interruptions=…\)"
    with pytest.raises(ConfigurationError, match=wanted):
        PersonaExecutor().options(max_interruptions=9)  # type: ignore[call-arg]


@for_each(
    "name, value",
    [
        ("force", 1), ("force", None), ("retry", "yes"), ("key", ""), ("key", 5),
        ("key", "\ud800"), ("timeout", 0), ("timeout", -1), ("timeout", "5"),
        ("timeout", float("inf")), ("timeout", float("nan")), ("timeout", True),
        ("max_attempts", 0), ("max_attempts", 1.5), ("max_elapsed_seconds", -1),
        ("retry_on", 5), ("retry_on", int), ("retry_on", "ValueError"), ("on_ambiguous", "maybe"),
        ("on_ambiguous", None), ("store_input", 0),
    ],
)  # fmt: skip
def test_a_bad_option_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(ConfigurationError, match=name):
        PersonaExecutor().options(**{name: value})  # type: ignore[arg-type]


# --- several executors ---------------------------------------------------------------------------


def test_two_personas_share_a_run_in_one_process(restarts: Restarts) -> None:
    async def note(word: str) -> int:
        current().memory[word] = True
        current().spend(tokens=len(word))
        return len(current().memory)

    async def main() -> None:
        one, other = restarts.executor("architect"), restarts.executor("developer")
        await asyncio.gather(
            *(one.execute(note, "note", word) for word in ("a", "bb")),
            *(other.execute(note, "note", word) for word in ("a", "cccc")),
        )
        assert (one.get_token_usage(), other.get_token_usage()) == (3, 5)
        state = one.state_persistence
        assert state is not None
        assert persona_state(state, "architect")["memory"] == {"a": True, "bb": True}
        assert persona_state(state, "developer")["memory"] == {"a": True, "cccc": True}
        assert len(steps_of(one)) == len(steps_of(other)) == 4

    asyncio.run(main())


def test_equal_calls_at_once_are_one_call(restarts: Restarts) -> None:
    calls = 0

    async def slow(number: int) -> int:
        nonlocal calls
        calls += 1
        await asyncio.sleep(0.01)
        return number

    async def main() -> list[ExecutionResult]:
        one, other = restarts.executor(), restarts.executor()
        made = [each.execute(slow, "slow", 5) for each in (one, other, one, other)]
        return await asyncio.gather(*made)

    results = asyncio.run(main())
    assert calls == 1
    assert [result.final_output for result in results] == [5, 5, 5, 5]


def test_equal_calls_in_threads_with_loops_of_their_own_are_one_call(restarts: Restarts) -> None:
    calls: list[int] = []
    outputs: list[object] = []
    executor = restarts.executor()

    def slow() -> str:
        calls.append(1)
        time.sleep(0.05)
        return "done"

    def thread() -> None:
        outputs.append(execute(executor, slow, "slow").final_output)

    threads = [threading.Thread(target=thread) for _ in range(5)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert (len(calls), outputs) == (1, ["done"] * 5)


def test_when_the_one_call_fails_those_who_waited_are_told(restarts: Restarts) -> None:
    body = Body(ValueError("no"))

    async def main() -> list[Any]:
        executor = restarts.executor()
        made = [executor.execute(body, "step") for _ in range(3)]
        return await asyncio.gather(*made, return_exceptions=True)

    assert [type(each) for each in asyncio.run(main())] == [UnrecoverableError] * 3
    assert body.count == 3  # the attempts of one call


def test_when_the_one_call_is_cancelled_another_continues(restarts: Restarts) -> None:
    started: list[int] = []
    has_started, may_end = asyncio.Event(), asyncio.Event()

    async def slow() -> str:
        started.append(1)
        has_started.set()
        await may_end.wait()
        return "done"

    async def main() -> ExecutionResult:
        executor = restarts.executor()
        first = asyncio.create_task(executor.execute(slow, "slow"))
        await has_started.wait()
        second = asyncio.create_task(executor.execute(slow, "slow"))
        await asyncio.sleep(0)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        may_end.set()
        return await second

    assert asyncio.run(main()).final_output == "done"
    assert len(started) == 2


def test_who_waits_for_another_call_can_be_cancelled(restarts: Restarts) -> None:
    has_started, may_end = asyncio.Event(), asyncio.Event()

    async def slow() -> str:
        has_started.set()
        await may_end.wait()
        return "done"

    async def main() -> ExecutionResult:
        executor = restarts.executor()
        first = asyncio.create_task(executor.execute(slow, "slow"))
        await has_started.wait()
        second = asyncio.create_task(executor.execute(slow, "slow"))
        await asyncio.sleep(0)
        second.cancel()
        with pytest.raises(asyncio.CancelledError):
            await second
        may_end.set()
        return await first

    assert asyncio.run(main()).final_output == "done"


def test_a_step_that_executes_itself_gets_an_error(restarts: Restarts) -> None:
    executor = restarts.executor().options(timeout=30, max_attempts=1)

    async def outer() -> object:
        return (await executor.execute(outer, "outer")).final_output

    with pytest.raises(ConfigurationError, match="itself"):
        execute(executor, outer, "outer")


def test_a_step_can_wait_for_its_namesake_in_another_run(restarts: Restarts) -> None:
    async def main() -> object:
        started = asyncio.Event()

        async def slow() -> str:
            started.set()
            await asyncio.sleep(0.01)
            return "of the other run"

        here, there = restarts.executor(workflow_id="here"), restarts.executor(workflow_id="there")

        async def outer() -> object:
            return (await there.execute(slow, "step")).final_output

        running = asyncio.create_task(there.execute(slow, "step"))
        await started.wait()
        found = await here.options(max_attempts=1).execute(outer, "step")
        await running
        return found.final_output

    assert asyncio.run(main()) == "of the other run"


def test_a_step_that_executes_itself_in_a_roundabout_way_gets_an_error(restarts: Restarts) -> None:
    executor = restarts.executor().options(timeout=30, max_attempts=1)

    async def one() -> object:
        return (await executor.execute(other, "other")).final_output

    async def other() -> object:
        return (await executor.execute(one, "one")).final_output

    with pytest.raises(ConfigurationError, match="itself"):
        execute(executor, one, "one")


def test_a_step_can_execute_others(restarts: Restarts) -> None:
    inner_body = Body("inner")

    async def outer() -> list[object]:
        executor = restarts.executor("other")
        found = [await executor.execute(inner_body, "inner", n) for n in range(2)]
        return [each.final_output for each in found] + [current().task_name]

    assert execute(restarts.executor(), outer, "outer").final_output == ["inner", "inner", "outer"]
    assert inner_body.count == 2


# --- files, or none ------------------------------------------------------------------------------


def everything_below(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*"))


def test_an_executor_in_memory_writes_no_files(tmp_path: Path, config: ExecutionConfig) -> None:
    executor = PersonaExecutor(config, "p")
    execute(executor, Body(), "design")
    executor._save_state()
    executor._persist_state(ExecutionResult("e", "t", "p"), executor.attempts[0])
    assert executor._load_state() is None
    assert executor.state_manager.get_all_state("workflows") == {}
    executor.state_manager.shutdown()
    executor.close()
    assert everything_below(tmp_path) == []


def test_in_memory_nothing_is_stored_from_call_to_call() -> None:
    body = Body("a", "b")
    executor = PersonaExecutor()
    assert [execute(executor, body).final_output for _ in range(2)] == ["a", "b"]
    ids = {execute(executor, body).execution_id for _ in range(2)}
    assert len(ids) == 2


def test_without_persistence_a_run_is_shared_in_the_process_and_writes_no_files(
    tmp_path: Path,
) -> None:
    folder = str(tmp_path / "state")
    state = StateConfig(state_dir=folder, checkpoint_dir=folder, enable_persistence=False)
    config = ExecutionConfig(state=state)
    body = Body("a", "b")
    with PersonaExecutor(config, "p", workflow_id="w") as executor:
        execute(executor, body, "design")
        executor._save_state()
    with PersonaExecutor(config, "p", workflow_id="w") as executor:
        assert execute(executor, body, "design").final_output == "a"
    with PersonaExecutor(config, "p", workflow_id="v") as executor:
        assert execute(executor, body, "design").final_output == "b"
    assert everything_below(tmp_path) == []


def test_a_closed_executor_executes_nothing(restarts: Restarts) -> None:
    executor = restarts.executor()
    executor.close()
    executor.close()
    body = Body()
    with pytest.raises(StorageError, match="was closed"):
        execute(executor, body)
    assert body.count == 0


# --- many ----------------------------------------------------------------------------------------


def test_two_thousand_steps_are_quick_and_found_again(restarts: Restarts) -> None:
    async def main(body: Body) -> float:
        executor = restarts.executor()
        started = time.process_time()
        for number in range(2000):
            await executor.execute(body, "step", number)
        return time.process_time() - started

    body = Body("x" * 100)
    first = asyncio.run(main(body))
    restarts.restart()
    again = asyncio.run(main(body))
    assert body.count == 2000
    assert first < 20
    assert again < 2


# --- used by older callers -----------------------------------------------------------------------


def test_the_delay_grows_up_to_the_longest_and_has_no_jitter() -> None:
    executor = PersonaExecutor(ExecutionConfig())
    assert [executor._calculate_delay(n) for n in range(1, 7)] == [
        1.0, 1.5, 2.25, 3.375, 5.0, 5.0,
    ]  # fmt: skip


def test_errors_are_classified() -> None:
    executor = PersonaExecutor()
    assert executor._classify_error(SyntaxError("x")) is ErrorCategory.SYNTAX
    assert executor._classify_error(TimeoutError()) is ErrorCategory.TIMEOUT
    assert executor._classify_error(AssertionError()) is ErrorCategory.TEST_FAILURE
    assert executor._classify_error(ConnectionError()) is ErrorCategory.API_ERROR
    assert executor._classify_error(MemoryError()) is ErrorCategory.RESOURCE_ERROR
    assert executor._classify_error(KeyError("x")) is ErrorCategory.UNKNOWN


@for_each(
    "tool, action",
    [
        ("write_file", "write"), ("EditNotebook", "write"), ("createIssue", "write"),
        ("update-row", "write"), ("set_value", "write"), ("delete_branch", "delete"),
        ("remove", "delete"), ("rm", "delete"), ("rm_rf", "delete"), ("rmtree", "delete"),
        ("unlink", "delete"), ("read_file", "read"), ("getUser", "read"), ("fetch_url", "read"),
        ("cat", "read"), ("tail_log", "read"), ("run_tests", "execute"), ("", "execute"),
        ("forget_user", "execute"), ("transform", "execute"), ("reset", "execute"),
        ("retarget", "execute"), ("authenticate", "execute"), ("overhead", "execute"),
    ],
)  # fmt: skip
def test_a_tools_name_tells_what_it_does(tool: str, action: str) -> None:
    assert PersonaExecutor()._infer_action_from_tool(tool) == action


def test_tokens_are_counted_unless_they_exceed_the_budget(restarts: Restarts) -> None:
    restarts.config.tokens.max_tokens_per_persona = 100
    for executor in (PersonaExecutor(restarts.config, "p"), restarts.executor("p")):
        executor._check_token_budget(60)
        with pytest.raises(TokenBudgetExceeded) as caught:
            executor._check_token_budget(41)
        assert (caught.value.persona_id, caught.value.tokens_used, caught.value.budget_limit) == (
            "p", 101, 100,
        )  # fmt: skip
        executor._check_token_budget(40)
        assert executor._tokens_used == executor.get_token_usage() == 100
        executor.reset_token_usage()
        assert executor.get_token_usage() == 0


def test_one_call_with_nine_attempts_changes_no_default() -> None:
    get_execution_config().level1.base_delay_seconds = 0
    body = Body(ValueError("no"))
    with pytest.raises(UnrecoverableError):
        asyncio.run(execute_with_level1_retry(body, "task", "p", 9, 1, b=2))
    assert body.count == 9
    assert body.calls[0] == ((1,), {"b": 2})
    assert get_execution_config().level1.max_attempts == 3
    again = Body(ValueError("no"))
    with pytest.raises(UnrecoverableError) as caught:
        asyncio.run(execute_with_level1_retry(again, "task", "p"))
    assert again.count == 3
    assert caught.value.failure_report is not None
    assert caught.value.failure_report.failed_persona == "p"
