"""Hive: what a user writes. Steps, workflows and runs, over the executors and one journal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from maestro_hive.kernel import load_lazily

if TYPE_CHECKING:
    from maestro_hive.engine.options import StepOptions as StepOptions
    from maestro_hive.engine.rates import Rate as Rate
    from maestro_hive.hive.answers import Question as Question
    from maestro_hive.hive.errors import AlreadyAnsweredError as AlreadyAnsweredError
    from maestro_hive.hive.errors import OutsideRunError as OutsideRunError
    from maestro_hive.hive.errors import RunCancelledError as RunCancelledError
    from maestro_hive.hive.errors import RunFailedError as RunFailedError
    from maestro_hive.hive.errors import RunInactiveError as RunInactiveError
    from maestro_hive.hive.errors import RunMismatchError as RunMismatchError
    from maestro_hive.hive.errors import UnknownRunError as UnknownRunError
    from maestro_hive.hive.functions import StepFunction as StepFunction
    from maestro_hive.hive.functions import WorkflowFunction as WorkflowFunction
    from maestro_hive.hive.handle import RunHandle as RunHandle
    from maestro_hive.hive.hive import Hive as Hive
    from maestro_hive.hive.runs import RunInfo as RunInfo
    from maestro_hive.hive.worker import Worker as Worker
    from maestro_hive.maestro.state.streams import StreamChunk as StreamChunk

# Loaded at first use, so that importing the package alone takes almost no time.
load_lazily(
    globals(),
    {
        "maestro_hive.engine.options": "StepOptions",
        "maestro_hive.engine.rates": "Rate",
        "maestro_hive.hive.answers": "Question",
        "maestro_hive.hive.errors": (
            "AlreadyAnsweredError OutsideRunError RunCancelledError RunFailedError "
            "RunInactiveError RunMismatchError UnknownRunError"
        ),
        "maestro_hive.hive.functions": "StepFunction WorkflowFunction",
        "maestro_hive.hive.handle": "RunHandle",
        "maestro_hive.hive.hive": "Hive",
        "maestro_hive.hive.runs": "RunInfo",
        "maestro_hive.maestro.state.streams": "StreamChunk",
        "maestro_hive.hive.worker": "Worker",
    },
)
