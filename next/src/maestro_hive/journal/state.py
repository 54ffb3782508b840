"""The state of a run, folded from its entries. Pure: no clock, no store, no loop.

An executing run keeps what can still be asked for: outcomes that no call has claimed yet, and steps
without an outcome. So a run of any length takes the memory of what is under way.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:  # entries change the state, and know it by name
    from collections.abc import Iterable

    from msgspec import Raw

    from maestro_hive.journal.entries import (
        AttemptFailed,
        CancelRequested,
        ChildStarted,
        Entry,
        PersonaSaved,
        ProgressSaved,
        Retried,
        RunEnded,
        RunStarted,
        RunSuspended,
        TaskSet,
        WaitStarted,
    )


class Outcome(NamedTuple):
    """What a durable call ended with, and its place in the order of the run."""

    seq: int
    at: int
    identity: str
    entry: Any  # one of the outcome kinds


class StepState:
    """A step without an outcome: its attempts over all lives."""

    __slots__ = (
        "failed",
        "feedback",
        "identity",
        "label",
        "micros",
        "number",
        "open_attempt",
        "progress",
        "starts",
        "stops",
        "tokens",
    )

    def __init__(self, number: int, identity: str) -> None:
        self.number, self.identity = number, identity
        self.starts = self.stops = 0
        self.open_attempt = self.tokens = self.micros = 0
        #: Its failures, in order.
        self.failed: list[AttemptFailed] = []
        self.progress: ProgressSaved | None = None
        #: Its name, and ``#2`` for the second one of the run.
        self.label = ""
        #: What a person said when a retry was requested.
        self.feedback = ""

    @property
    def failures(self) -> int:
        """Return how many attempts have failed."""
        return len(self.failed)

    @property
    def interruptions(self) -> int:
        """Return how many attempts have no end; ask when none is under way."""
        return self.starts - len(self.failed) - self.stops

    @property
    def round(self) -> int:
        """Return the round of the next attempt."""
        return self.failed[-1].round if self.failed else 1


class PersonaState:
    """What a persona remembers in a run."""

    __slots__ = ("history", "memory", "retries", "state")

    def __init__(self) -> None:
        self.memory: Raw | None = None
        self.state: Raw | None = None
        self.history: list[Raw] = []
        self.retries = 0

    def save(self, entry: PersonaSaved) -> None:
        """Keep what an entry has."""
        value: Any = entry.value
        match entry.what:
            case "memory":
                self.memory = value
            case "state":
                self.state = value
            case "history":
                self.history.append(value)
            case "retry":
                self.retries += 1


class RunState:
    """A run; ``seq`` is the number of its last entry."""

    def __init__(self) -> None:
        self.seq = self.created_at = self.updated_at = 0
        self.reset()

    def reset(self) -> None:
        """Forget all that was folded."""
        self.started: RunStarted | None = None
        self.ended: RunEnded | None = None
        self.suspended: RunSuspended | None = None
        self.cancel_requested: CancelRequested | None = None
        self.steps: dict[int, StepState] = {}
        self.by_identity: dict[str, StepState] = {}
        self.last_step = 0
        #: Outcomes of calls that were not claimed, by identity.
        self.outcomes: dict[str, Outcome] = {}
        #: Outcomes that belong to no call: cancel requests and ticks.
        self.signals: list[Outcome] = []
        #: How many steps of each name there are.
        self.step_names: dict[str, int] = {}
        #: When a retry of a call was requested, by identity: its time counts from then.
        self.retried: dict[str, int] = {}
        self.latest: Outcome | None = None
        self.questions: dict[str, WaitStarted] = {}
        self.children: dict[str, ChildStarted] = {}
        self.personas: dict[str, PersonaState] = {}
        self.tasks: dict[str, TaskSet] = {}
        self.fields: dict[str, Raw] = {}
        self.tokens = self.micros = 0
        #: Processes that died: all, and those since the last result that no step was open in.
        self.deaths = self.deaths_outside = 0
        self.resumed_at = 0

    def add(self, entries: Iterable[Entry]) -> None:
        """Fold entries in order."""
        for entry in entries:
            entry.fold(self)
            self.seq, self.updated_at = entry.seq, entry.at
            self.created_at = self.created_at or entry.at

    def add_step(self, step: StepState) -> StepState:
        """Add a step that has no outcome."""
        self.steps[step.number] = self.by_identity[step.identity] = step
        self.last_step = max(self.last_step, step.number)
        return step

    def step(self, identity: str) -> StepState:
        """Return what is recorded of a step, with a number of its own if it is new."""
        found = self.by_identity.get(identity)
        if found is None:
            self.last_step = number = self.last_step + 1
            found = self.steps[number] = self.by_identity[identity] = StepState(number, identity)
        return found

    def persona(self, name: str) -> PersonaState:
        """Return what a persona remembers."""
        found = self.personas.get(name)
        if found is None:
            found = self.personas[name] = PersonaState()
        return found

    def close(self, identity: str, entry: Entry) -> None:
        """Add the outcome of a call."""
        self.outcomes[identity] = self.latest = Outcome(entry.seq, entry.at, identity, entry)
        self.deaths_outside = 0

    def close_step(self, step: StepState, entry: Entry) -> None:
        """Add the outcome of a step, and forget its attempts."""
        identity = step.identity
        self.outcomes[identity] = self.latest = Outcome(entry.seq, entry.at, identity, entry)
        self.deaths_outside = 0
        self.questions.pop(identity, None)
        self.steps.pop(step.number, None)
        self.by_identity.pop(identity, None)

    def signal(self, entry: Entry) -> None:
        """Add an outcome that belongs to no call."""
        self.latest = Outcome(entry.seq, entry.at, "", entry)
        self.signals.append(self.latest)

    def retry(self, entry: Retried) -> None:
        """Forget the end of the run and the outcomes that no longer count."""
        self.ended = self.suspended = self.cancel_requested = None
        self.signals = [each for each in self.signals if each.entry.kind != "cancel_requested"]
        self.deaths_outside = 0
        for identity in entry.identities:
            self.retried[identity] = entry.at
            self.outcomes.pop(identity, None)
            self.questions.pop(identity, None)
            if (step := self.by_identity.pop(identity, None)) is not None:
                del self.steps[step.number]
            if entry.feedback:
                self.step(identity).feedback = entry.feedback
