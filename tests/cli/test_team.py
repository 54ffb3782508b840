"""``maestro run GRAPH``, ``resume``, ``stop``, ``status`` and ``retry`` of task graphs."""

from __future__ import annotations

import json
import os
import signal
import time
from typing import TYPE_CHECKING, Any

import pytest

from faults.team_kills import is_alive
from maestro_hive.cli import command
from tests.cli.processes import answer, complaint, maestro, start_maestro
from tests.team.conftest import SHELL, task

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.cli.processes import Done
    from tests.python_processes import PythonProcess

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
        "B: attempt 1 failed: the persona's command ended with exit code 5 not yet",
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
    resumed = called(folder, "resume", "my-shop")
    assert (resumed.returncode, "(2 executed, 1 reused)" in resumed.stdout) == (0, True)


def test_a_changed_graph_is_another_run_with_what_is_unchanged(folder: Path) -> None:
    write(folder, task("A"), task("B"))
    assert called(folder, "run", "graph.json").returncode == 0
    write(folder, task("A"), task("B", "true"))
    done = called(folder, "run", "graph.json")
    assert "run my-shop-2 goes on with what is unchanged" in done.stderr
    assert "2 of 2 tasks complete (1 executed, 1 reused)" in done.stdout


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
    refused = called(folder, "run", graph, "--budget", "some")
    assert refused.returncode == command.WRONG_USE
    assert "--budget" in complaint(
        called(folder, "run", "shop:build", "--budget", "5"), command.WRONG_USE
    )
    assert called(folder, "run", graph, "--budget", "$2.50").returncode == 0
    assert "my-shop" in called(folder, "budget").stdout


#: Writes its number, and ends only when the file ``go`` is there; a child of it, too.
_LONG = "(while ! test -f go; do sleep 0.05; done) & echo $! > pid; wait"


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_groups_and_says_how_to_resume(folder: Path, how: signal.Signals) -> None:
    graph = write(folder, task("A"), task("LONG", _LONG, "A"), task("LAST", after="LONG"))
    with started(folder, "run", graph) as engine:
        pid = number_in(folder / "pid")
        sent = time.monotonic()
        engine.send_signal(how)
        out, err = engine.communicate(_SECONDS)
    assert time.monotonic() - sent < _SECONDS / 2
    assert engine.returncode == (130 if how is signal.SIGINT else 128 + signal.SIGTERM)
    assert "maestro resume my-shop" in err
    assert "LONG: stopped" in out
    assert "LAST" not in out
    assert not is_alive(pid)
    (folder / "go").touch()
    resumed = called(folder, "resume")
    assert "3 of 3 tasks complete (2 executed, 1 reused)" in resumed.stdout
    assert "retried" not in resumed.stdout


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
    assert "that is executed" in complaint(called(folder, "stop"), command.WRONG_USE)


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
    with started(folder, "run", graph) as engine:
        wait_until(lambda: called(folder, "status").stdout.count("waiting") >= 2)
        done = called(folder, "answer", "my-shop", "A", "42")
        assert done.returncode == 0, done
        out, _ = engine.communicate(_SECONDS)
    assert "A: waits for an answer: maestro answer my-shop A TEXT" in out
    assert "1 of 1 task complete" in out


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
