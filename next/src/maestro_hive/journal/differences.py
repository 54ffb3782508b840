"""Differences: a text as copies of parts of an older text, and the little that is new.

Works on bytes, so it needs no knowledge of lists or dictionaries. A difference is msgpack: a list
of copies (start, length) and of new bytes, in the order of the new text.
"""

from __future__ import annotations

from bisect import bisect_right
from itertools import accumulate
from operator import itemgetter
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

#: Copies of the older text (start, length), and new bytes.
_Parts = list[tuple[int, int] | bytes]
#: Where bytes belong in the last text, and which bytes of an older text they are (start, length).
_Range = tuple[int, int, int]
#: Where bytes belong in the last text, a buffer, and which of its bytes they are.
_Piece = tuple[int, bytes, int, int]

#: How many bytes are searched for, to find where two texts are equal again. Texts repeat
#: themselves, and many bytes stand in one place only; few find what is equal between two changes.
_ANCHORS = 4096, 512, 48
#: Parts that are not longer are new, without a search.
_SHORT = 256
#: How far from the place where they would be, equal bytes are searched first.
_NEAR = 2048
#: How often a part is divided.
_DEPTH = 8
#: Equal bytes are compared in blocks that grow up to this size.
_LARGEST_BLOCK = 1 << 16

_TOO_FAR = "it copies what the text before it does not have"

_pack = msgspec.msgpack.Encoder().encode
_unpack = msgspec.msgpack.Decoder(_Parts).decode


# --- finding ----------------------------------------------------------------------------------


def difference(base: bytes, text: bytes) -> bytes:
    """Return the difference that makes ``text`` of ``base``."""
    shorter = min(len(base), len(text))
    head = common_start(base, text)
    tail = _equal(base, text, len(base), len(text), shorter - head, -1)
    parts: _Parts = [(0, head)]
    parts += _middle(base, head, len(base) - tail, text, head, len(text) - tail, _DEPTH)
    parts.append((len(base) - tail, tail))
    return _pack([part for part in parts if (part if isinstance(part, bytes) else part[1])])


def is_like(base: bytes, text: bytes) -> bool:
    """Return whether a difference is worth trying: texts without equal parts are soon known."""
    size, length = len(text), _ANCHORS[-1]
    return any(text[at : at + length] in base for at in (size // 2, size // 4, size * 3 // 4))


def common_start(base: bytes, text: bytes) -> int:
    """Return how many bytes two texts start with are equal."""
    return _equal(base, text, 0, 0, min(len(base), len(text)), 1)


def _middle(old: bytes, a: int, b: int, new: bytes, c: int, d: int, depth: int) -> _Parts:
    """Return the parts that make new[c:d] of old[a:b], where few bytes may be equal.

    Bytes from the middle and from the quarters of the new part are searched in the old one, first
    where they would be if nothing had been added.
    """
    if depth and b - a > _SHORT and d - c > _SHORT:
        for at, end, low, high in _places(a, b, c, d):
            found = old.find(new[at:end], low, high)
            if found >= 0:
                left = _equal(old, new, found, at, min(found - a, at - c), -1)
                right = _equal(old, new, found, at, min(b - found, d - at), 1)
                return [
                    *_middle(old, a, found - left, new, c, at - left, depth - 1),
                    (found - left, left + right),
                    *_middle(old, found + right, b, new, at + right, d, depth - 1),
                ]
    return [new[c:d]]


def _places(a: int, b: int, c: int, d: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield which bytes of new[c:d] to search for, and between which places of old[a:b]."""
    points = (c + d) // 2, (3 * c + d) // 4, (c + 3 * d) // 4
    for length in _ANCHORS:
        for at in points:
            end = min(at + length, d)
            for place in (at - c + a, at - d + b):  # as far from the start, and from the end
                yield at, end, max(a, place - _NEAR), min(b, place + _NEAR + length)
    for length in _ANCHORS:
        for at in points:
            yield at, min(at + length, d), a, b


def _equal(old: bytes, new: bytes, i: int, j: int, limit: int, way: int) -> int:
    """Return how many bytes behind two places are equal (``way`` 1), or before them (-1)."""

    def is_equal(low: int, high: int) -> bool:
        if way < 0:
            return old[i - high : i - low] == new[j - high : j - low]
        return old[i + low : i + high] == new[j + low : j + high]

    low, size = 0, 64
    while low < limit and is_equal(low, min(low + size, limit)):
        low, size = low + size, min(size * 4, _LARGEST_BLOCK)
    high = min(low + size, limit)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if is_equal(low, middle) else (low, middle)
    return min(low, limit)


# --- applying ---------------------------------------------------------------------------------


def apply(base: bytes, differences: Sequence[bytes], most: int) -> bytes:
    """Return the text that a chain of differences makes of ``base``, the oldest of them first.

    From the newest one back, only the parts that the last text needs are followed: a long chain
    costs its links, not its links times the size. A ``ValueError`` means that one of them is no
    difference to the text before it, or that the last text is longer than ``most``.
    """
    pieces: list[_Piece] = []
    wanted: list[_Range] | None = None
    for each in reversed(differences):
        parts = _unpack(each)
        ends = list(accumulate(map(_size, parts)))
        if wanted is None:
            total = ends[-1] if ends else 0
            if total > most:
                raise ValueError("it makes a text that is too long")
            wanted = [(0, 0, total)] if total else []
        wanted = _follow(wanted, parts, ends, pieces)
    if wanted is None:
        return base
    for place, start, length in wanted:
        if start + length > len(base):
            raise ValueError(_TOO_FAR)
        pieces.append((place, base, start, length))
    pieces.sort(key=itemgetter(0))
    return b"".join([memoryview(data)[start : start + size] for _, data, start, size in pieces])


def _size(part: tuple[int, int] | bytes) -> int:
    if isinstance(part, bytes):
        return len(part)
    start, length = part
    if start < 0 or length <= 0:
        raise ValueError("it copies nothing")
    return length


def _follow(
    wanted: list[_Range], parts: _Parts, ends: list[int], pieces: list[_Piece]
) -> list[_Range]:
    """Return which ranges of the text before have the wanted bytes; add the new ones to pieces."""
    older: list[_Range] = []
    for place, first, length in wanted:
        start, stop = first, first + length
        if not ends or stop > ends[-1]:
            raise ValueError(_TOO_FAR)
        number = bisect_right(ends, start)
        while start < stop:
            part, begin = parts[number], start - ends[number] + _size(parts[number])
            taken = min(stop, ends[number]) - start
            if isinstance(part, bytes):
                pieces.append((place + start - first, part, begin, taken))
            else:
                older.append((place + start - first, part[0] + begin, taken))
            start, number = start + taken, number + 1
    return older
