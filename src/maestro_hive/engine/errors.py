"""The errors of an execution, and the failure report that they carry.

MaestroError                     (``kernel.errors``: the root of all errors of this package)
└── ExecutionException           something went wrong while a task was executed
    ├── RecoverableError         worth another attempt: level 1 retries it
    ├── UnrecoverableError       level 1 gave up: level 2 decides
    ├── HelpNeeded               both levels gave up: a person has to decide
    ├── CircuitBreakerOpen       too many failures in a row: nothing was called
    ├── TokenBudgetExceeded      the token budget is used up: another attempt would use more
    │   ├── BudgetExceeded       the same, of a budget that all processes share: raise its limit
    │   └── UnpricedModel        a limit in money, and a model of which nobody knows the price
    └── GovernanceViolation      a policy forbids it: another attempt is forbidden too

Every argument is an attribute. The errors can be copied and pickled, so a worker process can return
them; an ``original_error`` of a user's class is included if it can be pickled itself.
"""

from __future__ import annotations

import math
import traceback
from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, fields
from datetime import date
from enum import Enum
from os import PathLike, fsdecode
from typing import Any

from maestro_hive.kernel.errors import MaestroError

#: How deep containers are shown.
_MAX_DEPTH = 20
#: How many errors of a group are read.
_MAX_PARTS = 10_000


@dataclass
class FailureReport:
    """What failed, in which persona, and what may help: for the next level, and for a person."""

    failed_persona: str
    error_category: str
    details: str
    context: list[Any] = field(default_factory=list)
    attempt_number: int = 0
    recoverable: bool = True
    suggested_fix: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain JSON, whatever its fields contain."""
        return _plain_parts(self, (id(self),))


class ExecutionException(MaestroError):  # noqa: N818 - existing callers catch it by this name
    """Something went wrong while a task was executed."""

    #: One that is made again from a record may lack its own.
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
        except Exception:  # noqa: BLE001 - an argument had another type than declared
            return message
        return f"{message} ({facts})" if facts else message

    def _facts(self) -> Iterator[str]:
        return iter(())

    def to_dict(self) -> dict[str, Any]:
        """Return the message and every fact as plain JSON, for journals and audit logs."""
        return _plain_parts(self, (id(self),))


class RecoverableError(ExecutionException):
    """An attempt failed, and another attempt may succeed.

    ``retry_after`` is the wait, in seconds, that the remote side requested.
    """

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
        self.error_category = error_category
        self.file_path = file_path
        self.line_number = line_number
        self.retry_after = retry_after

    def _facts(self) -> Iterator[str]:
        if self.error_category != "UNKNOWN":
            yield str(self.error_category)
        if self.file_path is not None:
            yield f"{self.file_path}:{self.line_number}" if self.line_number else self.file_path
        elif self.line_number is not None:
            yield f"line {self.line_number}"
        if self.retry_after is not None:
            yield f"retry after {self.retry_after:g} s"


def _reported(report: FailureReport, message: str) -> Iterator[str]:
    """Yield what a report adds to a message: its category and details, unless that has them."""
    if not report.details or report.details not in message:
        yield f"{report.error_category}: {report.details}"
    elif report.error_category != "UNKNOWN":
        yield str(report.error_category)


class UnrecoverableError(ExecutionException):
    """Level 1 gave up: all its attempts failed, or the error is one that is not retried.

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
        self.failure_report = failure_report
        self.original_error = original_error

    def _facts(self) -> Iterator[str]:
        if self.original_error is not None:
            yield _describe(self.original_error)
        elif isinstance(self.failure_report, FailureReport):
            yield from _reported(self.failure_report, text_of(self.message))


class HelpNeeded(ExecutionException):
    """Both levels gave up, and a person has to decide; ``jira_ticket`` is the ticket, if one was made.

    ``result`` has every attempt of both levels, if level 2 raised it.
    """

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
        self.failure_report = failure_report
        self.total_attempts = total_attempts
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


class CircuitBreakerOpen(ExecutionException):
    """The breaker is open after too many failures in a row, so nothing was called."""

    def __init__(
        self,
        message: str,
        consecutive_failures: int,
        cooldown_seconds: float,
        context: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(message, context)
        self.consecutive_failures = consecutive_failures
        self.cooldown_seconds = cooldown_seconds

    def _facts(self) -> Iterator[str]:
        yield f"failures in a row: {self.consecutive_failures}"
        yield f"cooldown: {self.cooldown_seconds:g} s"


class TokenBudgetExceeded(ExecutionException):
    """The token budget of a persona or of an execution is used up; another attempt would use more."""

    def __init__(
        self,
        message: str,
        persona_id: str,
        tokens_used: int,
        budget_limit: int,
        context: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(message, context)
        self.persona_id = persona_id
        self.tokens_used = tokens_used
        self.budget_limit = budget_limit

    def _facts(self) -> Iterator[str]:
        yield f"persona {self.persona_id}"
        yield f"{self.tokens_used:,} of {self.budget_limit:,} tokens used"


class BudgetExceeded(TokenBudgetExceeded):
    """A budget that all processes share has no room for a call; it has once its limit is raised.

    ``account`` says which, as in ``persona:architect``; ``used`` and ``limit`` are in tokens, or as
    ``unit`` says in millionths of a US dollar. ``lost`` of it was reserved by processes that died.
    After ``retry_in`` seconds there is room by itself, if that is known.
    """

    def __init__(
        self,
        account: str,
        unit: str,
        *,
        used: int,
        limit: int,
        lost: int = 0,
        amount: int = 0,
        waiting: int = 0,
        persona_id: str = "",
        retry_in: float | None = None,
    ) -> None:
        scope, _, name = account.partition(":")
        show = _tokens if unit == "tokens" else _dollars
        gone = f", {show(lost)} reserved by processes that died" if lost else ""
        gone += f", {show(waiting)} reserved by calls that wait themselves" if waiting else ""
        wanted = f"; a call may take {show(amount)}" if amount > 1 else ""
        ways = [f"raise it by `maestro budget raise {scope} {name} --{unit} N`"]
        if lost:
            ways.append("release what was lost by `maestro budget release`")
        super().__init__(
            f"the budget of {scope} {name!r} is used up: {show(used)} of {show(limit)} spent"
            f"{gone}{wanted}. To go on, {' or '.join(ways)}",
            persona_id,
            used,
            limit,
        )
        self.account = account
        self.unit = unit
        self.used = used
        self.limit = limit
        self.lost = lost
        self.retry_in = retry_in

    def _facts(self) -> Iterator[str]:
        return iter(())


def _tokens(amount: int) -> str:
    return f"{amount:,} tokens"


def _dollars(amount: int) -> str:
    return f"{amount / 1e6:,.6f} USD"


class UnpricedModel(TokenBudgetExceeded):
    """A step under a limit in money uses a model without a price: what it spends cannot be counted."""

    def __init__(self, step: str, persona_id: str, model: str) -> None:
        which = f"the model {model!r}" if model else "an unknown model (the option model= names it)"
        super().__init__(
            f"step {step!r} is under a limit in money and uses {which}, which has no price; give it"
            " one (Hive(prices=…)), give the step a max_usd, or count its cost by spend(usd=…)",
            persona_id,
            0,
            0,
        )
        self.step = step
        self.model = model

    def _facts(self) -> Iterator[str]:
        return iter(())


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
        self.violation_type = violation_type
        self.path = path
        self.tool_name = tool_name
        self.agent_id = agent_id

    def _facts(self) -> Iterator[str]:
        yield str(self.violation_type)
        if self.path is not None:
            yield f"path {self.path}"
        if self.tool_name is not None:
            yield f"tool {self.tool_name}"
        if self.agent_id is not None:
            yield f"agent {self.agent_id}"


# --- any exception ---------------------------------------------------------------------------


def text_of(value: object) -> str:
    """Return a value as text that can be written, also if its ``__str__`` raises."""
    try:
        return writable(str(value))
    except Exception:  # noqa: BLE001 - the report of a failure must not fail
        return f"{type(value).__name__}, whose __str__ raised an error"


def parts_of(error: BaseException) -> Iterator[BaseException]:
    """Yield the errors of a group and of the groups in it, however deep; any other error itself."""
    waiting, seen = [error], 0
    while waiting and seen < _MAX_PARTS:
        seen += 1
        found = waiting.pop()
        if isinstance(found, BaseExceptionGroup):
            waiting.extend(reversed(found.exceptions))
        else:
            yield found


# --- plain JSON ------------------------------------------------------------------------------
# The report of a failure must not fail. What is not JSON is described: the codec is for values
# that are decoded again.


def plain(value: object, inside: tuple[int, ...] = ()) -> Any:
    """Return ``value`` as plain JSON; ``inside`` are the containers around it."""
    if id(value) in inside or len(inside) > _MAX_DEPTH:
        return "…"
    within = (*inside, id(value))
    match value:
        case Enum():
            return plain(value.value, within)
        case FailureReport() | ExecutionException():
            return _plain_parts(value, within)
        case Mapping():
            return {_plain_key(key): plain(part, within) for key, part in value.items()}
        case list() | tuple() | AbstractSet():
            return [plain(part, within) for part in value]
        case _:
            return _plain_leaf(value)


def _plain_leaf(value: object) -> Any:
    match value:
        case None | bool() | int():
            return value
        case float():
            return value if math.isfinite(value) else repr(value)
        case str() | PathLike():
            return writable(fsdecode(value))
        case BaseException():
            return _describe(value)
        case date():
            return value.isoformat()
        case _:
            return f"<{type(value).__module__}.{type(value).__qualname__}>"


def _plain_parts(
    value: FailureReport | ExecutionException, within: tuple[int, ...]
) -> dict[str, Any]:
    if isinstance(value, FailureReport):
        return {part.name: plain(getattr(value, part.name), within) for part in fields(value)}
    return {name: plain(part, within) for name, part in vars(value).items() if name[0] != "_"}


def _plain_key(key: object) -> str:
    made = plain(key)
    return made if isinstance(made, str) else repr(made)


def _describe(error: object) -> str:
    """Return ``Type: message``; of a value that is not an error, its text."""
    if not isinstance(error, BaseException):
        return text_of(error)
    try:
        return writable("".join(traceback.format_exception_only(error)).strip())
    except Exception:  # noqa: BLE001 - the position in a SyntaxError may be of any type
        return f"{type(error).__name__}: {text_of(error)}"


def writable(text: str) -> str:
    """Return ``text`` with lone surrogates, which UTF-8 cannot encode, escaped."""
    return text.encode("utf-8", "backslashreplace").decode()
