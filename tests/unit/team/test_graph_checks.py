"""All errors of a task graph are reported at once, each with its place and what to do."""

from __future__ import annotations

import copy
import json
import pickle
import time
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from jsonschema import Draft7Validator

from maestro_hive.kernel.errors import MaestroError
from maestro_hive.team import graph_files
from maestro_hive.team.graph import GraphError, Problem, check_graph
from maestro_hive.team.shell_syntax import unreadable
from maestro_hive.team.state import load_schema
from tests.tables import for_each
from tests.timing import cpu_seconds
from tests.unit.team.graphs import SEEDS, Maker, checked, codes, document, good, task, warnings

if TYPE_CHECKING:
    from pathlib import Path

    from maestro_hive.team.graph import Checked

SMALL = document(task("A"))
SCHEMA = Draft7Validator(load_schema("task_graph"))

#: What is changed in a graph that is right, and the one error that follows, with its place.
WRONG: dict[str, tuple[Any, str, str]] = {
    "no object": ([], "wrong-type", "$"),
    "no feature": ({"tasks": [task("A")]}, "missing-feature", "$"),
    "an empty feature": (SMALL | {"feature": ""}, "missing-feature", "$"),
    "feature of another type": (SMALL | {"feature": 3}, "wrong-type", "$.feature"),
    "no tasks": ({"feature": "f"}, "missing-tasks", "$"),
    "an empty list": (document(), "no-tasks", "$.tasks"),
    "tasks of another type": (SMALL | {"tasks": "A"}, "wrong-type", "$.tasks"),
    "a task of another type": (document("A"), "wrong-type", "$.tasks[0]"),
    "no id": (document({"title": "t"}), "missing-id", "$.tasks[0]"),
    "an id of another type": (document(task("A") | {"id": 7}), "wrong-type", "$.tasks[0].id"),
    "an id twice": (document(task("A"), task("A")), "duplicate-id", "$.tasks[1].id"),
    "another id in a map": (
        {"feature": "f", "tasks": {"A": task("B")}},
        "two-ids",
        "$.tasks.A.id",
    ),
    "no title": (document({"id": "A"}), "missing-title", "$.tasks[0]"),
    "a blank title": (document(task("A", title=" ")), "missing-title", "$.tasks[0]"),
    "an unknown dependency": (
        document(task("A"), task("B", "A", "C")),
        "unknown-dependency",
        "$.tasks[1].dependencies[1]",
    ),
    "dependencies of another type": (
        document(task("A", dependencies="B")),
        "wrong-type",
        "$.tasks[0].dependencies",
    ),
    "a dependency of another type": (
        document(task("A", dependencies=[None])),
        "wrong-type",
        "$.tasks[0].dependencies[0]",
    ),
    "itself": (document(task("A", "A")), "cycle", "$.tasks[0].dependencies"),
    "a circle": (document(task("A", "B"), task("B", "A")), "cycle", "$.tasks[0].dependencies"),
    "a level of another type": (document(task("A", level="1")), "wrong-type", "$.tasks[0].level"),
    "a level that is a truth": (document(task("A", level=True)), "wrong-type", "$.tasks[0].level"),
    "a negative level": (document(task("A", level=-1)), "out-of-range", "$.tasks[0].level"),
    "an estimate of another type": (
        document(task("A", estimate_minutes="5")),
        "wrong-type",
        "$.tasks[0].estimate_minutes",
    ),
    "a huge estimate": (
        document(task("A", estimate_minutes=1e300)),
        "out-of-range",
        "$.tasks[0].estimate_minutes",
    ),
    "files of another type": (document(task("A", files="a.py")), "wrong-type", "$.tasks[0].files"),
    "a file of another type": (
        document(task("A", files={"create": [1]})),
        "wrong-type",
        "$.tasks[0].files.create[0]",
    ),
    "an empty path": (document(task("A", files=[""])), "bad-path", "$.tasks[0].files[0]"),
    "a move of another type": (
        document(task("A", files={"move": ["a"]})),
        "wrong-type",
        "$.tasks[0].files.move[0]",
    ),
    "a verification without command": (
        document(task("A", verification={"timeout_seconds": 3})),
        "missing-command",
        "$.tasks[0].verification",
    ),
    "a blank command": (
        document(task("A", verification=" ")),
        "not-executable",
        "$.tasks[0].verification",
    ),
    "a command with a zero byte": (
        document(task("A", verification={"command": "a\0b"})),
        "not-executable",
        "$.tasks[0].verification.command",
    ),
    "a verification of another type": (
        document(task("A", verification=["make"])),
        "wrong-type",
        "$.tasks[0].verification",
    ),
    "no time at all": (
        document(task("A", verification={"command": "x", "timeout_seconds": 0})),
        "out-of-range",
        "$.tasks[0].verification.timeout_seconds",
    ),
    "a step without action": (
        document(task("A", steps=[{"step": 1}])),
        "missing-action",
        "$.tasks[0].steps[0]",
    ),
    "levels of another type": (SMALL | {"levels": 3}, "wrong-type", "$.levels"),
    "a level that is no number": (
        SMALL | {"levels": {"one": {"name": "n", "tasks": []}}},
        "bad-level",
        "$.levels.one",
    ),
    "a level twice": (
        SMALL | {"levels": {"1": ["A"], "01": []}},
        "duplicate-level",
        "$.levels['01']",
    ),
    "a gate without command": (
        SMALL | {"levels": {"1": {"gates": [{"name": "g"}]}}},
        "missing-command",
        "$.levels['1'].gates[0]",
    ),
    "two gates of one name": (
        SMALL
        | {"levels": {"1": {"gates": [{"command": "a"}, {"name": "gate 1", "command": "b"}]}}},
        "duplicate-gate",
        "$.levels['1'].gates[1]",
    ),
    "a gate with a name of two lines": (
        SMALL | {"levels": {"1": {"gates": [{"name": "a\nb", "command": "x"}]}}},
        "bad-gate",
        "$.levels['1'].gates[0].name",
    ),
    "a gate with a long name": (
        SMALL | {"levels": {"1": {"gates": [{"name": "x" * 101, "command": "x"}]}}},
        "bad-gate",
        "$.levels['1'].gates[0].name",
    ),
    "a gate that is never reached": (
        document(
            task("A", "B", level=1),
            task("B", level=2),
            levels={"1": {"gates": [{"command": "make"}]}},
        ),
        "unreachable-gate",
        "$.tasks[0].dependencies[0]",
    ),
    "an unknown persona": (
        document(task("A", persona="x")),
        "unknown-persona",
        "$.tasks[0].persona",
    ),
    "a persona without command": (
        SMALL | {"personas": {"p": {}}},
        "bad-persona",
        "$.personas.p",
    ),
    "a persona with two": (
        SMALL | {"personas": {"p": {"command": "x", "agent": "claude"}}},
        "bad-persona",
        "$.personas.p",
    ),
    "an unknown agent": (
        SMALL | {"personas": {"p": {"agent": "gpt"}}},
        "bad-persona",
        "$.personas.p.agent",
    ),
    "a function that is none": (
        SMALL | {"personas": {"p": {"python": "os.system"}}},
        "bad-persona",
        "$.personas.p.python",
    ),
    "a prompt in the script of a shell": (
        SMALL | {"personas": {"p": {"command": ["sh", "-c", "tool '{prompt}'"]}}},
        "prompt-in-script",
        "$.personas.p.command",
    ),
    "a quote that is not closed": (
        SMALL | {"personas": {"p": {"command": "run 'it"}}},
        "not-executable",
        "$.personas.p.command",
    ),
    "a persona's name": (
        SMALL | {"personas": {"a b": {"command": "x"}}},
        "bad-id",
        "$.personas['a b']",
    ),
    "a budget of nothing": (SMALL | {"budget": {}}, "empty-budget", "$.budget"),
    "less money than is counted": (
        SMALL | {"budget": {"usd": 1e-9}},
        "out-of-range",
        "$.budget.usd",
    ),
    "a budget of no tokens": (SMALL | {"budget": {"tokens": 0}}, "out-of-range", "$.budget.tokens"),
    "no attempts": (document(task("A", retry=0)), "out-of-range", "$.tasks[0].retry"),
}


@for_each("name", WRONG)
def test_an_error_has_a_code_a_place_and_a_way_out(name: str) -> None:
    tree, code, path = WRONG[name]
    found = checked(tree)
    assert [(each.code, each.path) for each in found.errors] == [(code, path)], found.errors
    assert all(each.message and each.advice for each in found.errors)
    assert (found.graph, found.plan) == (None, None)


@for_each(
    "bad",
    ["../../etc", "a/b", "-rf", "1", "a b", "a\nb", "a;rm", "$(id)", "a" * 65, "ä", "A\n", "`x`"],
)
def test_an_id_that_could_mean_something_to_a_shell_or_a_path_is_refused(bad: str) -> None:
    (error,) = checked(document(task(bad))).errors
    assert (error.code, error.path) == ("bad-id", "$.tasks[0].id")
    assert "\n" not in error.message


def test_all_errors_are_reported_at_once_with_their_lines() -> None:
    tree = document(
        {"id": "A"},
        task("B", "gone", level="2"),
        task("C", "D", verification={}),
        task("D", "C"),
        task("B"),
        personas={"p": {}},
    )
    text = json.dumps(tree, indent=1)
    found = check_graph(text.encode(), "json")
    lines = [""] + [each.strip() for each in text.splitlines()]
    assert [(each.code, each.task, lines[each.line or 0]) for each in found.errors] == [
        ("bad-persona", None, '"p": {}'),
        ("missing-title", "A", "{"),
        ("wrong-type", "B", '"level": "2"'),
        ("missing-command", "C", '"verification": {}'),
        ("duplicate-id", "B", '"id": "B",'),
        ("unknown-dependency", "B", '"gone"'),
        ("cycle", "C", '"dependencies": ['),
    ]
    assert [each.line for each in found.errors][1] == 4


def test_a_cycle_is_named_by_its_members_in_order() -> None:
    tree = document(task("A"), task("B", "A", "D"), task("C", "B"), task("D", "C"), task("E", "D"))
    (error,) = checked(tree).errors
    assert "B → D → C → B" in error.message
    two = document(task("A", "B"), task("B", "A"), task("C", "D"), task("D", "E"), task("E", "C"))
    assert codes(two) == ["cycle", "cycle"]


def test_a_similar_id_is_suggested() -> None:
    (error,) = checked(document(task("SHOP-L1-001"), task("B", "SHOP-L1-01"))).errors
    assert "SHOP-L1-001" in error.advice


def test_the_name_that_is_meant_is_suggested_everywhere() -> None:
    tree = document(
        task("CART", persona="develper"),
        task("B", "cart-", persona={"agent": "cloude"}),
        task("C", persona={"agent": "claude", "permissions": "edti"}),
        personas={"developer": {"command": "x"}},
    )
    named = {each.code: each.advice for each in checked(tree).errors if each.code != "bad-persona"}
    assert {code: advice.partition("?")[0] for code, advice in named.items()} == {
        "unknown-dependency": "did you mean 'CART'",
        "unknown-persona": "did you mean 'developer'",
    }
    refused = [each.advice for each in checked(tree).errors if each.code == "bad-persona"]
    assert [each.partition("?")[0] for each in refused] == [
        "did you mean 'claude'",
        "did you mean 'edit'",
    ]
    levels = {"1": {"tasks": ["crat"]}}
    (warning,) = good(document(task("CART"), levels=levels)).warnings
    assert warning.advice.startswith("did you mean 'CART'?")


def test_many_unknown_ids_in_a_large_graph_are_found_quickly() -> None:
    tree = document(*(task(f"TASK-{at}", f"TSAK-{at}") for at in range(5000)))
    before = time.process_time()
    found = checked(tree)
    assert time.process_time() - before < 10
    assert "did you mean 'TASK-0'" in found.errors[0].advice
    assert len(found.errors) + found.more_errors == 5000


def test_a_persona_that_is_refused_is_no_unknown_persona() -> None:
    tree = document(task("A", persona="d"), personas={"d": {"command": "run 'it"}})
    assert codes(tree) == ["not-executable"]


def test_a_gate_of_a_level_without_tasks_is_a_warning() -> None:
    gated = {"name": "late", "gates": [{"command": "make"}]}
    tree = document(task("A"), levels={"1": {"name": "n"}, "7": gated})
    (warning,) = good(tree).warnings
    assert (warning.code, warning.path) == ("gate-without-tasks", "$.levels['7'].gates")
    assert warning.message == "level 7 has a gate, and no task"


def test_warnings_do_not_stop_a_run() -> None:
    tree = document(
        task("A", level=2, files=["x.py"], depends_on=["B"], dependancies=[], consumers=["gone"]),
        task("B", level=2, files=["./x.py"]),
        task("C", "B", level=2),
        task("D", "E", level=1, files=["/etc/passwd"]),
        task("E", level=3),
        task("a", level=1),
        total_tasks=99,
        budget={"tokens": 5, "euro": 1},
    )
    del tree["tasks"][0]["dependencies"]
    assert sorted(warnings(tree)) == [
        "later-level",
        "outside",
        "same-level",
        "shared-file",
        "similar-id",
        "unknown-key",
        "unknown-key",
        "unknown-key",
        "unknown-task",
        "wrong-count",
    ]


MISTYPED: dict[str, tuple[Any, str, str]] = {
    "a budget": (SMALL | {"bugdet": 5}, "$.bugdet", "'budget'"),
    "a timeout of all tasks": (SMALL | {"timeout": 5}, "$.timeout", "'timeout_seconds'"),
    "a gate of no level": (SMALL | {"gates": []}, "$.gates", "'levels'"),
    "files": (document(task("A", files={"crate": ["a"]})), "$.tasks[0].files.crate", "'create'"),
    "a timeout": (
        document(task("A", verification={"command": "x", "timeout": 5})),
        "$.tasks[0].verification.timeout",
        "'timeout_seconds'",
    ),
    "a timeout of a persona": (
        SMALL | {"personas": {"p": {"command": "x", "timeout": 5}}},
        "$.personas.p.timeout",
        "'timeout_seconds'",
    ),
    "a model": (
        SMALL | {"persona": {"agent": "claude", "modle": "opus"}},
        "$.persona.modle",
        "'model'",
    ),
    "dependencies as in camel case": (
        document({"id": "A", "title": "a", "dependsOn": []}),
        "$.tasks[0].dependsOn",
        "'dependencies'",
    ),
    "a timeout in camel case": (
        document(task("A", timeoutSeconds=5)),
        "$.tasks[0].timeoutSeconds",
        "'timeout_seconds'",
    ),
    "attempts beside 'retry'": (
        document(task("A", max_attempts=5)),
        "$.tasks[0].max_attempts",
        "belongs into 'retry'",
    ),
    "attempts in camel case, mistyped, beside 'retry'": (
        document(task("A", maxAtempts=5)),
        "$.tasks[0].maxAtempts",
        "belongs into 'retry'",
    ),
    "a limit beside 'budget'": (SMALL | {"tokens": 5}, "$.tokens", "belongs into 'budget'"),
    "an agent of a task": (
        document(task("A", agent="claude")),
        "$.tasks[0].agent",
        "belongs into 'persona'",
    ),
    "workers": (SMALL | {"workers": 5}, "$.workers", "--workers N"),
    "attempts of a retry in camel case": (
        document(task("A", retry={"maxAttempts": 5})),
        "$.tasks[0].retry.maxAttempts",
        "'max_attempts'",
    ),
    "gates": (SMALL | {"levels": {"1": {"gate": []}}}, "$.levels['1'].gate", "'gates'"),
}


@for_each("name", MISTYPED)
def test_a_key_that_looks_mistyped_is_a_warning_with_the_one_that_is_meant(name: str) -> None:
    tree, path, meant = MISTYPED[name]
    found = good(tree)
    (warning,) = found.warnings
    assert (warning.code, warning.path) == ("unknown-key", path)
    assert meant in warning.advice
    assert found.graph is not None
    assert found.graph.to_document() == tree


def test_keys_that_are_like_no_other_are_the_documents_own_business() -> None:
    tree = document(
        task("A", owner="me", files={"notes": 1}, verification={"command": "x", "why": "y"}),
        personas={"p": {"command": "x", "description": "does it", "role": "maker"}},
        levels={"1": {"goal": "all"}},
        **{"$schema": "s", "notes": [], "author": "me", "created_at": "now"},
    )
    assert good(tree).warnings == ()


def test_warnings_have_the_order_of_the_document() -> None:
    names = ["deps", "verify", "minutes", "timeout", "promt", "buget", "statsu"]
    tree = document({"id": "A", "title": "t", **dict.fromkeys(names, 1)})
    assert [each.path for each in good(tree).warnings] == [f"$.tasks[0].{each}" for each in names]


@for_each(
    "command",
    [
        *(
            'echo "unclosed',
            "echo 'unclosed",
            "echo $(date",
            "(make",
            "make)",
            "make &&",
            "make | | x",
        ),
        *(
            "make ; ; x",
            "if true; then x",
            "make; done",
            "make\n&& x",
            "echo `date",
            "cat <",
            "&& x",
        ),
        "for each in a b; do echo $each",
    ],
)
def test_a_command_that_the_shell_cannot_read_is_an_error(tmp_path: Path, command: str) -> None:
    tree = document(
        task("A", verification=command),
        task("B", verification={"command": command}),
        levels={"1": {"gates": [{"command": "true"}, {"name": "g", "command": command}]}},
    )
    assert [(each.code, each.path, each.task) for each in check_file(tmp_path, tree).errors] == [
        ("not-executable", "$.tasks[0].verification", "A"),
        ("not-executable", "$.tasks[1].verification.command", "B"),
        ("not-executable", "$.levels['1'].gates[1].command", None),
    ]


@for_each(
    "command",
    [
        *("make test", "a && b || c | d ; e", "test -f 'a b' && grep -q \"x y\" z.txt", "A=1 b $C"),
        *(
            "(a; b) > x 2>&1 &",
            "if a; then b; fi",
            "case $x in a) b;; esac",
            "x=$((1 + 2)); [ $x = 3 ]",
        ),
        *(
            "cat <<EOF\n$(x)\nEOF\n",
            "a\nb\n",
            'echo "$(date)"',
            "! a",
            "{ a; }",
            "echo \\\" # '",
            "[[ a ]]",
        ),
    ],
)
def test_a_command_that_the_shell_can_read_is_none(tmp_path: Path, command: str) -> None:
    assert check_file(tmp_path, document(task("A", verification=command))).errors == ()


def test_the_check_of_commands_executes_nothing_of_them(tmp_path: Path) -> None:
    mark = tmp_path / "executed"
    hostile = [
        *(f"touch {mark}", f"$(touch {mark})", f"`touch {mark}`", f"}}; touch {mark}; {{"),
        *(f"fi; touch {mark}; if x", f"set +n; touch {mark}", f"set +n\ntouch {mark}\n("),
        *(f"EOF\ntouch {mark}\n", f"cat <<E\n$(touch {mark})\nE", f"' ; touch {mark} ; '"),
        *(f"echo ${{x:=$(touch {mark})}} )", f"trap 'touch {mark}' EXIT; ("),
    ]
    tree = document(*(task(f"T{at}", verification=each) for at, each in enumerate(hostile)))
    assert check_file(tmp_path, tree).errors
    assert not mark.exists()


def test_usual_commands_of_ten_thousand_tasks_need_no_shell() -> None:
    usual = [f"pytest tests/test_{at}.py -k 'a or b' && test -f {at}.py" for at in range(10_000)]
    assert cpu_seconds(lambda: unreadable(usual), enough=1) < 1
    assert unreadable([*usual, "make ("]).keys() == {"make ("}


def test_a_schema_of_results_that_is_none_is_an_error_with_its_place(tmp_path: Path) -> None:
    wrong = {"type": "object", "properties": {"n": {"type": "objct"}}}
    tree = document(task("A", output_schema=wrong), task("B", "gone"), task("C", output_schema={}))
    path = tmp_path / "graph.json"
    path.write_text(json.dumps(tree, indent=1))
    unknown, schema = graph_files.check_file(path).errors
    assert unknown.code == "unknown-dependency"
    assert (schema.code, schema.task) == ("bad-schema", "A")
    assert schema.path == "$.tasks[0].output_schema.properties.n.type"
    assert "'objct' is not one of ['array'," in schema.message
    assert path.read_text().splitlines()[(schema.line or 0) - 1].strip() == '"type": "objct"'


def test_strict_makes_errors_of_tasks_that_own_the_same_file() -> None:
    tree = document(
        task("A", files=["x"]), task("B", files=["x"]), task("C", "A", "B", files=["x"])
    )
    assert warnings(tree) == ["shared-file"]
    assert codes(tree, strict=True) == ["shared-file"]
    assert codes(document(task("A", files=["x"]), task("B", "A", files=["x"])), strict=True) == []


def test_a_declared_conflict_is_no_warning() -> None:
    tree = document(task("A"), task("B"), conflict_matrix=[["A", "B"]])
    assert warnings(tree) == []


# --- documents that cannot be read ---


@for_each(
    "data, form, line",
    [
        (b'{"feature": 1,\n"feature": 2}', "json", 2),
        (b'{"a": [{"b": 1},\n{"b": "b",\n"\\u0062": 2, "c": NaN}]}', "json", 3),
        (b'{"a": "NaN: [{",\n"b": [1, -Infinity]}', "json", 2),
        (b'{"a": -1' + b"0" * 400 + b',\n\n"b": 1e999}', "json", 3),
        (b'{"feature":\n nope}', "json", 2),
        (b"", "json", 1),
        (b'{"feature": NaN}', "json", 1),
        (b'{"feature": "\\ud800"}', "json", None),
        (b'{"a": 1}\n\xff', "json", 2),
        (b"feature = 1\nfeature = 2\nx = 1\n", "toml", 2),
        (b"feature = nan", "toml", None),
        (b"feature", "toml", None),
        (b"a = " + b"[" * 5000, "toml", None),
        (b"x = 1\n" + b"a." * 100 + b"a = 1", "toml", 2),
        (b'{"a":\n' * 60 + b"1" + b"}" * 60, "json", 51),
        (b"[" * 100_000, "json", None),
    ],
)
def test_what_is_no_document_is_one_error(data: bytes, form: Any, line: int | None) -> None:
    (error,) = check_graph(data, form).errors
    assert error.code == "unreadable"
    assert line is None or error.line == line


def test_toml_errors_have_the_line_of_their_task() -> None:
    text = 'feature = "f"\n[[tasks]]\nid = "A"\ntitle = "a"\n\n[[tasks]]\nid = "B"\ntitle = 3\n'
    (error,) = check_graph(text.encode(), "toml").errors
    assert (error.path, error.line) == ("$.tasks[1].title", 8)
    mapped = 'feature = "f"\n[tasks.A]\ntitle = "a"\n[tasks.B]\ntitle = "b"\nlevel = "x"\n'
    (error,) = check_graph(mapped.encode(), "toml").errors
    assert (error.path, error.line) == ("$.tasks.B.level", 6)


def test_a_byte_order_mark_and_a_missing_form_are_no_obstacle() -> None:
    assert check_graph(b"\xef\xbb\xbf" + json.dumps(SMALL).encode()).errors == ()
    assert check_graph(b'feature = "f"\ntasks.A.title = "a"\n').errors == ()


# --- files, and the schemas ---


def check_file(folder: Path, tree: Any, *, strict: bool = False) -> Checked:
    path = folder / "graph.json"
    path.write_text(json.dumps(tree))
    return graph_files.check_file(path, strict=strict)


STRICT = {
    "a loose id": task("A", level=1),
    "level 0": task("SHOP-L1-001", level=0),
    "level 11": task("SHOP-L1-001", level=11),
    "no level": task("SHOP-L1-001"),
    "a long timeout": task(
        "SHOP-L1-001", level=1, verification={"command": "x", "timeout_seconds": 601}
    ),
    "a verification as text": task("SHOP-L1-001", level=1, verification="x"),
    "files as list": task("SHOP-L1-001", level=1, files=["a"]),
}


@pytest.mark.parametrize("name", STRICT)
def test_strict_holds_a_graph_to_the_published_schema(tmp_path: Path, name: str) -> None:
    tree = document(STRICT[name])
    assert check_file(tmp_path, tree).errors == ()
    (error,) = check_file(tmp_path, tree, strict=True).errors
    assert error.code == "schema"
    assert error.path.startswith("$.tasks[0]")
    assert error.task == tree["tasks"][0]["id"]


def test_what_passes_the_published_schema_passes_strict(tmp_path: Path) -> None:
    tree = document(
        task("SHOP-L1-001", level=1, files={"create": ["a"]}, verification={"command": "true"}),
        task("SHOP-L2-001", "SHOP-L1-001", level=2, persona="claude"),
        levels={"1": {"name": "one", "tasks": ["SHOP-L1-001"]}},
    )
    found = check_file(tmp_path, tree, strict=True)
    assert (found.errors, found.graph is not None) == ((), True)


def test_a_file_that_cannot_be_read_is_an_error_of_ours(tmp_path: Path) -> None:
    for path in (tmp_path / "gone.json", tmp_path):
        with pytest.raises(MaestroError, match=str(path)):
            graph_files.check_file(path)


def test_a_graph_error_lists_everything_and_can_be_copied(tmp_path: Path) -> None:
    path = tmp_path / "g.json"
    path.write_text(json.dumps(document({"id": "A"}, task("B", "gone"))))
    with pytest.raises(GraphError, match="2 errors") as caught:
        graph_files.load_file(path)
    assert "$.tasks[1].dependencies[0] (task B)" in str(caught.value)
    for again in (copy.copy(caught.value), pickle.loads(pickle.dumps(caught.value))):
        assert again.problems == caught.value.problems
        assert all(isinstance(each, Problem) for each in again.problems)


@pytest.mark.parametrize("name", ["task_graph", "task_graph_strict"])
def test_the_schemas_are_schemas(name: str) -> None:
    Draft7Validator.check_schema(load_schema(name))


@given(SEEDS)
@settings(max_examples=30, deadline=None)
def test_what_is_read_is_valid_by_the_schema(seed: int) -> None:
    tree = Maker(seed).document(5)
    good(tree)
    assert SCHEMA.is_valid(tree)


#: Errors that are about how the parts fit together, which no schema says.
_ABOUT_PARTS = {
    *("duplicate-id", "two-ids", "unknown-dependency", "cycle", "duplicate-level"),
    *("unreachable-gate", "unknown-persona", "not-executable", "duplicate-gate", "bad-gate"),
    "prompt-in-script",
}


@for_each("name", [name for name, each in WRONG.items() if each[1] not in _ABOUT_PARTS])
def test_what_is_wrong_in_a_part_is_invalid_by_the_schema(name: str) -> None:
    assert not SCHEMA.is_valid(WRONG[name][0])


def anything(maker: Maker, depth: int = 3) -> Any:
    """Return a value of any kind, with keys that mean something."""
    kinds = "feature tasks levels id title files persona gates budget 1 p".split()
    match maker.random.randrange(4 if depth else 2):
        case 0:
            return maker.random.choice([None, True, 0, -1, 10**30, 1.5, 1e300, "", "A", "\0", "p"])
        case 1:
            return maker.random.choice(["a b", "../x", [], {}, "make"])
        case 2:
            return [anything(maker, depth - 1) for _ in range(maker.random.randrange(4))]
        case _:
            keys = maker.random.sample(kinds, 3)
            return {key: anything(maker, depth - 1) for key in keys}


@given(SEEDS)
@settings(max_examples=200, deadline=None)
def test_any_document_is_read_or_refused(seed: int) -> None:
    maker = Maker(seed)
    members = {key: anything(maker) for key in ("levels", "personas", "conflict_matrix", "budget")}
    odd = {key: anything(maker) for key in maker.random.sample([*task("A"), "files", "steps"], 3)}
    found = checked(document(task("A") | odd, anything(maker)) | members)
    assert (found.graph is None) == bool(found.errors)


@for_each(
    "command, is_refused",
    [
        ("bash -c 'tool {prompt}'", True),
        ("/bin/dash -c {prompt}", True),
        ("zsh -lc 'tool {prompt}'", True),
        ("bash -euo pipefail -c 'tool {prompt}'", True),
        ("bash --norc -c -- 'tool {prompt}'", True),
        ("sh -c -e 'tool {prompt}'", True),
        ("env A=b timeout 60 ksh -c 'tool {prompt}'", True),
        ("sh -c 'tool \"$1\"' sh {prompt}", False),
        ("sh -c 'tool \"$2\"' sh -c {prompt}", False),
        ("sh tool.sh -c {prompt}", False),
        ("sh -e tool.sh {prompt}", False),
        ("claude -c {prompt}", False),
        ("python3 -c 'import sys; print(sys.argv[1])' {prompt}", False),
    ],
)
def test_no_shell_reads_a_prompt_as_its_script(command: str, is_refused: bool) -> None:
    tree = document(task("A"), persona={"command": command})
    assert codes(tree) == (["prompt-in-script"] if is_refused else [])
