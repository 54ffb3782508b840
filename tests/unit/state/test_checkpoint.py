"""Checkpoints: written whole, found by time, trusted only when they check out, forgotten in turn."""

from __future__ import annotations

import json
import logging
import os
import shutil
import stat
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest

from maestro_hive.kernel import errors, files
from maestro_hive.kernel.clock import ManualClock
from maestro_hive.kernel.errors import (
    ConfigurationError,
    EncodeError,
    FolderError,
    InvalidIdentifierError,
    MaestroError,
)
from maestro_hive.maestro.state import run_document as documents
from maestro_hive.maestro.state.checkpoint import (
    DEFAULT_STORAGE_PATH,
    AtomicWriteError,
    Checkpoint,
    CheckpointError,
    CheckpointFolder,
    CheckpointManager,
    CheckpointName,
    CheckpointNotFoundError,
    ChecksumValidationError,
    StateMetadata,
    WorkflowState,
)
from tests.tables import for_each

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture(params=["folder", "memory"])
def manager(
    request: pytest.FixtureRequest, tmp_path: Path, clock: ManualClock
) -> CheckpointManager:
    """Every promise holds in a folder and in memory."""
    where = tmp_path / "checkpoints" if request.param == "folder" else None
    return CheckpointManager(where, clock=clock)


@pytest.fixture
def on_disk(tmp_path: Path, clock: ManualClock) -> CheckpointManager:
    return CheckpointManager(tmp_path / "checkpoints", clock=clock)


def state(step: int = 0, **data: Any) -> WorkflowState:
    return WorkflowState("w", phase="build", step=step, data=data)


def made(manager: CheckpointManager, count: int, workflow: str = "w") -> list[str]:
    return [manager.create_checkpoint(workflow, state(step)).checkpoint_id for step in range(count)]


def path_of(manager: CheckpointManager, checkpoint_id: str, workflow: str = "w") -> Path:
    assert manager.storage_path is not None
    (found,) = (manager.storage_path / workflow).glob(f"*~{checkpoint_id}.json")
    return found


def tear(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def alter(path: Path, old: bytes, new: bytes) -> None:
    text = path.read_bytes()
    assert text.count(old) == 1
    path.write_bytes(text.replace(old, new))


# --- writing and reading ---


def test_a_checkpoint_comes_back_as_it_was_made(
    manager: CheckpointManager, clock: ManualClock
) -> None:
    given = WorkflowState(
        "w",
        "build",
        3,
        {"when": datetime(2030, 1, 1, tzinfo=UTC), "raw": b"\0", "pair": (1, 2)},
        StateMetadata("3.0", "json", None, {"reason": "before deploy", "tags": {"a": "b"}}),
    )
    checkpoint = manager.create_checkpoint("w", given)
    assert isinstance(checkpoint, Checkpoint)
    assert checkpoint.created_at == clock.now()
    assert (checkpoint.workflow_id, checkpoint.version, checkpoint.expires_at) == ("w", 1, None)
    assert len(given.checksum) == 64
    found = manager.get_checkpoint(checkpoint.checkpoint_id)
    assert found == checkpoint
    assert found.state is not given
    assert isinstance(found.state.data["pair"], tuple)


def test_what_a_checkpoint_keeps_does_not_change_with_its_source(
    manager: CheckpointManager,
) -> None:
    given = state(items=[1])
    checkpoint = manager.create_checkpoint("w", given)
    given.data["items"].append(2)
    assert manager.get_checkpoint(checkpoint.checkpoint_id).state.data == {"items": [1]}


def test_the_latest_is_the_last_one_made_also_within_one_moment(
    manager: CheckpointManager,
) -> None:
    assert manager.get_latest_checkpoint("w") is None
    ids = made(manager, 5)
    latest = manager.get_latest_checkpoint("w")
    assert latest is not None
    assert (latest.checkpoint_id, latest.state.step, latest.version) == (ids[-1], 4, 5)


def test_ids_are_unique_even_when_time_stands_still_or_goes_back(
    manager: CheckpointManager, clock: ManualClock
) -> None:
    ids = made(manager, 4)
    clock.jump(-3600)
    ids += made(manager, 4)
    assert len(set(ids)) == 8
    listed = manager.list_checkpoints("w")
    assert [checkpoint.checkpoint_id for checkpoint in listed] == ids
    assert [checkpoint.state.step for checkpoint in listed] == [0, 1, 2, 3] * 2


def test_workflows_do_not_mix(manager: CheckpointManager) -> None:
    (ours,) = made(manager, 1, "ours")
    (theirs,) = made(manager, 1, "theirs")
    assert [each.checkpoint_id for each in manager.list_checkpoints("ours")] == [ours]
    assert manager.get_checkpoint(theirs).workflow_id == "theirs"
    assert manager.get_checkpoint(ours, workflow_id="ours").workflow_id == "ours"
    with pytest.raises(CheckpointNotFoundError, match="of workflow 'ours'"):
        manager.get_checkpoint(theirs, workflow_id="ours")


def test_another_manager_on_the_folder_finds_everything(on_disk: CheckpointManager) -> None:
    ids = made(on_disk, 3)
    assert on_disk.storage_path is not None
    other = CheckpointManager(on_disk.storage_path)
    assert other.checkpoint_ids("w") == ids[::-1]
    assert other.get_checkpoint(ids[1]).state.step == 1
    newest = other.create_checkpoint("w", state(9)).checkpoint_id
    latest = on_disk.get_latest_checkpoint("w")
    assert latest is not None
    assert latest.checkpoint_id == newest


def test_two_managers_that_chose_the_same_version_overwrite_nothing(
    on_disk: CheckpointManager, clock: ManualClock
) -> None:
    (first,) = made(on_disk, 1)
    clock.advance(1)
    assert on_disk.storage_path is not None
    text = path_of(on_disk, first).read_bytes()
    other = CheckpointManager(on_disk.storage_path.parent / "other", clock=clock)
    (second,) = made(other, 1)
    shutil.copy(path_of(other, second), on_disk.storage_path / "w")
    assert path_of(on_disk, first).read_bytes() == text
    assert on_disk.checkpoint_ids("w") == [second, first]
    assert on_disk.create_checkpoint("w", state()).version == 2


def test_a_value_that_cannot_be_kept_is_an_error_and_writes_nothing(
    manager: CheckpointManager,
) -> None:
    with pytest.raises(EncodeError, match=r"state\.data\.bad"):
        manager.create_checkpoint("w", state(bad=object()))
    assert manager.list_checkpoints("w") == []


def test_a_checkpoint_is_one_private_json_file_below_its_workflow(
    on_disk: CheckpointManager,
) -> None:
    before = os.umask(0)
    try:
        (name,) = made(on_disk, 1)
    finally:
        os.umask(before)
    path = path_of(on_disk, name)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    document = json.loads(path.read_text())["document"]
    assert (document["checkpoint_id"], document["workflow_id"]) == (name, "w")
    assert document["state"]["phase"] == "build"
    assert [each.name for each in path.parent.iterdir()] == [path.name]


def test_in_memory_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    manager = CheckpointManager(None)
    ids = made(manager, 12)
    assert manager.storage_path is None
    assert manager.checkpoint_ids("w") == ids[:1:-1]
    assert list(tmp_path.iterdir()) == []
    assert manager.health_check()["storage_path"] == "memory"


def test_the_default_folder_is_not_in_tmp() -> None:
    assert DEFAULT_STORAGE_PATH == "/var/maestro/checkpoints"
    assert CheckpointManager.__init__.__defaults__ == (DEFAULT_STORAGE_PATH, None, None, 10, True)


# --- a serializer of the caller's own ---


class Backwards:
    """Writes text backwards, so that it is plain whether it was used."""

    def dumps(self, value: Any) -> str:
        return json.dumps(value)[::-1]

    def loads(self, text: str) -> Any:
        return json.loads(text[::-1])


def test_a_serializer_is_used_for_writing_and_reading(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, serializer=Backwards())
    name = manager.create_checkpoint("w", state(word="abc")).checkpoint_id
    assert "cba" in path_of(manager, name).read_text()
    assert manager.get_checkpoint(name).state.data == {"word": "abc"}
    assert manager.validate_checkpoint(name) is True


def test_a_serializer_that_cannot_read_a_checkpoint_is_an_error_that_names_it(
    tmp_path: Path,
) -> None:
    name = CheckpointManager(tmp_path).create_checkpoint("w", state(word="abc")).checkpoint_id
    with pytest.raises(ChecksumValidationError, match=name):
        CheckpointManager(tmp_path, serializer=Backwards()).get_checkpoint(name)


# --- time ---


def test_a_checkpoint_expires_after_its_time(
    manager: CheckpointManager, clock: ManualClock
) -> None:
    (lasting,) = made(manager, 1)
    passing = manager.create_checkpoint("w", state(7), ttl=60)
    assert passing.expires_at == clock.now() + timedelta(seconds=60)
    clock.advance(59)
    latest = manager.get_latest_checkpoint("w")
    assert latest is not None
    assert latest.checkpoint_id == passing.checkpoint_id
    assert latest.expires_at == passing.expires_at
    clock.advance(1)
    latest = manager.get_latest_checkpoint("w")
    assert latest is not None
    assert latest.checkpoint_id == lasting
    assert [each.checkpoint_id for each in manager.list_checkpoints("w")] == [lasting]
    assert len(manager.list_checkpoints("w", include_expired=True)) == 2
    assert manager.cleanup_expired() == 1
    assert manager.cleanup_expired() == 0
    assert len(manager.list_checkpoints("w", include_expired=True)) == 1
    with pytest.raises(CheckpointNotFoundError):
        manager.get_checkpoint(passing.checkpoint_id)


@pytest.mark.parametrize("default", [30, 30.0, timedelta(seconds=30)])
def test_the_default_time_holds_unless_another_is_given(
    tmp_path: Path, clock: ManualClock, default: float | timedelta
) -> None:
    manager = CheckpointManager(tmp_path, default_ttl=default, clock=clock)
    short = manager.create_checkpoint("w", state())
    long = manager.create_checkpoint("w", state(), ttl=timedelta(minutes=2))
    assert short.expires_at == clock.now() + timedelta(seconds=30)
    assert long.expires_at == clock.now() + timedelta(minutes=2)


def test_a_part_of_a_second_is_not_over_at_once(
    manager: CheckpointManager, clock: ManualClock
) -> None:
    clock.advance(0.2)
    checkpoint = manager.create_checkpoint("w", state(), ttl=0.5)
    assert checkpoint.expires_at is not None
    assert checkpoint.expires_at >= clock.now() + timedelta(seconds=0.5)
    assert manager.get_checkpoint(checkpoint.checkpoint_id) == checkpoint


@for_each("ttl", [0, -1, float("inf"), float("nan"), timedelta(0), timedelta.max])
def test_a_time_in_which_nothing_can_be_kept_is_an_error(
    manager: CheckpointManager, ttl: float | timedelta
) -> None:
    with pytest.raises(ConfigurationError, match="cannot expire after"):
        manager.create_checkpoint("w", state(), ttl=ttl)
    assert manager.list_checkpoints("w", include_expired=True) == []


def test_expired_ones_are_found_by_all_workflows(
    manager: CheckpointManager, clock: ManualClock
) -> None:
    for workflow in ("a", "b"):
        manager.create_checkpoint(workflow, state(), ttl=1)
        manager.create_checkpoint(workflow, state())
    clock.advance(2)
    assert manager.cleanup_expired() == 2


# --- retention ---


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, max_checkpoints=3)
    ids = made(manager, 8)
    made(manager, 2, "other")
    assert manager.checkpoint_ids("w") == ids[:4:-1]
    assert len(list((tmp_path / "w").iterdir())) == 3
    assert len(manager.checkpoint_ids("other")) == 2


def test_less_than_one_cannot_be_kept() -> None:
    with pytest.raises(ConfigurationError, match="at least 1"):
        CheckpointManager(None, max_checkpoints=0)


def test_retention_reads_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[Path] = []
    real = files.open_file

    def counted(path: Path, limit: int) -> files.ReadFile:
        reads.append(path)
        return real(path, limit)

    monkeypatch.setattr(files, "open_file", counted)
    manager = CheckpointManager(tmp_path, max_checkpoints=3)
    ids = made(manager, 20)
    manager.cleanup_expired()
    assert manager.checkpoint_ids("w") == ids[:16:-1]
    assert reads == []
    manager.get_latest_checkpoint("w")
    assert len(reads) == 1


def test_one_made_by_hand_is_newer_than_those_of_a_run(tmp_path: Path) -> None:
    """Those of a run carry its fencing number; one without must not be the first to go."""
    manager = CheckpointManager(tmp_path, max_checkpoints=2)
    for number in range(3):
        manager.write("w", f"run-{number}", {}, fence=7)
    ours = manager.create_checkpoint("w", state(5))
    assert manager.checkpoint_ids("w") == [ours.checkpoint_id, "run-2"]


def test_a_file_with_a_lower_fence_is_not_the_newest_however_late_it_comes(
    manager: CheckpointManager,
) -> None:
    manager.write("w", "current", {"phase": "new", "data": {}}, fence=2)
    manager.write("w", "late", {"phase": "old", "data": {}}, fence=1)
    latest = manager.get_latest_checkpoint("w")
    assert latest is not None
    assert (latest.checkpoint_id, latest.state.phase) == ("current", "new")
    assert manager.highest_fence("w") == 2
    assert manager.highest_fence("nobody") == 0


def test_a_name_tells_all_that_retention_needs_also_with_large_numbers(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    written = folder.write("w", "a.b:c-d_e", [b"te", b"xt"], fence=1_234_567, expires=1_893_456_000)
    assert written == CheckpointName(1_234_567, 1, 1_893_456_000, "a.b:c-d_e")
    assert folder.names("w") == [written]
    assert folder.open("w", written).read_at(0, 4) == b"text"


# --- deleting ---


def test_deleting_removes_one_and_says_whether_it_was_there(manager: CheckpointManager) -> None:
    ids = made(manager, 3)
    assert manager.delete_checkpoint(ids[1]) is True
    assert manager.delete_checkpoint(ids[1]) is False
    assert manager.delete_checkpoint("never") is False
    assert manager.checkpoint_ids("w") == [ids[2], ids[0]]


# --- trust ---


def test_every_error_is_a_checkpoint_error_and_ours() -> None:
    for kind in (CheckpointNotFoundError, ChecksumValidationError, AtomicWriteError):
        assert issubclass(kind, CheckpointError)
    assert issubclass(CheckpointError, MaestroError)
    assert issubclass(AtomicWriteError, errors.AtomicWriteError)


def test_what_is_not_there_is_not_found(manager: CheckpointManager) -> None:
    for ask in (manager.get_checkpoint, manager.validate_checkpoint):
        with pytest.raises(CheckpointNotFoundError, match="'never'"):
            ask("never")


DAMAGE: list[tuple[str, Callable[[Path], object]]] = [
    ("torn", tear),
    ("empty", lambda path: path.write_bytes(b"")),
    ("altered", lambda path: alter(path, b'"step":0', b'"step":9')),
    ("longer", lambda path: path.write_bytes(path.read_bytes() + b" ")),
    ("no JSON", lambda path: path.write_bytes(b"\xff\xfe")),
    ("a list", lambda path: path.write_bytes(b"[]\n")),
    ("another kind", lambda path: path.write_bytes(documents.seal("other", {"state": {}}))),
]


@pytest.mark.parametrize("damage", [how for _, how in DAMAGE], ids=[name for name, _ in DAMAGE])
def test_a_damaged_checkpoint_is_never_returned(
    on_disk: CheckpointManager, damage: Callable[[Path], object], caplog: pytest.LogCaptureFixture
) -> None:
    good, bad = made(on_disk, 1)[0], on_disk.create_checkpoint("w", state()).checkpoint_id
    path = path_of(on_disk, bad)
    damage(path)
    assert on_disk.validate_checkpoint(good) is True
    assert on_disk.validate_checkpoint(bad) is False
    with pytest.raises(ChecksumValidationError, match=bad):
        on_disk.get_checkpoint(bad)
    health = on_disk.health_check()
    assert (health["healthy"], health["checkpoints"]) == (False, 2)
    assert bad in health["damaged"][0]
    with caplog.at_level(logging.WARNING):
        assert [each.checkpoint_id for each in on_disk.list_checkpoints("w")] == [good]
    assert bad in caplog.text
    assert path.exists()  # looking sets nothing aside


def test_a_torn_newest_is_set_aside_named_and_the_one_before_it_used(
    on_disk: CheckpointManager, caplog: pytest.LogCaptureFixture
) -> None:
    ids = made(on_disk, 4)
    torn = [path_of(on_disk, name) for name in ids[2:]]
    for path in torn:
        tear(path)
    with caplog.at_level(logging.WARNING):
        latest = on_disk.get_latest_checkpoint("w")
    assert latest is not None
    assert latest.checkpoint_id == ids[1]
    assert len(caplog.records) == 2
    for path, record in zip(reversed(torn), caplog.records, strict=True):
        assert not path.exists()
        aside = path.with_name(f"{path.name}.damaged-1")
        assert aside.exists()
        assert path.name in record.message
        assert str(aside) in record.message
    assert on_disk.checkpoint_ids("w") == [ids[1], ids[0]]
    assert on_disk.health_check()["healthy"] is True


def test_when_all_are_torn_there_is_no_latest(on_disk: CheckpointManager) -> None:
    for name in made(on_disk, 2):
        tear(path_of(on_disk, name))
    assert on_disk.get_latest_checkpoint("w") is None


def test_validate_false_skips_the_checksum_and_nothing_else(on_disk: CheckpointManager) -> None:
    (name,) = made(on_disk, 1)
    path = path_of(on_disk, name)
    alter(path, b'"step":0', b'"step":9')
    assert on_disk.get_checkpoint(name, validate=False).state.step == 9
    latest = on_disk.get_latest_checkpoint("w", validate=False)
    assert latest is not None
    assert latest.state.step == 9
    tear(path)
    with pytest.raises(ChecksumValidationError):
        on_disk.get_checkpoint(name, validate=False)


def test_verify_on_read_false_still_lets_a_checkpoint_be_validated(
    tmp_path: Path, clock: ManualClock
) -> None:
    manager = CheckpointManager(tmp_path, verify_on_read=False, clock=clock)
    (name,) = made(manager, 1)
    alter(path_of(manager, name), b'"step":0', b'"step":9')
    assert manager.get_checkpoint(name).state.step == 9
    assert [each.state.step for each in manager.list_checkpoints("w")] == [9]
    assert manager.validate_checkpoint(name) is False
    assert manager.health_check()["healthy"] is False


def test_the_file_of_another_checkpoint_under_this_ones_name_is_refused(
    on_disk: CheckpointManager,
) -> None:
    first, second = made(on_disk, 2)
    shutil.copy(path_of(on_disk, first), path_of(on_disk, second))
    with pytest.raises(ChecksumValidationError, match="another checkpoint"):
        on_disk.get_checkpoint(second)


def test_the_file_of_another_workflow_is_refused(on_disk: CheckpointManager) -> None:
    (theirs,) = made(on_disk, 1, "theirs")
    (ours,) = made(on_disk, 1, "ours")
    path = path_of(on_disk, theirs, "theirs")
    shutil.copy(path, path_of(on_disk, ours, "ours").parent)
    with pytest.raises(ChecksumValidationError, match="another checkpoint"):
        on_disk.get_checkpoint(theirs, workflow_id="ours")
    latest = on_disk.get_latest_checkpoint("ours")
    assert latest is not None
    assert latest.checkpoint_id == ours


def test_a_checkpoint_that_vanishes_between_listing_and_reading_is_not_found(
    on_disk: CheckpointManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    (name,) = made(on_disk, 1)
    names = on_disk._folder.names("w")
    on_disk.delete_checkpoint(name)
    monkeypatch.setattr(on_disk._folder, "names", lambda _: names)
    with pytest.raises(CheckpointNotFoundError):
        on_disk.get_checkpoint(name, "w")
    assert on_disk.get_latest_checkpoint("w") is None


# --- trouble ---


def test_a_write_that_fails_is_an_error_and_leaves_the_older_ones(
    on_disk: CheckpointManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    (name,) = made(on_disk, 1)

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as broken:
        broken.setattr(os, "write", full)
        with pytest.raises(AtomicWriteError, match="No space left") as failed:
            on_disk.create_checkpoint("w", state(1))
    assert failed.value.path.parent.name == "w"
    assert failed.value.replaced is False
    assert on_disk.checkpoint_ids("w") == [name]
    assert [path.name for path in failed.value.path.parent.iterdir()] == [
        path_of(on_disk, name).name
    ]


def test_a_write_that_may_not_be_durable_says_so(
    on_disk: CheckpointManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    made(on_disk, 1)
    real, calls = os.fsync, []

    def second_fails(fd: int) -> None:
        calls.append(fd)
        if len(calls) == 2:
            raise OSError(5, "Input/output error")
        real(fd)

    monkeypatch.setattr(os, "fsync", second_fails)
    with pytest.raises(AtomicWriteError, match="may not be durable") as failed:
        on_disk.create_checkpoint("w", state(1))
    assert failed.value.replaced is True


HOSTILE = ["../x", "..", ".", "/etc/x", "a/b", "a\0b", "a\nb", "", "a" * 200, "-x", ".x", "ä", "*"]


@for_each("name", HOSTILE)
def test_hostile_ids_are_refused_and_nothing_is_touched(
    manager: CheckpointManager, tmp_path: Path, name: str
) -> None:
    made(manager, 1)
    before = sorted(tmp_path.rglob("*"))
    uses: list[Callable[[], object]] = [
        lambda: manager.create_checkpoint(name, state()),
        lambda: manager.write("w", name, {}),
        lambda: manager.get_checkpoint(name),
        lambda: manager.get_checkpoint("x", workflow_id=name),
        lambda: manager.get_latest_checkpoint(name),
        lambda: manager.list_checkpoints(name),
        lambda: manager.delete_checkpoint(name),
        lambda: manager.validate_checkpoint(name),
    ]
    for use in uses:
        with pytest.raises(InvalidIdentifierError):
            use()
    assert sorted(tmp_path.rglob("*")) == before


def test_a_link_is_neither_read_nor_written_through(
    on_disk: CheckpointManager, tmp_path: Path
) -> None:
    (name,) = made(on_disk, 1)
    assert on_disk.storage_path is not None
    outside = tmp_path / "outside"
    shutil.move(on_disk.storage_path / "w", outside)
    (on_disk.storage_path / "w").symlink_to(outside)
    uses: list[Callable[[], object]] = [
        lambda: on_disk.get_checkpoint(name, "w"),
        lambda: on_disk.create_checkpoint("w", state()),
        lambda: on_disk.get_latest_checkpoint("w"),
    ]
    for use in uses:
        with pytest.raises(FolderError, match="symbolic link"):
            use()
    assert len(list(outside.iterdir())) == 1


def test_a_checkpoint_file_that_is_a_link_is_not_trusted(
    on_disk: CheckpointManager, tmp_path: Path
) -> None:
    (name,) = made(on_disk, 1)
    path = path_of(on_disk, name)
    path.rename(tmp_path / "elsewhere.json")
    path.symlink_to(tmp_path / "elsewhere.json")
    with pytest.raises(ChecksumValidationError, match="symbolic link"):
        on_disk.get_checkpoint(name)


def test_strangers_in_the_folder_do_no_harm(on_disk: CheckpointManager) -> None:
    (name,) = made(on_disk, 1)
    assert on_disk.storage_path is not None
    (on_disk.storage_path / "lost+found").mkdir()
    (on_disk.storage_path / ".hidden").mkdir()
    (on_disk.storage_path / "notes.txt").write_text("mine")
    (on_disk.storage_path / "w" / "notes.json").write_text("mine")
    (on_disk.storage_path / "w" / f".{name}.tmp").write_text("half")
    assert on_disk.get_checkpoint(name).checkpoint_id == name
    assert on_disk.health_check()["checkpoints"] == 1
    assert on_disk.cleanup_expired() == 0
    assert on_disk.delete_checkpoint(name) is True


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(FolderError, match="not a folder"):
        CheckpointManager(tmp_path / "file" / "checkpoints")


def test_a_home_is_found_by_its_sign(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert CheckpointManager("~/points").storage_path == tmp_path / "points"
