"""What must be true of steps that are executed, failed, killed, stopped and retried: a model.

It knows nothing of journals. It is told what a body does, and says whether it may be called, as
which attempt, and not before when.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

MAX_ATTEMPTS, MAX_INTERRUPTIONS = 3, 2
DELAYS = {1: 4.0, 2: 8.0}
#: Clocks are added to and subtracted from: this much is no time at all.
TINY = 1e-3


@dataclass
class StepModel:
    """One step."""

    completed: bool = False
    output: Any = None
    starts: int = 0
    #: Failures by round of level 2: each has its own set of attempts.
    by_round: dict[int, int] = field(default_factory=dict)
    #: The rounds it was begun in.
    rounds: set[int] = field(default_factory=set)
    stops: int = 0
    interruptions: int = 0
    last_attempt: int = 0
    open: bool = False
    #: The round in which the last failure was the last one.
    final: int | None = None
    #: Whether it failed at all, be it before somebody asked for a retry.
    failed_before: bool = False
    progress: dict[str, Any] = field(default_factory=dict)
    #: When it may be called again, in true time, if its last word was a failure.
    due: float | None = None
    #: How long the wait is that ``due`` ends, and whether the machine was started again in it.
    wait: float = 0.0
    rebooted: bool = False

    @property
    def started(self) -> bool:
        """Return whether the journal knows of it."""
        return self.last_attempt > 0

    @property
    def failures(self) -> int:
        """How many attempts failed."""
        return sum(self.by_round.values())

    def sentences(self) -> int:
        """How many sentences of feedback there are; after a retry the last failure's is left."""
        return self.failures or int(self.failed_before)

    def verdict(self, number: int = 1) -> str:
        """Return what a call in this round comes to before the body is called, if it is not."""
        if self.completed:
            return "completed"
        if self.interruptions + self.open > MAX_INTERRUPTIONS:
            return "interrupted"
        failures = self.by_round.get(number, 0)
        if failures and (self.final == number or failures >= MAX_ATTEMPTS):
            return "failed"
        return "called"

    def earliest(self, now: float) -> float:
        """Return before when it must not be called."""
        return now if self.due is None or self.rebooted else max(now, self.due)

    def latest(self, now: float) -> float:
        """Return after when it must not be called for the first time, by a call made now."""
        if self.due is None:
            return now
        return now + self.wait if self.rebooted else max(now, self.due)

    # --- what happens to it ---

    def start(self, number: int = 1) -> None:
        """An attempt begins; one that never ended is an interruption."""
        verdict = self.verdict(number)
        assert verdict == "called", f"called, but it is {verdict}"
        self.interruptions += self.open
        self.starts += 1
        self.rounds.add(number)
        self.last_attempt += 1
        self.open = True
        self.due = None

    def keep(self, output: Any) -> None:
        """It succeeds."""
        self.open, self.completed, self.output = False, True, output

    def fail(self, now: float, number: int, *, final: bool) -> None:
        """It fails, and will be tried again after a while, or not."""
        self.open = False
        failures = self.by_round[number] = self.by_round.get(number, 0) + 1
        self.due, self.final = None, None
        self.failed_before = True
        if final or failures >= MAX_ATTEMPTS:
            self.final = number
        else:
            self.wait = DELAYS[failures]
            self.due, self.rebooted = now + self.wait, False

    def stop(self) -> None:
        """It is stopped politely."""
        self.open = False
        self.stops += 1

    def interrupt(self) -> None:
        """It is found to have died once too often, and that is written down."""
        self.interruptions += self.open
        self.open = False

    def start_over(self, *, forget: bool) -> None:
        """Somebody asks for a retry, or for all of it again."""
        if not self.started or (self.completed and not forget):
            return
        self.starts = self.stops = self.interruptions = 0
        self.by_round, self.rounds = {}, set()
        self.open = False
        self.due = self.final = None
        if forget:
            self.completed, self.output, self.progress = False, None, {}
            self.failed_before = False


@dataclass
class RunModel:
    """One run of one persona."""

    steps: dict[tuple[str, int], StepModel] = field(default_factory=dict)
    memory: dict[str, Any] = field(default_factory=dict)
    history: list[Any] = field(default_factory=list)
    tokens: int = 0
    marked: dict[str, Any] = field(default_factory=dict)

    def step(self, name: str, given: int) -> StepModel:
        """Return a step, which may be new."""
        return self.steps.setdefault((name, given), StepModel())

    def completed(self) -> set[str]:
        """Return the names of tasks that are done."""
        begun = [(name, step) for (name, _), step in self.steps.items() if step.started]
        waiting = {name for name, step in begun if not step.completed}
        return {name for name, _ in begun if name not in waiting} | set(self.marked)

    def retries(self) -> int:
        """Return how often a step was begun again."""
        return sum(step.last_attempt - 1 for step in self.steps.values() if step.started)

    def reboot(self) -> None:
        """The machine is started again: waits may end early now, and last no longer than whole."""
        for step in self.steps.values():
            step.rebooted = True
