"""Why a call of an agent failed: read from a status, an exit code, or what it says."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from maestro_hive.engine.config import ErrorCategory
from maestro_hive.engine.errors import RecoverableError, UnrecoverableError
from maestro_hive.kernel.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Mapping

#: More of what an agent says about a failure is not quoted.
_SHOWN = 2_000
#: A longer wait is a mistake.
_MOST_SECONDS = 7 * 24 * 3600.0


class FailureKind(StrEnum):
    """What kind of failure it was."""

    #: The provider of the model limits the rate of calls, or a quota is used up.
    RATE_LIMITED = "rate limited"
    #: The provider of the model has an error of its own, or no answer.
    UNAVAILABLE = "unavailable"
    #: The conversation no longer fits into the model's context.
    CONTEXT_FULL = "context full"
    #: No key, a wrong one, or nobody is logged in.
    NOT_AUTHENTICATED = "not authenticated"
    #: The agent's own limit of money is reached.
    BUDGET = "budget"
    #: The agent does not work in this folder, or with these rights, before a person permits it.
    NOT_PERMITTED = "not permitted"
    #: There is no session to resume: it was killed before the agent had saved one.
    NO_SESSION = "no session"
    #: The session exists, and has to be resumed.
    SESSION_EXISTS = "session exists"
    #: There is a result, and it is not what the schema asks for.
    NO_STRUCTURE = "no structure"
    #: The output ended without a result.
    CUT = "cut"
    #: Anything else.
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Why a call failed."""

    kind: FailureKind
    message: str
    #: How long the other side asks to wait, in seconds.
    retry_after: float | None = None

    @property
    def is_about_session(self) -> bool:
        """Return whether only the session was wrong."""
        return self.kind in {FailureKind.NO_SESSION, FailureKind.SESSION_EXISTS}

    def error(self, agent: str) -> AgentFailedError | AgentRefusedError:
        """Return the error that an attempt ends with."""
        message = f"{agent}: {self.kind}: {self.message}"
        if self.kind in {FailureKind.NOT_AUTHENTICATED, FailureKind.NOT_PERMITTED}:
            return AgentRefusedError(message)
        category = _CATEGORIES.get(self.kind, ErrorCategory.UNKNOWN)
        return AgentFailedError(message, category.value, retry_after=self.retry_after)


class AgentFailedError(RecoverableError):
    """A call of an agent failed; another attempt may succeed."""


class AgentRefusedError(UnrecoverableError):
    """An agent cannot work before a person has done something: the message says what."""


class AgentNotInstalledError(ConfigurationError):
    """Agents that a graph names are not installed; nothing was started."""

    def __init__(self, missing: Mapping[str, str]) -> None:
        lines = "\n".join(f"  {name}: {how}" for name, how in missing.items())
        super().__init__(f"nothing was started: agents are not installed; install them:\n{lines}")
        #: How each is installed, by name.
        self.missing = dict(missing)


_CATEGORIES = {
    FailureKind.RATE_LIMITED: ErrorCategory.RATE_LIMIT,
    FailureKind.UNAVAILABLE: ErrorCategory.API_ERROR,
    FailureKind.CONTEXT_FULL: ErrorCategory.RESOURCE_ERROR,
    FailureKind.BUDGET: ErrorCategory.TOKEN_BUDGET,
}

#: What stands before an HTTP status in a text.
_STATUS = r"(?:status|error|code|rejected)\W{0,6}"
#: What texts say, the first that matches; each was seen in the output of an agent or of a provider.
_TEXTS = tuple(
    (kind, re.compile("|".join(patterns), re.IGNORECASE))
    for kind, *patterns in (
        (
            FailureKind.NO_SESSION,
            r"no conversation found with session",
            r"invalid session identifier",
            r"no saved session found",
            r"session not found",
            r"no rollout found",
        ),
        (FailureKind.SESSION_EXISTS, r"session id \S{1,140} (?:is already in use|already exists)"),
        (
            FailureKind.CONTEXT_FULL,
            r"prompt is too long",
            r"request_too_large",
            r"context ?(?:length|window|overflow)",
            r"maximum context",
            r"input token count",
        ),
        (FailureKind.NOT_PERMITTED, r"not running in a trusted directory", r"root/sudo privileges"),
        (
            FailureKind.NOT_AUTHENTICATED,
            rf"{_STATUS}40[13]\b",
            r"authenticat",
            r"not logged in",
            r"unauthorized",
            r"invalid auth method",
            r"(?:missing|invalid|incorrect)[^\n]{0,40}api[ _]?key",
        ),
        (
            FailureKind.RATE_LIMITED,
            rf"{_STATUS}429\b",
            r"rate.?limit",
            r"too many requests",
            r"resource.?exhausted",
            r"quota",
            r"usage limit",
        ),
        (
            FailureKind.UNAVAILABLE,
            rf"{_STATUS}5\d\d\b",
            r"overloaded",
            r"unavailable",
            r"connection (?:error|refused|reset)",
            r"timed? ?out",
            r"internal server error",
            r"enotfound|econnrefused",
            r"stream disconnected",
        ),
    )
)
_WAIT = re.compile(
    r"(?:retry|try again|retrying)[ _-]?(?:after|in)?\D{0,4}(\d{1,9}(?:\.\d{1,6})?)"
    r"\s?(ms|milliseconds?|s|sec|seconds?|m|min|minutes?|h|hours?)?\b",
    re.IGNORECASE,
)
_UNITS = {"m": 60.0, "h": 3600.0, "s": 1.0}


def kind_of(message: str, status: object = None) -> FailureKind:
    """Return the kind of a failure by its HTTP status, where it is known, and by its text."""
    if status == 413:
        return FailureKind.CONTEXT_FULL
    about = message if type(status) is not int else f"{message} (status {status})"
    return next((kind for kind, text in _TEXTS if text.search(about)), FailureKind.FAILED)


def failure_of(message: str, status: object = None, *, retry_after: object = None) -> Failure:
    """Return the failure that a message describes."""
    return Failure(
        kind=kind_of(message, status),
        message=quoted(message),
        retry_after=_seconds(retry_after) or wait_in(message),
    )


def wait_in(message: str) -> float | None:
    """Return the seconds that a text asks to wait; None if it does not."""
    found = _WAIT.search(message)
    if found is None:
        return None
    unit = (found[2] or "s").lower()
    scale = 0.001 if unit.startswith(("ms", "milli")) else _UNITS[unit[0]]
    return _seconds(float(found[1]) * scale)


def _seconds(value: object) -> float | None:
    if isinstance(value, str) and re.fullmatch(r"\d{1,9}(?:\.\d{1,6})?", value):
        value = float(value)
    good = type(value) in (int, float) and 0 < value <= _MOST_SECONDS  # type: ignore[operator]
    return float(value) if good else None  # type: ignore[arg-type]


def quoted(message: str) -> str:
    """Return the part of a message that is shown: its start, and its end."""
    text = message.strip()
    if len(text) <= _SHOWN:
        return text
    half = _SHOWN // 2
    return f"{text[:half]} … {text[-half:]}"
