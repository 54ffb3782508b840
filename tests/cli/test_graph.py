"""``maestro graph``, ``maestro init`` and the dry run of a task graph."""

from __future__ import annotations

import json
import subprocess
import xml.etree.ElementTree as ET
from typing import TYPE_CHECKING, Any

import pytest

from maestro_hive.cli import command
from maestro_hive.team.graph_files import check_file
from tests.cli.processes import complaint, in_terminal, maestro, maestro_process

if TYPE_CHECKING:
    from pathlib import Path

    from tests.cli.processes import Done

GRAPH: dict[str, Any] = {
    "feature": "shop",
    "persona": {"command": "true"},
    "tasks": [
        {
            "id": "TYPES",
            "title": "Types",
            "estimate_minutes": 10,
            "files": {"create": ["types.py"]},
        },
        {
            "id": "CART",
            "title": "Cart",
            "dependencies": ["TYPES"],
            "estimate_minutes": 30,
            "files": {"create": ["cart.py"], "modify": ["app.py"]},
            "verification": "no-such-program --check && test -f cart.py",
        },
        {
            "id": "MAIL",
            "title": "Mail\n\x1b[2J",
            "dependencies": ["TYPES"],
            "estimate_minutes": 20,
            "files": {"modify": ["app.py"]},
        },
        {"id": "DOCS", "title": "Docs", "estimate_minutes": 5},
    ],
    "levels": {"1": {"name": "first", "gates": [{"name": "lint", "command": "true"}]}},
}


@pytest.fixture
def graph(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the file of a graph, in the current folder."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "graph.json"
    path.write_text(json.dumps(GRAPH, indent=1))
    return path


def names(folder: Path) -> list[str]:
    return sorted(each.name for each in folder.iterdir())


def dry_run(*words: str, **changes: str) -> Done:
    return maestro("run", "graph.json", "--dry-run", *words, **changes)


# --- graph ---


def test_a_graph_is_shown_in_lines_with_tabs(graph: Path) -> None:
    done = maestro("graph", "graph.json", "--workers", "2")
    assert done.returncode == command.SUCCESS, done.stderr
    problem, heading, *lines = done.stdout.splitlines()
    line = graph.read_text().splitlines().index('   "files": {', 33) + 1
    assert problem.split("\t")[:3] == ["warning", f"graph.json:{line} $.tasks[2].files", "MAIL"]
    assert heading == "shop: 4 tasks in 2 levels, 1 h 5 min of work"
    assert lines == [
        "1\tTYPES\tTypes\t10 min\t\ttypes.py",
        "1\tDOCS\tDocs\t5 min\t\t",
        "2\tCART\tCart\t30 min\tTYPES\tcart.py, app.py",
        "2\tMAIL\tMail\\n\\x1b[2J\t20 min\tTYPES, CART\tapp.py",
        "gate after level 1: lint: true",
        "critical path: TYPES → CART → MAIL (1 h)",
        "never at once: CART → MAIL (own app.py)",
        "with 2 workers: 1 h, at most 2 tasks at the same time",
    ]


def test_a_run_names_the_lines_that_graph_names_and_the_path_as_it_was_given(
    graph: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = graph.parent / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    graph.write_text(
        json.dumps({"feature": "f", "workers": 3, "tasks": [{"id": "A", "title": "a"}]}, indent=1)
    )
    shown = maestro("graph", "../graph.json").stdout.splitlines()[0]
    assert shown.split("\t")[1] == "../graph.json:3 $.workers"
    done = maestro("run", "../graph.json")
    assert "warning: ../graph.json:3 $.workers: 'workers' is not read; " in done.stderr
    graph.write_text(json.dumps({"feature": "f", "tasks": [{"id": "A"}]}, indent=1))
    for verb in ("graph", "run"):
        shown = maestro(verb, "../graph.json").stdout.splitlines()[0]
        assert shown.split("\t")[1:3] == ["../graph.json:4 $.tasks[0]", "A"]


def test_json_has_everything(graph: Path) -> None:
    shown = json.loads(maestro("graph", graph, "--json").stdout)
    assert [each["code"] for each in shown["warnings"]] == ["shared-file"]
    assert (shown["errors"], shown["feature"]) == ([], "shop")
    assert shown["critical_path"] == ["TYPES", "CART", "MAIL"]
    assert [level["tasks"] for level in shown["levels"]] == [["TYPES", "DOCS"], ["CART", "MAIL"]]
    assert shown["schedule"]["minutes"] == 60
    assert shown["tasks"][2]["after"] == ["TYPES", "CART"]


def test_errors_are_listed_and_the_exit_code_is_1(graph: Path) -> None:
    broken = GRAPH | {"tasks": [{"id": "A"}, {"id": "B", "title": "b", "dependencies": ["C"]}]}
    graph.write_text(json.dumps(broken))
    done = maestro("graph", graph, "--svg", "a.svg")
    assert done.returncode == command.FAILED
    assert [line.split("\t")[0] for line in done.stdout.splitlines()] == ["error", "error"]
    shown = json.loads(maestro("graph", graph, "--json").stdout)
    assert [each["task"] for each in shown["errors"]] == ["A", "B"]
    assert "levels" not in shown
    assert names(graph.parent) == ["graph.json"]


def test_strict_is_stricter(graph: Path) -> None:
    done = maestro("graph", graph, "--strict")
    assert done.returncode == command.FAILED
    assert "MAIL own 'app.py'" in done.stdout
    assert "'TYPES' does not match" in done.stdout


def test_in_a_terminal_a_graph_is_a_table(graph: Path) -> None:
    shown = in_terminal("graph", graph, columns=140).text
    assert "critical path: TYPES → CART → MAIL" in shown
    assert "\x1b[2J" not in shown


def test_a_picture_is_drawn(graph: Path) -> None:
    done = maestro("graph", graph, "--svg", "graph.svg")
    assert done.returncode == command.SUCCESS
    picture = ET.parse(graph.with_suffix(".svg"))
    texts = [each.text for each in picture.iter("{http://www.w3.org/2000/svg}text")]
    assert {"TYPES", "CART", "MAIL", "Level 1: first", "gate: lint", "critical path"} <= set(texts)


def test_a_picture_replaces_nothing_but_pictures(graph: Path) -> None:
    before = graph.read_bytes()
    wrong = complaint(maestro("graph", graph, "--svg", "graph.json"), command.WRONG_USE)
    assert "ends in .svg" in wrong
    assert graph.read_bytes() == before
    assert "gone" in complaint(maestro("graph", graph, "--svg", "gone/a.svg"), command.FAILED)


@pytest.mark.parametrize("words", [("gone.json",), (".",), ("graph.json", "--workers", "0")])
def test_what_is_no_graph_is_an_error_in_one_line(graph: Path, words: tuple[str, ...]) -> None:
    done = maestro("graph", *words)
    assert done.returncode in (command.FAILED, command.WRONG_USE)
    assert len(done.stderr.splitlines()) == 1


# --- init ---


@pytest.mark.parametrize("form", ["toml", "json"])
def test_the_example_passes_the_check_and_is_never_written_twice(
    tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert maestro("init", f"--{form}", "specs").returncode == command.SUCCESS
    path = tmp_path / "specs" / f"task-graph.{form}"
    shown = json.loads(maestro("graph", path, "--json").stdout)
    assert (shown["errors"], shown["warnings"]) == ([], [])
    path.write_text("mine")
    wrong = complaint(maestro("init", f"--{form}", "specs"), command.WRONG_USE)
    assert "exists, and is not replaced" in wrong
    assert path.read_text() == "mine"


def test_the_example_is_toml_in_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    maestro("init")
    assert names(tmp_path) == ["task-graph.toml"]
    assert "# A graph is a program" in (tmp_path / "task-graph.toml").read_text()


@pytest.mark.parametrize("form", ["toml", "json"])
def test_the_example_is_complete_in_its_first_run_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    folder = tmp_path / "project"
    folder.mkdir()
    monkeypatch.chdir(folder)
    maestro("init", f"--{form}")
    store = {"MAESTRO_STATE_DIR": str(tmp_path / "state")}
    for words in ((), ("--force",)):
        done = maestro_process("run", f"task-graph.{form}", *words, **store)
        assert done.returncode == command.SUCCESS, done.stderr
        assert "greeting: 4 of 4 tasks complete (4 executed, 0 reused)\n" in done.stdout
        assert "attempt 2" not in done.stdout + done.stderr
    assert "gate:2:syntax" in maestro("status", "greeting", **store).stdout
    greet = subprocess.run(["sh", "greeting/greet", "Ada"], capture_output=True, check=True)
    assert greet.stdout == b"Hello, Ada!\n"


def test_the_verifications_of_the_example_look_at_the_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    maestro("init")
    graph = check_file("task-graph.toml").graph
    assert graph is not None
    for task in graph.tasks:
        assert task.verification is not None
        done = subprocess.run(
            ["sh", "-c", task.verification.command], check=False, stderr=subprocess.DEVNULL
        )
        assert done.returncode != 0, task.id


@pytest.mark.parametrize("form", ["toml", "json"])
def test_init_writes_a_graph_that_an_agent_executes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert maestro("init", "--agent", "codex", f"--{form}").returncode == command.SUCCESS
    graph = check_file(tmp_path / f"task-graph.{form}").graph
    assert graph is not None
    (persona,) = graph.personas
    assert (persona.agent, persona.command, persona.permissions) == ("codex", None, "edit")
    assert "codex" in complaint(maestro("init", "--agent", "cody"), command.WRONG_USE)


def test_init_takes_one_of_its_forms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    wrong = complaint(maestro("init", "--json", "--toml"), command.WRONG_USE)
    assert "either --toml or --json" in wrong
    assert names(tmp_path) == []


def test_a_link_is_not_followed_by_init(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "task-graph.toml").symlink_to(tmp_path / "elsewhere")
    assert maestro("init").returncode == command.WRONG_USE
    assert not (tmp_path / "elsewhere").exists()


# --- the dry run ---


def test_a_dry_run_shows_workers_and_missing_programs_and_writes_nothing(graph: Path) -> None:
    done = dry_run("--workers", "2", MAESTRO_STATE_DIR=str(graph.parent / "state"))
    assert done.returncode == command.SUCCESS, done.stderr
    assert "1\tTYPES\t0 min\t10 min\n1\tCART\t10 min\t40 min\n" in done.stdout
    assert "2\tDOCS\t0 min\t5 min\n" in done.stdout
    assert "not on PATH: no-such-program, needed by CART\n" in done.stdout
    assert "not on PATH: test" not in done.stdout
    assert "nothing was executed or written" in done.stderr
    assert names(graph.parent) == ["graph.json"]


def test_a_dry_run_lists_all_that_a_run_would_refuse_and_writes_nothing(
    graph: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    (graph.parent / "few_people.py").write_text("def builds(task): pass\n")
    personas: list[Any] = [
        *({"python": "no_such_module:f"}, {"python": "few_people:nofn"}, "aider", None),
        *({"command": "no-such-tool"}, {"command": "./gone"}, {"python": "few_people:builds"}),
    ]
    tasks = [
        {"id": f"T{number}", "title": "t", "persona": persona}
        for number, persona in enumerate(personas)
    ]
    graph.write_text(json.dumps({"feature": "shop", "tasks": tasks}))
    verbs = ("run", "graph.json"), ("zerg", "rush", "-g", "graph.json")
    planned = [maestro_process(*words, "--dry-run") for words in verbs]
    assert [each.returncode for each in planned] == [command.FAILED] * 2
    shown = json.loads(maestro_process("run", "graph.json", "--dry-run", "--json").stdout)
    assert [each["tasks"] for each in shown["refused"]] == [[f"T{at}"] for at in range(6)]
    assert names(graph.parent) == ["few_people.py", "graph.json"]
    started = maestro_process("run", "graph.json")
    assert started.returncode == command.WRONG_USE
    refused = [line[2:] for line in started.stderr.splitlines() if line.startswith("  T")]
    assert len(refused) == 6
    for each in planned:
        lines = [line for line in each.stdout.splitlines() if line.startswith("cannot be")]
        assert lines == [f"cannot be executed: {line}" for line in refused]


def test_a_persona_option_may_name_an_agent(graph: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    graph.write_text(json.dumps({"feature": "shop", "tasks": [{"id": "A", "title": "a"}]}))
    shown = json.loads(dry_run("--persona", "codex", "--json").stdout)
    (refused,) = shown["refused"]
    assert (
        "the agent 'codex' is not installed, or not on PATH; install it: npm" in refused["reason"]
    )
    shown = json.loads(dry_run("--persona", "true {prompt}", "--json").stdout)
    assert shown["refused"] == []


def test_what_a_run_refuses_has_the_syntax_of_the_file_and_names_the_folder(
    graph: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    toml = graph.with_suffix(".toml")
    toml.write_text('feature = "shop"\n[tasks.A]\ntitle = "a"\n')
    refused = maestro("run", "graph.toml").stderr
    assert 'A: no persona; give the graph one, as persona = { command = "…" } at its' in refused
    persona = {"command": "tools/write.sh"}
    graph.write_text(json.dumps(GRAPH | {"persona": persona, "tasks": [{"id": "A", "title": "a"}]}))
    refused = maestro("run", "graph.json").stderr
    said = "the program 'tools/write.sh' is not there, in {}, where the tasks are executed"
    assert f"{said.format(graph.parent)}\n" in refused
    tool = graph.parent / "tools" / "write.sh"
    tool.parent.mkdir()
    tool.write_text("")
    elsewhere = graph.parent / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    refused = maestro("run", "../graph.json").stderr
    assert f"{said.format(elsewhere)}; it is in {graph.parent}: run the graph from there" in refused


def test_only_shows_a_task_with_what_it_depends_on(graph: Path) -> None:
    shown = json.loads(dry_run("--only", "MAIL", "--json").stdout)
    assert [each["id"] for each in shown["tasks"]] == ["TYPES", "MAIL"]
    assert shown["missing_programs"] == []
    assert shown["schedule"]["minutes"] == 30
    wrong = complaint(dry_run("--only", "MIAL"), command.WRONG_USE)
    assert "graph.json has no such task; did you mean MAIL?" in wrong
    wrong = complaint(dry_run("--only", "ZZ"), command.WRONG_USE)
    assert "graph.json has no such task; it has TYPES, " in wrong


def test_a_dry_run_of_a_graph_with_errors_ends_with_1(graph: Path) -> None:
    graph.write_text("{}")
    assert dry_run().returncode == command.FAILED


@pytest.mark.parametrize(
    "option",
    [
        *(("--dry-run",), ("--only", "A"), ("--workers", "2"), ("--strict",)),
        *(("--force",), ("--budget", "5"), ("--persona", "true")),
    ],
)
def test_options_of_graphs_are_refused_for_workflows(option: tuple[str, ...], graph: Path) -> None:
    wrong = complaint(maestro("run", "shop:build", *option), command.WRONG_USE)
    assert "are for task graphs" in wrong
    assert complaint(maestro("run", "graph.json", "word", "--dry-run"), command.WRONG_USE)


def test_hostile_ids_titles_and_commands_execute_nothing(graph: Path) -> None:
    evil = f"$(touch {graph.parent}/pwned); `touch {graph.parent}/pwned`"
    task = {"id": "A", "title": evil, "verification": evil, "prompt": evil, "files": [evil]}
    persona = {"command": ["true", evil]}
    graph.write_text(json.dumps({"feature": evil, "persona": persona, "tasks": [task]}))
    done = maestro_process("run", "graph.json", "--dry-run")
    assert done.returncode == command.SUCCESS, done.stderr
    graph.write_text(json.dumps({"feature": evil, "tasks": [task | {"id": evil}]}))
    assert maestro("graph", graph).returncode == command.FAILED
    assert names(graph.parent) == ["graph.json"]
