"""What is logged of runs and steps: under two loggers of this package, from the configured level on.

Nothing is configured here. Each of the loggers has a handler that does nothing, so that a program
that configured no logging prints none of it.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from maestro_hive.kernel.logs import SafeLog, get_logger
from maestro_hive.kernel.redaction import redact_text

if TYPE_CHECKING:
    from collections.abc import Mapping

    from maestro_hive.engine.failures import AttemptEnd
    from maestro_hive.engine.rounds import FailedRound, Rounds
    from maestro_hive.engine.step import StepExecution


#: How runs go, and how their steps do.
RUNS = get_logger("maestro_hive.runs")
STEPS = get_logger("maestro_hive.steps")
for _each in (RUNS, STEPS):
    _each.addHandler(logging.NullHandler())

#: How much of an error's message a line has.
_MESSAGE_LENGTH = 500


class ExecutionLog(SafeLog):
    """A logger that drops what is below a level.

    Its logger, handlers and levels are the program's own, and are left as they are.
    """

    #: Drops everything below this instead, in the whole process: for the command line.
    least_of_all: int | None = None

    def __init__(self, logger: logging.Logger, level: str) -> None:
        super().__init__(logger)
        self._least = logging.getLevelNamesMapping()[level]

    def isEnabledFor(self, level: int) -> bool:  # noqa: N802 - the name that logging has for it
        """Return whether a record of this level is logged."""
        least = self._least if self.least_of_all is None else self.least_of_all
        return level >= least and self.logger.isEnabledFor(level)


def names(run_id: str | None, step: str | None = None, attempt: int | None = None) -> Any:
    """Return what every record has as its ``extra``."""
    return {"run_id": run_id, "step": step, "attempt": attempt}


def error_text(facts: Mapping[str, Any]) -> str:
    """Return ``Type: message`` of an error, as it is recorded, in one line."""
    kind, message = str(facts.get("type")), " ".join(str(facts.get("message")).split())
    message = redact_text(message)  # before it is cut: half a secret is not found
    if len(message) > _MESSAGE_LENGTH:
        message = f"{message[:_MESSAGE_LENGTH]}…"
    return kind if message in ("", kind) else f"{kind}: {message}"


# --- steps ----------------------------------------------------------------------------------------


def log_step(step: StepExecution, what: str) -> None:
    """Log what an attempt does that has not failed; for who checked that STEPS takes it."""
    log = step.spec.log
    if log is not None and log.isEnabledFor(logging.DEBUG):
        number = step.record.started_attempt()[0]
        log.debug("%s: attempt %d %s", _place(step), number, what, extra=_extra(step, number))


def log_failed_attempt(step: StepExecution, end: AttemptEnd) -> None:
    """Log that an attempt failed, by what, and what follows."""
    log = step.spec.log
    if log is not None and log.isEnabledFor(logging.WARNING):
        number = step.record.started_attempt()[0]
        if end.status == "retrying":
            then = f"the next one starts {_in_seconds(end.wait)}"
        else:
            then = f"this round is over: {end.reason}"
        log.warning(
            "%s: attempt %d failed: %s; %s",
            _place(step),
            number,
            error_text(end.error),
            then,
            extra=_extra(step, number),
        )


def log_failed_round(rounds: Rounds, failed: FailedRound) -> None:
    """Log that a round failed, where there is more than one, and what follows."""
    log, most = rounds.policy.log, rounds.policy.config.max_attempts
    if log is None or most < 2 or not log.isEnabledFor(logging.WARNING):
        return
    name, run_id = rounds.label, rounds.run_id
    wait = failed.wait
    then = (
        "it has failed for good"
        if wait is None
        else f"the next one starts {_in_seconds(wait.seconds)}"
    )
    log.warning(
        "step %s%s: round %d of %d failed; %s",
        name,
        _of_run(run_id),
        len(rounds.failed) + 1,
        most,
        then,
        extra=names(run_id, name),
    )


def _place(step: StepExecution) -> str:
    return f"step {_label(step)}{_of_run(step.record.run_id)}"


def _label(step: StepExecution) -> str:
    return step.record.label() or step.name


def _of_run(run_id: str | None) -> str:
    return "" if run_id is None else f" of run {run_id}"


def _extra(step: StepExecution, number: int) -> Any:
    return names(step.record.run_id, _label(step), number)


def _in_seconds(wait: float | None) -> str:
    return f"in {wait:.3g} s" if wait else "at once"
