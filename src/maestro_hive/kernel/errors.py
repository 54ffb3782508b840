"""Every error this project raises on purpose, as one tree.

MaestroError
├── ConfigurationError           a setting that cannot be used, named
├── InvalidIdentifierError       a name that is not safe as a file name
├── FolderError                  a folder that cannot hold state (read-only, network, not a folder)
├── StorageError                 a read or write did not happen
│   ├── AtomicWriteError         a file was not written; the previous version is intact
│   ├── StoreFailedError         a write failed: reopen the store to continue
│   ├── StoreBusyError           another process blocked the write for too long
│   └── StoreClosedError         used after close, or in a forked child
├── CorruptionError              what was read is not what was written
│   └── DocumentCorruptError     one document, named, with the reason
├── NewerFormatError             written by a newer version; nothing was touched
├── CodecError                   a value that cannot be encoded or decoded, with its path
│   ├── EncodeError
│   └── DecodeError
│       └── UnknownClassError    (``maestro.state.codec``) of a class that is not imported here
├── GraphError                   (``team.graph``) a task graph with errors, all of them listed
├── RunLeasedError               another process holds this lease: host, pid, since when
├── FencedError                  the lease was taken over; the write was refused
├── StaleDocumentError           a document has another version; the write was refused
├── StaleLimitsError             the limits of budgets have changed; the write was refused
├── BudgetRefusedError           a budget has no room for a call now; the write was refused
├── TicketRefusedError           (``engine.tickets``) a ticket or comment was not made
├── TicketUnknownError           (``engine.tickets``) a ticket or comment may have been made
└── ExecutionException           raised by execution (see ``unified_execution.exceptions``)

Facts are attributes; a message states what happened, to which thing, and what to do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from datetime import datetime
    from pathlib import Path


class MaestroError(Exception):
    """The root of every error raised by maestro-hive."""

    def __reduce__(self) -> tuple[object, ...]:
        """Copy the finished error: the arguments it was made from are not stored."""
        return _copied, (type(self), self.args), vars(self) or None


def _copied(kind: type[MaestroError], args: tuple[object, ...]) -> MaestroError:
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
            f"{what} {shown} {reason}; use 1 to 128 characters of A-Z, a-z, 0-9, '-', '_', '.' and ':',"
            " starting with a letter or digit"
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
    """A read or write did not happen."""


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


class StoreFailedError(StorageError):
    """A write failed, so nothing more is accepted until the store is opened again."""

    def __init__(self, path: Path | str, reason: str) -> None:
        super().__init__(
            f"the journal {path} could not be written: {reason}. Nothing after the last"
            " acknowledged record is certain; fix the cause and reopen the store"
        )
        self.path = path
        self.reason = reason


class StoreBusyError(StorageError):
    """Another process blocked the journal for too long."""


class StoreClosedError(StorageError):
    """The store was used after it was closed, or in a process that did not open it."""


class CorruptionError(MaestroError):
    """What was read is not what was written."""


class DocumentCorruptError(CorruptionError):
    """One document is torn, altered or of another kind."""

    def __init__(self, name: str, reason: str, *, moved_to: Path | None = None) -> None:
        moved = f"; moved to {moved_to}" if moved_to else ""
        super().__init__(f"{name} cannot be trusted: {reason}{moved}")
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
    """A value cannot be encoded, or a text cannot be decoded; ``path`` says where."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"{path}: {reason}")
        self.path = path
        self.reason = reason


class EncodeError(CodecError):
    """A value has no exact form in JSON."""


class DecodeError(CodecError):
    """A text is not a value that this project wrote."""


class RunLeasedError(MaestroError):
    """Another process holds the lease: it executes this run."""

    def __init__(
        self,
        run_id: str,
        *,
        host: str,
        pid: int,
        since: datetime,
        way_out: str = "stop that process",
    ) -> None:
        super().__init__(
            f"run {run_id!r} is being executed by process {pid} on {host}"
            f" since {since:%Y-%m-%d %H:%M:%S} UTC; wait for it, or {way_out}"
        )
        self.run_id = run_id
        self.host = host
        self.pid = pid
        self.since = since


class FencedError(MaestroError):
    """The lease was taken over by another process or released; the write was refused."""

    def __init__(self, run_id: str, *, fence: int, current: int) -> None:
        super().__init__(
            f"run {run_id!r} was taken over (this process has fencing number {fence}, the current"
            f" one is {current}); its write was refused. Open the run again to continue"
        )
        self.run_id = run_id
        self.fence = fence
        self.current = current


class StaleDocumentError(MaestroError):
    """A document has another version than expected; the write that depended on it was refused."""

    def __init__(self, namespace: str, key: str, *, expected: int, version: int) -> None:
        super().__init__(
            f"document {namespace}/{key} has version {version}, and {expected} was expected; what"
            " depended on it was not written. Read the document again and decide again"
        )
        self.namespace = namespace
        self.key = key
        self.expected = expected
        #: The version it has; 0 if it does not exist.
        self.version = version


class StaleLimitsError(MaestroError):
    """The limits of budgets are others than expected; the write that depended on them was refused."""

    def __init__(self, *, expected: int, epoch: int) -> None:
        super().__init__(
            f"the limits of budgets have changed (epoch {epoch}, and {expected} was expected); what"
            " depended on them was not written. Read them again and decide again"
        )
        self.expected = expected
        self.epoch = epoch


class BudgetRefusedError(MaestroError):
    """A budget has no room for a call at present; that it starts was not recorded.

    ``alone``: only because a call of unknown size is made under it.
    """

    def __init__(
        self,
        account: str,
        unit: str,
        used: int,
        reserved: int,
        amount: int,
        limit: int,
        *,
        alone: bool = False,
    ) -> None:
        super().__init__(
            f"the budget of {account} has no room for {amount:,} more: {used:,} spent and"
            f" {reserved:,} reserved, of {limit:,} {unit}"
        )
        self.account = account
        self.unit = unit
        self.used = used
        self.reserved = reserved
        self.amount = amount
        self.limit = limit
        self.alone = alone
