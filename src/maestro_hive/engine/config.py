"""The settings of an execution, and the folders that they choose.

A state folder is a *default folder* when it was set by no argument, attribute or environment
variable: its origin decides, not its spelling. Only a default folder has a fallback. In place of a
folder that was set, nothing would be found, and every step would be executed and paid for again.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from maestro_hive.engine import settings
from maestro_hive.engine.settings import Secret, Settings, refused, setting
from maestro_hive.kernel.errors import FolderError
from maestro_hive.kernel.files import make_private_folder
from maestro_hive.kernel.logs import get_logger
from maestro_hive.maestro.state.stores import (
    DEFAULT_CHECKPOINT_DIR,
    DEFAULT_STATE_DIR,
    FALLBACK_CHECKPOINT_DIR,
    FALLBACK_STATE_DIR,
)

if TYPE_CHECKING:
    from collections.abc import Callable

logger = get_logger(__name__)


class RecoveryStrategy(StrEnum):
    """What to do about a failure."""

    #: Try again without a wait.
    RETRY_SAME = "retry_same"
    #: Try again after a wait that grows.
    RETRY_WITH_BACKOFF = "retry_with_backoff"
    #: Diagnose, feed the diagnosis back, and try again.
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


# --- folders -----------------------------------------------------------------------------------


class DefaultFolder(str):
    """A folder that was not set explicitly; a copy of its configuration has it as a default too."""

    __slots__ = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Fallback:
    """A default folder that could not be used, the reason, and the folder used instead."""

    wanted: Path
    used: Path
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StateFolders:
    """The two folders in use; without ``persistent`` neither was created."""

    state: Path
    checkpoints: Path
    persistent: bool = True
    fallbacks: tuple[Fallback, ...] = ()


def folder(name: str, value: object) -> str:
    """Accept the path of a folder, with ``~`` for a home directory; a check of ``settings``."""
    if isinstance(value, DefaultFolder):
        return value
    text = os.fspath(value) if isinstance(value, str | os.PathLike) else None
    if not isinstance(text, str) or not text.strip() or "\0" in text:
        raise refused(name, value, "the path of a folder")
    if not text.startswith("~"):
        return text
    try:
        return str(Path(text).expanduser())
    except RuntimeError:
        wanted = "the path of a folder; its home directory is unknown"
        raise refused(name, value, wanted) from None


# --- settings ----------------------------------------------------------------------------------

_strategy = settings.choice(RecoveryStrategy)
_jira_address = settings.address("https://jira.example.com", "JIRA_EMAIL and JIRA_API_TOKEN")
_github_address = settings.address("https://github.example.com/api/v3", "MAESTRO_GITHUB_TOKEN")


@dataclass
class Level1Config(Settings):
    """The attempts of one round: few and quick, with healing between them.

    The first wait is ``base_delay_seconds``, each further one ``backoff_multiplier`` times as
    long, and none longer than ``max_delay_seconds``; ``jitter`` adds up to that share of it, so
    that many callers do not retry at the same moment. ``max_interruptions`` is how many attempts of
    a step may be cut off by the death of their process, and how many workers in a row may die while
    they execute a run's own code outside of any step; ``max_elapsed_seconds`` limits the time
    from a step's first attempt to the start of its last one. ``enable_syntax_validation`` is for
    executors: a text that they return, and that looks like Python source, must parse.
    ``disabled_healers`` are the names of healers that are not asked when an attempt fails.
    """

    max_attempts: int = setting(3, settings.whole(1), "MAESTRO_L1_MAX_ATTEMPTS")
    base_delay_seconds: float = setting(1.0, settings.number(0))
    max_delay_seconds: float = setting(5.0, settings.number(0))
    backoff_multiplier: float = setting(1.5, settings.number(1))
    enable_self_healing: bool = setting(True, settings.flag)
    enable_syntax_validation: bool = setting(True, settings.flag)
    recovery_strategy: RecoveryStrategy = setting(RecoveryStrategy.REFLECT_AND_RETRY, _strategy)
    max_interruptions: int = setting(5, settings.whole(0))
    max_elapsed_seconds: float | None = setting(None, settings.optional(settings.number(0)))
    jitter: float = setting(0.1, settings.number(0))
    jitter_seed: int | None = setting(None, settings.optional(settings.whole(0)))
    disabled_healers: tuple[str, ...] = setting((), settings.names)


@dataclass
class Level2Config(Settings):
    """The rounds of a step: fewer and slower, behind a circuit breaker."""

    max_attempts: int = setting(2, settings.whole(1), "MAESTRO_L2_MAX_ATTEMPTS")
    base_delay_seconds: float = setting(5.0, settings.number(0))
    max_delay_seconds: float = setting(60.0, settings.number(0))
    backoff_multiplier: float = setting(2.0, settings.number(1))
    circuit_breaker_threshold: int = setting(5, settings.whole(1))
    circuit_breaker_cooldown_seconds: float = setting(300, settings.number(0))
    enable_jira_escalation: bool = setting(True, settings.flag)
    recovery_strategy: RecoveryStrategy = setting(RecoveryStrategy.ESCALATE, _strategy)
    jitter: float = setting(0.1, settings.number(0))
    jitter_seed: int | None = setting(None, settings.optional(settings.whole(0)))


@dataclass
class StateConfig(Settings):
    """Where state is stored, and how it is checked.

    With ``enable_persistence=False`` nothing is written to disk. With an interval of 0 there are no
    periodic checkpoints. Where only ``state_dir`` was set, checkpoints are stored in its subfolder
    ``checkpoints``.
    """

    state_dir: str = setting(lambda: DefaultFolder(DEFAULT_STATE_DIR), folder, "MAESTRO_STATE_DIR")
    checkpoint_dir: str = setting(
        lambda: DefaultFolder(DEFAULT_CHECKPOINT_DIR), folder, "MAESTRO_CHECKPOINT_DIR"
    )
    enable_persistence: bool = setting(True, settings.flag)
    auto_checkpoint_interval_seconds: float = setting(60, settings.number(0))
    verify_checksum_on_load: bool = setting(True, settings.flag)
    max_checkpoints_per_workflow: int = setting(10, settings.whole(1))
    #: Whether what steps write by ``current().write`` is stored; an option of a step goes before it.
    store_streams: bool = setting(True, settings.flag)

    def resolve(self) -> StateFolders:
        """Create both folders and return them; log a warning, once, if a fallback is used.

        Raises FolderError if a folder that was set cannot be used.
        """
        if not self.enable_persistence:
            state, checkpoints = Path(self.state_dir), Path(self.checkpoint_dir)
            return StateFolders(
                state=state.absolute(), checkpoints=checkpoints.absolute(), persistent=False
            )
        state, first = _create_folder(self.state_dir, FALLBACK_STATE_DIR, "MAESTRO_STATE_DIR")
        checkpoints, second = _create_folder(
            self._checkpoint_folder(state), FALLBACK_CHECKPOINT_DIR, "MAESTRO_CHECKPOINT_DIR"
        )
        fallbacks = tuple(each for each in (first, second) if each)
        _warn_once(fallbacks)
        return StateFolders(state=state, checkpoints=checkpoints, fallbacks=fallbacks)

    def _checkpoint_folder(self, state: Path) -> str:
        """Return where checkpoints are stored: inside the state folder, if only that was set.

        Two state folders must not share one checkpoint folder by default: a run that is new in
        one of them would be resumed from the checkpoints of the run with the same id in the other.
        """
        is_default = isinstance(self.checkpoint_dir, DefaultFolder)
        if is_default and not isinstance(self.state_dir, DefaultFolder):
            return str(state / "checkpoints")
        return self.checkpoint_dir


@dataclass
class TokenConfig(Settings):
    """How many tokens may be spent."""

    max_tokens_per_persona: int = setting(100_000, settings.whole(0), "MAESTRO_TOKEN_LIMIT")
    max_tokens_per_execution: int = setting(500_000, settings.whole(0))
    track_usage: bool = setting(True, settings.flag)
    enforce_budget: bool = setting(True, settings.flag)


class _OfBoth:
    """A method of a configuration and of the class alike: it gets what it is called on."""

    def __init__(
        self,
        method: Callable[[ExecutionConfig | type[ExecutionConfig], str | Path], ExecutionConfig],
    ) -> None:
        self._method = method

    def __get__(
        self, config: ExecutionConfig | None, kind: type[ExecutionConfig]
    ) -> Callable[[str | Path], ExecutionConfig]:
        return partial(self._method, kind if config is None else config)


@dataclass
class ExecutionConfig(Settings):
    """All settings of an execution; an executor takes a ``frozen()`` copy when it is made.

    Escalations go to Jira (``jira_base_url``), to GitHub (``github_repository``), to a webhook, or to
    ``escalation_command``; without any of these they are recorded locally only. Tokens, and the
    addresses of webhooks, are a ``Secret``: neither ``repr`` nor ``to_dict`` shows them.
    """

    level1: Level1Config = setting(Level1Config, settings.part(Level1Config))
    level2: Level2Config = setting(Level2Config, settings.part(Level2Config))
    state: StateConfig = setting(StateConfig, settings.part(StateConfig))
    tokens: TokenConfig = setting(TokenConfig, settings.part(TokenConfig))
    timeout_seconds: float = setting(300.0, settings.positive)
    capture_metrics: bool = setting(True, settings.flag)
    log_level: str = setting("INFO", settings.log_level)
    jira_project_key: str = setting("MD", settings.project_key, "JIRA_PROJECT_KEY")
    jira_base_url: str = setting("", _jira_address, "JIRA_BASE_URL")
    jira_email: str | None = setting(None, settings.optional(settings.email), "JIRA_EMAIL")
    jira_api_token: Secret | None = setting(None, settings.secret, "JIRA_API_TOKEN")
    #: 3 is Jira Cloud, 2 is Server and Data Center; None is 3 with an e-mail address, otherwise 2.
    jira_api_version: int | None = setting(None, settings.api_version, "JIRA_API_VERSION")
    jira_issue_type: str = setting("Bug", settings.text, "JIRA_ISSUE_TYPE")
    #: Given to new tickets where the site accepts it; empty for none.
    jira_priority: str = setting("High", settings.any_text, "JIRA_PRIORITY")
    #: After this time a ticket that was created is found by Jira's search.
    jira_index_lag_seconds: float = setting(120.0, settings.number(0), "MAESTRO_JIRA_INDEX_LAG")
    #: Accounts whose comments on a ticket are answers; ``*`` for all that can comment.
    ticket_answerers: tuple[str, ...] = setting((), settings.accounts, "MAESTRO_TICKET_ANSWERERS")
    #: The longest that each phase of a request to a ticket system may take.
    ticket_timeout_seconds: float = setting(30.0, settings.positive, "MAESTRO_TICKET_TIMEOUT")
    github_repository: str = setting("", settings.repository, "MAESTRO_GITHUB_REPOSITORY")
    github_token: Secret | None = setting(None, settings.secret, "MAESTRO_GITHUB_TOKEN")
    github_base_url: str = setting(
        "https://api.github.com", _github_address, "MAESTRO_GITHUB_BASE_URL"
    )
    webhook_url: Secret | None = setting(None, settings.secret, "MAESTRO_WEBHOOK_URL")
    #: Signs what is sent to ``webhook_url``.
    webhook_secret: Secret | None = setting(None, settings.secret, "MAESTRO_WEBHOOK_SECRET")
    slack_webhook_url: Secret | None = setting(None, settings.secret, "MAESTRO_SLACK_WEBHOOK_URL")
    #: A program and its arguments: it gets the failure as JSON, and prints the key of its ticket.
    escalation_command: tuple[str, ...] = setting(
        (), settings.arguments, "MAESTRO_ESCALATION_COMMAND"
    )
    escalation_command_timeout_seconds: float = setting(
        60.0, settings.positive, "MAESTRO_ESCALATION_COMMAND_TIMEOUT"
    )

    @_OfBoth
    def in_folder(
        source: ExecutionConfig | type[ExecutionConfig],  # noqa: N805 - either of them
        state_dir: str | Path,
    ) -> ExecutionConfig:
        """Return a configuration that stores everything in one folder.

        Called on a configuration, it is a copy that has all of its other settings.
        """
        if isinstance(source, type):
            return source(state=StateConfig(state_dir=str(state_dir)))
        state = replace(
            source.state,
            state_dir=str(state_dir),
            checkpoint_dir=DefaultFolder(DEFAULT_CHECKPOINT_DIR),
        )
        return replace(  # with parts of its own, which can be changed
            source,
            level1=replace(source.level1),
            level2=replace(source.level2),
            state=state,
            tokens=replace(source.tokens),
        )


# --- creating folders --------------------------------------------------------------------------


def _create_folder(path: str, fallback: str, variable: str) -> tuple[Path, Fallback | None]:
    """Create ``path``, or its fallback if it is a default folder; return the one to use."""
    wanted = Path(path).absolute()
    if isinstance(path, DefaultFolder):
        return _create_default(wanted, fallback, variable)
    try:
        return _create_writable(wanted), None
    except FolderError as error:
        raise FolderError(
            wanted,
            f"state cannot be stored there ({error}). The folder was set explicitly, so no other is"
            f" used instead; make it writable, or set another one, in the configuration or by"
            f" {variable}",
        ) from error


def _create_default(wanted: Path, fallback: str, variable: str) -> tuple[Path, Fallback | None]:
    home = os.path.expanduser(fallback)  # noqa: PTH111 - Path's version raises without a home
    decisions = _shared.decisions
    earlier = decisions.get((wanted, home))
    if earlier is not None:
        return _create_writable(earlier.used), earlier
    try:
        _create_writable(wanted)
        decided = None
    except FolderError as error:
        if (wanted, home) in decisions:  # it was usable before, and has state
            raise
        decided = _create_fallback(wanted, Path(home), error, variable)
    decided = decisions.setdefault((wanted, home), decided)
    return decided.used if decided else wanted, decided


def _create_fallback(wanted: Path, home: Path, why: FolderError, variable: str) -> Fallback:
    remedy = f"set {variable} to a writable folder"
    if not home.is_absolute():
        raise FolderError(
            wanted, f"it cannot be used ({why}), and the home directory is unknown; {remedy}"
        )
    try:
        _create_writable(home)
    except FolderError as error:
        both = f"it cannot be used ({why}), nor can the fallback {home} ({error})"
        raise FolderError(wanted, f"{both}; {remedy}") from error
    return Fallback(wanted=wanted, used=home, reason=str(why))


def _create_writable(path: Path) -> Path:
    make_private_folder(path)
    effective = os.access in os.supports_effective_ids
    if not os.access(path, os.R_OK | os.W_OK | os.X_OK, effective_ids=effective):
        raise FolderError(path, "cannot be written")
    return path


def _warn_once(fallbacks: tuple[Fallback, ...]) -> None:
    """Log a warning about fallbacks that no warning was logged about before."""
    first = [each for each in fallbacks if each not in _shared.warned]
    _shared.warned.update(first)
    if first:
        logger.warning(
            "state is stored in %s, because %s; set MAESTRO_STATE_DIR and MAESTRO_CHECKPOINT_DIR to"
            " use other folders",
            " and ".join(str(each.used) for each in first),
            " and ".join(dict.fromkeys(each.reason for each in first)),
        )


# --- shared by the whole process ---------------------------------------------------------------


class _Shared:
    """One configuration for the process, and which default folders it uses.

    The decisions hold for the whole process, so that its parts never use two folders; a forked
    child inherits all of it. It needs no lock: each change is one operation of a dict.
    """

    def __init__(self) -> None:
        self.config: dict[str, ExecutionConfig] = {}
        #: By default folder and fallback; None where the default folder itself is used.
        self.decisions: dict[tuple[Path, str], Fallback | None] = {}
        #: The fallbacks that a warning was logged about.
        self.warned: set[Fallback] = set()


_shared = _Shared()


def frozen_config(config: object = None) -> ExecutionConfig:
    """Return a frozen copy of a configuration; of the shared one, without one."""
    if config is None:
        return get_execution_config().frozen()
    if not isinstance(config, ExecutionConfig):
        wanted = "an ExecutionConfig, or None for that of the process"
        raise settings.refused("the config", config, wanted)
    return config.frozen()


def get_execution_config() -> ExecutionConfig:
    """Return the configuration that the whole process shares; it is made at the first call."""
    found = _shared.config.get("config")
    return _shared.config.setdefault("config", ExecutionConfig()) if found is None else found


def reset_execution_config() -> None:
    """Forget the shared configuration, and which default folders could be used."""
    for each in (_shared.config, _shared.decisions, _shared.warned):
        each.clear()
