"""``maestro backup``: a state folder is copied whole, while it is in use."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from maestro_hive.maestro.state.sqlite.store import SqliteStore
from maestro_hive.maestro.state.state_manager import StateManager
from maestro_hive.unified_execution import ExecutionConfig, StateConfig, StatePersistence
from tests.cli.processes import complaint, execute_steps, filled, maestro
from tests.python_processes import run_python

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return filled(tmp_path / "state")


def test_a_backup_has_everything(folder: Path, tmp_path: Path) -> None:
    execute_steps(folder, "build", "design")
    target = tmp_path / "new" / "backup"
    done = maestro("backup", target, "--store", folder)
    assert done.returncode == 0, done
    assert done.stdout == f"{folder} was copied to {target} (5 files)\n"
    assert maestro("doctor", "--store", target).returncode == 0
    for path in (target, *target.rglob("*")):
        assert path.stat().st_mode & 0o077 == 0, path
    manager = StateManager(target, auto_persist=True)
    assert manager.get_state("k") == "v" * 3000
    assert manager.restore("saved") is True
    assert len(manager.get_state("run", "workflows")["completed_tasks"]) == 5
    manager.shutdown()
    assert (target / "runs" / "run" / "execution_state.json").exists()
    assert maestro("checkpoints", "verify", "build", "--store", target).stdout


def test_a_backup_has_the_checkpoints_that_lie_elsewhere(folder: Path, tmp_path: Path) -> None:
    execute_steps(folder, "build", "design")
    elsewhere = tmp_path / "elsewhere"
    (folder / "checkpoints").rename(elsewhere)
    target = tmp_path / "backup"
    done = maestro("backup", target, "--store", folder, MAESTRO_CHECKPOINT_DIR=str(elsewhere))
    assert done.returncode == 0, done
    assert "after-design" in maestro("checkpoints", "list", "--store", target).stdout


WRITER = """
import sys
from maestro_hive.unified_execution import *
with StatePersistence(ExecutionConfig.in_folder(sys.argv[1]), "live") as p:
    number = 0
    while True:
        p.mark_task_completed(f"t{number}", {f"a{number}": "x" * 2000})
        print(number, flush=True)
        number += 1
"""


def backup_during_writes(source: Path, acknowledged: Path) -> tuple[Path, list[str]]:
    """Make backups, which are short, until something is written during one.

    Return it, and what was acknowledged before it.
    """
    for number in range(50):
        target = source.with_name(f"backup-{number}")
        before = acknowledged.read_text().rpartition("\n")[0].split()
        done = maestro("backup", target, "--store", source)
        assert done.returncode == 0, done.stderr
        if len(acknowledged.read_text().split()) > len(before):
            return target, before
    raise AssertionError("nothing was written during any backup")


def test_a_backup_of_a_folder_in_use_has_all_that_was_acknowledged_before(
    tmp_path: Path,
) -> None:
    source, acknowledged = tmp_path / "state", tmp_path / "acknowledged"
    with acknowledged.open("w") as out:
        writer = subprocess.Popen([sys.executable, "-c", WRITER, str(source)], stdout=out)
    try:
        while acknowledged.read_text().count("\n") < 200:
            assert writer.poll() is None
        target, before = backup_during_writes(source, acknowledged)
        assert writer.poll() is None
    finally:
        writer.kill()
        writer.wait()
    store = SqliteStore(target)
    assert store.check() == []
    (run,) = store.runs()
    tasks = [json.loads(entry.facts or b"")["task"] for entry in store.entries(run.id)]
    store.close()
    assert tasks[: len(before)] == [f"t{number}" for number in before]
    assert tasks == [f"t{number}" for number in range(len(tasks))]


def test_a_run_goes_on_in_a_backup_although_the_original_is_in_use(
    folder: Path, tmp_path: Path
) -> None:
    """Who held a run in the original does not hold it in the copy."""
    state = StateConfig(state_dir=str(folder), checkpoint_dir=str(tmp_path / "checkpoints"))
    with StatePersistence(ExecutionConfig(state=state), "run"):
        assert maestro("backup", tmp_path / "copy", "--store", folder).returncode == 0
        state = StateConfig(state_dir=str(tmp_path / "copy"), checkpoint_dir=str(tmp_path / "c"))
        with StatePersistence(ExecutionConfig(state=state), "run") as persistence:
            persistence.mark_task_completed("more")
            assert len(persistence.state.completed_tasks) == 6


def test_a_backup_onto_something_is_refused_and_leaves_it(folder: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir()
    (target / "mine.txt").write_text("mine")
    message = complaint(maestro("backup", target, "--store", folder))
    assert f"{target} exists and is not empty" in message
    assert [path.name for path in target.iterdir()] == ["mine.txt"]


def test_a_backup_onto_itself_or_a_file_is_refused(folder: Path, tmp_path: Path) -> None:
    assert "not empty" in complaint(maestro("backup", folder, "--store", folder))
    (tmp_path / "file").write_text("mine")
    assert "not a folder" in complaint(maestro("backup", tmp_path / "file", "--store", folder))
    assert (tmp_path / "file").read_text() == "mine"


def test_a_backup_into_an_empty_folder_is_fine(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert maestro("backup", tmp_path / "empty", "--store", folder).returncode == 0


def test_a_backup_of_what_is_no_state_folder_creates_nothing(tmp_path: Path) -> None:
    message = complaint(maestro("backup", tmp_path / "target", "--store", tmp_path / "missing"))
    assert str(tmp_path / "missing") in message
    assert list(tmp_path.iterdir()) == []


def test_a_backup_of_a_damaged_journal_is_an_error(folder: Path, tmp_path: Path) -> None:
    journal = folder / "journal.db"
    text = bytearray(journal.read_bytes())
    text[text.rindex(b"x" * 1500)] ^= 1
    journal.write_bytes(text)
    message = complaint(maestro("backup", tmp_path / "target", "--store", folder))
    assert str(journal) in message


KILLED = """
import os, sys
from maestro_hive.admin import transfer
from maestro_hive.cli import main
transfer._copy_document = lambda *_: os.kill(os.getpid(), 9)
main()
"""


def killed_backup(folder: Path, target: Path) -> None:
    """Kill a backup when it has the journal and is about to copy the rest."""
    killed = run_python(KILLED, "backup", target, "--store", folder)
    assert killed.returncode == -9


@pytest.mark.parametrize("is_there", [False, True])
def test_a_backup_that_was_killed_is_none_and_the_next_one_is_whole(
    folder: Path, tmp_path: Path, *, is_there: bool
) -> None:
    target = tmp_path / "copies" / "monday"
    if is_there:
        target.mkdir(parents=True)
        target.chmod(0o700)
    killed_backup(folder, target)
    assert "is not a state folder" in complaint(maestro("doctor", "--store", target))
    assert target.exists() is is_there
    assert maestro("backup", target, "--store", folder).returncode == 0
    assert sorted(path.name for path in target.parent.iterdir()) == ["monday"]
    assert not (target / ".half").exists()
    assert maestro("doctor", "--store", target).returncode == 0
    assert (target / "runs" / "run" / "execution_state.json").exists()


def test_two_backups_to_one_place_do_not_mix(folder: Path, tmp_path: Path) -> None:
    (tmp_path / ".copy.half").mkdir()
    lock = os.open(tmp_path / ".copy.half", os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    message = complaint(maestro("backup", tmp_path / "copy", "--store", folder))
    os.close(lock)
    assert f"another process is making the backup {tmp_path / 'copy'}" in message
    assert not (tmp_path / "copy").exists()
