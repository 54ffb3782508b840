"""The user's own code reads, copies or cuts the files of a journal in use, or of a killed one."""

from __future__ import annotations

import os
import shutil
import sqlite3
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from maestro_hive.journal.entries import AttemptStarted, RunStarted
from maestro_hive.journal.sqlite import DamagedJournalWarning, SqliteFile
from maestro_hive.journal.store import Acquire, Append, RunLease, Store, open_store
from maestro_hive.kernel.errors import CorruptionError, StorageError, StoreFailedError
from tests.programs import Program
from tests.python_processes import run_python

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

#: Appends an entry per line of its input, and reports its number when it is acknowledged.
WRITER = """
import sys
from pathlib import Path
from maestro_hive.journal.store import open_store
from tests.crash.test_readers_of_the_folder import acquire, fill, leave_unguarded, read_all, record
folder = Path(sys.argv[1])
if "unguarded" in sys.argv: leave_unguarded()
store = open_store(folder)
run = acquire(store, sys.argv[2])
for line in sys.stdin:
    match line.strip():
        case "append": print(record(store, run), flush=True)
        case "fill": fill(store, run); print("filled", flush=True)
        case "read": read_all(folder); print("read", flush=True)
        case "count": print(len(store.entries(run.number)), flush=True)
store.db.close()
"""
OPEN_AND_CLOSE = """
import sys
from maestro_hive.journal.store import open_store
open_store(sys.argv[1]).db.close()
"""


def read_all(folder: Path) -> None:
    """Open, read and close every file, as a search or a packer does."""
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            path.read_bytes()


def acquire(store: Store, name: str) -> RunLease:
    (lease,) = store.write([Acquire(name, RunStarted(workflow="work"))])
    assert isinstance(lease, RunLease), lease
    return lease


def record(store: Store, run: RunLease) -> int:
    """Append an entry that is acknowledged, and return its number."""
    entry = AttemptStarted(step=1, attempt=1, name="x" * 500)
    (written,) = store.write([Append(run, [entry], sync=True)])
    assert isinstance(written, list), written
    return written[-1].seq


def fill(store: Store, run: RunLease) -> None:
    """Append many pages, so that the index of the log has several parts."""
    entry = AttemptStarted(step=1, attempt=1, name="x" * 3000)
    (written,) = store.write([Append(run, [entry] * 10_000)])
    assert isinstance(written, list), written


def leave_unguarded() -> None:
    """Do without locks of open file descriptions, as in some sandboxes."""
    from maestro_hive.journal.sqlite_locks import Guards

    setattr(Guards, "lock", lambda _: None)  # noqa: B010 - in a process of its own


class Writer:
    """A process that appends to a run of its own."""

    def __init__(self, folder: Path, *words: str) -> None:
        self.program = Program(WRITER, folder, *words)

    def __call__(self, command: str) -> str:
        return self.program(command)

    def append(self, count: int) -> int:
        return [int(self("append")) for _ in range(count)][-1]


@contextmanager
def writing(folder: Path, run: str = "run-1", *words: str) -> Iterator[Writer]:
    writer = Writer(folder, run, *words)
    try:
        yield writer
    finally:
        writer.program.end_by_kill()


def killed(folder: Path, count: int = 30) -> int:
    """Leave a folder as a killed process does, and return how many entries were acknowledged."""
    with writing(folder) as writer:
        return writer.append(count)


def entries_in(folder: Path, run: str = "run-1") -> int:
    store = open_store(folder)
    try:
        number, _ = store.find(run)[:2]
        return len(store.entries(number))
    finally:
        store.db.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "state"


# --- locks that the user's own code drops ---------------------------------------------------------


def open_and_close(folder: Path) -> None:
    run_python(OPEN_AND_CLOSE, folder, check=True)


def query_with_another_sqlite(folder: Path) -> None:
    program = "import sqlite3, sys; sqlite3.connect(sys.argv[1]).execute('SELECT * FROM runs')"
    run_python(program, folder / "journal.db", check=True)


@pytest.mark.parametrize("other", [open_and_close, query_with_another_sqlite])
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
    assert entries_in(folder) == acknowledged == 31


def test_two_writers_that_both_read_the_folder_see_all_of_each_other(folder: Path) -> None:
    with writing(folder, "run-1") as one, writing(folder, "run-2") as two:
        for number in range(1, 9):
            for each in (one, two):
                each("read")
                assert each.append(4) == 4 * number + 1
                if number % 4 == 0:
                    open_and_close(folder)
                assert each("count") == str(4 * number + 1)
    assert entries_in(folder, "run-1") == entries_in(folder, "run-2") == 33


def test_the_program_itself_may_open_the_journal_with_another_sqlite(folder: Path) -> None:
    store = open_store(folder)
    run = acquire(store, "run-1")
    for number in range(2, 12):
        assert record(store, run) == number
        with sqlite3.connect(folder / "journal.db") as db:
            assert db.execute("SELECT count(*) FROM entries").fetchone() == (number,)
        db.close()
    assert (folder / "journal.db-wal").stat().st_size > 0
    assert len(store.entries(run.number)) == 11
    store.db.close()
    assert entries_in(folder) == 11


def test_without_locks_of_open_files_an_index_stays_as_long_as_it_was_mapped(folder: Path) -> None:
    with writing(folder, "run-1", "unguarded") as writer:
        writer("fill")
        long = (folder / "journal.db-shm").stat().st_size
        writer.append(1)  # copies the log
        writer.append(1)  # at the head of the log
        writer("read")
        open_and_close(folder)  # which builds the index again, and needs less of it
        assert (folder / "journal.db-shm").stat().st_size == long
        writer("fill")
        assert writer("count") == str(20_003)
    assert entries_in(folder) == 20_003


# --- a log that was deleted or cut ----------------------------------------------------------------


def delete(log: Path) -> None:
    log.unlink()


def empty(log: Path) -> None:
    os.truncate(log, 0)


def halve(log: Path) -> None:
    """Cut what has been written, of the room that was laid out, in half."""
    os.truncate(log, len(log.read_bytes().rstrip(b"\0")) // 2)


def cut_one_page(log: Path) -> None:
    os.truncate(log, len(log.read_bytes().rstrip(b"\0")) - 1)


@pytest.mark.parametrize("harm", [delete, empty, halve, cut_one_page])
def test_a_log_that_is_gone_or_cut_after_a_kill_is_reported(
    folder: Path, harm: Callable[[Path], None]
) -> None:
    killed(folder)
    harm(folder / "journal.db-wal")
    with pytest.raises(CorruptionError, match="steps that were acknowledged are gone; copied to"):
        open_store(folder)
    with pytest.warns(DamagedJournalWarning, match="acknowledged are gone"):
        database = SqliteFile(folder / "journal.db", accept_loss=True)
    store = Store(database, str(folder))
    record(store, acquire(store, "run-2"))
    database.close()
    assert entries_in(folder, "run-2") == 2


def test_a_log_whose_content_is_in_the_database_may_be_missing(folder: Path) -> None:
    with writing(folder) as writer:
        acknowledged = writer.append(30)
        open_and_close(folder)  # copies the log
    (folder / "journal.db-wal").unlink()
    assert entries_in(folder) == acknowledged


def test_a_kill_alone_is_nothing_to_report(folder: Path) -> None:
    for number in range(1, 4):
        with writing(folder, "one") as one, writing(folder, "two") as two:
            assert one.append(3) == two.append(3) == 3 * number + 1
            open_and_close(folder)
        assert entries_in(folder, "one") == entries_in(folder, "two") == 3 * number + 1


@pytest.mark.parametrize("harm", [delete, empty, halve])
def test_a_log_that_is_gone_or_cut_while_it_is_used_is_an_error(
    folder: Path, harm: Callable[[Path], None]
) -> None:
    store = open_store(folder)
    run = acquire(store, "run-1")
    for _ in range(10):
        record(store, run)
        store.db.wait(0.1)
    harm(folder / "journal.db-wal")
    with pytest.raises(StoreFailedError, match=r"deleted|was cut"):  # noqa: PT012 - soon, not at once
        while True:
            record(store, run)
            store.db.wait(0.1)
    store.db.close()
    with pytest.raises(CorruptionError, match="acknowledged are gone"):
        open_store(folder)


@pytest.mark.parametrize("name", ["journal.db-wal", "journal.db-shm"])
def test_who_opens_a_journal_whose_files_were_deleted_in_use_is_refused(
    folder: Path, name: str
) -> None:
    with writing(folder) as writer:
        writer.append(3)
        (folder / name).unlink()
        with pytest.raises(StorageError, match="were deleted or replaced while other"):
            open_store(folder)


def test_a_failed_store_leaves_the_marks_for_who_opens_it_next(folder: Path) -> None:
    store = open_store(folder)
    record(store, acquire(store, "run-1"))
    (folder / "journal.db-wal").unlink()
    with pytest.raises(StoreFailedError, match="deleted"):
        store.db.close()
    with pytest.raises(CorruptionError, match="acknowledged are gone"):
        open_store(folder)


# --- copies ---------------------------------------------------------------------------------------


def test_a_copy_of_a_folder_in_use_is_whole_or_says_so(folder: Path, tmp_path: Path) -> None:
    with writing(folder) as writer:
        acknowledged = writer.append(10)
        shutil.copytree(folder, tmp_path / "copy")
    assert entries_in(tmp_path / "copy") == acknowledged


def test_a_copy_that_lacks_the_end_of_the_log_says_so(folder: Path, tmp_path: Path) -> None:
    with writing(folder) as writer:
        writer.append(10)
        shutil.copytree(folder, tmp_path / "copy")
        writer.append(10)
        shutil.copytree(folder / "holders", tmp_path / "copy" / "holders", dirs_exist_ok=True)
    with pytest.raises(CorruptionError, match="acknowledged are gone"):
        open_store(tmp_path / "copy")


def test_a_copy_of_a_closed_folder_is_nothing_to_report(folder: Path, tmp_path: Path) -> None:
    store = open_store(folder)
    record(store, acquire(store, "run-1"))
    store.db.close()
    shutil.copytree(folder, tmp_path / "copy")
    assert entries_in(tmp_path / "copy") == 2
