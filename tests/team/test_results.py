"""Tasks that declare a schema for their result."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from maestro_hive.hive.errors import RunFailedError
from maestro_hive.kernel.errors import ConfigurationError
from maestro_hive.team import results
from maestro_hive.team.errors import ResultRefusedError
from maestro_hive.team.results import check_result, check_schema, result_in
from tests.tables import for_each
from tests.team.conftest import graph, task

if TYPE_CHECKING:
    from pathlib import Path

    from tests.team.conftest import Team

SCHEMA = {
    "type": "object",
    "required": ["files", "lines"],
    "properties": {
        "files": {"type": "array", "items": {"type": "string"}},
        "lines": {"minimum": 1},
    },
}
GOOD = {"files": ["a.py"], "lines": 3}


def test_the_result_of_a_command_is_what_it_writes_and_is_checked(team: Team) -> None:
    does = (
        'if [ "$MAESTRO_ATTEMPT" = 1 ]; then echo "{\\"files\\": [1], \\"lines\\": 0}"; else'
        ' printf "%s" "$MAESTRO_FEEDBACK" > ../feedback; echo "{\\"files\\": [\\"a\\"], \\"lines\\": 2}"; fi'
        ' > "$MAESTRO_RESULT"'
    )
    made = graph(task("A", does, output_schema=SCHEMA), retry=2)
    result = team.run(made)
    assert result["tasks"]["A"]["value"] == {"files": ["a"], "lines": 2}
    told = (team.folder / "../feedback").read_text()
    assert "$.files[0]: 1 is not of type 'string'" in told
    assert "$.lines: 0 is less than the minimum of 1" in told


@pytest.mark.parametrize(
    "does, said",
    [(":", "has written no result"), ('echo half > "$MAESTRO_RESULT"', "the result is no JSON")],
)
def test_a_command_without_a_result_fails(team: Team, does: str, said: str) -> None:
    with pytest.raises(RunFailedError) as failed:
        team.run(graph(task("A", does, output_schema=SCHEMA), retry=1))
    assert said in str(failed.value.__cause__.__cause__.exceptions)  # type: ignore[union-attr]


def test_a_folder_in_place_of_a_result_fails_one_attempt(team: Team) -> None:
    does = (
        'if [ "$MAESTRO_ATTEMPT" = 1 ]; then mkdir -p "$MAESTRO_RESULT/inside";'
        ' else echo 2 > "$MAESTRO_RESULT"; fi'
    )
    result = team.run(graph(task("A", does, output_schema={"type": "integer"}), retry=2))
    assert result["tasks"]["A"]["value"] == 2


def test_the_result_of_a_python_persona_is_checked_and_given_to_others(team: Team) -> None:
    text = (
        f"def make(task):\n    return {GOOD!r} if task.feedback else {{'files': 'a.py'}}\n\n"
        "def count(task):\n    return task.results['A']['lines'] + 1\n"
    )
    (team.folder / "result_makers.py").write_text(text)
    made = graph(
        task("A", persona={"python": "result_makers:make"}, output_schema=SCHEMA),
        task("B", after="A", persona={"python": "result_makers:count"}),
        retry=2,
    )
    found = team.run(made)["tasks"]
    assert (found["A"]["value"], found["B"]["value"]) == (GOOD, 4)


def test_a_schema_that_is_none_starts_nothing(team: Team) -> None:
    made = graph(task("A"), task("B", output_schema={"type": "objekt"}))
    with pytest.raises(ConfigurationError, match=r"B: output_schema\['type'\] is no JSON Schema"):
        team.run(made)


@for_each(
    "schema",
    [
        {"$ref": "#/$defs/gone"},
        {"properties": {"a": {"items": {"$ref": "#gone"}}}},
        {"$ref": "http://127.0.0.1:9/schema.json"},
        {"$ref": "other.json#/$defs/a"},
        {"type": "string", "$defs": {"a": {"$dynamicRef": "#gone"}}},
        {"$ref": "#/parts/a", "parts": {"a": {"$ref": "#/parts/b"}}},
        {"$ref": "#/type/x", "type": "string"},
        {"$ref": "http://[x"},
        {"$schema": "http://json-schema.org/draft-07/schema#", "$ref": "#/definitions/gone"},
    ],
)
def test_a_schema_that_refers_to_what_is_not_in_it_is_refused(schema: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match="output_schema refers to what is not in it"):
        check_schema(schema)


@for_each(
    "schema",
    [
        {"$ref": "#/$defs/a", "$defs": {"a": {"type": "string"}}},
        {"$ref": "#a", "$defs": {"a": {"$anchor": "a", "items": {"$ref": "#"}}}},
        {"$ref": "b", "$id": "https://example.com/", "$defs": {"b": {"$id": "b"}}},
        {"const": {"$ref": "#gone"}, "properties": {"$ref": {"type": "string"}}},
        {"$ref": "#/parts/a", "parts": {"a": {"items": {"$ref": "#/parts/a"}}}},
    ],
)
def test_a_schema_may_refer_to_its_own_parts(schema: dict[str, Any]) -> None:
    check_schema(schema)


def test_a_reference_to_nothing_is_found_before_the_persona_is_called(team: Team) -> None:
    made = graph(task("A", "touch called", output_schema={"$ref": "#/$defs/gone"}))
    with pytest.raises(ConfigurationError, match="nothing was started"):
        team.run(made)
    assert not (team.folder / "called").exists()


def test_nothing_is_fetched_for_a_schema() -> None:
    with pytest.raises(ConfigurationError, match="refers to what is not in it"):
        check_result(1, {"$ref": "http://127.0.0.1:9/schema.json"})


@pytest.mark.parametrize("value", [float("nan"), object(), {1, 2}])
def test_what_is_no_json_is_no_result(value: Any) -> None:
    check_schema({})
    with pytest.raises(ResultRefusedError, match="no JSON value"):
        check_result(value, {})


@pytest.mark.parametrize(
    "text", [json.dumps(GOOD), f"Here it is:\n```json\n{json.dumps(GOOD)}\n```\nDone."]
)
def test_the_result_is_found_in_what_an_agent_says(text: str) -> None:
    assert result_in(text) == GOOD
    for wrong in ("I am done.", "null", "```\nnothing\n```"):
        with pytest.raises(ResultRefusedError, match="the answer is no JSON"):
            result_in(wrong)


def test_many_places_are_named_and_the_rest_is_counted() -> None:
    with pytest.raises(ResultRefusedError, match="and 5 more"):
        check_result(["x"] * 15, {"items": {"type": "integer"}})


@pytest.mark.parametrize("schema", [{"$ref": "#"}, {"allOf": [{"$ref": "#"}]}])
def test_a_schema_that_refers_to_nothing_but_itself_is_refused(schema: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match="refers to itself"):
        check_schema(schema)


def test_a_pattern_that_takes_too_long_stops_nothing_but_its_check(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Python can do nothing else while it matches, not even be stopped."""
    monkeypatch.setattr(results, "_CHECKING_SECONDS", 1.0)
    schema = {"properties": {"a": {"type": "string", "pattern": "^(a+)+$"}}}
    with pytest.raises(ResultRefusedError, match="pattern of its output_schema takes too long"):
        check_result({"a": "a" * 60 + "!"}, schema)


def test_modules_of_the_current_folder_are_not_those_of_the_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("resource", "re", "jsonschema"):
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('of the project')\n")
    monkeypatch.chdir(tmp_path)
    check_result("abc", {"pattern": "^[a-z]+$"})


def test_a_check_that_cannot_be_made_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "_CHECKING", "raise RuntimeError('no memory')")
    with pytest.raises(ResultRefusedError, match=r"ended with 1:\n(?s:.*)RuntimeError: no memory"):
        check_result("abc", {"pattern": "^[a-z]+$"})


def test_patterns_are_checked() -> None:
    schema = {"type": "array", "items": {"pattern": "^a+$"}}
    check_result(["a", "aa"], schema)
    with pytest.raises(ResultRefusedError, match=r"\$\[1\]: 'b' does not match"):
        check_result(["a", "b"], schema)
