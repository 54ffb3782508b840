"""What a run's entries add up to."""

from __future__ import annotations

from typing import Any

import pytest

from maestro_hive.kernel.errors import CorruptionError, DecodeError, DocumentCorruptError
from maestro_hive.maestro.state import codec
from maestro_hive.maestro.state.projections import FIELDS, RunState, find_step, fold
from maestro_hive.maestro.state.records import Entry, EntryKind


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
        encoded = codec.encode(facts).data if facts else None
        when = seq * 1_000_000 if at is None else at
        entry = Entry(seq, kind, step, attempt, when, encoded, data, None, None, identity)
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
    journal.add(EntryKind.FIELDS_SET, value={"phase": "design", "step": 3, "status": "running"})
    journal.add(EntryKind.FIELDS_SET, value={"phase": "build", "metrics": {"a": 1}})
    journal.add(EntryKind.FIELDS_SET, value={"a field of tomorrow": 1, "__class__": 2})
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
    journal.add(EntryKind.FIELDS_SET, value={"completed_tasks": ["y", "x"], "pending_tasks": ["z"]})
    journal.add(EntryKind.TASK_COMPLETED, task="z")
    fields = journal.state().fields()
    assert (fields["completed_tasks"], fields["pending_tasks"]) == (["y", "x", "z"], [])


def test_retries_are_counted_per_persona(journal: Journal) -> None:
    for persona in ("architect", "developer", "architect"):
        journal.add(EntryKind.RETRY_COUNTED, persona=persona)
    assert journal.state().retry_counts == {"architect": 2, "developer": 1}


def test_what_personas_show_adds_up(journal: Journal) -> None:
    journal.add(EntryKind.PERSONA_SET, persona="a", value={"status": "running", "n": 1})
    journal.add(EntryKind.PERSONA_SET, persona="b", value={"status": "idle"})
    journal.add(EntryKind.PERSONA_SET, persona="a", value={"n": 2})
    assert journal.state().persona_states == {
        "a": {"status": "running", "n": 2},
        "b": {"status": "idle"},
    }


def test_fields_are_new_containers(journal: Journal) -> None:
    journal.add(EntryKind.PERSONA_SET, persona="a", value={"n": 1})
    journal.add(EntryKind.TASK_COMPLETED, task="t", value={"f": 1})
    state = journal.state()
    fields = state.fields()
    fields["persona_states"]["a"]["n"] = 2
    fields["artifacts"]["f"] = 2
    fields["completed_tasks"].append("u")
    assert state.persona_states == {"a": {"n": 1}}
    assert state.artifacts == {"f": 1}
    assert list(state.completed_tasks) == ["t"]


# --- steps ---------------------------------------------------------------------------------------


def begin(journal: Journal, attempt: int = 1, step: int = 1) -> Entry:
    identity = bytes([step]) * 32
    return journal.add(
        EntryKind.ATTEMPT_STARTED,
        step=step,
        attempt=attempt,
        identity=identity,
        value="in",
        name=f"step {step}",
        persona="p",
    )


def test_a_completed_step_is_found_by_its_identity(journal: Journal) -> None:
    begin(journal)
    completed = journal.add(EntryKind.STEP_COMPLETED, step=1, attempt=1, value="result")
    state = journal.state()
    step = state.by_identity[b"\x01" * 32]
    assert step is state.steps[1]
    assert step.completed is completed
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
    assert step.completed is None


def test_a_recorded_stop_is_neither_a_failure_nor_an_interruption(journal: Journal) -> None:
    begin(journal, 1)
    failed = journal.add(EntryKind.ATTEMPT_FAILED, step=1, attempt=1, status="retrying")
    begin(journal, 2)
    journal.add(EntryKind.ATTEMPT_FAILED, step=1, attempt=2, status="cancelled", counts=False)
    step = journal.state().steps[1]
    assert (step.starts, step.failures, step.stops, step.interruptions) == (2, 1, 1, 0)
    assert (step.open_attempt, step.last_attempt) == (0, 2)
    assert step.last_failure is failed
    assert [entry.attempt for entry in step.log] == [1, 1, 2, 2]


def test_failures_are_counted_by_round(journal: Journal) -> None:
    for attempt, round_number in enumerate([1, 1, 2], start=1):
        begin(journal, attempt)
        journal.add(EntryKind.ATTEMPT_FAILED, step=1, attempt=attempt, round=round_number)
    begin(journal, 4)
    journal.add(EntryKind.ATTEMPT_FAILED, step=1, attempt=4, round=2, counts=False)
    step = journal.state().steps[1]
    assert [step.failures_in(number) for number in (1, 2, 3)] == [2, 1, 0]
    assert step.failures == 3


def test_a_failure_that_names_no_round_was_in_the_first(journal: Journal) -> None:
    begin(journal)
    journal.add(EntryKind.ATTEMPT_FAILED, step=1, attempt=1)
    assert journal.state().steps[1].failures_in(1) == 1


def test_interruptions_before_a_step_completed_stay_counted(
    journal: Journal,
) -> None:
    begin(journal, 1)  # and the process dies
    begin(journal, 2)
    journal.add(EntryKind.STEP_COMPLETED, step=1, attempt=2)
    assert journal.state().steps[1].interruptions == 1


# --- trying again ---------------------------------------------------------------------------------


def given_up(journal: Journal, step: int = 1) -> None:
    begin(journal, 1, step)  # and the process dies
    begin(journal, 2, step)
    journal.add(EntryKind.PROGRESS_SAVED, step=step, attempt=2, value="half")
    journal.add(EntryKind.ATTEMPT_FAILED, step=step, attempt=2, final=True)


def test_a_retried_step_starts_counting_again_and_keeps_what_it_had(journal: Journal) -> None:
    given_up(journal)
    journal.add(EntryKind.RETRIED, identity=b"\x01" * 32)
    step = journal.state().steps[1]
    assert (step.starts, step.failures, step.stops, step.interruptions) == (0, 0, 0, 0)
    assert (step.last_attempt, step.log) == (2, [])
    assert step.progress is not None
    assert step.last_failure is not None


def test_a_step_under_way_when_it_was_retried_is_not_interrupted(journal: Journal) -> None:
    begin(journal)
    journal.add(EntryKind.RETRIED, identity=b"\x01" * 32)
    step = journal.state().steps[1]
    assert (step.open_attempt, step.interruptions) == (0, 0)


def test_a_completed_step_is_retried_only_if_its_result_is_to_be_forgotten(
    journal: Journal,
) -> None:
    begin(journal)
    completed = journal.add(EntryKind.STEP_COMPLETED, step=1, attempt=1)
    journal.add(EntryKind.RETRIED, identity=b"\x01" * 32)
    step = journal.state().steps[1]
    assert (step.completed, step.starts, step.interruptions) == (completed, 1, 0)
    journal.add(EntryKind.RETRIED, identity=b"\x01" * 32, forget=True)
    step = journal.state().steps[1]
    assert (step.completed, step.starts, step.interruptions, step.log) == (None, 0, 0, [])


def test_a_forgotten_step_has_neither_failure_nor_progress(journal: Journal) -> None:
    given_up(journal)
    journal.add(EntryKind.RETRIED, identity=b"\x01" * 32, forget=True)
    step = journal.state().steps[1]
    assert (step.last_failure, step.progress, step.last_attempt) == (None, None, 2)


def test_everything_that_is_not_finished_can_be_retried_at_once(journal: Journal) -> None:
    given_up(journal, 1)
    given_up(journal, 2)
    begin(journal, 1, 3)
    journal.add(EntryKind.STEP_COMPLETED, step=3, attempt=1)
    journal.add(EntryKind.ROUND_FAILED, identity=b"a")
    journal.add(EntryKind.ESCALATED, identity=b"a")
    journal.add(EntryKind.RETRIED)
    state = journal.state()
    assert [state.steps[number].failures for number in (1, 2)] == [0, 0]
    assert state.steps[3].completed is not None
    assert (state.rounds, state.escalated) == ({}, {})


def both_levels_gave_up(journal: Journal, step: int) -> None:
    given_up(journal, step)
    journal.add(EntryKind.ROUND_FAILED, identity=bytes([step]) * 32)
    journal.add(EntryKind.ESCALATED, identity=bytes([step]) * 32)


@pytest.mark.parametrize("status", ["failed", "cancelled"])
def test_a_retry_of_one_step_clears_that_step_alone_and_opens_the_run(
    journal: Journal, status: str
) -> None:
    for step in (1, 2):
        both_levels_gave_up(journal, step)
    journal.add(EntryKind.RUN_ENDED, status=status)
    journal.add(EntryKind.RETRIED, identity=b"\x02" * 32, run=True)
    state = journal.state()
    assert state.ended is None
    assert [state.steps[number].failures for number in (1, 2)] == [1, 0]
    assert list(state.rounds) == list(state.escalated) == [b"\x01" * 32]


@pytest.mark.parametrize("facts", [{"run": True}, {}])
def test_a_run_that_succeeded_is_not_opened_again(journal: Journal, facts: dict[str, Any]) -> None:
    journal.add(EntryKind.RUN_ENDED, status="success")
    journal.add(EntryKind.RETRIED, identity=b"x" if facts else None, **facts)
    assert journal.state().ended is not None


def test_a_retry_of_one_step_alone_leaves_the_end_of_the_run(journal: Journal) -> None:
    given_up(journal)
    journal.add(EntryKind.RUN_ENDED, status="failed")
    journal.add(EntryKind.RETRIED, identity=b"\x01" * 32)
    assert journal.state().ended is not None


@pytest.mark.parametrize(
    "wanted, number",
    [(3, 3), ("3", 3), ("build", 1), ("build#1", 1), ("build#2", 3), ("part#2", 2), ("4", 4)],
)
def test_a_step_is_found_by_number_name_and_name_with_number(
    journal: Journal, wanted: str | int, number: int
) -> None:
    for step, name in enumerate(["build", "part#2", "build", "2"], start=1):
        journal.add(EntryKind.ATTEMPT_STARTED, step=step, attempt=1, name=name)
    found = find_step(journal.state(), wanted)
    assert found is not None
    assert found.number == number


@pytest.mark.parametrize("wanted", ["", "0", "build#3", "9" * 5000, "part"])
def test_a_step_that_is_not_there_is_not_found(journal: Journal, wanted: str) -> None:
    journal.add(EntryKind.ATTEMPT_STARTED, step=1, attempt=1, name="build")
    assert find_step(journal.state(), wanted) is None


def test_a_retry_of_what_is_not_there_is_no_damage(journal: Journal) -> None:
    journal.add(EntryKind.RETRIED, identity=b"unknown")
    assert journal.state().steps == {}


# --- rounds ---------------------------------------------------------------------------------------


def test_rounds_and_escalations_are_found_by_identity(journal: Journal) -> None:
    first = journal.add(EntryKind.ROUND_FAILED, identity=b"a")
    second = journal.add(EntryKind.ROUND_FAILED, identity=b"a")
    other = journal.add(EntryKind.ROUND_FAILED, identity=b"b")
    escalated = journal.add(EntryKind.ESCALATED, identity=b"a", ticket="MD-1")
    state = journal.state()
    assert state.rounds == {b"a": [first, second], b"b": [other]}
    assert state.escalated == {b"a": escalated}
    journal.add(EntryKind.RETRIED, identity=b"a")
    state = journal.state()
    assert (state.rounds, state.escalated) == ({b"b": [other]}, {})


@pytest.mark.parametrize("kind", [EntryKind.ROUND_FAILED, EntryKind.ESCALATED])
def test_a_round_of_nothing_is_damage(journal: Journal, kind: EntryKind) -> None:
    journal.add(kind)
    with pytest.raises(CorruptionError, match=r"entry 1 of the run.*has no identity"):
        journal.state()


# --- personas -------------------------------------------------------------------------------------


def test_memory_is_the_latest_and_history_all_of_it(journal: Journal) -> None:
    journal.add(EntryKind.MEMORY_SAVED, persona="p", value={"a": 1})
    latest = journal.add(EntryKind.MEMORY_SAVED, persona="p", value={"a": 2})
    items = [journal.add(EntryKind.HISTORY_APPENDED, persona="p", value=n) for n in range(3)]
    state = journal.state()
    assert state.memories == {"p": latest}
    assert state.histories == {"p": items}
    assert journal.loaded == 0


def test_spending_adds_up_by_persona_and_by_attempt(journal: Journal) -> None:
    begin(journal, 1)
    journal.add(EntryKind.SPENT, step=1, attempt=1, persona="p", tokens=10, usd=0.5)
    begin(journal, 2)
    journal.add(EntryKind.SPENT, step=1, attempt=1, persona="p", tokens=5)  # late
    journal.add(EntryKind.SPENT, step=1, attempt=2, persona="p", tokens=7, usd=0.25)
    journal.add(EntryKind.SPENT, persona="q", tokens=100)
    state = journal.state()
    assert state.spent == {"p": (22, 0.75), "q": (100, 0.0)}
    assert state.steps[1].tokens == {1: 15, 2: 7}


# --- progress, and what is not loaded -------------------------------------------------------------


def test_the_latest_progress_is_remembered(journal: Journal) -> None:
    begin(journal)
    journal.add(EntryKind.PROGRESS_SAVED, step=1, attempt=1, value="early")
    latest = journal.add(EntryKind.PROGRESS_SAVED, step=1, attempt=1, value="late")
    assert journal.state().steps[1].progress is latest


def test_steps_do_not_load_their_values(journal: Journal) -> None:
    for number in range(1, 50):
        begin(journal, step=number)
        journal.add(EntryKind.STEP_COMPLETED, step=number, attempt=1, value="x" * 100)
    assert len(journal.state().steps) == 49
    assert journal.loaded == 0


# --- time and restoring ---------------------------------------------------------------------------


def test_a_run_began_with_its_first_entry_and_changed_with_its_last(journal: Journal) -> None:
    journal.add(EntryKind.TASK_PENDING, task="a", at=5_000_000)
    journal.add(EntryKind.TASK_PENDING, task="b", at=9_500_000)
    state = journal.state()
    assert (state.created_at, state.updated_at) == (5_000_000, 9_500_000)


def test_what_came_before_a_restore_no_longer_counts(journal: Journal) -> None:
    begin(journal)
    journal.add(EntryKind.STEP_COMPLETED, step=1, attempt=1, value="result")
    journal.add(EntryKind.TASK_COMPLETED, task="old", value={"old": 1})
    journal.add(EntryKind.FIELDS_SET, value={"phase": "late"})
    journal.add(EntryKind.RETRY_COUNTED, persona="p")
    journal.add(EntryKind.RESTORED)
    state = journal.state()
    assert state.fields() == RunState().fields()
    assert (state.steps, state.by_identity) == ({}, {})
    assert (state.seq, state.created_at) == (6, 1_000_000)
    journal.add(EntryKind.FIELDS_SET, value={"phase": "from the copy"})
    assert journal.state().phase == "from the copy"


def test_entries_after_a_restore_count_folded_at_once_or_one_by_one(journal: Journal) -> None:
    begin(journal)
    journal.add(EntryKind.STEP_COMPLETED, step=1, attempt=1)
    journal.add(EntryKind.RESTORED)
    for step in (1, 2):
        begin(journal, step=step)
        journal.add(EntryKind.STEP_COMPLETED, step=step, attempt=1)
    state = RunState()
    for entry in journal.entries:
        state.add_all([entry], journal.load)
    assert state == journal.state()
    assert [step.completed is not None for step in state.steps.values()] == [True, True]
    assert state.unfinished == {"step 1": 0, "step 2": 0}


def test_a_run_restored_from_a_copy_began_when_the_copied_entries_did(journal: Journal) -> None:
    journal.add(EntryKind.RESTORED, at=100_000_000)
    journal.add(EntryKind.TASK_PENDING, task="a", at=7_000_000)
    assert journal.state().created_at == 7_000_000


def test_entries_can_be_added_one_by_one(journal: Journal) -> None:
    begin(journal)
    journal.add(EntryKind.TASK_PENDING, task="a")
    state = journal.state()
    state.add_all([journal.add(EntryKind.STEP_COMPLETED, step=1, attempt=1)], journal.load)
    state.add_all([journal.add(EntryKind.TASK_COMPLETED, task="a")], journal.load)
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
        (EntryKind.PERSONA_SET, 5, {"persona": "p"}),
        (EntryKind.PERSONA_SET, ["abc"], {"persona": "p"}),
        (EntryKind.RETRY_COUNTED, None, {"persona": []}),
        (EntryKind.RESTORED, None, {"fence": "x"}),
        (EntryKind.FIELDS_SET, ["x"], {}),
        (EntryKind.FIELDS_SET, {"completed_tasks": [["x"]]}, {}),
        (EntryKind.FIELDS_SET, {"pending_tasks": 5}, {}),
        (EntryKind.FIELDS_SET, {"pending_tasks": "abc"}, {}),
        (EntryKind.FIELDS_SET, {"persona_states": {"p": 5}}, {}),
        (EntryKind.FIELDS_SET, {"persona_states": {"p": None}}, {}),
        (EntryKind.FIELDS_SET, {"metrics": None}, {}),
        (EntryKind.STEP_COMPLETED, None, {}),
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
    journal.add(EntryKind.FIELDS_SET, value={"retry_counts": {"p": "b"}})
    journal.add(EntryKind.RETRY_COUNTED, persona="p")
    with pytest.raises(CorruptionError, match="entry 2 of the run"):
        journal.state()


@pytest.mark.parametrize(
    "error", [DocumentCorruptError("it", "torn"), CorruptionError("x"), DecodeError("value", "x")]
)
def test_what_loading_a_value_says_is_passed_on(journal: Journal, error: Exception) -> None:
    def load(_: Entry) -> bytes | None:
        raise error

    with pytest.raises(type(error)) as raised:
        RunState().add_all([journal.add(EntryKind.TASK_COMPLETED, task="t")], load)
    assert raised.value is error
