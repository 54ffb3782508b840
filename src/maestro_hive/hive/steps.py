"""How a workflow's call of a step becomes a step of its run: planned, found or executed, delivered."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from maestro_hive.engine import values
from maestro_hive.engine.errors import (
    CircuitBreakerOpen,
    HelpNeeded,
    TokenBudgetExceeded,
    UnrecoverableError,
    parts_of,
)
from maestro_hive.engine.failures import error_facts, with_own_lines
from maestro_hive.engine.healing.stage import judge_completed
from maestro_hive.engine.open_run import Turn
from maestro_hive.engine.plan import EarlierCalls
from maestro_hive.engine.recorded_errors import (
    StepFailure,
    attach_failure,
    error_from,
    failed_attempts,
)
from maestro_hive.engine.rounds import Rounds, RoundsSkippedError
from maestro_hive.engine.step import StepExecution
from maestro_hive.engine.step_record import RunStep, steps_around
from maestro_hive.engine.values import OwnArguments
from maestro_hive.hive import runs
from maestro_hive.hive.branches import CONTENT_BYTES, Operation, enter_body
from maestro_hive.hive.escalating import StepEscalation
from maestro_hive.hive.run_context import prepare
from maestro_hive.kernel.errors import (
    CorruptionError,
    FencedError,
    FolderError,
    NewerFormatError,
    RunLeasedError,
    StorageError,
    StoreBusyError,
)
from maestro_hive.maestro.state import codec
from maestro_hive.maestro.state.projections import facts_of
from maestro_hive.maestro.state.records import EntryKind

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from maestro_hive.engine.plan import EncodeCall, Plan
    from maestro_hive.hive.active_run import ActiveRun
    from maestro_hive.hive.functions import StepFunction
    from maestro_hive.hive.run_context import PreparedStep, RunContext
    from maestro_hive.maestro.state.records import Entry

#: What says nothing about the workflow: it is suspended, and resumed at its next start.
_SUSPENDING = (
    CircuitBreakerOpen,
    CorruptionError,
    FencedError,
    FolderError,
    NewerFormatError,
    RunLeasedError,
    StorageError,
    StoreBusyError,
)


class StepArguments(NamedTuple):
    """What is called, with its arguments; ``own`` makes those of each attempt."""

    task: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    own: OwnArguments | None
    is_async: bool
    #: Whether other calls may be the same step: it has a key.
    is_shared: bool


class _Failed(NamedTuple):
    """How a step failed for good: what is recorded of it, and what the engine raised."""

    facts: dict[str, Any]
    error: Exception
    record: RunStep
    #: Whether a person is asked before the workflow gets the error.
    escalates: bool = False


class StepCalls:
    """The calls of steps in one run."""

    def __init__(self, active: ActiveRun, context: RunContext) -> None:
        self._active = active
        self._context = context
        self._prepared: dict[StepFunction[..., Any], PreparedStep] = {}
        self._earlier = EarlierCalls(active.run.state)

    async def call(
        self,
        step: StepFunction[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        key: str | None = None,
        task: Callable[..., Any] | None = None,
    ) -> Any:
        """Return a step's result: from the journal if it is there, else by executing it.

        ``task`` is what is called with the arguments, where it is not the step's function itself.
        """
        active = self._active
        operation = Operation(active)
        try:
            own = None
            if codec.is_small(args) and (not kwargs or codec.is_small(kwargs.values())):
                plan = self._planned(operation, step, args, kwargs, key)
            else:
                own = OwnArguments(args, kwargs)
                if own.characters is None:
                    plan = await self._planned_large(operation, step, *own.planned, key)
                else:
                    encode = partial(codec.encode_call, characters=own.characters)
                    plan = self._planned(operation, step, *own.planned, key, encode)
                own.encoded = plan.encoded
            if active.resumed_at and not active.replay.claim(plan.identity) and key is None:
                plan = await self._find_moved(operation, plan)
            outcome = self._outcome(plan)
            if outcome is not None:
                if active.run.state.unjudged:
                    await self._judge(step, plan)
                if outcome.kind != EntryKind.STEP_CANCELLED:
                    return await self._deliver(operation, plan, outcome)
                known = active.run.state.by_identity.get(plan.identity)
                await operation.cancelled_again(outcome, None if known is None else known.started)
            await operation.may_execute(plan.name)
            body, is_async = task or step.task, step.is_async
            if self._context.substitutes is not None:
                body, is_async = self._substitute(step, plan, body), True
            call = StepArguments(body, args, kwargs, own, is_async, key is not None)
            return await self._execute(operation, step, plan, call)
        except Exception as error:
            with_own_lines(error)
            raise
        finally:
            operation.close()

    def _substitute(
        self, step: StepFunction[..., Any], plan: Plan, task: Callable[..., Any]
    ) -> Callable[..., Any]:
        assert self._context.substitutes is not None
        run_id = self._active.run_id
        return self._context.substitutes.body(step, run_id, plan.identity, task)

    def _planned(
        self,
        operation: Operation,
        step: StepFunction[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        key: str | None,
        encode: EncodeCall = codec.encode_call,
    ) -> Plan:
        """Return which step a call is."""
        return step.planner.plan(
            args,
            kwargs,
            key=key,
            store_input=step.options.store_input,
            hidden=step.parameters.hidden,
            encode=encode,
            place=operation.place if key is None else operation.place_by_key,
        )

    async def _planned_large(
        self,
        operation: Operation,
        step: StepFunction[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        key: str | None,
    ) -> Plan:
        """Return which step a call is whose arguments may be large: in a thread, if they are."""
        operation.hold()
        try:
            return await values.plan(
                partial(self._planned, operation, step, args, kwargs, key), args, kwargs
            )
        finally:
            operation.release()

    async def _find_moved(self, operation: Operation, plan: Plan) -> Plan:
        """Return the plan with the identity under which earlier code recorded the step, if it did."""
        replay = self._active.replay
        earlier = self._earlier.contents(plan)
        for content in earlier:
            identity = operation.place_of(content)
            if replay.claim(identity):
                operation.identity = identity
                return self._matched(plan, identity)
        await operation.find_moved(plan.content, *earlier)
        if operation.identity == plan.identity:
            return plan
        return self._matched(plan, operation.identity)

    def _matched(self, plan: Plan, identity: bytes) -> Plan:
        """Return the plan of a step that changed code asks for in another way."""
        entry = self._earlier.match(plan, identity[:CONTENT_BYTES])
        if entry is not None:
            # At once: while it waited, it could be cancelled before its own cancellation is found.
            with self._active.suspended_by_failure:
                self._active.run.append([entry], sync=False)
        return plan.at(identity)

    # --- what is recorded ---

    def _outcome(self, plan: Plan) -> Entry | None:
        """Return the entry of a step's outcome, if it has one."""
        state = self._active.run.state
        found = state.by_identity.get(plan.identity)
        if found is not None and found.completed is not None:
            return found.completed
        return state.outcomes.get(plan.identity)

    async def _deliver(self, operation: Operation, plan: Plan, outcome: Entry) -> Any:
        """Return or raise what is recorded, when it is its turn."""
        if outcome.kind == EntryKind.STEP_FAILED:
            await operation.turn(outcome, outcome.facts)
            return self._raise(plan, outcome)
        result = None
        with self._active.suspended_by_failure:  # as by a class that is not imported here
            data = self._active.run.store.load(outcome)
            if data and values.is_large(data):
                operation.reserve(outcome)  # others may be delivered while it is decoded
                result = await values.decode(data, "result")
            elif data:
                result = codec.decode(data, "result")
        await _turn_of(operation, outcome)
        return result

    async def _judge(self, step: StepFunction[..., Any], plan: Plan) -> None:
        """Record the verdicts that a process did not live to record, of a step that it completed."""
        state = self._active.run.state.by_identity.get(plan.identity)
        if state is None or state.completed is None or not state.repairs:
            return
        definition = step.definition
        spec = (self._prepared.get(definition) or self._prepare(definition)).spec
        record = RunStep(self._active.run, plan, 1)
        with self._active.suspended_by_failure:
            await judge_completed(StepExecution(spec, record, step.name, step.task, (), {}, True))

    def _raise(self, plan: Plan, outcome: Entry) -> None:
        """Raise a step's own error, as it is recorded; return if it is to be skipped."""
        facts = facts_of(outcome)
        if facts.get("skipped"):
            return
        error = error_from(facts["error"])
        attempts = failed_attempts(RunStep(self._active.run, plan, 1).attempts())
        failure = StepFailure(
            step=plan.name,
            persona=plan.persona,
            attempts=attempts,
            rounds=int(facts.get("rounds", 1)),
            ticket=facts.get("ticket"),
            identity=plan.identity.hex(),
        )
        attach_failure(error, failure)
        raise error

    # --- executing ---

    async def _execute(
        self,
        operation: Operation,
        step: StepFunction[..., Any],
        plan: Plan,
        call: StepArguments,
    ) -> Any:
        run = self._active.run
        prepared = self._prepared.get(step.definition) or self._prepare(step.definition)
        turn = Turn(run, plan.identity, plan.name)
        while not turn.take():
            await turn.wait()
            outcome = self._outcome(plan)
            if outcome is not None and outcome.kind != EntryKind.STEP_CANCELLED:
                return await self._deliver(operation, plan, outcome)
        try:
            while True:
                try:
                    result, failed = await self._attempted(operation, step, prepared, plan, call)
                    goes_on = failed is not None and await self._escalate(operation, plan, failed)
                except asyncio.CancelledError:
                    # Not around what delivers an outcome: that ends in its turn by itself.
                    await self._cancelled(operation, plan, is_shared=call.is_shared)
                    raise
                if failed is None:
                    break
                # Not in an except block: the engine's error would become the context of the step's.
                if not goes_on:
                    return await self._failed(operation, plan, failed.facts)
                outcome = self._outcome(plan)
                if outcome is not None:  # a person gave it
                    return await self._deliver(operation, plan, outcome)
        finally:
            turn.give_back()
        completed = run.state.by_identity[plan.identity].completed
        if completed is not None:  # unless the run was reset meanwhile
            await _turn_of(operation, completed)
        return result

    async def _attempted(
        self,
        operation: Operation,
        step: StepFunction[..., Any],
        prepared: PreparedStep,
        plan: Plan,
        call: StepArguments,
    ) -> tuple[Any, _Failed | None]:
        """Make all attempts of a step; return its result, or how it failed for good."""
        active, run = self._active, self._active.run
        record = RunStep(run, plan, 1)
        execution = StepExecution(
            prepared.spec,
            record,
            step.name,
            call.task,
            call.args,
            call.kwargs,
            call.is_async,
            call.own,
        )
        entered = enter_body if active.resumed_note is None else self._enter_resumed
        execution.on_attempt = partial(entered, plan.identity)
        execution.on_completed = operation.reserve
        rounds = Rounds(prepared.policy, execution, run, plan.identity)
        try:
            work = _checked(execution, rounds) if prepared.spec.checks else rounds.run()
            return await work, None
        except RoundsSkippedError as skipped:
            return None, _Failed({"skipped": True}, skipped, record)
        except Exception as error:
            if _suspends(error):
                await self._let_calls_end(operation, plan, error, is_shared=call.is_shared)
                raise active.suspended(error) from error
            facts = {"error": _own_error(error, record), "rounds": max(1, len(rounds.failed))}
            return None, _Failed(facts, error, record, bool(step.options.escalate))

    async def _escalate(self, operation: Operation, plan: Plan, failed: _Failed) -> bool:
        """Ask a person about a step that failed for good; False if its workflow gets the error."""
        escalation = None
        if failed.escalates:
            escalation = StepEscalation.of(self._active, plan)
        if escalation is None:
            return False
        try:
            reply = await escalation.reply(failed.error, failed.record.attempts())
        except asyncio.CancelledError:
            escalation.withdraw()
            raise
        entry = escalation.entry_of(reply)
        if entry is None:
            return False
        with self._active.suspended_by_failure:
            await self._active.run.record(entry, sync=True)
        return True

    def _enter_resumed(self, identity: bytes) -> None:
        enter_body(identity)
        self._active.note_resumed()

    async def _failed(self, operation: Operation, plan: Plan, facts: dict[str, Any]) -> Any:
        """Record that a step failed for good, and raise its error."""
        run = self._active.run
        with self._active.suspended_by_failure:
            try:
                await run.record(runs.step_failed(plan.identity, plan.name, **facts), sync=True)
            except asyncio.CancelledError:
                await operation.end_cancelled(run.state.outcomes[plan.identity])
                raise
        return await self._deliver(operation, plan, run.state.outcomes[plan.identity])

    async def _let_calls_end(
        self, operation: Operation, plan: Plan, error: Exception, *, is_shared: bool
    ) -> None:
        """Return when a run that a budget has stopped may be suspended: calls in flight are paid for."""
        if not isinstance(error, TokenBudgetExceeded):
            return
        try:
            await self._active.let_calls_end(error, steps_around(self._active.run))
        except asyncio.CancelledError:
            await self._cancelled(operation, plan, is_shared=is_shared)
            raise

    async def _cancelled(self, operation: Operation, plan: Plan, *, is_shared: bool) -> None:
        """Record that the workflow cancelled a step, unless it has another outcome.

        Of one that other calls share, by its key, it is no end.
        """
        outcome = self._outcome(plan)
        if outcome is not None:
            await operation.end_cancelled(outcome)
        elif not is_shared:
            cancelled = runs.step_cancelled(plan.identity, plan.name)
            await operation.record_cancelled(cancelled, partial(self._outcome, plan))

    def _prepare(self, step: StepFunction[..., Any]) -> PreparedStep:
        prepared = step.prepared
        if prepared is None or prepared.context is not self._context:
            prepared = prepare(self._context, step, self._active)
            if not prepared.is_of_one_run:
                step.prepared = prepared
        self._prepared[step] = prepared
        return prepared


def _turn_of(operation: Operation, completed: Entry) -> Awaitable[None]:
    """Return what ends when it is the turn of a step's result."""
    if completed.facts and facts_of(completed).get("cancelled"):
        # It was cancelled, and completed all the same: so it is again.
        return operation.turn_despite_cancellation(completed, completed.sha256)
    return operation.turn(completed, completed.sha256)


async def _checked(execution: StepExecution, rounds: Rounds) -> Any:
    """Check a step before a breaker is asked for a permit: a person may take days to approve it."""
    await execution.check()
    return await rounds.run()


def is_suspending(error: BaseException) -> bool:
    """Return whether an error says nothing about the workflow."""
    return any(isinstance(part, _SUSPENDING) for part in parts_of(error))


def _suspends(error: Exception) -> bool:
    """Return whether the run is suspended by what a step raised, and the workflow sees nothing of it."""
    match error:
        case TokenBudgetExceeded():
            return error.context.get("scope") != "step"  # which is the step's own
        case HelpNeeded() if error.jira_ticket is not None:
            return True  # a version before the option ``escalate`` asked a person
        case HelpNeeded() | UnrecoverableError():
            facts: object = error.context
            return isinstance(facts, dict) and bool(facts.get("needs_retry"))
        case _:
            return is_suspending(error)


def _own_error(error: Exception, record: RunStep) -> dict[str, Any]:
    """Return the facts of the error that the step's own code raised, where the engine gave up."""
    gave_up = isinstance(error, HelpNeeded | UnrecoverableError) and error.result is not None
    if gave_up and not error.context.get("ambiguous"):  # type: ignore[attr-defined]
        last = record.state.last_failure if record.state is not None else None
        if last is not None:
            return dict(facts_of(last)["error"])
    return error_facts(error)
