"""Values to trees of plain JSON and back: what JSON has no form for becomes an object with a tag.

A tagged object has the key ``$``: ``{"$":"date","v":"2030-01-01"}``. A type has its encoder in the
table ``_ENCODERS`` and its decoder in ``_DECODERS``, or both in ``_SIMPLE``; classes of the user's
are found by what they are (an enum, a dataclass) or were registered with ``register_codec``.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from datetime import date, datetime, time, timedelta, timezone, tzinfo
from decimal import Decimal
from enum import Enum, Flag
from fractions import Fraction
from functools import partial
from pathlib import Path, PurePath, PurePosixPath, PureWindowsPath
from typing import ClassVar
from uuid import UUID

from maestro_hive.maestro.state import codec_classes as classes
from maestro_hive.maestro.state.codec_classes import TAG, Codec, Model, Node, text_of
from maestro_hive.maestro.state.strict_json import (
    MAX_DEPTH,
    SCALARS,
    TEXT,
    AtPathError,
    Json,
    Value,
    dump_canonical,
    item_step,
    member,
)

#: Types that are the same in JSON, whatever their value; a float may be NaN.
_PLAIN: frozenset[type] = frozenset({str, int, bool, type(None)})


# --- walking --------------------------------------------------------------------------------------


class _Walker:
    """Converts what containers hold; an error learns on the way out where it happened."""

    __slots__ = ()
    #: The types that stay as they are.
    plain: ClassVar[frozenset[type]] = frozenset()

    def convert(self, value: Value, room: int = MAX_DEPTH) -> Value:
        """Return what becomes of ``value``; ``room`` is how deep it may still go."""
        raise NotImplementedError

    def items(self, items: Iterable[object], room: int) -> list[Value]:
        """Convert the items of a sequence."""
        plain, convert = self.plain, self.convert
        made: list[Value] = []
        try:
            for item in items:
                made.append(item if type(item) in plain else convert(item, room))  # noqa: PERF401 - its length is the failing index
        except AtPathError as error:
            error.steps.append(f"[{len(made)}]")
            raise
        return made

    def members(self, items: Mapping[str, object], room: int) -> dict[str, Value]:
        """Convert the members of an object, by name."""
        plain, convert = self.plain, self.convert
        made: dict[str, Value] = {}
        key = ""
        try:
            for key, item in items.items():
                made[key] = item if type(item) in plain else convert(item, room)
        except AtPathError as error:
            error.steps.append(member(key))
            raise
        return made


class TreeEncoder(_Walker):
    """Makes the tree of one value."""

    __slots__ = ("_found", "_members", "has_pairs")
    plain = _PLAIN

    def __init__(self) -> None:
        #: Whether there are pairs, which the canonical form may sort, as it sorts keys.
        self.has_pairs = False
        self._found: dict[type, Encoder] = {}
        self._members: dict[int, Node] = {}

    def convert(self, value: Value, room: int = MAX_DEPTH) -> Json:
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

    def dict(self, items: dict[Value, Value], room: int) -> Json:
        """Return the tree of a dictionary: as it is where its keys are texts, else as pairs."""
        if TAG not in items and TEXT.issuperset(map(type, items)):
            return self.members(items, room)
        return {TAG: "dict", "v": self.pairs(items, room)}

    def pairs(self, items: Mapping[Value, Value], room: int) -> list[Json]:
        """Return the trees of keys and values, in their order."""
        self.has_pairs = True
        trees: list[Json] = []
        key: object = None
        try:
            for key, item in items.items():
                trees.append([self.convert(key, room), self.convert(item, room)])
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


class TreeChecker(TreeEncoder):
    """Finds what in a value JSON has no text for: slow, for a value that could not be written."""

    plain: ClassVar[frozenset[type]] = frozenset()

    def convert(self, value: Value, room: int = MAX_DEPTH) -> Json:
        """Raise an error if something in ``value`` cannot be written, the innermost first."""
        tree = TreeEncoder.convert(self, value, room)
        try:
            dump_canonical(tree)
        except UnicodeEncodeError:
            raise AtPathError("a text with half a surrogate pair has no form in UTF-8") from None
        except ValueError as error:
            raise AtPathError(f"an integer is too long: {error}") from None
        return tree


class TreeDecoder(_Walker):
    """Makes the value of one tree, which is left as it is."""

    __slots__ = ("_classes", "_members")
    plain: ClassVar[frozenset[type]] = SCALARS

    def __init__(self) -> None:
        self._classes: dict[str, type] = {}
        self._members: dict[tuple[str, str], Enum] = {}

    def convert(self, value: Json, room: int = MAX_DEPTH) -> Value:
        """Return the value of a tree; ``room`` is how deep it may still go."""
        kind = type(value)
        if kind is not dict and kind is not list:
            return value
        if room == 0:
            raise AtPathError(f"nested deeper than {MAX_DEPTH} levels")
        if kind is list:
            return self.items(value, room - 1)
        if TAG in value:
            return self._tagged(value, room - 1)
        return self.members(value, room - 1)

    def pairs(self, node: Node, room: int) -> dict[Value, Value]:
        """Return a dictionary from its pairs."""
        values: dict[Value, Value] = {}
        for pair in _list(node):
            if type(pair) is not list or len(pair) != 2:
                raise AtPathError(f"not a valid {node[TAG]}: it is made of pairs")
            key = self.convert(pair[0], room)
            try:
                values[key] = self.convert(pair[1], room)
            except AtPathError as error:
                error.steps.append(item_step(key))
                raise
        if len(values) != len(node["v"]):
            raise AtPathError("a key stands twice in one dictionary")
        return values

    def fields(self, node: Node, room: int, at: str = "v") -> dict[str, Value]:
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
            found = self._classes[name] = classes.known_class(name)
        return found

    def _tagged(self, node: Node, room: int) -> Value:
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


Encoder = Callable[[TreeEncoder, Value, int], Json]
Decoder = Callable[[TreeDecoder, Node, int], Value]


# --- parts of a form ------------------------------------------------------------------------------


def _list(node: Node, length: int | None = None, kind: type | None = None) -> list[Value]:
    items = node["v"]
    if type(items) is not list or (length is not None and len(items) != length):
        raise AtPathError(f"not a valid {node[TAG]}: it is made of a list")
    if kind is not None and any(type(item) is not kind for item in items):
        raise AtPathError(f"not a valid {node[TAG]}: it is made of {kind.__name__}")
    return items


# --- the types of Python --------------------------------------------------------------------------


def _decode_float(node: Node) -> float:
    if node["v"] not in ("nan", "inf", "-inf"):
        raise AtPathError("not a valid float: it is nan, inf or -inf")
    return float(node["v"])


def _encode_set(tag: str, encoder: TreeEncoder, value: Iterable[object], room: int) -> Json:
    # A set has no order, and the text shall be the same.
    trees = sorted((encoder.convert(item, room) for item in value), key=dump_canonical)
    return {TAG: tag, "v": trees}


def _decode_set(kind: type, decoder: TreeDecoder, node: Node, room: int) -> Value:
    made = kind(decoder.items(_list(node), room))
    if len(made) != len(node["v"]):
        raise AtPathError("an item stands twice in one set")
    return made


def _encode_deque(encoder: TreeEncoder, value: deque[Value], room: int) -> Json:
    node = {TAG: "deque", "v": encoder.items(value, room)}
    return node if value.maxlen is None else {**node, "maxlen": value.maxlen}


def _decode_deque(decoder: TreeDecoder, node: Node, room: int) -> deque[Value]:
    items, maxlen = decoder.items(_list(node), room), node.get("maxlen")
    if maxlen is not None and (type(maxlen) is not int or maxlen < len(items)):
        raise AtPathError("not a valid deque: it has more items than it can")
    return deque(items, maxlen)


def _decode_counter(decoder: TreeDecoder, node: Node, room: int) -> Counter[Value]:
    made: Counter[Value] = Counter()
    dict.update(made, decoder.pairs(node, room))
    return made


def _encode_defaultdict(encoder: TreeEncoder, value: defaultdict[Value, Value], room: int) -> Json:
    factory: Value = value.default_factory
    if factory is not None and _FACTORIES.get(getattr(factory, "__name__", "")) is not factory:
        raise AtPathError(
            f"a defaultdict of {factory!r} cannot be made again; one of {', '.join(_FACTORIES)} can"
        )
    name = None if factory is None else factory.__name__
    return {TAG: "defaultdict", "t": name, "v": encoder.pairs(value, room)}


def _decode_defaultdict(decoder: TreeDecoder, node: Node, room: int) -> Value:
    factory = None if node["t"] is None else _FACTORIES[node["t"]]
    return defaultdict(factory, decoder.pairs(node, room))


_FACTORIES: dict[str, type] = {
    kind.__name__: kind for kind in (int, list, dict, set, str, float, bool, tuple)
}


def _encode_zoned(tag: str, encoder: TreeEncoder, value: Value, _room: int) -> Json:
    """Return the tree of a datetime or a time of day."""
    zone = value.tzinfo
    if zone is None or (type(zone) is timezone and len(zone.__getinitargs__()) == 1):  # type: ignore[attr-defined]
        node = {TAG: tag, "v": value.isoformat()}
    else:
        local = value.replace(tzinfo=None).isoformat()
        node = {TAG: tag, "v": local, "zone": encoder.convert(zone)}
    return {**node, "fold": 1} if value.fold else node


def _decode_zoned(kind: Value, decoder: TreeDecoder, node: Node, room: int) -> Value:
    when = kind.fromisoformat(node["v"])
    if "zone" in node:
        zone = decoder.convert(node["zone"], room)
        if not isinstance(zone, tzinfo):
            raise AtPathError(f"not a valid {node[TAG]}: {zone!r} is no time zone")
        when = when.replace(tzinfo=zone)
    return when.replace(fold=node["fold"]) if "fold" in node else when


def _timezone_arguments(value: Value) -> Json:
    offset, *name = value.__getinitargs__()
    return [offset.days, offset.seconds, offset.microseconds, *name]


def _decode_timezone(node: Node) -> timezone:
    days, seconds, microseconds, *name = _list(node)
    if not type(days) is type(seconds) is type(microseconds) is int:
        raise AtPathError("not a valid timezone: it is made of whole numbers and a name")
    return timezone(timedelta(days, seconds, microseconds), *name)


def _zone_encoder(zone: object) -> Encoder | None:
    if not isinstance(zone, tzinfo) or not isinstance(getattr(zone, "key", None), str):
        raise AtPathError(f"a time zone of type {type(zone).__name__} without a name has no form")
    return lambda _encoder, zone, _room: {TAG: "zoneinfo", "v": zone.key}


def _decode_zoneinfo(_decoder: TreeDecoder, node: Node, _room: int) -> tzinfo:
    from zoneinfo import ZoneInfo

    return ZoneInfo(text_of(node))


def _decode_complex(decoder: TreeDecoder, node: Node, room: int) -> complex:
    real, imag = decoder.items(_list(node, 2), room)
    if not type(real) is type(imag) is float:
        raise AtPathError("not a valid complex: it is made of floats")
    return complex(real, imag)


def _decode_path(node: Node) -> PurePath:
    kinds: dict[str | None, type[PurePath]]
    kinds = {None: Path, "posix": PurePosixPath, "windows": PureWindowsPath}
    return kinds[node.get("t")](text_of(node))


# --- classes of the user's ------------------------------------------------------------------------


def _encoder_of(value: object) -> Encoder:
    """Return the encoder for a class that is in no table; it is found by what it is."""
    kind = type(value)
    codec = classes.codecs.of_type(kind)
    found = None if codec is not None else _known_kind(value)
    if found is not None:
        return found
    codec = codec or classes.codecs.of_type(kind, load=True)
    if codec is None:
        raise AtPathError(_no_form(kind))
    return partial(_encode_registered, codec)


def _known_kind(value: object) -> Encoder | None:
    kind = type(value)
    if isinstance(value, Enum):
        return lambda encoder, value, _room: encoder.member(value)
    if isinstance(value, tuple) and hasattr(kind, "_fields"):
        return partial(_encode_fields, "namedtuple", classes.stored_name(kind), tuple(kind._fields))
    package = str(kind.__module__).partition(".")[0]
    if package in _PACKAGES:
        return _PACKAGES[package](value)
    if isinstance(value, _BASES):
        return None
    if dataclasses.is_dataclass(kind):
        return partial(
            _encode_fields, "dataclass", classes.stored_name(kind), _dataclass_fields(kind)
        )
    return (
        partial(classes.encode_model, classes.stored_name(kind))
        if issubclass(kind, Model)
        else None
    )


#: A class derived from these holds more than its fields.
_BASES = (dict, list, tuple, set, frozenset, str, bytes, bytearray, int, float, BaseException)


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
    return {TAG: "object", "t": codec.name, "v": encoder.convert(stored, room)}


def _decode_registered(decoder: TreeDecoder, node: Node, room: int) -> Value:
    codec = classes.codecs.of_name(node["t"])
    if codec is None:
        raise classes.UnknownClassAtPathError(
            f"no codec named {str(node['t'])[:80]!r} is registered; call"
            " maestro_hive.register_codec for its class first"
        )
    return codec.decode(decoder.convert(node["v"], room))


def _encode_member(value: Enum) -> Node:
    kind = type(value)
    if kind.__members__.get(value.name) is value:
        return {TAG: "enum", "t": classes.stored_name(kind), "v": value.name}
    if isinstance(value, Flag):  # several flags or none
        return {TAG: "flag", "t": classes.stored_name(kind), "v": int(value.value)}
    raise AtPathError(f"{value!r} is not a member of {kind.__qualname__} by its name")


def _decode_flag(decoder: TreeDecoder, node: Node, _room: int) -> Flag:
    kind = decoder.class_of(node)
    if not issubclass(kind, Flag) or type(node["v"]) is not int:
        raise AtPathError(f"{node['t']} is not a flag, or has no such value")
    return kind(node["v"])


def _dataclass_fields(kind: Value) -> tuple[str, ...]:
    for name, each in kind.__dataclass_fields__.items():
        if each._field_type is dataclasses._FIELD_INITVAR:  # type: ignore[attr-defined]  # noqa: SLF001
            raise AtPathError(f"{kind.__qualname__} cannot be made again without its {name}")
    return tuple(each.name for each in dataclasses.fields(kind))


def _encode_fields(
    tag: str, name: str, names: tuple[str, ...], encoder: TreeEncoder, value: Value, room: int
) -> Json:
    fields = {each: getattr(value, each) for each in names}
    return {TAG: tag, "t": name, "v": encoder.members(fields, room)}


def _decode_dataclass(decoder: TreeDecoder, node: Node, room: int) -> Value:
    kind = decoder.class_of(node)
    if not dataclasses.is_dataclass(kind):
        raise AtPathError(f"{node['t']} is not a dataclass")
    values = decoder.fields(node, room)
    late = {each.name for each in dataclasses.fields(kind) if not each.init}
    made = kind(**{name: value for name, value in values.items() if name not in late})
    for name, value in values.items():  # as they were, whatever making it did with them
        object.__setattr__(made, name, value)
    return made


def _decode_namedtuple(decoder: TreeDecoder, node: Node, room: int) -> Value:
    kind = decoder.class_of(node)
    if not (issubclass(kind, tuple) and hasattr(kind, "_fields")):
        raise AtPathError(f"{node['t']} is not a named tuple")
    return kind(**decoder.fields(node, room))


# --- one line per type ----------------------------------------------------------------------------

#: Types whose form has nothing inside: the tag, how the value is written, and how it is read.
_SIMPLE: dict[type, tuple[str, Callable[[Value], Json], Callable[[Node], Value]]] = {
    float: ("float", repr, _decode_float),
    range: (
        "range",
        lambda value: [value.start, value.stop, value.step],
        lambda node: range(*_list(node, 3, int)),
    ),
    bytes: ("bytes", classes.base64_of, classes.bytes_of),
    bytearray: ("bytearray", classes.base64_of, lambda node: bytearray(classes.bytes_of(node))),
    date: ("date", date.isoformat, lambda node: date.fromisoformat(node["v"])),
    timedelta: (
        "timedelta",
        lambda value: [value.days, value.seconds, value.microseconds],
        lambda node: timedelta(*_list(node, 3, int)),
    ),
    timezone: ("timezone", _timezone_arguments, _decode_timezone),
    Decimal: ("decimal", str, lambda node: Decimal(text_of(node))),
    Fraction: (
        "fraction",
        lambda value: [value.numerator, value.denominator],
        lambda node: Fraction(*_list(node, 2, int)),
    ),
    UUID: ("uuid", str, lambda node: UUID(text_of(node))),
    type(Path()): ("path", str, _decode_path),
}


def _simple_encoder(tag: str, write: Callable[[Value], Json]) -> Encoder:
    return lambda _encoder, value, _room: {TAG: tag, "v": write(value)}


def _simple_decoder(read: Callable[[Node], Value]) -> Decoder:
    return lambda _decoder, node, _room: read(node)


#: Finds the encoder for a class of these packages; they are never imported here.
_PACKAGES: dict[str, Callable[[Value], Encoder | None]] = {
    "numpy": classes.numpy_encoder,
    "zoneinfo": _zone_encoder,
}

_ENCODERS: dict[type, Encoder] = {
    **{kind: _simple_encoder(tag, write) for kind, (tag, write, _) in _SIMPLE.items()},
    dict: TreeEncoder.dict,
    list: TreeEncoder.items,
    tuple: lambda encoder, value, room: {TAG: "tuple", "v": encoder.items(value, room)},
    set: partial(_encode_set, "set"),
    frozenset: partial(_encode_set, "frozenset"),
    deque: _encode_deque,
    Counter: lambda encoder, value, room: {TAG: "counter", "v": encoder.pairs(value, room)},
    OrderedDict: lambda encoder, value, room: {TAG: "ordereddict", "v": encoder.pairs(value, room)},
    defaultdict: _encode_defaultdict,
    datetime: partial(_encode_zoned, "datetime"),
    time: partial(_encode_zoned, "time"),
    complex: lambda encoder, value, _room: {
        TAG: "complex",
        "v": [encoder.convert(value.real), encoder.convert(value.imag)],
    },
    PurePosixPath: lambda _encoder, value, _room: {TAG: "path", "t": "posix", "v": str(value)},
    PureWindowsPath: lambda _encoder, value, _room: {TAG: "path", "t": "windows", "v": str(value)},
}

_DECODERS: dict[str, Decoder] = {
    **{tag: _simple_decoder(read) for tag, _, read in _SIMPLE.values()},
    "dict": TreeDecoder.pairs,
    "tuple": lambda decoder, node, room: tuple(decoder.items(_list(node), room)),
    "set": partial(_decode_set, set),
    "frozenset": partial(_decode_set, frozenset),
    "deque": _decode_deque,
    "counter": _decode_counter,
    "ordereddict": lambda decoder, node, room: OrderedDict(decoder.pairs(node, room)),
    "defaultdict": _decode_defaultdict,
    "datetime": partial(_decode_zoned, datetime),
    "time": partial(_decode_zoned, time),
    "zoneinfo": _decode_zoneinfo,
    "complex": _decode_complex,
    "enum": lambda decoder, node, _room: decoder.member(node),
    "flag": _decode_flag,
    "dataclass": _decode_dataclass,
    "namedtuple": _decode_namedtuple,
    "model": classes.decode_model,
    "object": _decode_registered,
    "numpy": classes.decode_numpy_scalar,
    "ndarray": classes.decode_array,
}

classes.BUILT_IN.update(_ENCODERS, _PLAIN)


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
