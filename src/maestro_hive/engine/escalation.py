"""Escalation of a failure to a person: what is told, with all that is known about it.

``Escalation`` and ``JiraClient`` are the interfaces of callers' own ways to reach a person; a
``TicketSystem`` (``engine.tickets``) can also be searched. ``outbox`` stores what is escalated.
"""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol, Self

from maestro_hive.engine.config import ErrorCategory
from maestro_hive.engine.failures import report_from
from maestro_hive.engine.healing.failure import Failure, FailureType
from maestro_hive.kernel.errors import ConfigurationError, CorruptionError
from maestro_hive.kernel.redaction import redact_text, redact_value
from maestro_hive.maestro.state.projections import facts_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from maestro_hive.engine.errors import FailureReport
    from maestro_hive.engine.results import ExecutionAttempt, ExecutionResult
    from maestro_hive.maestro.state.codec import Json
    from maestro_hive.maestro.state.projections import StepState

#: What Jira accepts as a summary.
_MAX_SUMMARY = 255
#: How much of an error's text a description contains; the journal has more of it.
_MAX_ERROR = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class EscalationCase:
    """A failure that is escalated to a person; secrets in its texts and its report are replaced.

    ``effect_key`` is the same whenever the same failure is escalated again: the receiver can
    detect the repetition by it. Without a ``run_id`` there is no run that could be resumed.
    ``fingerprint`` is the same for every failure of the same kind: a ticket is found by it.
    """

    run_id: str | None
    task_name: str
    effect_key: str
    summary: str
    description: str
    failure_report: FailureReport
    labels: tuple[str, ...] = ()
    fingerprint: str = ""

    def __post_init__(self) -> None:
        # Whoever makes a case, and whatever it is sent to: it leaves the process.
        for name in ("task_name", "summary", "description"):
            object.__setattr__(self, name, redact_text(getattr(self, name)))
        object.__setattr__(self, "failure_report", redacted_report(self.failure_report))
        object.__setattr__(self, "labels", tuple(map(redact_text, self.labels)))

    def to_json(self) -> dict[str, Json]:
        """Return it as plain JSON."""
        fields: dict[str, Json] = {name: getattr(self, name) for name in self.__slots__}
        report = self.failure_report.to_dict()
        return {**fields, "labels": list(self.labels), "failure_report": report}

    @classmethod
    def from_json(cls, written: Mapping[str, Json]) -> Self:
        """Return the case that ``to_json`` wrote; what a newer version wrote besides is left out."""
        known = {name: written[name] for name in cls.__slots__ if name in written}
        try:
            labels, report = tuple(written["labels"]), report_from(written["failure_report"])
            return cls(**{**known, "labels": labels, "failure_report": report})
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise CorruptionError(f"the case of an escalation cannot be read: {error}") from error


class Escalation(Protocol):
    """Reports a failure to a person."""

    async def escalate(self, case: EscalationCase) -> str | None:
        """Report the failure; return a reference to the report, such as a ticket's key, or None."""
        ...


class JiraClient(Protocol):
    """Creates tickets."""

    async def create_ticket(
        self, project_key: str, summary: str, description: str, issue_type: str, labels: list[str]
    ) -> str:
        """Create a ticket and return its key."""
        ...


class JiraEscalation:
    """Creates one ticket per failure, through a client."""

    def __init__(
        self, client: JiraClient, project_key: str, base_url: str = "", issue_type: str = "Bug"
    ) -> None:
        self._create_ticket = checked(client, "create_ticket", "jira_client")
        self._project_key = project_key
        self._base_url = base_url
        self._issue_type = issue_type

    async def escalate(self, case: EscalationCase) -> str | None:
        """Create the ticket; return its key."""
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
            raise TypeError(f"create_ticket returned {key!r}, and must return the ticket's key")
        return key

    def address_of(self, key: str) -> str | None:
        """Return where people find a ticket; None if the address of Jira is not known."""
        return f"{self._base_url}/browse/{key}" if self._base_url else None


def address_of(escalation: Escalation, reference: str | None) -> str | None:
    """Return where people find what an escalation made, if that is a ticket with an address."""
    if reference is None or not isinstance(escalation, JiraEscalation):
        return None
    return escalation.address_of(reference)


def checked(thing: object, method: str, name: str) -> Callable[..., object]:
    """Return the method ``method`` of ``thing``; raise if there is none."""
    found: object = getattr(thing, method, None)
    if not callable(found):
        kind = type(thing).__name__
        raise ConfigurationError(
            f"{name} is a {kind} without the method {method}, which is called when all retries of a"
            " step have failed"
        )
    return found


def redacted_report(report: FailureReport) -> FailureReport:
    """Return a report in which secrets are replaced."""
    fix = report.suggested_fix
    context = redact_value(report.to_dict()["context"])
    return replace(
        report,
        details=redact_text(str(report.details)),
        context=context if isinstance(context, list) else [context],
        suggested_fix=None if fix is None else redact_text(str(fix)),
    )


def fingerprint_of(task_name: str, report: FailureReport, step: StepState | None) -> str:
    """Return the fingerprint of a failure: as it was diagnosed, or else of what is reported of it."""
    last = None if step is None else step.last_failure
    diagnosis = None if last is None else facts_of(last).get("diagnosis")
    if diagnosis and diagnosis.get("fingerprint"):
        return str(diagnosis["fingerprint"])
    message = f"{report.error_category}: {report.details}"
    return Failure("", FailureType.UNKNOWN, message, function_name=task_name).get_hash()


# --- texts -------------------------------------------------------------------------------------


def summarise(task_name: str, report: FailureReport) -> str:
    """Return the failure in one line."""
    line = f"{task_name}: {report.error_category}: {report.details}"
    line = redact_text(" ".join(line.split()))  # before it is cut: half a secret is not found
    return line if len(line) <= _MAX_SUMMARY else line[: _MAX_SUMMARY - 1] + "…"


def describe(
    *,
    task_name: str,
    run_id: str | None,
    report: FailureReport,
    rounds: Sequence[ExecutionResult],
    actions: Sequence[str],
) -> str:
    """Return the description of a failure: what failed, each attempt, and what to do next."""
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
        "Attempts of each round:",
    ]
    for number, result in enumerate(rounds, 1):
        lines.append(f"Round {number}")
        lines += [f"  {_attempt_line(attempt)}" for attempt in result.attempts]
    lines += ["", "What to do next:", *(f"- {action}" for action in actions)]
    return "\n".join(lines)


def _attempt_line(attempt: ExecutionAttempt) -> str:
    started = attempt.started_at
    when = started.strftime("%Y-%m-%d %H:%M:%S UTC") if started is not None else "not started"
    error = f"{attempt.error_type}: {attempt.error_message}" if attempt.error_type else ""
    took = f"{attempt.duration_seconds:.1f} s"
    head = f"Attempt {attempt.attempt_number}, {when}, {took}: {attempt.status.value}"
    return f"{head}, {_shortened(error)}" if error else head


def _shortened(text: str) -> str:
    text = redact_text(text)
    return text if len(text) <= _MAX_ERROR else text[:_MAX_ERROR] + "…"


def labels_for(report: FailureReport) -> tuple[str, ...]:
    """Return labels to find such tickets by; Jira accepts none that contain spaces."""
    wanted = ("maestro-hive", str(report.error_category).lower(), report.failed_persona)
    return tuple(
        dict.fromkeys(re.sub(r"\s+", "-", str(label).strip()) for label in wanted if label)
    )


_ADVICE = {
    ErrorCategory.SYNTAX: "check the source that does not parse, and the prompt it was generated from",
    ErrorCategory.TEST_FAILURE: "check the failing tests, and decide whether the tests or the code are wrong",
    ErrorCategory.ACC_VIOLATION: "find out which architecture rule is violated, and by what",
    ErrorCategory.BDV_VIOLATION: "find out which specified behaviour is missing",
    ErrorCategory.TIMEOUT: "increase timeout_seconds, or give the step less work",
    ErrorCategory.API_ERROR: "check that the remote service is available and the credentials are valid",
    ErrorCategory.RATE_LIMIT: "wait, or execute fewer steps at the same time: the remote service limits the rate",
    ErrorCategory.TOKEN_BUDGET: "raise the token budget, or give the step less work",
    ErrorCategory.RESOURCE_ERROR: "free resources: memory, disk space, open files or processes are exhausted",
    ErrorCategory.UNKNOWN: "check the error of the last attempt",
}


def answers_for(escalation: str, report: FailureReport, *, comments: bool) -> list[str]:
    """Return what a person can do about a step whose run waits, the most useful action first.

    ``comments``: whether a comment on the ticket can be the answer.
    """
    name = f"maestro answer {escalation}"
    by_comment = "or comment on the ticket (feedback, /result VALUE or /give-up), and resolve it"
    return [
        *([report.suggested_fix] if report.suggested_fix else []),
        _ADVICE[_category(report)],
        f'give feedback, and the step is attempted again: {name} "what to do differently"',
        f"give the result yourself: {name} --result VALUE",
        f"give up, and the workflow gets the error: {name} --give-up",
        *([by_comment] if comments else []),
    ]


def _category(report: FailureReport) -> ErrorCategory:
    known = report.error_category in list(ErrorCategory)
    return ErrorCategory(report.error_category) if known else ErrorCategory.UNKNOWN


def actions_for(report: FailureReport, run_id: str | None) -> list[str]:
    """Return what a person can do, the most useful action first."""
    again = "then execute it again"
    if run_id:
        again = (
            f"then retry it: `maestro retry {run_id}`, or options(retry=True) of an executor;"
            f" until then, run {run_id} raises the same failure again"
        )
    return [
        *([report.suggested_fix] if report.suggested_fix else []),
        _ADVICE[_category(report)],
        again,
    ]
