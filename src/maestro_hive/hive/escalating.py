"""A step that failed for good and has ``escalate=True``: its run waits until a person says what to do.

The escalation is a wait of the run, so that the run is listed as waiting, released from memory and
woken like any run that waits for an answer. It is recorded with the outbox document of ``engine.outbox``
in one transaction. The answer is a message in the run's inbox, and is taken once.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from maestro_hive.engine import escalation as texts
from maestro_hive.engine import outbox
from maestro_hive.engine.errors import FailureReport
from maestro_hive.engine.failures import attempt_facts, report_of
from maestro_hive.engine.outbox import StoredEscalation
from maestro_hive.engine.plan import effect_key
from maestro_hive.engine.results import ExecutionResult
from maestro_hive.hive import runs
from maestro_hive.kernel.errors import CorruptionError
from maestro_hive.maestro.state import codec
from maestro_hive.maestro.state.projections import facts_of
from maestro_hive.maestro.state.records import EntryKind, NewEntry

if TYPE_CHECKING:
    from collections.abc import Mapping

    from maestro_hive.engine.plan import Plan
    from maestro_hive.engine.results import ExecutionAttempt
    from maestro_hive.hive.active_run import ActiveRun
    from maestro_hive.maestro.state.projections import StepState
    from maestro_hive.maestro.state.records import Entry
    from maestro_hive.maestro.state.strict_json import Json

#: The kinds of answers, as they are recorded.
FEEDBACK, RESULT, GIVE_UP = "feedback", "result", "give_up"


class Reply(NamedTuple):
    """What a person said about a step that failed for good; ``value`` is a text, or the result."""

    kind: str
    value: Json
    by: str | None = None

    @classmethod
    def read(cls, data: bytes | None, by: str | None = None) -> Reply:
        """Return what a recorded answer says."""
        return cls.of(codec.parse(data or b"null", "the answer", depth=codec.DOCUMENT_DEPTH), by)

    @classmethod
    def of(cls, given: Json, by: str | None = None) -> Reply:
        """Return what an answer says."""
        match given:
            case {"feedback": str(text)}:
                return cls(FEEDBACK, text, by)
            case {"result": tree}:
                return cls(RESULT, tree, by)
            case {"give_up": str(text)}:
                return cls(GIVE_UP, text, by)
            case other:
                raise CorruptionError(f"the answer to an escalation is {other!r:.100}")

    @property
    def in_words(self) -> str:
        """What was said, and by whom."""
        who = self.by or "A person"
        match self.kind:
            case "feedback":
                return f"{who} answered: {self.value}"
            case "result":
                return f"{who} gave the result {codec.dump(self.value).decode()}"
            case _:
                return f"{who} gave up{f': {self.value}' if self.value else ''}"

    @property
    def outcome(self) -> str:
        """How an escalation ended by it, for those who read the ticket."""
        match self.kind:
            case "feedback":
                return f"{self.in_words}\n\nThe step is attempted again with that."
            case "result":
                who = self.by or "A person"
                return f"{who} gave the result of the step, and its run goes on with that."
            case _:
                return f"{self.in_words}. The workflow got the error of the step."


@dataclass(slots=True, eq=False)
class StepEscalation:
    """The escalation of one final failure of a step."""

    run: ActiveRun
    plan: Plan
    step: StepState
    #: Of the question that its run waits for.
    identity: bytes

    @classmethod
    def of(cls, run: ActiveRun, plan: Plan) -> StepEscalation | None:
        """Return the escalation of a step's last failure; None if it has none: it was never called."""
        step = run.run.state.by_identity.get(plan.identity)
        if step is None or step.completed is not None:
            return None
        # Not by the attempt: a kill may have cut one off, and the escalation is the same.
        identity = runs.identity_of("escalation", plan.identity, str(step.retries))
        return cls(run, plan, step, identity)

    @property
    def id(self) -> str:
        """What a person names it by."""
        return outbox.escalation_id(self.run.run_id, self.identity)

    async def reply(self, error: Exception, attempts: list[ExecutionAttempt]) -> Reply:
        """Return what a person says about the failure, wherever and whenever that was."""
        run, state = self.run, self.run.run.state
        ended = state.answers.get(self.identity)
        if ended is None or facts_of(ended).get("how") != "answered":
            await self._ask(error, attempts)
            run.await_escalation(self.id)
            await self._answered()
            ended = state.answers[self.identity]
        self.note_delivered()
        with run.suspended_by_failure:
            reply = Reply.read(run.run.store.load(ended), facts_of(ended).get("by"))
        run.context.escalations.end(self.id, reply.outcome)
        return reply

    def entry_of(self, reply: Reply) -> NewEntry | None:
        """Return what is recorded of a reply: the result, or that it is executed again."""
        by = {"by": reply.by} if reply.by else {}
        facts: dict[str, Json] = {"resolved": True, "escalation": self.id, **by}
        match reply.kind:
            case "feedback":
                known = codec.dump_canonical({**facts, "feedback": reply.value})
                return NewEntry(EntryKind.RETRIED, facts=known, identity=self.plan.identity)
            case "result":
                value, known = codec.encoded(codec.dump(reply.value)), codec.dump_canonical(facts)
                number, attempt = self.step.number, self.step.last_attempt
                return NewEntry(EntryKind.STEP_COMPLETED, number, attempt, known, value)
            case _:
                return None

    def withdraw(self) -> None:
        """Record that the workflow cancelled the step: nobody is asked any more."""
        if self.run.is_stopping or self.identity not in self.run.run.state.questions:
            return
        with self.run.suspended_by_failure:
            self.run.append(runs.wait_ended(self.identity, self.plan.name, "cancelled"))
        self.run.context.escalations.end(self.id, "The workflow no longer needs the step.")

    # --- asking ---

    async def _ask(self, error: Exception, attempts: list[ExecutionAttempt]) -> None:
        """Record the question and the escalation, unless that was done in an earlier life."""
        run, state = self.run, self.run.run.state
        started = state.waits.get(self.identity)
        if started is not None and self.identity in state.questions:
            # A run that was imported has no outbox here.
            about = codec.parse(run.run.store.load(started) or b"{}", "the escalation")
            run.context.escalations.add(self._record(about, started))
            return
        case = self._case(error, attempts).to_json()
        about = codec.encode(case, "the escalation")
        asked = runs.wait_started(
            self.identity,
            self.plan.name,
            runs.ESCALATION,
            about,
            returns=self._shape,
            escalation=self.id,
            step=self.plan.identity.hex(),
        )
        with run.suspended_by_failure:
            await run.record(asked, change=outbox.added(self._record(case, None)))

    @property
    def _shape(self) -> Json:
        starts = [each for each in self.step.log if each.kind == EntryKind.ATTEMPT_STARTED]
        return facts_of((starts or [self.step.started])[-1]).get("returns")

    def _record(self, case: Mapping[str, Json], started: Entry | None) -> StoredEscalation:
        clock, system = self.run.run.store.clock, self.run.context.escalations.system
        record = self.run.run.store.run(self.run.run_id)
        if not isinstance(case, dict):
            raise CorruptionError(f"run {self.run.run_id}: what is escalated is {case!r:.40}")
        return StoredEscalation(
            id=self.id,
            run_id=self.run.run_id,
            workflow="" if record is None else record.workflow,
            step=self.run.run.label(self.step.number) or self.plan.name,
            persona=self.plan.persona,
            identity=self.plan.identity.hex(),
            question=self.identity.hex(),
            at=clock.nanos() // 1000 if started is None else started.at,
            case=dict(case),
            shape=self._shape,
            system=None if system is None else system.name,
            finds=system is not None and system.finds,
        )

    def _case(self, error: Exception, attempts: list[ExecutionAttempt]) -> texts.EscalationCase:
        run_id, name = self.run.run_id, self.plan.name
        last = facts_of(self.step.last_failure)["error"] if self.step.last_failure else {}
        report = report_of(error) or FailureReport(
            failed_persona=self.plan.persona,
            error_category=str(last.get("category") or "UNKNOWN"),
            details=str(last.get("message") or error),
        )
        listed = [attempt_facts(each) for each in attempts]
        report = replace(report, context=listed, attempt_number=len(listed))
        result = ExecutionResult(run_id, name, self.plan.persona, attempts=attempts)
        return texts.EscalationCase(
            run_id=run_id,
            task_name=name,
            effect_key=effect_key(run_id, self.identity),
            summary=texts.summarise(name, report),
            description=texts.describe(
                task_name=name,
                run_id=run_id,
                report=report,
                rounds=[result],
                actions=texts.answers_for(self.id, report, comments=self._takes_comments),
            ),
            failure_report=report,
            labels=texts.labels_for(report),
            fingerprint=texts.fingerprint_of(name, report, self.step),
        )

    @property
    def _takes_comments(self) -> bool:
        system = self.run.context.escalations.system
        return system is not None and system.finds

    # --- waiting ---

    async def _answered(self) -> None:
        """Return when the answer is recorded."""
        run = self.run
        arrived = run.listen(self.identity)
        run.check_inbox()
        told = run.context.escalations.when_told
        told[self.id] = self._note_soon
        try:
            with run.waiting(self, None):
                await asyncio.wait({arrived})
            prevented = arrived.exception()  # why it could not be recorded
            if isinstance(prevented, Exception):
                raise run.suspended(prevented) from prevented
        finally:
            told.pop(self.id, None)
            run.stop_listening(self.identity)

    def _note_soon(self) -> None:
        """Record that a person was told, while it waits; if that fails, the run is suspended."""
        try:
            self.note_delivered()
        except asyncio.CancelledError:
            return  # it is suspended by now

    def note_delivered(self) -> None:
        """Record, for people, that and where a person was told; once."""
        run = self.run.run
        record = outbox.found_escalation(run.store, self.id)
        if record is None or not record.delivered or self.id in run.state.delivered:
            return
        with self.run.suspended_by_failure:
            run.append(
                [outbox.delivered_entry(self.plan.identity, self.plan.name, record)], sync=False
            )
