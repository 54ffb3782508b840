"""The events of a run: one frozen record for each entry of its journal.

``EventReader`` makes them. Values are not in them: a result or a memory may be large, and ``views``
has it. ``str`` of an event is its text for people.

Everything about a kind of event is its class here: its fields, how it is read from an entry, and
its text. ``maestro events``, ``maestro show`` and ``hive.events`` need no change for a new one.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar

from maestro_hive.maestro.state import codec
from maestro_hive.maestro.state.projections import facts_of
from maestro_hive.maestro.state.records import Entry, EntryKind

#: Longer texts of errors are cut; the journal has all of them.
_LONGEST_LINE = 400

Facts = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEvent:
    """Every event has the number of its entry, the time it was recorded (UTC), and its run."""

    seq: int
    at: datetime
    run_id: str

    @classmethod
    def read(cls, source: Source) -> RunEvent:
        """Make the event of an entry."""
        return cls(**source.base())


EventT = TypeVar("EventT", bound=RunEvent)

#: The event of each kind of entry.
EVENTS: dict[int, type[RunEvent]] = {}


def _event_of(kind: EntryKind) -> Callable[[type[EventT]], type[EventT]]:
    def registered(event: type[EventT]) -> type[EventT]:
        EVENTS[kind] = event
        return event

    return registered


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptEvent(RunEvent):
    """An event of an attempt has the number and name of its step, and its persona."""

    step: int
    name: str
    persona: str
    attempt: int

    @classmethod
    def read(cls, source: Source) -> RunEvent:
        """Make the event of an entry."""
        return cls(**source.attempt())

    @property
    def which(self) -> str:
        """Name the attempt: ``step implement (developer) attempt 2``."""
        return f"{_step(self.name or self.step, self.persona)} attempt {self.attempt}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PersonaEvent(RunEvent):
    """An event of a persona."""

    persona: str

    @classmethod
    def read(cls, source: Source) -> RunEvent:
        """Make the event of an entry."""
        return cls(**source.base(), persona=source.text("persona"))


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskEvent(RunEvent):
    """An event of a task that was named by hand."""

    task: str

    @classmethod
    def read(cls, source: Source) -> RunEvent:
        """Make the event of an entry."""
        return cls(**source.base(), task=source.text("task"))


# --- runs -----------------------------------------------------------------------------------------


@_event_of(EntryKind.RUN_STARTED)
@dataclass(frozen=True, slots=True, kw_only=True)
class RunStarted(RunEvent):
    """A workflow was started: by itself, as a child of ``parent``, or as a fork of another run."""

    workflow: str
    parent: str | None = None
    forked_from: str | None = None
    from_step: str | None = None

    @classmethod
    def read(cls, source: Source) -> RunEvent:
        """Make the event of an entry."""
        return cls(
            **source.base(),
            workflow=source.text("workflow"),
            parent=source.text("parent") or None,
            forked_from=source.text("forked_from") or None,
            from_step=source.text("from_step") or None,
        )

    def __str__(self) -> str:
        child = f", child of run {self.parent}" if self.parent else ""
        at = f" at step {self.from_step}" if self.from_step else ""
        fork = f", forked from run {self.forked_from}{at}" if self.forked_from else ""
        return f"workflow {self.workflow} started{child}{fork}"


@_event_of(EntryKind.RUN_ENDED)
@dataclass(frozen=True, slots=True, kw_only=True)
class RunEnded(RunEvent):
    """A workflow ended; ``status`` is success, failed or cancelled."""

    status: str
    error_type: str | None = None
    message: str | None = None

    @classmethod
    def read(cls, source: Source) -> RunEvent:
        """Make the event of an entry."""
        error = source.part("error")
        return cls(
            **source.base(),
            status=source.text("status") or "failed",
            error_type=_text(error, "type") or None,
            message=_text(error, "message") or source.text("reason") or None,
        )

    def __str__(self) -> str:
        why = _error(self.error_type, self.message)
        return f"run ended: {self.status}{f': {why}' if why else ''}"


@_event_of(EntryKind.WAIT_STARTED)
@dataclass(frozen=True, slots=True, kw_only=True)
class WaitStarted(RunEvent):
    """The workflow waits: for time (``what`` is sleep) or for an answer; ``until`` at most."""

    name: str
    what: str
    until: datetime | None

    @classmethod
    def read(cls, source: Source) -> RunEvent:
        """Make the event of an entry."""
        name, what = source.text("name"), source.text("what")
        return cls(
            **source.base(), name=name, what=what, until=deadline(source.entry, source.facts)
        )

    def __str__(self) -> str:
        until = f"until {self.until:%Y-%m-%d %H:%M:%S} UTC" if self.until else "without a limit"
        if self.what == "sleep":
            return f"sleeping {until}"
        return f"waiting for an answer to {self.name}, {until}"


@_event_of(EntryKind.WAIT_ENDED)
@dataclass(frozen=True, slots=True, kw_only=True)
class WaitEnded(RunEvent):
    """A wait ended; ``how`` is over, answered or timeout."""

    name: str
    how: str
    by: str | None

    @classmethod
    def read(cls, source: Source) -> RunEvent:
        """Make the event of an entry."""
        name, how, by = source.text("name"), source.text("how"), source.text("by") or None
        return cls(**source.base(), name=name, how=how, by=by)

    def __str__(self) -> str:
        by = f" by {self.by}" if self.by else ""
        return f"wait {self.name} ended: {self.how}{by}"


@_event_of(EntryKind.CHILD_STARTED)
@dataclass(frozen=True, slots=True, kw_only=True)
class ChildStarted(RunEvent):
    """The workflow started another run as its child."""

    child: str
    workflow: str

    @classmethod
    def read(cls, source: Source) -> RunEvent:
        """Make the event of an entry."""
        child, workflow = source.text("run_id"), source.text("workflow")
        return cls(**source.base(), child=child, workflow=workflow)

    def __str__(self) -> str:
        return f"child run {self.child} started (workflow {self.workflow})"


@_event_of(EntryKind.RETRIED)
@dataclass(frozen=True, slots=True, kw_only=True)
class Retried(RunEvent):
    """A retry was requested: of one step, or of all that failed (``step`` is None)."""

    step: int | None
    name: str | None
    forget: bool

    @classmethod
    def read(cls, source: Source) -> RunEvent:
        """Make the event of an entry."""
        step = source.reader.step_with(source.entry.identity)
        number, name = (step.number, step.name) if step else (None, None)
        forget = bool(source.facts.get("forget"))
        return cls(**source.base(), step=number, name=name, forget=forget)

    def __str__(self) -> str:
        what = f"step {self.name or self.step}" if self.step else "all failed steps"
        return f"retry of {what} requested{', its result forgotten' if self.forget else ''}"


@_event_of(EntryKind.RESTORED)
@dataclass(frozen=True, slots=True, kw_only=True)
class Restored(RunEvent):
    """Earlier entries no longer count: the run starts over, or from the copy that follows."""

    source: str | None
    saved_at: str | None

    @classmethod
    def read(cls, source: Source) -> RunEvent:
        """Make the event of an entry."""
        copied, saved_at = source.text("from") or None, source.text("saved_at") or None
        return cls(**source.base(), source=copied, saved_at=saved_at)

    def __str__(self) -> str:
        if self.source is None:
            return "run started over; earlier entries no longer count"
        return f"run restored from {self.source}, saved at {self.saved_at}; its entries follow"


@_event_of(EntryKind.FIELDS_SET)
@dataclass(frozen=True, slots=True, kw_only=True)
class FieldsSet(RunEvent):
    """Fields of the run were set, by name."""

    fields: tuple[str, ...]

    @classmethod
    def read(cls, source: Source) -> RunEvent:
        """Make the event of an entry."""
        data = source.reader.load(source.entry)
        fields = codec.parse(data, "fields", depth=codec.DOCUMENT_DEPTH) if data else {}
        names = tuple(fields) if isinstance(fields, dict) else ()
        return cls(**source.base(), fields=names)

    def __str__(self) -> str:
        return f"fields set: {', '.join(self.fields)}"


# --- steps ----------------------------------------------------------------------------------------


@_event_of(EntryKind.ATTEMPT_STARTED)
@dataclass(frozen=True, slots=True, kw_only=True)
class StepStarted(AttemptEvent):
    """An attempt at a step started; ``interrupted`` if the end of the previous one is missing."""

    interrupted: bool = False

    @classmethod
    def read(cls, source: Source) -> RunEvent:
        """Make the event of an entry."""
        return cls(**source.attempt(), interrupted=source.reader.is_open(source.entry.step))

    def __str__(self) -> str:
        died = "; the process of the previous attempt died" if self.interrupted else ""
        return f"{self.which} started{died}"


@_event_of(EntryKind.ATTEMPT_FAILED)
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

    @classmethod
    def read(cls, source: Source) -> RunEvent:
        """Make the event of an entry: another one if it is not a failure of the task."""
        error, status = source.part("error"), source.text("status") or "failed"
        message = _text(error, "message")
        if not source.facts.get("counts", True):
            return StepStopped(**source.attempt(), status=status, message=message)
        return cls(
            **source.attempt(),
            status=status,
            error_type=_text(error, "type"),
            message=message,
            category=_text(error, "category"),
            round=source.facts.get("round", 1),
            retry_in=_wait_seconds(source.facts),
            final=bool(source.facts.get("final")),
            healed=bool(source.facts.get("healed")),
        )

    def __str__(self) -> str:
        repaired = "; repaired" if self.healed else ""
        then = _retrying(self.retry_in) if self.status == "retrying" else "; gave up"
        return f"{self.which} failed: {_error(self.error_type, self.message)}{repaired}{then}"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepStopped(AttemptEvent):
    """An attempt ended without a failure: ``status`` is cancelled, or interrupted too often."""

    status: str
    message: str

    def __str__(self) -> str:
        return f"{self.which} {self.status}{f': {self.message}' if self.message else ''}"


@_event_of(EntryKind.STEP_COMPLETED)
@dataclass(frozen=True, slots=True, kw_only=True)
class StepCompleted(AttemptEvent):
    """An attempt succeeded: the step is completed, and never runs again."""

    def __str__(self) -> str:
        return f"{self.which} completed"


@_event_of(EntryKind.PROGRESS_SAVED)
@dataclass(frozen=True, slots=True, kw_only=True)
class ProgressSaved(AttemptEvent):
    """A step saved its progress."""

    def __str__(self) -> str:
        return f"{self.which} saved progress"


@_event_of(EntryKind.SPENT)
@dataclass(frozen=True, slots=True, kw_only=True)
class Spent(AttemptEvent):
    """Tokens or money were spent."""

    tokens: int
    usd: float

    @classmethod
    def read(cls, source: Source) -> RunEvent:
        """Make the event of an entry."""
        whose = {**source.attempt(), "persona": source.text("persona")}
        return cls(**whose, tokens=source.facts.get("tokens", 0), usd=source.facts.get("usd", 0.0))

    def __str__(self) -> str:
        usd = f" and {self.usd:.4f} USD" if self.usd else ""
        return f"{self.which} spent {self.tokens:,} tokens{usd}"


@_event_of(EntryKind.ROUND_FAILED)
@dataclass(frozen=True, slots=True, kw_only=True)
class RoundFailed(PersonaEvent):
    """A round of level 2 failed; the next one is in ``retry_in`` seconds, if there is one."""

    name: str
    round: int
    message: str
    category: str
    retry_in: float | None

    @classmethod
    def read(cls, source: Source) -> RunEvent:
        """Make the event of an entry."""
        report = source.part("report")
        failed = source.reader.round_of(source.entry.identity)
        return cls(
            **source.base(),
            persona=failed.persona,
            name=failed.name,
            round=failed.number,
            message=_text(report, "details"),
            category=_text(report, "error_category"),
            retry_in=_wait_seconds(source.facts),
        )

    def __str__(self) -> str:
        then = "; gave up" if self.retry_in is None else _retrying(self.retry_in)
        which = _step(self.name, self.persona)
        return f"{which} round {self.round} failed: {self.category}: {self.message}{then}"


@_event_of(EntryKind.ESCALATED)
@dataclass(frozen=True, slots=True, kw_only=True)
class Escalated(PersonaEvent):
    """Level 2 gave up and asked for help; ``ticket`` names the ticket, if there is one."""

    name: str
    ticket: str | None
    message: str
    category: str

    @classmethod
    def read(cls, source: Source) -> RunEvent:
        """Make the event of an entry."""
        report = source.part("report")
        failed = source.reader.round_of(source.entry.identity)
        return cls(
            **source.base(),
            persona=failed.persona or _text(report, "failed_persona"),
            name=failed.name,
            ticket=source.text("ticket") or None,
            message=_text(report, "details"),
            category=_text(report, "error_category"),
        )

    def __str__(self) -> str:
        ticket = f", ticket {self.ticket}" if self.ticket else ""
        which = _step(self.name, self.persona)
        return f"{which} needs help{ticket}: {self.category}: {self.message}"


# --- personas and tasks ---------------------------------------------------------------------------


@_event_of(EntryKind.MEMORY_SAVED)
@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySaved(PersonaEvent):
    """A persona's memory was saved."""

    def __str__(self) -> str:
        return f"memory of {self.persona} saved"


@_event_of(EntryKind.HISTORY_APPENDED)
@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryAppended(PersonaEvent):
    """An item was appended to a persona's history."""

    def __str__(self) -> str:
        return f"history of {self.persona} appended"


@_event_of(EntryKind.RETRY_COUNTED)
@dataclass(frozen=True, slots=True, kw_only=True)
class RetryCounted(PersonaEvent):
    """A retry of a persona was counted by hand."""

    def __str__(self) -> str:
        return f"retry of {self.persona} counted"


@_event_of(EntryKind.PERSONA_SET)
@dataclass(frozen=True, slots=True, kw_only=True)
class PersonaSet(PersonaEvent):
    """The state of a persona was set by hand."""

    def __str__(self) -> str:
        return f"state of {self.persona} set"


@_event_of(EntryKind.TASK_PENDING)
@dataclass(frozen=True, slots=True, kw_only=True)
class TaskPending(TaskEvent):
    """A task is pending."""

    def __str__(self) -> str:
        return f"task {self.task} pending"


@_event_of(EntryKind.TASK_COMPLETED)
@dataclass(frozen=True, slots=True, kw_only=True)
class TaskCompleted(TaskEvent):
    """A task is completed."""

    def __str__(self) -> str:
        return f"task {self.task} completed"


#: Every class of event, in the order of their kinds.
EVENT_TYPES: tuple[type[RunEvent], ...] = (*EVENTS.values(), StepStopped)


# --- reading --------------------------------------------------------------------------------------


class _Step(NamedTuple):
    number: int
    name: str
    persona: str


class _Round(NamedTuple):
    """The latest failed round of a step."""

    number: int = 0
    name: str = ""
    persona: str = ""


class EventReader:
    """Makes the events of one run from its entries, which it is given from the first one on.

    ``load`` is asked for the few values that are needed; without it a large one is left out.
    """

    def __init__(
        self, run_id: str, load: Callable[[Entry], bytes | None] = attrgetter("value")
    ) -> None:
        self._run_id = run_id
        self.load = load
        self._reset()

    def _reset(self) -> None:
        self._steps: dict[int, _Step] = {}
        self._by_identity: dict[bytes, _Step] = {}
        #: Steps with an attempt whose end has not been read.
        self._open: set[int] = set()
        self._rounds: dict[bytes | None, _Round] = {}

    def read(self, entry: Entry) -> RunEvent | None:
        """Return the event of an entry; None for a kind that this version does not know."""
        kind = EVENTS.get(entry.kind)
        if kind is None:
            return None
        facts = facts_of(entry)
        self._before(entry, facts)
        event = kind.read(Source(entry, facts, self))
        self._after(entry)
        return event

    def skip(self, entries: Sequence[Entry]) -> None:
        """Take note of entries whose events are not wanted."""
        for entry in entries:
            if entry.kind in _NOTED:
                self._before(entry, facts_of(entry))
                self._after(entry)

    def _before(self, entry: Entry, facts: Facts) -> None:
        """Note what the event of this entry may need: the step, or the round."""
        match entry.kind:
            case EntryKind.ATTEMPT_STARTED if entry.step not in self._steps:
                step = _Step(entry.step, _text(facts, "name"), _text(facts, "persona"))
                self._steps[entry.step] = step
                if entry.identity is not None:
                    self._by_identity[entry.identity] = step
            case EntryKind.ROUND_FAILED:
                self._rounds[entry.identity] = self._failed_round(entry, facts)
            case EntryKind.RESTORED:
                self._reset()
            case _:
                pass

    def _after(self, entry: Entry) -> None:
        """Note what later events may need: the attempts and rounds that are open."""
        match entry.kind:
            case EntryKind.ATTEMPT_STARTED:
                self._open.add(entry.step)
            case EntryKind.ATTEMPT_FAILED | EntryKind.STEP_COMPLETED:
                self._open.discard(entry.step)
            case EntryKind.RETRIED if entry.identity is None:
                self._rounds.clear()
                self._open.clear()
            case EntryKind.RETRIED:
                self._rounds.pop(entry.identity, None)
                step = self.step_with(entry.identity)
                self._open.discard(step.number if step else 0)
            case _:
                pass

    def _failed_round(self, entry: Entry, facts: Facts) -> _Round:
        step = self.step_with(entry.identity) or _Step(0, "", "")
        persona = _text(facts, "persona") or step.persona
        return _Round(
            facts.get("round") or self.round_of(entry.identity).number + 1,
            _text(facts, "name") or step.name,
            persona or _text(_part(facts, "report"), "failed_persona"),
        )

    # --- for the classes of events ---

    def base(self, entry: Entry) -> dict[str, Any]:
        """Return the fields that every event has."""
        return {"seq": entry.seq, "at": entry.when, "run_id": self._run_id}

    def attempt(self, entry: Entry) -> dict[str, Any]:
        """Return the fields that every event of an attempt has."""
        step = self._steps.get(entry.step) or _Step(entry.step, "", "")
        whose = {"step": step.number, "name": step.name, "persona": step.persona}
        return {**self.base(entry), **whose, "attempt": entry.attempt}

    def is_open(self, step: int) -> bool:
        """Return whether the end of the step's latest attempt has not been read."""
        return step in self._open

    def step_with(self, identity: bytes | None) -> _Step | None:
        """Return the step of this identity."""
        return None if identity is None else self._by_identity.get(identity)

    def round_of(self, identity: bytes | None) -> _Round:
        """Return the latest failed round of a step."""
        return self._rounds.get(identity, _Round())


class Source(NamedTuple):
    """An entry of which an event is made, its facts, and what the reader noted before."""

    entry: Entry
    facts: Facts
    reader: EventReader

    def base(self) -> dict[str, Any]:
        """Return the fields that every event has."""
        return self.reader.base(self.entry)

    def attempt(self) -> dict[str, Any]:
        """Return the fields that every event of an attempt has."""
        return self.reader.attempt(self.entry)

    def text(self, name: str) -> str:
        """Return a fact as text; empty if there is none."""
        return _text(self.facts, name)

    def part(self, name: str) -> Facts:
        """Return a fact that is an object; empty if there is none."""
        return _part(self.facts, name)


#: The kinds of which ``EventReader`` takes note for later events.
_NOTED = frozenset(
    {
        EntryKind.ATTEMPT_STARTED,
        EntryKind.ATTEMPT_FAILED,
        EntryKind.STEP_COMPLETED,
        EntryKind.ROUND_FAILED,
        EntryKind.RETRIED,
        EntryKind.RESTORED,
    }
)


def latest_events(
    run_id: str,
    entries: Sequence[Entry],
    load: Callable[[Entry], bytes | None],
    most: int,
) -> list[RunEvent]:
    """Return the events of the last ``most`` entries of a run."""
    reader, first = EventReader(run_id, load), max(0, len(entries) - most)
    reader.skip(entries[:first])
    events = [reader.read(entry) for entry in entries[first:]]
    return [event for event in events if event is not None]


# --- showing --------------------------------------------------------------------------------------


def to_dict(event: RunEvent) -> dict[str, Any]:
    """Return an event as JSON: its name under ``event``, as ``step_started``; times as ISO 8601."""
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


def _step(name: object, persona: str) -> str:
    return f"step {name} ({persona})" if persona else f"step {name}"


def _error(kind: str | None, message: str | None) -> str:
    return ": ".join(part for part in (kind, message if message != kind else None) if part)


def _retrying(seconds: float | None) -> str:
    return f"; retrying in {seconds:.3g} s" if seconds else "; retrying at once"


# --- facts ----------------------------------------------------------------------------------------


def _text(facts: Facts, name: str) -> str:
    value = facts.get(name)
    return "" if value is None else str(value)


def _part(facts: Facts, name: str) -> Facts:
    value = facts.get(name)
    return value if isinstance(value, dict) else {}


def _wait_seconds(facts: Facts) -> float | None:
    """Return how long is waited, if it is."""
    seconds = _part(facts, "wait").get("seconds")
    return None if seconds is None else float(seconds)


def deadline(entry: Entry, facts: Facts) -> datetime | None:
    """Return when a wait ends at the latest; None if it has no limit."""
    seconds = _wait_seconds(facts)
    try:
        return None if seconds is None else entry.when + timedelta(seconds=seconds)
    except OverflowError:  # as good as no limit
        return None
