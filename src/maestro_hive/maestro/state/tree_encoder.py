"""Values to trees of plain JSON: what JSON has no form for becomes an object with a tag.

A tagged object has the key ``$``: ``{"$":"date","v":"2030-01-01"}``. A type has its encoder in the
table ``_ENCODERS`` and its decoder in that of ``tree_decoder``; classes of the user's are found by
what they are (an enum, a dataclass) or were registered with ``register_codec``.
"""

from __future__ import annotations

import base64
import dataclasses
import re
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from datetime import date, datetime, time, timedelta, timezone, tzinfo
from decimal import Decimal
from enum import Enum, Flag
from fractions import Fraction
from functools import partial
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any
from uuid import UUID

from maestro_hive.maestro.state.codec_classes import BUILT_IN, Codec, Model, codecs, stored_name
from maestro_hive.maestro.state.strict_json import (
    MAX_DEPTH,
    AtPathError,
    Json,
    dump_canonical,
    item_step,
    member,
)

TAG = "$"
#: Types that are the same in JSON, whatever their value; a float may be NaN.
_PLAIN: frozenset[type] = frozenset({str, int, bool, type(None)})
#: Base64 is made in pieces of this size, so that none takes long.
BASE64_PIECE = 3 * (1 << 18)

Node = dict[str, Json]


class TreeEncoder:
    """Makes the tree of one value."""

    __slots__ = ("_found", "_members", "has_pairs")

    def __init__(self) -> None:
        #: Whether there are pairs, which the canonical form may sort, as it sorts keys.
        self.has_pairs = False
        self._found: dict[type, Encoder] = {}
        self._members: dict[int, Node] = {}

    def encode(self, value: Any, room: int = MAX_DEPTH) -> Json:
        """Return ``value`` as plain JSON; ``room`` is how deep it may still go."""
        kind = type(value)
        if kind in _PLAIN or (kind is float and value - value == 0.0):
            return value
        if room == 0:
            raise AtPathError(f"nested deeper than {MAX_DEPTH} levels, or contains itself")
        encoder = _ENCODERS.get(kind) or self._found.get(kind)
        if encoder is None:
            encoder = self._found[kind] = _encoder_of(value)
        return encoder(self, value, room - 1)

    def items(self, items: Iterable[Any], room: int) -> list[Json]:
        """Return the trees of a sequence's items."""
        trees: list[Json] = []
        try:
            for item in items:
                trees.append(item if type(item) in _PLAIN else self.encode(item, room))  # noqa: PERF401 - its length is the failing index
        except AtPathError as error:
            error.steps.append(f"[{len(trees)}]")
            raise
        return trees

    def fields(self, fields: Mapping[str, object], room: int) -> Node:
        """Return the trees of an object's fields, by name."""
        trees: Node = {}
        name = ""
        try:
            for name, item in fields.items():
                trees[name] = item if type(item) in _PLAIN else self.encode(item, room)
        except AtPathError as error:
            error.steps.append(f".{name}")
            raise
        return trees

    def dict(self, items: dict[Any, Any], room: int) -> Json:
        """Return the tree of a dictionary: as it is where its keys are texts, else as pairs."""
        trees: Node = {}
        key: object = None
        try:
            for key, item in items.items():
                if type(key) is not str or key == TAG:
                    break
                trees[key] = item if type(item) in _PLAIN else self.encode(item, room)
            else:
                return trees
        except AtPathError as error:
            error.steps.append(member(key))
            raise
        return {TAG: "dict", "v": self.pairs(items, room)}

    def pairs(self, items: Mapping[Any, Any], room: int) -> list[Json]:
        """Return the trees of keys and values, in their order."""
        self.has_pairs = True
        trees: list[Json] = []
        key: object = None
        try:
            for key, item in items.items():
                trees.append([self.encode(key, room), self.encode(item, room)])
        except AtPathError as error:
            error.steps.append(item_step(key))
            raise
        return trees

    def member(self, value: Enum) -> Node:
        """Return the tree of an enum's member; it is made once."""
        known = self._members.get(id(value))
        if known is None:
            known = self._members[id(value)] = _encode_member(value)
        return known


Encoder = Callable[[TreeEncoder, Any, int], Json]


def _encoder_of(value: object) -> Encoder:
    """Return the encoder for a class that is in no table; it is found by what it is."""
    kind = type(value)
    codec = codecs.of_type(kind)
    found = None if codec is not None else _known_kind(value)
    if found is not None:
        return found
    codec = codec or codecs.of_type(kind, load=True)
    if codec is None:
        raise AtPathError(_no_form(kind))
    return partial(_encode_registered, codec)


def _known_kind(value: object) -> Encoder | None:
    kind = type(value)
    if isinstance(value, Enum):
        return lambda encoder, value, _room: encoder.member(value)
    if isinstance(value, tuple) and hasattr(kind, "_fields"):
        return partial(_encode_fields, "namedtuple", stored_name(kind), tuple(kind._fields))
    package = str(kind.__module__).partition(".")[0]
    if package in _PACKAGES:
        return _PACKAGES[package](value)
    if isinstance(value, _BUILT_IN_BASES):
        return None
    if dataclasses.is_dataclass(kind):
        return partial(_encode_fields, "dataclass", stored_name(kind), _dataclass_fields(kind))
    return partial(_encode_model, stored_name(kind)) if issubclass(kind, Model) else None


#: A class derived from these holds more than its fields.
_BUILT_IN_BASES = (
    dict,
    list,
    tuple,
    set,
    frozenset,
    str,
    bytes,
    bytearray,
    int,
    float,
    BaseException,
)


def _no_form(kind: type) -> str:
    name = f"{kind.__module__}.{kind.__qualname__}"
    how = f"maestro_hive.register_codec({kind.__qualname__}, encode, decode)"
    for base in (dict, list, tuple, set, str, int, float):
        if issubclass(kind, base):
            return (
                f"a {name} would come back as a {base.__name__};"
                f" convert it, or register how it is stored: {how}"
            )
    return (
        f"a {name} cannot be stored; give plain data, a dataclass or a pydantic model, or register"
        f" how it is stored: {how}"
    )


def _encode_registered(codec: Codec, encoder: TreeEncoder, value: object, room: int) -> Json:
    try:
        stored = codec.encode(value)
    except Exception as error:
        raise AtPathError(f"the codec {codec.name!r} raised {error!r}") from error
    return {TAG: "object", "t": codec.name, "v": encoder.encode(stored, room)}


def _encode_member(value: Enum) -> Node:
    kind = type(value)
    if kind.__members__.get(value.name) is value:
        return {TAG: "enum", "t": stored_name(kind), "v": value.name}
    if isinstance(value, Flag):  # several flags or none
        return {TAG: "flag", "t": stored_name(kind), "v": int(value.value)}
    raise AtPathError(f"{value!r} is not a member of {kind.__qualname__} by its name")


def _dataclass_fields(kind: Any) -> tuple[str, ...]:
    for name, each in kind.__dataclass_fields__.items():
        if each._field_type is dataclasses._FIELD_INITVAR:  # type: ignore[attr-defined]  # noqa: SLF001
            raise AtPathError(f"{kind.__qualname__} cannot be made again without its {name}")
    return tuple(each.name for each in dataclasses.fields(kind))


def _encode_fields(
    tag: str, name: str, names: tuple[str, ...], encoder: TreeEncoder, value: Any, room: int
) -> Json:
    fields = {each: getattr(value, each) for each in names}
    return {TAG: tag, "t": name, "v": encoder.fields(fields, room)}


def _encode_model(name: str, encoder: TreeEncoder, value: Any, room: int) -> Json:
    kind = type(value)
    fields = _model_fields(value)
    node: Node = {TAG: "model", "t": name, "v": encoder.fields(fields, room)}
    try:
        back = make_model(kind, fields)
    except ValueError as error:
        raise AtPathError(f"the model does not come back from its fields: {error}") from None
    if TAG in fields or (
        _model_fields(back) != fields and encoder.fields(_model_fields(back), room) != node["v"]
    ):
        raise AtPathError("the model comes back from its fields with other values")
    unset = sorted(kind.model_fields.keys() - value.model_fields_set)
    if unset:
        node["unset"] = unset
    known = back.__pydantic_private__ or {}
    private = {
        name: item
        for name, item in (value.__pydantic_private__ or {}).items()
        if name not in known or known[name] != item
    }
    if private:
        node["private"] = encoder.fields(private, room)
    return node


def _model_fields(model: Any) -> dict[str, object]:
    """Return the fields by the names that the model is made with, and what it has besides."""
    fields: dict[str, object] = {}
    for name, info in type(model).model_fields.items():
        alias = info.validation_alias
        alias = getattr(alias, "choices", [alias])[0]
        fields[alias if isinstance(alias, str) else name] = getattr(model, name)
    return fields | (model.model_extra or {})


def make_model(kind: Any, fields: dict[str, Any]) -> Any:
    """Return a pydantic model with these fields, validated."""
    if getattr(kind, "__pydantic_root_model__", False):
        return kind.model_validate(fields["root"])
    return kind.model_validate(fields)


def _base64(data: Any) -> str:
    if len(data) <= BASE64_PIECE:
        return base64.b64encode(data).decode()
    view = memoryview(data)
    return "".join(
        base64.b64encode(view[at : at + BASE64_PIECE]).decode()
        for at in range(0, len(view), BASE64_PIECE)
    )


def _encode_set(tag: str, encoder: TreeEncoder, value: Iterable[object], room: int) -> Json:
    trees = [encoder.encode(item, room) for item in value]
    try:
        trees.sort(key=dump_canonical)  # a set has no order, and the text shall be the same
    except UnicodeEncodeError:
        raise AtPathError("a text with half a surrogate pair has no form in UTF-8") from None
    except ValueError as error:
        raise AtPathError(f"an integer is too long: {error}") from None
    return {TAG: tag, "v": trees}


def _encode_defaultdict(encoder: TreeEncoder, value: defaultdict[Any, Any], room: int) -> Json:
    factory: Any = value.default_factory
    if factory is not None and FACTORIES.get(getattr(factory, "__name__", "")) is not factory:
        raise AtPathError(
            f"a defaultdict of {factory!r} cannot be made again; one of {', '.join(FACTORIES)} can"
        )
    name = None if factory is None else factory.__name__
    return {TAG: "defaultdict", "t": name, "v": encoder.pairs(value, room)}


FACTORIES: dict[str, type] = {
    kind.__name__: kind for kind in (int, list, dict, set, str, float, bool, tuple)
}


def _encode_deque(encoder: TreeEncoder, value: deque[Any], room: int) -> Json:
    node = {TAG: "deque", "v": encoder.items(value, room)}
    return node if value.maxlen is None else {**node, "maxlen": value.maxlen}


def _encode_zoned(tag: str, encoder: TreeEncoder, value: Any, _room: int) -> Json:
    """Return the tree of a datetime or a time of day."""
    zone = value.tzinfo
    if zone is None or (type(zone) is timezone and len(zone.__getinitargs__()) == 1):  # type: ignore[attr-defined]
        node = {TAG: tag, "v": value.isoformat()}
    else:
        local = value.replace(tzinfo=None).isoformat()
        node = {TAG: tag, "v": local, "zone": encoder.encode(zone)}
    return {**node, "fold": 1} if value.fold else node


def _encode_timezone(_encoder: TreeEncoder, value: Any, _room: int) -> Json:
    offset, *name = value.__getinitargs__()
    return {TAG: "timezone", "v": [offset.days, offset.seconds, offset.microseconds, *name]}


def _zone_encoder(zone: object) -> Encoder | None:
    if not isinstance(zone, tzinfo) or not isinstance(getattr(zone, "key", None), str):
        raise AtPathError(f"a time zone of type {type(zone).__name__} without a name has no form")
    return lambda _encoder, zone, _room: {TAG: "zoneinfo", "v": zone.key}


def _numpy_encoder(value: Any) -> Encoder | None:
    numpy: Any = sys.modules["numpy"]
    if type(value) is numpy.ndarray:
        return _encode_array
    return _encode_numpy_scalar if isinstance(value, numpy.generic) else None


def _dtype(value: Any) -> str:
    text: str = value.dtype.str
    if value.dtype.itemsize == 0 or DTYPE.fullmatch(text) is None:
        raise AtPathError(f"a numpy value of type {value.dtype} has no form of its own")
    return text


#: Booleans, numbers, texts, bytes and times; not objects, not structures.
DTYPE = re.compile(r"[<>|][biufcSUmM][0-9]{1,9}(\[[0-9]{0,9}[a-zA-Z]{1,2}\])?")


def _encode_numpy_scalar(encoder: TreeEncoder, value: Any, room: int) -> Json:
    dtype = _dtype(value)
    small = value.dtype.kind in "biuf" and value.dtype.itemsize <= 8
    written = encoder.encode(value.item(), room + 1) if small else _base64(value.tobytes())
    return {TAG: "numpy", "t": dtype, "v": written}


def _encode_array(_encoder: TreeEncoder, value: Any, _room: int) -> Json:
    node = {TAG: "ndarray", "t": _dtype(value), "shape": list(value.shape)}
    return {**node, "v": _base64(value.tobytes())}


#: Finds the encoder for a class of these packages; they are never imported here.
_PACKAGES: dict[str, Callable[[Any], Encoder | None]] = {
    "numpy": _numpy_encoder,
    "zoneinfo": _zone_encoder,
}

_ENCODERS: dict[type, Encoder] = {
    dict: TreeEncoder.dict,
    list: TreeEncoder.items,
    float: lambda _encoder, value, _room: {TAG: "float", "v": repr(value)},
    tuple: lambda encoder, value, room: {TAG: "tuple", "v": encoder.items(value, room)},
    set: partial(_encode_set, "set"),
    frozenset: partial(_encode_set, "frozenset"),
    deque: _encode_deque,
    Counter: lambda encoder, value, room: {TAG: "counter", "v": encoder.pairs(value, room)},
    OrderedDict: lambda encoder, value, room: {TAG: "ordereddict", "v": encoder.pairs(value, room)},
    defaultdict: _encode_defaultdict,
    range: lambda _encoder, value, _room: {
        TAG: "range",
        "v": [value.start, value.stop, value.step],
    },
    bytes: lambda _encoder, value, _room: {TAG: "bytes", "v": _base64(value)},
    bytearray: lambda _encoder, value, _room: {TAG: "bytearray", "v": _base64(value)},
    datetime: partial(_encode_zoned, "datetime"),
    date: lambda _encoder, value, _room: {TAG: "date", "v": value.isoformat()},
    time: partial(_encode_zoned, "time"),
    timedelta: lambda _encoder, value, _room: {
        TAG: "timedelta",
        "v": [value.days, value.seconds, value.microseconds],
    },
    timezone: _encode_timezone,
    complex: lambda encoder, value, _room: {
        TAG: "complex",
        "v": [encoder.encode(value.real), encoder.encode(value.imag)],
    },
    Decimal: lambda _encoder, value, _room: {TAG: "decimal", "v": str(value)},
    Fraction: lambda _encoder, value, _room: {
        TAG: "fraction",
        "v": [value.numerator, value.denominator],
    },
    UUID: lambda _encoder, value, _room: {TAG: "uuid", "v": str(value)},
    type(Path()): lambda _encoder, value, _room: {TAG: "path", "v": str(value)},
    PurePosixPath: lambda _encoder, value, _room: {TAG: "path", "t": "posix", "v": str(value)},
    PureWindowsPath: lambda _encoder, value, _room: {TAG: "path", "t": "windows", "v": str(value)},
}

BUILT_IN.update(_ENCODERS, _PLAIN)


# --- canonical trees ------------------------------------------------------------------------------

#: Tags of dictionaries: of equal ones, the pairs may stand in another order.
_UNORDERED = frozenset({"dict", "counter", "defaultdict"})


def canonical_tree(tree: Json) -> Json:
    """Return a tree with the pairs of its dictionaries sorted; keys are sorted as it is written."""
    if type(tree) is list:
        return [canonical_tree(item) for item in tree]
    if type(tree) is not dict:
        return tree
    made = {key: canonical_tree(item) for key, item in tree.items()}
    if tree.get(TAG) in _UNORDERED:
        made["v"].sort(key=lambda pair: dump_canonical(pair[0]))
    return made
