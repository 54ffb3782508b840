"""Plain data, which msgspec writes as it is: dicts with texts as keys, lists, texts, numbers, None.

Most values are plain, and few of them should be walked in Python: msgspec writes a value, and the
value is plain if what msgspec reads from that text is equal to it. ``plain`` finds the rest, which
``tagged_values`` writes: what msgspec would change silently, such as a tuple, an enum or NaN.
"""

from __future__ import annotations

import gc
import marshal
import math
from typing import Any

import msgspec

#: The key that marks a tagged object.
TAG = "$"
TAG_AS_KEY = f'"{TAG}":'.encode()
#: How deep a value may be nested.
MAX_DEPTH = 100
TEXT = frozenset({str})
#: Types that are the same in JSON, whatever the value; a float may be NaN.
ALWAYS_PLAIN: frozenset[type] = frozenset({str, int, bool, type(None)})
_SCALARS = ALWAYS_PLAIN | {float}

#: Writes JSON without spaces, keys in their order.
dump = msgspec.json.Encoder().encode
#: Writes JSON with sorted keys: equal trees give equal bytes.
dump_sorted = msgspec.json.Encoder(order="sorted").encode
#: Reads plain JSON; a ``ValueError`` or a ``RecursionError`` means that it is none.
load = msgspec.json.Decoder().decode
#: From this size on, a text is read by ``load_large``.
LARGE = 1 << 20

#: With more bytes of text than this for each container, copying is faster than reading back.
_BYTES_A_CONTAINER = 400
#: With fewer containers than this, too.
_FEW_CONTAINERS = 8
#: A text this short has few containers anyway.
_SHORT = 256
#: Containers are counted in this many first bytes.
_SAMPLE = 1 << 16
#: Integers up to this size are recognised at once; others may have too many digits for a text.
_LONGEST_INTEGER = 1 << 63


class _NotPlainError(Exception):
    """A value would be read back as another one."""


def load_large(data: bytes) -> Any:
    """Return plain JSON; the collector would visit all containers again and again meanwhile."""
    if not gc.isenabled():
        return load(data)
    gc.disable()
    try:
        return load(data)
    finally:
        gc.enable()


def plain(value: Any, room: int = MAX_DEPTH) -> tuple[bytes, Any] | None:
    """Return the text of plain data, and the data as it is read back; None if it is not plain.

    ``room`` is how deep the data may be nested.
    """
    kind = type(value)
    if kind in ALWAYS_PLAIN and kind is not str:
        is_short = kind is not int or -_LONGEST_INTEGER < value < _LONGEST_INTEGER
        return (dump(value), value) if is_short else None
    try:
        data = dump(value)
        if kind is str:
            return data, value
        if len(data) >= _SHORT or b"$" in data:
            return data, _read_back(value, data, room)
        if kind is dict and room and ALWAYS_PLAIN.issuperset(map(type, value.values())):
            return (data, value.copy()) if TEXT.issuperset(map(type, value)) else None
        return data, _copy(value, room)
    except Exception:  # noqa: BLE001 - of msgspec and marshal, or of an `__eq__` of the user's
        return None


def _read_back(value: Any, data: bytes, room: int) -> Any:
    """Return plain data as it is read back from its text; raise an error if it is not plain.

    Equality finds nearly all types that would come back as another one; what is equal all the same
    (enums, classes derived from list and dict), marshal refuses. In this order: marshal takes
    exponential time for sets in sets.
    """
    if b"$" in data and TAG_AS_KEY in data:  # one byte first: searching for more is slow
        raise _NotPlainError
    sample = data[:_SAMPLE]
    containers = sample.count(b"{") + sample.count(b"[")
    if containers < _FEW_CONTAINERS or len(sample) > _BYTES_A_CONTAINER * containers:
        return _copy(value, room)
    back = load(data) if len(data) < LARGE else load_large(data)
    deepest = containers + len(data) - len(sample)
    if value != back or (deepest > room and not _is_shallow(back, room)):
        raise _NotPlainError
    marshal.dumps(value, 2)
    return back


def _copy(value: Any, room: int) -> Any:
    """Return plain data as it would be read back: new containers, the same texts and numbers."""
    kind = type(value)
    if kind is dict and TEXT.issuperset(map(type, value)):
        items: Any = value.values()
    elif kind is list:
        items = value
    elif kind is float and math.isfinite(value):
        return value
    else:
        raise _NotPlainError
    if not room:
        raise _NotPlainError
    kinds = set(map(type, items))
    if float in kinds and not all(math.isfinite(each) for each in items if type(each) is float):
        raise _NotPlainError
    if kinds <= _SCALARS:
        return value.copy()
    inside = room - 1
    if kind is list:
        return [each if type(each) in _SCALARS else _copy(each, inside) for each in value]
    return {
        key: each if type(each) in _SCALARS else _copy(each, inside) for key, each in value.items()
    }


def _is_shallow(tree: Any, room: int) -> bool:
    """Return whether plain JSON is not nested too deep, level by level."""
    level = [tree]
    for _ in range(room):
        members = (each.values() if type(each) is dict else each for each in level)
        level = [item for items in members for item in items if type(item) in (dict, list)]
        if not level:
            return True
    return False
