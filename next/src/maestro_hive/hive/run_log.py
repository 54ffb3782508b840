"""What is logged of runs; and the filter that names them in the log lines of a program."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

from maestro_hive.engine.attempt import find_current
from maestro_hive.engine.execution_log import RUNS, error_text, is_logged, names
from maestro_hive.hive.run_ends import error_of
from maestro_hive.hive.workflow_loop import WorkflowLoop
from maestro_hive.journal.recorded_errors import decode_error

if TYPE_CHECKING:
    from maestro_hive.journal.entries import RunEnded
    from maestro_hive.journal.recorder import RunJournal


class RunLog:
    """Logs how one run proceeds, to the logger ``maestro_hive.runs``."""

    def __init__(self, run_id: str, level: str) -> None:
        self._run_id, self._level = run_id, level

    def started(self, workflow: str, *, is_resumed: bool) -> None:
        """Log that the run is executed, from its beginning or again."""
        self._info("run %s (%s) %s", workflow, "is resumed" if is_resumed else "started")

    def ended(self, ended: RunEnded, journal: RunJournal, root: asyncio.Task[Any]) -> None:
        """Log the end of the run: what it spent, or the traceback of its workflow's error."""
        match ended.status:
            case "success":
                state = journal.state
                spent = f"; it spent {state.tokens:,} tokens ({state.micros / 1e6:.4f} USD)"
                self._info("run %s completed%s", spent if state.tokens or state.micros else "")
            case "cancelled":
                self._info("run %s was cancelled: %s", ended.reason or "no reason was given")
            case "failed":
                error = error_of(root) or decode_error(journal.text(ended.error))
                text, extra = error_text(error), names(self._run_id)
                if is_logged(RUNS, self._level, logging.ERROR):
                    RUNS.error("run %s failed: %s", self._run_id, text, extra=extra, exc_info=error)

    def suspended(self, error: BaseException | None) -> None:
        """Log that the run has not ended, and is not executed: after an error or a polite stop."""
        reason = "it was stopped politely" if error is None else error_text(error)
        self._info("run %s is suspended: %s", reason)

    def released(self, waits_for: str | None) -> None:
        """Log that the run was released from memory while it waits."""
        self._info("run %s is released: it waits for %s", waits_for or "nothing")

    def _info(self, message: str, *words: str) -> None:
        if is_logged(RUNS, self._level, logging.INFO):
            RUNS.info(message, self._run_id, *words, extra=names(self._run_id))


class RunContextFilter(logging.Filter):
    """Gives each log record the ``run_id``, ``step`` and ``attempt`` that it comes from.

    For a handler: ``handler.addFilter(RunContextFilter())``. It refuses no record. Outside of a
    step or workflow, and in a thread that was not given its context, they are ``missing``. ``step``
    is the step's label, as in the run's events: ``name#2`` is the second one of its name.
    """

    def __init__(self, missing: object = "-") -> None:
        super().__init__()
        self.missing = missing

    def filter(self, record: logging.LogRecord) -> bool:
        """Complete a record; one that says where it comes from is not changed."""
        found = _where() if getattr(record, "run_id", None) is None else {}
        for name in ("run_id", "step", "attempt"):
            if getattr(record, name, None) is None:
                value = found.get(name)
                setattr(record, name, self.missing if value is None else value)
        return True


def _where() -> dict[str, Any]:
    """Return the run, the step and the attempt that are executed here."""
    loop = asyncio._get_running_loop()  # noqa: SLF001 - None where no loop runs
    if isinstance(loop, WorkflowLoop):
        return names(loop.host.run_id)
    attempt = find_current()
    if attempt is None:
        return {}
    return names(attempt.plan.run_id, attempt.label, attempt.number)
