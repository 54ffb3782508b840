"""Why a call of an agent failed: read from its codes, or from what it says in an error of its own."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

from maestro_hive.engine.config import ErrorCategory
from maestro_hive.engine.errors import RecoverableError, UnrecoverableError

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


_CATEGORIES = {
    FailureKind.RATE_LIMITED: ErrorCategory.RATE_LIMIT,
    FailureKind.UNAVAILABLE: ErrorCategory.API_ERROR,
    FailureKind.CONTEXT_FULL: ErrorCategory.RESOURCE_ERROR,
    FailureKind.BUDGET: ErrorCategory.TOKEN_BUDGET,
}

#: What agents and the clients of providers call an error, in a field for it, and what HTTP statuses mean.
_CODES: dict[object, FailureKind] = {
    **dict.fromkeys((401, 403), FailureKind.NOT_AUTHENTICATED),
    413: FailureKind.CONTEXT_FULL,
    429: FailureKind.RATE_LIMITED,
    **dict.fromkeys(range(500, 600), FailureKind.UNAVAILABLE),
    # of claude
    "authentication_failed": FailureKind.NOT_AUTHENTICATED,
    "oauth_org_not_allowed": FailureKind.NOT_AUTHENTICATED,
    "rate_limit": FailureKind.RATE_LIMITED,
    "overloaded": FailureKind.UNAVAILABLE,
    "server_error": FailureKind.UNAVAILABLE,
    # of opencode
    "ProviderAuthError": FailureKind.NOT_AUTHENTICATED,
    "ContextOverflowError": FailureKind.CONTEXT_FULL,
    # of aider
    "AuthenticationError": FailureKind.NOT_AUTHENTICATED,
    "PermissionDeniedError": FailureKind.NOT_AUTHENTICATED,
    "ContextWindowExceededError": FailureKind.CONTEXT_FULL,
    "RateLimitError": FailureKind.RATE_LIMITED,
    "APIConnectionError": FailureKind.UNAVAILABLE,
    "InternalServerError": FailureKind.UNAVAILABLE,
    "ServiceUnavailableError": FailureKind.UNAVAILABLE,
    "Timeout": FailureKind.UNAVAILABLE,
}
#: What an error of an agent may start with, besides colors.
_START = (
    r"^(?:\x1b\[[\d;]{0,9}m|Error: |Error (?:resuming|starting) session: |thread/resume failed: "
    r"|Reconnecting\.\.\. \d+/\d+ \()*"
)
#: Where the HTTP status is in an error of an agent; it may quote more of the response behind it.
_STATUS = re.compile(
    rf"{_START}(?:unexpected status |(?:exceeded retry limit, )?last status: |status "
    r"|(?:Failed to authenticate\. )?\[?API Error: (?:Request rejected \()?)(?P<status>[45]\d\d)\b"
)


def _compiled(
    prefix: str, *kinds: tuple[FailureKind | str, ...]
) -> tuple[tuple[FailureKind, re.Pattern[str]], ...]:
    return tuple(
        (FailureKind(kind), re.compile(rf"{prefix}(?:{'|'.join(patterns)})", re.IGNORECASE))
        for kind, *patterns in kinds
    )


#: How lines start that only agents print. What nobody can mend but a person is read from nothing else:
#: a model, or what it executes, may say anything.
_SENTENCES = _compiled(
    _START,
    (
        FailureKind.NO_SESSION,
        r"no conversation found with session",
        r"invalid session identifier",
        r"no saved session found",
        r"session not found",
        r"no rollout found for thread",
    ),
    (
        FailureKind.SESSION_EXISTS,
        r"session id \S{1,140} (?:is already in use|already exists)",
    ),
    (
        FailureKind.NOT_PERMITTED,
        r"gemini cli is not running in a trusted directory",
        r"not inside a trusted directory and --skip-git-repo-check",
        r"--dangerously-skip-permissions cannot be used with root/sudo privileges",
    ),
    (
        FailureKind.NOT_AUTHENTICATED,
        r"(?:not logged in|oauth token revoked|login expired) · please run /login",
        r"authentication required · sign in again",
        r"invalid (?:api key|auth token) · fix external",
        r"invalid auth method selected\.",
        r"missing api key for \S{1,60} auth\.",
        r"no auth type is selected\.",
        r"your access token could not be refreshed",
        r"missing environment variable: `\w{0,60}(?:key|token)\w{0,60}`",
    ),
)
#: What is in an error of an agent, or of a provider that it quotes.
_PHRASES = _compiled(
    r"(?<![a-z])",
    (
        FailureKind.CONTEXT_FULL,
        r"prompt is too long",
        r"request_too_large",
        r"context_length_exceeded",
        r"maximum context length",
        r"context (?:length|window) (?:is |was |has been )?exceeded",
        r"exceeds? (?:the |its |this )?(?:model's )?(?:maximum )?context (?:length|window)",
        r"ran out of room in the model's context window",
        r"input token count .{0,40}exceeds",
    ),
    (
        FailureKind.RATE_LIMITED,
        r"rate[ _-]?limit(?:s|ed|_error|_exceeded)?\b",
        r"too many requests",
        r"resource[ _]?(?:has been )?exhausted",
        r"(?:exceeded your current|insufficient|out of)[ _]quota",
        r"quota (?:is |was |has been )?(?:exceeded|exhausted)",
        r"usage limit",
    ),
    (
        FailureKind.UNAVAILABLE,
        r"overloaded(?:_error)?\b",
        r"(?:service|server|model|capacity|temporarily|currently) (?:is )?(?:\w+ )?unavailable",
        r"connection (?:error|refused|reset|failed)",
        r"(?:request|connection|response|read|operation) timed out",
        r"(?:request|connection|gateway) timeout",
        r"internal server error",
        r"enotfound|econnrefused|econnreset|etimedout",
        r"stream disconnected before completion",
        r"currently experiencing high demand",
        r"selected model is at capacity",
    ),
)
#: What a line of an output starts with that is an error of the agent, if anything is.
_ERROR_LINE = re.compile(r"(?:\x1b\[[\d;]{0,9}m)*\[?(?:error|api error)\b", re.IGNORECASE)
_WAIT = re.compile(
    r"(?:retry|try again|retrying)[ _-]?(?:after|in)?\D{0,4}(\d{1,9}(?:\.\d{1,6})?)"
    r"\s?(ms|milliseconds?|s|sec|seconds?|m|min|minutes?|h|hours?)?\b",
    re.IGNORECASE,
)
_UNITS = {"m": 60.0, "h": 3600.0, "s": 1.0}


def kind_of(message: str, code: object = None) -> FailureKind:
    """Return the kind of a failure by what an agent says in a field for errors, and nowhere else.

    ``code`` is an HTTP status, or the agent's name of the error, where it gives one.
    """
    found = _CODES.get(code) if isinstance(code, int | str) else None
    status = _STATUS.match(message)
    if found is None and status is not None:
        found = _CODES.get(int(status["status"]))
    return found or _first(_SENTENCES, message) or _first(_PHRASES, message) or FailureKind.FAILED


def kind_in_output(output: str) -> FailureKind:
    """Return the kind of a failure by lines of an output, among which may be anybody's."""
    lines = output.splitlines()
    sentences = [_first(_SENTENCES, line.strip()) for line in lines]
    phrases = [_first(_PHRASES, line) for line in lines if _ERROR_LINE.match(line)]
    return next(filter(None, (*sentences, *phrases)), FailureKind.FAILED)


def _first(kinds: tuple[tuple[FailureKind, re.Pattern[str]], ...], text: str) -> FailureKind | None:
    return next((kind for kind, pattern in kinds if pattern.search(text)), None)


def failure_of(message: str, code: object = None, *, retry_after: object = None) -> Failure:
    """Return the failure that an error of an agent describes."""
    return Failure(
        kind=kind_of(message, code),
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
