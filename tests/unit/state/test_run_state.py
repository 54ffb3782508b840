"""What a run's entries add up to."""

from __future__ import annotations

from typing import Any

import pytest

from maestro_hive.kernel.errors import CorruptionError, DecodeError, DocumentCorruptError
from maestro_hive.maestro.state import codec
from maestro_hive.maestro.state.records import Entry, EntryKind
from maestro_hive.maestro.state.run_state import FIELDS, RunState, fold


class Journal:
    """Entries of one run, and how often their values were loaded."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.loaded = 0

    def add(
        self,
        kind: EntryKind,
        *,
        step: int = 0,
        attempt: int = 0,
        at: int | None = None,
        value: Any = None,
        identity: bytes | None = None,
        **facts: Any,
    ) -> Entry:
        seq = len(self.entries) + 1
        data = None if value is None else codec.encode(value).data
        told = codec.encode(facts).data if facts else None
        when = seq * 1_000_000 if at is None else at
        entry = Entry(seq, kind, step, attempt, when, told, data, None, None, identity)
        self.entries.append(entry)
        return entry

    def load(self, entry: Entry) -> bytes | None:
        self.loaded += 1
        return entry.value

    def state(self) -> RunState:
        return fold(self.entries, self.load)


@pytest.fixture
def journal() -> Journal:
    return Journal()


def test_a_run_without_entries_is_as_new(journal: Journal) -> None:
    state = journal.state()
    assert state.fields() == {name: make() for name, make in FIELDS.items()}
    assert (state.seq, state.steps) == (0, {})


def test_fields_are_replaced_by_name(journal: Journal) -> None:
    journal.add(EntryKind.FIELDS_CHANGED, value={"phase": "design", "step": 3, "status": "running"})
    journal.add(EntryKind.FIELDS_CHANGED, value={"phase": "build", "metrics": {"a": 1}})
    journal.add(EntryKind.FIELDS_CHANGED, value={"a field of tomorrow": 1, "__class__": 2})
    state = journal.state()
    assert (state.phase, state.step, state.status) == ("build", 3, "running")
    assert state.metrics == {"a": 1}
    assert not hasattr(state, "a field of tomorrow")
    assert type(state) is RunState
    assert state.seq == 3


def test_tasks_wait_and_are_done_once_each_in_order(journal: Journal) -> None:
    for name in ("b", "a", "c", "a"):
        journal.add(EntryKind.TASK_PENDING, task=name)
    journal.add(EntryKind.TASK_COMPLETED, task="a", value={"file": "a.py"})
    journal.add(EntryKind.TASK_COMPLETED, task="x")
    journal.add(EntryKind.TASK_COMPLETED, task="a", value={"more": 1})
    fields = journal.state().fields()
    assert fields["pending_tasks"] == ["b", "c"]
    assert fields["completed_tasks"] == ["a", "x"]
    assert fields["artifacts"] == {"file": "a.py", "more": 1}


def test_task_lists_can_be_set_as_a_whole(journal: Journal) -> None:
    journal.add(EntryKind.TASK_PENDING, task="a")
    journal.add(
        EntryKind.FIELDS_CHANGED, value={"completed_tasks": ["y", "x"], "pending_tasks": ["z"]}
    )
    journal.add(EntryKind.TASK_COMPLETED, task="z")
    fields = journal.state().fields()
    assert (fields["completed_tasks"], fields["pending_tasks"]) == (["y", "x", "z"], [])


def test_retries_are_counted_per_persona(journal: Journal) -> None:
    for persona in ("architect", "developer", "architect"):
        journal.add(EntryKind.RETRY_COUNTED, persona=persona)
    assert journal.state().retry_counts == {"architect": 2, "developer": 1}


def test_what_personas_show_adds_up(journal: Journal) -> None:
    journal.add(EntryKind.PERSONA_CHANGED, persona="a", value={"status": "running", "n": 1})
    journal.add(EntryKind.PERSONA_CHANGED, persona="b", value={"status": "idle"})
    journal.add(EntryKind.PERSONA_CHANGED, persona="a", value={"n": 2})
    assert journal.state().persona_states == {
        "a": {"status": "running", "n": 2},
        "b": {"status": "idle"},
    }


def test_fields_are_new_containers(journal: Journal) -> None:
    journal.add(EntryKind.PERSONA_CHANGED, persona="a", value={"n": 1})
    journal.add(EntryKind.TASK_COMPLETED, task="t", value={"f": 1})
    state = journal.state()
    fields = state.fields()
    fields["persona_states"]["a"]["n"] = 2
    fields["artifacts"]["f"] = 2
    fields["completed_tasks"].append("u")
    assert state.persona_states == {"a": {"n": 1}}
    assert state.artifacts == {"f": 1}
    assert list(state.completed) == ["t"]


# --- steps ---------------------------------------------------------------------------------------


def begin(journal: Journal, attempt: int = 1, step: int = 1) -> Entry:
    identity = bytes([step]) * 32
    return journal.add(
        EntryKind.ATTEMPT_BEGUN,
        step=step,
        attempt=attempt,
        identity=identity,
        value="in",
        name=f"step {step}",
        persona="p",
    )


def test_a_kept_step_is_found_by_its_identity(journal: Journal) -> None:
    begin(journal)
    kept = journal.add(EntryKind.STEP_KEPT, step=1, attempt=1, value="result")
    state = journal.state()
    step = state.by_identity[b"\x01" * 32]
    assert step is state.steps[1]
    assert step.kept is kept
    assert (step.starts, step.failures, step.interruptions) == (1, 0, 0)
    assert step.open_attempt == 0


def test_failures_count_and_interruptions_are_not_failures(journal: Journal) -> None:
    begin(journal, 1)
    failed = journal.add(EntryKind.ATTEMPT_FAILED, step=1, attempt=1, status="failed")
    begin(journal, 2)  # and the process dies
    begin(journal, 3)  # and again
    begin(journal, 4)
    step = journal.state().steps[1]
    assert (step.starts, step.failures, step.open_attempt) == (4, 1, 4)
    assert step.interruptions == 2
    assert step.last_failure is failed
    assert step.kept is None


@pytest.mark.parametrize(
    "kinds, status",
    [
        ([], "running"),
        ([EntryKind.ATTEMPT_FAILED], "failed"),
        ([EntryKind.STEP_KEPT], "success"),
    ],
)
def test_a_step_shows_how_it_stands(journal: Journal, kinds: list[EntryKind], status: str) -> None:
    begin(journal)
    for kind in kinds:
        journal.add(kind, step=1, attempt=1)
    shown = journal.state().to_dict("run-1")
    assert shown["workflow_id"] == "run-1"
    (step,) = shown["steps"]
    assert step == {
        "step": 1,
        "name": "step 1",
        "persona": "p",
        "status": status,
        "attempts": 1,
        "failures": int(status == "failed"),
    }


def test_the_latest_progress_is_remembered(journal: Journal) -> None:
    begin(journal)
    journal.add(EntryKind.PROGRESS_SAVED, step=1, attempt=1, value="early")
    latest = journal.add(EntryKind.PROGRESS_SAVED, step=1, attempt=1, value="late")
    assert journal.state().steps[1].progress is latest


def test_steps_do_not_load_their_values(journal: Journal) -> None:
    for number in range(1, 50):
        begin(journal, step=number)
        journal.add(EntryKind.STEP_KEPT, step=number, attempt=1, value="x" * 100)
    assert len(journal.state().steps) == 49
    assert journal.loaded == 0


# --- time and restoring ---------------------------------------------------------------------------


def test_a_run_began_with_its_first_entry_and_changed_with_its_last(journal: Journal) -> None:
    journal.add(EntryKind.TASK_PENDING, task="a", at=5_000_000)
    journal.add(EntryKind.TASK_PENDING, task="b", at=9_500_000)
    shown = journal.state().to_dict("run-1")
    assert shown["created_at"] == "1970-01-01T00:00:05+00:00"
    assert shown["updated_at"] == "1970-01-01T00:00:09.500000+00:00"


def test_what_came_before_a_restore_no_longer_counts(journal: Journal) -> None:
    begin(journal)
    journal.add(EntryKind.STEP_KEPT, step=1, attempt=1, value="result")
    journal.add(EntryKind.TASK_COMPLETED, task="old", value={"old": 1})
    journal.add(EntryKind.FIELDS_CHANGED, value={"phase": "late"})
    journal.add(EntryKind.RETRY_COUNTED, persona="p")
    journal.add(EntryKind.RESTORED)
    state = journal.state()
    assert state.fields() == RunState().fields()
    assert (state.steps, state.by_identity) == ({}, {})
    assert (state.seq, state.created_at) == (6, 1_000_000)
    journal.add(EntryKind.FIELDS_CHANGED, value={"phase": "from the copy"})
    assert journal.state().phase == "from the copy"


def test_a_run_restored_from_a_copy_began_when_the_copied_entries_did(journal: Journal) -> None:
    journal.add(EntryKind.RESTORED, at=100_000_000)
    journal.add(EntryKind.TASK_PENDING, task="a", at=7_000_000)
    assert journal.state().created_at == 7_000_000


def test_entries_can_be_added_one_by_one(journal: Journal) -> None:
    begin(journal)
    journal.add(EntryKind.TASK_PENDING, task="a")
    state = journal.state()
    state.add(journal.add(EntryKind.STEP_KEPT, step=1, attempt=1), journal.load)
    state.add(journal.add(EntryKind.TASK_COMPLETED, task="a"), journal.load)
    assert state == journal.state()


# --- damage ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind, value, facts",
    [
        (EntryKind.TASK_COMPLETED, ["a.py"], {"task": "t"}),
        (EntryKind.TASK_COMPLETED, "out.py", {"task": "t"}),
        (EntryKind.TASK_COMPLETED, 5, {"task": "t"}),
        (EntryKind.TASK_COMPLETED, None, {"task": ["t"]}),
        (EntryKind.TASK_COMPLETED, None, {}),
        (EntryKind.TASK_PENDING, None, {"task": {}}),
        (EntryKind.PERSONA_CHANGED, 5, {"persona": "p"}),
        (EntryKind.PERSONA_CHANGED, ["abc"], {"persona": "p"}),
        (EntryKind.RETRY_COUNTED, None, {"persona": []}),
        (EntryKind.RESTORED, None, {"fence": "x"}),
        (EntryKind.FIELDS_CHANGED, ["x"], {}),
        (EntryKind.FIELDS_CHANGED, {"completed_tasks": [["x"]]}, {}),
        (EntryKind.FIELDS_CHANGED, {"pending_tasks": 5}, {}),
        (EntryKind.FIELDS_CHANGED, {"pending_tasks": "abc"}, {}),
        (EntryKind.FIELDS_CHANGED, {"persona_states": {"p": 5}}, {}),
        (EntryKind.FIELDS_CHANGED, {"persona_states": {"p": None}}, {}),
        (EntryKind.FIELDS_CHANGED, {"metrics": None}, {}),
        (EntryKind.STEP_KEPT, None, {}),
    ],
)
def test_an_entry_that_cannot_be_is_damage_and_is_named(
    journal: Journal, kind: EntryKind, value: Any, facts: dict[str, Any]
) -> None:
    journal.add(EntryKind.TASK_PENDING, task="good")
    journal.add(kind, step=7, value=value, **facts)
    with pytest.raises(CorruptionError, match="entry 2 of the run"):
        journal.state()


def test_a_retry_of_what_was_never_counted_is_damage(journal: Journal) -> None:
    journal.add(EntryKind.FIELDS_CHANGED, value={"retry_counts": {"p": "b"}})
    journal.add(EntryKind.RETRY_COUNTED, persona="p")
    with pytest.raises(CorruptionError, match="entry 2 of the run"):
        journal.state()


@pytest.mark.parametrize(
    "error", [DocumentCorruptError("it", "torn"), CorruptionError("x"), DecodeError("value", "x")]
)
def test_what_loading_a_value_says_is_passed_on(journal: Journal, error: Exception) -> None:
    def load(_: Entry) -> bytes | None:
        raise error

    with pytest.raises(type(error)) as told:
        RunState().add(journal.add(EntryKind.TASK_COMPLETED, task="t"), load)
    assert told.value is error
