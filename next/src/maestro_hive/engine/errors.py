"""The errors of an execution, and the failure report that they carry.

MaestroError                     (``kernel.errors``: the root of all errors of this package)
└── ExecutionException           an execution went wrong
    ├── RecoverableError         an attempt failed: another one may succeed
    │   └── ResultTypeError      a result is not of the type that its step declares
    ├── UnrecoverableError       another attempt is pointless, or level 1 has used up its attempts
    ├── HelpNeeded               a person has to decide
    │   └── AmbiguousStepError   a step may have had its effect before its process died
    ├── CircuitBreakerOpen       too many failures in a row: nothing was called
    ├── TokenBudgetExceeded      a budget of tokens is used up
    ├── GovernanceViolation      a policy forbids it: another attempt is forbidden too
    └── AttemptOverError         a body used ``current()`` after its attempt had ended

Every argument is an attribute. An error with ``suspends`` ends no step: its run waits, and resumes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from datetime import date
from enum import Enum
from os import PathLike, fsdecode
from typing import Any, ClassVar, Literal

from maestro_hive.kernel.errors import MaestroError

#: How deep containers are shown.
_DEEPEST = 20


@dataclass
class FailureReport:
    """A failure, its persona, and what may help: for the next level, and for a person."""

    failed_persona: str
    error_category: str
    details: str
    context: list[Any] = field(default_factory=list)
    attempt_number: int = 0
    recoverable: bool = True
    suggested_fix: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain JSON, whatever its fields contain."""
        made: dict[str, Any] = plain(self)
        return made


class ExecutionException(MaestroError):  # noqa: N818 - existing callers catch it by this name
    """An execution went wrong."""

    #: Why it suspends its run, in the words of ``RunSuspended``; empty: it ends the step.
    suspends: ClassVar[Literal["", "breaker", "budget", "person"]] = ""
    #: One that is made from a record may lack its own.
    message: str = ""

    def __init__(self, message: str, context: dict[str, Any] | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.context = {} if context is None else context

    def __str__(self) -> str:
        """Return the message, and in brackets the known facts."""
        message = text_of(self.message)
        try:
            facts = "; ".join(self._facts())
        except Exception:  # noqa: BLE001 - an argument has another type than declared
            return message
        return f"{message} ({facts})" if facts else message

    def _facts(self) -> Iterator[str]:
        return iter(())

    def to_dict(self) -> dict[str, Any]:
        """Return the message and every fact as plain JSON."""
        made: dict[str, Any] = plain(self)
        return made


class RecoverableError(ExecutionException):
    """An attempt failed, and another one may succeed; ``retry_after`` is a requested wait."""

    def __init__(
        self,
        message: str,
        error_category: str = "UNKNOWN",
        file_path: str | None = None,
        line_number: int | None = None,
        context: dict[str, Any] | None = None,
        *,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message, context)
        self.error_category, self.retry_after = error_category, retry_after
        self.file_path, self.line_number = file_path, line_number

    def _facts(self) -> Iterator[str]:
        if self.error_category != "UNKNOWN":
            yield str(self.error_category)
        if self.file_path is not None:
            yield f"{self.file_path}:{self.line_number}" if self.line_number else self.file_path
        elif self.line_number is not None:
            yield f"line {self.line_number}"
        if self.retry_after is not None:
            yield f"retry after {self.retry_after:g} s"


class ResultTypeError(RecoverableError, TypeError):
    """A result is not of the type that its step declares; ``problems`` has each place."""

    def __init__(self, declared: str, problems: list[str]) -> None:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        super().__init__(f"the result is not {declared}: {problems[0]}{more}")
        self.declared, self.problems = declared, problems


def _reported(report: FailureReport, message: str) -> Iterator[str]:
    """Yield what a report adds to a message: its category and details, unless that has them."""
    if not report.details or report.details not in message:
        yield f"{report.error_category}: {report.details}"
    elif report.error_category != "UNKNOWN":
        yield str(report.error_category)


class UnrecoverableError(ExecutionException):
    """Another attempt is pointless, or level 1 has used up its attempts.

    ``result`` has every attempt, if an executor raised it.
    """

    result: Any = None

    def __init__(
        self,
        message: str,
        failure_report: FailureReport | None = None,
        original_error: BaseException | None = None,
        context: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(message, context)
        self.failure_report, self.original_error = failure_report, original_error

    def _facts(self) -> Iterator[str]:
        if self.original_error is not None:
            yield described(self.original_error)
        elif isinstance(self.failure_report, FailureReport):
            yield from _reported(self.failure_report, text_of(self.message))


class HelpNeeded(ExecutionException):
    """A person has to decide; ``jira_ticket`` is the ticket, if there is one.

    ``result`` has every attempt of both levels, if level 2 raised it.
    """

    suspends = "person"
    result: Any = None

    def __init__(
        self,
        message: str,
        failure_report: FailureReport,
        total_attempts: int = 0,
        suggested_actions: list[str] | None = None,
        context: dict[str, Any] | None = None,
        *,
        jira_ticket: str | None = None,
    ) -> None:
        super().__init__(message, context)
        self.failure_report, self.total_attempts = failure_report, total_attempts
        self.suggested_actions = [] if suggested_actions is None else suggested_actions
        self.jira_ticket = jira_ticket

    def _facts(self) -> Iterator[str]:
        if self.total_attempts:
            yield "1 attempt" if self.total_attempts == 1 else f"{self.total_attempts} attempts"
        if isinstance(self.failure_report, FailureReport):
            yield from _reported(self.failure_report, text_of(self.message))
        if self.jira_ticket is not None:
            yield f"ticket {self.jira_ticket}"
        if self.suggested_actions:
            yield "try: " + ", ".join(self.suggested_actions)


class AmbiguousStepError(HelpNeeded):
    """A step started and has no recorded end: it may have had its effect."""

    def __init__(self, run_id: str, step: str, persona: str, attempts: int) -> None:
        super().__init__(
            f"step {step!r} of run {run_id!r} is ambiguous: attempt {attempts} started and has no"
            " recorded end, so it may have had its effect",
            FailureReport(persona, "UNKNOWN", "", attempt_number=attempts, recoverable=False),
            attempts,
            [
                f"`maestro answer {run_id} {step} --result VALUE`, if it had its effect",
                f"`maestro answer {run_id} {step} --rerun`, if not",
            ],
        )
        self.run_id, self.step = run_id, step

    def _facts(self) -> Iterator[str]:
        yield "; ".join(self.suggested_actions)


class CircuitBreakerOpen(ExecutionException):
    """The breaker is open after too many failures in a row, so nothing was called.

    After ``cooldown_seconds`` it is worth trying again.
    """

    suspends = "breaker"

    def __init__(
        self,
        message: str,
        consecutive_failures: int,
        cooldown_seconds: float,
        context: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(message, context)
        self.consecutive_failures, self.cooldown_seconds = consecutive_failures, cooldown_seconds

    def _facts(self) -> Iterator[str]:
        yield f"failures in a row: {self.consecutive_failures}"
        yield f"cooldown: {self.cooldown_seconds:g} s"


class TokenBudgetExceeded(ExecutionException):
    """The budget of a persona or of an execution is used up; another attempt would use more."""

    def __init__(
        self,
        message: str,
        persona_id: str,
        tokens_used: int,
        budget_limit: int,
        context: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(message, context)
        self.persona_id, self.tokens_used, self.budget_limit = persona_id, tokens_used, budget_limit

    def _facts(self) -> Iterator[str]:
        yield f"persona {self.persona_id}"
        yield f"{self.tokens_used:,} of {self.budget_limit:,} tokens used"


class GovernanceViolation(ExecutionException):
    """A policy forbids what a task was about to do; it is never retried."""

    def __init__(
        self,
        message: str,
        violation_type: str,
        path: str | None = None,
        tool_name: str | None = None,
        agent_id: str | None = None,
        context: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(message, context)
        self.violation_type, self.path = violation_type, path
        self.tool_name, self.agent_id = tool_name, agent_id

    def _facts(self) -> Iterator[str]:
        yield str(self.violation_type)
        if self.path is not None:
            yield f"path {self.path}"
        if self.tool_name is not None:
            yield f"tool {self.tool_name}"
        if self.agent_id is not None:
            yield f"agent {self.agent_id}"


class AttemptOverError(ExecutionException):
    """An attempt is over, because it took too long or was stopped: its body saves nothing more."""

    def __init__(self, step: str, attempt: int, wish: str = "") -> None:
        denied = f", and cannot {wish} any more" if wish else ""
        super().__init__(
            f"attempt {attempt} of step {step!r} is over{denied}: it took too long or stopped"
        )
        self.step, self.attempt = step, attempt


# --- any value, as text and as plain JSON ---------------------------------------------------------
# The report of a failure must not fail: what is not JSON is described.


def text_of(value: object) -> str:
    """Return a value as text that can be written, also if its ``__str__`` raises."""
    try:
        return str(value).encode("utf-8", "backslashreplace").decode()
    except Exception:  # noqa: BLE001 - of the user's class
        return f"{type(value).__name__}, whose __str__ raised an error"


def described(error: BaseException) -> str:
    """Return ``Type: message``, also of an error that cannot print itself."""
    kind, message = type(error).__name__, text_of(error)
    return f"{kind}: {message}" if message else kind


def plain(  # noqa: C901, PLR0911 - one line for each kind
    value: object, inside: tuple[int, ...] = ()
) -> Any:
    """Return ``value`` as plain JSON; ``inside`` are the containers around it."""
    if id(value) in inside or len(inside) > _DEEPEST:
        return "…"
    within = (*inside, id(value))
    match value:
        case Enum():
            return plain(value.value, within)
        case FailureReport() | ExecutionException():
            parts = ((name, part) for name, part in vars(value).items() if name[0] != "_")
            return {name: plain(part, within) for name, part in parts}
        case Mapping():
            pairs = ((plain(key), plain(part, within)) for key, part in value.items())
            return {key if isinstance(key, str) else repr(key): part for key, part in pairs}
        case list() | tuple() | AbstractSet():
            return [plain(part, within) for part in value]
        case None | bool() | int():
            return value
        case float():
            return value if math.isfinite(value) else repr(value)
        case str() | PathLike():
            return text_of(fsdecode(value))
        case BaseException():
            return described(value)
        case date():
            return value.isoformat()
        case _:
            return f"<{type(value).__module__}.{type(value).__qualname__}>"
