"""Durable execution by classes: two levels of retry, a shared breaker, and the state of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from maestro_hive.kernel import load_lazily

if TYPE_CHECKING:
    from maestro_hive.engine.breaker import CircuitBreaker as CircuitBreaker
    from maestro_hive.engine.breaker import CircuitState as CircuitState
    from maestro_hive.engine.config import ErrorCategory as ErrorCategory
    from maestro_hive.engine.config import ExecutionConfig as ExecutionConfig
    from maestro_hive.engine.config import Level1Config as Level1Config
    from maestro_hive.engine.config import Level2Config as Level2Config
    from maestro_hive.engine.config import RecoveryStrategy as RecoveryStrategy
    from maestro_hive.engine.config import StateConfig as StateConfig
    from maestro_hive.engine.config import TokenConfig as TokenConfig
    from maestro_hive.engine.config import get_execution_config as get_execution_config
    from maestro_hive.engine.config import reset_execution_config as reset_execution_config
    from maestro_hive.engine.context import StepContext as StepContext
    from maestro_hive.engine.context import current as current
    from maestro_hive.engine.errors import CircuitBreakerOpen as CircuitBreakerOpen
    from maestro_hive.engine.errors import ExecutionException as ExecutionException
    from maestro_hive.engine.errors import FailureReport as FailureReport
    from maestro_hive.engine.errors import GovernanceViolation as GovernanceViolation
    from maestro_hive.engine.errors import HelpNeeded as HelpNeeded
    from maestro_hive.engine.errors import RecoverableError as RecoverableError
    from maestro_hive.engine.errors import TokenBudgetExceeded as TokenBudgetExceeded
    from maestro_hive.engine.errors import UnrecoverableError as UnrecoverableError
    from maestro_hive.engine.escalation import Escalation as Escalation
    from maestro_hive.engine.escalation import EscalationCase as EscalationCase
    from maestro_hive.engine.escalation import JiraClient as JiraClient
    from maestro_hive.engine.options import CallOptions as CallOptions
    from maestro_hive.engine.plan import UnencodableInputWarning as UnencodableInputWarning
    from maestro_hive.engine.results import ExecutionAttempt as ExecutionAttempt
    from maestro_hive.engine.results import ExecutionResult as ExecutionResult
    from maestro_hive.engine.results import ExecutionStatus as ExecutionStatus
    from maestro_hive.engine.results import Level2Result as Level2Result
    from maestro_hive.engine.settings import Secret as Secret
    from maestro_hive.unified_execution.persona_executor import PersonaExecutor as PersonaExecutor
    from maestro_hive.unified_execution.persona_executor import (
        execute_with_level1_retry as execute_with_level1_retry,
    )
    from maestro_hive.unified_execution.safety_retry import SafetyRetryWrapper as SafetyRetryWrapper
    from maestro_hive.unified_execution.safety_retry import (
        execute_with_full_retry as execute_with_full_retry,
    )
    from maestro_hive.unified_execution.state_persistence import (
        DEFAULT_CHECKPOINT_PATH as DEFAULT_CHECKPOINT_PATH,
    )
    from maestro_hive.unified_execution.state_persistence import (
        DEFAULT_STATE_PATH as DEFAULT_STATE_PATH,
    )
    from maestro_hive.unified_execution.state_persistence import ExecutionState as ExecutionState
    from maestro_hive.unified_execution.state_persistence import (
        StateCorruptionError as StateCorruptionError,
    )
    from maestro_hive.unified_execution.state_persistence import (
        StatePersistence as StatePersistence,
    )
    from maestro_hive.unified_execution.state_persistence import (
        get_state_persistence as get_state_persistence,
    )
    from maestro_hive.unified_execution.state_persistence import load_state as load_state
    from maestro_hive.unified_execution.state_persistence import save_state as save_state

# Loaded at first use, so that importing the package alone takes almost no time.
load_lazily(
    globals(),
    {
        "maestro_hive.engine.breaker": "CircuitBreaker CircuitState",
        "maestro_hive.engine.config": (
            "ErrorCategory ExecutionConfig Level1Config Level2Config RecoveryStrategy "
            "StateConfig TokenConfig get_execution_config reset_execution_config"
        ),
        "maestro_hive.engine.context": "StepContext current",
        "maestro_hive.engine.errors": (
            "CircuitBreakerOpen ExecutionException FailureReport GovernanceViolation "
            "HelpNeeded RecoverableError TokenBudgetExceeded UnrecoverableError"
        ),
        "maestro_hive.engine.escalation": "Escalation EscalationCase JiraClient",
        "maestro_hive.engine.options": "CallOptions",
        "maestro_hive.engine.plan": "UnencodableInputWarning",
        "maestro_hive.engine.settings": "Secret",
        "maestro_hive.engine.results": (
            "ExecutionAttempt ExecutionResult ExecutionStatus Level2Result"
        ),
        "maestro_hive.unified_execution.persona_executor": (
            "PersonaExecutor execute_with_level1_retry"
        ),
        "maestro_hive.unified_execution.safety_retry": "SafetyRetryWrapper execute_with_full_retry",
        "maestro_hive.unified_execution.state_persistence": (
            "DEFAULT_CHECKPOINT_PATH DEFAULT_STATE_PATH ExecutionState StateCorruptionError "
            "StatePersistence get_state_persistence load_state save_state"
        ),
    },
)
