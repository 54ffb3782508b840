"""Whether a step that was started before may be continued: by another process, or by a retry.

One whose last attempt has no recorded end may have had its effect (``on_ambiguous``); one whose
process died again and again is interrupted; one that was given up waits for a retry.
"""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from maestro_hive.engine.errors import HelpNeeded, UnrecoverableError
from maestro_hive.engine.failures import AttemptEnd
from maestro_hive.engine.healing.stage import continue_healing
from maestro_hive.engine.results import ExecutionStatus
from maestro_hive.engine.step_record import RunStep
from maestro_hive.maestro.state.projections import facts_of

if TYPE_CHECKING:
    from maestro_hive.engine.step import StepExecution
    from maestro_hive.maestro.state.projections import StepState


async def check_may_continue(step: StepExecution) -> None:
    """Return when the next attempt may start; raise if there must be none."""
    record = step.record
    assert isinstance(record, RunStep)
    if record.state is None:
        return
    if needs_retry(step):
        if record.state.repairs:
            await continue_healing(step, goes_on=False)
        if _is_ambiguous(step, record.state):
            raise await _ambiguous(step, record)
        if _is_interrupted(step, record.state):
            raise await _interrupted(step, record)
        step.give_up(None, "it was given up before, and no retry was requested")
    if record.state.failures:
        if step.changed is None:
            step.changed = await record.changed_arguments()
        await continue_healing(step, goes_on=True)
    await record.wait()


def needs_retry(step: StepExecution) -> bool:
    """Return whether a step that is not completed goes on only if a retry is requested."""
    record = step.record
    assert isinstance(record, RunStep)
    state = record.state
    return state is not None and (
        _is_ambiguous(step, state)
        or _is_interrupted(step, state)
        or record.is_exhausted(step.spec.attempts_in(record.round))
    )


def _is_ambiguous(step: StepExecution, state: StepState) -> bool:
    if step.spec.options.on_ambiguous == "rerun":
        return False
    stopped = state.log and facts_of(state.log[-1]).get("ambiguous", False)
    return state.open_attempt > 0 or bool(stopped)


def _is_interrupted(step: StepExecution, state: StepState) -> bool:
    return state.interruptions + (state.open_attempt > 0) > step.spec.max_interruptions


async def _interrupted(step: StepExecution, record: RunStep) -> UnrecoverableError:
    times = step.spec.max_interruptions + 1
    reason = f"its process died in the middle of it {times} times"
    if record.state is not None and record.state.open_attempt:
        error = {"message": reason, "type": "Interrupted", "category": "UNKNOWN"}
        status = ExecutionStatus.INTERRUPTED
        await record.fail(AttemptEnd(status, counts=False, error=error, reason=reason))
    result = step.result(ExecutionStatus.INTERRUPTED)
    report = result.failure_report = step.report({"message": reason}, recoverable=False)
    report.suggested_fix = "find out what kills the process, then retry the step"
    message = f"{step.name} is interrupted: {reason}. To try again: {_how_to_retry(step)}"
    return step.unrecoverable(message, result, reason, needs_retry=True)


def _how_to_retry(step: StepExecution) -> str:
    return (
        f"`maestro retry {step.record.run_id} {step.name}`, or options(retry=True) of an executor"
    )


async def _ambiguous(step: StepExecution, record: RunStep) -> UnrecoverableError | HelpNeeded:
    """Return the error that keeps a step that may have had its effect from running again."""
    result = step.result(ExecutionStatus.INTERRUPTED)
    result.attempts[-1].status = ExecutionStatus.INTERRUPTED  # no process executes it any more
    reason = "its last attempt started, and its end was never recorded"
    effect_key = step.record.effect_key
    report = result.failure_report = step.report({"message": reason}, recoverable=False)
    report.suggested_fix = f"look for its effect, by its effect_key {effect_key}"
    if step.spec.options.on_ambiguous == "fail":
        message = f"{step.name} is ambiguous: {reason}"
        return step.unrecoverable(message, result, reason, ambiguous=True)
    error = {"message": reason, "type": "Ambiguous", "category": "UNKNOWN"}
    status = ExecutionStatus.INTERRUPTED
    asked = AttemptEnd(status, counts=False, error=error, reason=reason, ambiguous=True, asked=True)
    await record.ask(asked)
    resolve = f"maestro resolve {shlex.quote(str(record.run_id))} {shlex.quote(record.label())}"
    return HelpNeeded(
        f"{step.name} is ambiguous: {reason}",
        report,
        total_attempts=result.attempt_count,
        suggested_actions=[
            report.suggested_fix,
            f"if it had its effect: `{resolve} --completed RESULT`",
            f"if it had not: `{resolve} --rerun`",
        ],
        context={
            "effect_key": effect_key,
            "task_name": step.name,
            "called": False,
            "needs_retry": True,
        },
    )
