"""Trees of plain JSON back into values, every tag becoming what it stands for.

A class is looked up among the modules that are imported already. It is never imported: a file must
not decide what code runs.
"""

from __future__ import annotations

import base64
import dataclasses
import sys
from datetime import date, datetime, time, timedelta
from decimal import Decimal, InvalidOperation
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import UUID

from maestro_hive.maestro.state.lowering import TAG, Model
from maestro_hive.maestro.state.strict_json import MAX_DEPTH, AtPathError, Json, member

if TYPE_CHECKING:
    from collections.abc import Callable


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
    except (
        KeyError,
        TypeError,
        ValueError,
        OverflowError,
        AttributeError,
        InvalidOperation,
    ) as error:
        raise AtPathError(f"not a valid {tag}: {error}") from None


def _raise_dict(node: dict[str, Json], room: int) -> dict[Any, Any]:
    raised = {raise_up(key, room): raise_up(item, room) for key, item in node["v"]}
    if len(raised) != len(node["v"]):
        raise AtPathError("a key stands twice in one dictionary")
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
        raise AtPathError(f"{node['t']} is not an enum")
    return kind[node["v"]]


def _raise_dataclass(node: dict[str, Json], room: int) -> Any:
    kind = _find_type(node["t"])
    if not dataclasses.is_dataclass(kind):
        raise AtPathError(f"{node['t']} is not a dataclass")
    values = raise_up(node["v"], room)
    late = {f.name for f in dataclasses.fields(kind) if not f.init}
    made = kind(**{name: value for name, value in values.items() if name not in late})
    for name in late & values.keys():
        object.__setattr__(made, name, values[name])
    return made


def _raise_namedtuple(node: dict[str, Json], room: int) -> Any:
    kind = _find_type(node["t"])
    if not (issubclass(kind, tuple) and hasattr(kind, "_fields")):
        raise AtPathError(f"{node['t']} is not a named tuple")
    return kind(**raise_up(node["v"], room))


def _raise_model(node: dict[str, Json], _room: int) -> Any:
    kind = _find_type(node["t"])
    if not issubclass(kind, Model):
        raise AtPathError(f"{node['t']} is not a pydantic model")
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
        raise AtPathError(f"its type {name} is not imported; import {module_name} first")
    for part in qualname.split("."):
        found = getattr(found, part, None)
    if not isinstance(found, type):
        raise AtPathError(f"its type {name} does not exist any more")
    return found
