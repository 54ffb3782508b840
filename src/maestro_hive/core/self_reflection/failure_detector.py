"""Re-exports ``maestro_hive.engine.healing`` at a path callers import from."""

from maestro_hive.engine.healing.detector import FailureDetector
from maestro_hive.engine.healing.failure import Failure, FailureType, Severity

__all__ = ["Failure", "FailureDetector", "FailureType", "Severity"]
