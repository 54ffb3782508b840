"""What ``maestro doctor`` and ``maestro backup`` do."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import apsw

from maestro_hive.kernel import files
from maestro_hive.kernel.errors import DocumentCorruptError, FolderError
from maestro_hive.maestro.state import documents
from maestro_hive.maestro.state.damage import recorded_damage
from maestro_hive.maestro.state.migrate import newest_format
from maestro_hive.maestro.state.sqlite_store import SqliteStore

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@contextlib.contextmanager
def _opened(folder: Path) -> Iterator[SqliteStore]:
    """Open a folder that must be a state folder already: looking must not create one."""
    if not (folder / "journal.db").exists():
        raise FolderError(folder, "is not a state folder: it has no journal.db; see --store")
    store = SqliteStore(folder)
    try:
        yield store
    finally:
        store.close()


def examine(folder: Path) -> dict[str, Any]:
    """Read all of a state folder; ``wrong`` lists what cannot be trusted."""
    with _opened(folder) as store:
        wrong = [*recorded_damage(folder), *store.check(), *_damaged_copies(folder)]
        runs = len(store.runs())
    return {
        "folder": str(folder),
        "format": newest_format(),
        "sqlite": apsw.sqlite_lib_version(),
        "runs": runs,
        "wrong": wrong,
    }


def _damaged_copies(folder: Path) -> Iterator[str]:
    for path in sorted((folder / "runs").glob("*/execution_state.json")):
        try:
            documents.unseal(files.read_whole(path), "execution_state", str(path))
        except DocumentCorruptError as error:
            yield str(error)


def copy_folder(folder: Path, target: Path) -> int:
    """Copy the journal and the JSON copies of the runs; return how many files."""
    with _opened(folder) as store:
        store.backup(target)
    copied = 1
    for path in sorted((folder / "runs").glob("*/execution_state.json")):
        inside = files.make_folder_inside(target, "runs", path.parent.name)
        files.write_atomically(inside / path.name, files.read_whole(path))
        copied += 1
    return copied
