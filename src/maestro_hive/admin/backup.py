"""A copy of a state folder, made while it is in use."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from maestro_hive.admin.folder import checkpoint_folders, documents, writing
from maestro_hive.kernel import files
from maestro_hive.kernel.errors import FolderError, StorageError

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass(frozen=True, slots=True, kw_only=True)
class Backup:
    """A finished backup, and how many files it has."""

    source: Path
    target: Path
    files: int


def back_up(folder: Path, target: Path) -> Backup:
    """Copy a state folder to a new folder: the journal as of one moment, and all documents.

    Until the copy is complete it is in a folder ".NAME.half" next to the target, or ".half" in a
    target that exists and is empty. What a killed backup left there is deleted by the next one.
    """
    with writing(folder) as store, _unfinished(target) as half:
        store.backup(half)
        copied = 1 + sum(_copy(source, half, place) for source, place in _documents(folder))
        _put_in_place(half, target)
    return Backup(source=folder, target=target, files=copied)


@contextlib.contextmanager
def _unfinished(target: Path) -> Iterator[Path]:
    """Make the folder of an unfinished copy, on the target's disk; an error deletes it.

    It is locked meanwhile, so the content of one that is not locked was left by a killed process.
    """
    target = target.resolve()
    half = target / ".half" if target.is_dir() else target.with_name(f".{target.name}.half")
    if os.path.lexists(target) and not target.is_dir():
        raise FolderError(target, "is not a folder")
    if target.is_dir() and any(path != half for path in target.iterdir()):
        raise StorageError(f"{target} exists and is not empty; choose a new folder")
    files.make_folder_inside(half.parent, half.name)
    lock = os.open(half, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if not _is_locked_by(lock, half):
            raise StorageError(f"another process is making the backup {target} now")
        try:
            _empty(half)
            yield half
        except BaseException:  # Ctrl+C too must not leave an unfinished copy
            shutil.rmtree(half, ignore_errors=True)
            raise
    finally:
        os.close(lock)


def _is_locked_by(lock: int, half: Path) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.path.samestat(half.stat(), os.fstat(lock))  # or it was renamed already
    except (BlockingIOError, FileNotFoundError):
        return False


def _empty(half: Path) -> None:
    try:
        for path in half.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
    except OSError as error:
        raise StorageError(f"{half} could not be emptied: {error.strerror}") from error


def _put_in_place(half: Path, target: Path) -> None:
    """Rename a complete copy, durably; the journal last, which makes it a state folder."""
    target = target.resolve()
    try:
        if half.parent == target:
            for path in sorted(half.iterdir(), key=lambda path: path.name == "journal.db"):
                files.sync_folder(target)
                path.rename(target / path.name)
            half.rmdir()
        else:
            half.rename(target)
        files.sync_folder(half.parent)
    except OSError as error:
        raise StorageError(f"{target} could not be put in place: {error.strerror}") from error


def _documents(folder: Path) -> Iterator[tuple[Path, Path]]:
    """Yield the documents next to the journal, and their places in a copy."""
    for path, _ in documents(folder):
        yield path, path.relative_to(folder)
    for separate in checkpoint_folders(folder):
        if separate != folder / "checkpoints":  # the copy has them inside
            for path in sorted(separate.glob("*/*.json")):
                yield path, Path("checkpoints") / path.relative_to(separate)


def _copy(source: Path, target: Path, place: Path) -> int:
    try:
        text = files.read_whole(source)
    except FileNotFoundError:
        return 0  # retention deleted it just now
    inside = files.make_folder_inside(target, *place.parent.parts)
    files.write_atomically(inside / place.name, text)
    return 1
