"""A run as one JSON document: copies, checkpoints and exports have the same form.

A document has what people read first, then the run's entries since it was last restored, each on a
line of its own and exactly as the journal has it, then the large values that they refer to: whole
ones as JSON, differences to an earlier value as they are stored, so that a document grows like its
run. One document is one run, because its digest is then that of the run.
"""

from __future__ import annotations

import hashlib
import re
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, NamedTuple

from msgspec import UNSET, Meta, Raw, Struct, UnsetType
from msgspec import json as msgspec_json
from msgspec.structs import replace

from maestro_hive.journal import documents
from maestro_hive.journal import entries as kinds
from maestro_hive.journal.state import RunState
from maestro_hive.kernel import files
from maestro_hive.kernel.errors import DocumentCorruptError, StorageError, UnknownRunError

if TYPE_CHECKING:
    from maestro_hive.journal.documents import Sealed
    from maestro_hive.journal.entries import FieldsSet
    from maestro_hive.journal.store import RunRow, Store

    AnyEntry = kinds.Entry
else:
    AnyEntry = kinds.AnyEntry

#: The kind of a document that has a run.
KIND = "run"
#: How a value refers to a payload. A user's dict never looks like it, nor does a part of a text.
_REFERENCE = re.compile(rb'\{"\$":"payload","v":\[(\d+),(\d+),"([0-9a-f]{64})"\]\}')
_MARK = '"$":"payload"'

#: A time with its offset, which is that of UTC.
Moment = Annotated[datetime, Meta(tz=True)]
Digest = Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]


class CopiedValue(Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """A large value: whole, or as the difference to an earlier one."""

    #: The number by which entries refer to it.
    number: kinds.Count
    #: SHA-256 of its whole JSON text.
    sha256: Digest
    #: The JSON itself, if it is whole.
    value: Raw | UnsetType = UNSET
    #: Of a difference, the number of the earlier value.
    base: kinds.Count | None = None
    #: The difference, in base64.
    data: bytes = b""

    def whole(self) -> bytes:
        """Return the text of a whole value."""
        return b"" if isinstance(self.value, UnsetType) else bytes(self.value)


class RunCopy(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A run as of one moment."""

    run_id: str
    workflow: str
    status: str
    parent: str | None = None
    queue: str | None = None
    version: str | None = None
    priority: int = 0
    created_at: Moment
    updated_at: Moment
    saved_at: Moment
    #: The fencing number under which it was saved; of two copies the one with the higher number,
    #: then the higher ``seq``, is newer.
    fence: kinds.Count
    #: The number of the last entry.
    seq: kinds.Count
    steps_completed: kinds.Count = 0
    #: Fields of the run that were set by name, such as its phase.
    fields: dict[str, Raw] = {}
    entries: list[AnyEntry]
    #: The large values that entries refer to.
    payloads: list[CopiedValue] = []


class CopyTooLargeError(StorageError):
    """A run has more than a document may have; the run itself is not affected."""


class RunText(NamedTuple):
    """The text of a run's document, and what tells it from others of the run."""

    run_id: str
    fence: int
    seq: int
    data: bytes


def take_copy(store: Store, row: RunRow, limit: int = files.MAX_FILE_BYTES) -> RunText:
    """Return a run as a document, or raise: the run was purged, is damaged, or too large."""
    return _CopyReader(store, row, limit).read()


class _CopyReader:
    """Reads a run from a journal, and makes the text of its document."""

    def __init__(self, store: Store, row: RunRow, limit: int) -> None:
        self._store, self._row, self._limit = store, row, limit
        self._seq = self._last_payload = self._completed = self._size = 0
        self._fields: dict[str, Raw] = {}
        self._text = bytearray()

    def read(self) -> RunText:
        """Return the document."""
        for seq, text in self._store.texts(self._row.number):
            self._seq = seq
            self._add_entry(text)
        written, self._text = self._text, bytearray()
        self._add_values()
        there = self._store.db.read(self._store.sql["RUN_OF_NUMBER"], self._row.number)
        if not (self._seq and there and there[0][1] == self._row.run_id):  # or it was purged
            raise UnknownRunError(self._row.run_id, self._store.place)
        members = (self._head(), written, b'\n],"payloads":[', self._text, b"\n]")
        sealed = documents.seal(KIND, members)
        self._check_size(len(sealed))
        return RunText(self._row.run_id, self._row.fence, self._seq, sealed)

    def _add_entry(self, text: str) -> None:
        kind = text[9 : text.index('"', 9)]  # after {"kind":"
        if kind == "restored":
            self._text, self._fields, self._completed, self._size = bytearray(), {}, 0, 0
            return
        self._completed += kind == "step_completed"
        if kind == "fields_set":
            found: FieldsSet = kinds.decode(text)
            self._fields.update(found.fields)
        data = text.encode()
        if _MARK in text:
            for number, _, _ in _REFERENCE.findall(data):
                self._last_payload = max(self._last_payload, int(number))
        self._add(data)

    def _add_values(self) -> None:
        for each in self._store.payloads(self._row.number):
            if each.number > self._last_payload:
                break  # of a later entry
            value = CopiedValue(number=each.number, sha256=each.sha256.hex())
            if each.base is None:
                value = replace(value, value=Raw(each.data))
            else:
                value = replace(value, base=each.base, data=each.data)
            self._add(msgspec_json.encode(value))

    def _add(self, data: bytes) -> None:
        self._text += b",\n" if self._text else b"\n"
        self._text += data
        self._size += len(data)
        self._check_size(self._size)

    def _check_size(self, size: int) -> None:
        if size > self._limit:
            raise CopyTooLargeError(
                f"run {self._row.run_id!r} has more than {self._limit >> 20:,} MB, so it has no"
                " new JSON copy; it continues. `maestro backup` copies the whole journal"
            )

    def _head(self) -> bytes:
        row = self._row
        head = RunCopy(
            run_id=row.run_id,
            workflow=row.workflow,
            status=row.status,
            parent=row.parent,
            queue=row.queue,
            version=row.version,
            priority=row.priority,
            created_at=datetime.fromtimestamp(row.created_at, UTC),
            updated_at=datetime.fromtimestamp(row.updated_at, UTC),
            saved_at=datetime.fromtimestamp(self._store.now(), UTC),
            fence=row.fence,
            seq=self._seq,
            steps_completed=self._completed,
            fields=self._fields,
            entries=[],
        )
        return msgspec_json.encode(head)[1:-2]  # without {, ] and }


def run_in(document: Sealed) -> RunCopy:
    """Return the run in a document, after checking that all of it can be used."""
    name = document.name
    if document.kind != KIND:
        raise DocumentCorruptError(name, f"it is a {document.kind} document, not one of a run")
    copy = documents.decoded(document.body, RunCopy, name)
    state_of(copy, name)
    there = {value.number: value for value in copy.payloads}
    for value in copy.payloads:
        if value.base is not None and not (value.base in there and value.base < value.number):
            raise DocumentCorruptError(name, f"value {value.number} builds on one that is missing")
        if value.base is None and hashlib.sha256(value.whole()).hexdigest() != value.sha256:
            raise DocumentCorruptError(name, f"value {value.number} does not match its digest")
    for number, _, digest in _REFERENCE.findall(document.body):
        found = there.get(int(number))
        if found is None or found.sha256 != digest.decode():
            raise DocumentCorruptError(name, f"value {int(number)} of its entries is missing")
    return copy


def state_of(copy: RunCopy, name: str) -> RunState:
    """Return the state of a run that continues from a copy; raise if it cannot be folded."""
    state = RunState()
    try:
        state.add(copy.entries)
    except (KeyError, AttributeError, TypeError, ValueError) as error:
        raise DocumentCorruptError(name, f"its entries do not make a run: {error!r}") from error
    numbers = [entry.seq for entry in copy.entries]
    if not numbers or numbers != list(range(numbers[0], copy.seq + 1)):
        raise DocumentCorruptError(name, "entries are missing")
    if state.started is None or state.started.workflow != copy.workflow:
        raise DocumentCorruptError(name, "it does not begin with the start of its run")
    return state
