"""Which types can be stored, and what they are as plain JSON.

What JSON has no form for becomes an object with the key ``$``, its tag: ``{"$":"date","v":…}``.
A type has one encoder and one decoder, in the two tables ``_ENCODERS`` and ``_DECODERS``; classes
of the user's are found by what they are (an enum, a dataclass) or were registered with
``register_codec``.
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
from math import prod
from pathlib import Path, PurePath, PurePosixPath, PureWindowsPath
from types import ModuleType
from typing import Any, NamedTuple, Protocol, TypeVar, cast, runtime_checkable
from uuid import UUID

from maestro_hive.kernel.errors import ConfigurationError, DecodeError
from maestro_hive.maestro.state.strict_json import (
    MAX_DEPTH,
    AtPathError,
    Json,
    dump_canonical,
    member,
)

TAG = "$"
#: Types that are the same in JSON, whatever their value; a float may be NaN.
_PLAIN = frozenset({str, int, bool, type(None)})
_PLAIN_OR_FLOAT = _PLAIN | {float}
#: Base64 and the like are made in pieces of this size, so that none takes long.
_PIECE = 3 * (1 << 18)

Node = dict[str, Json]
T = TypeVar("T")


@runtime_checkable
class Model(Protocol):
    """What a pydantic model offers; pydantic itself is never imported here."""

    def model_dump(self, *, mode: str, by_alias: bool, round_trip: bool) -> dict[str, object]:
        """Return the fields as plain data."""
        ...

    @classmethod
    def model_validate(cls, obj: object) -> object:
        """Return the model that these fields describe."""
        ...


class UnknownClassError(DecodeError):
    """A value is whole, and of a class that this process does not have: its own program does."""


class UnknownClassAtPathError(AtPathError):
    """What becomes an ``UnknownClassError`` when its path is known."""


# --- names of classes -----------------------------------------------------------------------------


def module_name(module: str) -> str:
    """Return the name by which others import a module, also of the program that was started."""
    if module not in ("__main__", "__mp_main__"):
        return module
    main = sys.modules.get(module)
    spec, file = getattr(main, "__spec__", None), getattr(main, "__file__", None)
    if spec is not None:
        return str(spec.name)
    return Path(file).stem if file else "__main__"


def class_name(kind: type) -> str:
    """Return ``module:name`` of a class, by which ``find_classes`` finds it again."""
    return f"{module_name(kind.__module__)}:{kind.__qualname__}"


def find_classes(name: str) -> list[type]:
    """Return what is known as ``module:name`` without importing anything or loading it late.

    The program that was started has two names, and may have been imported by its other one.
    """
    module, _, qualname = name.partition(":")
    known = [module] if module_name("__main__") != module else ["__main__", module]
    found = (_find(sys.modules.get(each), qualname) for each in known)
    return [kind for kind in found if isinstance(kind, type)]


def _find(found: object, qualname: str) -> object:
    for part in qualname.split("."):
        found = vars(found).get(part) if isinstance(found, ModuleType | type) else None
    return found


def _stored_name(kind: type) -> str:
    if "<locals>" in kind.__qualname__:
        raise AtPathError(
            f"{kind.__qualname__} is defined inside a function and could not be found again;"
            " define it in a module"
        )
    name = class_name(kind)
    if kind not in find_classes(name):
        raise AtPathError(f"its type is not what is found as {name}; define it there by that name")
    return name


def _class_of(node: Node) -> type:
    name: str = node["t"]
    found = find_classes(name)
    if found:
        return found[0]
    module = name.partition(":")[0]
    if module not in sys.modules and module_name("__main__") != module:
        raise UnknownClassAtPathError(f"its type {name} is not imported; import {module} first")
    raise UnknownClassAtPathError(
        f"its type {name} is not in this process: the module {module} has no such class here;"
        " read it with the program that stored it, or give the class back its name"
    )


# --- codecs of the user's -------------------------------------------------------------------------


class Codec(NamedTuple):
    """How instances of one class are stored: registered under a name."""

    name: str
    kind: type
    encode: Callable[[Any], object]
    decode: Callable[[Any], object]


class _Codecs:
    """The registered codecs, by class and by name; those of installed packages on first miss."""

    def __init__(self) -> None:
        self._by_type: dict[type, Codec] = {}
        self._by_name: dict[str, Codec] = {}
        self._loaded = False

    def add(self, codec: Codec) -> None:
        known = self._by_name.get(codec.name)
        if known is not None and class_name(known.kind) != class_name(codec.kind):
            raise ConfigurationError(
                f"a codec named {codec.name!r} is registered already, for"
                f" {class_name(known.kind)}; give this one another name"
            )
        before = self._by_type.pop(codec.kind, None)
        if before is not None:
            self._by_name.pop(before.name, None)
        self._by_type[codec.kind] = self._by_name[codec.name] = codec

    def of_type(self, kind: type, *, load: bool = False) -> Codec | None:
        if load and kind not in self._by_type:
            self._load()
        return self._by_type.get(kind)

    def of_name(self, name: object) -> Codec | None:
        if not isinstance(name, str):
            return None
        if name not in self._by_name:
            self._load()
        return self._by_name.get(name)

    def _load(self) -> None:
        """Call the functions that installed packages name as ``maestro_hive.codecs``, once."""
        if self._loaded:
            return
        self._loaded = True
        from importlib.metadata import entry_points  # noqa: PLC0415 - slow, and rarely needed

        for each in entry_points(group="maestro_hive.codecs"):
            try:
                each.load()()
            except Exception as error:
                raise ConfigurationError(
                    f"the codecs of {each.value} cannot be loaded: {error}"
                ) from error


_codecs = _Codecs()


def register_codec(
    cls: type[T],
    encode: Callable[[T], object],
    decode: Callable[[Any], T],
    *,
    name: str | None = None,
) -> None:
    """Store instances of exactly this class as what ``encode`` returns; ``decode`` makes them again.

    ``encode`` may return anything that can be stored. ``name`` is written with every value, and
    finds the codec when it is read: it must stay the same (default: ``module:name`` of the class).
    """
    if cls in _ENCODERS:
        raise ConfigurationError(f"{cls.__name__} has a form already, which cannot be replaced")
    _codecs.add(Codec(name or class_name(cls), cls, encode, decode))


# --- values to trees ------------------------------------------------------------------------------


class TreeEncoder:
    """Makes the tree of one value."""

    __slots__ = ("_found", "_members", "has_pairs")

    def __init__(self) -> None:
        #: Whether there are pairs, which the canonical form sorts, as it sorts keys.
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
                trees.append(item if type(item) in _PLAIN else self.encode(item, room))
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
            error.steps.append(f"[{key!r}]")
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
    codec = _codecs.of_type(kind)
    if codec is not None:
        return partial(_encode_registered, codec)
    if isinstance(value, Enum):
        return lambda encoder, value, _room: encoder.member(value)
    if type(kind.__module__) is str and kind.__module__.partition(".")[0] in _MODULES:
        found = _MODULES[kind.__module__.partition(".")[0]](value)
        if found is not None:
            return found
    if isinstance(value, tuple) and hasattr(kind, "_fields"):
        return _encode_namedtuple
    if not isinstance(value, _BUILT_IN):
        if dataclasses.is_dataclass(kind):
            return _encode_dataclass
        if issubclass(kind, Model):
            return _encode_model
    codec = _codecs.of_type(kind, load=True)
    if codec is not None:
        return partial(_encode_registered, codec)
    raise AtPathError(_no_form(kind))


#: A class derived from these holds more than its fields.
_BUILT_IN = (dict, list, tuple, set, frozenset, str, bytes, bytearray, int, float, BaseException)


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
        return {TAG: "enum", "t": _stored_name(kind), "v": value.name}
    if isinstance(value, Flag):  # several flags or none
        return {TAG: "flag", "t": _stored_name(kind), "v": int(value.value)}
    raise AtPathError(f"{value!r} is not a member of {kind.__qualname__} by its name")


def _encode_dataclass(encoder: TreeEncoder, value: Any, room: int) -> Json:
    kind = type(value)
    for name, each in kind.__dataclass_fields__.items():
        if each._field_type is dataclasses._FIELD_INITVAR:  # type: ignore[attr-defined]  # noqa: SLF001
            raise AtPathError(f"{kind.__qualname__} cannot be made again without its {name}")
    fields = {each.name: getattr(value, each.name) for each in dataclasses.fields(kind)}
    return {TAG: "dataclass", "t": _stored_name(kind), "v": encoder.fields(fields, room)}


def _encode_namedtuple(encoder: TreeEncoder, value: Any, room: int) -> Json:
    fields = dict(zip(value._fields, value, strict=True))
    return {TAG: "namedtuple", "t": _stored_name(type(value)), "v": encoder.fields(fields, room)}


def _encode_model(encoder: TreeEncoder, value: Any, room: int) -> Json:
    kind = type(value)
    fields = _model_fields(value)
    node: Node = {TAG: "model", "t": _stored_name(kind), "v": encoder.fields(fields, room)}
    try:
        back = _make_model(kind, fields)
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


def _make_model(kind: Any, fields: dict[str, Any]) -> Any:
    if getattr(kind, "__pydantic_root_model__", False):
        return kind.model_validate(fields["root"])
    return kind.model_validate(fields)


def _base64(data: Any) -> str:
    if len(data) <= _PIECE:
        return base64.b64encode(data).decode()
    view = memoryview(data)
    return "".join(
        base64.b64encode(view[at : at + _PIECE]).decode() for at in range(0, len(view), _PIECE)
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
    if factory is not None and _FACTORIES.get(getattr(factory, "__name__", "")) is not factory:
        raise AtPathError(
            f"a defaultdict of {factory!r} cannot be made again; one of {', '.join(_FACTORIES)} can"
        )
    name = None if factory is None else factory.__name__
    return {TAG: "defaultdict", "t": name, "v": encoder.pairs(value, room)}


_FACTORIES: dict[str, type] = {
    kind.__name__: kind for kind in (int, list, dict, set, str, float, bool, tuple)
}


def _encode_deque(encoder: TreeEncoder, value: deque[Any], room: int) -> Json:
    node = {TAG: "deque", "v": encoder.items(value, room)}
    return node if value.maxlen is None else {**node, "maxlen": value.maxlen}


def _encode_ordered(encoder: TreeEncoder, value: OrderedDict[Any, Any], room: int) -> Json:
    known, pairs = encoder.has_pairs, encoder.pairs(value, room)
    encoder.has_pairs = known  # its order is part of it
    return {TAG: "ordereddict", "v": pairs}


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
    if value.dtype.itemsize == 0 or _DTYPE.fullmatch(text) is None:
        raise AtPathError(f"a numpy value of type {value.dtype} has no form of its own")
    return text


#: Booleans, numbers, texts, bytes and times; not objects, not structures.
_DTYPE = re.compile(r"[<>|][biufcSUmM][0-9]{1,9}(\[[0-9]{0,9}[a-zA-Z]{1,2}\])?")


def _encode_numpy_scalar(encoder: TreeEncoder, value: Any, room: int) -> Json:
    dtype = _dtype(value)
    small = value.dtype.kind in "biuf" and value.dtype.itemsize <= 8
    written = encoder.encode(value.item(), room + 1) if small else _base64(value.tobytes())
    return {TAG: "numpy", "t": dtype, "v": written}


def _encode_array(_encoder: TreeEncoder, value: Any, _room: int) -> Json:
    node = {TAG: "ndarray", "t": _dtype(value), "shape": list(value.shape)}
    return {**node, "v": _base64(value.tobytes())}


#: Who finds the encoder for a class of these modules; they are never imported here.
_MODULES: dict[str, Callable[[Any], Encoder | None]] = {
    "numpy": _numpy_encoder,
    "zoneinfo": _zone_encoder,
    "backports": _zone_encoder,
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
    OrderedDict: _encode_ordered,
    defaultdict: _encode_defaultdict,
    range: lambda _encoder, value, _room: {TAG: "range", "v": [value.start, value.stop, value.step]},
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


# --- trees to values ------------------------------------------------------------------------------


class TreeDecoder:
    """Makes the value of one tree, which is left as it is."""

    __slots__ = ("_members",)

    def __init__(self) -> None:
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
                values.append(item if type(item) in _PLAIN_OR_FLOAT else self.decode(item, room))
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
                values[key] = item if type(item) in _PLAIN_OR_FLOAT else self.decode(item, room)
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
                error.steps.append(f"[{key!r}]")
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
        known = self._members.get((name, value))
        if known is None:
            kind = _class_of(node)
            if not issubclass(kind, Enum):
                raise AtPathError(f"{name} is not an enum")
            known = self._members[name, value] = kind[value]
        return known

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
    step = _PIECE // 3 * 4
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
    factory = None if node["t"] is None else _FACTORIES[node["t"]]
    return defaultdict(factory, decoder.pairs(node, room))


def _decode_zoned(kind: Any, decoder: TreeDecoder, node: Node, room: int) -> Any:
    when = kind.fromisoformat(node["v"])
    if "zone" in node:
        zone = decoder.decode(node["zone"], room)
        if not isinstance(zone, tzinfo):
            raise AtPathError(f"not a valid {node[TAG]}: {zone!r} is no time zone")
        when = when.replace(tzinfo=zone)
    return when.replace(fold=node.get("fold", 0))


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


def _decode_flag(_decoder: TreeDecoder, node: Node, _room: int) -> Flag:
    kind = _class_of(node)
    if not issubclass(kind, Flag) or type(node["v"]) is not int:
        raise AtPathError(f"{node['t']} is not a flag, or has no such value")
    return kind(node["v"])


def _decode_dataclass(decoder: TreeDecoder, node: Node, room: int) -> Any:
    kind = _class_of(node)
    if not dataclasses.is_dataclass(kind):
        raise AtPathError(f"{node['t']} is not a dataclass")
    values = decoder.fields(node, room)
    late = {each.name for each in dataclasses.fields(kind) if not each.init}
    made = kind(**{name: value for name, value in values.items() if name not in late})
    for name, value in values.items():  # as they were, whatever making it did with them
        object.__setattr__(made, name, value)
    return made


def _decode_namedtuple(decoder: TreeDecoder, node: Node, room: int) -> Any:
    kind = _class_of(node)
    if not (issubclass(kind, tuple) and hasattr(kind, "_fields")):
        raise AtPathError(f"{node['t']} is not a named tuple")
    return kind(**decoder.fields(node, room))


def _decode_model(decoder: TreeDecoder, node: Node, room: int) -> Any:
    kind = _class_of(node)
    if not issubclass(kind, Model):
        raise AtPathError(f"{node['t']} is not a pydantic model")
    made = _make_model(kind, decoder.fields(node, room))
    if "unset" in node:
        made.model_fields_set.difference_update(node["unset"])
    if "private" in node:
        for name, value in decoder.fields(node, room, "private").items():
            made.__pydantic_private__[name] = value
    return made


def _decode_registered(decoder: TreeDecoder, node: Node, room: int) -> Any:
    codec = _codecs.of_name(node["t"])
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
    if type(node["t"]) is not str or _DTYPE.fullmatch(node["t"]) is None:
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
