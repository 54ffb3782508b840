"""Large values, encoded and decoded in pieces: for worker threads.

One call of the C encoder on 12 MB keeps all other threads waiting until it is done. Here no call
takes longer than a few milliseconds, and other threads get their turn in between. The result is the
same as that of ``codec``, to the byte.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from codecs import iterdecode
from collections import deque
from heapq import merge
from itertools import chain, islice
from json.decoder import JSONDecodeError, scanstring  # type: ignore[attr-defined]
from operator import le
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from maestro_hive.kernel.errors import EncodeError
from maestro_hive.kernel.process import without_garbage_collection
from maestro_hive.maestro.state import codec
from maestro_hive.maestro.state.codec import Encoded, EncodedCall
from maestro_hive.maestro.state.codec_classes import TAG
from maestro_hive.maestro.state.strict_json import (
    COST_OF_VALUE,
    MAX_BYTES,
    MAX_DEPTH,
    SCALARS,
    TEXT,
    AtPathError,
    Json,
    Value,
    is_plain,
    is_sorted,
    parse_text,
    scan_once,
    write,
    write_long,
    writer_for,
)
from maestro_hive.maestro.state.tree_codec import TreeDecoder, TreeEncoder, canonical_tree

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

MadeT = TypeVar("MadeT")

#: From this number of bytes on, decoding takes longer than about 2 ms.
LARGE_BYTES = 100_000

#: What a value takes that is no plain JSON, in the units of ``COST_OF_VALUE``.
_TYPED = 400
#: How much is encoded in one call, about 5 ms; and what takes longer than about 2 ms.
_PIECE = 1_600_000
LARGE = 600_000
#: How many items of a list or dictionary are encoded in one call at most.
_ITEMS = 1024
#: How much is written between two turns of other threads; to give one takes as long as some of it.
_TURN = 1 << 16
#: How many bytes are decoded in one call.
_WINDOW = 1 << 18


# --- estimating -----------------------------------------------------------------------------------

#: How many values are examined in all, and how many of one container.
_EXAMINED = 300
#: What takes no longer is small without an estimate: finding that out takes less than one.
_CERTAINLY_SMALL = 10_000
_SAMPLES = 16


def is_large(value: Value) -> bool:
    """Return whether encoding takes longer than about 2 ms, as far as a few hundred values show."""
    kind = type(value)
    if kind in SCALARS and kind is not str:
        return False
    if (kind is dict or kind is list) and is_plain(value, MAX_DEPTH, _CERTAINLY_SMALL):
        return False
    waiting: deque[tuple[Value, float]] = deque([(value, 1.0)])
    total, left = 0.0, _EXAMINED
    while waiting and left > 0 and total <= LARGE:
        left -= 1
        each, times = waiting.popleft()
        own, count, items = _estimate(each)
        total += times * (own + COST_OF_VALUE * count)
        if items:
            times *= count / len(items)
            for item in items:
                kind = type(item)
                if kind is str:
                    left -= 1
                    total += times * len(item)
                elif kind not in _SMALL:
                    waiting.append((item, times))
    return total > LARGE


_SMALL = SCALARS - {str}


def _estimate(value: Value) -> tuple[int, int, list[Value]]:
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
    names: Value = getattr(kind, "__dataclass_fields__", None) or getattr(value, "__dict__", ())
    items = [getattr(value, name, None) for name in islice(names, _SAMPLES)]
    size = getattr(value, "nbytes", 0)
    return _TYPED + (size if type(size) is int else 0), len(names), items


# --- encoding -------------------------------------------------------------------------------------


def encode_large(value: object, path: str = "value", *, depth: int = MAX_DEPTH) -> Encoded:
    """Return what ``encode`` does; other threads need not wait."""
    with without_garbage_collection():
        return _made(value, path, depth, lambda tree: _written(_Pieces(tree), path))


def encode_call_large(
    args: tuple[Value, ...], kwargs: dict[str, Value], path: str = "input"
) -> EncodedCall:
    """Return what ``encode_call`` does; other threads need not wait."""

    def encoded(tree: _Tree) -> EncodedCall:
        pieces = _Pieces(tree, compare=True)
        value = _written(pieces, path)
        digest = value.sha256
        if not pieces.in_order:
            if tree.has_pairs:
                tree = tree._replace(value=canonical_tree(tree.value))
            digest = _digest(_Pieces(tree, canonical=True))
        return EncodedCall(value, digest)

    with without_garbage_collection():
        return _made({"args": list(args), "kwargs": kwargs}, path, MAX_DEPTH, encoded)


class _Tree(NamedTuple):
    """Plain data: a value as it is, or the tree of one, which has tags and is not too deep."""

    value: Json
    room: int
    has_tags: bool = False
    has_pairs: bool = False


def _made(value: object, path: str, depth: int, make: Callable[[_Tree], MadeT]) -> MadeT:
    """Return what is made of a value if it is plain, else of its tree."""
    try:
        return make(_Tree(value, depth))
    except EncodeError:
        raise
    except ValueError:
        pass  # it is not plain, or has no form at all
    except RuntimeError as error:
        raise EncodeError(path, f"it was changed while it was encoded: {error}") from None
    tree, has_pairs = codec.tree_of(value, path, depth)
    try:
        return make(_Tree(tree, _ANY_DEPTH, has_tags=True, has_pairs=has_pairs))
    except EncodeError:
        raise
    except ValueError as error:
        raise codec.no_text(value, path, depth, error) from None


def _written(pieces: _Pieces, path: str) -> Encoded:
    parts: list[bytes] = []
    digest = hashlib.sha256()
    size = waited = 0
    for text in pieces:
        parts.append(text.encode())
        digest.update(parts[-1])
        size += len(parts[-1])
        waited = _let_others_go_on(waited + len(text))
        if size > MAX_BYTES:
            raise EncodeError(path, f"its text is over the limit of {MAX_BYTES:,} bytes")
    return Encoded(b"".join(parts), digest.digest())


def _digest(pieces: _Pieces) -> bytes:
    digest = hashlib.sha256()
    waited = 0
    for text in pieces:
        digest.update(text.encode())
        waited = _let_others_go_on(waited + len(text))
    return digest.digest()


def _let_others_go_on(waited: int) -> int:
    """Give other threads their turn if they have waited for so much text; return for how much now."""
    if waited < _TURN:
        return waited
    time.sleep(0)
    return 0


class _NotPlainError(ValueError):
    """Something in a tree is not plain, or in a value has no form."""


class _Pieces:
    """Yields the text of a tree in pieces; compares, if it shall, its order with the canonical.

    Of what is not plain, the tree is made for a few items at a time: a whole one would take many
    times the memory of its text.
    """

    def __init__(self, tree: _Tree, *, compare: bool = False, canonical: bool = False) -> None:
        self.in_order = compare and not tree.has_pairs
        self._tree = tree
        self._canonical = canonical
        self._encoder = TreeEncoder()

    def __iter__(self) -> Iterator[str]:
        return self._of(self._tree.value, self._tree.room)

    def _of(self, value: Json, room: int) -> Iterator[str]:
        kind = type(value)
        is_short = (kind is list or kind is dict) and is_plain(value, room, _PIECE)
        text = self._text(value) if is_short else None
        if text is not None:
            yield text
        elif kind is str and len(value) > _PIECE:
            yield '"'
            for at in range(0, len(value), _PIECE):
                yield "".join(write_long(value[at : at + _PIECE], 0))[1:-1]
            yield '"'
        elif kind is list:
            yield "["
            yield from self._joined(_batches(value), room)
            yield "]"
        elif kind is dict and (self._tree.has_tags or _has_text_keys(value)):
            self.in_order = self.in_order and all(map(le, value, islice(value, 1, None)))
            yield "{"
            yield from self._joined(self._parts(value), room)
            yield "}"
        elif kind in SCALARS:
            yield "".join(writer_for(value)(value, 0))
        else:
            yield from self._tagged(value, room)

    def _joined(self, parts: Iterable[Json], room: int) -> Iterator[str]:
        separator = ""
        for part in parts:
            yield separator
            yield from self._part(part, room)
            separator = ","

    def _part(self, part: Json, room: int) -> Iterator[str]:
        """Yield the text of a few items, without the brackets round them."""
        plain = is_plain(part, room, _PIECE)
        text = self._text(part) if plain else None
        if plain is None:
            yield from self._divided(part, room)
        elif text is None:
            yield from self._tagged(part, room, is_part=True)
        else:
            yield text[1:-1]

    def _text(self, part: Json) -> str | None:
        """Return the text of plain data; None if a key in it is what marks a tag."""
        text = "".join(writer_for(part, canonical=self._canonical)(part, 0))
        if not self._tree.has_tags and codec.TAG in text and codec.TAG_AS_KEY in text:
            return None
        self.in_order = self.in_order and is_sorted(part)
        return text

    def _tagged(self, value: Value, room: int, *, is_part: bool = False) -> Iterator[str]:
        """Yield the text of what is not plain; of a part, without the brackets round it."""
        if self._tree.has_tags:
            raise _NotPlainError
        encoder = self._encoder
        try:
            tree = encoder.convert(value, room)
        except (AtPathError, RecursionError, ValueError):
            raise _NotPlainError from None  # the tree of the whole says what, and where it is
        if encoder.has_pairs:
            self.in_order = False
            tree = canonical_tree(tree) if self._canonical else tree
        made = _Tree(tree, _ANY_DEPTH, has_tags=True)
        inside = _Pieces(made, compare=self.in_order, canonical=self._canonical)
        yield from inside._part(tree, _ANY_DEPTH) if is_part else inside
        self.in_order = inside.in_order

    def _divided(self, part: Json, room: int) -> Iterable[str]:
        middle = len(part) // 2
        if type(part) is list:
            if middle:
                return self._joined((part[:middle], part[middle:]), room)
            return self._of(part[0], room - 1)
        items = list(part.items())
        if middle:
            return self._joined((dict(items[:middle]), dict(items[middle:])), room)
        ((key, item),) = items
        return chain(("".join(write(key, 0)), ":"), self._of(item, room - 1))

    def _parts(self, value: dict[str, Json]) -> Iterator[dict[str, Json]]:
        """Yield a dictionary as several, in the order they are written."""
        keys: Iterable[str] = value
        if self._canonical:
            keys = merge(*(sorted(part) for part in _batches(value)))
        for part in _batches(keys):
            yield {key: value[key] for key in part}


#: Of a tree, which was limited in depth as it was made.
_ANY_DEPTH = 1 << 30


def _batches(items: Iterable[Value]) -> Iterator[list[Value]]:
    rest = iter(items)
    while batch := list(islice(rest, _ITEMS)):
        yield batch


def _has_text_keys(value: dict[Value, Value]) -> bool:
    return TAG not in value and all(TEXT.issuperset(map(type, part)) for part in _batches(value))


# --- decoding -------------------------------------------------------------------------------------


def decode_large(data: bytes, path: str = "value") -> Value:
    """Return what ``decode`` does; other threads need not wait."""
    if LARGE_BYTES < len(data) <= MAX_BYTES:
        try:
            with without_garbage_collection():
                return _Reader(data).read()
        except (AtPathError, ValueError, RecursionError):
            pass  # what follows says what is wrong, or reads what is valid and not written by us
    return codec.decode(data, path)


def _windows(data: bytes) -> Iterator[bytes]:
    for at in range(0, len(data), _PIECE):
        yield data[at : at + _PIECE]
        time.sleep(0)


class _NotOursError(ValueError):
    """The text is not as we write it; it may be valid all the same."""


class _Reader:
    """Reads JSON as we write it, a window of text at a time.

    What fits into a window is read by the C decoder, as many items at once as possible; of what
    does not, one level is read here. Tags are decoded with their window, except where a tag holds
    more than one window: all inside it is read first.
    """

    def __init__(self, data: bytes) -> None:
        self._text = "".join(iterdecode(_windows(data), "utf-8"))
        self._at = 0
        self._keeps_tags = False
        self._one_by_one_until = 0

    def read(self) -> Value:
        """Return the value that the whole text is."""
        value = self._value(MAX_DEPTH)
        if self._at != len(self._text):
            raise _NotOursError
        return value

    def _skip(self, expected: str) -> str:
        found = self._text[self._at : self._at + 1]
        if not found or found not in expected:
            raise _NotOursError
        self._at += 1
        return found

    def _decoded(self, text: str, room: int) -> Value:
        tree = parse_text(text, room)
        has_tags = codec.may_have_tags(text)
        return TreeDecoder().convert(tree, room) if has_tags and not self._keeps_tags else tree

    def _value(self, room: int) -> Value:
        """Read one value, whatever its size: of most of them, the end is near."""
        opening = self._text[self._at : self._at + 1]
        for window in (_WINDOW >> 8, _WINDOW):
            part = self._text[self._at : self._at + window]
            with contextlib.suppress(ValueError, StopIteration):  # it does not end in this window
                end = scan_once(part, 0)[1]
                if end < len(part) or self._at + end == len(self._text):  # a number may go on
                    self._at += end
                    return self._decoded(part[:end], room)
        if opening == "[":
            return self._list(room)
        return self._dict(room) if opening == "{" else self._long_text()

    def _long_text(self) -> str:
        self._skip('"')
        start, end = self._at, self._text.find('"', self._at)
        if end < 0 or self._text.find("\\", start, end) >= 0:
            raise _NotOursError
        parts = []
        for at in range(start, end, _WINDOW):
            piece = self._text[at : min(at + _WINDOW, end)]
            parts.append(scanstring(piece + '"', 0, True)[0])
            time.sleep(0)
        self._at = end + 1
        return "".join(parts)

    def _list(self, room: int) -> list[Value]:
        items: list[Value] = []
        self._skip("[")
        while True:
            items += self._up_to(self._last_item(), "[%s]", room) or [self._value(room - 1)]
            if self._skip(",]") == "]":
                return items

    def _last_item(self) -> int:
        """Return the index of a comma, most likely one between two items, late in this window.

        It is found by how the first one begins: a list of alike objects has it before each.
        """
        text, at = self._text, self._at
        begin = text[at : at + 1] if text[at : at + 1] in ("[", '"') else ""
        if text[at : at + 1] == "{":
            begin = text[at : text.find('":', at, at + _ITEMS) + 2]
        return text.rfind("," + begin, at, at + _WINDOW)

    def _dict(self, room: int) -> Value:
        self._skip("{")
        is_tag = self._text.startswith(codec.TAG_AS_KEY, self._at)
        outer, self._keeps_tags = self._keeps_tags, self._keeps_tags or is_tag
        members: dict[str, Value] = {}
        size = 0
        while True:
            found = self._up_to(self._last_member(), "{%s}", room) or self._member(room)
            members |= found
            size += len(found)
            if self._skip(",}") == "}":
                break
        self._keeps_tags = outer
        if len(members) != size or (TAG in members and not is_tag):
            raise _NotOursError
        return TreeDecoder().convert(members, room) if is_tag and not outer else members

    def _member(self, room: int) -> dict[str, Value]:
        key = self._value(1)
        if type(key) is not str:
            raise _NotOursError
        self._skip(":")
        return {key: self._value(room - 1)}

    def _last_member(self) -> int:
        """Return the index of a comma as ``_last_item`` does, found by how the first one ends."""
        text, at = self._text, self._at
        colon = text.find('":', at, at + _WINDOW)
        ending = {"{": "}", "[": "]", '"': '"'}.get(text[colon + 2 : colon + 3], "")
        return text.rfind(ending + ',"', at, at + _WINDOW) + len(ending)

    def _up_to(self, cut: int, brackets: str, room: int) -> Value:
        """Read what ends at a comma; None if it is none between two items.

        If it is inside an item, the text up to it is not valid. If it is behind the end of what is
        read, that end is found. Elsewhere the items up to it are read one by one: to try again
        after each of them would take the square of their number.
        """
        at = self._at
        if cut <= at or at < self._one_by_one_until:
            return None
        time.sleep(0)
        try:
            found = self._decoded(brackets % self._text[at:cut], room)
        except JSONDecodeError as error:
            end = at + error.pos - 2  # of what stands inside the brackets that were closed there
            if error.msg == "Extra data" and at < end < cut:
                return self._up_to(end, brackets, room)
            self._one_by_one_until = cut
            return None
        self._at = cut
        return found
