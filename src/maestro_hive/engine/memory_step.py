"""What is noted of one step in memory alone: for executors without a workflow id.

``MemoryStep`` has the methods that the path of a step calls, as ``RunStep`` of ``step_record``.
"""

from __future__ import annotations

import copy
import secrets
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from maestro_hive.engine.accounts import most_usd
from maestro_hive.engine.failures import set_failure
from maestro_hive.engine.healing.function_healers import TriedRepair
from maestro_hive.engine.healing.repairs import Repair
from maestro_hive.engine.results import ExecutionAttempt, ExecutionStatus
from maestro_hive.engine.streams import DiscardedStream
from maestro_hive.kernel.clock import Wait
from maestro_hive.maestro.state.projections import feedback_sentence

if TYPE_CHECKING:
    from collections.abc import Mapping
    from contextlib import AbstractContextManager

    from maestro_hive.engine.accounts import Sizing
    from maestro_hive.engine.budget import Gate
    from maestro_hive.engine.failures import AttemptEnd
    from maestro_hive.engine.healing.repairs import Verdict
    from maestro_hive.engine.healing.workspace import FileBefore
    from maestro_hive.engine.usage import Usage
    from maestro_hive.kernel.clock import Clock
    from maestro_hive.maestro.state.codec import Encoded, Json
    from maestro_hive.maestro.state.projections import StepState
    from maestro_hive.maestro.state.records import EntryKind
    from maestro_hive.maestro.state.store import DocumentGuard


@dataclass(slots=True)
class MemoryPersona:
    """What a persona of an executor without a journal remembers, as long as that lives."""

    memory: dict[str, Any] = field(default_factory=dict)
    history: list[Any] = field(default_factory=list)
    tokens: int = 0
    usd: float = 0.0
    gate: Gate | None = None
    #: What is held while something of it is changed, or something of one of its steps.
    lock: threading.RLock = field(default_factory=threading.RLock)


class MemoryStep:
    """A step of which nothing is written: for executors without a workflow id."""

    __slots__ = (
        "_attempts",
        "_clock",
        "_files",
        "_fingerprints",
        "_least_wait",
        "_persona",
        "_progress",
        "_repairs",
        "_staged",
        "_started",
        "_tokens",
        "_usd",
        "_wait",
        "effect_key",
        "failures",
        "still_held",
    )

    state: StepState | None = None
    run_id: str | None = None
    #: Its rounds are counted by who makes them.
    round = 1

    def __init__(self, persona: MemoryPersona, clock: Clock) -> None:
        self.failures = 0
        #: The name of this step's effect for the outside world.
        self.effect_key = f"exec_{secrets.token_hex(8)}"
        self._persona = persona
        self._clock = clock
        self._attempts: list[ExecutionAttempt] = []
        self._progress: dict[str, Any] = {}
        self._staged: dict[str, Any] | None = None
        self._tokens: dict[int, int] = {}
        self._usd = 0
        self._wait = self._least_wait = 0.0
        self._started = 0.0
        #: The fingerprint of each failed attempt; the repairs with their verdicts; what files were.
        self._fingerprints: list[str | None] = []
        self._repairs: dict[tuple[int, str], tuple[Repair, str | None]] = {}
        self._files: dict[tuple[int, str], tuple[dict[str, FileBefore], str | None]] = {}
        #: Nothing of it is written, so nobody reads this.
        self.still_held: list[Json] = []

    def label(self) -> str:
        """Return nothing: there are no others of its name."""
        return ""

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

    # --- repairs ---

    def worked_before(self, _fingerprint: str) -> str | None:
        """Return None: in memory nothing is known of other executions."""
        return None

    def tried_repairs(self, fingerprint: str) -> list[TriedRepair]:
        """Return what was tried, and how it went."""
        return [
            TriedRepair(
                repair.healer,
                repair.facts.get("fix"),
                repair.facts.get("feedback"),
                repair.fingerprint == fingerprint,
                verdict,
            )
            for repair, verdict in self._repairs.values()
        ]

    def pending_repairs(self) -> list[Repair]:
        """Return nothing: only another process, or another round, would ask."""
        return []

    def interrupted_repairs(self) -> list[Repair]:
        """Return nothing, as above."""
        return []

    def unhealed_failure(self) -> tuple[dict[str, Any], dict[str, Any]] | None:
        """Return nothing, as above."""
        return None

    def fingerprints_after(self, attempt: int) -> list[str | None]:
        """Return the fingerprints of the failures after an attempt; None where one is unknown."""
        return self._fingerprints[attempt:]

    def files_before(self, repair: Repair) -> tuple[dict[str, FileBefore], str | None]:
        """Return what files were before a repair, and the folder they are in."""
        return self._files.get((repair.attempt, repair.healer), ({}, None))

    async def record_files(self, facts: dict[str, Any], before: Mapping[str, FileBefore]) -> None:
        """Note what files are before a repair changes them."""
        key = len(self._attempts), str(facts["healer"])
        self._files[key] = dict(before), facts.get("workspace")

    async def record_repair(
        self, facts: dict[str, Any], arguments: Encoded | None
    ) -> Repair | None:
        """Note what came of healing the last failure; return the repair, if there is one."""
        del arguments
        attempt = self._attempts[-1]
        attempt.healing_applied = facts["status"] == "FIXED"
        for name, fact in (("healing_error", "error"), ("feedback", "feedback")):
            if facts.get(fact) is not None:
                attempt.metrics[name] = facts[fact]
        if attempt.healing_applied:
            self._wait = max(facts.get("seconds") or 0.0, self._least_wait)
        repair = Repair.read(len(self._attempts), facts)
        if repair is not None:
            self._repairs[repair.attempt, repair.healer] = repair, None
        return repair

    async def record_verdict(self, repair: Repair, verdict: Verdict) -> None:
        """Note whether a repair worked."""
        self._repairs[repair.attempt, repair.healer] = repair, verdict.verdict

    # --- attempts ---

    def tokens(self) -> int:
        """Return the tokens that all its attempts spent."""
        return sum(self._tokens.values())

    async def start(self, guard: DocumentGuard | None = None, sizing: Sizing | None = None) -> None:
        """Note that an attempt starts."""
        del guard, sizing
        number = len(self._attempts) + 1
        if number == 1:
            self._started = self._clock.boot_seconds()
        self._attempts.append(
            ExecutionAttempt(
                f"{self.effect_key}.{number}",
                number,
                self._clock.now(),
                status=ExecutionStatus.RUNNING,
            )
        )

    async def complete(self, _output: object, *, cancelled: bool = False) -> None:
        """Note that it succeeded."""
        del cancelled
        attempt = self._attempts[-1]
        attempt.status = ExecutionStatus.SUCCESS
        attempt.ended_at = self._clock.now()
        if self._tokens:
            attempt.tokens_used = self._tokens.get(attempt.attempt_number, 0)

    async def fail(self, failure: AttemptEnd) -> None:
        """Note that it failed."""
        self.stop(failure)

    def stop(self, failure: AttemptEnd) -> None:
        """Note that it failed, or was stopped."""
        if not self._attempts:
            return
        attempt = self._attempts[-1]
        attempt.status = failure.status
        attempt.ended_at = self._clock.now()
        set_failure(attempt, failure.error)
        self._fingerprints.append((failure.diagnosis or {}).get("fingerprint"))
        attempt.tokens_used = self._tokens.get(attempt.attempt_number, 0)
        self.failures += failure.counts
        self._wait, self._least_wait = failure.wait or 0.0, failure.least_wait

    async def wait(self) -> None:
        """Wait for the next attempt."""
        await Wait.start(self._clock, self._wait).finished(self._clock)

    # --- what its context stores ---

    @property
    def lock(self) -> AbstractContextManager[object]:
        """What is held while something is changed."""
        return self._persona.lock

    def open_stream(self) -> DiscardedStream:
        """Return a stream that is not stored: without a run, nobody could read it."""
        return DiscardedStream()

    def change_progress(self, changed: dict[str, Any]) -> None:
        """Change fields of its half-done work; what its other threads changed meanwhile stays."""
        with self.lock:
            self._progress = self._progress | copy.deepcopy(changed)

    def stage_progress(self, changed: dict[str, Any] | None) -> dict[str, Any] | None:
        """Return what it is asked to keep: nothing here survives a kill, so it is kept afterwards."""
        with self.lock:
            staged, self._staged = self._staged, changed
            return staged

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

    def spend(self, attempt: int, usage: Usage) -> None:
        """Count what was spent."""
        with self.lock:
            self._persona.tokens += usage.tokens
            self._persona.usd += (usage.usd or 0) / 1e6
            self._usd += usage.usd or 0
            self._tokens[attempt] = self._tokens.get(attempt, 0) + usage.tokens

    #: The usage that its outcome reports is counted in the same way.
    note_usage = spend

    def tokens_left(self) -> float:
        """Return how many tokens shared budgets leave to it: there are none in memory."""
        return float("inf")

    def pending_tokens(self) -> int:
        """Return 0: what was spent is counted at once."""
        return 0

    def check_accounts(self) -> None:
        """Do nothing: without a journal, no budget is shared."""

    def check_price(self, persona: str, name: str, sizing: Sizing) -> None:
        """Raise ``UnpricedModel`` if the model that the step names has no price."""
        most_usd(persona, name, sizing)

    def has_spent(self, attempt: int) -> bool:
        """Return whether an attempt has counted what it spent."""
        return attempt in self._tokens

    def spent_in_all(self) -> tuple[int, int]:
        """Return the tokens that all its attempts spent, and the millionths of a dollar."""
        return self.tokens(), self._usd

    def add_event(
        self, kind: EntryKind, attempt: int, facts: dict[str, Any], *, sync: bool = True
    ) -> None:
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
