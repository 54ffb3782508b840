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
import types
import typing
from collections.abc import Callable, Hashable, Iterator, Mapping
from enum import Enum
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

from maestro_hive.kernel.errors import ConfigurationError, DecodeError
from maestro_hive.maestro.state.strict_json import Json, member, parse

_PLAIN: dict[Any, str] = {
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    type(None): "null",
    list: "array",
    dict: "object",
}
_WORDS = {
    "boolean": "yes or no",
    "integer": "a whole number",
    "number": "a number",
    "string": "text",
    "null": "nothing",
    "array": "a list",
    "object": "an object",
}
_YES_OR_NO = {
    **dict.fromkeys(("yes", "y", "true"), True),
    **dict.fromkeys(("no", "n", "false"), False),
}


class ShapeError(ConfigurationError):
    """A value does not have the required shape; ``path`` is the place."""

    def __init__(self, path: str, problem: str) -> None:
        super().__init__(f"{path} {problem}")
        self.path = path
        self.problem = problem


# --- from a type to its shape ---------------------------------------------------------------------


class _Field(NamedTuple):
    """One field of a class."""

    name: str
    type: Any
    required: bool


def shape_of(expected: Any) -> Json:
    """Return the shape of a type; None, ``Any`` and ``object`` allow anything."""
    return {} if expected is None else _shape_of(expected, ())


def _shape_of(expected: Any, around: tuple[Any, ...]) -> Json:
    expected = _bare(expected)
    if not isinstance(expected, Hashable):
        raise _no_shape(expected)
    if expected in (Any, object):
        return {}
    if expected in _PLAIN:
        return {"type": _PLAIN[expected]}
    if isinstance(expected, type) and issubclass(expected, Enum):
        return _shape_of_enum(expected)
    if _has_fields(expected):
        return _shape_of_class(expected, around)
    return _shape_of_generic(expected, around)


def _shape_of_generic(expected: Any, around: tuple[Any, ...]) -> Json:
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
    raise _no_shape(expected)


def _bare(expected: Any) -> Any:
    return get_args(expected)[0] if get_origin(expected) is Annotated else expected


def _no_shape(expected: Any) -> ConfigurationError:
    name = getattr(expected, "__qualname__", None) if isinstance(expected, type) else None
    return ConfigurationError(
        f"an answer cannot have the type {name or repr(expected)}; use bool, int, float, str,"
        " list, dict, None, a Literal, an Enum, a dataclass, a pydantic model, or a union, list[…]"
        " or dict[str, …] of those"
    )


def _shape_of_enum(expected: type[Enum]) -> Json:
    names = list(expected.__members__)
    values = [expected[name].value for name in names]
    plain = all(isinstance(value, str | int) for value in values)
    return {"enum": names, "values": values} if plain else {"enum": names}


def _shape_of_class(expected: Any, around: tuple[Any, ...]) -> Json:
    if expected in around:
        raise ConfigurationError(
            f"an answer cannot have the type {expected.__qualname__}: it contains itself"
        )
    fields = list(_fields(expected))
    return {
        "type": "object",
        "title": expected.__name__,
        "properties": {field.name: _shape_of(field.type, (*around, expected)) for field in fields},
        "required": [field.name for field in fields if field.required],
        "additionalProperties": getattr(expected, "model_config", {}).get("extra") == "allow",
    }


def _has_fields(expected: Any) -> bool:
    is_class = isinstance(expected, type)
    return is_class and (dataclasses.is_dataclass(expected) or _is_model(expected))


def _is_model(expected: Any) -> bool:
    """Return whether it is a pydantic model, by its attributes: pydantic is not imported here."""
    return isinstance(getattr(expected, "model_fields", None), Mapping)


def _fields(expected: Any) -> Iterator[_Field]:
    if _is_model(expected):
        for name, field in expected.model_fields.items():
            alias = field.validation_alias or field.alias
            own = alias if isinstance(alias, str) else name
            yield _Field(own, field.annotation, field.is_required())
        return
    hints = _hints(expected)
    for field in dataclasses.fields(expected):
        if field.init:
            defaults = (field.default, field.default_factory)
            required = all(default is dataclasses.MISSING for default in defaults)
            yield _Field(field.name, hints[field.name], required)


def _hints(expected: Any) -> dict[str, Any]:
    try:
        return typing.get_type_hints(expected)
    except (NameError, TypeError) as error:
        raise ConfigurationError(
            f"an answer cannot have the type {expected.__qualname__}: {error}; define the types"
            " of its fields at the top of their module"
        ) from error


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
    elif not _IS[shape["type"]](value):
        raise _wrong(shape, value, path)
    elif isinstance(value, list):
        for number, item in enumerate(value):
            check(shape.get("items"), item, f"{path}[{number}]")
    elif isinstance(value, dict):
        _check_members(shape, value, path)


def _check_any(shape: Json, value: Json, path: str) -> None:
    if any(fits(option, value) for option in shape["anyOf"]):
        return
    typed = [option for option in shape["anyOf"] if "type" in option]
    of_its_kind = [option for option in typed if _IS[option["type"]](value)]
    if isinstance(value, dict | list) and len(of_its_kind) == 1:
        check(of_its_kind[0], value, path)  # its error is more precise
    raise _wrong(shape, value, path)


def _check_members(shape: Json, value: dict[str, Json], path: str) -> None:
    fields = shape.get("properties", {})
    others = shape.get("additionalProperties", True)
    for name in shape.get("required", ()):
        if name not in value:
            raise ShapeError(
                path + member(name), f"is missing, and must be {describe(fields[name])}"
            )
    for name, item in value.items():
        if name in fields:
            check(fields[name], item, path + member(name))
        elif others is False:
            known = ", ".join(fields) or "none"
            raise ShapeError(path + member(name), f"is not a field; the fields are: {known}")
        elif others is not True:
            check(others, item, path + member(name))


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


def _is_number(value: Json) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return abs(float(value)) != float("inf") and value == value  # noqa: PLR0124 - NaN is not
    except OverflowError:
        return False


_IS: dict[str, Callable[[Json], bool]] = {
    "boolean": lambda value: isinstance(value, bool),
    "integer": lambda value: isinstance(value, int) and not isinstance(value, bool),
    "number": _is_number,
    "string": lambda value: isinstance(value, str),
    "null": lambda value: value is None,
    "array": lambda value: isinstance(value, list),
    "object": lambda value: isinstance(value, dict),
}


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
    return _WORDS[shape["type"]] + _described_inside(shape)


def _described_inside(shape: Json) -> str:
    if "properties" in shape:
        return f" with: {', '.join(_described_fields(shape)) or 'nothing'}"
    if shape.get("items"):
        return f" (each {_noun(shape['items'])})"
    if shape.get("additionalProperties"):
        return f" (each value {_noun(shape['additionalProperties'])})"
    return ""


def _described_fields(shape: Json) -> Iterator[str]:
    for name, field in shape["properties"].items():
        optional = "" if name in shape["required"] else ", optional"
        yield f"{name} ({_noun(field)}{optional})"


def _noun(shape: Json) -> str:
    return describe(shape).removeprefix("a ").removeprefix("an ")


def _as_typed(choice: Json) -> str:
    return choice if isinstance(choice, str) else json.dumps(choice)


def parse_words(shape: Json, text: str, path: str = "answer") -> Json:
    """Return the value of a typed text: a plain word where the shape allows one, else JSON."""
    value = _read(shape or {}, text, path)
    check(shape, value, path)
    return value


def _read(shape: Json, text: str, path: str) -> Json:
    if "anyOf" in shape:
        return _read_any(shape, text, path)
    if "enum" in shape:
        return _read_choice(shape, text.strip(), path)
    if shape.get("type") == "string":
        return text
    return _read_word(shape, text.strip(), path)


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


def build(expected: Any, value: Json, path: str = "answer") -> Any:
    """Return the value as an instance of the type."""
    check(shape_of(expected), value, path)
    return _built(expected, value, path)


def _built(expected: Any, value: Json, path: str) -> Any:
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
    if expected is float:
        return float(value)
    if isinstance(expected, type) and issubclass(expected, Enum):
        return _member(expected, value)
    return _made(expected, value, path) if _has_fields(expected) else value


def _member(expected: type[Enum], value: Json) -> Enum:
    """Return the member of that name, or else of that value."""
    by_name = expected.__members__.get(value) if isinstance(value, str) else None
    return by_name or next(each for each in expected if _same(each.value, value))


def _made(expected: Any, value: dict[str, Json], path: str) -> Any:
    given = dict(value)
    for field in _fields(expected):
        if field.name in given:
            given[field.name] = _built(field.type, given[field.name], path + member(field.name))
    try:
        return expected.model_validate(given) if _is_model(expected) else expected(**given)
    except Exception as error:
        name = expected.__qualname__
        raise ShapeError(path, f"is not what {name} accepts as its fields: {error}") from error
