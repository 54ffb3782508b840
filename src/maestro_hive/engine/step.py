"""The path of one step, the same for Hive and for the executors.

A call is planned (``plan``), found among the run's completed steps or executed: its stages let it
in, "attempt started" is recorded, the task is called, its outcome is encoded and recorded, and only
then returned. After a failure ``retry_policy`` decides: wait and try again, or give up the round.
Rounds, behind a circuit breaker, are made around this by ``rounds``.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from maestro_hive.engine import retry_policy, values
from maestro_hive.engine.attempt import Attempt
from maestro_hive.engine.config import ErrorCategory, ExecutionConfig, RecoveryStrategy
from maestro_hive.engine.context import StepContext
from maestro_hive.engine.errors import (
    FailureReport,
    HelpNeeded,
    TokenBudgetExceeded,
    UnrecoverableError,
)
from maestro_hive.engine.failures import (
    Failure,
    attempt_line,
    check_source,
    ended_attempt,
    error_facts,
    failed_attempt,
    is_interruption,
    is_unrecoverable,
    last_error,
    passes_through,
    status_of,
)
from maestro_hive.engine.healing import NOT_HEALED, Healer, Healing, heal
from maestro_hive.engine.results import ExecutionAttempt, ExecutionResult, ExecutionStatus
from maestro_hive.engine.step_record import MemoryStep, RunStep
from maestro_hive.kernel.errors import ConfigurationError, StaleDocumentError
from maestro_hive.maestro.state import codec

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from random import Random

    from maestro_hive.engine.budget import Budget
    from maestro_hive.engine.open_run import OpenRun
    from maestro_hive.engine.options import Options
    from maestro_hive.engine.retry_policy import Decision
    from maestro_hive.kernel.clock import Clock
    from maestro_hive.maestro.state.codec import Encoded
    from maestro_hive.maestro.state.projections import StepState
    from maestro_hive.maestro.state.store import DocumentGuard

_ACTIVE = (ExecutionStatus.RUNNING, ExecutionStatus.RETRYING)

#: How often a breaker may change between being read and the record of a start.
_RENEWALS = 100

#: The steps that this task is inside of.
_inside: ContextVar[frozenset[tuple[str, bytes]]] = ContextVar("steps_inside", default=frozenset())

Leave: TypeAlias = "Callable[[], None]"
RenewedGuard: TypeAlias = "Callable[[], DocumentGuard | None]"
OwnArguments: TypeAlias = (
    "Callable[[tuple[Any, ...], dict[str, Any]], Awaitable[tuple[tuple[Any, ...], dict[str, Any]]]]"
)


class StepCheck(Protocol):
    """What a step is checked by before its first attempt."""

    async def check(self, step: StepExecution) -> None:
        """Raise if the step must not be executed."""
        ...


class Stage(Protocol):
    """What every attempt of a step has to pass before it starts."""

    async def enter(self, step: StepExecution) -> Leave | None:
        """Return when the attempt may start, with what is called when it ended; or raise.

        The attempt's time limit does not run meanwhile.
        """
        ...


class SkippedError(Exception):
    """A step failed for good, and its recovery strategy is to go on without its result."""

    def __init__(self, result: ExecutionResult) -> None:
        super().__init__()
        self.result = result


class Latest:
    """What an executor, and those made from it by ``options``, did last."""

    def __init__(self) -> None:
        self.status = ExecutionStatus.PENDING
        self._attempts: list[ExecutionAttempt] | ExecutionResult = []

    @property
    def attempts(self) -> list[ExecutionAttempt]:
        """Every attempt of it, up to now."""
        known = self._attempts
        return known if isinstance(known, list) else known.attempts

    def set(
        self, status: ExecutionStatus, attempts: list[ExecutionAttempt] | ExecutionResult
    ) -> None:
        """Note its status; of a result only the attempts count."""
        self.status, self._attempts = status, attempts


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSpec:
    """How a step is executed: what all its calls have in common."""

    config: ExecutionConfig
    persona: str
    options: Options
    clock: Clock
    rng: Random
    budget: Budget
    #: What a step is checked by, once, before its first attempt.
    checks: tuple[StepCheck, ...] = ()
    #: What each attempt enters, in order.
    stages: tuple[Stage, ...] = ()
    healer: Healer | None = None
    latest: Latest | None = None
    #: Whether the caller gets the recorded result, decoded, and not the object itself.
    reads_back: bool = False

    #: How many seconds an attempt may take.
    timeout: float = field(init=False)
    #: How many attempts may fail in one round.
    max_attempts: int = field(init=False)
    #: How many attempts may be cut off by the death of their process.
    max_interruptions: int = field(init=False)
    #: Whether a result that starts like Python source must parse.
    checks_source: bool = field(init=False)

    def __post_init__(self) -> None:
        level1, options = self.config.level1, self.options
        chosen = {
            "timeout": options.timeout or self.config.timeout_seconds,
            "max_attempts": options.max_attempts or level1.max_attempts,
            "max_interruptions": level1.max_interruptions,
            "checks_source": level1.enable_syntax_validation,
        }
        for name, value in chosen.items():
            object.__setattr__(self, name, value)


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

    async def check(self) -> None:
        """Raise if the step must not be executed."""
        if self.spec.checks:
            self._note(ExecutionStatus.FAILED, [])  # unless it is allowed
            for each in self.spec.checks:
                await each.check(self)

    # --- one round ---

    async def run_round(
        self, guard: DocumentGuard | None = None, renewed_guard: RenewedGuard | None = None
    ) -> Any:
        """Return the output of the first attempt that succeeds; raise when none will.

        ``guard`` stands for the breaker's permit: the first attempt starts only if it holds. It is
        renewed after the stages: they may take long, and their turn would be lost with it.
        """
        try:
            while True:
                self._check_budget()
                leaving: list[Leave] | tuple[()]
                leaving = () if not self.spec.stages else await self._enter_stages()
                try:
                    if self.spec.stages and guard is not None and renewed_guard is not None:
                        done, output = await self._attempt_renewed(renewed_guard)
                    else:
                        done, output = await self._attempt(guard)
                finally:
                    for leave in leaving:
                        leave()
                if done:
                    return output
                guard = None
                await self.record.wait()
        except BaseException as error:
            latest = self.spec.latest
            if latest is not None and latest.status in _ACTIVE:
                self._note(status_of(error))
            raise

    async def _attempt_renewed(self, renewed_guard: RenewedGuard) -> tuple[bool, Any]:
        """Make an attempt under a guard of now, and of later if that failed: the turn stays ours."""
        for _ in range(_RENEWALS):
            guard = renewed_guard()
            with contextlib.suppress(StaleDocumentError):
                return await self._attempt(guard)
        return await self._attempt(renewed_guard())

    async def _enter_stages(self) -> list[Leave]:
        leaving: list[Leave] = []
        try:
            for stage in self.spec.stages:
                leave = await stage.enter(self)
                if leave is not None:
                    leaving.insert(0, leave)
        except BaseException:
            for leave in leaving:
                leave()
            raise
        return leaving

    async def _attempt(self, guard: DocumentGuard | None) -> tuple[bool, Any]:
        """Return whether an attempt succeeded, and its output; False: there will be another."""
        spec, record = self.spec, self.record
        if spec.latest is not None:
            spec.latest.status = ExecutionStatus.RUNNING
        try:
            await record.start(guard)
        except BaseException as error:
            if not isinstance(error, Exception):
                self._stopped(error, asked=True)  # the task was not called, so it is not to blame
            raise
        number, feedback = record.started_attempt()
        context = StepContext(
            record,
            self._spend,
            attempt=number,
            feedback=feedback,
            persona_id=spec.persona,
            task_name=self.name,
            run_id=record.run_id,
        )
        attempt = Attempt(context, spec.timeout)
        encoded: Encoded | None = None
        try:
            args, kwargs = self.args, self.kwargs
            if self.own_arguments is not None:
                args, kwargs = await self.own_arguments(args, kwargs)
            output = await attempt.run(self.task, args, kwargs, is_async=self.is_async)
            if spec.checks_source and type(output) is str:
                check_source(output)
            if type(record) is RunStep:
                encoded = (
                    codec.encode(output, "result")
                    if codec.is_small((output,))
                    else await values.encode(output, "result")
                )
        except Exception as error:  # noqa: BLE001 - whatever the task raises
            await self._failed(error)
            return False, None
        except BaseException as error:
            self._stopped(error, asked=attempt.was_asked_to_stop(error))
            raise
        await record.complete(encoded)
        if spec.reads_back and encoded is not None and type(output) not in codec.IMMUTABLE:
            output = await values.decode(encoded.data, "result")
        return True, output

    def _check_budget(self) -> None:
        try:
            self.spec.budget.check()
        except TokenBudgetExceeded:
            self._note(ExecutionStatus.BANKRUPT)
            raise

    def _spend(self, attempt: int, tokens: int, usd: float) -> None:
        self.spec.budget.spend(self.record, attempt, tokens, usd)

    # --- failures ---

    async def _failed(self, error: Exception) -> None:
        """Record a failure; raise if there is no point in another attempt."""
        if passes_through(error):
            # What the task did was paid for: that counts, or each start would pay again.
            await self.record.fail(ended_attempt(error, status_of(error), counts=True))
            self._note(status_of(error))
            raise error
        try:
            decision = self._decide(error)
        except Exception as broken:
            # The function given as retry_on is to blame; the attempt has failed all the same.
            decision = retry_policy.Decision(False, 0.0, "the function given as retry_on failed")
            await self.record.fail(failed_attempt(error_facts(error), decision, NOT_HEALED))
            self._note(ExecutionStatus.FAILED)
            raise broken from error
        facts = error_facts(error)
        try:
            healing = await self._heal(facts) if decision.retry else NOT_HEALED
        except BaseException:  # the task has failed, whatever becomes of the healer
            self.record.stop(failed_attempt(facts, decision, NOT_HEALED))
            raise
        await self.record.fail(failed_attempt(facts, decision, healing))
        if not decision.retry:
            self.give_up(error, decision.reason)
        self._note(ExecutionStatus.RETRYING)

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
            max_attempts=self.spec.max_attempts,
            elapsed=self.record.elapsed(),
            max_elapsed=level1.max_elapsed_seconds if limit is None else limit,
            wanted=wanted,
            asked=retry_policy.retry_after(error, self.spec.clock.now()),
            delay=delay,
            final=isinstance(error, UnrecoverableError)
            or is_unrecoverable(error)
            or strategy is RecoveryStrategy.ESCALATE,
        )

    async def _heal(self, facts: dict[str, Any]) -> Healing:
        level1, healer = self.spec.config.level1, self.spec.healer
        if healer is None or not level1.enable_self_healing:
            return NOT_HEALED
        if level1.recovery_strategy is not RecoveryStrategy.REFLECT_AND_RETRY:
            return NOT_HEALED
        return await heal(healer, self.report(facts, recoverable=True), self.spec.timeout)

    def _stopped(self, error: BaseException, *, asked: bool) -> None:
        """Record a stop; one that no caller asked for counts, or it could be repeated for ever."""
        interrupted = not asked and is_interruption(error)
        status = ExecutionStatus.INTERRUPTED if interrupted else status_of(error)
        counts = not asked and not interrupted
        self.record.stop(ended_attempt(error, status, counts=counts))
        self._note(ExecutionStatus.CANCELLED)

    def give_up(self, error: Exception | None, reason: str) -> None:
        """Raise what level 2 waits for; with the strategy SKIP, ``SkippedError``."""
        result = self.result(ExecutionStatus.FAILED)
        known = last_error(result.attempts)
        marked = not known.get("recoverable", True)
        result.failure_report = self.report(known, recoverable=not marked)
        if self.spec.config.level1.recovery_strategy is RecoveryStrategy.SKIP:
            raise SkippedError(result)
        text = "It cannot be recovered" if marked else "Level 1 retries exhausted"
        message = f"{text} for {self.name}"
        raise self.unrecoverable(message, result, reason, error) from error

    def unrecoverable(
        self, message: str, result: ExecutionResult, reason: str, error: BaseException | None = None
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
            },
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

    def result(self, status: ExecutionStatus) -> ExecutionResult:
        """Return the result of a step without output."""
        attempts = self.record.attempts()
        seconds = 0.0
        if attempts and attempts[-1].ended_at is not None:
            seconds = max(0.0, (attempts[-1].ended_at - attempts[0].started_at).total_seconds())
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

    def arguments(self) -> dict[str, Any]:
        """Return the task's arguments by name, as far as they have one."""
        try:
            bound = inspect.signature(self.task).bind_partial(*self.args, **self.kwargs)
        except (TypeError, ValueError):  # it takes no such arguments, or does not declare them
            return self.kwargs
        bound.apply_defaults()
        return {**bound.arguments, **self.kwargs}


# --- a step that was started before --------------------------------------------------------------


async def check_may_continue(step: StepExecution) -> None:
    """Return when the next attempt may start; raise if there must be none."""
    record = step.record
    assert isinstance(record, RunStep)
    if record.state is None:
        return
    if needs_retry(step):
        if _is_ambiguous(step, record.state):
            raise _ambiguous(step)
        if _is_interrupted(step, record.state):
            raise await _interrupted(step, record)
        step.give_up(None, "it was given up before, and no retry was requested")
    await record.wait()


def needs_retry(step: StepExecution) -> bool:
    """Return whether a step that is not completed goes on only if a retry is requested."""
    record = step.record
    assert isinstance(record, RunStep)
    state = record.state
    return state is not None and (
        _is_ambiguous(step, state)
        or _is_interrupted(step, state)
        or record.is_exhausted(step.spec.max_attempts)
    )


def _is_ambiguous(step: StepExecution, state: StepState) -> bool:
    return state.open_attempt > 0 and step.spec.options.on_ambiguous != "rerun"


def _is_interrupted(step: StepExecution, state: StepState) -> bool:
    return state.interruptions + (state.open_attempt > 0) > step.spec.max_interruptions


async def _interrupted(step: StepExecution, record: RunStep) -> UnrecoverableError:
    times = step.spec.max_interruptions + 1
    reason = f"its process died in the middle of it {times} times"
    if record.state is not None and record.state.open_attempt:
        error = {"message": reason, "type": "Interrupted", "category": "UNKNOWN"}
        status = ExecutionStatus.INTERRUPTED
        await record.fail(Failure(status, counts=False, error=error, reason=reason))
    result = step.result(ExecutionStatus.INTERRUPTED)
    report = result.failure_report = step.report({"message": reason}, recoverable=False)
    report.suggested_fix = "find out what kills the process, then retry the step"
    message = f"{step.name} is interrupted: {reason}. To try again: {_how_to_retry(step)}"
    return step.unrecoverable(message, result, reason)


def _how_to_retry(step: StepExecution) -> str:
    return (
        f"`maestro retry {step.record.run_id} {step.name}`, or options(retry=True) of an executor"
    )


def _ambiguous(step: StepExecution) -> UnrecoverableError | HelpNeeded:
    """Return the error that keeps a step that may have had its effect from running again."""
    result = step.result(ExecutionStatus.INTERRUPTED)
    result.attempts[-1].status = ExecutionStatus.INTERRUPTED  # no process executes it any more
    reason = "its last attempt started, and its end was never recorded"
    effect_key = step.record.effect_key
    report = result.failure_report = step.report({"message": reason}, recoverable=False)
    report.suggested_fix = f"look for its effect, by its effect_key {effect_key}"
    if step.spec.options.on_ambiguous == "fail":
        return step.unrecoverable(f"{step.name} is ambiguous: {reason}", result, reason)
    return HelpNeeded(
        f"{step.name} is ambiguous: {reason}",
        report,
        total_attempts=result.attempt_count,
        suggested_actions=[
            report.suggested_fix,
            "if it had its effect: mark_task_completed",
            f"if it had not: {_how_to_retry(step)}",
        ],
        context={"effect_key": effect_key, "task_name": step.name, "called": False},
    )


# --- one at a time -------------------------------------------------------------------------------


class Turn:
    """The right to execute one step of a run; others in this process wait for it."""

    __slots__ = ("_identity", "_name", "_run", "_token")

    def __init__(self, run: OpenRun, identity: bytes, name: str) -> None:
        self._run = run
        self._identity = identity
        self._name = name
        self._token: Any = None

    def take(self) -> bool:
        """Take the turn; False if another task has it: then ``wait`` for that."""
        run, identity = self._run, self._identity
        if not run.enter(identity):
            return False
        self._token = _inside.set(_inside.get() | {(run.run_id, identity)})
        return True

    async def wait(self) -> None:
        """Return after another task's turn: it may have completed the step."""
        run, identity = self._run, self._identity
        if (run.run_id, identity) in _inside.get():
            raise ConfigurationError(
                f"{self._name!r} executes itself, with the same input, and would wait for ever"
            )
        waiter = run.wait_for(identity)
        if waiter is not None:
            await asyncio.shield(asyncio.wrap_future(waiter))

    def give_back(self) -> None:
        """Let the next one have it."""
        try:  # noqa: SIM105 - on the path of every step
            _inside.reset(self._token)
        except ValueError:  # closed by another context
            pass
        self._run.leave(self._identity)
