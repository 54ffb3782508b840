"""What happens in a run, as frozen records: one for each thing that an entry of its journal tells.

``EventReader`` of ``run_events`` makes them. Values are not in them: a result or a memory may be
large, and ``show_run`` has it. ``str`` of an event is its text for people.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from operator import attrgetter
from typing import Any, ClassVar, NamedTuple

from maestro_hive.maestro.state import codec
from maestro_hive.maestro.state.projections import facts_of
from maestro_hive.maestro.state.records import Entry, EntryKind

__all__ = [
    "ChildStarted",
    "EventReader",
    "FieldsSet",
    "Escalated",
    "HistoryAppended",
    "MemorySaved",
    "PersonaSet",
    "ProgressSaved",
    "Restored",
    "Retried",
    "RetryCounted",
    "RoundFailed",
    "RunStarted",
    "RunEnded",
    "RunEvent",
    "Spent",
    "StepStarted",
    "StepFailed",
    "StepCompleted",
    "StepStopped",
    "TaskCompleted",
    "TaskPending",
    "WaitStarted",
    "WaitEnded",
    "describe",
    "to_dict",
]

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
class RunStarted(Event):
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
class WaitStarted(Event):
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
class ChildStarted(Event):
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
class FieldsSet(Event):
    """Fields of the run were set, by name."""

    fields: tuple[str, ...]

    def __str__(self) -> str:
        return f"fields set: {', '.join(self.fields)}"


# --- steps ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class StepStarted(AttemptEvent):
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
class StepCompleted(AttemptEvent):
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
class Escalated(PersonaEvent):
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
class HistoryAppended(PersonaEvent):
    """A persona's history has one more item."""

    def __str__(self) -> str:
        return f"history of {self.persona} went on"


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryCounted(PersonaEvent):
    """A persona was tried once more."""

    def __str__(self) -> str:
        return f"{self.persona} tried once more"


@dataclass(frozen=True, slots=True, kw_only=True)
class PersonaSet(PersonaEvent):
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
    RunStarted
    | RunEnded
    | WaitStarted
    | WaitEnded
    | ChildStarted
    | Retried
    | Restored
    | FieldsSet
    | StepStarted
    | StepFailed
    | StepStopped
    | StepCompleted
    | ProgressSaved
    | Spent
    | RoundFailed
    | Escalated
    | MemorySaved
    | HistoryAppended
    | RetryCounted
    | PersonaSet
    | TaskPending
    | TaskCompleted
)


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


def _whose(name: object, persona: str) -> str:
    return f"{name} ({persona})" if persona else str(name)


def _error(kind: str | None, message: str | None) -> str:
    return ": ".join(part for part in (kind, message if message != kind else None) if part)


def _again(seconds: float | None) -> str:
    return f"; again in {seconds:.3g} s" if seconds else "; again at once"


# --- run_events ---


class _Step(NamedTuple):
    number: int
    name: str
    persona: str


_Facts = Mapping[str, Any]

_OF_PERSONA: dict[int, type[MemorySaved | HistoryAppended | RetryCounted | PersonaSet]] = {
    EntryKind.MEMORY_SAVED: MemorySaved,
    EntryKind.HISTORY_APPENDED: HistoryAppended,
    EntryKind.RETRY_COUNTED: RetryCounted,
    EntryKind.PERSONA_SET: PersonaSet,
}
_OF_TASK: dict[int, type[TaskPending | TaskCompleted]] = {
    EntryKind.TASK_PENDING: TaskPending,
    EntryKind.TASK_COMPLETED: TaskCompleted,
}


class EventReader:
    """Makes the events of one run of its entries, which it is given from the first one on.

    ``load`` is asked for the few values that are looked at; without it a large one is not seen.
    """

    def __init__(
        self, run_id: str, load: Callable[[Entry], bytes | None] = attrgetter("value")
    ) -> None:
        self._run_id = run_id
        self._load = load
        self._forget()

    def _forget(self) -> None:
        self._steps: dict[int, _Step] = {}
        self._by_identity: dict[bytes, _Step] = {}
        #: Steps with an attempt whose end was not seen so far.
        self._open: set[int] = set()
        #: How many rounds failed, of what and whose.
        self._rounds: dict[bytes | None, tuple[int, str, str]] = {}

    def read(self, entry: Entry) -> RunEvent | None:
        """Return what an entry tells; None for one of a kind that this version does not know."""
        facts = facts_of(entry)
        if entry.kind in _OF_PERSONA:
            persona = _text(facts, "persona")
            return _OF_PERSONA[entry.kind](**self._base(entry), persona=persona)
        if entry.kind in _OF_TASK:
            return _OF_TASK[entry.kind](**self._base(entry), task=_text(facts, "task"))
        make = self._makers.get(entry.kind)
        return None if make is None else make(self, entry, facts)

    def _base(self, entry: Entry) -> dict[str, Any]:
        return {"seq": entry.seq, "at": entry.when, "run_id": self._run_id}

    def _attempt(self, entry: Entry) -> dict[str, Any]:
        step = self._steps.get(entry.step) or _Step(entry.step, "", "")
        whose = {"step": step.number, "name": step.name, "persona": step.persona}
        return {**self._base(entry), **whose, "attempt": entry.attempt}

    # --- the run ---

    def _run_started(self, entry: Entry, facts: _Facts) -> RunStarted:
        return RunStarted(
            **self._base(entry),
            workflow=_text(facts, "workflow"),
            parent=_text(facts, "parent") or None,
            forked_from=_text(facts, "forked_from") or None,
            from_step=_text(facts, "from_step") or None,
        )

    def _run_ended(self, entry: Entry, facts: _Facts) -> RunEnded:
        error = _part(facts, "error")
        return RunEnded(
            **self._base(entry),
            status=_text(facts, "status") or "failed",
            error_type=_text(error, "type") or None,
            message=_text(error, "message") or _text(facts, "reason") or None,
        )

    def _wait_started(self, entry: Entry, facts: _Facts) -> WaitStarted:
        name, what = _text(facts, "name"), _text(facts, "what")
        until = _until(entry, _seconds(facts))
        return WaitStarted(**self._base(entry), name=name, what=what, until=until)

    def _wait_ended(self, entry: Entry, facts: _Facts) -> WaitEnded:
        name, how, by = _text(facts, "name"), _text(facts, "how"), _text(facts, "by") or None
        return WaitEnded(**self._base(entry), name=name, how=how, by=by)

    def _child_started(self, entry: Entry, facts: _Facts) -> ChildStarted:
        child, workflow = _text(facts, "run_id"), _text(facts, "workflow")
        return ChildStarted(**self._base(entry), child=child, workflow=workflow)

    def _retried(self, entry: Entry, facts: _Facts) -> Retried:
        identity = entry.identity
        step = None if identity is None else self._by_identity.get(identity)
        if identity is None:
            self._rounds.clear()
            self._open.clear()
        else:
            self._rounds.pop(identity, None)
            self._open.discard(step.number if step else 0)
        number, name = (step.number, step.name) if step else (None, None)
        forget = bool(facts.get("forget"))
        return Retried(**self._base(entry), step=number, name=name, forget=forget)

    def _restored(self, entry: Entry, facts: _Facts) -> Restored:
        self._forget()
        source, saved_at = _text(facts, "from") or None, _text(facts, "saved_at") or None
        return Restored(**self._base(entry), source=source, saved_at=saved_at)

    def _fields_changed(self, entry: Entry, _: _Facts) -> FieldsSet:
        data = self._load(entry)
        fields = codec.parse(data, "fields", depth=codec.DOCUMENT_DEPTH) if data else {}
        names = tuple(fields) if isinstance(fields, dict) else ()
        return FieldsSet(**self._base(entry), fields=names)

    # --- its steps ---

    def _step_started(self, entry: Entry, facts: _Facts) -> StepStarted:
        if entry.step not in self._steps:
            step = _Step(entry.step, _text(facts, "name"), _text(facts, "persona"))
            self._steps[entry.step] = step
            if entry.identity is not None:
                self._by_identity[entry.identity] = step
        interrupted = entry.step in self._open
        self._open.add(entry.step)
        return StepStarted(**self._attempt(entry), interrupted=interrupted)

    def _step_failed(self, entry: Entry, facts: _Facts) -> StepFailed | StepStopped:
        self._open.discard(entry.step)
        error, status = _part(facts, "error"), _text(facts, "status") or "failed"
        message = _text(error, "message")
        if not facts.get("counts", True):
            return StepStopped(**self._attempt(entry), status=status, message=message)
        return StepFailed(
            **self._attempt(entry),
            status=status,
            error_type=_text(error, "type"),
            message=message,
            category=_text(error, "category"),
            round=facts.get("round", 1),
            retry_in=_seconds(facts),
            final=bool(facts.get("final")),
            healed=bool(facts.get("healed")),
        )

    def _step_completed(self, entry: Entry, _: _Facts) -> StepCompleted:
        self._open.discard(entry.step)
        return StepCompleted(**self._attempt(entry))

    def _progress_saved(self, entry: Entry, _: _Facts) -> ProgressSaved:
        return ProgressSaved(**self._attempt(entry))

    def _spent(self, entry: Entry, facts: _Facts) -> Spent:
        whose = {**self._attempt(entry), "persona": _text(facts, "persona")}
        return Spent(**whose, tokens=facts.get("tokens", 0), usd=facts.get("usd", 0.0))

    def _round_failed(self, entry: Entry, facts: _Facts) -> RoundFailed:
        number = self._rounds.get(entry.identity, (0, "", ""))[0] + 1
        name, report = _text(facts, "name"), _part(facts, "report")
        persona = _text(facts, "persona") or _text(report, "failed_persona")
        self._rounds[entry.identity] = number, name, persona
        return RoundFailed(
            **self._base(entry),
            persona=persona,
            name=name,
            round=number,
            message=_text(report, "details"),
            category=_text(report, "error_category"),
            retry_in=_seconds(facts),
        )

    def _help_asked(self, entry: Entry, facts: _Facts) -> Escalated:
        report = _part(facts, "report")
        _, name, persona = self._rounds.get(entry.identity, (0, "", ""))
        return Escalated(
            **self._base(entry),
            persona=persona or _text(report, "failed_persona"),
            name=name,
            ticket=_text(facts, "ticket") or None,
            message=_text(report, "details"),
            category=_text(report, "error_category"),
        )

    _makers: ClassVar[dict[int, Callable[[EventReader, Entry, _Facts], RunEvent]]] = {
        EntryKind.RUN_STARTED: _run_started,
        EntryKind.RUN_ENDED: _run_ended,
        EntryKind.WAIT_STARTED: _wait_started,
        EntryKind.WAIT_ENDED: _wait_ended,
        EntryKind.CHILD_STARTED: _child_started,
        EntryKind.RETRIED: _retried,
        EntryKind.RESTORED: _restored,
        EntryKind.FIELDS_SET: _fields_changed,
        EntryKind.ATTEMPT_STARTED: _step_started,
        EntryKind.ATTEMPT_FAILED: _step_failed,
        EntryKind.STEP_COMPLETED: _step_completed,
        EntryKind.PROGRESS_SAVED: _progress_saved,
        EntryKind.SPENT: _spent,
        EntryKind.ROUND_FAILED: _round_failed,
        EntryKind.ESCALATED: _help_asked,
    }


def _text(facts: _Facts, name: str) -> str:
    value = facts.get(name)
    return "" if value is None else str(value)


def _part(facts: _Facts, name: str) -> _Facts:
    value = facts.get(name)
    return value if isinstance(value, dict) else {}


def _seconds(facts: _Facts) -> float | None:
    """Return how long is waited at most, if it is."""
    seconds = _part(facts, "wait").get("seconds")
    return None if seconds is None else float(seconds)


def _until(entry: Entry, seconds: float | None) -> datetime | None:
    try:
        return None if seconds is None else entry.when + timedelta(seconds=seconds)
    except OverflowError:  # for ever, nearly
        return None
