"""The journals of these tests, and the folder of their copies."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import pytest

from maestro_hive.journal.copies import CopyFolder
from maestro_hive.journal.store import Store, open_store
from tests.stores import place

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "state"


@contextlib.contextmanager
def opened(kind: str, folder: Path) -> Iterator[Store]:
    """Open an empty journal of a kind."""
    with place(kind, folder) as where:
        store = open_store(where)
        yield store
        store.db.close()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with opened("file", tmp_path) as made:
        yield made


@pytest.fixture
def copy_folder(folder: Path) -> CopyFolder:
    return CopyFolder(folder)
