"""The audit log: every decision of a policy as one JSON line, chained by hash, anchored in a journal.

A line has its ``number``, the SHA-256 of the line before it (``previous``), and as its last member
``sha256``, the SHA-256 of the line without that member. So no line can be changed, inserted, removed
or moved without the next ones. The journal has number and hash of the last line of each log, its
anchor: that is what a cut at the end, a rewritten log and a deleted one are found by.

A line is written first, and its anchor then, both under the lock of the file. So a process that was
killed leaves at most one line that is not anchored, and never an anchor without its line; the next
one anchors it before it writes its own.
"""

from __future__ import annotations

import hashlib
import json
import re
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from maestro_hive.kernel.appending import AppendedFile
from maestro_hive.kernel.errors import CorruptionError, FolderError, StorageError
from maestro_hive.kernel.files import make_private_folder, write_atomically
from maestro_hive.kernel.redaction import redact_value
from maestro_hive.maestro.state.shared_records import SharedRecords

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from maestro_hive.maestro.state.codec import Json
    from maestro_hive.maestro.state.store import Reader, Store

#: What the log of a state folder is called.
DEFAULT_NAME = "audit.jsonl"
#: What the first line of a log has as the hash of the line before it.
FIRST = "0" * 64
#: For how many seconds another process may hold the lock of a log.
PATIENCE = 30.0
#: How often a log may be replaced by another file while its lock is being taken.
_TRIES = 100
_ENDING = re.compile(rb',"sha256":"([0-9a-f]{64})"\}')
_ENDING_BYTES = len(',"sha256":""}') + 64


@dataclass(frozen=True, slots=True)
class Anchor:
    """The last line of a log that a journal knows: its number, 0 for none, and its hash."""

    number: int = 0
    sha256: str = FIRST


def _anchor(fields: Json) -> Anchor:
    made = Anchor(**fields)
    number: object = made.number
    if not isinstance(number, int) or not re.fullmatch("[0-9a-f]{64}", made.sha256):
        raise ValueError(f"{fields!r} is no anchor")
    return made


#: The anchors of a journal, by the path of their log.
ANCHORS = SharedRecords("$audit", asdict, _anchor)


class Line(NamedTuple):
    """A line whose own hash is right."""

    facts: dict[str, Any]
    number: int
    previous: str
    sha256: str
    #: Whether a journal anchors it.
    anchored: bool


class BadLineError(Exception):
    """A line is not one that was written by an audit log; the message says why."""


def read_line(data: bytes) -> Line:
    """Return what a line says; ``BadLineError`` if it is not as it was written."""
    ending = _ENDING.fullmatch(data[-_ENDING_BYTES:])
    if ending is None:
        raise BadLineError("it does not end with its hash")
    if hashlib.sha256(data[:-_ENDING_BYTES] + b"}").hexdigest().encode() != ending[1]:
        raise BadLineError("it was changed: its hash is another one")
    try:
        facts = json.loads(data)
        number, previous, anchored = facts["number"], facts["previous"], facts["anchored"]
        return Line(facts, int(number), str(previous), facts["sha256"], anchored is True)
    except (ValueError, KeyError, TypeError) as error:
        raise BadLineError("it is no line of an audit log") from error


def make_line(facts: Mapping[str, Any], after: Anchor, *, anchored: bool) -> tuple[bytes, Anchor]:
    """Return the line that follows another one, and the anchor that it needs."""
    number = after.number + 1
    chain = {"number": number, "anchored": anchored, "previous": after.sha256}
    text = json.dumps({**facts, **chain}, ensure_ascii=False, separators=(",", ":"), default=str)
    body = text.encode(errors="backslashreplace")  # half a surrogate pair is escaped as in JSON
    digest = hashlib.sha256(body).hexdigest()
    return body[:-1] + f',"sha256":"{digest}"}}'.encode(), Anchor(number, digest)


def _plain(fact: object) -> object:
    """Return what is written of a fact: a text, where JSON has nothing else for it."""
    return json.loads(json.dumps(fact, default=str))


# --- writing --------------------------------------------------------------------------------------


class AuditLog:
    """One audit log, which any number of processes write to.

    With a ``store`` its last line is anchored there; a store in memory is none.
    """

    def __init__(self, path: str | Path, store: Store | None = None) -> None:
        self.path = Path(path).expanduser().absolute()
        self._store = store if store is not None and store.format else None
        self._key = "" if self._store is None else key_of(self.path, self._store)

    def write(self, facts: Mapping[str, Any]) -> int:
        """Add a line, durably and anchored, and return its number; raise if that fails.

        Secrets are replaced before the line is made: its hash is of what the file has.
        """
        facts = {name: redact_value(_plain(fact)) for name, fact in facts.items()}
        with _locked(self.path) as file:
            tail = file.tail()
            last = self._last(tail.line)
            anchored = self._store is not None
            line, anchor = make_line(facts, last, anchored=anchored)
            try:
                file.append(line, tail.end)
            except StorageError as error:
                raise _unwritable(self.path, error) from error
            if anchored:
                self._set_anchor(anchor)
        return anchor.number

    def _last(self, line: bytes | None) -> Anchor:
        """Return the line that the next one follows; raise unless it is the one that was written."""
        last, anchored = Anchor(), False
        if line is not None:
            try:
                read = read_line(line)
            except BadLineError as error:
                raise self._refused(f"of its last line: {error}") from error
            last, anchored = Anchor(read.number, read.sha256), read.anchored
            follows = Anchor(read.number - 1, read.previous)
        else:
            follows = last
        if self._store is None:
            if anchored:
                raise StorageError(
                    f"the audit log {self.path} is anchored in the journal of a state folder, and what"
                    " runs in memory cannot go on with it; give it another path, or a workflow_id"
                )
            return last
        known = _read_anchor(self._store, self._key)
        if known is None and not anchored:
            self._set_anchor(last)  # before the first line, so that also that one is missed
        elif known is None:
            raise self._refused("another journal anchors it, or this one is a new one")
        elif known == follows and last.number:
            self._set_anchor(last)  # a process was killed between the two
        elif known != last:
            raise self._refused(f"its last line is number {last.number}, and not the anchored one")
        return last

    def _set_anchor(self, anchor: Anchor) -> None:
        assert self._store is not None
        ANCHORS.update(self._store, self._key, lambda _: anchor)

    def _refused(self, reason: str) -> CorruptionError:
        return CorruptionError(
            f"the audit log {self.path} is not as it was written: {reason}. `maestro audit verify"
            f" {self.path}` says more; keep the file as evidence, and to go on use another path"
        )


@contextmanager
def _locked(path: Path, *, shared: bool = False) -> Iterator[AppendedFile]:
    """Give the file of a log under its lock; unless it is ``shared``, it is created if it is missing."""
    for _ in range(_TRIES):
        with _opened(path, create=not shared) as file:
            got = file.share(PATIENCE) if shared else file.acquire(PATIENCE)
            if not got:
                reason = f"another process has had its lock for {PATIENCE:g} seconds"
                raise StorageError(f"the audit log {path} cannot be used: {reason}")
            if file.is_in_place():
                yield file
                return
    raise StorageError(f"the audit log {path} is replaced again and again")


def _opened(path: Path, *, create: bool) -> AppendedFile:
    if not create:
        return AppendedFile(path, create=False)
    try:
        make_private_folder(path.parent)
        return AppendedFile(path)
    except FolderError as error:
        raise _unwritable(path, error) from error


def _unwritable(path: Path, error: Exception) -> StorageError:
    return StorageError(f"the audit log {path} cannot be written: {error}")


# --- anchors --------------------------------------------------------------------------------------


def key_of(path: Path, reader: Reader) -> str:
    """Return the name under which a journal anchors a log: inside its folder, relative to that."""
    folder = Path(reader.location).absolute()
    for given in (path, path.parent.resolve() / path.name):
        for root in (folder, folder.resolve()):
            if given.is_relative_to(root):
                return given.relative_to(root).as_posix()
    return str(path.parent.resolve() / path.name)


def _read_anchor(reader: Reader, key: str) -> Anchor | None:
    found = reader.document(ANCHORS.namespace, key)
    return None if found is None else ANCHORS.decode(found.value, key)


def anchored_logs(reader: Reader, folder: Path) -> list[Path]:
    """Return the paths of the logs that the journal in a folder anchors."""
    return [folder / key for key in ANCHORS.all(reader)]  # an absolute one stays as it is


# --- reading --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditReport:
    """What came of verifying a log: how many lines are right, and the first that is not."""

    path: Path
    lines: int
    #: The number of the last line that the journal knows; None without a journal that does.
    anchored: int | None
    bad_line: int | None = None
    problem: str | None = None
    notes: tuple[str, ...] = ()

    @property
    def is_intact(self) -> bool:
        """Whether nothing was found."""
        return self.problem is None


def verify(path: Path, reader: Reader | None = None) -> AuditReport:
    """Return whether a log is as it was written; with the journal, also whether it is complete."""
    key = None if reader is None else key_of(path.expanduser().absolute(), reader)
    if not path.exists() and not path.is_symlink():
        anchor = None if reader is None or key is None else _read_anchor(reader, key)
        return _missing(path, anchor)
    with _locked(path, shared=True) as file:
        # Under the lock: no process is between a line and its anchor.
        anchor = None if reader is None or key is None else _read_anchor(reader, key)
        return _Verification(path, anchor).run(file)


def _missing(path: Path, anchor: Anchor | None) -> AuditReport:
    if anchor is None or not anchor.number:
        raise StorageError(f"there is no audit log {path}")
    problem = f"the file was deleted: the journal knows {anchor.number} lines of it"
    return AuditReport(path=path, lines=0, anchored=anchor.number, bad_line=1, problem=problem)


class _Verification:
    def __init__(self, path: Path, anchor: Anchor | None) -> None:
        self._path = path
        self._anchor = anchor
        self._last = Anchor()
        self._was_anchored = False

    def run(self, file: AppendedFile) -> AuditReport:
        for data, is_whole in file.lines():
            if not is_whole:
                return self._unfinished()
            problem = self._problem(data)
            if problem is not None:
                return self._bad(problem)
        return self._complete()

    def _problem(self, data: bytes) -> str | None:
        """Return what is wrong with the next line, if anything."""
        try:
            line = read_line(data)
        except BadLineError as error:
            return str(error)
        number = self._last.number + 1
        if line.number != number:
            return f"it has the number {line.number}: lines were removed, inserted or moved"
        if line.previous != self._last.sha256:
            return "it follows another line than the one before it"
        anchor = self._anchor
        if anchor is not None and number == anchor.number and line.sha256 != anchor.sha256:
            return "it is not the line that the journal knows: it, or one before it, was rewritten"
        if anchor is not None and number > anchor.number + 1:
            return f"it was added by something else: the journal knows {anchor.number} lines"
        self._last, self._was_anchored = Anchor(line.number, line.sha256), line.anchored
        return None

    def _unfinished(self) -> AuditReport:
        if self._anchor is not None and self._last.number != self._anchor.number:
            return self._bad("it has no end")
        return self._complete("a line after the last one was cut off when a process was killed")

    def _complete(self, *notes: str) -> AuditReport:
        anchor, last = self._anchor, self._last
        if anchor is None:
            if self._was_anchored:
                why = (
                    "a journal anchors it, and this one does not; give its state folder by --store"
                )
                return self._bad(why)
            text = "it has no anchor in a journal, so lines cut off at its end would not be missed"
            return self._report(*notes, text)
        if last.number < anchor.number:
            return self._bad(f"it is missing: the journal knows {anchor.number} lines")
        if last.number > anchor.number:
            notes = (*notes, "its last line is not anchored yet: a process was killed just then")
        return self._report(*notes)

    def _bad(self, problem: str) -> AuditReport:
        """Return that the next line is wrong, or is missing."""
        return self._report(bad_line=self._last.number + 1, problem=problem)

    def _report(
        self, *notes: str, bad_line: int | None = None, problem: str | None = None
    ) -> AuditReport:
        return AuditReport(
            path=self._path,
            lines=self._last.number,
            anchored=None if self._anchor is None else self._anchor.number,
            bad_line=bad_line,
            problem=problem,
            notes=notes,
        )


def copy_log(source: Path, target: Path, lines: int) -> None:
    """Copy so many lines of a log: as many as a copy of the journal knows."""
    with _locked(source, shared=True) as file:
        copied = islice(file.lines(), lines)
        write_atomically(target, (line + b"\n" * is_whole for line, is_whole in copied))


def entries(path: Path) -> Iterator[dict[str, Any]]:
    """Yield what the lines of a log say, as far as they are JSON objects; verified or not."""
    if not path.exists() and not path.is_symlink():
        raise StorageError(f"there is no audit log {path}; `maestro audit verify` says what it had")
    with _locked(path.expanduser().absolute(), shared=True) as file:
        for data, _ in file.lines():
            try:
                facts = json.loads(data)
            except ValueError:
                continue
            if isinstance(facts, dict):
                yield facts
