"""Programs in the style of the first implementation, run as they are, each in its own process."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

#: Both levels around a persona, with its state beside; run twice, the second time after a kill.
TWO_LEVELS = """
import asyncio, os, sys
from maestro_hive.unified_execution import (
    PersonaExecutor, SafetyRetryWrapper, StatePersistence, StateConfig, ExecutionConfig,
    ExecutionStatus, UnrecoverableError, HelpNeeded, get_execution_config,
)

config = get_execution_config()
config.state = StateConfig(state_dir="state", checkpoint_dir="checkpoints")
config.level1.base_delay_seconds = 0.01
config.level2.base_delay_seconds = 0.01
ledger = open("ledger", "a", buffering=1)

async def design(feature):
    ledger.write("design\\n")
    return {"parts": ["cart", "payment"], "tokens_used": 120}

async def implement(part):
    ledger.write(f"implement {part}\\n")
    if part == "payment" and "die" in sys.argv:
        os._exit(9)
    return f"def {part}():\\n    return 1\\n"

async def main():
    persistence = StatePersistence(config=config, workflow_id="checkout-42")
    persistence.update_state(phase="implementation", step=1, status="running")
    executor = PersonaExecutor(
        config=config, persona_id="developer", workflow_id="checkout-42",
        state_persistence=persistence,
    )
    wrapper = SafetyRetryWrapper(config=config)
    result = await wrapper.execute_safe(executor.execute, design, "design", "checkout page")
    assert result.success and result.circuit_breaker_state["state"] == "closed"
    assert result.circuit_breaker_state["consecutive_failures"] == 0
    for part in result.level1_results[-1].final_output["parts"]:
        done = await executor.execute(implement, f"implement {part}", part)
        assert done.final_status in (ExecutionStatus.SUCCESS, ExecutionStatus.RECOVERED)
        assert done.attempts[-1].to_dict()["status"] == "success"
        persistence.mark_task_completed(part, {part: f"{part}.py"})
    assert executor._tokens_used == executor.get_token_usage() == 120
    persistence.update_state(phase="done", step=2, status="completed")
    name = persistence.checkpoint()
    assert name in persistence.list_checkpoints()
    state = persistence.get_persona_state("developer")
    assert state["status"] == "success" and state["tokens_used"] == 120
    assert persistence.get_persona_state("tester") is None
    persistence.shutdown()
    again = StatePersistence(config=config, workflow_id="checkout-42")
    assert (again.state.phase, again.state.status) == ("done", "completed")
    assert set(again.state.artifacts) == {"cart", "payment"}
    assert again.restore(name) is True
    again.shutdown()
    print("completed")

asyncio.run(main())
"""

#: The state manager and the checkpoint manager alone.
MANAGERS = """
from datetime import timedelta
from pathlib import Path
from src.maestro_hive.core.state_manager import StateManager, StateChange, get_state_manager
from maestro_hive.maestro.state.checkpoint import (
    CheckpointManager, CheckpointNotFoundError, StateMetadata, WorkflowState,
)

manager = StateManager(persistence_dir="state", auto_persist=True, persist_interval_seconds=60)
assert manager is StateManager() is get_state_manager()
assert "default" in manager.get_namespaces()
changes = []
subscription = manager.subscribe(changes.append, key_pattern="task_*", namespace="default")
manager.set_state("task_1", {"status": "running"})
manager.set_state("task_1", {"status": "complete"})
manager.set_state("other", 1)
manager.delete_state("task_1")
assert [c.change_type for c in changes] == ["set", "set", "delete"]
assert all(isinstance(c, StateChange) for c in changes)
assert manager.unsubscribe(subscription)
made = manager.checkpoint("before", {"reason": "deploy"})
assert made["checkpoint_id"] == "before" and made["metadata"] == {"reason": "deploy"}
assert made["state_snapshot"]["default"] == {"other": 1} and made["timestamp"]
manager.clear("default")
assert manager.restore("before") and manager.get_state("other") == 1
manager.shutdown()

checkpoints = CheckpointManager(storage_path="checkpoints", default_ttl=timedelta(days=7))
assert checkpoints._storage_path == Path("checkpoints")
for step in range(3):
    state = WorkflowState(
        workflow_id="wf", phase="build", step=step, data={"step": step},
        metadata=StateMetadata(executor_version="2.1", custom={"by": "ada"}),
    )
    assert checkpoints.create_checkpoint("wf", state).version == step + 1
assert [c.version for c in checkpoints.list_checkpoints("wf")] == [1, 2, 3]
latest = checkpoints.get_latest_checkpoint("wf")
assert latest.state.data == {"step": 2} and latest.state.metadata.custom == {"by": "ada"}
assert checkpoints.validate_checkpoint(latest.checkpoint_id)
assert checkpoints.delete_checkpoint(latest.checkpoint_id)
try:
    checkpoints.get_checkpoint(latest.checkpoint_id)
except CheckpointNotFoundError:
    print("completed")
"""

#: Governance, budgets, the breaker, and a ticket at the end.
GOVERNED = """
import asyncio, json
from dataclasses import dataclass
from enum import Enum
from typing import Optional
from maestro_hive.unified_execution import *
from maestro_hive.unified_execution import ExecutionConfig, StateConfig

class ViolationType(Enum):
    IMMUTABLE_PATH = "immutable_path"

@dataclass
class EnforcerResult:
    allowed: bool
    violation_type: Optional[ViolationType] = None
    message: str = ""
    latency_ms: float = 0.0

class Enforcer:
    def check(self, agent, tool_name, target_path=None, action="execute"):
        assert agent.agent_id == "dev" and agent.role == "developer_agent"
        assert agent.reputation == 50 and agent.recursion_depth == 0
        seen.append((agent.current_tokens, agent.budget_remaining))
        if target_path and target_path.endswith(".env") and action == "write":
            return EnforcerResult(False, ViolationType.IMMUTABLE_PATH, "no writing of .env", 0.1)
        return EnforcerResult(True, latency_ms=0.1)

class Jira:
    async def create_ticket(self, project_key, summary, description, issue_type, labels):
        tickets.append((project_key, issue_type))
        return f"{project_key}-1"

seen, tickets, calls = [], [], []
config = ExecutionConfig()
config.state = StateConfig(state_dir="state", checkpoint_dir="checkpoints")
config.tokens.max_tokens_per_persona = 100
config.level1.base_delay_seconds = config.level2.base_delay_seconds = 0.0

async def write_file(path, content): return "written"
async def ask(): calls.append(1); return {"usage": {"total_tokens": 60}}
async def fail(): raise RecoverableError("still broken", error_category="TEST_FAILURE")

async def main():
    executor = PersonaExecutor(
        config=config, persona_id="dev", enforcer=Enforcer(), audit_log_path="audit.log",
    )
    assert executor.l1_config.max_attempts == 3
    try:
        await executor.execute(write_file, "write", path="/app/.env", content="x")
    except GovernanceViolation as e:
        assert e.violation_type == "immutable_path" and e.tool_name == "write_file"
    assert (await executor.execute(ask, "one")).success
    result = await executor.execute(ask, "two")
    assert result.final_status == ExecutionStatus.BANKRUPT and not result.success
    assert "100" in result.failure_report.details and "120" in result.failure_report.details
    result = await executor.execute(ask, "three")
    assert result.final_status == ExecutionStatus.BANKRUPT and len(calls) == 2
    assert seen == [(0, 100.0), (0, 100.0), (60, 40.0), (120, 0.0)], seen
    executor._tokens_used = 0
    assert (await executor.execute(ask, "four")).success
    lines = [json.loads(line) for line in open("audit.log")]
    assert [line["allowed"] for line in lines] == [False, True, True, True, True]

    config.tokens.enforce_budget = False
    wrapper = SafetyRetryWrapper(config=config, jira_client=Jira())
    try:
        await wrapper.execute_safe(PersonaExecutor(config=config).execute, fail, "fail")
    except HelpNeeded as e:
        assert e.failure_report.error_category == "TEST_FAILURE" and e.total_attempts == 6
    assert tickets == [("MD", "Bug")]
    wrapper.circuit_breaker.threshold = 1
    wrapper.circuit_breaker.record_failure()
    try:
        await wrapper.execute_safe(PersonaExecutor(config=config).execute, fail, "fail")
    except CircuitBreakerOpen:
        pass
    wrapper.circuit_breaker.cooldown_seconds = 0
    assert not wrapper.circuit_breaker.is_open()
    wrapper.circuit_breaker.record_success()
    assert wrapper.circuit_breaker.to_dict()["state"] == "closed"
    result = await execute_with_full_retry(write_file, "full", "dev", config, "a", "b")
    assert result.success and result.level1_results[0].final_output == "written"
    assert ExecutionResult().attempts == [] and ExecutionAttempt().duration_seconds == 0.0
    print("completed")

asyncio.run(main())
"""


def run(program: str, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    folder.mkdir(exist_ok=True)
    project = str(__file__).rpartition("/tests/")[0]
    return subprocess.run(
        [sys.executable, "-c", program, *arguments],
        cwd=folder,
        env={"HOME": str(folder), "PYTHONPATH": project, "PATH": ""},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


@pytest.mark.parametrize("program", [TWO_LEVELS, MANAGERS, GOVERNED])
def test_a_first_program_runs_unchanged(program: str, tmp_path: Path) -> None:
    done = run(program, tmp_path / "program")
    assert (done.returncode, done.stdout) == (0, "completed\n"), done.stderr


def test_a_first_program_resumes_after_its_death(tmp_path: Path) -> None:
    folder = tmp_path / "program"
    assert run(TWO_LEVELS, folder, "die").returncode == 9
    done = run(TWO_LEVELS, folder)
    assert (done.returncode, done.stdout) == (0, "completed\n"), done.stderr
    assert (folder / "ledger").read_text().split("\n")[:-1] == [
        "design", "implement cart", "implement payment", "implement payment",
    ]  # fmt: skip
