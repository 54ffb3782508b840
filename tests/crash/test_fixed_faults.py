"""What the fault tests once found, each as the smallest test of it."""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
from pathlib import Path
from typing import Any

import pytest

from faults.scenarios import RUN, checkpoint, config_in
from maestro_hive.kernel import files
from maestro_hive.kernel.errors import FolderError, InvalidIdentifierError, StorageError
from maestro_hive.maestro.state import deltas
from maestro_hive.maestro.state.checkpoint import CheckpointManager, WorkflowState
from maestro_hive.maestro.state.sqlite.store import SqliteStore
from maestro_hive.unified_execution.state_persistence import StatePersistence


def failing(*_: Any, **__: Any) -> Any:
    raise OSError(errno.EIO, "Input/output error")


def test_a_lock_file_on_a_full_disk_is_an_error_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = SqliteStore(tmp_path)
    monkeypatch.setattr(os, "pwrite", failing)
    with pytest.raises(FolderError, match="cannot be written"):
        store.acquire_run("r")
    monkeypatch.undo()
    store.acquire_run("r")
    store.close()


def test_a_store_closes_also_when_its_holder_file_cannot_be_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = SqliteStore(tmp_path)
    store.acquire_run("r")
    monkeypatch.setattr(Path, "unlink", failing)
    store.close()
    monkeypatch.undo()
    again = SqliteStore(tmp_path)
    assert again.acquire_run("r").lease.fence == 2
    again.close()


def test_a_checkpoint_that_cannot_be_deleted_is_an_error_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "old.json"
    path.touch()
    monkeypatch.setattr(Path, "unlink", failing)
    with pytest.raises(StorageError, match="could not be removed"):
        files.remove(path)


def test_a_file_that_the_disk_does_not_give_is_an_error_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "open", failing)
    with pytest.raises(StorageError, match="could not be read"):
        files.read_whole(tmp_path / "document.json")


def test_half_a_surrogate_is_refused_as_an_id_before_anything_is_written(tmp_path: Path) -> None:
    checkpoints = CheckpointManager(tmp_path / "checkpoints")
    with pytest.raises(InvalidIdentifierError):
        checkpoints.create_checkpoint("run\ud800", WorkflowState("run\ud800"))


def test_a_difference_cannot_copy_the_same_bytes_again_and_again() -> None:
    with pytest.raises(ValueError, match="twice"):
        deltas.from_json([[0, 2550]] * 2)


@pytest.mark.parametrize("facts", [1.5, 7, {}, {"task": {"a": 1}}, []])
def test_a_sealed_copy_whose_entries_make_no_run_is_set_aside_and_the_older_one_used(
    tmp_path: Path, facts: object, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in checkpoint(tmp_path, count=2):
        pass
    for journal in (tmp_path / "state").glob("journal*"):
        journal.unlink()
    copy = tmp_path / "state" / "runs" / RUN / "execution_state.json"
    _spoil(copy, facts)
    with caplog.at_level(logging.WARNING), StatePersistence(config_in(tmp_path), RUN) as state:
        assert state.state.completed_tasks == ["task-1", "task-2"]
        assert state.restored is not None
        assert "cp-2" in state.restored.source
    assert "execution_state.json" in caplog.text
    assert list(copy.parent.glob("*.damaged-1"))


def _spoil(path: Path, facts: object) -> None:
    """Change a document, and seal it again as only an attacker would."""
    document = json.loads(path.read_bytes())["document"]
    document["run"]["entries"][0]["facts"] = facts
    text = json.dumps(document, separators=(",", ":"), sort_keys=True, ensure_ascii=False).encode()
    digest = hashlib.sha256(text).hexdigest().encode()
    path.write_bytes(b'{"document":' + text + b',"sha256":"' + digest + b'"}\n')
