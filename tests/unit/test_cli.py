"""The command ``maestro``, as a process of its own: what it prints, what it exits with."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import maestro_hive
from maestro_hive.maestro.state.sqlite_store import SqliteStore
from maestro_hive.maestro.state.state_manager import StateManager
from maestro_hive.unified_execution import ExecutionConfig, StateConfig, StatePersistence

Done = subprocess.CompletedProcess[str]


def maestro(*arguments: str | Path, **environment: str) -> Done:
    return subprocess.run(
        [sys.executable, "-m", "maestro_hive", *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env={**os.environ, **environment},
    )


def said(done: Done) -> str:
    """Return the one sentence on stderr of a command that failed."""
    assert (done.returncode, done.stdout) == (1, ""), done
    assert done.stderr.startswith("maestro: ")
    assert done.stderr.count("\n") == 1
    return done.stderr


def filled(folder: Path, tasks: int = 5) -> Path:
    """Make a state folder with a run, a value and a checkpoint in it; nobody has it open."""
    state = StateConfig(state_dir=str(folder), checkpoint_dir=str(folder.parent / "checkpoints"))
    manager = StateManager(folder, auto_persist=True)
    manager.set_state("k", "v" * 3000)
    manager.checkpoint("kept")
    with StatePersistence(ExecutionConfig(state=state), "run") as persistence:
        for number in range(tasks):
            persistence.mark_task_completed(f"t{number}", {f"a{number}": "x" * 2000})
        persistence._run.store.checkpoint()  # type: ignore[attr-defined]
    manager.shutdown()
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return filled(tmp_path / "state")


# --- the command itself ---


def test_it_tells_its_version() -> None:
    done = maestro("--version")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"maestro, version {maestro_hive.__version__}\n"


def test_the_installed_script_is_the_same_command() -> None:
    script = Path(sys.executable).with_name("maestro")
    if not script.exists():
        pytest.skip("maestro-hive is not installed here")
    done = subprocess.run([script, "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"maestro, version {maestro_hive.__version__}\n"


def test_its_help_names_every_command() -> None:
    done = maestro("--help")
    assert done.returncode == 0
    for word in ("Usage: maestro", "doctor", "backup", "--version"):
        assert word in done.stdout


@pytest.mark.parametrize("command", ["doctor", "backup"])
def test_each_command_says_which_folder_it_means(command: str) -> None:
    done = maestro(command, "--help")
    assert done.returncode == 0
    shown = " ".join(done.stdout.split())
    for word in ("--store", "MAESTRO_STATE_DIR", "/var/maestro/state"):
        assert word in shown


def test_a_command_that_does_not_exist_is_a_usage_error() -> None:
    done = maestro("docter")
    assert (done.returncode, done.stdout) == (2, "")
    assert "docter" in done.stderr


# --- doctor ---


def test_doctor_finds_a_good_folder_sound(folder: Path) -> None:
    done = maestro("doctor", "--store", folder)
    assert (done.returncode, done.stderr) == (0, "")
    assert str(folder) in done.stdout
    assert "runs          1" in done.stdout
    assert "everything that could be checked is sound" in done.stdout


def test_doctor_prints_json(folder: Path) -> None:
    done = maestro("doctor", "--store", folder, "--json")
    assert done.returncode == 0
    found = json.loads(done.stdout)
    assert (found["folder"], found["runs"], found["wrong"]) == (str(folder), 1, [])
    assert {"format", "sqlite"} <= found.keys()


def test_doctor_takes_the_folder_from_the_environment(folder: Path) -> None:
    done = maestro("doctor", MAESTRO_STATE_DIR=str(folder))
    assert (done.returncode, str(folder) in done.stdout) == (0, True)


def test_doctor_looks_where_the_default_folder_has_its_stand_in(tmp_path: Path) -> None:
    if Path("/var/maestro/state/journal.db").exists():
        pytest.skip("the default folder is in use on this machine")
    stand_in = filled(tmp_path / ".maestro" / "state")
    done = maestro("doctor", "--json", HOME=str(tmp_path), MAESTRO_STATE_DIR="")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["folder"] == str(stand_in)


def test_doctor_looks_into_a_folder_that_is_in_use(folder: Path) -> None:
    manager = StateManager(folder, auto_persist=True)
    manager.set_state("j", 1)
    assert maestro("doctor", "--store", folder).returncode == 0
    manager.set_state("j", 2)
    assert manager.get_state("j") == 2
    manager.shutdown()


@pytest.mark.parametrize("what", ["missing", "empty", "a file"])
def test_doctor_of_what_is_no_state_folder_says_so_and_creates_nothing(
    tmp_path: Path, what: str
) -> None:
    place = tmp_path / "place"
    if what == "empty":
        place.mkdir()
    elif what == "a file":
        place.write_text("mine")
    before = sorted(tmp_path.rglob("*"))
    message = said(maestro("doctor", "--store", place))
    assert str(place) in message
    assert "not a state folder" in message
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("as_json", [False, True])
def test_doctor_names_a_damaged_page_of_the_journal(folder: Path, *, as_json: bool) -> None:
    journal = folder / "journal.db"
    text = bytearray(journal.read_bytes())
    at = text.rindex(b"x" * 1500)
    text[at] ^= 1
    journal.write_bytes(text)
    done = maestro("doctor", "--store", folder, *(["--json"] if as_json else []))
    assert done.returncode == 1, done
    shown = json.loads(done.stdout)["wrong"] if as_json else [done.stdout]
    assert str(journal) in shown[0]
    assert "Traceback" not in done.stderr


def test_doctor_of_a_journal_that_is_none_names_it(folder: Path) -> None:
    journal = folder / "journal.db"
    journal.write_bytes(b"this was a journal " * 1000)
    (folder / "journal.db-wal").unlink(missing_ok=True)
    message = said(maestro("doctor", "--store", folder))
    assert str(journal) in message
    assert "damaged" in message


@pytest.mark.parametrize("name", ["runs/run/execution_state.json", "checkpoints/kept.json"])
def test_doctor_names_a_damaged_document(folder: Path, name: str) -> None:
    path = folder / name
    path.write_bytes(path.read_bytes()[:-20])
    done = maestro("doctor", "--store", folder)
    assert done.returncode == 1
    assert f"wrong         {path}" in done.stdout
    assert "not sound" in done.stdout


def test_doctor_still_tells_of_what_was_set_aside(folder: Path) -> None:
    path = folder / "runs" / "run" / "execution_state.json"
    path.rename(f"{path}.damaged-1")
    done = maestro("doctor", "--store", folder)
    assert done.returncode == 1
    assert f"{path}.damaged-1" in done.stdout


# --- backup ---


def test_a_backup_has_everything(folder: Path, tmp_path: Path) -> None:
    target = tmp_path / "new" / "backup"
    done = maestro("backup", target, "--store", folder)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"{folder} was copied to {target} (3 files)\n"
    assert maestro("doctor", "--store", target).returncode == 0
    for path in (target, *target.rglob("*")):
        assert path.stat().st_mode & 0o077 == 0, path
    manager = StateManager(target, auto_persist=True)
    assert manager.get_state("k") == "v" * 3000
    assert manager.restore("kept") is True
    assert len(manager.get_state("run", "workflows")["completed_tasks"]) == 5
    manager.shutdown()
    assert (target / "runs" / "run" / "execution_state.json").exists()


WRITER = """
import sys
from maestro_hive.unified_execution import *
state = StateConfig(state_dir=sys.argv[1], checkpoint_dir=sys.argv[1] + "-checkpoints")
with StatePersistence(ExecutionConfig(state=state), "live") as p:
    number = 0
    while True:
        p.mark_task_completed(f"t{number}", {f"a{number}": "x" * 2000})
        print(number, flush=True)
        number += 1
"""


def test_a_backup_of_a_folder_in_use_has_all_that_was_acknowledged_before(
    tmp_path: Path,
) -> None:
    source, target = tmp_path / "state", tmp_path / "backup"
    acknowledged = tmp_path / "acknowledged"
    with acknowledged.open("w") as out:
        writer = subprocess.Popen([sys.executable, "-c", WRITER, str(source)], stdout=out)
    try:
        while acknowledged.read_text().count("\n") < 200:
            assert writer.poll() is None
        before = acknowledged.read_text().rpartition("\n")[0].split()
        done = maestro("backup", target, "--store", source)
        after = acknowledged.read_text().split()
        assert writer.poll() is None
    finally:
        writer.kill()
        writer.wait()
    assert done.returncode == 0, done.stderr
    assert len(after) > len(before)
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
    message = said(maestro("backup", target, "--store", folder))
    assert f"{target} exists and is not empty" in message
    assert [path.name for path in target.iterdir()] == ["mine.txt"]


def test_a_backup_onto_itself_or_a_file_is_refused(folder: Path, tmp_path: Path) -> None:
    assert "not empty" in said(maestro("backup", folder, "--store", folder))
    (tmp_path / "file").write_text("mine")
    assert "not a folder" in said(maestro("backup", tmp_path / "file", "--store", folder))
    assert (tmp_path / "file").read_text() == "mine"


def test_a_backup_into_an_empty_folder_is_fine(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert maestro("backup", tmp_path / "empty", "--store", folder).returncode == 0


def test_a_backup_of_what_is_no_state_folder_creates_nothing(tmp_path: Path) -> None:
    message = said(maestro("backup", tmp_path / "target", "--store", tmp_path / "missing"))
    assert str(tmp_path / "missing") in message
    assert list(tmp_path.iterdir()) == []


def test_a_backup_of_a_damaged_journal_is_an_error(folder: Path, tmp_path: Path) -> None:
    journal = folder / "journal.db"
    text = bytearray(journal.read_bytes())
    text[text.rindex(b"x" * 1500)] ^= 1
    journal.write_bytes(text)
    message = said(maestro("backup", tmp_path / "target", "--store", folder))
    assert str(journal) in message
