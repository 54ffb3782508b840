"""What ``maestro doctor`` and ``maestro backup`` do."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import apsw

from maestro_hive.kernel import files
from maestro_hive.kernel.errors import (
    CodecError,
    CorruptionError,
    DocumentCorruptError,
    FolderError,
)
from maestro_hive.maestro.state import documents
from maestro_hive.maestro.state.damage import recorded_damage
from maestro_hive.maestro.state.migrate import newest_format
from maestro_hive.maestro.state.run_state import fold
from maestro_hive.maestro.state.sqlite_store import SqliteStore
from maestro_hive.unified_execution.config import DEFAULT_STATE_DIR, FALLBACK_STATE_DIR

if TYPE_CHECKING:
    from collections.abc import Iterator


#: The documents that lie beside a journal, and their kinds.
_COPIES = {
    "runs/*/execution_state.json": "execution_state",
    "checkpoints/*.json": "state_manager_checkpoint",
    "checkpoints/*/*.json": "checkpoint",
}


def default_folder() -> Path:
    """Return the folder that is used when none is chosen: the default, or its stand-in."""
    default, stand_in = Path(DEFAULT_STATE_DIR), Path(FALLBACK_STATE_DIR).expanduser()
    in_use = not (default / "journal.db").exists() and (stand_in / "journal.db").exists()
    return stand_in if in_use else default


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
        wrong = [*recorded_damage(folder), *store.check(), *_senseless_runs(store)]
        wrong += _damaged_copies(folder)
        runs = len(store.runs())
    return {
        "folder": str(folder),
        "format": newest_format(),
        "sqlite": apsw.sqlite_lib_version(),
        "runs": runs,
        "wrong": wrong,
    }


def _senseless_runs(store: SqliteStore) -> Iterator[str]:
    """Tell which runs could not be opened, though every byte of them is as it was written."""
    for record in store.runs():
        try:
            fold(store.entries(record.id), store.load)
        except (CorruptionError, CodecError) as error:
            yield f"run {record.name}: {error}"


def _damaged_copies(folder: Path) -> Iterator[str]:
    for path, kind in _copies(folder):
        try:
            documents.unseal(files.read_whole(path), kind, str(path))
        except FileNotFoundError:
            continue  # retention took it in this moment
        except DocumentCorruptError as error:
            yield str(error)
    for pattern in _COPIES:
        for path in sorted(folder.glob(f"{pattern}.damaged-*")):
            yield f"{path} was found damaged and set aside"


def _copies(folder: Path) -> Iterator[tuple[Path, str]]:
    for pattern, kind in _COPIES.items():
        for path in sorted(folder.glob(pattern)):
            yield path, kind


def copy_folder(folder: Path, target: Path) -> int:
    """Copy the journal and the documents beside it; return how many files."""
    with _opened(folder) as store:
        store.backup(target)
    copied = 1
    for path, _ in _copies(folder):
        try:
            text = files.read_whole(path)
        except FileNotFoundError:
            continue  # retention took it in this moment
        inside = files.make_folder_inside(target, *path.relative_to(folder).parent.parts)
        files.write_atomically(inside / path.name, text)
        copied += 1
    return copied
