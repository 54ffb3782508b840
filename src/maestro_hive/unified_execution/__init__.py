"""Execution that survives: two levels of retry, a shared breaker, and the state of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from maestro_hive.kernel.late_names import load_late

if TYPE_CHECKING:
    from maestro_hive.unified_execution.attempt import StepContext, current
    from maestro_hive.unified_execution.breaker import CircuitBreaker, CircuitState
    from maestro_hive.unified_execution.call_options import CallOptions
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
    from maestro_hive.unified_execution.escalation import Escalation, EscalationCase, JiraClient
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
    from maestro_hive.unified_execution.persona_executor import (
        PersonaExecutor,
        execute_with_level1_retry,
    )
    from maestro_hive.unified_execution.results import (
        ExecutionAttempt,
        ExecutionResult,
        ExecutionStatus,
        Level2Result,
    )
    from maestro_hive.unified_execution.safety_retry import (
        SafetyRetryWrapper,
        execute_with_full_retry,
    )
    from maestro_hive.unified_execution.state_persistence import (
        DEFAULT_CHECKPOINT_PATH,
        DEFAULT_STATE_PATH,
        StatePersistence,
        get_state_persistence,
        load_state,
        save_state,
    )
    from maestro_hive.unified_execution.steps import UnkeptInputWarning

__all__ = [
    "DEFAULT_CHECKPOINT_PATH",
    "DEFAULT_STATE_PATH",
    "CallOptions",
    "CircuitBreaker",
    "CircuitBreakerOpen",
    "CircuitState",
    "ErrorCategory",
    "Escalation",
    "EscalationCase",
    "ExecutionAttempt",
    "ExecutionConfig",
    "ExecutionException",
    "ExecutionResult",
    "ExecutionState",
    "ExecutionStatus",
    "FailureReport",
    "GovernanceViolation",
    "HelpNeeded",
    "JiraClient",
    "Level1Config",
    "Level2Config",
    "Level2Result",
    "PersonaExecutor",
    "RecoverableError",
    "RecoveryStrategy",
    "SafetyRetryWrapper",
    "StateConfig",
    "StateCorruptionError",
    "StatePersistence",
    "StepContext",
    "TokenBudgetExceeded",
    "TokenConfig",
    "UnkeptInputWarning",
    "UnrecoverableError",
    "current",
    "execute_with_full_retry",
    "execute_with_level1_retry",
    "get_execution_config",
    "get_state_persistence",
    "load_state",
    "reset_execution_config",
    "save_state",
]

# Loaded when first used: who wants the configuration alone need not load a database.
__getattr__, __dir__ = load_late(
    __name__,
    globals(),
    {
        "maestro_hive.unified_execution.attempt": ("StepContext", "current"),
        "maestro_hive.unified_execution.breaker": ("CircuitBreaker", "CircuitState"),
        "maestro_hive.unified_execution.call_options": ("CallOptions",),
        "maestro_hive.unified_execution.config": (
            "ErrorCategory",
            "ExecutionConfig",
            "Level1Config",
            "Level2Config",
            "RecoveryStrategy",
            "StateConfig",
            "TokenConfig",
            "get_execution_config",
            "reset_execution_config",
        ),
        "maestro_hive.unified_execution.escalation": ("Escalation", "EscalationCase", "JiraClient"),
        "maestro_hive.unified_execution.exceptions": (
            "CircuitBreakerOpen",
            "ExecutionException",
            "FailureReport",
            "GovernanceViolation",
            "HelpNeeded",
            "RecoverableError",
            "TokenBudgetExceeded",
            "UnrecoverableError",
        ),
        "maestro_hive.unified_execution.execution_state": (
            "ExecutionState",
            "StateCorruptionError",
        ),
        "maestro_hive.unified_execution.persona_executor": (
            "PersonaExecutor",
            "execute_with_level1_retry",
        ),
        "maestro_hive.unified_execution.results": (
            "ExecutionAttempt",
            "ExecutionResult",
            "ExecutionStatus",
            "Level2Result",
        ),
        "maestro_hive.unified_execution.safety_retry": (
            "SafetyRetryWrapper",
            "execute_with_full_retry",
        ),
        "maestro_hive.unified_execution.state_persistence": (
            "DEFAULT_CHECKPOINT_PATH",
            "DEFAULT_STATE_PATH",
            "StatePersistence",
            "get_state_persistence",
            "load_state",
            "save_state",
        ),
        "maestro_hive.unified_execution.steps": ("UnkeptInputWarning",),
    },
)
