"""A team run of which nothing is left but ``.mahabharatha/state.json`` and what is beside it."""

from __future__ import annotations

import json
import logging
import shutil
import time
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from maestro_hive import Hive
from maestro_hive.cli import command
from maestro_hive.kernel.errors import StorageError
from maestro_hive.team import state, state_file
from maestro_hive.team.state import (
    Checkpoint,
    ExecutionState,
    TaskState,
    TaskStatus,
    validate_state,
)
from maestro_hive.team.state_file import PATH
from tests.cli.processes import answer, complaint, maestro, start_maestro
from tests.hive.conftest import quick_config
from tests.team.conftest import SHELL, Team, graph, statuses, task

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.cli.processes import Done

#: A task that notes its start, and makes its file.
MAKE = "echo $MAESTRO_TASK_ID >> ../ledger; echo $MAESTRO_TASK_ID > $MAESTRO_TASK_ID"
WAIT = "echo WAIT >> ../ledger; while ! [ -f ../go ]; do sleep 0.02; done; touch WAIT"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    return work


def called(folder: Path, *words: str) -> Done:
    return maestro(*words, MAESTRO_STATE_DIR=str(folder.parent / "state"))


def write(folder: Path, *tasks: dict[str, Any], **more: Any) -> str:
    document = {"feature": "shop", "persona": SHELL, "tasks": list(tasks), **more}
    (folder / "graph.json").write_text(json.dumps(document))
    return "graph.json"


def make(name: str, after: str = "") -> dict[str, Any]:
    return task(name, MAKE, after, files=[name])


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def state_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / PATH).read_text())
    return found


def is_complete(folder: Path, *names: str) -> bool:
    if not (folder / PATH).exists():
        return False
    tasks = state_of(folder)["tasks"]
    return all(tasks[each]["status"] == "complete" for each in names)


def lose_the_journal(folder: Path) -> None:
    shutil.rmtree(folder.parent / "state")


def without_journal(team: Team) -> Team:
    """Return the team with another state folder; the one that it had is gone."""
    lost = Path(team.hive.config.state.state_dir)
    lost.rename(lost.with_name("moved away"))
    return Team(Hive(lost.with_name("new"), quick_config()), team.folder)


@pytest.mark.parametrize("words", [("run", "graph.json"), ("resume",), ("resume", "shop")])
def test_a_killed_run_whose_journal_is_lost_goes_on_from_its_state_file(
    folder: Path, words: tuple[str, ...]
) -> None:
    write(
        folder,
        make("A"),
        make("B", "A"),
        task("WAIT", WAIT, "B", files=["WAIT"]),
        make("C", "WAIT"),
    )
    state = str(folder.parent / "state")
    with start_maestro("run", "graph.json", cwd=folder, MAESTRO_STATE_DIR=state) as engine:
        wait_until(lambda: is_complete(folder, "A", "B") and "WAIT" in _ledger(folder))
        engine.kill()
    lose_the_journal(folder)
    (folder.parent / "go").touch()
    done = called(folder, *words, "--json")
    assert "goes on from" in done.stderr
    assert "2 complete tasks of 4" in done.stderr
    assert _ledger(folder) == ["A", "B", "WAIT", "WAIT", "C"]
    validate_state(state_of(folder))
    assert is_complete(folder, "A", "B", "WAIT", "C")
    found = answer(called(folder, "status", "--json"))["run"]
    assert {each["status"] for each in found["tasks"]} == {"complete"}
    assert "0 executed, 4 reused" in called(folder, "run", "graph.json").stdout


def _ledger(folder: Path) -> list[str]:
    path = folder.parent / "ledger"
    return path.read_text().split() if path.exists() else []


def test_the_results_of_complete_tasks_are_those_of_the_lost_run(team: Team) -> None:
    text = "def one(task):\n    return {'n': 1}\n\ndef two(task):\n    return task.results['A']['n'] + 1\n"
    (team.folder / "restored_results.py").write_text(text)
    made = graph(
        task("A", persona={"python": "restored_results:one"}),
        task("B", persona={"python": "restored_results:two"}, after="A"),
    )
    before = team.run(made)
    assert team.hive_runner().restorable(made, team.folder) is None  # the journal is there
    team = without_journal(team)
    runner = team.hive_runner()
    found = runner.restorable(made, team.folder)
    assert found is not None
    assert runner.restore("again", made, team.folder, found) == ["A", "B"]
    assert team.run(made, "again") == before
    changed = graph(
        task("A", persona={"python": "restored_results:one"}, description="other"),
        task("B", persona={"python": "restored_results:two"}, after="A"),
    )
    assert runner.restore("changed", changed, team.folder, found) == []


def test_a_fresh_worker_gets_the_checkpoint_of_the_lost_run(team: Team) -> None:
    does = (
        'if [ -s "$MAESTRO_PROGRESS" ]; then cp "$MAESTRO_PROGRESS" ../seen; else'
        ' echo "{\\"current_step\\": 7}" > "$MAESTRO_PROGRESS"; exit 2; fi'
    )
    made = graph(task("A", f"{does}; [ -f ../go ]"), retry=1)
    with pytest.raises(Exception, match="failed: A"):
        team.run(made)
    (name,) = state_of(team.folder)["checkpoints"]
    saved = json.loads((team.folder / ".mahabharatha" / name).read_text())
    assert Checkpoint.from_dict(saved).current_step == 7
    team = without_journal(team)
    (team.folder / "../seen").unlink()
    (team.folder / "../go").touch()
    runner = team.hive_runner()
    found = runner.restorable(made, team.folder)
    assert found is not None
    assert runner.restore("again", made, team.folder, found) == []
    team.run(made, "again")
    assert json.loads((team.folder / "../seen").read_text())["current_step"] == 7
    assert state_of(team.folder)["checkpoints"] == []
    assert list((team.folder / ".mahabharatha/checkpoints").iterdir()) == []


def test_the_state_file_names_a_checkpoint_while_the_fresh_worker_is_executed(team: Team) -> None:
    does = (
        'i=0; until_state_has() { until grep -q "$1" .mahabharatha/state.json; do'
        " [ $((i += 1)) -lt 600 ] || exit 1; sleep 0.05; done; };"
        ' [ -s "$MAESTRO_PROGRESS" ] && until_state_has checkpoints/A && exit 0;'
        ' until_state_has running; echo 7 > "$MAESTRO_PROGRESS"; exit 2'
    )
    team.run(graph(task("A", does), retry=1))


def test_a_new_run_gets_no_checkpoint_of_another_one(team: Team) -> None:
    does = 'test -s "$MAESTRO_PROGRESS" && exit 1; echo {} > "$MAESTRO_PROGRESS"; exit 1'
    made = graph(task("A", does), retry=1)
    for run in ("one", "two"):
        with pytest.raises(Exception, match="failed: A"):
            team.run(made, run)
    assert len(state_of(team.folder)["checkpoints"]) == 1


@pytest.mark.parametrize("text", ["{", '{"feature": 1}', '{"feature": "shop", "tasks": []}'])
def test_a_state_file_that_cannot_be_read_is_an_error_with_a_way_out(
    folder: Path, text: str
) -> None:
    write(folder, make("A"))
    (folder / ".mahabharatha").mkdir()
    (folder / PATH).write_text(text)
    said = complaint(called(folder, "run", "graph.json"), command.WRONG_USE)
    assert "state.json" in said
    assert "--force" in said
    called(folder, "run", "graph.json", "--force")
    assert is_complete(folder, "A")


def test_the_only_state_of_another_graph_is_not_replaced(folder: Path) -> None:
    write(folder, make("A"), task("BAD", "exit 1", "A"), retry=1)
    called(folder, "run", "graph.json")
    write(folder, make("X"), feature="other")
    lose_the_journal(folder)
    said = complaint(called(folder, "run", "graph.json"), command.WRONG_USE)
    assert "is of another graph, of the feature 'shop'" in said
    assert state_of(folder)["feature"] == "shop"
    called(folder, "run", "graph.json", "--force")
    assert state_of(folder)["feature"] == "other"


def test_the_state_of_a_run_that_has_a_journal_is_replaced(folder: Path) -> None:
    write(folder, make("A"), task("BAD", "exit 1", "A"), retry=1)
    called(folder, "run", "graph.json")
    write(folder, make("X"), feature="other")
    assert called(folder, "run", "graph.json").returncode == 0
    write(folder, make("Y"), feature="another")  # the journal of the other run is there
    elsewhere = maestro("run", "graph.json", MAESTRO_STATE_DIR=str(folder.parent / "elsewhere"))
    assert "1 executed, 0 reused" in elsewhere.stdout


def test_a_state_that_another_program_wrote_is_imported_and_not_taken(folder: Path) -> None:
    write(folder, make("A"))
    state = ExecutionState.create("shop")
    state.save(folder / PATH)
    assert called(folder, "run", "graph.json").returncode == 0  # nothing is complete in it
    lose_the_journal(folder)
    state.tasks["A"] = TaskState("A", TaskStatus.COMPLETE)
    state.save(folder / PATH)
    assert "maestro import" in complaint(called(folder, "run", "graph.json"), command.WRONG_USE)


def test_a_state_of_our_own_is_imported_with_a_graph_without_personas(folder: Path) -> None:
    persona = ("--persona", "sh -c 'eval \"$(sed -n 3p)\"'")
    tasks = [make("A"), task("B", "test -f ../fixed", "A", retry=1)]
    write(folder, *tasks, persona=None)
    assert called(folder, "run", "graph.json", *persona).returncode == command.FAILED
    lose_the_journal(folder)
    done = called(folder, "import", str(PATH), "--graph", "graph.json")
    assert done.returncode == 0, done
    assert called(folder, "status", "shop").returncode == 0
    (folder / "../fixed").touch()
    assert called(folder, "run", "graph.json", *persona).returncode == 0
    assert (folder / "../ledger").read_text() == "A\n"
    lose_the_journal(folder)
    called(folder, "import", str(PATH), "--graph", "graph.json")
    other = "sh -c 'echo other >> ../ledger'"
    assert called(folder, "run", "graph.json", "--persona", other).returncode == 0
    assert (folder / "../ledger").read_text() == "A\nother\nother\n"


def test_secrets_and_long_results_are_not_in_the_state_file(team: Team) -> None:
    text = (
        "def long(task):\n    return 'x' * 9000\n\n"
        "def secret(task):\n    return {'password': 'hunter2'}\n\n"
        "def other(task):\n    return (1, 2)\n"
    )
    (team.folder / "long_results.py").write_text(text)
    names = ("long", "secret", "other")
    made = graph(*(task(each, persona={"python": f"long_results:{each}"}) for each in names))
    team.run(made)
    assert statuses(team) == dict.fromkeys(names, "complete")
    assert not any("result" in each for each in state_of(team.folder)["tasks"].values())


def test_a_state_file_that_was_not_written_once_is_written_again(
    team: Team, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write, written = state.atomic_write, []

    def full_once(path: Path, text: str) -> None:
        written.append(path)
        if len(written) == 2:  # the first one is at the start of the run
            raise StorageError("no space left")
        write(path, text)

    monkeypatch.setattr(state, "atomic_write", full_once)
    seen = "until grep -q .complete., .mahabharatha/state.json; do sleep 0.05; done; touch ../seen"
    changes = [task(f"C{at}", "[ -f ../seen ] || sleep 0.3", f"C{at - 1}") for at in range(1, 60)]
    made = graph(task("SEEN", seen, timeout_seconds=30), task("C0"), *changes, retry=1)
    with caplog.at_level(logging.WARNING, "maestro_hive"):
        team.run(made)
    said = [each.getMessage() for each in caplog.records]
    assert said == ["the state file is behind the run: no space left"]


def test_the_last_write_of_the_state_file_raises_if_the_disk_refuses_it(
    team: Team, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, text: str) -> None:
        raise StorageError("no space left")

    monkeypatch.setattr(state, "atomic_write", full)
    with pytest.raises(StorageError, match="no space left"):
        team.run(graph(task("A")))


def test_results_that_have_no_room_in_the_state_file_are_left_out(
    team: Team, monkeypatch: pytest.MonkeyPatch
) -> None:
    (team.folder / "some_results.py").write_text("def some(task):\n    return 'x' * 1000\n")
    monkeypatch.setattr(state_file, "MAX_RESULTS_LENGTH", 3500)
    some = {"python": "some_results:some"}
    made = graph(*(task(f"T{at}", files=[f"t{at}"], persona=some) for at in range(10)))
    team.run(made)
    found = state_of(team.folder)["tasks"].values()
    assert sum("result" in each for each in found) == 3
    assert all(each["status"] == "complete" for each in found)


def test_a_state_that_is_too_large_for_its_file_fails_no_run(
    team: Team, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(state, "MAX_STATE_BYTES", 100)
    with caplog.at_level(logging.WARNING, "maestro_hive"):
        assert team.run(graph(task("A")))["tasks"].keys() == {"A"}
    assert caplog.text.count("it would be larger than the limit") == 1


def test_the_state_file_is_made_while_nothing_is_recorded(
    team: Team, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot, is_waiting = state_file.StateFile._snapshot, []

    def looked_at(file: Any) -> Any:
        with ThreadPoolExecutor() as pool:
            with file._run.mutex:
                made = pool.submit(snapshot, file)
                wait([made], timeout=0.3)
                is_waiting.append(not made.done())
            return made.result(30)

    monkeypatch.setattr(state_file.StateFile, "_snapshot", looked_at)
    team.run(graph(task("A")))
    assert is_waiting
    assert all(is_waiting)
