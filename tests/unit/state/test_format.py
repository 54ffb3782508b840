"""The format of a journal: its tables are all there or none, and what is not ours is not touched."""

from __future__ import annotations

import shutil
import sqlite3
from typing import TYPE_CHECKING

import apsw
import pytest

from maestro_hive.kernel.errors import (
    CorruptionError,
    MaestroError,
    NewerFormatError,
    StorageError,
)
from maestro_hive.maestro.state.codec import encode
from maestro_hive.maestro.state.sqlite import connection
from maestro_hive.maestro.state.sqlite.reader import SqliteReader
from maestro_hive.maestro.state.sqlite.store import SqliteStore

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "state"


def contents(folder: Path) -> dict[str, bytes]:
    """What people would miss: the shared memory and the locks hold nothing."""
    names = ("journal.db", "journal.db-wal")
    found = {name: (folder / name).read_bytes() for name in names if (folder / name).exists()}
    return {name: data for name, data in found.items() if data}


def connect(folder: Path) -> apsw.Connection:
    return apsw.Connection(str(folder / "journal.db"), vfs="cksmvfs")


def test_a_new_folder_has_the_format(folder: Path) -> None:
    SqliteStore(folder).close()
    db = connect(folder)
    assert db.pragma("user_version") == connection.FORMAT
    assert db.pragma("application_id") == connection.APPLICATION_ID
    db.close()


def test_an_empty_file_is_a_new_journal(folder: Path) -> None:
    folder.mkdir(mode=0o700)
    (folder / "journal.db").touch()
    store = SqliteStore(folder)
    assert store.runs() == []
    store.close()


def test_opening_again_changes_nothing(folder: Path) -> None:
    store = SqliteStore(folder)
    store.acquire_run("run-1")
    store.close()
    before = contents(folder)
    SqliteStore(folder).close()
    assert contents(folder)["journal.db"] == before["journal.db"]


# --- what is refused ----------------------------------------------------------------------------


def give_format(folder: Path, number: int = 99) -> None:
    db = connect(folder)
    db.pragma("user_version", number)
    db.close()


def refused_untouched(folder: Path, error: type[MaestroError], words: str) -> MaestroError:
    before = contents(folder)
    with pytest.raises(error, match=words) as caught:
        SqliteStore(folder)
    refusal: MaestroError = caught.value
    del caught
    assert contents(folder) == before
    return refusal


def test_a_newer_format_is_refused_and_not_touched(folder: Path) -> None:
    store = SqliteStore(folder)
    store.acquire_run("run-1")
    store.close()
    give_format(folder)
    refusal = refused_untouched(folder, NewerFormatError, "99")
    assert isinstance(refusal, NewerFormatError)
    assert (refusal.found, refusal.known) == (99, connection.FORMAT)


@pytest.mark.parametrize("number", range(1, connection.FORMAT))
def test_an_earlier_format_is_refused_and_not_touched(folder: Path, number: int) -> None:
    SqliteStore(folder).close()
    give_format(folder, number)
    refused_untouched(folder, StorageError, f"format {number}, of before the first release")
    with pytest.raises(StorageError, match=f"format {number}, of before the first release"):
        SqliteReader(folder)


def test_a_newer_format_that_is_still_in_the_log_is_refused_and_not_touched(
    folder: Path, tmp_path: Path
) -> None:
    store = SqliteStore(folder)
    store.update_document("space", "key", lambda _: encode("x" * 500))
    give_format(folder)
    crashed = tmp_path / "crashed"
    crashed.mkdir(mode=0o700)
    for name in contents(folder):
        shutil.copy(folder / name, crashed / name)
    store.close()
    refused_untouched(crashed, NewerFormatError, "99")


@pytest.mark.parametrize("wal", [False, True])
@pytest.mark.parametrize("version", [0, 1, 99])
def test_somebody_elses_database_is_refused_and_not_touched(
    folder: Path, wal: bool, version: int
) -> None:
    folder.mkdir(mode=0o700)
    db = sqlite3.connect(folder / "journal.db")
    if wal:
        db.execute("PRAGMA journal_mode = wal")
    db.execute("CREATE TABLE theirs (a)")
    db.execute("INSERT INTO theirs VALUES ('precious')")
    db.execute(f"PRAGMA user_version = {version}")
    db.commit()
    db.close()
    refused_untouched(folder, CorruptionError, "not a journal of maestro-hive")


@pytest.mark.parametrize("content", [b"x", b"not a database " * 1000, b"\0" * 8192])
def test_what_is_no_database_is_refused_and_not_touched(folder: Path, content: bytes) -> None:
    folder.mkdir(mode=0o700)
    (folder / "journal.db").write_bytes(content)
    refused_untouched(folder, CorruptionError, "journal")


def test_a_refused_folder_can_be_opened_once_it_is_mended(folder: Path) -> None:
    SqliteStore(folder).close()
    give_format(folder)
    with pytest.raises(NewerFormatError):
        SqliteStore(folder)
    db = connect(folder)
    db.pragma("user_version", connection.FORMAT)
    db.close()
    SqliteStore(folder).close()


# --- all or nothing -----------------------------------------------------------------------------


def test_a_first_launch_that_fails_in_the_middle_leaves_nothing(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = connection._SCHEMA.read_text(encoding="utf-8")
    bad = tmp_path / "bad.sql"
    bad.write_text(good + "\nCREATE TABLE entries (again);", encoding="utf-8")
    monkeypatch.setattr(connection, "_SCHEMA", bad)
    with pytest.raises(MaestroError):
        SqliteStore(folder)
    db = connect(folder)
    assert db.pragma("user_version") == 0
    assert db.pragma("application_id") == 0
    assert db.execute("SELECT count(*) FROM sqlite_schema").get == 0
    db.close()
    monkeypatch.undo()
    store = SqliteStore(folder)
    store.acquire_run("run-1")
    store.close()
