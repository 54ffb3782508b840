"""The settings of an execution; an executor and a hive take a ``frozen()`` copy when made."""

from __future__ import annotations

import logging
import os
import re
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta

from maestro_hive.engine.settings import (
    Amount,
    Duration,
    Factor,
    Flag,
    Seconds,
    Settings,
    Times,
    refused,
    setting,
)
from maestro_hive.kernel.errors import ConfigurationError
from maestro_hive.kernel.redaction import know_secret

DEFAULT_STATE_DIR = "/var/maestro/state"
DEFAULT_CHECKPOINT_DIR = "/var/maestro/checkpoints"


class RecoveryStrategy(StrEnum):
    """What follows a failure."""

    #: Another attempt without a wait.
    RETRY_SAME = "retry_same"
    #: Another attempt after a wait that grows.
    RETRY_WITH_BACKOFF = "retry_with_backoff"
    #: Diagnose, feed the diagnosis back, and try again after a wait that grows.
    REFLECT_AND_RETRY = "reflect_and_retry"
    #: Pass it to the next level, or to a person.
    ESCALATE = "escalate"
    #: Continue without a result.
    SKIP = "skip"


class ErrorCategory(StrEnum):
    """What kind of failure it was."""

    #: Source that does not parse.
    SYNTAX = "SYNTAX"
    #: Tests that fail.
    TEST_FAILURE = "TEST_FAILURE"
    #: A breach of the architecture's rules.
    ACC_VIOLATION = "ACC_VIOLATION"
    #: A breach of the specified behaviour.
    BDV_VIOLATION = "BDV_VIOLATION"
    #: Not completed in time.
    TIMEOUT = "TIMEOUT"
    #: A remote service returned an error, or no response.
    API_ERROR = "API_ERROR"
    #: A remote service limits the rate of calls.
    RATE_LIMIT = "RATE_LIMIT"
    #: The token budget is used up.
    TOKEN_BUDGET = "TOKEN_BUDGET"  # noqa: S105 - no password
    #: Memory, disk, files or processes ran out.
    RESOURCE_ERROR = "RESOURCE_ERROR"
    #: None of these.
    UNKNOWN = "UNKNOWN"


# --- checks of single settings --------------------------------------------------------------------


class DefaultFolder(str):
    """A folder that was not set by an argument, an attribute or the environment.

    Only such a folder has a fallback: in place of one that was set, nothing would be found, and
    every step would be executed and paid for again. A copy of the configuration has it too.
    """

    __slots__ = ()


class Secret:
    """A text that only ``reveal()`` returns; it is replaced in all that leaves the process."""

    __slots__ = ("_text",)

    def __init__(self, text: str) -> None:
        self._text = text
        know_secret(text)

    def reveal(self) -> str:
        """Return the text itself."""
        return self._text

    def __repr__(self) -> str:
        return "***"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and other._text == self._text

    def __hash__(self) -> int:
        return hash(self._text)


def _folder(label: str, value: object) -> str:
    """Accept the path of a folder, with ``~`` for a home directory."""
    if isinstance(value, DefaultFolder):
        return value
    text = os.fspath(value) if isinstance(value, str | os.PathLike) else None
    if not isinstance(text, str) or not text.strip() or "\0" in text:
        raise refused(label, value, "the path of a folder")
    if not text.startswith("~"):
        return text
    try:
        return str(Path(text).expanduser())
    except RuntimeError:
        raise refused(label, value, "the path of a folder; its home is unknown") from None


def _log_level(label: str, value: object) -> str:
    known = logging.getLevelNamesMapping()
    if not isinstance(value, str) or value.upper() not in known:
        raise refused(label, value, f"one of {', '.join(known)}")
    return value.upper()


def _address(label: str, value: object) -> str:
    """Accept an http address without user, password or query; empty means none."""
    wanted = "an address like https://jira.example.com, or empty for none"
    if isinstance(value, str) and "@" in value:  # not shown: it may contain a password
        raise ConfigurationError(
            f"{label} contains a user or a password, and must be {wanted}; set the credentials by"
            " JIRA_EMAIL and JIRA_API_TOKEN"
        )
    pattern = r"https?://([\w.\-]+|\[[0-9A-Fa-f:.]+\])(:[0-9]{1,5})?(/[^\s?#]*)?"
    if not isinstance(value, str) or (value and not re.fullmatch(pattern, value)):
        raise refused(label, value, wanted)
    return value.rstrip("/")


def _secret(label: str, value: object) -> Secret | None:
    match value:
        case None | Secret():
            return value
        case str() if value.strip():
            return Secret(value.strip())
        case _:
            raise ConfigurationError(f"{label} is blank or not a text, and must be a token or None")


def _part(kind: type[Any]) -> Any:
    def check(label: str, value: object) -> object:
        if not isinstance(value, kind):
            raise refused(label, value, f"a {kind.__name__}")
        return value

    return check


_ProjectKey = Annotated[
    str,
    Meta(
        pattern=r"\A[A-Za-z][A-Za-z0-9_]{0,254}\Z",
        description="the key of a Jira project, like MD",
    ),
]
_Email = Annotated[
    Annotated[str, Meta(pattern=r"\A[^@\s]+@[^@\s]+\Z")] | None,
    Meta(description="an e-mail address, or None"),
]
_Strategy = Annotated[RecoveryStrategy, Meta(description=f"one of {', '.join(RecoveryStrategy)}")]


# --- the settings ---------------------------------------------------------------------------------


@dataclass
class Level1Config(Settings):
    """The attempts of one round: few and quick, with healing between them.

    The first wait is ``base_delay_seconds``, each further one ``backoff_multiplier`` times as
    long, and none longer than ``max_delay_seconds``. ``max_interruptions`` is how many attempts of
    a step may end with the death of their process. ``enable_syntax_validation`` is for executors:
    a text that they return, and that looks like Python source, must parse.
    """

    max_attempts: int = setting(3, Times, "MAESTRO_L1_MAX_ATTEMPTS")
    base_delay_seconds: float = setting(1.0, Seconds)
    max_delay_seconds: float = setting(5.0, Seconds)
    backoff_multiplier: float = setting(1.5, Factor)
    enable_self_healing: bool = setting(True, Flag)
    enable_syntax_validation: bool = setting(True, Flag)
    recovery_strategy: RecoveryStrategy = setting(RecoveryStrategy.REFLECT_AND_RETRY, _Strategy)
    max_interruptions: int = setting(5, Amount)


@dataclass
class Level2Config(Settings):
    """The rounds of a step: fewer and slower, behind a circuit breaker."""

    max_attempts: int = setting(2, Times, "MAESTRO_L2_MAX_ATTEMPTS")
    base_delay_seconds: float = setting(5.0, Seconds)
    max_delay_seconds: float = setting(60.0, Seconds)
    backoff_multiplier: float = setting(2.0, Factor)
    circuit_breaker_threshold: int = setting(5, Times)
    circuit_breaker_cooldown_seconds: float = setting(300, Seconds)
    enable_jira_escalation: bool = setting(True, Flag)
    recovery_strategy: RecoveryStrategy = setting(RecoveryStrategy.ESCALATE, _Strategy)


@dataclass
class StateConfig(Settings):
    """Where state is stored, and how it is checked.

    With ``enable_persistence=False`` nothing is written to disk. With an interval of 0 there are
    no periodic checkpoints.
    """

    state_dir: str = setting(lambda: DefaultFolder(DEFAULT_STATE_DIR), _folder, "MAESTRO_STATE_DIR")
    checkpoint_dir: str = setting(
        lambda: DefaultFolder(DEFAULT_CHECKPOINT_DIR), _folder, "MAESTRO_CHECKPOINT_DIR"
    )
    enable_persistence: bool = setting(True, Flag)
    auto_checkpoint_interval_seconds: float = setting(60, Seconds)
    verify_checksum_on_load: bool = setting(True, Flag)
    max_checkpoints_per_workflow: int = setting(10, Times)
    #: Whether what steps write by ``current().write`` is stored; an option of a step goes before.
    store_streams: bool = setting(True, Flag)


@dataclass
class TokenConfig(Settings):
    """How many tokens may be spent."""

    max_tokens_per_persona: int = setting(100_000, Amount, "MAESTRO_TOKEN_LIMIT")
    max_tokens_per_execution: int = setting(500_000, Amount)
    track_usage: bool = setting(True, Flag)
    enforce_budget: bool = setting(True, Flag)


@dataclass
class ExecutionConfig(Settings):
    """All settings of an execution.

    Without ``jira_base_url`` escalations stay local. ``jira_api_token`` is a ``Secret``: neither
    ``repr`` nor ``to_dict`` shows it. After ``jira_index_lag_seconds`` Jira's search finds a ticket
    that was created.
    """

    level1: Level1Config = setting(Level1Config, _part(Level1Config))
    level2: Level2Config = setting(Level2Config, _part(Level2Config))
    state: StateConfig = setting(StateConfig, _part(StateConfig))
    tokens: TokenConfig = setting(TokenConfig, _part(TokenConfig))
    timeout_seconds: float = setting(300.0, Duration)
    capture_metrics: bool = setting(True, Flag)
    log_level: str = setting("INFO", _log_level)
    jira_project_key: str = setting("MD", _ProjectKey, "JIRA_PROJECT_KEY")
    jira_base_url: str = setting("", _address, "JIRA_BASE_URL")
    jira_email: str | None = setting(None, _Email, "JIRA_EMAIL")
    jira_api_token: Secret | None = setting(None, _secret, "JIRA_API_TOKEN")
    jira_index_lag_seconds: float = setting(120.0, Seconds, "MAESTRO_JIRA_INDEX_LAG")


# --- shared by the whole process ------------------------------------------------------------------

#: The configuration, and the decisions about default folders.
shared: dict[Any, Any] = {}


def get_execution_config() -> ExecutionConfig:
    """Return the configuration that the whole process shares; the first call makes it."""
    found: ExecutionConfig | None = shared.get("config")
    return found or shared.setdefault("config", ExecutionConfig())


def reset_execution_config() -> None:
    """Forget the shared configuration, and which default folders could be used."""
    shared.clear()
