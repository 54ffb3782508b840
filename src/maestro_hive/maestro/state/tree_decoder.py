"""Trees of plain JSON to values: the other side of ``tree_encoder``."""

from __future__ import annotations

import base64
import dataclasses
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from datetime import date, datetime, time, timedelta, timezone, tzinfo
from decimal import Decimal
from enum import Enum, Flag
from fractions import Fraction
from functools import partial
from math import prod
from pathlib import Path, PurePath, PurePosixPath, PureWindowsPath
from typing import Any
from uuid import UUID

from maestro_hive.maestro.state.codec_classes import (
    Model,
    UnknownClassAtPathError,
    codecs,
    known_class,
)
from maestro_hive.maestro.state.strict_json import (
    MAX_DEPTH,
    SCALARS,
    AtPathError,
    Json,
    item_step,
    member,
)
from maestro_hive.maestro.state.tree_encoder import (
    BASE64_PIECE,
    DTYPE,
    FACTORIES,
    TAG,
    Node,
    make_model,
)


class TreeDecoder:
    """Makes the value of one tree, which is left as it is."""

    __slots__ = ("_classes", "_members")

    def __init__(self) -> None:
        self._classes: dict[str, type] = {}
        self._members: dict[tuple[str, str], Enum] = {}

    def decode(self, node: Json, room: int = MAX_DEPTH) -> Any:
        """Return the value of a tree; ``room`` is how deep it may still go."""
        kind = type(node)
        if kind is not dict and kind is not list:
            return node
        if room == 0:
            raise AtPathError(f"nested deeper than {MAX_DEPTH} levels")
        if kind is list:
            return self.items(node, room - 1)
        if TAG in node:
            return self._tagged(node, room - 1)
        return self.members(node, room - 1)

    def items(self, items: list[Json], room: int) -> list[Any]:
        """Return the values of a list of trees."""
        values: list[Any] = []
        try:
            for item in items:
                values.append(item if type(item) in SCALARS else self.decode(item, room))  # noqa: PERF401 - its length is the failing index
        except AtPathError as error:
            error.steps.append(f"[{len(values)}]")
            raise
        return values

    def members(self, node: Node, room: int) -> dict[str, Any]:
        """Return the values of an object's members."""
        values: dict[str, Any] = {}
        key = ""
        try:
            for key, item in node.items():
                values[key] = item if type(item) in SCALARS else self.decode(item, room)
        except AtPathError as error:
            error.steps.append(member(key))
            raise
        return values

    def pairs(self, node: Node, room: int) -> dict[Any, Any]:
        """Return a dictionary from its pairs."""
        values: dict[Any, Any] = {}
        for pair in _list(node):
            if type(pair) is not list or len(pair) != 2:
                raise AtPathError(f"not a valid {node[TAG]}: it is made of pairs")
            key = self.decode(pair[0], room)
            try:
                values[key] = self.decode(pair[1], room)
            except AtPathError as error:
                error.steps.append(item_step(key))
                raise
        if len(values) != len(node["v"]):
            raise AtPathError("a key stands twice in one dictionary")
        return values

    def fields(self, node: Node, room: int, at: str = "v") -> dict[str, Any]:
        """Return an object's fields by name."""
        if type(node[at]) is not dict or TAG in node[at]:
            raise AtPathError(f"not a valid {node[TAG]}: it is made of fields")
        return self.members(node[at], room)

    def member(self, node: Node) -> Enum:
        """Return the member of an enum; it is found once."""
        name, value = node["t"], node["v"]
        known = self._members.get((name, value)) if type(value) is str else None
        if known is None:
            kind = self.class_of(node)
            if not issubclass(kind, Enum) or type(value) is not str:
                raise AtPathError(f"{name} is not an enum, or has no such member")
            known = self._members[name, value] = kind[value]
        return known

    def class_of(self, node: Node) -> type:
        """Return the class of an object; it is searched once."""
        name = node["t"]
        found = self._classes.get(name)
        if found is None:
            found = self._classes[name] = known_class(name)
        return found

    def _tagged(self, node: Node, room: int) -> Any:
        tag = node[TAG]
        decoder = _DECODERS.get(tag) if isinstance(tag, str) else None
        if decoder is None:
            raise AtPathError(f"{str(tag)[:40]!r} is not a kind of value this version knows")
        try:
            return decoder(self, node, room)
        except AtPathError:
            raise
        except Exception as error:  # noqa: BLE001 - a constructor of the user's may raise anything
            raise AtPathError(f"not a valid {tag}: {error}") from None


Decoder = Callable[[TreeDecoder, Node, int], Any]


def _list(node: Node, length: int | None = None, kind: type | None = None) -> list[Any]:
    items = node["v"]
    if type(items) is not list or (length is not None and len(items) != length):
        raise AtPathError(f"not a valid {node[TAG]}: it is made of a list")
    if kind is not None and any(type(item) is not kind for item in items):
        raise AtPathError(f"not a valid {node[TAG]}: it is made of {kind.__name__}")
    return items


def _text(node: Node) -> str:
    if type(node["v"]) is not str:
        raise AtPathError(f"not a valid {node[TAG]}: it is made of a text")
    return node["v"]


def _bytes(node: Node) -> bytes:
    text = _text(node)
    step = BASE64_PIECE // 3 * 4
    if len(text) <= step:
        return base64.b64decode(text, validate=True)
    pieces = (text[at : at + step] for at in range(0, len(text), step))
    return b"".join(base64.b64decode(piece, validate=True) for piece in pieces)


def _decode_float(_decoder: TreeDecoder, node: Node, _room: int) -> float:
    if node["v"] not in ("nan", "inf", "-inf"):
        raise AtPathError("not a valid float: it is nan, inf or -inf")
    return float(node["v"])


def _decode_set(kind: type, decoder: TreeDecoder, node: Node, room: int) -> Any:
    made = kind(decoder.items(_list(node), room))
    if len(made) != len(node["v"]):
        raise AtPathError("an item stands twice in one set")
    return made


def _decode_deque(decoder: TreeDecoder, node: Node, room: int) -> deque[Any]:
    items, maxlen = decoder.items(_list(node), room), node.get("maxlen")
    if maxlen is not None and (type(maxlen) is not int or maxlen < len(items)):
        raise AtPathError("not a valid deque: it has more items than it can")
    return deque(items, maxlen)


def _decode_counter(decoder: TreeDecoder, node: Node, room: int) -> Counter[Any]:
    made: Counter[Any] = Counter()
    dict.update(made, decoder.pairs(node, room))
    return made


def _decode_defaultdict(decoder: TreeDecoder, node: Node, room: int) -> Any:
    factory = None if node["t"] is None else FACTORIES[node["t"]]
    return defaultdict(factory, decoder.pairs(node, room))


def _decode_zoned(kind: Any, decoder: TreeDecoder, node: Node, room: int) -> Any:
    when = kind.fromisoformat(node["v"])
    if "zone" in node:
        zone = decoder.decode(node["zone"], room)
        if not isinstance(zone, tzinfo):
            raise AtPathError(f"not a valid {node[TAG]}: {zone!r} is no time zone")
        when = when.replace(tzinfo=zone)
    return when.replace(fold=node["fold"]) if "fold" in node else when


def _decode_timezone(_decoder: TreeDecoder, node: Node, _room: int) -> timezone:
    days, seconds, microseconds, *name = _list(node)
    if not type(days) is type(seconds) is type(microseconds) is int:
        raise AtPathError("not a valid timezone: it is made of whole numbers and a name")
    return timezone(timedelta(days, seconds, microseconds), *name)


def _decode_zoneinfo(_decoder: TreeDecoder, node: Node, _room: int) -> tzinfo:
    from zoneinfo import ZoneInfo  # noqa: PLC0415 - rarely needed, slow to import

    return ZoneInfo(_text(node))


def _decode_complex(decoder: TreeDecoder, node: Node, room: int) -> complex:
    real, imag = decoder.items(_list(node, 2), room)
    if not type(real) is type(imag) is float:
        raise AtPathError("not a valid complex: it is made of floats")
    return complex(real, imag)


def _decode_path(_decoder: TreeDecoder, node: Node, _room: int) -> PurePath:
    kinds: dict[str | None, type[PurePath]]
    kinds = {None: Path, "posix": PurePosixPath, "windows": PureWindowsPath}
    return kinds[node.get("t")](_text(node))


def _decode_flag(decoder: TreeDecoder, node: Node, _room: int) -> Flag:
    kind = decoder.class_of(node)
    if not issubclass(kind, Flag) or type(node["v"]) is not int:
        raise AtPathError(f"{node['t']} is not a flag, or has no such value")
    return kind(node["v"])


def _decode_dataclass(decoder: TreeDecoder, node: Node, room: int) -> Any:
    kind = decoder.class_of(node)
    if not dataclasses.is_dataclass(kind):
        raise AtPathError(f"{node['t']} is not a dataclass")
    values = decoder.fields(node, room)
    late = {each.name for each in dataclasses.fields(kind) if not each.init}
    made = kind(**{name: value for name, value in values.items() if name not in late})
    for name, value in values.items():  # as they were, whatever making it did with them
        object.__setattr__(made, name, value)
    return made


def _decode_namedtuple(decoder: TreeDecoder, node: Node, room: int) -> Any:
    kind = decoder.class_of(node)
    if not (issubclass(kind, tuple) and hasattr(kind, "_fields")):
        raise AtPathError(f"{node['t']} is not a named tuple")
    return kind(**decoder.fields(node, room))


def _decode_model(decoder: TreeDecoder, node: Node, room: int) -> Any:
    kind = decoder.class_of(node)
    if not issubclass(kind, Model):
        raise AtPathError(f"{node['t']} is not a pydantic model")
    made = make_model(kind, decoder.fields(node, room))
    if "unset" in node:
        made.model_fields_set.difference_update(node["unset"])
    if "private" in node:
        for name, value in decoder.fields(node, room, "private").items():
            made.__pydantic_private__[name] = value
    return made


def _decode_registered(decoder: TreeDecoder, node: Node, room: int) -> Any:
    codec = codecs.of_name(node["t"])
    if codec is None:
        raise UnknownClassAtPathError(
            f"no codec named {str(node['t'])[:80]!r} is registered; call"
            " maestro_hive.register_codec for its class first"
        )
    return codec.decode(decoder.decode(node["v"], room))


def _numpy_dtype(node: Node) -> tuple[Any, Any]:
    numpy: Any = sys.modules.get("numpy")
    if numpy is None:
        raise UnknownClassAtPathError("it is a value of numpy's; import numpy first")
    if type(node["t"]) is not str or DTYPE.fullmatch(node["t"]) is None:
        raise AtPathError(f"{str(node['t'])[:40]!r} is not a type of numpy's")
    return numpy, numpy.dtype(node["t"])


def _decode_numpy_scalar(decoder: TreeDecoder, node: Node, room: int) -> Any:
    numpy, dtype = _numpy_dtype(node)
    if dtype.kind in "biuf" and dtype.itemsize <= 8:
        value = decoder.decode(node["v"], room + 1)
        if type(value) is not {"b": bool, "f": float}.get(dtype.kind, int):
            raise AtPathError(f"{str(value)[:40]} is not of the type {dtype}")
        return dtype.type(value)
    (value,) = numpy.frombuffer(_bytes(node), dtype)
    return value


def _decode_array(_decoder: TreeDecoder, node: Node, _room: int) -> Any:
    numpy, dtype = _numpy_dtype(node)
    shape, data = node["shape"], bytearray(_bytes(node))
    if any(type(length) is not int or length < 0 for length in shape):
        raise AtPathError("not a valid array: its shape is made of whole numbers")
    if prod(shape) * dtype.itemsize != len(data):
        raise AtPathError("not a valid array: its shape is not that of its data")
    return numpy.frombuffer(data, dtype).reshape(shape)  # writable, since a bytearray is


_DECODERS: dict[str, Decoder] = {
    "dict": TreeDecoder.pairs,
    "float": _decode_float,
    "tuple": lambda decoder, node, room: tuple(decoder.items(_list(node), room)),
    "set": partial(_decode_set, set),
    "frozenset": partial(_decode_set, frozenset),
    "deque": _decode_deque,
    "counter": _decode_counter,
    "ordereddict": lambda decoder, node, room: OrderedDict(decoder.pairs(node, room)),
    "defaultdict": _decode_defaultdict,
    "range": lambda _decoder, node, _room: range(*_list(node, 3, int)),
    "bytes": lambda _decoder, node, _room: _bytes(node),
    "bytearray": lambda _decoder, node, _room: bytearray(_bytes(node)),
    "datetime": partial(_decode_zoned, datetime),
    "date": lambda _decoder, node, _room: date.fromisoformat(node["v"]),
    "time": partial(_decode_zoned, time),
    "timedelta": lambda _decoder, node, _room: timedelta(*_list(node, 3, int)),
    "timezone": _decode_timezone,
    "zoneinfo": _decode_zoneinfo,
    "complex": _decode_complex,
    "decimal": lambda _decoder, node, _room: Decimal(_text(node)),
    "fraction": lambda _decoder, node, _room: Fraction(*_list(node, 2, int)),
    "uuid": lambda _decoder, node, _room: UUID(_text(node)),
    "path": _decode_path,
    "enum": lambda decoder, node, _room: decoder.member(node),
    "flag": _decode_flag,
    "dataclass": _decode_dataclass,
    "namedtuple": _decode_namedtuple,
    "model": _decode_model,
    "object": _decode_registered,
    "numpy": _decode_numpy_scalar,
    "ndarray": _decode_array,
}
