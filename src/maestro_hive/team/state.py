"""The state of a feature's execution: its tasks, its workers and their checkpoints.

A state file is plain JSON that any program can read and write; ``schemas/`` defines it. Members
that the schemas do not name are read into ``extra`` and written back. Times are written in UTC,
and a time without an offset, as older files have it, is read as UTC.

``save`` also writes a format number and a SHA-256, and ``load`` refuses a file that does not match
its own. A file that has neither, because another program wrote it, is checked against the schema
alone; to edit a file by hand, remove both members.

A save that is killed leaves the old file or the new one, and at most one temporary file
(``.state.json.….tmp``), which is never read and may be deleted. Of several concurrent saves the
last one wins: only one process at a time should save.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime
from enum import Enum
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from maestro_hive.kernel.clock import SystemClock
from maestro_hive.kernel.errors import (
    CodecError,
    ConfigurationError,
    DecodeError,
    DocumentCorruptError,
    EncodeError,
    NewerFormatError,
    StorageError,
)
from maestro_hive.kernel.files import make_private_folder, read_whole, write_atomically
from maestro_hive.maestro.state import codec

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Iterator
    from typing import Self

    from jsonschema import Draft7Validator, ValidationError

    from maestro_hive.kernel.clock import Clock
    from maestro_hive.maestro.state.strict_json import Json

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


# --- times ---------------------------------------------------------------------------------------

_RFC_3339 = re.compile(
    r"[0-9]{4}-[0-9]{2}-[0-9]{2}[Tt](?:[01][0-9]|2[0-3]):[0-9]{2}:[0-9]{2}(?:\.[0-9]+)?"
    r"(?:[Zz]|[+-][0-9]{2}:[0-9]{2})?"
)


def read_time(text: str) -> datetime:
    """Return the moment of an RFC 3339 text, in UTC, or raise ``ValueError``.

    A text without an offset, as older files have it, is read as UTC.
    """
    if not _RFC_3339.fullmatch(text):
        raise ValueError(f"{text!r:.40} is not a date-time")
    when = datetime.fromisoformat(text.upper())
    try:
        return (when if when.tzinfo else when.replace(tzinfo=UTC)).astimezone(UTC)
    except OverflowError as error:
        raise ValueError(f"{text!r:.40} is before the year 1 or after 9999 in UTC") from error


def write_time(when: datetime) -> str:
    """Return the RFC 3339 text of a moment, in UTC; a time without a zone is taken as UTC."""
    return (when if when.tzinfo else when.replace(tzinfo=UTC)).astimezone(UTC).isoformat()


def _read_time_or_none(text: str | None) -> datetime | None:
    return None if text is None else read_time(text)


# --- the records ---------------------------------------------------------------------------------


class TaskStatus(Enum):
    """The status of a task."""

    #: Waiting for a worker, or for its level.
    PENDING = "pending"
    #: A worker executes it.
    RUNNING = "running"
    #: Completed.
    COMPLETE = "complete"
    #: Failed for good; ``error`` gives the reason.
    FAILED = "failed"
    #: Cannot start, because a task it depends on failed.
    BLOCKED = "blocked"


@dataclass(slots=True)
class _Record:
    """Members that a schema names, and in ``extra`` those of other programs.

    A field's ``read`` in its metadata makes the Python value of the JSON value.
    """

    extra: dict[str, Json] = field(default_factory=dict, kw_only=True)

    if TYPE_CHECKING:
        schema_name: ClassVar[str]
    checksum_members: ClassVar[tuple[str, ...]] = ()

    def to_dict(self) -> dict[str, Json]:
        """Return the record as JSON values."""
        own = {name: _to_json(getattr(self, name)) for name in _readers(type(self))}
        return own | self.extra | own  # own members come first, and are not replaced

    @classmethod
    def from_dict(cls, data: dict[str, Json]) -> Self:
        """Return the record that ``data`` describes, or raise a ``ValidationError``."""
        check(data, cls.schema_name)
        return cls._from_valid(data)

    @classmethod
    def _from_valid(cls, data: dict[str, Json]) -> Self:
        readers = _readers(cls)
        members = {name: read(data[name]) for name, read in readers.items() if name in data}
        named = {*readers, *cls.checksum_members}
        members["extra"] = {name: value for name, value in data.items() if name not in named}
        return cls(**members)


@dataclass(slots=True)
class TaskState(_Record):
    """One task: its status and its worker."""

    schema_name = "task"

    id: str
    status: TaskStatus = field(default=TaskStatus.PENDING, metadata={"read": TaskStatus})
    worker_id: str | None = None
    started_at: datetime | None = field(default=None, metadata={"read": _read_time_or_none})
    completed_at: datetime | None = field(default=None, metadata={"read": _read_time_or_none})
    error: str | None = None


@dataclass(slots=True)
class WorkerState(_Record):
    """One worker: its current task and how many it has completed."""

    schema_name = "worker"

    id: str
    status: str = "idle"
    current_task: str | None = None
    tasks_completed: int = field(default=0, metadata={"read": int})


@dataclass(slots=True)
class Checkpoint(_Record):
    """A worker's progress on a task, for the worker that resumes it."""

    schema_name = "checkpoint"

    task_id: str
    worker_id: str
    timestamp: datetime | None = field(metadata={"read": _read_time_or_none})
    files_created: list[str] = field(metadata={"read": list})
    files_modified: list[str] = field(metadata={"read": list})
    current_step: int = field(metadata={"read": int})
    state_data: dict[str, Json]


def _read_tasks(data: dict[str, Json]) -> dict[str, TaskState]:
    return {name: TaskState._from_valid(task) for name, task in data.items()}  # noqa: SLF001


def _read_workers(data: dict[str, Json]) -> dict[str, WorkerState]:
    return {name: WorkerState._from_valid(worker) for name, worker in data.items()}  # noqa: SLF001


@dataclass(slots=True)
class ExecutionState(_Record):
    """The execution of one feature, as it is stored between processes."""

    schema_name = "saved"
    checksum_members = ("format", "sha256")

    feature: str
    started_at: datetime = field(metadata={"read": read_time})
    current_level: int = field(default=0, metadata={"read": int})
    tasks: dict[str, TaskState] = field(default_factory=dict, metadata={"read": _read_tasks})
    workers: dict[str, WorkerState] = field(default_factory=dict, metadata={"read": _read_workers})
    checkpoints: list[str] = field(default_factory=list, metadata={"read": list})

    @classmethod
    def create(cls, feature: str, *, clock: Clock = _CLOCK) -> Self:
        """Return a state of ``feature`` that starts now, at level 0, without tasks."""
        return cls(feature=feature, started_at=clock.now())

    def save(self, path: str | os.PathLike[str] = _DEFAULT_PATH) -> None:
        """Write the state to ``path``, completely and durably, or raise and leave the old file.

        Missing folders are created. A state that ``load`` would refuse is refused here, with the
        same error, before anything is written.
        """
        data = self.to_dict()
        check(data, "saved", str(path))
        text = _to_text(data, str(path))
        make_private_folder(Path(path).parent)
        atomic_write(path, text)

    @classmethod
    def load(cls, path: str | os.PathLike[str] = _DEFAULT_PATH) -> Self | None:
        """Return the state saved at ``path``, or ``None`` if there is no such file.

        A file that violates the schema raises jsonschema's ``ValidationError``; one that is not
        JSON, was altered or cannot be read raises a ``MaestroError``.
        """
        try:
            text = read_whole(Path(path), MAX_STATE_BYTES)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise StorageError(f"{path} could not be read: {error.strerror}") from error
        return cls._from_valid(_from_text(text, str(path)))


def _readers(kind: type[_Record]) -> dict[str, Json]:
    """Return, for each member that a schema names, what makes its value from JSON."""
    named = (each for each in fields(kind) if each.name != "extra")
    return {each.name: each.metadata.get("read", lambda value: value) for each in named}


def _to_json(value: object) -> object:
    """Return a member as JSON value; a value of another type is left for the schema to refuse."""
    match value:
        case datetime():
            return write_time(value)
        case Enum():
            return value.value
        case dict():
            return {
                name: each.to_dict() if isinstance(each, _Record) else each
                for name, each in value.items()
            }
        case list() | tuple():
            return list(value)
        case _:
            return value


# --- the file ------------------------------------------------------------------------------------


def atomic_write(path: str | os.PathLike[str], data: str) -> None:
    """Write the text to ``path``, completely and durably, or raise and leave the old file."""
    try:
        text = data.encode()
    except UnicodeEncodeError as error:
        raise EncodeError(str(path), f"the text is not valid UTF-8: {error.reason}") from error
    write_atomically(Path(path), text)


def _to_text(data: dict[str, Json], name: str) -> str:
    """Return the text of a state file, after checking that it is read back unchanged."""
    document = {**data, "format": STATE_FORMAT}
    canonical = _canonical(document, name, EncodeError)
    digest = hashlib.sha256(canonical).hexdigest()
    try:
        faithful = codec.parse(canonical, name) == document
        text = json.dumps({**document, "sha256": digest}, ensure_ascii=False, indent=2) + "\n"
    except (DecodeError, RecursionError) as error:
        raise EncodeError(name, str(error)) from error
    if not faithful:
        raise EncodeError(name, "JSON cannot hold a tuple, or a key that is not a string")
    if len(text.encode()) > MAX_STATE_BYTES:
        raise EncodeError(name, f"it would be larger than the limit of {MAX_STATE_BYTES:,} bytes")
    return text


def _from_text(text: bytes, name: str) -> Json:
    """Return the members of a state file without its checksum, or raise what is wrong with it."""
    data = codec.parse(text, name)
    found = data.get("format") if isinstance(data, dict) else None
    if type(found) is int and found > STATE_FORMAT:
        raise NewerFormatError(name, found, STATE_FORMAT)
    check(data, "saved", name)
    digest = data.pop("sha256", None)
    canonical = _canonical(data, name, DecodeError)
    if digest is not None and hashlib.sha256(canonical).hexdigest() != digest:
        advice = "if you edited it, remove its members 'format' and 'sha256'"
        reason = f"its SHA-256 does not match: it was altered ({advice})"
        raise DocumentCorruptError(name, reason)
    return data


def _canonical(tree: dict[str, Json], name: str, problem: type[CodecError]) -> bytes:
    try:
        return codec.dump_canonical(tree)
    except (TypeError, ValueError, RecursionError) as error:
        raise problem(name, f"it contains a value that JSON cannot hold: {error}") from error


# --- the schemas ---------------------------------------------------------------------------------

_SUFFIX = ".schema.json"
_SCHEMAS = ("checkpoint", "state", "task", "task_graph", "task_graph_strict")
#: How much of a value an error message shows.
_SHOWN = 300


def load_schema(name: str) -> dict[str, Json]:
    """Return a bundled schema by name: ``"state.schema.json"`` or, for short, ``"state"``."""
    for known in _SCHEMAS:
        if name in (known, known + _SUFFIX):
            file = Path(__file__).with_name("schemas") / (known + _SUFFIX)
            schema: dict[str, Json] = json.loads(file.read_text(encoding="utf-8"))
            return schema
    bundled = ", ".join(known + _SUFFIX for known in _SCHEMAS)
    raise ConfigurationError(f"there is no schema {name!r:.80}; the bundled ones are {bundled}")


def validate_state(data: dict[str, Json]) -> bool:
    """Return True if ``data`` is a valid state; raise jsonschema's ``ValidationError`` if not.

    ``ExecutionState`` reads less than that: other programs may write what they like as workers,
    checkpoints, and times of tasks.
    """
    check(data, "state")
    return True


def check(data: Json, kind: str, source: str = "") -> None:
    """Raise a ``ValidationError`` unless ``data`` is a valid one of its kind.

    Kinds are those of the schemas, ``worker``, and ``saved``: a state that can be read as one.

    Its message names the ``source``, the JSON path and the rule that was violated.
    """
    from jsonschema import ValidationError  # noqa: PLC0415 - slow to import

    try:
        error = next(iter(_validator(kind).iter_errors(data)), None)
    except (RecursionError, ValueError) as cause:  # from the repr of a value it refuses
        error = ValidationError(f"cannot be checked: {cause}", validator="type")
    if error is not None:
        where = _short(_json_path(error.absolute_path))
        message = f"{where}: {_short(error.message)} (rule: {error.validator})"
        # Without the schema, so that str(error) is this message and not pages of JSON.
        raise ValidationError(
            f"{source}: {message}" if source else message,
            validator=error.validator,
            path=error.absolute_path,
            schema_path=error.absolute_schema_path,
            instance=error.instance,
        ) from None


@cache
def _validator(kind: str) -> Draft7Validator:
    from jsonschema import Draft7Validator, FormatChecker  # noqa: PLC0415 - slow to import
    from jsonschema.validators import extend  # noqa: PLC0415

    formats = FormatChecker(formats=())
    formats.checks("date-time", raises=ValueError)(
        lambda value: not isinstance(value, str) or bool(read_time(value))
    )
    # Two kinds have no schema file of their own.
    schema = load_schema("state" if kind in ("worker", "saved") else kind)
    if kind == "worker":
        schema = {"$ref": "#/definitions/worker", "definitions": schema["definitions"]}
    elif kind == "saved":
        schema["allOf"] = [{"$ref": "#/definitions/saved"}]
    ordered = extend(Draft7Validator, {"additionalProperties": _in_order})  # type: ignore[no-untyped-call]
    validator: Draft7Validator = ordered(schema, format_checker=formats)
    return validator


def _in_order(
    validator: Draft7Validator, schema: dict[str, Json], value: object, _parent: object
) -> Iterator[ValidationError]:
    """Check the members of an object in order, so that the first error is always the same one.

    jsonschema goes through a set. Here no object has ``properties`` beside it.
    """
    if isinstance(value, dict):
        for name, member in value.items():
            yield from validator.descend(member, schema, path=name)


def _json_path(path: Iterable[object]) -> str:
    # Not jsonschema's json_path, which raises for a key that is not a string.
    return "$" + "".join(
        f".{at}" if isinstance(at, str) and at.isidentifier() else f"[{at!r}]" for at in path
    )


def _short(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN // 2]} … {text[-_SHOWN // 2 :]}"
