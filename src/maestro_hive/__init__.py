"""Durable execution for teams of AI agents: what finished stays finished, whatever is killed."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from maestro_hive.kernel.errors import MaestroError
    from maestro_hive.maestro.state.checkpoint import CheckpointManager
    from maestro_hive.maestro.state.state_manager import StateManager
    from maestro_hive.unified_execution.config import ExecutionConfig
    from maestro_hive.unified_execution.execution_state import ExecutionState
    from maestro_hive.unified_execution.state_persistence import StatePersistence

__version__ = "0.1.0"

__all__ = [
    "CheckpointManager",
    "ExecutionConfig",
    "ExecutionState",
    "MaestroError",
    "StateManager",
    "StatePersistence",
    "__version__",
]

# Loaded when first used: importing the package alone must cost next to nothing.
_HOMES = {
    "CheckpointManager": "maestro_hive.maestro.state.checkpoint",
    "ExecutionConfig": "maestro_hive.unified_execution.config",
    "ExecutionState": "maestro_hive.unified_execution.execution_state",
    "MaestroError": "maestro_hive.kernel.errors",
    "StateManager": "maestro_hive.maestro.state.state_manager",
    "StatePersistence": "maestro_hive.unified_execution.state_persistence",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'maestro_hive' has no attribute {name!r}")
    found: object = getattr(import_module(_HOMES[name]), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted(__all__)
