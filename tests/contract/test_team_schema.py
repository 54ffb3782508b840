"""The schema of a feature's state accepts everything that the first one accepted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft7Validator

from maestro_hive.team.state import validate_state
from tests.tables import for_each

PROJECT = Path(__file__).parents[2]

#: The schema that the first programs were written for.
FIRST: dict[str, Any] = {
    "type": "object",
    "required": ["feature", "started_at", "current_level", "tasks"],
    "properties": {
        "feature": {"type": "string"},
        "started_at": {"type": "string", "format": "date-time"},
        "current_level": {"type": "integer", "minimum": 0},
        "tasks": {"type": "object", "additionalProperties": {"$ref": "#/definitions/task"}},
    },
    "definitions": {
        "task": {
            "type": "object",
            "required": ["id", "status"],
            "properties": {
                "id": {"type": "string"},
                "status": {"enum": ["pending", "running", "complete", "failed", "blocked"]},
                "worker_id": {"type": ["string", "null"]},
                "started_at": {"type": ["string", "null"]},
                "completed_at": {"type": ["string", "null"]},
                "error": {"type": ["string", "null"]},
            },
        }
    },
}
STATE: dict[str, Any] = {
    "feature": "f",
    "started_at": "2030-01-01T00:00:00Z",
    "current_level": 0,
    "tasks": {},
}


@pytest.fixture(scope="module", params=[".mahabharatha", "src/maestro_hive/team"])
def ours(request: pytest.FixtureRequest) -> Draft7Validator:
    path = PROJECT / request.param / "schemas" / "state.schema.json"
    return Draft7Validator(json.loads(path.read_text()))


@for_each(
    "more",
    [
        {"workers": ["w1"]},
        {"workers": {"w": {"name": 7}}},
        {"workers": None, "checkpoints": {}},
        {"checkpoints": [1]},
        {"format": "json"},
        {"format": 2},
        {"sha256": None},
        {"tasks": {"T": {"id": "T", "status": "running", "started_at": "a minute ago"}}},
        {"tasks": {"T": {"id": "", "status": "failed", "completed_at": "", "colour": "red"}}},
        {"current_level": 1.0, "anything": [{}]},
    ],
)
def test_a_state_of_another_program_is_valid(ours: Draft7Validator, more: dict[str, Any]) -> None:
    state = STATE | more
    assert Draft7Validator(FIRST).is_valid(state)
    assert ours.is_valid(state)
    assert validate_state(state) is True


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 2) | st.floats(-2, 2) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=4,
)
STATUS = st.sampled_from(["pending", "running", "complete", "failed", "blocked", "done"])
NAMES = ["worker_id", "started_at", "completed_at", "error", "more"]
TASKS = st.fixed_dictionaries(
    {"id": st.text(max_size=3), "status": STATUS},
    optional={name: st.none() | st.text(max_size=3) | VALUES for name in NAMES},
)
STATES = st.fixed_dictionaries(
    {
        "feature": st.text(max_size=3) | VALUES,
        "started_at": st.text(max_size=3) | VALUES,
        "current_level": st.integers(-1, 3) | VALUES,
        "tasks": st.dictionaries(st.text(max_size=3), TASKS, max_size=2) | VALUES,
    },
    optional=dict.fromkeys(
        ("workers", "checkpoints", "format", "sha256", "$schema", "extra"), VALUES
    ),
)


@given(state=STATES)
def test_both_schemas_accept_the_same(ours: Draft7Validator, state: Any) -> None:
    assert ours.is_valid(state) == Draft7Validator(FIRST).is_valid(state)
