"""Durable execution by classes: two levels of retry, a shared breaker, and the state of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from maestro_hive.kernel.lazy import load_lazily

if TYPE_CHECKING:
    from maestro_hive.engine.breaker import CircuitBreaker, CircuitState
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
    from maestro_hive.engine.context import StepContext, current
    from maestro_hive.engine.errors import (
        CircuitBreakerOpen,
        ExecutionException,
        FailureReport,
        GovernanceViolation,
        HelpNeeded,
        RecoverableError,
        TokenBudgetExceeded,
        UnrecoverableError,
    )
    from maestro_hive.engine.escalation import Escalation, EscalationCase, JiraClient
    from maestro_hive.engine.options import CallOptions
    from maestro_hive.engine.plan import UnencodableInputWarning
    from maestro_hive.engine.results import (
        ExecutionAttempt,
        ExecutionResult,
        ExecutionStatus,
        Level2Result,
    )
    from maestro_hive.unified_execution.execution_state import ExecutionState, StateCorruptionError
    from maestro_hive.unified_execution.persona_executor import (
        PersonaExecutor,
        execute_with_level1_retry,
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
    "UnencodableInputWarning",
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
__getattr__, __dir__ = load_lazily(
    __name__,
    globals(),
    {
        "maestro_hive.engine.context": ("StepContext", "current"),
        "maestro_hive.engine.breaker": ("CircuitBreaker", "CircuitState"),
        "maestro_hive.engine.options": ("CallOptions",),
        "maestro_hive.engine.config": (
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
        "maestro_hive.engine.escalation": ("Escalation", "EscalationCase", "JiraClient"),
        "maestro_hive.engine.errors": (
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
        "maestro_hive.engine.results": (
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
        "maestro_hive.engine.plan": ("UnencodableInputWarning",),
    },
)
