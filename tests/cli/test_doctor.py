"""``maestro doctor``: what it finds, what it repairs, and where it can still read."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import subprocess
import time
from typing import TYPE_CHECKING, Any

import pytest

from maestro_hive.admin import doctor as doctor_module
from maestro_hive.admin import folder as admin_folder
from maestro_hive.engine import config as engine_config
from maestro_hive.maestro.state.sqlite.connection import FORMAT
from maestro_hive.maestro.state.sqlite.store import SqliteStore
from maestro_hive.maestro.state.state_manager import StateManager
from maestro_hive.unified_execution import ExecutionConfig, StatePersistence
from tests.cli.processes import Done, answer, complaint, execute_steps, filled, maestro
from tests.python_processes import PythonProcess, run_python

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

needs_mount = pytest.mark.skipif(os.geteuid() != 0, reason="only the superuser may mount")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return filled(tmp_path / "state")


def doctor(folder: Path, *arguments: str) -> Done:
    return maestro("doctor", "--store", folder, *arguments)


def examined(folder: Path, *arguments: str, code: int = 0) -> Any:
    return answer(doctor(folder, "--json", *arguments), code)


def files_in(folder: Path) -> dict[str, tuple[int, float]]:
    return {
        str(path.relative_to(folder)): (path.lstat().st_mode, path.lstat().st_mtime)
        for path in folder.rglob("*")
        if path.is_file()
    }


# --- a good folder ---


def test_a_good_folder_is_valid(folder: Path) -> None:
    done = doctor(folder)
    assert done.returncode == 0, done
    assert f"state folder  {folder}\n" in done.stdout
    assert "runs          1\n" in done.stdout
    assert "--fix" not in done.stdout
    assert done.stdout.endswith("everything that was checked is valid\n")


def test_its_json_has_the_documented_keys(folder: Path) -> None:
    found = examined(folder)
    assert (found["folder"], found["runs"], found["problems"]) == (str(folder), 1, [])
    assert found.keys() == {
        "store",
        "folder",
        "format",
        "maestro_hive",
        "python",
        "sqlite",
        "apsw",
        "runs",
        "free_bytes",
        "journal_bytes",
        "held",
        "unfinished",
        "warnings",
        "problems",
        "repairs",
        "repaired",
    }
    assert found["format"] == FORMAT
    assert (found["repairs"], found["repaired"]) == ([], [])


def test_examining_changes_and_leaves_nothing(folder: Path) -> None:
    doctor(folder)
    before = files_in(folder)
    assert doctor(folder).returncode == 0
    assert files_in(folder).keys() == before.keys()


def test_a_folder_in_use_is_examined_without_harm(folder: Path) -> None:
    manager = StateManager(folder, auto_persist=True)
    manager.set_state("j", 1)
    assert doctor(folder).returncode == 0
    manager.set_state("j", 2)
    assert manager.get_state("j") == 2
    manager.shutdown()


def test_repairing_a_folder_that_needs_none_does_nothing(folder: Path) -> None:
    done = doctor(folder, "--fix")
    assert done.returncode == 0
    assert "\nrepaired " not in done.stdout


# --- damage ---


@pytest.mark.parametrize("as_json", [False, True])
def test_a_damaged_page_of_the_journal_is_named(folder: Path, *, as_json: bool) -> None:
    journal = folder / "journal.db"
    text = bytearray(journal.read_bytes())
    at = text.rindex(b"x" * 1500)
    text[at] ^= 1
    journal.write_bytes(text)
    done = doctor(folder, *(["--json"] if as_json else []))
    assert done.returncode == 1, done
    shown = json.loads(done.stdout)["problems"] if as_json else [done.stdout]
    assert str(journal) in shown[0]
    assert "Traceback" not in done.stderr


def test_a_journal_that_is_none_is_named(folder: Path) -> None:
    journal = folder / "journal.db"
    journal.write_bytes(b"this was a journal " * 1000)
    (folder / "journal.db-wal").unlink(missing_ok=True)
    message = complaint(doctor(folder))
    assert str(journal) in message
    assert "damaged" in message


@pytest.mark.parametrize("name", ["runs/run/execution_state.json", "checkpoints/saved.json"])
def test_a_damaged_document_is_named(folder: Path, name: str) -> None:
    path = folder / name
    path.write_bytes(path.read_bytes()[:-20])
    done = doctor(folder)
    assert done.returncode == 1
    assert f"problem       {path}" in done.stdout
    assert done.stdout.endswith("there are problems\n")


def test_what_was_renamed_as_damaged_is_still_a_problem_and_not_deleted(folder: Path) -> None:
    path = folder / "runs" / "run" / "execution_state.json"
    path.rename(f"{path}.damaged-1")
    done = doctor(folder, "--fix")
    assert done.returncode == 1
    assert f"{path}.damaged-1" in done.stdout
    assert (folder / "runs" / "run" / "execution_state.json.damaged-1").exists()


# --- rights ---


def test_what_is_open_to_others_is_a_problem_until_it_is_repaired(folder: Path) -> None:
    folder.chmod(0o755)
    (folder / "runs" / "run" / "execution_state.json").chmod(0o644)
    (folder / "journal.db").chmod(0o640)
    found = examined(folder, code=1)
    wrong = "\n".join(found["problems"])
    for name in ("mode 0755", "execution_state.json is open", "journal.db is open"):
        assert name in wrong
    assert f"make {folder} private" in found["repairs"]
    found = examined(folder, "--fix")
    assert len(found["repaired"]) >= 2
    assert found["problems"] == []
    for path in (folder, *folder.rglob("*")):
        assert path.stat().st_mode & 0o077 == 0, path
    assert examined(folder)["repairs"] == []


def test_a_link_is_named_and_its_target_is_not_changed(folder: Path, tmp_path: Path) -> None:
    mine = tmp_path / "mine.txt"
    mine.write_text("mine")
    mine.chmod(0o644)
    (folder / "runs" / "link.json").symlink_to(mine)
    found = examined(folder, "--fix", code=1)
    assert any("link.json is a symbolic link" in line for line in found["problems"])
    assert mine.stat().st_mode & 0o777 == 0o644


def in_a_project(folder: Path) -> dict[Path, int]:
    """Put files of another program into a state folder, also into folders that both use."""
    names = {
        "deploy.sh": 0o755,
        "journal.md": 0o644,
        "web/index.html": 0o644,
        "web/.page.tmp": 0o644,
        "runs/train/model.sh": 0o755,
        "checkpoints/epoch-3/weights.bin": 0o644,
    }
    for name, mode in names.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True, parents=True)
        path.parent.chmod(0o755)
        path.write_text("mine")
        path.chmod(mode)
    folder.chmod(0o700)
    (folder / "web" / "latest").symlink_to("index.html")
    there = [folder / name for name in (*names, "web", "runs/train", "checkpoints/epoch-3")]
    return {path: path.stat().st_mode for path in there}


def test_what_a_project_has_in_its_folder_is_left_as_it_is(folder: Path) -> None:
    mine = in_a_project(folder)
    (folder / "runs").chmod(0o750)
    found = examined(folder, "--fix")
    assert found["problems"] == []
    assert {path: path.stat().st_mode for path in mine} == mine
    assert (folder / "runs").stat().st_mode & 0o777 == 0o700


@pytest.mark.skipif(os.geteuid() != 0, reason="only the superuser may give files away")
def test_what_others_own_in_a_project_is_not_given_to_anybody(folder: Path) -> None:
    mine = list(in_a_project(folder))
    for path in mine:
        os.chown(path, 12345, -1)
    assert examined(folder, "--fix")["problems"] == []
    assert {path.stat().st_uid for path in mine} == {12345}


def test_files_behind_a_link_are_left_as_they_are(folder: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    (folder / "runs").rename(elsewhere)
    copy = elsewhere / "run" / "execution_state.json"
    copy.chmod(0o644)
    (folder / "runs").symlink_to(elsewhere)
    found = examined(folder, "--fix", code=1)
    assert any("runs is a symbolic link" in line for line in found["problems"])
    assert copy.stat().st_mode & 0o777 == 0o644


def test_a_folder_that_all_users_share_is_named_and_stays_theirs(
    folder: Path, tmp_path: Path
) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o1777)
    environment = {"MAESTRO_CHECKPOINT_DIR": str(shared)}
    done = maestro("doctor", "--fix", "--store", folder, **environment)
    assert f"{shared} is shared with other users" in done.stdout
    assert shared.stat().st_mode & 0o7777 == 0o1777


@pytest.mark.skipif(os.geteuid() != 0, reason="only the superuser may give files away")
def test_a_file_that_the_owner_cannot_use_is_given_back(folder: Path) -> None:
    path = folder / "runs" / "run" / "execution_state.json"
    os.chown(path, 12345, -1)
    assert any("user 12345" in line for line in examined(folder, code=1)["problems"])
    assert examined(folder, "--fix")["problems"] == []
    assert path.stat().st_uid == os.geteuid()


# --- who holds what ---

HOLDER = """
import sys, time
from maestro_hive.unified_execution import *
p = StatePersistence(ExecutionConfig.in_folder(sys.argv[1]), "long")
p.mark_task_pending("later")
print("held", flush=True)
time.sleep(600)
"""


@pytest.fixture
def holder(folder: Path) -> Iterator[PythonProcess]:
    """A process that holds the run ``long``, which has something left to do."""
    with PythonProcess(HOLDER, folder) as process:
        assert process.stdout.readline() == "held\n"
        _wait_for_copies(folder)
        yield process
        process.kill()


def _wait_for_copies(folder: Path) -> None:
    """Wait until the run has its JSON copies, and none is being written.

    The files of a write under way have real times: with a clock that is set they may seem old.
    """
    copies = [folder / "runs" / "long" / "execution_state.json", folder / "checkpoints" / "long"]
    deadline = time.monotonic() + 30
    while not all(each.exists() for each in copies) or any(folder.rglob("*.tmp")):
        assert time.monotonic() < deadline, "the run has no copies"
        time.sleep(0.01)


def test_the_holder_of_a_run_is_shown(folder: Path, holder: PythonProcess) -> None:
    found = examined(folder)
    (held,) = found["held"]
    assert (held["name"], held["pid"]) == ("run/long", holder.pid)
    assert found["unfinished"] == []
    assert f"run/long by process {holder.pid} on " in doctor(folder).stdout


def test_a_held_run_stays_held_when_the_folder_is_repaired(
    folder: Path, holder: PythonProcess
) -> None:
    assert examined(folder, "--fix")["repaired"] == []
    assert [held["pid"] for held in examined(folder)["held"]] == [holder.pid]


def test_leases_of_dead_processes_are_released_and_their_unfinished_runs_named(
    folder: Path, holder: PythonProcess
) -> None:
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    found = examined(folder)
    assert found["held"] == []
    assert [run["run"] for run in found["unfinished"]] == ["long"]
    assert any(f"process {holder.pid}" in line for line in found["repairs"])
    assert "not finished  long (pending): no process executes it" in doctor(folder).stdout
    fixed = examined(folder, "--fix")["repaired"]
    assert any("run/long was held" in line and "released" in line for line in fixed)
    assert examined(folder)["repairs"] == []


# --- what can be repaired ---


def test_files_that_a_killed_process_left_are_deleted_and_younger_ones_are_not(
    folder: Path,
) -> None:
    old = folder / "runs" / "run" / ".execution_state.json.0123456789abcdef.tmp"
    young = folder / ".mine.fedcba9876543210.tmp"
    other = folder / "runs" / "run" / ".not-ours.tmp"
    now = time.time()
    for path, age in ((old, 10_000), (young, 0), (other, 10_000)):
        path.touch(mode=0o600)
        os.utime(path, (now - age,) * 2)
    assert examined(folder)["repairs"] == ["delete 1 file that killed processes left"]
    assert old.exists()
    assert any(str(old) in line for line in examined(folder, "--fix")["repaired"])
    assert (old.exists(), young.exists(), other.exists()) == (False, True, True)


def test_values_that_nothing_refers_to_are_deleted(folder: Path) -> None:
    store = SqliteStore(folder)
    (run,) = store.runs()
    store._file.write(lambda db: store._delete_runs(db, [run], ()))  # killed before the collecting
    store.close()
    (repair,) = examined(folder)["repairs"]
    assert "delete 5 stored values" in repair
    assert examined(folder, "--fix")["repaired"] == [
        "deleted 5 stored values that nothing refers to"
    ]
    assert examined(folder)["repairs"] == []


def test_a_missing_copy_is_written(folder: Path) -> None:
    execute_steps(folder, "build", "design")
    copy = folder / "runs" / "build" / "execution_state.json"
    copy.unlink()
    assert examined(folder)["repairs"] == [
        "write the missing copy of run 'build' (execution_state.json)"
    ]
    assert examined(folder, "--fix")["repaired"] == [
        "run 'build' had no execution_state.json: written"
    ]
    assert copy.exists()
    with StatePersistence(ExecutionConfig.in_folder(folder), "build") as persistence:
        assert persistence.state.completed_tasks == ["design"]


# --- where nothing can be written ---


def mounted(folder: Path, *options: str) -> None:
    subprocess.run(["mount", *options, str(folder)], check=True)


@pytest.fixture
def read_only(folder: Path) -> Iterator[Path]:
    """A state folder on a file system that takes no writes."""
    mounted(folder, "--bind", str(folder))
    try:
        mounted(folder, "-o", "remount,ro,bind")
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@needs_mount
@pytest.mark.parametrize("fix", [False, True])
def test_a_read_only_folder_is_examined_all_the_same(read_only: Path, *, fix: bool) -> None:
    found = examined(read_only, *(["--fix"] if fix else []))
    assert (found["runs"], found["problems"]) == (1, [])
    (unseen,) = found["warnings"]
    assert "cannot be opened for writing" in unseen


@needs_mount
def test_damage_is_found_in_a_read_only_folder(folder: Path) -> None:
    text = bytearray((folder / "journal.db").read_bytes())
    text[text.rindex(b"x" * 1500)] ^= 1
    (folder / "journal.db").write_bytes(text)
    mounted(folder, "--bind", str(folder))
    try:
        mounted(folder, "-o", "remount,ro,bind")
        assert any("journal.db" in line for line in examined(folder, code=1)["problems"])
    finally:
        subprocess.run(["umount", str(folder)], check=True)


KILLED = """
import os, sys
from maestro_hive.unified_execution import *
p = StatePersistence(ExecutionConfig.in_folder(sys.argv[1]), "killed")
p.mark_task_completed("t", {"a": 1})
os.kill(os.getpid(), 9)
"""


@needs_mount
def test_the_log_of_a_killed_process_is_read_in_a_read_only_folder(folder: Path) -> None:
    run_python(KILLED, folder)
    assert (folder / "journal.db-wal").stat().st_size
    mounted(folder, "--bind", str(folder))
    try:
        mounted(folder, "-o", "remount,ro,bind")
        found = examined(folder)
    finally:
        subprocess.run(["umount", str(folder)], check=True)
    seen_all = found["runs"] == 2
    assert seen_all or any("journal.db-wal cannot be read" in line for line in found["warnings"])


def fill(path: Path) -> None:
    """Write until the disk takes no more."""
    with path.open("wb", buffering=0) as filler, contextlib.suppress(OSError):
        for _ in range(1000):
            filler.write(b"x" * 4096)


@needs_mount
def test_a_full_disk_is_named_and_the_folder_examined(folder: Path, tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m,mode=0700", "tmpfs", small], check=True)
    try:
        subprocess.run(["cp", "-a", f"{folder}/.", str(small)], check=True)
        fill(small / "filler")
        (small / "filler").chmod(0o600)
        found = examined(small, code=1)
        assert found["runs"] == 1
        assert any("has only" in line for line in found["problems"])
        assert examined(small, "--fix", code=1)["runs"] == 1
    finally:
        subprocess.run(["umount", str(small)], check=True)


@pytest.mark.skipif(os.geteuid() == 0, reason="the superuser may write everywhere")
def test_a_folder_without_write_permission_is_examined(folder: Path) -> None:
    folder.chmod(0o500)
    try:
        assert examined(folder)["runs"] == 1
    finally:
        folder.chmod(0o700)


def test_a_folder_that_is_synchronised_is_a_problem_and_examined(folder: Path) -> None:
    (folder.parent / ".stfolder").mkdir()
    found = examined(folder, code=1)
    assert any("synchronised by Syncthing" in line for line in found["problems"])
    assert found["runs"] == 1


def test_a_process_that_is_stopped_inside_a_write_does_not_block_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor_module, "_BUSY_SECONDS", 0.1)
    with (folder / "journal.lock").open("r+b") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        found = examined(folder)
    assert found["runs"] == 1
    assert any("inside a write" in line for line in found["warnings"])


# --- the default folder ---------------------------------------------------------------------------


@pytest.fixture
def fallback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A state folder in the home directory, because the default one cannot be created."""
    (tmp_path / "in the way").touch()
    home, default = tmp_path / "home", str(tmp_path / "in the way" / "state")
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.delenv("MAESTRO_STATE_DIR", raising=False)
    monkeypatch.delenv("MAESTRO_CHECKPOINT_DIR", raising=False)
    for module in (engine_config, admin_folder):
        monkeypatch.setattr(module, "DEFAULT_STATE_DIR", default)
    monkeypatch.setattr(engine_config, "DEFAULT_CHECKPOINT_DIR", default + "/checkpoints")
    engine_config.reset_execution_config()
    with StatePersistence(workflow_id="w") as state:
        state.update_state(phase="one")
    yield home / ".maestro" / "state"
    engine_config.reset_execution_config()


def test_it_says_that_the_default_folder_was_replaced(fallback: Path) -> None:
    done = maestro("doctor", HOME=str(fallback.parents[1]))
    assert done.returncode == 0, done
    (warning,) = [line for line in done.stdout.splitlines() if line.startswith("warning")]
    assert "in place of the default folder" in warning
    assert "in the way" in warning
    assert "MAESTRO_STATE_DIR" in warning
    found = answer(maestro("doctor", "--json", HOME=str(fallback.parents[1])))
    assert found["folder"] == str(fallback)
    assert ["in place of the default folder" in each for each in found["warnings"]] == [True]


def test_it_says_when_the_default_folder_can_be_used_by_now(fallback: Path) -> None:
    in_the_way = fallback.parents[2] / "in the way"
    in_the_way.unlink()
    done = maestro("doctor", HOME=str(fallback.parents[1]))
    assert "which can be used by now: programs will not find their state here" in done.stdout


def test_a_folder_that_was_chosen_replaces_nothing(fallback: Path) -> None:
    chosen = {"HOME": str(fallback.parents[1]), "MAESTRO_STATE_DIR": str(fallback)}
    assert "default folder" not in maestro("doctor", **chosen).stdout
