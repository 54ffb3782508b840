"""Shared records: one shared copy of each, of the right type."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import pytest

from maestro_hive.kernel.errors import DocumentCorruptError, MaestroError
from maestro_hive.maestro.state.codec import encode
from maestro_hive.maestro.state.records import Breaker
from maestro_hive.maestro.state.shared_records import BREAKERS, SharedRecords
from maestro_hive.maestro.state.sqlite.store import SqliteStore

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

NOW = datetime(2030, 1, 2, 3, 4, 5, 678901, tzinfo=UTC)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SqliteStore]:
    opened = SqliteStore(tmp_path / "state")
    yield opened
    opened.close()


@pytest.fixture
def other(tmp_path: Path, store: SqliteStore) -> Iterator[SqliteStore]:
    opened = SqliteStore(tmp_path / "state")
    yield opened
    opened.close()


def test_what_nobody_put_there_is_not_there(store: SqliteStore) -> None:
    assert BREAKERS.all(store) == {}


def test_a_breaker_comes_back_for_everybody(store: SqliteStore, other: SqliteStore) -> None:
    made = Breaker(
        name="anthropic",
        state="open",
        consecutive_failures=5,
        opened_at=NOW,
        last_failure_time=NOW,
        last_success_time=None,
    )
    assert BREAKERS.update(store, "anthropic", lambda _: made) == made
    assert BREAKERS.all(other) == {"anthropic": made}


def test_each_kind_has_a_namespace_of_its_own(store: SqliteStore) -> None:
    numbers = SharedRecords("numbers", str, int)
    BREAKERS.update(store, "same", lambda _: Breaker(name="same"))
    numbers.update(store, "same", lambda _: 5)
    assert BREAKERS.all(store) == {"same": Breaker(name="same")}
    assert numbers.all(store) == {"same": 5}
    assert [(found.namespace, found.key) for found in store.documents()] == [
        ("circuit_breakers", "same"),
        ("numbers", "same"),
    ]


def test_no_change_is_lost_between_threads_and_processes(
    store: SqliteStore, other: SqliteStore
) -> None:
    def fail(found: Breaker | None) -> Breaker:
        before = found or Breaker(name="a")
        return replace(before, consecutive_failures=before.consecutive_failures + 1)

    def fail_often(writer: SqliteStore) -> None:
        for _ in range(15):
            BREAKERS.update(writer, "a", fail)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(fail_often, [store, other] * 2))
    assert BREAKERS.all(store)["a"].consecutive_failures == 60


def test_a_change_that_raises_changes_nothing(store: SqliteStore) -> None:
    BREAKERS.update(store, "a", lambda _: Breaker(name="a"))

    def trouble(_old: Breaker | None) -> Breaker:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        BREAKERS.update(store, "a", trouble)
    assert BREAKERS.all(store) == {"a": Breaker(name="a")}


def test_the_same_record_is_not_written_again(store: SqliteStore) -> None:
    BREAKERS.update(store, "a", lambda _: Breaker(name="a"))
    same = BREAKERS.update(store, "a", lambda found: found or Breaker(name="b"))
    assert same == Breaker(name="a")
    assert [found.version for found in store.documents()] == [1]


@pytest.mark.parametrize(
    "value", [None, 1, [], {}, "text", {"name": "a", "no such field": 1}, {"name": "a", 1: 2}]
)
def test_what_is_no_record_of_that_kind_is_refused_by_name(
    store: SqliteStore, value: object
) -> None:
    store.update_document("circuit_breakers", "anthropic", lambda _: encode(value))
    with pytest.raises(DocumentCorruptError, match="circuit_breakers/anthropic"):
        BREAKERS.all(store)
    with pytest.raises(MaestroError):
        BREAKERS.update(store, "anthropic", lambda _: Breaker(name="anthropic"))
