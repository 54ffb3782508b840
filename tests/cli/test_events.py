"""``maestro events``."""

from __future__ import annotations

import json
import signal
import time
from typing import TYPE_CHECKING, Any

import pytest

from maestro_hive.admin.events import Ending, EventFeed, FamilyFeed
from maestro_hive.admin.folder import reading as open_reader
from maestro_hive.maestro.state.records import EntryKind, NewDispatch
from tests.cli.processes import complaint, in_terminal, maestro, start_maestro
from tests.cli.sample_runs import (
    RUN,
    active_run,
    add,
    asks,
    child_ends,
    ends,
    entry,
    execute,
    executed,
    starts,
    workflow,
)

if TYPE_CHECKING:
    from pathlib import Path

    from maestro_hive.maestro.state.records import NewEntry
    from tests.python_processes import PythonProcess


def events_in(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def following(folder: Path, run: str = RUN) -> PythonProcess:
    """Start to follow a run."""
    return start_maestro("events", run, "--follow", "--json", "--store", folder)


# --- what happened -------------------------------------------------------------------------------


def test_each_entry_is_a_line(tmp_path: Path) -> None:
    done = maestro("events", RUN, "--store", executed(tmp_path))
    assert done.returncode == 0
    lines = [line.split("\t") for line in done.stdout.splitlines()]
    assert [line[0] for line in lines] == [str(number) for number in range(1, 19)]
    assert lines[0][2] == "step implement (developer) attempt 1 started"
    assert lines[5][2] == (
        "step implement (developer) attempt 1 failed: TimeoutError: too slow; retrying in 0.001 s"
    )
    assert lines[-1][2] == ("step review (developer) attempt 3 failed: ValueError: no way; gave up")


def test_json_is_one_object_per_line(tmp_path: Path) -> None:
    events = events_in(maestro("events", RUN, "--json", "--store", executed(tmp_path)).stdout)
    assert [event["seq"] for event in events] == list(range(1, 19))
    assert {event["run_id"] for event in events} == {RUN}
    assert events[0]["event"] == "step_started"
    assert (events[5]["event"], events[5]["error_type"]) == ("step_failed", "TimeoutError")


def test_it_starts_after_an_entry_and_still_knows_the_names(tmp_path: Path) -> None:
    executed(tmp_path)
    done = maestro("events", RUN, "--after", "11", "--json", "--store", tmp_path)
    events = events_in(done.stdout)
    assert events[0]["seq"] == 12
    assert (events[0]["event"], events[0]["name"]) == ("step_completed", "implement")
    assert maestro("events", RUN, "--after", "99", "--store", tmp_path).stdout == ""


def test_a_terminal_shows_short_times(tmp_path: Path) -> None:
    workflow(tmp_path, "good", "success", ends("success"))
    seen = in_terminal("events", "good", "--store", tmp_path)
    assert seen.text.splitlines()[1].startswith("    1  20")
    assert seen.text.splitlines()[1].endswith("  workflow build started")


def attempt(kind: EntryKind, number: int, **facts: Any) -> NewEntry:
    """Return an entry of the only attempt at a step; each step has an identity of its own."""
    return entry(kind, step=number, attempt=1, **facts)._replace(identity=b"%032d" % number)


def test_parallel_steps_of_one_name_can_be_told_apart(tmp_path: Path) -> None:
    started = [attempt(EntryKind.ATTEMPT_STARTED, number, name="fetch") for number in (1, 2, 3)]
    error = {"type": "E", "message": "no"}
    gave_up = attempt(EntryKind.STEP_FAILED, 0, name="fetch", error=error)
    gave_up = gave_up._replace(identity=b"%032d" % 3)
    cancelled = attempt(EntryKind.STEP_CANCELLED, 0, name="fetch")._replace(identity=b"%032d" % 1)
    done = attempt(EntryKind.STEP_COMPLETED, 2)
    workflow(tmp_path, "many", "running", *started, done, gave_up, cancelled)
    lines = maestro("events", "many", "--after", "1", "--store", tmp_path).stdout.splitlines()
    assert [line.split("\t")[2] for line in lines] == [
        "step fetch attempt 1 started",
        "step fetch#2 attempt 1 started",
        "step fetch#3 attempt 1 started",
        "step fetch#2 attempt 1 completed",
        "step fetch#3 failed for good: E: no",
        "step fetch cancelled by the workflow",
    ]
    given = events_in(maestro("events", "many", "--json", "--store", tmp_path).stdout)
    assert [event.get("label") for event in given[1:5]] == [
        "fetch",
        "fetch#2",
        "fetch#3",
        "fetch#2",
    ]
    assert {event["name"] for event in given[1:]} == {"fetch"}


# --- children ------------------------------------------------------------------------------------


def test_children_are_followed_with_their_parent_in_the_order_of_time(tmp_path: Path) -> None:
    workflow(tmp_path, "child", "running", starts("grandchild"), parent="top")
    workflow(tmp_path, "grandchild", "success", ends("success"), parent="child")
    workflow(tmp_path, "top", "success", starts("child"), starts("gone"), ends("success"))
    done = maestro("events", "top", "--children", "--follow", "--store", tmp_path)
    assert done.returncode == 0
    rows = [line.split("\t") for line in done.stdout.splitlines()]
    assert [row[1] for row in rows] == sorted(row[1] for row in rows)
    assert [(row[0], row[2]) for row in rows] == [
        ("1", "child"),
        ("2", "child"),
        ("1", "grandchild"),
        ("2", "grandchild"),
        ("1", "top"),
        ("2", "top"),
        ("3", "top"),
        ("4", "top"),
    ]
    given = events_in(maestro("events", "top", "--children", "--json", "--store", tmp_path).stdout)
    assert [event["run_id"] for event in given] == [row[2] for row in rows]
    seen = in_terminal("events", "top", "--children", "--store", tmp_path)
    assert seen.text.splitlines()[1].endswith("  child  workflow build started, child of run top")


def test_what_a_live_child_does_is_followed(tmp_path: Path) -> None:
    workflow(tmp_path, RUN, "success", ends("success"), parent="top")
    with open_reader(tmp_path) as reader, active_run(tmp_path, "top", of_workflow=True) as process:
        feed = FamilyFeed(reader, "top")
        found, ending = feed.next_batch()
        assert ([event.run_id for event in found], ending) == (["top"], None)
        assert feed.next_batch() == ([], None)
        process.finish("success")
        found, ending = feed.next_batch()
        assert ([event.run_id for event in found], ending) == (["top"], Ending.COMPLETED)


def test_a_child_that_is_retried_is_followed_again(tmp_path: Path) -> None:
    workflow(tmp_path, "top", "failed", starts("child"), ends("failed"))
    workflow(tmp_path, "child", "failed", ends("failed"), parent="top")
    with open_reader(tmp_path) as reader:
        feed = FamilyFeed(reader, "top")
        assert len(feed.next_batch()[0]) == 5
        again = entry(EntryKind.RETRIED)._replace(identity=None)
        add(tmp_path, "child", again, ends("success"))
        add(tmp_path, "top", again, child_ends("child", "success"), ends("success"))
        found, ending = feed.next_batch()
        assert [event.run_id for event in found] == ["child"] * 2 + ["top"] * 3
        assert ending is Ending.COMPLETED


def test_numbers_of_entries_are_those_of_one_run(tmp_path: Path) -> None:
    executed(tmp_path)
    done = maestro("events", RUN, "--children", "--after", "3", "--store", tmp_path)
    assert "not with --children" in complaint(done, code=2)


# --- following -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "entries, status, code",
    [
        ([ends("success")], "success", 0),
        ([ends("failed")], "failed", 1),
        ([ends("cancelled", reason="by hand")], "cancelled", 1),
        ([asks()], "waiting", 75),
        ([], "running", 1),
    ],
    ids=["done", "failed", "cancelled", "waiting", "left"],
)
def test_the_exit_code_shows_how_a_run_ended(
    tmp_path: Path, entries: list[Any], status: str, code: int
) -> None:
    workflow(tmp_path, "dead", status, *entries)
    done = maestro("events", "dead", "--follow", "--store", tmp_path)
    assert done.returncode == code
    assert len(done.stdout.splitlines()) == 1 + len(entries)
    assert maestro("events", "dead", "--store", tmp_path).returncode == 0


def test_a_run_that_has_its_answers_needs_no_person(tmp_path: Path) -> None:
    workflow(tmp_path, "asking", "waiting", asks("go"), asks("when"))
    maestro("answer", "asking", "go", "yes", "--store", tmp_path)
    done = maestro("events", "asking", "--follow", "--store", tmp_path)
    assert (done.returncode, "needs a person" in done.stderr) == (75, True)
    maestro("answer", "asking", "when", "now", "--store", tmp_path)
    done = maestro("events", "asking", "--follow", "--store", tmp_path)
    assert done.returncode == 1
    assert "has its answer, and continues when its program is started" in done.stderr


def test_a_retried_run_is_not_over(tmp_path: Path) -> None:
    workflow(
        tmp_path,
        "again",
        "pending",
        ends("failed"),
        entry(EntryKind.RETRIED)._replace(identity=None),
    )
    done = maestro("events", "again", "--follow", "--store", tmp_path)
    assert done.returncode == 1
    assert "is not finished, and no process executes it" in done.stderr


def test_a_run_without_a_workflow_is_finished_when_its_steps_are(tmp_path: Path) -> None:
    with active_run(tmp_path) as process:
        process.finish()
    assert maestro("events", RUN, "--follow", "--store", tmp_path).returncode == 0
    execute(tmp_path, "half")  # one of its steps was given up
    assert maestro("events", "half", "--follow", "--store", tmp_path).returncode == 1


def test_a_live_run_is_followed_to_its_end(tmp_path: Path) -> None:
    with active_run(tmp_path, of_workflow=True) as process:
        follower = following(tmp_path)
        assert follower.stdout is not None
        assert json.loads(follower.stdout.readline())["event"] == "run_started"
        time.sleep(0.5)
        assert follower.poll() is None
        process.finish("failed")
        rest, _ = follower.communicate(timeout=60)
    (ended,) = events_in(rest)
    assert (ended["event"], ended["status"]) == ("run_ended", "failed")
    assert follower.returncode == 1


def test_following_ends_when_the_process_is_killed(tmp_path: Path) -> None:
    with active_run(tmp_path) as process:
        follower = following(tmp_path)
        assert follower.stdout is not None
        follower.stdout.readline()
        process.kill()
        _, message = follower.communicate(timeout=60)
    assert follower.returncode == 1
    assert "is not finished, and no process executes it" in message


@pytest.mark.parametrize("entries", [[], [asks()]], ids=["enqueued", "released"])
def test_a_run_that_belongs_to_workers_is_followed_to_its_end(
    tmp_path: Path, entries: list[Any]
) -> None:
    workflow(tmp_path, "top", "waiting", *entries, dispatch=NewDispatch("default"))
    workflow(tmp_path, "child", "running", parent="top")
    with open_reader(tmp_path) as reader:
        feed, child = EventFeed(reader, "top"), EventFeed(reader, "child")
        found, ending = feed.next_batch()
        assert (len(found), ending) == (1 + len(entries), None)
        assert child.next_batch()[1] is None
        add(tmp_path, "top", ends("success"), status="success")
        assert feed.next_batch()[1] is Ending.COMPLETED
        assert child.next_batch()[1] is Ending.NOT_FINISHED


def test_ctrl_c_ends_following(tmp_path: Path) -> None:
    with active_run(tmp_path):
        follower = following(tmp_path)
        assert follower.stdout is not None
        follower.stdout.readline()
        follower.send_signal(signal.SIGINT)
        _, message = follower.communicate(timeout=60)
    assert follower.returncode == 130
    assert message.splitlines()[-1] == "maestro: interrupted"
    assert "Traceback" not in message


def test_a_reader_that_leaves_is_no_trouble(tmp_path: Path) -> None:
    with active_run(tmp_path, of_workflow=True) as process:
        follower = following(tmp_path)
        follower.stdout.readline()
        follower.stdout.close()
        process.finish("success")
        _, errors = follower.communicate(timeout=60)
    assert "Traceback" not in errors


# --- wrong use -----------------------------------------------------------------------------------


def test_wrong_use_is_one_sentence(tmp_path: Path) -> None:
    executed(tmp_path)
    assert "Did you mean 'run-1'?" in complaint(
        maestro("events", "run-2", "--store", tmp_path), code=2
    )
    complaint(maestro("events", RUN, "--after", "x", "--store", tmp_path), code=2)
    complaint(maestro("events", "--store", tmp_path), code=2)
