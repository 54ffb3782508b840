"""Durable execution for teams of AI agents: a completed step never runs again."""

from __future__ import annotations

from typing import TYPE_CHECKING

from maestro_hive.kernel import load_lazily

if TYPE_CHECKING:
    from maestro_hive.engine.attempt import current as current
    from maestro_hive.engine.config import ExecutionConfig as ExecutionConfig
    from maestro_hive.engine.errors import GovernanceViolation as GovernanceViolation
    from maestro_hive.engine.errors import TokenBudgetExceeded as TokenBudgetExceeded
    from maestro_hive.hive.hive import Hive as Hive
    from maestro_hive.hive.run_log import RunContextFilter as RunContextFilter
    from maestro_hive.journal.recorded_errors import StepFailure as StepFailure
    from maestro_hive.journal.recorded_errors import failure_of as failure_of
    from maestro_hive.journal.user_classes import register_codec as register_codec
    from maestro_hive.kernel.errors import MaestroError as MaestroError
    from maestro_hive.kernel.errors import RecordedError as RecordedError
    from maestro_hive.kernel.errors import RunCancelledError as RunCancelledError
    from maestro_hive.kernel.errors import RunFailedError as RunFailedError
    from maestro_hive.kernel.redaction import mark_secret as mark_secret

__version__ = "0.1.0"

__all__ = ["__version__"]

if __name__ != "maestro_hive":  # from the folder of the project, as ``src.maestro_hive``
    from maestro_hive.kernel.package_alias import share_package

    share_package(__name__, "maestro_hive")

# Loaded at first use, so that importing the package alone takes almost no time.
load_lazily(
    globals(),
    {
        "maestro_hive.engine.attempt": "current",
        "maestro_hive.engine.config": "ExecutionConfig",
        "maestro_hive.engine.errors": "GovernanceViolation TokenBudgetExceeded",
        "maestro_hive.hive.hive": "Hive",
        "maestro_hive.hive.run_log": "RunContextFilter",
        "maestro_hive.journal.recorded_errors": "StepFailure failure_of",
        "maestro_hive.journal.user_classes": "register_codec",
        "maestro_hive.kernel.errors": "MaestroError RecordedError RunCancelledError RunFailedError",
        "maestro_hive.kernel.redaction": "mark_secret",
    },
)
