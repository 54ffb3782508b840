"""The results of executions: status, attempts and output."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field, fields, replace
from datetime import UTC, datetime
from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING, Any

from maestro_hive.engine.errors import FailureReport

if TYPE_CHECKING:
    from collections.abc import Callable


class ExecutionStatus(StrEnum):
    """The status of an execution or of an attempt."""

    #: Not started.
    PENDING = "pending"
    #: Being executed.
    RUNNING = "running"
    #: Completed.
    SUCCESS = "success"
    #: Given up.
    FAILED = "failed"
    #: Failed, with another attempt to follow.
    RETRYING = "retrying"
    #: Completed, after a repair between its attempts.
    RECOVERED = "recovered"
    #: Given up by both levels; a person has to decide.
    HELP_NEEDED = "help_needed"
    #: The token budget is used up.
    BANKRUPT = "bankrupt"
    #: Its process died during too many attempts; it waits for a retry.
    INTERRUPTED = "interrupted"
    #: Stopped on request.
    CANCELLED = "cancelled"

    @property
    def done(self) -> bool:
        """Return whether there is a result."""
        return self in (ExecutionStatus.SUCCESS, ExecutionStatus.RECOVERED)


@dataclass(slots=True)
class ExecutionAttempt:
    """One try at a task."""

    attempt_id: str = field(default_factory=lambda: secrets.token_hex(4))
    attempt_number: int = 0
    started_at: datetime | None = None
    ended_at: datetime | None = None
    status: ExecutionStatus = ExecutionStatus.PENDING
    error_message: str | None = None
    error_type: str | None = None
    error_traceback: str | None = None
    output: Any = None
    tokens_used: int = 0
    healing_applied: bool = False
    metrics: dict[str, Any] = field(default_factory=dict)

    @property
    def duration_seconds(self) -> float:
        """How long it took; 0 before it starts, and while it runs."""
        if self.started_at is None or self.ended_at is None:
            return 0.0
        # Not below 0: a clock may be set back.
        return max(0.0, (self.ended_at - self.started_at).total_seconds())

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain data; the output as it is."""
        return {**_plain(self), "duration_seconds": self.duration_seconds}


@dataclass(slots=True)
class ExecutionResult:
    """What level 1 returns for one task."""

    execution_id: str = field(default_factory=lambda: f"exec_{secrets.token_hex(8)}")
    task_name: str = ""
    persona_id: str = ""
    final_status: ExecutionStatus = ExecutionStatus.PENDING
    attempts: list[ExecutionAttempt] = field(default_factory=list)
    total_duration_seconds: float = 0.0
    total_tokens_used: int = 0
    final_output: Any = None
    recovery_applied: bool = False
    failure_report: FailureReport | None = None
    created_at: datetime = field(default_factory=lambda: datetime.now(UTC))

    @property
    def attempt_count(self) -> int:
        """The number of attempts."""
        return len(self.attempts)

    @property
    def success(self) -> bool:
        """Return whether there is a result."""
        return self.final_status.done

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain data; outputs as they are."""
        return {**_plain(self), "attempt_count": self.attempt_count, "success": self.success}


class LazyResult(ExecutionResult):
    """A result whose attempts are loaded at their first use: most callers need the output alone."""

    __slots__ = ("_attempts", "_load")

    def load_attempts_with(self, load: Callable[[], list[ExecutionAttempt]]) -> None:
        """Load the attempts by ``load`` at their first use."""
        self._load: Callable[[], list[ExecutionAttempt]] | None = load

    @property
    def attempts(self) -> list[ExecutionAttempt]:
        """All attempts."""
        if self._load is not None:
            self._attempts, self._load = self._load(), None
        return self._attempts

    @attempts.setter
    def attempts(self, attempts: list[ExecutionAttempt]) -> None:
        self._attempts, self._load = attempts, None

    def load_without_metrics(self) -> None:
        """Leave out the metrics of its attempts, whenever they are loaded."""
        load = self._load if self._load is not None else partial(list, self._attempts)
        self._load = lambda: [replace(each, metrics={}) for each in load()]

    def __reduce__(self) -> tuple[object, ...]:
        """Copy it as a result whose attempts are loaded."""
        return ExecutionResult, tuple(getattr(self, each.name) for each in fields(self))


def drop_metrics(result: ExecutionResult) -> None:
    """Empty the metrics of a result's attempts."""
    if isinstance(result, LazyResult):
        result.load_without_metrics()
    else:
        for attempt in result.attempts:
            attempt.metrics = {}


@dataclass(slots=True)
class Level2Result:
    """What level 2 returns: its rounds, and the result of level 1 for each."""

    execution_id: str
    task_name: str
    final_status: ExecutionStatus = ExecutionStatus.PENDING
    level1_results: list[ExecutionResult] = field(default_factory=list)
    level2_attempts: int = 0
    total_duration_seconds: float = 0.0
    jira_ticket: str | None = None
    #: The breaker as ``CircuitBreaker.to_dict`` shows it.
    circuit_breaker_state: dict[str, Any] | None = None
    created_at: datetime = field(default_factory=lambda: datetime.now(UTC))
    #: The address of the ticket, where ``jira_base_url`` is set.
    jira_url: str | None = None

    @property
    def success(self) -> bool:
        """Return whether there is a result."""
        return self.final_status.done

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain data; outputs as they are."""
        return {**_plain(self), "success": self.success}


_OUTPUTS = ("output", "final_output")


def _plain(record: ExecutionAttempt | ExecutionResult | Level2Result) -> dict[str, object]:
    values = {each.name: getattr(record, each.name) for each in fields(record)}
    return {name: value if name in _OUTPUTS else _shown(value) for name, value in values.items()}


def _shown(value: object) -> object:
    match value:
        case ExecutionStatus():
            return value.value
        case datetime():
            return value.isoformat()
        case dict():
            return dict(value)
        case list():
            return [each.to_dict() for each in value]
        case FailureReport():
            return value.to_dict()
        case _:
            return value
