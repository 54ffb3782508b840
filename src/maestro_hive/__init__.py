"""Durable execution for teams of AI agents: a completed step is never executed again."""

from __future__ import annotations

from typing import TYPE_CHECKING

from maestro_hive.kernel.lazy import load_lazily

if TYPE_CHECKING:
    from maestro_hive.engine.config import ExecutionConfig as ExecutionConfig
    from maestro_hive.engine.context import current as current
    from maestro_hive.hive.errors import RunCancelledError as RunCancelledError
    from maestro_hive.hive.errors import RunFailedError as RunFailedError
    from maestro_hive.hive.hive import Hive as Hive
    from maestro_hive.kernel.errors import MaestroError as MaestroError
    from maestro_hive.maestro.state.checkpoint import CheckpointManager as CheckpointManager
    from maestro_hive.maestro.state.codec import register_codec as register_codec
    from maestro_hive.maestro.state.state_manager import StateManager as StateManager
    from maestro_hive.unified_execution.persona_executor import PersonaExecutor as PersonaExecutor
    from maestro_hive.unified_execution.safety_retry import SafetyRetryWrapper as SafetyRetryWrapper
    from maestro_hive.unified_execution.state_persistence import ExecutionState as ExecutionState
    from maestro_hive.unified_execution.state_persistence import (
        StatePersistence as StatePersistence,
    )

__version__ = "0.1.0"

__all__ = ["__version__"]

# Loaded at first use, so that importing the package alone takes almost no time.
load_lazily(
    globals(),
    {
        "maestro_hive.engine.config": "ExecutionConfig",
        "maestro_hive.engine.context": "current",
        "maestro_hive.hive.errors": "RunCancelledError RunFailedError",
        "maestro_hive.hive.hive": "Hive",
        "maestro_hive.kernel.errors": "MaestroError",
        "maestro_hive.maestro.state.checkpoint": "CheckpointManager",
        "maestro_hive.maestro.state.codec": "register_codec",
        "maestro_hive.maestro.state.state_manager": "StateManager",
        "maestro_hive.unified_execution.persona_executor": "PersonaExecutor",
        "maestro_hive.unified_execution.safety_retry": "SafetyRetryWrapper",
        "maestro_hive.unified_execution.state_persistence": "ExecutionState StatePersistence",
    },
)
