"""The errors that maestro-hive raises on purpose, as one tree.

MaestroError
├── ConfigurationError           a setting or call that cannot be used as given, named
│   ├── AlreadyAnsweredError     a question has its answer, and takes no other
│   └── RunMismatchError         a run belongs to another workflow, or to other arguments
├── InvalidIdentifierError       a name that is not safe as a file name
├── FolderError                  a folder that cannot hold state (read-only, network, not a folder)
├── StorageError                 a read or write failed
│   ├── AtomicWriteError         a file was not written; the previous version is intact
│   ├── StoreFailedError         a write failed: reopen the store to continue
│   ├── StoreUnreachable         the database server does not answer
│   └── StoreClosedError         used after close, or in a forked child
├── CorruptionError              the bytes read are not the bytes written
│   ├── DocumentCorruptError     one document, named, with the reason
│   └── ValueCorruptError        one large value of a run, with its number and the reason
├── FormatError                  written in another format; nothing was touched
├── RefusedError                 the store refused one append; nothing of it was written
│   ├── FencedError              another process has taken the run over
│   ├── StaleDocumentError       a document has another version than the one that was read
│   └── NoRoomError              an account has no room for a claim
├── RunLeasedError               another process executes the run: host, pid, since when
├── CodecError                   a value that cannot be encoded or decoded, with its path
│   ├── EncodeError              it has no exact form in JSON
│   └── DecodeError              the text is not one that maestro-hive wrote
│       └── UnknownClassError    its class is not imported in this process
├── RecordedError                stands for a recorded exception that cannot be made again
├── RunFailedError               the workflow raised; the run stays failed until it is retried
├── RunCancelledError            the run was cancelled, and stays so until it is retried
├── RunInterruptedError          processes died in the run too often; it waits for a retry
├── RunInactiveError             a run has not ended, and no process executes it
├── UnknownRunError              no run has that id
└── OutsideRunError              a call that only a workflow or a step can make, or none of them

Facts are attributes; a message states what happened, to which thing, and what to do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

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


class StoreFailedError(StorageError):
    """A write failed, so nothing more is accepted until the store is opened again."""


class StoreUnreachable(StorageError):  # noqa: N818 - a state of the network, not a fault of a call
    """The database server does not answer; ``outcome_unknown``: a commit may have succeeded."""

    def __init__(self, reason: str, *, outcome_unknown: bool = False) -> None:
        unknown = "; the last write may have succeeded" if outcome_unknown else ""
        super().__init__(f"the database server does not answer: {reason}{unknown}")
        self.reason = reason
        self.outcome_unknown = outcome_unknown


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


class FormatError(MaestroError):
    """Written in another format than the one that this version reads; nothing was touched."""

    def __init__(self, name: str, found: object, known: int) -> None:
        super().__init__(
            f"{name} has format {found}, and this version reads format {known};"
            " use the maestro-hive that wrote it"
        )
        self.name = name
        self.found = found
        self.known = known


class RefusedError(MaestroError):
    """The store refused one append; nothing of it was written."""


class FencedError(RefusedError):
    """Another process has taken the run over, or it was released; the append was refused."""

    def __init__(self, run_id: str, fence: int) -> None:
        super().__init__(
            f"run {run_id!r} was taken over by another process (fencing number {fence} is old);"
            " the append was refused. Start the run again to continue it"
        )
        self.run_id = run_id
        self.fence = fence


class StaleDocumentError(RefusedError):
    """A document has another version than the one that was read."""

    def __init__(self, namespace: str, key: str) -> None:
        super().__init__(f"{namespace} {key!r} was changed by another process; read it again")
        self.namespace = namespace
        self.key = key


class NoRoomError(RefusedError):
    """An account has no room for a claim; ``used`` does not come back, ``held`` does."""

    def __init__(self, account: str, *, used: int, held: int, most: int, wanted: int) -> None:
        super().__init__(
            f"{account} has no room for {wanted:,}: {used:,} used and {held:,} held of {most:,}"
        )
        self.account = account
        self.used = used
        self.held = held
        self.most = most
        self.wanted = wanted


class RunLeasedError(MaestroError):
    """Another process executes the run."""

    def __init__(self, run_id: str, holder: str) -> None:
        super().__init__(
            f"run {run_id!r} is being executed by {holder}; wait for it, or stop that process"
        )
        self.run_id = run_id
        self.holder = holder


class ValueCorruptError(CorruptionError):
    """A large value of a run is damaged, or a value that it builds on is."""

    def __init__(self, number: int, reason: str) -> None:
        super().__init__(f"value {number} of the run cannot be trusted: {reason}")
        self.number = number
        self.reason = reason


class CodecError(MaestroError, ValueError):
    """A value cannot be encoded, or a text cannot be decoded; ``path`` names the place."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"{path}: {reason}")
        self.path = path
        self.reason = reason


class EncodeError(CodecError):
    """A value has no exact form in JSON."""


class DecodeError(CodecError):
    """A text is not a value that maestro-hive wrote."""


class UnknownClassError(DecodeError):
    """A value is whole, but its class is not in this process: the program that stored it has it."""


class RecordedError(MaestroError):
    """Stands for an exception that cannot be made again; ``reason`` names the cause.

    ``type_name`` is the class of the exception, ``message`` its text. The notes and the causes are
    those of the exception. A workflow gets it before a restart too, so that all lives see the same.
    """

    def __init__(self, type_name: str, message: str, reason: str) -> None:
        super().__init__(f"{type_name}: {message}" if message else type_name)
        self.type_name = type_name
        self.message = message
        self.reason = reason


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


class RunInterruptedError(MaestroError):
    """Processes died in the run, or in one of its steps, too often; it waits for a retry."""

    def __init__(self, run_id: str, where: str, deaths: int) -> None:
        super().__init__(
            f"{deaths} processes died in {where} of run {run_id!r}; when the reason is known,"
            f" retry it with `maestro retry {run_id}` or hive.retry({run_id!r})"
        )
        self.run_id = run_id
        self.where = where
        self.deaths = deaths


class RunInactiveError(MaestroError):
    """A run has not ended, and no process executes it, so its result would never come."""

    def __init__(self, run_id: str) -> None:
        super().__init__(
            f"run {run_id!r} has not ended, and no process executes it;"
            f" resume it with `await hive.resume({run_id!r})`"
        )
        self.run_id = run_id


class AlreadyAnsweredError(ConfigurationError):
    """A question of a run has its answer, ``value`` by ``by``, and takes no other."""

    def __init__(
        self, run_id: str, name: str, question: str | None, value: Any, by: str = ""
    ) -> None:
        shown = repr(value)
        if len(shown) > _LONGEST_SHOWN:
            shown = f"{shown[:_LONGEST_SHOWN]}…"
        whose = f" by {by}" if by else ""
        what = (
            f"an early one waits for it{whose}, with {shown}"
            if question is None
            else f"question {question} was answered{whose}, with {shown}"
        )
        super().__init__(f"run {run_id!r} has its answer to {name!r} already: {what}")
        self.run_id = run_id
        self.name = name
        self.question = question
        self.value = value
        self.by = by


class OutsideRunError(ConfigurationError):
    """A call that only a workflow or a step can make, or that a workflow cannot make."""
