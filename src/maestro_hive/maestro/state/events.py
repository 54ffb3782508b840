"""The events of a run: one frozen record for each entry of its journal.

``event_reader`` makes them. Values are not in them: a result or a memory may be large, and
``run_view`` has it. ``str`` of an event is its text for people.

Everything about a kind of event is its class here: its fields, how they are read from an entry, and
its text. ``maestro events``, ``maestro show`` and ``hive.events`` need no change for a new one.
"""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from datetime import datetime
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeVar, dataclass_transform

from maestro_hive.maestro.state import codec, plain
from maestro_hive.maestro.state.records import Entry, EntryKind
from maestro_hive.maestro.state.views import deadline, wait_seconds

if TYPE_CHECKING:
    from collections.abc import Callable

    from maestro_hive.maestro.state.event_reader import EventReader
    from maestro_hive.maestro.state.projections import Facts

#: Longer texts of errors are cut; the journal has all of them.
_LONGEST_LINE = 400

EventT = TypeVar("EventT", bound="RunEvent")

# --- declaring events -----------------------------------------------------------------------------


class Source(NamedTuple):
    """An entry of which an event is made, its facts, and what the reader noted before."""

    entry: Entry
    facts: Facts
    reader: EventReader


def _read(read: Callable[[Source], object], default: object = dataclasses.MISSING) -> Any:
    """Declare how a field is read; without it, it is the fact of its own name."""
    return dataclasses.field(default=default, metadata={"read": read})


def _fact(*path: str, default: object = dataclasses.MISSING) -> Any:
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
_CONVERT: dict[str, Callable[[object], object]] = {
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


def _reader_of(field: dataclasses.Field[object]) -> Callable[[Source], object]:
    name, read = field.name, field.metadata.get("read")
    convert: Callable[[object], object] = _CONVERT.get(str(field.type), lambda value: value)
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
        fields: dict[str, codec.Json] = {name: read(source) for name, read in cls.readers}
        return cls(**fields)

    def __str__(self) -> str:
        return self.text.format(self)


@_event()
class AttemptEvent(RunEvent):
    """An event of an attempt has the number and name of its step, and its persona.

    ``label`` tells it from other steps of its name: ``name#2`` is the second one that was started.
    """

    step: int = _read(lambda source: source.entry.step)
    name: str = _read(lambda source: source.reader.name(source.entry))
    label: str = _read(lambda source: source.reader.label(source.entry), default="")
    persona: str = _read(lambda source: source.reader.persona(source.entry))
    attempt: int = _read(lambda source: source.entry.attempt)

    @property
    def which(self) -> str:
        """Name the attempt: ``step implement#3 (developer) attempt 2``."""
        named = self.label or self.name or self.step
        return f"{_step(named, self.persona)} attempt {self.attempt}"


@_event()
class PersonaEvent(RunEvent):
    """An event of a persona."""

    persona: str


@_event()
class RoundEvent(RunEvent):
    """An event of a failed round of level 2: of its step, and why it failed."""

    persona: str = _read(
        lambda source: (
            source.reader.round(source.entry).get("persona")
            or source.reader.persona(source.entry)
            or _part(source.facts, "report").get("failed_persona")
        )
    )
    name: str = _read(
        lambda source: (
            source.reader.round(source.entry).get("name") or source.reader.name(source.entry)
        )
    )
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
    """The workflow waits for time (``what`` is sleep) or an answer, or has a timeout; ``until``.

    Or a step failed for good, and waits for a person (``what`` is escalation).
    """

    name: str
    what: str
    escalation: str | None
    until: datetime | None = _read(lambda source: deadline(source.entry, source.facts))

    def __str__(self) -> str:
        until = f"until {self.until:%Y-%m-%d %H:%M:%S} UTC" if self.until else "without a limit"
        if self.what == "sleep":
            return f"sleeping {until}"
        if self.what == "timeout":
            return f"a block with a timeout started, {until}"
        if self.what == "escalation":
            return f"{self.name} needs help: escalation {self.escalation} waits for a person"
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


@_event(EntryKind.CHILD_ENDED, "child run {0.child} ended: {0.status} (workflow {0.workflow})")
class ChildEnded(RunEvent):
    """A child of the workflow ended; ``cancelled`` by the workflow itself, or not."""

    child: str = _fact("run_id")
    workflow: str
    status: str
    cancelled: bool


@_event(EntryKind.VALUE_RECORDED, "{0.name} recorded")
class ValueRecorded(RunEvent):
    """The workflow got the time, or something random."""

    name: str


@_event(EntryKind.CANCEL_REQUESTED)
class CancelRequested(RunEvent):
    """The run is cancelled: its workflow gets that now, and may clean up."""

    reason: str | None
    until: datetime | None = _read(lambda source: deadline(source.entry, source.facts))

    def __str__(self) -> str:
        until = f"; it may clean up until {self.until:%Y-%m-%d %H:%M:%S} UTC" if self.until else ""
        return f"cancelling{f': {self.reason}' if self.reason else ''}{until}"


@_event(EntryKind.REPLAY_DIFFERED)
class ReplayDiffered(RunEvent):
    """A resumed workflow went another way: its code has changed, or it is not deterministic."""

    missing: tuple[str, ...] = _read(lambda source: tuple(source.facts.get("missing", ())))
    new: tuple[str, ...] = _read(lambda source: tuple(source.facts.get("new", ())))

    def __str__(self) -> str:
        missing = (
            f"; recorded and not called again: {_counted(self.missing)}" if self.missing else ""
        )
        new = f"; new among recorded calls: {_counted(self.new)}" if self.new else ""
        return f"the resumed workflow went another way{missing}{new}"


def _counted(names: tuple[str, ...]) -> str:
    """Return names as a list, each once, with how often it is there."""
    found = Counter(names).items()
    return ", ".join(f"{name} ({times} times)" if times > 1 else name for name, times in found)


@_event(EntryKind.RUN_SUSPENDED)
class RunSuspended(RunEvent):
    """The run was suspended, and no process executes it: a breaker, a budget, or a person is asked."""

    error_type: str = _fact("error.type")
    message: str = _fact("error.message")

    def __str__(self) -> str:
        return f"run suspended: {_error(self.error_type, self.message)}"


@_event(EntryKind.RUN_RESUMED)
class RunResumed(RunEvent):
    """A run that had spent something was resumed: what its completed steps spent was saved."""

    saved_tokens: int = _fact("saved_tokens", default=0)
    saved_usd: float = _fact("saved_usd", default=0.0)

    def __str__(self) -> str:
        usd = f" and {self.saved_usd:.4f} USD" if self.saved_usd else ""
        return f"run resumed, which saved {self.saved_tokens:,} tokens{usd}"


@_event(EntryKind.BUDGET_WARNED)
class BudgetWarned(AttemptEvent):
    """What an attempt spent used up a part of a budget, for the first time.

    ``unit`` is tokens, or usd: then ``used`` and ``limit`` are millionths of a US dollar.
    """

    account: str
    percent: int
    unit: str
    used: int
    limit: int

    def __str__(self) -> str:
        scope, _, name = self.account.partition(":")
        if self.unit == "tokens":
            amounts = f"{self.used:,} of {self.limit:,} tokens"
        else:
            amounts = f"{self.used / 1e6:,.4f} of {self.limit / 1e6:,.4f} USD"
        return f"{self.percent} % of the budget of {scope} {name} is used up: {amounts}"


@_event(EntryKind.ARGUMENTS_ADDED)
class ArgumentsAdded(RunEvent):
    """A step has arguments with defaults that it had not when its results were recorded."""

    name: str
    persona: str
    arguments: tuple[str, ...] = _read(lambda source: tuple(source.facts.get("defaults", ())))

    def __str__(self) -> str:
        return f"{self.name} has more arguments than before: {', '.join(self.arguments)}"


@_event(EntryKind.RETRIED)
class Retried(RunEvent):
    """A retry was requested: of one step, or of all that failed (``step`` is None).

    ``resolved``: the step was ambiguous or escalated, and a person said (``by``) that it runs again;
    ``feedback`` is what its next attempts are told.
    """

    step: int | None = _read(
        lambda source: getattr(source.reader.step(source.entry), "number", None)
    )
    name: str | None = _read(lambda source: source.reader.name(source.entry))
    forget: bool
    resolved: bool
    by: str | None
    feedback: str | None

    def __str__(self) -> str:
        who = f" by {self.by}" if self.by else ""
        if self.feedback:
            return f"step {self.name or self.step} is executed again, with feedback{who}"
        if self.resolved:
            return f"step {self.name or self.step} resolved{who}: it is executed again"
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

    interrupted: bool = _read(lambda source: source.reader.was_open, default=False)

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
    retry_in: float | None = _read(lambda source: wait_seconds(source.facts))
    final: bool
    healed: bool
    #: What tells this failure from others, if it was diagnosed.
    fingerprint: str | None = _fact("diagnosis.fingerprint", default=None)

    def __str__(self) -> str:
        repaired = "; repaired" if self.healed else ""
        then = _retrying(self.retry_in) if self.status == "retrying" else "; gave up"
        return f"{self.which} failed: {_error(self.error_type, self.message)}{repaired}{then}"


@_event(EntryKind.REPAIR_TRIED)
class RepairTried(AttemptEvent):
    """A healer was asked about the failure of an attempt; ``fix`` says what it does about it.

    ``status`` is FIXED if the cause is repaired, AWAITING_REVIEW if the next attempt gets feedback
    alone, IN_PROGRESS while files are changed, and FAILED if there is no repair.
    """

    status: str
    fingerprint: str
    failure_type: str = _fact("type")
    healer: str | None
    fix: str | None
    feedback: str | None
    wait: float | None = _read(lambda source: wait_seconds(source.facts))
    files: tuple[str, ...] = _read(lambda source: tuple(source.facts.get("files") or ()))
    error: str | None

    def __str__(self) -> str:
        by = f" by {self.healer}" if self.healer else ""
        about = f": {self.fix}" if self.fix else ""
        match self.status:
            case "FIXED":
                said = f"repaired{by}{about}"
            case "IN_PROGRESS":
                said = f"changing {', '.join(self.files)}{by}"
            case _ if self.healer:
                said = f"diagnosed{by}{about}"
            case _:
                said = "has no repair"
        trouble = f" ({self.error})" if self.error else ""
        return f"{self.which} {said}{trouble}"


@_event(EntryKind.REPAIR_JUDGED)
class RepairJudged(AttemptEvent):
    """What is known of the repair of a failed attempt; ``verdict`` is worked, failed or undecided.

    Undecided: another failure came; a later one may follow. Or interrupted: its process died while it
    changed files, which are restored, and it is made again.
    """

    verdict: str
    fingerprint: str
    healer: str
    reason: str | None
    #: Files that were restored, and those that others had changed meanwhile.
    restored: tuple[str, ...] = _read(lambda source: tuple(source.facts.get("restored") or ()))
    left: tuple[str, ...] = _read(lambda source: tuple(source.facts.get("left") or ()))

    def __str__(self) -> str:
        because = f": {self.reason}" if self.reason else ""
        files = f"; restored {', '.join(self.restored)}" if self.restored else ""
        said = "is undecided" if self.verdict == "undecided" else self.verdict
        return f"{self.which} repair by {self.healer} {said}{because}{files}"


@_event()
class StepStopped(AttemptEvent):
    """An attempt ended without a failure: ``status`` is cancelled, or interrupted too often."""

    status: str = _fact("status", default="failed")
    message: str = _fact("error.message")

    def __str__(self) -> str:
        return f"{self.which} {self.status}{f': {self.message}' if self.message else ''}"


@_event(EntryKind.STEP_COMPLETED)
class StepCompleted(AttemptEvent):
    """An attempt succeeded: the step is completed, and never runs again.

    ``resolved``: it was ambiguous, and a person said so (``by``).
    """

    resolved: bool
    by: str | None

    def __str__(self) -> str:
        if not self.resolved:
            return f"{self.which} completed"
        return f"{self.which} resolved{f' by {self.by}' if self.by else ''}: it was completed"


@_event(EntryKind.STEP_FAILED)
class StepGaveUp(RunEvent):
    """A step failed for good, and the workflow got its error; or None, where it is to be skipped."""

    name: str
    label: str = _read(lambda source: source.reader.label(source.entry), default="")
    error_type: str | None = _fact("error.type", default=None)
    message: str | None = _fact("error.message", default=None)
    skipped: bool

    def __str__(self) -> str:
        named = self.label or self.name
        if self.skipped:
            return f"step {named} failed for good, and is skipped"
        return f"step {named} failed for good: {_error(self.error_type or '', self.message or '')}"


@_event(EntryKind.STEP_CANCELLED)
class StepCancelled(RunEvent):
    """The workflow itself cancelled a step, which is not executed again."""

    name: str
    label: str = _read(lambda source: source.reader.label(source.entry), default="")

    def __str__(self) -> str:
        return f"step {self.label or self.name} cancelled by the workflow"


@_event(EntryKind.PROGRESS_SAVED, "{0.which} saved progress")
class ProgressSaved(AttemptEvent):
    """A step saved its progress."""


@_event(EntryKind.SPENT)
class Spent(AttemptEvent):
    """Tokens or money were spent."""

    persona: str
    tokens: int
    usd: float
    model: str = _fact("model", default="")
    cached: int = _fact("cached", default=0)

    def __str__(self) -> str:
        usd = f" and {self.usd:.4f} USD" if self.usd else ""
        return f"{self.which} spent {self.tokens:,} tokens{usd}"


@_event(EntryKind.ROUND_FAILED)
class RoundFailed(RoundEvent):
    """A round of level 2 failed; the next one is in ``retry_in`` seconds, if there is one."""

    round: int = _fact("round", default=1)
    retry_in: float | None = _read(lambda source: wait_seconds(source.facts))

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


@_event(EntryKind.ESCALATION_DELIVERED)
class EscalationDelivered(RunEvent):
    """A person was told of an escalation: by ``ticket``, or ``comment`` on it, of ``system``."""

    name: str
    escalation: str
    system: str
    ticket: str | None
    address: str | None
    comment: str | None

    def __str__(self) -> str:
        what = f"comment on ticket {self.ticket}" if self.comment else f"ticket {self.ticket}"
        told = what if self.ticket else "message"
        where = f" ({self.address})" if self.address else ""
        return f"escalation {self.escalation} of {self.name}: {told} made in {self.system}{where}"


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


# --- showing --------------------------------------------------------------------------------------


@plain.to_dict.register(RunEvent)
def to_dict(event: RunEvent) -> dict[str, codec.Json]:
    """Return an event as JSON: its name under ``event``, as ``step_started``; times as ISO 8601."""
    name = re.sub(r"(?<!^)(?=[A-Z])", "_", type(event).__name__).lower()
    fields = {each.name: getattr(event, each.name) for each in dataclasses.fields(event)}
    for key, value in fields.items():
        if isinstance(value, datetime):
            fields[key] = value.isoformat()
        elif isinstance(value, tuple):
            fields[key] = list(value)
    return {"event": name, **fields}


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


def _part(facts: Facts, name: str) -> Facts:
    value = facts.get(name)
    return value if isinstance(value, dict) else {}
