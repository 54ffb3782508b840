"""THE PATH: how one step comes to its outcome, whoever calls it.

completed? return → ambiguous? → wait for the rest of a backoff → admission by the stages and
"started", in one transaction → call the body → record its outcome and return it, or decide by the
retry policy: another attempt, the next round, or the end.
"""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from random import SystemRandom
from typing import TYPE_CHECKING, Literal

from maestro_hive.engine import outcomes
from maestro_hive.engine.attempt import Attempt, call_body, restart_stream
from maestro_hive.engine.errors import AmbiguousStepError, described
from maestro_hive.engine.execution_log import log_attempt, log_failure
from maestro_hive.engine.retry_policy import Decision, decide
from maestro_hive.journal.entries import StepClosed
from maestro_hive.journal.state import Outcome
from maestro_hive.kernel.errors import FencedError, RefusedError, RunInterruptedError
from maestro_hive.kernel.signals import interrupted

if TYPE_CHECKING:
    from maestro_hive.engine.attempt import StepStages
    from maestro_hive.engine.context import StepContext
    from maestro_hive.engine.plan import Plan
    from maestro_hive.journal.effects import Effect
    from maestro_hive.journal.entries import Entry
    from maestro_hive.journal.recorder import RunJournal
    from maestro_hive.journal.state import StepState
    from maestro_hive.journal.values import Encoded

    Phase = Literal["enter", "leave", "stopped"]

_random = SystemRandom()  # which forked processes do not share


#: How soon after a signal the runs of a program are stopped.
_STOP_SECONDS = 0.1


class StepExecution:
    """The execution of one step on the outer loop; its workflow or a stop may end it."""

    def __init__(
        self, plan: Plan, journal: RunJournal, stages: StepStages, *, is_nested: bool = False
    ) -> None:
        self.plan, self.journal, self._all_stages = plan, journal, stages
        self._stages = stages.of(plan.definition)
        self.is_cancelled = self.is_stopped = False
        #: The result of the body, in the life that has executed it.
        self.result: Encoded | None = None
        #: A step in the body of another ends with that body, and is never cancelled by itself.
        self._is_nested = is_nested
        self._task: asyncio.Task[object] | None = None

    def cancel(self) -> None:
        """End it for its workflow, which does not want the result."""
        self.is_cancelled = True
        if self._task is not None:
            self._task.cancel()

    def stop(self) -> None:
        """End it for this process alone: neither a failure nor an interruption."""
        self.is_stopped = True
        if self._task is not None:
            self._task.cancel()

    async def run(self) -> Outcome:  # noqa: C901, PLR0912 - the path, read from top to bottom
        """Execute the step to its outcome, over all attempts and rounds, and return its record."""
        plan, journal = self.plan, self.journal
        if (known := journal.state.outcomes.get(plan.identity)) is not None:
            return known

        step = journal.state.step(plan.identity)
        attempt: Attempt | None = None
        try:
            if not self._is_nested:
                self._task = asyncio.current_task()
            if self.is_cancelled or self.is_stopped:  # before its first step
                raise asyncio.CancelledError  # noqa: TRY301 - as if it were cancelled here
            if step.starts > len(step.failed) and (decided := await self._settle_doubt(step)):
                return decided

            while True:
                if step.failed and (rest := step.failed[-1].retry_at / 1e6 - journal.now()) > 0:
                    await asyncio.sleep(rest)  # perhaps since before a restart
                attempt = Attempt(plan, journal, self._all_stages, step)
                await self._record(attempt, "enter", outcomes.attempt_started(attempt))
                restart_stream(attempt)
                log_attempt(attempt, "starts")

                try:
                    self.result = await call_body(attempt)
                except Exception as error:  # noqa: BLE001 - the user's code
                    attempt.error = error
                if attempt.loop in interrupted:  # its processes may have had the signal, too
                    await asyncio.sleep(_STOP_SECONDS)  # the stop comes, and this is no outcome
                attempt.is_over, attempt.despite = True, self.is_cancelled
                saved = () if attempt.context is None else _end(attempt, attempt.context)

                if attempt.error is None and self.result is not None:
                    completed = outcomes.step_completed(attempt, self.result)
                    log_attempt(attempt, "completed the step")
                    return await self._conclude(attempt, "leave", *saved, completed)

                assert attempt.error is not None
                saved += await self._fail(attempt, step, attempt.error)
                if attempt.decision is None or attempt.decision.round:
                    await self._record(attempt, "leave", *saved)
                    continue
                if attempt.held is not None:
                    await self._record(attempt, "leave", *saved)
                    raise attempt.held
                failed = outcomes.step_failed(plan, attempt.error, despite=attempt.despite)
                return await self._conclude(attempt, "leave", *saved, failed)

        except asyncio.CancelledError:
            if journal.state.steps.get(step.number) is not step:  # its outcome was just recorded
                raise
            stopped = () if attempt is None else _stopped(attempt, step)
            is_stop = self.is_stopped or (not self.is_cancelled and _is_loop_ending())
            if not (is_stop or self._is_nested):
                closed = StepClosed(identity=plan.identity, how="cancelled")
                return await self._conclude(attempt, "stopped", *stopped, closed)
            if attempt is not None and attempt.thread is not None:
                journal.left.append(attempt.thread)
            if stopped:
                await self._record(attempt, "stopped", *stopped)
            raise

    async def _settle_doubt(self, step: StepState) -> Outcome | None:
        """Decide about attempts of earlier lives without a recorded end; None: run it again.

        Raises if the step waits for a person: that suspends its run.
        """
        plan, definition = self.plan, self.plan.definition
        if step.interruptions > definition.max_interruptions:
            raise RunInterruptedError(plan.run_id, f"step {definition.name!r}", step.interruptions)
        if definition.options.on_ambiguous == "rerun":
            return None
        doubt = AmbiguousStepError(plan.run_id, definition.name, definition.persona, step.starts)
        if definition.options.on_ambiguous == "fail":
            return await self._conclude(None, "stopped", outcomes.step_failed(plan, doubt))
        if plan.identity not in self.journal.state.questions:
            await self._record(None, "stopped", outcomes.ambiguity(plan, step))
        raise doubt

    async def _fail(self, attempt: Attempt, step: StepState, error: Exception) -> tuple[Entry, ...]:
        """Decide what follows a failure; return its entries, with those of the stages."""
        attempt.feedback = outcomes.feedback_of(attempt, error)
        now = self.journal.now()
        if attempt.despite:
            attempt.decision = Decision(0, 0.0, "its workflow has cancelled it")
        else:
            try:
                at = datetime.fromtimestamp(now, UTC)
                attempt.decision = decide(self.plan.definition.rules, step, error, at, _random)
            except Exception as broken:  # noqa: BLE001 - the user's function
                broken.__cause__, attempt.error = error, broken
                attempt.decision = Decision(0, 0.0, "the function given as retry_on failed")
        entries: list[Entry] = []
        for stage in self._stages:
            entries += await stage.on_failure(attempt)
        log_failure(attempt, error)
        decision = attempt.decision
        retry_at = now + decision.wait if decision.round else 0.0
        return (*entries, outcomes.attempt_failed(attempt, retry_at))

    async def _record(self, attempt: Attempt | None, phase: Phase, *entries: Entry) -> Entry:
        """Record entries with the claims of the stages; while one is refused, wait and repeat."""
        while True:
            effects: list[Effect] = []
            if attempt is not None:
                for stage in self._stages:
                    effects += getattr(stage, phase)(attempt)
            try:
                return await self.journal.record(*entries, effects=effects)
            except FencedError:
                raise
            except RefusedError as refusal:
                assert attempt is not None
                for stage in self._stages:
                    await stage.refused(attempt, refusal)

    async def _conclude(self, attempt: Attempt | None, phase: Phase, *entries: Entry) -> Outcome:
        """Record the outcome of the step."""
        entry = await self._record(attempt, phase, *entries)
        return Outcome(entry.seq, entry.at, self.plan.identity, entry)


def _is_loop_ending() -> bool:
    """Return whether all tasks are cancelled, as at the end of ``asyncio.run``."""
    return all(each.cancelling() for each in asyncio.all_tasks())


def _stopped(attempt: Attempt, step: StepState) -> tuple[Entry, ...]:
    """Return the entries of an attempt that is stopped; none if it has ended."""
    attempt.is_over = True
    if step.open_attempt != attempt.number:
        return ()
    saved = () if attempt.context is None else _end(attempt, attempt.context)
    return (*saved, outcomes.attempt_stopped(attempt))


def _end(attempt: Attempt, context: StepContext) -> tuple[Entry, ...]:
    """End a body's access; return what is saved with the outcome, which may become a failure."""
    context.flush()  # an outcome is recorded after all chunks
    try:
        return context.memory.changes()
    except Exception as broken:  # noqa: BLE001 - a value of the user's in the memory
        if attempt.error is None:
            attempt.error = broken
        else:
            attempt.error.add_note(f"its memory could not be saved: {described(broken)}")
        return ()
