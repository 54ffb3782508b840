"""What callers of ``.mahabharatha/state.py`` rely on; ``tests/unit/team`` has the details."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from jsonschema import Draft7Validator, ValidationError, validate

import state as public_state
from maestro_hive.kernel.errors import AtomicWriteError, MaestroError
from maestro_hive.team import state as team_state
from state import (
    Checkpoint,
    ExecutionState,
    TaskState,
    TaskStatus,
    WorkerState,
    atomic_write,
    load_schema,
    validate_state,
)

HERE = Path(__file__).resolve().parents[1]
SCHEMAS = ["checkpoint.schema.json", "state.schema.json", "task.schema.json"]


# --- the first four tests, under their original names -------------------------------------------


def test_create_state() -> None:
    s = ExecutionState.create("my-feature")
    assert s.feature == "my-feature"
    assert s.current_level == 0
    assert (s.tasks, s.workers, s.checkpoints) == ({}, {}, [])
    assert s.started_at.tzinfo is UTC
    assert abs(datetime.now(UTC) - s.started_at) < timedelta(minutes=1)


def test_save_load_roundtrip(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    s = ExecutionState.create("test")
    s.current_level = 2
    for number, status in enumerate(TaskStatus):
        s.tasks[f"T{number}"] = TaskState(f"T{number}", status, "worker-1", s.started_at)
    s.workers["worker-1"] = WorkerState("worker-1", "busy", "T1", tasks_completed=4)
    s.checkpoints.append("T1-worker-1")
    s.save(str(path))

    assert ExecutionState.load(str(path)) == s


@pytest.mark.parametrize("call", ["open", "fchmod", "write", "fsync", "rename"])
def test_atomic_write_on_crash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    """A write that fails leaves the old text; ``tests/crash`` kills real processes too."""
    path = tmp_path / "state.json"
    atomic_write(str(path), "old")

    def fail(*_args: object, **_options: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as broken:
        broken.setattr(os, call, fail)
        with pytest.raises(AtomicWriteError, match=r"state\.json.*No space left on device"):
            atomic_write(str(path), "new")

    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["state.json"]  # noqa: PTH208 - nothing else is left behind
    atomic_write(str(path), "newer")
    assert path.read_text() == "newer"


@pytest.mark.parametrize(
    "member, value, where, rule",
    [
        ("feature", 7, r"\$\.feature", "type"),
        ("started_at", "yesterday", r"\$\.started_at", "format"),
        ("current_level", -1, r"\$\.current_level", "minimum"),
        ("current_level", "0", r"\$\.current_level", "type"),
        ("tasks", {"T 1": {"id": "T 1"}}, r"\$\.tasks\['T 1'\]", "required"),
        ("tasks", {"T1": {"id": "T1", "status": "done"}}, r"\$\.tasks\.T1\.status", "enum"),
    ],
)
def test_schema_validation_rejects_invalid(
    tmp_path: Path, member: str, value: object, where: str, rule: str
) -> None:
    data = ExecutionState.create("test").to_dict()
    assert validate_state(data) is True
    data[member] = value
    path = tmp_path / "state.json"
    path.write_text(json.dumps(data))

    with pytest.raises(ValidationError, match=rf"^{where}: .*\(rule: {rule}\)"):
        validate_state(data)
    with pytest.raises(ValidationError, match=rf"state\.json: {where}: .*\(rule: {rule}\)"):
        ExecutionState.load(str(path))


@pytest.mark.parametrize(
    "member, value, where, rule",
    [
        ("workers", {"w": {"id": 1}}, r"\$\.workers\.w\.id", "type"),
        ("workers", ["w"], r"\$\.workers", "type"),
        ("checkpoints", ["a", None], r"\$\.checkpoints\[1\]", "type"),
        ("format", 1, r"\$", "dependencies"),
        (
            "tasks",
            {"T": {"id": "T", "status": "failed", "started_at": "yesterday"}},
            r"\$\.tasks\.T\.started_at",
            "format",
        ),
    ],
)
def test_what_the_schema_leaves_open_and_no_state_can_hold_is_refused_on_loading(
    tmp_path: Path, member: str, value: object, where: str, rule: str
) -> None:
    data = ExecutionState.create("test").to_dict() | {member: value}
    assert validate_state(data) is True
    path = tmp_path / "state.json"
    path.write_text(json.dumps(data))
    with pytest.raises(ValidationError, match=rf"state\.json: {where}: .*\(rule: {rule}\)"):
        ExecutionState.load(str(path))
    with pytest.raises(ValidationError, match=rf"{where}: .*\(rule: {rule}\)"):
        ExecutionState.from_dict(data)


# --- the rest of the documented behaviour --------------------------------------------------------

CHECK = """
from state import ExecutionState, TaskStatus, Checkpoint

# Test create and save
s = ExecutionState.create('test-feature')
s.save()

# Test load
s2 = ExecutionState.load()
assert s2.feature == 'test-feature'
assert s2.current_level == 0

# Test checkpoint
cp = Checkpoint(
    task_id='TASK-001',
    worker_id='worker-1',
    timestamp=None,
    files_created=['test.py'],
    files_modified=[],
    current_step=3,
    state_data={}
)

print('OK: State persistence works')
"""


def test_the_documented_check_works_as_written(tmp_path: Path) -> None:
    folder = tmp_path / ".mahabharatha"
    folder.mkdir()
    shutil.copy(HERE / "state.py", folder)
    done = subprocess.run(
        [sys.executable, "-c", CHECK], cwd=folder, capture_output=True, text=True, check=False
    )
    assert (done.stdout, done.stderr) == ("OK: State persistence works\n", "")
    assert (folder / ".mahabharatha" / "state.json").is_file()


def test_a_missing_file_is_no_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert ExecutionState.load() is None
    assert ExecutionState.load("no/such/folder/state.json") is None


def test_a_file_that_is_not_json_raises_our_error(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    path.write_text('{"feature": "x", ')
    with pytest.raises(MaestroError, match=r"state\.json.*not JSON"):
        ExecutionState.load(path)


@pytest.mark.parametrize("timestamp", [None, datetime(2030, 1, 2, 3, 4, 5, 678, tzinfo=UTC)])
def test_a_checkpoint_comes_back_as_it_was(timestamp: datetime | None) -> None:
    saved = Checkpoint("TASK-001", "worker-1", timestamp, ["a.py"], ["b.py"], 3, {"deep": [{}]})
    data = json.loads(json.dumps(saved.to_dict()))
    validate(data, load_schema("checkpoint.schema.json"))
    assert Checkpoint.from_dict(data) == saved


@pytest.mark.parametrize("name", SCHEMAS)
def test_the_schemas_here_are_the_bundled_ones(name: str) -> None:
    bundled = Path(team_state.__file__).with_name("schemas")
    assert (HERE / "schemas" / name).read_bytes() == (bundled / name).read_bytes()
    assert load_schema(name) == json.loads((HERE / "schemas" / name).read_text())
    Draft7Validator.check_schema(load_schema(name))


def test_no_schema_is_missing_here_or_there() -> None:
    bundled = Path(team_state.__file__).with_name("schemas")
    of_graphs = {"task_graph.schema.json", "task_graph_strict.schema.json"}
    assert sorted(each.name for each in (HERE / "schemas").iterdir()) == SCHEMAS
    assert {each.name for each in bundled.iterdir()} - of_graphs == set(SCHEMAS)


def test_this_module_re_exports_and_copies_nothing() -> None:
    assert public_state.__all__ == team_state.__all__
    for name in public_state.__all__:
        assert getattr(public_state, name) is getattr(team_state, name)
