"""What lies beside a journal: the JSON copies of runs, checkpoints, and what dead processes left."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import time
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from maestro_hive.kernel import files
from maestro_hive.kernel.errors import FolderError, StorageError
from maestro_hive.kernel.locks import is_locked

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

#: The documents that lie in a state folder, and their kinds.
DOCUMENTS = {
    "runs/*/execution_state.json": "execution_state",
    "checkpoints/*.json": "state_manager_checkpoint",
    "checkpoints/*/*.json": "checkpoint",
}

#: What a checkpoint folder that lies by itself has in it.
_CHECKPOINTS = ("*/*~*.json", "*/*~*.json.damaged-*", "*/.*.tmp")
#: What a state folder has in it, and nobody else would call so.
_OURS = (
    *("journal.db", "journal.db-*", "journal.lock", "journal.users", ".*.tmp"),
    *("holders", "holders/*.json", "damaged", "damaged/journal.db-wal.*", "damaged/.*.tmp"),
    *("runs/*/execution_state.json", "runs/*/execution_state.json.damaged-*", "runs/*/.*.tmp"),
    *("checkpoints/*.json", "checkpoints/*.json.damaged-*", "checkpoints/.*.tmp"),
    *(f"checkpoints/{pattern}" for pattern in _CHECKPOINTS),
)

#: As ``files.write_atomically`` names what it has not finished yet.
_TEMPORARY = re.compile(r"\..+\.[0-9a-f]{16}\.tmp")
#: Nobody takes as long to write one file; younger ones may still be under way.
_UNDER_WAY_SECONDS = 600.0


def copies(folder: Path) -> Iterator[tuple[Path, str]]:
    """Yield the documents of a state folder, with their kinds."""
    for pattern, kind in DOCUMENTS.items():
        for path in sorted(folder.glob(pattern)):
            yield path, kind


def ours(state_folder: Path) -> list[Path]:
    """Return what was made by us in a state folder, each folder before what lies in it.

    So are links where folders of ours would be; whatever else somebody put there is not.
    """
    return _matching(state_folder, _OURS)


def ours_in_checkpoints(folder: Path) -> list[Path]:
    """Return what was made by us in a checkpoint folder that lies by itself."""
    return _matching(folder, _CHECKPOINTS)


def _matching(folder: Path, patterns: Iterable[str]) -> list[Path]:
    found = {path for pattern in patterns for path in _matching_one(folder, pattern)}
    return sorted(
        path
        for path in found
        if path.suffix != ".tmp" or _TEMPORARY.fullmatch(path.name)  # or it is somebody else's
    )


def _matching_one(folder: Path, pattern: str) -> Iterator[Path]:
    """Yield what is there by such a name, and the folders on the way; no link is followed."""
    name, _, rest = pattern.partition("/")
    inside: list[Path] = []
    with contextlib.suppress(OSError):  # gone in this moment, or not to be read
        inside = list(folder.iterdir())
    for path in inside:
        if not fnmatchcase(path.name, name):
            continue
        if not rest or path.is_symlink():
            yield path
        elif path.is_dir():
            found = list(_matching_one(path, rest))
            if found or not os.access(path, os.R_OK | os.X_OK):
                yield path
            yield from found


def set_aside(folder: Path) -> Iterator[Path]:
    """Yield the documents that were found damaged and are kept out of the way."""
    for pattern in DOCUMENTS:
        yield from sorted(folder.glob(f"{pattern}.damaged-*"))


def leftovers(folders: Iterable[Path]) -> list[Path]:
    """Return what processes that were killed left behind: half-written files, and their names."""
    found = []
    for folder in dict.fromkeys(folders):
        for pattern in (".*.tmp", "*/.*.tmp", "*/*/.*.tmp"):
            found += [path for path in folder.glob(pattern) if _TEMPORARY.fullmatch(path.name)]
        found += [path for path in folder.glob("holders/*.json") if not is_locked(path)]
    return sorted({path for path in found if _is_old(path)})


def _is_old(path: Path) -> bool:
    with contextlib.suppress(OSError):
        return time.time() - path.lstat().st_mtime > _UNDER_WAY_SECONDS
    return False


def remove_copies(run: str, state_folder: Path, checkpoint_folders: Iterable[Path]) -> int:
    """Delete every JSON copy of a run, whole or damaged; return how many files."""
    files.check_identifier(run, "run id")
    places = [state_folder / "runs" / run, *(each / run for each in checkpoint_folders)]
    return sum(_remove_folder(place) for place in places)


def _remove_folder(folder: Path) -> int:
    if files.is_link(folder):
        raise FolderError(folder, "is a symbolic link; what it leads to is not deleted")
    if not folder.is_dir():
        return 0
    try:
        count = sum(1 for path in folder.rglob("*") if not path.is_dir())
        shutil.rmtree(folder)
        files.sync_folder(folder.parent)
    except OSError as error:
        raise StorageError(f"{folder} could not be removed: {files.reason_of(error)}") from error
    return count
