"""``maestro gc`` and ``maestro purge``: what is deleted is gone, and nothing else is."""

from __future__ import annotations

import os
import re
import subprocess
from typing import TYPE_CHECKING, Any

import pytest

from maestro_hive.admin.purge import plan_purge, purge_family, purge_runs
from maestro_hive.hive.inbox import Answer, Inbox
from maestro_hive.hive.runs import child_started
from maestro_hive.maestro.state.checkpoint import CheckpointManager, WorkflowState
from maestro_hive.maestro.state.memory import MemoryStore
from maestro_hive.maestro.state.sqlite.store import SqliteStore
from maestro_hive.unified_execution import StatePersistence
from tests.cli.processes import (
    Done,
    answer,
    complaint,
    config_in,
    execute_steps,
    filled,
    in_terminal_process,
    maestro,
    maestro_process,
)
from tests.cli.sample_runs import active_run, add, ends, workflow
from tests.python_processes import run_python

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from maestro_hive.maestro.state.records import RunRecord

SECRET = "secret-of-the-customer"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return filled(tmp_path / "state")


def purge(folder: Path, *arguments: str) -> Done:
    return maestro("purge", "--store", folder, *arguments)


def purge_process(folder: Path, *arguments: str) -> Done:
    return maestro_process("purge", "--store", folder, *arguments)


def runs(folder: Path) -> dict[str, str]:
    store = SqliteStore(folder)
    try:
        return {record.name: record.status for record in store.runs()}
    finally:
        store.close()


def secretive(folder: Path, run: str = "private") -> None:
    """Execute a run with the secret in all that is stored of it, large and small."""
    with StatePersistence(config_in(folder), run) as persistence:
        for number in range(40):
            artifacts = {f"small{number}": SECRET, f"large{number}": SECRET * 300}
            persistence.mark_task_completed(f"{SECRET}-{number}", artifacts)
        persistence.update_persona_state("developer", {"note": SECRET})
        persistence.checkpoint(SECRET)
        persistence.update_state(status="success")


def places_of_the_secret(folder: Path) -> list[str]:
    """Return the files that have the secret in them, or in their names.

    Another process reads them: closing a file here would end the locks that SQLite has on it.
    """
    found = subprocess.run(
        ["grep", "-rlaF", SECRET, "."], cwd=folder, capture_output=True, text=True, check=False
    )
    named = {str(path.relative_to(folder)) for path in folder.rglob(f"*{SECRET}*")}
    return sorted(named | {line.removeprefix("./") for line in found.stdout.splitlines()})


# --- purge ---


def test_a_purged_run_is_deleted_everywhere_and_others_are_not(folder: Path) -> None:
    execute_steps(folder, "build", "design", "review")
    done = purge(folder, "build", "--yes")
    assert done.returncode == 0, done
    assert "run 'build' is purged, with 3 copies" in done.stdout
    assert list(runs(folder)) == ["run"]
    assert [path.name for path in (folder / "runs").iterdir()] == ["run"]
    assert maestro("checkpoints", "list", "--store", folder).stdout == ""
    assert maestro("doctor", "--store", folder).returncode == 0
    with StatePersistence(config_in(folder), "build") as persistence:
        assert persistence.state.completed_tasks == []
        assert persistence.restored is None


def test_no_byte_of_a_purged_run_is_left_in_the_folder(folder: Path) -> None:
    secretive(folder)
    assert len(places_of_the_secret(folder)) >= 3
    assert purge(folder, "private", "--yes").returncode == 0
    assert places_of_the_secret(folder) == []


def test_no_byte_is_left_either_while_another_process_uses_the_folder(folder: Path) -> None:
    other = SqliteStore(folder)
    secretive(folder)
    assert "journal.db-wal" in places_of_the_secret(folder)
    assert purge_process(folder, "private", "--yes").returncode == 0
    assert places_of_the_secret(folder) == []
    assert len(other.runs()) == 1
    other.close()


def test_a_reader_that_uses_the_log_is_reported(folder: Path) -> None:
    other = SqliteStore(folder)
    secretive(folder)
    reader = other._file._reader
    reader.execute("BEGIN; SELECT count(*) FROM runs")
    done = purge_process(folder, "private", "--yes")
    assert done.returncode == 0
    assert "'maestro gc'" in done.stderr
    reader.execute("COMMIT")
    assert maestro("gc", "--store", folder).returncode == 0
    assert places_of_the_secret(folder) == []
    other.close()


def test_a_damaged_copy_that_was_renamed_is_deleted_too(folder: Path) -> None:
    secretive(folder)
    copy = folder / "runs" / "private" / "execution_state.json"
    copy.rename(f"{copy}.damaged-1")
    assert purge(folder, "private", "--yes").returncode == 0
    assert places_of_the_secret(folder) == []


def test_the_inbox_of_a_purged_run_is_deleted_too(folder: Path) -> None:
    secretive(folder)
    store = SqliteStore(folder)
    answer = Answer(name="approval", value=SECRET)
    Inbox(store).post("private", lambda messages: messages.answers.append(answer))
    store.close()
    assert purge(folder, "private", "--yes").returncode == 0
    assert places_of_the_secret(folder) == []


def test_a_purge_asks_first(folder: Path) -> None:
    words = ("purge", "run", "--store", folder)
    seen = in_terminal_process(*words, typed={"[y/N]": "n\r"})
    assert seen.returncode == 1
    assert "Purge 1 run (run; 1 pending) for good?" in seen.text
    assert list(runs(folder)) == ["run"]
    assert in_terminal_process(*words, typed={"[y/N]": "y\r"}).returncode == 0
    assert runs(folder) == {}


def test_without_a_terminal_yes_is_required(folder: Path) -> None:
    assert "--yes" in complaint(purge(folder, "run"), 2)
    assert list(runs(folder)) == ["run"]


def test_runs_are_chosen_by_status_and_age(folder: Path) -> None:
    for number, status in enumerate(["success", "success", "failed"]):
        with StatePersistence(config_in(folder), f"r{number}") as persistence:
            persistence.update_state(status=status)
    done = purge(folder, "--status", "success", "--older-than", "1h", "--yes")
    assert done.returncode == 0
    assert "no run matches" in done.stderr
    assert len(runs(folder)) == 4
    assert purge(folder, "--status", "success", "--older-than", "0.001", "--yes").returncode == 0
    assert runs(folder) == {"run": "pending", "r2": "failed"}
    assert purge(folder, "run", "r2", "--status", "failed", "--yes").returncode == 0
    assert list(runs(folder)) == ["run"]


def test_a_run_that_is_still_written_to_is_not_old(folder: Path) -> None:
    """A run's line in the journal is as old as its last status; its last entry counts."""
    store = SqliteStore(folder)
    store._file.write(lambda db: db.execute("UPDATE runs SET updated_at = 0, created_at = 0"))
    store.close()
    done = purge(folder, "--older-than", "1h", "--yes")
    assert "no run matches" in done.stderr


def test_a_held_run_is_refused_by_the_name_of_its_holder_and_others_are_purged(
    folder: Path,
) -> None:
    execute_steps(folder, "build", "design")
    with StatePersistence(config_in(folder), "run"):
        done = purge(folder, "run", "build", "--yes")
        assert done.returncode == 1
        assert f"process {os.getpid()}" in done.stderr
    assert list(runs(folder)) == ["run"]
    assert (folder / "runs" / "run" / "execution_state.json").exists()


def test_copies_without_a_journal_are_purged_too(folder: Path) -> None:
    execute_steps(folder, "build", "design")
    store = SqliteStore(folder)
    store.purge_runs(["build"])
    store.close()
    assert (folder / "runs" / "build").exists()
    assert purge(folder, "build", "--yes").returncode == 0
    assert not (folder / "runs" / "build").exists()
    assert list(runs(folder)) == ["run"]


def test_checkpoints_elsewhere_are_purged_too(folder: Path, tmp_path: Path) -> None:
    execute_steps(folder, "build", "design")
    elsewhere = tmp_path / "elsewhere"
    (folder / "checkpoints").rename(elsewhere)
    done = maestro(
        "purge", "build", "--yes", "--store", folder, MAESTRO_CHECKPOINT_DIR=str(elsewhere)
    )
    assert done.returncode == 0
    assert not (elsewhere / "build").exists()


def test_what_a_link_leads_to_is_not_deleted(folder: Path, tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "file").touch()
    (folder / "runs" / "linked").symlink_to(mine)
    assert "symbolic link" in complaint(purge(folder, "linked", "--yes"))
    assert (mine / "file").exists()


BOSS = """
import os, sys
from maestro_hive import Hive
hive = Hive(sys.argv[1])
@hive.step(persona="developer")
async def pay(number):
    print("paying", number, flush=True)
    return number
@hive.workflow
async def grandchild(number): return await pay(number)
@hive.workflow
async def child(number): return await grandchild(number)
@hive.workflow
async def boss():
    paid = [await child(1), await child(2)]
    if sys.argv[2] == "killed":
        os._exit(9)
    return paid
hive.run_sync(boss, run_id="boss")
"""


def boss(folder: Path, end: str = "killed") -> list[str]:
    """Execute a run that has parts, and is killed when they are over; return what it did now."""
    return run_python(BOSS, folder, end).stdout.splitlines()


def test_children_of_an_unfinished_run_are_left_out_when_runs_are_chosen_by_status(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "state"
    assert boss(folder) == ["paying 1", "paying 2"]
    before = runs(folder)
    assert sorted(before.values()) == ["running"] + ["success"] * 4
    done = purge(folder, "--status", "success", "--yes")
    assert done.returncode == 0, done
    assert "4 runs left out: children of runs not finished (boss)" in done.stderr
    assert runs(folder) == before
    assert boss(folder, "well") == []
    assert purge(folder, "--status", "success", "--yes").returncode == 0
    assert runs(folder) == {}


def test_a_run_is_purged_with_all_its_children_if_all_are_chosen(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    boss(folder)
    done = purge(folder, "--status", "success", "--status", "stopped", "--yes")
    assert (done.returncode, runs(folder)) == (0, {}), done


def test_a_run_is_purged_with_its_children_and_none_of_their_results_comes_back(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "state"
    boss(folder, "well")
    message = complaint(purge(folder, "boss"), 2)
    assert "Purge 5 runs (boss, boss.child-" in message
    done = purge(folder, "boss", "--yes")
    assert (done.returncode, runs(folder)) == (0, {}), done
    assert list((folder / "runs").iterdir()) == []
    assert boss(folder, "well") == ["paying 1", "paying 2"]


def test_a_child_that_a_process_executes_keeps_its_parent_from_being_purged(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "state"
    boss(folder)
    before = runs(folder)
    part = next(name for name in before if ".grandchild" in name)
    with StatePersistence(config_in(folder), part):
        done = purge(folder, "boss", "--yes")
        assert done.returncode == 1
        assert "nothing is purged of 'boss' and its children" in done.stderr
        assert runs(folder) == before


def test_a_child_of_a_run_that_is_gone_does_not_give_its_results_to_another(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "state"
    boss(folder, "well")
    store = SqliteStore(folder)
    purge_family(store, folder, ["boss"])  # without its children
    store.close()
    done = run_python(BOSS, folder, "well")
    assert "it was left by another run of that id" in done.stderr
    assert done.stdout == ""
    left = re.findall("maestro purge ([^`]+)", done.stderr)[-1]
    assert purge(folder, left, "--yes").returncode == 0
    done = run_python(BOSS, folder, "well")
    assert done.stdout.splitlines() == ["paying 1"]  # and then the second one is in its way


def test_a_fork_needs_nothing_of_the_run_that_is_purged(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    boss(folder)
    assert maestro("fork", "boss", "--as", "copy", "--store", folder).returncode == 0
    assert maestro("fork", "copy", "--as", "copy-2", "--store", folder).returncode == 0
    assert purge(folder, "boss", "--yes").returncode == 0
    assert set(runs(folder)) == {"copy", "copy-2"}
    for name in ("copy", "copy-2"):
        program = BOSS.replace('run_id="boss"', f'run_id="{name}"')
        done = run_python(program, folder, "well")
        assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert set(runs(folder).values()) == {"success"}
    assert purge(folder, "copy", "--yes").returncode == 0
    assert set(runs(folder)) == {"copy-2"}


def test_a_child_that_is_named_is_asked_about_with_the_run_that_needs_it(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    boss(folder)
    part = next(name for name in runs(folder) if ".grandchild" in name)
    message = complaint(purge(folder, part), 2)
    assert (
        f"Runs that are not finished (boss) will execute their children again: {part}. Purge"
        in message
    )
    assert purge(folder, part, "--yes").returncode == 0
    assert part not in runs(folder)


def test_a_child_that_was_purged_by_name_is_executed_again(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    boss(folder)
    part = next(name for name in runs(folder) if re.fullmatch(r"boss\.child-\w+", name))
    assert purge(folder, part, "--yes").returncode == 0
    assert len(runs(folder)) == 3
    paid = boss(folder, "well")
    assert len(paid) == 1
    assert part in runs(folder)
    assert set(runs(folder).values()) == {"success"}
    assert boss(folder, "well") == []


def test_an_imported_run_says_which_child_has_to_be_imported_too(tmp_path: Path) -> None:
    folder, other, file = tmp_path / "state", tmp_path / "other", tmp_path / "boss.json"
    boss(folder)
    assert maestro("export", "boss", file, "--with-values", "--store", folder).returncode == 0
    assert maestro("import", file, "--store", other).returncode == 0
    done = run_python(BOSS, other, "well")
    assert done.stdout == ""  # what was paid is not paid again
    part = re.findall(r"child '(boss\.child-\w+)'", done.stderr)[-1]
    assert "import that run too" in done.stderr
    for name in [name for name in runs(folder) if name.startswith(part)]:
        copy = tmp_path / f"{name}.json"
        assert maestro("export", name, copy, "--with-values", "--store", folder).returncode == 0
        assert maestro("import", copy, "--store", other).returncode == 0
    done = run_python(BOSS, other, "well")
    assert done.stdout == ""
    assert re.findall(r"child '(boss\.child-\w+)'", done.stderr)[-1] != part


class KeysAfter(str):
    """Keys that are typed after something else has happened."""

    __slots__ = ("happens",)
    happens: Callable[[], object]

    def encode(self, *_: str) -> bytes:
        self.happens()
        return super().encode()


def test_a_run_that_changed_during_the_question_is_not_purged(folder: Path) -> None:
    workflow(folder, "over", "failed", ends("failed"))
    workflow(folder, "again", "failed", ends("failed"))
    keys = KeysAfter("y\r")
    keys.happens = lambda: add(folder, "again", status="running")
    seen = in_terminal_process(
        "purge", "--status", "failed", "--store", folder, typed={"[y/N]": keys}
    )
    assert seen.returncode == 1
    assert "run 'over' is purged" in seen.text
    assert "run 'again' has changed since it was chosen and is stopped now" in seen.text
    assert runs(folder) == {"run": "pending", "again": "running"}


def test_a_run_that_was_added_to_during_the_question_is_not_purged(folder: Path) -> None:
    def add() -> None:
        with StatePersistence(config_in(folder), "run") as persistence:
            persistence.mark_task_completed("one more")

    keys = KeysAfter("y\r")
    keys.happens = add
    seen = in_terminal_process("purge", "run", "--store", folder, typed={"[y/N]": keys})
    assert seen.returncode == 1
    assert "run 'run' has changed since it was chosen and is pending now" in seen.text
    assert list(runs(folder)) == ["run"]


def test_runs_are_chosen_by_the_status_that_runs_shows(folder: Path) -> None:
    workflow(folder, "left", "running")
    with active_run(folder, "busy", of_workflow=True) as process:
        shown = answer(maestro("runs", "--json", "--store", folder))["runs"]
        statuses = {run["run_id"]: run["status"] for run in shown}
        assert statuses == {"busy": "running", "left": "stopped", "run": "pending"}
        done = purge(folder, "--status", "running", "--yes")
        assert done.returncode == 1
        assert f"process {process.pid}" in done.stderr
        assert set(runs(folder)) == {"busy", "left", "run"}
        assert purge(folder, "--status", "stopped", "--yes").returncode == 0
        assert set(runs(folder)) == {"busy", "run"}


KILLED_BETWEEN = """
import os, sys
from pathlib import Path
from maestro_hive.admin.purge import purge_family
from maestro_hive.maestro.state.sqlite.store import SqliteStore
store = SqliteStore(Path(sys.argv[1]))
kill = lambda *_: os.kill(os.getpid(), 9)
setattr(store, sys.argv[2], kill) if sys.argv[2] == "collect" else setattr(store._entries, "delete", kill)
purge_family(store, Path(sys.argv[1]), ["private"])
"""


@pytest.mark.parametrize("where", ["delete", "collect"])
def test_a_purge_that_is_killed_leaves_nothing_that_comes_back(folder: Path, where: str) -> None:
    secretive(folder)
    done = run_python(KILLED_BETWEEN, folder, where)
    assert done.returncode == -9
    assert not (folder / "runs" / "private").exists()
    there = "private" in runs(folder)
    assert there is (where == "delete")
    with StatePersistence(config_in(folder), "private") as persistence:
        # Either the whole run, to be purged again, or a new one: never one from old copies.
        assert len(persistence.state.completed_tasks) == (40 if there else 0)
        assert persistence.restored is None
    assert maestro("doctor", "--store", folder).returncode == 0


def test_after_such_a_kill_the_values_are_collected(folder: Path) -> None:
    secretive(folder)
    run_python(KILLED_BETWEEN, folder, "collect")
    assert places_of_the_secret(folder)
    assert maestro("gc", "--store", folder).returncode == 0
    assert places_of_the_secret(folder) == []


@pytest.mark.parametrize("arguments", [[], ["--yes"], ["unknown", "--yes"], ["--older-than", "x"]])
def test_wrong_use_is_refused(folder: Path, arguments: list[str]) -> None:
    complaint(purge(folder, *arguments), 2)
    assert list(runs(folder)) == ["run"]


# --- gc ---


def orphaned(folder: Path) -> None:
    """Leave values that nothing refers to, as a purge that was killed does."""
    store = SqliteStore(folder)
    (run,) = store.runs()
    store._file.write(lambda db: store._delete_runs(db, [run], ()))
    store.close()


def test_gc_deletes_values_that_nothing_refers_to_and_says_how_much(folder: Path) -> None:
    orphaned(folder)
    would = answer(maestro("gc", "--dry-run", "--json", "--store", folder))
    assert (would["dry_run"], would["values"]) == (True, 5)
    assert would["bytes"] > 2000
    assert answer(maestro("gc", "--dry-run", "--json", "--store", folder)) == would
    done = maestro("gc", "--store", folder)
    assert "deleted 5 stored values (" in done.stdout
    again = answer(maestro("gc", "--json", "--store", folder))
    assert (again["values"], again["bytes"]) == (0, 0)


def test_gc_deletes_nothing_that_is_needed(folder: Path) -> None:
    execute_steps(folder, "build", "design", "review")
    assert maestro("gc", "--store", folder).returncode == 0
    assert maestro("doctor", "--store", folder).returncode == 0
    with StatePersistence(config_in(folder), "run") as persistence:
        assert len(persistence.state.artifacts) == 5
    assert maestro("checkpoints", "list", "--store", folder).stdout.count("\n") == 2


def test_gc_deletes_checkpoints_that_have_expired(folder: Path) -> None:
    manager = CheckpointManager(folder / "checkpoints")
    manager.create_checkpoint("flow", WorkflowState("flow"), ttl=10_000)
    expired = manager.create_checkpoint("flow", WorkflowState("flow"), ttl=1000)
    (path,) = folder.glob(f"checkpoints/flow/*{expired.checkpoint_id}.json")
    path.rename(path.with_name(f"000000.00000002~1~{expired.checkpoint_id}.json"))
    assert answer(maestro("gc", "--json", "--store", folder))["checkpoints"] == 1
    assert len(list((folder / "checkpoints" / "flow").iterdir())) == 1


def test_gc_keeps_as_many_checkpoints_as_asked(folder: Path) -> None:
    execute_steps(folder, "build", "a", "b", "c")
    execute_steps(folder, "other", "a")
    done = maestro("gc", "--keep", "2", "--dry-run", "--store", folder)
    assert "would delete 0 stored values (0 B), 1 checkpoint," in done.stdout
    assert maestro("gc", "--keep", "2", "--store", folder).returncode == 0
    left = maestro("checkpoints", "list", "--store", folder).stdout
    assert [line.split("\t")[0] for line in left.splitlines()] == ["after-c", "after-b", "after-a"]


@pytest.mark.parametrize("newer", ["inside", "elsewhere"])
def test_gc_keeps_the_newest_of_checkpoints_in_two_folders(
    folder: Path, tmp_path: Path, newer: str
) -> None:
    execute_steps(folder, "build", "a", "b", "c")
    (folder / "checkpoints").rename(tmp_path / "older")
    execute_steps(folder, "build", "d", "e")
    if newer == "inside":
        elsewhere = tmp_path / "older"
    else:
        elsewhere = (folder / "checkpoints").rename(tmp_path / "newer")
        (tmp_path / "older").rename(folder / "checkpoints")
    places = {"MAESTRO_CHECKPOINT_DIR": str(elsewhere)}

    def listed() -> list[str]:
        done = maestro("checkpoints", "list", "build", "--store", folder, **places)
        return [line.split("\t")[0] for line in done.stdout.splitlines()]

    assert listed() == ["after-e", "after-d", "after-c", "after-b", "after-a"]
    assert maestro("gc", "--keep", "3", "--store", folder, **places).returncode == 0
    assert listed() == ["after-e", "after-d", "after-c"]


def test_checkpoints_of_one_fence_in_two_folders_are_told_apart_by_their_time(
    folder: Path, tmp_path: Path
) -> None:
    made = [
        CheckpointManager(place).create_checkpoint("flow", WorkflowState("flow")).checkpoint_id
        for place in [folder / "checkpoints"] * 3 + [tmp_path / "elsewhere"]
    ]
    places = {"MAESTRO_CHECKPOINT_DIR": str(tmp_path / "elsewhere")}
    assert maestro("gc", "--keep", "1", "--store", folder, **places).returncode == 0
    done = maestro("checkpoints", "list", "flow", "--store", folder, **places)
    assert [line.split("\t")[0] for line in done.stdout.splitlines()] == [made[-1]]


class _LateRuns(MemoryStore):
    """A store in which a run starts a child right after the runs were listed."""

    def runs(self, **chosen: Any) -> list[RunRecord]:
        return [each for each in super().runs(**chosen) if each.name != "child"]


def test_a_child_that_was_started_while_runs_were_chosen_is_purged_with_its_parent(
    tmp_path: Path,
) -> None:
    store = _LateRuns()
    started = child_started(b"c" * 32, "child", "work")
    parent = store.acquire_run("parent", "work", [started], "failed")
    child = store.acquire_run("child", "work", [], "failed")
    store.release_run(child)
    store.release_run(parent)
    plan = plan_purge(store, tmp_path, ["parent"])
    assert plan.families == (("parent", "child"),)
    assert [each.run_id for each in purge_runs(store, tmp_path, plan)] == ["parent", "child"]
    assert store.run("child") is None
