"""Hive: what a user writes. Steps, workflows and runs, over the executors and one journal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from maestro_hive.kernel.lazy import load_lazily

if TYPE_CHECKING:
    from maestro_hive.engine.options import StepOptions
    from maestro_hive.engine.rates import Rate
    from maestro_hive.hive.errors import (
        OutsideRunError,
        RunCancelledError,
        RunFailedError,
        RunInactiveError,
        RunMismatchError,
        UnknownRunError,
    )
    from maestro_hive.hive.functions import StepFunction, WorkflowFunction
    from maestro_hive.hive.handle import RunHandle
    from maestro_hive.hive.hive import Hive
    from maestro_hive.hive.runs import RunInfo

__all__ = [
    "Hive",
    "OutsideRunError",
    "Rate",
    "RunCancelledError",
    "RunFailedError",
    "RunHandle",
    "RunInactiveError",
    "RunInfo",
    "RunMismatchError",
    "StepFunction",
    "StepOptions",
    "UnknownRunError",
    "WorkflowFunction",
]

__getattr__, __dir__ = load_lazily(
    __name__,
    globals(),
    {
        "maestro_hive.hive.errors": (
            "OutsideRunError",
            "RunCancelledError",
            "RunFailedError",
            "RunInactiveError",
            "RunMismatchError",
            "UnknownRunError",
        ),
        "maestro_hive.hive.handle": ("RunHandle",),
        "maestro_hive.hive.hive": ("Hive",),
        "maestro_hive.engine.options": ("StepOptions",),
        "maestro_hive.engine.rates": ("Rate",),
        "maestro_hive.hive.runs": ("RunInfo",),
        "maestro_hive.hive.functions": ("StepFunction", "WorkflowFunction"),
    },
)
