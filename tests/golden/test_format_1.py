"""A folder of format 1 is read as it is, and is brought to the newest format when it is opened."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import pytest

from maestro_hive.maestro.state.projections import facts_of
from maestro_hive.maestro.state.records import EntryKind, NewDispatch
from maestro_hive.maestro.state.sqlite.connection import newest_format
from maestro_hive.maestro.state.sqlite.reader import SqliteReader
from maestro_hive.maestro.state.sqlite.store import SqliteStore
from maestro_hive.maestro.state.store import NewRun
from tests.golden import make

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from maestro_hive.maestro.state.store import Reader

ARCHIVE = make.ROOT / "tests" / "golden" / "folder-1.tar.xz"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make.unpack(ARCHIVE, tmp_path / "state")


@pytest.fixture
def reader(folder: Path) -> Iterator[SqliteReader]:
    reader = SqliteReader(folder)
    yield reader
    reader.close()


def parents(reader: Reader) -> dict[str, str | None]:
    return {run.name: run.parent for run in reader.runs()}


def recorded_parents(reader: Reader) -> dict[str, str | None]:
    """Return whose child each run is, by all of its entries."""
    found: dict[str, str | None] = {}
    for run in reader.runs():
        started = [e for e in reader.entries(run.id) if e.kind == EntryKind.RUN_STARTED]
        found[run.name] = facts_of(started[0]).get("parent") if started else None
    return found


def files_of(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.suffix != ".db-shm"
    }


def test_a_reader_finds_the_parents_and_no_run_of_a_worker(
    folder: Path, reader: SqliteReader
) -> None:
    before = files_of(folder)
    assert reader.format == 1
    assert parents(reader) == recorded_parents(reader)
    children = {name for name, parent in parents(reader).items() if parent}
    assert children
    assert {run.name for run in reader.runs(roots=True)} == parents(reader).keys() - children
    assert reader.count_runs(roots=True) == reader.count_runs() - len(children)
    assert reader.dispatch("work-pending") is None
    assert (reader.dispatches(), reader.dispatch_counts()) == ([], {})
    assert reader.seconds_to_next() is None
    assert files_of(folder) == before


def test_a_reader_works_where_nothing_can_be_written(folder: Path) -> None:
    folder.chmod(0o500)
    try:
        reader = SqliteReader(folder)
        assert (reader.format, len(reader.runs()) > 0, reader.dispatches()) == (1, True, [])
        reader.close()
    finally:
        folder.chmod(0o700)


def test_opening_it_brings_it_to_the_newest_format(folder: Path) -> None:
    store = SqliteStore(folder)
    assert parents(store) == recorded_parents(store)
    assert (store.format, store.dispatches(), store.check()) == (newest_format(), [], [])
    store.close()
    reader = SqliteReader(folder)
    assert reader.format == newest_format()
    reader.close()


def test_a_reader_that_was_open_meanwhile_goes_on(folder: Path, reader: SqliteReader) -> None:
    before = parents(reader)
    store = SqliteStore(folder)
    assert parents(reader) == before
    assert store.create_runs([NewRun("further", "mail", [], "pending", NewDispatch())]) == [True]
    assert [each.run_id for each in reader.dispatches()] == ["further"]
    assert reader.seconds_to_next() == 0.0
    assert parents(reader) == before | {"further": None}
    store.close()
