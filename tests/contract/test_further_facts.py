"""What programs written for the first implementation rely on: each fact by an assertion."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from maestro_hive.core.state_manager import StateChange, StateManager
from maestro_hive.engine.policy import AgentContext
from maestro_hive.maestro.state.checkpoint import (
    CheckpointManager,
    StateMetadata,
    WorkflowState,
)
from maestro_hive.unified_execution import (
    CircuitBreaker,
    CircuitState,
    ExecutionAttempt,
    ExecutionConfig,
    ExecutionResult,
    ExecutionStatus,
    FailureReport,
    GovernanceViolation,
    PersonaExecutor,
    SafetyRetryWrapper,
    StateConfig,
    StatePersistence,
    TokenConfig,
    execute_with_full_retry,
    reset_execution_config,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

PROJECT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Keep the default folders inside the test's own."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("MAESTRO_STATE_DIR", str(tmp_path / "environment"))
    reset_execution_config()
    yield
    reset_execution_config()


@pytest.fixture
def config(tmp_path: Path) -> ExecutionConfig:
    made = ExecutionConfig(state=StateConfig(state_dir=str(tmp_path / "state")))
    made.level1.base_delay_seconds = made.level2.base_delay_seconds = 0
    return made


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[StateManager]:
    made = StateManager(tmp_path / "values", auto_persist=True)
    yield made
    made.shutdown()


async def done() -> str:
    return "done"


async def fail() -> None:
    raise RuntimeError("no")


# --- the first line: values that can be set, and what is returned ----------------------------------


def test_tokens_used_can_be_set(config: ExecutionConfig) -> None:
    executor = PersonaExecutor(config)
    executor._tokens_used = 41
    executor._tokens_used += 1
    assert executor._tokens_used == executor.get_token_usage() == 42
    executor.reset_token_usage()
    assert executor._tokens_used == 0


def test_tokens_used_can_be_set_in_a_run_and_count_for_its_budget(config: ExecutionConfig) -> None:
    config.tokens.max_tokens_per_persona = 100
    with PersonaExecutor(config, workflow_id="w") as executor:
        executor._tokens_used = 101
        assert executor.get_token_usage() == 101
        result = asyncio.run(executor.execute(done, "t"))
    assert result.final_status is ExecutionStatus.BANKRUPT


def test_a_breakers_threshold_and_cooldown_can_be_set() -> None:
    breaker = CircuitBreaker()
    breaker.threshold = 2
    breaker.cooldown_seconds = 0
    assert (breaker.threshold, breaker.cooldown_seconds) == (2, 0)
    breaker.record_failure()
    assert breaker.to_dict()["state"] == "closed"
    breaker.record_failure()
    assert breaker.to_dict()["state"] == "open"
    assert not breaker.is_open()  # its cooldown is over
    assert breaker.state is CircuitState.HALF_OPEN


def test_a_cooldown_that_is_set_holds_for_a_breaker_that_is_open() -> None:
    breaker = CircuitBreaker(threshold=1, cooldown_seconds=300)
    breaker.record_failure()
    assert breaker.is_open()
    breaker.cooldown_seconds = 0
    assert not breaker.is_open()


def test_the_breaker_of_a_wrapper_can_be_set_too(config: ExecutionConfig) -> None:
    with SafetyRetryWrapper(config) as wrapper, SafetyRetryWrapper(config) as other:
        wrapper.circuit_breaker.threshold = 1
        wrapper.circuit_breaker.record_failure()
        assert wrapper.circuit_breaker.is_open()
        assert other.circuit_breaker.is_open()
        wrapper.circuit_breaker.cooldown_seconds = 0
        assert not wrapper.circuit_breaker.is_open()


@pytest.mark.parametrize("name, value", [("threshold", 0), ("cooldown_seconds", -1)])
def test_a_wrong_setting_of_a_breaker_is_refused_and_named(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=name):
        setattr(CircuitBreaker(), name, value)


def test_the_state_of_an_unknown_persona_is_none(config: ExecutionConfig) -> None:
    with StatePersistence(config, "w") as state:
        assert state.get_persona_state("unknown") is None
        state.update_persona_state("known", {})
        assert state.get_persona_state("known") == {}


@pytest.mark.parametrize("in_folder", [True, False])
def test_a_checkpoint_of_a_state_manager_is_a_dict(tmp_path: Path, *, in_folder: bool) -> None:
    manager = StateManager(tmp_path if in_folder else None)
    manager.set_state("k", {"a": 1}, namespace="n")
    made = manager.checkpoint("one", {"why": "before"})
    assert made["checkpoint_id"] == "one"
    assert datetime.fromisoformat(made["timestamp"]).tzinfo is UTC
    assert made["state_snapshot"]["n"] == {"k": {"a": 1}}
    assert made["metadata"] == {"why": "before"}
    json.dumps(made)
    manager.shutdown()


def test_the_namespaces_contain_default(manager: StateManager) -> None:
    assert manager.get_namespaces() == ["default"]
    assert manager.get_all_state() == {"default": {}}
    manager.set_state("k", 1, namespace="other")
    manager.clear()
    assert manager.get_namespaces() == ["default"]


def test_a_change_is_set_delete_or_clear(manager: StateManager) -> None:
    seen: list[StateChange] = []
    manager.subscribe(seen.append)
    manager.set_state("k", 1)
    manager.set_state("k", 2)
    manager.delete_state("k")
    manager.set_state("a", 1)
    manager.set_state("b", 1)
    manager.clear("default")
    kinds = [(each.key, each.change_type, each.new_value) for each in seen]
    assert kinds[:5] == [
        ("k", "set", 1), ("k", "set", 2), ("k", "delete", None), ("a", "set", 1), ("b", "set", 1),
    ]  # fmt: skip
    assert sorted(kinds[5:]) == [("a", "clear", None), ("b", "clear", None)]


def test_checkpoints_are_listed_oldest_first(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path)
    made = [manager.create_checkpoint("w", WorkflowState("w", "p", n, {})) for n in range(3)]
    assert [each.checkpoint_id for each in manager.list_checkpoints("w")] == [
        each.checkpoint_id for each in made
    ]
    assert [each.version for each in manager.list_checkpoints("w")] == [1, 2, 3]


def test_full_retry_has_defaults(config: ExecutionConfig) -> None:
    assert asyncio.run(execute_with_full_retry(done)).task_name == "task"
    result = asyncio.run(execute_with_full_retry(done, config=config))
    assert result.level1_results[0].persona_id == "default"


def test_attempts_and_results_have_defaults() -> None:
    attempt, result = ExecutionAttempt(), ExecutionResult()
    assert attempt.status is result.final_status is ExecutionStatus.PENDING
    assert (attempt.attempt_number, attempt.started_at, attempt.ended_at) == (0, None, None)
    assert attempt.attempt_id != ExecutionAttempt().attempt_id
    assert result.execution_id != ExecutionResult().execution_id
    assert (result.task_name, result.persona_id, result.attempts) == ("", "", [])
    assert attempt.to_dict()["started_at"] is None
    assert attempt.duration_seconds == 0.0
    json.dumps([attempt.to_dict(), result.to_dict()])
    attempt.started_at = datetime.now(UTC)
    attempt.ended_at = attempt.started_at + timedelta(seconds=2)
    assert attempt.duration_seconds == 2.0


def test_the_state_of_the_breaker_in_a_result_is_a_dict(config: ExecutionConfig) -> None:
    with SafetyRetryWrapper(config) as wrapper:
        result = asyncio.run(wrapper.execute_safe(PersonaExecutor(config).execute, done, "t"))
        shown = result.circuit_breaker_state
        assert shown is not None
        assert shown["state"] == "closed"
        assert shown["consecutive_failures"] == 0
        assert set(shown) >= {"threshold", "cooldown_seconds", "last_failure_time"}
        assert result.to_dict()["circuit_breaker_state"] == shown
        json.dumps(shown)


def test_an_executor_has_its_level_1_settings(config: ExecutionConfig) -> None:
    config.level1.max_attempts = 7
    executor = PersonaExecutor(config)
    assert executor.l1_config is executor.config.level1
    assert executor.l1_config.max_attempts == 7


# --- checkpoints -----------------------------------------------------------------------------------


def test_the_metadata_of_a_state_has_the_known_fields(tmp_path: Path) -> None:
    assert StateMetadata() == StateMetadata(
        executor_version="2.1", serialization_format="json", compression=None, custom={}
    )
    manager = CheckpointManager(tmp_path)
    state = WorkflowState("w", "p", 1, {}, StateMetadata(custom={"colour": "red", "n": [1]}))
    found = manager.get_checkpoint(manager.create_checkpoint("w", state).checkpoint_id)
    assert found.state.metadata.custom == {"colour": "red", "n": [1]}
    assert found.state.metadata.executor_version == "2.1"


def test_a_checkpoint_manager_has_a_storage_path(tmp_path: Path) -> None:
    manager = CheckpointManager(str(tmp_path / "checkpoints"))
    assert manager._storage_path == tmp_path / "checkpoints"
    assert manager._storage_path.is_dir()
    manager.create_checkpoint("w", WorkflowState("w", "p", 1, {}))
    assert len(list((manager._storage_path / "w").iterdir())) == 1


# --- governance ------------------------------------------------------------------------------------


class ViolationType(Enum):
    FORBIDDEN_TOOL = "forbidden_tool"


class Answer:
    """What an enforcer answers; attributes only, as the known one has them."""

    allowed: bool

    def __init__(self, **facts: Any) -> None:
        self.__dict__.update(facts)


class Enforcer:
    """Written for the known interface: everything but the agent and the tool may be left out."""

    def __init__(self, **answer: Any) -> None:
        self.answer = {"allowed": True, "violation_type": None, "message": "", **answer}
        self.agents: list[AgentContext] = []
        self.calls: list[tuple[str, str | None, str]] = []

    def check(
        self,
        agent: AgentContext,
        tool_name: str,
        target_path: str | None = None,
        action: str = "execute",
    ) -> Answer:
        self.agents.append(agent)
        self.calls.append((tool_name, target_path, action))
        return Answer(latency_ms=0.5, **self.answer)


def test_an_agents_context_has_the_known_fields() -> None:
    agent = AgentContext("dev")
    assert agent == AgentContext(
        agent_id="dev",
        role="developer_agent",
        reputation=50,
        current_tokens=0,
        recursion_depth=0,
        budget_remaining=100.0,
    )


def test_an_enforcer_is_handed_the_tokens_spent_and_the_budget_left(
    config: ExecutionConfig,
) -> None:
    config.tokens = TokenConfig(max_tokens_per_persona=1000)
    enforcer = Enforcer()
    executor = PersonaExecutor(config, "dev", enforcer=enforcer, persona_role="architect_agent")

    async def write_file(path: str) -> dict[str, int]:
        return {"tokens_used": 250}

    for number in range(2):
        asyncio.run(executor.execute(write_file, f"t{number}", path="a.py"))
    first, second = enforcer.agents
    assert (first.agent_id, first.role, first.reputation) == ("dev", "architect_agent", 50)
    assert (first.current_tokens, first.budget_remaining) == (0, 1000)
    assert (second.current_tokens, second.budget_remaining) == (250, 750)
    assert enforcer.calls == [("write_file", "a.py", "write")] * 2


def test_the_depth_of_an_agent_inside_an_agent_is_handed_over(config: ExecutionConfig) -> None:
    enforcer = Enforcer()
    inner = PersonaExecutor(config, "inner", enforcer=enforcer)
    outer = PersonaExecutor(config, "outer", enforcer=enforcer)

    async def ask() -> None:
        await inner.execute(done, "inside")

    asyncio.run(outer.execute(ask, "outside"))
    assert [each.recursion_depth for each in enforcer.agents] == [0, 1]


def test_only_true_allows(config: ExecutionConfig) -> None:
    for allowed in (False, None, 1, "yes", 0, object()):
        executor = PersonaExecutor(config, enforcer=Enforcer(allowed=allowed))
        with pytest.raises(GovernanceViolation):
            asyncio.run(executor.execute(done, "t"))
    assert asyncio.run(PersonaExecutor(config, enforcer=Enforcer()).execute(done, "t")).success


@pytest.mark.parametrize("name", ["message", "reason"])
def test_a_violation_has_its_type_and_its_message(
    config: ExecutionConfig, tmp_path: Path, name: str
) -> None:
    answer = {"allowed": False, "violation_type": ViolationType.FORBIDDEN_TOOL, name: "no sudo"}
    enforcer = Enforcer(**answer)
    log = tmp_path / "audit.log"
    executor = PersonaExecutor(config, "dev", enforcer=enforcer, audit_log_path=str(log))
    with pytest.raises(GovernanceViolation, match="no sudo") as caught:
        asyncio.run(executor.execute(done, "t"))
    assert caught.value.violation_type == "forbidden_tool"
    assert (caught.value.tool_name, caught.value.agent_id) == ("done", "dev")
    line = json.loads(log.read_text())
    assert (line["allowed"], line["violation_type"]) == (False, "forbidden_tool")
    assert (line["message"], line["latency_ms"]) == ("no sudo", 0.5)


# --- budgets ---------------------------------------------------------------------------------------


class Used:
    """A result with attributes."""

    def __init__(self, **facts: Any) -> None:
        self.__dict__.update(facts)


USAGES = [
    {"tokens_used": 60},
    {"usage": {"total_tokens": 60}},
    {"tokens_used": 60, "usage": {"total_tokens": 60}},
    Used(tokens_used=60),
    Used(usage=Used(total_tokens=60)),
    Used(usage={"total_tokens": 60}),
    {"usage": Used(total_tokens=60)},
]


@pytest.mark.parametrize("output", USAGES)
def test_usage_is_read_from_a_result_once(config: ExecutionConfig, output: object) -> None:
    async def ask() -> object:
        return output

    executor = PersonaExecutor(config)
    result = asyncio.run(executor.execute(ask, "t"))
    assert result.success
    assert executor.get_token_usage() == result.total_tokens_used == 60
    assert [each.tokens_used for each in result.attempts] == [60]


@pytest.mark.parametrize("usage", [None, "60", True, -1, 1.5, {"total_tokens": None}, 10**16])
def test_what_is_no_usage_is_not_counted(config: ExecutionConfig, usage: object) -> None:
    async def ask() -> dict[str, object]:
        return {"tokens_used": usage, "usage": usage}

    executor = PersonaExecutor(config)
    assert asyncio.run(executor.execute(ask, "t")).success
    assert executor.get_token_usage() == 0


def test_the_usage_of_a_result_is_not_read_where_its_attempt_has_spent(
    config: ExecutionConfig,
) -> None:
    from maestro_hive import current

    async def ask() -> dict[str, int]:
        current().spend(tokens=40)
        return {"tokens_used": 60}

    with PersonaExecutor(config, workflow_id="w") as executor:
        asyncio.run(executor.execute(ask, "t"))
        assert executor.get_token_usage() == 40


@pytest.mark.parametrize("run", [None, "w"])
def test_a_bankrupt_execution_returns_a_result(config: ExecutionConfig, run: str | None) -> None:
    config.tokens.max_tokens_per_persona = 100
    calls = []

    async def ask(name: str) -> dict[str, int]:
        calls.append(name)
        return {"tokens_used": 60}

    with PersonaExecutor(config, "writer", workflow_id=run) as executor:
        assert asyncio.run(executor.execute(ask, "a", "a")).success
        result = asyncio.run(executor.execute(ask, "b", "b"))
        assert calls == ["a", "b"]
        assert (result.success, result.final_status) == (False, ExecutionStatus.BANKRUPT)
        assert executor.final_status is ExecutionStatus.BANKRUPT
        report = result.failure_report
        assert isinstance(report, FailureReport)
        assert (report.failed_persona, report.recoverable) == ("writer", False)
        assert "120" in report.details
        assert "100" in report.details
        assert [each.status for each in result.attempts] == [ExecutionStatus.BANKRUPT]
        assert result.total_tokens_used == 60
        json.dumps(result.to_dict())
        assert asyncio.run(executor.execute(ask, "c", "c")).final_status == "bankrupt"
        assert calls == ["a", "b"], "nothing more is called"


def test_a_bankrupt_execution_is_the_same_after_a_restart(config: ExecutionConfig) -> None:
    config.tokens.max_tokens_per_persona = 100
    calls = []

    async def ask(name: str) -> dict[str, int]:
        calls.append(name)
        return {"tokens_used": 160}

    for _ in range(2):
        with PersonaExecutor(config, workflow_id="w") as executor:
            result = asyncio.run(executor.execute(ask, "a", "a"))
            assert result.final_status is ExecutionStatus.BANKRUPT
            assert executor.get_token_usage() == 160
    assert calls == ["a"]
    config.tokens.max_tokens_per_persona = 1000  # someone paid
    with PersonaExecutor(config, workflow_id="w") as executor:
        assert asyncio.run(executor.execute(ask, "a", "a")).success
    assert calls == ["a", "a"]


def test_level_2_does_not_retry_a_bankrupt_execution(config: ExecutionConfig) -> None:
    config.tokens.max_tokens_per_persona = 100
    calls = []

    async def ask() -> dict[str, int]:
        calls.append(1)
        return {"tokens_used": 160}

    with SafetyRetryWrapper(config) as wrapper:
        executor = PersonaExecutor(config)
        result = asyncio.run(wrapper.execute_safe(executor.execute, ask, "t"))
        assert (result.final_status, result.level2_attempts) == (ExecutionStatus.BANKRUPT, 1)
        assert len(result.level1_results) == len(calls) == 1
        assert wrapper.circuit_breaker.consecutive_failures == 0


def test_a_budget_that_is_not_enforced_only_counts(config: ExecutionConfig) -> None:
    config.tokens = TokenConfig(max_tokens_per_persona=100, enforce_budget=False)

    async def ask() -> dict[str, int]:
        return {"tokens_used": 160}

    executor = PersonaExecutor(config)
    for number in range(2):
        assert asyncio.run(executor.execute(ask, f"t{number}")).success
    assert executor.get_token_usage() == 320


# --- what a run shows ------------------------------------------------------------------------------


def shown_by_runs(config: ExecutionConfig) -> dict[str, str]:
    made = subprocess.run(
        [sys.executable, "-m", "maestro_hive", "runs", "--json"],
        capture_output=True,
        text=True,
        check=True,
        env={"MAESTRO_STATE_DIR": config.state.state_dir, "PATH": ""},
    )
    return {run["run_id"]: run["status"] for run in json.loads(made.stdout)["runs"]}


def test_a_run_shows_what_its_executor_does(config: ExecutionConfig) -> None:
    config.level1.max_attempts = 1
    with StatePersistence(config, "good") as state:
        executor = PersonaExecutor(config, state_persistence=state)
        assert (state.state.phase, state.state.step, state.state.status) == (
            "initializing", 0, "pending",
        )  # fmt: skip
        seen = []

        async def look() -> None:
            seen.append((state.state.phase, state.state.step, state.state.status))

        asyncio.run(executor.execute(look, "design"))
        assert seen == [("design", 1, "running")]
        assert state.state.status == "success"
        asyncio.run(executor.execute(done, "build"))
        assert (state.state.phase, state.state.step, state.state.status) == (
            "build", 2, "success",
        )  # fmt: skip
    with PersonaExecutor(config, workflow_id="bad") as executor:
        with pytest.raises(Exception, match="exhausted"):
            asyncio.run(executor.execute(fail, "build"))
        assert executor.state_persistence is not None
        assert executor.state_persistence.state.status == "failed"
        assert shown_by_runs(config) == {"good": "success", "bad": "running"}
    assert shown_by_runs(config) == {"good": "success", "bad": "failed"}
    with PersonaExecutor(config, workflow_id="bad") as executor:
        asyncio.run(executor.options(retry=True).execute(done, "build"))
    assert shown_by_runs(config) == {"good": "success", "bad": "success"}


def test_a_killed_executor_leaves_a_run_that_is_stopped(config: ExecutionConfig) -> None:
    program = """
import asyncio, os, sys
from maestro_hive import ExecutionConfig, PersonaExecutor
async def ok(): pass
async def die(): os._exit(9)
executor = PersonaExecutor(ExecutionConfig(), workflow_id="w")
asyncio.run(executor.execute(ok, "first"))
asyncio.run(executor.execute(die, "second"))
"""
    env = {"MAESTRO_STATE_DIR": config.state.state_dir, "PATH": ""}
    subprocess.run([sys.executable, "-c", program], check=False, env=env)
    assert shown_by_runs(config) == {"w": "stopped"}
    with StatePersistence(config, "w") as state:
        assert (state.state.phase, state.state.step, state.state.status) == (
            "second", 2, "running",
        )  # fmt: skip


def test_what_a_program_sets_itself_is_its_own(config: ExecutionConfig) -> None:
    with StatePersistence(config, "w") as state:
        executor = PersonaExecutor(config, state_persistence=state)
        state.update_state(phase="planning", step=7, status="in review")
        asyncio.run(executor.execute(done, "design"))
        assert (state.state.phase, state.state.step) == ("planning", 7)
        assert state.state.status == "in review"
        with pytest.raises(Exception, match="exhausted"):
            asyncio.run(executor.options(max_attempts=1).execute(fail, "build"))
        assert state.state.status == "failed"
        state.update_state(status="given up")
        assert state.state.status == "given up"
    assert shown_by_runs(config) == {"w": "given up"}
