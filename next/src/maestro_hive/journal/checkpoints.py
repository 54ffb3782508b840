"""Checkpoints: files whose names have all that retention needs, so that it opens none of them.

``0000000000000003.00000012~never~before-deploy.json`` is of entry 12 of its run, was written under
fencing number 3, does not expire, and has the id ``before-deploy``. The newest is the one whose
name sorts last: a process that was taken over and writes late has a lower fencing number.
"""

from __future__ import annotations

import re
import secrets
from datetime import UTC, datetime
from typing import TYPE_CHECKING, NamedTuple

from maestro_hive.kernel import files
from maestro_hive.kernel.errors import FolderError

if TYPE_CHECKING:
    from pathlib import Path

_NAME = re.compile(
    r"(\d{16})\.(\d{8,})~(never|\d{1,12})~([A-Za-z0-9][A-Za-z0-9._:\-]{0,127})\.json", re.ASCII
)
#: How the ids of checkpoints start that were written at an interval.
AUTOMATIC = "auto_"


class CheckpointName(NamedTuple):
    """The parts of a file's name; they sort as the checkpoints do."""

    fence: int
    seq: int
    checkpoint_id: str
    expires: int | None = None

    @property
    def file(self) -> str:
        """Return it as a file name."""
        expires = "never" if self.expires is None else self.expires
        return f"{self.fence:016d}.{self.seq:08d}~{expires}~{self.checkpoint_id}.json"

    @classmethod
    def of(cls, file: str) -> CheckpointName | None:
        """Return the parts of a file name; None if it is not one of a checkpoint."""
        if (match := _NAME.fullmatch(file)) is None:
            return None
        fence, seq, expires, checkpoint_id = match.groups()
        until = None if expires == "never" else int(expires)
        return cls(int(fence), int(seq), checkpoint_id, until)


def new_checkpoint_id(now: float, prefix: str = "cp_") -> str:
    """Return an id that sorts by time; two of one moment differ."""
    moment = datetime.fromtimestamp(now, UTC)
    return f"{prefix}{moment:%Y%m%dT%H%M%S.%f}_{secrets.token_hex(3)}"


def inside(root: Path, run_id: str, *, make: bool = False) -> Path:
    """Return a run's own folder; of a child it is below that of its parent."""
    names = run_id.split("/")
    for name in names:
        files.check_identifier(name, "run id")
    if make:
        return files.make_folder_inside(root, *names)
    at = root
    for name in names:
        at /= name
        if at.is_symlink():
            raise FolderError(at, "is a symbolic link; nothing is read through it")
    return at


class CheckpointFolder:
    """The checkpoints of all runs below one folder; of each run, ``most`` are stored."""

    def __init__(self, root: Path, most: int = 10) -> None:
        self.root, self.most = root, most

    def names(self, run_id: str) -> list[CheckpointName]:
        """Return the names of a run's checkpoints, oldest first."""
        folder = inside(self.root, run_id)
        try:
            found = [CheckpointName.of(each.name) for each in folder.iterdir()]
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise FolderError(folder, f"cannot be read: {files.reason_of(error)}") from error
        return sorted(filter(None, found))

    def path(self, run_id: str, name: CheckpointName) -> Path:
        """Return where a checkpoint is."""
        return inside(self.root, run_id) / name.file

    def write(self, run_id: str, name: CheckpointName, text: bytes, now: float) -> Path:
        """Add a checkpoint, and delete one of the same id and those that are too old."""
        files.check_identifier(name.checkpoint_id, "checkpoint id")
        path = inside(self.root, run_id, make=True) / name.file
        files.write_atomically(path, text)
        for old in self._too_old(self.names(run_id), name, now):
            files.remove(self.path(run_id, old))
        return path

    def _too_old(
        self, names: list[CheckpointName], new: CheckpointName, now: float
    ) -> list[CheckpointName]:
        """Return what retention deletes: automatic ones, then the oldest; never the newest."""
        valid: list[CheckpointName] = []
        dropped: list[CheckpointName] = []
        for each in names:
            is_replaced = each.checkpoint_id == new.checkpoint_id and each != new
            is_over = each.expires is not None and each.expires <= now
            (dropped if is_replaced or is_over else valid).append(each)
        rest = sorted(
            valid[:-1], key=lambda each: not each.checkpoint_id.startswith(AUTOMATIC)
        )  # stable: the oldest first
        return dropped + rest[: max(0, len(valid) - self.most)]
