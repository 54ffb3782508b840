"""A JSON document with a SHA-256, and a whole run as such a document.

The text is ``{"document":{…},"sha256":"…"}`` and a line feed; the digest is that of the bytes of
``{…}`` exactly as they stand. So any change to any byte is found, and a file can be checked with a
JSON parser and a hash function (docs/storage-format.md shows how).

Documents are written in chunks, so that a run of 100,000 steps needs little memory, and a thread
that writes one never holds the interpreter for long.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple, cast, overload

from maestro_hive.kernel.errors import (
    CorruptionError,
    DecodeError,
    DocumentCorruptError,
    NewerFormatError,
)
from maestro_hive.maestro.state import codec, deltas
from maestro_hive.maestro.state.projections import FIELDS, RunState, effective_entries
from maestro_hive.maestro.state.records import Entry, EntryKind, NewEntry
from maestro_hive.maestro.state.views import show_run

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from maestro_hive.maestro.state.codec import Json
    from maestro_hive.maestro.state.store import Reader

#: The format of the documents this version writes, and the newest it reads.
DOCUMENT_FORMAT = 1

_HEAD = b'{"document":'
_MIDDLE = b',"sha256":"'
_TAIL = b'"}\n'
_DIGEST_LENGTH = 64

#: How many entries, or items of a field, are encoded at a time.
_CHUNK_ITEMS = 500

#: What reading a document of the wrong content may raise.
_WRONG = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)


def seal(
    kind: str, body: dict[str, Json], raw: Mapping[str, bytes | Iterable[bytes]] | None = None
) -> bytes:
    """Return the text of a document with these members; ``raw`` ones are JSON text already."""
    return b"".join(seal_in_chunks(kind, body, raw))


def seal_in_chunks(
    kind: str, body: dict[str, Json], raw: Mapping[str, bytes | Iterable[bytes]] | None = None
) -> Iterator[bytes]:
    """Yield the text of a document piece by piece."""
    texts: dict[str, bytes | Iterable[bytes]] = {
        name: codec.dump(value) for name, value in body.items()
    }
    texts |= raw or {}
    texts["format"] = b"%d" % DOCUMENT_FORMAT
    texts["kind"] = codec.dump_canonical(kind)
    digest = hashlib.sha256()
    yield _HEAD
    for chunk in _members(texts):
        digest.update(chunk)
        yield chunk
    yield _MIDDLE + digest.hexdigest().encode() + _TAIL


def _members(texts: Mapping[str, bytes | Iterable[bytes]]) -> Iterator[bytes]:
    before = b"{"
    for name in sorted(texts):
        yield before + codec.dump_canonical(name) + b":"
        text = texts[name]
        if isinstance(text, bytes):
            yield text
        else:
            yield from text
        before = b","
    yield b"}"


def unseal(text: bytes, kind: str, name: str, *, verify: bool = True) -> dict[str, Json]:
    """Return the members of a document, or raise an error that says what is wrong with it.

    ``verify=False`` leaves the digest unchecked; everything else is checked.
    """
    end = len(text) - len(_TAIL) - _DIGEST_LENGTH
    middle = end - len(_MIDDLE)
    whole = (
        text.startswith(_HEAD)
        and text.endswith(_TAIL)
        and middle > len(_HEAD)
        and text[middle:end] == _MIDDLE
    )
    if not whole:
        raise DocumentCorruptError(name, "it is torn, or not a document of maestro-hive")
    document = text[len(_HEAD) : middle]
    if verify and hashlib.sha256(document).hexdigest().encode() != text[end : -len(_TAIL)]:
        raise DocumentCorruptError(name, "its SHA-256 does not match: it was altered")
    return _check_members(document, kind, name)


def _check_members(document: bytes, kind: str, name: str) -> dict[str, Json]:
    try:
        body = codec.parse(document, name, depth=codec.DOCUMENT_DEPTH)
    except DecodeError as error:
        raise DocumentCorruptError(name, error.reason) from error
    if not isinstance(body, dict):
        raise DocumentCorruptError(name, "it is not an object")
    found = body.pop("format", None)
    if type(found) is not int or found < 1:
        raise DocumentCorruptError(name, f"its format number is {found!r}")
    if found > DOCUMENT_FORMAT:
        raise NewerFormatError(name, found, DOCUMENT_FORMAT)
    if body.pop("kind", None) != kind:
        raise DocumentCorruptError(name, f"it is not a {kind} document")
    return cast("dict[str, Json]", body)


# --- runs ---


_NAMES = {kind.value: kind.name.lower() for kind in EntryKind}
_KINDS = {kind.name.lower(): kind for kind in EntryKind}
#: The types of facts that are computed with or read; each may also be None.
_FACTS: dict[str, Any] = {
    **dict.fromkeys(("name", "persona", "task", "workflow", "parent", "run_id", "status"), str),
    **dict.fromkeys(
        ("forked_from", "from_step", "what", "how", "reason", "ticket", "feedback"), str
    ),
    **dict.fromkeys(("tokens", "usd", "round", "fence"), int | float),
    "error": dict.fromkeys(("type", "message", "category", "traceback"), str),
    "options": {},
    "parameters": list,
    "report": {},
    "shape": {},
    "wait": {"seconds": int | float},
}


class RunCopy(NamedTuple):
    """A run read from a document: its source and its members."""

    source: str
    saved_at: str
    fence: int
    seq: int
    body: dict[str, Any]


class RunText(Iterable[bytes]):
    """A run as JSON text, in chunks; it may be iterated more than once.

    ``entries`` are all entries of the run up to some moment, ``fields`` what people read first.
    The run's lease is not needed: entries are only ever added, so the values that these refer to
    are still there.
    """

    def __init__(
        self,
        store: Reader,
        run: int,
        name: str,
        entries: Sequence[Entry],
        fields: dict[str, Any],
        saved_at: str,
        fence: int,
    ) -> None:
        self._store = store
        self._run = run
        self._name = name
        self._entries = entries
        self._state = list(_field_chunks(fields))  # now: they may change later
        self._saved_at = saved_at
        self._fence = fence

    def __iter__(self) -> Iterator[bytes]:
        """Yield the text piece by piece."""
        last = self._entries[-1].seq if self._entries else 0
        yield b'{"entries":['
        yield from _entry_chunks(effective_entries(self._entries))
        yield b'],"fence":%d,"saved_at":"%s","seq":%d,"state":{' % (
            self._fence,
            self._saved_at.encode(),
            last,
        )
        yield from self._state
        yield b'},"values":{'
        before = b'"'
        for value in self._store.values_of(self._run):
            yield before + value.sha256.hex().encode() + b'":'
            yield _value_text(value.base, value.data)
            before = b',"'
        yield b'},"workflow_id":"%s"}' % self._name.encode()


def _entry_chunks(entries: Sequence[Entry]) -> Iterator[bytes]:
    for start in range(0, len(entries), _CHUNK_ITEMS):
        chunk = b",".join(map(_entry_text, entries[start : start + _CHUNK_ITEMS]))
        yield b"," + chunk if start else chunk


def _field_chunks(fields: dict[str, Any]) -> Iterator[bytes]:
    """Yield the members of an object whose keys are texts, long lists and objects in parts."""
    before = b""
    for name in sorted(fields):
        yield before + codec.dump_canonical(name) + b":"
        yield from _value_chunks(fields[name], f"state.{name}")
        before = b","


def _value_chunks(value: Any, path: str) -> Iterator[bytes]:
    parts: Iterator[Any]
    if type(value) is list and len(value) > _CHUNK_ITEMS:
        starts = range(0, len(value), _CHUNK_ITEMS)
        parts, brackets = (value[start : start + _CHUNK_ITEMS] for start in starts), b"[]"
    elif type(value) is dict and len(value) > _CHUNK_ITEMS and _has_plain_keys(value):
        items = list(value.items())
        starts = range(0, len(items), _CHUNK_ITEMS)
        parts, brackets = (dict(items[start : start + _CHUNK_ITEMS]) for start in starts), b"{}"
    else:
        yield codec.encode(value, path, depth=codec.WHOLE_DEPTH).data
        return
    before = brackets[:1]
    for part in parts:
        yield before + codec.encode(part, path, depth=codec.WHOLE_DEPTH).data[1:-1]
        before = b","
    yield brackets[1:]


def _has_plain_keys(value: dict[Any, Any]) -> bool:
    """Return whether an object is encoded as an object, and not as tagged pairs."""
    return all(type(key) is str and key != "$" for key in value)


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


def read_run(
    source: str, body: dict[str, Json], load: Callable[[Entry], bytes | None] = attrgetter("value")
) -> RunCopy:
    """Check that a document's members are those of a run, whose values ``load`` returns."""
    match body:
        case {
            "workflow_id": str(),
            "saved_at": str(saved_at),
            "fence": int(fence),
            "seq": int(seq),
            "entries": list(),
            "values": dict(),
        }:
            copy = RunCopy(source, saved_at, fence, seq, body)
        case _:
            raise DocumentCorruptError(source, "it lacks members that every run has")
    _check_run(copy, load)
    return copy


def _check_run(copy: RunCopy, load: Callable[[Entry], bytes | None]) -> None:
    """Fold the entries, so that a run is only resumed from what can be opened again."""
    state = RunState()
    try:
        for seq, new in enumerate(CopiedEntries(copy), start=1):
            data, sha256 = new.value or (None, None)
            rest = (new.step, new.attempt, new.at or 0, new.facts, data, None, sha256, new.identity)
            state.add(Entry(seq, new.kind, *rest), load)
        shown = show_run(state, "", load)
    except DocumentCorruptError:
        raise
    except (CorruptionError, *_WRONG) as error:
        reason = f"its entries do not make a run: {type(error).__name__} {error}"
        raise DocumentCorruptError(copy.source, reason) from error
    wrong = [name for name, make in FIELDS.items() if type(shown[name]) is not type(make())]
    if wrong:
        raise DocumentCorruptError(copy.source, f"its {', '.join(wrong)} have the wrong type")


class CopiedEntries(Sequence[NewEntry]):
    """The entries of a copy, to be appended to a journal; values are put together one by one."""

    def __init__(self, copy: RunCopy, *, journal_lost: bool = False) -> None:
        self._source = copy.source
        self._entries: list[Json] = copy.body["entries"]
        self._values: dict[str, Json] = copy.body["values"]
        facts: dict[str, Json] = {"from": copy.source, "saved_at": copy.saved_at}
        if journal_lost:  # fencing numbers start over: files from now on must still be the newest
            facts["fence"] = copy.fence
        self._facts = codec.dump_canonical(facts)
        self._last: tuple[str, bytes] = ("", b"")

    def __len__(self) -> int:
        """Return the number of entries, with the mark in front of them."""
        return len(self._entries) + 1

    @overload
    def __getitem__(self, index: int) -> NewEntry: ...

    @overload
    def __getitem__(self, index: slice) -> list[NewEntry]: ...

    def __getitem__(self, index: int | slice) -> NewEntry | list[NewEntry]:
        """Return a mark that what came before no longer counts, or one of the entries behind it."""
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(len(self)))]
        if index == 0:
            return NewEntry(EntryKind.RESTORED, facts=self._facts)
        written = self._entries[index - 1]  # whose IndexError ends an iteration
        try:
            return self._entry(written)
        except _WRONG as error:
            reason = f"entries[{index - 1}] is not an entry: {error}"
            raise DocumentCorruptError(self._source, reason) from error

    def _entry(self, entry: dict[str, Json]) -> NewEntry:
        facts, identity = entry["facts"], entry["identity"]
        return NewEntry(
            kind=_KINDS[entry["kind"]],
            step=_integer(entry["step"]),
            attempt=_integer(entry["attempt"]),
            facts=None if facts is None else codec.dump_canonical(_checked(facts, _FACTS)),
            value=self._value(entry),
            family=_family(facts),
            identity=None if identity is None else bytes.fromhex(identity),
            at=_integer(entry["at"]),
        )

    def _value(self, entry: dict[str, Json]) -> codec.Encoded | None:
        digest = entry["sha256"]
        if digest is None:
            return None
        data = codec.dump(entry["value"]) if "value" in entry else self._large(digest)
        if hashlib.sha256(data).hexdigest() != digest:
            raise DecodeError(f"entry {entry.get('seq')}", "its value does not match its SHA-256")
        return codec.Encoded(data, bytes.fromhex(digest))

    def _large(self, digest: str) -> bytes:
        """Put a large value together; the last one made is in memory, and usually the base."""
        at = digest
        pieces: deltas.Pieces | None = None
        for _ in range(len(self._values) + 1):
            whole = self._whole(at)
            if whole is not None:
                data = whole if pieces is None else pieces.finish(whole)
                self._last = (digest, data)
                return data
            instructions = deltas.from_json(self._values[at]["pieces"])
            pieces = pieces or deltas.Pieces(deltas.size(instructions))
            pieces.apply(instructions)
            at = self._values[at]["base"]
        raise ValueError(f"value {digest} builds on itself")

    def _whole(self, digest: str) -> bytes | None:
        if digest == self._last[0]:
            return self._last[1]
        stored = self._values[digest]
        return codec.dump(stored["whole"]) if "whole" in stored else None


def _integer(value: Json) -> int:
    if type(value) is not int or not 0 <= value < 1 << 62:
        raise ValueError(f"{str(value)[:40]} is not a valid number")
    return value


def _checked(facts: Json, expected: dict[str, Any]) -> dict[str, Json]:
    """Return facts, if those that are computed with have the expected types."""
    if type(facts) is not dict:
        raise TypeError("its facts are not an object")
    for name in facts.keys() & expected.keys():
        fact, kind = facts[name], expected[name]
        if fact is None:
            continue
        if isinstance(kind, dict):
            _checked(fact, kind)
        elif not isinstance(fact, kind):
            raise TypeError(f"its {name} cannot be {str(fact)[:40]!r}")
    return facts


def _family(facts: Json) -> str:
    """Values of the same step name and persona may have grown from one another."""
    if facts is None:
        return ""
    return f"{facts.get('persona', '')}/{facts.get('name', '')}"
