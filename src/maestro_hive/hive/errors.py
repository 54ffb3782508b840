"""How a run can end badly, or not be run at all.

MaestroError                     (``kernel.errors``: the root of all of ours)
├── RunFailedError               the workflow raised; the run stays failed until it is retried
├── RunCancelledError            somebody cancelled it
├── RunInactiveError                 it is not over, and no process executes it
├── UnknownRunError              there is no run of that name
└── ConfigurationError
    ├── RunMismatchError         the run belongs to another workflow, or to other arguments
    └── OutsideRunError          a step, a sleep or a wait that is in no run
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from maestro_hive.kernel.errors import ConfigurationError, MaestroError

if TYPE_CHECKING:
    from collections.abc import Mapping


class RunFailedError(MaestroError):
    """A run failed. ``__cause__`` is what its workflow raised, in the process that saw it."""

    def __init__(self, run_id: str, error: Mapping[str, Any]) -> None:
        self.run_id = run_id
        self.error_type = str(error.get("type", "Exception"))
        self.error_message = str(error.get("message", ""))
        #: The lines that led to it, as they were printed then.
        self.error_traceback = str(error.get("traceback", ""))
        super().__init__(
            f"run {run_id!r} failed: {self.error_type}: {self.error_message}; mend the cause, then"
            f" `maestro retry {run_id}` or hive.retry({run_id!r}) lets it be tried again"
        )


class RunCancelledError(MaestroError):
    """A run was cancelled, for good unless it is retried."""

    def __init__(self, run_id: str, reason: str = "") -> None:
        because = f" ({reason})" if reason else ""
        super().__init__(
            f"run {run_id!r} was cancelled{because}; `maestro retry {run_id}` or"
            f" hive.retry({run_id!r}) lets it go on"
        )
        self.run_id = run_id
        self.reason = reason


class RunInactiveError(MaestroError):
    """A run is not over, and no process executes it, so waiting for its result is pointless."""

    def __init__(self, run_id: str) -> None:
        super().__init__(
            f"run {run_id!r} is not over, and no process executes it;"
            f" `await hive.resume({run_id!r})` goes on with it"
        )
        self.run_id = run_id


class UnknownRunError(MaestroError):
    """There is no run of that name."""

    def __init__(self, run_id: str, location: str) -> None:
        super().__init__(f"there is no run {run_id!r} in {location}; `maestro runs` lists them")
        self.run_id = run_id


class RunMismatchError(ConfigurationError):
    """A run was begun as something else than what is now asked of it."""


class OutsideRunError(ConfigurationError):
    """Something that belongs in a workflow was called where no run is under way."""
