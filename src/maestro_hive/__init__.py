"""Durable execution for teams of AI agents: a completed step is never executed again."""

from __future__ import annotations

from typing import TYPE_CHECKING

from maestro_hive.kernel import load_lazily

if TYPE_CHECKING:
    from maestro_hive.engine.config import ExecutionConfig as ExecutionConfig
    from maestro_hive.engine.context import current as current
    from maestro_hive.engine.errors import BudgetExceeded as BudgetExceeded
    from maestro_hive.engine.errors import GovernanceViolation as GovernanceViolation
    from maestro_hive.engine.errors import TokenBudgetExceeded as TokenBudgetExceeded
    from maestro_hive.engine.healing.failure import Failure as Failure
    from maestro_hive.engine.healing.failure import Fix as Fix
    from maestro_hive.engine.healing.function_healers import TriedRepair as TriedRepair
    from maestro_hive.engine.policy_rules import PolicyEnforcer as PolicyEnforcer
    from maestro_hive.engine.recorded_errors import RecordedError as RecordedError
    from maestro_hive.engine.recorded_errors import StepFailure as StepFailure
    from maestro_hive.engine.recorded_errors import failure_of as failure_of
    from maestro_hive.hive.errors import RunCancelledError as RunCancelledError
    from maestro_hive.hive.errors import RunFailedError as RunFailedError
    from maestro_hive.hive.hive import Hive as Hive
    from maestro_hive.hive.run_log import RunContextFilter as RunContextFilter
    from maestro_hive.kernel.errors import MaestroError as MaestroError
    from maestro_hive.kernel.redaction import mark_secret as mark_secret
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

if __name__ != "maestro_hive":  # from the folder of the project, as ``src.maestro_hive``
    from maestro_hive.kernel.package_alias import share_package

    share_package(__name__, "maestro_hive")

# Loaded at first use, so that importing the package alone takes almost no time.
load_lazily(
    globals(),
    {
        "maestro_hive.engine.config": "ExecutionConfig",
        "maestro_hive.engine.context": "current",
        "maestro_hive.engine.healing.failure": "Failure Fix",
        "maestro_hive.engine.healing.function_healers": "TriedRepair",
        "maestro_hive.engine.errors": "BudgetExceeded GovernanceViolation TokenBudgetExceeded",
        "maestro_hive.engine.policy_rules": "PolicyEnforcer",
        "maestro_hive.engine.recorded_errors": "RecordedError StepFailure failure_of",
        "maestro_hive.hive.errors": "RunCancelledError RunFailedError",
        "maestro_hive.hive.hive": "Hive",
        "maestro_hive.hive.run_log": "RunContextFilter",
        "maestro_hive.kernel.errors": "MaestroError",
        "maestro_hive.kernel.redaction": "mark_secret",
        "maestro_hive.maestro.state.checkpoint": "CheckpointManager",
        "maestro_hive.maestro.state.codec": "register_codec",
        "maestro_hive.maestro.state.state_manager": "StateManager",
        "maestro_hive.unified_execution.persona_executor": "PersonaExecutor",
        "maestro_hive.unified_execution.safety_retry": "SafetyRetryWrapper",
        "maestro_hive.unified_execution.state_persistence": "ExecutionState StatePersistence",
    },
)
