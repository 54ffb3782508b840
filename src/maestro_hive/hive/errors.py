"""The errors of runs: failed, cancelled, or not executable as requested.

MaestroError                     (``kernel.errors``: the root of all errors of this package)
├── RunFailedError               the workflow raised; the run stays failed until it is retried
├── RunCancelledError            it was cancelled
├── RunInactiveError             it has not ended, and no process executes it
├── UnknownRunError              there is no run with that id
└── ConfigurationError
    ├── AlreadyAnsweredError     the question of a run has its answer, and takes no other
    ├── RunMismatchError         the run belongs to another workflow, or to other arguments
    └── OutsideRunError          a step, a sleep or a wait outside of a run
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from maestro_hive.kernel.errors import ConfigurationError, MaestroError

if TYPE_CHECKING:
    from collections.abc import Mapping


#: Longer answers are cut in messages.
_LONGEST_VALUE = 100


class RunFailedError(MaestroError):
    """A run failed; ``__cause__`` is what its workflow raised, as it is recorded."""

    def __init__(self, run_id: str, error: Mapping[str, Any]) -> None:
        self.run_id = run_id
        self.error_type = str(error.get("type", "Exception"))
        self.error_message = str(error.get("message", ""))
        #: The traceback, as it was recorded.
        self.error_traceback = str(error.get("traceback", ""))
        super().__init__(
            f"run {run_id!r} failed: {self.error_type}: {self.error_message}; fix the cause, then"
            f" retry it by `maestro retry {run_id}` or hive.retry({run_id!r})"
        )


class RunCancelledError(MaestroError):
    """A run was cancelled, and stays so until it is retried."""

    def __init__(self, run_id: str, reason: str = "") -> None:
        because = f" ({reason})" if reason else ""
        super().__init__(
            f"run {run_id!r} was cancelled{because}; to resume it anyway, retry it by"
            f" `maestro retry {run_id}` or hive.retry({run_id!r})"
        )
        self.run_id = run_id
        self.reason = reason


class RunInactiveError(MaestroError):
    """A run has not ended, and no process executes it, so its result would never come."""

    def __init__(self, run_id: str) -> None:
        super().__init__(
            f"run {run_id!r} has not ended, and no process executes it;"
            f" resume it by `await hive.resume({run_id!r})`"
        )
        self.run_id = run_id


class UnknownRunError(MaestroError):
    """There is no run with that id."""

    def __init__(self, run_id: str, location: str) -> None:
        super().__init__(f"there is no run {run_id!r} in {location}; `maestro runs` lists them")
        self.run_id = run_id


class AlreadyAnsweredError(ConfigurationError):
    """A question of a run has its answer, ``value`` by ``by``, and takes no other.

    ``said``: of an escalation, which is what ``question`` names then, the answer in words.
    """

    def __init__(
        self,
        run_id: str,
        name: str,
        question: str | None,
        value: Any,
        by: str | None,
        said: str | None = None,
    ) -> None:
        if said is None:
            which = f"question {question} was answered" if question else "an early one waits for it"
            who = f" by {by}" if by else ""
            text = f"run {run_id!r} has its answer to {name!r} already: {which}{who}"
            text = f"{text}, with {_shortened(repr(value))}"
        else:
            what = f"escalation {question} of run {run_id!r}"
            text = f"{what} has its answer already: {_shortened(said)}"
        super().__init__(f"{text}; this one is not taken")
        self.run_id = run_id
        self.name = name
        self.question = question
        self.value = value
        self.by = by


def _shortened(text: str) -> str:
    return text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]}…"


class RunMismatchError(ConfigurationError):
    """A run was started with another workflow or with other arguments than it is now called with."""


class OutsideRunError(ConfigurationError):
    """A function that needs a run was called outside of a workflow."""
