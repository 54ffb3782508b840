"""The errors of team runs.

ExecutionException               (``engine.errors``)
├── RecoverableError
│   ├── CommandFailedError       a persona's command, or a Python persona's work, failed
│   ├── VerificationFailedError  the persona is done, and the verification says that the task is not
│   ├── FilesNotOwnedError       a task has changed files that it does not own
│   └── ResultRefusedError       the result of a task is not what its schema asks for
├── OwnerUnknownError            files were changed that no task owns which was executed; it stops a run
├── TaskCancelledError           the call of a task or a gate was cancelled, and the run was not
├── GateFailedError              a required gate of a level failed; nothing after it starts
└── GraphFailedError             a team run failed: tasks or gates of it did

MaestroError                     (``kernel.errors``)
└── TooManyHandoversError        the context was full more often than ``max_handovers`` allows
"""

from __future__ import annotations

from maestro_hive.engine.errors import ExecutionException, RecoverableError
from maestro_hive.kernel.errors import MaestroError


class CommandFailedError(RecoverableError):
    """The command of a persona failed; the message has the end of its output."""


class VerificationFailedError(RecoverableError):
    """The verification of a task failed; the message has the end of its output."""


class FilesNotOwnedError(RecoverableError):
    """A task has changed files that it does not own; the message names them."""


class ResultRefusedError(RecoverableError):
    """The result of a task is not what its ``output_schema`` asks for; the message has the places."""


class OwnerUnknownError(ExecutionException):
    """Files were changed that none of the tasks owns which were executed; the message names all of them."""


class TaskCancelledError(ExecutionException):
    """The call of a task or a gate was cancelled, and the run was not: what it did is no outcome."""


class GateFailedError(ExecutionException):
    """A required gate of a level failed; the message has the end of its output."""


class TooManyHandoversError(MaestroError):
    """A task's context was full too often. It is never retried: that would fill it as often."""


class GraphFailedError(ExecutionException):
    """A team run failed; ``__cause__`` is a group of the errors of its tasks and gates."""
