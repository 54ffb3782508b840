"""The import path that callers know: the configuration lives in ``maestro_hive.engine.config``."""

from maestro_hive.engine.config import (
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
from maestro_hive.maestro.state.stores import DEFAULT_CHECKPOINT_DIR, DEFAULT_STATE_DIR

__all__ = [
    "DEFAULT_CHECKPOINT_DIR",
    "DEFAULT_STATE_DIR",
    "ErrorCategory",
    "ExecutionConfig",
    "Level1Config",
    "Level2Config",
    "RecoveryStrategy",
    "StateConfig",
    "TokenConfig",
    "get_execution_config",
    "reset_execution_config",
]
