"""The errors that maestro-hive raises on purpose, as one tree.

MaestroError
├── ConfigurationError           a setting or call that cannot be used as given, named
│   └── RunMismatchError         a run belongs to another workflow, or to other arguments
├── InvalidIdentifierError       a name that is not safe as a file name
├── FolderError                  a folder that cannot hold state (read-only, network, not a folder)
├── StorageError                 a read or write failed
│   ├── AtomicWriteError         a file was not written; the previous version is intact
│   └── StoreClosedError         used after close, or in a forked child
├── CorruptionError              the bytes read are not the bytes written
│   └── DocumentCorruptError     one document, named, with the reason
├── RunFailedError               the workflow raised; the run stays failed until it is retried
├── RunCancelledError            the run was cancelled, and stays so until it is retried
└── UnknownRunError              no run has that id

Facts are attributes; a message states what happened, to which thing, and what to do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

#: Longer values are cut in messages.
_LONGEST_SHOWN = 80


class MaestroError(Exception):
    """The root of every error raised by maestro-hive."""

    def __reduce__(self) -> tuple[object, ...]:
        """Copy the finished error: its constructor's arguments are not stored."""
        return _copy, (type(self), self.args), vars(self) or None


def _copy(kind: type[MaestroError], args: tuple[object, ...]) -> MaestroError:
    error = kind.__new__(kind)
    error.args = args
    return error


class ConfigurationError(MaestroError, ValueError):
    """A setting or an argument cannot be used as given."""


class RunMismatchError(ConfigurationError):
    """A run was started with another workflow or other arguments than it is now called with."""


class InvalidIdentifierError(MaestroError, ValueError):
    """A name cannot be used, because it is also a file name and would not be a safe one."""

    def __init__(self, what: str, value: object, reason: str) -> None:
        shown = repr(value)
        if len(shown) > _LONGEST_SHOWN:
            shown = shown[: _LONGEST_SHOWN - 3] + "..."
        super().__init__(
            f"{what} {shown} {reason}; use 1 to 128 characters of A-Z, a-z, 0-9, '-', '_', '.' and"
            " ':', starting with a letter or digit"
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
    """A read or write failed."""


class AtomicWriteError(StorageError):
    """A file was not written, or may not be durable (``replaced``); it is never half-written."""

    def __init__(self, path: Path, reason: str, *, replaced: bool = False) -> None:
        super().__init__(
            f"{path} was written, but may not be durable: {reason}; write it again"
            if replaced
            else f"{path} was not written: {reason}; the previous version, if any, is intact"
        )
        self.path = path
        self.reason = reason
        self.replaced = replaced


class StoreClosedError(StorageError):
    """A store or lock was used after it was closed, or in a process that did not open it."""


class CorruptionError(MaestroError):
    """The bytes read are not the bytes written."""


class DocumentCorruptError(CorruptionError):
    """One document is torn, altered or of another kind."""

    def __init__(self, name: str, reason: str, *, moved_to: Path | None = None) -> None:
        moved = f"; moved to {moved_to}" if moved_to else ""
        super().__init__(f"{name} cannot be trusted: {reason}{moved}")
        self.name = name
        self.reason = reason
        self.moved_to = moved_to


class RunFailedError(MaestroError):
    """A run failed; ``__cause__`` is the error that its workflow raised, as it is recorded."""

    def __init__(
        self, run_id: str, *, error_type: str, error_message: str, error_traceback: str = ""
    ) -> None:
        super().__init__(
            f"run {run_id!r} failed: {error_type}: {error_message}; fix the cause, then retry it"
            f" with `maestro retry {run_id}` or hive.retry({run_id!r})"
        )
        self.run_id = run_id
        self.error_type = error_type
        self.error_message = error_message
        self.error_traceback = error_traceback


class RunCancelledError(MaestroError):
    """A run was cancelled, and stays so until it is retried."""

    def __init__(self, run_id: str, reason: str = "") -> None:
        because = f" ({reason})" if reason else ""
        super().__init__(
            f"run {run_id!r} was cancelled{because}; to resume it anyway, retry it with"
            f" `maestro retry {run_id}` or hive.retry({run_id!r})"
        )
        self.run_id = run_id
        self.reason = reason


class UnknownRunError(MaestroError):
    """No run has that id."""

    def __init__(self, run_id: str, location: str) -> None:
        super().__init__(f"{location} has no run {run_id!r}; `maestro status` lists its runs")
        self.run_id = run_id
        self.location = location
