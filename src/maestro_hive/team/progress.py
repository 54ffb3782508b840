"""Worker checkpoints: what a worker saved of its half-done work, for the one that goes on.

A command writes it to the file that ``MAESTRO_PROGRESS`` names, a Python persona raises ``ContextFull``.
It is recorded as the progress of the task's step, in the form of MAHABHARATHA's checkpoints.
"""

from __future__ import annotations

import json
import shutil
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from maestro_hive.kernel import files
from maestro_hive.kernel.errors import DecodeError, DocumentCorruptError, StorageError
from maestro_hive.maestro.state import codec, strict_json
from maestro_hive.team.state import Checkpoint

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from datetime import datetime
    from pathlib import Path

    from maestro_hive.maestro.state.strict_json import Json

#: Under which name it is in the progress of a step.
CHECKPOINT = "checkpoint"
#: And how often a context was full: of the task in its run, whatever fails or is killed meanwhile.
HANDOVERS = "handovers"
_MOST_BYTES = 1024 * 1024
#: What is nested deeper could not be recorded inside of a checkpoint.
_MOST_DEPTH = 50
#: Why a progress file is not taken: it is none, it is too long, or it cannot be read.
_NOT_TAKEN = (DocumentCorruptError, StorageError, OSError)


class ContextFull(Exception):  # noqa: N818 - no error: the work goes on
    """Raised by a Python persona whose context is nearly full; a fresh call goes on from what it saved.

    ``current().progress["checkpoint"]`` has the fields there. It costs no attempt.
    """

    def __init__(self, **fields: Any) -> None:
        super().__init__("the context is nearly full")
        self.fields = fields


def handovers(progress: Mapping[str, Json]) -> int:
    """Return how often the context of a worker was full, by the progress of its step."""
    count = progress.get(HANDOVERS)
    return count if type(count) is int else 0


def one_more_handover(progress: Mapping[str, Json]) -> dict[str, Json]:
    """Return what to save when a context is full, in one record with what the next worker goes on from."""
    return {HANDOVERS: handovers(progress) + 1}


class ProgressFile:
    """The file that a command saves its checkpoint to."""

    def __init__(self, path: Path, write: Callable[[str], None]) -> None:
        """Use a file; ``write`` adds a line to the log of the task."""
        self.path = path
        self._write = write
        self._seen = b""

    def offer(self, saved: Json) -> None:
        """Let it have the last checkpoint: what the last worker left there, or what is recorded."""
        files.make_private_folder(self.path.parent)
        if not self.path.is_file() or self.path.is_symlink() or not self.path.stat().st_size:
            self.remove()
            if saved is not None:
                files.write_atomically(self.path, checkpoint_text(saved))
        with suppress(FileNotFoundError, *_NOT_TAKEN):
            self._seen = self._read()

    def taken(self) -> Json:
        """Return what was written since it was looked at last; None if nothing was.

        What cannot be read, or is too long, is nothing: the work of the command counts, and not this.
        """
        try:
            data = self._read()
        except FileNotFoundError:
            return None
        except _NOT_TAKEN as error:
            self._write(f"the progress file was not taken: {_reason_of(error)}\n")
            return None
        if not data.strip() or data == self._seen:
            return None
        self._seen = data
        try:
            return strict_json.parse(data, depth=_MOST_DEPTH)
        except DecodeError:  # what cannot be recorded as JSON is a text
            return data.decode("utf-8", "replace")

    def remove(self) -> None:
        """Remove it: the task is complete, or it is no file."""
        remove_whatever(self.path)

    def _read(self) -> bytes:
        return files.read_whole(self.path, _MOST_BYTES)


def remove_whatever(path: Path) -> None:
    """Remove what is at a path of which a command was told, if anything: it may be a folder."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _reason_of(error: Exception) -> str:
    match error:
        case DocumentCorruptError():
            return error.reason
        case OSError():
            return files.reason_of(error)
        case _:
            return str(error)


def checkpoint_text(checkpoint: Json) -> bytes:
    """Return a checkpoint as JSON; values that JSON does not have, as in the journal."""
    tree = codec.parse(codec.encode(checkpoint).data, depth=codec.DOCUMENT_DEPTH)
    return (json.dumps(tree, indent=2, ensure_ascii=True) + "\n").encode()


def read_checkpoint(data: bytes, name: str) -> Json:
    """Return the values of a checkpoint; raise ``DecodeError`` if it is no JSON.

    One of another program may have members that look like those of the journal.
    """
    try:
        return codec.decode(data, name)
    except DecodeError:
        return codec.parse(data, name)


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
