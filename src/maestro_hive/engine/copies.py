"""The JSON copies of a run: its checkpoints, and ``execution_state.json`` as of the last of them.

They are what a folder resumes from when its journal is gone. The newest good one counts: by
fencing number first, so that a process which was taken over cannot pass off its late file as new.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from maestro_hive.kernel import files
from maestro_hive.kernel.errors import DocumentCorruptError, FolderError
from maestro_hive.maestro.state import run_document as documents
from maestro_hive.maestro.state.run_document import RunCopy, read_run

if TYPE_CHECKING:
    from pathlib import Path

    from maestro_hive.maestro.state.checkpoint import CheckpointManager

logger = logging.getLogger(__name__)

KIND = "execution_state"
FILE = "execution_state.json"


class RunCopies:
    """The copies of one run; without a state folder there is no ``execution_state.json``."""

    def __init__(
        self, workflow_id: str, state_dir: Path | None, checkpoints: CheckpointManager
    ) -> None:
        self._workflow_id = files.check_identifier(workflow_id, "workflow id")
        self._state_dir = state_dir
        self._checkpoints = checkpoints

    @property
    def path(self) -> Path | None:
        """Where ``execution_state.json`` is, or will be."""
        if self._state_dir is None:
            return None
        return self._state_dir / "runs" / self._workflow_id / FILE

    def write_state(self, run: bytes) -> None:
        """Write ``execution_state.json``: the run as of now."""
        if self._state_dir is None:
            return
        folder = files.make_folder_inside(self._state_dir, "runs", self._workflow_id)
        files.write_atomically(folder / FILE, documents.seal(KIND, {}, raw={"run": run}))

    def write_checkpoint(self, checkpoint_id: str, run: bytes, fence: int) -> None:
        """Write the run as a checkpoint of this id."""
        self._checkpoints.write(self._workflow_id, checkpoint_id, run, fence=fence)

    def newest(self) -> RunCopy | None:
        """Return the newest good copy; damaged ones are set aside, and that is logged."""
        found = [copy for copy in (self._state_copy(), self._checkpoint_copy()) if copy]
        return max(found, key=lambda copy: (copy.fence, copy.seq), default=None)

    def checkpoint(self, checkpoint_id: str) -> RunCopy:
        """Return one checkpoint as a copy of the run."""
        shown, body = self._checkpoints.body(checkpoint_id, self._workflow_id)
        return self._checked(shown, body.get("state"))

    def _state_copy(self) -> RunCopy | None:
        path = self.path
        if path is None:
            return None
        if files.is_link(path.parent):
            raise FolderError(path.parent, "is a symbolic link; a run is not read through it")
        try:
            body = documents.unseal(files.read_whole(path), KIND, str(path))
            return self._checked(str(path), body.get("run"))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except DocumentCorruptError as error:
            logger.warning("%s; kept aside as %s", error, files.set_aside(path))
            return None

    def _checkpoint_copy(self) -> RunCopy | None:
        for shown, body in self._checkpoints.good_bodies(self._workflow_id):
            try:
                return self._checked(shown, body.get("state"))
            except DocumentCorruptError as error:
                logger.warning("%s; it is not used", error)
        return None

    def _checked(self, source: str, run: object) -> RunCopy:
        if not isinstance(run, dict) or run.get("workflow_id") != self._workflow_id:
            raise DocumentCorruptError(source, f"it is not a copy of run {self._workflow_id!r}")
        return read_run(source, run)
