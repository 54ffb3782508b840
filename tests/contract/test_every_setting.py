"""Every field of every configuration class changes something: a new one without a check fails."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import pytest

from maestro_hive.engine.settings import Settings
from maestro_hive.kernel.errors import DocumentCorruptError
from maestro_hive.maestro.state.checkpoint import ChecksumValidationError
from maestro_hive.unified_execution import (
    CircuitBreakerOpen,
    ExecutionAttempt,
    ExecutionConfig,
    ExecutionResult,
    ExecutionStatus,
    HelpNeeded,
    PersonaExecutor,
    RecoveryStrategy,
    SafetyRetryWrapper,
    StatePersistence,
    UnrecoverableError,
    current,
    reset_execution_config,
)
from tests.tickets.settings_effects import TICKET_SETTINGS
from tests.timing import least

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Check: TypeAlias = "Callable[[ExecutionConfig], object]"


@pytest.fixture(autouse=True)
def own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("MAESTRO_CHECKPOINT_DIR", raising=False)
    reset_execution_config()
    yield
    reset_execution_config()


@pytest.fixture
def config(tmp_path: Path) -> ExecutionConfig:
    made = ExecutionConfig().in_folder(tmp_path / "state")
    made.state.auto_checkpoint_interval_seconds = 0
    for level in (made.level1, made.level2):
        level.base_delay_seconds = level.jitter = 0
    return made


# --- what is tried ---------------------------------------------------------------------------------


class Task:
    """Fails a number of times, and then returns."""

    def __init__(self, failures: int = 99, output: object = "done") -> None:
        self.left, self.output, self.calls = failures, output, 0

    async def __call__(self) -> object:
        self.calls += 1
        if self.left:
            self.left -= 1
            raise RuntimeError("no")
        return self.output


def execute(config: ExecutionConfig, task: Task, **made: Any) -> ExecutionResult | None:
    """Execute a task by level 1 in memory; return None if it failed."""
    executor = PersonaExecutor(config, **made)
    try:
        return asyncio.run(executor.execute(task, "t"))
    except UnrecoverableError:
        return None


def calls(config: ExecutionConfig) -> int:
    execute(config, task := Task())
    return task.calls


def executed_safely(config: ExecutionConfig, task: Task, **made: Any) -> HelpNeeded | None:
    """Execute a task by both levels; return the error that asks for help."""
    with SafetyRetryWrapper(config, **made) as wrapper:
        executor = PersonaExecutor(config)
        try:
            asyncio.run(wrapper.execute_safe(executor.execute, task, "t"))
        except HelpNeeded as error:
            return error
    return None


def rounds(config: ExecutionConfig) -> int:
    config.level1.max_attempts = 1
    executed_safely(config, task := Task())
    return task.calls


def level1_delays(config: ExecutionConfig) -> list[float]:
    return [PersonaExecutor(config)._calculate_delay(number) for number in range(1, 9)]


def level2_delays(config: ExecutionConfig) -> list[float]:
    with SafetyRetryWrapper(config) as wrapper:
        return [wrapper._calculate_delay(number) for number in range(1, 9)]


def waits_long(config: ExecutionConfig, level: str) -> bool:
    """Return whether the wait before the second attempt or round is far longer than its delay."""
    config.level1.max_attempts = 2 if level == "level1" else 1
    for each in (config.level1, config.level2):
        each.base_delay_seconds = each.max_delay_seconds = 0.02
        each.jitter_seed = 3

    def seconds() -> float:
        started = time.monotonic()
        if level == "level1":
            execute(config, Task(1))
        else:
            executed_safely(config, Task(1))
        return time.monotonic() - started

    return least(seconds, 0.4) > 0.4  # a busy machine is not as slow each time


class Healer:
    """Repairs everything, and counts how often."""

    def __init__(self) -> None:
        self.failures: list[object] = []

    def heal_single(self, failure: object) -> object:
        self.failures.append(failure)
        return type("Answer", (), {"status": "FIXED"})()


def healed(config: ExecutionConfig) -> int:
    execute(config, Task(1), healing_engine=(healer := Healer()))
    return len(healer.failures)


def tells_where_source_does_not_parse(config: ExecutionConfig) -> bool:
    told: list[list[str]] = []

    async def write() -> str:
        told.append(list(current().feedback))
        return "def f(:\n"

    with contextlib.suppress(UnrecoverableError):
        asyncio.run(PersonaExecutor(config).execute(write, "t"))
    return "Python cannot parse the source" in told[-1][0]


def interruptions(config: ExecutionConfig) -> int:
    """Return how often a step is started whose process dies in the middle of it."""

    async def die() -> None:
        started.append(1)
        raise KeyboardInterrupt

    started: list[int] = []
    for _ in range(8):
        stopped = contextlib.suppress(KeyboardInterrupt, UnrecoverableError)
        with PersonaExecutor(config, workflow_id="w") as executor, stopped:
            asyncio.run(executor.execute(die, "t"))
    return len(started)


def breaker_opens_after(config: ExecutionConfig) -> int:
    config.level1.max_attempts = config.level2.max_attempts = 1
    for number in range(1, 20):
        try:
            executed_safely(config, Task())
        except CircuitBreakerOpen:
            return number - 1
    return 0


def cooldown(config: ExecutionConfig) -> float:
    with SafetyRetryWrapper(config) as wrapper:
        for _ in range(5):
            wrapper.circuit_breaker.record_failure()
        return wrapper.circuit_breaker.remaining_seconds()


class Jira:
    """Creates tickets, and remembers with what."""

    def __init__(self) -> None:
        self.projects: list[str] = []

    async def create_ticket(
        self, project_key: str, summary: str, description: str, issue_type: str, labels: list[str]
    ) -> str:
        self.projects.append(project_key)
        return f"{project_key}-{len(self.projects)}"


def tickets(config: ExecutionConfig) -> list[str]:
    executed_safely(config, Task(), jira_client=(jira := Jira()))
    return jira.projects


def address(config: ExecutionConfig) -> tuple[object, ...]:
    error = executed_safely(config, Task(), jira_client=Jira())
    assert error is not None
    return error.result.jira_url, error.context.get("ticket_url"), error.suggested_actions[0]


def level2_status(config: ExecutionConfig) -> object:
    with SafetyRetryWrapper(config) as wrapper:
        try:
            return asyncio.run(
                wrapper.execute_safe(PersonaExecutor(config).execute, Task(), "t")
            ).final_status
        except HelpNeeded:
            return ExecutionStatus.HELP_NEEDED


def level1_status(config: ExecutionConfig) -> object:
    result = execute(config, Task())
    return None if result is None else result.final_status


def is_repeatable(config: ExecutionConfig) -> bool:
    """Return whether the numbers that jitter is made of are the same in the next process."""
    executors = [PersonaExecutor(config) for _ in range(2)]
    wrappers = [SafetyRetryWrapper(config) for _ in range(2)]
    level1 = {executor._spec.rng.random() for executor in executors}
    level2 = {wrapper._random.random() for wrapper in wrappers}
    return len(level1) == 1 or len(level2) == 1


def files(config: ExecutionConfig) -> list[str]:
    """Return the folders that a run writes to."""
    with StatePersistence(config, "w") as state:
        state.update_state(phase="p")
        state.checkpoint("c")
        root = Path(config.state.state_dir).parent
        found = (each for each in root.rglob("*") if each.is_file())
        return sorted({str(each.parent.relative_to(root)) for each in found})


def automatic(config: ExecutionConfig) -> bool:
    """Return whether there is a checkpoint that nobody asked for."""
    with StatePersistence(config, "w") as state:
        state.update_state(phase="p")
        until = time.monotonic() + (30 if config.state.auto_checkpoint_interval_seconds else 0.2)
        while not state.list_checkpoints() and time.monotonic() < until:
            time.sleep(0.01)
        return bool(state.list_checkpoints())


def is_checked(config: ExecutionConfig) -> bool:
    """Return whether a checkpoint is refused whose checksum is wrong."""
    with StatePersistence(config, "w") as state:
        state.update_state(phase="p")
        state.checkpoint("c")
        manager = state.run.copies.checkpoints
        (name,) = manager._folder.names("w")
        path = manager._folder.path("w", name)
        path.write_bytes(path.read_bytes().replace(b'"phase":"p"', b'"phase":"q"'))
        try:
            manager.get_checkpoint("c")
        except (ChecksumValidationError, DocumentCorruptError):
            return True
        return False


def kept_checkpoints(config: ExecutionConfig) -> int:
    with StatePersistence(config, "w") as state:
        for number in range(12):
            state.update_state(step=number)
            state.checkpoint()
        return len(state.list_checkpoints())


def stored_chunks(config: ExecutionConfig) -> int:
    async def write() -> None:
        current().write("a")

    with StatePersistence(config, "w") as state:
        asyncio.run(PersonaExecutor(config, state_persistence=state).execute(write, "t"))
        return state.run.store.last_chunk(state.run.lease.run)


def spent(config: ExecutionConfig) -> tuple[object, int]:
    """Return how two personas of a run end that spend 60 tokens each, and what is counted."""
    with StatePersistence(config, "w") as state:
        executors = [PersonaExecutor(config, name, state_persistence=state) for name in "ab"]
        tasks = [each.execute(Task(0, {"tokens_used": 60}), "t") for each in executors]
        ended = [asyncio.run(each).final_status.value for each in tasks]
        return ended, executors[-1].get_token_usage()


def is_in_time(config: ExecutionConfig) -> bool:
    async def slow() -> None:
        await asyncio.sleep(0.2)

    config.level1.max_attempts = 1
    try:
        return asyncio.run(PersonaExecutor(config).execute(slow, "t")).success
    except UnrecoverableError:
        return False


def metrics(config: ExecutionConfig) -> list[bool]:
    """Return whether attempts have metrics: of a result, of an error, and of level 2."""
    executor = PersonaExecutor(config)
    result = asyncio.run(executor.execute(Task(1), "t"))
    found = [bool(result.attempts[0].metrics), bool(executor.attempts[0].metrics)]
    with pytest.raises(UnrecoverableError) as caught:
        asyncio.run(PersonaExecutor(config).execute(Task(), "t"))
    found.append(bool(caught.value.result.attempts[0].metrics))
    assert caught.value.failure_report is not None
    assert caught.value.failure_report.details == "no"
    with PersonaExecutor(config, workflow_id="w") as durable:
        for _ in range(2):  # the second time from the journal
            result = asyncio.run(durable.execute(Task(1), "t"))
            found.append(bool(result.attempts[0].metrics))
    error = executed_safely(config, Task())
    assert error is not None
    attempts: list[ExecutionAttempt] = error.result.level1_results[0].attempts
    return [*found, bool(attempts[0].metrics)]


def logged(config: ExecutionConfig) -> set[str]:
    """Return the levels of what executors log, where everything that they log is shown."""
    found: set[str] = set()
    handler = logging.Handler()
    handler.emit = lambda record: found.add(record.levelname)  # type: ignore[method-assign]
    logger = logging.getLogger("maestro_hive")
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel("DEBUG")
    try:
        executed_safely(config, Task())
        execute(config, Task(1))
    finally:
        logger.setLevel(before)
        logger.removeHandler(handler)
    return found


# --- for each field: the value that is set, and what it changes --------------------------------------

CHECKS: dict[str, tuple[object, Check]] = {
    "Level1Config.max_attempts": (5, calls),
    "Level1Config.base_delay_seconds": (2, level1_delays),
    "Level1Config.max_delay_seconds": (3, lambda c: level1_delays(with_delays(c))),
    "Level1Config.backoff_multiplier": (3, lambda c: level1_delays(with_delays(c))),
    "Level1Config.enable_self_healing": (False, healed),
    "Level1Config.enable_syntax_validation": (
        False,
        lambda c: execute(c, Task(0, "def f(:\n")) is None,
    ),
    "Level1Config.recovery_strategy": (RecoveryStrategy.SKIP, level1_status),
    "Level1Config.max_interruptions": (2, interruptions),
    "Level1Config.max_elapsed_seconds": (0, calls),
    "Level1Config.jitter": (100, lambda c: waits_long(c, "level1")),
    "Level1Config.jitter_seed": (7, is_repeatable),
    "Level1Config.disabled_healers": (("syntax",), tells_where_source_does_not_parse),
    "Level2Config.max_attempts": (4, rounds),
    "Level2Config.base_delay_seconds": (2, level2_delays),
    "Level2Config.max_delay_seconds": (3, lambda c: level2_delays(with_delays(c))),
    "Level2Config.backoff_multiplier": (3, lambda c: level2_delays(with_delays(c))),
    "Level2Config.circuit_breaker_threshold": (2, breaker_opens_after),
    "Level2Config.circuit_breaker_cooldown_seconds": (10, lambda c: cooldown(c) > 20),
    "Level2Config.enable_jira_escalation": (False, tickets),
    "Level2Config.recovery_strategy": (RecoveryStrategy.SKIP, level2_status),
    "Level2Config.jitter": (100, lambda c: waits_long(c, "level2")),
    "Level2Config.jitter_seed": (7, is_repeatable),
    "StateConfig.state_dir": ("elsewhere", files),
    "StateConfig.checkpoint_dir": ("elsewhere", files),
    "StateConfig.enable_persistence": (False, files),
    "StateConfig.auto_checkpoint_interval_seconds": (60, automatic),
    "StateConfig.verify_checksum_on_load": (False, is_checked),
    "StateConfig.max_checkpoints_per_workflow": (2, kept_checkpoints),
    "StateConfig.store_streams": (False, stored_chunks),
    "TokenConfig.max_tokens_per_persona": (50, spent),
    "TokenConfig.max_tokens_per_execution": (100, spent),
    "TokenConfig.track_usage": (False, spent),
    "TokenConfig.enforce_budget": (False, lambda c: spent(with_budget(c))),
    "ExecutionConfig.timeout_seconds": (0.05, is_in_time),
    "ExecutionConfig.capture_metrics": (False, metrics),
    "ExecutionConfig.log_level": ("DEBUG", logged),
    "ExecutionConfig.jira_project_key": ("AB", tickets),
    "ExecutionConfig.jira_base_url": ("https://jira.example.com", address),
    **{f"ExecutionConfig.{name}": check for name, check in TICKET_SETTINGS.items()},
}


def with_delays(config: ExecutionConfig) -> ExecutionConfig:
    config.level1.base_delay_seconds = config.level2.base_delay_seconds = 1
    return config


def with_budget(config: ExecutionConfig) -> ExecutionConfig:
    config.tokens.max_tokens_per_persona = 50
    return config


def part_of(config: ExecutionConfig, name: str) -> Settings:
    parts = {
        type(each).__name__: each for each in vars(config).values() if isinstance(each, Settings)
    }
    return {**parts, "ExecutionConfig": config}[name.partition(".")[0]]


def test_there_is_a_check_for_every_field() -> None:
    config = ExecutionConfig()
    parts = [config, *(each for each in vars(config).values() if isinstance(each, Settings))]
    named = {f"{type(part).__name__}.{each.name}" for part in parts for each in fields(part)}
    inside = {f"ExecutionConfig.{each}" for each in ("level1", "level2", "state", "tokens")}
    assert named - inside == CHECKS.keys()
    assert {each.name for each in fields(config)} >= {"level1", "level2", "state", "tokens"}


@pytest.mark.usefixtures("prompt_copies")
@pytest.mark.parametrize("name", CHECKS)
def test_it_changes_something(config: ExecutionConfig, tmp_path: Path, name: str) -> None:
    value, check = CHECKS[name]
    field = name.partition(".")[2]
    if field.endswith("_dir"):
        value = str(tmp_path / "set" / str(value))
    changed = config.in_folder(tmp_path / "changed" / "state")
    setattr(part_of(changed, name), field, value)
    before = check(config.in_folder(tmp_path / "first" / "state"))
    after = check(changed)
    assert before != after, f"{name} = {value!r} changes nothing"


# --- the details of those that were read by nobody ---------------------------------------------------


@pytest.mark.parametrize(
    "level, shown",
    [
        ("DEBUG", {"DEBUG", "INFO", "WARNING"}),
        ("INFO", {"INFO", "WARNING"}),
        ("WARNING", {"WARNING"}),
        ("CRITICAL", set()),
    ],
)
def test_the_log_level_is_the_least_that_executors_log(
    config: ExecutionConfig, level: str, shown: set[str]
) -> None:
    config.log_level = level
    assert logged(config) == shown


def test_executors_leave_the_logging_of_the_program_alone(config: ExecutionConfig) -> None:
    def settings() -> list[object]:
        loggers = [logging.getLogger(), logging.getLogger("maestro_hive")]
        return [(each.level, list(each.handlers), each.propagate) for each in loggers]

    config.log_level = "DEBUG"
    before = settings()
    executed_safely(config, Task())
    assert settings() == before


def test_without_captured_metrics_there_are_none_anywhere(config: ExecutionConfig) -> None:
    assert metrics(config) == [True] * 6
    config.capture_metrics = False
    config.state.state_dir += "2"
    assert metrics(config) == [False] * 6


def test_the_ticket_has_an_address_also_after_a_restart(config: ExecutionConfig) -> None:
    config.jira_base_url, config.jira_project_key = "https://jira.example.com/", "AB"
    wanted = "https://jira.example.com/browse/AB-1"
    jira = Jira()
    for _ in range(2):
        with (
            PersonaExecutor(config, workflow_id="w") as executor,
            SafetyRetryWrapper(config, jira, workflow_id="w") as wrapper,
            pytest.raises(HelpNeeded) as caught,
        ):
            asyncio.run(wrapper.execute_safe(executor.execute, Task(), "t"))
        error = caught.value
        assert (error.jira_ticket, error.result.jira_ticket) == ("AB-1", "AB-1")
        assert error.result.jira_url == error.context["ticket_url"] == wanted
        assert error.result.to_dict()["jira_url"] == wanted
        assert error.suggested_actions[0] == f"see the ticket: {wanted}"
    assert len(jira.projects) == 1
