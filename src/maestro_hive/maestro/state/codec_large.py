"""Large values, encoded and decoded in pieces: for worker threads.

One call of the C encoder on 12 MB keeps all other threads waiting until it is done. Here no call
takes longer than a few milliseconds, and other threads get their turn in between. The result is the
same as that of ``codec``, to the byte.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections import deque
from enum import Enum, auto
from heapq import merge
from itertools import islice
from json.decoder import JSONDecodeError, scanstring  # type: ignore[attr-defined]
from typing import TYPE_CHECKING, Any, NamedTuple

from maestro_hive.kernel.errors import EncodeError
from maestro_hive.maestro.state import codec
from maestro_hive.maestro.state.codec import Encoded, EncodedCall
from maestro_hive.maestro.state.codec_classes import TAG
from maestro_hive.maestro.state.strict_json import (
    FINITE,
    MAX_BYTES,
    MAX_DEPTH,
    SCALARS,
    TEXT,
    AtPathError,
    Json,
    is_sorted,
    parse_text,
    scan_once,
    write,
    write_sorted,
)
from maestro_hive.maestro.state.tree_codec import TreeDecoder, TreeEncoder, canonical_tree

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

#: From this number of bytes on, decoding takes longer than about 2 ms.
LARGE_BYTES = 100_000

#: What encoding takes, in units of about 3 ns: a value 100, a character 1, a typed value more.
_VALUE = 100
_TYPED = 400
#: How much is encoded in one call, about 5 ms; and what takes longer than about 2 ms.
_PIECE = 1_600_000
_LARGE = 600_000
#: How many items of a list or dictionary are encoded in one call at most.
_ITEMS = 1024
#: How many bytes are decoded in one call.
_WINDOW = 1 << 18


# --- estimating -----------------------------------------------------------------------------------

#: How many values are examined in all, and how many of one container.
_EXAMINED = 300
_SAMPLES = 16


def is_large(value: object) -> bool:
    """Return whether encoding takes longer than about 2 ms, as far as a few hundred values show."""
    if type(value) in SCALARS and type(value) is not str:
        return False
    waiting: deque[tuple[Any, float]] = deque([(value, 1.0)])
    total, left = 0.0, _EXAMINED
    while waiting and left > 0 and total <= _LARGE:
        left -= 1
        each, times = waiting.popleft()
        own, count, items = _estimate(each)
        total += times * (own + _VALUE * count)
        if items:
            times *= count / len(items)
            for item in items:
                kind = type(item)
                if kind is str:
                    left -= 1
                    total += times * len(item)
                elif kind not in _SMALL:
                    waiting.append((item, times))
    return total > _LARGE


_SMALL = SCALARS - {str}


def _estimate(value: Any) -> tuple[int, int, list[Any]]:
    """Return what a value takes without its items, how many they are, and some of them."""
    kind = type(value)
    if kind is str:
        return len(value), 0, []
    if kind is list or isinstance(value, tuple):
        return 0, len(value), list(value[:: len(value) // _SAMPLES + 1])
    if isinstance(value, dict):
        samples = [*islice(value, _SAMPLES), *islice(value.values(), _SAMPLES)]
        return 0, 2 * len(value), samples
    if isinstance(value, set | frozenset | deque):
        return _TYPED, len(value), list(islice(value, _SAMPLES))
    if isinstance(value, bytes | bytearray):
        return _TYPED + len(value), 0, []
    names: Any = getattr(kind, "__dataclass_fields__", None) or getattr(value, "__dict__", ())
    items = [getattr(value, name, None) for name in islice(names, _SAMPLES)]
    size = getattr(value, "nbytes", 0)
    return _TYPED + (size if type(size) is int else 0), len(names), items


# --- encoding -------------------------------------------------------------------------------------


def encode_large(value: object, path: str = "value", *, depth: int = MAX_DEPTH) -> Encoded:
    """Return what ``encode`` does; other threads need not wait."""
    return _written(_Pieces(compare=False), value, path, depth)


def encode_call_large(
    args: tuple[Any, ...], kwargs: dict[str, Any], path: str = "input"
) -> EncodedCall:
    """Return what ``encode_call`` does; other threads need not wait."""
    call = {"args": list(args), "kwargs": kwargs}
    pieces = _Pieces()
    data, sha256 = _written(pieces, call, path, MAX_DEPTH)
    if pieces.in_order:
        return EncodedCall(data, sha256, sha256)
    return EncodedCall(data, sha256, canonical_digest_large(call, path))


def canonical_digest_large(value: object, path: str = "value") -> bytes:
    """Return what ``canonical_digest`` does; other threads need not wait."""
    return _written(_Pieces(canonical=True), value, path, MAX_DEPTH).sha256


def _written(pieces: _Pieces, value: object, path: str, depth: int) -> Encoded:
    parts: list[bytes] = []
    digest = hashlib.sha256()
    size = 0
    try:
        for text in pieces.of(value, depth):
            parts.append(text.encode())
            digest.update(parts[-1])
            size += len(parts[-1])
            if size > MAX_BYTES:
                raise EncodeError(path, f"its text is over the limit of {MAX_BYTES:,} bytes")
            time.sleep(0)
    except (AtPathError, ValueError, RuntimeError) as error:
        codec.encode(value, path, depth=depth)  # it says which part of it has no form
        raise EncodeError(path, f"it was changed while it was encoded: {error}") from None
    return Encoded(b"".join(parts), digest.digest())


class _Kind(Enum):
    """What a few items are."""

    PLAIN = auto()
    TYPED = auto()
    HEAVY = auto()


class _Pieces:
    """Yields the text of a value in pieces; compares, if it shall, its order with the canonical."""

    def __init__(self, *, canonical: bool = False, compare: bool = True) -> None:
        self.in_order = compare
        self._canonical = canonical
        self._write = write_sorted if canonical else write

    def of(self, value: Any, room: int, *, is_tree: bool = False) -> Iterator[str]:
        """Yield the text of a value; in a tree, tags are tags."""
        kind = type(value)
        if kind is str and len(value) > _PIECE:
            yield '"'
            for at in range(0, len(value), _PIECE):
                yield "".join(write(value[at : at + _PIECE], 0))[1:-1]
            yield '"'
        elif kind is list and room > 0:
            yield "["
            yield from self._joined(_slices(value), room, is_tree=is_tree)
            yield "]"
        elif kind is dict and room > 0 and (is_tree or _has_text_keys(value)):
            yield "{"
            yield from self._joined(self._parts(value), room, is_tree=is_tree)
            yield "}"
        elif kind is _Later:
            yield from self.of(value.value, value.room)
        elif is_tree or kind in FINITE or (kind is float and math.isfinite(value)):
            yield "".join(self._write(value, 0))
        else:
            yield from self.of(self._tree(value, room), _ANY_DEPTH, is_tree=True)

    def _joined(self, parts: Iterable[Any], room: int, *, is_tree: bool) -> Iterator[str]:
        separator = ""
        for part in parts:
            yield separator
            yield from self._part(part, room, is_tree=is_tree)
            separator = ","

    def _part(self, part: Any, room: int, *, is_tree: bool) -> Iterator[str]:
        """Yield the text of a few items, without the brackets round them."""
        kind = _kind_of(part, room)
        if kind is _Kind.HEAVY or (is_tree and kind is _Kind.TYPED):
            if len(part) > 1:
                if self.in_order and type(part) is dict:
                    self.in_order = list(part) == sorted(part)
                yield from self._joined(_halves(part), room, is_tree=is_tree)
                return
            (item,) = part if type(part) is list else part.values()
            if type(part) is dict:
                yield "".join(write(next(iter(part)), 0)) + ":"
            yield from self.of(item, room - 1, is_tree=is_tree)
            return
        text = self._text(part, is_tree=is_tree) if is_tree or kind is _Kind.PLAIN else None
        if text is None:
            yield from self._part(self._tree(part, room), _ANY_DEPTH, is_tree=True)
            return
        if self.in_order:
            self.in_order = is_sorted(part)
        yield text[1:-1]

    def _text(self, part: Any, *, is_tree: bool) -> str | None:
        """Return the text of a few items; None if they need a tree."""
        try:
            text = "".join(self._write(part, 0))
        except ValueError:
            if is_tree:
                raise
            return None  # NaN, or what has no form at all
        has_tag = codec.TAG in text and codec.TAG_AS_KEY in text
        return text if is_tree or not has_tag else None

    def _tree(self, value: object, room: int) -> Json:
        encoder = _Outline()
        tree = _ENCODE(encoder, value, room)
        if encoder.has_pairs:
            self.in_order = False
            return canonical_tree(tree) if self._canonical else tree
        return tree

    def _parts(self, value: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield a dictionary as several, in the order they are written."""
        keys: Iterable[str] = value
        if self._canonical:
            keys = merge(*(sorted(part) for part in _batches(value)))
        last = ""
        for part in _batches(keys):
            self.in_order = self.in_order and last <= part[0]
            last = part[-1]
            yield {key: value[key] for key in part}


class _Later(NamedTuple):
    """A long list or dictionary in a tree, of which no tree was made yet."""

    value: Any
    room: int


class _Outline(TreeEncoder):
    """Makes trees of all but long lists and dictionaries: these may well be plain."""

    def encode(self, value: Any, room: int = MAX_DEPTH) -> Json:
        """Return ``value`` as plain JSON, or as something for later."""
        if (type(value) is list or type(value) is dict) and len(value) > _ITEMS and room > 0:
            return _Later(value, room)
        return TreeEncoder.encode(self, value, room)


#: Also for a long list, if it is the value itself.
_ENCODE = TreeEncoder.encode

#: A tree was limited in depth as it was made.
_ANY_DEPTH = 1 << 30


def _batches(items: Iterable[Any]) -> Iterator[list[Any]]:
    rest = iter(items)
    while batch := list(islice(rest, _ITEMS)):
        yield batch


def _slices(items: list[Any]) -> Iterator[list[Any]]:
    return (items[at : at + _ITEMS] for at in range(0, len(items), _ITEMS))


def _halves(part: Any) -> tuple[Any, Any]:
    middle = len(part) // 2
    if type(part) is list:
        return part[:middle], part[middle:]
    items = list(part.items())
    return dict(items[:middle]), dict(items[middle:])


def _has_text_keys(value: dict[Any, Any]) -> bool:
    return TAG not in value and all(TEXT.issuperset(map(type, part)) for part in _batches(value))


def _kind_of(part: Any, room: int) -> _Kind:
    """Return whether a few items are plain, and small enough for one call."""
    containers: list[Any] = [part]
    total = 0
    for _ in range(room):
        inside: list[Any] = []
        for each in containers:
            total += len(each) * _VALUE
            if total > _PIECE:
                return _Kind.HEAVY
            size = _add_inside(each, inside)
            if size is None:
                return _Kind.TYPED
            total += size
        if total > _PIECE:
            return _Kind.HEAVY
        if not inside:
            return _Kind.PLAIN
        containers = inside
    return _Kind.TYPED  # too deep: making a tree of it raises the error


def _add_inside(container: Any, inside: list[Any]) -> int | None:
    """Add the containers in one to ``inside``; return how long its texts are, None if not plain."""
    items, size = container, 0
    if type(container) is dict:
        if not TEXT.issuperset(map(type, container)):
            return None
        items = container.values()
        size = sum(map(len, container))
    kinds = set(map(type, items))
    if not kinds <= _JSON:
        return None
    if str in kinds:
        size += sum([len(item) for item in items if type(item) is str])
    if list in kinds or dict in kinds:
        inside += [item for item in items if type(item) is dict or type(item) is list]
    return size


_JSON = SCALARS | {list, dict}


# --- decoding -------------------------------------------------------------------------------------


def decode_large(data: bytes, path: str = "value") -> Any:
    """Return what ``decode`` does; other threads need not wait."""
    if LARGE_BYTES < len(data) <= MAX_BYTES:
        try:
            return _Reader(data).read()
        except (AtPathError, ValueError, RecursionError):
            pass  # what follows says what is wrong, or reads what is valid and not written by us
    return codec.decode(data, path)


class _NotOursError(ValueError):
    """The text is not as we write it; it may be valid all the same."""


class _Reader:
    """Reads JSON as we write it, a window of text at a time.

    What fits into a window is read by the C decoder, as many items at once as possible; of what
    does not, one level is read here. Tags are decoded with their window, except where a tag holds
    more than one window: all inside it is read first.
    """

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._start = 0  # of the window, in the data
        self._text = ""
        self._at = 0  # in the window
        self._is_last = False
        self._keeps_tags = False
        self._one_by_one_until = 0  # in the data
        self._fill()

    def read(self) -> Any:
        """Return the value that the whole text is."""
        value = self._value(MAX_DEPTH)
        if self._next():
            raise _NotOursError
        return value

    def _fill(self) -> None:
        """Let the window begin where reading stands."""
        self._start += len(self._text[: self._at].encode())
        end = _character(self._data, self._start + _WINDOW)
        self._text = str(self._data[self._start : end], "utf-8")
        self._at = 0
        self._is_last = end == len(self._data)
        time.sleep(0)

    def _next(self) -> str:
        if self._at >= len(self._text):
            self._fill()
        return self._text[self._at : self._at + 1]

    def _skip(self, expected: str) -> str:
        found = self._next()
        if not found or found not in expected:
            raise _NotOursError
        self._at += 1
        return found

    def _decoded(self, text: str, room: int) -> Any:
        tree = parse_text(text, room)
        has_tags = codec.may_have_tags(text)
        return TreeDecoder().decode(tree, room) if has_tags and not self._keeps_tags else tree

    def _value(self, room: int) -> Any:
        """Read one value, whatever its size."""
        if self._at > len(self._text) // 2:
            self._fill()
        found = self._value_in_window(room)
        if not found and self._at:
            self._fill()
            found = self._value_in_window(room)
        if found:
            return found[0]
        opening = self._next()
        if opening == "[":
            return self._list(room)
        return self._dict(room) if opening == "{" else self._long_text()

    def _value_in_window(self, room: int) -> tuple[()] | tuple[Any]:
        """Read a value if it ends in this window."""
        try:
            end = scan_once(self._text, self._at)[1]
        except (ValueError, StopIteration):
            if self._is_last:
                raise _NotOursError from None
            return ()
        if end == len(self._text) and not self._is_last:
            return ()  # a number may go on
        value = self._decoded(self._text[self._at : end], room)
        self._at = end
        return (value,)

    def _long_text(self) -> str:
        start = self._start + 1
        end = self._data.find(b'"', start)
        if self._text[0] != '"' or end < 0 or self._data.find(b"\\", start, end) >= 0:
            raise _NotOursError
        parts = []
        while start < end:
            cut = min(end, _character(self._data, start + _WINDOW))
            parts.append(scanstring(str(self._data[start:cut], "utf-8") + '"', 0, True)[0])
            start = cut
            time.sleep(0)
        self._start, self._text, self._at = end + 1, "", 0
        return "".join(parts)

    def _list(self, room: int) -> list[Any]:
        items: list[Any] = []
        self._skip("[")
        while True:
            items += self._items_in_window(room) or [self._value(room - 1)]
            if self._skip(",]") == "]":
                return items

    def _items_in_window(self, room: int) -> list[Any]:
        """Read as many items as end in this window, up to a comma between two of them.

        It is found by how the first one begins: a list of alike objects has it before each.
        """
        if self._at > len(self._text) // 2:
            self._fill()
        text, at = self._text, self._at
        begin = text[at : at + 1] if text[at : at + 1] in ("[", '"') else ""
        if text[at : at + 1] == "{":
            begin = text[at : text.find('":', at) + 2][:_ITEMS]
        cut = text.rfind("," + begin, at)
        return self._up_to(cut, "[%s]", room) or []

    def _dict(self, room: int) -> Any:
        self._skip("{")
        is_tag = self._text.startswith(codec.TAG_AS_KEY, self._at)
        outer, self._keeps_tags = self._keeps_tags, self._keeps_tags or is_tag
        members: dict[str, Any] = {}
        size = 0
        while True:
            found = self._members_in_window(room) or self._member(room)
            members |= found
            size += len(found)
            if self._skip(",}") == "}":
                break
        self._keeps_tags = outer
        if len(members) != size or (TAG in members and not is_tag):
            raise _NotOursError
        return TreeDecoder().decode(members, room) if is_tag and not outer else members

    def _member(self, room: int) -> dict[str, Any]:
        key = self._value(1)
        if type(key) is not str:
            raise _NotOursError
        self._skip(":")
        return {key: self._value(room - 1)}

    def _members_in_window(self, room: int) -> dict[str, Any]:
        """Read as many members as end in this window."""
        if self._at > len(self._text) // 2:
            self._fill()
        text, at = self._text, self._at
        colon = text.find('":', at)
        ending = {"{": "}", "[": "]", '"': '"'}.get(text[colon + 2 : colon + 3], "")
        cut = text.rfind(ending + ',"', at)
        return self._up_to(cut + len(ending), "{%s}", room) or {}

    def _up_to(self, cut: int, brackets: str, room: int) -> Any:
        """Read what ends at a comma; None if it is none between two items.

        If it is inside an item, the text up to it is not valid. If it is behind the end of what is
        read, that end is found. Elsewhere the items up to it are read one by one: to try again
        after each of them would take the square of their number.
        """
        at = self._at
        if cut <= at or self._start + at < self._one_by_one_until:
            return None
        try:
            found = self._decoded(brackets % self._text[at:cut], room)
        except JSONDecodeError as error:
            end = at + error.pos - 2  # of what stands inside the brackets that were closed there
            if error.msg == "Extra data" and at < end < cut:
                return self._up_to(end, brackets, room)
            self._one_by_one_until = self._start + cut
            return None
        self._at = cut
        return found


def _character(data: bytes, at: int) -> int:
    """Return the index of the next character that begins at an index or behind it."""
    while at < len(data) and data[at] & 0xC0 == 0x80:
        at += 1
    return min(at, len(data))
