"""The rounds of level 2 that failed, and how it ended: kept in a run, or in memory alone."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from datetime import datetime
from typing import TYPE_CHECKING, Any

from maestro_hive.engine.errors import FailureReport, UnrecoverableError
from maestro_hive.engine.results import (
    ExecutionAttempt,
    ExecutionResult,
    ExecutionStatus,
)
from maestro_hive.engine.retry_policy import classify
from maestro_hive.engine.waits import Wait
from maestro_hive.maestro.state import codec
from maestro_hive.maestro.state.projections import facts_of
from maestro_hive.maestro.state.records import EntryKind, NewEntry, to_micros
from maestro_hive.unified_execution.steps import error_facts

if TYPE_CHECKING:
    from collections.abc import Mapping

    from maestro_hive.engine.open_run import OpenRun
    from maestro_hive.kernel.clock import Clock
    from maestro_hive.maestro.state.records import Entry

#: What is kept of an error's text: enough to see what it was.
_LONGEST_TEXT = 4000


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedRound:
    """One round: what level 1 made of it, and how long to wait before the next."""

    result: ExecutionResult
    wait: Wait | None = None

    @property
    def report(self) -> FailureReport:
        """What failed, with each attempt of the round."""
        report = self.result.failure_report
        assert report is not None, "a round that failed says why"
        return report


class Rounds:
    """The failed rounds of one call; in a run they survive a restart.

    ``identities`` are the call's in each round of a level 2 around it: the last is this one's.
    """

    def __init__(self, clock: Clock, run: OpenRun | None = None, *identities: bytes) -> None:
        self._clock = clock
        self._run = run
        self._identities = identities
        kept = run.state.rounds.get(identities[-1], []) if run else []
        self.failed: list[FailedRound] = [_round_from(entry) for entry in kept]

    async def forget(self) -> None:
        """Let what failed before count no more: the next call starts anew."""
        for identity in self.remembered():
            await self._record(EntryKind.RETRIED, {}, identity)
        self.failed = []

    def remembered(self) -> list[bytes]:
        """Return under which of its identities the run knows of a failure."""
        if self._run is None:
            return []
        rounds, escalated = self._run.state.rounds, self._run.state.escalated
        return [each for each in self._identities if each in rounds or each in escalated]

    @property
    def results(self) -> list[ExecutionResult]:
        """What level 1 made of each."""
        return [each.result for each in self.failed]

    @property
    def attempts(self) -> list[ExecutionAttempt]:
        """Every attempt of every round."""
        return [attempt for result in self.results for attempt in result.attempts]

    @property
    def wait(self) -> Wait | None:
        """What is still to wait before the next."""
        return self.failed[-1].wait if self.failed else None

    def own_attempts(self, result: ExecutionResult) -> ExecutionResult:
        """Return a round's result without the attempts of earlier rounds at the same step."""
        known = {(each.attempt_id, each.started_at) for each in self.attempts}
        own = [each for each in result.attempts if (each.attempt_id, each.started_at) not in known]
        return replace(result, attempts=own)

    async def add(self, result: ExecutionResult, wait_seconds: float | None) -> None:
        """Record that a round failed, and the wait that begins now."""
        wait = None if wait_seconds is None else Wait.begin(self._clock, wait_seconds)
        failed = FailedRound(result=result, wait=wait)
        await self._record(EntryKind.ROUND_FAILED, _round_facts(failed))
        self.failed.append(failed)

    def escalated(self) -> Mapping[str, Any] | None:
        """Return what was recorded when level 2 gave up, if it did."""
        return self._escalated(self._identities[-1]) if self._run else None

    def ticket(self) -> str | None:
        """Return the ticket that was made for this failure in an earlier round around it."""
        ends = [self._escalated(identity) for identity in self._identities[:-1]]
        return next((end["ticket"] for end in ends if end is not None and end["ticket"]), None)

    def _escalated(self, identity: bytes) -> Mapping[str, Any] | None:
        entry = self._run.state.escalated.get(identity) if self._run else None
        return facts_of(entry) if entry is not None else None

    async def escalate(self, facts: dict[str, Any]) -> None:
        """Record that level 2 gave up."""
        await self._record(EntryKind.ESCALATED, facts)

    async def _record(
        self, kind: EntryKind, facts: dict[str, Any], identity: bytes | None = None
    ) -> None:
        if self._run is not None:
            entry = NewEntry(
                kind,
                facts=codec.dump_canonical(facts),
                identity=identity or self._identities[-1],
                at=to_micros(self._clock.now()),
            )
            await self._run.record(entry, sync=True)


# --- what level 1 made of a round ----------------------------------------------------------------


def failed_result(
    error: Exception,
    *,
    name: str,
    persona: str | None,
    execution_id: str,
    number: int,
    started_at: datetime,
    ended_at: datetime,
) -> ExecutionResult:
    """Return a round that raised as level 1 would: its own result, or one with one attempt."""
    found = error.result if isinstance(error, UnrecoverableError) else None
    if isinstance(found, ExecutionResult):
        result = found
    else:
        result = ExecutionResult(
            execution_id=execution_id,
            task_name=name,
            persona_id=persona or "",
            final_status=ExecutionStatus.FAILED,
            attempts=[_attempt_of(error, number, started_at, ended_at)],
            total_duration_seconds=(ended_at - started_at).total_seconds(),
        )
    return replace(result, failure_report=report_of(error) or report_of(result))


def report_of(failure: object) -> FailureReport | None:
    """Return the report that an error or a result came with, if it is one."""
    found = (
        failure.failure_report
        if isinstance(failure, UnrecoverableError | ExecutionResult)
        else None
    )
    return found if isinstance(found, FailureReport) else None


def original_of(error: Exception | None) -> Exception | None:
    """Return the error that level 1 gave up over, if it says so."""
    found: object = error.original_error if isinstance(error, UnrecoverableError) else None
    return found if isinstance(found, Exception) else None


def _attempt_of(
    error: Exception, number: int, started_at: datetime, ended_at: datetime
) -> ExecutionAttempt:
    facts = error_facts(original_of(error) or error)
    return ExecutionAttempt(
        attempt_id=f"round-{number}",
        attempt_number=1,
        started_at=started_at,
        ended_at=ended_at,
        status=ExecutionStatus.FAILED,
        error_message=facts["message"],
        error_type=facts["type"],
        error_traceback=facts["traceback"],
    )


def reported(
    result: ExecutionResult, error: Exception | None, *, name: str, persona: str | None
) -> ExecutionResult:
    """Return the result with a report that lists each of its attempts, as plain data."""
    report = report_of(result) or FailureReport(
        failed_persona=persona or result.persona_id or name,
        error_category=classify(error).value if error is not None else "UNKNOWN",
        details=plain_text(error) if error is not None else f"{name} ended without a result",
    )
    listed = [_attempt_facts(attempt) for attempt in result.attempts]
    plain = replace(report, context=listed, attempt_number=len(listed)).to_dict()
    return replace(result, failure_report=report_from(plain))


def plain_text(error: BaseException) -> str:
    """Return ``Type: message``, also of an error that cannot show itself."""
    facts = error_facts(error)
    kind, message = facts["type"], facts["message"]
    return kind if message == kind else f"{kind}: {message}"


# --- as plain JSON -------------------------------------------------------------------------------


def _attempt_facts(attempt: ExecutionAttempt) -> dict[str, Any]:
    return {
        "attempt_id": attempt.attempt_id,
        "attempt_number": attempt.attempt_number,
        "started_at": attempt.started_at.isoformat(),
        "ended_at": attempt.ended_at.isoformat() if attempt.ended_at else None,
        "status": attempt.status.value,
        "error_type": attempt.error_type,
        "error_message": (attempt.error_message or "")[:_LONGEST_TEXT] or None,
        "tokens_used": attempt.tokens_used,
    }


def _round_facts(failed: FailedRound) -> dict[str, Any]:
    result = failed.result
    return {
        "execution_id": result.execution_id,
        "name": result.task_name,
        "persona": result.persona_id,
        "status": result.final_status.value,
        "seconds": result.total_duration_seconds,
        "tokens": result.total_tokens_used,
        "report": failed.report.to_dict(),
        "wait": failed.wait.to_facts() if failed.wait else None,
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
    return FailedRound(result=result, wait=Wait.from_facts(wait) if wait else None)


def report_from(facts: Mapping[str, Any]) -> FailureReport:
    """Return the report that was written down, or is to be: its texts are texts, and no novels."""
    fix = facts["suggested_fix"]
    texts = {name: _text(facts[name]) for name in ("failed_persona", "error_category", "details")}
    plain = {**copy.deepcopy(dict(facts)), **texts}  # others read the same facts
    return FailureReport(**{**plain, "suggested_fix": _text(fix) if fix else None})


def _text(value: object) -> str:
    return str(value)[:_LONGEST_TEXT]


def _attempt_from(facts: Mapping[str, Any]) -> ExecutionAttempt:
    ended_at = facts["ended_at"]
    return ExecutionAttempt(
        attempt_id=facts["attempt_id"],
        attempt_number=facts["attempt_number"],
        started_at=datetime.fromisoformat(facts["started_at"]),
        ended_at=datetime.fromisoformat(ended_at) if ended_at else None,
        status=ExecutionStatus(facts["status"]),
        error_type=facts["error_type"],
        error_message=facts["error_message"],
        tokens_used=facts["tokens_used"],
    )
