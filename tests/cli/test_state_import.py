"""``maestro import`` of the states that MAHABHARATHA writes, in both of its generations."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from maestro_hive.cli import command
from maestro_hive.team.state import Checkpoint
from tests.cli.processes import answer, complaint, maestro
from tests.team.conftest import SHELL, task

if TYPE_CHECKING:
    from pathlib import Path

    from tests.cli.processes import Done

MAKE = "echo $MAESTRO_TASK_ID >> ../ledger; touch $MAESTRO_TASK_ID"
IDS = ("A-1", "A-2", "B-1", "B-2")

#: The same progress, as each generation writes it.
OLDER = {
    "feature": "shop",
    "started_at": "2026-02-04T08:43:17.661124",
    "current_level": 1,
    "tasks": {
        "A-1": {"id": "A-1", "status": "complete", "worker_id": "worker-1", "error": None},
        "A-2": {"id": "A-2", "status": "running", "started_at": "2026-02-04T08:44:00"},
        "B-1": {"id": "B-1", "status": "pending"},
        "B-2": {"id": "B-2", "status": "blocked"},
    },
    "workers": {},
    "checkpoints": [],
}
NEWER = {
    "feature": "shop",
    "started_at": "2026-02-04T08:43:17.661124",
    "current_level": 1,
    "tasks": {
        "A-1": {
            "status": "complete",
            "worker_id": 1,
            "updated_at": "2026-02-04T08:45:00",
            "completed_at": "2026-02-04T08:45:00",
        },
        "A-2": {"status": "in_progress", "worker_id": 2, "claimed_at": "2026-02-04T08:44:00"},
        "B-1": {"status": "todo"},
        "B-2": {"status": "paused", "retry_count": 2},
    },
    "workers": {"1": {"status": "ready", "port": 49152}},
    "levels": {"1": {"status": "running", "merge_status": "pending"}},
    "execution_log": [{"timestamp": "2026-02-04T08:43:17", "event": "started", "data": {}}],
    "metrics": None,
    "paused": False,
    "error": None,
}
ORCHESTRATOR = {
    "state": "STOPPED",
    "current_level": 1,
    "completed_tasks": ["A-1"],
    "failed_tasks": ["A-2"],
    "timestamp": "2026-02-04T08:45:00",
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    work = tmp_path / "work"
    (work / ".mahabharatha" / "state").mkdir(parents=True)
    monkeypatch.chdir(work)
    return work


def called(folder: Path, *words: str) -> Done:
    return maestro(*words, MAESTRO_STATE_DIR=str(folder.parent / "state"))


def write_graph(folder: Path, **more: Any) -> Path:
    tasks = [task(each, MAKE, "" if each[0] == "A" else "A-1 A-2", files=[each]) for each in IDS]
    path = folder / ".gsd" / "specs" / "shop" / "task-graph.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"feature": "shop", "persona": SHELL, "tasks": tasks, **more}))
    return path


def write_state(folder: Path, state: Any, name: str = "state.json") -> str:
    path = folder / ".mahabharatha" / name
    path.write_text(state if isinstance(state, str) else json.dumps(state))
    return str(path)


def ledger(folder: Path) -> list[str]:
    return sorted((folder.parent / "ledger").read_text().split())


@pytest.mark.parametrize(
    "state, name", [(OLDER, "state.json"), (NEWER, "state/shop.json")], ids=["older", "newer"]
)
def test_a_state_becomes_a_run_that_is_resumed(folder: Path, state: Any, name: str) -> None:
    write_graph(folder)
    done = called(folder, "import", write_state(folder, state, name))
    assert "run 'shop' was made of" in done.stdout
    assert "with 1 of 4 tasks complete" in done.stdout
    assert "to resume it: maestro resume shop" in done.stdout
    found = answer(called(folder, "status", "shop", "--json"))["run"]
    assert [each["status"] for each in found["tasks"]] == ["complete", *["pending"] * 3]
    assert "4 of 4 tasks complete (3 executed, 1 reused)" in called(folder, "resume", "shop").stdout
    assert ledger(folder) == ["A-2", "B-1", "B-2"]


def test_the_checkpoint_of_an_orchestrator_is_of_the_graph_that_is_given(folder: Path) -> None:
    graph = str(write_graph(folder))
    state = write_state(folder, ORCHESTRATOR)
    refused = complaint_lines(called(folder, "import", state))
    assert "$.feature" in refused
    assert "--graph" in refused
    assert "with 1 of 4 tasks complete" in called(folder, "import", state, "--graph", graph).stdout
    assert called(folder, "run", graph).returncode == 0
    assert ledger(folder) == ["A-2", "B-1", "B-2"]


def complaint_lines(done: Done) -> str:
    assert done.returncode == command.WRONG_USE
    return done.stderr


def test_a_graph_without_personas_goes_on_with_one_from_the_command_line(folder: Path) -> None:
    graph = write_graph(folder, persona=None)
    done = called(folder, "import", write_state(folder, NEWER, "state/shop.json"))
    assert f"maestro run {graph} --persona COMMAND" in done.stdout
    persona = "sh -c 'echo $MAESTRO_TASK_ID >> ../ledger'"
    again = called(folder, "run", str(graph), "--persona", persona)
    assert "(3 executed, 1 reused)" in again.stdout
    assert ledger(folder) == ["A-2", "B-1", "B-2"]


def test_what_depends_on_something_that_is_not_complete_is_executed_again(folder: Path) -> None:
    write_graph(folder)
    tasks = {**OLDER["tasks"], "B-1": {"id": "B-1", "status": "complete"}}  # type: ignore[dict-item]
    tasks["GONE"] = {"id": "GONE", "status": "complete"}
    done = called(folder, "import", write_state(folder, {**OLDER, "tasks": tasks}), "--as", "mine")
    assert "run 'mine'" in done.stdout
    assert "is not complete: B-1, GONE" in done.stdout


def test_the_checkpoint_of_a_worker_is_given_to_a_fresh_one(folder: Path) -> None:
    graph = write_graph(folder)
    document = json.loads(graph.read_text())
    document["tasks"][1]["description"] = 'cp "$MAESTRO_PROGRESS" ../seen; touch A-2'
    graph.write_text(json.dumps(document))
    saved = Checkpoint("A-2", "worker-2", None, ["x.py"], [], 3, {"left": "tests"})
    (folder / ".mahabharatha" / "checkpoints").mkdir()
    (folder / ".mahabharatha" / "checkpoints" / "a2.json").write_text(json.dumps(saved.to_dict()))
    called(folder, "import", write_state(folder, {**OLDER, "checkpoints": ["a2.json"]}))
    assert called(folder, "resume", "shop").returncode == 0
    assert json.loads((folder.parent / "seen").read_text())["state_data"] == {"left": "tests"}


@pytest.mark.parametrize("name", ["a\0b", "x" * 5000, "../..", ""])
def test_a_checkpoint_of_a_name_that_is_no_file_is_none(folder: Path, name: str) -> None:
    write_graph(folder)
    done = called(folder, "import", write_state(folder, {**OLDER, "checkpoints": [name]}))
    assert done.returncode == 0, done.stderr
    assert "run 'shop' was made of" in done.stdout


@pytest.mark.parametrize(
    "state, said",
    [
        ({**OLDER, "tasks": []}, "$.tasks: it must be a map of tasks by id"),
        ({**OLDER, "tasks": None}, "$.tasks: it must be a map of tasks by id, and is nothing"),
        ({**OLDER, "feature": 7}, "$.feature: it must be a text"),
        ({**OLDER, "tasks": {"A-1": {"status": "done"}}}, "'done' is none of complete"),
        ({**OLDER, "tasks": {"A-1": 1, "A-2": {"id": "X", "status": "todo"}}}, "$.tasks['A-2'].id"),
        ({**OLDER, "checkpoints": {}}, "$.checkpoints: it must be a list"),
        ({**OLDER, "feature": "other"}, "the graph of the feature 'other' is not in"),
        ({**OLDER, "feature": "a\0b"}, "the graph of the feature 'a\\x00b' is not in"),
        ({**OLDER, "feature": "../.."}, "the graph of the feature '../..' is not in"),
        ({**OLDER, "tasks": {"X": {"status": "complete"}}}, "their tasks must be the same ones"),
        ({**OLDER, "format": 1, "sha256": "0" * 64}, "it was altered"),
        ({"completed_tasks": [1]}, "$.completed_tasks: it must be a list"),
    ],
)
def test_a_state_that_is_wrong_is_refused_and_nothing_is_made(
    folder: Path, state: Any, said: str
) -> None:
    write_graph(folder)
    done = called(folder, "import", write_state(folder, state))
    assert done.returncode != 0
    assert said in done.stderr
    assert done.stdout == ""
    assert "shop" not in called(folder, "runs").stdout


@pytest.mark.parametrize("text", ["", "{", "[]", "7", '{"a": 1}', "\x00"])
def test_a_file_that_is_neither_a_run_nor_a_state_is_refused(folder: Path, text: str) -> None:
    graph = str(write_graph(folder))
    path = write_state(folder, text)
    complaint(called(folder, "import", path))
    assert "neither" in complaint(called(folder, "import", path, "--graph", graph), 2)


def test_a_wrong_graph_is_refused_with_all_its_errors(folder: Path) -> None:
    (folder / "wrong.json").write_text(
        '{"feature": "shop", "tasks": [{"title": "x"}, {"id": "B"}]}'
    )
    done = called(folder, "import", write_state(folder, OLDER), "--graph", "wrong.json")
    assert done.returncode != 0
    assert "$.tasks[0]" in done.stderr
    assert "$.tasks[1]" in done.stderr
