"""Level 2: rounds of attempts, few and slow, behind a circuit breaker; at the end, a person.

A round is the whole of what is called, once. Which rounds failed, the wait between them and the
final failure are recorded under the identity of what is called, which is the step's own: so they
survive a restart, and a retry of that step clears them.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, TypeVar

from maestro_hive.engine import escalation as escalations
from maestro_hive.engine import outbox
from maestro_hive.engine.config import RecoveryStrategy
from maestro_hive.engine.context import round_number
from maestro_hive.engine.delivery import Delivery
from maestro_hive.engine.errors import (
    CircuitBreakerOpen,
    ExecutionException,
    FailureReport,
    HelpNeeded,
    UnrecoverableError,
)
from maestro_hive.engine.execution_log import log_failed_round
from maestro_hive.engine.failures import (
    attempt_facts,
    error_facts,
    original_of,
    plain_text,
    report_from,
    report_of,
    set_failure,
)
from maestro_hive.engine.outbox import StoredEscalation
from maestro_hive.engine.plan import effect_key
from maestro_hive.engine.results import (
    ExecutionAttempt,
    ExecutionResult,
    ExecutionStatus,
    Level2Result,
)
from maestro_hive.engine.retry_policy import (
    classify,
    delay_before,
    is_about_other_side,
    never_retried,
    retry_after,
    with_jitter,
)
from maestro_hive.engine.step import SkippedError
from maestro_hive.engine.values import in_thread
from maestro_hive.kernel.clock import Wait
from maestro_hive.kernel.errors import StaleDocumentError
from maestro_hive.maestro.state import codec
from maestro_hive.maestro.state.projections import facts_of
from maestro_hive.maestro.state.records import Entry, EntryKind, NewEntry

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping
    from random import Random

    from maestro_hive.engine.breaker import CircuitBreaker, Permit
    from maestro_hive.engine.config import Level2Config
    from maestro_hive.engine.execution_log import ExecutionLog
    from maestro_hive.engine.open_run import OpenRun
    from maestro_hive.engine.tickets import TicketSystem
    from maestro_hive.kernel.clock import Clock
    from maestro_hive.maestro.state.store import DocumentChange, Store

ResultT = TypeVar("ResultT")

#: How often a breaker may change between being read and the record of a start.
_ADMISSIONS = 100
#: How often an open breaker is looked at by what waits for it, in seconds.
_SHORTEST_LOOK, _LONGEST_LOOK = 0.05, 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundPolicy:
    """What rounds are made with."""

    config: Level2Config
    breaker: CircuitBreaker
    escalation: TicketSystem | None
    rng: Random
    #: Whether the final failure is escalated to a person; where there is no ticket system, locally.
    escalates: bool = False
    #: Whether the breaker counts every failed round, and not only what is about the other side.
    counts_all: bool = False
    #: What is told the name of a step, and whether it waits; None: an open breaker is an error.
    waits_for_breaker: Callable[[str, bool], None] | None = None
    log: ExecutionLog | None = None


class RoundCall(Protocol):
    """What a round calls."""

    #: What it is called in messages and records.
    name: str

    @property
    def persona(self) -> str | None:
        """Who does the work; None where that is unknown."""
        ...

    @property
    def uses_guard(self) -> bool:
        """Whether ``make`` records its start under the breaker's guard."""
        ...

    def make(self, number: int, permit: Permit) -> Awaitable[Any]:
        """Make round ``number`` and return what came of it; raise if it failed."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedRound:
    """One round that failed: what level 1 made of it, and how long to wait before the next."""

    number: int
    result: ExecutionResult
    wait: Wait | None = None

    @property
    def report(self) -> FailureReport:
        """What failed, with each attempt of the round."""
        report = self.result.failure_report
        assert report is not None, "a round that failed has a report"
        return report


class Rounds:
    """The rounds of one call; inside a round of another level 2 their numbers go on from there.

    ``run`` and ``identity`` say where they are recorded; without a run, nowhere.
    """

    def __init__(
        self, policy: RoundPolicy, call: RoundCall, run: OpenRun | None, identity: bytes
    ) -> None:
        self.policy = policy
        self.call = call
        self._run = run
        self._identity = identity
        self._clock: Clock = policy.breaker.clock
        self._outer = round_number.get()
        self._first = (self._outer - 1) * policy.config.max_attempts + 1
        self._last_error: Exception | None = None
        self._started: float | None = None
        self._own_id: str | None = None
        self.failed: list[FailedRound] = []
        if run is not None and identity in run.state.rounds:
            recorded = (_round_from(entry) for entry in run.state.rounds[identity])
            self.failed = [each for each in recorded if each.number >= self._first]
        #: Whether all rounds were made before, here or in an outer round.
        self._was_escalated = run is not None and identity in run.state.escalated

    @property
    def label(self) -> str:
        """What tells the step from others of its name in the run: ``name``, or ``name#2``."""
        run = self._run
        step = None if run is None else run.state.by_identity.get(self._identity)
        found = None if run is None or step is None else run.label(step.number)
        return found or self.call.name

    async def run(self) -> Any:
        """Return what the first round that succeeds returns; raise at the end of all of them."""
        if self._was_escalated:
            ended = self._escalated()
            if ended is not None and ended.get("outer", 1) == self._outer:
                raise self._help_needed(await self._told(ended))
        while len(self.failed) < self.policy.config.max_attempts:
            if self.failed:
                await self._wait()
            # The first time by what this process knows; a start under that guard may be refused.
            permit = self.policy.breaker.admit_known() if self.call.uses_guard else None
            for _ in range(_ADMISSIONS):
                if permit is None:
                    permit = await self._permit()
                try:
                    return await self._round(permit)
                except StaleDocumentError:
                    permit.release()
                    permit = None
                except RoundFailedError as failed:
                    await self._record_failed(failed)
                    break
        return await self._give_up()

    # --- one round ---

    async def _wait(self) -> None:
        """Wait for the next round, unless the breaker is known to refuse it then."""
        wait = self.failed[-1].wait
        left = wait.remaining(self._clock) if wait is not None else 0.0
        if left and self.policy.breaker.remaining_seconds() < left:
            # Counted from now: a wall clock that was set back must not make it longer.
            await Wait.start(self._clock, left).finished(self._clock)

    async def _permit(self) -> Permit:
        tell = self.policy.waits_for_breaker
        waits = False
        while True:
            try:
                permit: Permit = await self._off_loop(self.policy.breaker.acquire)
            except CircuitBreakerOpen as refused:
                if tell is None:
                    if self.failed:
                        refused.context.update(self._so_far())
                    raise
            else:
                if tell is not None and waits:
                    tell(self.call.name, False)
                return permit
            if not waits:
                waits = True
                tell(self.call.name, True)
            # Not for all of it: it may be reset, or its probe may succeed.
            left = self.policy.breaker.remaining_seconds()
            pause = min(max(left, _SHORTEST_LOOK), _LONGEST_LOOK)
            await Wait.start(self._clock, pause).finished(self._clock)

    def _so_far(self) -> dict[str, Any]:
        return {
            "task_name": self.call.name,
            "rounds": len(self.failed),
            "attempts": sum(len(each.result.attempts) for each in self.failed),
            "last_failure": self.failed[-1].report.to_dict(),
        }

    async def _round(self, permit: Permit) -> Any:
        """Make one round under a permit, and tell the breaker how it went."""
        clock, number = self._clock, self._first + len(self.failed)
        started = clock.awake_seconds()
        if self._started is None:
            self._started = started
        token = round_number.set(number)
        try:
            outcome = await self.call.make(number, permit)
        except StaleDocumentError:
            raise
        except SkippedError as skipped:
            seconds = clock.awake_seconds() - started
            await self._tell_breaker(permit, skipped.error, seconds)
            result = self._reported(skipped.result, None)
            if skipped.error is None:  # a task that returned a result without success
                raise RoundFailedError(result, None) from None
            raise RoundsSkippedError(self.level2_result(ExecutionStatus.FAILED, result)) from None
        except Exception as error:  # noqa: BLE001 - the user's own task
            seconds = clock.awake_seconds() - started
            await self._raised(error, permit, seconds)
        except BaseException:
            permit.release()  # stopped, which says nothing about the other side
            raise
        finally:
            round_number.reset(token)
        if not permit.succeeded_without_news():
            seconds = clock.awake_seconds() - started
            await self._off_loop(lambda: permit.succeeded(seconds))
        return outcome

    async def _raised(self, error: Exception, permit: Permit, seconds: float) -> NoReturn:
        """Count a round that raised; raise what is not to be retried as it is."""
        final = _is_final(error)
        if final and not isinstance(error, UnrecoverableError):
            permit.release()  # forbidden, bankrupt, or our own disk: not the other side's fault
            raise error
        await self._tell_breaker(permit, error, seconds)
        if final:
            raise error
        result = self._result_of(error, seconds)
        raise RoundFailedError(self._reported(result, error), error)

    def _result_of(self, error: Exception, seconds: float) -> ExecutionResult:
        """Return what level 1 made of a round that raised: its own result, or one attempt."""
        found = error.result if isinstance(error, UnrecoverableError) else None
        if isinstance(found, ExecutionResult):
            return replace(found, failure_report=report_of(error) or report_of(found))
        result = self.one_call(seconds, ExecutionStatus.FAILED, failure_report=report_of(error))
        set_failure(result.attempts[0], error_facts(original_of(error) or error))
        return result

    def one_call(self, seconds: float, status: ExecutionStatus, **facts: Any) -> ExecutionResult:
        """Return the result of a round that was one call: a single attempt."""
        ended_at = self._clock.now()
        attempt = ExecutionAttempt(
            attempt_id=f"round-{self._first + len(self.failed)}",
            attempt_number=1,
            started_at=ended_at - timedelta(seconds=seconds),
            ended_at=ended_at,
            status=status,
            output=facts.get("final_output"),
        )
        return ExecutionResult(
            execution_id=self.execution_id,
            task_name=self.call.name,
            persona_id=self.call.persona or "",
            final_status=status,
            attempts=[attempt],
            total_duration_seconds=seconds,
            **facts,
        )

    def _reported(self, result: ExecutionResult, error: Exception | None) -> ExecutionResult:
        """Return a round's result with a report that lists its own attempts, as plain data."""
        own = self.own_attempts(result)
        report = report_of(own) or FailureReport(
            failed_persona=self.call.persona or own.persona_id or self.call.name,
            error_category=classify(error).value if error is not None else "UNKNOWN",
            details=plain_text(error)
            if error is not None
            else f"{self.call.name} ended without a result",
        )
        listed = [attempt_facts(attempt) for attempt in own.attempts]
        plain = replace(report, context=listed, attempt_number=len(listed)).to_dict()
        return replace(own, failure_report=report_from(plain))

    def own_attempts(self, result: ExecutionResult) -> ExecutionResult:
        """Return a round's result without the attempts of earlier rounds at the same step."""
        known = {
            (each.attempt_id, each.started_at)
            for failed in self.failed
            for each in failed.result.attempts
        }
        if not known:
            return result
        own = [each for each in result.attempts if (each.attempt_id, each.started_at) not in known]
        return replace(result, attempts=own)

    async def _record_failed(self, failed: RoundFailedError) -> None:
        """Record a failed round, and the wait for the next if there is to be one."""
        self._last_error = failed.error
        count = len(self.failed) + 1
        wait = None
        if count < self.policy.config.max_attempts:
            wait = Wait.start(self._clock, self._delay(count, failed.error))
        number = self._first + len(self.failed)
        made = FailedRound(number=number, result=failed.result, wait=wait)
        await self._record(EntryKind.ROUND_FAILED, _round_facts(made))
        log_failed_round(self, made)
        self.failed.append(made)

    def _delay(self, failures: int, error: Exception | None) -> float:
        config = self.policy.config
        at_once = config.recovery_strategy is RecoveryStrategy.RETRY_SAME
        delay = 0.0 if at_once else delay_before(config, failures)
        return max(with_jitter(delay, config.jitter, self.policy.rng), self._asked_for(error))

    def _asked_for(self, error: Exception | None) -> float:
        now = self._clock.now()
        sources = [each for each in (error, original_of(error)) if each is not None]
        asked = [retry_after(each, now) for each in sources]
        return max((seconds for seconds in asked if seconds is not None), default=0.0)

    # --- the end ---

    @property
    def run_id(self) -> str | None:
        """The id of the run that they are recorded in, if any."""
        return None if self._run is None else self._run.run_id

    @property
    def execution_id(self) -> str:
        """The run's id; without a run, a name of its own."""
        if self._run is not None:
            return self._run.run_id
        if self._own_id is None:
            self._own_id = f"exec_{secrets.token_hex(8)}"
        return self._own_id

    def level2_result(self, status: ExecutionStatus, *last: ExecutionResult) -> Level2Result:
        """Return what level 2 gives back: a result for each round, and the last one's."""
        results = [*(each.result for each in self.failed), *last]
        return Level2Result(
            execution_id=self.execution_id,
            task_name=self.call.name,
            final_status=status,
            level1_results=results,
            level2_attempts=len(results),
            total_duration_seconds=self.elapsed(),
            circuit_breaker_state=self.policy.breaker.to_dict(),
        )

    def elapsed(self) -> float:
        """Return the seconds since the first round that was made here started."""
        return 0.0 if self._started is None else self._clock.awake_seconds() - self._started

    def _escalated(self) -> Mapping[str, Any] | None:
        """Return what was recorded when level 2 gave up, if it did."""
        entry = self._run.state.escalated.get(self._identity) if self._run else None
        return facts_of(entry) if entry is not None else None

    async def start_over(self) -> None:
        """Let what failed before count no more, and start again with the first round."""
        await self.forget()
        self.failed = []

    async def forget(self) -> None:
        """Let the next call of the same start again with the first round."""
        if self._run is None:
            return
        state = self._run.state
        if self._identity in state.rounds or self._identity in state.escalated:
            name = (self._escalated() or {}).get("escalation")
            change = None if name is None else outbox.ended(name, "It is executed again.")
            await self._record(EntryKind.RETRIED, {}, change)

    async def _give_up(self) -> NoReturn:
        """Ask a person for help, once, and raise; or raise ``SkippedError``, if that was the wish."""
        if self.policy.config.recovery_strategy is RecoveryStrategy.SKIP:
            raise RoundsSkippedError(self.level2_result(ExecutionStatus.FAILED))
        facts, earlier = self._final_facts(), self._escalated() or {}
        known = {name: earlier.get(name) for name in ("ticket", "ticket_url", "escalation")}
        facts.update({name: fact for name, fact in known.items() if fact is not None})
        change = None
        if self.policy.escalates and not known["ticket"] and not known["escalation"]:
            record = self._record_of(report_from(facts["report"]), facts["actions"])
            if record is not None:
                facts["escalation"], change = record.id, outbox.added(record)
        await self._record(EntryKind.ESCALATED, facts, change)
        raise self._help_needed(await self._told(facts)) from self._last_error

    def _final_facts(self) -> dict[str, Any]:
        reports = [each.report for each in self.failed]
        listed = [attempt for report in reports for attempt in report.context]
        report = replace(reports[-1], context=listed, attempt_number=len(listed))
        return {
            "outer": self._outer,
            "ticket": None,
            "report": report.to_dict(),
            "actions": escalations.actions_for(report, self.run_id),
        }

    def _record_of(self, report: FailureReport, actions: list[str]) -> StoredEscalation | None:
        """Return the escalation of the final failure; None if nobody could be told of it."""
        run, system, name = self._run, self.policy.escalation, self.call.name
        if run is None and system is None:
            return None
        # What is escalated is recorded with it, so it need not be made again in the same way.
        own = self._identity + secrets.token_bytes(8)
        step = None if run is None else run.state.by_identity.get(self._identity)
        case = escalations.EscalationCase(
            run_id=self.run_id,
            task_name=name,
            effect_key=effect_key(self.execution_id, own),
            summary=escalations.summarise(name, report),
            description=escalations.describe(
                task_name=name,
                run_id=self.run_id,
                report=report,
                rounds=[each.result for each in self.failed],
                actions=actions,
            ),
            failure_report=report,
            labels=escalations.labels_for(report),
            fingerprint=escalations.fingerprint_of(name, report, step),
        )
        return StoredEscalation(
            id=outbox.escalation_id(self.execution_id, own),
            run_id=self.run_id,
            step=self.label,
            persona=report.failed_persona,
            identity=self._identity.hex(),
            at=self._clock.nanos() // 1000,
            case=case.to_json(),
            system=None if system is None else system.name,
            finds=system is not None and system.finds,
        )

    @property
    def _store(self) -> Store:
        """Where escalations are recorded."""
        return self.policy.breaker.store if self._run is None else self._run.store

    async def _told(self, facts: Mapping[str, Any]) -> dict[str, Any]:
        """Return what is known of a failure, with its ticket, which is made if it can be made now.

        Trouble with that must not hide the failure: it is tried again.
        """
        name, system, store = facts.get("escalation"), self.policy.escalation, self._store
        if name is None:
            return dict(facts)
        record = await self._off_loop(lambda: outbox.found_escalation(store, name))
        if record is not None and not record.delivered and system is not None:
            await Delivery(store, system).deliver(name, at_once=True)
            record = await self._off_loop(lambda: outbox.found_escalation(store, name))
        if record is not None and record.delivered:
            await self._note_delivered(record)
        told = dict(facts)
        if record is not None:
            told |= {"ticket": record.ticket, "ticket_url": record.address}
        elif self._run is not None and name in self._run.state.delivered:
            known = facts_of(self._run.state.delivered[name])
            told |= {"ticket": known.get("ticket"), "ticket_url": known.get("address")}
        if record is not None and record.problem is not None and not record.delivered:
            later = f"the ticket is not made yet ({record.problem}); it is tried again"
            if self._is_forgotten(record):
                later = f"file a ticket by hand: the escalation failed ({record.problem})"
            told |= {"trouble": record.problem, "actions": [*facts["actions"], later]}
        if record is not None and self._is_forgotten(record):
            await self._off_loop(lambda: outbox.apply(store, outbox.ended(name, "")), writes=True)
        return told

    def _is_forgotten(self, record: StoredEscalation) -> bool:
        """Return whether nobody can do more for an escalation: no other process, and no later call."""
        return self._run is None and not record.finds

    async def _note_delivered(self, record: StoredEscalation) -> None:
        """Record that, and by what, a person was told; once."""
        run = self._run
        if run is not None and record.id not in run.state.delivered:
            entry = outbox.delivered_entry(self._identity, self.call.name, record)
            await run.record(entry, sync=False)

    def _help_needed(self, facts: Mapping[str, Any]) -> HelpNeeded:
        """Return the error that these facts describe."""
        report = report_from(facts["report"])
        context: dict[str, Any] = {
            "task_name": self.call.name,
            "rounds": len(self.failed),
            "attempts": report.context,
        }
        if "trouble" in facts:
            context["escalation_error"] = facts["trouble"]
        result = self.level2_result(ExecutionStatus.HELP_NEEDED)
        result.jira_ticket, result.jira_url = facts["ticket"], facts.get("ticket_url")
        actions = list(facts["actions"])
        if result.jira_url is not None:
            context["ticket_url"] = result.jira_url
            actions.insert(0, f"see the ticket: {result.jira_url}")
        error = HelpNeeded(
            f"All retry levels exhausted for {self.call.name}",
            report,
            sum(len(each.result.attempts) for each in self.failed),
            actions,
            context,
            jira_ticket=facts["ticket"],
        )
        error.result = result
        return error

    async def _record(
        self, kind: EntryKind, facts: dict[str, Any], change: DocumentChange | None = None
    ) -> None:
        if self._run is None:
            if change is not None:
                made, store = change, self._store
                await self._off_loop(lambda: outbox.apply(store, made), writes=True)
            return
        entry = NewEntry(
            kind,
            facts=codec.dump_canonical(facts),
            identity=self._identity,
            at=self._clock.nanos() // 1000,
        )
        await self._run.record(entry, sync=True, change=change)

    # --- waiting for the disk ---

    async def _tell_breaker(self, permit: Permit, error: Exception | None, seconds: float) -> None:
        """Record that a round failed, if its error says something about the other side.

        If it does not, the breaker stays as it is; half open, the next call is the probe.
        """
        if _called_nothing(error) or not (self.policy.counts_all or _counts(error)):
            permit.release()
        else:
            # It is written, and another process may be in the way.
            await self._off_loop(lambda: permit.failed(seconds), writes=True)

    async def _off_loop(self, call: Callable[[], ResultT], *, writes: bool = False) -> ResultT:
        store = self.policy.breaker.store
        if not writes and store.syncs_fast():
            return call()
        return await in_thread(call)


class RoundFailedError(Exception):
    """A round failed, and another one may help; ``error`` is what it raised, if anything."""

    def __init__(self, result: ExecutionResult, error: Exception | None) -> None:
        super().__init__()
        self.result = result
        self.error = error


class RoundsSkippedError(Exception):
    """All rounds failed, and the recovery strategy is to go on without a result."""

    def __init__(self, result: Level2Result) -> None:
        super().__init__()
        self.result = result


def _is_final(error: Exception) -> bool:
    """Return whether another round is out of the question."""
    if isinstance(error, UnrecoverableError):  # level 1 has given up: that is what rounds are for
        report = report_of(error)
        return report is not None and not report.recoverable
    return never_retried(error)


def _called_nothing(error: Exception | None) -> bool:
    """Return whether level 1 knew beforehand: then the breaker learns nothing from it."""
    return _context_of(error).get("called") is False


def _counts(error: Exception | None) -> bool:
    """Return whether a breaker counts an error: as ``breaker_on`` says, or if it is about the other side."""
    decided = _context_of(error).get("counts_for_breaker")
    if isinstance(decided, bool):
        return decided
    return error is not None and is_about_other_side(error)


def _context_of(error: Exception | None) -> dict[str, Any]:
    context: object = error.context if isinstance(error, ExecutionException) else None
    return context if isinstance(context, dict) else {}


# --- as plain JSON -------------------------------------------------------------------------------


def _round_facts(failed: FailedRound) -> dict[str, Any]:
    result = failed.result
    return {
        "round": failed.number,
        "execution_id": result.execution_id,
        "name": result.task_name,
        "persona": result.persona_id,
        "status": result.final_status.value,
        "seconds": result.total_duration_seconds,
        "tokens": result.total_tokens_used,
        "report": failed.report.to_dict(),
        "wait": failed.wait.to_json() if failed.wait else None,
    }


def _round_from(entry: Entry) -> FailedRound:
    facts = facts_of(entry)
    report = report_from(facts["report"])
    result = ExecutionResult(
        execution_id=facts["execution_id"],
        task_name=facts["name"],
        persona_id=facts["persona"],
        final_status=ExecutionStatus(facts["status"]),
        attempts=[_attempt_from(each) for each in report.context],
        total_duration_seconds=facts["seconds"],
        total_tokens_used=facts["tokens"],
        failure_report=report,
        created_at=entry.when,
    )
    wait = facts["wait"]
    return FailedRound(
        number=facts["round"], result=result, wait=Wait.from_json(wait) if wait else None
    )


def _attempt_from(facts: Mapping[str, Any]) -> ExecutionAttempt:
    times = {name: facts[name] for name in ("started_at", "ended_at")}
    typed = {name: when and datetime.fromisoformat(when) for name, when in times.items()}
    return ExecutionAttempt(**{**facts, **typed, "status": ExecutionStatus(facts["status"])})
