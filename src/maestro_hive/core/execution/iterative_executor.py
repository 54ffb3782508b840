"""A door: ``IterativeExecutor`` lives in ``maestro_hive.unified_execution.iterative_executor``."""

from maestro_hive.unified_execution.iterative_executor import IterativeExecutor, IterativeResult

__all__ = ["IterativeExecutor", "IterativeResult"]
