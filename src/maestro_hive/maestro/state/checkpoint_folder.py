"""Checkpoint files: names that sort, retention without reading, damaged ones set aside.

A file's name says all that retention needs: ``000003.00000012~never~before-deploy.json`` is the
twelfth checkpoint of its run, made under fencing number 3, kept until it is pushed out, called
``before-deploy``. The newest is the one whose name sorts last; a process that was taken over and
wakes up late writes a lower fencing number, so its file does not pass for the newest.
"""

from __future__ import annotations

import logging
import os
import re
import threading
from pathlib import Path
from typing import NamedTuple

from maestro_hive.kernel import files
from maestro_hive.kernel.errors import DocumentCorruptError, FolderError, InvalidIdentifierError

logger = logging.getLogger(__name__)

_NAME = re.compile(
    r"(\d{6,})\.(\d{8,})~(never|\d{1,12})~([A-Za-z0-9][A-Za-z0-9._:\-]{0,127})\.json"
)


class CheckpointName(NamedTuple):
    """What a checkpoint file's name says; it sorts like the checkpoints themselves."""

    fence: int
    version: int
    expires: int | None
    checkpoint_id: str

    @property
    def file(self) -> str:
        """The name as a file name."""
        expires = "never" if self.expires is None else self.expires
        return f"{self.fence:06d}.{self.version:08d}~{expires}~{self.checkpoint_id}.json"

    def expired(self, now: float) -> bool:
        """Tell whether its time is over."""
        return self.expires is not None and self.expires <= now


class CheckpointFolder:
    """The checkpoints of every run below one folder, or in memory where there is no folder."""

    def __init__(self, root: Path | None) -> None:
        self.root = root
        self._memory: dict[str, dict[CheckpointName, bytes]] = {}
        self._mutex = threading.RLock()

    def names(self, workflow_id: str) -> list[CheckpointName]:
        """Return the names of a run's checkpoints, oldest first."""
        files.check_identifier(workflow_id, "workflow id")
        if self.root is None:
            return sorted(self._memory.get(workflow_id, ()), key=_age)
        folder = self.root / workflow_id
        if files.is_link(folder):
            raise FolderError(folder, "is a symbolic link; checkpoints are not read through it")
        try:
            found = [_NAME.fullmatch(entry.name) for entry in folder.iterdir()]
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise FolderError(folder, f"cannot be read: {error.strerror}") from error
        return sorted((_parse(match) for match in found if match), key=_age)

    def workflows(self) -> list[str]:
        """Return the runs that have a folder here."""
        if self.root is None:
            return sorted(self._memory)
        try:
            entries = sorted(self.root.iterdir())
        except FileNotFoundError:
            return []
        except OSError as error:
            raise FolderError(self.root, f"cannot be read: {error.strerror}") from error
        return [entry.name for entry in entries if _is_workflow(entry)]

    def write(
        self,
        workflow_id: str,
        checkpoint_id: str,
        text: bytes,
        *,
        fence: int | None,
        expires: int | None,
    ) -> CheckpointName:
        """Add a checkpoint; one of the same id is replaced. Without a fence it is the newest."""
        files.check_identifier(workflow_id, "workflow id")
        files.check_identifier(checkpoint_id, "checkpoint id")
        with self._mutex:
            names = self.names(workflow_id)
            version = max((name.version for name in names), default=0) + 1
            if fence is None:
                fence = max((name.fence for name in names), default=0)
            name = CheckpointName(fence, version, expires, checkpoint_id)
            if self.root is None:
                self._memory.setdefault(workflow_id, {})[name] = text
            else:
                folder = files.make_folder_inside(self.root, workflow_id)
                files.write_atomically(folder / name.file, text)
            for old in names:
                if old.checkpoint_id == checkpoint_id:
                    self.delete(workflow_id, old)
        return name

    def read(self, workflow_id: str, name: CheckpointName) -> bytes:
        """Return a checkpoint's text."""
        if self.root is None:
            return self._memory[workflow_id][name]
        return files.read_whole(self.path(workflow_id, name))

    def delete(self, workflow_id: str, name: CheckpointName) -> None:
        """Remove a checkpoint."""
        if self.root is None:
            self._memory[workflow_id].pop(name, None)
        else:
            files.remove(self.path(workflow_id, name))

    def keep_newest(self, workflow_id: str, count: int, now: float) -> int:
        """Delete expired checkpoints and all but the newest ``count``; return how many."""
        names = self.names(workflow_id)
        living = [name for name in names if not name.expired(now)]
        doomed = [name for name in names if name.expired(now)] + living[
            : max(0, len(living) - count)
        ]
        for name in doomed:
            self.delete(workflow_id, name)
        return len(doomed)

    def set_aside(
        self, workflow_id: str, name: CheckpointName, error: DocumentCorruptError
    ) -> None:
        """Keep a damaged checkpoint out of the way, and say so."""
        if self.root is None:
            return
        kept_as = files.set_aside(self.path(workflow_id, name))
        logger.warning("%s; kept aside as %s, an older one is used", error, kept_as)

    def path(self, workflow_id: str, name: CheckpointName) -> Path:
        """Return where a checkpoint is."""
        if self.root is None:
            raise FolderError(Path("memory"), "checkpoints in memory have no path")
        return self.root / workflow_id / name.file


def _age(name: CheckpointName) -> tuple[int, int, str]:
    # Two processes may have chosen the same version; the ids that we make sort by time.
    return name.fence, name.version, name.checkpoint_id


def _is_workflow(entry: Path) -> bool:
    """Tell whether a folder can be ours; ``lost+found`` is not."""
    try:
        files.check_identifier(entry.name, "workflow id")
    except InvalidIdentifierError:
        return False
    return os.path.isdir(entry) and not files.is_link(entry)  # noqa: PTH112 - Path's raises


def _parse(match: re.Match[str]) -> CheckpointName:
    fence, version, expires, checkpoint_id = match.groups()
    until = None if expires == "never" else int(expires)
    return CheckpointName(int(fence), int(version), until, checkpoint_id)
