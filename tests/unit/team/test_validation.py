from __future__ import annotations

import json
import subprocess
import sys
from copy import deepcopy
from datetime import UTC, datetime, timedelta, timezone
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft7Validator, FormatChecker, ValidationError

from maestro_hive.kernel.errors import ConfigurationError
from maestro_hive.team.state import (
    Checkpoint,
    ExecutionState,
    TaskState,
    WorkerState,
    check,
    load_schema,
    read_time,
    validate_state,
    write_time,
)
from tests.tables import for_each
from tests.timing import cpu_seconds, is_within

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

# --- times -------------------------------------------------------------------------------------

NOON = datetime(2030, 1, 2, 12, 0, 0, tzinfo=UTC)


@for_each(
    "text, when",
    [
        ("2030-01-02T12:00:00Z", NOON),
        ("2030-01-02t12:00:00z", NOON),
        ("2030-01-02T12:00:00+00:00", NOON),
        ("2030-01-02T12:00:00-00:00", NOON),
        ("2030-01-02T17:30:00+05:30", NOON),
        ("2030-01-01T12:01:00-23:59", NOON),
        ("2030-01-02T12:00:00", NOON),
        ("2030-01-02T12:00:00.5Z", NOON.replace(microsecond=500_000)),
        ("2030-01-02T12:00:00.123456", NOON.replace(microsecond=123_456)),
        ("2030-01-02T12:00:00.123456789Z", NOON.replace(microsecond=123_456)),
        ("2028-02-29T00:00:00Z", datetime(2028, 2, 29, tzinfo=UTC)),
        ("0001-01-01T00:00:00Z", datetime.min.replace(tzinfo=UTC)),
        ("9999-12-31T23:59:59.999999Z", datetime.max.replace(tzinfo=UTC)),
    ],
)
def test_a_date_time_is_read_in_utc(text: str, when: datetime) -> None:
    assert read_time(text) == when
    assert read_time(text).tzinfo is UTC


@pytest.mark.parametrize(
    "text",
    [
        "",
        "now",
        "2030",
        "2030-01-02",
        "12:00:00Z",
        "20300102T120000Z",
        "2030-W01-2T12:00:00Z",
        "2030-002T12:00:00Z",
        "2030-01-02 12:00:00Z",
        "2030-01-02T12Z",
        "2030-01-02T12:00Z",
        "2030-01-02T24:00:00Z",
        "2030-01-02T12:60:00Z",
        "2030-01-02T23:59:60Z",
        "2030-01-02T12:00:00,5Z",
        "2030-01-02T12:00:00.Z",
        "2030-01-02T12:00:00+0530",
        "2030-01-02T12:00:00+05",
        "2030-01-02T12:00:00+24:00",
        "2030-01-02T12:00:00+05:30:10",
        "2030-01-02T12:00:00 Z",
        "2030-01-02T12:00:00Z\n",
        " 2030-01-02T12:00:00Z",
        "2030-01-02T12:00:00ZZ",
        "2030-13-02T12:00:00Z",
        "2030-02-30T12:00:00Z",
        "2029-02-29T12:00:00Z",
        "2030-00-02T12:00:00Z",
        "0000-01-01T00:00:00Z",
        "-2030-01-02T12:00:00Z",
        "12030-01-02T12:00:00Z",
        "٢٠٣٠-01-02T12:00:00Z",
        "2030-01-02T12:00:00\N{MINUS SIGN}05:00",
        "0001-01-01T00:00:00+00:01",
        "9999-12-31T23:59:59-00:01",
        pytest.param("2030-01-02T12:00:00." + "9" * 100_000 + "x", id="endless"),
    ],
)
def test_what_is_no_date_time_is_refused_in_every_version_of_python(text: str) -> None:
    with pytest.raises(ValueError, match=r"date-time|year|month|day|minute|second|offset"):
        read_time(text)
    data = ExecutionState.create("x").to_dict() | {"started_at": text}
    with pytest.raises(ValidationError, match=r"\$\.started_at: .* \(rule: format\)"):
        validate_state(data)


@for_each("zone", [UTC, None, timezone(timedelta(hours=-3)), timezone(timedelta(seconds=4321))])
def test_a_time_is_written_in_utc_whatever_its_zone(zone: timezone | None) -> None:
    when = datetime(2030, 1, 2, 12, 0, 0, 7, tzinfo=zone)
    assert write_time(when).endswith("+00:00")
    assert read_time(write_time(when)) == (when if zone else when.replace(tzinfo=UTC))


# --- schemas -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["state", "task", "checkpoint"])
def test_a_schema_is_found_by_its_short_name_too(name: str) -> None:
    assert load_schema(name) == load_schema(f"{name}.schema.json")


@pytest.mark.parametrize(
    "name",
    [
        "",
        "worker",
        "State",
        "state.json",
        "state.schema.json.bak",
        "../schemas/state.schema.json",
        "./state.schema.json",
        "/etc/passwd",
        "..",
        "state.schema.json\0",
        "state\n",
        "file:///etc/passwd",
        pytest.param("x" * 100_000, id="endless"),
        None,
        7,
        b"state",
        ["state"],
    ],
)
def test_a_schema_that_is_not_bundled_is_a_clear_error(name: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"no schema .*state\.schema\.json") as caught:
        load_schema(name)
    assert len(str(caught.value)) < 300


def test_changing_a_loaded_schema_does_not_change_validation() -> None:
    load_schema("state")["required"].append("coffee")
    assert validate_state(ExecutionState.create("x").to_dict())


def test_a_task_means_the_same_in_both_schemas_but_for_its_times() -> None:
    task = load_schema("task")
    del task["$schema"]
    for name in ("started_at", "completed_at"):  # free text in files of other programs
        assert task["properties"][name].pop("format") == "date-time"
    assert load_schema("state")["definitions"]["task"] == task


def test_the_schemas_name_every_member_that_is_written() -> None:
    properties = load_schema("state")["properties"]
    assert properties.keys() - {"format", "sha256"} == ExecutionState.create("x").to_dict().keys()
    definitions = load_schema("state")["definitions"]
    assert definitions["task"]["properties"].keys() == TaskState("t").to_dict().keys()
    assert definitions["worker"]["properties"].keys() == WorkerState("w").to_dict().keys()
    checkpoint = Checkpoint("t", "w", None, [], [], 0, {}).to_dict()
    assert load_schema("checkpoint")["properties"].keys() == checkpoint.keys()


# --- verdicts ----------------------------------------------------------------------------------


@for_each(
    "kind, data, where, rule",
    [
        ("task", {"status": "pending"}, "$", "required"),
        ("task", {"id": "t", "status": "pending", "error": 1}, "$.error", "type"),
        ("task", {"id": "t", "status": "pending", "completed_at": ""}, "$.completed_at", "format"),
        ("worker", {}, "$", "required"),
        ("worker", {"id": "w", "status": None}, "$.status", "type"),
        ("worker", {"id": "w", "tasks_completed": -1}, "$.tasks_completed", "minimum"),
        ("worker", {"id": "w", "tasks_completed": ["t"]}, "$.tasks_completed", "type"),
        ("checkpoint", {"timestamp": "soon"}, "$", "required"),
        ("checkpoint", {"files_created": ["a", 2]}, "$.files_created[1]", "type"),
        ("checkpoint", {"current_step": 1.5}, "$.current_step", "type"),
        ("checkpoint", {"state_data": []}, "$.state_data", "type"),
    ],
)
def test_a_refusal_names_the_path_and_the_rule(
    kind: str, data: dict[str, Any], where: str, rule: str
) -> None:
    if kind == "checkpoint" and rule != "required":
        data = Checkpoint("t", "w", None, [], [], 0, {}).to_dict() | data
    kinds = {"task": TaskState, "worker": WorkerState, "checkpoint": Checkpoint}
    with pytest.raises(ValidationError) as caught:
        kinds[kind].from_dict(data)  # type: ignore[attr-defined]
    assert str(caught.value).startswith(f"{where}: ")
    assert str(caught.value).endswith(f"(rule: {rule})")
    assert caught.value.validator == rule
    assert caught.value.json_path == where


def test_a_refusal_is_short_however_long_the_value() -> None:
    data = ExecutionState.create("x").to_dict() | {"feature": ["x" * 5_000_000]}

    def refuse() -> None:
        with pytest.raises(ValidationError) as caught:
            validate_state(data)
        assert len(str(caught.value)) < 500

    assert cpu_seconds(refuse, 1) < 1


def test_of_many_errors_the_first_task_is_named_every_time() -> None:
    data = ExecutionState.create("x").to_dict()
    data["tasks"] = {name: {} for name in ("zeta", "alpha", "mu", "beta")}
    for _ in range(5):
        with pytest.raises(ValidationError, match=r"^\$\.tasks\.zeta: 'id'"):
            validate_state(data)


def _deep(levels: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(levels):
        value = [value]
    return value


@for_each(
    "member",
    [
        {"feature": _deep(20_000)},
        {"feature": 10**5000},
        {"tasks": {(1, 2): None}},
        {"tasks": {None: None}},
        {"tasks": {"x" * 10_000: None}},
        {"started_at": datetime(2030, 1, 1, tzinfo=UTC)},
        {"current_level": float("nan")},
        {"current_level": True},
    ],
)
def test_python_data_that_json_never_holds_is_refused_like_any_other(member: Any) -> None:
    with pytest.raises(ValidationError) as caught:
        validate_state(ExecutionState.create("x").to_dict() | member)
    assert len(str(caught.value)) < 700


def test_a_tuple_is_no_list_of_checkpoints() -> None:
    with pytest.raises(ValidationError, match=r"\$\.checkpoints"):
        ExecutionState.from_dict(ExecutionState.create("x").to_dict() | {"checkpoints": ("a",)})


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.floats(-2, 2) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=5,
)
LIKELY: st.SearchStrategy[Any] = st.sampled_from(
    [None, "", "x", "running", "2030-01-01T00:00:00Z", 0, -1, 1.0, 1.5, True, [], ["x"], {}]
)


@st.composite
def nearly_valid(draw: st.DrawFn) -> Any:
    """A valid state in which a few members were replaced or removed, anywhere."""
    task = {"id": "t", "status": "pending", "worker_id": None, "started_at": None, "error": "e"}
    data: Any = {
        "feature": "f",
        "started_at": "2030-01-01T00:00:00Z",
        "current_level": 0,
        "tasks": {"t": task, "u": dict(task)},
        "workers": {"w": {"id": "w", "status": "idle", "tasks_completed": 0}},
        "checkpoints": ["c", "d"],
        "format": 1,
        "sha256": "",
    }
    for _ in range(draw(st.integers(0, 3))):
        at = data
        while True:
            if not isinstance(at, dict | list) or not at:
                break
            key = draw(st.sampled_from(sorted(at) if isinstance(at, dict) else range(len(at))))
            if draw(st.booleans()):
                at = at[key]
                continue
            if draw(st.booleans()):
                del at[key]
            else:
                at[key] = deepcopy(draw(LIKELY | JSON))  # it may be changed next
            break
    return data


def _unmodified_validator(**more: Any) -> Draft7Validator:
    formats = FormatChecker(formats=())

    @formats.checks("date-time", raises=ValueError)
    def _is_time(value: object) -> bool:
        return not isinstance(value, str) or bool(read_time(value))

    return Draft7Validator({**load_schema("state"), **more}, format_checker=formats)


UNMODIFIED = {
    "state": _unmodified_validator(),
    "saved": _unmodified_validator(allOf=[{"$ref": "#/definitions/saved"}]),
}


@pytest.mark.parametrize("kind", UNMODIFIED)
@settings(deadline=None, max_examples=100)
@given(data=nearly_valid() | JSON)
def test_the_verdict_is_that_of_unmodified_jsonschema(kind: str, data: Any) -> None:
    expected = {
        (tuple(error.absolute_path), error.validator)
        for error in UNMODIFIED[kind].iter_errors(data)
    }
    if not expected:
        check(data, kind)
        return
    with pytest.raises(ValidationError) as caught:
        check(data, kind)
    assert (tuple(caught.value.absolute_path), caught.value.validator) in expected


# --- cost --------------------------------------------------------------------------------------


def test_jsonschema_is_only_asked_about_what_is_not_plainly_valid(tmp_path: Path) -> None:
    program = f"""
import json, sys
from datetime import UTC, datetime
from maestro_hive.team.state import ExecutionState, TaskState, TaskStatus, WorkerState, validate_state
now = datetime.now(UTC)
state = ExecutionState.create("x")
state.tasks = {{"t": TaskState("t", TaskStatus.FAILED, "1", now, now, "e", extra={{"more": [1.5]}})}}
state.workers = {{"1": WorkerState("1", "running", "t", 3)}}
state.checkpoints = ["c"]
state.save({str(tmp_path / "state.json")!r})
assert ExecutionState.load({str(tmp_path / "state.json")!r}) == state
before = "jsonschema" in sys.modules
data = state.to_dict()
data["current_level"] = 1.0  # which is an integer of JSON Schema
validate_state(data)
print(json.dumps([before, "jsonschema" in sys.modules]))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout) == [False, True]


def test_ten_times_the_tasks_take_about_ten_times_as_long_to_check() -> None:
    def check_of(tasks: int) -> Callable[[], object]:
        state = ExecutionState.create("x")
        state.tasks = {f"T{n}": TaskState(f"T{n}", started_at=NOON) for n in range(tasks)}
        data = state.to_dict()
        return lambda: validate_state(data)

    assert is_within(40, check_of(5_000), check_of(500))  # quadratic would be 100
