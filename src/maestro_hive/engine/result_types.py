"""Whether a result is of the type that its step declares: a type, a pydantic model, a JSON Schema."""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from itertools import islice
from typing import Any, Literal, Union, get_args, get_origin

from maestro_hive.engine.errors import RecoverableError
from maestro_hive.engine.settings import refused
from maestro_hive.kernel.errors import ConfigurationError

#: How many problems of one result are told, how many items are looked at, and how deep.
_MOST_PROBLEMS = 10
_MOST_ITEMS = 10_000
_DEEPEST = 50
#: How much of a schema is repeated.
_MAX_SCHEMA = 1_000

#: Returns what is wrong with a value, one text for each place.
Problems = Callable[[Any], Iterable[str]]


class ResultTypeError(RecoverableError, TypeError):
    """A step returned something that is not of the type it declares; ``problems`` says in what."""

    def __init__(self, declared: str, problems: list[str], schema: str | None = None) -> None:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        super().__init__(f"the result is not {declared}: {problems[0]}{more}")
        self.problems = problems
        self.schema = schema


def check_returns(name: str, value: object) -> object:
    """Return what the option ``returns`` was given; raise if no result can be checked by it."""
    if isinstance(value, dict):
        _validator(value, name)
        return value
    if value is False or (
        isinstance(value, list | str | bytes | int | float) and value is not True
    ):
        raise refused(name, value, "True, a type, or a JSON Schema as a dict")
    return value


def result_check(returns: object, task: Callable[..., Any] | None) -> Callable[[Any], None]:
    """Return the function that refuses results that are not as declared."""
    expected = _annotation(task) if returns is True else returns
    declared, problems = _declared(expected)

    def check(result: Any) -> None:
        found = list(islice(problems(result), _MOST_PROBLEMS))
        if found:
            raise ResultTypeError(declared, found, _shown_schema(expected))

    return check


def _declared(expected: object) -> tuple[str, Problems]:
    if isinstance(expected, dict):
        return "as its JSON Schema says", _schema_problems(_validator(expected, "returns"))
    return _name(expected), lambda result: _problems(expected, result, "result", 0)


def _annotation(task: Callable[..., Any] | None) -> object:
    """Return the type that a function is annotated with; raise if it is not."""
    function = getattr(task, "function", task)
    name = getattr(function, "__qualname__", repr(function))
    try:
        hints = typing.get_type_hints(function)
    except (NameError, TypeError, AttributeError) as error:
        raise ConfigurationError(
            f"{name} has returns=True, and its annotations cannot be read: {error}; give the type"
            " itself: returns=…"
        ) from error
    if "return" not in hints:
        raise ConfigurationError(f"{name} has returns=True, and no annotation of its result")
    return hints["return"]


# --- JSON Schema -----------------------------------------------------------------------------------


def _shown_schema(expected: object) -> str | None:
    """Return the JSON Schema of results as it is told, if they have one; of a long one the start."""
    schema = expected if isinstance(expected, dict) else _schema_of_models(expected)
    if schema is None:
        return None
    text = json.dumps(schema, default=str)
    return text if len(text) <= _MAX_SCHEMA else f"{text[:_MAX_SCHEMA]}…"


def _schema_of_models(expected: Any) -> dict[str, Any] | None:
    """Return the JSON Schema of a type that is, or contains, a pydantic model; None of others."""
    if not _has_model(expected, 0):
        return None
    from pydantic import TypeAdapter

    try:
        return TypeAdapter(expected).json_schema()
    except Exception:  # noqa: BLE001 - a model of the user's may have none
        return None


def _has_model(expected: object, depth: int) -> bool:
    if isinstance(expected, type) and hasattr(expected, "model_json_schema"):
        return True
    return depth < _DEEPEST and any(_has_model(each, depth + 1) for each in get_args(expected))


def _validator(schema: dict[str, Any], name: str) -> Any:
    from jsonschema import Draft202012Validator, SchemaError
    from jsonschema.validators import validator_for
    from referencing import Registry

    kind = validator_for(schema, default=Draft202012Validator)
    try:
        kind.check_schema(schema)
    except SchemaError as error:
        raise refused(name, schema, f"a valid JSON Schema ({error.message})") from error
    made = kind(schema, registry=Registry())  # which fetches nothing
    _check_references(schema, kind, name)
    return made


def _check_references(schema: dict[str, Any], kind: Any, name: str) -> None:
    """Raise if a schema refers to what is not in it: it would be found by the first result."""
    from referencing import Registry
    from referencing.exceptions import Unresolvable
    from referencing.jsonschema import specification_with

    specification = specification_with(kind.META_SCHEMA.get("$id") or kind.META_SCHEMA.get("id"))
    root = specification.create_resource(schema)
    waiting = [(root, Registry().resolver_with_root(root))]
    while waiting:
        resource, resolver = waiting.pop()
        for key in ("$ref", "$dynamicRef", "$recursiveRef"):
            reference = resource.contents.get(key) if isinstance(resource.contents, dict) else None
            if not isinstance(reference, str):
                continue
            try:
                resolver.lookup(reference)
            except (Unresolvable, ValueError) as error:
                wanted = f"a JSON Schema that has what it refers to; it has no {reference!r}"
                raise refused(name, schema, wanted) from error
        waiting += [(each, resolver.in_subresource(each)) for each in resource.subresources()]


def _schema_problems(validator: Any) -> Problems:
    def problems(result: Any) -> Iterator[str]:
        for error in validator.iter_errors(result):
            yield f"{error.json_path.replace('$', 'result', 1)}: {error.message[:200]}"

    return problems


# --- types -----------------------------------------------------------------------------------------


def _name(expected: object) -> str:
    if isinstance(expected, type) and not get_args(expected):
        return f"a {expected.__name__}"
    return str(expected).replace("typing.", "")


def _kind(value: object) -> str:
    return "None" if value is None else f"a {type(value).__name__}"


def _problems(  # noqa: C901 - one line for each kind of type
    expected: Any, value: Any, path: str, depth: int
) -> Iterator[str]:
    """Yield in what a value is not of a type; what cannot be checked is taken for right."""
    if depth > _DEEPEST or expected in (Any, object) or isinstance(expected, typing.TypeVar):
        return
    if isinstance(expected, typing.NewType):
        expected = expected.__supertype__
    origin = get_origin(expected)
    if origin is typing.Annotated:
        yield from _problems(get_args(expected)[0], value, path, depth + 1)
    elif origin in (Union, types.UnionType):
        yield from _union_problems(expected, value, path, depth)
    elif origin is Literal:
        if not any(value == each and type(value) is type(each) for each in get_args(expected)):
            shown = ", ".join(map(repr, get_args(expected)))
            yield f"{path}: must be one of {shown}, and is {value!r:.80}"
    elif expected is None or expected is type(None):
        if value is not None:
            yield f"{path}: must be None, and is {_kind(value)}"
    elif _is_typed_dict(origin or expected):
        yield from _member_problems(origin or expected, value, path, depth)
    elif origin is not None:
        yield from _generic_problems(expected, origin, value, path, depth)
    elif isinstance(expected, type):
        yield from _class_problems(expected, value, path, depth)


def _union_problems(expected: Any, value: Any, path: str, depth: int) -> Iterator[str]:
    """Yield the problems of the choice that a value was meant for, if its places show which."""
    choices = get_args(expected)
    found: list[list[str]] = []
    for each in choices:
        problems = list(islice(_problems(each, value, path, depth + 1), _MOST_PROBLEMS))
        if not problems:
            return
        found.append(problems)
    whole = f"{path}: "
    inside = [each for each in found if not any(one.startswith(whole) for one in each)]
    if inside:
        yield from min(inside, key=len)
        return
    named = " or ".join(_name(each) for each in choices)
    yield f"{path}: must be {named}, and is {_kind(value)}"


def _class_problems(expected: type, value: Any, path: str, depth: int) -> Iterator[str]:
    validate = getattr(expected, "model_validate", None)
    if validate is not None and isinstance(value, dict):  # what a model is made of
        yield from _model_problems(validate, value, path)
        return
    is_flag = isinstance(value, bool) and expected in (int, float)
    good = isinstance(value, int | float) if expected is float else _is_instance(expected, value)
    if is_flag or not good:
        yield f"{path}: must be {_name(expected)}, and is {_kind(value)}"
    elif dataclasses.is_dataclass(expected) and type(value).__module__ != "builtins":
        hints = _hints(expected)
        for each in dataclasses.fields(value):
            inside = hints.get(each.name, Any)
            yield from _problems(
                inside, getattr(value, each.name), f"{path}.{each.name}", depth + 1
            )


def _is_instance(expected: type, value: Any) -> bool:
    try:
        return isinstance(value, expected)
    except TypeError:  # a protocol that cannot be checked
        return True


def _model_problems(validate: Callable[[Any], object], value: Any, path: str) -> Iterator[str]:
    try:
        validate(value)
    except Exception as error:  # noqa: BLE001 - a validator of the model may be the user's own
        errors = getattr(error, "errors", None)
        for each in errors() if callable(errors) else [{"loc": (), "msg": str(error)}]:
            yield f"{path}{_place(each['loc'])}: {str(each['msg'])[:200]}"


def _place(steps: Iterable[object]) -> str:
    return "".join(f"[{each}]" if isinstance(each, int) else f".{each}" for each in steps)


def _hints(expected: type) -> dict[str, Any]:
    try:
        return typing.get_type_hints(expected)
    except (NameError, TypeError, AttributeError):  # defined in a function, or not at all
        return {}


def _is_typed_dict(expected: object) -> bool:
    return isinstance(expected, type) and hasattr(expected, "__required_keys__")


def _required_keys(expected: Any) -> set[str]:
    """Return the keys that a TypedDict needs; those it has itself are wrong where annotations are texts."""
    try:
        hints = typing.get_type_hints(expected, include_extras=True)
    except (NameError, TypeError, AttributeError):  # defined in a function, or not at all
        hints = {}
    required = set(expected.__required_keys__)
    for name, hint in expected.__annotations__.items():
        text = getattr(hint, "__forward_arg__", "")
        given = get_origin(hints.get(name))
        if given is typing.NotRequired or (given is None and "NotRequired[" in text):
            required.discard(name)
        elif given is typing.Required:
            required.add(name)
    return required


def _member_problems(expected: Any, value: Any, path: str, depth: int) -> Iterator[str]:
    if not isinstance(value, dict):
        yield f"{path}: must be {_name(expected)}, and is {_kind(value)}"
        return
    for name in sorted(_required_keys(expected) - value.keys()):
        yield f"{path}.{name}: is missing"
    hints = _hints(expected)
    for name in hints.keys() & value.keys():
        yield from _problems(hints[name], value[name], f"{path}.{name}", depth + 1)


def _generic_problems(
    expected: Any, origin: Any, value: Any, path: str, depth: int
) -> Iterator[str]:
    """Yield the problems of a ``list[int]`` and the like."""
    if isinstance(origin, type) and not _is_instance(origin, value):
        yield f"{path}: must be {_name(expected)}, and is {_kind(value)}"
        return
    args = get_args(expected)
    if isinstance(value, Mapping) and len(args) == 2:
        for key, item in islice(value.items(), _MOST_ITEMS):
            yield from _problems(args[0], key, f"{path} key {key!r:.40}", depth + 1)
            yield from _problems(args[1], item, f"{path}[{key!r:.40}]", depth + 1)
    elif isinstance(value, tuple) and origin is tuple and args[-1:] != (...,):
        wanted = () if args == ((),) else args
        if len(value) != len(wanted):
            yield f"{path}: must have {len(wanted)} items, and has {len(value)}"
            return
        for number, (kind, item) in enumerate(zip(wanted, value, strict=True)):
            yield from _problems(kind, item, f"{path}[{number}]", depth + 1)
    elif isinstance(value, Sequence | AbstractSet) and not isinstance(value, str | bytes):
        for number, item in enumerate(islice(value, _MOST_ITEMS)):
            yield from _problems(args[0] if args else Any, item, f"{path}[{number}]", depth + 1)
