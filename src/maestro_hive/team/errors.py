"""The errors of team runs.

ExecutionException               (``engine.errors``)
├── RecoverableError
│   ├── CommandFailedError       a persona's command, or a Python persona's work, failed
│   └── VerificationFailedError  the persona is done, and the verification says that the task is not
├── GateFailedError              a required gate of a level failed; nothing after it starts
└── GraphFailedError             a team run failed: tasks or gates of it did
"""

from __future__ import annotations

from maestro_hive.engine.errors import ExecutionException, RecoverableError


class CommandFailedError(RecoverableError):
    """The command of a persona failed; the message has the end of its output."""


class VerificationFailedError(RecoverableError):
    """The verification of a task failed; the message has the end of its output."""


class GateFailedError(ExecutionException):
    """A required gate of a level failed; the message has the end of its output."""


class GraphFailedError(ExecutionException):
    """A team run failed; ``__cause__`` is a group of the errors of its tasks and gates."""
