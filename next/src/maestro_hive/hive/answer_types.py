"""The type of an answer, as a shape in plain JSON: to answer, its Python class is not needed.

A shape is a small subset of JSON Schema:

``{}`` anything · ``{"type": "boolean" | "integer" | "number" | "string" | "null"}``
``{"type": "array", "items": shape}`` · ``{"type": "object", "additionalProperties": shape}``
``{"enum": [choice, …]}``, for an enum its names, with ``"values": [value, …]`` in the same order
``{"type": "object", "title": name, "properties": {…}, "required": [name, …],
"additionalProperties": bool}`` for a class with fields · ``{"anyOf": [shape, …]}``
"""

from __future__ import annotations

import dataclasses
import json
import sys
import types
import typing
from collections.abc import Iterator, Mapping
from enum import Enum
from typing import Annotated, Any, Literal, TypeGuard, Union, get_args, get_origin

from maestro_hive.kernel.errors import ConfigurationError

Json = Any
Shape = dict[str, Any]

#: The plain types, their names in a shape, and in a phrase; True is found as a boolean first.
_KINDS: dict[type, tuple[str, str]] = {
    bool: ("boolean", "yes or no"),
    int: ("integer", "a whole number"),
    float: ("number", "a number"),
    str: ("string", "text"),
    type(None): ("null", "nothing"),
    list: ("array", "a list"),
    dict: ("object", "an object"),
}
_PHRASES = dict(_KINDS.values())


class ShapeError(ConfigurationError):
    """A value does not have the required shape; ``path`` is the place."""

    def __init__(self, path: str, problem: str) -> None:
        super().__init__(f"{path} {problem}")
        self.path = path


# --- from a type to its shape ---------------------------------------------------------------------


def shape_of(  # noqa: PLR0911 - one line for each kind of type
    expected: object, around: tuple[type, ...] = ()
) -> Shape:
    """Return the shape of a type; None, ``Any`` and ``object`` allow anything."""
    expected = _bare(expected)
    origin, inside = get_origin(expected), get_args(expected)
    if expected is None or expected is Any or expected is object:
        return {}
    if isinstance(expected, type) and expected in _KINDS:
        return {"type": _KINDS[expected][0]}
    if isinstance(expected, type) and issubclass(expected, Enum):
        values = [each.value for each in expected.__members__.values()]
        plain = all(isinstance(value, str | int) for value in values)
        return {"enum": list(expected.__members__), **({"values": values} if plain else {})}
    if _has_fields(expected):
        if expected in around:
            raise _no_answer(expected, ": it contains itself")
        fields, around = list(_fields(expected)), (*around, expected)
        return {
            "type": "object",
            "title": expected.__name__,
            "properties": {name: shape_of(kind, around) for name, kind, _ in fields},
            "required": [name for name, _, required in fields if required],
            "additionalProperties": getattr(expected, "model_config", {}).get("extra") == "allow",
        }
    if origin is Literal and all(type(each) in (str, int, bool, type(None)) for each in inside):
        return {"enum": list(inside)}
    if origin in (Union, types.UnionType):
        return {"anyOf": [shape_of(option, around) for option in inside]}
    if origin is list:
        return {"type": "array", "items": shape_of(inside[0], around)}
    if origin is dict and inside[0] is str:
        return {"type": "object", "additionalProperties": shape_of(inside[1], around)}
    raise _no_answer(
        expected,
        "; use bool, int, float, str, list, dict, None, a Literal, an Enum, a dataclass, or a"
        " pydantic model",
    )


def _bare(expected: object) -> object:
    return get_args(expected)[0] if get_origin(expected) is Annotated else expected


def _no_answer(expected: object, why: str) -> ConfigurationError:
    name = expected.__qualname__ if isinstance(expected, type) else repr(expected)
    return ConfigurationError(f"an answer cannot have the type {name}{why}")


def _has_fields(expected: object) -> TypeGuard[type]:
    is_class = isinstance(expected, type)
    return is_class and (dataclasses.is_dataclass(expected) or _is_model(expected))


def _is_model(expected: object) -> bool:
    """Return whether it is a pydantic model, by its attributes: pydantic is not imported here."""
    return isinstance(getattr(expected, "model_fields", None), Mapping)


def _fields(expected: Any) -> Iterator[tuple[str, object, bool]]:
    """Yield the name and the type of each field, and whether it is required."""
    if _is_model(expected):
        for name, field in expected.model_fields.items():
            alias = field.validation_alias or field.alias
            own = alias if isinstance(alias, str) else name
            yield own, field.annotation, field.is_required()
        return
    try:
        hints = typing.get_type_hints(expected)
    except (NameError, TypeError) as error:
        why = f": {error}; define the types of its fields at the top of their module"
        raise _no_answer(expected, why) from error
    for field in dataclasses.fields(expected):
        if field.init:
            required = field.default is field.default_factory is dataclasses.MISSING
            yield field.name, hints[field.name], required


# --- a value against a shape ----------------------------------------------------------------------


def check(shape: Shape | None, value: Json, path: str = "answer") -> None:
    """Raise ``ShapeError`` unless the value has the shape."""
    for place, problem in _problems(shape or {}, value, path):
        raise ShapeError(place, problem)


def fits(shape: Shape, value: Json) -> bool:
    """Return whether the value has the shape."""
    return not any(_problems(shape, value, ""))


def _problems(shape: Shape, value: Json, path: str) -> Iterator[tuple[str, str]]:
    """Yield the places where a value has another shape, and what is wrong there."""
    options = shape.get("anyOf", [])
    if not shape or any(fits(option, value) for option in options):
        return
    if options:
        near = [option for option in options if _is_of(option, value)]
        if isinstance(value, dict | list) and len(near) == 1:
            yield from _problems(near[0], value, path)  # which is more precise
    elif "enum" in shape:
        if any(_same(value, each) for each in [*shape["enum"], *shape.get("values", ())]):
            return
    elif _is_of(shape, value):
        for each, item, place in _members(shape, value):
            if each is None:
                yield path + place, item
            else:
                yield from _problems(each, item, path + place)
        return
    yield path, f"is {value!r:.60}, and must be {describe(shape)}"


def _members(shape: Shape, value: Json) -> Iterator[tuple[Shape | None, Json, str]]:
    """Yield the shape, the value and the place of each member; without a shape, what is wrong."""
    if isinstance(value, list) and "items" in shape:
        yield from ((shape["items"], item, f"[{at}]") for at, item in enumerate(value))
    if not isinstance(value, dict):
        return
    fields, others = shape.get("properties", {}), shape.get("additionalProperties", True)
    for name in shape.get("required", ()):
        if name not in value:
            yield None, f"is missing, and must be {describe(fields[name])}", _member(name)
    for name, item in value.items():
        if name not in fields and others is False:
            known = ", ".join(fields) or "none"
            yield None, f"is not a field; the fields are: {known}", _member(name)
        else:
            yield fields.get(name, {} if others is True else others), item, _member(name)


def _member(name: str) -> str:
    return f".{name}" if name.isidentifier() else f"[{name!r}]"


def _same(value: Json, choice: Json) -> bool:
    return type(value) is type(choice) and bool(value == choice)


def _is_of(shape: Shape, value: Json) -> bool:
    """Return whether a value is of the type of a shape, whatever is inside."""
    wanted = shape.get("type")
    if wanted == "number" and type(value) in (int, float):
        return bool(abs(value) <= sys.float_info.max)
    return wanted == next((name for of, (name, _) in _KINDS.items() if isinstance(value, of)), "")


# --- as text --------------------------------------------------------------------------------------


def describe(shape: Shape | None) -> str:
    """Return the shape as a phrase: ``yes or no``, ``one of: approve, reject``."""
    if not shape:
        return "anything"
    if "anyOf" in shape:
        options = sorted(shape["anyOf"], key=lambda option: option == {"type": "null"})
        return " or ".join(dict.fromkeys(map(describe, options)))
    if "enum" in shape:
        return "one of: " + ", ".join(map(_as_typed, shape["enum"]))
    return _PHRASES[shape["type"]] + _described_inside(shape)


def _described_inside(shape: Shape) -> str:
    if "properties" in shape:
        fields = [
            f"{name} ({_noun(field)}{'' if name in shape['required'] else ', optional'})"
            for name, field in shape["properties"].items()
        ]
        return f" with: {', '.join(fields) or 'nothing'}"
    if shape.get("items"):
        return f" (each {_noun(shape['items'])})"
    if shape.get("additionalProperties"):
        return f" (each value {_noun(shape['additionalProperties'])})"
    return ""


def _noun(shape: Shape) -> str:
    return describe(shape).removeprefix("a ").removeprefix("an ")


def _as_typed(choice: Json) -> str:
    return choice if isinstance(choice, str) else json.dumps(choice)


# --- from a value to the type, and back -----------------------------------------------------------


def build(expected: object, value: Json, path: str = "answer") -> Any:
    """Return the value as an instance of the type."""
    check(shape_of(expected), value, path)
    return _built(expected, value, path)


def _built(expected: object, value: Json, path: str) -> object:
    expected = _bare(expected)
    origin, inside = get_origin(expected), get_args(expected)
    if origin in (Union, types.UnionType):
        # A whole number becomes a float only where int is not an option.
        options = sorted(inside, key=lambda option: option is float)
        return _built(next(each for each in options if fits(shape_of(each), value)), value, path)
    if origin is list:
        return [_built(inside[0], item, f"{path}[{at}]") for at, item in enumerate(value)]
    if origin is dict:
        return {name: _built(inside[1], item, path + _member(name)) for name, item in value.items()}
    if expected is float:
        return float(value)
    if isinstance(expected, type) and issubclass(expected, Enum):
        by_name = expected.__members__.get(value) if isinstance(value, str) else None
        return by_name or next(each for each in expected if _same(each.value, value))
    return _made(expected, value, path) if _has_fields(expected) else value


def _made(expected: Any, value: dict[str, Json], path: str) -> object:
    given = dict(value)
    for name, kind, _ in _fields(expected):
        if name in given:
            given[name] = _built(kind, given[name], path + _member(name))
    try:
        return expected.model_validate(given) if _is_model(expected) else expected(**given)
    except Exception as error:
        name = expected.__qualname__
        raise ShapeError(path, f"is not what {name} accepts as its fields: {error}") from error


def plain(value: Any) -> Json:
    """Return a value as plain data, as it is given without its class."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [each.name for each in dataclasses.fields(value) if each.init]
        return {name: plain(getattr(value, name)) for name in fields}
    if _is_model(type(value)):
        return value.model_dump(mode="json", by_alias=True, round_trip=True)
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    return value.name if isinstance(value, Enum) else value
