"""Asking a person for help: once per failure, with all that is known about it.

``Escalation`` is the seam: ``JiraEscalation`` asks through a client that can make tickets.
"""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from maestro_hive.engine.config import ErrorCategory
from maestro_hive.kernel.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from maestro_hive.engine.errors import FailureReport
    from maestro_hive.engine.results import ExecutionAttempt, ExecutionResult

#: What Jira takes as a summary.
_LONGEST_SUMMARY = 255
#: An error's text in a description; the journal has more of it.
_LONGEST_ERROR = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class EscalationCase:
    """A failure that a person must look at.

    ``effect_key`` is the same whenever the same failure is told again: for the other side to
    notice the repetition. Without a ``run_id`` it belongs to no run that could be resumed.
    """

    run_id: str | None
    task_name: str
    effect_key: str
    summary: str
    description: str
    failure_report: FailureReport
    labels: tuple[str, ...] = ()


class Escalation(Protocol):
    """Brings a failure to a person."""

    async def escalate(self, case: EscalationCase) -> str | None:
        """Tell somebody; return where, such as a ticket's key, if there is such a place."""
        ...


class JiraClient(Protocol):
    """What can make a ticket."""

    async def create_ticket(
        self,
        project_key: str,
        summary: str,
        description: str,
        issue_type: str,
        labels: list[str],
    ) -> str:
        """Make a ticket and return its key."""
        ...


class JiraEscalation:
    """One ticket per failure, made by a client."""

    def __init__(self, client: JiraClient, project_key: str, issue_type: str = "Bug") -> None:
        self._create_ticket: Any = checked(client, "create_ticket", "jira_client")
        self._project_key = project_key
        self._issue_type = issue_type

    async def escalate(self, case: EscalationCase) -> str | None:
        """Make the ticket; return its key."""
        key = self._create_ticket(
            project_key=self._project_key,
            summary=case.summary,
            description=case.description,
            issue_type=self._issue_type,
            labels=list(case.labels),
        )
        if inspect.isawaitable(key):
            key = await key
        if not isinstance(key, str) or not key:
            raise TypeError(f"create_ticket answered {key!r}, and must answer the ticket's key")
        return key


def checked(thing: object, method: str, name: str) -> Any:
    """Return the method that is needed of ``thing``; raise if it has none."""
    found = getattr(thing, method, None)
    if not callable(found):
        kind = type(thing).__name__
        raise ConfigurationError(
            f"{name} is a {kind} without the method {method}; it is needed when a task has failed"
            " for good, and that is too late to find out"
        )
    return found


# --- what is said ----------------------------------------------------------------------------


def summarise(task_name: str, report: FailureReport) -> str:
    """Return the failure in one line."""
    line = f"{task_name}: {report.error_category}: {report.details}"
    line = " ".join(line.split())
    return line if len(line) <= _LONGEST_SUMMARY else line[: _LONGEST_SUMMARY - 1] + "…"


def describe(
    *,
    task_name: str,
    run_id: str | None,
    report: FailureReport,
    rounds: Sequence[ExecutionResult],
    actions: Sequence[str],
) -> str:
    """Return all that a person needs: what failed, each attempt, and what to do next."""
    attempts = sum(len(result.attempts) for result in rounds)
    lines = [
        f"All retry levels are exhausted for {task_name}.",
        "",
        f"Task: {task_name}",
        f"Persona: {report.failed_persona}",
        f"Run: {run_id or 'none (it was executed without a workflow id)'}",
        f"Error: {report.error_category}: {_shortened(report.details)}",
        f"Attempts: {attempts} in {len(rounds)} round(s)",
        "",
        "What was tried:",
    ]
    for number, result in enumerate(rounds, 1):
        lines.append(f"Round {number}")
        lines += [f"  {_attempt_line(attempt)}" for attempt in result.attempts]
    lines += ["", "What to do next:", *(f"- {action}" for action in actions)]
    return "\n".join(lines)


def _attempt_line(attempt: ExecutionAttempt) -> str:
    when = attempt.started_at.strftime("%Y-%m-%d %H:%M:%S UTC")
    error = f"{attempt.error_type}: {attempt.error_message}" if attempt.error_type else ""
    took = f"{attempt.duration_seconds:.1f} s"
    head = f"Attempt {attempt.attempt_number}, {when}, {took}: {attempt.status.value}"
    return f"{head}, {_shortened(error)}" if error else head


def _shortened(text: str) -> str:
    return text if len(text) <= _LONGEST_ERROR else text[:_LONGEST_ERROR] + "…"


def labels_for(report: FailureReport) -> tuple[str, ...]:
    """Return labels to find such tickets by; Jira takes none with spaces in them."""
    wanted = ("maestro-hive", str(report.error_category).lower(), report.failed_persona)
    return tuple(
        dict.fromkeys(re.sub(r"\s+", "-", str(label).strip()) for label in wanted if label)
    )


_ADVICE = {
    ErrorCategory.SYNTAX: "look at the source that did not parse, and at the prompt it came from",
    ErrorCategory.TEST_FAILURE: "look at the tests that fail, and decide which side is wrong",
    ErrorCategory.ACC_VIOLATION: "look at which rule of the architecture is broken, and by what",
    ErrorCategory.BDV_VIOLATION: "look at which specified behaviour is not there",
    ErrorCategory.TIMEOUT: "give it more time (timeout_seconds), or less to do at once",
    ErrorCategory.API_ERROR: "see whether the other side is up, and the credentials are valid",
    ErrorCategory.RATE_LIMIT: "wait, or have less done at once; the other side asked for patience",
    ErrorCategory.RESOURCE_ERROR: "make room: memory, disk, files or processes ran out",
    ErrorCategory.UNKNOWN: "look at the last attempt's error",
}


def actions_for(report: FailureReport, run_id: str | None) -> list[str]:
    """Return what a person can do about it, the most useful first."""
    category = report.error_category
    known = ErrorCategory(category) if category in list(ErrorCategory) else ErrorCategory.UNKNOWN
    again = "then execute it again"
    until = f"; until then {run_id} raises this again"
    go_on = f"{again} with options(retry=True){until}" if run_id else again
    return [*([report.suggested_fix] if report.suggested_fix else []), _ADVICE[known], go_on]
