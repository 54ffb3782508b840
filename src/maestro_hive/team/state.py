"""The state of a feature's execution: its tasks, its workers and the checkpoints they left.

A state file is plain JSON that any program can read and write; ``schemas/`` says what it holds.
Members that the schemas do not name are kept in ``extra`` and written back. Times are written in
UTC, and one without an offset, as older files have it, is taken as UTC.

``save`` also writes a format number and a SHA-256, and ``load`` refuses a file that does not
match its own. A file that has neither, because another program wrote it, is checked against the
schema alone; who edits a file by hand removes both.

A save that is killed leaves the old file or the new one, and at most one temporary file
(``.state.json.….tmp``), which nothing reads and which may be deleted. The last of several
savers wins: one process at a time should be the one that saves.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field, fields
from datetime import datetime
from enum import Enum
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from maestro_hive.kernel.clock import SystemClock
from maestro_hive.kernel.errors import (
    CodecError,
    DecodeError,
    DocumentCorruptError,
    EncodeError,
    NewerFormatError,
    StorageError,
)
from maestro_hive.kernel.files import make_private_folder, read_whole, write_atomically
from maestro_hive.maestro.state import codec
from maestro_hive.team.validation import check, load_schema, read_time, write_time

if TYPE_CHECKING:
    import os
    from typing import Self

    from maestro_hive.kernel.clock import Clock

__all__ = [
    "Checkpoint",
    "ExecutionState",
    "TaskState",
    "TaskStatus",
    "WorkerState",
    "atomic_write",
    "load_schema",
    "validate_state",
]

#: The format of the state files this version writes, and the newest it reads.
STATE_FORMAT = 1
#: A larger state file than this is refused, on writing and on reading.
MAX_STATE_BYTES = 64 * 1024 * 1024

_DEFAULT_PATH = ".mahabharatha/state.json"
_CLOCK = SystemClock()


class TaskStatus(Enum):
    """Where a task stands."""

    #: Waiting for a worker, or for its level.
    PENDING = "pending"
    #: A worker has it.
    RUNNING = "running"
    #: Done.
    COMPLETE = "complete"
    #: Tried and given up; ``error`` says why.
    FAILED = "failed"
    #: Cannot begin, because a task it needs failed.
    BLOCKED = "blocked"


@dataclass(slots=True)
class TaskState:
    """One task: where it stands and who has it."""

    id: str
    status: TaskStatus = TaskStatus.PENDING
    worker_id: str | None = None
    started_at: datetime | None = None
    completed_at: datetime | None = None
    error: str | None = None
    extra: dict[str, Any] = field(default_factory=dict, kw_only=True)

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        return _with_extra(
            {
                "id": self.id,
                "status": _plain(self.status),
                "worker_id": self.worker_id,
                "started_at": _plain(self.started_at),
                "completed_at": _plain(self.completed_at),
                "error": self.error,
            },
            self.extra,
        )

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> TaskState:
        """Return the task that ``data`` describes, or raise a ``ValidationError``."""
        check(data, "task")
        return _task(data)


@dataclass(slots=True)
class WorkerState:
    """One worker: what it does now and how much it has done."""

    id: str
    status: str = "idle"
    current_task: str | None = None
    tasks_completed: int = 0
    extra: dict[str, Any] = field(default_factory=dict, kw_only=True)

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        return _with_extra(
            {
                "id": self.id,
                "status": self.status,
                "current_task": self.current_task,
                "tasks_completed": self.tasks_completed,
            },
            self.extra,
        )

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> WorkerState:
        """Return the worker that ``data`` describes, or raise a ``ValidationError``."""
        check(data, "worker")
        return _worker(data)


@dataclass(slots=True)
class Checkpoint:
    """How far a worker came with a task, for whoever goes on with it."""

    task_id: str
    worker_id: str
    timestamp: datetime | None
    files_created: list[str]
    files_modified: list[str]
    current_step: int
    state_data: dict[str, Any]
    extra: dict[str, Any] = field(default_factory=dict, kw_only=True)

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        return _with_extra(
            {
                "task_id": self.task_id,
                "worker_id": self.worker_id,
                "timestamp": _plain(self.timestamp),
                "files_created": list(self.files_created),
                "files_modified": list(self.files_modified),
                "current_step": self.current_step,
                "state_data": self.state_data,
            },
            self.extra,
        )

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Checkpoint:
        """Return the checkpoint that ``data`` describes, or raise a ``ValidationError``."""
        check(data, "checkpoint")
        return cls(
            task_id=data["task_id"],
            worker_id=data["worker_id"],
            timestamp=_time(data["timestamp"]),
            files_created=list(data["files_created"]),
            files_modified=list(data["files_modified"]),
            current_step=int(data["current_step"]),
            state_data=data["state_data"],
            extra=_extra(data, Checkpoint),
        )


@dataclass(slots=True)
class ExecutionState:
    """One feature's execution, as it is kept between processes."""

    feature: str
    started_at: datetime
    current_level: int = 0
    tasks: dict[str, TaskState] = field(default_factory=dict)
    workers: dict[str, WorkerState] = field(default_factory=dict)
    checkpoints: list[str] = field(default_factory=list)
    extra: dict[str, Any] = field(default_factory=dict, kw_only=True)

    @classmethod
    def create(cls, feature: str, *, clock: Clock = _CLOCK) -> Self:
        """Begin ``feature`` now, at level 0, without tasks."""
        return cls(feature=feature, started_at=clock.now())

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        return _with_extra(
            {
                "feature": self.feature,
                "started_at": _plain(self.started_at),
                "current_level": self.current_level,
                "tasks": {name: task.to_dict() for name, task in self.tasks.items()},
                "workers": {name: worker.to_dict() for name, worker in self.workers.items()},
                "checkpoints": list(self.checkpoints),
            },
            self.extra,
        )

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Self:
        """Return the state that ``data`` describes, or raise a ``ValidationError``."""
        check(data, "state")
        return cls._from_valid(data)

    def save(self, path: str | os.PathLike[str] = _DEFAULT_PATH) -> None:
        """Put the state at ``path``, wholly and durably, or raise and leave what was there.

        Missing folders are made. A state that ``load`` would refuse is refused here, with the
        same error, before anything is written.
        """
        data = self.to_dict()
        check(data, "state", str(path))
        text = _seal(data, str(path))
        make_private_folder(Path(path).parent)
        atomic_write(path, text)

    @classmethod
    def load(cls, path: str | os.PathLike[str] = _DEFAULT_PATH) -> Self | None:
        """Return the state saved at ``path``, or ``None`` if there is no such file.

        A file that breaks the schema raises jsonschema's ``ValidationError``; one that is no
        JSON, was altered or cannot be read, a ``MaestroError``.
        """
        try:
            text = read_whole(Path(path), MAX_STATE_BYTES)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise StorageError(f"{path} could not be read: {error.strerror}") from error
        return cls._from_valid(_unseal(text, str(path)))

    @classmethod
    def _from_valid(cls, data: dict[str, Any]) -> Self:
        return cls(
            feature=data["feature"],
            started_at=read_time(data["started_at"]),
            current_level=int(data["current_level"]),
            tasks={name: _task(task) for name, task in data["tasks"].items()},
            workers={name: _worker(worker) for name, worker in data.get("workers", {}).items()},
            checkpoints=list(data.get("checkpoints", [])),
            extra=_extra(data, ExecutionState, _SEAL),
        )


def validate_state(data: dict[str, Any]) -> bool:
    """Return True if ``data`` is a state as a file may hold it; raise ``ValidationError`` if not."""
    check(data, "state")
    return True


def atomic_write(path: str | os.PathLike[str], data: str) -> None:
    """Put the text ``data`` at ``path``, wholly and durably, or raise and leave what was there."""
    try:
        text = data.encode()
    except UnicodeEncodeError as error:
        raise EncodeError(str(path), f"the text has no form in UTF-8: {error.reason}") from error
    write_atomically(Path(path), text)


# --- the file ----------------------------------------------------------------------------------

_SEAL = frozenset({"format", "sha256"})


def _seal(data: dict[str, Any], name: str) -> str:
    """Return the text of a state file, after making sure that it will be read back as it is."""
    document = {**data, "format": STATE_FORMAT}
    canonical = _canonical(document, name, EncodeError)
    digest = hashlib.sha256(canonical).hexdigest()
    try:
        faithful = codec.parse(canonical, name) == document
        text = json.dumps({**document, "sha256": digest}, ensure_ascii=False, indent=2) + "\n"
    except (DecodeError, RecursionError) as error:
        raise EncodeError(name, str(error)) from error
    if not faithful:
        raise EncodeError(name, "JSON has no form for a tuple, or for a key that is not a text")
    if len(text.encode()) > MAX_STATE_BYTES:
        raise EncodeError(name, f"it would be larger than the limit of {MAX_STATE_BYTES:,} bytes")
    return text


def _unseal(text: bytes, name: str) -> dict[str, Any]:
    """Return the members of a state file, or raise what is wrong with it."""
    data = codec.parse(text, name)
    found = data.get("format") if isinstance(data, dict) else None
    if type(found) is int and found > STATE_FORMAT:
        raise NewerFormatError(name, found, STATE_FORMAT)
    check(data, "state", name)
    document: dict[str, Any] = {key: value for key, value in data.items() if key != "sha256"}
    canonical = _canonical(document, name, DecodeError)
    if "sha256" in data and hashlib.sha256(canonical).hexdigest() != data["sha256"]:
        reason = "its SHA-256 does not match: it was altered"
        raise DocumentCorruptError(
            name, f"{reason} (if you edited it, remove its members 'format' and 'sha256')"
        )
    return document


def _canonical(tree: dict[str, Any], name: str, problem: type[CodecError]) -> bytes:
    try:
        return codec.dump_canonical(tree)
    except (TypeError, ValueError, RecursionError) as error:
        raise problem(name, f"it holds what JSON has no form for: {error}") from error


# --- values ------------------------------------------------------------------------------------


def _task(data: dict[str, Any]) -> TaskState:
    return TaskState(
        id=data["id"],
        status=TaskStatus(data["status"]),
        worker_id=data.get("worker_id"),
        started_at=_time(data.get("started_at")),
        completed_at=_time(data.get("completed_at")),
        error=data.get("error"),
        extra=_extra(data, TaskState),
    )


def _worker(data: dict[str, Any]) -> WorkerState:
    return WorkerState(
        id=data["id"],
        status=data.get("status", "idle"),
        current_task=data.get("current_task"),
        tasks_completed=int(data.get("tasks_completed", 0)),
        extra=_extra(data, WorkerState),
    )


def _time(text: str | None) -> datetime | None:
    return None if text is None else read_time(text)


def _plain(value: object) -> object:
    """Return a value as JSON has it; what is of neither type is left for the schema to judge."""
    if isinstance(value, datetime):
        return write_time(value)
    return value.value if isinstance(value, Enum) else value


def _with_extra(own: dict[str, Any], extra: dict[str, Any]) -> dict[str, Any]:
    return own | extra | own if extra else own  # own members stand first, and win


def _extra(data: dict[str, Any], kind: type, known: frozenset[str] = frozenset()) -> dict[str, Any]:
    named = _members(kind)
    return {key: value for key, value in data.items() if key not in named and key not in known}


@cache
def _members(kind: type) -> frozenset[str]:
    return frozenset(each.name for each in fields(kind)) - {"extra"}
