"""Every variant of a task graph is read, and written again as it was."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from hypothesis import given, settings

from maestro_hive.team.graph import (
    Budget,
    Conflict,
    Gate,
    Graph,
    Persona,
    Retry,
    Task,
    Verification,
    check_graph,
)
from maestro_hive.team.graph_files import example
from tests.tables import for_each
from tests.unit.team.graphs import SEEDS, Maker, checked, document, good, task, warnings

if TYPE_CHECKING:
    from maestro_hive.team.graph.documents import Form


_FORMS: tuple[Form, ...] = ("toml", "json")


def read(tree: Any) -> Graph:
    graph = good(tree).graph
    assert graph is not None
    return graph


def levels(tree: Any) -> dict[int, tuple[str, ...]]:
    return {level.number: level.tasks for level in read(tree).levels}


# --- levels ---


@for_each(
    "given_levels",
    [
        {"1": {"name": "first", "tasks": ["A"]}, "2": {"name": "then", "tasks": ["B"]}},
        [{"name": "first", "tasks": ["A"]}, {"name": "then", "tasks": ["B"]}],
        [{"level": 2, "name": "then", "tasks": ["B"]}, {"level": 1, "tasks": ["A"]}],
        [["A"], ["B"]],
        {"1": ["A"], "2": ["B"]},
        None,
    ],
)
@for_each("of_tasks", [{}, {"level": None}])
def test_levels_are_a_map_or_a_list_or_derived_from_dependencies(
    given_levels: Any, of_tasks: dict[str, Any]
) -> None:
    tree = document(task("A", **of_tasks), task("B", "A", **of_tasks), levels=given_levels)
    assert levels(tree) == {1: ("A",), 2: ("B",)}


def test_levels_may_start_at_0() -> None:
    tree = document(task("A", level=0), task("B", "A", level=1), task("C", "B"))
    assert levels(tree) == {0: ("A",), 1: ("B",), 2: ("C",)}
    assert levels(tree | {"levels": [["A"], ["B"]]}) == {0: ("A",), 1: ("B",), 2: ("C",)}


def test_a_task_without_level_is_one_level_after_the_last_of_its_dependencies() -> None:
    tree = document(task("C", "B", "A"), task("A", level=5), task("B", "A"))
    assert levels(tree) == {5: ("A",), 6: ("B",), 7: ("C",)}


def test_the_level_of_a_task_is_its_own_where_the_levels_differ() -> None:
    tree = document(task("A", level=2), levels={"1": {"name": "x", "tasks": ["A", "gone"]}})
    assert levels(tree)[2] == ("A",)
    assert warnings(tree) == ["two-levels", "unknown-task"]


def test_an_agent_without_a_name_is_known_by_its_own() -> None:
    claude = {"agent": "claude", "model": "opus"}
    tree = document(
        task("A", persona=claude), task("B"), task("C", persona="claude"), persona=claude
    )
    graph = read(tree)
    assert {persona.name for each in graph.tasks if (persona := graph.persona_of(each))} == {
        "claude"
    }


def test_a_level_may_have_a_name_and_gates_and_no_list_of_tasks() -> None:
    gates = [{"command": "make test"}, {"name": "slow", "command": "x", "required": False}]
    tree = document(task("A"), levels={"1": {"gates": gates, "parallel": False}})
    (level,) = read(tree).levels
    assert (level.name, level.tasks, level.parallel) == ("level 1", ("A",), False)
    assert level.gates == (
        Gate(name="gate 1", command="make test", required=True),
        Gate(name="slow", command="x", required=False),
    )
    assert level.is_gated


# --- tasks ---


def test_tasks_may_be_a_map_by_id() -> None:
    tree = {"feature": "shop", "tasks": {"A": {"title": "a"}, "B": task("B", "A")}}
    assert [each.id for each in read(tree).tasks] == ["A", "B"]


@for_each(
    "members",
    [
        {"files": {"create": ["a"], "modify": ["b"], "delete": ["c"], "read": ["r"]}},
        {"files": ["a", "b", "c"]},
        {"files_owned": ["a", "b", "c"], "files_read": ["r"]},
        {"files": {"create": ["a"], "move": [{"from": "b", "to": "c"}]}},
        {"files": {"create": ["a"], "move": [["b", "c"]]}},
        {"files": {"create": ["a"], "move": ["b -> c"]}},
        {"files": {"create": ["a"], "move": {"b": "c"}}},
    ],
)
def test_what_a_task_writes_is_its_own(members: dict[str, Any]) -> None:
    (found,) = read(document(task("A", **members))).tasks
    assert found.files.owned == ("a", "b", "c")


def test_a_verification_is_an_object_or_a_text() -> None:
    full = {"command": "a | b", "timeout_seconds": 30, "expected": "OK"}
    one, other = read(document(task("A", verification=full), task("B", verification="a; b"))).tasks
    assert one.verification == Verification(command="a | b", timeout_seconds=30, expected="OK")
    assert other.verification == Verification(command="a; b")


def test_null_is_no_member() -> None:
    keys = (
        "level dependencies files verification estimate_minutes steps persona budget retry".split()
    )
    tree = document(task("A") | dict.fromkeys([*keys, "integration_test", "context"]))
    assert read(tree | {"levels": None, "conflict_matrix": None}).tasks[0].dependencies == ()


def test_what_only_personas_read_is_no_error_in_another_type() -> None:
    tree = document(task("A", context={"a": 1}, acceptance_criteria="works", skills_required=[1]))
    assert warnings(tree) == ["ignored"] * 3
    assert read(tree).tasks[0].context is None


def test_steps_and_the_rest_of_a_task_are_read() -> None:
    step = {
        "step": 1,
        "action": "write_test",
        "file": "t.py",
        "run": "pytest",
        "verify": "exit_code",
    }
    tree = document(task("A", steps=[step], consumers=["A"], phase="core", prompt="do it"))
    (found,) = read(tree).tasks
    assert (found.steps[0].action, found.steps[0].run) == ("write_test", "pytest")
    assert (found.consumers, found.phase, found.prompt) == (("A",), "core", "do it")


# --- conflicts ---


@for_each(
    "matrix",
    [
        {"description": "…", "conflicts": [{"tasks": ["A", "B"], "reason": "r"}]},
        [{"tasks": ["A", "B"], "reason": "r"}],
        {"conflicts": [["A", "B"]]},
        {"A": ["B"]},
    ],
)
def test_conflicts_are_read_in_every_shape(matrix: Any) -> None:
    (conflict,) = read(document(task("A"), task("B"), conflict_matrix=matrix)).conflicts
    assert conflict.tasks == ("A", "B")


def test_a_conflict_that_is_not_understood_is_a_warning() -> None:
    tree = document(task("A"), conflict_matrix={"conflicts": [{"pair": "A and B"}, ["A", "gone"]]})
    assert warnings(tree) == ["unknown-conflict", "unknown-task"]


# --- additions ---


def test_personas_are_commands_functions_or_agents() -> None:
    tree = document(
        task("A", persona="writer"),
        task("B", persona={"python": "shop.team:build"}),
        task("C", persona="codex"),
        task("D"),
        persona="reviewer",
        personas={
            "writer": {"command": "claude -p {prompt} --name 'a b'"},
            "reviewer": {"agent": "claude", "model": "opus", "args": ["--fast"]},
        },
    )
    graph = read(tree)
    found = [graph.persona_of(each) for each in graph.tasks]
    assert found == [
        Persona(name="writer", command=("claude", "-p", "{prompt}", "--name", "a b")),
        Persona(name="B", python="shop.team:build"),
        Persona(name="codex", agent="codex"),
        Persona(name="reviewer", agent="claude", model="opus", args=("--fast",)),
    ]


def test_a_task_has_no_persona_if_nobody_is_named() -> None:
    graph = read(document(task("A")))
    assert graph.persona_of(graph.tasks[0]) is None


def test_budgets_and_retries_have_a_short_form() -> None:
    tree = document(
        task("A", budget=1000, retry=2, timeout_seconds=1.5),
        task("B", budget={"usd": 0.5}, retry={"max_attempts": 4, "rounds": 2}),
        budget={"tokens": 9, "usd": 1},
        retry={"max_handovers": 0},
    )
    graph = read(tree)
    assert (graph.budget, graph.retry) == (Budget(tokens=9, usd=1), Retry(max_handovers=0))
    assert [each.budget for each in graph.tasks] == [Budget(tokens=1000), Budget(usd=0.5)]
    assert [each.retry for each in graph.tasks] == [
        Retry(max_attempts=2),
        Retry(max_attempts=4, rounds=2),
    ]
    assert graph.tasks[0].timeout_seconds == 1.5


def test_toml_is_read_like_json() -> None:
    toml, as_json = (check_graph(example(form).encode(), form) for form in _FORMS)
    assert toml.graph == as_json.graph
    assert toml.errors == toml.warnings == as_json.warnings == ()


def test_times_of_toml_are_texts() -> None:
    text = b'feature = "f"\ngenerated = 2026-01-02T03:04:05Z\n[tasks.A]\ntitle = "t"\n'
    graph = check_graph(text).graph
    assert graph is not None
    assert graph.to_document()["generated"] == "2026-01-02T03:04:05+00:00"


# --- the round trip ---


@given(SEEDS)
@settings(max_examples=150, deadline=None)
def test_a_graph_is_written_as_it_was_read(seed: int) -> None:
    tree = Maker(seed).document()
    graph = read(tree)
    again = graph.to_document()
    assert json.dumps(again) == json.dumps(tree)  # the order of the keys, too
    assert read(again) == graph


def test_what_was_replaced_is_written_and_the_rest_stays() -> None:
    tree = document(
        task("A", files_owned=["a"], mine={"x": [1]}, verification="true"),
        task("B", "A", zone=3),
        notes="n",
    )
    graph = read(tree)
    first = replace(
        graph.tasks[0],
        title="new",
        files=replace(graph.tasks[0].files, create=("c",)),
        verification=Verification(command="false", timeout_seconds=3),
    )
    changed = replace(graph, feature="other", tasks=(first, graph.tasks[1]))
    assert changed.to_document() == {
        "feature": "other",
        "tasks": [
            {
                "id": "A",
                "title": "new",
                "dependencies": [],
                "mine": {"x": [1]},
                "verification": {"command": "false", "timeout_seconds": 3},
                "files": {"create": ["c"], "modify": ["a"]},
            },
            tree["tasks"][1],
        ],
        "notes": "n",
    }
    assert graph.to_document() == tree
    assert (graph.extra, graph.tasks[0].extra) == ({"notes": "n"}, {"mine": {"x": [1]}})


def test_a_graph_that_a_program_made_is_written_and_read_again() -> None:
    made = Graph(
        feature="f",
        tasks=(
            Task(id="A", title="a", level=1, persona="p", budget=Budget(tokens=5)),
            Task(id="B", title="b", level=2, dependencies=("A",), retry=Retry(max_attempts=2)),
        ),
        conflicts=(Conflict(tasks=("A", "B"), reason="r"),),
        personas=(Persona(name="p", command=("run", "{prompt}")),),
    )
    again = read(made.to_document())
    assert again.tasks == made.tasks
    assert (again.conflicts, again.personas) == (made.conflicts, made.personas)
    assert checked(made.to_document()).warnings == ()
