"""The user's own code reads, copies or cuts the files of a journal that is in use, or was killed."""

from __future__ import annotations

import json
import logging
import os
import shutil
import sqlite3
from collections import deque
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from maestro_hive.admin.doctor import examine, repair
from maestro_hive.kernel import files
from maestro_hive.kernel.errors import MaestroError, StorageError, StoreFailedError
from maestro_hive.maestro.state.records import EntryKind, NewEntry
from maestro_hive.maestro.state.sqlite.store import SqliteStore
from maestro_hive.maestro.state.sqlite.wal import DamagedJournalWarning
from maestro_hive.maestro.state.store import Append
from maestro_hive.maestro.state.stores import open_reader
from tests.python_processes import PythonProcess, run_python

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from maestro_hive.maestro.state.store import RunLease

#: Appends a record per line of its input, and reports its number when it is acknowledged.
WRITER = """
import sys
from pathlib import Path
from maestro_hive.maestro.state.sqlite.store import SqliteStore
from tests.crash.test_readers_of_the_folder import fill, leave_unguarded, read_all, record
folder = Path(sys.argv[1])
if "unguarded" in sys.argv: leave_unguarded()
store = SqliteStore(folder)
run = store.acquire_run(sys.argv[2])
for line in sys.stdin:
    match line.strip():
        case "append": print(record(store, run, run.seq + 1), flush=True)
        case "fill": fill(store, run); print("filled", flush=True)
        case "read": read_all(folder); print("read", flush=True)
        case "count": print(len(store.entries(run.run)), flush=True)
        case "checkpoint": store.checkpoint(); print("copied", flush=True)
store.close()
"""
OPEN_AND_CLOSE = """
import sys
from pathlib import Path
from maestro_hive.maestro.state.sqlite.store import SqliteStore
SqliteStore(Path(sys.argv[1])).close()
"""


def read_all(folder: Path) -> None:
    """Open, read and close every file, as a search or a packer does."""
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            path.read_bytes()


def record(store: SqliteStore, run: RunLease, number: int) -> int:
    """Append a record that is acknowledged."""
    facts = {"task": f"task-{number}", "text": "x" * 500}
    entry = NewEntry(EntryKind.TASK_PENDING, facts=json.dumps(facts).encode())
    (written,) = store.append([Append(run, [entry])])
    assert isinstance(written, list)
    return written[-1].seq


def fill(store: SqliteStore, run: RunLease) -> None:
    """Append so many pages that the index of the log has several parts."""
    entries = [NewEntry(EntryKind.TASK_PENDING, facts=b'{"task":"%s"}' % (b"x" * 3000))] * 10_000
    store.append([Append(run, entries)], sync=False)


def leave_unguarded() -> None:
    """Do without locks of open file descriptions, as in some sandboxes."""
    setattr(files.RangeLock, "hold", lambda _: False)  # noqa: B010 - in a process of its own


class Writer:
    """A process that appends to a run of its own."""

    def __init__(self, folder: Path, *words: str) -> None:
        self.process = PythonProcess(WRITER, folder, *words, stderr=True)

    def __call__(self, command: str) -> str:
        self.process.stdin.write(f"{command}\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline().strip()
        if not answer:
            _, error = self.process.communicate(timeout=60)
            raise AssertionError(error)
        return answer

    def append(self, count: int) -> int:
        return [int(self("append")) for _ in range(count)][-1]

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate(timeout=60)


@contextmanager
def writing(folder: Path, run: str = "run-1", *words: str) -> Iterator[Writer]:
    writer = Writer(folder, run, *words)
    try:
        yield writer
    finally:
        writer.kill()


def killed(folder: Path, count: int = 30) -> int:
    """Leave a folder as a killed process does, and return how many records were acknowledged."""
    with writing(folder) as writer:
        return writer.append(count)


def entries_in(folder: Path, run: str = "run-1") -> int:
    store = SqliteStore(folder)
    try:
        assert store.damage == ()
        return store.acquire_run(run).seq
    finally:
        store.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "state"


# --- locks that the user's own code drops ---------------------------------------------------------


def open_and_close(folder: Path) -> None:
    run_python(OPEN_AND_CLOSE, folder, check=True)


def list_runs(folder: Path) -> None:
    program = "import sys; from maestro_hive.cli.app import run; sys.exit(run(sys.argv[1:]))"
    run_python(program, "runs", "--store", folder, check=True)


def query_with_another_sqlite(folder: Path) -> None:
    program = "import sqlite3, sys; sqlite3.connect(sys.argv[1]).execute('SELECT * FROM runs')"
    run_python(program, folder / "journal.db", check=True)


@pytest.mark.parametrize("other", [open_and_close, list_runs, query_with_another_sqlite])
def test_a_step_that_reads_the_folder_loses_nothing_when_others_open_and_close_it(
    folder: Path, other: Callable[[Path], None]
) -> None:
    acknowledged = 0
    with writing(folder) as writer:
        for _ in range(3):
            writer.append(5)
            writer("read")
            other(folder)
            acknowledged = writer.append(5)
            assert writer("count") == str(acknowledged)
    assert entries_in(folder) == acknowledged == 30


def test_two_writers_that_both_read_the_folder_see_all_of_each_other(folder: Path) -> None:
    with writing(folder, "run-1") as one, writing(folder, "run-2") as two:
        for number in range(1, 9):
            for each in (one, two):
                each("read")
                assert each.append(4) == 4 * number
                each("checkpoint")
                assert each("count") == str(4 * number)
    assert entries_in(folder, "run-1") == entries_in(folder, "run-2") == 32


def test_the_program_itself_may_open_the_journal_with_another_sqlite(folder: Path) -> None:
    store = SqliteStore(folder)
    run = store.acquire_run("run-1")
    for number in range(1, 11):
        assert record(store, run, number) == number
        with sqlite3.connect(folder / "journal.db") as db:
            assert db.execute("SELECT count(*) FROM entries").fetchone() == (number,)
        db.close()
    assert (folder / "journal.db-wal").stat().st_size > 0
    assert len(store.entries(run.run)) == 10
    store.close()
    assert entries_in(folder) == 10


def test_without_locks_of_open_files_an_index_stays_as_long_as_it_was_mapped(folder: Path) -> None:
    with writing(folder, "run-1", "unguarded") as writer:
        writer("fill")
        long = (folder / "journal.db-shm").stat().st_size
        writer("checkpoint")
        writer.append(1)  # at the head of the log, which is truncated
        writer("read")
        open_and_close(folder)  # which builds the index again, and needs less of it
        assert (folder / "journal.db-shm").stat().st_size == long
        writer("fill")
        assert writer("count") == str(20_001)
    assert entries_in(folder) == 20_001


# --- a log that was deleted or cut ----------------------------------------------------------------


def delete(log: Path) -> None:
    log.unlink()


def empty(log: Path) -> None:
    os.truncate(log, 0)


def halve(log: Path) -> None:
    os.truncate(log, log.stat().st_size // 2)


def cut_one_page(log: Path) -> None:
    os.truncate(log, log.stat().st_size - 1)


@pytest.mark.parametrize("harm", [delete, empty, halve, cut_one_page])
def test_a_log_that_is_gone_or_cut_after_a_kill_is_reported(
    folder: Path, harm: Callable[[Path], None]
) -> None:
    killed(folder)
    assert examine(folder).problems == ()
    harm(folder / "journal.db-wal")
    (problem,) = examine(folder).problems
    assert "acknowledged are gone" in problem
    reader = open_reader(folder)
    assert reader.partial is not None
    assert reader.partial.endswith("acknowledged are gone")
    reader.close()
    with pytest.warns(DamagedJournalWarning, match="log (is missing|was cut).*are gone"):
        store = SqliteStore(folder)
    (damage,) = store.damage
    assert "acknowledged are gone" in damage.reason
    record(store, store.acquire_run("run-2"), 1)
    store.close()
    (problem,) = examine(folder).problems  # until the note is deleted
    assert damage.reason in problem
    assert entries_in(folder, "run-2") == 1


def test_a_log_whose_content_is_in_the_database_may_be_missing(folder: Path) -> None:
    with writing(folder) as writer:
        acknowledged = writer.append(30)
        writer("checkpoint")
    (folder / "journal.db-wal").unlink(missing_ok=True)
    assert examine(folder).problems == ()
    assert entries_in(folder) == acknowledged


def test_a_kill_alone_is_nothing_to_report(folder: Path) -> None:
    for number in range(1, 4):
        with writing(folder, "one") as one, writing(folder, "two") as two:
            assert one.append(3) == two.append(3) == 3 * number
            one("checkpoint")
        assert examine(folder).problems == ()
        assert entries_in(folder, "one") == entries_in(folder, "two") == 3 * number


@pytest.mark.parametrize("harm", [delete, empty, halve])
def test_a_log_that_is_gone_or_cut_while_it_is_used_is_an_error(
    folder: Path, harm: Callable[[Path], None]
) -> None:
    store = SqliteStore(folder)
    run = store.acquire_run("run-1")
    for number in range(1, 11):
        record(store, run, number)
    harm(folder / "journal.db-wal")
    with pytest.raises(MaestroError, match=r"deleted while it was open|was cut while|damaged"):
        deque(record(store, run, number) for number in range(11, 14))
    store.close()
    with pytest.warns(DamagedJournalWarning):
        SqliteStore(folder).close()


@pytest.mark.parametrize("name", ["journal.db-wal", "journal.db-shm"])
def test_who_opens_a_journal_whose_files_were_deleted_in_use_is_refused(
    folder: Path, name: str
) -> None:
    with writing(folder) as writer:
        writer.append(3)
        (folder / name).unlink()
        with pytest.raises(StorageError, match=f"{name} was deleted or replaced while other"):
            SqliteStore(folder)


def test_a_failed_store_leaves_the_marks_for_who_opens_it_next(folder: Path) -> None:
    store = SqliteStore(folder)
    run = store.acquire_run("run-1")
    record(store, run, 1)
    (folder / "journal.db-wal").unlink()
    with pytest.raises(StoreFailedError, match="deleted"):
        record(store, run, 2)
    store.close()
    with pytest.warns(DamagedJournalWarning, match="log is missing"):
        SqliteStore(folder).close()


# --- copies ---------------------------------------------------------------------------------------


def test_a_copy_of_a_folder_in_use_is_whole_or_says_so(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with writing(folder) as writer:
        acknowledged = writer.append(10)
        shutil.copytree(folder, tmp_path / "copy")
    with caplog.at_level(logging.WARNING):
        assert entries_in(tmp_path / "copy") == acknowledged
    assert "is a copy that was made while" in caplog.text
    caplog.clear()
    assert entries_in(tmp_path / "copy") == acknowledged
    assert caplog.text == ""


def test_a_copy_that_lacks_the_end_of_the_log_says_so(folder: Path, tmp_path: Path) -> None:
    with writing(folder) as writer:
        writer.append(10)
        shutil.copytree(folder, tmp_path / "copy")
        writer.append(10)
        shutil.copy(folder / "journal.marks", tmp_path / "copy")  # copied last
    assert examine(tmp_path / "copy").problems
    with pytest.warns(DamagedJournalWarning, match="log was cut"):
        SqliteStore(tmp_path / "copy").close()


def test_a_copy_of_a_closed_folder_is_nothing_to_report(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = SqliteStore(folder)
    record(store, store.acquire_run("run-1"), 1)
    store.close()
    shutil.copytree(folder, tmp_path / "copy")
    with caplog.at_level(logging.WARNING):
        assert entries_in(tmp_path / "copy") == 1
    assert caplog.text == ""


# --- permissions ----------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o702])
def test_a_folder_that_others_may_write_to_is_reported_and_repaired(
    folder: Path, caplog: pytest.LogCaptureFixture, mode: int
) -> None:
    folder.mkdir()
    folder.chmod(mode)
    with caplog.at_level(logging.WARNING):
        SqliteStore(folder).close()
        SqliteStore(folder).close()
    (message,) = [each.message for each in caplog.records]
    assert f"{mode:04o}" in message
    assert "doctor --fix" in message
    assert any(f"(mode {mode:04o})" in problem for problem in examine(folder).problems)
    assert repair(folder).problems == ()
    assert folder.stat().st_mode & 0o777 == 0o700
