"""What is recorded of one step while it is executed, in a run's journal.

``RunStep`` has the methods that the path of a step calls, as ``MemoryStep`` has without a journal;
what they returned from survives a kill. A level-2 round is a number in what is recorded of an attempt.
"""

from __future__ import annotations

import asyncio
import copy
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from maestro_hive.engine.accounts import UNSIZED, StepAround, most_usd
from maestro_hive.engine.budget_queue import behind_others
from maestro_hive.engine.context import records_around
from maestro_hive.engine.failures import error_facts, set_failure
from maestro_hive.engine.healing.arguments import ChangedArguments
from maestro_hive.engine.open_run import RUNNING
from maestro_hive.engine.plan import effect_key
from maestro_hive.engine.results import (
    ExecutionAttempt,
    ExecutionResult,
    ExecutionStatus,
    LazyResult,
)
from maestro_hive.engine.step_repairs import StepRepairs
from maestro_hive.engine.streams import AttemptStream
from maestro_hive.engine.usage import Usage
from maestro_hive.kernel.clock import Wait
from maestro_hive.kernel.errors import StorageError
from maestro_hive.maestro.state import codec
from maestro_hive.maestro.state.budgets import MICROS, Settle
from maestro_hive.maestro.state.projections import (
    ended_repairs,
    facts_of,
    feedback_of,
    is_fixed,
    repairs_of,
    was_healed,
)
from maestro_hive.maestro.state.records import Entry, EntryKind, NewEntry, from_micros

if TYPE_CHECKING:
    from collections.abc import Awaitable, Mapping
    from contextlib import AbstractContextManager

    from maestro_hive.engine.accounts import Sizing
    from maestro_hive.engine.failures import AttemptEnd
    from maestro_hive.engine.open_run import OpenRun
    from maestro_hive.engine.plan import Plan
    from maestro_hive.kernel.clock import Clock
    from maestro_hive.kernel.errors import BudgetRefusedError
    from maestro_hive.maestro.state.budgets import Reserve, StepKey
    from maestro_hive.maestro.state.codec import Encoded, Json
    from maestro_hive.maestro.state.projections import StepState
    from maestro_hive.maestro.state.store import DocumentGuard

_SEQ = attrgetter("seq")
_STARTED = EntryKind.ATTEMPT_STARTED
_COMPLETED = EntryKind.STEP_COMPLETED
NOTHING = Usage()
_CANCELLED = codec.dump_canonical({"cancelled": True})


class RunStep(StepRepairs):
    """A step of an open run."""

    __slots__ = (
        "_also_within",
        "_clock",
        "_elapsed_before",
        "_held",
        "_progress",
        "_reserved",
        "_sizing",
        "_spent",
        "_staged",
        "_started",
        "_started_at",
        "_stream",
        "_ticket",
        "_usage",
        "plan",
        "round",
        "run",
        "run_id",
        "still_held",
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
        #: Half-done work that is recorded with what is spent next.
        self._staged: dict[str, Any] | None = None
        #: What the thread of the attempt that ends now still holds, of limits.
        self.still_held: list[Json] = []
        #: What the attempt writes while it is made, if anything.
        self._stream: AttemptStream | None = None
        #: Whether the attempt has reserved a part of a budget; what it spent so far; and what its
        #: result reports, which is recorded with its outcome.
        self._reserved = False
        self._held: Reserve | None = None
        #: Its place among those that wait for a budget, once it has one; and the steps that wait
        #: themselves, next to which it may be made.
        self._ticket = 0
        self._also_within: tuple[StepKey, ...] = ()
        self._spent = NOTHING
        self._usage: Usage | None = None
        self._sizing = UNSIZED
        self._started_at = 0

    # --- what is known ---

    @property
    def state(self) -> StepState | None:
        """What the journal has of it."""
        return self.run.state.by_identity.get(self.plan.identity)

    @property
    def effect_key(self) -> str:
        """The name of this step's effect for the outside world; the same for all its attempts."""
        return effect_key(self.run.run_id, self.plan.identity)

    def label(self) -> str:
        """Return what tells it from others of its name in the run: ``name``, or ``name#2``."""
        state = self.state
        return (None if state is None else self.run.label(state.number)) or self.plan.name

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
        repairs = ended_repairs(state) if state.repairs else {}
        return _attempts(state.number, state.log, state.completed, state.tokens, repairs)

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
        repairs = ended_repairs(state) if state.repairs else {}
        log, tokens = state.log, state.tokens
        made = partial(_attempts, state.number, log, completed, tokens, repairs, output)
        result.load_attempts_with(made)
        return result

    async def changed_arguments(self) -> ChangedArguments | None:
        """Return the arguments that healers changed since it was started or retried."""
        state = self.state
        if state is None:
            return None
        changed = [each for each in repairs_of(state) if each.sha256]
        data = self.run.store.load(max(changed, key=_SEQ)) if changed else None
        return None if data is None else ChangedArguments(None, data)

    def tokens(self) -> int:
        """Return the tokens that all its attempts spent."""
        state = self.state
        return sum(state.tokens.values()) if state and state.tokens else 0

    # --- what happens ---

    def start(
        self, guard: DocumentGuard | None = None, sizing: Sizing = UNSIZED
    ) -> Awaitable[None]:
        """Record that an attempt starts: safe against a kill, if not against a power cut."""
        run, plan, clock = self.run, self.plan, self._clock
        if run.refusal is not None:
            raise run.refusal
        state = run.state.by_identity.get(plan.identity)
        now = clock.nanos() // 1000
        if self._started is None:
            self._started = clock.boot_seconds()
            if state is not None and state.log:  # another process started it
                self._elapsed_before = max(0.0, (now - state.log[0].at) / 1e6)
        if state is None:
            number, attempt, given = run.new_step_number(), 1, plan.input
        else:
            number, attempt, given = state.number, state.last_attempt + 1, None
        facts, reserve = plan.facts, run.ledger.unlimited
        self._reserved, self._usage, self._spent, self._held = False, None, NOTHING, None
        self._sizing, self._started_at = sizing, now
        if reserve is None:
            facts, reserve = self._reserve(now)
        entry = NewEntry(
            _STARTED,
            number,
            attempt,
            facts,
            given,
            plan.family,
            plan.identity,
            now,
        )
        # A workflow has its own status; of executors, the first start says that the run goes on.
        listed = run.listed_status == RUNNING or run.state.started is not None
        status = None if listed else RUNNING
        started = run.record(entry, sync=False, guard=guard, status=status, budget=reserve)
        if self._ticket:
            started = self._start_after_waiting(started)
        if attempt == 1 and not run.state.restored_seq:
            return started
        return self._start_stream_over(started, number, attempt)

    def _reserve(self, now: int) -> tuple[bytes, Reserve]:
        """Return the facts of a start with what it reserves, and that."""
        run, plan, ledger = self.run, self.plan, self.run.ledger
        known = ledger.known
        accounts = run.accounts.of(plan.persona, known.days.name(now))
        reserve, estimated = ledger.reserve(
            known, accounts, plan.persona, self._sizing.alike or plan.name, self._sizing
        )
        if not reserve.limits:
            return plan.facts, reserve
        within = tuple((each.number, each.step) for each in steps_around(run))
        self._held = reserve = reserve._replace(within=(*within, *self._also_within))
        waited_for = ledger.queue.first_waited_for(reserve.limits)
        if waited_for is not None and not self._ticket and not reserve.within:
            raise behind_others(waited_for, reserve)
        self._reserved, self._held = True, reserve
        return ledger.facts(plan.facts, reserve, estimated=estimated), reserve

    async def wait_for_room(self, refused: BudgetRefusedError) -> None:
        """Return when it may be tried again whether a budget has room; raise if it will have none."""
        ledger, wanted = self.run.ledger, self._held
        assert wanted is not None
        self._ticket = self._ticket or ledger.queue.ticket()
        self._also_within = await ledger.room(refused, wanted, self.plan.persona, self._ticket)

    async def _start_after_waiting(self, started: Awaitable[None]) -> None:
        """Record a start that had to wait for a budget, and let others have their turn."""
        try:
            await started
        finally:
            self.run.ledger.queue.note_tried(self._ticket)

    async def _start_stream_over(self, started: Awaitable[None], number: int, attempt: int) -> None:
        """Record the start; if the run has streams, say that what the step wrote before is void."""
        await started
        run = self.run
        if run.store.last_chunk(run.lease.run):
            self._stream = AttemptStream(run.store, run.lease, number, attempt)
            self._stream.restart()

    def complete(self, output: Encoded | None, *, cancelled: bool = False) -> Awaitable[None]:
        """Record the result; when it is awaited, the step never runs again.

        ``cancelled``: its caller had cancelled it, and it was completed all the same.
        """
        facts = _CANCELLED if cancelled else None
        entry = self._entry(_COMPLETED, facts, output)
        if self._stream is not None:
            return self._record_after(self._stream, entry)
        if self._usage is not None or self._reserved:
            first, settle = self._settlement(entry)
            return self.run.record(entry, sync=True, first=first, budget=settle)
        return self.run.record(entry, sync=True)

    async def _record_after(self, stream: AttemptStream, entry: NewEntry) -> None:
        """Record an outcome after all that the attempt wrote, also if the caller is cancelled."""
        self._stream = None
        first, settle = self._settlement(entry)
        try:
            await stream.flushed()
        except asyncio.CancelledError:
            self.run.append([*first, entry], budget=settle)
            raise
        await self.run.record(entry, sync=True, first=first, budget=settle)

    async def fail(self, failure: AttemptEnd) -> None:
        """Record that the attempt failed, and how long to wait for the next."""
        entry = self._failure_entry(failure)
        if self._stream is not None:
            await self._record_after(self._stream, entry)
        else:
            first, settle = self._settlement(entry)
            await self.run.record(entry, sync=True, first=first, budget=settle)

    async def refuse(self, error: Exception) -> None:
        """Record that a policy forbids it; who executes it again asks the policy again."""
        facts = {"name": self.plan.name, "error": error_facts(error), "refused": True}
        known, identity = codec.dump_canonical(facts), self.plan.identity
        entry = NewEntry(EntryKind.STEP_FAILED, facts=known, identity=identity)
        await self.run.record(entry, sync=True)

    async def ask(self, failure: AttemptEnd) -> None:
        """Record that a person has to say whether the last attempt had its effect; once."""
        state = self.state
        if state is not None and not (state.log and facts_of(state.log[-1]).get("asked")):
            entry = self._failure_entry(failure)._replace(attempt=state.last_attempt)
            await self.run.record(entry, sync=True)

    def stop(self, failure: AttemptEnd) -> None:
        """Record that the attempt was stopped; at once, since the loop may be ending."""
        state = self.state
        if state is not None and state.open_attempt:
            stream, self._stream = self._stream, None
            if stream is not None:
                stream.flush()
            entry = self._failure_entry(failure)
            first, settle = self._settlement(entry)
            self.run.append([*first, entry], sync=failure.counts, budget=settle)

    async def wait(self) -> None:
        """Wait for what is left of the time to the next attempt."""
        failure = self._last_failure()
        waits = [failure.get("wait")]
        state = self.state
        if state is None or not state.log or state.log[-1] is not state.last_failure:
            return
        if (
            state.repairs and state.last_failure is not None
        ):  # a repair may need no wait, or a longer one
            tried = ended_repairs(state).get(state.last_failure.attempt)
            if tried and is_fixed(tried):
                waits = [facts_of(tried).get("wait"), failure.get("least_wait")]
        for each in waits:  # each from its own start: together, the longer one
            if each is not None:
                await Wait.from_json(each).finished(self._clock)

    def start_over(self, *, forget: bool) -> None:
        """Let it be tried again, its result discarded or not."""
        facts = codec.dump_canonical({"forget": True}) if forget else None
        entry = NewEntry(EntryKind.RETRIED, facts=facts, identity=self.plan.identity)
        if self.state is not None:
            self.run.append([entry])

    def _failure_entry(self, failure: AttemptEnd) -> NewEntry:
        facts: dict[str, Any] = {
            "status": failure.status.value,
            "round": self.round,
            "error": failure.error,
            "reason": failure.reason,
            "clock": {**Wait.start(self._clock, 0.0).to_json(), "elapsed": self.elapsed()},
        }
        where_they_apply = {
            "counts": None if failure.counts else False,
            "final": failure.final or None,
            "ambiguous": failure.ambiguous or None,
            "asked": failure.asked or None,
            "diagnosis": None if failure.diagnosis is None else dict(failure.diagnosis),
            "still_held": self.still_held or None,
        }
        self.still_held = []
        facts |= {name: fact for name, fact in where_they_apply.items() if fact is not None}
        if failure.wait is not None:
            facts["wait"] = Wait.start(self._clock, failure.wait).to_json()
            if failure.least_wait and failure.diagnosis is not None:
                facts["least_wait"] = Wait.start(self._clock, failure.least_wait).to_json()
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
        # Its time is that of its transaction: outcomes that have one are delivered together.
        number, attempt = state.number, state.open_attempt
        return NewEntry(kind, number, attempt, facts, value, self.plan.family)

    # --- what its context stores ---

    @property
    def lock(self) -> AbstractContextManager[object]:
        """What is held while something is changed."""
        return self.run.mutex

    def open_stream(self) -> AttemptStream:
        """Return the stream of the attempt that is being made; the caller holds ``lock``."""
        if self._stream is None:
            run, outcome = self.run, self._entry(_COMPLETED)  # which the chunks come before
            self._stream = AttemptStream(run.store, run.lease, outcome.step, outcome.attempt)
        return self._stream

    def change_progress(self, changed: dict[str, Any]) -> None:
        """Change fields of its half-done work; what its other threads changed meanwhile stays."""
        with self.run.mutex:
            self.run.catch_up()
            self._append_progress(changed)

    def stage_progress(self, changed: dict[str, Any] | None) -> dict[str, Any] | None:
        """Have half-done work recorded with what is spent next; return what is not recorded of it yet."""
        with self.run.mutex:
            staged, self._staged = self._staged, changed
            return staged

    def _append_progress(
        self, changed: dict[str, Any], spent: NewEntry | None = None, settle: Settle | None = None
    ) -> None:
        """Record half-done work, and what was spent, in one transaction."""
        progress = self._saved_progress() | changed
        value = codec.encode(progress, "progress")
        progress = progress | copy.deepcopy(changed)
        saved = self._entry(EntryKind.PROGRESS_SAVED, value=value)
        if spent is None:
            self.run.append([saved])
        else:
            self.run.append([spent, saved], budget=settle)
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

    def spend(self, attempt: int, usage: Usage) -> None:
        """Count what was spent; it is durable on return."""
        state = self.state
        number = state.number if state else 0
        entry, settle = self._spending(number, attempt, usage)
        if attempt == (state.last_attempt if state else 0):
            self._spent = plus(self._spent, settle.tokens, settle.usd, usage.model)
            self._held = None  # a part of it is used
        with self.run.mutex:
            staged, self._staged = self._staged, None
            if staged is None:
                self.run.append([entry], budget=settle)
            else:
                self.run.catch_up()
                self._append_progress(staged, entry, settle)

    def note_usage(self, _attempt: int, usage: Usage) -> None:
        """Note the usage that the result reports: it is recorded with the outcome."""
        self._usage = usage

    def pending_tokens(self) -> int:
        """Return the tokens that are noted, and not yet recorded."""
        return 0 if self._usage is None else self._usage.tokens

    def _spending(
        self, number: int, attempt: int, usage: Usage, *, ended: bool = False
    ) -> tuple[NewEntry, Settle]:
        """Return the entry of what was spent, and how that is settled."""
        run, ledger, persona = self.run, self.run.ledger, self.plan.persona
        owned, known, tokens = run.accounts, ledger.known, usage.tokens
        accounts = owned.of(persona, known.days.name(self._start_of(attempt)))
        limits = known.limited(accounts)
        usd = ledger.cost(usage, self._sizing, limits)
        model = usage.model or self._sizing.model
        facts = {"persona": persona, "tokens": tokens, "usd": usd / MICROS, **usage.facts()}
        if model:
            facts["model"] = model
        entry = NewEntry(EntryKind.SPENT, number, attempt, codec.dump_canonical(facts))
        charged, held = owned.counted(accounts, model), self._held
        # By position: by name it would take twice as long, with each call.
        settle = Settle(
            number, attempt, ended, self._reserved, held, charged, tokens, usd, usage.cached, limits
        )
        return entry, settle

    def _settlement(self, outcome: NewEntry) -> tuple[tuple[NewEntry, ...], Settle | None]:
        """Return what is recorded before the outcome of an attempt, and how its spending is settled."""
        usage, self._usage = self._usage, None
        self._ticket, self._also_within = 0, ()
        first: tuple[NewEntry, ...] = ()
        spent = self._spent
        if usage is not None:
            entry, settle = self._spending(outcome.step, outcome.attempt, usage, ended=True)
            first = (entry,)
            spent = plus(spent, settle.tokens, settle.usd, usage.model)
        elif self._reserved:
            settle = Settle(outcome.step, outcome.attempt, reserved=True)
        else:
            return (), None
        # What succeeded without any usage is known, too: it needs none.
        if spent is not NOTHING or outcome.kind == _COMPLETED:
            name = self._sizing.alike or self.plan.name
            model = spent.model or self._sizing.model
            learnt = self.run.ledger.learn(
                self.plan.persona, name, spent.tokens, spent.usd or 0, model
            )
            if learnt is not None:
                settle = settle._replace(estimate=learnt)
        return first, settle

    def _start_of(self, attempt: int) -> int:
        """Return when an attempt started; what is spent late counts for that day."""
        state = self.state
        if self._started_at and state is not None and attempt == state.last_attempt:
            return self._started_at
        for entry in reversed(state.log if state else ()):
            if entry.kind == _STARTED and entry.attempt == attempt:
                return entry.at
        return self._started_at or self._clock.nanos() // 1000

    def tokens_left(self) -> float:
        """Return how many tokens the budgets that all processes share leave to it."""
        run, ledger = self.run, self.run.ledger
        day = ledger.known.days.name(self._clock.nanos() // 1000)
        return ledger.tokens_left(run.accounts.of(self.plan.persona, day))

    def check_accounts(self) -> None:
        """Raise ``BudgetExceeded`` if more was spent than a shared budget has."""
        run = self.run
        if run.ledger.unlimited is None:
            started = self._started_at or self._clock.nanos() // 1000
            run.ledger.check_spent(run.accounts, self.plan.persona, started)

    def check_price(self, persona: str, name: str, sizing: Sizing) -> None:
        """Raise ``UnpricedModel`` if nobody knows what a call costs that spends tokens."""
        estimate = self.run.ledger.estimate(persona, sizing.alike or name)
        most_usd(persona, name, sizing, estimate)

    def has_spent(self, attempt: int) -> bool:
        """Return whether an attempt has counted what it spent."""
        state = self.state
        return state is not None and state.tokens is not None and attempt in state.tokens

    def spent_in_all(self) -> tuple[int, int]:
        """Return the tokens that all its attempts spent, and the millionths of a dollar."""
        state, usage = self.state, self._usage
        usd = 0 if state is None else round(state.usd * MICROS)
        if usage is not None:
            usd += self.run.ledger.cost(usage, self._sizing, ())
        return self.tokens() + self.pending_tokens(), usd

    def add_event(
        self, kind: EntryKind, attempt: int, facts: dict[str, Any], *, sync: bool = True
    ) -> None:
        """Record what happened in an attempt; durable on return, also when the attempt is over."""
        state = self.state
        number = state.number if state else 0
        entry = NewEntry(kind, number, attempt, codec.dump_canonical(facts))
        self.run.append([entry], sync=sync)

    def progress(self) -> dict[str, Any]:
        """Return what it last saved of its work; a copy."""
        with self.run.mutex:
            return copy.deepcopy(self._saved_progress()) if self._progress_seq() else {}

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


def steps_around(run: OpenRun | None = None) -> tuple[StepAround, ...]:
    """Return the steps that what is executed here is inside of; ``run`` is the one that it belongs to.

    Also those in which its run, or that of one of these, was enqueued.
    """
    found: dict[StepAround, None] = {}
    runs = [] if run is None else [run]
    for record in records_around():
        if isinstance(record, RunStep) and record.state is not None:
            around = record.run
            found[StepAround(around.run_id, around.lease.run, record.state.number)] = None
            runs.append(around)
    for each in runs:
        found |= dict.fromkeys(each.accounts.enqueued_in)
    return tuple(found)


def plus(spent: Usage, tokens: int, usd: int, model: str) -> Usage:
    """Return what was spent, with some more."""
    return Usage(spent.tokens + tokens, 0, 0, 0, 0, (spent.usd or 0) + usd, model or spent.model)


def _attempts(
    step: int,
    log: list[Entry],
    completed: Entry | None,
    tokens: dict[int, int] | None,
    repairs: Mapping[int, Entry],
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
            _end_attempt(attempts[-1], entry, repairs.get(entry.attempt))
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
        status=ExecutionStatus.RUNNING,
        tokens_used=tokens.get(entry.attempt, 0) if tokens else 0,
    )


def _end_attempt(attempt: ExecutionAttempt, entry: Entry, repair: Entry | None) -> None:
    facts = facts_of(entry)
    tried = facts if repair is None else facts_of(repair)
    attempt.status = ExecutionStatus(facts.get("status", "failed"))
    attempt.ended_at = from_micros(entry.at)
    set_failure(
        attempt,
        facts.get("error", {}),
        healed=bool(facts.get("healed")) or (repair is not None and is_fixed(repair)),
        healing_error=tried.get("healing_error") if repair is None else tried.get("error"),
        feedback=tried.get("feedback"),
    )
