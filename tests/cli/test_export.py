"""``maestro export`` and ``maestro import``."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import pathlib
import signal
from typing import TYPE_CHECKING, Any

import pytest

from maestro_hive.engine.context import current
from maestro_hive.engine.copies import KIND
from maestro_hive.maestro.state import run_document as documents
from maestro_hive.maestro.state.records import EntryKind
from maestro_hive.maestro.state.sqlite.store import SqliteStore
from maestro_hive.unified_execution import PersonaExecutor, StatePersistence
from tests.cli.processes import answer, complaint, environment, maestro
from tests.cli.sample_runs import (
    RUN,
    Page,
    active_run,
    asks,
    ends,
    entry,
    executed,
    quick,
    workflow,
)
from tests.python_processes import run_python

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """Return a folder with a run in it."""
    return executed(tmp_path / "old")


@pytest.fixture
def new(tmp_path: Path) -> Path:
    """Return a folder that is not there yet."""
    return tmp_path / "new"


@pytest.fixture
def file(tmp_path: Path, old: Path) -> Path:
    """Return the run as a file."""
    file = tmp_path / "run.json"
    done = maestro("export", RUN, file, "--with-values", "--store", old)
    assert done.returncode == 0, done.stderr
    return file


def shown(folder: Path, run: str = RUN) -> Any:
    """Return a run; its events without their numbers, which are higher after an import."""
    shown = answer(maestro("show", run, "--json", "--store", folder))["run"]
    for event in shown["latest_events"]:
        del event["seq"], event["run_id"]
    return shown


def names_in(folder: Path) -> list[str]:
    runs = answer(maestro("runs", "--json", "--store", folder))["runs"]
    return [run["run_id"] for run in runs]


# --- there and back ------------------------------------------------------------------------------


def test_a_run_is_the_same_in_another_folder(old: Path, new: Path, file: Path) -> None:
    done = maestro("import", file, "--store", new)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"run 'run-1' was imported into {new}, as of ")
    assert shown(new) == shown(old)


def test_completed_steps_are_not_run_again_and_failed_ones_are(new: Path, file: Path) -> None:
    assert maestro("import", file, "--store", new).returncode == 0
    ran = []

    async def again(part: str) -> dict[str, str]:
        ran.append(part)
        return {}

    async def look() -> list[str]:
        ran.append("look")
        assert current().memory == {"tried": 2}
        return current().feedback

    with PersonaExecutor(quick(new), "developer", workflow_id=RUN) as executor:
        completed = asyncio.run(executor.execute(again, "implement", "page"))
        reviewed = asyncio.run(executor.options(retry=True).execute(look, "review"))
    assert completed.final_output == {"made": "page"}
    assert completed.total_tokens_used == 2400
    assert ran == ["look"]
    assert reviewed.final_output == ["Attempt 3 failed: UNKNOWN: no\nway"]


def test_a_run_may_get_another_id(old: Path, file: Path) -> None:
    assert maestro("import", file, "--as", "copy", "--store", old).returncode == 0
    assert names_in(old) == ["copy", RUN]
    assert shown(old, "copy") == {**shown(old), "run_id": "copy"}


def test_a_pipe_will_do(old: Path, new: Path) -> None:
    exported = maestro("export", RUN, "-", "--with-values", "--store", old)
    assert exported.returncode == 0
    documents.unseal(exported.stdout.encode(), KIND, "stdout")  # and nothing else
    done = maestro("import", "-", "--store", new, stdin=exported.stdout)
    assert done.returncode == 0, done.stderr
    assert shown(new) == shown(old)


def test_large_values_and_classes_of_the_program_come_along(tmp_path: Path, new: Path) -> None:
    async def page(number: int) -> list[Page]:
        current().memory["pages"] = [Page("x" * 3000)] * number
        return [Page("x" * 3000)] * number

    old = tmp_path / "old"
    with PersonaExecutor(quick(old), "developer", workflow_id=RUN) as executor:
        for number in range(1, 5):  # values that grow are stored as what was added
            asyncio.run(executor.execute(page, "draw", number))
        assert executor.state_persistence is not None
        executor.state_persistence.mark_task_completed("drawn", {"page": Page("home")})
    file = tmp_path / "run.json"
    assert maestro("export", RUN, file, "--with-values", "--store", old).returncode == 0
    done = maestro("import", file, "--store", new)
    assert done.returncode == 0, done.stderr

    async def never() -> None:
        raise AssertionError

    with PersonaExecutor(quick(new), "developer", workflow_id=RUN) as executor:
        completed = asyncio.run(executor.execute(never, "draw", 4))
        assert executor.state_persistence is not None
        assert executor.state_persistence.state.artifacts == {"page": Page("home")}
    assert completed.final_output == [Page("x" * 3000)] * 4


def test_a_workflow_and_what_it_waits_for_come_along(tmp_path: Path, new: Path) -> None:
    old, file = tmp_path / "old", tmp_path / "run.json"
    child = entry(EntryKind.CHILD_STARTED, run_id="part", workflow="part")
    workflow(old, "asking", "waiting", child, asks())
    exported = maestro("export", "asking", file, "--with-values", "--store", old)
    assert "it has 1 child run: export them separately" in exported.stderr
    assert maestro("import", file, "--store", new).returncode == 0
    (run,) = answer(maestro("runs", "--json", "--store", new))["runs"]
    assert (run["workflow"], run["status"]) == ("build", "waiting")
    assert [wait["name"] for wait in run["waits_for"]] == ["approve"]


def test_a_run_that_was_imported_can_be_exported_again(
    tmp_path: Path, new: Path, file: Path
) -> None:
    maestro("import", file, "--store", new)
    again, third = tmp_path / "again.json", tmp_path / "third"
    assert maestro("export", RUN, again, "--with-values", "--store", new).returncode == 0
    assert maestro("import", again, "--store", third).returncode == 0
    assert shown(third) == shown(new)


# --- exporting -----------------------------------------------------------------------------------


def test_a_live_run_is_exported_as_of_now_and_goes_on(tmp_path: Path, new: Path) -> None:
    old, file = tmp_path / "old", tmp_path / "run.json"
    with active_run(old) as process:
        assert maestro("export", RUN, file, "--with-values", "--store", old).returncode == 0
        process.finish("done")
    assert [step["status"] for step in shown(old)["steps"]] == ["success"]
    assert maestro("import", file, "--store", new).returncode == 0
    assert [step["status"] for step in shown(new)["steps"]] == ["stopped"]


def test_a_file_that_is_there_is_kept_unless_forced(old: Path, tmp_path: Path) -> None:
    file = tmp_path / "precious"
    file.write_text("precious")
    message = complaint(maestro("export", RUN, file, "--with-values", "--store", old), code=2)
    assert "exists already" in message
    assert "--force" in message
    assert file.read_text() == "precious"
    assert maestro("export", RUN, file, "--force", "--with-values", "--store", old).returncode == 0
    documents.unseal(file.read_bytes(), KIND, "file")


def test_the_file_is_its_owners_alone(file: Path) -> None:
    assert file.stat().st_mode & 0o777 == 0o600


def test_what_cannot_be_exported_is_one_sentence(tmp_path: Path, old: Path) -> None:
    target = tmp_path / "x.json"
    complaint(maestro("export", "run-2", target, "--with-values", "--store", old), code=2)
    complaint(maestro("export", RUN, "--with-values", "--store", old), code=2)
    complaint(maestro("export", RUN, tmp_path, "--with-values", "--store", old), code=2)  # a folder
    nowhere = tmp_path / "no folder" / "x.json"
    assert "was not written" in complaint(
        maestro("export", RUN, nowhere, "--with-values", "--store", old)
    )
    assert not target.exists()


# --- importing -----------------------------------------------------------------------------------


def test_an_id_that_is_taken_is_refused(old: Path, file: Path) -> None:
    before = shown(old)
    message = complaint(maestro("import", file, "--store", old), code=2)
    assert "there is a run 'run-1' already" in message
    assert "--as" in message
    assert "maestro purge run-1" in message
    assert shown(old) == before


def test_a_folder_whose_copies_cannot_be_looked_for_is_an_error(
    new: Path, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exists = pathlib.Path.exists

    def fail(path: Path) -> bool:
        if path.name == RUN:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return exists(path)

    monkeypatch.setattr(pathlib.Path, "exists", fail)
    assert "cannot be read (Input/output error)" in complaint(
        maestro("import", file, "--store", new)
    )


def test_an_id_of_which_only_copies_are_left_is_refused(new: Path, file: Path) -> None:
    with StatePersistence(quick(new), RUN) as persistence:
        persistence.mark_task_completed("mine")
        persistence.checkpoint("saved")
    for name in ("journal.db", "journal.db-wal", "journal.db-shm"):
        (new / name).unlink(missing_ok=True)
    message = complaint(maestro("import", file, "--store", new), code=2)
    assert f"already, in {new / 'runs' / RUN};" in message
    assert names_in(new) == []


def test_a_name_that_is_no_safe_file_name_is_refused(new: Path, file: Path) -> None:
    assert "'../x'" in complaint(maestro("import", file, "--as", "../x", "--store", new), code=2)
    assert names_in(new) == []


def damaged(text: bytes) -> dict[str, bytes]:
    return {
        "torn": text[: len(text) // 2],
        "altered": text.replace(b"TimeoutError", b"TimeoutErrer", 1),
        "something else": b"# notes\n",
        "empty": b"",
        "of another kind": documents.seal("checkpoint", {}, raw={"run": b"{}"}),
        "without a run": documents.seal(KIND, {}),
        "a run without entries": documents.seal(KIND, {"run": {"workflow_id": "x"}}),
    }


@pytest.mark.parametrize("kind", damaged(documents.seal(KIND, {})))
def test_a_damaged_file_changes_nothing(new: Path, file: Path, kind: str) -> None:
    file.write_bytes(damaged(file.read_bytes())[kind])
    message = complaint(maestro("import", file, "--store", new))
    assert "cannot be trusted" in message
    assert str(file) in message
    assert not new.exists()


@pytest.mark.parametrize(
    "kind, facts",
    [
        ("run_started", "x"),
        ("run_started", [[]]),
        ("attempt_started", 1.5),
        ("attempt_started", {"name": ["s"]}),
        ("attempt_failed", {"wait": "x"}),
        ("attempt_failed", {"wait": {"seconds": "x"}}),
        ("attempt_failed", {"error": "x"}),
        ("attempt_failed", {"error": {"type": "E", "traceback": [1]}}),
        ("wait_started", {"what": "answer", "name": 3}),
    ],
)
def test_a_file_with_wrong_facts_and_the_right_checksum_is_refused(
    tmp_path: Path, new: Path, kind: str, facts: Any
) -> None:
    entries = [
        entry(EntryKind.ATTEMPT_STARTED, step=1, attempt=1, name="s", persona="p"),
        entry(EntryKind.ATTEMPT_FAILED, step=1, attempt=1, error={"type": "E", "message": "m"}),
    ]
    workflow(tmp_path / "old", RUN, "waiting", *entries, asks())
    file = tmp_path / "run.json"
    assert (
        maestro("export", RUN, file, "--with-values", "--store", tmp_path / "old").returncode == 0
    )
    run = json.loads(file.read_text())["document"]["run"]
    (changed,) = [each for each in run["entries"] if each["kind"] == kind]
    changed["facts"] = {**changed["facts"], **facts} if isinstance(facts, dict) else facts
    file.write_bytes(documents.seal(KIND, {"run": run}))
    assert "cannot be trusted" in complaint(maestro("import", file, "--store", new))
    assert not new.exists()


def test_a_file_of_a_newer_version_is_refused(
    new: Path, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = json.loads(file.read_text())["document"]
    with monkeypatch.context() as newer:
        newer.setattr(documents, "DOCUMENT_FORMAT", documents.DOCUMENT_FORMAT + 1)
        file.write_bytes(documents.seal(KIND, {"run": body["run"]}))
    message = complaint(maestro("import", file, "--store", new))
    assert "install the maestro-hive that wrote it, or a newer one" in message
    assert not new.exists()


def test_a_file_that_is_not_there_is_wrong_use(tmp_path: Path, new: Path) -> None:
    complaint(maestro("import", tmp_path / "nothing", "--store", new), code=2)
    complaint(maestro("import", tmp_path, "--store", new), code=2)
    assert not new.exists()


_KILLED = """
import os, signal, sys
from maestro_hive.maestro.state.sqlite import entries
from maestro_hive.cli import main
as_entry, placed = entries._as_entry, 0
def kill_in_the_middle(*arguments, **options):
    global placed
    placed += 1
    if placed == int(os.environ["KILL_AT"]):
        os.kill(os.getpid(), signal.SIGKILL)
    return as_entry(*arguments, **options)
entries._as_entry = kill_in_the_middle
main()
"""


@pytest.mark.parametrize("at", ["1", "9"])
def test_an_import_that_is_killed_leaves_nothing_in_the_way(new: Path, file: Path, at: str) -> None:
    killed = run_python(_KILLED, "import", file, "--store", new, env=environment(KILL_AT=at))
    assert killed.returncode == -signal.SIGKILL
    store = SqliteStore(new)
    record = store.run(RUN)
    assert record is None or store.entries(record.id) == []
    store.close()
    done = maestro("import", file, "--store", new)
    assert done.returncode == 0, done.stderr
    assert [step["status"] for step in shown(new)["steps"]] == ["success", "failed"]


def test_a_run_that_another_process_starts_just_now_is_not_replaced(new: Path, file: Path) -> None:
    store = SqliteStore(new)
    store.acquire_run(RUN)
    message = complaint(maestro("import", file, "--store", new))
    store.close()
    assert f"is being executed by process {os.getpid()}" in message


def test_the_disk_that_is_full_leaves_no_half_a_run(new: Path, file: Path) -> None:
    script = _KILLED.replace(
        "os.kill(os.getpid(), signal.SIGKILL)",
        'raise __import__("apsw").FullError("database or disk is full")',
    )
    failed = run_python(script, "import", file, "--store", new, env=environment(KILL_AT="9"))
    assert failed.returncode == 1
    assert "could not be written" in failed.stderr
    assert "Traceback" not in failed.stderr
    assert maestro("import", file, "--store", new).returncode == 0


def test_both_end_a_finished_run_as_finished(tmp_path: Path, new: Path) -> None:
    old, file = tmp_path / "old", tmp_path / "run.json"
    workflow(old, "good", "success", ends("success", {"pages": 3}))
    maestro("export", "good", file, "--with-values", "--store", old)
    maestro("import", file, "--store", new)
    assert shown(new, "good")["result"] == {"pages": 3}
    assert maestro("events", "good", "--follow", "--store", new).returncode == 0


def test_the_document_is_the_one_that_lies_beside_a_journal(old: Path, new: Path) -> None:
    beside = old / "runs" / RUN / "execution_state.json"
    assert maestro("import", beside, "--store", new).returncode == 0
    assert [step["name"] for step in shown(new)["steps"]] == ["implement", "review"]
