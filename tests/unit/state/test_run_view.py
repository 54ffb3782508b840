"""The read model of a run."""

from __future__ import annotations

import enum
import json
from typing import Any

import pytest

from maestro_hive.maestro.state import codec
from maestro_hive.maestro.state.projections import status_of
from maestro_hive.maestro.state.records import EntryKind
from maestro_hive.maestro.state.views import (
    retry_count,
    show_fields,
    show_persona,
    show_run,
    without_derived_fields,
)
from tests.unit.state.test_run_state import Journal


@pytest.fixture
def journal() -> Journal:
    return Journal()


def begin(
    journal: Journal, step: int = 1, attempt: int = 1, name: str = "design", persona: str = "p"
) -> None:
    journal.add(
        EntryKind.ATTEMPT_STARTED,
        step=step,
        attempt=attempt,
        identity=bytes([step]) * 32,
        name=name,
        persona=persona,
    )


def fail(journal: Journal, step: int = 1, attempt: int = 1, **facts: Any) -> None:
    given = {"status": "retrying", "error": {"message": f"no {attempt}"}} | facts
    journal.add(EntryKind.ATTEMPT_FAILED, step=step, attempt=attempt, **given)


def keep(journal: Journal, step: int = 1, attempt: int = 1, value: Any = "result") -> None:
    journal.add(EntryKind.STEP_COMPLETED, step=step, attempt=attempt, value=value)


def fields_of(journal: Journal) -> dict[str, Any]:
    return show_fields(journal.state(), journal.load)


def step_of(journal: Journal) -> dict[str, Any]:
    (step,) = show_run(journal.state(), "run-1", journal.load)["steps"]
    assert isinstance(step, dict)
    return step


# --- the run -------------------------------------------------------------------------------------


def test_a_run_without_entries_is_shown(journal: Journal) -> None:
    shown = show_run(journal.state(), "run-1", journal.load)
    assert shown == {
        "workflow_id": "run-1",
        "phase": "initializing",
        "step": 0,
        "status": "pending",
        "persona_states": {},
        "retry_counts": {},
        "completed_tasks": [],
        "pending_tasks": [],
        "artifacts": {},
        "metrics": {},
        "created_at": "1970-01-01T00:00:00+00:00",
        "updated_at": "1970-01-01T00:00:00+00:00",
        "steps": [],
    }


def test_times_are_those_of_the_first_entry_and_the_last(journal: Journal) -> None:
    journal.add(EntryKind.TASK_PENDING, task="a", at=5_000_000)
    journal.add(EntryKind.TASK_PENDING, task="b", at=9_500_000)
    shown = show_run(journal.state(), "run-1", journal.load)
    assert shown["created_at"] == "1970-01-01T00:00:05+00:00"
    assert shown["updated_at"] == "1970-01-01T00:00:09.500000+00:00"


# --- steps ---------------------------------------------------------------------------------------


def test_a_step_shows_what_it_is_and_how_it_went(journal: Journal) -> None:
    begin(journal)
    journal.add(EntryKind.SPENT, step=1, attempt=1, persona="p", tokens=5)
    fail(journal)
    begin(journal, attempt=2)  # and the process dies
    begin(journal, attempt=3)
    keep(journal, attempt=3, value={"pages": 3})
    assert step_of(journal) == {
        "step": 1,
        "name": "design",
        "label": "design",
        "persona": "p",
        "status": "success",
        "attempts": 3,
        "failures": 1,
        "interruptions": 1,
        "tokens": 5,
        "started_at": "1970-01-01T00:00:01+00:00",
        "took_seconds": 5.0,
        "last_error": "no 1",
        "output": {"pages": 3},
    }


@pytest.mark.parametrize(
    "entries, status",
    [
        ([], "running"),
        ([(EntryKind.ATTEMPT_FAILED, {})], "failed"),
        ([(EntryKind.ATTEMPT_FAILED, {"status": "retrying"})], "retrying"),
        ([(EntryKind.ATTEMPT_FAILED, {"status": "cancelled", "counts": False})], "cancelled"),
        ([(EntryKind.ATTEMPT_FAILED, {"status": "bankrupt", "counts": False})], "bankrupt"),
        ([(EntryKind.STEP_COMPLETED, {})], "success"),
        (
            [(EntryKind.ATTEMPT_FAILED, {"healed": True}), (EntryKind.STEP_COMPLETED, {})],
            "recovered",
        ),
        (
            [(EntryKind.ATTEMPT_FAILED, {}), (EntryKind.RETRIED, {"forget": True})],
            "pending",
        ),
    ],
)
def test_a_step_shows_where_it_stands(
    journal: Journal, entries: list[tuple[EntryKind, dict[str, Any]]], status: str
) -> None:
    begin(journal)
    for kind, facts in entries:
        identity = b"\x01" * 32 if kind is EntryKind.RETRIED else None
        journal.add(kind, step=1, attempt=1, identity=identity, **facts)
    assert step_of(journal)["status"] == status
    assert status_of(journal.state().steps[1]) == status


class Gone(enum.Enum):
    A = 1


def test_a_result_of_a_class_that_is_not_known_here_is_shown_as_json(journal: Journal) -> None:
    begin(journal)
    keep(journal, value={"kind": Gone.A})
    unknown = codec.encode({"kind": Gone.A}).data.replace(b"Gone", b"Lost")
    journal.entries[-1] = journal.entries[-1]._replace(value=unknown)
    output = step_of(journal)["output"]
    assert output["kind"]["v"] == "A"
    json.dumps(output)


# --- tasks ---------------------------------------------------------------------------------------


def test_tasks_are_told_from_steps_and_from_marks(journal: Journal) -> None:
    journal.add(EntryKind.TASK_PENDING, task="write")
    journal.add(EntryKind.TASK_PENDING, task="publish")
    journal.add(EntryKind.TASK_COMPLETED, task="plan")
    begin(journal, 1, name="design")
    keep(journal, 1)
    begin(journal, 2, name="review")
    begin(journal, 3, name="write")
    keep(journal, 3)
    fields = fields_of(journal)
    assert fields["completed_tasks"] == ["plan", "design", "write"]
    assert fields["pending_tasks"] == ["publish", "review"]


def test_a_task_with_a_step_to_do_is_pending(journal: Journal) -> None:
    begin(journal, 1, name="part")
    keep(journal, 1)
    begin(journal, 2, name="part")
    fields = fields_of(journal)
    assert (fields["completed_tasks"], fields["pending_tasks"]) == ([], ["part"])


def test_a_mark_completes_a_task_whose_step_failed(journal: Journal) -> None:
    begin(journal, 1, name="design")
    fail(journal, 1)
    journal.add(EntryKind.TASK_COMPLETED, task="design")
    fields = fields_of(journal)
    assert (fields["completed_tasks"], fields["pending_tasks"]) == (["design"], [])


def test_a_step_without_a_name_is_no_task(journal: Journal) -> None:
    journal.add(EntryKind.ATTEMPT_STARTED, step=1, attempt=1, persona="p")
    fields = fields_of(journal)
    assert (fields["completed_tasks"], fields["pending_tasks"]) == ([], [])


def test_what_steps_say_is_not_set_as_well(journal: Journal) -> None:
    journal.add(EntryKind.TASK_COMPLETED, task="plan")
    begin(journal, 1, name="design")
    keep(journal, 1)
    begin(journal, 2, name="review")
    fail(journal, 2)
    begin(journal, 2, attempt=2, name="review")
    given = {
        "completed_tasks": ["plan", "design", "new"],
        "pending_tasks": ["review", "next"],
        "retry_counts": {"p": 4, "q": 2},
        "phase": "late",
    }
    before = dict(given)
    assert without_derived_fields(journal.state(), given) == {
        "completed_tasks": ["plan", "new"],
        "pending_tasks": ["next"],
        "retry_counts": {"p": 3, "q": 2},
        "phase": "late",
    }
    assert given == before


def test_a_mark_of_a_steps_name_stays_a_mark(journal: Journal) -> None:
    journal.add(EntryKind.TASK_COMPLETED, task="design")
    journal.add(EntryKind.TASK_PENDING, task="review")
    begin(journal, 1, name="design")
    keep(journal, 1)
    begin(journal, 2, name="review")
    given = {"completed_tasks": ["design"], "pending_tasks": ["review"]}
    assert without_derived_fields(journal.state(), given) == given


# --- personas ------------------------------------------------------------------------------------


def test_retries_are_attempts_after_the_first_and_those_counted_by_hand(journal: Journal) -> None:
    journal.add(EntryKind.RETRY_COUNTED, persona="p")
    for attempt in (1, 2, 3):
        begin(journal, 1, attempt)
        fail(journal, 1, attempt)
    begin(journal, 2)
    begin(journal, 3, persona="q")
    state = journal.state()
    assert show_fields(state, journal.load)["retry_counts"] == {"p": 3}
    assert (retry_count(state, "p"), retry_count(state, "q")) == (3, 0)


def test_a_persona_shows_its_latest_step(journal: Journal) -> None:
    begin(journal, 1)
    keep(journal, 1)
    begin(journal, 2, name="review")
    journal.add(EntryKind.MEMORY_SAVED, persona="p", value={"a": 1})
    journal.add(EntryKind.HISTORY_APPENDED, persona="p", value="item")
    journal.add(EntryKind.SPENT, step=2, attempt=1, persona="p", tokens=9)
    fail(journal, 2)
    assert show_persona(journal.state(), "p", journal.load) == {
        "last_updated": "1970-01-01T00:00:07+00:00",
        "status": "retrying",
        "current_attempt": 1,
        "tokens_used": 9,
        "last_error": "no 1",
        "recovery_applied": False,
        "memory": {"a": 1},
        "history": ["item"],
    }
    assert show_persona(journal.state(), "unknown", journal.load) is None


def test_the_later_of_hand_and_step_is_shown(journal: Journal) -> None:
    journal.add(EntryKind.PERSONA_SET, persona="p", value={"status": "idle", "mood": "good"})
    begin(journal)
    shown = show_persona(journal.state(), "p", journal.load) or {}
    assert (shown["status"], shown["mood"]) == ("running", "good")
    journal.add(EntryKind.PERSONA_SET, persona="p", value={"status": "away"})
    shown = show_persona(journal.state(), "p", journal.load) or {}
    assert (shown["status"], shown["mood"], shown["current_attempt"]) == ("away", "good", 1)
    keep(journal)
    shown = show_persona(journal.state(), "p", journal.load) or {}
    assert shown["status"] == "success"


def test_what_is_shown_does_not_change_the_run(journal: Journal) -> None:
    begin(journal)
    journal.add(EntryKind.RETRY_COUNTED, persona="p")
    journal.add(EntryKind.PERSONA_SET, persona="p", value={"mood": "good"})
    state = journal.state()
    fields = show_fields(state, journal.load)
    fields["persona_states"]["p"]["mood"] = "bad"
    fields["retry_counts"]["p"] = 99
    fields["pending_tasks"].clear()
    assert show_fields(state, journal.load) == fields_of(journal)


def test_after_a_restore_nothing_of_before_is_shown(journal: Journal) -> None:
    begin(journal)
    keep(journal)
    journal.add(EntryKind.RESTORED)
    shown = show_run(journal.state(), "run-1", journal.load)
    assert (shown["steps"], shown["completed_tasks"], shown["persona_states"]) == ([], [], {})
