"""Every error this project raises on purpose, as one tree.

MaestroError
├── ConfigurationError           a setting that cannot be used, named
├── InvalidIdentifierError       a name that is not safe as a file name
├── FolderError                  a folder that cannot hold state (read-only, network, not a folder)
├── StorageError                 what was asked of the disk did not happen
│   ├── AtomicWriteError         a file was not written; the old one still stands
│   ├── StoreFailedError         a write failed: reopen the store before going on
│   ├── StoreBusyError           another process is in the way, and stayed there
│   └── StoreClosedError         used after close, or in a forked child
├── CorruptionError              what was read is not what was written
│   └── DocumentCorruptError     one document, named, with the reason
├── NewerFormatError             written by a newer version; nothing was touched
├── CodecError                   a value that cannot be kept or read, with its path
│   ├── EncodeError
│   └── DecodeError
│       └── UnknownClassError    (``maestro.state.codec``) of a class that is not imported here
├── RunLeasedError                 another process executes this run: host, pid, since when
├── FencedError                  this process was taken over; its write did not happen
└── ExecutionException           raised by execution (see ``unified_execution.exceptions``)

Facts are attributes; the message says what happened, to which thing, and what to do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from datetime import datetime
    from pathlib import Path


class MaestroError(Exception):
    """The root of every error raised by maestro-hive."""

    def __reduce__(self) -> tuple[object, ...]:
        """Copy the finished error; its arguments are gone, and only they could make it anew."""
        return _remade, (type(self), self.args), vars(self) or None


def _remade(kind: type[MaestroError], args: tuple[object, ...]) -> MaestroError:
    error = kind.__new__(kind)
    error.args = args
    return error


class ConfigurationError(MaestroError, ValueError):
    """A setting cannot be used as given."""


class InvalidIdentifierError(MaestroError, ValueError):
    """A name cannot be used, because it is also a file name and would not be a safe one."""

    def __init__(self, what: str, value: object, reason: str) -> None:
        shown = repr(value)
        if len(shown) > 80:
            shown = shown[:77] + "..."
        super().__init__(
            f"{what} {shown} {reason}; use 1 to 128 letters, digits, '-', '_', '.' or ':',"
            " beginning with a letter or digit"
        )
        self.what = what
        self.value = value
        self.reason = reason


class FolderError(MaestroError, OSError):
    """A folder cannot hold state."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"{path}: {reason}")
        self.path = path
        self.reason = reason


class StorageError(MaestroError):
    """What was asked of the disk did not happen."""


class AtomicWriteError(StorageError):
    """A file was not written, or may not last (``replaced``); whole it is in either case."""

    def __init__(self, path: Path, reason: str, *, replaced: bool = False) -> None:
        super().__init__(
            f"{path} was written, but may not last: {reason}; write it again"
            if replaced
            else f"{path} was not written: {reason}; the previous version, if any, is intact"
        )
        self.path = path
        self.reason = reason
        self.replaced = replaced


class StoreFailedError(StorageError):
    """A write failed, so nothing more is accepted until the store is opened again."""

    def __init__(self, path: Path | str, reason: str) -> None:
        super().__init__(
            f"the journal {path} could not be written: {reason}. Nothing after the last"
            " acknowledged record is certain; mend the cause and reopen the store"
        )
        self.path = path
        self.reason = reason


class StoreBusyError(StorageError):
    """Another process kept the journal for itself for too long."""


class StoreClosedError(StorageError):
    """The store was used after it was closed, or in a process that did not open it."""


class CorruptionError(MaestroError):
    """What was read is not what was written."""


class DocumentCorruptError(CorruptionError):
    """One document is torn, altered or not one of ours."""

    def __init__(self, name: str, reason: str, *, moved_to: Path | None = None) -> None:
        aside = f"; kept aside as {moved_to}" if moved_to else ""
        super().__init__(f"{name} cannot be trusted: {reason}{aside}")
        self.name = name
        self.reason = reason
        self.moved_to = moved_to


class NewerFormatError(MaestroError):
    """Written by a newer version of maestro-hive; nothing was read or changed."""

    def __init__(self, name: str, found: int, known: int) -> None:
        super().__init__(
            f"{name} has format {found}, and this version knows formats up to {known};"
            " install the maestro-hive that wrote it, or a newer one"
        )
        self.name = name
        self.found = found
        self.known = known


class CodecError(MaestroError, ValueError):
    """A value cannot be kept, or a text cannot be read back, and the path says where."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"{path}: {reason}")
        self.path = path
        self.reason = reason


class EncodeError(CodecError):
    """A value has no faithful form in JSON."""


class DecodeError(CodecError):
    """A text is not a value that this project wrote."""


class RunLeasedError(MaestroError):
    """Another process executes this run."""

    def __init__(self, run_id: str, *, host: str, pid: int, since: datetime) -> None:
        super().__init__(
            f"run {run_id!r} is being executed by process {pid} on {host}"
            f" since {since:%Y-%m-%d %H:%M:%S} UTC; wait for it, or stop that process"
        )
        self.run_id = run_id
        self.host = host
        self.pid = pid
        self.since = since


class FencedError(MaestroError):
    """This process was taken over by another while it did not answer; its write did not happen."""

    def __init__(self, run_id: str, *, fence: int, current: int) -> None:
        super().__init__(
            f"run {run_id!r} was taken over (this process holds number {fence}, the current one is"
            f" {current}); what it tried to write was refused. Open the run again to go on"
        )
        self.run_id = run_id
        self.fence = fence
        self.current = current
