"""What is executed again when a graph has changed, and what is not; also in another process."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import maestro_hive
from maestro_hive import Hive
from maestro_hive.hive.errors import RunFailedError
from maestro_hive.maestro.state import codec
from maestro_hive.team.runner import ChosenRun
from tests.hive.conftest import quick_config
from tests.team.conftest import graph, task
from tests.team.test_scheduler import until

if TYPE_CHECKING:
    from maestro_hive.team.graph import Graph
    from tests.team.conftest import Team

SAY = 'echo "$MAESTRO_TASK_ID" >> ../log'
#: Two tasks that end only if they are executed at the same time.
MEET = "touch ../$MAESTRO_TASK_ID; while ! [ -f ../A -a -f ../B ]; do sleep 0.02; done"


def run_changed(team: Team, changed: Graph) -> list[str]:
    """Execute a graph that was changed since its last run; return what was executed."""
    before = len(team.lines("../log"))
    runner = team.hive_runner()
    chosen = runner.choose(changed, team.folder)
    runner.fork(chosen, changed)
    team.run(changed, chosen.run_id)
    return sorted(team.lines("../log")[before:])


@pytest.mark.parametrize("owned", ["src/", "src/*.py", "src/**"])
def test_what_depends_on_a_folder_is_executed_again_when_its_files_are_others(
    team: Team, owned: str
) -> None:
    def made(text: str, comment: str = "") -> Graph:
        writes = f"{SAY}; mkdir -p src/deep; echo {text} > src/deep/a.py {comment}"
        return graph(task("A", writes, files=[owned]), task("B", SAY, "A"))

    team.run(made("one"), "test")
    assert run_changed(team, made("two")) == ["A", "B"]
    assert run_changed(team, made("two", "# as before")) == ["A"]


def test_a_state_folder_in_an_owned_folder_is_not_a_result(team: Team) -> None:
    team.hive.close()
    team.hive = Hive(team.folder / "state", quick_config())

    def made(comment: str = "") -> Graph:
        writes = f"{SAY}; mkdir -p src; echo a > src/a {comment}"
        return graph(task("A", writes, files=["./"]), task("B", SAY, "A"))

    team.run(made(), "test")
    assert run_changed(team, made("# as before")) == ["A"]


def gated(does: str, **more: Any) -> Graph:
    """Return a graph with a gate on the level above a task that it does not depend on."""
    gate = {"name": "check", "command": "echo GATE >> ../log"}
    return graph(
        task("A", does, level=1, **more),
        task("B", SAY, level=2),
        levels={
            "1": {"name": "one", "tasks": ["A"]},
            "2": {"name": "two", "tasks": ["B"], "gates": [gate]},
        },
    )


def test_a_gate_is_executed_again_when_a_task_of_a_lower_level_has_made_other_files(
    team: Team,
) -> None:
    def made(text: str) -> Graph:
        return gated(f"{SAY}; echo {text} > a", files=["a"])

    team.run(made("one"), "test")
    assert run_changed(team, made("two")) == ["A", "GATE"]


def test_a_gate_is_executed_again_when_a_task_without_files_was_changed(team: Team) -> None:
    team.run(gated(SAY), "test")
    assert run_changed(team, gated(f"{SAY}; true")) == ["A", "GATE"]


def test_a_gate_waits_for_the_tasks_of_lower_levels(team: Team) -> None:
    made = gated(f"until grep -q B ../log; do sleep 0.02; done; {SAY}")
    team.run(made)
    assert team.lines("../log") == ["B", "A", "GATE"]


def test_a_folder_that_was_moved_goes_on_with_what_was_complete(team: Team) -> None:
    made = graph(task("A", SAY), task("B", f"{SAY}; test -f mended", "A"), retry=1)
    with pytest.raises(RunFailedError):
        team.run(made, "test")
    team.folder = team.folder.rename(team.folder.with_name("moved"))
    (team.folder / "mended").touch()
    assert run_changed(team, made) == ["B"]
    assert team.hive_runner().choose(made, team.folder) == ChosenRun("test-2", exists=True)


def test_another_folder_of_the_same_feature_is_no_folder_that_was_moved(team: Team) -> None:
    made = graph(task("A", SAY))
    team.run(made, "test")
    copy = team.folder.with_name("copy")
    shutil.copytree(team.folder, copy)
    assert team.hive_runner().choose(made, copy) == ChosenRun("test-2", exists=False)
    shutil.rmtree(team.folder)
    other = team.folder.with_name("other")
    other.mkdir()
    assert team.hive_runner().choose(made, other) == ChosenRun("test-2", exists=False)


def test_files_of_complete_tasks_that_are_gone_are_named(
    team: Team, caplog: pytest.LogCaptureFixture
) -> None:
    made = graph(
        task("A", f"{SAY}; mkdir -p src; touch a src/x", files=["a", "src/"]),
        task("B", "touch b", files=["b"]),
        task("C", "rm b", "B", files={"delete": ["b"]}),
    )
    team.run(made)
    team.run(made)
    assert not caplog.records
    (team.folder / "a").unlink()
    shutil.rmtree(team.folder / "src")
    team.run(made)
    assert "files that complete tasks have made are not there: a (A), src/ (A)" in caplog.text
    assert "maestro run GRAPH --force --only A" in caplog.text
    assert team.lines("../log") == ["A"]


def test_an_answer_is_not_asked_for_again_when_other_tasks_are_new(team: Team) -> None:
    asks = 'case "$(cat)" in *"The answer: blue"*) echo A >> ../log;; *) echo which?; exit 3;; esac'
    persona = {"command": ["sh", "-c", asks]}

    async def answered(made: Graph) -> None:
        hive = team.hive
        running = asyncio.create_task(
            team.hive_runner().run(made, run_id="test", folder=team.folder)
        )
        await until(lambda: bool(hive.runs() and hive.questions("test")))
        hive.answer("test", "A", "blue")
        await running

    asyncio.run(answered(graph(task("A", persona=persona))))
    changed = graph(task("NEW", SAY, estimate_minutes=50), task("A", persona=persona))
    assert run_changed(team, changed) == ["NEW"]


# --- identity -------------------------------------------------------------------------------------


def test_the_identity_of_a_task_is_the_same_in_every_process() -> None:
    """What a persona returned may be a set, whose order is another one in each process."""
    program = (
        "from maestro_hive.maestro.state.codec import encode_call\n"
        "print(encode_call(({}, {'A': {'value': set('abcdefgh')}}), {}).digest.hex())"
    )

    def key(seed: str) -> str:
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        command = [sys.executable, "-c", program]
        return subprocess.run(
            command, env=environment, check=True, capture_output=True, text=True, timeout=60
        ).stdout

    assert len({key(seed) for seed in "123"}) == 1


def test_other_words_around_what_the_graph_says_execute_nothing_again(
    team: Team, tmp_path: Path
) -> None:
    """As of another release: its package says it otherwise."""
    persona = {"command": ["sh", "-c", "cat > ../told; touch a"]}
    first = task("A", "as it was", files=["a"], persona=persona)
    package = Path(maestro_hive.__file__).parent
    shutil.copytree(package, tmp_path / "other" / package.name)
    prompts = tmp_path / "other" / package.name / "team" / "prompts.py"
    old, new = "Write no other files: other tasks own them.", "The other files are of other tasks."
    assert old in prompts.read_text()
    prompts.write_text(prompts.read_text().replace(old, new).replace('"Create"', '"Make"'))

    def run(changed: Graph) -> str:
        (tmp_path / "graph.json").write_text(json.dumps(changed.to_document()))
        words = ("run", str(tmp_path / "graph.json"), "--store", str(tmp_path / "state"))
        done = subprocess.run(
            [sys.executable, "-m", "maestro_hive", *words],
            env={**os.environ, "PYTHONPATH": str(tmp_path / "other")},
            cwd=team.folder,
            check=True,
            capture_output=True,
            text=True,
            timeout=60,
        )
        return done.stdout

    team.run(graph(first, task("B", SAY, "A")), "test")
    changed = task("B", f"{SAY}; true", "A")
    assert "(1 executed, 1 reused)" in run(graph(first, changed))
    assert team.lines("../log") == ["B", "B"]
    assert "(1 executed, 1 reused)" in run(graph({**first, "description": "another"}, changed))
    assert team.lines("../log") == ["B", "B"]
    assert new in (tmp_path / "told").read_text()


@pytest.mark.parametrize("value", [{(1, 2): 3}, {1: "a", "x": "b"}, {"nan": float("nan")}])
def test_every_result_that_can_be_recorded_has_an_identity(value: Any) -> None:
    def identity(value: Any) -> bytes:
        return codec.encode_call(({}, {"A": {"value": value}}), {}).digest

    assert identity(value) == identity(value) != identity(None)


# --- budgets --------------------------------------------------------------------------------------


def test_commands_and_gates_are_executed_at_once_under_a_budget(team: Team) -> None:
    """They report no usage, so nothing has to be known of what they spend."""
    team.run(graph(task("A", MEET), task("B", MEET), budget=1000, timeout_seconds=60))


def test_functions_are_executed_at_once_under_a_budget_when_one_of_them_has_told(
    team: Team,
) -> None:
    text = """
        import time
        from maestro_hive import current

        def work(task):
            is_first = not list(task.folder.glob("started-*"))
            current().spend(tokens=10)
            (task.folder / f"started-{task.id}").touch()
            while not is_first and len(list(task.folder.glob("started-*"))) < 3:
                time.sleep(0.02)
    """
    (team.folder / "meeting.py").write_text("\n".join(line[8:] for line in text.splitlines()))
    persona = {"python": "meeting:work"}
    team.run(graph(*map(task, "ABC"), persona=persona, budget=1000, timeout_seconds=60))
