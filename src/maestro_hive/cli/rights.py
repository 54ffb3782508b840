"""Who may read and write a state folder: everything in it is its owner's, and nobody else's."""

from __future__ import annotations

import contextlib
import os
import stat
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path


class Exposed(NamedTuple):
    """A file or folder that others may use, or that its folder's owner cannot.

    One with neither a mode nor an owner that it should have is for a person to look at.
    """

    path: Path
    trouble: str
    mode: int | None = None
    owner: int | None = None

    @property
    def can_be_mended(self) -> bool:
        """Tell whether it is known how."""
        return self.mode is not None or self.owner is not None

    def mend(self) -> None:
        """Give it the rights that it should have."""
        if self.owner is not None:
            os.chown(self.path, self.owner, -1, follow_symlinks=False)
        if self.mode is not None:
            self.path.chmod(self.mode)


def exposed(folders: Iterable[Path]) -> list[Exposed]:
    """Return all that is not private in these folders, the folders themselves first."""
    return [found for folder in folders for found in _exposed_in(folder.resolve())]


def _exposed_in(root: Path) -> Iterator[Exposed]:
    owner = root.stat().st_uid
    for path in _walk(root):
        with contextlib.suppress(FileNotFoundError):  # gone in this moment
            facts = path.lstat()
            if stat.S_ISLNK(facts.st_mode):
                yield Exposed(path, "is a symbolic link, and nothing is read through one")
                continue
            if facts.st_uid != owner:
                trouble = f"belongs to user {facts.st_uid}, and its folder to user {owner}"
                yield Exposed(path, trouble, owner=owner)
            if facts.st_mode & 0o077:
                trouble = f"is open to other users (mode {stat.S_IMODE(facts.st_mode):04o})"
                mode = 0o700 if stat.S_ISDIR(facts.st_mode) else 0o600
                yield Exposed(path, trouble, mode=mode)


def _walk(root: Path) -> Iterator[Path]:
    yield root
    for folder, names, files in os.walk(root, followlinks=False):
        for name in sorted([*names, *files]):
            yield root.joinpath(folder, name)
