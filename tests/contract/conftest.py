from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from maestro_hive.engine import copies, open_run
from tests.contract.stores import EVERY_STORE

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from maestro_hive.maestro.state.store import Store
    from maestro_hive.testing import ManualClock
    from tests.contract.stores import Stores


@pytest.fixture(params=EVERY_STORE, ids=lambda kind: kind.__name__.removesuffix("Stores").lower())
def stores(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Stores]:
    made: Stores = request.param(tmp_path)
    yield made
    made.close()


@pytest.fixture
def store(stores: Stores) -> Store:
    return stores.open()


@pytest.fixture
def other(stores: Stores, store: Store) -> Store:
    """The store of another process, on the same data."""
    return stores.open()


@pytest.fixture
def clock(stores: Stores) -> ManualClock:
    return stores.clock


@pytest.fixture
def prompt_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have copies written as soon as they are due, by a thread that no other test uses.

    Otherwise it rests for half a minute after a second that one took, also in an earlier test.
    """
    monkeypatch.setattr(copies, "_REST_FACTOR", 0)
    monkeypatch.setattr(open_run, "_COPY_COST_FACTOR", 0)
    monkeypatch.setattr(copies.copier, "_value", copies.Copier())
