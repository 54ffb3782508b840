"""Values into trees of plain JSON, with a tag on everything JSON has no form for."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import math
import sys
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from enum import Enum
from pathlib import Path, PurePath
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast, runtime_checkable
from uuid import UUID

from maestro_hive.kernel.errors import DecodeError, EncodeError
from maestro_hive.maestro.state.strict_json import (
    DOCUMENT_DEPTH,
    MAX_BYTES,
    MAX_DEPTH,
    WHOLE_DEPTH,
    AtPathError,
    Json,
    dump_canonical,
    member,
    parse,
    parse_any_depth,
    to_text,
)

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = [
    "DOCUMENT_DEPTH",
    "Encoded",
    "Json",
    "MAX_BYTES",
    "MAX_DEPTH",
    "TAG",
    "WHOLE_DEPTH",
    "decode",
    "dump_canonical",
    "encode",
    "encode_call",
    "encoded",
    "parse",
    "revive",
]

TAG = "$"

PLAIN_SCALARS = frozenset({str, int, bool, type(None)})


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


def lower(value: object, room: int = MAX_DEPTH) -> Json:
    """Return ``value`` as plain JSON; ``room`` is how deep it may still go."""
    kind = type(value)
    if kind in PLAIN_SCALARS:
        return value
    if kind is float:
        if not math.isfinite(cast("float", value)):
            raise AtPathError(f"{value!r} has no form in JSON")
        return value
    if room == 0:
        raise AtPathError(f"nested deeper than {MAX_DEPTH} levels, or contains itself")
    if kind is dict:
        return _lower_dict(cast("dict[object, object]", value), room - 1)
    if kind is list:
        return _lower_items(cast("list[object]", value), room - 1)
    lower = _LOWER.get(kind)
    if lower is not None:
        return lower(value, room - 1)
    return _lower_object(value, room - 1)


def _lower_items(items: Any, room: int) -> list[Json]:
    lowered = []
    index = 0
    try:
        for item in items:
            lowered.append(item if type(item) in PLAIN_SCALARS else lower(item, room))
            index += 1
    except AtPathError as error:
        error.steps.append(f"[{index}]")
        raise
    return lowered


def _lower_dict(items: dict[object, object], room: int) -> Json:
    lowered: dict[str, Json] = {}
    key: object = None
    try:
        for key, item in items.items():
            if type(key) is not str or key == TAG:
                break
            lowered[key] = item if type(item) in PLAIN_SCALARS else lower(item, room)
        else:
            return lowered
    except AtPathError as error:
        error.steps.append(member(key))
        raise
    return _lower_pairs(items, room)


def _lower_pairs(items: dict[object, object], room: int) -> Json:
    pairs = []
    for key, item in items.items():
        try:
            pairs.append([lower(key, room), lower(item, room)])
        except AtPathError as error:
            error.steps.append(f"[{key!r}]")
            raise
    pairs.sort(key=lambda pair: _order(pair[0]))
    return {TAG: "dict", "v": pairs}


def _lower_object(value: object, room: int) -> Json:
    kind = type(value)
    if isinstance(value, Enum):
        if type(value).__members__.get(value.name) is not value:
            raise AtPathError(f"{value!r} is several flags or none, and has no name of its own")
        return {TAG: "enum", "t": _type_name(kind), "v": value.name}
    if isinstance(value, PurePath):
        if kind is not type(Path()):
            raise AtPathError(f"a {kind.__name__} would come back as another type; use Path")
        return {TAG: "path", "v": str(value)}
    if dataclasses.is_dataclass(kind):
        _refuse_init_only(kind)
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(kind)}
        return {TAG: "dataclass", "t": _type_name(kind), "v": _lower_fields(fields, room)}
    if isinstance(value, tuple) and hasattr(kind, "_fields"):
        fields = dict(zip(kind._fields, value, strict=True))
        return {TAG: "namedtuple", "t": _type_name(kind), "v": _lower_fields(fields, room)}
    if issubclass(kind, Model):
        return {TAG: "model", "t": _type_name(kind), "v": _dump_model(cast("Model", value))}
    name = f"{kind.__module__}.{kind.__qualname__}"
    raise AtPathError(
        f"a {name} has no faithful form in JSON; return plain data, a dataclass or a pydantic model"
    )


def _refuse_init_only(kind: type) -> None:
    every: dict[str, Any] = kind.__dataclass_fields__  # type: ignore[attr-defined]
    for name, each in every.items():
        if each._field_type is dataclasses._FIELD_INITVAR:  # type: ignore[attr-defined]  # noqa: SLF001
            raise AtPathError(f"{kind.__qualname__} cannot be made again without its {name}")


def _dump_model(value: Model) -> dict[str, object]:
    try:
        dumped = value.model_dump(mode="json", by_alias=True, round_trip=True)
        back = type(value).model_validate(dumped)
    except ValueError as error:
        raise AtPathError(f"the model does not come back from its JSON: {error}") from None
    if back != value:
        raise AtPathError("the model comes back from its JSON with other values")
    return dumped


def _lower_fields(fields: dict[str, object], room: int) -> dict[str, Json]:
    lowered = {}
    for name, item in fields.items():
        try:
            lowered[name] = lower(item, room)
        except AtPathError as error:
            error.steps.append(f".{name}")
            raise
    return lowered


def _lower_set(tag: str) -> Callable[[Any, int], Json]:
    return lambda value, room: {
        TAG: tag,
        "v": sorted((lower(item, room) for item in value), key=_order),
    }


def _order(item: Json) -> str:
    try:
        return to_text(item)
    except ValueError as error:
        raise AtPathError(f"an integer is too long: {error}") from None


def _lower_datetime(value: datetime, _room: int) -> Json:
    tagged = {TAG: "datetime", "v": value.isoformat()}
    zone = value.tzinfo
    if value.fold:
        tagged["fold"] = 1  # type: ignore[assignment]
    if zone is None or type(zone) is timezone:
        return tagged
    key = getattr(zone, "key", None)
    if type(zone).__module__ == "zoneinfo" and isinstance(key, str):
        return {**tagged, "v": value.replace(tzinfo=None).isoformat(), "zone": key}
    raise AtPathError(f"a time zone of type {type(zone).__name__} has no form in JSON")


def _lower_time(value: time, _room: int) -> Json:
    if value.tzinfo is not None and type(value.tzinfo) is not timezone:
        raise AtPathError("a time of day with a named zone has no form in JSON")
    return {TAG: "time", "v": value.isoformat(), **({"fold": 1} if value.fold else {})}


_LOWER: dict[type, Callable[[Any, int], Json]] = {
    tuple: lambda value, room: {TAG: "tuple", "v": _lower_items(value, room)},
    set: _lower_set("set"),
    frozenset: _lower_set("frozenset"),
    bytes: lambda value, _: {TAG: "bytes", "v": base64.b64encode(value).decode()},
    bytearray: lambda value, _: {TAG: "bytearray", "v": base64.b64encode(value).decode()},
    datetime: _lower_datetime,
    date: lambda value, _: {TAG: "date", "v": value.isoformat()},
    time: _lower_time,
    timedelta: lambda value, _: {
        TAG: "timedelta",
        "v": [value.days, value.seconds, value.microseconds],
    },
    Decimal: lambda value, _: {TAG: "decimal", "v": str(value)},
    UUID: lambda value, _: {TAG: "uuid", "v": str(value)},
}


def _type_name(kind: type) -> str:
    if "<locals>" in kind.__qualname__:
        raise AtPathError(
            f"{kind.__qualname__} is defined inside a function and could not be found again;"
            " define it in a module"
        )
    name = f"{kind.__module__}:{kind.__qualname__}"
    if find_type(name) is not kind:
        raise AtPathError(f"its type is not what is found as {name}; define it there by that name")
    return name


def find_type(name: str) -> type | None:
    """Find a class by ``module:name``, without importing anything or having it loaded late."""
    module_name, _, qualname = name.partition(":")
    found: object = sys.modules.get(module_name)
    for part in qualname.split("."):
        found = vars(found).get(part) if isinstance(found, ModuleType | type) else None
    return found if isinstance(found, type) else None


# --- raising ---


class UnknownClassError(DecodeError):
    """A value is whole, and of a class that this process does not have: its own program does."""


class UnknownClassAtPathError(AtPathError):
    """What becomes an ``UnknownClassError`` when its path is known."""


def raise_up(node: Json, room: int = MAX_DEPTH) -> Any:
    """Return the value of a tree; ``room`` is how deep it may still go."""
    kind = type(node)
    if kind is not dict and kind is not list:
        return node
    if room == 0:
        raise AtPathError(f"nested deeper than {MAX_DEPTH} levels")
    if kind is list:
        return _raise_items(node, room - 1)
    if TAG in node:
        return _raise_tagged(node, room - 1)
    raised = {}
    key = None
    try:
        for key, item in node.items():
            raised[key] = raise_up(item, room - 1)
    except AtPathError as error:
        error.steps.append(member(key))
        raise
    return raised


def _raise_items(items: list[Json], room: int) -> list[Any]:
    raised = []
    try:
        for item in items:
            raised.append(raise_up(item, room))  # noqa: PERF401 - its length is the failing index
    except AtPathError as error:
        error.steps.append(f"[{len(raised)}]")
        raise
    return raised


def _raise_tagged(node: dict[str, Json], room: int) -> Any:
    tag = node[TAG]
    reader = _RAISE.get(tag) if isinstance(tag, str) else None
    if reader is None:
        raise AtPathError(f"{str(tag)[:40]!r} is not a kind of value this version knows")
    try:
        return reader(node, room)
    except AtPathError:
        raise
    except Exception as error:  # noqa: BLE001 - a constructor of the user's may raise anything
        raise AtPathError(f"not a valid {tag}: {error}") from None


def _raise_dict(node: dict[str, Json], room: int) -> dict[Any, Any]:
    raised = {}
    for pair in _list(node):
        if type(pair) is not list or len(pair) != 2:
            raise AtPathError("not a valid dict: it is made of pairs")
        key = raise_up(pair[0], room)
        try:
            raised[key] = raise_up(pair[1], room)
        except AtPathError as error:
            error.steps.append(f"[{key!r}]")
            raise
    if len(raised) != len(node["v"]):
        raise AtPathError("a key stands twice in one dictionary")
    return raised


def _list(node: dict[str, Json]) -> list[Json]:
    if type(node["v"]) is not list:
        raise AtPathError(f"not a valid {node[TAG]}: it is made of a list")
    return node["v"]


def _text(node: dict[str, Json]) -> str:
    if type(node["v"]) is not str:
        raise AtPathError(f"not a valid {node[TAG]}: it is made of a text")
    return node["v"]


def _raise_fields(node: dict[str, Json], room: int) -> dict[str, Any]:
    if type(node["v"]) is not dict or TAG in node["v"]:
        raise AtPathError(f"not a valid {node[TAG]}: it is made of fields")
    raised = {}
    for name, item in node["v"].items():
        try:
            raised[name] = raise_up(item, room)
        except AtPathError as error:
            error.steps.append(member(name))
            raise
    return raised


def _raise_timedelta(node: dict[str, Json], _room: int) -> timedelta:
    days, seconds, microseconds = _list(node)
    if not type(days) is type(seconds) is type(microseconds) is int:
        raise AtPathError("not a valid timedelta: it is made of whole numbers")
    return timedelta(days, seconds, microseconds)


def _raise_datetime(node: dict[str, Json], _room: int) -> datetime:
    when = datetime.fromisoformat(node["v"])
    if "zone" in node:
        from zoneinfo import ZoneInfo  # noqa: PLC0415 - rarely needed, slow to import

        when = when.replace(tzinfo=ZoneInfo(node["zone"]))
    return when.replace(fold=node.get("fold", 0))


def _raise_time(node: dict[str, Json], _room: int) -> time:
    return time.fromisoformat(node["v"]).replace(fold=node.get("fold", 0))


def _raise_enum(node: dict[str, Json], _room: int) -> Any:
    kind = _find_type(node["t"])
    if not issubclass(kind, Enum):
        raise AtPathError(f"{node['t']} is not an enum")
    return kind[node["v"]]


def _raise_dataclass(node: dict[str, Json], room: int) -> Any:
    kind = _find_type(node["t"])
    if not dataclasses.is_dataclass(kind):
        raise AtPathError(f"{node['t']} is not a dataclass")
    values = _raise_fields(node, room)
    late = {f.name for f in dataclasses.fields(kind) if not f.init}
    made = kind(**{name: value for name, value in values.items() if name not in late})
    for name, value in values.items():  # as they were, whatever making it did with them
        object.__setattr__(made, name, value)
    return made


def _raise_namedtuple(node: dict[str, Json], room: int) -> Any:
    kind = _find_type(node["t"])
    if not (issubclass(kind, tuple) and hasattr(kind, "_fields")):
        raise AtPathError(f"{node['t']} is not a named tuple")
    return kind(**_raise_fields(node, room))


def _raise_model(node: dict[str, Json], _room: int) -> Any:
    kind = _find_type(node["t"])
    if not issubclass(kind, Model):
        raise AtPathError(f"{node['t']} is not a pydantic model")
    return kind.model_validate(node["v"])


_RAISE: dict[str, Callable[[dict[str, Json], int], Any]] = {
    "dict": _raise_dict,
    "tuple": lambda node, room: tuple(_raise_items(_list(node), room)),
    "set": lambda node, room: set(_raise_items(_list(node), room)),
    "frozenset": lambda node, room: frozenset(_raise_items(_list(node), room)),
    "bytes": lambda node, _: base64.b64decode(node["v"], validate=True),
    "bytearray": lambda node, _: bytearray(base64.b64decode(node["v"], validate=True)),
    "datetime": _raise_datetime,
    "date": lambda node, _: date.fromisoformat(node["v"]),
    "time": _raise_time,
    "timedelta": _raise_timedelta,
    "decimal": lambda node, _: Decimal(_text(node)),
    "uuid": lambda node, _: UUID(_text(node)),
    "path": lambda node, _: Path(_text(node)),
    "enum": _raise_enum,
    "dataclass": _raise_dataclass,
    "namedtuple": _raise_namedtuple,
    "model": _raise_model,
}


def _find_type(name: str) -> type:
    module_name = name.partition(":")[0]
    if module_name not in sys.modules:
        raise UnknownClassAtPathError(
            f"its type {name} is not imported; import {module_name} first"
        )
    found = find_type(name)
    if found is None:
        raise UnknownClassAtPathError(
            f"its type {name} is not in this process: the module {module_name} has no such class"
            " here; read it with the program that stored it, or give the class back its name"
        )
    return found


# --- codec ---


class Encoded(NamedTuple):
    """A value's canonical bytes and their SHA-256; a tuple, because one is made for every step."""

    data: bytes
    sha256: bytes

    @property
    def hexdigest(self) -> str:
        """The digest as people write it."""
        return self.sha256.hex()


def encode(value: object, path: str = "value", *, depth: int = MAX_DEPTH) -> Encoded:
    """Return the canonical bytes of ``value``; ``path`` names it in errors."""
    try:
        tree = value if type(value) in PLAIN_SCALARS else lower(value, depth)
        data = to_text(tree).encode()
    except AtPathError as error:
        raise EncodeError(path + error.where(), error.reason) from None
    except RecursionError:
        raise EncodeError(path, "nested too deep for the room left on the stack") from None
    except ValueError as error:
        raise EncodeError(
            path + _path_to_culprit(lower(value, depth)), _text_reason(error)
        ) from None
    if len(data) > MAX_BYTES:
        raise EncodeError(path, f"{len(data):,} bytes is over the limit of {MAX_BYTES:,}")
    return Encoded(data, hashlib.sha256(data).digest())


def encoded(data: bytes) -> Encoded:
    """Return canonical bytes, made elsewhere, with their digest."""
    return Encoded(data, hashlib.sha256(data).digest())


def encode_call(args: tuple[Any, ...], kwargs: dict[str, Any], path: str = "input") -> Encoded:
    """Return what ``encode`` makes of a call's arguments; plain ones need no second look."""
    if kwargs or not PLAIN_SCALARS.issuperset(map(type, args)):
        return encode({"args": list(args), "kwargs": kwargs}, path)
    try:
        data = b'{"args":%b,"kwargs":{}}' % to_text(args).encode()
    except ValueError:
        data = b""
    if not data or len(data) > MAX_BYTES:  # it says which of them cannot be written, and why
        return encode({"args": list(args), "kwargs": kwargs}, path)
    return Encoded(data, hashlib.sha256(data).digest())


def _text_reason(error: ValueError) -> str:
    if isinstance(error, UnicodeEncodeError):
        return "a text with half a surrogate pair has no form in UTF-8"
    return f"an integer is too long: {error}"


def _path_to_culprit(tree: Json) -> str:
    """Find the innermost value that cannot be written as text; looked for only on failure."""
    for step, item in _inside(tree):
        try:
            dump_canonical(item)
        except ValueError:
            return step + _path_to_culprit(item)
    return ""


def _inside(tree: Json) -> list[tuple[str, Json]]:
    """Return what a value has inside, by the step that leads there; a tag is no step."""
    if type(tree) is dict and TAG in tree:
        if tree[TAG] == "dict":
            return [(f"[{key!r}]", item) for key, item in tree["v"]]
        return _inside(tree["v"])
    if type(tree) is dict:
        return [(member(key), item) for key, item in tree.items()]
    return [(f"[{at}]", item) for at, item in enumerate(tree)] if type(tree) is list else []


def decode(data: bytes, path: str = "value") -> Any:
    """Return the value whose canonical bytes are ``data``."""
    return revive(parse_any_depth(data, path), path)


def revive(tree: Json, path: str = "value", *, depth: int = MAX_DEPTH) -> Any:
    """Turn tags back into the values they stand for."""
    try:
        return raise_up(tree, depth)
    except UnknownClassAtPathError as error:
        raise UnknownClassError(path + error.where(), error.reason) from None
    except AtPathError as error:
        raise DecodeError(path + error.where(), error.reason) from None
    except RecursionError:
        raise DecodeError(path, "nested too deep for the room left on the stack") from None
