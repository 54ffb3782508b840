"""``maestro events``."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from typing import TYPE_CHECKING, Any

import pytest

from maestro_hive.maestro.state.records import EntryKind
from tests.cli.processes import COMMAND, complaint, environment, in_terminal, maestro
from tests.cli.sample_runs import RUN, active_run, asks, ends, entry, execute, executed, workflow

if TYPE_CHECKING:
    from pathlib import Path


def events_in(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def following(folder: Path, run: str = RUN) -> subprocess.Popen[str]:
    """Start to follow a run."""
    return subprocess.Popen(
        [*COMMAND, "events", run, "--follow", "--json", "--store", str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
    )


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
        rest, _ = follower.communicate(timeout=20)
    (ended,) = events_in(rest)
    assert (ended["event"], ended["status"]) == ("run_ended", "failed")
    assert follower.returncode == 1


def test_following_ends_when_the_process_is_killed(tmp_path: Path) -> None:
    with active_run(tmp_path) as process:
        follower = following(tmp_path)
        assert follower.stdout is not None
        follower.stdout.readline()
        process.kill()
        _, message = follower.communicate(timeout=20)
    assert follower.returncode == 1
    assert "is not finished, and no process executes it" in message


def test_ctrl_c_ends_following(tmp_path: Path) -> None:
    with active_run(tmp_path):
        follower = following(tmp_path)
        assert follower.stdout is not None
        follower.stdout.readline()
        follower.send_signal(signal.SIGINT)
        _, message = follower.communicate(timeout=20)
    assert follower.returncode == 130
    assert message.splitlines()[-1] == "maestro: interrupted"
    assert "Traceback" not in message


def test_a_reader_that_leaves_is_no_trouble(tmp_path: Path) -> None:
    with active_run(tmp_path, of_workflow=True) as process:
        follower = following(tmp_path)
        assert follower.stdout is not None
        assert follower.stderr is not None
        follower.stdout.readline()
        follower.stdout.close()
        process.finish("success")
        assert "Traceback" not in follower.stderr.read()
        follower.stderr.close()
        follower.wait(timeout=20)


# --- wrong use -----------------------------------------------------------------------------------


def test_wrong_use_is_one_sentence(tmp_path: Path) -> None:
    executed(tmp_path)
    assert "Did you mean 'run-1'?" in complaint(
        maestro("events", "run-2", "--store", tmp_path), code=2
    )
    complaint(maestro("events", RUN, "--after", "x", "--store", tmp_path), code=2)
    complaint(maestro("events", "--store", tmp_path), code=2)
