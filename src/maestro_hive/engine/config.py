"""The folders that hold state: the chosen ones, or a stand-in for a default that cannot be used.

A folder is *untouched* when nobody chose it: not by an argument, an attribute or the environment.
Where it came from decides, not how it is spelled: who passes the default's own text has chosen it.
Only an untouched folder has a stand-in. In place of a chosen one nothing would be found, and
everything would be paid for twice.
"""

from __future__ import annotations

import logging
import os
import threading
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Self

from maestro_hive.engine import settings
from maestro_hive.engine.settings import FrozenConfigError, Secret, Settings, refused, setting
from maestro_hive.kernel.errors import FolderError
from maestro_hive.kernel.files import make_private_folder

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

logger = logging.getLogger(__name__)


class Untouched(str):
    """A default folder that nobody chose; it stays so when a configuration is copied."""

    __slots__ = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Fallback:
    """A default folder that could not be used, why, and what is used instead."""

    wanted: Path
    used: Path
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StateFolders:
    """The two folders that are really used; if not ``persistent``, neither was made."""

    state: Path
    checkpoints: Path
    persistent: bool = True
    fallbacks: tuple[Fallback, ...] = ()


def folder(name: str, value: object) -> str:
    """Accept the path of a folder, with ``~`` for a home; a check of ``settings``."""
    if isinstance(value, Untouched):
        return value
    text = os.fspath(value) if isinstance(value, str | os.PathLike) else None
    if not isinstance(text, str) or not text.strip() or "\0" in text:
        raise refused(name, value, "the path of a folder")
    if not text.startswith("~"):
        return text
    try:
        return str(Path(text).expanduser())
    except RuntimeError:
        raise refused(name, value, "the path of a folder; that home is not known") from None


_folders_lock = threading.RLock()
#: What was decided about untouched folders, by folder and stand-in; None if no stand-in is needed.
#: It holds for the whole process, so that its parts never work in two places.
_decided: dict[tuple[Path, str], Fallback | None] = {}
_said: set[Fallback] = set()


def make_ready(path: str, stand_in: str, variable: str) -> tuple[Path, Fallback | None]:
    """Make ``path`` usable, or its stand-in if nobody chose it; return the one that is."""
    wanted = Path(path).absolute()
    if isinstance(path, Untouched):
        with _folders_lock:
            return _make_default_ready(wanted, stand_in, variable)
    try:
        return _make_usable(wanted), None
    except FolderError as error:
        raise FolderError(
            wanted,
            f"cannot hold state ({error}). It was chosen, so no other folder is used instead;"
            f" make it writable, or choose another in the configuration or by {variable}",
        ) from error


def _make_default_ready(wanted: Path, stand_in: str, variable: str) -> tuple[Path, Fallback | None]:
    home = os.path.expanduser(stand_in)  # noqa: PTH111 - Path's version raises without a home
    earlier = _decided.get((wanted, home))
    if earlier:
        return _make_usable(earlier.used), earlier
    try:
        _make_usable(wanted)
        fallback = None
    except FolderError as error:
        if (wanted, home) in _decided:  # state is in there already
            raise
        fallback = _fall_back(wanted, Path(home), error, variable)
    _decided[wanted, home] = fallback
    return fallback.used if fallback else wanted, fallback


def _fall_back(wanted: Path, home: Path, why: FolderError, variable: str) -> Fallback:
    way_out = f"set {variable} to a folder that can be written"
    if not home.is_absolute():
        raise FolderError(wanted, f"cannot be used ({why}), and no home is known; {way_out}")
    try:
        _make_usable(home)
    except FolderError as error:
        both = f"cannot be used ({why}), nor can its stand-in {home} ({error})"
        raise FolderError(wanted, f"{both}; {way_out}") from error
    return Fallback(wanted=wanted, used=home, reason=str(why))


def _make_usable(path: Path) -> Path:
    make_private_folder(path)
    effective = os.access in os.supports_effective_ids
    if not os.access(path, os.R_OK | os.W_OK | os.X_OK, effective_ids=effective):
        raise FolderError(path, "cannot be written")
    return path


def say_once(fallbacks: tuple[Fallback, ...]) -> None:
    """Warn about stand-ins that were not mentioned before."""
    with _folders_lock:
        notifications = [each for each in fallbacks if each not in _said]
        _said.update(notifications)
    if notifications:
        logger.warning(
            "state is kept in %s, because %s; set MAESTRO_STATE_DIR and MAESTRO_CHECKPOINT_DIR to"
            " choose other folders",
            " and ".join(str(each.used) for each in notifications),
            " and ".join(dict.fromkeys(each.reason for each in notifications)),
        )


def forget_decisions() -> None:
    """Look at the default folders anew when they are next needed."""
    with _folders_lock:
        _decided.clear()
        _said.clear()


# --- config ---


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

    state_dir: str = setting(lambda: Untouched(DEFAULT_STATE_DIR), folder, "MAESTRO_STATE_DIR")
    checkpoint_dir: str = setting(
        lambda: Untouched(DEFAULT_CHECKPOINT_DIR), folder, "MAESTRO_CHECKPOINT_DIR"
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
        state, first = make_ready(self.state_dir, FALLBACK_STATE_DIR, "MAESTRO_STATE_DIR")
        checkpoints, second = make_ready(
            self._checkpoint_dir_beside(state), FALLBACK_CHECKPOINT_DIR, "MAESTRO_CHECKPOINT_DIR"
        )
        fallbacks = tuple(each for each in (first, second) if each)
        say_once(fallbacks)
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
    forget_decisions()
