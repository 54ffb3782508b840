"""A step of a run that is held, while it is executed: found, begun, failed, kept."""

from __future__ import annotations

import copy
import hashlib
from functools import partial
from typing import TYPE_CHECKING, Any

from maestro_hive.engine.results import (
    ExecutionAttempt,
    ExecutionResult,
    ExecutionStatus,
    LateResult,
)
from maestro_hive.engine.waits import Wait
from maestro_hive.kernel.errors import StorageError
from maestro_hive.maestro.state import codec
from maestro_hive.maestro.state.projections import StepState, facts_of, feedback_of
from maestro_hive.maestro.state.records import Entry, EntryKind, NewEntry, from_micros, to_micros
from maestro_hive.unified_execution.steps import metrics_of

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from maestro_hive.engine.open_run import OpenRun
    from maestro_hive.kernel.clock import Clock
    from maestro_hive.unified_execution.steps import Failure, Plan


_BEGUN = int(EntryKind.ATTEMPT_STARTED)  # compared for every attempt of every kept step


class DurableStep:
    """A step of a run that is held; what its methods returned from survives a kill."""

    def __init__(self, run: OpenRun, plan: Plan, persona: str, round_number: int) -> None:
        self.run_id = run.run_id
        self._run = run
        self._plan = plan
        self._persona = persona
        self._round = round_number
        self._clock: Clock = run.store.clock
        self._began: float | None = None
        self._before = 0.0
        #: What it saved of its work, and which entry says so.
        self._progress: tuple[int, dict[str, Any]] = (0, {})

    # --- what is known ---

    @property
    def state(self) -> StepState | None:
        """What the journal has of it."""
        return self._run.state.by_identity.get(self._plan.identity)

    @property
    def effect_key(self) -> str:
        """Name the effect of this step to the outside world; the same for all its attempts."""
        return hashlib.sha256(self.run_id.encode() + b"\0" + self._plan.identity).hexdigest()[:32]

    @property
    def attempt(self) -> int:
        """The number of the attempt that began last."""
        state = self.state
        return state.last_attempt if state else 0

    @property
    def failures(self) -> int:
        """How many attempts failed in this round."""
        state = self.state
        return state.failures_in(self._round) if state and state.failures else 0

    def feedback(self) -> list[str]:
        """Return what went wrong before, a sentence for each attempt."""
        state = self.state
        return feedback_of(state) if state is not None else []

    def elapsed(self) -> float:
        """Return the seconds since its first attempt began, those before a restart included."""
        before = self._last_failure().get("clock")
        if before is not None:
            return float(before["elapsed"]) + Wait.from_facts(before).elapsed(self._clock)
        if self._began is None:
            return 0.0
        return self._before + self._clock.boot_seconds() - self._began

    def _last_failure(self) -> Any:
        """Return the facts of the last failure since it was begun, or begun anew."""
        state = self.state
        if state is None or state.last_failure is None or not state.failures:
            return {}
        return facts_of(state.last_failure)

    def is_given_up(self, max_attempts: int) -> bool:
        """Return whether nothing is left to try in this round."""
        if not self.failures:
            return False
        last = self._last_failure()
        final = last.get("final", False) and last.get("round", 1) == self._round
        return bool(final) or self.failures >= max_attempts

    def output(self, kept: Entry) -> Any:
        """Return the result that was kept."""
        data = self._run.store.load(kept)
        return None if data is None else codec.decode(data, "result")

    def attempts(self) -> list[ExecutionAttempt]:
        """Return every attempt there was, with what came of it."""
        state = self.state
        return _attempts(state.number, state.log, state.completed, state.tokens) if state else []

    def completed_result(self, name: str, status: ExecutionStatus, output: Any) -> ExecutionResult:
        """Return the result of a finished step; its attempts are told when somebody looks."""
        state = self.state
        assert state is not None
        begun, kept = state.log[0] if state.log else state.started, state.completed
        result = LateResult(
            execution_id=self.run_id,
            task_name=name,
            persona_id=self._persona,
            final_status=status,
            total_duration_seconds=max(0.0, (kept.at - begun.at) / 1e6) if kept else 0.0,
            total_tokens_used=sum(state.tokens.values()) if state.tokens else 0,
            final_output=output,
            recovery_applied=status is ExecutionStatus.RECOVERED,
        )
        # Of the log as it is: what starts over gets a new one.
        result.tell_late(partial(_attempts, state.number, state.log, kept, state.tokens, output))
        return result

    def tokens(self) -> int:
        """Return the tokens that all its attempts spent."""
        state = self.state
        return sum(state.tokens.values()) if state and state.tokens else 0

    # --- what happens ---

    async def begin(self) -> None:
        """Record that an attempt begins; known after a kill, if not after a power cut."""
        state = self.state
        first = state is None
        number = self._run.new_step_number() if state is None else state.number
        if self._began is None:
            self._began = self._clock.boot_seconds()
            if state is not None and state.log:  # another process began it
                since = self._clock.now() - from_micros(state.log[0].at)
                self._before = max(0.0, since.total_seconds())
        await self._run.record(
            NewEntry(
                EntryKind.ATTEMPT_STARTED,
                number,
                1 if state is None else state.last_attempt + 1,
                self._plan.facts,
                self._plan.given if first else None,
                self._plan.family,
                self._plan.identity,
                to_micros(self._clock.now()),
            ),
            sync=False,
        )

    def encode(self, output: Any) -> codec.Encoded:
        """Return the result as it will be kept; raise if it would not come back the same."""
        return codec.encode(output, "result")

    async def keep(self, output: codec.Encoded | None) -> None:
        """Record the result; when this returns, the step never runs again."""
        await self._run.record(self._entry(EntryKind.STEP_COMPLETED, value=output), sync=True)

    async def fail(self, failure: Failure) -> None:
        """Record that the attempt failed, and how long to wait for the next."""
        await self._run.record(self._failure_entry(failure), sync=True)

    def stop(self, failure: Failure) -> None:
        """Record that the attempt was stopped; at once, since the loop may be ending."""
        state = self.state
        if state is not None and state.open_attempt:
            self._run.append([self._failure_entry(failure)], sync=failure.counts)

    async def wait(self) -> None:
        """Wait for what is left of the time to the next attempt."""
        wait = self._last_failure().get("wait")
        state = self.state
        if wait is not None and state is not None and state.log[-1] is state.last_failure:
            await Wait.from_facts(wait).over(self._clock)

    def start_over(self, *, forget: bool) -> None:
        """Let it be tried again, its result forgotten or not."""
        facts = codec.dump_canonical({"forget": True}) if forget else None
        entry = NewEntry(EntryKind.RETRIED, facts=facts, identity=self._plan.identity)
        if self.state is not None:
            self._run.append([entry])

    def _failure_entry(self, failure: Failure) -> NewEntry:
        facts: dict[str, Any] = {
            "status": failure.status.value,
            "round": self._round,
            "error": failure.error,
            "reason": failure.reason,
            "clock": {**Wait.begin(self._clock, 0.0).to_facts(), "elapsed": self.elapsed()},
        }
        if not failure.counts:
            facts["counts"] = False
        if failure.final:
            facts["final"] = True
        if failure.healed:
            facts["healed"] = True
        if failure.healing_error is not None:
            facts["healing_error"] = failure.healing_error
        if failure.wait is not None:
            facts["wait"] = Wait.begin(self._clock, failure.wait).to_facts()
        return self._entry(EntryKind.ATTEMPT_FAILED, codec.dump_canonical(facts))

    def _entry(
        self, kind: EntryKind, facts: bytes | None = None, value: codec.Encoded | None = None
    ) -> NewEntry:
        state = self.state
        if state is None:
            raise StorageError(
                f"run {self.run_id!r} was set back while a step of {self._persona!r} was executed:"
                " what the step did was not recorded, and it will be executed again"
            )
        now = to_micros(self._clock.now())
        family = self._plan.family
        return NewEntry(kind, state.number, state.open_attempt, facts, value, family, None, now)

    # --- the notebook of its context ---

    @property
    def lock(self) -> AbstractContextManager[object]:
        """What is held while something is changed."""
        return self._run.mutex

    def change_progress(self, changed: dict[str, Any]) -> None:
        """Change fields of its half-done work; what its other threads changed meanwhile stays."""
        with self._run.mutex:
            self._run.catch_up()
            progress = self._saved_progress() | changed
            value = codec.encode(progress, "progress")
            progress = progress | copy.deepcopy(changed)
            self._run.append([self._entry(EntryKind.PROGRESS_SAVED, value=value)])
            self._progress = (self._progress_seq(), progress)

    def change_memory(self, changed: dict[str, Any], gone: set[str]) -> dict[str, Any]:
        """Change the persona's memory; what its other steps changed meanwhile stays."""
        with self._run.mutex:
            self._run.catch_up()
            kept = {key: value for key, value in self.memory().items() if key not in gone}
            encoded = codec.encode(kept | changed, "memory")
            memory = kept | copy.deepcopy(changed)
            self._note(EntryKind.MEMORY_SAVED, encoded, "memory")
            saved = self._run.state.memories[self._persona]
            self._run.decoded_memories[self._persona] = (saved.seq, memory)
            return memory

    def add_history(self, item: Any) -> None:
        """Add to the persona's history."""
        self._note(EntryKind.HISTORY_APPENDED, codec.encode(item, "history"), "history")

    def _note(self, kind: EntryKind, value: codec.Encoded, family: str) -> None:
        facts = codec.dump_canonical({"persona": self._persona})
        entry = NewEntry(kind, facts=facts, value=value, family=f"{self._persona}//{family}")
        self._run.append([entry])

    def spend(self, attempt: int, tokens: int, usd: float) -> None:
        """Count what was spent."""
        facts = codec.dump_canonical({"persona": self._persona, "tokens": tokens, "usd": usd})
        state = self.state
        number = state.number if state else 0
        self._run.append([NewEntry(EntryKind.SPENT, number, attempt, facts)])

    def progress(self) -> dict[str, Any]:
        """Return what it last saved of its work; a copy."""
        with self._run.mutex:
            return copy.deepcopy(self._saved_progress())

    def _saved_progress(self) -> dict[str, Any]:
        seq, state = self._progress_seq(), self.state
        if self._progress[0] != seq:
            self._progress = (seq, self._value(state.progress if state else None) or {})
        return self._progress[1]

    def _progress_seq(self) -> int:
        state = self.state
        return state.progress.seq if state is not None and state.progress is not None else 0

    def memory(self) -> dict[str, Any]:
        """Return the persona's memory; its values are nobody's to change, for others have them."""
        with self._run.mutex:
            saved = self._run.state.memories.get(self._persona)
            if saved is None:
                return {}
            known = self._run.decoded_memories.get(self._persona)
            if known is None or known[0] != saved.seq:
                known = self._run.decoded_memories[self._persona] = (saved.seq, self._value(saved))
            return known[1]

    def history(self) -> list[Any]:
        """Return the persona's history."""
        return [self._value(entry) for entry in self._run.state.histories.get(self._persona, [])]

    def _value(self, entry: Entry | None) -> Any:
        data = self._run.store.load(entry) if entry is not None else None
        return None if data is None else codec.decode(data)


def _attempts(
    step: int,
    log: list[Entry],
    kept: Entry | None,
    tokens: dict[int, int] | None,
    output: Any = None,
) -> list[ExecutionAttempt]:
    """Return the attempts that a step's entries tell of."""
    attempts: list[ExecutionAttempt] = []
    for entry in log:
        if entry.kind == _BEGUN:
            if attempts and attempts[-1].ended_at is None:
                attempts[-1].status = ExecutionStatus.INTERRUPTED
            attempts.append(_started_attempt(step, entry, tokens))
        else:
            _end_attempt(attempts[-1], entry)
    if kept is not None and attempts:
        attempts[-1].status = ExecutionStatus.SUCCESS
        attempts[-1].ended_at = from_micros(kept.at)
        attempts[-1].output = output
    return attempts


def _started_attempt(step: int, entry: Entry, tokens: dict[int, int] | None) -> ExecutionAttempt:
    return ExecutionAttempt(
        attempt_id=f"{step}.{entry.attempt}",
        attempt_number=entry.attempt,
        started_at=from_micros(entry.at),
        tokens_used=tokens.get(entry.attempt, 0) if tokens else 0,
    )


def _end_attempt(attempt: ExecutionAttempt, entry: Entry) -> None:
    facts = facts_of(entry)
    error = facts.get("error", {})
    attempt.status = ExecutionStatus(facts.get("status", "failed"))
    attempt.ended_at = from_micros(entry.at)
    attempt.error_message = error.get("message")
    attempt.error_type = error.get("type")
    attempt.error_traceback = error.get("traceback")
    attempt.healing_applied = bool(facts.get("healed"))
    attempt.metrics = metrics_of(error, facts.get("healing_error"))
