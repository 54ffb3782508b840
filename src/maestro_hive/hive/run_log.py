"""What is logged of runs, and the filter that gives log lines of a workflow the names of where they are."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from maestro_hive.engine.context import current_step
from maestro_hive.engine.execution_log import RUNS, ExecutionLog, error_text, names
from maestro_hive.engine.failures import plain_text
from maestro_hive.hive.branches import active_run_or_none

if TYPE_CHECKING:
    from collections.abc import Mapping

    from maestro_hive.hive.active_run import ActiveRun
    from maestro_hive.hive.functions import WorkflowFunction
    from maestro_hive.maestro.state.projections import RunState


class RunLog:
    """What a hive logs of its runs: to the logger ``maestro_hive.runs``."""

    def __init__(self, level: str) -> None:
        self._log = ExecutionLog(RUNS, level)

    def started(self, active: ActiveRun, workflow: WorkflowFunction[..., Any]) -> None:
        """Log that a run is executed, from its beginning or again."""
        if RUNS.isEnabledFor(logging.INFO):
            what = "is resumed" if active.resumed_at else "started"
            self._info(active.run_id, "run %s (%s) %s", workflow.name, what)

    def completed(self, run_id: str, state: RunState) -> None:
        """Log that a run has its result, and what it spent and saved."""
        if RUNS.isEnabledFor(logging.INFO):
            self._info(run_id, "run %s completed%s", _money_words(state))

    def cancelled(self, run_id: str, reason: str) -> None:
        """Log that a run was cancelled."""
        self._info(run_id, "run %s was cancelled: %s", reason or "no reason was given")

    def suspended(self, run_id: str, error: BaseException | None) -> None:
        """Log that a run is no longer executed, and has not ended: by an error, or a polite stop."""
        reason = "it was asked to stop" if error is None else plain_text(error)
        self._info(run_id, "run %s is suspended: %s", " ".join(reason.split()))

    def released(self, run_id: str, until: str) -> None:
        """Log that a waiting run was released from memory, and until when."""
        self._info(run_id, "run %s is released: it waits for %s", until)

    def failed(self, run_id: str, facts: Mapping[str, Any], error: BaseException) -> None:
        """Log that a run failed, with the traceback of what its workflow raised."""
        text = error_text(facts)
        self._log.error("run %s failed: %s", run_id, text, extra=names(run_id), exc_info=error)

    def _info(self, run_id: str, message: str, *words: str) -> None:
        self._log.info(message, run_id, *words, extra=names(run_id))


def _money_words(state: RunState) -> str:
    if not state.spent:
        return ""
    tokens = sum(tokens for tokens, _ in state.spent.values())
    usd = sum(usd for _, usd in state.spent.values())
    words = f"; it spent {tokens:,} tokens ({usd:.4f} USD)"
    if state.saved[0] or state.saved[1]:
        words += f", and resuming saved {state.saved[0]:,} tokens ({state.saved[1]:.4f} USD)"
    return words


class RunContextFilter(logging.Filter):
    """Gives each log record ``run_id``, ``step`` and ``attempt``: of the step or workflow it is from.

    For a handler: ``handler.addFilter(RunContextFilter())``. It refuses no record. Outside of a step
    or workflow, and in a thread that was not given its context, they are ``missing``. ``step`` is the
    step's label, as in the run's events: ``name#2`` is the second one of its name.
    """

    def __init__(self, missing: object = "-") -> None:
        super().__init__()
        self.missing = missing

    def filter(self, record: logging.LogRecord) -> bool:
        """Complete a record; one that says where it is from is not changed."""
        found = _where() if getattr(record, "run_id", None) is None else ()
        for name, value in zip(("run_id", "step", "attempt"), found, strict=False):
            if getattr(record, name, None) is None:
                setattr(record, name, value)
        for name in ("run_id", "step", "attempt"):
            if getattr(record, name, None) is None:
                setattr(record, name, self.missing)
        return True


def _where() -> tuple[str | None, str | None, int | None]:
    """Return the run, the step and the attempt that are executed here."""
    active, step = active_run_or_none(), current_step.get()
    run_id = None if active is None else active.run_id
    if step is None or (active is not None and step is active.around):
        return run_id, None, None
    return step.run_id or run_id, step.label, step.attempt
