"""Hive: what a user writes. Steps, workflows and runs, over the executors and one journal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from maestro_hive.kernel.late_names import load_late

if TYPE_CHECKING:
    from maestro_hive.hive.errors import (
        OutsideRunError,
        RunCancelledError,
        RunFailedError,
        RunLeftError,
        RunMismatchError,
        UnknownRunError,
    )
    from maestro_hive.hive.handle import RunHandle
    from maestro_hive.hive.hive import Hive
    from maestro_hive.hive.rates import Rate
    from maestro_hive.hive.run_reading import RunInfo
    from maestro_hive.hive.step_function import StepFunction
    from maestro_hive.hive.workflow_function import WorkflowFunction

__all__ = [
    "Hive",
    "OutsideRunError",
    "Rate",
    "RunCancelledError",
    "RunFailedError",
    "RunHandle",
    "RunInfo",
    "RunLeftError",
    "RunMismatchError",
    "StepFunction",
    "UnknownRunError",
    "WorkflowFunction",
]

__getattr__, __dir__ = load_late(
    __name__,
    globals(),
    {
        "maestro_hive.hive.errors": (
            "OutsideRunError",
            "RunCancelledError",
            "RunFailedError",
            "RunLeftError",
            "RunMismatchError",
            "UnknownRunError",
        ),
        "maestro_hive.hive.handle": ("RunHandle",),
        "maestro_hive.hive.hive": ("Hive",),
        "maestro_hive.hive.rates": ("Rate",),
        "maestro_hive.hive.run_reading": ("RunInfo",),
        "maestro_hive.hive.step_function": ("StepFunction",),
        "maestro_hive.hive.workflow_function": ("WorkflowFunction",),
    },
)
