"""Values into trees of plain JSON, with a tag on everything JSON has no form for."""

from __future__ import annotations

import base64
import dataclasses
import math
import sys
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from enum import Enum
from pathlib import Path, PurePath
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol, cast, runtime_checkable
from uuid import UUID

from maestro_hive.maestro.state.strict_json import MAX_DEPTH, AtPathError, Json, member, to_text

if TYPE_CHECKING:
    from collections.abc import Callable

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
