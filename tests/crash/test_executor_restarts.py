"""Level 1 started, killed with ``kill -9``, started again: what was done is done, once."""

from __future__ import annotations

import signal
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

from faults.child_processes import PERSONA, ChildProcesses, ObservedRun
from tests.timing import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(scope="module")
def children() -> Iterator[ChildProcesses]:
    with ChildProcesses("tests.crash.executor_workflows") as children:
        yield children


@pytest.fixture
def observed(tmp_path: Path) -> ObservedRun:
    """The folder that all processes of a test share."""
    return ObservedRun(tmp_path, {})


# --- finished steps, half-done waits, what a persona knows ---------------------------------------


@pytest.mark.parametrize("hang_in, done", [("plan", 0), ("build", 1), ("check", 2)])
def test_a_finished_step_is_not_called_again_after_kill(
    children: ChildProcesses, observed: ObservedRun, hang_in: str, done: int
) -> None:
    first = children.start("three_steps", observed.folder, hang_in=hang_in)
    first.wait_for_report("hangs")
    first.kill()
    assert first.end() == -signal.SIGKILL
    end = children.run("three_steps", observed.folder)
    names = ["plan", "build", "check"]
    assert end["outputs"] == [f"{name} is done" for name in names]
    assert observed.starts() == [*names[: done + 1], *names[done:]]
    assert (end["completed"], end["pending"]) == (names, [])
    assert end["retries"] == {PERSONA: 1}
    assert end["persona"]["status"] == "success"


def test_a_finished_run_calls_nothing_at_all(
    children: ChildProcesses, observed: ObservedRun
) -> None:
    first = children.run("three_steps", observed.folder)
    assert children.run("three_steps", observed.folder) == first
    assert observed.starts() == ["plan", "build", "check"]


def test_after_a_kill_in_a_backoff_only_the_rest_of_it_is_waited(
    children: ChildProcesses, observed: ObservedRun
) -> None:
    delay = 2.5
    kill_in_backoff(children, observed, delay)
    time.sleep(2.0)
    again = children.start("backing_off", observed.folder, delay=delay)
    end = again.finish()
    before, after = observed.start_times()
    assert delay <= after - before
    assert after - again.reports()[0]["up"] < delay, "it waited all over again"
    assert (end["output"]["attempt"], end["attempts"]) == (2, 2)
    assert "not yet" in end["output"]["feedback"][0]
    assert end["retries"] == {PERSONA: 1}


def test_a_wait_that_ended_between_two_processes_is_not_waited_again(
    children: ChildProcesses, observed: ObservedRun
) -> None:
    delay = 2.0
    kill_in_backoff(children, observed, delay)
    time.sleep(delay)
    again = children.start("backing_off", observed.folder, delay=delay)
    assert again.finish()["attempts"] == 2
    assert observed.start_times()[1] - again.reports()[0]["up"] < delay


def kill_in_backoff(children: ChildProcesses, observed: ObservedRun, delay: float) -> None:
    """Start it, and kill it as soon as its failure is recorded."""
    first = children.start("backing_off", observed.folder, delay=delay)
    first.wait_for_report("fails")
    wait_until(lambda: any(step.failures for step in observed.journal().steps.values()))
    first.kill()
    assert first.end() == -signal.SIGKILL


def test_memory_history_progress_and_tokens_survive_a_kill(
    children: ChildProcesses, observed: ObservedRun
) -> None:
    assert children.start("remembering", observed.folder).end() == -signal.SIGKILL
    end = children.run("remembering", observed.folder)
    found = end["output"]
    memory = {"language": "Python", "style": {"names": ["nouns", "promises"]}, "half": "done"}
    history = [{"asked": "first"}, {"asked": "second"}]
    assert found["attempt"] == 2
    assert found["memory"] == memory
    assert found["history"] == history
    assert found["progress"] == {
        "current_step": "half",
        "files_created": ["a.py"],
        "state_data": {"line": 7},
    }
    assert (end["tokens"], end["spent"]) == (140, 40)
    assert end["completed"] == ["first", "second"]
    shown = end["persona"]
    assert (shown["memory"], shown["history"]) == (memory, history)
    assert (shown["tokens_used"], shown["current_attempt"]) == (140, 2)


def test_steps_at_once_do_not_overwrite_each_others_memory(
    children: ChildProcesses, observed: ObservedRun
) -> None:
    shown = children.run("remembering_at_once", observed.folder)["persona"]
    assert sorted(shown["history"]) == ["a", "b", "c"]
    assert sorted(shown["memory"]) == ["a", "b", "c"]


# --- limits that no kill can stretch -------------------------------------------------------------


def restart_until_it_ends(
    children: ChildProcesses, observed: ObservedRun, **options: Any
) -> dict[str, Any]:
    """Start it again for as long as it is killed; return the last thing it said."""
    for _ in range(20):
        process = children.start("scripted", observed.folder, **options)
        if process.end() != -signal.SIGKILL:
            return process.reports()[-1]
    raise AssertionError("it never came to an end")


def test_a_body_that_fails_and_dies_in_turn_has_exactly_its_attempts(
    children: ChildProcesses, observed: ObservedRun
) -> None:
    script = ["fail", "die", "die", "fail", "fail"]
    end = restart_until_it_ends(children, observed, script=script)
    assert len(observed.starts()) == 5
    statuses = ["retrying", "interrupted", "interrupted", "retrying", "failed"]
    assert end["attempts"] == statuses
    assert "Level 1 retries exhausted for scripted" in end["error"]
    report = end["report"]
    assert (report["failed_persona"], report["attempt_number"]) == (PERSONA, 5)
    assert [status in line for status, line in zip(statuses, report["context"], strict=True)] == (
        [True] * 5
    )
    assert [f"failure of start {n}" in report["context"][n - 1] for n in (1, 4, 5)] == [True] * 3
    assert end["pending"] == ["scripted"]

    again = children.run("scripted", observed.folder, script=script)
    assert len(observed.starts()) == 5, "it was called once more"
    assert again["attempts"] == statuses
    assert again["report"]["context"] == report["context"]


def test_a_body_that_always_dies_is_interrupted_until_a_retry_is_requested(
    children: ChildProcesses, observed: ObservedRun
) -> None:
    script = ["die"] * 8 + ["succeed"]
    end = restart_until_it_ends(children, observed, script=script)
    assert len(observed.starts()) == 1 + 5
    assert end["status"] == "interrupted"
    assert "is interrupted" in end["error"]
    assert end["attempts"] == ["interrupted"] * 6, "nothing runs any more"
    assert children.run("scripted", observed.folder, script=script)["status"] == "interrupted"
    assert len(observed.starts()) == 6

    process = children.start("scripted", observed.folder, script=script, retry=True)
    assert process.end() == -signal.SIGKILL
    end = restart_until_it_ends(children, observed, script=script)
    assert end["output"] == "done at start 9"
    assert end["completed"] == ["scripted"]


def test_a_step_that_failed_before_it_was_interrupted_can_be_retried(
    children: ChildProcesses, observed: ObservedRun
) -> None:
    script = ["fail"] + ["die"] * 6 + ["succeed"]
    end = restart_until_it_ends(children, observed, script=script)
    assert (end["status"], len(observed.starts())) == ("interrupted", 7)
    end = children.run("scripted", observed.folder, script=script, retry=True)
    assert end["output"] == "done at start 8"


def test_a_step_that_was_given_up_has_new_attempts_after_a_retry(
    children: ChildProcesses, observed: ObservedRun
) -> None:
    script = ["fail", "fail", "die", "fail", "fail", "fail", "succeed"]
    end = restart_until_it_ends(children, observed, script=script)
    assert (end["status"], len(observed.starts())) == ("failed", 4)
    end = children.run("scripted", observed.folder, script=script, retry=True)
    assert (end["output"], len(observed.starts())) == ("done at start 7", 7)


# --- code that changes between restarts ----------------------------------------------------------


def test_of_code_that_changed_only_what_must_is_run_again(
    children: ChildProcesses, observed: ObservedRun
) -> None:
    first = [["fetch", "A"], ["old", "x"], ["parse", "<fetch"], ["report", "<parse"]]
    process = children.start("changing", observed.folder, steps=first, dies_in="report")
    assert process.end() == -signal.SIGKILL
    assert observed.starts() == ["fetch", "old", "parse", "report"]

    added_removed_and_reordered = [
        ["greet", "new"],
        ["fetch", "A"],
        ["parse", "<fetch"],
        ["report", "<parse"],
    ]
    children.run("changing", observed.folder, steps=added_removed_and_reordered)
    assert observed.starts()[4:] == ["greet", "report"]

    another_input_with_the_same_result = [
        ["parse", "fetch(a)"],
        ["fetch", " a "],
        ["report", "<parse"],
        ["parse", "<fetch"],
    ]
    children.run("changing", observed.folder, steps=another_input_with_the_same_result)
    assert observed.starts()[6:] == ["fetch"]

    another_input = [["fetch", "B"], ["parse", "<fetch"], ["report", "<parse"]]
    end = children.run("changing", observed.folder, steps=another_input)
    assert observed.starts()[7:] == ["fetch", "parse", "report"]
    assert end["outputs"]["report"] == "report(parse(fetch(b)))"

    children.run("changing", observed.folder, steps=first)
    assert Counter(observed.starts()) == {"fetch": 3, "old": 1, "parse": 2, "report": 3, "greet": 1}


# --- a polite stop -------------------------------------------------------------------------------


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("kind", ["async", "sync"])
def test_a_graceful_stop_spends_neither_an_attempt_nor_an_interruption(
    children: ChildProcesses, observed: ObservedRun, kind: str, how: signal.Signals
) -> None:
    for _ in range(2):
        process = children.start("stopped", observed.folder, kind=kind)
        process.wait_for_report("started")
        asked = time.monotonic()
        process.kill(how)
        assert process.end() == 128 + how
        assert time.monotonic() - asked < 30, "it slept to its end"
    end = children.run("stopped", observed.folder, kind=kind, quick=True)
    assert (end["output"], end["attempts"]) == ("rested", ["cancelled", "cancelled", "success"])
    assert len(observed.starts()) == 3
