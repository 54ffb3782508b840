"""The results of executions: status, attempts and output."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from datetime import UTC, datetime
from enum import StrEnum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from maestro_hive.engine.errors import FailureReport


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

    attempt_id: str
    attempt_number: int
    started_at: datetime
    ended_at: datetime | None = None
    status: ExecutionStatus = ExecutionStatus.RUNNING
    error_message: str | None = None
    error_type: str | None = None
    error_traceback: str | None = None
    output: Any = None
    tokens_used: int = 0
    healing_applied: bool = False
    metrics: dict[str, Any] = field(default_factory=dict)

    @property
    def duration_seconds(self) -> float:
        """How long it took; 0 while it runs."""
        if self.ended_at is None:
            return 0.0
        return max(
            0.0, (self.ended_at - self.started_at).total_seconds()
        )  # a clock may be set back

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain data; the output as it is."""
        return {
            "attempt_id": self.attempt_id,
            "attempt_number": self.attempt_number,
            "started_at": self.started_at.isoformat(),
            "ended_at": self.ended_at.isoformat() if self.ended_at else None,
            "duration_seconds": self.duration_seconds,
            "status": self.status.value,
            "error_message": self.error_message,
            "error_type": self.error_type,
            "error_traceback": self.error_traceback,
            "output": self.output,
            "tokens_used": self.tokens_used,
            "healing_applied": self.healing_applied,
            "metrics": dict(self.metrics),
        }


@dataclass(slots=True)
class ExecutionResult:
    """What level 1 returns for one task."""

    execution_id: str
    task_name: str
    persona_id: str
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
        return {
            "execution_id": self.execution_id,
            "task_name": self.task_name,
            "persona_id": self.persona_id,
            "final_status": self.final_status.value,
            "attempts": [attempt.to_dict() for attempt in self.attempts],
            "attempt_count": self.attempt_count,
            "success": self.success,
            "total_duration_seconds": self.total_duration_seconds,
            "total_tokens_used": self.total_tokens_used,
            "final_output": self.final_output,
            "recovery_applied": self.recovery_applied,
            "failure_report": self.failure_report.to_dict() if self.failure_report else None,
            "created_at": self.created_at.isoformat(),
        }


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

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy it as a result whose attempts are loaded."""
        return ExecutionResult, tuple(getattr(self, each.name) for each in fields(self))


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
    circuit_breaker_state: str = "closed"
    created_at: datetime = field(default_factory=lambda: datetime.now(UTC))

    @property
    def success(self) -> bool:
        """Return whether there is a result."""
        return self.final_status.done

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain data; outputs as they are."""
        return {
            "execution_id": self.execution_id,
            "task_name": self.task_name,
            "final_status": self.final_status.value,
            "level1_results": [result.to_dict() for result in self.level1_results],
            "level2_attempts": self.level2_attempts,
            "success": self.success,
            "total_duration_seconds": self.total_duration_seconds,
            "jira_ticket": self.jira_ticket,
            "circuit_breaker_state": self.circuit_breaker_state,
            "created_at": self.created_at.isoformat(),
        }
