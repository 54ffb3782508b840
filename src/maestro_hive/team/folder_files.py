"""The files of a folder as they are now: what has changed is seen by comparing two snapshots of it."""

from __future__ import annotations

import hashlib
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection
    from pathlib import Path

    #: When a file was changed last, its size and its number.
    Stamp = tuple[int, int, int]
    Snapshot = dict[str, Stamp]

#: There is no snapshot of a folder with more files.
MAX_FILES = 50_000
#: Folders and files that belong to programs, and to nobody's task.
_LEFT_OUT = frozenset(
    {
        *(".git", ".hg", ".svn", ".jj", ".mahabharatha", ".DS_Store", ".coverage"),
        *("__pycache__", ".pytest_cache", ".mypy_cache", ".ruff_cache", ".hypothesis", ".cache"),
        *("node_modules", ".venv", ".tox", ".nox"),
    }
)
_STARTS_LEFT_OUT = (".aider", ".nfs", ".fuse_hidden")


def snapshot(folder: Path, apart: Collection[str] = ()) -> Snapshot | None:
    """Return the files of a folder, by their relative path; None if there are too many.

    ``apart`` are folders that are left out, by their real paths.
    """
    found: Snapshot = {}
    left = [("", os.path.realpath(folder))]
    while left:
        inside, path = left.pop()
        try:
            entries = os.scandir(path)
        except OSError:  # it was deleted just now, or nobody may read it
            continue
        with entries:
            for entry in entries:
                name = entry.name
                if name in _LEFT_OUT or name.startswith(_STARTS_LEFT_OUT):
                    continue
                try:
                    if entry.is_dir(follow_symlinks=False):
                        if entry.path not in apart:
                            left.append((f"{inside}{name}/", entry.path))
                        continue
                    stat = entry.stat(follow_symlinks=False)
                except OSError:
                    continue
                found[inside + name] = (stat.st_mtime_ns, stat.st_size, stat.st_ino)
        if len(found) > MAX_FILES:
            return None
    return found


def digest_of_file(path: Path) -> bytes | None:
    """Return the SHA-256 of a file; None if it is none, or is gone. A link is what it refers to."""
    try:
        if path.is_symlink() or not path.is_file():
            return hashlib.sha256(os.fsencode(path.readlink())).digest()
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").digest()
    except OSError:
        return None


def digest_of_folder(folder: Path, apart: Collection[str] = ()) -> bytes | None:
    """Return the SHA-256 of all files of a folder, with their names; None if there are none, or too many."""
    whole = hashlib.sha256()
    names = snapshot(folder, apart)
    for name in sorted(names or ()):
        digest = digest_of_file(folder / name)
        if digest is not None:
            whole.update(os.fsencode(name) + b"\0" + digest)
    return whole.digest() if names else None
