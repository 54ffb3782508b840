"""``maestro show``."""

from __future__ import annotations

import asyncio
import contextlib
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import pytest

from maestro_hive.engine.context import current
from maestro_hive.maestro.state.records import EntryKind, NewDispatch
from maestro_hive.unified_execution import PersonaExecutor, UnrecoverableError
from tests.cli.processes import answer, complaint, copy_of, in_terminal, maestro
from tests.cli.sample_runs import (
    RUN,
    Page,
    active_run,
    asks,
    child_ends,
    ends,
    entry,
    executed,
    never_works,
    quick,
    sleeps,
    starts,
    workflow,
)

if TYPE_CHECKING:
    from pathlib import Path


def shown(folder: Path, *words: str) -> Any:
    """Return what ``--json`` gives for a run, or for a step of it."""
    given = answer(maestro("show", *words, "--json", "--store", folder))
    assert given.pop("store") == str(folder)
    (facts,) = given.values()
    return facts


def text(folder: Path, *words: str) -> str:
    done = maestro("show", *words, "--store", folder)
    assert done.returncode == 0, done.stderr
    return done.stdout


# --- runs ----------------------------------------------------------------------------------------


def test_a_run_shows_its_steps_and_personas(tmp_path: Path) -> None:
    run = shown(executed(tmp_path), RUN)
    assert (run["run_id"], run["workflow"], run["holder"], run["error"]) == (RUN, None, None, None)
    done, given_up = run["steps"]
    assert datetime.fromisoformat(done.pop("started_at")).tzinfo is not None
    assert done.pop("took_seconds") > 0
    assert done == {
        "step": 1,
        "name": "implement",
        "label": "implement",
        "persona": "developer",
        "status": "success",
        "attempts": 2,
        "failures": 1,
        "interruptions": 0,
        "tokens": 2400,
        "last_error": "TimeoutError: too slow",
        "running_threads": [],
        "permits_held_by": [],
    }
    assert (given_up["name"], given_up["status"], given_up["failures"]) == ("review", "failed", 3)
    assert run["personas"] == [
        {"persona": "developer", "tokens": 2400, "usd": 0.5, "history_items": 2}
    ]


def test_steps_are_lines_that_can_be_cut(tmp_path: Path) -> None:
    lines = [line.split("\t") for line in text(executed(tmp_path), RUN).splitlines()]
    (review,) = [line for line in lines if line[1:2] == ["review"]]
    assert review[:8] == ["2", "review", "developer", "failed", "3", "3", "0", "0"]
    assert review[9] == "ValueError: no\\nway"
    assert ["status:        failed"] in lines


def test_a_failed_run_shows_its_error_and_how_to_try_again(tmp_path: Path) -> None:
    error = {"type": "KeyError", "message": "'x'", "traceback": "Traceback\n  File 'a.py'\n"}
    workflow(tmp_path, "bad", "failed", ends("failed", error=error))
    shown_text = text(tmp_path, "bad")
    assert "workflow:      build" in shown_text
    assert "status:        failed" in shown_text
    assert "error:         KeyError: 'x'" in shown_text
    assert "    Traceback\n      File 'a.py'\n" in shown_text
    assert f"to retry: maestro retry bad --store {tmp_path}" in shown_text
    assert shown(tmp_path, "bad")["error"] == error


def test_a_finished_run_shows_what_it_was_given_and_gave(tmp_path: Path) -> None:
    workflow(tmp_path, "good", "success", ends("success", {"pages": 3}))
    run = shown(tmp_path, "good")
    assert (run["status"], run["result"]) == ("success", {"pages": 3})
    assert run["input"] == {"args": ["page"], "kwargs": {}}
    assert run["ended_at"] == run["updated_at"]
    shown_text = text(tmp_path, "good")
    assert "input\n  build('page')\n" in shown_text
    assert "result\n  {'pages': 3}\n" in shown_text


def test_values_are_shown_as_in_the_program_and_stored_ones_with_json(tmp_path: Path) -> None:
    result = {"page": Page("home"), "at": datetime(2030, 1, 2, tzinfo=UTC), "raw": (b"x", 1)}
    workflow(tmp_path, "good", "success", ends("success", result))
    assert (
        "result\n  {'page': Page(title='home'), 'at': 2030-01-02 00:00:00+00:00, 'raw': (b'x', 1)}\n"
    ) in text(tmp_path, "good")
    stored = shown(tmp_path, "good")["result"]
    assert stored["at"] == {"$": "datetime", "v": "2030-01-02T00:00:00+00:00"}


def test_steps_come_before_values(tmp_path: Path) -> None:
    step = {"step": 1, "attempt": 1}
    steps = [
        entry(EntryKind.ATTEMPT_STARTED, {"args": [], "kwargs": {}}, **step, name="draw"),
        entry(EntryKind.STEP_COMPLETED, "done", **step),
    ]
    workflow(tmp_path, "good", "success", *steps, starts("gone"), ends("success", 1))
    shown_text = text(tmp_path, "good")
    places = [shown_text.index(f"\n{part}\n") for part in ("steps", "children", "input", "result")]
    assert places == sorted(places)


def test_a_run_that_waits_shows_the_command_that_answers(tmp_path: Path) -> None:
    workflow(tmp_path, "asking", "waiting", asks("the plan"), asks("amount"))
    shown_text = text(tmp_path, "asking")
    assert "waiting for amount (anything) since " in shown_text
    assert f": maestro answer asking 'the plan' VALUE --store {tmp_path}\n" in shown_text
    assert f": maestro answer asking amount VALUE --store {tmp_path}\n" in shown_text
    chosen = maestro("show", "asking", MAESTRO_STATE_DIR=str(tmp_path))
    assert ": maestro answer asking amount VALUE\n" in chosen.stdout


@pytest.mark.parametrize(
    "shape, words",
    [
        ({"type": "boolean"}, "yes or no"),
        ({"enum": ["red", "blue"]}, "one of: red, blue"),
        ({"type": "tomorrow"}, "of a kind that this version does not know"),
    ],
)
def test_which_kind_of_answer_is_expected_is_shown(
    tmp_path: Path, shape: dict[str, Any], words: str
) -> None:
    question = entry(EntryKind.WAIT_STARTED, name="go", what="answer", shape=shape)
    workflow(tmp_path, "asking", "waiting", question)
    assert f"waiting for go ({words}) since " in text(tmp_path, "asking")


def test_an_answer_in_the_inbox_is_shown(tmp_path: Path) -> None:
    workflow(tmp_path, "asking", "waiting", asks("approve"))
    assert maestro("answer", "asking", "approve", "yes", "--store", tmp_path).returncode == 0
    (wait,) = shown(tmp_path, "asking")["waits_for"]
    assert (wait["name"], wait["answered"]) == ("approve", True)
    assert "approve is answered" in text(tmp_path, "asking")


def test_an_active_run_shows_its_process_and_a_killed_one_that_it_is_stopped(
    tmp_path: Path,
) -> None:
    with active_run(tmp_path) as process:
        run = shown(tmp_path, RUN)
        assert (run["status"], run["holder"]["pid"]) == ("running", process.pid)
        assert [step["status"] for step in run["steps"]] == ["running"]
        assert f"executed by:   process {process.pid} on " in text(tmp_path, RUN)
        assert shown(tmp_path, RUN, "wait")["attempts"][0]["status"] == "running"
        process.kill()
    run = shown(tmp_path, RUN)
    (step,) = run["steps"]
    assert (step["status"], step["interruptions"]) == ("stopped", 1)
    assert shown(tmp_path, RUN, "wait")["attempts"][0]["status"] == "interrupted"


def test_children_forks_and_parents_are_shown(tmp_path: Path) -> None:
    workflow(tmp_path, "part", "success", ends("success"), name="part")
    started = entry(EntryKind.RUN_STARTED, workflow="build", parent="big", forked_from="old")
    children = [
        entry(EntryKind.CHILD_STARTED, run_id=name, workflow="part") for name in ("part", "gone")
    ]
    workflow(tmp_path, "whole", "success", started, *children, ends("success"))
    run = shown(tmp_path, "whole")
    assert (run["parent"], run["forked_from"]) == ("big", "old")
    done, gone = run["children"]
    assert done.pop("took_seconds") >= 0
    nothing: dict[str, Any] = {"waits_for": [], "error": None, "children": [], "hidden_children": 0}
    assert done == {"run_id": "part", "workflow": "part", "status": "success", **nothing}
    assert (gone["run_id"], gone["status"], gone["took_seconds"]) == ("gone", None, None)
    assert "gone\tpart\tpurged\t\t\twhole\n" in text(tmp_path, "whole")


def family(folder: Path) -> None:
    """Record a run with children: one waits, and one failed and has a child that sleeps."""
    workflow(folder, "top", "running", starts("a"), starts("b"), child_ends("b", "failed"))
    workflow(folder, "a", "waiting", asks("approve"), name="part", parent="top")
    error = {"type": "KeyError", "message": "'x'"}
    workflow(folder, "b", "failed", starts("b1"), ends("failed", error=error), parent="top")
    workflow(folder, "b1", "running", sleeps(3600), name="part", parent="b")


def test_children_are_shown_under_their_parent_with_what_they_wait_for(tmp_path: Path) -> None:
    family(tmp_path)
    a, b = shown(tmp_path, "top")["children"]
    assert (a["run_id"], a["status"], a["waits_for"]) == ("a", "waiting", ["approve"])
    assert (b["status"], b["error"]) == ("failed", "KeyError: 'x'")
    assert [(each["run_id"], each["waits_for"]) for each in b["children"]] == [("b1", ["sleep"])]
    rows = [line.split("\t") for line in text(tmp_path, "top").splitlines()]
    assert [[row[0], row[2], *row[4:]] for row in rows if len(row) == 6] == [
        ["a", "waiting", "approve", "top"],
        ["b", "failed", "KeyError: 'x'", "top"],
        ["b1", "stopped", "sleep", "b"],
    ]
    seen = in_terminal("show", "top", "--store", tmp_path, columns=100, NO_COLOR="1").text
    table = seen.partition("children\n")[2].splitlines()
    assert [line.split("part")[0].split("build")[0].rstrip() for line in table[1:4]] == [
        "a",
        "b",
        "  b1",
    ]


def test_of_many_children_the_unfinished_and_the_last_are_shown(tmp_path: Path) -> None:
    names = [f"part-{number}" for number in range(120)]
    entries = [part for name in names for part in (starts(name), child_ends(name, "success"))]
    del entries[7]  # the end of one
    workflow(tmp_path, "whole", "running", *entries)
    children = [child["run_id"] for child in shown(tmp_path, "whole")["children"]]
    assert children == ["part-3", *names[71:]]
    assert shown(tmp_path, "whole")["hidden_children"] == 70
    assert "… and 70 children more: --all" in maestro("show", "whole", "--store", tmp_path).stderr
    assert len(shown(tmp_path, "whole", "--all")["children"]) == 120


def test_a_run_that_is_recorded_as_its_own_child_is_shown_once(tmp_path: Path) -> None:
    workflow(tmp_path, "a", "running", starts("b"), starts("a"))
    workflow(tmp_path, "b", "running", starts("a"))
    (child,) = shown(tmp_path, "a", "--all")["children"]
    assert (child["run_id"], child["children"]) == ("b", [])


def test_a_run_that_sleeps_shows_until_when(tmp_path: Path) -> None:
    workflow(tmp_path, "tired", "running", sleeps(3600))
    (timer,) = shown(tmp_path, "tired")["timers"]
    since, until = (datetime.fromisoformat(timer[key]) for key in ("since", "until"))
    assert (timer["what"], (until - since).total_seconds()) == ("sleep", 3600)
    assert f"sleeping, until {timer['until']}" in text(tmp_path, "tired")


def test_a_run_of_workers_shows_its_queue_and_what_it_waits_for(tmp_path: Path) -> None:
    workflow(tmp_path, "now", "pending", dispatch=NewDispatch("mail", 3, 0.0, "v2"))
    workflow(tmp_path, "later", "pending", dispatch=NewDispatch(due=3600.0))
    workflow(tmp_path, "held", "pending", dispatch=NewDispatch(due=None))
    run = shown(tmp_path, "now")["dispatch"]
    assert (run["queue"], run["state"], run["priority"], run["version"]) == (
        "mail",
        "ready",
        3,
        "v2",
    )
    assert "queue:         mail, ready since " in text(tmp_path, "now")
    assert ", priority 3, for version v2\n" in text(tmp_path, "now")
    assert "queue:         default, due 20" in text(tmp_path, "later")
    assert "queue:         default, held until it is woken" in text(tmp_path, "held")


def test_a_suspended_run_of_workers_shows_the_one_next_action(tmp_path: Path) -> None:
    error = {"type": "UnrecoverableError", "message": "no"}
    suspended = entry(EntryKind.RUN_SUSPENDED, error=error)._replace(identity=None)
    held = NewDispatch(due=None)
    workflow(tmp_path, "given-up", "running", suspended, dispatch=held)
    seen = text(tmp_path, "given-up")
    assert "held until a person decides" in seen
    again = f"maestro retry given-up --store {tmp_path}"
    assert f"no process executes it: have a worker try it again by {again}\n" in seen
    assert "when it is due" not in seen
    ambiguous = entry(EntryKind.ATTEMPT_STARTED, step=1, attempt=1, name="pay")
    asked = entry(EntryKind.ATTEMPT_FAILED, step=1, attempt=1, ambiguous=True, asked=True)
    workflow(tmp_path, "unclear", "running", ambiguous, asked, suspended, dispatch=held)
    seen = text(tmp_path, "unclear")
    assert "pay may have had its effect" in seen
    assert "not finished" not in seen
    workflow(tmp_path, "asks", "waiting", asks(), dispatch=held)
    assert "held until it is answered" in text(tmp_path, "asks")
    maestro("answer", "asks", "approve", "yes", "--store", tmp_path)
    assert "is answered: the run continues when a worker takes it" in text(tmp_path, "asks")


def test_a_child_that_nobody_executes_is_resumed_with_its_parent(tmp_path: Path) -> None:
    workflow(tmp_path, "child", "running", parent="top")
    workflow(tmp_path, "asking", "waiting", asks(), parent="top")
    again = f"it is resumed with its parent, see maestro show top --store {tmp_path}"
    assert again in text(tmp_path, "child")
    maestro("answer", "asking", "approve", "yes", "--store", tmp_path)
    assert "the run continues with its parent, run top" in text(tmp_path, "asking")


def test_a_value_of_a_class_that_only_its_program_knows_is_shown_as_json(tmp_path: Path) -> None:
    async def page() -> Page:
        current().memory["page"] = Page("home")
        return Page("home")

    with PersonaExecutor(quick(tmp_path), "developer", workflow_id=RUN) as executor:
        asyncio.run(executor.execute(page, "draw"))
        assert executor.state_persistence is not None
        executor.state_persistence.mark_task_completed("drawn", {"page": Page("home")})
    step = shown(tmp_path, RUN, "draw")
    assert step["output"]["v"] == {"title": "home"}
    assert step["memory"]["page"]["v"] == {"title": "home"}
    assert maestro("events", RUN, "--store", tmp_path).returncode == 0


# --- long runs -----------------------------------------------------------------------------------


@pytest.fixture
def long(tmp_path: Path) -> Path:
    """Return a folder with a run of 2,000 steps, of which one failed early."""
    return copy_of(_long_run, tmp_path)


def _long_run(folder: Path) -> None:
    facts: dict[str, Any] = {"name": "step", "persona": "developer"}
    entries = []
    for number in range(1, 2_001):
        at = {"step": number, "attempt": 1}
        entries.append(entry(EntryKind.ATTEMPT_STARTED, {"args": [number]}, **at, **facts))
        if number == 7:
            failed = {"status": "failed", "error": {"type": "E", "message": "no"}}
            entries.append(entry(EntryKind.ATTEMPT_FAILED, **at, **failed))
        else:
            entries.append(entry(EntryKind.STEP_COMPLETED, {"n": number}, **at))
    workflow(folder, "long", "success", *entries, ends("success"))


def test_of_a_long_run_the_last_steps_are_shown_and_those_not_completed(long: Path) -> None:
    assert shown(long, "long")["total_steps"] == 2_000
    started = time.process_time()
    done = maestro("show", "long", "--store", long)
    took = time.process_time() - started
    numbers = [line.split("\t")[0] for line in done.stdout.splitlines() if "\tdeveloper\t" in line]
    assert numbers == ["7", *map(str, range(1_951, 2_001))]
    assert "… and 1,949 completed steps more: --all" in done.stderr
    assert took < 0.6
    assert len(shown(long, "long")["steps"]) == 51
    assert len(shown(long, "long", "--all")["steps"]) == 2_000


def test_steps_of_one_name_are_numbered_in_their_order(long: Path) -> None:
    for words in (["1999"], ["step#1999"]):
        step = shown(long, "long", *words)
        assert (step["step"], step["label"], step["output"]) == (1999, "step#1999", {"n": 1999})
    assert shown(long, "long", "step")["step"] == 1


# --- steps ---------------------------------------------------------------------------------------


def test_a_step_shows_its_attempts_and_all_that_belongs_to_it(tmp_path: Path) -> None:
    step = shown(executed(tmp_path), RUN, "implement")
    first, second = step["attempts"]
    assert (first["attempt"], first["status"], first["tokens"]) == (1, "retrying", 1200)
    assert first["error"]["type"] == "TimeoutError"
    assert 'raise TimeoutError("too slow")' in first["error"]["traceback"]
    assert first["retry_in"] == 0.001
    assert (second["status"], second["error"]) == ("success", None)
    assert first["started_at"] < first["ended_at"] <= second["started_at"] < second["ended_at"]
    assert step["input"] == {"args": ["page"], "kwargs": {}}
    assert step["output"] == {"made": "page"}
    assert step["progress"] == {"current_step": 2}
    assert step["memory"] == {"tried": 2}
    assert step["history"] == [{"attempt": 1}, {"attempt": 2}]
    assert step["feedback"] == []  # nothing comes after it


def test_a_step_is_printed_with_its_tracebacks(tmp_path: Path) -> None:
    shown_text = text(executed(tmp_path), RUN, "implement")
    assert "step 1 implement of run run-1\n" in shown_text
    assert "\nattempt 1: failed, started " in shown_text
    assert (
        ", 1,200 tokens, retried after 1 ms\n  TimeoutError: too slow\n    Traceback" in shown_text
    )
    assert "input\n  implement('page')\n" in shown_text
    assert "output\n  {'made': 'page'}\n" in shown_text
    assert "memory of developer\n  {'tried': 2}\n" in shown_text
    assert "history of developer (2 items)\n" in shown_text


def test_feedback_is_what_the_next_attempt_is_given(tmp_path: Path) -> None:
    received: list[list[str]] = []
    started = asyncio.Event()

    async def fails_twice() -> None:
        if current().attempt < 3:
            raise ValueError(f"no {current().attempt}")
        started.set()
        await asyncio.Event().wait()

    async def look() -> None:
        received.append(list(current().feedback))

    async def stop_in_the_third_attempt() -> None:
        with PersonaExecutor(quick(tmp_path), "developer", workflow_id=RUN) as executor:
            work = asyncio.create_task(executor.execute(fails_twice, "review"))
            await started.wait()
            work.cancel()
            await asyncio.wait([work])

    asyncio.run(stop_in_the_third_attempt())
    step = shown(tmp_path, RUN, "review")
    assert [attempt["status"] for attempt in step["attempts"]] == [
        "retrying",
        "retrying",
        "cancelled",
    ]
    assert len(step["feedback"]) == 2
    assert f"feedback for the next attempt\n  {step['feedback'][0]}\n" in text(
        tmp_path, RUN, "review"
    )
    with PersonaExecutor(quick(tmp_path), "developer", workflow_id=RUN) as executor:
        asyncio.run(executor.execute(look, "review"))
    assert received == [step["feedback"]]


def test_after_a_retry_the_attempts_before_it_are_still_shown(tmp_path: Path) -> None:
    executed(tmp_path)
    with (
        PersonaExecutor(quick(tmp_path), "developer", workflow_id=RUN) as executor,
        contextlib.suppress(UnrecoverableError),
    ):
        asyncio.run(executor.options(retry=True).execute(never_works, "review"))
    step = shown(tmp_path, RUN, "review")
    assert [attempt["attempt"] for attempt in step["attempts"]] == [1, 2, 3, 4, 5, 6]
    assert step["failures"] == 3


def test_a_long_value_is_cut_for_people_only(tmp_path: Path) -> None:
    async def long_text() -> str:
        return "x" * 50_000

    with PersonaExecutor(quick(tmp_path), "developer", workflow_id=RUN) as executor:
        asyncio.run(executor.execute(long_text, "write"))
    assert len(shown(tmp_path, RUN, "write")["output"]) == 50_000
    shown_text = text(tmp_path, RUN, "write")
    assert "xxx… (--json shows all)" in shown_text
    assert len(shown_text) < 4000


# --- wrong use -----------------------------------------------------------------------------------


def test_a_mistyped_run_is_an_error_with_similar_ones(tmp_path: Path) -> None:
    for name in ("checkout-42", "checkout-43", "deploy"):
        workflow(tmp_path, name, "success")
    message = complaint(maestro("show", "chekout-42", "--store", tmp_path), code=2)
    assert "There is no run 'chekout-42'" in message
    assert "Did you mean 'checkout-42' or 'checkout-43'?" in message
    assert "'deploy'" in complaint(maestro("show", "dep", "--store", tmp_path), code=2)
    assert "'maestro runs' lists them" in complaint(
        maestro("show", "x", "--store", tmp_path), code=2
    )


def test_a_mistyped_step_is_an_error_with_similar_ones(tmp_path: Path) -> None:
    executed(tmp_path)
    message = complaint(maestro("show", RUN, "implemnt", "--store", tmp_path), code=2)
    assert "has no step 'implemnt'; did you mean implement?" in message
    assert "implement, review" in complaint(maestro("show", RUN, "9", "--store", tmp_path), code=2)


def test_showing_creates_nothing(tmp_path: Path) -> None:
    complaint(maestro("show", "x", "--store", tmp_path / "nothing"))
    assert not (tmp_path / "nothing").exists()


# --- terminals -----------------------------------------------------------------------------------


def test_a_terminal_shows_a_table_that_fits(tmp_path: Path) -> None:
    seen = in_terminal("show", RUN, "--store", executed(tmp_path), columns=100, NO_COLOR="1")
    assert seen.returncode == 0
    (line,) = [line for line in seen.text.splitlines() if line.split()[1:2] == ["review"]]
    assert line.split()[:4] == ["2", "review", "developer", "failed"]
    assert "3 (3 failed)" in line
    assert "\x1b" not in seen.text.replace("\x1b[2m", "").replace("\x1b[0m", "")


def test_text_of_a_task_cannot_control_a_terminal(tmp_path: Path) -> None:
    async def evil() -> None:
        raise ValueError("\x1b]0;gotcha\x07")

    with (
        PersonaExecutor(quick(tmp_path), "developer", workflow_id=RUN) as executor,
        contextlib.suppress(UnrecoverableError),
    ):
        asyncio.run(executor.execute(evil, "evil"))
    for words in (["show", RUN], ["show", RUN, "evil"], ["events", RUN]):
        seen = in_terminal(*words, "--store", tmp_path, NO_COLOR="1")
        assert "gotcha" in seen.text
        assert "\x1b]0;" not in seen.text
