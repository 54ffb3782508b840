"""The events of a run."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import signal
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import pytest

from maestro_hive.engine.context import current
from maestro_hive.maestro.state import codec
from maestro_hive.maestro.state.event_reader import EventReader
from maestro_hive.maestro.state.events import (
    EVENT_TYPES,
    ChildStarted,
    Escalated,
    EscalationDelivered,
    FieldsSet,
    Restored,
    Retried,
    RoundFailed,
    RunEnded,
    RunEvent,
    RunStarted,
    Spent,
    StepCompleted,
    StepFailed,
    StepStarted,
    StepStopped,
    WaitEnded,
    WaitStarted,
    describe,
    to_dict,
)
from maestro_hive.maestro.state.records import Entry, EntryKind
from maestro_hive.maestro.state.sqlite.store import SqliteStore
from maestro_hive.unified_execution import ExecutionConfig, HelpNeeded, PersonaExecutor
from maestro_hive.unified_execution.safety_retry import SafetyRetryWrapper
from tests.python_processes import run_python
from tests.tables import for_each
from tests.unit.state.test_run_state import Journal

if TYPE_CHECKING:
    from pathlib import Path

RUN = "run-1"


def events_in(folder: Path) -> list[RunEvent]:
    store = SqliteStore(folder)
    try:
        record = store.run(RUN)
        assert record is not None
        reader = EventReader(RUN, store.load)
        read = [reader.read(entry) for entry in store.entries(record.id)]
        assert None not in read
        return [event for event in read if event is not None]
    finally:
        store.close()


def names(events: list[RunEvent]) -> list[str]:
    return [to_dict(event)["event"] for event in events]


def only(events: list[RunEvent], kind: type) -> Any:
    (found,) = [event for event in events if isinstance(event, kind)]
    return found


def events_of(*entries: dict[str, Any]) -> list[RunEvent]:
    """Return the events of entries that are made by hand."""
    journal, reader = Journal(), EventReader(RUN)
    read = [reader.read(journal.add(**entry)) for entry in entries]
    return [event for event in read if event is not None]


@pytest.fixture
def config(tmp_path: Path) -> ExecutionConfig:
    config = ExecutionConfig.in_folder(tmp_path / "state")
    config.level1.jitter = config.level2.jitter = 0
    config.level1.base_delay_seconds = config.level2.base_delay_seconds = 0.001
    return config


# --- real journals -------------------------------------------------------------------------------


async def works_at_last() -> str:
    step = current()
    step.spend(tokens=1200, usd=0.25)
    step.memory["tried"] = step.attempt
    step.history.append({"attempt": step.attempt})
    step.save_progress(current_step=step.attempt)
    if step.attempt == 1:
        raise TimeoutError("too\nslow")
    return "done"


def test_the_events_of_a_step_that_fails_and_then_works(
    tmp_path: Path, config: ExecutionConfig
) -> None:
    with PersonaExecutor(config, "developer", workflow_id=RUN) as executor:
        asyncio.run(executor.execute(works_at_last, "implement"))
    events = events_in(tmp_path / "state")
    attempt = ["step_started", "spent", "memory_saved", "history_appended", "progress_saved"]
    assert names(events) == [*attempt, "step_failed", *attempt, "step_completed"]
    assert [event.seq for event in events] == list(range(1, 13))
    assert {event.run_id for event in events} == {RUN}
    assert all(event.at.tzinfo is UTC for event in events)
    failed = only(events, StepFailed)
    assert (failed.step, failed.name, failed.persona, failed.attempt) == (
        1,
        "implement",
        "developer",
        1,
    )
    assert (failed.error_type, failed.message, failed.category) == (
        "TimeoutError",
        "too\nslow",
        "TIMEOUT",
    )
    assert (failed.retry_in, failed.final, failed.status) == (0.001, False, "retrying")
    assert describe(failed) == (
        "step implement (developer) attempt 1 failed: TimeoutError: too slow; retrying in 0.001 s"
    )
    spent = [event for event in events if isinstance(event, Spent)]
    assert [(each.attempt, each.tokens, each.usd) for each in spent] == [
        (1, 1200, 0.25),
        (2, 1200, 0.25),
    ]
    assert describe(events[-1]) == "step implement (developer) attempt 2 completed"


async def never_works() -> None:
    raise ValueError("no")


class BreakerBackend:
    async def escalate(self, case: object) -> str:
        return "MD-7"


def test_rounds_that_fail_and_the_call_for_help(tmp_path: Path, config: ExecutionConfig) -> None:
    async def scene() -> None:
        with (
            PersonaExecutor(config, "writer", workflow_id=RUN) as executor,
            SafetyRetryWrapper(config, workflow_id=RUN, escalation=BreakerBackend()) as wrapper,
        ):
            with pytest.raises(HelpNeeded):
                await wrapper.execute_safe(executor.execute, never_works, "draft")
            await executor.options(retry=True).execute(works_at_last, "draft")

    asyncio.run(scene())
    events = events_in(tmp_path / "state")
    rounds = [event for event in events if isinstance(event, RoundFailed)]
    assert [(each.name, each.persona, each.round) for each in rounds] == [
        ("draft", "writer", 1),
        ("draft", "writer", 2),
    ]
    assert (rounds[0].retry_in, rounds[1].retry_in) == (0.001, None)
    asked = only(events, Escalated)
    assert (asked.name, asked.persona) == ("draft", "writer")
    told = only(events, EscalationDelivered)
    assert (told.name, told.ticket) == ("draft", "MD-7")
    assert describe(asked).startswith("step draft (writer) needs help: ")
    retried = only(events, Retried)
    assert (retried.step, retried.name, retried.forget) == (1, "draft", False)
    given_up = [each for each in events if isinstance(each, StepFailed) and each.retry_in is None]
    assert [each.round for each in given_up] == [1, 2]
    assert describe(given_up[0]).endswith("; gave up")


DIES = """
import asyncio, os, signal, sys
from maestro_hive.unified_execution import ExecutionConfig, PersonaExecutor

async def dies():
    os.kill(os.getpid(), signal.SIGKILL)

config = ExecutionConfig.in_folder(sys.argv[1])
asyncio.run(PersonaExecutor(config, "developer", workflow_id="run-1").execute(dies, "implement"))
"""


def test_an_attempt_that_follows_a_kill_says_so(tmp_path: Path, config: ExecutionConfig) -> None:
    assert run_python(DIES, tmp_path / "state").returncode == -signal.SIGKILL
    with PersonaExecutor(config, "developer", workflow_id=RUN) as executor:
        asyncio.run(executor.execute(works_at_last, "implement"))
    events = events_in(tmp_path / "state")
    started = [event for event in events if isinstance(event, StepStarted)]
    assert [(each.attempt, each.interrupted) for each in started] == [(1, False), (2, True)]
    assert describe(started[1]) == (
        "step implement (developer) attempt 2 started; the process of the previous attempt died"
    )


def test_a_polite_stop_is_no_failure(tmp_path: Path, config: ExecutionConfig) -> None:
    async def scene() -> None:
        has_started = asyncio.Event()

        async def nap() -> None:
            has_started.set()
            await asyncio.sleep(60)

        with PersonaExecutor(config, "developer", workflow_id=RUN) as executor:
            work = asyncio.create_task(executor.execute(nap, "nap"))
            await has_started.wait()
            work.cancel()
            with pytest.raises(asyncio.CancelledError):
                await work

    asyncio.run(scene())
    started, stopped = events_in(tmp_path / "state")
    assert isinstance(started, StepStarted)
    assert isinstance(stopped, StepStopped)
    assert stopped.status == "cancelled"


def test_what_is_set_by_hand_and_restored(tmp_path: Path, config: ExecutionConfig) -> None:
    with PersonaExecutor(config, "developer", workflow_id=RUN) as executor:
        asyncio.run(executor.execute(works_at_last, "implement"))
        state = executor.state_persistence
        assert state is not None
        state.update_state(phase="build", artifacts={"page": "x" * 100_000})
        state.mark_task_pending("docs")
        state.mark_task_completed("docs")
        state.increment_retry("developer")
        state.update_persona_state("developer", {"mood": "good"})
        state.checkpoint("before")
        state.restore("before")
    events = events_in(tmp_path / "state")
    assert names(events)[12:18] == [
        "fields_set",
        "task_pending",
        "task_completed",
        "retry_counted",
        "persona_set",
        "restored",
    ]
    changed = events[12]
    assert isinstance(changed, FieldsSet)
    assert changed.fields == ("phase", "artifacts")
    restored = only(events, Restored)
    assert restored.source is not None
    assert "before" in restored.source
    assert restored.saved_at is not None
    assert names(events)[18:] == names(events)[:17]  # the copied entries follow
    again = events[18]
    assert isinstance(again, StepStarted)
    assert not again.interrupted


# --- workflows -----------------------------------------------------------------------------------


def test_a_workflow_that_begins_says_for_whom_or_from_where() -> None:
    alone, child, fork = events_of(
        {"kind": EntryKind.RUN_STARTED, "workflow": "build"},
        {"kind": EntryKind.RUN_STARTED, "workflow": "build", "parent": "big"},
        {
            "kind": EntryKind.RUN_STARTED,
            "workflow": "build",
            "forked_from": "old",
            "from_step": "implement",
        },
    )
    assert isinstance(alone, RunStarted)
    assert (alone.workflow, alone.parent, alone.forked_from) == ("build", None, None)
    assert describe(alone) == "workflow build started"
    assert describe(child) == "workflow build started, child of run big"
    assert describe(fork) == "workflow build started, forked from run old at step implement"


def test_a_workflow_that_ends_says_how() -> None:
    done, failed, cancelled = events_of(
        {"kind": EntryKind.RUN_ENDED, "status": "success"},
        {
            "kind": EntryKind.RUN_ENDED,
            "status": "failed",
            "error": {"type": "ValueError", "message": "no"},
        },
        {"kind": EntryKind.RUN_ENDED, "status": "cancelled", "reason": "by hand"},
    )
    assert isinstance(failed, RunEnded)
    assert (failed.status, failed.error_type, failed.message) == ("failed", "ValueError", "no")
    assert describe(done) == "run ended: success"
    assert describe(failed) == "run ended: failed: ValueError: no"
    assert describe(cancelled) == "run ended: cancelled: by hand"


def test_waits_and_children() -> None:
    wait = {"seconds": 90.0, "boot": "b", "boot_seconds": 1.0, "at": 5}
    asked, for_ever, slept, answered, child = events_of(
        {"kind": EntryKind.WAIT_STARTED, "name": "approve", "what": "answer", "wait": wait},
        {
            "kind": EntryKind.WAIT_STARTED,
            "name": "approve",
            "what": "answer",
            "wait": {"seconds": 1e15},
        },
        {"kind": EntryKind.WAIT_STARTED, "name": "sleep", "what": "sleep", "wait": wait},
        {"kind": EntryKind.WAIT_ENDED, "name": "approve", "how": "answered", "by": "ada"},
        {"kind": EntryKind.CHILD_STARTED, "run_id": "run-1.2", "workflow": "part"},
    )
    assert isinstance(asked, WaitStarted)
    assert asked.until == datetime(1970, 1, 1, 0, 1, 31, tzinfo=UTC)
    assert describe(asked) == "waiting for an answer to approve, until 1970-01-01 00:01:31 UTC"
    assert isinstance(for_ever, WaitStarted)
    assert for_ever.until is None
    assert describe(for_ever) == "waiting for an answer to approve, without a limit"
    assert describe(slept) == "sleeping until 1970-01-01 00:01:33 UTC"
    assert isinstance(answered, WaitEnded)
    assert describe(answered) == "wait approve ended: answered by ada"
    assert isinstance(child, ChildStarted)
    assert (child.run_id, child.child, child.workflow) == (RUN, "run-1.2", "part")


# --- all of them ---------------------------------------------------------------------------------

EVERYTHING: list[dict[str, Any]] = [
    {"kind": EntryKind.ATTEMPT_STARTED, "step": 1, "attempt": 1, "name": "a", "persona": "p"},
    {"kind": EntryKind.ATTEMPT_FAILED, "step": 1, "attempt": 1, "status": "retrying"},
    {"kind": EntryKind.STEP_COMPLETED, "step": 1, "attempt": 2},
    {"kind": EntryKind.FIELDS_SET, "value": {"phase": "x"}},
    *({"kind": kind} for kind in EntryKind),
    {"kind": EntryKind.ATTEMPT_FAILED, "step": 1, "counts": False, "status": "cancelled"},
]


def test_every_kind_of_entry_is_an_event_and_every_event_comes_up() -> None:
    events = events_of(*EVERYTHING)
    assert len(events) == len(EVERYTHING)
    assert {type(event) for event in events} == set(EVENT_TYPES)


@for_each("event", events_of(*EVERYTHING), ids=lambda event: type(event).__name__)
def test_an_event_is_json_and_a_line(event: RunEvent) -> None:
    shown = json.loads(json.dumps(to_dict(event)))
    assert shown.keys() == {"event", *(each.name for each in dataclasses.fields(event))}
    assert datetime.fromisoformat(shown["at"]) == event.at
    line = describe(event)
    assert line
    assert "\n" not in line
    assert "None" not in line
    assert "(" + type(event).__name__ not in line


def test_a_kind_of_a_newer_version_is_ignored() -> None:
    entry = Entry(
        1, max(EntryKind) + 1, 0, 0, 0, codec.encode({"a": 1}).data, None, None, None, None
    )
    assert EventReader(RUN).read(entry) is None


def test_a_very_long_message_is_cut_in_a_line() -> None:
    _, failed = events_of(
        EVERYTHING[0],
        {
            "kind": EntryKind.ATTEMPT_FAILED,
            "step": 1,
            "attempt": 1,
            "error": {"type": "E", "message": "x" * 5000},
        },
    )
    assert len(describe(failed)) == 400
    assert isinstance(failed, StepFailed)
    assert len(failed.message) == 5000


def test_steps_are_numbered_again_after_a_restore() -> None:
    completed = events_of(
        EVERYTHING[0],
        {"kind": EntryKind.RESTORED},
        {"kind": EntryKind.ATTEMPT_STARTED, "step": 1, "attempt": 1, "name": "b", "persona": "q"},
        {"kind": EntryKind.STEP_COMPLETED, "step": 1, "attempt": 1},
    )[-1]
    assert isinstance(completed, StepCompleted)
    assert (completed.name, completed.persona) == ("b", "q")
