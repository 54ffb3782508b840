"""A run's journal as typed events: what happened, in order, and each in one line for people."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import datetime, timedelta
from operator import attrgetter
from typing import Any, ClassVar, NamedTuple

from maestro_hive.maestro.state import codec
from maestro_hive.maestro.state.event_records import (
    ChildBegun,
    FieldsChanged,
    HelpAsked,
    HistoryAdded,
    MemorySaved,
    PersonaChanged,
    ProgressSaved,
    Restored,
    Retried,
    RetryCounted,
    RoundFailed,
    RunBegun,
    RunEnded,
    RunEvent,
    Spent,
    StepBegun,
    StepFailed,
    StepKept,
    StepStopped,
    TaskCompleted,
    TaskPending,
    WaitBegun,
    WaitEnded,
    describe,
    to_dict,
)
from maestro_hive.maestro.state.records import Entry, EntryKind
from maestro_hive.maestro.state.run_state import facts_of

__all__ = [
    "ChildBegun",
    "EventReader",
    "FieldsChanged",
    "HelpAsked",
    "HistoryAdded",
    "MemorySaved",
    "PersonaChanged",
    "ProgressSaved",
    "Restored",
    "Retried",
    "RetryCounted",
    "RoundFailed",
    "RunBegun",
    "RunEnded",
    "RunEvent",
    "Spent",
    "StepBegun",
    "StepFailed",
    "StepKept",
    "StepStopped",
    "TaskCompleted",
    "TaskPending",
    "WaitBegun",
    "WaitEnded",
    "describe",
    "to_dict",
]


class _Step(NamedTuple):
    number: int
    name: str
    persona: str


_Facts = Mapping[str, Any]

_OF_PERSONA: dict[int, type[MemorySaved | HistoryAdded | RetryCounted | PersonaChanged]] = {
    EntryKind.MEMORY_SAVED: MemorySaved,
    EntryKind.HISTORY_ADDED: HistoryAdded,
    EntryKind.RETRY_COUNTED: RetryCounted,
    EntryKind.PERSONA_CHANGED: PersonaChanged,
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

    def _run_begun(self, entry: Entry, facts: _Facts) -> RunBegun:
        return RunBegun(
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

    def _wait_begun(self, entry: Entry, facts: _Facts) -> WaitBegun:
        name, what = _text(facts, "name"), _text(facts, "what")
        until = _until(entry, _seconds(facts))
        return WaitBegun(**self._base(entry), name=name, what=what, until=until)

    def _wait_ended(self, entry: Entry, facts: _Facts) -> WaitEnded:
        name, how, by = _text(facts, "name"), _text(facts, "how"), _text(facts, "by") or None
        return WaitEnded(**self._base(entry), name=name, how=how, by=by)

    def _child_begun(self, entry: Entry, facts: _Facts) -> ChildBegun:
        child, workflow = _text(facts, "run_id"), _text(facts, "workflow")
        return ChildBegun(**self._base(entry), child=child, workflow=workflow)

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

    def _fields_changed(self, entry: Entry, _: _Facts) -> FieldsChanged:
        data = self._load(entry)
        fields = codec.parse(data, "fields", depth=codec.DOCUMENT_DEPTH) if data else {}
        names = tuple(fields) if isinstance(fields, dict) else ()
        return FieldsChanged(**self._base(entry), fields=names)

    # --- its steps ---

    def _step_begun(self, entry: Entry, facts: _Facts) -> StepBegun:
        if entry.step not in self._steps:
            step = _Step(entry.step, _text(facts, "name"), _text(facts, "persona"))
            self._steps[entry.step] = step
            if entry.identity is not None:
                self._by_identity[entry.identity] = step
        interrupted = entry.step in self._open
        self._open.add(entry.step)
        return StepBegun(**self._attempt(entry), interrupted=interrupted)

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

    def _step_kept(self, entry: Entry, _: _Facts) -> StepKept:
        self._open.discard(entry.step)
        return StepKept(**self._attempt(entry))

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

    def _help_asked(self, entry: Entry, facts: _Facts) -> HelpAsked:
        report = _part(facts, "report")
        _, name, persona = self._rounds.get(entry.identity, (0, "", ""))
        return HelpAsked(
            **self._base(entry),
            persona=persona or _text(report, "failed_persona"),
            name=name,
            ticket=_text(facts, "ticket") or None,
            message=_text(report, "details"),
            category=_text(report, "error_category"),
        )

    _makers: ClassVar[dict[int, Callable[[EventReader, Entry, _Facts], RunEvent]]] = {
        EntryKind.RUN_BEGUN: _run_begun,
        EntryKind.RUN_ENDED: _run_ended,
        EntryKind.WAIT_BEGUN: _wait_begun,
        EntryKind.WAIT_ENDED: _wait_ended,
        EntryKind.CHILD_BEGUN: _child_begun,
        EntryKind.RETRIED: _retried,
        EntryKind.RESTORED: _restored,
        EntryKind.FIELDS_CHANGED: _fields_changed,
        EntryKind.ATTEMPT_BEGUN: _step_begun,
        EntryKind.ATTEMPT_FAILED: _step_failed,
        EntryKind.STEP_KEPT: _step_kept,
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
