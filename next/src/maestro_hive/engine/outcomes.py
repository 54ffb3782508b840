"""The entries that an attempt or a step ends with."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
from msgspec import UNSET, Raw

from maestro_hive.engine.config import ErrorCategory
from maestro_hive.engine.error_signs import classify
from maestro_hive.engine.errors import text_of
from maestro_hive.journal.entries import (
    AttemptFailed,
    AttemptStarted,
    StepClosed,
    StepCompleted,
    WaitStarted,
)
from maestro_hive.journal.recorded_errors import encode_error
from maestro_hive.kernel.redaction import redact_text, redact_value

if TYPE_CHECKING:
    from maestro_hive.engine.attempt import Attempt
    from maestro_hive.engine.plan import Plan
    from maestro_hive.journal.state import StepState
    from maestro_hive.journal.values import Encoded

#: How much of an error's message the next attempt is told.
_LONGEST_FEEDBACK = 2_000


def attempt_started(attempt: Attempt) -> AttemptStarted:
    """Return the entry of an attempt that starts; the first one has the input."""
    plan = attempt.plan
    definition = plan.definition
    stored = plan.stored_input() if attempt.number == 1 else None
    return AttemptStarted(
        step=attempt.step,
        attempt=attempt.number,
        identity=plan.identity,
        name=definition.name,
        persona=definition.persona,
        input=UNSET if stored is None else Raw(stored),
        options=definition.recorded_options,
    )


def step_completed(attempt: Attempt, result: Encoded) -> StepCompleted:
    """Return the entry of a step that has a result."""
    return StepCompleted(
        step=attempt.step, attempt=attempt.number, result=Raw(result.data), despite=attempt.despite
    )


def attempt_failed(attempt: Attempt, retry_at: float) -> AttemptFailed:
    """Return the entry of an attempt that failed, and when the next one may start; 0: none."""
    error, decision = attempt.error, attempt.decision
    assert error is not None
    assert decision is not None
    category = classify(error)
    return AttemptFailed(
        step=attempt.step,
        attempt=attempt.number,
        status="timeout" if category is ErrorCategory.TIMEOUT else "failed",
        error=Raw(recorded_error(attempt.plan, error)),
        category=category,
        round=decision.round or attempt.round,
        retry_at=int(retry_at * 1e6),
        feedback=attempt.feedback,
    )


def feedback_of(attempt: Attempt, error: Exception) -> str:
    """Return a sentence on a failure, for the prompt of the next attempt."""
    category = classify(error)
    known = "" if category is ErrorCategory.UNKNOWN else f"{category}: "
    message = text_of(error) or type(error).__name__
    if attempt.plan.definition.options.redact:
        message = redact_text(message, _hidden(attempt.plan))
    return f"Attempt {attempt.number} failed: {known}{message[:_LONGEST_FEEDBACK]}"


def attempt_stopped(attempt: Attempt) -> AttemptFailed:
    """Return the entry of an attempt that was ended from outside: no failure, no interruption."""
    return AttemptFailed(
        step=attempt.step, attempt=attempt.number, status="stopped", round=attempt.round
    )


def step_failed(plan: Plan, error: Exception, *, despite: bool = False) -> StepClosed:
    """Return the entry of a step that ends with an error, or is skipped."""
    return StepClosed(
        identity=plan.identity,
        how="skipped" if plan.definition.rules.skips else "failed",
        error=Raw(recorded_error(plan, error)),
        despite=despite,
    )


def ambiguity(plan: Plan, step: StepState) -> WaitStarted:
    """Return the entry of a step about which a person decides."""
    return WaitStarted(
        identity=plan.identity, name=plan.definition.name, what="ambiguous", step=step.number
    )


def recorded_error(plan: Plan, error: Exception) -> bytes:
    """Return an error as it is recorded, without the texts of arguments that are redacted."""
    data = encode_error(error)
    if not plan.definition.options.redact:
        return data
    return msgspec.json.encode(redact_value(msgspec.json.decode(data), _hidden(plan)))


def _hidden(plan: Plan) -> tuple[str, ...]:
    return plan.definition.parameters.hidden_texts(plan.call.given)
