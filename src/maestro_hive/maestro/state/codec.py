"""Values as canonical JSON and back, the same value giving the same bytes.

What JSON has no form for is written as an object with the key ``$``: a datetime is
``{"$":"datetime","v":"2030-01-01T00:00:00+00:00"}`` and comes back as a datetime. A dictionary
that has that key itself, or keys that are no strings, is written as pairs.

Nothing is guessed: a value that would not come back equal and of the same type is an error that
names its path. Reading trusts nothing: no NaN, no duplicate keys, limits on size and depth, and a
class is only ever looked up among modules that are imported already, never imported.
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
import math
import sys
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal, InvalidOperation
from enum import Enum
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast, runtime_checkable
from uuid import UUID

from maestro_hive.kernel.errors import DecodeError, EncodeError

if TYPE_CHECKING:
    from collections.abc import Callable

#: Deeper nesting than this is refused, on writing and on reading.
MAX_DEPTH = 100
#: A larger text than this is refused, on writing and on reading.
MAX_BYTES = 256 * 1024 * 1024

TAG = "$"

Json = Any  # None | bool | int | float | str | list[Json] | dict[str, Json]

_PLAIN_SCALARS = frozenset({str, int, bool, type(None)})


class Encoded(NamedTuple):
    """A value's canonical bytes and their SHA-256; a tuple, because one is made for every step."""

    data: bytes
    sha256: bytes

    @property
    def hexdigest(self) -> str:
        """The digest as people write it."""
        return self.sha256.hex()


@runtime_checkable
class _Model(Protocol):
    """What a pydantic model offers; pydantic itself is never imported here."""

    def model_dump(self, *, mode: str) -> dict[str, object]: ...

    @classmethod
    def model_validate(cls, obj: object) -> object: ...


def encode(value: object, path: str = "value") -> Encoded:
    """Return the canonical bytes of ``value``; ``path`` names it in errors."""
    try:
        tree = value if type(value) in _PLAIN_SCALARS else _lower(value, MAX_DEPTH)
        data = _dumps(tree).encode()
    except _AtPathError as error:
        raise EncodeError(path + error.where(), error.reason) from None
    except UnicodeEncodeError:
        raise EncodeError(path, "a text with half a surrogate pair has no form in UTF-8") from None
    except ValueError as error:  # an integer with more digits than Python turns into text
        raise EncodeError(path, str(error)) from None
    if len(data) > MAX_BYTES:
        raise EncodeError(path, f"{len(data):,} bytes is over the limit of {MAX_BYTES:,}")
    return Encoded(data, hashlib.sha256(data).digest())


def decode(data: bytes, path: str = "value") -> Any:
    """Return the value whose canonical bytes are ``data``."""
    return revive(parse(data, path), path)


def parse(data: bytes, path: str = "value") -> Json:
    """Read strict JSON, tags left as they are."""
    if len(data) > MAX_BYTES:
        raise DecodeError(path, f"{len(data):,} bytes is over the limit of {MAX_BYTES:,}")
    try:
        return json.loads(
            data.decode("utf-8"),
            object_pairs_hook=_unique_keys,
            parse_constant=_no_constant,
            parse_float=_finite,
        )
    except _AtPathError as error:
        raise DecodeError(path, error.reason) from None
    except RecursionError:
        raise DecodeError(path, f"nested deeper than {MAX_DEPTH} levels") from None
    except ValueError as error:  # not UTF-8, not JSON, or a number of thousands of digits
        raise DecodeError(path, f"not JSON of ours: {error}") from None


def revive(tree: Json, path: str = "value") -> Any:
    """Turn tags back into the values they stand for."""
    try:
        return _raise_up(tree, MAX_DEPTH)
    except _AtPathError as error:
        raise DecodeError(path + error.where(), error.reason) from None


def dump_canonical(tree: Json) -> bytes:
    """Write plain JSON, already free of anything that needs a tag."""
    return _dumps(tree).encode()


# --- writing ---------------------------------------------------------------------------------

_dumps = json.JSONEncoder(
    ensure_ascii=False, check_circular=False, allow_nan=False, sort_keys=True, separators=(",", ":")
).encode


class _AtPathError(Exception):
    """A problem that learns its path on the way out, so that good values pay nothing for it."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason
        self.steps: list[str] = []

    def where(self) -> str:
        return "".join(reversed(self.steps))


def _lower(value: object, room: int) -> Json:
    kind = type(value)
    if kind in _PLAIN_SCALARS:
        return value
    if kind is float:
        if not math.isfinite(cast("float", value)):
            raise _AtPathError(f"{value!r} has no form in JSON")
        return value
    if room == 0:
        raise _AtPathError(f"nested deeper than {MAX_DEPTH} levels, or contains itself")
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
            lowered.append(item if type(item) in _PLAIN_SCALARS else _lower(item, room))
            index += 1
    except _AtPathError as error:
        error.steps.append(f"[{index}]")
        raise
    return lowered


def _lower_dict(items: dict[object, object], room: int) -> Json:
    lowered: dict[str, Json] = {}
    key: object = None
    try:
        for key, item in items.items():
            if type(key) is not str or key == TAG:
                return _lower_pairs(items, room)
            lowered[key] = item if type(item) in _PLAIN_SCALARS else _lower(item, room)
    except _AtPathError as error:
        error.steps.append(_member(key))
        raise
    return lowered


def _lower_pairs(items: dict[object, object], room: int) -> Json:
    pairs = []
    for key, item in items.items():
        try:
            pairs.append([_lower(key, room), _lower(item, room)])
        except _AtPathError as error:
            error.steps.append(f"[{key!r}]")
            raise
    pairs.sort(key=lambda pair: _dumps(pair[0]))
    return {TAG: "dict", "v": pairs}


def _lower_object(value: object, room: int) -> Json:
    kind = type(value)
    if isinstance(value, Enum):
        return {TAG: "enum", "t": _type_name(kind), "v": value.name}
    if isinstance(value, PurePath):
        if not isinstance(value, Path):
            raise _AtPathError(f"a {kind.__name__} is no path of this machine; use Path")
        return {TAG: "path", "v": str(value)}
    if dataclasses.is_dataclass(value):
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        return {TAG: "dataclass", "t": _type_name(kind), "v": _lower_fields(fields, room)}
    if isinstance(value, tuple) and hasattr(kind, "_fields"):
        fields = dict(zip(kind._fields, value, strict=True))
        return {TAG: "namedtuple", "t": _type_name(kind), "v": _lower_fields(fields, room)}
    if isinstance(value, _Model):
        return {TAG: "model", "t": _type_name(kind), "v": value.model_dump(mode="json")}
    name = f"{kind.__module__}.{kind.__qualname__}"
    raise _AtPathError(
        f"a {name} has no faithful form in JSON; return plain data, a dataclass or a pydantic model"
    )


def _lower_fields(fields: dict[str, object], room: int) -> dict[str, Json]:
    lowered = {}
    for name, item in fields.items():
        try:
            lowered[name] = _lower(item, room)
        except _AtPathError as error:
            error.steps.append(f".{name}")
            raise
    return lowered


def _lower_set(tag: str) -> Callable[[Any, int], Json]:
    return lambda value, room: {
        TAG: tag,
        "v": sorted((_lower(item, room) for item in value), key=_dumps),
    }


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
    raise _AtPathError(f"a time zone of type {type(zone).__name__} has no form in JSON")


def _lower_time(value: time, _room: int) -> Json:
    if value.tzinfo is not None and type(value.tzinfo) is not timezone:
        raise _AtPathError("a time of day with a named zone has no form in JSON")
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


def _member(key: object) -> str:
    return f".{key}" if isinstance(key, str) and key.isidentifier() else f"[{key!r}]"


def _type_name(kind: type) -> str:
    if "<locals>" in kind.__qualname__:
        raise _AtPathError(
            f"{kind.__qualname__} is defined inside a function and could not be found again;"
            " define it in a module"
        )
    return f"{kind.__module__}:{kind.__qualname__}"


# --- reading ---------------------------------------------------------------------------------


def _unique_keys(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
    members = dict(pairs)
    if len(members) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise _AtPathError(f"the key {twice!r} stands twice in one object")
    return members


def _no_constant(name: str) -> Json:
    raise _AtPathError(f"{name} is not JSON")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise _AtPathError(f"the number {text[:40]} is too large")
    return number


def _raise_up(node: Json, room: int) -> Any:
    kind = type(node)
    if kind is not dict and kind is not list:
        return node
    if room == 0:
        raise _AtPathError(f"nested deeper than {MAX_DEPTH} levels")
    if kind is list:
        return _raise_items(node, room - 1)
    if TAG in node:
        return _raise_tagged(node, room - 1)
    raised = {}
    key = None
    try:
        for key, item in node.items():
            raised[key] = _raise_up(item, room - 1)
    except _AtPathError as error:
        error.steps.append(_member(key))
        raise
    return raised


def _raise_items(items: list[Json], room: int) -> list[Any]:
    raised = []
    try:
        for item in items:
            raised.append(_raise_up(item, room))  # noqa: PERF401 - its length is the failing index
    except _AtPathError as error:
        error.steps.append(f"[{len(raised)}]")
        raise
    return raised


def _raise_tagged(node: dict[str, Json], room: int) -> Any:
    tag = node[TAG]
    reader = _RAISE.get(tag) if isinstance(tag, str) else None
    if reader is None:
        raise _AtPathError(f"{str(tag)[:40]!r} is not a kind of value this version knows")
    try:
        return reader(node, room)
    except (
        KeyError,
        TypeError,
        ValueError,
        OverflowError,
        AttributeError,
        InvalidOperation,
    ) as error:
        raise _AtPathError(f"not a valid {tag}: {error}") from None


def _raise_dict(node: dict[str, Json], room: int) -> dict[Any, Any]:
    raised = {_raise_up(key, room): _raise_up(item, room) for key, item in node["v"]}
    if len(raised) != len(node["v"]):
        raise _AtPathError("a key stands twice in one dictionary")
    return raised


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
        raise _AtPathError(f"{node['t']} is not an enum")
    return kind[node["v"]]


def _raise_dataclass(node: dict[str, Json], room: int) -> Any:
    kind = _find_type(node["t"])
    if not dataclasses.is_dataclass(kind):
        raise _AtPathError(f"{node['t']} is not a dataclass")
    values = _raise_up(node["v"], room)
    late = {f.name for f in dataclasses.fields(kind) if not f.init}
    made = kind(**{name: value for name, value in values.items() if name not in late})
    for name in late & values.keys():
        object.__setattr__(made, name, values[name])
    return made


def _raise_namedtuple(node: dict[str, Json], room: int) -> Any:
    kind = _find_type(node["t"])
    if not (issubclass(kind, tuple) and hasattr(kind, "_fields")):
        raise _AtPathError(f"{node['t']} is not a named tuple")
    return kind(**_raise_up(node["v"], room))


def _raise_model(node: dict[str, Json], _room: int) -> Any:
    kind = _find_type(node["t"])
    if not issubclass(kind, _Model):
        raise _AtPathError(f"{node['t']} is not a pydantic model")
    return kind.model_validate(node["v"])


_RAISE: dict[str, Callable[[dict[str, Json], int], Any]] = {
    "dict": _raise_dict,
    "tuple": lambda node, room: tuple(_raise_items(node["v"], room)),
    "set": lambda node, room: set(_raise_items(node["v"], room)),
    "frozenset": lambda node, room: frozenset(_raise_items(node["v"], room)),
    "bytes": lambda node, _: base64.b64decode(node["v"], validate=True),
    "bytearray": lambda node, _: bytearray(base64.b64decode(node["v"], validate=True)),
    "datetime": _raise_datetime,
    "date": lambda node, _: date.fromisoformat(node["v"]),
    "time": _raise_time,
    "timedelta": lambda node, _: timedelta(*node["v"]),
    "decimal": lambda node, _: Decimal(node["v"]),
    "uuid": lambda node, _: UUID(node["v"]),
    "path": lambda node, _: Path(node["v"]),
    "enum": _raise_enum,
    "dataclass": _raise_dataclass,
    "namedtuple": _raise_namedtuple,
    "model": _raise_model,
}


def _find_type(name: str) -> type:
    module_name, _, qualname = name.partition(":")
    found: object = sys.modules.get(module_name)
    if found is None:
        raise _AtPathError(f"its type {name} is not imported; import {module_name} first")
    for part in qualname.split("."):
        found = getattr(found, part, None)
    if not isinstance(found, type):
        raise _AtPathError(f"its type {name} does not exist any more")
    return found
