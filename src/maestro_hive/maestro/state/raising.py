"""Trees of plain JSON back into values, every tag becoming what it stands for.

A class is looked up among the modules that are imported already. It is never imported: a file must
not decide what code runs.
"""

from __future__ import annotations

import base64
import dataclasses
import sys
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import UUID

from maestro_hive.kernel.errors import DecodeError
from maestro_hive.maestro.state.lowering import TAG, Model, find_type
from maestro_hive.maestro.state.strict_json import MAX_DEPTH, AtPathError, Json, member

if TYPE_CHECKING:
    from collections.abc import Callable


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
