"""Every test of a contract runs over each place for journals."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from maestro_hive.journal.store import Store, open_store
from tests import stores

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from maestro_hive.journal.database import Database


@pytest.fixture(params=stores.KINDS)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """An empty place for a journal: in memory, a folder, or the URL of a database."""
    with stores.place(request.param, tmp_path) as found:
        yield found


@pytest.fixture(params=stores.SHARED_KINDS)
def shared_place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """An empty place that several processes share."""
    with stores.place(request.param, tmp_path) as found:
        yield found


@pytest.fixture
def store(place: str) -> Iterator[Store]:
    """An open journal."""
    found = open_store(place)
    yield found
    found.db.close()


@pytest.fixture
def database(store: Store) -> Database:
    """The database of an open journal."""
    return store.db
