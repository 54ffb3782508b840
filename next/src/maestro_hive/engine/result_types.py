"""Whether a result is of the type that its step declares: a type, a pydantic model, JSON Schema."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from itertools import islice, repeat
from typing import Any, Literal, NotRequired, Required, Union, get_args, get_origin

from maestro_hive.engine.errors import ResultTypeError
from maestro_hive.engine.settings import refused
from maestro_hive.kernel.errors import ConfigurationError

#: How many problems of one result are shown, and how many items are read.
_MOST_PROBLEMS = 10
_MOST_ITEMS = 10_000

#: Returns what is wrong with a value, one text for each place.
Problems = Callable[[Any], Iterable[str]]


def checked_returns(what: str, value: object) -> object:
    """Return the option ``returns``; raise if no result can be checked by it."""
    if isinstance(value, dict):
        _schema_problems(value, what)
    elif value is False or isinstance(value, list | str | bytes) or type(value) in (int, float):
        raise refused(what, value, "True, a type, or a JSON Schema as a dict")
    return value


def result_check(
    returns: object, body: Callable[..., Any], what: str
) -> Callable[[Any], None] | None:
    """Return the function that raises for results that are not as declared; None for any."""
    if returns is None:
        return None
    expected = _annotation(body, what) if returns is True else returns
    if isinstance(expected, dict):
        declared, problems = "as its JSON Schema has it", _schema_problems(expected, what)
    else:
        declared = _name(expected)

        def problems(result: Any) -> Iterable[str]:
            return _problems(expected, result, "result")

    def check(result: Any) -> None:
        found = list(islice(problems(result), _MOST_PROBLEMS))
        if found:
            raise ResultTypeError(declared, found)

    return check


def _annotation(body: Callable[..., Any], what: str) -> object:
    """Return the type that a function is annotated with; raise if it has none."""
    hints = _hints(body)
    if "return" not in hints:
        raise ConfigurationError(
            f"{what} has returns=True, and no annotation of its result that can be read; give the"
            " type itself: returns=…"
        )
    return hints["return"]


def _schema_problems(schema: dict[str, Any], what: str) -> Problems:
    from jsonschema import Draft202012Validator, SchemaError
    from jsonschema.validators import validator_for
    from referencing import Registry

    kind = validator_for(schema, default=Draft202012Validator)
    try:
        kind.check_schema(schema)
    except SchemaError as error:
        raise refused(what, schema, f"a valid JSON Schema ({error.message})") from error
    validator = kind(schema, registry=Registry())  # which fetches nothing

    def problems(result: Any) -> Iterator[str]:
        for error in validator.iter_errors(result):
            yield f"{error.json_path.replace('$', 'result', 1)}: {error.message[:200]}"

    return problems


# --- types ----------------------------------------------------------------------------------------


def _name(expected: object) -> str:
    if isinstance(expected, type) and not get_args(expected):
        return f"a {expected.__name__}"
    return str(expected).replace("typing.", "")


def _kind(value: object) -> str:
    return "None" if value is None else f"a {type(value).__name__}"


def _problems(expected: Any, value: Any, path: str) -> Iterator[str]:
    """Yield where a value is not of a type; what cannot be checked counts as right."""
    expected = getattr(expected, "__supertype__", expected)  # of a NewType
    origin, arguments = get_origin(expected), get_args(expected)
    kind = origin or (type(None) if expected is None else expected)
    if origin is typing.Annotated:
        yield from _problems(arguments[0], value, path)
    elif origin in (Union, types.UnionType):
        yield from _union_problems(arguments, value, path)
    elif origin is Literal:
        if not any(value == each and type(value) is type(each) for each in arguments):
            shown = ", ".join(map(repr, arguments))
            yield f"{path}: must be one of {shown}, and is {value!r:.80}"
    elif isinstance(kind, type) and hasattr(kind, "model_validate") and isinstance(value, dict):
        yield from _model_problems(kind.model_validate, value, path)
    elif isinstance(kind, type) and not _is_instance(kind, value):
        yield f"{path}: must be {_name(expected)}, and is {_kind(value)}"
    else:
        for part, item, place in _parts(kind, arguments, value):
            yield from _problems(part, item, f"{path}{place}")
        if typing.is_typeddict(kind):
            for name in sorted(_required(kind) - value.keys()):
                yield f"{path}.{name}: is missing"


def _parts(kind: Any, arguments: Any, value: Any) -> Iterator[tuple[Any, Any, str]]:
    """Yield what is inside of a value: the type of each part, the part, and its place."""
    if typing.is_typeddict(kind):
        hints = _hints(kind)
        for name in hints.keys() & value.keys():
            yield hints[name], value[name], f".{name}"
    elif isinstance(kind, type) and dataclasses.is_dataclass(kind):
        hints = _hints(kind)
        for each in dataclasses.fields(kind):
            yield hints.get(each.name, Any), getattr(value, each.name), f".{each.name}"
    elif isinstance(value, Mapping) and len(arguments) == 2:
        for key, item in islice(value.items(), _MOST_ITEMS):
            yield arguments[0], key, f" key {key!r:.40}"
            yield arguments[1], item, f"[{key!r:.40}]"
    elif arguments and isinstance(value, Sequence | AbstractSet) and not isinstance(value, str):
        kinds = repeat(arguments[0])
        if kind is tuple and arguments[-1] is not ...:
            yield Literal[len(arguments)], len(value), " length"
            kinds = arguments
        for number, (each, item) in enumerate(zip(kinds, islice(value, _MOST_ITEMS))):  # noqa: B905
            yield each, item, f"[{number}]"


def _union_problems(choices: Any, value: Any, path: str) -> Iterator[str]:
    """Yield the problems of the choice that a value was meant for, if its places show which."""
    found = [list(islice(_problems(each, value, path), _MOST_PROBLEMS)) for each in choices]
    inside = [each for each in found if not any(one.startswith(f"{path}: ") for one in each)]
    if inside:  # one without problems, or the nearest
        yield from min(inside, key=len)
    else:
        yield f"{path}: must be {' or '.join(map(_name, choices))}, and is {_kind(value)}"


def _is_instance(kind: type, value: Any) -> bool:
    if isinstance(value, bool) and kind in (int, float):
        return False
    try:
        numbers = isinstance(value, int) and kind is float
        return numbers or isinstance(value, dict if typing.is_typeddict(kind) else kind)
    except TypeError:  # a protocol that cannot be checked
        return True


def _model_problems(validate: Callable[[Any], object], value: Any, path: str) -> Iterator[str]:
    try:
        validate(value)
    except Exception as error:  # noqa: BLE001 - a validator of the model is the user's code
        errors = getattr(error, "errors", None)
        for each in errors() if callable(errors) else [{"loc": (), "msg": str(error)}]:
            steps = (f"[{one}]" if isinstance(one, int) else f".{one}" for one in each["loc"])
            yield f"{path}{''.join(steps)}: {str(each['msg'])[:200]}"


def _hints(expected: Callable[..., Any], *, extras: bool = False) -> dict[str, Any]:
    try:
        return typing.get_type_hints(expected, include_extras=extras)
    except (NameError, TypeError, AttributeError):  # defined in a function, or not at all
        return {}


def _required(expected: Any) -> set[str]:
    """Return the keys that a TypedDict needs; its own are wrong where annotations are texts."""
    hints, required = _hints(expected, extras=True), set(expected.__required_keys__)
    for name, annotation in expected.__annotations__.items():
        hint = get_origin(hints.get(name))
        if hint is NotRequired or "NotRequired[" in getattr(annotation, "__forward_arg__", ""):
            required.discard(name)
        elif hint is Required:
            required.add(name)
    return required
