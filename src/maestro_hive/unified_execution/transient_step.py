"""A step that nothing is kept of: for executors without a workflow id."""

from __future__ import annotations

import copy
import itertools
import os
import secrets
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from maestro_hive.engine.results import ExecutionAttempt, ExecutionStatus
from maestro_hive.engine.waits import Wait
from maestro_hive.unified_execution.steps import metrics_of

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from maestro_hive.kernel.clock import Clock
    from maestro_hive.maestro.state.projections import StepState
    from maestro_hive.unified_execution.steps import Failure


@dataclass(slots=True)
class Persona:
    """What a persona of an executor without a journal remembers, as long as that lives."""

    memory: dict[str, Any] = field(default_factory=dict)
    history: list[Any] = field(default_factory=list)
    tokens: int = 0
    usd: float = 0.0
    #: What is held while something of it is changed, or something of one of its steps.
    lock: threading.RLock = field(default_factory=threading.RLock)


_numbers = itertools.count(1)
_PREFIX = f"exec_{secrets.token_hex(6)}_"


def _new_names_in_child() -> None:
    global _PREFIX  # noqa: PLW0603 - or parent and child would give the same names
    _PREFIX = f"exec_{secrets.token_hex(6)}_"


os.register_at_fork(after_in_child=_new_names_in_child)


class TransientStep:
    """A step that nothing is kept of; for executors without a workflow id."""

    __slots__ = (
        "_attempts",
        "_began",
        "_clock",
        "_number",
        "_persona",
        "_progress",
        "_tokens",
        "_wait",
        "failures",
    )

    state: StepState | None = None
    run_id: str | None = None

    def __init__(self, persona: Persona, clock: Clock) -> None:
        self.failures = 0
        self._persona = persona
        self._clock = clock
        self._number = next(_numbers)
        self._attempts: list[ExecutionAttempt] = []
        self._progress: dict[str, Any] = {}
        self._tokens: dict[int, int] = {}
        self._wait = 0.0
        self._began = 0.0

    @property
    def effect_key(self) -> str:
        """Name the effect of this step to the outside world; a process has its own names."""
        return f"{_PREFIX}{self._number:x}"

    @property
    def attempt(self) -> int:
        """The number of the attempt that began last."""
        return len(self._attempts)

    def feedback(self) -> list[str]:
        """Return what went wrong before, a sentence for each attempt."""
        if not self.failures:
            return []
        return [
            f"Attempt {each.attempt_number} failed:"
            f" {each.metrics.get('error_category', 'UNKNOWN')}: {each.error_message}"
            for each in self._attempts
            if each.error_message is not None
        ]

    def elapsed(self) -> float:
        """Return the seconds since its first attempt began."""
        return self._clock.boot_seconds() - self._began if self._attempts else 0.0

    def attempts(self) -> list[ExecutionAttempt]:
        """Return every attempt there was."""
        return self._attempts

    def tokens(self) -> int:
        """Return the tokens that all its attempts spent."""
        return sum(self._tokens.values())

    async def begin(self) -> None:
        """Note that an attempt begins."""
        number = len(self._attempts) + 1
        if number == 1:
            self._began = self._clock.boot_seconds()
        self._attempts.append(
            ExecutionAttempt(f"{self._number}.{number}", number, self._clock.now())
        )

    def encode(self, output: Any) -> None:
        """Do nothing: any result will do."""

    async def keep(self, _output: object) -> None:
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
        attempt.error_message = failure.error.get("message")
        attempt.error_type = failure.error.get("type")
        attempt.error_traceback = failure.error.get("traceback")
        attempt.healing_applied = failure.healed
        attempt.metrics = metrics_of(failure.error, failure.healing_error)
        attempt.tokens_used = self._tokens.get(attempt.attempt_number, 0)
        self.failures += failure.counts
        self._wait = failure.wait or 0.0

    async def wait(self) -> None:
        """Wait for the next attempt."""
        await Wait.begin(self._clock, self._wait).over(self._clock)

    # --- the notebook of its context ---

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
            kept = {key: value for key, value in self._persona.memory.items() if key not in gone}
            self._persona.memory = kept | copy.deepcopy(changed)
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

    def progress(self) -> dict[str, Any]:
        """Return what it last saved of its work; a copy."""
        return copy.deepcopy(self._progress)

    def memory(self) -> dict[str, Any]:
        """Return the persona's memory; its values are nobody's to change, for others have them."""
        return self._persona.memory

    def history(self) -> list[Any]:
        """Return the persona's history."""
        return copy.deepcopy(self._persona.history)
