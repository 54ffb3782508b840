"""``maestro run GRAPH``, ``resume``, ``stop``, ``status`` and ``retry`` of task graphs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any

import pytest

from faults.team_kills import guards_of, is_alive
from maestro_hive.cli import command, output
from tests.cli.processes import (
    COMMAND,
    answer,
    complaint,
    environment,
    maestro,
    start_maestro,
)
from tests.python_processes import PythonProcess, suspend
from tests.team.conftest import SHELL, task

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.cli.processes import Done

_SECONDS = 60.0


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a state folder that verbs find."""
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    return work


def write(folder: Path, *tasks: dict[str, Any], **more: Any) -> str:
    document = {"feature": "my shop", "persona": SHELL, "tasks": list(tasks), **more}
    (folder / "graph.json").write_text(json.dumps(document))
    return "graph.json"


def called(folder: Path, *words: str) -> Done:
    return maestro(*words, MAESTRO_STATE_DIR=str(folder.parent / "state"))


def started(folder: Path, *words: str) -> PythonProcess:
    state = str(folder.parent / "state")
    return start_maestro(*words, cwd=folder, MAESTRO_STATE_DIR=state)


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + _SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_dry_run_says_what_is_already_done(folder: Path) -> None:
    graph = write(folder, task("A", "true"), task("B", "test -f mended", after="A"), retry=1)
    run = ("run", graph, "--dry-run")
    assert "already done" not in called(folder, *run).stdout
    assert called(folder, "run", graph).returncode == command.FAILED
    assert "already done, by my-shop: 1 of 2 tasks: A\n" in called(folder, *run).stdout
    assert answer(called(folder, *run, "--json"))["reused"] == {"source": "my-shop", "tasks": ["A"]}
    assert "already done" not in called(folder, *run, "--force").stdout
    write(folder, task("A", "echo another"), task("B", "true", after="A"))
    assert "already done, by my-shop: 0 of 2 tasks\n" in called(folder, *run).stdout


def test_a_dry_run_executes_a_task_with_a_shorter_description_again(folder: Path) -> None:
    graph = write(folder, task("A", "true", context="as it was\nand more"))
    assert called(folder, "run", graph).returncode == command.SUCCESS
    write(folder, task("A", "true", context="as it was"))
    dry = called(folder, "run", graph, "--dry-run").stdout
    assert "already done, by my-shop: 0 of 1 task\n" in dry
    assert "(1 executed, 0 reused)" in called(folder, "run", graph).stdout


def test_a_dry_run_says_what_the_run_with_the_same_options_does(folder: Path) -> None:
    graph = write(folder, task("A", "true"), persona=None)
    dry = ("run", graph, "--dry-run")
    persona = ("--persona", "sh -c true")
    assert "no-such-program" in called(folder, *dry, "--persona", "no-such-program x").stdout
    assert called(folder, "run", graph, *persona).returncode == command.SUCCESS
    assert "already done, by my-shop: 1 of 1 task: A\n" in called(folder, *dry, *persona).stdout
    another = called(folder, *dry, "--persona", "true")
    assert "already done, by my-shop: 0 of 1 task\n" in another.stdout
    assert "already done" not in called(folder, *dry, *persona, "--run-id", "other").stdout
    other = str(folder.parent / "other")
    assert "already done" not in called(folder, *dry, *persona, "--store", other).stdout
    assert called(folder, "run", graph, *persona, "--run-id", "mine").returncode == 0
    assert called(folder, "purge", "my-shop", "--yes").returncode == 0
    assert "already done" not in called(folder, *dry, *persona).stdout
    assert "(1 executed, 0 reused)" in called(folder, "run", graph, *persona).stdout


def test_a_persona_of_the_command_line_is_no_script_with_the_prompt_in_it(folder: Path) -> None:
    graph = write(folder, task("A", "touch executed"), persona=None)
    for more in ((), ("--dry-run",)):
        refused = called(folder, "run", graph, "--persona", "sh -c 'eval {prompt}'", *more)
        assert refused.returncode == command.WRONG_USE
        assert "{prompt} stands in the script of a shell" in refused.stderr
    assert not (folder / "executed").exists()


def test_force_with_the_id_of_a_run_that_exists_is_refused(folder: Path) -> None:
    graph = write(folder, task("A", "echo A >> done"))
    words = ("run", graph, "--run-id", "mine", "--force")
    assert called(folder, *words).returncode == command.SUCCESS
    for more in ((), ("--dry-run",)):
        refused = complaint(called(folder, *words, *more), command.WRONG_USE)
        assert "run 'mine' exists" in refused
        assert "another --run-id" in refused
        assert "maestro purge mine" in refused
    assert (folder / "done").read_text() == "A\n"


def test_what_is_complete_in_another_state_folder_is_not_executed_again_unasked(
    folder: Path,
) -> None:
    graph = write(folder, task("A", "echo A >> done"), retry=1)
    assert called(folder, "run", graph).returncode == command.SUCCESS
    other = {"MAESTRO_STATE_DIR": str(folder.parent / "other")}
    for words in (("run", graph), ("run", graph, "--dry-run"), ("resume",)):
        refused = complaint(maestro(*words, **other), command.WRONG_USE)
        assert "1 task of this graph is complete in run my-shop of another state folder" in refused
        assert f"--store {folder.parent / 'state'}" in refused
    assert (folder / "done").read_text() == "A\n"
    there = maestro("run", graph, "--store", str(folder.parent / "state"), **other)
    assert "(0 executed, 1 reused)" in there.stdout
    assert maestro("run", graph, "--force", **other).returncode == command.SUCCESS
    assert (folder / "done").read_text() == "A\nA\n"


def test_resume_takes_no_run_whose_graph_was_changed_since(folder: Path) -> None:
    def graph(text: str) -> str:
        return write(folder, task("A", f"echo {text} >> done; test -f go"), retry=1)

    assert called(folder, "run", graph("one")).returncode == command.FAILED
    (folder / "go").touch()
    assert called(folder, "run", graph("two")).returncode == command.SUCCESS
    refused = complaint(called(folder, "resume"), command.WRONG_USE)
    assert "my-shop-2, is complete" in refused
    assert "maestro resume my-shop" in refused
    assert (folder / "done").read_text() == "one\ntwo\n"
    assert called(folder, "status").stdout.startswith("run my-shop-2: success")
    (folder / "go").unlink()
    assert called(folder, "run", graph("three")).returncode == command.FAILED
    assert "to retry: maestro retry my-shop-3" in called(folder, "resume").stdout


def test_a_part_of_a_graph_is_said_to_be_one(folder: Path) -> None:
    graph = write(folder, task("A", "echo A >> done"), task("B"))
    assert called(folder, "run", graph).returncode == command.SUCCESS
    part = called(folder, "run", graph, "--only", "A")
    assert (
        "run my-shop-2 is for a part of the graph: what is unchanged since run my-shop stays complete"
        in part.stderr
    )
    whole = called(folder, "run", graph)
    assert "run my-shop-2 is for a part of the graph: run my-shop-3 goes on" in whole.stderr
    assert "(0 executed, 2 reused)" in whole.stdout
    write(folder, task("A", "echo A >> done"), task("B", "true"))
    assert "the graph has changed since run my-shop-3" in called(folder, "run", graph).stderr


def test_an_option_that_is_refused_makes_no_run(folder: Path) -> None:
    assert called(folder, "run", write(folder, task("A"))).returncode == command.SUCCESS
    graph = write(folder, task("A", "true"))
    for wrong in ("ftp://x", "no-such-program {message}"):
        refused = complaint(called(folder, "run", graph, "--notify", wrong), command.WRONG_USE)
        assert "--notify" in refused
    assert "my-shop-2" not in called(folder, "runs").stdout


def number_in(path: Path) -> int:
    wait_until(lambda: path.exists() and path.read_text().strip())
    return int(path.read_text())


def without_times(text: str) -> list[str]:
    """Return the lines that say what happened, without when and how long."""
    lines = [line[10:] if line[2:3] == ":" else line for line in text.splitlines()]
    return [line.partition(" in ")[0] if "complete in" in line else line for line in lines]


def test_a_graph_is_executed_and_each_thing_that_happens_is_a_line(folder: Path) -> None:
    graph = write(
        folder,
        task("A", "echo a > a", files=["a"], verification="test -f a"),
        task("B", 'test "$MAESTRO_ATTEMPT" = 2 || { echo not yet; exit 5; }', "A"),
    )
    done = called(folder, "run", graph, "--workers", "2")
    assert done.returncode == 0, done
    assert without_times(done.stdout) == [
        "A: started",
        "A: complete",
        "B: started",
        "B: attempt 1 failed: the persona's command ended with exit code 5: not yet",
        "B: started (attempt 2)",
        "B: complete",
        "my shop: 2 of 2 tasks complete (2 executed, 0 reused)",
        "retried: B",
    ]
    again = called(folder, "run", graph)
    assert again.stdout == "my shop: 2 of 2 tasks complete (0 executed, 2 reused)\n"
    shown = answer(called(folder, "status", "--json"))["run"]
    assert [(each["id"], each["status"]) for each in shown["tasks"]] == [
        ("A", "complete"),
        ("B", "complete"),
    ]
    assert called(folder, "logs", "my-shop", "A").stdout == "$ test -f a\n"
    forced = called(folder, "run", graph, "--force", "--only", "A")
    assert "1 of 1 task complete (1 executed, 0 reused)" in forced.stdout


def test_the_line_of_a_failed_verification_has_the_reason_first(folder: Path) -> None:
    check = f"{': ' * 100}; echo some; echo the reason; exit 1"
    graph = write(
        folder,
        task("A", verification=check),
        task("B", verification={"command": f"echo; {check.replace('1', '0')}", "expected": "none"}),
        retry=1,
    )
    lines = without_times(called(folder, "run", graph).stdout)
    (line,) = [each for each in lines if each.startswith("A: attempt 1 failed")]
    assert line.startswith(
        "A: attempt 1 failed: the reason; the verification ended with exit code 1: : : :"
    )
    (line,) = [each for each in lines if each.startswith("B: attempt 1 failed")]
    assert "its output does not contain what is expected" in line


def test_exit_codes_with_a_meaning_are_explained(folder: Path) -> None:
    graph = write(folder, task("FULL", "exit 2"), task("ASK", "exit 4"), retry=1)
    done = called(folder, "run", graph, "--no-wait")
    assert (
        "FULL: attempt 1 failed: the persona's command ended with exit code 2, which means a full"
        " context, and saved no new progress to the file that MAESTRO_PROGRESS names"
    ) in done.stdout
    assert (
        "ASK: waits for an answer to 'it ended with exit code 4, which means that it needs"
        " something, and printed no question'"
    ) in done.stdout


def test_failures_come_last_with_the_command_to_retry(folder: Path) -> None:
    graph = write(
        folder,
        task("BAD", "echo the reason; test -f mended"),
        task("AFTER", after="BAD"),
        task("GOOD"),
        retry=1,
    )
    done = called(folder, "run", graph)
    assert done.returncode == command.FAILED
    report = done.stdout[done.stdout.index("my shop: ") :]
    assert report == (
        "my shop: 1 of 3 tasks complete (1 executed, 0 reused)\n"
        "not started: AFTER (needs BAD)\n"
        "\n"
        "failed: BAD, after 1 attempt\n"
        "  CommandFailedError: the persona's command ended with exit code 1\n"
        "  the reason\n"
        "  its output: maestro logs my-shop BAD\n"
        "\n"
        "to retry: maestro retry my-shop && maestro resume my-shop\n"
    )
    rows = [line.split("\t")[1:3] for line in called(folder, "status").stdout.splitlines()[1:]]
    assert rows == [["BAD", "failed"], ["GOOD", "complete"], ["AFTER", "blocked"]]
    assert called(folder, "resume").returncode == command.FAILED  # before it is retried
    (folder / "mended").touch()
    retried = called(folder, "retry", "my-shop", "BAD")
    assert "it is resumed: maestro resume my-shop" in retried.stdout
    rows = [line.split("\t")[1:3] for line in called(folder, "status").stdout.splitlines()[1:]]
    assert rows == [["BAD", "pending"], ["GOOD", "complete"], ["AFTER", "pending"]]
    resumed = called(folder, "resume", "my-shop")
    assert (resumed.returncode, "(2 executed, 1 reused)" in resumed.stdout) == (0, True)


def test_tasks_that_failed_alike_are_reported_once(folder: Path) -> None:
    names = [f"TASK-{number:02}" for number in range(12)]
    same = [task(name, "echo the reason; test -f mended") for name in names]
    graph = write(folder, *same, task("OTHER", "exit 7"), retry=1)
    done = called(folder, "run", graph)
    assert done.returncode == command.FAILED
    report = done.stdout[done.stdout.index("my shop: ") :]
    named = ", ".join(names[:9])
    assert report == (
        "my shop: 0 of 13 tasks complete (0 executed, 0 reused)\n"
        "\n"
        f"failed: {named} and 3 more, each after 1 attempt\n"
        "  CommandFailedError: the persona's command ended with exit code 1\n"
        "  the reason\n"
        "  the output of TASK-00: maestro logs my-shop TASK-00\n"
        "\n"
        "failed: OTHER, after 1 attempt\n"
        "  CommandFailedError: the persona's command ended with exit code 7, and printed nothing\n"
        "  its output: maestro logs my-shop OTHER\n"
        "\n"
        "to retry: maestro retry my-shop && maestro resume my-shop\n"
    )


@pytest.mark.parametrize("failing", ["the gate", "a task before it"])
def test_what_waits_for_a_required_gate_that_failed_is_not_started(
    folder: Path, failing: str
) -> None:
    gates = [{"name": name, "command": "false", "required": True} for name in ("unit", "more")]
    task_fails = failing == "a task before it"
    graph = write(
        folder,
        task("A", "exit 1" if task_fails else "true"),
        task("B"),
        task("C", after="B"),
        task("D", after="C"),
        levels={
            "1": {"tasks": ["A", "B"], "gates": gates},
            "2": {"tasks": ["C"]},
            "3": {"tasks": ["D"], "gates": [{"name": "last", "command": "true"}]},
        },
        retry=1,
    )
    done = called(folder, "run", graph)
    assert done.returncode == command.FAILED
    assert "not started: C (needs gate:1:unit), D (needs gate:1:unit)\n" in done.stdout
    shown = answer(called(folder, "status", "--json"))["run"]["tasks"]
    cause = "A" if task_fails else "gate:1:unit"
    assert {each["id"]: each["blocked_by"] for each in shown if each["status"] == "blocked"} == {
        **({"gate:1:unit": cause} if task_fails else {}),
        "gate:1:more": cause,
        "C": "gate:1:unit",
        "D": "gate:1:unit",
        "gate:3:last": "gate:1:unit",
    }


def test_a_run_that_fails_by_no_task_says_why(folder: Path) -> None:
    graph = write(folder, task("A", "test -f mended"), retry=1)
    assert called(folder, "run", graph).returncode == command.FAILED
    unreadable = folder.parent / "state" / "runs" / "my-shop" / "processes" / "1"
    unreadable.mkdir()
    assert called(folder, "retry", "my-shop").returncode == 0
    failed = called(folder, "resume", "my-shop")
    assert failed.returncode == command.FAILED
    assert (
        f"run 'my-shop' failed: IsADirectoryError: [Errno 21] Is a directory: '{unreadable}'"
        in failed.stderr
    )
    assert "`maestro retry my-shop`" in failed.stderr
    unreadable.rmdir()
    (folder / "mended").touch()
    assert called(folder, "retry", "my-shop").returncode == 0
    assert called(folder, "resume", "my-shop").returncode == command.SUCCESS


def test_the_file_of_a_checkpoint_that_cannot_be_removed_suspends_the_run(folder: Path) -> None:
    graph = write(folder, task("A", "test -f mended"), retry=1)
    assert called(folder, "run", graph).returncode == command.FAILED
    unremovable = folder / ".mahabharatha" / "checkpoints" / "A.json"
    unremovable.mkdir(parents=True)
    assert called(folder, "retry", "my-shop").returncode == 0
    refused = called(folder, "resume", "my-shop")
    assert refused.returncode == command.FAILED
    said = f"{unremovable} cannot be used for the checkpoint of a worker: Is a directory; remove it"
    assert said in refused.stderr
    unremovable.rmdir()
    (folder / "mended").touch()
    assert called(folder, "resume", "my-shop").returncode == command.SUCCESS


def test_a_gate_that_is_not_required_and_failed_is_shown_as_not_passed(folder: Path) -> None:
    gate = {"name": "opt", "command": "echo the reason; exit 3", "required": False}
    must = {"name": "must", "command": "true", "required": True}
    levels = {"1": {"tasks": ["A"], "gates": [gate, must]}, "2": {"tasks": ["B"]}}
    more = {"levels": levels, "retry": 1}
    graph = write(folder, task("A"), task("B", "test -f mended", "A"), **more)
    logs = "its output: maestro logs my-shop gate:1:opt"
    reported = f"not passed, and not required: gate:1:opt; {logs}\n"
    reason = "gate 'opt' ended with exit code 3"
    done = called(folder, "run", graph)
    assert without_times(done.stdout)[:4] == [
        "A: started",
        "A: complete",
        "gate:1:opt: started",
        f"gate:1:opt: not passed, and not required: {reason}: the reason",
    ]
    assert reported in done.stdout
    assert "failed: B, after 1 attempt" in done.stdout
    (folder / "mended").touch()
    assert called(folder, "retry", "my-shop").returncode == command.SUCCESS
    resumed = called(folder, "resume")
    assert (resumed.returncode, reported in resumed.stdout) == (command.SUCCESS, True)
    assert "gate:1:opt: not passed" not in resumed.stdout  # it is not executed again
    shown = answer(called(folder, "status", "--json"))["run"]
    assert shown["status"] == "success"
    (found,) = [each for each in shown["tasks"] if each["id"] == "gate:1:opt"]
    assert (found["status"], found["error"], found["failures"]) == (
        "not_passed",
        f"{reason}\nthe reason",
        1,
    )
    assert "not passed" in called(folder, "status").stdout
    write(folder, task("A"), task("B", "true", "A"), **more)
    forked = called(folder, "run", graph)
    assert forked.returncode == command.SUCCESS
    assert "(1 executed, 1 reused)" in forked.stdout
    assert reported.replace("my-shop", "my-shop-2") in forked.stdout
    again = called(folder, "run", graph)
    assert reported.replace("my-shop", "my-shop-2") in again.stdout
    assert statuses(folder) == {"A": "complete", "B": "complete"}


def statuses(folder: Path) -> dict[str, str]:
    """Return the statuses of tasks in the state file."""
    found = json.loads((folder / ".mahabharatha" / "state.json").read_text())["tasks"]
    return {name: each["status"] for name, each in found.items()}


def test_what_waits_for_the_second_gate_of_a_level_waits_for_no_breaker(folder: Path) -> None:
    gates = [
        {"name": "first", "command": "true"},
        {"name": "second", "command": "until [ -e go ]; do sleep 0.05; done"},
    ]
    graph = write(
        folder,
        task("A"),
        task("B", persona="later"),
        levels={"1": {"tasks": ["A"], "gates": gates}, "2": {"tasks": ["B"]}},
        personas={"later": SHELL},
    )

    def status_of(name: str) -> str:
        tasks = answer(called(folder, "status", "my-shop", "--json"))["run"]["tasks"]
        return next(str(each["status"]) for each in tasks if each["id"] == name)

    with started(folder, "run", graph) as engine:
        wait_until(lambda: called(folder, "status", "my-shop").returncode == 0)
        wait_until(lambda: status_of("gate:1:second") == "running")
        assert called(folder, "breakers", "open", "later", "--new").returncode == 0
        assert status_of("gate:1:first") == "complete"
        assert status_of("B") == "pending"
        (folder / "go").touch()
        wait_until(lambda: status_of("B") == "parked")
        assert called(folder, "breakers", "reset", "later").returncode == 0
        engine.communicate(_SECONDS)
    assert engine.returncode == 0


def test_a_changed_graph_is_another_run_with_what_is_unchanged(folder: Path) -> None:
    write(folder, task("A"), task("B"))
    assert called(folder, "run", "graph.json").returncode == 0
    write(folder, task("A"), task("B", "true"))
    done = called(folder, "run", "graph.json")
    assert "run my-shop-2 goes on with what is unchanged" in done.stderr
    assert "2 of 2 tasks complete (1 executed, 1 reused)" in done.stdout


def test_a_run_id_of_another_graph_is_refused_in_two_lines(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(folder, task("A"))
    assert called(folder, "run", "graph.json").returncode == 0
    assert called(folder, "run", "graph.json", "--run-id", "mine").returncode == 0
    assert called(folder, "run", "graph.json", "--run-id", "mine").returncode == 0
    write(folder, task("A", "true"))
    refused = called(folder, "run", "graph.json", "--run-id", "mine")
    assert refused.returncode == command.WRONG_USE
    assert refused.stderr.splitlines()[-2:] == [
        "maestro: run mine is of another graph than this one.",
        "Leave --run-id out: run my-shop-2 is its run; or give another id.",
    ]
    refused = called(folder, "run", "graph.json", "--run-id", "my-shop")
    assert "run my-shop-2 goes on with what is unchanged; or" in refused.stderr
    (folder / "sub").mkdir()
    monkeypatch.chdir(folder / "sub")
    moved = called(folder, "run", "../graph.json", "--run-id", "mine")
    assert f"run mine was started in another folder, {folder}" in moved.stderr


def test_what_another_graph_has_replaced_is_executed_again_when_that_is_changed_back(
    folder: Path,
) -> None:
    """The files are those of the other graph, and its own gate has seen others."""

    def graph(text: str, does: str = ":") -> str:
        return write(
            folder,
            task("A", f"echo {text} > a; {does}", files=["a"]),
            task("B", "cp a b", "A", files=["b"]),
            task("C"),
            levels={
                "1": {
                    "tasks": ["A"],
                    "gates": [{"name": "check", "command": f"grep -qx {text} a"}],
                }
            },
            retry=1,
        )

    def run(text: str, does: str = ":") -> str:
        return called(folder, "run", graph(text, does)).stdout

    assert "3 of 3 tasks complete (3 executed" in run("one")
    assert "3 of 3 tasks complete (2 executed" in run("two")
    back = run("one")
    assert "3 of 3 tasks complete (2 executed, 1 reused)" in back
    assert "gate:1:check: complete" in back
    assert (folder / "a").read_text() == (folder / "b").read_text() == "one\n"
    assert "failed" in run("three", "false")
    assert "already done, by my-shop-4: 1 of 3 tasks: C\n" in (
        called(folder, "run", graph("one"), "--dry-run").stdout
    )
    assert "3 of 3 tasks complete (1 executed, 2 reused)" in run("one")
    assert (folder / "a").read_text() == (folder / "b").read_text() == "one\n"


def test_gates_above_the_first_level_are_those_of_the_changed_graph(folder: Path) -> None:
    def run(last: str, *, passes: bool = True) -> tuple[Done, dict[str, tuple[str, int]]]:
        gate = {"name": "check", "command": "true" if passes else "echo not yet; exit 1"}
        graph = write(
            folder,
            task("A"),
            task("B", after="A"),
            task("C", last, after="B"),
            levels={"2": {"tasks": ["B"], "gates": [gate]}},
            retry=1,
        )
        done = called(folder, "run", graph)
        shown = answer(called(folder, "status", "--json"))["run"]["tasks"]
        return done, {each["id"]: (each["status"], each["attempts"]) for each in shown}

    _, first = run("true")
    _, second = run("echo another")
    assert first == second == dict.fromkeys(("A", "B", "gate:2:check", "C"), ("complete", 1))
    failed, third = run("true", passes=False)
    assert third["gate:2:check"] == ("failed", 1)
    assert failed.returncode == command.FAILED
    assert "failed: gate:2:check, after 1 attempt" in failed.stdout
    assert "not yet" in failed.stdout


@pytest.mark.parametrize("how", ["run id", "resumed", "purged", "other store"])
def test_what_another_run_has_replaced_is_executed_again(folder: Path, how: str) -> None:
    """Which run was executed last is what the folder says, and not the number of a run."""
    other = str(folder.parent / "other")

    def run(text: str, *more: str, does: str = ":") -> str:
        a = task("A", f"echo {text} > a; {does}", files=["a"])
        b, c = task("B", "cp a b", "A", files=["b"]), task("C")
        graph = write(folder, a, b, c, retry=1)
        done = called(folder, "run", graph, *more)
        return done.stdout + done.stderr

    run("one", does="test -f go" if how == "resumed" else ":")
    match how:
        case "run id":
            run("two", "--run-id", "mine")
            refused = run("one", "--run-id", "my-shop")
            assert "run mine has executed A, B with another input in this folder" in refused
        case "resumed":
            run("two")
            (folder / "go").touch()
            called(folder, "retry", "my-shop")
            called(folder, "resume", "my-shop")
            assert (folder / "a").read_text() == "one\n"
        case "purged":
            run("two")
            called(folder, "purge", "my-shop-2", "--yes")
        case _:
            run("two", "--store", other, "--force")
    last = "two" if how == "resumed" else "one"
    said = run(last)
    assert "has executed A, B with another input after run my-shop" in said
    assert "3 of 3 tasks complete (2 executed, 1 reused)" in said
    assert (folder / "a").read_text() == (folder / "b").read_text() == f"{last}\n"
    assert "(0 executed, 3 reused)" in run(last)
    assert f"already done, by {'my-shop-3' if how == 'resumed' else 'my-shop-2'}: 3 of 3" in (
        called(folder, "run", "graph.json", "--dry-run").stdout
    )


def test_a_part_that_is_executed_again_leaves_the_rest_complete(folder: Path) -> None:
    say = 'echo "$MAESTRO_TASK_ID" >> ../log; '
    tasks = [
        task("A", say),
        task("B", say, "A"),
        task("C", f"{say}cat version > made", files=["made"]),
    ]
    last = task("LAST", say, "C")
    (folder / "version").write_text("1")
    graph = write(folder, *tasks, last)
    log = folder.parent / "log"
    assert called(folder, "run", graph).returncode == 0
    log.unlink()
    forced = called(folder, "run", graph, "--force", "--only", "C")
    assert (
        "run my-shop-2 executes C again; what else run my-shop has completed stays" in forced.stderr
    )
    assert "1 of 1 task complete (1 executed, 0 reused)" in forced.stdout
    whole = called(folder, "run", graph)
    assert "4 of 4 tasks complete (0 executed, 4 reused)" in whole.stdout
    assert log.read_text().split() == ["C"]
    (folder / "version").write_text("2")
    called(folder, "run", graph, "--force", "--only", "C")
    assert "4 of 4 tasks complete (1 executed, 3 reused)" in called(folder, "run", graph).stdout
    assert log.read_text().split() == ["C", "C", "LAST"]  # which depends on what has changed
    called(folder, "run", graph, "--force")
    assert sorted(log.read_text().split()[3:]) == ["A", "B", "C", "LAST"]


def test_a_wrong_graph_starts_nothing_and_names_all_errors(folder: Path) -> None:
    graph = write(folder, task("A", after="NONE"), {"id": "B"})
    done = called(folder, "run", graph)
    assert done.returncode == command.FAILED
    for part in ("NONE", "$.tasks[1]"):
        assert part in done.stdout
    assert not (folder.parent / "state").exists()
    write(folder, task("A"), persona=None)
    refused = called(folder, "run", graph)
    assert refused.returncode == command.WRONG_USE
    assert "A: no persona" in refused.stderr
    assert not (folder.parent / "state").exists()
    assert called(folder, "run", graph, "--persona", "true").returncode == 0


def test_a_budget_and_options_that_are_for_graphs_are_checked(folder: Path) -> None:
    graph = write(folder, task("A"))
    refused = complaint(called(folder, "run", graph, "--budget", "some"), command.WRONG_USE)
    assert "--budget is 'some', and must be tokens, or money as in '$2.50'" in refused
    assert "--budget" in complaint(
        called(folder, "run", "shop:build", "--budget", "5"), command.WRONG_USE
    )
    assert called(folder, "run", graph, "--budget", "$2.50").returncode == 0
    assert "my-shop" in called(folder, "budget").stdout


#: Writes its number, and ends only when the file ``go`` is there; a child of it, too.
_LONG = "(while ! test -f go; do sleep 0.05; done) & echo $! > pid; wait"


def test_verbs_that_only_look_make_no_state_folder(folder: Path) -> None:
    other = folder / "other"
    other.mkdir()
    (other / "file").touch()
    for verb in ("status", "stop", "runs"):
        refused = complaint(maestro(verb, "--store", str(other)), command.FAILED)
        assert "is not a state folder: it has no journal.db" in refused
    for verb in ("status", "stop"):
        refused = complaint(called(folder, verb), command.WRONG_USE)
        assert f"there is no run of a task graph in {folder}" in refused
    assert [each.name for each in other.iterdir()] == ["file"]
    assert not (folder.parent / "state").exists()


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_groups_and_says_how_to_resume(folder: Path, how: signal.Signals) -> None:
    graph = write(folder, task("A"), task("LONG", _LONG, "A"), task("LAST", after="LONG"))
    with started(folder, "run", graph) as engine:
        pid = number_in(folder / "pid")
        sent = time.monotonic()
        engine.send_signal(how)
        out, err = engine.communicate(_SECONDS)
    assert time.monotonic() - sent < _SECONDS / 2
    assert engine.returncode == 128 + how
    assert "maestro resume my-shop" in err
    assert "LONG: stopped" in out
    assert "LAST" not in out
    assert not is_alive(pid)
    (folder / "go").touch()
    resumed = called(folder, "resume")
    assert "3 of 3 tasks complete (2 executed, 1 reused)" in resumed.stdout
    assert "retried" not in resumed.stdout


#: A persona that fails if its program does, which a signal to the group ends. It blocks the loop until
#: both are there: the signal, and the end of the program.
_WAITS_FOR_A_PROGRAM = """
import os, pathlib, subprocess, time

async def work(task):
    os.setpgid(0, 0)  # as a shell does
    program = subprocess.Popen(["sleep", "60"])
    pathlib.Path("pid").write_text(str(program.pid))
    while program.poll() is None:
        time.sleep(0.01)
    raise RuntimeError(f"the program ended with {program.returncode}")
"""


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_end_of_a_program_by_the_signal_that_stops_the_run_is_no_failure(
    folder: Path, how: signal.Signals
) -> None:
    (folder / "waiting_for_program.py").write_text(_WAITS_FOR_A_PROGRAM)
    persona = {"python": "waiting_for_program:work"}
    graph = write(folder, task("A"), persona=persona, retry={"max_attempts": 1, "rounds": 1})
    with started(folder, "run", graph) as engine:
        os.killpg(os.getpgid(number_in(folder / "pid")), how)
        out, err = engine.communicate(_SECONDS)
    assert engine.returncode == 128 + how, err
    assert "A: stopped" in out
    (shown,) = answer(called(folder, "status", "--json"))["run"]["tasks"]
    assert (shown["status"], shown["failures"]) == ("stopped", 0)


def test_a_second_ctrl_c_stops_at_once(folder: Path) -> None:
    graph = write(folder, task("LONG", f"trap '' TERM; {_LONG}"))
    with started(folder, "run", graph) as engine:
        pid = number_in(folder / "pid")
        engine.send_signal(signal.SIGINT)
        time.sleep(0.1)  # the first one is being handled; if it is over, so be it
        engine.send_signal(signal.SIGINT)
        engine.communicate(_SECONDS)
    wait_until(lambda: not is_alive(pid))
    (folder / "go").touch()
    assert called(folder, "resume").returncode == 0


_GOES_ON = """
import asyncio, pathlib
async def work(task):
    pathlib.Path("started").touch()
    while True:
        try:
            await asyncio.sleep(100)
        except asyncio.CancelledError:
            pathlib.Path("cancelled").touch()
"""


def test_a_second_ctrl_c_ends_a_function_that_catches_its_cancellation(folder: Path) -> None:
    (folder / "goes_on.py").write_text(_GOES_ON)
    graph = write(folder, task("A", persona={"python": "goes_on:work"}))
    with started(folder, "run", graph) as engine:
        for seen in ("started", "cancelled"):
            wait_until((folder / seen).exists)
            engine.send_signal(signal.SIGINT)
        _, err = engine.communicate(_SECONDS)
    assert engine.returncode == 130
    assert "run 'my-shop' was stopped" in err
    (shown,) = answer(called(folder, "status", "--json"))["run"]["tasks"]
    assert (shown["status"], shown["failures"]) == ("stopped", 0)


def test_stop_stops_the_process_that_executes_a_run(folder: Path) -> None:
    graph = write(folder, task("LONG", _LONG))
    with started(folder, "run", graph) as engine:
        pid = number_in(folder / "pid")
        shown = answer(called(folder, "status", "--json"))["run"]
        assert (shown["executed"], shown["tasks"][0]["status"]) == (True, "running")
        stopped = called(folder, "stop")
        assert stopped.stdout == ("run my-shop was stopped; to resume it: maestro resume my-shop\n")
        engine.communicate(_SECONDS)
    assert not is_alive(pid)
    assert answer(called(folder, "status", "--json"))["run"]["tasks"][0]["status"] == "stopped"
    assert "is executed by no process" in called(folder, "stop", "my-shop").stdout
    line = "not finished, and no process executes it: maestro resume my-shop\n"
    assert line in called(folder, "show", "my-shop").stdout
    assert "that is executed" in complaint(called(folder, "stop"), command.WRONG_USE)


def test_a_run_that_has_ended_is_not_said_to_be_resumed(folder: Path) -> None:
    graph = write(folder, task("A"), task("B", "test -f mended"), retry=1)
    assert called(folder, "run", graph).returncode == command.FAILED
    assert called(folder, "stop", "my-shop").stdout == (
        "run my-shop is executed by no process; it has failed, and to retry it: maestro retry my-shop"
        " && maestro resume my-shop\n"
    )
    again = "to execute it again: maestro run GRAPH --only A --force"
    assert again in complaint(called(folder, "retry", "my-shop", "A"), command.WRONG_USE)
    (folder / "mended").touch()
    called(folder, "retry", "my-shop", "B")
    assert called(folder, "resume", "my-shop").returncode == 0
    stopped = called(folder, "stop", "my-shop").stdout
    assert stopped == "run my-shop is executed by no process; it is complete\n"
    assert again in complaint(called(folder, "retry", "my-shop", "A"), command.WRONG_USE)


def test_a_run_that_is_executed_is_refused_at_once(folder: Path) -> None:
    graph = write(folder, task("A"), task("LONG", _LONG, "A"))
    with started(folder, "run", graph) as engine:
        number_in(folder / "pid")
        for words in (["run", graph], ["resume", "my-shop"]):
            refused = complaint(called(folder, *words))
            assert f"run 'my-shop' is being executed by process {engine.pid} on" in refused
            assert refused.endswith("wait for it, or stop it: maestro stop my-shop")
        (folder / "go").touch()
        engine.communicate(_SECONDS)
    assert engine.returncode == 0


#: ``maestro`` with leases that expire soon.
_SHORT_LEASES = """
from maestro_hive.cli import main
from maestro_hive.maestro.state.sqlite.store import SqliteStore
SqliteStore.__init__.__kwdefaults__["lease_seconds"] = 1.0
main()
"""


@pytest.fixture
def suspended(folder: Path) -> Iterator[PythonProcess]:
    """An engine that executes a task, and is suspended."""
    env = environment(MAESTRO_STATE_DIR=str(folder.parent / "state"))
    graph = write(folder, task("LONG", _LONG))
    with PythonProcess(_SHORT_LEASES, "run", graph, stderr=True, env=env, cwd=folder) as engine:
        number_in(folder / "pid")
        suspend(engine.pid)
        yield engine
        engine.send_signal(signal.SIGCONT)
        engine.communicate(_SECONDS)


def test_a_run_of_a_suspended_process_is_taken_over_when_its_lease_has_expired(
    folder: Path, suspended: PythonProcess
) -> None:
    (folder / "go").touch()
    last = None

    def is_taken_over() -> bool:
        nonlocal last
        last = called(folder, "resume", "my-shop")
        if "busy" in last.stderr:  # it was suspended inside of a write
            suspended.send_signal(signal.SIGCONT)
            suspend(suspended.pid)
        return "is being executed" not in last.stderr and "busy" not in last.stderr

    wait_until(is_taken_over)
    assert last is not None
    assert last.returncode == command.SUCCESS, last
    suspended.send_signal(signal.SIGCONT)
    suspended.communicate(_SECONDS)
    assert suspended.returncode == command.FAILED
    assert answer(called(folder, "status", "--json"))["run"]["status"] == "success"
    file = json.loads((folder / ".mahabharatha" / "state.json").read_text())
    assert file["tasks"]["LONG"]["status"] == "complete"  # and the file is that of the other one


def test_stop_of_a_suspended_process_says_so_and_what_helps(
    folder: Path, suspended: PythonProcess
) -> None:
    refused = complaint(called(folder, "stop"), command.WRONG_USE)
    assert f"process {suspended.pid} is suspended" in refused
    assert f"kill -CONT {suspended.pid}" in refused
    assert "maestro resume my-shop" in refused
    (folder / "go").touch()


def test_a_command_that_ignores_sigterm_is_killed(folder: Path) -> None:
    graph = write(folder, task("LONG", f"trap '' TERM HUP INT; {_LONG}"))
    with started(folder, "run", graph) as engine:
        pid = number_in(folder / "pid")
        engine.send_signal(signal.SIGTERM)
        engine.communicate(_SECONDS)
    assert engine.returncode == 128 + signal.SIGTERM
    assert not is_alive(pid)


def test_a_killed_run_is_resumed_and_does_nothing_twice(folder: Path) -> None:
    say = 'echo "$MAESTRO_TASK_ID" >> log; '
    graph = write(folder, task("A", say), task("LONG", say + _LONG, "A"), task("B", say, "LONG"))
    with started(folder, "run", graph) as engine:
        pid = number_in(folder / "pid")
        engine.kill()
    wait_until(lambda: not is_alive(pid))
    (folder / "go").touch()
    assert called(folder, "run", graph, "--workers", "1").returncode == 0
    assert (folder / "log").read_text().split() == ["A", "LONG", "LONG", "B"]


def test_a_task_that_asks_is_answered_from_another_terminal(folder: Path) -> None:
    asks = ["sh", "-c", "grep -q 'answer: 42' || { echo which number?; exit 3; }"]
    graph = write(folder, task("A"), persona={"command": asks})
    # A notification follows the line about the question; the journal has it earlier.
    with started(folder, "run", graph, "--notify", "touch asked") as engine:
        wait_until((folder / "asked").exists)
        assert called(folder, "status").stdout.count("waiting") >= 2
        done = called(folder, "answer", "my-shop", "A", "42")
        assert done.returncode == 0, done
        out, _ = engine.communicate(_SECONDS)
    assert "A: waits for an answer to 'which number?': maestro answer my-shop A TEXT" in out
    assert out.count("complete in") == 1  # not of the attempt that asked
    assert "waited for an answer: A (" in out
    assert "1 of 1 task complete" in out


def test_no_wait_ends_when_only_people_can_go_on(folder: Path) -> None:
    asks = ["sh", "-c", "grep -q 'answer: 42' || { echo which number?; exit 3; }"]
    graph = write(folder, task("A"), persona={"command": asks})
    left = called(folder, "run", graph, "--no-wait")
    assert left.returncode == command.PERSON_NEEDED
    assert "waits for an answer: A: maestro answer my-shop A TEXT\n" in left.stdout
    assert "Answer, then: maestro resume my-shop --no-wait\n" in left.stderr
    seen = called(folder, "status").stdout
    assert "asks 'which number?'" in seen
    assert "to answer: maestro answer my-shop A TEXT\n" in seen
    assert called(folder, "answer", "my-shop", "A", "42").returncode == 0
    assert "to answer" not in called(folder, "status").stdout
    resumed = called(folder, "resume", "my-shop", "--no-wait")
    assert (resumed.returncode, "1 of 1 task complete" in resumed.stdout) == (0, True)


def test_what_is_over_its_budget_is_said_once(folder: Path) -> None:
    (folder / "spending.py").write_text(
        "from maestro_hive import current\ndef spend(task):\n    current().spend(tokens=500)\n"
    )
    persona = {"python": "spending:spend"}
    budget = {"tokens": 100}
    made = {"id": "A", "title": "A", "budget": budget}
    with started(folder, "run", write(folder, made, persona=persona)) as engine:
        out, _ = engine.communicate(_SECONDS)
    assert engine.returncode == command.FAILED
    lines = [line for line in without_times(out) if line.startswith("A: ")]
    assert lines[0] == "A: started"
    assert lines[1].startswith("A: over budget: Token budget of the step exceeded")
    assert len(lines) == 2
    assert "over budget: A, after 1 attempt\n" in out
    assert "raise the task's budget in the graph, then 'maestro run GRAPH'\n" in out
    assert "maestro retry" not in out  # which would find the same budget
    raised = "to go on: raise the task's budget in the graph, then 'maestro run GRAPH'"
    retried = called(folder, "retry", "my-shop", "A")
    assert retried.stdout == f"A is over its budget, which a retry does not raise; {raised}\n"
    with started(folder, "resume", "my-shop") as engine:
        again, _ = engine.communicate(_SECONDS)
    assert without_times(again)[0] == lines[1]  # that, and not that it failed
    assert "failed for good" not in again
    assert f"  {raised}\n" in again


def test_the_status_has_what_each_task_has_spent_and_its_handovers(folder: Path) -> None:
    (folder / "spending.py").write_text(
        "import os\n"
        "from maestro_hive import current\n"
        "from maestro_hive.team.progress import ContextFull\n"
        "def spend(task):\n"
        "    current().spend(tokens=600, usd=0.1)\n"
        "    current().spend(tokens=600, usd=0.2)\n"
        "    if 'checkpoint' not in current().progress:\n"
        "        raise ContextFull(current_step=1)\n"
        "    if not os.path.exists('mended'):\n"
        "        raise ValueError('no')\n"
    )
    made = [{"id": "A", "title": "A", "persona": {"python": "spending:spend"}}, task("B")]
    graph = write(folder, *made, retry=1)
    assert "tokens" not in called(folder, "run", graph, "--only", "B").stdout
    assert called(folder, "status").stdout.count("tokens") == 0
    with started(folder, "run", graph, "--force") as engine:
        engine.communicate(_SECONDS)
    assert engine.returncode == command.FAILED
    (folder / "mended").touch()
    assert called(folder, "retry", "my-shop-2").returncode == 0

    def shown() -> dict[str, Any]:
        run = answer(called(folder, "status", "my-shop-2", "--json"))["run"]
        assert (run["tokens"], run["usd"]) == (spent["tokens"], spent["usd"])
        by_id = {each["id"]: each for each in run["tasks"]}
        assert [by_id["B"][name] for name in spent] == [0, 0.0, 0]
        return {name: by_id["A"][name] for name in spent}

    spent = {"tokens": 2400, "usd": 0.6, "handovers": 1}
    assert shown() == spent  # also while nothing of it counts
    with started(folder, "resume", "my-shop-2") as engine:
        engine.communicate(_SECONDS)
    assert engine.returncode == command.SUCCESS
    spent = {"tokens": 3600, "usd": 0.9, "handovers": 1}
    assert shown() == spent
    table = called(folder, "status", "my-shop-2").stdout.splitlines()
    assert table[1].split("\t")[5] == "3,600"


def test_the_report_as_json_is_all_that_is_printed(folder: Path) -> None:
    graph = write(
        folder,
        task("A"),
        task("B", 'test "$MAESTRO_ATTEMPT" = 2 || exit 5', "A"),
    )
    shown = answer(called(folder, "run", graph, "--json"))
    assert shown["run"]["status"] == "success"
    assert (shown["executed"], shown["retried"], shown["waited_seconds"]) == (
        ["A", "B"],
        ["B"],
        {},
    )


def test_a_run_of_another_workflow_is_no_team_run(folder: Path) -> None:
    (folder / "mine.py").write_text(
        "from maestro_hive import Hive\n"
        "import os\n"
        "hive = Hive(os.environ['MAESTRO_STATE_DIR'])\n"
        "@hive.workflow\n"
        "async def build():\n"
        "    return 1\n"
    )
    with started(folder, "run", "mine:build", "--run-id", "one") as process:
        process.communicate(_SECONDS)
    for verb in ("resume", "stop", "status"):
        said = complaint(called(folder, verb, "one"), command.WRONG_USE)
        assert "is no run of a task graph" in said
    assert "there is no run of a task graph" in complaint(
        called(folder, "resume"), command.WRONG_USE
    )
    assert os.environ.get("MAESTRO_RUN_ID") is None


def test_a_resumed_run_may_be_strict(folder: Path) -> None:
    both = "while ! test -f A || ! test -f B; do sleep 0.01; done; echo more >> others"
    graph = write(
        folder,
        task("FIRST", "test -f mended"),
        task("A", f"touch A; {both}", "FIRST", files=["A"]),
        task("B", f"touch B; {both}", "FIRST", files=["B"]),
        retry=1,
    )
    assert called(folder, "run", graph).returncode == command.FAILED
    (folder / "mended").touch()
    assert called(folder, "retry", "my-shop", "FIRST").returncode == 0
    stopped = called(folder, "resume", "--strict")
    assert "no task owns" in stopped.stderr


def test_a_purged_run_is_said_to_have_left_its_state_in_its_folder(folder: Path) -> None:
    graph = write(folder, task("A", "echo A >> done"), task("B", "test -f mended", "A"), retry=1)
    assert called(folder, "run", graph).returncode == command.FAILED
    purged = called(folder, "purge", "my-shop", "--yes")
    path = folder / ".mahabharatha" / "state.json"
    assert f"{path} has the results of 1 complete task" in purged.stdout
    assert (
        "'maestro run GRAPH' goes on from it there, and starts over with --force" in purged.stdout
    )
    (folder / "mended").touch()
    done = called(folder, "run", graph)
    assert "the journal of run my-shop is gone" in done.stderr
    assert "--force starts a new one" in done.stderr
    assert (folder / "done").read_text().split() == ["A"]
    path.unlink()
    assert "state.json" not in called(folder, "purge", "my-shop", "--yes").stdout


def took(folder: Path, name: str) -> float | None:
    """Return how long a task took, as ``maestro status`` says."""
    run = answer(called(folder, "status", "my-shop", "--json"))["run"]
    found: float | None = next(each["took_seconds"] for each in run["tasks"] if each["id"] == name)
    return found


def test_how_long_a_task_took_is_the_same_in_its_line_and_in_the_status(folder: Path) -> None:
    graph = write(
        folder, task("LONG", _LONG), task("B", "test $MAESTRO_ATTEMPT = 2", "LONG"), retry=2
    )
    with started(folder, "run", graph) as engine:
        pid = number_in(folder / "pid")
        assert took(folder, "LONG") is not None
        engine.kill()
    wait_until(lambda: not is_alive(pid))
    assert took(folder, "LONG") is None
    (folder / "go").touch()
    done = called(folder, "resume")
    for name in ("LONG", "B"):
        line = next(each for each in done.stdout.splitlines() if f" {name}: complete in" in each)
        seconds = took(folder, name)
        assert seconds is not None
        assert line.endswith(f"complete in {output.took(seconds)}")


@pytest.mark.parametrize("how", ["changed", "forced"])
def test_what_outlived_a_run_is_ended_before_another_run_starts_in_its_folder(
    folder: Path, how: str
) -> None:
    elsewhere = folder.parent / "elsewhere"
    elsewhere.mkdir()
    waits = "sleep 100 & echo $! > pid; wait"
    graph = write(elsewhere, task("A", waits), feature="other")
    with started(elsewhere, "run", graph) as other:
        beside = number_in(elsewhere / "pid")
        is_alone = "! grep -q sleep /proc/$(cat pid)/cmdline"
        write(folder, task("A", f"test -f pid || {{ {waits}; }}; {is_alone}"), retry=1)
        with started(folder, "run", graph) as engine:
            left = number_in(folder / "pid")
            for guard in guards_of(engine.pid):
                os.kill(guard, signal.SIGKILL)
            engine.kill()
        assert is_alive(left)
        if how == "changed":
            write(folder, task("A", is_alone), retry=1)
        done = called(folder, "run", graph, *(["--force"] if how == "forced" else []))
        survived = [each for each in (left, beside) if is_alive(each)]
        with suppress(ProcessLookupError):
            os.kill(left, signal.SIGKILL)
        other.kill()
    assert "run: my-shop-2" in done.stderr
    assert (done.returncode, survived) == (command.SUCCESS, [beside]), done.stderr
    wait_until(lambda: not is_alive(beside))


def test_handovers_before_a_kill_count_after_it(folder: Path) -> None:
    # The second worker is killed with its engine; each of the others has a full context.
    does = (
        "echo $$ >> log; test $(grep -c . log) = 2 && echo $$ > pid && sleep 100;"
        ' cp log "$MAESTRO_PROGRESS"; exit 2'
    )
    graph = write(folder, task("A", does), retry={"max_attempts": 3, "max_handovers": 2})
    with started(folder, "run", graph) as engine:
        left = number_in(folder / "pid")
        engine.kill()
    wait_until(lambda: not is_alive(left))
    done = called(folder, "resume")
    assert done.returncode == command.FAILED
    assert "the context was full 3 times, and the limit of fresh workers is 2" in done.stdout
    assert len((folder / "log").read_text().split()) == 4


def test_the_same_feature_in_several_folders_at_once_is_several_runs(folder: Path) -> None:
    """The state folder is the same for all of them, as it is by default."""
    places = [folder.parent / f"checkout-{number}" for number in range(4)]
    for place in places:
        place.mkdir()
        write(place, task("A", "sleep 0.5; touch a", files=["a"]))
    with ExitStack() as stack:
        engines = [stack.enter_context(started(place, "run", "graph.json")) for place in places]
        assert [engine.wait() for engine in engines] == [0] * 4
    runs = answer(called(folder, "runs", "--json"))["runs"]
    names = ["my-shop", *(f"my-shop-{number}" for number in (2, 3, 4))]
    assert sorted(each["run_id"] for each in runs) == names
    assert all((place / "a").exists() for place in places)


def test_a_run_that_is_stopped_prints_its_object_as_well(folder: Path) -> None:
    graph = write(folder, task("LONG", _LONG))
    with started(folder, "run", graph, "--json") as engine:
        number_in(folder / "pid")
        engine.send_signal(signal.SIGTERM)
        printed, _ = engine.communicate()
        assert engine.wait() == 128 + signal.SIGTERM
    run = json.loads(printed)["run"]
    assert (run["run_id"], run["tasks"][0]["status"]) == ("my-shop", "stopped")


@pytest.mark.parametrize("how", ["closed", "full"])
def test_a_report_that_nobody_reads_says_nothing_about_the_run(folder: Path, how: str) -> None:
    graph = write(folder, task("A"))
    reading, closed = os.pipe()
    os.close(reading)
    with open(closed, "w") as pipe, open("/dev/full", "w") as full:  # noqa: PTH123
        state = {"MAESTRO_STATE_DIR": str(folder.parent / "state")}
        done = subprocess.run(
            [*COMMAND, "run", graph],
            stdout=pipe if how == "closed" else full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            cwd=folder,
            env=environment(**state),
        )
    assert done.returncode == (command.SUCCESS if how == "closed" else command.FAILED)
    is_said = "the report could not be printed: No space left on device. Run my-shop: success"
    assert (is_said in done.stderr) == (how == "full")


def test_how_far_a_run_came_is_what_the_journal_has(folder: Path) -> None:
    """Also if it was stopped before the display knew of what was complete before."""
    graph = write(folder, task("A"), task("LONG", _LONG, "A"))
    with started(folder, "run", graph) as engine:
        number_in(folder / "pid")
        engine.send_signal(signal.SIGTERM)
        _, err = engine.communicate(_SECONDS)
    assert "was stopped, 1 of 2 tasks complete" in err
    (folder / "pid").unlink()
    with started(folder, "resume") as engine:
        wait_until(lambda: holders_of(folder))
        engine.send_signal(signal.SIGTERM)
        _, err = engine.communicate(_SECONDS)
    assert "was stopped, 1 of 2 tasks complete" in err


def holders_of(folder: Path) -> list[str]:
    """Return the processes that execute a run of the folder."""
    runs = answer(called(folder, "runs", "--json"))["runs"]
    return [each["run_id"] for each in runs if each["executed"]]


def test_a_feature_of_two_lines_is_printed_in_one(folder: Path) -> None:
    graph = write(folder, task("A"), feature="my\nshop")
    assert called(folder, "graph", graph).stdout.startswith("my\\nshop: 1 task in 1 level")
    assert "my\\nshop: 1 of 1 task complete" in called(folder, "run", graph).stdout
