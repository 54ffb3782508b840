"""The path of one step, the same for Hive and for the executors.

A call is planned (``plan``), found among the run's completed steps or executed: its stages let it
in, "attempt started" is recorded, the task is called, its outcome is encoded and recorded, and only
then returned. After a failure ``retry_policy`` decides: wait and try again, or give up the round.
Rounds, behind a circuit breaker, are made around this by ``rounds``.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from logging import DEBUG
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

from maestro_hive.engine import retry_policy, values
from maestro_hive.engine.attempt import Attempt
from maestro_hive.engine.config import ErrorCategory, RecoveryStrategy
from maestro_hive.engine.context import StepContext, current_step
from maestro_hive.engine.continued_step import check_may_continue
from maestro_hive.engine.errors import (
    FailureReport,
    TokenBudgetExceeded,
    UnrecoverableError,
    text_of,
)
from maestro_hive.engine.execution_log import STEPS, log_failed_attempt, log_step
from maestro_hive.engine.failures import (
    attempt_line,
    ended_attempt,
    error_facts,
    failed_attempt,
    is_interruption,
    is_unrecoverable,
    last_error,
    note_broken,
    passes_through,
    status_of,
)
from maestro_hive.engine.healing.failure import diagnosis_of
from maestro_hive.engine.healing.stage import (
    diagnose,
    heal,
    judge,
)
from maestro_hive.engine.parameters import Hidden, places_of
from maestro_hive.engine.result_types import result_check
from maestro_hive.engine.results import ExecutionAttempt, ExecutionResult, ExecutionStatus
from maestro_hive.engine.step_record import RunStep
from maestro_hive.kernel.errors import BudgetRefusedError, StaleDocumentError, StaleLimitsError
from maestro_hive.kernel.redaction import redact_value
from maestro_hive.maestro.state import codec

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from maestro_hive.engine.attempt import Admission
    from maestro_hive.engine.breaker import Permit
    from maestro_hive.engine.failures import AttemptEnd
    from maestro_hive.engine.healing.arguments import ChangedArguments
    from maestro_hive.engine.healing.repairs import Repair
    from maestro_hive.engine.memory_step import MemoryStep
    from maestro_hive.engine.retry_policy import Decision
    from maestro_hive.engine.step_spec import StepSpec
    from maestro_hive.maestro.state.codec import Encoded
    from maestro_hive.maestro.state.records import Entry
    from maestro_hive.maestro.state.store import DocumentGuard

_ACTIVE = (ExecutionStatus.RUNNING, ExecutionStatus.RETRYING)

#: What a step was checked with that was not.
_UNCHECKED = object()
#: How often a breaker may change between being read and the record of a start.
_RENEWALS = 100

RenewedGuard: TypeAlias = "Callable[[], DocumentGuard | None]"
OwnArguments: TypeAlias = (
    "Callable[[tuple[Any, ...], dict[str, Any]], Awaitable[tuple[tuple[Any, ...], dict[str, Any]]]]"
)


class SkippedError(Exception):
    """A step failed for good, and its recovery strategy is to go on without its result."""

    def __init__(self, result: ExecutionResult, error: UnrecoverableError | None = None) -> None:
        super().__init__()
        self.result = result
        #: What is raised with another strategy.
        self.error = error


@dataclass(slots=True)
class StepExecution:
    """One step that is being executed: a task with its arguments, and what is recorded of it."""

    spec: StepSpec
    record: RunStep | MemoryStep
    name: str
    task: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    is_async: bool
    #: Makes the arguments of each attempt, where the task must not change those of its caller.
    own_arguments: OwnArguments | None = None
    #: What healers changed of its arguments, and the repairs that have no verdict yet.
    changed: ChangedArguments | None = None
    repairs: Sequence[Repair] = ()
    #: The changed arguments that it was checked with last, None for its own.
    checked: object = _UNCHECKED
    #: Called before the task is, in each attempt; and with the entry of its result.
    on_attempt: Callable[[], None] | None = None
    on_completed: Callable[[Entry], None] | None = None
    #: What the stages let the attempt in with, and the attempt that is made.
    admissions: Sequence[Admission] = ()
    attempt: Attempt | None = None

    #: A round of it is recorded under the breaker's guard.
    uses_guard: ClassVar = True

    @property
    def persona(self) -> str:
        """Who does the work."""
        return self.spec.persona

    def make(self, number: int, permit: Permit) -> Awaitable[Any]:
        """Make the attempts of one round."""
        record = self.record
        assert type(record) is RunStep
        record.round = number
        if record.state is not None or self.spec.checks:
            return self._make_checked(permit)
        return self.run_round(permit.guard, permit.renewed_guard)

    async def _make_checked(self, permit: Permit) -> Any:
        await check_may_continue(self)
        await self.check()
        return await self.run_round(permit.guard, permit.renewed_guard)

    async def check(self) -> None:
        """Raise if the step must not be executed; once, and again when healers change its arguments."""
        if self.spec.checks and self.checked is not self.changed:
            self._note(ExecutionStatus.FAILED, [])  # unless it is allowed
            for each in self.spec.checks:
                await each.check(self)
            self.checked = self.changed

    # --- one round ---

    async def run_round(
        self, guard: DocumentGuard | None = None, renewed_guard: RenewedGuard | None = None
    ) -> Any:
        """Return the output of the first attempt that succeeds; raise when none will.

        ``guard`` stands for the breaker's permit: the first attempt starts only if it holds. It is
        renewed after the stages: they may take long, and their turn would be lost with it.
        """
        budget = self.spec.budget
        try:
            while True:
                if budget.is_limited:
                    self._check_budget()
                if self.spec.stages:
                    await self._enter_stages()
                try:
                    if self.spec.stages and guard is not None and renewed_guard is not None:
                        done, output = await self._attempt_renewed(guard, renewed_guard)
                    else:
                        done, output = await self._attempt(guard)
                except (BudgetRefusedError, StaleLimitsError) as refused:
                    await self._withdraw_from_stages()
                    await self._wait_for_budget(refused)
                    continue
                finally:
                    if self.admissions:
                        self._leave_stages()
                if done:
                    return output
                guard = None
                await self.check()
                await self.record.wait()
        except BaseException as error:
            latest = self.spec.latest
            if latest is not None and latest.status in _ACTIVE:
                self._note(status_of(error))
            raise

    async def _attempt_renewed(
        self, guard: DocumentGuard | None, renewed_guard: RenewedGuard
    ) -> tuple[bool, Any]:
        """Make an attempt under a guard, and under later ones while that fails: the turn stays ours."""
        for _ in range(_RENEWALS):
            with contextlib.suppress(StaleDocumentError):
                return await self._attempt(guard)
            guard = renewed_guard()
        return await self._attempt(guard)

    async def _enter_stages(self) -> None:
        admissions: list[Admission] = []
        try:
            for stage in self.spec.stages:
                admission = await stage.enter(self)
                if admission is not None:
                    admissions.insert(0, admission)
        except BaseException:
            _leave(admissions)
            raise
        self.admissions = admissions

    async def _withdraw_from_stages(self) -> None:
        """Leave what was entered for an attempt that did not start: it has used none of it."""
        admissions, self.admissions = self.admissions, ()
        for each in admissions:
            await each.withdraw()

    def _leave_stages(self) -> None:
        """Leave what was entered; if the attempt is over and its thread is not, with the thread."""
        thread = self.attempt.thread if self.attempt is not None else None
        admissions, self.admissions, self.attempt = self.admissions, (), None
        if thread is None:
            _leave(admissions)
        else:  # at once, if it has ended
            thread.add_done_callback(lambda _: _leave(admissions))

    def _note_outlived(self, *, stopped: bool = False) -> None:
        """Have recorded, with the attempt's end, what its thread still holds.

        The run knows the thread of one that was ``stopped``: its step may be called again elsewhere.
        """
        thread = self.attempt.thread if self.attempt is not None else None
        if thread is None or thread.done():
            return
        record = self.record
        if self.admissions:
            held = [each.outlive() for each in self.admissions]
            record.still_held = [each for each in held if each is not None]
        if stopped and type(record) is RunStep:
            record.run.threads.append((record.plan.identity, thread))

    async def _attempt(  # noqa: C901, PLR0912 - the path of every step, without a call more
        self, guard: DocumentGuard | None
    ) -> tuple[bool, Any]:
        """Return whether an attempt succeeded, and its output; False: there will be another."""
        spec, record = self.spec, self.record
        if spec.latest is not None:
            spec.latest.status = ExecutionStatus.RUNNING
        attempt: Attempt | None = None
        encoded: Encoded | None = None
        reads_back = False
        try:
            await record.start(guard, spec.sizing)
            context = self._context()
            attempt = self.attempt = Attempt(context, spec.timeout, self.admissions)
            args, kwargs = self.args, self.kwargs
            if self.own_arguments is not None or self.changed is not None:
                args, kwargs = await self.arguments_of_attempt()
            output = await attempt.run(self.task, args, kwargs, is_async=self.is_async)
            if spec.counts_usage and type(output) not in codec.IMMUTABLE:
                spec.budget.note_reported(record, context.attempt, output)
            if spec.check_output is not None and type(output) is str:
                spec.check_output(output)
            if spec.options.returns is not None:
                self._check_result(output)
            if type(record) is RunStep:
                encoded = codec.encode_flat(output)
                reads_back = spec.reads_back and type(output) not in codec.IMMUTABLE
                if encoded is None:
                    encoded, output, reads_back = await values.record(output, reads_back)
                elif reads_back:  # of what is recorded: others may change the output meanwhile
                    output, reads_back = output.copy(), False
        except Exception as error:
            if attempt is None:
                raise
            if not attempt.was_called:  # and so it is neither ambiguous nor an attempt less
                self._stopped(error, asked=True)
                raise
            self._note_outlived()
            self._note_usage_of(error)
            await self._failed(error)
            return False, None
        except BaseException as error:
            self._note_outlived(stopped=True)
            # A task that was not called is not to blame.
            asked = attempt is None or attempt.was_asked_to_stop(error)
            called = attempt is not None and attempt.was_called
            self._stopped(error, asked=asked, called=called)
            raise
        await record.complete(encoded, cancelled=attempt.was_cancelled())
        self._note_completed()
        if self.repairs:
            await judge(self, completed=True)
        if reads_back and encoded is not None:
            output = await values.decode(encoded.data, "result")
        return True, output

    def _check_result(self, output: Any) -> None:
        """Raise if a result is not of the type that the step declares."""
        check = self.spec.check_result or result_check(True, self.task)
        check(output)

    async def arguments_of_attempt(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return what an attempt is called with: its own copies, and what healers changed of them."""
        arguments = self.args, self.kwargs
        if self.own_arguments is not None:
            arguments = await self.own_arguments(*arguments)
        if self.changed is not None:
            arguments = await self.changed.apply(self.task, arguments)
        return arguments

    def _note_completed(self) -> None:
        if STEPS.isEnabledFor(DEBUG):
            log_step(self, "completed the step")
        state = self.record.state
        if self.on_completed is not None and state is not None and state.completed is not None:
            self.on_completed(state.completed)

    def _context(self) -> StepContext:
        """Return what the task has while it is called."""
        record = self.record
        if STEPS.isEnabledFor(DEBUG):
            log_step(self, "starts")
        if self.on_attempt is not None:
            self.on_attempt()
        number, feedback = record.started_attempt()
        return StepContext(
            record,
            self.spec.budget,
            attempt=number,
            feedback=feedback,
            persona_id=self.spec.persona,
            task_name=self.name,
            run_id=record.run_id,
            stores_stream=self.spec.stores_streams,
        )

    def _check_budget(self) -> None:
        try:
            self.spec.budget.check(self.record)
            if self.spec.budget.is_in_money:
                self.record.check_price(self.spec.persona, self.name, self.spec.sizing)
        except TokenBudgetExceeded:
            self._note(ExecutionStatus.BANKRUPT)
            raise

    async def _wait_for_budget(self, refused: BudgetRefusedError | StaleLimitsError) -> None:
        """Return when an attempt that a shared budget refused may be tried again; raise if never."""
        record = self.record
        assert type(record) is RunStep
        if isinstance(refused, StaleLimitsError):
            record.run.ledger.refresh()
            return
        try:
            await record.wait_for_room(refused)
        except TokenBudgetExceeded:
            self._note(ExecutionStatus.BANKRUPT)
            raise

    def is_nested(self) -> bool:
        """Return whether it is executed inside of another step."""
        return current_step.get() is not None

    def _note_usage_of(self, error: Exception) -> None:
        """Count the usage that an error reports, if it does."""
        if self.spec.counts_usage and not isinstance(error, TokenBudgetExceeded):
            attempt, _ = self.record.started_attempt()
            with contextlib.suppress(
                TokenBudgetExceeded
            ):  # the step's own error is the one to tell
                self.spec.budget.note_reported(self.record, attempt, error)

    # --- failures ---

    async def _failed(self, error: Exception) -> None:
        """Record a failure; raise if there is no point in another attempt."""
        if passes_through(error):
            # What the task did was paid for: that counts, or each start would pay again.
            # In a workflow a used-up budget suspends the run, and refuses it until it is raised.
            counts = not (self.spec.reads_back and isinstance(error, TokenBudgetExceeded))
            await self._record_failed(ended_attempt(error, status_of(error), counts=counts))
            self._note(status_of(error))
            raise error
        try:
            decision = self._decide(error)
        except Exception as broken:
            # The function given as retry_on is to blame; the attempt has failed all the same.
            decision = retry_policy.Decision(False, 0.0, "the function given as retry_on failed")
            note_broken("retry_on", error, broken)
            await self._record_failed(failed_attempt(error_facts(error), decision))
            self._note(ExecutionStatus.FAILED)
            raise broken from error
        breaker_counts = None if decision.retry else self._counts_for_breaker(error)
        facts = error_facts(error)
        failure = diagnose(self, error, facts)
        diagnosis = None if failure is None else diagnosis_of(failure)
        await self._record_failed(failed_attempt(facts, decision, diagnosis))
        if not decision.retry:  # the next round, if there is one, heals it before it starts
            self.give_up(error, decision.reason, breaker_counts)
        if failure is not None:
            await heal(self, failure)
        self._note(ExecutionStatus.RETRYING)

    async def _record_failed(self, end: AttemptEnd) -> None:
        if self.spec.options.redact:
            end = end._replace(
                error=self.redacted(end.error), diagnosis=self.redacted(end.diagnosis)
            )
        await self.record.fail(end)
        log_failed_attempt(self, end)
        if self.repairs:
            await judge(self, completed=False)

    def redacted(self, facts: Any) -> Any:
        """Return what is recorded of a failure of a step that has ``redact``."""
        redact = self.spec.options.redact
        hidden = Hidden.of(redact, places_of(self.task)) if redact else None
        if hidden is None:
            return facts
        return redact_value(facts, hidden.texts(self.args, self.kwargs))

    def _decide(self, error: Exception) -> Decision:
        level1, options = self.spec.config.level1, self.spec.options
        failures = self.record.failures + 1
        strategy = level1.recovery_strategy
        wanted: retry_policy.Verdict = True
        if options.retry_on is not None:
            wanted = retry_policy.asks_for_retry(options.retry_on, error)
        delay = 0.0
        if strategy is not RecoveryStrategy.RETRY_SAME:
            delay = retry_policy.delay_before(level1, failures)
            delay = retry_policy.with_jitter(delay, level1.jitter, self.spec.rng)
        limit = options.max_elapsed_seconds
        return retry_policy.decide(
            failures=failures,
            max_attempts=self.spec.attempts_in(self.record.round),
            elapsed=self.record.elapsed(),
            max_elapsed=level1.max_elapsed_seconds if limit is None else limit,
            wanted=wanted,
            asked=retry_policy.retry_after(error, self.spec.clock.now()),
            delay=delay,
            final=isinstance(error, UnrecoverableError)
            or is_unrecoverable(error)
            or strategy is RecoveryStrategy.ESCALATE,
        )

    def _counts_for_breaker(self, error: Exception) -> bool | None:
        """Return what ``breaker_on`` says about the error that a round ends with; None without it.

        A function that fails decides nothing, and the step's own error has a note of it.
        """
        breaker_on = self.spec.options.breaker_on
        if breaker_on is None:
            return None
        try:
            return retry_policy.counts_for_breaker(breaker_on, error)
        except Exception as broken:  # noqa: BLE001 - the user's own function
            note_broken("breaker_on", error, broken)
            return None

    def _stopped(self, error: BaseException, *, asked: bool, called: bool = False) -> None:
        """Record a stop; one that no caller asked for counts, or it could be repeated for ever.

        A task that was ``called`` may have had its effect.
        """
        interrupted = not asked and is_interruption(error)
        status = ExecutionStatus.INTERRUPTED if interrupted else status_of(error)
        counts = not asked and not interrupted
        stopped = ended_attempt(error, status, counts=counts, ambiguous=called)
        self.record.stop(stopped)
        self._note(ExecutionStatus.CANCELLED)

    def give_up(
        self, error: Exception | None, reason: str, counts_for_breaker: bool | None = None
    ) -> None:
        """Raise what level 2 waits for; with the strategy SKIP, ``SkippedError``."""
        result = self.result(ExecutionStatus.FAILED)
        known = last_error(result.attempts)
        marked = not known.get("recoverable", True)
        result.failure_report = self.report(known, recoverable=not marked)
        text = "It cannot be recovered" if marked else "Level 1 retries exhausted"
        decided = {} if counts_for_breaker is None else {"counts_for_breaker": counts_for_breaker}
        made = self.unrecoverable(f"{text} for {self.name}", result, reason, error, **decided)
        if self.spec.config.level1.recovery_strategy is RecoveryStrategy.SKIP:
            raise SkippedError(result, made)
        raise made from error

    def unrecoverable(
        self,
        message: str,
        result: ExecutionResult,
        reason: str,
        error: BaseException | None = None,
        **more: bool,
    ) -> UnrecoverableError:
        """Return the error that carries a result without success, and whether the task was called."""
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
            }
            | more,
        )
        made.result = result
        return made

    def report(self, error: dict[str, Any], *, recoverable: bool) -> FailureReport:
        """Return what failed, with every attempt."""
        attempts = self.record.attempts()
        return FailureReport(
            failed_persona=self.spec.persona,
            error_category=error.get("category", ErrorCategory.UNKNOWN.value),
            details=error.get("message") or "it failed without a message",
            context=[attempt_line(attempt) for attempt in attempts],
            attempt_number=len(attempts),
            recoverable=recoverable,
        )

    # --- results ---

    def completed_result(self, output: Any) -> ExecutionResult:
        """Return the result of a step that succeeded, with its attempts."""
        healed = self.record.was_healed
        status = ExecutionStatus.RECOVERED if healed else ExecutionStatus.SUCCESS
        if isinstance(self.record, RunStep):
            result = self.record.completed_result(status, output)
            self._note(status, result)
        else:
            result = self.result(status)
            result.final_output = result.attempts[-1].output = output
            result.recovery_applied = healed
        return result

    def bankrupt_result(self, error: BaseException) -> ExecutionResult:
        """Return the result of a step whose budget is used up: what the budget is, and the usage."""
        result = self.result(ExecutionStatus.BANKRUPT)
        facts = {"category": ErrorCategory.TOKEN_BUDGET.value, "message": text_of(error)}
        result.failure_report = self.report(facts, recoverable=False)
        result.failure_report.suggested_fix = "raise the token budget, or give the step less work"
        return result

    def result(self, status: ExecutionStatus) -> ExecutionResult:
        """Return the result of a step without output."""
        attempts = self.record.attempts()
        seconds = 0.0
        if attempts and attempts[-1].ended_at is not None:
            first = attempts[0].started_at or attempts[-1].ended_at
            seconds = max(0.0, (attempts[-1].ended_at - first).total_seconds())
        result = ExecutionResult(
            execution_id=self.record.run_id or self.record.effect_key,
            task_name=self.name,
            persona_id=self.spec.persona,
            final_status=status,
            attempts=attempts,
            total_duration_seconds=seconds,
            total_tokens_used=self.record.tokens(),
        )
        self._note(status, result)
        return result

    def _note(
        self,
        status: ExecutionStatus,
        attempts: list[ExecutionAttempt] | ExecutionResult | None = None,
    ) -> None:
        if self.spec.latest is not None:
            known = self.record.attempts() if attempts is None else attempts
            self.spec.latest.set(status, known)

    async def arguments_to_check(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return what an attempt will be called with, without a copy if nothing was changed."""
        if self.changed is None:
            return self.args, self.kwargs
        return await self.arguments_of_attempt()


def _leave(admissions: Sequence[Admission]) -> None:
    for each in admissions:
        each.leave()
