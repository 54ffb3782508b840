"""Who may read and write a state folder: what is ours in it is its owner's, and nobody else's."""

from __future__ import annotations

import contextlib
import os
import stat
from typing import TYPE_CHECKING, NamedTuple

from maestro_hive.cli import beside

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
        """Return whether it is known how."""
        return self.mode is not None or self.owner is not None

    def mend(self) -> None:
        """Give it the rights that it should have."""
        if self.owner is not None:
            os.chown(self.path, self.owner, -1, follow_symlinks=False)
        if self.mode is not None:
            self.path.chmod(self.mode)


def exposed(state_folder: Path, checkpoint_folders: Iterable[Path]) -> list[Exposed]:
    """Return all of ours that is not private, each folder before what lies in it.

    A state folder may be a project's own folder, with files in it that others shall read and
    execute: those are nobody's business here.
    """
    root = state_folder.resolve()
    found = list(_exposed_of(root, beside.ours(root)))
    for each in checkpoint_folders:
        root = each.resolve()
        found += _exposed_of(root, beside.ours_in_checkpoints(root))
    return found


def _exposed_of(root: Path, ours: Iterable[Path]) -> Iterator[Exposed]:
    owner = root.stat().st_uid
    for path in (root, *ours):
        with contextlib.suppress(FileNotFoundError):  # gone in this moment
            facts = path.lstat()
            if stat.S_ISLNK(facts.st_mode):
                yield Exposed(path, "is a symbolic link, and nothing is read through one")
                continue
            if facts.st_uid != owner:
                trouble = f"belongs to user {facts.st_uid}, and its folder to user {owner}"
                yield Exposed(path, trouble, owner=owner)
            if facts.st_mode & 0o077:
                yield _open_to_others(path, stat.S_IMODE(facts.st_mode))


def _open_to_others(path: Path, mode: int) -> Exposed:
    if mode & stat.S_ISVTX:  # as /tmp: taken from the others, it would be of no use to anybody
        return Exposed(path, f"is shared with other users (mode {mode:04o}); choose another folder")
    return Exposed(path, f"is open to other users (mode {mode:04o})", mode=mode & ~0o077)
