"""Checkpoints: files with names that sort, retention without reading, damaged ones set aside.

A file's name has all that retention needs: ``000003.00000012~never~before-deploy.json`` is the
twelfth checkpoint of its run, made under fencing number 3, without an expiry, with the id
``before-deploy``. The newest is the one whose name sorts last; a process that was taken over and
resumes late writes a lower fencing number, so its file is not the newest.
"""

from __future__ import annotations

import math
import os
import re
import secrets
import threading
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, Self

from maestro_hive.kernel import errors, files
from maestro_hive.kernel.clock import Clock, SystemClock
from maestro_hive.kernel.errors import (
    ConfigurationError,
    DocumentCorruptError,
    FolderError,
    InvalidIdentifierError,
    MaestroError,
)
from maestro_hive.kernel.logs import get_logger
from maestro_hive.maestro.state import codec
from maestro_hive.maestro.state import run_document as documents
from maestro_hive.maestro.state.json_stream import BytesSource

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from maestro_hive.maestro.state.codec import Json
    from maestro_hive.maestro.state.json_stream import Source

logger = get_logger(__name__)

_NAME = re.compile(
    r"(\d{6,})\.(\d{8,})~(never|\d{1,12})~([A-Za-z0-9][A-Za-z0-9._:\-]{0,127})\.json"
)


#: How the ids of checkpoints start that are written at an interval.
_AUTOMATIC = "auto_"


class CheckpointName(NamedTuple):
    """The parts of a checkpoint file's name; they sort like the checkpoints."""

    fence: int
    version: int
    expires: int | None
    checkpoint_id: str

    @property
    def file(self) -> str:
        """The name as a file name."""
        expires = "never" if self.expires is None else self.expires
        return f"{self.fence:06d}.{self.version:08d}~{expires}~{self.checkpoint_id}.json"

    @property
    def is_automatic(self) -> bool:
        """Return whether it was written at an interval, and not because it was asked for."""
        return self.checkpoint_id.startswith(_AUTOMATIC)

    def expired(self, now: float) -> bool:
        """Return whether it has expired."""
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
        text: Iterable[bytes],
        *,
        fence: int | None,
        expires: int | None,
    ) -> CheckpointName:
        """Add a checkpoint; one of the same id is replaced. Without a fence it is the newest."""
        files.check_identifier(checkpoint_id, "checkpoint id")
        with self._mutex:
            names = self.names(workflow_id)
            version = max((name.version for name in names), default=0) + 1
            if fence is None:
                fence = max((name.fence for name in names), default=0)
            name = CheckpointName(fence, version, expires, checkpoint_id)
            if self.root is None:
                self._memory.setdefault(workflow_id, {})[name] = b"".join(text)
            else:
                folder = files.make_folder_inside(self.root, workflow_id)
                files.write_atomically(folder / name.file, text)
            for old in names:
                if old.checkpoint_id == checkpoint_id:
                    self.delete(workflow_id, old)
        return name

    def open(self, workflow_id: str, name: CheckpointName) -> Source:
        """Return a checkpoint's text, to be read in parts."""
        if self.root is None:
            return BytesSource(self._memory[workflow_id][name], name.file)
        return files.open_file(self.path(workflow_id, name), documents.MAX_DOCUMENT_BYTES)

    def delete(self, workflow_id: str, name: CheckpointName) -> None:
        """Remove a checkpoint."""
        if self.root is None:
            self._memory[workflow_id].pop(name, None)
        else:
            files.remove(self.path(workflow_id, name))

    def keep_newest(self, workflow_id: str, count: int, now: float) -> int:
        """Delete expired checkpoints and all but ``count`` others; return how many.

        The newest always stays. Automatic ones go first, so that they do not push out those that
        a program asked for; then the oldest.
        """
        names = self.names(workflow_id)
        valid = [name for name in names if not name.expired(now)]
        first = sorted(valid[:-1], key=lambda name: not name.is_automatic)
        old = [name for name in names if name.expired(now)] + first[: max(0, len(valid) - count)]
        for name in old:
            self.delete(workflow_id, name)
        return len(old)

    def set_aside(self, workflow_id: str, name: CheckpointName, error: MaestroError) -> None:
        """Rename a damaged checkpoint, and log that."""
        if self.root is not None:
            moved_to = files.set_aside(self.path(workflow_id, name))
            logger.warning("%s; set aside as %s, an older one is used", error, moved_to)

    def path(self, workflow_id: str, name: CheckpointName) -> Path:
        """Return where a checkpoint is."""
        if self.root is None:
            raise FolderError(Path("memory"), "checkpoints in memory have no path")
        return self.root / workflow_id / name.file


def _age(name: CheckpointName) -> tuple[int, int, str]:
    # Two processes may have chosen the same version; the ids that we make sort by time.
    return name.fence, name.version, name.checkpoint_id


def _is_workflow(entry: Path) -> bool:
    """Return whether a folder can be that of a workflow; ``lost+found`` is not."""
    try:
        files.check_identifier(entry.name, "workflow id")
    except InvalidIdentifierError:
        return False
    return os.path.isdir(entry) and not files.is_link(entry)  # noqa: PTH112 - Path's raises


def _parse(match: re.Match[str]) -> CheckpointName:
    fence, version, expires, checkpoint_id = match.groups()
    until = None if expires == "never" else int(expires)
    return CheckpointName(int(fence), int(version), until, checkpoint_id)


# --- the manager ---


DEFAULT_STORAGE_PATH = "/var/maestro/checkpoints"
KIND = "checkpoint"

#: A thousand years: longer means no expiry.
_LONGEST_TTL = 1000 * 366 * 24 * 3600


class CheckpointError(MaestroError):
    """A checkpoint could not be used."""


class CheckpointNotFoundError(CheckpointError):
    """There is no such checkpoint."""


class ChecksumValidationError(CheckpointError):
    """A checkpoint is torn or altered; the message names it."""


class AtomicWriteError(CheckpointError, errors.AtomicWriteError):
    """A checkpoint was not written; the older ones are intact."""


class Serializer(Protocol):
    """Turns a workflow's data into text and back, in place of the built-in codec."""

    def dumps(self, value: object) -> str:
        """Return the text of ``value``."""

    def loads(self, text: str) -> Any:
        """Return the value of ``text``."""


@dataclass(slots=True)
class StateMetadata:
    """What made a state, how it is written, and in ``custom`` whatever a program adds.

    ``create_checkpoint`` writes JSON without compression, whatever it says here.
    """

    executor_version: str = "2.1"
    serialization_format: str = "json"
    compression: str | None = None
    custom: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def from_json(cls, written: dict[str, Json]) -> Self:
        """Return what was written; members that have no field are ``custom``."""
        known = {each.name for each in fields(cls)}
        others = {name: value for name, value in written.items() if name not in known}
        named = {name: value for name, value in written.items() if name in known}
        return cls(**{**named, "custom": {**others, **named.get("custom", {})}})


@dataclass(slots=True)
class WorkflowState:
    """The state of a workflow in a checkpoint; ``checksum`` is set on writing."""

    workflow_id: str
    phase: str = "initializing"
    step: int = 0
    data: dict[str, Any] = field(default_factory=dict)
    metadata: StateMetadata = field(default_factory=StateMetadata)
    created_at: datetime = field(default_factory=lambda: datetime.now(UTC))
    checksum: str = ""


@dataclass(slots=True)
class Checkpoint:
    """One checkpoint."""

    checkpoint_id: str
    workflow_id: str
    version: int
    state: WorkflowState
    created_at: datetime
    expires_at: datetime | None = None


class CheckpointManager:
    """Writes, finds, checks and deletes checkpoints below a folder.

    ``default_ttl`` and ``ttl`` are seconds or a timedelta; ``storage_path=None`` keeps everything
    in memory.
    """

    def __init__(
        self,
        storage_path: str | Path | None = DEFAULT_STORAGE_PATH,
        serializer: Serializer | None = None,
        default_ttl: float | timedelta | None = None,
        max_checkpoints: int = 10,
        verify_on_read: bool = True,
        *,
        clock: Clock | None = None,
    ) -> None:
        if max_checkpoints < 1:
            raise ConfigurationError(f"max_checkpoints is {max_checkpoints}; at least 1 is needed")
        root = None if storage_path is None else Path(storage_path).expanduser()
        self._folder = CheckpointFolder(root and files.make_private_folder(root))
        self._serializer = serializer
        self._default_ttl = default_ttl
        self._max_checkpoints = max_checkpoints
        self._verify = verify_on_read
        self._clock: Clock = clock or SystemClock()

    @property
    def storage_path(self) -> Path | None:
        """Where the checkpoints are; None is memory."""
        return self._folder.root

    _storage_path = storage_path  # the name that older callers read

    # --- writing ---

    def create_checkpoint(
        self, workflow_id: str, state: WorkflowState, ttl: float | timedelta | None = None
    ) -> Checkpoint:
        """Write the state as the workflow's newest checkpoint."""
        data = self._to_json(state.data)
        state.checksum = codec.canonical_digest(data).hex()
        body = {each.name: getattr(state, each.name) for each in fields(state)} | {
            "data": data,
            "metadata": asdict(state.metadata),
            "created_at": state.created_at.isoformat(),
        }
        del body["workflow_id"]  # it stands beside the state
        name, created_at = self.write(workflow_id, new_checkpoint_id(self._clock), body, ttl=ttl)
        return Checkpoint(
            checkpoint_id=name.checkpoint_id,
            workflow_id=workflow_id,
            version=name.version,
            state=state,
            created_at=created_at,
            expires_at=_moment(name.expires),
        )

    def write(
        self,
        workflow_id: str,
        checkpoint_id: str,
        state: Json | documents.RunText,
        *,
        ttl: float | timedelta | None = None,
        fence: int | None = None,
    ) -> tuple[CheckpointName, datetime]:
        """Write plain JSON, or a run, as a checkpoint, and delete the oldest ones."""
        now = self._clock.now()
        expires_at = _moment(expires := self._expiry(ttl, now))
        members: dict[str, Json] = {
            "checkpoint_id": checkpoint_id,
            "workflow_id": workflow_id,
            "created_at": now.isoformat(),
            "expires_at": expires_at and expires_at.isoformat(),
        }
        run = state if isinstance(state, documents.RunText) else codec.dump(state)
        text = documents.seal_in_chunks(KIND, members, raw={"state": run})
        try:
            name = self._folder.write(
                workflow_id, checkpoint_id, text, fence=fence, expires=expires
            )
        except errors.AtomicWriteError as error:
            raise AtomicWriteError(error.path, error.reason, replaced=error.replaced) from error
        self._folder.keep_newest(workflow_id, self._max_checkpoints, now.timestamp())
        return name, now

    # --- reading ---

    def get_checkpoint(
        self, checkpoint_id: str, workflow_id: str | None = None, validate: bool = True
    ) -> Checkpoint:
        """Return a checkpoint, or raise: not found, or damaged."""
        workflow, name = self._locate(checkpoint_id, workflow_id)
        return self._read(workflow, name, verify=validate and self._verify)

    def get_latest_checkpoint(self, workflow_id: str, validate: bool = True) -> Checkpoint | None:
        """Return the newest good checkpoint; damaged ones are set aside, and that is logged."""
        for name in self._newest_first(workflow_id):
            with self._setting_aside(workflow_id, name):
                return self._read(workflow_id, name, verify=validate and self._verify)
        return None

    def good_bodies(self, workflow_id: str) -> Iterator[tuple[str, dict[str, Json]]]:
        """Yield the good checkpoints as (file, members), newest first, damaged ones set aside."""
        for name in self._newest_first(workflow_id, include_expired=True):
            found = None
            with self._setting_aside(workflow_id, name):
                found = self.read_body(workflow_id, name)
            if found is not None:
                yield found

    def _newest_first(
        self, workflow_id: str, *, include_expired: bool = False
    ) -> list[CheckpointName]:
        now = self._clock.now().timestamp()
        names = reversed(self._folder.names(workflow_id))
        return [name for name in names if include_expired or not name.expired(now)]

    @contextmanager
    def _setting_aside(self, workflow_id: str, name: CheckpointName) -> Iterator[None]:
        """Read a checkpoint; one that is damaged is set aside, and one that is gone passed over."""
        try:
            yield
        except CheckpointNotFoundError:
            pass  # another process deleted it in this moment
        except (ChecksumValidationError, DocumentCorruptError) as error:
            self._folder.set_aside(workflow_id, name, error)

    def highest_fence(self, workflow_id: str) -> int:
        """Return the highest fencing number of a workflow's checkpoints; 0 if there are none."""
        return max((name.fence for name in self._folder.names(workflow_id)), default=0)

    def body(self, checkpoint_id: str, workflow_id: str) -> tuple[str, dict[str, Json]]:
        """Return one checkpoint as (file, members)."""
        _, name = self._locate(checkpoint_id, workflow_id)
        return self.read_body(workflow_id, name)

    def read_body(
        self, workflow_id: str, name: CheckpointName, *, verify: bool = True
    ) -> tuple[str, dict[str, Json]]:
        """Read a checkpoint's document and check that it belongs to its name."""
        shown = f"checkpoint {name.checkpoint_id} of {workflow_id} ({name.file})"
        try:
            text = self._folder.open(workflow_id, name)
        except (FileNotFoundError, KeyError) as error:
            raise CheckpointNotFoundError(f"{shown} is gone") from error
        body = documents.unseal(text, KIND, shown, verify=verify, lazy=True)
        if (body.get("checkpoint_id"), body.get("workflow_id")) != (
            name.checkpoint_id,
            workflow_id,
        ):
            raise DocumentCorruptError(shown, "it is the file of another checkpoint")
        return shown, body

    def list_checkpoints(self, workflow_id: str, include_expired: bool = False) -> list[Checkpoint]:
        """Return a workflow's checkpoints, oldest first; damaged ones are left out and logged."""
        found = []
        for name in reversed(self._newest_first(workflow_id, include_expired=include_expired)):
            try:
                found.append(self._read(workflow_id, name, verify=self._verify))
            except CheckpointError as error:
                logger.warning("%s", error)
        return found

    def checkpoint_ids(self, workflow_id: str) -> list[str]:
        """Return the ids of a workflow's checkpoints, newest first, without reading them."""
        return [name.checkpoint_id for name in self._newest_first(workflow_id)]

    def validate_checkpoint(self, checkpoint_id: str) -> bool:
        """Return whether a checkpoint is exactly what was written."""
        workflow, name = self._locate(checkpoint_id, None)
        try:
            self._read(workflow, name, verify=True)
        except ChecksumValidationError:
            return False
        return True

    # --- deleting ---

    def delete_checkpoint(self, checkpoint_id: str) -> bool:
        """Delete a checkpoint; False if there is none of that id."""
        try:
            workflow, name = self._locate(checkpoint_id, None)
        except CheckpointNotFoundError:
            return False
        self._folder.delete(workflow, name)
        return True

    def cleanup_expired(self) -> int:
        """Delete what has expired; return how many."""
        now = self._clock.now().timestamp()
        return sum(
            self._folder.keep_newest(workflow, self._max_checkpoints, now)
            for workflow in self._folder.workflows()
        )

    def health_check(self) -> dict[str, Json]:
        """Read every checkpoint and return what was found."""
        damaged, count = [], 0
        for workflow in self._folder.workflows():
            for name in self._folder.names(workflow):
                count += 1
                try:
                    self._read(workflow, name, verify=True)
                except CheckpointError as error:
                    damaged.append(str(error))
        where = "memory" if self.storage_path is None else str(self.storage_path)
        return {
            "healthy": not damaged,
            "storage_path": where,
            "checkpoints": count,
            "damaged": damaged,
        }

    # --- inside ---

    def _locate(self, checkpoint_id: str, workflow_id: str | None) -> tuple[str, CheckpointName]:
        files.check_identifier(checkpoint_id, "checkpoint id")
        workflows = self._folder.workflows() if workflow_id is None else [workflow_id]
        for workflow in workflows:
            for name in reversed(self._folder.names(workflow)):
                if name.checkpoint_id == checkpoint_id:
                    return workflow, name
        of = f" of workflow {workflow_id!r}" if workflow_id else ""
        raise CheckpointNotFoundError(f"there is no checkpoint {checkpoint_id!r}{of}")

    def _read(self, workflow_id: str, name: CheckpointName, *, verify: bool) -> Checkpoint:
        try:
            shown, body = self.read_body(workflow_id, name, verify=verify)
            return self._checkpoint(shown, body, name)
        except DocumentCorruptError as error:
            raise ChecksumValidationError(str(error)) from error

    def _checkpoint(self, shown: str, body: dict[str, Json], name: CheckpointName) -> Checkpoint:
        try:
            written = documents.whole(body["state"])
            state = WorkflowState(
                workflow_id=body["workflow_id"],
                phase=written.get("phase", "") or written.get("state", {}).get("phase", ""),
                step=written.get("step", 0),
                data=self._from_json(written["data"]) if "data" in written else written,
                metadata=StateMetadata.from_json(written.get("metadata", {})),
                created_at=datetime.fromisoformat(written.get("created_at", body["created_at"])),
                checksum=written.get("checksum", ""),
            )
            return Checkpoint(
                checkpoint_id=name.checkpoint_id,
                workflow_id=state.workflow_id,
                version=name.version,
                state=state,
                created_at=datetime.fromisoformat(body["created_at"]),
                expires_at=_moment(name.expires),
            )
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise DocumentCorruptError(shown, f"it is not a workflow's state: {error}") from error

    def _to_json(self, data: object) -> Json:
        if self._serializer is not None:
            return self._serializer.dumps(data)
        written = codec.encode(data, "state.data").data
        return codec.parse(written, "state.data", depth=codec.DOCUMENT_DEPTH)

    def _from_json(self, data: Json) -> Any:
        if self._serializer is not None:
            return self._serializer.loads(data)
        return codec.decode_tree(data, "state.data")

    def _expiry(self, ttl: float | timedelta | None, now: datetime) -> int | None:
        ttl = self._default_ttl if ttl is None else ttl
        if ttl is None:
            return None
        seconds = ttl.total_seconds() if isinstance(ttl, timedelta) else ttl
        if not 0 < seconds < _LONGEST_TTL:
            raise ConfigurationError(
                f"a checkpoint cannot expire after {seconds:g} seconds; give more than 0, or None"
                " for never"
            )
        return math.ceil(now.timestamp() + seconds)  # a part of a second more, and never less


def new_checkpoint_id(clock: Clock, prefix: str = "cp_") -> str:
    """Return an id that sorts by time and is never used twice."""
    return f"{prefix}{clock.now():%Y%m%dT%H%M%S%f}_{secrets.token_hex(3)}"


def automatic_checkpoint_id(clock: Clock) -> str:
    """Return the id of a checkpoint that nobody asked for; retention deletes these first."""
    return new_checkpoint_id(clock, _AUTOMATIC)


def _moment(expires: int | None) -> datetime | None:
    return None if expires is None else datetime.fromtimestamp(expires, UTC)
