"""The state of a feature's execution: re-exported from ``maestro_hive.team.state``."""

from maestro_hive.team.state import (
    Checkpoint,
    ExecutionState,
    TaskState,
    TaskStatus,
    WorkerState,
    atomic_write,
    load_schema,
    validate_state,
)

__all__ = [
    "Checkpoint",
    "ExecutionState",
    "TaskState",
    "TaskStatus",
    "WorkerState",
    "atomic_write",
    "load_schema",
    "validate_state",
]
