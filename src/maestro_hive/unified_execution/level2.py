"""One execution of level 2: its rounds, one after the other, to a result or to a call for help."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections.abc import Mapping
from contextlib import asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from maestro_hive.engine import escalation as words
from maestro_hive.engine.attempt import round_number
from maestro_hive.engine.config import RecoveryStrategy
from maestro_hive.engine.errors import (
    CircuitBreakerOpen,
    ExecutionException,
    HelpNeeded,
    UnrecoverableError,
)
from maestro_hive.engine.results import (
    ExecutionAttempt,
    ExecutionResult,
    ExecutionStatus,
    Level2Result,
)
from maestro_hive.engine.retry_policy import delay_before, never_retried, retry_after, with_jitter
from maestro_hive.engine.waits import Wait
from maestro_hive.kernel.errors import ConfigurationError
from maestro_hive.unified_execution.rounds import (
    Rounds,
    failed_result,
    original_of,
    plain_text,
    report_from,
    report_of,
    reported,
)
from maestro_hive.unified_execution.wrapped_call import effect_key

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from datetime import datetime
    from random import Random

    from maestro_hive.engine.breaker import CircuitBreaker, Permit
    from maestro_hive.engine.config import Level2Config
    from maestro_hive.engine.errors import FailureReport
    from maestro_hive.engine.escalation import Escalation
    from maestro_hive.engine.open_run import OpenRun
    from maestro_hive.unified_execution.wrapped_call import WrappedCall

ResultT = TypeVar("ResultT")

#: The calls that this task is inside of.
_inside: ContextVar[frozenset[tuple[str, bytes]]] = ContextVar("calls_inside", default=frozenset())


@dataclass(frozen=True, slots=True, kw_only=True)
class Level2:
    """What an execution works with."""

    config: Level2Config
    breaker: CircuitBreaker
    run: OpenRun | None
    escalation: Escalation | None
    random: Random


class RoundFailedError(Exception):
    """A round failed, and another one may help; ``__cause__`` is what it raised, if anything."""

    def __init__(self, result: ExecutionResult, error: Exception | None) -> None:
        super().__init__()
        self.result = result
        self.error = error


class Level2Execution:
    """One call, in as many rounds as it takes and as are left.

    Inside a round of another level 2 its rounds go on counting from there: what level 1 gave up
    in an earlier round around it gets new attempts.
    """

    def __init__(self, level2: Level2, call: WrappedCall, identity: bytes = b"") -> None:
        self._config = level2.config
        self._breaker = level2.breaker
        self._run = level2.run
        self._escalation = level2.escalation
        self._random = level2.random
        self._clock = level2.breaker.clock
        self._call = call
        self._identity = identity
        self._around = round_number.get()
        self._id = self._run.run_id if self._run else f"exec_{secrets.token_hex(8)}"
        self._began = self._clock.awake_seconds()
        self._rounds = Rounds(self._clock)
        self._last_error: Exception | None = None

    async def result(self) -> Level2Result:
        """Return what came of it; in a run, whoever asks for the same meanwhile waits for it."""
        if self._run is None:
            return await self._result()
        async with _turn(self._run, self._identity, self._call.name):
            identities = [_in_round(self._identity, n) for n in range(1, self._around + 1)]
            self._rounds = Rounds(self._clock, self._run, *identities)
            if self._call.starts_over:
                await self._rounds.forget()
            return await self._result()

    async def _result(self) -> Level2Result:
        kept = self._call.completed()
        if kept is not None:
            return self._done(kept)
        ended = self._rounds.escalated()
        if ended is not None:
            raise self._cry(ended)
        while len(self._rounds.failed) < self._config.max_attempts:
            await self._wait()
            try:
                result = await self._round(len(self._rounds.failed) + 1)
            except RoundFailedError as failed:
                await self._note(failed)
            else:
                return await self._succeeded(result)
        return await self._give_up()

    # --- a round ---

    async def _wait(self) -> None:
        """Wait for the next round, unless the breaker is known to refuse it then."""
        wait = self._rounds.wait
        left = wait.remaining(self._clock) if wait is not None else 0.0
        if left and self._breaker.remaining_seconds() < left:
            # Begun anew: a wall clock that was set back must not make it longer.
            await Wait.begin(self._clock, left).over(self._clock)

    async def _round(self, number: int) -> ExecutionResult:
        """Make one round: under a permit, and telling the breaker how it went."""
        permit = await self._permit()
        began, started_at = self._clock.awake_seconds(), self._clock.now()
        token = round_number.set((self._around - 1) * self._config.max_attempts + number)
        try:
            outcome = await self._call.make()
        except Exception as error:  # noqa: BLE001 - the user's own task
            seconds = self._clock.awake_seconds() - began
            await self._raised(error, permit, started_at, seconds)
        except BaseException:
            permit.release()  # stopped, which says nothing about the other side
            raise
        finally:
            round_number.reset(token)
        seconds = self._clock.awake_seconds() - began
        result = self._as_result(outcome, started_at, seconds)
        if not result.success:
            await self._tell_failure(permit, seconds)
            raise RoundFailedError(self._with_report(result, None), None)
        await self._off_loop(lambda: permit.succeeded(seconds))
        return result

    async def _permit(self) -> Permit:
        try:
            return await self._off_loop(self._breaker.acquire)
        except CircuitBreakerOpen as refused:
            if self._rounds.failed:
                refused.context.update(self._so_far())
            raise

    def _so_far(self) -> dict[str, Any]:
        return {
            "task_name": self._call.name,
            "rounds": len(self._rounds.failed),
            "attempts": len(self._rounds.attempts),
            "last_failure": self._rounds.failed[-1].report.to_dict(),
        }

    async def _raised(
        self, error: Exception, permit: Permit, started_at: datetime, seconds: float
    ) -> NoReturn:
        """Count a round that raised; raise what is not to be retried as it is."""
        final = _is_final(error)
        if final and not isinstance(error, UnrecoverableError):
            permit.release()  # forbidden, bankrupt, or our own disk: not the other side's fault
            raise error
        if _called_nothing(error):
            permit.release()
        else:
            await self._tell_failure(permit, seconds)
        if final:
            raise error
        result = failed_result(
            error,
            name=self._call.name,
            persona=self._call.persona,
            execution_id=self._id,
            number=len(self._rounds.failed) + 1,
            started_at=started_at,
            ended_at=self._clock.now(),
        )
        raise RoundFailedError(self._with_report(result, error), error)

    def _as_result(self, outcome: object, started_at: datetime, seconds: float) -> ExecutionResult:
        if isinstance(outcome, ExecutionResult):
            return outcome
        done = ExecutionStatus.SUCCESS
        attempt = ExecutionAttempt(
            attempt_id=f"round-{len(self._rounds.failed) + 1}",
            attempt_number=1,
            started_at=started_at,
            ended_at=self._clock.now(),
            status=done,
            output=outcome,
        )
        return ExecutionResult(
            execution_id=self._id,
            task_name=self._call.name,
            persona_id=self._call.persona or "",
            final_status=done,
            attempts=[attempt],
            total_duration_seconds=seconds,
            final_output=outcome,
        )

    def _with_report(self, result: ExecutionResult, error: Exception | None) -> ExecutionResult:
        own = self._rounds.own_attempts(result)
        return reported(own, error, name=self._call.name, persona=self._call.persona)

    async def _note(self, failed: RoundFailedError) -> None:
        """Record a failed round, and the wait for the next if there is to be one."""
        self._last_error = failed.error
        count = len(self._rounds.failed) + 1
        last = count >= self._config.max_attempts
        await self._rounds.add(failed.result, None if last else self._delay(count, failed.error))

    def _delay(self, failures: int, error: Exception | None) -> float:
        at_once = self._config.recovery_strategy is RecoveryStrategy.RETRY_SAME
        delay = 0.0 if at_once else delay_before(self._config, failures)
        return max(with_jitter(delay, self._config.jitter, self._random), self._asked_for(error))

    def _asked_for(self, error: Exception | None) -> float:
        now = self._clock.now()
        sources = [each for each in (error, original_of(error)) if each is not None]
        asked = [retry_after(each, now) for each in sources]
        return max((seconds for seconds in asked if seconds is not None), default=0.0)

    # --- the end ---

    def _level2_result(self, status: ExecutionStatus, *last: ExecutionResult) -> Level2Result:
        results = [*self._rounds.results, *last]
        return Level2Result(
            execution_id=self._id,
            task_name=self._call.name,
            final_status=status,
            level1_results=results,
            level2_attempts=len(results),
            total_duration_seconds=self._clock.awake_seconds() - self._began,
            circuit_breaker_state=self._breaker.state.value,
        )

    async def _succeeded(self, result: ExecutionResult) -> Level2Result:
        """Return the result; unless level 1 keeps it, let the next call of that name start anew."""
        done = self._done(result)
        if self._rounds.remembered() and self._call.completed() is None:
            await self._rounds.forget()
        return done

    def _done(self, result: ExecutionResult) -> Level2Result:
        again = self._rounds.failed or result.final_status is ExecutionStatus.RECOVERED
        status = ExecutionStatus.RECOVERED if again else ExecutionStatus.SUCCESS
        return self._level2_result(status, self._rounds.own_attempts(result))

    async def _give_up(self) -> Level2Result:
        """Ask for help, once, and say so to the caller; or leave it, if that was the wish."""
        if self._config.recovery_strategy is RecoveryStrategy.SKIP:
            return self._level2_result(ExecutionStatus.FAILED)
        facts = self._facts_of_the_end()
        facts.update(await self._escalate(report_from(facts["report"]), facts["actions"]))
        await self._rounds.escalate(facts)
        raise self._cry(facts) from self._last_error

    def _facts_of_the_end(self) -> dict[str, Any]:
        reports = [each.report for each in self._rounds.failed]
        listed = [attempt for report in reports for attempt in report.context]
        report = replace(reports[-1], context=listed, attempt_number=len(listed))
        return {
            "report": report.to_dict(),
            "actions": words.actions_for(report, self._run.run_id if self._run else None),
        }

    async def _escalate(self, report: FailureReport, actions: list[str]) -> dict[str, Any]:
        """Tell a person, if there is a way to; trouble with that must not hide the failure."""
        known = self._rounds.ticket()
        if self._escalation is None or known is not None:
            return {"ticket": known}
        run_id = self._run.run_id if self._run else None
        case = words.EscalationCase(
            run_id=run_id,
            task_name=self._call.name,
            effect_key=effect_key(self._id, self._identity),
            summary=words.summarise(self._call.name, report),
            description=words.describe(
                task_name=self._call.name,
                run_id=run_id,
                report=report,
                rounds=self._rounds.results,
                actions=actions,
            ),
            failure_report=report,
            labels=words.labels_for(report),
        )
        try:
            return {"ticket": await self._escalation.escalate(case)}
        except Exception as error:  # noqa: BLE001 - the user's own client
            trouble = plain_text(error)
            by_hand = f"file a ticket by hand: the escalation failed ({trouble})"
            return {"ticket": None, "trouble": trouble, "actions": [*actions, by_hand]}

    def _cry(self, facts: Mapping[str, Any]) -> HelpNeeded:
        """Return the call for help that these facts tell of."""
        report = report_from(facts["report"])
        context: dict[str, Any] = {
            "task_name": self._call.name,
            "rounds": len(self._rounds.failed),
            "attempts": report.context,
        }
        if "trouble" in facts:
            context["escalation_error"] = facts["trouble"]
        result = self._level2_result(ExecutionStatus.HELP_NEEDED)
        result.jira_ticket = facts["ticket"]
        error = HelpNeeded(
            f"All retry levels exhausted for {self._call.name}",
            report,
            len(self._rounds.attempts),
            list(facts["actions"]),
            context,
            jira_ticket=facts["ticket"],
        )
        error.result = result
        return error

    # --- waiting for the disk ---

    async def _tell_failure(self, permit: Permit, seconds: float) -> None:
        if self._breaker.store is None:
            permit.failed(seconds)
        else:  # it is written, and another process may be in the way
            await asyncio.to_thread(permit.failed, seconds)

    async def _off_loop(self, call: Callable[[], ResultT]) -> ResultT:
        store = self._breaker.store
        if store is None or store.syncs_fast():
            return call()
        return await asyncio.to_thread(call)


def _in_round(identity: bytes, around: int) -> bytes:
    """Return a call's identity inside that round of another level 2: it has rounds of its own."""
    return identity if around == 1 else hashlib.sha256(identity + b"#%d" % around).digest()


@asynccontextmanager
async def _turn(run: OpenRun, identity: bytes, name: str) -> AsyncIterator[None]:
    """Wait until nobody else in this process executes the same, and keep others waiting."""
    this = (run.run_id, identity)
    while not run.enter(identity):
        if this in _inside.get():
            raise ConfigurationError(
                f"{name!r} executes itself, with the same input, and would wait for ever"
            )
        other = run.wait_for(identity)
        if other is not None:
            await asyncio.shield(asyncio.wrap_future(other))
    token = _inside.set(_inside.get() | {this})
    try:
        yield
    finally:
        run.leave(identity)
        _inside.reset(token)


def _is_final(error: Exception) -> bool:
    """Return whether another round is out of the question."""
    if isinstance(error, UnrecoverableError):  # level 1 has given up: that is what rounds are for
        report = report_of(error)
        return report is not None and not report.recoverable
    return never_retried(error)


def _called_nothing(error: Exception) -> bool:
    """Return whether level 1 knew beforehand: then the breaker learns nothing from it."""
    context: object = error.context if isinstance(error, ExecutionException) else None
    return isinstance(context, Mapping) and context.get("called") is False
