"""Whether a step that was begun before may go on: after a kill, or after it was given up."""

from __future__ import annotations

from typing import TYPE_CHECKING

from maestro_hive.engine.errors import HelpNeeded, UnrecoverableError
from maestro_hive.engine.results import ExecutionResult, ExecutionStatus
from maestro_hive.unified_execution.steps import Failure

if TYPE_CHECKING:
    from maestro_hive.maestro.state.projections import StepState
    from maestro_hive.unified_execution.call import Call
    from maestro_hive.unified_execution.durable_step import DurableStep


async def go_on(call: Call, step: DurableStep) -> ExecutionResult | None:
    """Return when the next attempt may begin; raise if there must be none.

    With the strategy SKIP a step that was given up gives a result instead.
    """
    if step.state is None:
        return None
    if _is_ambiguous(call, step.state):
        raise _ambiguous(call)
    if _is_interrupted(call, step.state):
        raise await _interrupted(call, step)
    if step.is_given_up(call.max_attempts):
        return call.give_up(None, "it was given up before, and nobody asked for a retry")
    await step.wait()
    return None


def is_over(call: Call, step: DurableStep) -> bool:
    """Return whether a step that is not finished goes on only if somebody asks for a retry."""
    state = step.state
    return state is not None and (
        _is_ambiguous(call, state)
        or _is_interrupted(call, state)
        or step.is_given_up(call.max_attempts)
    )


def _is_ambiguous(call: Call, state: StepState) -> bool:
    return state.open_attempt > 0 and call.options.on_ambiguous != "rerun"


def _is_interrupted(call: Call, state: StepState) -> bool:
    return state.interruptions + (state.open_attempt > 0) > call.max_interruptions


async def _interrupted(call: Call, step: DurableStep) -> UnrecoverableError:
    times = call.max_interruptions + 1
    reason = f"its process died in the middle of it {times} times"
    if step.state is not None and step.state.open_attempt:
        await step.fail(
            Failure(
                status=ExecutionStatus.INTERRUPTED,
                counts=False,
                error={"message": reason, "type": "Interrupted", "category": "UNKNOWN"},
                reason=reason,
                wait=None,
                final=False,
            )
        )
    result = call.result(ExecutionStatus.INTERRUPTED)
    report = result.failure_report = call.report({"message": reason}, recoverable=False)
    report.suggested_fix = "find out what kills the process, then retry the step"
    message = f"{call.name} is interrupted: {reason}. To try again: options(retry=True)"
    return call.unrecoverable(message, result, reason)


def _ambiguous(call: Call) -> UnrecoverableError | HelpNeeded:
    """Return the error that keeps a step that may have had its effect from running again."""
    result = call.result(ExecutionStatus.INTERRUPTED)
    result.attempts[-1].status = ExecutionStatus.INTERRUPTED  # nobody runs it any more
    reason = "its last attempt began, and nobody knows whether it came to its end"
    report = result.failure_report = call.report({"message": reason}, recoverable=False)
    report.suggested_fix = f"look for its effect, by its effect_key {call.step.effect_key}"
    if call.options.on_ambiguous == "fail":
        return call.unrecoverable(f"{call.name} is ambiguous: {reason}", result, reason)
    return HelpNeeded(
        f"{call.name} is ambiguous: {reason}",
        report,
        total_attempts=result.attempt_count,
        suggested_actions=[
            report.suggested_fix,
            "if it had its effect: mark_task_completed",
            "if it had not: options(retry=True)",
        ],
        context={"effect_key": call.step.effect_key, "task_name": call.name, "called": False},
    )
