"""The type of an answer, as a shape in plain JSON: to answer, its Python class is not needed.

A shape is a small subset of JSON Schema:

``{}`` anything · ``{"type": "boolean" | "integer" | "number" | "string" | "null"}``
``{"type": "string", "format": "date-time" | "date" | "time" | "decimal" | "uuid" | "path"}``
``{"type": "array", "items": shape}`` · ``{"type": "object", "additionalProperties": shape}``
``{"enum": [choice, …]}``, for an enum its names, with ``"values": [value, …]`` in the same order
``{"type": "object", "title": name, "properties": {…}, "required": [name, …],
"additionalProperties": bool}`` for a class with fields · ``{"anyOf": [shape, …]}``

A shape ``with_classes`` also has what a value is stored with: ``"class"``, the stored name of an enum, a
dataclass or a model, ``"kind"``, which of these it is, and ``"default"`` of a field, as it is stored. So
a value of that class can be stored where the class itself is not known (``to_tree``).
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from datetime import date, datetime, time
from decimal import Decimal, InvalidOperation
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal, TypeGuard, Union, get_args, get_origin
from uuid import UUID

from maestro_hive.kernel.errors import ConfigurationError, DecodeError, EncodeError
from maestro_hive.maestro.state import codec
from maestro_hive.maestro.state.codec_classes import stored_name
from maestro_hive.maestro.state.strict_json import AtPathError, Json, member, parse

#: The plain types, their names in a shape, and in a phrase.
_PLAIN: dict[type, tuple[str, str]] = {
    bool: ("boolean", "yes or no"),
    int: ("integer", "a whole number"),
    float: ("number", "a number"),
    str: ("string", "text"),
    type(None): ("null", "nothing"),
    list: ("array", "a list"),
    dict: ("object", "an object"),
}
_WORDS = dict(_PLAIN.values())


class _Text(typing.NamedTuple):
    """A type whose values are written as text: how it is read, and an example of it."""

    read: Callable[[str], Any]
    phrase: str


_TEXTS: dict[type, tuple[str, _Text]] = {
    datetime: ("date-time", _Text(datetime.fromisoformat, "a date and time, as 2030-01-31T09:00")),
    date: ("date", _Text(date.fromisoformat, "a date, as 2030-01-31")),
    time: ("time", _Text(time.fromisoformat, "a time of day, as 09:30")),
    Decimal: ("decimal", _Text(Decimal, "a decimal number, as 12.50")),
    UUID: ("uuid", _Text(UUID, "a UUID")),
    Path: ("path", _Text(Path, "a path")),
}
_FORMATS = dict(_TEXTS.values())
_YES_OR_NO = {"yes": True, "y": True, "true": True, "no": False, "n": False, "false": False}


class ShapeError(ConfigurationError):
    """A value does not have the required shape; ``path`` is the place."""

    def __init__(self, path: str, problem: str) -> None:
        super().__init__(f"{path} {problem}")
        self.path = path
        self.problem = problem


# --- from a type to its shape ---------------------------------------------------------------------


def shape_of(expected: object) -> Json:
    """Return the shape of a type; None, ``Any`` and ``object`` allow anything."""
    return _without_classes(shape_with_classes(expected))


def shape_with_classes(expected: object) -> Json:
    """Return the shape of a type, with what its values are stored with."""
    return {} if expected is None else _shape_of(expected, ())


def declared_result(function: Callable[..., Any]) -> Json:
    """Return the shape, with classes, of what a function declares to return; None if none is known."""
    return declared_types(function).get("return")


def declared_types(function: Callable[..., Any]) -> dict[str, Json]:
    """Return the shapes, with classes, of a function's parameters and result by their annotations.

    One of a type that is not written as text is ``{"unknown": its name}``.
    """
    try:
        hints = typing.get_type_hints(function)
    except (NameError, TypeError, AttributeError):  # defined in a function, or not at all
        return {}
    return {name: _declared(hint) for name, hint in hints.items()}


def _declared(hint: object) -> Json:
    try:
        return shape_with_classes(hint)
    except ConfigurationError:
        return {"unknown": hint.__qualname__ if isinstance(hint, type) else str(hint)}


def _without_classes(shape: Json) -> Json:
    known = {key: each for key, each in shape.items() if key not in ("class", "kind", "default")}
    for key in ("items", "additionalProperties"):
        if isinstance(known.get(key), dict):
            known[key] = _without_classes(known[key])
    if "anyOf" in known:
        known["anyOf"] = [_without_classes(option) for option in known["anyOf"]]
    if "properties" in known:
        fields = known["properties"].items()
        known["properties"] = {name: _without_classes(field) for name, field in fields}
    return known


def _shape_of(expected: object, around: tuple[type, ...]) -> Json:
    expected = _bare(expected)
    if expected is Any or expected is object:
        return {}
    if isinstance(expected, type) and expected in _PLAIN:
        return {"type": _PLAIN[expected][0]}
    if isinstance(expected, type) and expected in _TEXTS:
        return {"type": "string", "format": _TEXTS[expected][0]}
    if isinstance(expected, type) and issubclass(expected, Enum):
        return _shape_of_enum(expected)
    if _has_fields(expected):
        return _shape_of_class(expected, around)
    return _shape_of_generic(expected, around)


def _shape_of_generic(expected: object, around: tuple[type, ...]) -> Json:
    origin, inside = get_origin(expected), get_args(expected)
    if origin is Literal and all(
        isinstance(value, str | int | None) and not isinstance(value, Enum) for value in inside
    ):
        return {"enum": list(inside)}
    if origin in (Union, types.UnionType):
        return {"anyOf": [_shape_of(option, around) for option in inside]}
    if origin is list:
        return {"type": "array", "items": _shape_of(inside[0], around)}
    if origin is dict and inside[0] is str:
        return {"type": "object", "additionalProperties": _shape_of(inside[1], around)}
    raise _no_answer(
        expected,
        "; use bool, int, float, str, list, dict, None, a Literal, an Enum, a dataclass, a pydantic"
        " model, datetime, date, time, Decimal, UUID, Path, or a union, list[…] or dict[str, …] of"
        " those",
    )


def _bare(expected: object) -> object:
    return get_args(expected)[0] if get_origin(expected) is Annotated else expected


def _no_answer(expected: object, why: str) -> ConfigurationError:
    name = expected.__qualname__ if isinstance(expected, type) else repr(expected)
    return ConfigurationError(f"an answer cannot have the type {name}{why}")


def _shape_of_enum(expected: type[Enum]) -> Json:
    names = list(expected.__members__)
    values = [expected[name].value for name in names]
    plain = all(isinstance(value, str | int) for value in values)
    shape = {"enum": names, "values": values} if plain else {"enum": names}
    return {**shape, **_class_of(expected, "enum")}


def _class_of(expected: type, kind: str) -> Json:
    """Return the name that a class is stored by; none where it has none: it is in a function."""
    try:
        return {"class": stored_name(expected), "kind": kind}
    except AtPathError:
        return {}


def _shape_of_class(expected: type, around: tuple[type, ...]) -> Json:
    if expected in around:
        raise _no_answer(expected, ": it contains itself")
    fields, around = list(_fields(expected)), (*around, expected)
    defaults = {} if _is_model(expected) else _defaults(expected)
    return {
        "type": "object",
        "title": expected.__name__,
        "properties": {
            name: {**_shape_of(kind, around), **defaults.get(name, {})} for name, kind, _ in fields
        },
        "required": [name for name, _, required in fields if required],
        "additionalProperties": getattr(expected, "model_config", {}).get("extra") == "allow",
        **_class_of(expected, "model" if _is_model(expected) else "dataclass"),
    }


def _defaults(expected: Any) -> dict[str, Json]:
    """Return the defaults of a dataclass's fields as they are stored; not those that cannot be."""
    found: dict[str, Json] = {}
    for field in dataclasses.fields(expected):
        default = field.default
        if field.default_factory in (list, dict, set, tuple):
            default = field.default_factory()
        if default is not dataclasses.MISSING:
            with contextlib.suppress(EncodeError):
                found[field.name] = {"default": codec.parse(codec.encode(default).data)}
    return found


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


# --- a value against a shape ---------------------------------------------------------------------


def check(shape: Json, value: Json, path: str = "answer") -> None:
    """Raise ``ShapeError`` unless the value has the shape."""
    if not shape:
        return
    if "anyOf" in shape:
        _check_any(shape, value, path)
    elif "enum" in shape:
        choices = [*shape["enum"], *shape.get("values", ())]
        if not any(_same(value, choice) for choice in choices):
            raise _wrong(shape, value, path)
    elif not _is_of_kind(value, shape["type"]) or not _is_of_format(value, shape.get("format")):
        raise _wrong(shape, value, path)
    elif isinstance(value, list):
        for number, item in enumerate(value):
            check(shape.get("items"), item, f"{path}[{number}]")
    elif isinstance(value, dict):
        _check_members(shape, value, path)


def _check_any(shape: Json, value: Json, path: str) -> None:
    if any(fits(option, value) for option in shape["anyOf"]):
        return
    kinds = [option for option in shape["anyOf"] if _is_of_kind(value, option.get("type"))]
    if isinstance(value, dict | list) and len(kinds) == 1:
        check(kinds[0], value, path)  # its error is more precise
    raise _wrong(shape, value, path)


def _check_members(shape: Json, value: dict[str, Json], path: str) -> None:
    fields = shape.get("properties", {})
    others = shape.get("additionalProperties", True)
    for name in shape.get("required", ()):
        if name not in value:
            problem = f"is missing, and must be {describe(fields[name])}"
            raise ShapeError(path + member(name), problem)
    for name, item in value.items():
        if name not in fields and others is False:
            known = ", ".join(fields) or "none"
            raise ShapeError(path + member(name), f"is not a field; the fields are: {known}")
        check(fields.get(name, {} if others is True else others), item, path + member(name))


def fits(shape: Json, value: Json) -> bool:
    """Return whether the value has the shape."""
    try:
        check(shape, value)
    except ShapeError:
        return False
    return True


def _wrong(shape: Json, value: Json, path: str) -> ShapeError:
    shown = repr(value)
    if len(shown) > 60:
        shown = shown[:57] + "..."
    return ShapeError(path, f"is {shown}, and must be {describe(shape)}")


def _same(value: Json, choice: Json) -> bool:
    return type(value) is type(choice) and bool(value == choice)


def _is_of_kind(value: Json, kind: str | None) -> bool:
    if kind == "number" and type(value) is not bool:
        return isinstance(value, int | float) and _is_finite(value)
    found = (name for plain, (name, _) in _PLAIN.items() if isinstance(value, plain))
    return kind == next(found, None)  # True and False are found as booleans first


def _is_of_format(value: Json, name: str | None) -> bool:
    if name is None or name not in _FORMATS:
        return True
    try:
        _FORMATS[name].read(value)
    except (ValueError, InvalidOperation):
        return False
    return True


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


# --- as text -------------------------------------------------------------------------------------


def describe(shape: Json) -> str:
    """Return the shape as a phrase: ``yes or no``, ``one of: approve, reject``."""
    if not shape:
        return "anything"
    if "anyOf" in shape:
        options = sorted(shape["anyOf"], key=lambda option: option == {"type": "null"})
        return " or ".join(dict.fromkeys(map(describe, options)))
    if "enum" in shape:
        return "one of: " + ", ".join(map(_as_typed, shape["enum"]))
    if shape.get("format") in _FORMATS:
        return _FORMATS[shape["format"]].phrase
    return _WORDS[shape["type"]] + _described_inside(shape)


def _described_inside(shape: Json) -> str:
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


def _noun(shape: Json) -> str:
    return describe(shape).removeprefix("a ").removeprefix("an ")


def _as_typed(choice: Json) -> str:
    return choice if isinstance(choice, str) else json.dumps(choice)


def parse_words(shape: Json, text: str, path: str = "answer") -> Json:
    """Return the value of a typed text: a plain word where the shape allows one, else JSON."""
    shape = shape or {}
    if "anyOf" in shape:
        value = _read_any(shape, text, path)
    elif "enum" in shape:
        value = _read_choice(shape, text.strip(), path)
    elif shape.get("type") == "string":
        value = text.strip() if "format" in shape else text
    else:
        value = _read_word(shape, text.strip(), path)
    check(shape, value, path)
    return value


def _read_word(shape: Json, word: str, path: str) -> Json:
    kind = shape.get("type")
    if kind == "boolean" and word.lower() in _YES_OR_NO:
        return _YES_OR_NO[word.lower()]
    if kind == "null" and word.lower() in {"", "none", "nothing"}:
        return None
    try:
        return parse(word.encode(), path)
    except (DecodeError, UnicodeEncodeError) as error:
        is_json = word.startswith(("{", "[", '"'))
        if kind is None and not is_json:
            return word
        if kind in {None, "array", "object"}:
            problem = f"must be {describe(shape)}, written as JSON: {error}"
            raise ShapeError(path, problem) from error
        raise _wrong(shape, word, path) from error


def _read_any(shape: Json, text: str, path: str) -> Json:
    """Return the value by the first option that fits; as text only if no other does."""
    for option in sorted(shape["anyOf"], key=lambda option: option == {"type": "string"}):
        try:
            return parse_words(option, text, path)
        except ShapeError:
            continue
    raise _wrong(shape, text, path)


def _read_choice(shape: Json, word: str, path: str) -> Json:
    """Return the choice of that name; a member of an enum can be given by its value too."""
    names = shape["enum"]
    options = [*zip(names, names, strict=True), *zip(shape.get("values", ()), names, strict=False)]
    for form in (str, str.lower):
        for typed, choice in options:
            if form(_as_typed(typed)) == form(word):
                return choice
    raise _wrong(shape, word, path)


# --- from a value to the type --------------------------------------------------------------------


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
        fitting = next(option for option in options if fits(_shape_of(option, ()), value))
        return _built(fitting, value, path)
    if origin is list:
        return [_built(inside[0], item, f"{path}[{at}]") for at, item in enumerate(value)]
    if origin is dict:
        return {name: _built(inside[1], item, path + member(name)) for name, item in value.items()}
    if isinstance(expected, type) and (expected is float or expected in _TEXTS):
        return float(value) if expected is float else _TEXTS[expected][1].read(value)
    if isinstance(expected, type) and issubclass(expected, Enum):
        by_name = expected.__members__.get(value) if isinstance(value, str) else None
        return by_name or next(each for each in expected if _same(each.value, value))
    return _made(expected, value, path) if _has_fields(expected) else value


def _made(expected: Any, value: dict[str, Json], path: str) -> object:
    given = dict(value)
    for name, kind, _ in _fields(expected):
        if name in given:
            given[name] = _built(kind, given[name], path + member(name))
    try:
        return expected.model_validate(given) if _is_model(expected) else expected(**given)
    except Exception as error:
        name = expected.__qualname__
        raise ShapeError(path, f"is not what {name} accepts as its fields: {error}") from error


# --- from a value to how it is stored ------------------------------------------------------------


def to_tree(shape: Json, value: Json, path: str = "value") -> Json:
    """Return a value as the codec stores one of this type; its classes need not be known here.

    ``shape`` is one with classes; raises ``ShapeError`` unless the value has it.
    """
    check(shape, value, path)
    return _tree(shape, value, path)


def _tree(shape: Json, value: Json, path: str) -> Json:
    if not shape:
        return codec.parse(codec.encode(value, path).data, path)
    if "anyOf" in shape:
        # A whole number becomes a float only where int is not an option.
        options = sorted(shape["anyOf"], key=lambda option: option == {"type": "number"})
        fitting = next(option for option in options if fits(option, value))
        return _tree(fitting, value, path)
    if "enum" in shape:
        return _member_tree(shape, value, path)
    if isinstance(value, list):
        return [_tree(shape.get("items"), each, f"{path}[{at}]") for at, each in enumerate(value)]
    if isinstance(value, dict):
        return _object_tree(shape, value, path)
    return _scalar_tree(shape, value, path)


def _scalar_tree(shape: Json, value: Json, path: str) -> Json:
    if shape.get("format") in _FORMATS:
        return codec.parse(codec.encode(_FORMATS[shape["format"]].read(value), path).data, path)
    return float(value) if shape["type"] == "number" else value


def _member_tree(shape: Json, value: Json, path: str) -> Json:
    if "values" not in shape and "class" not in shape:
        return value  # a Literal
    by_value = dict(zip(map(repr, shape.get("values", ())), shape["enum"], strict=False))
    name = value if value in shape["enum"] else by_value[repr(value)]
    return {codec.TAG: "enum", "t": _name_of(shape, path), "v": name}


def _object_tree(shape: Json, value: dict[str, Json], path: str) -> Json:
    others = shape.get("additionalProperties", True)
    if "properties" not in shape:
        inside = others if isinstance(others, dict) else {}
        return {name: _tree(inside, each, path + member(name)) for name, each in value.items()}
    name = _name_of(shape, path)
    if shape.get("kind") == "model":  # which makes its fields of plain data itself
        return {codec.TAG: "model", "t": name, "v": value}
    fields: dict[str, Json] = {}
    for each, field in shape["properties"].items():
        if each in value:
            fields[each] = _tree(field, value[each], path + member(each))
        elif "default" in field:
            fields[each] = field["default"]
    return {codec.TAG: "dataclass", "t": name, "v": fields}


def _name_of(shape: Json, path: str) -> str:
    if "class" not in shape:
        raise ShapeError(path, "is of a class that is defined in a function, and cannot be stored")
    return str(shape["class"])
