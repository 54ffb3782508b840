"""What is logged of runs and steps: to two loggers of this package, from the configured level on.

Nothing is configured here. Each of the loggers has a handler that does nothing, so that a program
that configured no logging prints none of it.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from maestro_hive.engine.errors import described
from maestro_hive.kernel.logs import SafeLog, get_log
from maestro_hive.kernel.redaction import redact_text

if TYPE_CHECKING:
    from maestro_hive.engine.attempt import Attempt

#: How runs and their steps proceed.
RUNS, STEPS = get_log("maestro_hive.runs"), get_log("maestro_hive.steps")
for _each in (RUNS, STEPS):
    _each.logger.addHandler(logging.NullHandler())

#: How much of an error's message a line has.
_MESSAGE_LENGTH = 500


def is_logged(log: SafeLog, least: str, level: int) -> bool:
    """Return whether a record of this level is logged; ``least``: the one of the configuration."""
    return log.isEnabledFor(level) and level >= logging.getLevelNamesMapping()[least]


def names(run_id: str, step: str | None = None, attempt: int | None = None) -> dict[str, Any]:
    """Return what every record has as its ``extra``."""
    return {"run_id": run_id, "step": step, "attempt": attempt}


def error_text(error: BaseException) -> str:
    """Return ``Type: message`` of an error, in one line."""
    text = redact_text(" ".join(described(error).split()))  # before it is cut
    return text if len(text) <= _MESSAGE_LENGTH else f"{text[:_MESSAGE_LENGTH]}…"


def log_attempt(attempt: Attempt, what: str) -> None:
    """Log what an attempt does that has not failed."""
    if STEPS.isEnabledFor(logging.DEBUG) and _is_logged(attempt, logging.DEBUG):
        STEPS.debug("%s: attempt %d %s", _place(attempt), attempt.number, what, extra=_of(attempt))


def log_failure(attempt: Attempt, error: Exception) -> None:
    """Log that an attempt failed, by what, and what follows; and the end of a round."""
    decision = attempt.decision
    if decision is None or not _is_logged(attempt, logging.WARNING):
        return
    place, wait = _place(attempt), f"in {decision.wait:.3g} s" if decision.wait else "at once"
    then = f"the next one starts {wait}"
    is_next = decision.round == attempt.round
    over = then if is_next else f"this round is over: {decision.reason}"
    STEPS.warning(
        "%s: attempt %d failed: %s; %s",
        *(place, attempt.number, error_text(error), over),
        extra=_of(attempt),
    )
    rounds = attempt.plan.definition.rules.limit.rounds
    if rounds > 1 and not is_next:
        STEPS.warning(
            "%s: round %d of %d failed; %s",
            *(place, attempt.round, rounds, then if decision.round else "it has failed for good"),
            extra=names(attempt.plan.run_id, attempt.label),
        )


def _is_logged(attempt: Attempt, level: int) -> bool:
    return is_logged(STEPS, attempt.plan.definition.config.log_level, level)


def _place(attempt: Attempt) -> str:
    return f"step {attempt.label} of run {attempt.plan.run_id}"


def _of(attempt: Attempt) -> dict[str, Any]:
    return names(attempt.plan.run_id, attempt.label, attempt.number)
