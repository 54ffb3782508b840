"""Re-exports ``maestro_hive.engine.healing`` at a path callers import from."""

from maestro_hive.engine.healing.engine import SelfHealingEngine
from maestro_hive.engine.healing.failure import (
    Failure,
    FailureType,
    Fix,
    HealingResult,
    HealingStatus,
    Severity,
)
from maestro_hive.engine.healing.healers import Healer, SyntaxHealer, TestFailureHealer
from maestro_hive.engine.healing.workspace import Workspace

__all__ = [
    "Failure",
    "FailureType",
    "Fix",
    "Healer",
    "HealingResult",
    "HealingStatus",
    "SelfHealingEngine",
    "Severity",
    "SyntaxHealer",
    "TestFailureHealer",
    "Workspace",
]
