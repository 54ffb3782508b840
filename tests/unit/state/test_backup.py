"""Copying a journal that is in use."""

from __future__ import annotations

import os
import subprocess
import threading
from typing import TYPE_CHECKING

import pytest

from maestro_hive.kernel.errors import StorageError
from maestro_hive.maestro.state.codec import encode
from maestro_hive.maestro.state.sqlite.store import SqliteStore

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SqliteStore]:
    opened = SqliteStore(tmp_path / "state")
    for number in range(40):
        text = os.urandom(50_000).hex()
        opened.set_documents({("space", str(number)): encode(text)})
    yield opened
    opened.close()


def test_a_copy_is_finished_while_others_write_without_pause(
    store: SqliteStore, tmp_path: Path
) -> None:
    other = SqliteStore(store.folder)
    done = threading.Event()

    def write() -> None:
        while not done.is_set():
            other.update_document("space", "busy", lambda _: encode("x" * 2000))

    writer = threading.Thread(target=write)
    writer.start()
    try:
        store.backup(tmp_path / "copy")
    finally:
        done.set()
        writer.join()
        other.close()
    copy = SqliteStore(tmp_path / "copy")
    assert copy.check() == []
    assert len(copy.documents("space")) >= 40
    copy.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only the superuser may mount")
def test_a_copy_that_does_not_fit_leaves_nothing_and_harms_nothing(
    store: SqliteStore, tmp_path: Path
) -> None:
    small = tmp_path / "small"
    small.mkdir()
    mounted = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(small)]
    subprocess.run(mounted, check=True)
    try:
        with pytest.raises(StorageError, match="copied to"):
            store.backup(small / "copy")
        assert list((small / "copy").iterdir()) == []
    finally:
        subprocess.run(["umount", str(small)], check=True)
    assert store.update_document("space", "key", lambda _: encode(1)) is not None
