"""What an idle worker asks ten times a second is answered without a query, and never late."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

import pytest

from maestro_hive.maestro.state.records import NewDispatch
from maestro_hive.maestro.state.sqlite import dispatch
from maestro_hive.maestro.state.sqlite.store import SqliteStore
from maestro_hive.maestro.state.store import NewRun

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def stores(tmp_path: Path) -> Iterator[tuple[SqliteStore, SqliteStore]]:
    """Two stores on one folder, as two processes have them; one run is due in an hour."""
    mine, other = SqliteStore(tmp_path), SqliteStore(tmp_path)
    add(other, "later", 3600.0)
    yield mine, other
    other.close()
    mine.close()


def add(store: SqliteStore, name: str, due: float) -> None:
    assert store.create_runs([NewRun(name, "build", [], "pending", NewDispatch(due=due))]) == [True]


def settle(folder: Path) -> None:
    """Let the last change of the log be long ago."""
    log = folder / "journal.db-wal"
    os.utime(log, (time.time() - 60, time.time() - 60))


def test_nothing_is_queried_while_the_log_has_not_changed(
    stores: tuple[SqliteStore, SqliteStore], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, other = stores
    settle(tmp_path)
    monkeypatch.setattr(dispatch, "_KNOWN_SECONDS", 600.0)
    assert mine.seconds_to_next() == pytest.approx(3600, abs=60)
    queried: list[str] = []
    rows = mine._queries.rows

    def counted(sql: str, given: tuple[object, ...] = ()) -> object:
        queried.append(sql)
        return rows(sql, given)

    monkeypatch.setattr(mine._queries, "rows", counted)
    first = mine.seconds_to_next()
    assert first is not None
    time.sleep(0.01)
    again = mine.seconds_to_next()
    assert again is not None
    assert again < first, "time passes, also without a query"
    assert queried == []
    add(other, "now", 0.0)
    assert mine.seconds_to_next() == 0.0, "a change is seen at once"
    assert queried != []


def test_a_log_that_was_just_changed_is_looked_at_each_time(
    stores: tuple[SqliteStore, SqliteStore],
) -> None:
    """Two changes in one step of the file's clock look like one."""
    mine, other = stores
    for number in range(50):
        add(other, f"soon-{number}", 100.0 - number)
        seconds = mine.seconds_to_next()
        assert seconds is not None
        assert seconds <= 100 - number


def test_an_answer_is_not_used_for_ever(
    stores: tuple[SqliteStore, SqliteStore], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, other = stores
    settle(tmp_path)
    monkeypatch.setattr(dispatch, "_KNOWN_SECONDS", 600.0)
    mine.seconds_to_next()
    add(other, "now", 0.0)
    known = mine._next_known
    assert known is not None
    # As if the change could not be seen.
    monkeypatch.setattr(dispatch, "_log_of", lambda _: known.log)
    assert mine.seconds_to_next() != 0.0
    mine._next_known = known._replace(until=time.monotonic())
    assert mine.seconds_to_next() == 0.0
