"""Re-exports ``maestro_hive.unified_execution.iterative_executor`` at a path callers import from."""

from maestro_hive.unified_execution.iterative_executor import IterativeExecutor, IterativeResult

__all__ = ["IterativeExecutor", "IterativeResult"]
