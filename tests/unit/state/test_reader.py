"""Reading a journal without writing: beside writers, after a crash, where nothing can be written."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import apsw
import pytest

from maestro_hive.kernel.errors import (
    CorruptionError,
    FolderError,
    NewerFormatError,
    StoreClosedError,
)
from maestro_hive.maestro.state.codec import encode
from maestro_hive.maestro.state.sqlite import connection
from maestro_hive.maestro.state.sqlite.reader import SqliteReader
from maestro_hive.maestro.state.sqlite.store import SqliteStore
from maestro_hive.maestro.state.store import Append
from maestro_hive.maestro.state.stores import close_store, open_reader, open_store
from tests.contract.stores import add_tasks, task, tasks

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

LARGE = "x" * 5000


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "state"


@pytest.fixture
def store(folder: Path) -> Iterator[SqliteStore]:
    opened = SqliteStore(folder)
    yield opened
    opened.close()


def fill(store: SqliteStore) -> None:
    run = store.acquire_run("run-1", "build", [task("a"), task("b", LARGE)], "running")
    store.update_document("space", "key", lambda _: encode(1))
    store.append([Append(run, [task("c")])])


def killed(folder: Path) -> None:
    """Leave a folder as a killed process does: with a log, and leases that were not released."""
    program = (
        "import os, sys; from pathlib import Path;"
        "from maestro_hive.maestro.state.sqlite.store import SqliteStore;"
        "from tests.unit.state.test_reader import fill;"
        "store = SqliteStore(Path(sys.argv[1])); fill(store); os.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", program, str(folder)], check=False)
    assert (folder / "journal.db-wal").stat().st_size


def listing(folder: Path) -> dict[str, bytes]:
    """Return every file and its bytes, less those of SQLite's shared memory."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not path.name.endswith("-shm")
    }


def check_filled(reader: Any) -> None:
    assert reader.partial is None
    record = reader.run("run-1")
    assert (record.workflow, record.status) == ("build", "running")
    assert [run.name for run in reader.runs(status="running", limit=5)] == ["run-1"]
    entries = reader.entries(record.id)
    assert tasks(entries) == ["a", "b", "c"]
    assert reader.load(entries[1]) == encode(LARGE).data
    assert len(list(reader.values_of(record.id))) == 1
    assert reader.document("space", "key").value == b"1"
    assert [document.key for document in reader.documents()] == ["key"]
    assert reader.unused_values() == (0, 0)
    assert reader.check() == []


def test_a_closed_journal_is_read_and_nothing_changes(store: SqliteStore, folder: Path) -> None:
    fill(store)
    store.close()
    before = listing(folder)
    assert "journal.db-wal" not in before
    reader = open_reader(folder)
    check_filled(reader)
    assert reader.leases() == []
    reader.close()
    reader.close()
    assert listing(folder) == before
    assert not (folder / "journal.db-shm").exists()


def test_a_journal_is_read_beside_its_writer(store: SqliteStore, folder: Path) -> None:
    fill(store)
    reader = open_reader(folder)
    check_filled(reader)
    (held,) = reader.run_leases().values()
    assert held.holder.pid == os.getpid()
    assert reader.is_alive(held)
    assert reader.lease("run/run-1") == held
    store.append([Append(store.acquire_run("run-1"), [task("d")])])
    assert tasks(reader.entries(1, after=3)) == ["d"]
    reader.close()


def test_the_journal_of_a_killed_process_is_read_and_left_as_it_is(folder: Path) -> None:
    killed(folder)
    before = listing(folder)
    reader = open_reader(folder)
    check_filled(reader)
    (lease,) = reader.leases()
    assert not reader.is_alive(lease)
    assert reader.run_leases() == {}
    reader.close()
    assert listing(folder) == before


def test_a_log_without_shared_memory_is_read_from_a_private_copy(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed(folder)
    (folder / "journal.db-shm").unlink()
    private = tmp_path / "private"
    private.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(private))
    before = listing(folder)
    reader = open_reader(folder)
    check_filled(reader)
    assert [path.stat().st_mode & 0o777 for path in private.iterdir()] == [0o700]
    assert listing(folder) == before
    assert not (folder / "journal.db-shm").exists()
    reader.close()
    assert list(private.iterdir()) == []


def test_commits_behind_a_damaged_part_of_the_log_are_reported(folder: Path) -> None:
    killed(folder)
    (folder / "journal.db-shm").unlink()
    log = folder / "journal.db-wal"
    data = bytearray(log.read_bytes())
    data[len(data) // 2] ^= 1
    log.write_bytes(bytes(data))
    reader = open_reader(folder)
    assert reader.partial is not None
    assert "damaged" in reader.partial
    reader.close()


def test_where_no_copy_can_be_made_the_reader_says_that_it_does_not_see_all(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = SqliteStore(folder)
    store.acquire_run("before")
    store.close()
    killed(folder)
    (folder / "journal.db-shm").unlink()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shutil, "copyfile", full)
    reader = open_reader(folder)
    assert reader.partial is not None
    assert "journal.db-wal" in reader.partial
    assert [run.name for run in reader.runs()] == ["before"]
    reader.close()


def test_a_reader_follows_a_journal_that_is_opened_and_closed_meanwhile(folder: Path) -> None:
    SqliteStore(folder).close()
    reader = open_reader(folder)
    assert reader.runs() == []
    for count in range(1, 4):
        store = SqliteStore(folder)
        run = store.acquire_run("run-1")
        add_tasks(store, run, 1)
        assert len(reader.entries(run.run)) == count
        store.close()
        assert len(reader.entries(run.run)) == count
    reader.close()


def test_a_journal_whose_first_launch_was_killed_is_empty(folder: Path) -> None:
    folder.mkdir()
    (folder / "journal.db").touch()
    reader = open_reader(folder)
    assert reader.runs() == []
    assert reader.count_runs() == 0
    assert reader.check() == []
    store = SqliteStore(folder)
    store.acquire_run("run-1")
    assert reader.count_runs() == 1
    store.close()
    reader.close()


def test_a_folder_without_a_journal_is_refused_and_stays_empty(folder: Path) -> None:
    with pytest.raises(FolderError, match="has no journal"):
        open_reader(folder)
    folder.mkdir()
    with pytest.raises(FolderError, match="has no journal"):
        open_reader(folder)
    assert list(folder.iterdir()) == []


def test_other_databases_and_newer_formats_are_refused(store: SqliteStore, folder: Path) -> None:
    store.close()
    db = connection.connect(folder / "journal.db", apsw.SQLITE_OPEN_READWRITE)
    db.pragma("user_version", 99)
    db.pragma("journal_mode", "delete")  # into the database
    db.close()
    with pytest.raises(NewerFormatError):
        open_reader(folder)
    (folder / "journal.db").write_bytes(b"no database" * 1000)
    with pytest.raises(CorruptionError):
        open_reader(folder)


def test_a_damaged_page_is_our_error(store: SqliteStore, folder: Path) -> None:
    fill(store)
    store.close()
    path = folder / "journal.db"
    data = bytearray(path.read_bytes())
    data[5000] ^= 1
    path.write_bytes(bytes(data))
    reader = open_reader(folder)
    with pytest.raises(CorruptionError, match="checksum"):
        reader.runs()
    assert reader.check() != []
    reader.close()


def test_a_closed_reader_says_so(store: SqliteStore, folder: Path) -> None:
    reader = SqliteReader(folder)
    assert store.usable
    reader.close()
    with pytest.raises(StoreClosedError):
        reader.runs()


# --- the stores of this process ---


def test_a_folder_has_one_store_per_process_until_all_have_closed_it(folder: Path) -> None:
    first, second = open_store(folder), open_store(str(folder))
    assert first is second
    close_store(first)
    second.runs()
    close_store(second)
    assert not second.usable
    close_store(second)  # no error: it is not open any more
    third = open_store(folder)
    assert third is not first
    close_store(third)


def test_a_store_in_memory_stands_for_its_folder_and_writes_nothing(folder: Path) -> None:
    first = open_store(folder, persistent=False)
    add_tasks(first, first.acquire_run("run-1"), 1)
    close_store(first)
    second = open_store(folder, persistent=False)
    assert second is first
    assert second.usable
    assert second.run("run-1") is not None
    assert not folder.exists()
    close_store(second)


def test_a_failed_store_is_replaced_for_the_next_caller(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = open_store(folder)
    run = first.acquire_run("run-1")

    def fail(_fd: int) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as broken:
        broken.setattr(os, "fdatasync", fail)
        with pytest.raises(Exception, match="Input/output error"):
            add_tasks(first, run, 1)
    assert not first.usable
    second = open_store(folder)
    assert second is not first
    assert second.usable
    close_store(first)
    assert second.usable
    second.acquire_run("run-1")
    close_store(second)
