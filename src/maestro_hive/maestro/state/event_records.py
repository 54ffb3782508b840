"""What happens in a run, as frozen records: one for each thing that an entry of its journal tells.

``EventReader`` of ``run_events`` makes them. Values are not in them: a result or a memory may be
large, and ``show_run`` has it. ``str`` of an event is its text for people.
"""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from datetime import datetime
from typing import Any

#: More of an error's text is in the journal.
_LONGEST_LINE = 400


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Every event has the number of its entry, the time it was recorded (UTC), and its run."""

    seq: int
    at: datetime
    run_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptEvent(Event):
    """What happens in an attempt says at which step, by number and name, and whose."""

    step: int
    name: str
    persona: str
    attempt: int

    @property
    def which(self) -> str:
        """Name the attempt: ``step implement (developer) attempt 2``."""
        return f"step {_whose(self.name or self.step, self.persona)} attempt {self.attempt}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PersonaEvent(Event):
    """What happens to a persona."""

    persona: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskEvent(Event):
    """What happens to a task that somebody named."""

    task: str


# --- runs ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class RunBegun(Event):
    """A workflow began: by itself, for a run that is its ``parent``, or as a fork of another."""

    workflow: str
    parent: str | None = None
    forked_from: str | None = None
    from_step: str | None = None

    def __str__(self) -> str:
        child = f", for run {self.parent}" if self.parent else ""
        at = f" at step {self.from_step}" if self.from_step else ""
        fork = f", forked from run {self.forked_from}{at}" if self.forked_from else ""
        return f"workflow {self.workflow} begun{child}{fork}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEnded(Event):
    """A workflow is over; ``status`` is success, failed or cancelled."""

    status: str
    error_type: str | None = None
    message: str | None = None

    def __str__(self) -> str:
        why = _error(self.error_type, self.message)
        return f"run ended: {self.status}{f': {why}' if why else ''}"


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitBegun(Event):
    """The workflow waits: for time (``what`` is sleep) or for an answer; ``until`` at most."""

    name: str
    what: str
    until: datetime | None

    def __str__(self) -> str:
        until = f"until {self.until:%Y-%m-%d %H:%M:%S} UTC" if self.until else "for ever"
        if self.what == "sleep":
            return f"sleeps {until}"
        return f"waits for an answer to {self.name}, {until}"


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitEnded(Event):
    """A wait is over; ``how`` is over, answered or timeout."""

    name: str
    how: str
    by: str | None

    def __str__(self) -> str:
        by = f" by {self.by}" if self.by else ""
        return f"wait {self.name} ended: {self.how}{by}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildBegun(Event):
    """The workflow started another run."""

    child: str
    workflow: str

    def __str__(self) -> str:
        return f"child run {self.child} begun (workflow {self.workflow})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Retried(Event):
    """Somebody let what failed be tried again: one step, or all (``step`` is None)."""

    step: int | None
    name: str | None
    forget: bool

    def __str__(self) -> str:
        what = f"step {self.name or self.step}" if self.step else "whatever failed"
        return f"{what} may be tried again{', its result forgotten' if self.forget else ''}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored(Event):
    """What came before counts no more: the run starts again, or from the copy that follows."""

    source: str | None
    saved_at: str | None

    def __str__(self) -> str:
        if self.source is None:
            return "run started afresh; what came before counts no more"
        return f"run restored from {self.source}, saved at {self.saved_at}; its entries follow"


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldsChanged(Event):
    """Fields of the run were set, by name."""

    fields: tuple[str, ...]

    def __str__(self) -> str:
        return f"fields set: {', '.join(self.fields)}"


# --- steps ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBegun(AttemptEvent):
    """An attempt at a step began; ``interrupted`` if the one before never ended: a kill."""

    interrupted: bool = False

    def __str__(self) -> str:
        died = "; the process of the attempt before it died" if self.interrupted else ""
        return f"{self.which} begun{died}"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFailed(AttemptEvent):
    """An attempt failed; the next one is in ``retry_in`` seconds, if there is one in this round."""

    status: str
    error_type: str
    message: str
    category: str
    round: int
    retry_in: float | None
    final: bool
    healed: bool

    def __str__(self) -> str:
        mended = "; mended" if self.healed else ""
        then = _again(self.retry_in) if self.status == "retrying" else "; given up"
        return f"{self.which} failed: {_error(self.error_type, self.message)}{mended}{then}"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepStopped(AttemptEvent):
    """An attempt ended and is no failure: ``status`` is cancelled, or interrupted too often."""

    status: str
    message: str

    def __str__(self) -> str:
        return f"{self.which} {self.status}{f': {self.message}' if self.message else ''}"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepKept(AttemptEvent):
    """An attempt succeeded, and the step never runs again."""

    def __str__(self) -> str:
        return f"{self.which} done, and kept"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgressSaved(AttemptEvent):
    """A step saved its half-done work."""

    def __str__(self) -> str:
        return f"{self.which} saved its progress"


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent(AttemptEvent):
    """Tokens or money were spent."""

    tokens: int
    usd: float

    def __str__(self) -> str:
        usd = f" and {self.usd:.4f} USD" if self.usd else ""
        return f"{self.which} spent {self.tokens:,} tokens{usd}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundFailed(PersonaEvent):
    """A round of level 2 failed; the next one is in ``retry_in`` seconds, if there is one."""

    name: str
    round: int
    message: str
    category: str
    retry_in: float | None

    def __str__(self) -> str:
        then = "; given up" if self.retry_in is None else _again(self.retry_in)
        whose = _whose(self.name, self.persona)
        return f"{whose} round {self.round} failed: {self.category}: {self.message}{then}"


@dataclass(frozen=True, slots=True, kw_only=True)
class HelpAsked(PersonaEvent):
    """Level 2 gave up and asked a person; ``ticket`` says where, if there is such a place."""

    name: str
    ticket: str | None
    message: str
    category: str

    def __str__(self) -> str:
        ticket = f", ticket {self.ticket}" if self.ticket else ""
        whose = _whose(self.name, self.persona)
        return f"{whose} needs help{ticket}: {self.category}: {self.message}"


# --- personas and tasks --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySaved(PersonaEvent):
    """A persona's memory changed."""

    def __str__(self) -> str:
        return f"memory of {self.persona} saved"


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryAdded(PersonaEvent):
    """A persona's history has one more item."""

    def __str__(self) -> str:
        return f"history of {self.persona} went on"


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryCounted(PersonaEvent):
    """A persona was tried once more."""

    def __str__(self) -> str:
        return f"{self.persona} tried once more"


@dataclass(frozen=True, slots=True, kw_only=True)
class PersonaChanged(PersonaEvent):
    """A persona shows something else of itself."""

    def __str__(self) -> str:
        return f"state of {self.persona} set"


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskPending(TaskEvent):
    """A task waits to be done."""

    def __str__(self) -> str:
        return f"task {self.task} pending"


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskCompleted(TaskEvent):
    """A task is done."""

    def __str__(self) -> str:
        return f"task {self.task} completed"


RunEvent = (
    RunBegun
    | RunEnded
    | WaitBegun
    | WaitEnded
    | ChildBegun
    | Retried
    | Restored
    | FieldsChanged
    | StepBegun
    | StepFailed
    | StepStopped
    | StepKept
    | ProgressSaved
    | Spent
    | RoundFailed
    | HelpAsked
    | MemorySaved
    | HistoryAdded
    | RetryCounted
    | PersonaChanged
    | TaskPending
    | TaskCompleted
)


def to_dict(event: RunEvent) -> dict[str, Any]:
    """Return an event as JSON: its name under ``event``, as ``step_begun``; times as ISO 8601."""
    name = re.sub(r"(?<!^)(?=[A-Z])", "_", type(event).__name__).lower()
    fields = {each.name: getattr(event, each.name) for each in dataclasses.fields(event)}
    return {"event": name, **{key: _plain(value) for key, value in fields.items()}}


def _plain(value: object) -> object:
    match value:
        case datetime():
            return value.isoformat()
        case tuple():
            return list(value)
        case _:
            return value


def describe(event: RunEvent) -> str:
    """Return an event in one line, for people."""
    line = " ".join(str(event).split())
    return line if len(line) <= _LONGEST_LINE else line[: _LONGEST_LINE - 1] + "…"


def _whose(name: object, persona: str) -> str:
    return f"{name} ({persona})" if persona else str(name)


def _error(kind: str | None, message: str | None) -> str:
    return ": ".join(part for part in (kind, message if message != kind else None) if part)


def _again(seconds: float | None) -> str:
    return f"; again in {seconds:.3g} s" if seconds else "; again at once"
