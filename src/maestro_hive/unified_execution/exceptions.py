"""The import path that callers know: the errors live in ``maestro_hive.engine.errors``."""

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

__all__ = [
    "CircuitBreakerOpen",
    "ExecutionException",
    "FailureReport",
    "GovernanceViolation",
    "HelpNeeded",
    "RecoverableError",
    "TokenBudgetExceeded",
    "UnrecoverableError",
]
