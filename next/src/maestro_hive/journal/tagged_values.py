"""The tagged form: values that JSON has no form for, to trees of plain JSON with tags and back.

A tagged object has the key ``$``: ``{"$":"date","v":"2030-01-01"}``. A type that holds no other
values is one line of ``leaf_types``; one that does has a function to write it and one to make it
here. Classes of the user's are found by what they are (an enum, a dataclass) or were registered.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter, OrderedDict, defaultdict, deque
from datetime import datetime, time, timezone, tzinfo
from enum import Enum, Flag
from functools import partial
from pathlib import Path, PurePath, PurePosixPath, PureWindowsPath
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec

from maestro_hive.journal import library_types, user_classes
from maestro_hive.journal.leaf_types import LEAVES, Leaf, base64_of, timezone_arguments
from maestro_hive.journal.plain_data import (
    ALWAYS_PLAIN,
    MAX_DEPTH,
    TAG,
    TEXT,
    dump_sorted,
    plain,
)
from maestro_hive.journal.user_classes import AtPathError, UnknownClassAtPathError, step_to
from maestro_hive.kernel.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

Node = dict[str, Any]

#: Containers with at least this many items are tried as plain data first.
_MANY = 8
_shaped = msgspec.convert


# --- walking ----------------------------------------------------------------------------------


class _Walk:
    """Converts the members of containers; an error learns on the way out where it happened."""

    __slots__ = ()
    #: Types whose values stay as they are.
    unchanged: ClassVar[frozenset[type]] = ALWAYS_PLAIN

    def convert(self, value: Any, room: int) -> Any:
        raise NotImplementedError

    def items(
        self, values: Iterable[Any], room: int, keys: Iterable[object] | None = None
    ) -> list[Any]:
        """Convert values; ``keys`` are their places, if these are no indexes."""
        made: list[Any] = []
        unchanged, convert = self.unchanged, self.convert
        try:
            for value in values:
                made.append(value if type(value) in unchanged else convert(value, room))  # noqa: PERF401 - its length is the failing index
        except AtPathError as error:
            error.steps.append(step_to(len(made) if keys is None else list(keys)[len(made)]))
            raise
        return made

    def members(self, values: Mapping[str, Any], room: int) -> dict[str, Any]:
        """Convert the members of an object, by name."""
        return dict(zip(values, self.items(values.values(), room, values), strict=True))


class Writer(_Walk):
    """Makes the tree of a value.

    A canonical writer makes the same tree of equal values, whatever order their dictionaries
    have, if it is written with ``dump_sorted``.
    """

    __slots__ = ("_canonical", "_members", "_writers")
    #: Whether parts that are plain data are written as they are.
    tries_plain: ClassVar[bool] = True

    def __init__(self, *, canonical: bool = False) -> None:
        self._canonical = canonical
        self._members: dict[int, Node] = {}
        self._writers: dict[type, Any] = {}

    def convert(self, value: Any, room: int = MAX_DEPTH) -> Any:
        """Return ``value`` as plain JSON; ``room`` is how deep it may be nested."""
        kind = type(value)
        if kind in ALWAYS_PLAIN or (kind is float and math.isfinite(value)):
            return value
        if room == 0:
            raise AtPathError(f"nested deeper than {MAX_DEPTH} levels, or contains itself")
        if (kind is list or kind is dict) and len(value) >= _MANY and self.tries_plain:
            found = plain(value, room) if room < MAX_DEPTH else None  # the whole one is not plain
            if found is not None:
                return msgspec.Raw(dump_sorted(found[1]) if self._canonical else found[0])
        write = _WRITERS.get(kind) or self._writers.get(kind)
        if write is None:
            write = self._writers[kind] = _writer_of(value)
        try:
            return write(self, value, room - 1)
        except (AtPathError, RuntimeError, ValueError):
            raise
        except Exception as error:
            raise AtPathError(f"writing it raised {error!r}") from error

    def mapping(self, value: Mapping[Any, Any], room: int) -> Any:
        """Return the tree of a dictionary: as it is if its keys are texts, else as pairs."""
        if TAG not in value and TEXT.issuperset(map(type, value)):
            return self.members(value, room)
        return {TAG: "dict", "v": self.pairs(value, room)}

    def pairs(
        self, value: Mapping[Any, Any], room: int, *, ordered: bool = False
    ) -> list[list[Any]]:
        """Return the trees of keys and values; ``ordered``: their order is part of the value."""
        keys = self.items(value, room, value)
        made = list(map(list, zip(keys, self.items(value.values(), room, value), strict=True)))
        if self._canonical and not ordered:
            made.sort(key=lambda pair: dump_sorted(pair[0]))
        return made

    def member(self, value: Enum, _room: int) -> Node:
        """Return the tree of an enum's member; it is made once."""
        known = self._members.get(id(value))
        if known is None:
            known = self._members[id(value)] = _write_member(value)
        return known


class TextChecker(Writer):
    """Finds the part of a value that has no text in JSON: slow, for errors only."""

    __slots__ = ()
    unchanged: ClassVar[frozenset[type]] = frozenset()
    tries_plain: ClassVar[bool] = False

    def convert(self, value: Any, room: int = MAX_DEPTH) -> Any:
        """Raise an error if something in ``value`` cannot be written, the innermost first."""
        try:
            tree = super().convert(value, room)
            dump_sorted(tree)
        except UnicodeEncodeError:
            raise AtPathError("a text with half a surrogate pair has no form in UTF-8") from None
        except ConfigurationError:
            raise
        except ValueError as error:
            raise AtPathError(f"it cannot be written: {error}") from None
        return tree


class Reader(_Walk):
    """Makes the value of a tree."""

    __slots__ = ("_classes",)

    def __init__(self) -> None:
        self._classes: dict[tuple[str, type], type] = {}

    def convert(self, value: Any, room: int = MAX_DEPTH) -> Any:
        """Return the value of a tree; ``room`` is how deep it may be nested."""
        kind = type(value)
        if kind is not dict and kind is not list:
            return value
        if room == 0:
            raise AtPathError(f"nested deeper than {MAX_DEPTH} levels")
        if kind is list:
            return self.items(value, room - 1)
        if TAG not in value:
            return self.members(value, room - 1)
        tag = value[TAG]
        make = _MAKERS.get(tag) if isinstance(tag, str) else None
        if make is None:
            raise AtPathError(f"{str(tag)[:40]!r} is not a kind of value this version knows")
        try:
            return make(self, value, room - 1)
        except (AtPathError, RecursionError):
            raise
        except Exception as error:  # noqa: BLE001 - a constructor of the user's may raise anything
            raise AtPathError(f"not a valid {tag}: {error}") from None

    def sequence(self, node: Node, room: int) -> list[Any]:
        """Return the values of a form that is a list."""
        return self.items(_shaped(node["v"], list), room)

    def pairs(self, node: Node, room: int) -> dict[Any, Any]:
        """Return a dictionary from its pairs."""
        pairs = _shaped(node["v"], list[tuple[Any, Any]])
        keys = self.items([pair[0] for pair in pairs], room)
        values = self.items([pair[1] for pair in pairs], room, keys)
        made = dict(zip(keys, values, strict=True))
        if len(made) != len(pairs):
            raise AtPathError("a key stands twice in one dictionary")
        return made

    def fields(self, node: Node, room: int, at: str = "v") -> dict[str, Any]:
        """Return an object's fields by name."""
        fields = _shaped(node[at], dict)
        if TAG in fields:
            raise AtPathError(f"not a valid {node[TAG]}: it is made of fields")
        return self.members(fields, room)

    def class_of(self, node: Node, base: type = object) -> Any:
        """Return the class of an object; it is searched once."""
        key = node["t"], base
        if key not in self._classes:
            self._classes[key] = user_classes.known_class(*key)
        return self._classes[key]


# --- containers -------------------------------------------------------------------------------


def _write_set(tag: str, writer: Writer, value: Iterable[Any], room: int) -> Node:
    # A set has no order, and its text is the same in every process.
    return {TAG: tag, "v": sorted(writer.items(value, room), key=dump_sorted)}


def _make_set(kind: type, reader: Reader, node: Node, room: int) -> Any:
    made = kind(reader.sequence(node, room))
    if len(made) != len(node["v"]):
        raise AtPathError("an item stands twice in one set")
    return made


def _write_deque(writer: Writer, value: deque[Any], room: int) -> Node:
    node = {TAG: "deque", "v": writer.items(value, room)}
    return node if value.maxlen is None else {**node, "maxlen": value.maxlen}


def _make_deque(reader: Reader, node: Node, room: int) -> deque[Any]:
    items, maxlen = reader.sequence(node, room), _shaped(node.get("maxlen"), int | None)
    if maxlen is not None and maxlen < len(items):
        raise AtPathError("not a valid deque: it has more items than it can")
    return deque(items, maxlen)


def _make_counter(reader: Reader, node: Node, room: int) -> Counter[Any]:
    made: Counter[Any] = Counter()
    dict.update(made, reader.pairs(node, room))
    return made


_FACTORIES: dict[str | None, Any] = {
    kind.__name__: kind for kind in (int, list, dict, set, str, float, bool, tuple)
} | {None: None}


def _write_defaultdict(writer: Writer, value: defaultdict[Any, Any], room: int) -> Node:
    factory = value.default_factory
    name = getattr(factory, "__name__", None)
    if _FACTORIES.get(name, value) is not factory:
        known = ", ".join(filter(None, _FACTORIES))
        raise AtPathError(f"a defaultdict of {factory!r} cannot be made again; one of {known} can")
    return {TAG: "defaultdict", "t": name, "v": writer.pairs(value, room)}


# --- times and paths --------------------------------------------------------------------------


def _write_zoned(tag: str, writer: Writer, value: Any, _room: int) -> Node:
    """Return the tree of a datetime or a time of day."""
    zone = value.tzinfo
    if zone is None or (type(zone) is timezone and len(timezone_arguments(zone)) == 3):
        node = {TAG: tag, "v": value.isoformat()}
    else:
        local = value.replace(tzinfo=None).isoformat()
        node = {TAG: tag, "v": local, "zone": writer.convert(zone)}
    return {**node, "fold": 1} if value.fold else node


def _make_zoned(kind: Any, reader: Reader, node: Node, _room: int) -> Any:
    when = kind.fromisoformat(node["v"])
    if "zone" in node:
        zone = reader.convert(node["zone"])
        if not isinstance(zone, tzinfo):
            raise AtPathError(f"not a valid {node[TAG]}: {zone!r} is no time zone")
        when = when.replace(tzinfo=zone)
    return when.replace(fold=node["fold"]) if "fold" in node else when


def _write_zoneinfo(_writer: Writer, value: Any, _room: int) -> Node:
    return {TAG: "zoneinfo", "v": value.key}


def _make_zoneinfo(_reader: Reader, node: Node, _room: int) -> tzinfo:
    from zoneinfo import ZoneInfo

    return ZoneInfo(_shaped(node["v"], str))


def _write_complex(writer: Writer, value: complex, room: int) -> Node:
    return {TAG: "complex", "v": writer.items((value.real, value.imag), room + 1)}


def _make_complex(reader: Reader, node: Node, room: int) -> complex:
    return complex(*_shaped(reader.sequence(node, room + 1), tuple[float, float]))


_PATHS: dict[str, type[PurePath]] = {"posix": PurePosixPath, "windows": PureWindowsPath}


def _write_path(kind: str, _writer: Writer, value: PurePath, _room: int) -> Node:
    return {TAG: "path", "t": kind, "v": str(value)}


def _make_path(_reader: Reader, node: Node, _room: int) -> PurePath:
    return (_PATHS[node["t"]] if "t" in node else Path)(_shaped(node["v"], str))


# --- classes of the user's --------------------------------------------------------------------

#: An instance of a class derived from these is more than its fields.
_BASES = (dict, list, tuple, set, frozenset, str, bytes, bytearray, int, float, BaseException)


def _writer_of(value: object) -> Any:
    """Return the writer for a class that is in no table."""
    kind = type(value)
    codec = user_classes.codecs.find(kind, load=False)
    found = None if codec is not None else _known_kind(value, kind)
    if found is not None:
        return found
    codec = codec or user_classes.codecs.find(kind)
    if codec is None:
        raise AtPathError(_no_form(kind))
    return partial(_write_registered, codec)


def _known_kind(value: object, kind: Any) -> Any:
    """Return the writer for a class that is found by what it is."""
    package = str(kind.__module__).partition(".")[0]
    found: Any = None
    if isinstance(value, Enum):
        found = Writer.member
    elif isinstance(value, tuple) and hasattr(kind, "_fields"):
        names = tuple(kind._fields)
        found = partial(_write_fields, "namedtuple", user_classes.stored_name(kind), names)
    elif package == "numpy" and library_types.is_numpy(value):
        found = _write_numpy
    elif package == "zoneinfo" and isinstance(getattr(value, "key", None), str):
        found = _write_zoneinfo
    elif isinstance(value, _BASES):
        pass
    elif hasattr(kind, "__dataclass_fields__"):
        names = _dataclass_fields(kind)
        found = partial(_write_fields, "dataclass", user_classes.stored_name(kind), names)
    elif library_types.is_model(kind):
        found = partial(_write_model, user_classes.stored_name(kind))
    return found


def _dataclass_fields(kind: Any) -> tuple[str, ...]:
    for name, each in kind.__dataclass_fields__.items():
        if each._field_type is dataclasses._FIELD_INITVAR:  # type: ignore[attr-defined]  # noqa: SLF001
            raise AtPathError(f"{kind.__qualname__} cannot be made again without its {name}")
    return tuple(each.name for each in dataclasses.fields(kind))


def _no_form(kind: type) -> str:
    name = f"{kind.__module__}.{kind.__qualname__}"
    how = f"maestro_hive.register_codec({kind.__qualname__}, encode, decode)"
    for base in _BASES[:-1]:
        if issubclass(kind, base):
            return (
                f"a {name} would come back as a {base.__name__};"
                f" convert it, or register how it is stored: {how}"
            )
    return (
        f"a {name} cannot be stored; give plain data, a dataclass or a pydantic model, or register"
        f" how it is stored: {how}"
    )


def _write_registered(codec: user_classes.Codec, writer: Writer, value: object, room: int) -> Node:
    try:
        stored = codec.encode(value)
    except Exception as error:
        raise AtPathError(f"the codec {codec.name!r} raised {error!r}") from error
    return {TAG: "object", "t": codec.name, "v": writer.convert(stored, room)}


def _make_registered(reader: Reader, node: Node, room: int) -> Any:
    name = _shaped(node["t"], str)
    codec = user_classes.codecs.find(name)
    if codec is None:
        raise UnknownClassAtPathError(
            f"no codec named {name[:80]!r} is registered; call"
            " maestro_hive.register_codec for its class first"
        )
    return codec.decode(reader.convert(node["v"], room))


def _write_member(value: Enum) -> Node:
    kind = type(value)
    if kind.__members__.get(value.name) is value:
        return {TAG: "enum", "t": user_classes.stored_name(kind), "v": value.name}
    if isinstance(value, Flag):  # several flags or none
        return {TAG: "flag", "t": user_classes.stored_name(kind), "v": int(value.value)}
    raise AtPathError(f"{value!r} is not a member of {kind.__qualname__} by its name")


def _make_member(reader: Reader, node: Node, _room: int) -> Any:
    return reader.class_of(node, Enum)[_shaped(node["v"], str)]


def _make_flag(reader: Reader, node: Node, _room: int) -> Any:
    return reader.class_of(node, Flag)(_shaped(node["v"], int))


def _write_fields(
    tag: str, name: str, names: tuple[str, ...], writer: Writer, value: Any, room: int
) -> Node:
    fields = {each: getattr(value, each) for each in names}
    return {TAG: tag, "t": name, "v": writer.members(fields, room)}


def _make_dataclass(reader: Reader, node: Node, room: int) -> Any:
    kind = reader.class_of(node)
    late = {each.name for each in dataclasses.fields(kind) if not each.init}
    values = reader.fields(node, room)
    made = kind(**{name: value for name, value in values.items() if name not in late})
    for name, value in values.items():  # as they were, whatever `__post_init__` did with them
        object.__setattr__(made, name, value)
    return made


def _make_namedtuple(reader: Reader, node: Node, room: int) -> Any:
    kind = reader.class_of(node, tuple)
    if not hasattr(kind, "_fields"):
        raise AtPathError(f"{node['t']} is not a named tuple")
    return kind(**reader.fields(node, room))


# --- values of libraries ----------------------------------------------------------------------


def _write_model(name: str, writer: Writer, value: Any, room: int) -> Node:
    """Return the tree of a pydantic model, if it comes back from its fields as it is."""
    kind, fields = type(value), library_types.model_fields(value)
    node: Node = {TAG: "model", "t": name, "v": writer.members(fields, room)}
    try:
        back = library_types.make_model(kind, fields)
    except ValueError as error:
        raise AtPathError(f"the model does not come back from its fields: {error}") from None
    again = library_types.model_fields(back)
    if TAG in fields or (again != fields and writer.members(again, room) != node["v"]):
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
        node["private"] = writer.members(private, room)
    return node


def _make_model(reader: Reader, node: Node, room: int) -> Any:
    made = library_types.make_model(reader.class_of(node), reader.fields(node, room))
    made.model_fields_set.difference_update(node.get("unset", ()))
    if "private" in node:
        made.__pydantic_private__.update(reader.fields(node, room, "private"))
    return made


def _write_numpy(writer: Writer, value: Any, _room: int) -> Node:
    dtype = library_types.dtype_name(value)
    if library_types.is_array(value):
        shape = list(value.shape)
        return {TAG: "ndarray", "t": dtype, "shape": shape, "v": base64_of(value.tobytes())}
    if library_types.is_number(value.dtype):
        return {TAG: "numpy", "t": dtype, "v": writer.convert(value.item())}
    return {TAG: "numpy", "t": dtype, "v": base64_of(value.tobytes())}


def _make_numpy(reader: Reader, node: Node, _room: int) -> Any:
    dtype = library_types.find_dtype(node["t"])
    if library_types.is_number(dtype):
        return library_types.make_number(dtype, reader.convert(node["v"]))
    return library_types.make_array(dtype, [1], _shaped(node["v"], bytearray))[0]


def _make_array(_reader: Reader, node: Node, _room: int) -> Any:
    dtype, shape = library_types.find_dtype(node["t"]), _shaped(node["shape"], list[int])
    return library_types.make_array(dtype, shape, _shaped(node["v"], bytearray))


# --- the tables -------------------------------------------------------------------------------


def _leaf_writer(leaf: Leaf) -> Any:
    return lambda _writer, value, _room: {TAG: leaf.tag, "v": leaf.write(value)}


def _leaf_maker(leaf: Leaf) -> Any:
    return lambda _reader, node, _room: leaf.make(_shaped(node["v"], leaf.shape))


_WRITERS: dict[type, Any] = {leaf.kind: _leaf_writer(leaf) for leaf in LEAVES} | {
    dict: Writer.mapping,
    list: Writer.items,
    tuple: lambda writer, value, room: {TAG: "tuple", "v": writer.items(value, room)},
    set: partial(_write_set, "set"),
    frozenset: partial(_write_set, "frozenset"),
    deque: _write_deque,
    Counter: lambda writer, value, room: {TAG: "counter", "v": writer.pairs(value, room)},
    OrderedDict: lambda writer, value, room: {
        TAG: "ordereddict",
        "v": writer.pairs(value, room, ordered=True),
    },
    defaultdict: _write_defaultdict,
    datetime: partial(_write_zoned, "datetime"),
    time: partial(_write_zoned, "time"),
    complex: _write_complex,
    PurePosixPath: partial(_write_path, "posix"),
    PureWindowsPath: partial(_write_path, "windows"),
}
_MAKERS: dict[str, Any] = {leaf.tag: _leaf_maker(leaf) for leaf in LEAVES} | {
    "dict": Reader.pairs,
    "tuple": lambda reader, node, room: tuple(reader.sequence(node, room)),
    "set": partial(_make_set, set),
    "frozenset": partial(_make_set, frozenset),
    "deque": _make_deque,
    "counter": _make_counter,
    "ordereddict": lambda reader, node, room: OrderedDict(reader.pairs(node, room)),
    "defaultdict": lambda reader, node, room: defaultdict(
        _FACTORIES[node["t"]], reader.pairs(node, room)
    ),
    "datetime": partial(_make_zoned, datetime),
    "time": partial(_make_zoned, time),
    "zoneinfo": _make_zoneinfo,
    "complex": _make_complex,
    "path": _make_path,
    "enum": _make_member,
    "flag": _make_flag,
    "dataclass": _make_dataclass,
    "namedtuple": _make_namedtuple,
    "model": _make_model,
    "object": _make_registered,
    "numpy": _make_numpy,
    "ndarray": _make_array,
}
user_classes.BUILT_IN.update(_WRITERS, ALWAYS_PLAIN)
