"""What an attempt came to: how an error ends it, and whether a result is what it looks like."""

from __future__ import annotations

import ast
import asyncio
import textwrap
import warnings

from maestro_hive.engine import retry_policy
from maestro_hive.engine.config import ErrorCategory
from maestro_hive.engine.errors import (
    HelpNeeded,
    RecoverableError,
    TokenBudgetExceeded,
    UnrecoverableError,
    parts_of,
)
from maestro_hive.engine.results import ExecutionStatus

#: What the beginning of Python source looks like.
_SOURCE = ("def ", "class ", "import ", "from ")


def passes_through(error: Exception) -> bool:
    """Return whether an error must reach the caller as it is, without another attempt."""
    return any(
        retry_policy.never_retried(part) and not isinstance(part, UnrecoverableError)
        for part in parts_of(error)
    )


def is_interruption(error: BaseException) -> bool:
    """Return whether an end looks like a stop that nobody is known to have asked for.

    A Ctrl+C that no event loop handles looks like one that the task raises itself; so does a task
    that cancels itself. They are like the death of a process: no failure, and not without end.
    """
    return isinstance(error, KeyboardInterrupt | asyncio.CancelledError)


def status_of(error: BaseException) -> ExecutionStatus:
    """Return how an execution ended that raised an error."""
    if isinstance(error, ExceptionGroup):
        inside = (status_of(part) for part in parts_of(error))
        return next((it for it in inside if it != "failed"), ExecutionStatus.FAILED)
    match error:
        case TokenBudgetExceeded():
            return ExecutionStatus.BANKRUPT
        case HelpNeeded():
            return ExecutionStatus.HELP_NEEDED
        case Exception():
            return ExecutionStatus.FAILED
        case _:
            return ExecutionStatus.CANCELLED


def check_source(output: str) -> None:
    """Raise if a result is Python source that does not parse."""
    if not output.lstrip().startswith(_SOURCE):
        return
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # they are about somebody else's source
            ast.parse(textwrap.dedent(output))
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        line = getattr(error, "lineno", None)
        where = f" in line {line}" if line else ""
        raise RecoverableError(
            f"the result is Python source that does not parse{where}: {error}",
            error_category=ErrorCategory.SYNTAX.value,
            line_number=line,
        ) from error
