from __future__ import annotations

import json
import os
import stat
import threading
from datetime import UTC, datetime, timedelta, timezone
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import ValidationError

from maestro_hive.kernel.clock import ManualClock
from maestro_hive.kernel.errors import EncodeError
from maestro_hive.team.state import (
    ExecutionState,
    StateWriter,
    TaskState,
    TaskStatus,
    WorkerState,
    atomic_write,
)

if TYPE_CHECKING:
    from pathlib import Path

WHEN = datetime(2030, 1, 1, tzinfo=UTC)
VALID = '{"feature":"f","started_at":"2030-01-01T00:00:00Z","current_level":0,"tasks":{}}'


# --- what was saved comes back ------------------------------------------------------------------


def test_a_state_begins_when_the_clock_says() -> None:
    clock = ManualClock()
    assert ExecutionState.create("f", clock=clock).started_at == clock.now()


def test_a_saved_state_is_plain_json_in_the_shape_of_the_schema(
    state: ExecutionState, path: Path
) -> None:
    state.save(path)
    text = path.read_text(encoding="utf-8")
    data = json.loads(text)
    assert data.pop("format") == 1
    assert len(data.pop("sha256")) == 64
    assert data == state.to_dict()
    assert data["tasks"]["T1"]["status"] == "failed"
    assert data["started_at"] == "2030-01-02T03:04:05.678901+00:00"
    assert "🐝" in text


def test_saving_twice_writes_the_same_bytes(state: ExecutionState, path: Path) -> None:
    state.save(path)
    first = path.read_bytes()
    loaded = ExecutionState.load(path)
    assert loaded == state
    loaded.save(path)
    assert path.read_bytes() == first


def test_a_writer_writes_each_state_as_a_save_of_it_does(path: Path, tmp_path: Path) -> None:
    names = ["T2", "T10", "T1", "ü\u2028", "T3"]
    pending = {name: TaskState(id=name) for name in names}
    complete = {
        name: TaskState(
            name, TaskStatus.COMPLETE, "1", WHEN, extra={"result": {"b": 1, "a": [name]}}
        )
        for name in names
    }
    writer, saved = StateWriter(path), tmp_path / "saved.json"
    for done in range(len(names) + 1):
        tasks = {name: (complete if at < done else pending)[name] for at, name in enumerate(names)}
        workers = {"1": WorkerState("1", tasks_completed=done)} if done else {}
        state = ExecutionState("f", WHEN, done, tasks, workers, extra={"z": {"y": done}, "a": "b"})
        writer.save(state)
        state.save(saved)
        assert path.read_bytes() == saved.read_bytes()
        assert ExecutionState.load(path) == state


def test_a_writer_refuses_what_a_save_refuses_and_leaves_the_file(path: Path) -> None:
    good, bad = TaskState("T1"), TaskState("T2", worker_id=2)  # type: ignore[arg-type]
    writer = StateWriter(path)
    writer.save(ExecutionState("f", WHEN, tasks={"T1": good}))
    before = path.read_bytes()
    with pytest.raises(ValidationError, match="T2"):
        writer.save(ExecutionState("f", WHEN, tasks={"T1": good, "T2": bad}))
    assert path.read_bytes() == before


def test_files_and_folders_are_private_whatever_the_umask(
    state: ExecutionState, tmp_path: Path
) -> None:
    before = os.umask(0)
    try:
        state.save(tmp_path / "a" / "b" / "state.json")
    finally:
        os.umask(before)
    modes = {
        name: stat.S_IMODE((tmp_path / name).stat().st_mode)
        for name in ("a", "a/b", "a/b/state.json")
    }
    assert modes == {"a": 0o700, "a/b": 0o700, "a/b/state.json": 0o600}


def test_the_default_path_is_below_the_current_folder(
    state: ExecutionState, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    state.save()
    assert (tmp_path / ".mahabharatha" / "state.json").is_file()
    assert ExecutionState.load() == state


def test_a_file_as_the_first_version_wrote_it_is_read(path: Path) -> None:
    path.write_text(VALID)
    loaded = ExecutionState.load(path)
    assert loaded == ExecutionState("f", datetime(2030, 1, 1, tzinfo=UTC), 0)


def test_a_time_without_an_offset_is_taken_as_utc(path: Path) -> None:
    path.write_text(VALID.replace("00:00:00Z", "10:00:00.25"))
    loaded = ExecutionState.load(path)
    assert loaded is not None
    assert loaded.started_at == datetime(2030, 1, 1, 10, 0, 0, 250_000, tzinfo=UTC)
    loaded.started_at = datetime(2030, 1, 1, 11)  # noqa: DTZ001 - that is the point
    loaded.save(path)
    assert json.loads(path.read_text())["started_at"] == "2030-01-01T11:00:00+00:00"


def test_a_time_in_another_zone_is_the_same_moment_afterwards(path: Path) -> None:
    when = datetime(2030, 1, 1, 10, tzinfo=timezone(timedelta(hours=5, minutes=30)))
    ExecutionState("f", when).save(path)
    loaded = ExecutionState.load(path)
    assert loaded is not None
    assert loaded.started_at == when
    assert loaded.started_at.tzinfo is UTC


def test_whole_numbers_written_with_a_point_come_back_as_integers(path: Path) -> None:
    path.write_text(VALID.replace('"current_level":0', '"current_level":3.0'))
    loaded = ExecutionState.load(path)
    assert loaded is not None
    assert repr(loaded.current_level) == "3"


def test_members_of_other_programs_survive_in_every_place(path: Path) -> None:
    data = json.loads(VALID) | {"branch": "main", "extra": 1, "$": ["x"], "": {"$": "tuple"}}
    data["tasks"] = {"t": {"id": "t", "status": "pending", "title": "T", "extra": {"n": None}}}
    data["workers"] = {"w": {"id": "w", "port": 49152, "extra": []}}
    path.write_text(json.dumps(data))
    loaded = ExecutionState.load(path)
    assert loaded is not None
    assert loaded.extra == {"branch": "main", "extra": 1, "$": ["x"], "": {"$": "tuple"}}
    assert loaded.tasks["t"].extra == {"title": "T", "extra": {"n": None}}
    loaded.tasks["t"].status = TaskStatus.COMPLETE
    loaded.save(path)
    saved = json.loads(path.read_text())
    assert {key: saved[key] for key in ("branch", "extra", "$", "")} == loaded.extra
    assert saved["tasks"]["t"]["title"] == "T"
    assert saved["tasks"]["t"]["status"] == "complete"
    assert saved["workers"]["w"]["port"] == 49152
    assert ExecutionState.load(path) == loaded


def test_an_extra_member_cannot_replace_a_real_one() -> None:
    task = TaskState("t", extra={"status": "complete", "title": "T"})
    assert list(task.to_dict().items())[:2] == [("id", "t"), ("status", "pending")]
    assert task.to_dict()["title"] == "T"


def test_states_and_times_given_as_their_texts_are_understood(path: Path) -> None:
    state = ExecutionState.create("f")
    state.tasks["t"] = TaskState("t", "running", started_at="2030-01-01T00:00:00Z")  # type: ignore[arg-type]
    state.save(path)
    loaded = ExecutionState.load(path)
    assert loaded is not None
    assert loaded.tasks["t"].status is TaskStatus.RUNNING
    assert loaded.tasks["t"].started_at == datetime(2030, 1, 1, tzinfo=UTC)


TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)
TIMES = st.datetimes(timezones=st.just(UTC))
OWN = {"id", "status", "worker_id", "started_at", "completed_at", "error", "current_task"} | {
    "tasks_completed"
}
EXTRA = st.dictionaries(TEXT.filter(lambda name: name not in OWN), JSON, max_size=2)
MAYBE = st.none() | TEXT
TASKS = st.builds(
    TaskState,
    TEXT,
    st.sampled_from(TaskStatus),
    MAYBE,
    st.none() | TIMES,
    st.none() | TIMES,
    MAYBE,
    extra=EXTRA,
)
WORKERS = st.builds(WorkerState, TEXT, TEXT, MAYBE, st.integers(0), extra=EXTRA)
STATES = st.builds(
    ExecutionState,
    TEXT,
    TIMES,
    st.integers(0),
    st.dictionaries(TEXT, TASKS, max_size=4),
    st.dictionaries(TEXT, WORKERS, max_size=3),
    st.lists(TEXT, max_size=3),
)


@settings(deadline=None, max_examples=75)
@given(state=STATES)
def test_every_state_comes_back_as_it_was(
    tmp_path_factory: pytest.TempPathFactory, state: ExecutionState
) -> None:
    path = tmp_path_factory.getbasetemp() / "any-state.json"
    state.save(path)
    assert ExecutionState.load(path) == state
    assert ExecutionState.from_dict(json.loads(path.read_text(encoding="utf-8"))) == state


# --- what is not written ------------------------------------------------------------------------


def _cycle() -> list[Any]:
    value: list[Any] = []
    value.append(value)
    return value


NO_JSON: dict[str, object] = {
    "an object": object(),
    "a set": {1, 2},
    "bytes": b"bytes",
    "a tuple": (1, 2),
    "NaN": float("nan"),
    "infinity": float("inf"),
    "half a surrogate pair": "\ud800",
    "a number of 5,001 digits": 10**5000,
    "a key that is a number": {1: "x"},
    "a key that is null": {None: "x"},
    "a key that is a tuple": {(1, 2): "x"},
    "keys that sort otherwise as texts": {2: "x", 10: "y"},
    "keys of two kinds": {"a": "x", 1: "y"},
    "itself": _cycle(),
}


@pytest.mark.parametrize("name", NO_JSON)
def test_what_json_cannot_hold_is_an_error_and_not_a_file(path: Path, name: str) -> None:
    ExecutionState.create("old").save(path)
    before = path.read_bytes()
    state = ExecutionState.create("new")
    state.extra["more"] = {"x": [NO_JSON[name]]}
    with pytest.raises(EncodeError, match=r"state\.json"):
        state.save(path)
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    "member, value",
    [
        ("feature", None),
        ("started_at", None),
        ("current_level", -1),
        ("tasks", {"t": TaskState("t", "done")}),  # type: ignore[arg-type]
        ("workers", {"w": WorkerState("w", tasks_completed=-1)}),
        ("checkpoints", [1]),
    ],
)
def test_a_state_that_could_not_be_loaded_is_not_saved(
    path: Path, member: str, value: object
) -> None:
    state = ExecutionState.create("f")
    setattr(state, member, value)
    with pytest.raises(ValidationError, match=rf"state\.json: \$\.{member}"):
        state.save(path)
    assert not path.exists()


def test_a_state_that_is_too_large_to_load_is_not_saved(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("maestro_hive.team.state.MAX_STATE_BYTES", 1000)
    with pytest.raises(EncodeError, match="1,000 bytes"):
        ExecutionState.create("x" * 1000).save(path)
    assert not path.exists()


def test_a_text_without_a_form_in_utf_8_is_not_written(path: Path) -> None:
    with pytest.raises(EncodeError, match="UTF-8"):
        atomic_write(path, "\ud800")
    assert not path.exists()


def test_a_reader_among_many_writers_sees_only_whole_states(path: Path) -> None:
    def save_often(name: str) -> None:
        state = ExecutionState.create(name)
        state.tasks = {f"{name}-{n}": TaskState(f"{name}-{n}", error=name) for n in range(50)}
        for _ in range(10):
            state.save(path)

    writers = [threading.Thread(target=save_often, args=(f"w{n}",)) for n in range(4)]
    for writer in writers:
        writer.start()
    is_over, loaded = False, None
    while not is_over:
        is_over = not any(writer.is_alive() for writer in writers)
        loaded = ExecutionState.load(path)
        if loaded is not None:
            assert {task.error for task in loaded.tasks.values()} == {loaded.feature}
    assert loaded is not None
    assert os.listdir(path.parent) == [path.name]  # noqa: PTH208
