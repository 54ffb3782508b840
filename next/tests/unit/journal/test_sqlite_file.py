"""A journal in a folder: what is created, what is refused, what is named."""

from __future__ import annotations

import os
import shutil
import sqlite3
import threading
import time
from typing import TYPE_CHECKING

import apsw
import pytest

from maestro_hive.journal.database import FORMAT
from maestro_hive.journal.sqlite import APPLICATION_ID, DamagedJournalWarning, Sqlite, SqliteFile
from maestro_hive.kernel.clock import ManualClock
from maestro_hive.kernel.errors import (
    CorruptionError,
    FolderError,
    FormatError,
    MaestroError,
    StoreFailedError,
)

if TYPE_CHECKING:
    from pathlib import Path

ADD = "INSERT INTO accounts VALUES ($1, 0, 0, 0)"
COUNT = "SELECT count(*) FROM accounts"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state" / "journal.db"


def content(folder: Path) -> dict[str, bytes]:
    return {str(each): each.read_bytes() for each in folder.rglob("*") if each.is_file()}


def fill(path: Path, count: int = 10) -> SqliteFile:
    database = SqliteFile(path)
    for number in range(count):
        database.once(ADD, (f"{number}",), sync=True)
    return database


# --- files ----------------------------------------------------------------------------------------


def test_files_are_private_and_nothing_else_is_left_after_closing(path: Path) -> None:
    before = os.umask(0)
    try:
        fill(path).close()
    finally:
        os.umask(before)
    modes = {each.name: each.stat().st_mode & 0o777 for each in path.parent.iterdir()}
    assert modes == {
        "journal.db": 0o600,
        "journal.db-wal": 0o600,
        "journal.db-shm": 0o600,
        "journal.lock": 0o600,
        "holders": 0o700,
    }
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert list((path.parent / "holders").iterdir()) == []


@pytest.mark.parametrize(
    "name", ["journal.db", "journal.db-wal", "journal.db-shm", "journal.lock", "holders"]
)
def test_a_symbolic_link_among_the_files_is_refused(path: Path, name: str) -> None:
    fill(path).close()
    (path.parent / name).rename(path.parent.parent / name)
    (path.parent / name).symlink_to(path.parent.parent / name)
    with pytest.raises(FolderError, match="symbolic link"):
        SqliteFile(path)


def test_a_folder_may_be_reached_by_a_symbolic_link(path: Path, tmp_path: Path) -> None:
    fill(path).close()
    (tmp_path / "link").symlink_to(path.parent)
    database = SqliteFile(tmp_path / "link" / "journal.db")
    assert database.read(COUNT) == [(10,)]
    database.close()


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(MaestroError, match="/proc/nowhere"):
        SqliteFile("/proc/nowhere/journal.db")


def test_the_log_is_laid_out_at_creation(path: Path) -> None:
    database = SqliteFile(path)
    size = (path.parent / "journal.db-wal").stat().st_size
    database.once(ADD, ("one",), sync=True)
    assert (path.parent / "journal.db-wal").stat().st_size == size > 1 << 20
    database.close()


def test_a_creation_that_was_killed_is_done_again(path: Path) -> None:
    path.parent.mkdir()
    path.with_suffix(".new").write_bytes(b"half")
    path.with_name("journal.db-wal").write_bytes(bytes(1000))
    fill(path).close()
    assert not path.with_suffix(".new").exists()


# --- formats --------------------------------------------------------------------------------------


@pytest.mark.parametrize("found", [FORMAT - 1, FORMAT + 1])
def test_another_format_is_refused_by_name_and_nothing_is_touched(path: Path, found: int) -> None:
    path.parent.mkdir()
    db = sqlite3.connect(path)
    db.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    db.execute(f"PRAGMA user_version = {found}")
    db.execute("CREATE TABLE t (x)")
    db.close()
    before = content(path.parent)
    with pytest.raises(FormatError, match=f"has format {found}, and this version reads") as caught:
        SqliteFile(path)
    assert (caught.value.name, caught.value.found) == (str(path), found)
    assert content(path.parent) == before


@pytest.mark.parametrize("data", [b"x" * 5000, b"SQLite format 3\0" + bytes(5000)])
def test_a_file_of_another_program_is_refused_and_nothing_is_touched(
    path: Path, data: bytes
) -> None:
    path.parent.mkdir()
    path.write_bytes(data)
    with pytest.raises(CorruptionError, match="no journal of maestro-hive"):
        SqliteFile(path)
    assert content(path.parent) == {str(path): data}


# --- damage ---------------------------------------------------------------------------------------


def test_a_database_that_is_gone_or_cut_is_not_created_again(path: Path) -> None:
    fill(path).close()
    data = path.read_bytes()
    for harmed in (None, b"", data[:50], data[:4096], data[:-1]):
        path.unlink(missing_ok=True)
        if harmed is not None:
            path.write_bytes(harmed)
        with pytest.raises(CorruptionError, match=r"gone or was cut|damaged|malformed"):
            SqliteFile(path)
    path.write_bytes(data)
    database = SqliteFile(path)
    assert database.read(COUNT) == [(10,)]
    database.close()


def test_a_page_with_another_byte_is_found(path: Path) -> None:
    fill(path).close()
    pages = path.stat().st_size // 4096
    with sqlite3.connect(path) as db:
        names = db.execute("SELECT name FROM sqlite_schema WHERE type = 'table'").fetchall()
        tables = [name for (name,) in names if not name.startswith("sqlite")]
    db.close()
    for page in range(pages):
        with path.open("r+b") as file:
            file.seek(page * 4096 + 2000)
            (byte,) = file.read(1)
            file.seek(page * 4096 + 2000)
            file.write(bytes([byte ^ 1]))
        with pytest.raises(CorruptionError, match="damaged"):  # noqa: PT012 - at either of them
            database = SqliteFile(path)
            try:
                for table in tables:
                    database.read(f"SELECT * FROM {table}")
                found = database.read("PRAGMA integrity_check")
                if found != [("ok",)]:  # in an index
                    raise CorruptionError(f"damaged: {found}")
            finally:
                database.close()
        with path.open("r+b") as file:
            file.seek(page * 4096 + 2000)
            file.write(bytes([byte]))


def leave_as_a_kill(path: Path, target: Path) -> None:
    """Copy a journal in use; of the holders' files the locks are not copied, as after a kill."""
    database = fill(path)
    shutil.copytree(path.parent, target)
    database.close()


@pytest.mark.parametrize("length", [0, 32, 4000, 20_000])
def test_a_log_that_was_cut_after_a_kill_is_refused_until_the_loss_is_accepted(
    path: Path, tmp_path: Path, length: int
) -> None:
    folder = tmp_path / "killed"
    leave_as_a_kill(path, folder)
    os.truncate(folder / "journal.db-wal", length)
    before = {name: folder.joinpath(name).read_bytes() for name in ("journal.db", "journal.db-wal")}
    for _ in range(2):
        with pytest.raises(CorruptionError, match="synced pages: steps that were acknowledged"):
            SqliteFile(folder / "journal.db")
    (aside,) = (folder / "damaged").iterdir()
    assert {each.name: each.read_bytes() for each in aside.iterdir()} == before
    with pytest.warns(DamagedJournalWarning, match="copied to"):
        database = SqliteFile(folder / "journal.db", accept_loss=True)
    assert database.damage is not None
    database.once(ADD, ("after",), sync=True)
    database.close()
    SqliteFile(folder / "journal.db").close()


def test_a_log_whose_frame_was_flipped_after_a_kill_is_refused(path: Path, tmp_path: Path) -> None:
    folder = tmp_path / "killed"
    leave_as_a_kill(path, folder)
    with (folder / "journal.db-wal").open("r+b") as file:
        file.seek(32 + 4120 * 3 + 1000)
        file.write(b"flipped")
    with pytest.raises(CorruptionError, match="lost"):
        SqliteFile(folder / "journal.db")


def test_a_journal_as_a_kill_leaves_it_opens_whole(path: Path, tmp_path: Path) -> None:
    leave_as_a_kill(path, tmp_path / "killed")
    database = SqliteFile(tmp_path / "killed" / "journal.db")
    assert database.damage is None
    assert database.read(COUNT) == [(10,)]
    database.close()


# --- files that are deleted in use ----------------------------------------------------------------


@pytest.mark.parametrize("name", ["journal.db", "journal.db-wal", "journal.db-shm", "journal.lock"])
def test_files_that_are_deleted_in_use_are_noticed_soon(path: Path, name: str) -> None:
    database = fill(path)
    (path.parent / name).unlink()
    started, number = time.monotonic(), 0
    with pytest.raises(StoreFailedError, match="deleted or replaced"):  # noqa: PT012 - one of many
        while time.monotonic() - started < 60:
            database.once(ADD, (f"lost-{number}",), sync=True)
            number += 1
    with pytest.raises(StoreFailedError, match="deleted or replaced"):
        database.once(ADD, ("next",), sync=True)
    database.close()


def test_files_that_were_deleted_are_noticed_when_closing(path: Path) -> None:
    database = fill(path)
    path.unlink()
    with pytest.raises(StoreFailedError, match="deleted or replaced"):
        database.close()
    database.close()


def test_a_process_that_only_waits_notices_that_the_files_are_deleted(path: Path) -> None:
    database = SqliteFile(path)
    shutil.rmtree(path.parent)
    with pytest.raises(StoreFailedError, match="deleted or replaced"):  # noqa: PT012 - one of many
        while True:
            database.wait(60)


def test_a_journal_whose_files_were_replaced_in_use_is_refused(path: Path) -> None:
    database = fill(path)
    path.with_name("journal.db-shm").unlink()
    with pytest.raises(StoreFailedError, match="end those first"):
        SqliteFile(path)
    with pytest.raises(StoreFailedError, match="deleted or replaced"):
        database.close()


# --- other programs -------------------------------------------------------------------------------


def test_another_program_that_writes_for_long_is_named(path: Path) -> None:
    database = SqliteFile(path)
    other = apsw.Connection(str(path))
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(StoreFailedError, match="another program has locked it"):
        database.once(ADD, ("one",), sync=True)
    other.execute("ROLLBACK")
    other.close()
    database.once(ADD, ("one",), sync=True)
    database.close()


def test_another_program_that_reads_for_long_only_lets_the_log_grow(path: Path) -> None:
    database = fill(path, 3)
    with sqlite3.connect(path) as other:
        other.execute("BEGIN")
        assert other.execute(COUNT).fetchone() == (3,)
        big = "INSERT INTO documents VALUES ('big', $1, 1, $2)"
        for number in range(30):
            database.once(big, (f"{number}", "x" * 200_000), sync=True)
        assert other.execute(COUNT).fetchone() == (3,)
    other.close()
    assert database.read("SELECT count(*) FROM documents") == [(30,)]
    database.close()
    database = SqliteFile(path)
    assert database.read("SELECT count(*) FROM documents") == [(30,)]
    database.close()


def test_a_thread_that_reads_the_files_all_the_time_does_not_keep_it_from_opening(
    path: Path,
) -> None:
    fill(path).close()
    stop = threading.Event()

    def read() -> None:
        while not stop.is_set():
            for each in path.parent.iterdir():
                if each.is_file():
                    each.read_bytes()

    thread = threading.Thread(target=read)
    thread.start()
    for number in range(20):
        database = SqliteFile(path)
        database.once(ADD, (f"more-{number}",), sync=True)
        database.close()
    stop.set()
    thread.join()
    database = SqliteFile(path)
    assert database.read(COUNT) == [(30,)]
    database.close()


# --- in memory ------------------------------------------------------------------------------------


def test_a_copy_of_a_journal_in_memory_has_what_was_committed() -> None:
    database = Sqlite()
    database.once(ADD, ("one",), sync=False)
    copies = []

    def body(tx: object) -> None:
        database.read(COUNT)
        copies.append(database.copy)

    database.write(body, sync=True)
    copy = database.copy()
    database.once(ADD, ("two",), sync=True)
    assert copy.read(COUNT) == [(1,)]
    assert not copy.alive(database.holder())
    copy.close()
    assert database.read(COUNT) == [(2,)]
    database.close()


def test_a_clock_that_is_given_is_the_clock_of_the_journal(path: Path) -> None:
    clock = ManualClock()
    for database in (Sqlite(clock=clock), SqliteFile(path, clock=clock)):
        before = database.now()
        clock.advance(5)
        clock.jump(3600)  # the wall clock is set
        assert database.now() == before + 5
        database.close()
