"""The rounds of level 2 that failed, and how it ended: kept in a run, or in memory alone."""

from __future__ import annotations

import traceback
from dataclasses import dataclass, replace
from datetime import datetime
from typing import TYPE_CHECKING, Any

from maestro_hive.maestro.state import codec
from maestro_hive.maestro.state.records import EntryKind, NewEntry, to_micros
from maestro_hive.maestro.state.run_state import facts_of
from maestro_hive.unified_execution.error_signs import classify
from maestro_hive.unified_execution.exceptions import FailureReport, UnrecoverableError
from maestro_hive.unified_execution.results import (
    ExecutionAttempt,
    ExecutionResult,
    ExecutionStatus,
)
from maestro_hive.unified_execution.waits import Wait

if TYPE_CHECKING:
    from collections.abc import Mapping

    from maestro_hive.kernel.clock import Clock
    from maestro_hive.maestro.state.records import Entry
    from maestro_hive.unified_execution.held_run import HeldRun

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
    """The failed rounds of one call; in a run they survive a restart."""

    def __init__(self, clock: Clock, run: HeldRun | None = None, identity: bytes = b"") -> None:
        self._clock = clock
        self._run = run
        self._identity = identity
        kept = run.state.rounds.get(identity, []) if run else []
        self.failed: list[FailedRound] = [_round_from(entry) for entry in kept]

    async def start_over(self) -> None:
        """Let what was made before count no more."""
        if self.failed or self.escalated() is not None:
            await self._record(EntryKind.RETRIED, {})
            self.failed = []

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
        entry = self._run.state.escalated.get(self._identity) if self._run else None
        return facts_of(entry) if entry is not None else None

    async def escalate(self, facts: dict[str, Any]) -> None:
        """Record that level 2 gave up."""
        await self._record(EntryKind.ESCALATED, facts)

    async def _record(self, kind: EntryKind, facts: dict[str, Any]) -> None:
        if self._run is not None:
            entry = NewEntry(
                kind,
                facts=codec.dump_canonical(facts),
                identity=self._identity,
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
            attempts=[_attempt_of(error, started_at, ended_at)],
            total_duration_seconds=(ended_at - started_at).total_seconds(),
        )
    given = error.failure_report if isinstance(error, UnrecoverableError) else None
    return replace(result, failure_report=given or result.failure_report)


def _attempt_of(error: Exception, started_at: datetime, ended_at: datetime) -> ExecutionAttempt:
    original = error.original_error if isinstance(error, UnrecoverableError) else None
    cause = original or error
    return ExecutionAttempt(
        attempt_id=f"round-{started_at.isoformat()}",
        attempt_number=1,
        started_at=started_at,
        ended_at=ended_at,
        status=ExecutionStatus.FAILED,
        error_message=plain_text(cause).removeprefix(f"{type(cause).__name__}: "),
        error_type=type(cause).__name__,
        error_traceback="".join(traceback.format_exception(cause)),
    )


def reported(
    result: ExecutionResult, error: Exception | None, *, name: str, persona: str | None
) -> ExecutionResult:
    """Return the result with a report that lists each of its attempts."""
    report = result.failure_report or FailureReport(
        failed_persona=persona or result.persona_id or name,
        error_category=classify(error).value if error is not None else "UNKNOWN",
        details=plain_text(error) if error is not None else f"{name} ended without a result",
    )
    listed = [_attempt_facts(attempt) for attempt in result.attempts]
    report = replace(report, context=listed, attempt_number=len(listed))
    return replace(result, failure_report=report)


def plain_text(error: BaseException) -> str:
    """Return ``Type: message``, also of an error that cannot show itself."""
    shown = "".join(traceback.format_exception_only(error)).strip()
    return shown.encode("utf-8", "backslashreplace").decode()[:_LONGEST_TEXT]


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
    report = replace(failed.report, details=str(failed.report.details)[:_LONGEST_TEXT])
    return {
        "execution_id": result.execution_id,
        "name": result.task_name,
        "persona": result.persona_id,
        "status": result.final_status.value,
        "seconds": result.total_duration_seconds,
        "tokens": result.total_tokens_used,
        "report": report.to_dict(),
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
    """Return the report that was written down."""
    return FailureReport(**{**facts, "context": list(facts["context"])})


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
