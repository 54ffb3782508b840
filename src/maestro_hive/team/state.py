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
from dataclasses import dataclass, field, fields, replace
from datetime import UTC, datetime
from enum import Enum
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, NamedTuple

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
from maestro_hive.maestro.state.strict_json import is_plain, write, write_sorted

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
_TEXT_OR_NONE = (str, type(None))


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
        members = _readers(type(self))  # type: ignore[arg-type]  # types are hashable
        own = {
            name: value if type(value := getattr(self, name)) in _TEXT_OR_NONE else _to_json(value)
            for name in members
        }
        # Own members come first, and are not replaced.
        return own | self.extra | own if self.extra else own

    @classmethod
    def from_dict(cls, data: dict[str, Json]) -> Self:
        """Return the record that ``data`` describes, or raise a ``ValidationError``."""
        check(data, cls.schema_name)
        return cls._from_valid(data)

    @classmethod
    def _from_valid(cls, data: dict[str, Json]) -> Self:
        readers = _readers(cls)  # type: ignore[arg-type]  # as above
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
        StateWriter(path).save(self)

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
        return cls.parse(text, str(path))

    @classmethod
    def parse(cls, text: bytes, name: str) -> Self:
        """Return the state that the text of a file has; ``name`` names it in errors, as of ``load``."""
        return cls._from_valid(_from_text(text, name))


@cache
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


class _TaskText(NamedTuple):
    """A task in a state file: the record, its text for the checksum, and its line."""

    record: TaskState
    canonical: str
    line: str


class StateWriter:
    """Writes one state of an execution after the other to a file.

    A task that has the same record as in the state before is not checked and made text of again: a
    task that has changed must have another record.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = path
        self._tasks: dict[str, _TaskText] = {}

    def save(self, state: ExecutionState) -> None:
        """Write a state, completely and durably, or raise and leave the old file."""
        text = self._text_of(state)
        make_private_folder(Path(self._path).parent)
        atomic_write(self._path, text)

    def _text_of(self, state: ExecutionState) -> str:
        """Return the text of the file, after checking that it is read back unchanged."""
        name, known = str(self._path), self._known(state)
        if known:
            left = {each: task for each, task in state.tasks.items() if each not in known}
            data = replace(state, tasks=left).to_dict()
        else:
            data = state.to_dict()
        check(data, "saved", name)
        document = {**data, "format": STATE_FORMAT}
        _check_faithful(document, name)
        for each, task in document["tasks"].items():
            known[each] = _TaskText(state.tasks[each], _sorted(task), _line(task))
        self._tasks = {each: known[each] for each in state.tasks}
        text = _in_lines(document, self._tasks)
        if len(text.encode()) > MAX_STATE_BYTES:
            raise EncodeError(
                name, f"it would be larger than the limit of {MAX_STATE_BYTES:,} bytes"
            )
        return text

    def _known(self, state: ExecutionState) -> dict[str, _TaskText]:
        """Return the tasks that have not changed since the last state."""
        if not self._tasks:
            return {}
        tasks = state.tasks.items()
        last = {each: self._tasks.get(each) for each in state.tasks}
        return {each: it for each, task in tasks if (it := last[each]) and it.record is task}


def _check_faithful(document: dict[str, Json], name: str) -> None:
    """Raise if JSON would give something else back."""
    canonical = _canonical(document, name, EncodeError)
    try:
        faithful = is_plain(document) or codec.parse(canonical, name) == document
    except (DecodeError, RecursionError) as error:
        raise EncodeError(name, str(error)) from error
    if not faithful:
        raise EncodeError(name, "JSON cannot hold a tuple, or a key that is not a string")


def _in_lines(document: dict[str, Json], tasks: dict[str, _TaskText]) -> str:
    """Return the text of a document with its SHA-256, and with a line for each task and worker.

    The C encoder writes no line breaks, and Python's own takes a multiple of the time.
    """
    canonical = {key: _sorted(each) for key, each in document.items() if key != "tasks"}
    canonical["tasks"] = _joined({each: it.canonical for each, it in sorted(tasks.items())})
    digest = hashlib.sha256(_joined(dict(sorted(canonical.items()))).encode()).hexdigest()
    members = []
    for key, each in (*document.items(), ("sha256", digest)):
        if key != "tasks":
            lines = {name: _line(item) for name, item in each.items()} if type(each) is dict else {}
        else:
            lines = {name: it.line for name, it in tasks.items()}
        members.append(f"{_line(key)}: {_block(lines) if lines else _line(each)}")
    return "{\n  " + ",\n  ".join(members) + "\n}\n"


def _block(lines: dict[str, str]) -> str:
    return "{\n" + ",\n".join([f"    {_line(key)}: {it}" for key, it in lines.items()]) + "\n  }"


def _joined(members: dict[str, str]) -> str:
    return "{" + ",".join([f"{_line(key)}:{text}" for key, text in members.items()]) + "}"


def _sorted(value: Json) -> str:
    return "".join(write_sorted(value, 0))


def _line(value: Json) -> str:
    return "".join(write(value, 0))


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
_STATUSES = frozenset(each.value for each in TaskStatus)


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
    if kind in ("saved", "state") and _is_plainly_valid(data):
        return
    from jsonschema import ValidationError

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


def _is_plainly_valid(data: Json) -> bool:
    """Return whether a state is certainly one that can be saved; False says nothing.

    The schema decides. It takes a hundred times as long, and a run saves its state again and again.
    """
    if type(data) is not dict:
        return False
    tasks, workers, names = data.get("tasks"), data.get("workers", {}), data.get("checkpoints", [])
    return (
        type(data.get("feature")) is str
        and type(data.get("started_at")) is str
        and _is_time_or_none(data["started_at"])
        and _is_number(data.get("current_level"), least=0)
        and type(tasks) is dict
        and all(map(_is_plain_task, tasks.values()))
        and type(workers) is dict
        and all(map(_is_plain_worker, workers.values()))
        and type(names) is list
        and all(type(each) is str for each in names)
        and ("format" in data) == ("sha256" in data)
        and _is_number(data.get("format", 1), least=1)
        and type(data.get("sha256", "")) is str
    )


def _is_plain_task(task: Json) -> bool:
    return (
        type(task) is dict
        and type(task.get("id")) is str
        and type(task.get("status")) is str
        and task["status"] in _STATUSES
        and type(task.get("worker_id")) in _TEXT_OR_NONE
        and type(task.get("error")) in _TEXT_OR_NONE
        and _is_time_or_none(task.get("started_at"))
        and _is_time_or_none(task.get("completed_at"))
    )


def _is_plain_worker(worker: Json) -> bool:
    return (
        type(worker) is dict
        and type(worker.get("id")) is str
        and type(worker.get("status", "")) is str
        and type(worker.get("current_task")) in _TEXT_OR_NONE
        and _is_number(worker.get("tasks_completed", 0), least=0)
    )


def _is_number(value: Json, *, least: int) -> bool:
    return type(value) is int and value >= least


def _is_time_or_none(value: Json) -> bool:
    try:
        return value is None or (type(value) is str and bool(read_time(value)))
    except ValueError:
        return False


@cache
def _validator(kind: str) -> Draft7Validator:
    from jsonschema import Draft7Validator, FormatChecker
    from jsonschema.validators import extend

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
