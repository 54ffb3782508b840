"""What is recorded of one step while it is executed: in a run's journal, or in memory alone.

``RunStep`` and ``MemoryStep`` have the methods that the path of a step calls; what those of
``RunStep`` returned from survives a kill. A level-2 round is a number in what is recorded of an attempt.
"""

from __future__ import annotations

import copy
import secrets
import threading
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from maestro_hive.engine.failures import set_failure
from maestro_hive.engine.plan import effect_key
from maestro_hive.engine.results import (
    ExecutionAttempt,
    ExecutionResult,
    ExecutionStatus,
    LazyResult,
)
from maestro_hive.kernel.clock import Wait
from maestro_hive.kernel.errors import StorageError
from maestro_hive.maestro.state import codec
from maestro_hive.maestro.state.projections import (
    facts_of,
    feedback_of,
    feedback_sentence,
    was_healed,
)
from maestro_hive.maestro.state.records import Entry, EntryKind, NewEntry, from_micros, to_micros

if TYPE_CHECKING:
    from collections.abc import Awaitable
    from contextlib import AbstractContextManager

    from maestro_hive.engine.failures import Failure
    from maestro_hive.engine.open_run import OpenRun
    from maestro_hive.engine.plan import Plan
    from maestro_hive.kernel.clock import Clock
    from maestro_hive.maestro.state.codec import Encoded
    from maestro_hive.maestro.state.projections import StepState
    from maestro_hive.maestro.state.store import DocumentGuard

_STARTED = EntryKind.ATTEMPT_STARTED
_COMPLETED = EntryKind.STEP_COMPLETED


class RunStep:
    """A step of an open run."""

    __slots__ = (
        "_clock",
        "_elapsed_before",
        "_progress",
        "_started",
        "plan",
        "round",
        "run",
        "run_id",
    )

    def __init__(self, run: OpenRun, plan: Plan, round_number: int) -> None:
        self.run = run
        self.run_id: str | None = run.run_id
        self.plan = plan
        self.round = round_number
        self._clock: Clock = run.store.clock
        self._started: float | None = None
        self._elapsed_before = 0.0
        #: What it saved of its work, and the number of the entry that says so.
        self._progress: tuple[int, dict[str, Any]] = (0, {})

    # --- what is known ---

    @property
    def state(self) -> StepState | None:
        """What the journal has of it."""
        return self.run.state.by_identity.get(self.plan.identity)

    @property
    def effect_key(self) -> str:
        """The name of this step's effect for the outside world; the same for all its attempts."""
        return effect_key(self.run.run_id, self.plan.identity)

    def started_attempt(self) -> tuple[int, list[str]]:
        """Return the number of the attempt that started last, and what failed before it."""
        state = self.run.state.by_identity.get(self.plan.identity)
        if state is None:
            return 0, []
        return state.last_attempt, feedback_of(state) if state.last_failure is not None else []

    @property
    def failures(self) -> int:
        """How many attempts failed in this round."""
        state = self.state
        return state.failures_in(self.round) if state and state.failures else 0

    @property
    def was_healed(self) -> bool:
        """Whether a repair was made between its attempts."""
        state = self.state
        return state is not None and was_healed(state)

    def elapsed(self) -> float:
        """Return the seconds since its first attempt started, those before a restart included."""
        before = self._last_failure().get("clock")
        if before is not None:
            return float(before["elapsed"]) + Wait.from_json(before).elapsed(self._clock)
        if self._started is None:
            return 0.0
        return self._elapsed_before + self._clock.boot_seconds() - self._started

    def _last_failure(self) -> Any:
        """Return the facts of the last failure since the step was started, or retried."""
        state = self.state
        if state is None or state.last_failure is None or not state.failures:
            return {}
        return facts_of(state.last_failure)

    def is_exhausted(self, max_attempts: int) -> bool:
        """Return whether nothing is left to try in this round."""
        failures = self.failures
        if not failures:
            return False
        last = self._last_failure()
        final = last.get("final", False) and last.get("round", 1) == self.round
        return bool(final) or failures >= max_attempts

    def attempts(self) -> list[ExecutionAttempt]:
        """Return every attempt there was, with its outcome."""
        state = self.state
        if state is None:
            return []
        return _attempts(state.number, state.log, state.completed, state.tokens)

    def completed_result(self, status: ExecutionStatus, output: Any) -> ExecutionResult:
        """Return the result of a completed step; its attempts are read when they are asked for."""
        state = self.state
        assert state is not None
        started, completed = state.log[0] if state.log else state.started, state.completed
        result = LazyResult(
            execution_id=self.run.run_id,
            task_name=self.plan.name,
            persona_id=self.plan.persona,
            final_status=status,
            total_duration_seconds=max(0.0, (completed.at - started.at) / 1e6) if completed else 0,
            total_tokens_used=sum(state.tokens.values()) if state.tokens else 0,
            final_output=output,
            recovery_applied=status is ExecutionStatus.RECOVERED,
        )
        # Of the log as it is: a step that is retried gets a new one.
        made = partial(_attempts, state.number, state.log, completed, state.tokens, output)
        result.load_attempts_with(made)
        return result

    def tokens(self) -> int:
        """Return the tokens that all its attempts spent."""
        state = self.state
        return sum(state.tokens.values()) if state and state.tokens else 0

    # --- what happens ---

    def start(self, guard: DocumentGuard | None = None) -> Awaitable[None]:
        """Record that an attempt starts: safe against a kill, if not against a power cut."""
        run, plan, clock = self.run, self.plan, self._clock
        state = run.state.by_identity.get(plan.identity)
        now = clock.now()
        if self._started is None:
            self._started = clock.boot_seconds()
            if state is not None and state.log:  # another process started it
                since = now - from_micros(state.log[0].at)
                self._elapsed_before = max(0.0, since.total_seconds())
        if state is None:
            number, attempt, given = run.new_step_number(), 1, plan.input
        else:
            number, attempt, given = state.number, state.last_attempt + 1, None
        entry = NewEntry(
            _STARTED,
            number,
            attempt,
            plan.facts,
            given,
            plan.family,
            plan.identity,
            to_micros(now),
        )
        return run.record(entry, sync=False, guard=guard)

    def complete(self, output: Encoded | None) -> Awaitable[None]:
        """Record the result; when it is awaited, the step never runs again."""
        return self.run.record(self._entry(_COMPLETED, value=output), sync=True)

    async def fail(self, failure: Failure) -> None:
        """Record that the attempt failed, and how long to wait for the next."""
        await self.run.record(self._failure_entry(failure), sync=True)

    def stop(self, failure: Failure) -> None:
        """Record that the attempt was stopped; at once, since the loop may be ending."""
        state = self.state
        if state is not None and state.open_attempt:
            self.run.append([self._failure_entry(failure)], sync=failure.counts)

    async def wait(self) -> None:
        """Wait for what is left of the time to the next attempt."""
        wait = self._last_failure().get("wait")
        state = self.state
        if wait is not None and state is not None and state.log[-1] is state.last_failure:
            await Wait.from_json(wait).finished(self._clock)

    def start_over(self, *, forget: bool) -> None:
        """Let it be tried again, its result discarded or not."""
        facts = codec.dump_canonical({"forget": True}) if forget else None
        entry = NewEntry(EntryKind.RETRIED, facts=facts, identity=self.plan.identity)
        if self.state is not None:
            self.run.append([entry])

    def _failure_entry(self, failure: Failure) -> NewEntry:
        facts: dict[str, Any] = {
            "status": failure.status.value,
            "round": self.round,
            "error": failure.error,
            "reason": failure.reason,
            "clock": {**Wait.start(self._clock, 0.0).to_json(), "elapsed": self.elapsed()},
        }
        if not failure.counts:
            facts["counts"] = False
        if failure.final:
            facts["final"] = True
        if failure.healed:
            facts["healed"] = True
        if failure.healing_error is not None:
            facts["healing_error"] = failure.healing_error
        if failure.feedback is not None:
            facts["feedback"] = failure.feedback
        if failure.wait is not None:
            facts["wait"] = Wait.start(self._clock, failure.wait).to_json()
        return self._entry(EntryKind.ATTEMPT_FAILED, codec.dump_canonical(facts))

    def _entry(
        self, kind: EntryKind, facts: bytes | None = None, value: Encoded | None = None
    ) -> NewEntry:
        state = self.run.state.by_identity.get(self.plan.identity)
        if state is None:
            raise StorageError(
                f"run {self.run_id!r} was reset while {self.plan.name!r} was executed: what the"
                " step did was not recorded, and it will be executed again"
            )
        now = to_micros(self._clock.now())
        number, attempt = state.number, state.open_attempt
        return NewEntry(kind, number, attempt, facts, value, self.plan.family, None, now)

    # --- what its context stores ---

    @property
    def lock(self) -> AbstractContextManager[object]:
        """What is held while something is changed."""
        return self.run.mutex

    def change_progress(self, changed: dict[str, Any]) -> None:
        """Change fields of its half-done work; what its other threads changed meanwhile stays."""
        with self.run.mutex:
            self.run.catch_up()
            progress = self._saved_progress() | changed
            value = codec.encode(progress, "progress")
            progress = progress | copy.deepcopy(changed)
            self.run.append([self._entry(EntryKind.PROGRESS_SAVED, value=value)])
            self._progress = (self._progress_seq(), progress)

    def change_memory(self, changed: dict[str, Any], gone: set[str]) -> dict[str, Any]:
        """Change the persona's memory; what its other steps changed meanwhile stays."""
        with self.run.mutex:
            self.run.catch_up()
            rest = {key: value for key, value in self.memory().items() if key not in gone}
            encoded = codec.encode(rest | changed, "memory")
            memory = rest | copy.deepcopy(changed)
            self._note(EntryKind.MEMORY_SAVED, encoded, "memory")
            saved = self.run.state.memories[self.plan.persona]
            self.run.decoded_memories[self.plan.persona] = (saved.seq, memory)
            return memory

    def add_history(self, item: Any) -> None:
        """Add to the persona's history."""
        self._note(EntryKind.HISTORY_APPENDED, codec.encode(item, "history"), "history")

    def _note(self, kind: EntryKind, value: Encoded, family: str) -> None:
        facts = codec.dump_canonical({"persona": self.plan.persona})
        entry = NewEntry(kind, facts=facts, value=value, family=f"{self.plan.persona}//{family}")
        self.run.append([entry])

    def spend(self, attempt: int, tokens: int, usd: float) -> None:
        """Count what was spent."""
        spent = {"persona": self.plan.persona, "tokens": tokens, "usd": usd}
        self.add_event(EntryKind.SPENT, attempt, spent)

    def add_event(self, kind: EntryKind, attempt: int, facts: dict[str, Any]) -> None:
        """Record what happened in an attempt; durable on return, also when the attempt is over."""
        state = self.state
        number = state.number if state else 0
        self.run.append([NewEntry(kind, number, attempt, codec.dump_canonical(facts))])

    def progress(self) -> dict[str, Any]:
        """Return what it last saved of its work; a copy."""
        with self.run.mutex:
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
        """Return the persona's memory; its values must not be changed, for others have them."""
        persona = self.plan.persona
        with self.run.mutex:
            saved = self.run.state.memories.get(persona)
            if saved is None:
                return {}
            known = self.run.decoded_memories.get(persona)
            if known is None or known[0] != saved.seq:
                known = self.run.decoded_memories[persona] = (saved.seq, self._value(saved))
            return known[1]

    def history(self) -> list[Any]:
        """Return the persona's history."""
        return [self._value(entry) for entry in self.run.state.histories.get(self.plan.persona, [])]

    def _value(self, entry: Entry | None) -> Any:
        data = self.run.store.load(entry) if entry is not None else None
        return None if data is None else codec.decode(data)


def _attempts(
    step: int,
    log: list[Entry],
    completed: Entry | None,
    tokens: dict[int, int] | None,
    output: Any = None,
) -> list[ExecutionAttempt]:
    """Return the attempts that a step's entries describe."""
    attempts: list[ExecutionAttempt] = []
    for entry in log:
        if entry.kind == _STARTED:
            if attempts and attempts[-1].ended_at is None:
                attempts[-1].status = ExecutionStatus.INTERRUPTED
            attempts.append(_started_attempt(step, entry, tokens))
        else:
            _end_attempt(attempts[-1], entry)
    if completed is not None and attempts:
        attempts[-1].status = ExecutionStatus.SUCCESS
        attempts[-1].ended_at = from_micros(completed.at)
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
    attempt.status = ExecutionStatus(facts.get("status", "failed"))
    attempt.ended_at = from_micros(entry.at)
    set_failure(
        attempt,
        facts.get("error", {}),
        healed=bool(facts.get("healed")),
        healing_error=facts.get("healing_error"),
        feedback=facts.get("feedback"),
    )


# --- in memory -----------------------------------------------------------------------------------


@dataclass(slots=True)
class MemoryPersona:
    """What a persona of an executor without a journal remembers, as long as that lives."""

    memory: dict[str, Any] = field(default_factory=dict)
    history: list[Any] = field(default_factory=list)
    tokens: int = 0
    usd: float = 0.0
    #: What is held while something of it is changed, or something of one of its steps.
    lock: threading.RLock = field(default_factory=threading.RLock)


class MemoryStep:
    """A step of which nothing is written: for executors without a workflow id."""

    __slots__ = (
        "_attempts",
        "_clock",
        "_persona",
        "_progress",
        "_started",
        "_tokens",
        "_wait",
        "effect_key",
        "failures",
    )

    state: StepState | None = None
    run_id: str | None = None

    def __init__(self, persona: MemoryPersona, clock: Clock) -> None:
        self.failures = 0
        #: The name of this step's effect for the outside world.
        self.effect_key = f"exec_{secrets.token_hex(8)}"
        self._persona = persona
        self._clock = clock
        self._attempts: list[ExecutionAttempt] = []
        self._progress: dict[str, Any] = {}
        self._tokens: dict[int, int] = {}
        self._wait = 0.0
        self._started = 0.0

    def started_attempt(self) -> tuple[int, list[str]]:
        """Return the number of the attempt that started last, and what failed before it."""
        return len(self._attempts), self._feedback()

    @property
    def was_healed(self) -> bool:
        """Whether a repair was made between its attempts."""
        return self.failures > 0 and any(each.healing_applied for each in self._attempts)

    def _feedback(self) -> list[str]:
        if not self.failures:
            return []
        return [
            feedback_sentence(
                each.attempt_number,
                {"category": each.metrics.get("error_category"), "message": each.error_message},
                each.metrics.get("feedback"),
            )
            for each in self._attempts
            if each.error_message is not None
        ]

    def elapsed(self) -> float:
        """Return the seconds since its first attempt started."""
        return self._clock.boot_seconds() - self._started if self._attempts else 0.0

    def attempts(self) -> list[ExecutionAttempt]:
        """Return every attempt there was."""
        return self._attempts

    def tokens(self) -> int:
        """Return the tokens that all its attempts spent."""
        return sum(self._tokens.values())

    async def start(self, guard: DocumentGuard | None = None) -> None:
        """Note that an attempt starts."""
        del guard
        number = len(self._attempts) + 1
        if number == 1:
            self._started = self._clock.boot_seconds()
        self._attempts.append(
            ExecutionAttempt(f"{self.effect_key}.{number}", number, self._clock.now())
        )

    async def complete(self, _output: object) -> None:
        """Note that it succeeded."""
        attempt = self._attempts[-1]
        attempt.status = ExecutionStatus.SUCCESS
        attempt.ended_at = self._clock.now()
        if self._tokens:
            attempt.tokens_used = self._tokens.get(attempt.attempt_number, 0)

    async def fail(self, failure: Failure) -> None:
        """Note that it failed."""
        self.stop(failure)

    def stop(self, failure: Failure) -> None:
        """Note that it failed, or was stopped."""
        if not self._attempts:
            return
        attempt = self._attempts[-1]
        attempt.status = failure.status
        attempt.ended_at = self._clock.now()
        set_failure(
            attempt,
            failure.error,
            healed=failure.healed,
            healing_error=failure.healing_error,
            feedback=failure.feedback,
        )
        attempt.tokens_used = self._tokens.get(attempt.attempt_number, 0)
        self.failures += failure.counts
        self._wait = failure.wait or 0.0

    async def wait(self) -> None:
        """Wait for the next attempt."""
        await Wait.start(self._clock, self._wait).finished(self._clock)

    # --- what its context stores ---

    @property
    def lock(self) -> AbstractContextManager[object]:
        """What is held while something is changed."""
        return self._persona.lock

    def change_progress(self, changed: dict[str, Any]) -> None:
        """Change fields of its half-done work; what its other threads changed meanwhile stays."""
        with self.lock:
            self._progress = self._progress | copy.deepcopy(changed)

    def change_memory(self, changed: dict[str, Any], gone: set[str]) -> dict[str, Any]:
        """Change the persona's memory; what its other steps changed meanwhile stays."""
        with self.lock:
            rest = {key: value for key, value in self._persona.memory.items() if key not in gone}
            self._persona.memory = rest | copy.deepcopy(changed)
            return self._persona.memory

    def add_history(self, item: Any) -> None:
        """Add to the persona's history."""
        with self.lock:
            self._persona.history.append(copy.deepcopy(item))

    def spend(self, attempt: int, tokens: int, usd: float) -> None:
        """Count what was spent."""
        with self.lock:
            self._persona.tokens += tokens
            self._persona.usd += usd
            self._tokens[attempt] = self._tokens.get(attempt, 0) + tokens

    def add_event(self, kind: EntryKind, attempt: int, facts: dict[str, Any]) -> None:
        """Do nothing: without a run, events are not recorded."""

    def progress(self) -> dict[str, Any]:
        """Return what it last saved of its work; a copy."""
        return copy.deepcopy(self._progress)

    def memory(self) -> dict[str, Any]:
        """Return the persona's memory; its values must not be changed, for others have them."""
        return self._persona.memory

    def history(self) -> list[Any]:
        """Return the persona's history."""
        return copy.deepcopy(self._persona.history)
