"""Execution that survives: configuration, errors, and the state of an execution."""

from maestro_hive.unified_execution.config import (
    ErrorCategory,
    ExecutionConfig,
    Level1Config,
    Level2Config,
    RecoveryStrategy,
    StateConfig,
    TokenConfig,
    get_execution_config,
    reset_execution_config,
)
from maestro_hive.unified_execution.exceptions import (
    CircuitBreakerOpen,
    ExecutionException,
    FailureReport,
    GovernanceViolation,
    HelpNeeded,
    RecoverableError,
    TokenBudgetExceeded,
    UnrecoverableError,
)
from maestro_hive.unified_execution.execution_state import ExecutionState, StateCorruptionError
from maestro_hive.unified_execution.state_persistence import (
    DEFAULT_CHECKPOINT_PATH,
    DEFAULT_STATE_PATH,
    StatePersistence,
    get_state_persistence,
    load_state,
    save_state,
)

__all__ = [
    "DEFAULT_CHECKPOINT_PATH",
    "DEFAULT_STATE_PATH",
    "CircuitBreakerOpen",
    "ErrorCategory",
    "ExecutionConfig",
    "ExecutionException",
    "ExecutionState",
    "FailureReport",
    "GovernanceViolation",
    "HelpNeeded",
    "Level1Config",
    "Level2Config",
    "RecoverableError",
    "RecoveryStrategy",
    "StateConfig",
    "StateCorruptionError",
    "StatePersistence",
    "TokenBudgetExceeded",
    "TokenConfig",
    "UnrecoverableError",
    "get_execution_config",
    "get_state_persistence",
    "load_state",
    "reset_execution_config",
    "save_state",
]
