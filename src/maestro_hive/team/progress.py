"""Worker checkpoints: what a worker saved of its half-done work, for the one that goes on.

A command writes it to the file that ``MAESTRO_PROGRESS`` names, a Python persona raises ``ContextFull``.
It is recorded as the progress of the task's step, in the form of MAHABHARATHA's checkpoints.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from maestro_hive.kernel import files
from maestro_hive.kernel.errors import DecodeError, DocumentCorruptError
from maestro_hive.maestro.state import strict_json
from maestro_hive.team.errors import CommandFailedError
from maestro_hive.team.state import Checkpoint

if TYPE_CHECKING:
    from datetime import datetime
    from pathlib import Path

    from maestro_hive.maestro.state.strict_json import Json

#: Under which name it is in the progress of a step.
CHECKPOINT = "checkpoint"
_MOST_BYTES = 1024 * 1024
#: What is nested deeper could not be recorded inside of a checkpoint.
_MOST_DEPTH = 50


class ContextFull(Exception):  # noqa: N818 - no error: the work goes on
    """Raised by a Python persona whose context is nearly full; a fresh call goes on from what it saved.

    ``current().progress["checkpoint"]`` has the fields there. It costs no attempt.
    """

    def __init__(self, **fields: Any) -> None:
        super().__init__("the context is nearly full")
        self.fields = fields


class ProgressFile:
    """The file that a command saves its checkpoint to."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._seen = b""

    def offer(self, saved: Json) -> None:
        """Let it have the last checkpoint: what the last worker left there, or what is recorded."""
        files.make_private_folder(self.path.parent)
        if not self.path.exists() and saved is not None:
            self.path.write_text(json.dumps(saved), encoding="utf-8")
        self._seen = self._read()

    def taken(self) -> Json:
        """Return what was written since it was looked at last; None if nothing was."""
        data = self._read()
        if not data.strip() or data == self._seen:
            return None
        self._seen = data
        try:
            return strict_json.parse(data, depth=_MOST_DEPTH)
        except DecodeError:  # what cannot be recorded as JSON is a text
            return data.decode("utf-8", "replace")

    def remove(self) -> None:
        """Remove it: the task is complete."""
        self.path.unlink(missing_ok=True)

    def _read(self) -> bytes:
        try:
            return files.read_whole(self.path, _MOST_BYTES)
        except FileNotFoundError:
            return b""
        except (DocumentCorruptError, OSError) as error:
            raise CommandFailedError(f"the progress file cannot be read: {error}") from error


def as_checkpoint(saved: Json, *, task: str, worker: str, now: datetime) -> dict[str, Json]:
    """Return what was saved in the form of a checkpoint; what it has no member for is ``state_data``."""
    given: dict[str, Json] = saved if isinstance(saved, dict) else {"text": saved}
    known = {"task_id", "worker_id", "timestamp", "state_data"}
    fields = {
        "files_created": list,
        "files_modified": list,
        "current_step": int,
    }
    right = {name: given[name] for name, kind in fields.items() if type(given.get(name)) is kind}
    data = given.get("state_data")
    rest = {name: each for name, each in given.items() if name not in known and name not in right}
    return Checkpoint(
        task_id=task,
        worker_id=worker,
        timestamp=now,
        files_created=[str(each) for each in right.get("files_created", [])],
        files_modified=[str(each) for each in right.get("files_modified", [])],
        current_step=right.get("current_step", 0),
        state_data={**rest, **(data if isinstance(data, dict) else {})},
    ).to_dict()
