"""Every kind of entry is folded, is an event, is shown, and survives an export."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from maestro_hive.maestro.state import codec, plain, run_view
from maestro_hive.maestro.state.event_reader import EventReader
from maestro_hive.maestro.state.events import EVENTS, describe, to_dict
from maestro_hive.maestro.state.memory import MemoryStore
from maestro_hive.maestro.state.projections import FOLDED, fold
from maestro_hive.maestro.state.records import (
    EVENTS_ONLY,
    Entry,
    EntryKind,
    NewEntry,
    RunRecord,
)
from maestro_hive.maestro.state.run_document import CopiedEntries, RunText, read_run
from maestro_hive.maestro.state.store import Append
from tests.tables import for_each

if TYPE_CHECKING:
    from maestro_hive.maestro.state.store import Store

NOW = datetime(2030, 1, 1, tzinfo=UTC)
STEP = b"s" * 32
WAIT = {"seconds": 60.0, "boot": "b", "boot_seconds": 1.0, "at": 1_900_000_000_000_000}
REPORT: dict[str, Any] = {"failed_persona": "p", "error_category": "c", "details": "d"}
REPORT |= {"context": [], "suggested_fix": None}
ROUND: dict[str, Any] = {
    "round": 1,
    "execution_id": "e",
    "name": "a",
    "persona": "p",
    "status": "failed",
}
ROUND |= {"seconds": 0.5, "tokens": 3, "report": REPORT, "wait": WAIT}

#: An entry of each kind, as it is written: a new kind is given one here.
EXAMPLES: dict[EntryKind, dict[str, Any]] = {
    EntryKind.ATTEMPT_STARTED: {"step": 2, "attempt": 1, "name": "b", "persona": "q"},
    EntryKind.ATTEMPT_FAILED: {
        "step": 1,
        "attempt": 1,
        "error": {"type": "E", "message": "m"},
        "healing": {"status": "FIXED", "fix": "deeper"},
        "diagnosis": {"fingerprint": "0a1b", "type": "key_error"},
        "value": {"depth": 5},
    },
    EntryKind.STEP_COMPLETED: {"step": 1, "attempt": 1, "value": "made"},
    EntryKind.PROGRESS_SAVED: {"step": 1, "attempt": 1, "value": {"current_step": 1}},
    EntryKind.MEMORY_SAVED: {"persona": "p", "value": {"a": 1}},
    EntryKind.HISTORY_APPENDED: {"persona": "p", "value": "item"},
    EntryKind.SPENT: {"step": 1, "attempt": 1, "persona": "p", "tokens": 5},
    EntryKind.ROUND_FAILED: {"identity": STEP, **ROUND},
    EntryKind.ESCALATED: {"identity": STEP, "ticket": "MD-1", "report": REPORT, "actions": []},
    EntryKind.ESCALATION_DELIVERED: {
        "identity": STEP,
        "name": "a",
        "escalation": "esc-1",
        "system": "jira",
        "ticket": "MD-1",
    },
    EntryKind.FIELDS_SET: {"value": {"phase": "late"}},
    EntryKind.TASK_PENDING: {"task": "t"},
    EntryKind.TASK_COMPLETED: {"task": "t", "value": {"file": "f"}},
    EntryKind.RETRY_COUNTED: {"persona": "p"},
    EntryKind.PERSONA_SET: {"persona": "p", "value": {"mood": "good"}},
    EntryKind.RESTORED: {"from": "copy.json", "saved_at": "2030"},
    EntryKind.RETRIED: {"identity": STEP},
    EntryKind.RUN_STARTED: {
        "identity": b"r" * 32,
        "workflow": "build",
        "value": {"args": [], "kwargs": {}},
    },
    EntryKind.RUN_ENDED: {"status": "failed", "error": {"type": "E", "message": "m"}},
    EntryKind.WAIT_STARTED: {"identity": b"w" * 32, "name": "go", "what": "answer"},
    EntryKind.WAIT_ENDED: {"identity": b"w" * 32, "name": "go", "how": "answered"},
    EntryKind.CHILD_STARTED: {"identity": b"c" * 32, "run_id": "part", "workflow": "part"},
    EntryKind.CHILD_ENDED: {
        "identity": b"c" * 32,
        "run_id": "part",
        "workflow": "part",
        "status": "success",
    },
    EntryKind.STEP_FAILED: {"identity": STEP, "name": "a", "error": {"type": "E", "message": "m"}},
    EntryKind.STEP_CANCELLED: {"identity": STEP, "name": "a"},
    EntryKind.VALUE_RECORDED: {"identity": b"v" * 32, "name": "random", "value": 0.5},
    EntryKind.CANCEL_REQUESTED: {"reason": "enough", "wait": WAIT},
    EntryKind.REPLAY_DIFFERED: {"missing": ["a"], "new": ["b"]},
    EntryKind.RUN_SUSPENDED: {"error": {"type": "CircuitBreakerOpen", "message": "open"}},
    EntryKind.RUN_RESUMED: {"saved_tokens": 7, "saved_usd": 0.5},
    EntryKind.BUDGET_WARNED: {
        "step": 1,
        "attempt": 1,
        "account": "persona:p",
        "percent": 50,
        "unit": "usd",
        "used": 600_000,
        "limit": 1_000_000,
    },
    EntryKind.ARGUMENTS_ADDED: {"name": "a", "persona": "p", "defaults": {"mode": "0a1b"}},
    EntryKind.REPAIR_TRIED: {
        "step": 1,
        "attempt": 1,
        "status": "FIXED",
        "type": "key_error",
        "fingerprint": "0a1b",
        "healer": "deeper",
        "value": {"depth": 5},
    },
    EntryKind.REPAIR_JUDGED: {
        "step": 1,
        "attempt": 1,
        "verdict": "worked",
        "fingerprint": "0a1b",
        "healer": "deeper",
    },
}
FIRST = (EntryKind.ATTEMPT_STARTED, {"step": 1, "attempt": 1, "name": "a", "persona": "p"})


def new_entry(kind: EntryKind, example: dict[str, Any]) -> NewEntry:
    facts = dict(example)
    step, attempt = facts.pop("step", 0), facts.pop("attempt", 0)
    identity = facts.pop("identity", STEP if kind is EntryKind.ATTEMPT_STARTED else None)
    value = codec.encode(facts.pop("value")) if "value" in facts else None
    told = codec.dump_canonical(facts) if facts else None
    return NewEntry(kind, step, attempt, told, value, "", identity)


def recorded(kind: EntryKind) -> tuple[Store, list[Entry]]:
    """Return a store, and the entries of its run with a step, and one of this kind behind it."""
    store = MemoryStore()
    hold = store.acquire_run("run")
    store.append([Append(hold, [new_entry(*FIRST), new_entry(kind, EXAMPLES[kind])])])
    return store, list(store.entries(hold.run))


def shown(store: Store, entries: list[Entry]) -> str:
    record = RunRecord(
        id=1, name="run", workflow="", status="pending", created_at=NOW, updated_at=NOW
    )
    run = run_view.RecordedRun(
        record=record,
        entries=entries,
        state=fold(entries, store.load),
        lease=None,
        load=store.load,
        now=NOW,
    )
    view = run_view.run_view(run, most_steps=50, most_events=10, answered=())
    return json.dumps(plain.to_dict(view), default=str)


def test_no_kind_was_forgotten_here() -> None:
    assert set(EXAMPLES) == set(EntryKind)


@for_each("kind", EntryKind)
def test_a_kind_is_folded_unless_it_is_an_event_alone(kind: EntryKind) -> None:
    store, (first, entry) = recorded(kind)
    assert (kind in FOLDED) != (kind in EVENTS_ONLY)
    before, after = fold([first], store.load), fold([first, entry], store.load)
    before.seq, before.updated_at = after.seq, after.updated_at
    assert (after == before) == (kind in EVENTS_ONLY)


@for_each("kind", EntryKind)
def test_a_kind_is_an_event_with_a_text(kind: EntryKind) -> None:
    store, (first, entry) = recorded(kind)
    assert kind in EVENTS
    reader = EventReader("run", store.load)
    reader.read(first)
    event = reader.read(entry)
    assert event is not None
    assert describe(event)
    assert json.loads(json.dumps(to_dict(event)))["seq"] == entry.seq


@for_each("kind", EntryKind)
def test_a_kind_is_shown(kind: EntryKind) -> None:
    store, (first, entry) = recorded(kind)
    event = EventReader("run", store.load).read(entry)
    assert event is not None
    without, with_it = shown(store, [first]), shown(store, [first, entry])
    assert with_it != without
    assert f'"event": "{to_dict(event)["event"]}", "seq": {entry.seq}' in with_it


@for_each("kind", EntryKind)
def test_a_kind_survives_an_export(kind: EntryKind) -> None:
    if kind is EntryKind.RESTORED:  # entries before it are not exported, and it is not
        return
    store, entries = recorded(kind)
    record = store.run("run")
    assert record is not None
    text = RunText(store, record.id, "run", 0, len(entries), {}, "2030", 1)
    copy = read_run("a file", json.loads(b"".join(text)))
    mark, *copied = list(CopiedEntries(copy))
    assert mark.kind is EntryKind.RESTORED
    assert [_comparable(each) for each in copied] == [_comparable(each) for each in entries]


def _comparable(entry: Entry | NewEntry) -> tuple[Any, ...]:
    value = entry.value.data if isinstance(entry.value, codec.Encoded) else entry.value
    facts = json.loads(entry.facts) if entry.facts else None
    return int(entry.kind), entry.step, entry.attempt, facts, value, entry.identity, entry.at
