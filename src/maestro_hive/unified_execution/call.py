"""One call of an executor: attempts, until one succeeds or there is no point in another."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from maestro_hive.engine import retry_policy
from maestro_hive.engine.attempt import StepContext, run_attempt
from maestro_hive.engine.config import ErrorCategory, ExecutionConfig, RecoveryStrategy
from maestro_hive.engine.errors import (
    FailureReport,
    TokenBudgetExceeded,
    UnrecoverableError,
)
from maestro_hive.engine.healing import Healer, Healing, heal
from maestro_hive.engine.results import (
    ExecutionAttempt,
    ExecutionResult,
    ExecutionStatus,
)
from maestro_hive.unified_execution.durable_step import DurableStep
from maestro_hive.unified_execution.steps import Failure, error_facts, is_unrecoverable
from maestro_hive.unified_execution.verdicts import (
    check_source,
    is_interruption,
    passes_through,
    status_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from maestro_hive.engine.retry_policy import Decision, RandomSource
    from maestro_hive.kernel.clock import Clock
    from maestro_hive.unified_execution.call_options import CallOptions, Gate
    from maestro_hive.unified_execution.transient_step import TransientStep

_UNDER_WAY = (ExecutionStatus.RUNNING, ExecutionStatus.RETRYING)
_NOT_HEALED = Healing(fixed=False)


class Latest:
    """What an executor, and those made from it by ``options``, did last."""

    def __init__(self) -> None:
        self.status = ExecutionStatus.PENDING
        self._attempts: list[ExecutionAttempt] | ExecutionResult = []

    @property
    def attempts(self) -> list[ExecutionAttempt]:
        """Every attempt of it, up to now."""
        told = self._attempts
        return told if isinstance(told, list) else told.attempts

    def show(
        self, status: ExecutionStatus, attempts: list[ExecutionAttempt] | ExecutionResult
    ) -> None:
        """Take note of where it stands; of a result only the attempts count."""
        self.status, self._attempts = status, attempts


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What all calls of an executor have in common."""

    config: ExecutionConfig
    persona_id: str
    clock: Clock
    rng: RandomSource
    healer: Healer | None
    latest: Latest
    #: Counts tokens and money, and raises if there is no more of them.
    spend: Callable[[DurableStep | TransientStep, int, int, float], None]
    #: Raises if more was spent than there was.
    check_budget: Callable[[], None]


@dataclass(slots=True)
class Call:
    """A task with its arguments, under these terms."""

    terms: Terms
    options: CallOptions
    step: DurableStep | TransientStep
    task: Callable[..., Any]
    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    async def run(self) -> ExecutionResult:
        """Return the result of the first attempt that succeeds; raise when none will."""
        gate = self.options.gate
        try:
            while True:
                self._check_budget()
                result = await (self._attempt() if gate is None else self._attempt_behind(gate))
                if result is not None:
                    return result
                await self.step.wait()
        except BaseException as error:
            if self.terms.latest.status in _UNDER_WAY:
                self._show(status_of(error))
            raise

    async def _attempt_behind(self, gate: Gate) -> ExecutionResult | None:
        leave = await gate.enter()
        try:
            return await self._attempt()
        finally:
            leave()

    async def _attempt(self) -> ExecutionResult | None:
        """Return what an attempt came to; None if there will be another one."""
        step = self.step
        await self._begin()
        context = self._context()
        try:
            output = await run_attempt(context, self.timeout, self.task, self.args, self.kwargs)
            if type(output) is str and self.terms.config.level1.enable_syntax_validation:
                check_source(output)
            encoded = step.encode(output)
        except Exception as error:  # noqa: BLE001 - whatever the task raises
            return await self._failed(error)
        except BaseException as error:
            self._stopped(error, asked=context.was_asked_to_stop(error))
            raise
        await step.keep(encoded)
        return self.result(self._success(), output)

    def _check_budget(self) -> None:
        try:
            self.terms.check_budget()
        except TokenBudgetExceeded:
            self._show(ExecutionStatus.BANKRUPT)
            raise

    async def _begin(self) -> None:
        self.terms.latest.status = ExecutionStatus.RUNNING
        try:
            await self.step.begin()
        except BaseException as error:
            if not isinstance(error, Exception):
                self._stopped(error, asked=True)  # the task has not begun, so it is not to blame
            raise

    def _context(self) -> StepContext:
        step = self.step
        return StepContext(
            step,
            lambda attempt, tokens, usd: self.terms.spend(step, attempt, tokens, usd),
            attempt=step.attempt,
            feedback=step.feedback(),
            persona_id=self.terms.persona_id,
            task_name=self.name,
            run_id=step.run_id,
        )

    # --- failing ---

    async def _failed(self, error: Exception) -> ExecutionResult | None:
        """Record a failure; raise if there is no point in another attempt."""
        if passes_through(error):
            # What the task did was paid for: that counts, or each start would pay again.
            await self.step.fail(_refusal(error, status_of(error), counts=True))
            self._show(status_of(error))
            raise error
        try:
            move = self._decide(error)
        except Exception as broken:
            # The function given as retry_on is to blame; the attempt has failed all the same.
            move = retry_policy.Decision(False, 0.0, "the function given as retry_on failed")
            await self.step.fail(_failure(error_facts(error), move, _NOT_HEALED))
            self._show(ExecutionStatus.FAILED)
            raise broken from error
        facts = error_facts(error)
        try:
            healing = await self._heal(facts) if move.retry else _NOT_HEALED
        except BaseException:  # the task has failed, whatever becomes of the healer
            self.step.stop(_failure(facts, move, _NOT_HEALED))
            raise
        await self.step.fail(_failure(facts, move, healing))
        if move.retry:
            self._show(ExecutionStatus.RETRYING)
            return None
        return self.give_up(error, move.reason)

    def _decide(self, error: Exception) -> Decision:
        level1, options = self.terms.config.level1, self.options
        failures = self.step.failures + 1
        strategy = level1.recovery_strategy
        wanted = True
        if options.retry_on is not None:
            wanted = retry_policy.asks_for_retry(options.retry_on, error)  # type: ignore[assignment]
        delay = 0.0
        if strategy is not RecoveryStrategy.RETRY_SAME:
            delay = retry_policy.delay_before(level1, failures)
            delay = retry_policy.with_jitter(delay, level1.jitter, self.terms.rng)
        limit = options.max_elapsed_seconds
        return retry_policy.decide(
            failures=failures,
            max_attempts=self.max_attempts,
            elapsed=self.step.elapsed(),
            max_elapsed=level1.max_elapsed_seconds if limit is None else limit,
            wanted=wanted,
            asked=retry_policy.retry_after(error, self.terms.clock.now()),
            delay=delay,
            final=isinstance(error, UnrecoverableError)
            or is_unrecoverable(error)
            or strategy is RecoveryStrategy.ESCALATE,
        )

    @property
    def timeout(self) -> float:
        """How many seconds an attempt may take."""
        return self.options.timeout or self.terms.config.timeout_seconds

    @property
    def max_attempts(self) -> int:
        """How many attempts may fail in one round."""
        return self.options.max_attempts or self.terms.config.level1.max_attempts

    @property
    def max_interruptions(self) -> int:
        """How many attempts may be cut off by the death of their process."""
        return self.terms.config.level1.max_interruptions

    def arguments(self) -> dict[str, Any]:
        """Return the task's arguments by name, as far as they have one."""
        try:
            bound = inspect.signature(self.task).bind_partial(*self.args, **self.kwargs)
        except (TypeError, ValueError):  # it takes no such arguments, or does not say which
            return self.kwargs
        bound.apply_defaults()
        return {**bound.arguments, **self.kwargs}

    async def _heal(self, facts: dict[str, Any]) -> Healing:
        level1, healer = self.terms.config.level1, self.terms.healer
        if healer is None or not level1.enable_self_healing:
            return _NOT_HEALED
        if level1.recovery_strategy is not RecoveryStrategy.REFLECT_AND_RETRY:
            return _NOT_HEALED
        return await heal(healer, self.report(facts, recoverable=True), self.timeout)

    def _stopped(self, error: BaseException, *, asked: bool) -> None:
        """Record a stop; one that nobody asked for counts, or it could go on for ever."""
        interrupted = not asked and is_interruption(error)
        status = ExecutionStatus.INTERRUPTED if interrupted else status_of(error)
        self.step.stop(_refusal(error, status, counts=not asked and not interrupted))
        self._show(ExecutionStatus.CANCELLED)

    def give_up(self, error: Exception | None, reason: str) -> ExecutionResult:
        """Raise what level 2 waits for; with the strategy SKIP, return a result that failed."""
        result = self.result(ExecutionStatus.FAILED)
        last = next((each for each in reversed(result.attempts) if each.error_message), None)
        known = _facts_of(last)
        marked = not known.get("recoverable", True)
        result.failure_report = self.report(known, recoverable=not marked)
        if self.terms.config.level1.recovery_strategy is RecoveryStrategy.SKIP:
            return result
        text = "It cannot be recovered" if marked else "Level 1 retries exhausted"
        message = f"{text} for {self.name}"
        raise self.unrecoverable(message, result, reason, error) from error

    def unrecoverable(
        self, message: str, result: ExecutionResult, reason: str, error: BaseException | None = None
    ) -> UnrecoverableError:
        """Return the error that carries a result without success; it tells if the task was called."""
        made = UnrecoverableError(
            message,
            result.failure_report,
            error,
            context={
                "execution_id": result.execution_id,
                "task_name": self.name,
                "attempts": result.attempt_count,
                "reason": reason,
                "called": error is not None,
            },
        )
        made.result = result
        return made

    def report(self, error: dict[str, Any], *, recoverable: bool) -> FailureReport:
        """Return what failed, with every attempt."""
        attempts = self.step.attempts()
        return FailureReport(
            failed_persona=self.terms.persona_id,
            error_category=error.get("category", ErrorCategory.UNKNOWN.value),
            details=error.get("message") or "it failed without a message",
            context=[_line(attempt) for attempt in attempts],
            attempt_number=len(attempts),
            recoverable=recoverable,
        )

    # --- results ---

    def _success(self) -> ExecutionStatus:
        if self.step.failures and any(each.healing_applied for each in self.step.attempts()):
            return ExecutionStatus.RECOVERED
        return ExecutionStatus.SUCCESS

    def result(self, status: ExecutionStatus, output: Any = None) -> ExecutionResult:
        """Return what the call came to."""
        step = self.step
        if status.done and isinstance(step, DurableStep):
            result = step.completed_result(self.name, status, output)
        else:
            result = make_result(step, self.name, self.terms.persona_id, status, output)
        self.terms.latest.show(status, result)
        return result

    def _show(self, status: ExecutionStatus) -> None:
        self.terms.latest.show(status, self.step.attempts())


def make_result(
    step: DurableStep | TransientStep,
    name: str,
    persona_id: str,
    status: ExecutionStatus,
    output: Any = None,
) -> ExecutionResult:
    """Return the result of a step, as its attempts tell it."""
    attempts = step.attempts()
    if attempts and status.done:
        attempts[-1].output = output
    seconds = 0.0
    if attempts and attempts[-1].ended_at is not None:
        seconds = max(0.0, (attempts[-1].ended_at - attempts[0].started_at).total_seconds())
    return ExecutionResult(
        execution_id=step.run_id or step.effect_key,
        task_name=name,
        persona_id=persona_id,
        final_status=status,
        attempts=attempts,
        total_duration_seconds=seconds,
        total_tokens_used=step.tokens(),
        final_output=output,
        recovery_applied=status is ExecutionStatus.RECOVERED,
    )


def _refusal(error: BaseException, status: ExecutionStatus, *, counts: bool) -> Failure:
    """Return what is recorded of an attempt after which the error itself goes on its way."""
    return Failure(
        status=status,
        counts=counts,
        error=error_facts(error),
        reason="it is not retried",
        wait=None,
        final=False,
    )


def _failure(facts: dict[str, Any], move: Decision, healing: Healing) -> Failure:
    return Failure(
        status=ExecutionStatus.RETRYING if move.retry else ExecutionStatus.FAILED,
        counts=True,
        error=facts,
        reason=move.reason,
        wait=move.wait if move.retry and not healing.fixed else None,
        final=not move.retry,
        healed=healing.fixed,
        healing_error=healing.error,
    )


def _facts_of(attempt: ExecutionAttempt | None) -> dict[str, Any]:
    if attempt is None:
        return {}
    return {
        "message": attempt.error_message,
        "category": attempt.metrics.get("error_category", ErrorCategory.UNKNOWN.value),
        "recoverable": attempt.metrics.get("recoverable", True),
    }


def _line(attempt: ExecutionAttempt) -> str:
    """Return one attempt as a line of a report."""
    if attempt.error_message is not None:
        told = f"{attempt.status.value}: {attempt.error_type}: {attempt.error_message}"
    else:
        told = attempt.status.value
    return f"attempt {attempt.attempt_number} at {attempt.started_at.isoformat()}: {told}"
