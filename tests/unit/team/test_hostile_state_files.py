"""Files that are not a state, or not the saved state, are refused without side effects."""

from __future__ import annotations

import json
import os
import socket
import time
import tracemalloc
from typing import TYPE_CHECKING

import pytest
from jsonschema import ValidationError

from maestro_hive.kernel.errors import (
    AtomicWriteError,
    DecodeError,
    DocumentCorruptError,
    FolderError,
    MaestroError,
    NewerFormatError,
    StorageError,
)
from maestro_hive.team.state import MAX_STATE_BYTES, ExecutionState, TaskStatus
from tests.tables import for_each

if TYPE_CHECKING:
    from pathlib import Path

VALID = '{"feature":"f","started_at":"2030-01-01T00:00:00Z","current_level":0,"tasks":{}}'


def _with(member: str, value: str) -> str:
    """A state file that would be valid without this member, whose value is any text."""
    members = json.loads(VALID)
    members.pop(member, None)
    return json.dumps(members)[:-1] + f', "{member}": {value}' + "}"


DEEP = 100_000
HOSTILE: dict[str, str | bytes] = {
    # not JSON
    "empty": "",
    "blank": " \n\t",
    "a zero byte": b"\0",
    "zeros, as after a power cut": b"\0" * 4096,
    "a byte order mark": b"\xef\xbb\xbf" + VALID.encode(),
    "utf-16": VALID.encode("utf-16"),
    "utf-32": VALID.encode("utf-32"),
    "latin-1": _with("feature", '"na\xefve"').encode("latin-1"),
    "a stray continuation byte": VALID.encode().replace(b'"f"', b'"\x80"'),
    "an overlong slash": VALID.encode().replace(b'"f"', b'"\xc0\xaf"'),
    "a surrogate in utf-8": VALID.encode().replace(b'"f"', b'"\xed\xa0\x80"'),
    "a truncated character": VALID.encode().replace(b'"f"', b'"\xf0\x9f\x90"'),
    "half a surrogate pair": _with("feature", r'"\ud800"'),
    "half a surrogate pair as a key": _with(r"\udfff", "1"),
    "half a surrogate pair far inside": _with("more", r'[{"x": "\ud83d"}]'),
    "torn": VALID[:-20],
    "without its last brace": VALID[:-1],
    "twice": VALID + VALID,
    "followed by text": VALID + "x",
    "followed by a zero": VALID.encode() + b"\0",
    "a comment": "// state\n" + VALID,
    "a trailing comma": VALID[:-1] + ",}",
    "single quotes": VALID.replace('"', "'"),
    "a bare key": VALID.replace('"feature"', "feature"),
    "yaml": "feature: f\ntasks: {}\n",
    "pickle": b"\x80\x04\x95\x00\x00\x00\x00.",
    "NaN": _with("current_level", "NaN"),
    "NaN far inside": _with("more", "[[NaN]]"),
    "Infinity": _with("current_level", "Infinity"),
    "-Infinity": _with("more", "-Infinity"),
    "1e999": _with("current_level", "1e999"),
    "-1e999 far inside": _with("more", '{"x": [-1e999]}'),
    "a number of 5,000 digits": _with("current_level", "9" * 5_000),
    "a number of a million digits": _with("more", "9" * 1_000_000),
    "a leading zero": _with("current_level", "01"),
    "hexadecimal": _with("current_level", "0x1"),
    "a plus sign": _with("current_level", "+1"),
    "a bare point": _with("current_level", "1."),
    "a raw line feed in a text": _with("feature", '"a\nb"'),
    "a bad escape": _with("feature", r'"\x41"'),
    "a duplicate key": VALID[:-1] + ', "feature": "g"}',
    "a duplicate task": _with(
        "tasks", '{"t":{"id":"t","status":"failed"},"t":{"id":"t","status":"complete"}}'
    ),
    "a duplicate by escape": VALID[:-1] + r', "\u0066eature": "g"}',
    "a duplicate far inside": _with("more", '[{"x": 1, "x": 1}]'),
    "lists too deep": "[" * DEEP,
    "closed lists too deep": "[" * DEEP + "]" * DEEP,
    "objects too deep": '{"a":' * DEEP,
    "a deep feature": _with("feature", "[" * DEEP + "]" * DEEP),
    "a deep unknown member": _with("more", "[" * DEEP + "]" * DEEP),
    "a million open braces": "{" * 1_000_000,
    # JSON, but not a state
    "null": "null",
    "true": "true",
    "a number": "7",
    "a text": json.dumps(VALID),
    "a list": f"[{VALID}]",
    "an empty object": "{}",
    "a long list": "[" + "0," * 100_000 + "0]",
    "no feature": VALID.replace('"feature"', '"featur"'),
    "no start": VALID.replace('"started_at"', '"started"'),
    "no level": VALID.replace('"current_level"', '"level"'),
    "no tasks": VALID.replace('"tasks"', '"task"'),
    "a feature that is null": _with("feature", "null"),
    "a feature that is a long list": _with("feature", "[" + "0," * 100_000 + "0]"),
    "a feature that is nested": _with("feature", "[" * 90 + "]" * 90),
    "a start that is a number": _with("started_at", "0"),
    "a start that is null": _with("started_at", "null"),
    "a start that is no time": _with("started_at", '"2030-02-30T00:00:00Z"'),
    "a start before all time": _with("started_at", '"0001-01-01T00:00:00+12:00"'),
    "a long start": _with("started_at", '"2030-01-01T00:00:00.' + "0" * 500_000 + 'x"'),
    "a level that is true": _with("current_level", "true"),
    "a level that is a text": _with("current_level", '"0"'),
    "a level between levels": _with("current_level", "0.5"),
    "a negative level": _with("current_level", "-1"),
    "tasks in a list": _with("tasks", "[]"),
    "a task that is null": _with("tasks", '{"t": null}'),
    "a task without members": _with("tasks", '{"t": {}}'),
    "a task without a status": _with("tasks", '{"t": {"id": "t"}}'),
    "an unknown status": _with("tasks", '{"t": {"id": "t", "status": "done"}}'),
    "a status in capitals": _with("tasks", '{"t": {"id": "t", "status": "PENDING"}}'),
    "a status that is null": _with("tasks", '{"t": {"id": "t", "status": null}}'),
    "a status that is a list": _with("tasks", '{"t": {"id": "t", "status": ["pending"]}}'),
    "a task's id that is a number": _with("tasks", '{"t": {"id": 1, "status": "pending"}}'),
    "a task's worker that is a number": _with(
        "tasks", '{"t": {"id": "t", "status": "pending", "worker_id": 1}}'
    ),
    "a task's time that is no time": _with(
        "tasks", '{"t": {"id": "t", "status": "pending", "started_at": "today"}}'
    ),
    "a task's error that is an object": _with(
        "tasks", '{"t": {"id": "t", "status": "failed", "error": {}}}'
    ),
    "30,000 bad tasks": _with("tasks", "{" + ",".join(f'"{n}": null' for n in range(30_000)) + "}"),
    "workers in a list": _with("workers", "[]"),
    "workers that are null": _with("workers", "null"),
    "a worker without an id": _with("workers", '{"w": {}}'),
    "a worker's status that is a number": _with("workers", '{"w": {"id": "w", "status": 1}}'),
    "a worker's task that is a list": _with("workers", '{"w": {"id": "w", "current_task": []}}'),
    "a negative count of completed tasks": _with(
        "workers", '{"w": {"id": "w", "tasks_completed": -1}}'
    ),
    "checkpoints in an object": _with("checkpoints", "{}"),
    "checkpoints that are null": _with("checkpoints", "null"),
    "a checkpoint that is an object": _with("checkpoints", "[{}]"),
    # a wrong checksum
    "a format without a digest": _with("format", "1"),
    "a digest without a format": _with("sha256", '""'),
    "format zero": _with("format", '0, "sha256": ""'),
    "a format that is a text": _with("format", '"1", "sha256": ""'),
    "a format that is true": _with("format", 'true, "sha256": ""'),
    "a newer format": _with("format", "2"),
    "a format of the far future": _with("format", "9" * 400),
    "a digest that is null": _with("format", '1, "sha256": null'),
    "an empty digest": _with("format", '1, "sha256": ""'),
    "a digest of something else": _with("format", '1, "sha256": "' + "0" * 64 + '"'),
}


@for_each("name", HOSTILE)
def test_a_hostile_file_is_refused_quickly_and_in_little_memory(path: Path, name: str) -> None:
    text = HOSTILE[name]
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    before = path.read_bytes()
    began = time.thread_time()
    with pytest.raises((MaestroError, ValidationError), match=r"state\.json") as caught:
        ExecutionState.load(path)
    assert time.thread_time() - began < 1
    assert len(str(caught.value)) < 1_500
    tracemalloc.start()
    try:
        with pytest.raises(type(caught.value)):
            ExecutionState.load(path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 100_000_000
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    "text, kind",
    [
        ("", DecodeError),
        (_with("format", "2"), NewerFormatError),
        (_with("format", '1, "sha256": ""'), DocumentCorruptError),
        (_with("format", "1"), ValidationError),
        ("null", ValidationError),
    ],
)
def test_each_kind_of_damage_has_its_own_error(
    path: Path, text: str, kind: type[Exception]
) -> None:
    path.write_text(text)
    with pytest.raises(kind):
        ExecutionState.load(path)


def test_a_flipped_bit_of_any_byte_is_found(state: ExecutionState, path: Path) -> None:
    state.save(path)
    whole = path.read_bytes()
    missed = []
    for at in range(len(whole)):
        for bit in range(at % 3, 8, 3):
            damaged = bytearray(whole)
            damaged[at] ^= 1 << bit
            path.write_bytes(damaged)
            try:
                ExecutionState.load(path)
            except (MaestroError, ValidationError):
                continue
            missed.append((at, bit))
    assert missed == []


def test_every_cut_is_found(state: ExecutionState, path: Path) -> None:
    state.save(path)
    whole = path.read_bytes()
    for length in range(len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(DecodeError):
            ExecutionState.load(path)
    path.write_bytes(whole[:-1])  # only the line feed at its end is missing
    assert ExecutionState.load(path) == state


def test_an_edited_file_is_refused_until_its_checksum_is_removed(
    state: ExecutionState, path: Path
) -> None:
    state.save(path)
    data = json.loads(path.read_text(encoding="utf-8"))
    data["tasks"]["T1"]["status"] = "pending"
    path.write_text(json.dumps(data))
    with pytest.raises(DocumentCorruptError, match="remove its members 'format' and 'sha256'"):
        ExecutionState.load(path)
    del data["format"], data["sha256"]
    path.write_text(json.dumps(data))
    loaded = ExecutionState.load(path)
    assert loaded is not None
    assert loaded.tasks["T1"].status is TaskStatus.PENDING


def test_a_file_that_was_only_reformatted_is_still_good(state: ExecutionState, path: Path) -> None:
    state.save(path)
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")), sort_keys=True))
    assert ExecutionState.load(path) == state


def test_a_symbolic_link_is_not_followed(state: ExecutionState, path: Path) -> None:
    target = path.with_name("target.json")
    state.save(target)
    path.symlink_to(target)
    with pytest.raises(DocumentCorruptError, match="symbolic link"):
        ExecutionState.load(path)
    ExecutionState.create("other").save(path)
    assert ExecutionState.load(target) == state
    assert not path.is_symlink()


def test_a_link_that_leads_nowhere_is_not_a_missing_file(path: Path) -> None:
    path.symlink_to("nowhere")
    with pytest.raises(DocumentCorruptError, match="symbolic link"):
        ExecutionState.load(path)


def test_a_pipe_without_a_writer_does_not_block(path: Path) -> None:
    os.mkfifo(path)
    with pytest.raises(DocumentCorruptError, match="not a regular file"):
        ExecutionState.load(path)


def test_a_folder_is_no_state(state: ExecutionState, path: Path) -> None:
    path.mkdir()
    with pytest.raises(MaestroError, match=r"state\.json"):
        ExecutionState.load(path)
    with pytest.raises(AtomicWriteError):
        state.save(path)
    assert os.listdir(path.parent) == [path.name]  # noqa: PTH208


def test_a_socket_is_no_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # the path of a socket must be short
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("state.json")
        with pytest.raises(MaestroError, match=r"state\.json"):
            ExecutionState.load("state.json")


@pytest.mark.parametrize("device", ["/dev/null", "/dev/zero"])
def test_a_device_is_no_state(device: str) -> None:
    with pytest.raises(DocumentCorruptError, match="not a regular file"):
        ExecutionState.load(device)


def test_a_file_in_place_of_a_folder_is_an_error(state: ExecutionState, path: Path) -> None:
    path.write_text("")
    with pytest.raises(StorageError, match="could not be read"):
        ExecutionState.load(path / "state.json")
    with pytest.raises(FolderError, match="is not a folder"):
        state.save(path / "state.json")


def test_a_file_that_is_too_large_is_not_even_read(path: Path) -> None:
    path.touch()
    os.truncate(path, MAX_STATE_BYTES + 1)
    began = time.thread_time()
    with pytest.raises(DocumentCorruptError, match="the limit is"):
        ExecutionState.load(path)
    assert time.thread_time() - began < 1
