"""Every setting: its default, what it may be, and which environment variable gives it instead.

An argument or an attribute wins over the environment, and the environment over the default; an
empty variable counts as unset. Every value is checked when it is set, and a bad one is an error
that names the setting or the variable.

Which folders are used in the end, ``StateConfig.resolve()`` tells; see ``state_folders``.
"""
# ruff: noqa: RUF009 - a `setting` is a dataclass field

from __future__ import annotations

import threading
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Self

from maestro_hive.unified_execution import settings, state_folders
from maestro_hive.unified_execution.settings import FrozenConfigError, Secret, Settings, setting
from maestro_hive.unified_execution.state_folders import Fallback, StateFolders, Untouched

__all__ = [
    "DEFAULT_CHECKPOINT_DIR",
    "DEFAULT_STATE_DIR",
    "ErrorCategory",
    "ExecutionConfig",
    "Fallback",
    "FrozenConfigError",
    "Level1Config",
    "Level2Config",
    "RecoveryStrategy",
    "Secret",
    "StateConfig",
    "StateFolders",
    "TokenConfig",
    "get_execution_config",
    "reset_execution_config",
]

DEFAULT_STATE_DIR = "/var/maestro/state"
DEFAULT_CHECKPOINT_DIR = "/var/maestro/checkpoints"
#: Used where an untouched default folder cannot be.
FALLBACK_STATE_DIR = "~/.maestro/state"
FALLBACK_CHECKPOINT_DIR = "~/.maestro/checkpoints"


class RecoveryStrategy(StrEnum):
    """What to do about a failure."""

    #: Try again at once.
    RETRY_SAME = "retry_same"
    #: Try again after a wait that grows.
    RETRY_WITH_BACKOFF = "retry_with_backoff"
    #: Diagnose, feed the diagnosis back, and try again.
    REFLECT_AND_RETRY = "reflect_and_retry"
    #: Hand it to the next level, or to a person.
    ESCALATE = "escalate"
    #: Leave it and go on.
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
    #: Not done in time.
    TIMEOUT = "TIMEOUT"
    #: The other side answered with an error, or not at all.
    API_ERROR = "API_ERROR"
    #: The other side asked for patience.
    RATE_LIMIT = "RATE_LIMIT"
    #: Memory, disk, files or processes ran out.
    RESOURCE_ERROR = "RESOURCE_ERROR"
    #: None of these.
    UNKNOWN = "UNKNOWN"


_strategy = settings.choice(RecoveryStrategy)


@dataclass
class Level1Config(Settings):
    """The attempts inside an executor: few and quick, with healing in between.

    The first wait is ``base_delay_seconds``, each further one ``backoff_multiplier`` times as
    long, and none longer than ``max_delay_seconds``; ``jitter`` adds up to that share of it, so
    that not everybody comes back at once. ``max_interruptions`` is how often a step may be begun
    again whose process died in the middle; ``max_elapsed_seconds`` ends a step's retries by time.
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


@dataclass
class Level2Config(Settings):
    """The rounds around an executor: fewer and slower, behind a circuit breaker."""

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
    """Where state is kept, and how carefully.

    With ``enable_persistence=False`` nothing is written anywhere. With an interval of 0 no
    checkpoint is made by the clock alone. Where only ``state_dir`` was chosen, checkpoints go into
    a folder of that name inside it.
    """

    state_dir: str = setting(
        lambda: Untouched(DEFAULT_STATE_DIR), state_folders.folder, "MAESTRO_STATE_DIR"
    )
    checkpoint_dir: str = setting(
        lambda: Untouched(DEFAULT_CHECKPOINT_DIR), state_folders.folder, "MAESTRO_CHECKPOINT_DIR"
    )
    enable_persistence: bool = setting(True, settings.flag)
    auto_checkpoint_interval_seconds: float = setting(60, settings.number(0))
    verify_checksum_on_load: bool = setting(True, settings.flag)
    max_checkpoints_per_workflow: int = setting(10, settings.whole(1))

    def resolve(self) -> StateFolders:
        """Make both folders ready and return them; say once if a default was not usable.

        Raises FolderError if a folder that was chosen cannot be used.
        """
        if not self.enable_persistence:
            state, checkpoints = Path(self.state_dir), Path(self.checkpoint_dir)
            return StateFolders(
                state=state.absolute(), checkpoints=checkpoints.absolute(), persistent=False
            )
        state, first = state_folders.make_ready(
            self.state_dir, FALLBACK_STATE_DIR, "MAESTRO_STATE_DIR"
        )
        checkpoints, second = state_folders.make_ready(
            self._checkpoint_dir_beside(state), FALLBACK_CHECKPOINT_DIR, "MAESTRO_CHECKPOINT_DIR"
        )
        fallbacks = tuple(each for each in (first, second) if each)
        state_folders.say_once(fallbacks)
        return StateFolders(state=state, checkpoints=checkpoints, fallbacks=fallbacks)

    def _checkpoint_dir_beside(self, state: Path) -> str:
        """Return where checkpoints go: with the state, if only that was chosen.

        Two state folders must not share one checkpoint folder by default: a run that is new in
        one of them would be resumed from the checkpoints of its namesake in the other.
        """
        untouched = isinstance(self.checkpoint_dir, Untouched)
        if untouched and not isinstance(self.state_dir, Untouched):
            return str(state / "checkpoints")
        return self.checkpoint_dir


@dataclass
class TokenConfig(Settings):
    """How many tokens may be spent."""

    max_tokens_per_persona: int = setting(100_000, settings.whole(0), "MAESTRO_TOKEN_LIMIT")
    max_tokens_per_execution: int = setting(500_000, settings.whole(0))
    track_usage: bool = setting(True, settings.flag)
    enforce_budget: bool = setting(True, settings.flag)


@dataclass
class ExecutionConfig(Settings):
    """All settings of an execution; an executor takes a ``frozen()`` copy when it is made.

    Without ``jira_base_url`` escalations stay local. The token is a ``Secret``: neither ``repr``
    nor ``to_dict`` shows it.
    """

    level1: Level1Config = setting(Level1Config, settings.part(Level1Config))
    level2: Level2Config = setting(Level2Config, settings.part(Level2Config))
    state: StateConfig = setting(StateConfig, settings.part(StateConfig))
    tokens: TokenConfig = setting(TokenConfig, settings.part(TokenConfig))
    timeout_seconds: float = setting(300.0, settings.positive)
    capture_metrics: bool = setting(True, settings.flag)
    log_level: str = setting("INFO", settings.log_level)
    jira_project_key: str = setting("MD", settings.project_key, "JIRA_PROJECT_KEY")
    jira_base_url: str = setting("", settings.address, "JIRA_BASE_URL")
    jira_email: str | None = setting(None, settings.email, "JIRA_EMAIL")
    jira_api_token: Secret | None = setting(None, settings.secret, "JIRA_API_TOKEN")

    @classmethod
    def in_folder(cls, state_dir: str | Path) -> Self:
        """Return a configuration that keeps everything under one folder."""
        return cls(state=StateConfig(state_dir=str(state_dir)))


_lock = threading.Lock()
_shared: list[ExecutionConfig] = []


def get_execution_config() -> ExecutionConfig:
    """Return the configuration that the whole process shares, made when first asked for."""
    with _lock:
        if not _shared:
            _shared.append(ExecutionConfig())
        return _shared[0]


def reset_execution_config() -> None:
    """Forget the shared configuration, and which default folders were usable."""
    with _lock:
        _shared.clear()
    state_folders.forget_decisions()
