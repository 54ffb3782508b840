"""Breakers and budgets: one shared copy of each, of the right type."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import pytest

from maestro_hive.kernel.errors import DocumentCorruptError, MaestroError
from maestro_hive.maestro.state import shared_records
from maestro_hive.maestro.state.codec import encode
from maestro_hive.maestro.state.records import Breaker, Budget
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


def test_what_nobody_put_there_is_none(store: SqliteStore) -> None:
    assert shared_records.breakers(store).get("anthropic") is None
    assert shared_records.breakers(store).all() == {}


def test_a_breaker_comes_back_for_everybody(store: SqliteStore, other: SqliteStore) -> None:
    made = Breaker(
        name="anthropic",
        state="open",
        consecutive_failures=5,
        opened_at=NOW,
        last_failure_time=NOW,
        last_success_time=None,
    )
    assert shared_records.breakers(store).update("anthropic", lambda _: made) == made
    assert shared_records.breakers(other).get("anthropic") == made
    assert shared_records.breakers(other).all() == {"anthropic": made}


def test_a_budget_comes_back(store: SqliteStore, other: SqliteStore) -> None:
    budget = Budget(name="run-1", max_tokens=10, max_usd=0.5, tokens=3, usd=0.25)
    shared_records.budgets(store).update("run-1", lambda _: budget)
    assert shared_records.budgets(other).get("run-1") == budget


def test_each_kind_has_a_namespace_of_its_own(store: SqliteStore) -> None:
    shared_records.breakers(store).update("same", lambda _: Breaker(name="same"))
    shared_records.budgets(store).update("same", lambda _: Budget(name="same"))
    assert shared_records.breakers(store).get("same") == Breaker(name="same")
    assert shared_records.budgets(store).get("same") == Budget(name="same")
    assert [(found.namespace, found.key) for found in store.documents()] == [
        ("budgets", "same"),
        ("circuit_breakers", "same"),
    ]


def test_no_spending_is_lost_between_threads_and_processes(
    store: SqliteStore, other: SqliteStore
) -> None:
    def spend(writer: SqliteStore) -> None:
        for _ in range(15):
            shared_records.budgets(writer).update(
                "run-1",
                lambda old: replace(
                    old or Budget(name="run-1"), tokens=(old.tokens if old else 0) + 1
                ),
            )

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(spend, [store, other] * 2))
    assert shared_records.budgets(store).get("run-1") == Budget(name="run-1", tokens=60)


def test_a_change_that_raises_changes_nothing(store: SqliteStore) -> None:
    records = shared_records.breakers(store)
    records.update("a", lambda _: Breaker(name="a"))

    def trouble(_old: Breaker | None) -> Breaker:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        records.update("a", trouble)
    assert records.get("a") == Breaker(name="a")


@pytest.mark.parametrize(
    "value", [None, 1, [], {}, "text", {"name": "a", "no such field": 1}, {"name": "a", 1: 2}]
)
def test_what_is_no_record_of_that_kind_is_refused_by_name(
    store: SqliteStore, value: object
) -> None:
    store.update_document("circuit_breakers", "anthropic", lambda _: encode(value))
    records = shared_records.breakers(store)
    with pytest.raises(DocumentCorruptError, match="circuit_breakers/anthropic"):
        records.get("anthropic")
    with pytest.raises(MaestroError):
        records.all()
    with pytest.raises(MaestroError):
        records.update("anthropic", lambda _: Breaker(name="anthropic"))
