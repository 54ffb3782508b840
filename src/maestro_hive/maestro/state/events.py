"""The events of a run: one frozen record for each entry of its journal.

``EventReader`` makes them. Values are not in them: a result or a memory may be large, and
``run_view`` has it. ``str`` of an event is its text for people.

Everything about a kind of event is its class here: its fields, how they are read from an entry, and
its text. ``maestro events``, ``maestro show`` and ``hive.events`` need no change for a new one.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta
from operator import attrgetter
from typing import Any, ClassVar, NamedTuple, TypeVar, dataclass_transform

from maestro_hive.maestro.state import codec
from maestro_hive.maestro.state.projections import facts_of
from maestro_hive.maestro.state.records import Entry, EntryKind

#: Longer texts of errors are cut; the journal has all of them.
_LONGEST_LINE = 400

Facts = Mapping[str, Any]
EventT = TypeVar("EventT", bound="RunEvent")

# --- declaring events -----------------------------------------------------------------------------


class Source(NamedTuple):
    """An entry of which an event is made, its facts, and what the reader noted before."""

    entry: Entry
    facts: Facts
    reader: EventReader


def _read(read: Callable[[Source], Any], default: Any = dataclasses.MISSING) -> Any:
    """Declare how a field is read; without it, it is the fact of its own name."""
    return dataclasses.field(default=default, metadata={"read": read})


def _fact(*path: str, default: Any = dataclasses.MISSING) -> Any:
    """Declare a field that is the first of these facts there is; ``a.b`` is a part of ``a``."""

    def read(source: Source) -> object:
        for each in path:
            outer, _, inner = each.rpartition(".")
            value = (_part(source.facts, outer) if outer else source.facts).get(inner)
            if value:
                return value
        return None if default is dataclasses.MISSING else default

    return _read(read, default)


#: How a fact is read for a field of each type; None is what is not there.
_CONVERT: dict[str, Callable[[Any], object]] = {
    "str": lambda value: "" if value is None else str(value),
    "str | None": lambda value: str(value) if value else None,
    "bool": bool,
    "int": lambda value: value or 0,
    "float": lambda value: value or 0.0,
}

#: The event of each kind of entry.
EVENTS: dict[int, type[RunEvent]] = {}


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(_read, _fact))
def _event(kind: EntryKind | None = None, text: str = "") -> Callable[[type[EventT]], type[EventT]]:
    """Make a class the event of a kind of entry; ``text`` is its ``str``, a format of its fields."""

    def make(cls: type[EventT]) -> type[EventT]:
        event = dataclasses.dataclass(frozen=True, slots=True, kw_only=True)(cls)
        event.text = text
        event.readers = tuple((each.name, _reader_of(each)) for each in dataclasses.fields(event))
        if kind is not None:
            EVENTS[kind] = event
        return event

    return make


def _reader_of(field: dataclasses.Field[Any]) -> Callable[[Source], object]:
    name, read = field.name, field.metadata.get("read")
    convert: Callable[[Any], object] = _CONVERT.get(str(field.type), lambda value: value)
    if read is None:
        return lambda source: convert(source.facts.get(name))
    return lambda source: convert(read(source))


@_event()
class RunEvent:
    """Every event has the number of its entry, the time it was recorded (UTC), and its run."""

    text: ClassVar[str]
    readers: ClassVar[tuple[tuple[str, Callable[[Source], object]], ...]]

    seq: int = _read(lambda source: source.entry.seq)
    at: datetime = _read(lambda source: source.entry.when)
    run_id: str = _read(lambda source: source.reader.run_id)

    @classmethod
    def read(cls, source: Source) -> RunEvent:
        """Make the event of an entry."""
        fields: dict[str, Any] = {name: read(source) for name, read in cls.readers}
        return cls(**fields)

    def __str__(self) -> str:
        return self.text.format(self)


@_event()
class AttemptEvent(RunEvent):
    """An event of an attempt has the number and name of its step, and its persona."""

    step: int = _read(lambda source: source.entry.step)
    name: str = _read(lambda source: source.reader.step(source.entry.step).name)
    persona: str = _read(lambda source: source.reader.step(source.entry.step).persona)
    attempt: int = _read(lambda source: source.entry.attempt)

    @property
    def which(self) -> str:
        """Name the attempt: ``step implement (developer) attempt 2``."""
        return f"{_step(self.name or self.step, self.persona)} attempt {self.attempt}"


@_event()
class PersonaEvent(RunEvent):
    """An event of a persona."""

    persona: str


@_event()
class RoundEvent(RunEvent):
    """An event of a failed round of level 2: of its step, and why it failed."""

    persona: str = _read(lambda source: source.reader.round_of(source).persona)
    name: str = _read(lambda source: source.reader.round_of(source).name)
    message: str = _fact("report.details")
    category: str = _fact("report.error_category")

    @property
    def which(self) -> str:
        """Name the step: ``step implement (developer)``."""
        return _step(self.name, self.persona)


@_event()
class TaskEvent(RunEvent):
    """An event of a task that was named by hand."""

    task: str


# --- runs -----------------------------------------------------------------------------------------


@_event(EntryKind.RUN_STARTED)
class RunStarted(RunEvent):
    """A workflow was started: by itself, as a child of ``parent``, or as a fork of another run."""

    workflow: str
    parent: str | None = None
    forked_from: str | None = None
    from_step: str | None = None

    def __str__(self) -> str:
        child = f", child of run {self.parent}" if self.parent else ""
        at = f" at step {self.from_step}" if self.from_step else ""
        fork = f", forked from run {self.forked_from}{at}" if self.forked_from else ""
        return f"workflow {self.workflow} started{child}{fork}"


@_event(EntryKind.RUN_ENDED)
class RunEnded(RunEvent):
    """A workflow ended; ``status`` is success, failed or cancelled."""

    status: str = _fact("status", default="failed")
    error_type: str | None = _fact("error.type", default=None)
    message: str | None = _fact("error.message", "reason", default=None)

    def __str__(self) -> str:
        why = _error(self.error_type, self.message)
        return f"run ended: {self.status}{f': {why}' if why else ''}"


@_event(EntryKind.WAIT_STARTED)
class WaitStarted(RunEvent):
    """The workflow waits: for time (``what`` is sleep) or for an answer; ``until`` at most."""

    name: str
    what: str
    until: datetime | None = _read(lambda source: deadline(source.entry, source.facts))

    def __str__(self) -> str:
        until = f"until {self.until:%Y-%m-%d %H:%M:%S} UTC" if self.until else "without a limit"
        if self.what == "sleep":
            return f"sleeping {until}"
        return f"waiting for an answer to {self.name}, {until}"


@_event(EntryKind.WAIT_ENDED)
class WaitEnded(RunEvent):
    """A wait ended; ``how`` is over, answered or timeout."""

    name: str
    how: str
    by: str | None

    def __str__(self) -> str:
        return f"wait {self.name} ended: {self.how}{f' by {self.by}' if self.by else ''}"


@_event(EntryKind.CHILD_STARTED, "child run {0.child} started (workflow {0.workflow})")
class ChildStarted(RunEvent):
    """The workflow started another run as its child."""

    child: str = _fact("run_id")
    workflow: str


@_event(EntryKind.RETRIED)
class Retried(RunEvent):
    """A retry was requested: of one step, or of all that failed (``step`` is None)."""

    step: int | None = _read(lambda source: source.reader.retried(source).number or None)
    name: str | None = _read(lambda source: source.reader.retried(source).name)
    forget: bool

    def __str__(self) -> str:
        what = f"step {self.name or self.step}" if self.step else "all failed steps"
        return f"retry of {what} requested{', its result forgotten' if self.forget else ''}"


@_event(EntryKind.RESTORED)
class Restored(RunEvent):
    """Earlier entries no longer count: the run starts over, or from the copy that follows."""

    source: str | None = _fact("from")
    saved_at: str | None

    def __str__(self) -> str:
        if self.source is None:
            return "run started over; earlier entries no longer count"
        return f"run restored from {self.source}, saved at {self.saved_at}; its entries follow"


@_event(EntryKind.FIELDS_SET)
class FieldsSet(RunEvent):
    """Fields of the run were set, by name."""

    fields: tuple[str, ...] = _read(lambda source: _field_names(source.reader.load(source.entry)))

    def __str__(self) -> str:
        return f"fields set: {', '.join(self.fields)}"


def _field_names(data: bytes | None) -> tuple[str, ...]:
    fields = codec.parse(data, "fields", depth=codec.DOCUMENT_DEPTH) if data else {}
    return tuple(fields) if isinstance(fields, dict) else ()


# --- steps ----------------------------------------------------------------------------------------


@_event(EntryKind.ATTEMPT_STARTED)
class StepStarted(AttemptEvent):
    """An attempt at a step started; ``interrupted`` if the end of the previous one is missing."""

    interrupted: bool = _read(
        lambda source: source.reader.is_open(source.entry.step), default=False
    )

    def __str__(self) -> str:
        died = "; the process of the previous attempt died" if self.interrupted else ""
        return f"{self.which} started{died}"


@_event(EntryKind.ATTEMPT_FAILED)
class StepFailed(AttemptEvent):
    """An attempt failed; the next one is in ``retry_in`` seconds, if there is one in this round."""

    status: str = _fact("status", default="failed")
    error_type: str = _fact("error.type")
    message: str = _fact("error.message")
    category: str = _fact("error.category")
    round: int = _fact("round", default=1)
    retry_in: float | None = _read(lambda source: _wait_seconds(source.facts))
    final: bool
    healed: bool

    def __str__(self) -> str:
        repaired = "; repaired" if self.healed else ""
        then = _retrying(self.retry_in) if self.status == "retrying" else "; gave up"
        return f"{self.which} failed: {_error(self.error_type, self.message)}{repaired}{then}"


@_event()
class StepStopped(AttemptEvent):
    """An attempt ended without a failure: ``status`` is cancelled, or interrupted too often."""

    status: str = _fact("status", default="failed")
    message: str = _fact("error.message")

    def __str__(self) -> str:
        return f"{self.which} {self.status}{f': {self.message}' if self.message else ''}"


@_event(EntryKind.STEP_COMPLETED, "{0.which} completed")
class StepCompleted(AttemptEvent):
    """An attempt succeeded: the step is completed, and never runs again."""


@_event(EntryKind.PROGRESS_SAVED, "{0.which} saved progress")
class ProgressSaved(AttemptEvent):
    """A step saved its progress."""


@_event(EntryKind.SPENT)
class Spent(AttemptEvent):
    """Tokens or money were spent."""

    persona: str
    tokens: int
    usd: float

    def __str__(self) -> str:
        usd = f" and {self.usd:.4f} USD" if self.usd else ""
        return f"{self.which} spent {self.tokens:,} tokens{usd}"


@_event(EntryKind.ROUND_FAILED)
class RoundFailed(RoundEvent):
    """A round of level 2 failed; the next one is in ``retry_in`` seconds, if there is one."""

    round: int = _read(lambda source: source.reader.round_of(source).number)
    retry_in: float | None = _read(lambda source: _wait_seconds(source.facts))

    def __str__(self) -> str:
        then = "; gave up" if self.retry_in is None else _retrying(self.retry_in)
        return f"{self.which} round {self.round} failed: {self.category}: {self.message}{then}"


@_event(EntryKind.ESCALATED)
class Escalated(RoundEvent):
    """Level 2 gave up and asked for help; ``ticket`` names the ticket, if there is one."""

    ticket: str | None

    def __str__(self) -> str:
        ticket = f", ticket {self.ticket}" if self.ticket else ""
        return f"{self.which} needs help{ticket}: {self.category}: {self.message}"


# --- personas and tasks ---------------------------------------------------------------------------


@_event(EntryKind.MEMORY_SAVED, "memory of {0.persona} saved")
class MemorySaved(PersonaEvent):
    """A persona's memory was saved."""


@_event(EntryKind.HISTORY_APPENDED, "history of {0.persona} appended")
class HistoryAppended(PersonaEvent):
    """An item was appended to a persona's history."""


@_event(EntryKind.RETRY_COUNTED, "retry of {0.persona} counted")
class RetryCounted(PersonaEvent):
    """A retry of a persona was counted by hand."""


@_event(EntryKind.PERSONA_SET, "state of {0.persona} set")
class PersonaSet(PersonaEvent):
    """The state of a persona was set by hand."""


@_event(EntryKind.TASK_PENDING, "task {0.task} pending")
class TaskPending(TaskEvent):
    """A task is pending."""


@_event(EntryKind.TASK_COMPLETED, "task {0.task} completed")
class TaskCompleted(TaskEvent):
    """A task is completed."""


#: Every class of event, in the order of their kinds.
EVENT_TYPES: tuple[type[RunEvent], ...] = (*EVENTS.values(), StepStopped)


# --- reading --------------------------------------------------------------------------------------


class _Step(NamedTuple):
    """A step, or a failed round of one: ``number`` is the step's or the round's."""

    number: int
    name: str = ""
    persona: str = ""


class EventReader:
    """Makes the events of one run from its entries, which it is given from the first one on.

    ``load`` is asked for the few values that are needed; without it a large one is left out.
    """

    def __init__(
        self, run_id: str, load: Callable[[Entry], bytes | None] = attrgetter("value")
    ) -> None:
        self.run_id: str = run_id
        self.load: Callable[[Entry], bytes | None] = load
        self._reset()

    def _reset(self) -> None:
        self._steps: dict[int, _Step] = {}
        self._by_identity: dict[bytes | None, _Step] = {}
        #: Steps with an attempt whose end has not been read.
        self._open: set[int] = set()
        #: The latest failed round of each step.
        self._rounds: dict[bytes | None, _Step] = {}

    def read(self, entry: Entry) -> RunEvent | None:
        """Return the event of an entry; None for a kind that this version does not know."""
        kind = EVENTS.get(entry.kind)
        if kind is None:
            return None
        facts = facts_of(entry)
        if kind is StepFailed and not facts.get("counts", True):
            kind = StepStopped
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
                step = self._by_identity.get(entry.identity, _NO_STEP)
                earlier = self._rounds.get(entry.identity, _NO_STEP)
                self._rounds[entry.identity] = _Step(
                    facts.get("round") or earlier.number + 1,
                    _text(facts, "name") or step.name,
                    _text(facts, "persona") or step.persona,
                )
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
                self._open.discard(self._by_identity.get(entry.identity, _NO_STEP).number)
            case _:
                pass

    # --- for the fields of events ---

    def step(self, number: int) -> _Step:
        """Return a step by its number."""
        return self._steps.get(number, _NO_STEP)

    def is_open(self, step: int) -> bool:
        """Return whether the end of the step's latest attempt has not been read."""
        return step in self._open

    def retried(self, source: Source) -> _Step:
        """Return the step that an entry refers to by its identity."""
        return self._by_identity.get(source.entry.identity, _NO_STEP)

    def round_of(self, source: Source) -> _Step:
        """Return the latest failed round of the step that an entry refers to."""
        found = self._rounds.get(source.entry.identity, _NO_STEP)
        persona = found.persona or _text(_part(source.facts, "report"), "failed_persona")
        return found._replace(persona=persona)


_NO_STEP = _Step(0)
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
    run_id: str, entries: Sequence[Entry], load: Callable[[Entry], bytes | None], most: int
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
