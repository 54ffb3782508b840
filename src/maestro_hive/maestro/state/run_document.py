"""A JSON document with a SHA-256, and a whole run as such a document.

The text is ``{"document":{…},"sha256":"…"}`` and a line feed; the digest is that of the bytes of
``{…}`` exactly as they stand. So any change to any byte is found, and a file can be checked with a
JSON parser and a hash function (docs/storage-format.md shows how).

Documents are written and read in portions: a run with gigabytes of results needs little memory, and a
thread that writes one never holds the interpreter for long. One limit holds for both, so what was
written can be read.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import InitVar, dataclass, field
from typing import TYPE_CHECKING, NamedTuple, cast, overload

from maestro_hive.kernel.errors import (
    CorruptionError,
    DecodeError,
    DocumentCorruptError,
    NewerFormatError,
    StorageError,
)
from maestro_hive.maestro.state import codec, deltas, entry_rules
from maestro_hive.maestro.state.budgets import RunBudget
from maestro_hive.maestro.state.codec_large import encode_large, is_large
from maestro_hive.maestro.state.json_stream import (
    BytesSource,
    JsonStream,
    StreamedItems,
    StreamedMembers,
)
from maestro_hive.maestro.state.projections import FIELDS, RunState, facts_of, labels
from maestro_hive.maestro.state.records import Entry, EntryKind, NewEntry
from maestro_hive.maestro.state.strict_json import DOCUMENT_DEPTH, AtPathError
from maestro_hive.maestro.state.views import plain_values, run_status, show_fields, step_facts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from maestro_hive.maestro.state.codec import Json
    from maestro_hive.maestro.state.json_stream import Source
    from maestro_hive.maestro.state.store import Reader

#: The format of the documents this version writes, and the newest it reads.
DOCUMENT_FORMAT = 1

#: A larger document is neither written nor read.
MAX_DOCUMENT_BYTES = 16 << 30

#: The kinds of documents that have a run, and the member that it is.
RUN_MEMBERS = {"execution_state": "run", "checkpoint": "state"}

_HEAD = b'{"document":'
_MIDDLE = b',"sha256":"'
_TAIL = b'"}\n'
_DIGEST_LENGTH = 64
_END_LENGTH = len(_MIDDLE) + _DIGEST_LENGTH + len(_TAIL)
#: How many bytes are hashed at a time.
_HASHED_BYTES = 1 << 20

#: How many entries are encoded at a time.
_CHUNK_ITEMS = 500

#: What reading a document of the wrong content may raise.
_WRONG = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)


def seal(
    kind: str, body: dict[str, Json], raw: Mapping[str, bytes | Iterable[bytes]] | None = None
) -> bytes:
    """Return the text of a document with these members; ``raw`` ones are JSON text already.

    It is also read as a whole, unless it is a run.
    """
    text = b"".join(seal_in_chunks(kind, body, raw))
    if len(text) > codec.MAX_BYTES:
        raise StorageError(
            f"a {kind} document would have {len(text):,} bytes, and no more than"
            f" {codec.MAX_BYTES:,} are read into memory; store less in it"
        )
    return text


def seal_in_chunks(
    kind: str, body: dict[str, Json], raw: Mapping[str, bytes | Iterable[bytes]] | None = None
) -> Iterator[bytes]:
    """Yield the text of a document piece by piece; raise an error if it gets too large to be read."""
    texts: dict[str, bytes | Iterable[bytes]] = {
        name: codec.dump(value) for name, value in body.items()
    }
    texts |= raw or {}
    texts["format"] = b"%d" % DOCUMENT_FORMAT
    texts["kind"] = codec.dump_canonical(kind)
    digest, left = hashlib.sha256(), MAX_DOCUMENT_BYTES - len(_HEAD) - _END_LENGTH
    yield _HEAD
    for chunk in _members(texts):
        digest.update(chunk)
        left -= len(chunk)
        if left < 0:
            raise StorageError(
                f"a document would have more than {MAX_DOCUMENT_BYTES:,} bytes, and could not be"
                " read again; the journal has everything: 'maestro backup' copies it"
            )
        yield chunk
    yield _MIDDLE + digest.hexdigest().encode() + _TAIL


def _members(texts: Mapping[str, bytes | Iterable[bytes]]) -> Iterator[bytes]:
    before = b"{"
    for name in sorted(texts):
        yield before + codec.dump_canonical(name) + b":"
        text = texts[name]
        yield from (text,) if isinstance(text, bytes) else text
        before = b","
    yield b"}" if texts else b"{}"


def unseal(
    text: bytes | Source, kind: str, name: str, *, verify: bool = True, lazy: bool = False
) -> dict[str, Json]:
    """Return the members of a document, or raise an error that says what is wrong with it.

    ``verify=False`` leaves the digest unchecked; everything else is checked. With ``lazy``, the entries
    and values of a run are read from the source when they are asked for (see ``whole``).
    """
    source = BytesSource(text, name) if isinstance(text, bytes) else text
    if source.size > MAX_DOCUMENT_BYTES:
        raise DocumentCorruptError(name, _too_large(source.size))
    start, end = _content(source, name, verify=verify)
    try:
        if lazy:
            body = _streamed(source, start, end, RUN_MEMBERS.get(kind))
        else:
            body = codec.parse(source.read_at(start, end - start), name, depth=DOCUMENT_DEPTH)
    except DecodeError as error:
        raise DocumentCorruptError(name, error.reason) from error
    return _check_members(body, kind, name)


def _too_large(size: int) -> str:
    return f"it has {size:,} bytes, and the limit is {MAX_DOCUMENT_BYTES:,}"


def _content(source: Source, name: str, *, verify: bool) -> tuple[int, int]:
    """Return where the content of a document starts and ends, which has the digest behind it."""
    start, end = len(_HEAD), source.size - _END_LENGTH
    tail = source.read_at(end, _END_LENGTH) if end > start else b""
    head = source.read_at(0, start) if tail else b""
    if head != _HEAD or not tail.startswith(_MIDDLE) or not tail.endswith(_TAIL):
        raise DocumentCorruptError(name, "it is torn, or not a document of maestro-hive")
    if verify:
        digest = hashlib.sha256()
        for at in range(start, end, _HASHED_BYTES):
            digest.update(source.read_at(at, min(_HASHED_BYTES, end - at)))
        if digest.hexdigest().encode() != tail[len(_MIDDLE) : -len(_TAIL)]:
            raise DocumentCorruptError(name, "its SHA-256 does not match: it was altered")
    return start, end


def _streamed(source: Source, start: int, end: int, run: str | None) -> Json:
    """Return the content of a document, of whose run the entries and values are in the source."""
    stream = JsonStream(source, start, end)
    if stream.peek() != "{":
        return None
    body: dict[str, Json] = {}
    for name in stream.members():
        is_run = name == run and stream.peek() == "{"
        body[name] = _streamed_run(source, stream, end) if is_run else stream.value()
    stream.finish()
    return body


def _streamed_run(source: Source, stream: JsonStream, end: int) -> dict[str, Json]:
    run: dict[str, Json] = {}
    for name in stream.members():
        match name, stream.peek():
            case "entries", "[":
                run[name] = StreamedItems(source, stream, end)
            case "values", "{":
                run[name] = StreamedMembers(source, stream)
            case _:
                run[name] = stream.value()
    return run


def whole(run: Json) -> Json:
    """Return the run of a document with everything in memory."""
    if not isinstance(run, dict):
        return run
    found = dict(run)
    for name, value in run.items():
        if isinstance(value, StreamedItems):
            found[name] = list(value)
        elif isinstance(value, StreamedMembers):
            found[name] = dict(value)
    return found


def _check_members(body: Json, kind: str, name: str) -> dict[str, Json]:
    if not isinstance(body, dict):
        raise DocumentCorruptError(name, "it is not an object")
    found = body.pop("format", None)
    if type(found) is not int or found < 1:
        raise DocumentCorruptError(name, f"its format number is {str(found)[:40]!r}")
    if found > DOCUMENT_FORMAT:
        raise NewerFormatError(name, found, DOCUMENT_FORMAT)
    if body.pop("kind", None) != kind:
        raise DocumentCorruptError(name, f"it is not a {kind} document")
    return cast("dict[str, Json]", body)


# --- runs ---


_NAMES = {kind.value: kind.name.lower() for kind in EntryKind}


class CopiedValues:
    """The large values of a copy, by their digests; each is put together when it is asked for."""

    def __init__(self, values: Mapping[str, Json]) -> None:
        self._values = values
        self._last: tuple[str, bytes] = ("", b"")

    def __contains__(self, digest: object) -> bool:
        return digest in self._values

    def load(self, digest: str) -> bytes:
        """Return a value; the last one made is in memory, and usually the base."""
        at = digest
        pieces: deltas.Pieces | None = None
        for _ in range(len(self._values) + 1):
            stored = {} if at == self._last[0] else self._values[at]
            if at == self._last[0] or "whole" in stored:
                base = self._last[1] if at == self._last[0] else codec.dump(stored["whole"])
                data = base if pieces is None else pieces.finish(base)
                self._last = (digest, data)
                return data
            instructions = deltas.from_json(stored["pieces"])
            pieces = pieces or deltas.Pieces(deltas.size(instructions))
            pieces.apply(instructions)
            at = stored["base"]
        raise ValueError(f"value {digest} builds on itself")


class RunCopy(NamedTuple):
    """A run read from a document, and checked: its source, its members, and what listings show."""

    source: str
    run_id: str
    saved_at: str
    fence: int
    seq: int
    entries: list[Json] | StreamedItems
    values: CopiedValues
    workflow: str = ""
    status: str = ""
    parent: str | None = None
    #: None of versions that had no budgets, and of a run that has spent nothing and has no limit.
    budget: RunBudget | None = None

    def load(self, entry: Entry) -> bytes | None:
        """Return the value of an entry as ``fold_copy`` makes it."""
        if entry.payload is None or entry.sha256 is None:
            return entry.value
        return self.values.load(entry.sha256.hex())

    def corrupt(self, at: int, problem: str) -> DocumentCorruptError:
        """Return the error for one of its entries, from 0 on."""
        return DocumentCorruptError(self.source, f"run.entries[{at}]{problem}")


def _encoded_field(name: str, value: object) -> bytes:
    # A long one in pieces, so that other threads need not wait.
    encode = encode_large if is_large(value) else codec.encode
    return encode(value, f"state.{name}", depth=codec.WHOLE_DEPTH).data


@dataclass(slots=True, eq=False)
class RunText(Iterable[bytes]):
    """A run as JSON text, in chunks; it may be iterated more than once.

    It has the entries over ``after`` and up to ``seq``, and ``fields``, what people read first. The
    run's lease is not needed: entries are only ever added, so what these refer to is still there,
    unless the run is purged. Entries are read a few at a time, so a long run takes no more memory than
    a short one, and no other thread waits for long.
    """

    store: Reader
    run: int
    name: str
    after: int
    seq: int
    fields: InitVar[dict[str, object]]
    saved_at: str
    fence: int
    budget: RunBudget | None = None
    state: dict[str, bytes] = field(init=False)

    def __post_init__(self, fields: dict[str, object]) -> None:
        # Now, because they may change later.
        self.state = {name: _encoded_field(name, value) for name, value in fields.items()}

    def __iter__(self) -> Iterator[bytes]:
        """Yield the text piece by piece; raise an error if the run was purged meanwhile."""
        missing: set[bytes] = set()
        if self.budget is None:
            yield b'{"entries":['
        else:
            yield b'{"budget":%s,"entries":[' % codec.dump_canonical(self.budget.to_json())
        yield from self._entry_chunks(missing)
        yield b'],"fence":%d,"saved_at":"%s","seq":%d,"state":' % (
            self.fence,
            self.saved_at.encode(),
            self.seq,
        )
        yield from _members(self.state)
        yield b',"values":{'
        before = b'"'
        for value in self.store.values_of(self.run):
            missing.discard(value.sha256)
            yield before + value.sha256.hex().encode() + b'":'
            yield _value_text(value.base, value.data)
            before = b',"'
        if missing:
            raise self._purged()
        yield b'},"workflow_id":"%s"}' % self.name.encode()

    def _entry_chunks(self, missing: set[bytes]) -> Iterator[bytes]:
        """Yield the text of the entries; ``missing`` gets the digests of values stored elsewhere."""
        before = b""
        for entries in self._portions():
            missing.update(
                each.sha256 for each in entries if each.payload is not None and each.sha256
            )
            yield before + b",".join(map(_entry_text, entries))
            before = b","

    def entries(self) -> Iterator[Entry]:
        """Yield the entries; raise an error if the run was purged meanwhile."""
        for entries in self._portions():
            yield from entries

    def _portions(self) -> Iterator[Sequence[Entry]]:
        for start in range(self.after, self.seq, _CHUNK_ITEMS):
            end = min(start + _CHUNK_ITEMS, self.seq)
            entries = self.store.entries(self.run, start, end)
            if len(entries) < end - start:
                raise self._purged()
            yield entries

    def _purged(self) -> StorageError:
        return StorageError(
            f"run {self.name!r} was purged while it was copied; nothing was written"
        )


def _entry_text(entry: Entry) -> bytes:
    # Written by hand, because facts and value are JSON already.
    value = b',"value":%s' % entry.value if entry.value is not None else b""
    return (
        b'{"at":%d,"attempt":%d,"facts":%s,"identity":%s,"kind":"%s","seq":%d,"sha256":%s,'
        b'"step":%d%s}'
    ) % (
        entry.at,
        entry.attempt,
        entry.facts or b"null",
        _hex(entry.identity),
        _NAMES[entry.kind].encode(),
        entry.seq,
        _hex(entry.sha256),
        entry.step,
        value,
    )


def _hex(data: bytes | None) -> bytes:
    return b"null" if data is None else b'"%s"' % data.hex().encode()


def _value_text(base: bytes | None, data: bytes) -> bytes:
    if base is None:
        return b'{"whole":%s}' % data
    return b'{"base":"%s","pieces":%s}' % (base.hex().encode(), data)


def read_run(source: str, body: dict[str, Json], *, plain: bool = False) -> RunCopy:
    """Return the run of a document, checked: everything that readers of a journal rely on is there.

    With ``plain``, the classes of its values may be unknown here.
    """
    try:
        _RUN(body)
    except AtPathError as error:
        raise DocumentCorruptError(source, f"run{error.where()} {error.reason}") from error
    copy = RunCopy(
        source,
        body["workflow_id"],
        body["saved_at"],
        body["fence"],
        body["seq"],
        body["entries"],
        CopiedValues(body["values"]),
    )
    state = _check_run(copy, plain_values(copy.load) if plain else copy.load)
    started = {} if state.started is None else facts_of(state.started)
    return copy._replace(
        workflow=str(started.get("workflow", "")),
        status=_status(state, body.get("state", {})),
        parent=started.get("parent"),
        budget=RunBudget.from_json(body["budget"]) if "budget" in body else None,
    )


def _listed(value: Json) -> None:
    if not isinstance(value, list | StreamedItems):
        raise AtPathError("is not a list")


def _named(value: Json) -> None:
    if not isinstance(value, dict | StreamedMembers):
        raise AtPathError("is not an object")


_AMOUNT = entry_rules.whole()
_BUDGET = entry_rules.members(
    {
        "limit": entry_rules.some(
            entry_rules.members(
                {
                    "tokens": entry_rules.some(_AMOUNT),
                    "usd": entry_rules.some(_AMOUNT),
                    "declared": entry_rules.some(entry_rules.text),
                }
            )
        ),
        **dict.fromkeys(("tokens", "usd", "cached", "calls"), _AMOUNT),
    }
)
_RUN = entry_rules.members(
    {
        "workflow_id": entry_rules.text,
        "saved_at": entry_rules.text,
        "fence": entry_rules.count,
        "seq": entry_rules.count,
        "entries": _listed,
        "values": _named,
    },
    {"state": entry_rules.members({}, {"status": entry_rules.text}), "budget": _BUDGET},
)


#: The statuses of a workflow's run that has not ended; pending is one that was retried.
_OPEN = ("pending", "running", "waiting")


def _status(state: RunState, shown: dict[str, Json]) -> str:
    """Return the status for listings; what people read first counts where nothing contradicts it."""
    given = str(shown.get("status", state.status))
    if state.started is None:
        return given
    return given if state.ended is None and given in _OPEN else run_status(state)


def fold_copy(copy: RunCopy, load: Callable[[Entry], bytes | None]) -> RunState:
    """Return the folded state of a copy, whose values ``load`` returns.

    Large values are not in it: ``RunCopy.load`` reads them again.
    """
    state = RunState()
    for seq, new in enumerate(CopiedEntries(copy), start=1):
        data, sha256 = new.value or (None, None)
        payload = 1 if sha256 is not None and sha256.hex() in copy.values else None
        own = (None if payload else data, payload, sha256, new.identity)
        entry = Entry(seq, new.kind, new.step, new.attempt, new.at or 0, new.facts, *own)
        try:
            _check_value(entry, load)
            state.add_all([entry], load)
        except AtPathError as error:
            raise copy.corrupt(seq - 2, f"{error.where()} {error.reason}") from error
        except (CorruptionError, *_WRONG) as error:
            raise copy.corrupt(seq - 2, f": {type(error).__name__} {error}") from error
    return state


def _check_value(entry: Entry, load: Callable[[Entry], bytes | None]) -> None:
    """Raise an error unless readers can rely on an entry's value."""
    kind = EntryKind(entry.kind)
    if entry_rules.RULES[kind].value is not None and entry.sha256 is not None:
        entry_rules.check_value(kind, codec.decode(load(entry) or b"null"))


def _check_run(copy: RunCopy, load: Callable[[Entry], bytes | None]) -> RunState:
    """Fold the entries, so that a run is only resumed from what can be opened again."""
    try:
        state = fold_copy(copy, load)
        shown = show_fields(state, load)
        for number, label in labels(state).items():
            step_facts(state.steps[number], label)
    except DocumentCorruptError:
        raise
    except (CorruptionError, *_WRONG) as error:
        reason = f"its entries do not make a run: {type(error).__name__} {error}"
        raise DocumentCorruptError(copy.source, reason) from error
    wrong = [name for name, make in FIELDS.items() if type(shown[name]) is not type(make())]
    if wrong:
        raise DocumentCorruptError(copy.source, f"its {', '.join(wrong)} have the wrong type")
    return state


class CopiedEntries(Sequence[NewEntry]):
    """The entries of a copy, to be appended to a journal, each made when it is asked for.

    So a journal that stores one after the other needs no memory for the values of all of them.
    """

    def __init__(self, copy: RunCopy, *, journal_lost: bool = False) -> None:
        self._copy = copy
        facts: dict[str, Json] = {"from": copy.source, "saved_at": copy.saved_at}
        if journal_lost:  # fencing numbers start over: files from now on must still be the newest
            facts["fence"] = copy.fence
        self._facts = codec.dump_canonical(facts)

    def __len__(self) -> int:
        return 1 + len(self._copy.entries)

    @overload
    def __getitem__(self, at: int) -> NewEntry: ...
    @overload
    def __getitem__(self, at: slice) -> list[NewEntry]: ...
    def __getitem__(self, at: int | slice) -> NewEntry | list[NewEntry]:
        return list(self)[at]

    def __iter__(self) -> Iterator[NewEntry]:
        """Yield a mark that what came before no longer counts, and the entries behind it."""
        yield NewEntry(EntryKind.RESTORED, facts=self._facts)
        seq = 0
        for at, written in enumerate(self._copy.entries):
            try:
                kind = entry_rules.check_entry(written, after=seq)
                seq = written["seq"]
                entry = self._entry(kind, written)
            except AtPathError as error:
                raise self._copy.corrupt(at, f"{error.where()} {error.reason}") from error
            except _WRONG as error:
                raise self._copy.corrupt(at, f" is not an entry: {error}") from error
            yield entry
        if seq > self._copy.seq:
            reason = f"run.seq is {self._copy.seq}, and its last entry has the number {seq}"
            raise DocumentCorruptError(self._copy.source, reason)

    def _entry(self, kind: EntryKind, entry: dict[str, Json]) -> NewEntry:
        facts, identity = entry["facts"], entry["identity"]
        return NewEntry(
            kind=kind,
            step=entry["step"],
            attempt=entry["attempt"],
            facts=None if facts is None else codec.dump_canonical(facts),
            value=self._value(entry),
            family=_family(facts),
            identity=None if identity is None else bytes.fromhex(identity),
            at=entry["at"],
        )

    def _value(self, entry: dict[str, Json]) -> codec.Encoded | None:
        digest = entry["sha256"]
        if digest is None:
            return None
        data = codec.dump(entry["value"]) if "value" in entry else self._copy.values.load(digest)
        if hashlib.sha256(data).hexdigest() != digest:
            raise DecodeError(f"entry {entry.get('seq')}", "its value does not match its SHA-256")
        return codec.Encoded(data, bytes.fromhex(digest))


def _family(facts: Json) -> str:
    """Values of the same step name and persona may have grown from one another."""
    if facts is None:
        return ""
    return f"{facts.get('persona', '')}/{facts.get('name', '')}"
