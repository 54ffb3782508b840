"""The arguments of a step of a hive: which of them are its input, and how they are recorded.

Arguments without a default are recorded by place, those with one by name, with the default where
none was given: so a default is part of the input, and an argument that is added with a default can be
left out again to find what was recorded before it was there.
"""

from __future__ import annotations

import functools
import inspect
from itertools import combinations, islice, takewhile
from typing import TYPE_CHECKING, Any, NamedTuple

from maestro_hive.kernel.errors import ConfigurationError, EncodeError
from maestro_hive.kernel.redaction import REDACTED
from maestro_hive.maestro.state import codec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

#: What an instance is called by that has a name of its own to be identified by.
STEP_IDENTITY = "step_identity"
#: The attribute of a task that adds to the recorded arguments.
_COMPLETES = "__maestro_completes__"
#: How many alternatives are tried for one call.
_ALTERNATIVES = 64


class Given(NamedTuple):
    """The arguments of one call: as they are recorded, and a task that is called with these."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    #: Adds what is not recorded; None where that is nothing.
    task: Callable[..., Any] | None = None


class Hidden(NamedTuple):
    """Which arguments of a call are not recorded: all of them, or those of these names."""

    names: frozenset[str] | None
    #: The names of what is given by place.
    places: tuple[str, ...]

    @classmethod
    def of(cls, redact: bool | tuple[str, ...], places: tuple[str, ...]) -> Hidden | None:
        """Return what the option ``redact`` hides; None for nothing."""
        if redact is True:
            return cls(None, places)
        return cls(frozenset(redact), places) if redact else None

    def texts(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, ...]:
        """Return the texts among the arguments that are hidden."""
        found = [each for each, hides in self._by_place(args) if hides]
        found += [each for name, each in kwargs.items() if self._hides(name)]
        return tuple(each for each in found if isinstance(each, str))

    def without(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments as they are recorded."""
        return (
            tuple(REDACTED if hides else each for each, hides in self._by_place(args)),
            {name: REDACTED if self._hides(name) else each for name, each in kwargs.items()},
        )

    def _by_place(self, args: tuple[Any, ...]) -> list[tuple[Any, bool]]:
        last = self.places[-1] if self.places else ""  # what takes all further ones
        names = (*self.places, *[last] * (len(args) - len(self.places)))
        return [(each, self._hides(name)) for each, name in zip(args, names, strict=False)]

    def _hides(self, name: str) -> bool:
        return self.names is None or name in self.names


def places_of(task: Callable[..., Any]) -> tuple[str, ...]:
    """Return the names of the arguments that a task takes by place; none if it does not tell."""
    try:
        known = inspect.signature(task).parameters.values()
    except (TypeError, ValueError):
        return ()
    return tuple(each.name for each in known if each.kind <= each.VAR_POSITIONAL)


class Parameters:
    """The parameters of one step's function; ``ignore`` names those that are not recorded."""

    def __init__(
        self,
        function: Callable[..., Any],
        step: str,
        ignore: tuple[str, ...],
        redact: bool | tuple[str, ...] = False,
    ) -> None:
        self.signature = inspect.signature(function)
        self._step = step
        #: Whether its first argument is the instance, or the class, that it is a method of.
        self.is_method = is_in_class(function) and next(iter(self.signature.parameters), "") in (
            "self",
            "cls",
        )
        self._ignored = frozenset(ignore)
        known = self.signature.parameters
        self._refuse_unknown("ignore", ignore)
        takes_any = any(each.kind is each.VAR_KEYWORD for each in known.values())
        if not isinstance(redact, bool) and not takes_any:
            self._refuse_unknown("redact", redact)
        recorded = [each for each in known.values() if each.name not in self._ignored]
        self._recorded = self.signature.replace(parameters=recorded)
        self._is_variadic = any(each.kind is each.VAR_POSITIONAL for each in known.values())
        by_place = [each for each in recorded if self._has_place(each)]
        #: The names of what is recorded by place.
        self.by_place = tuple(each.name for each in by_place)
        #: What is recorded by name and may be left out, with its default.
        self.defaults = {
            each.name: each.default
            for each in recorded
            if each.default is not each.empty and not self._has_place(each)
        }
        #: Which of them are not recorded.
        self.hidden = Hidden.of(redact, self.by_place)
        #: What is called with the arguments as they are recorded.
        self.function = function
        optional = (each.name for each in known.values() if each.default is not each.empty)
        places = tuple(
            takewhile(lambda name: name in self.defaults and self._could_have_place(name), optional)
        )
        if places and hasattr(function, "__wrapped__"):
            self.function = _by_place(function, places)
        #: How many arguments a call has that needs no binding; None where each call is bound.
        self.arity: int | None = None
        if not self._is_variadic and not self._ignored:
            needed = [each for each in recorded if each.name not in self.defaults]
            plain = all(
                each.kind is each.POSITIONAL_OR_KEYWORD and each.default is each.empty
                for each in needed
            )
            self.arity = len(needed) if plain else None

    def _refuse_unknown(self, option: str, names: tuple[str, ...]) -> None:
        known = self.signature.parameters
        unknown = sorted({*names} - known.keys())
        if unknown:
            raise ConfigurationError(
                f"step {self._step!r} is to {option} {', '.join(unknown)}, and has no such argument;"
                f" its arguments are {', '.join(known) or 'none'}"
            )

    def _has_place(self, parameter: inspect.Parameter) -> bool:
        kinds = inspect.Parameter
        if parameter.kind is kinds.POSITIONAL_OR_KEYWORD:
            return parameter.default is parameter.empty or self._is_variadic
        return parameter.kind in (kinds.POSITIONAL_ONLY, kinds.VAR_POSITIONAL)

    # --- one call ---

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> inspect.BoundArguments:
        """Return all arguments by name, defaults included; TypeError if they do not fit."""
        bound = self.signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return bound

    def recorded(self, bound: inspect.BoundArguments, *, has_key: bool = False) -> Given:
        """Return the arguments as they are recorded."""
        instance = self._instance(bound, has_key=has_key) if self.is_method else None
        places: list[Any] = []
        named: dict[str, Any] = {}
        left_out: list[tuple[int, tuple[Any, ...]]] = []
        unnamed: dict[str, Any] = {}
        kinds, at = inspect.Parameter, 0
        for name, value in bound.arguments.items():
            parameter = self.signature.parameters[name]
            if self._has_place(parameter):
                values = value if parameter.kind is kinds.VAR_POSITIONAL else (value,)
                if name in self._ignored:
                    left_out.append((at, values))
                else:
                    places += values
                at += len(values)
            else:
                values = value if parameter.kind is kinds.VAR_KEYWORD else {name: value}
                (unnamed if name in self._ignored else named).update(values)
        if instance is not None:
            left_out.insert(0, (0, (instance.value,)))
            places[0] = instance.identity
        if not left_out and not unnamed:
            return Given(tuple(places), named)
        added = _Added(tuple(left_out), unnamed, drops_first=instance is not None)
        return Given(tuple(places), named, added.to(self.function, self._recorded))

    def _instance(self, bound: inspect.BoundArguments, *, has_key: bool) -> Instance | None:
        first = next(iter(bound.arguments))
        if first in self._ignored:
            return None
        return identified(bound.arguments[first], self._step, has_key=has_key)

    # --- which other records are of the same call ---

    def alternatives(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Iterator[tuple[frozenset[str], tuple[Any, ...], dict[str, Any]]]:
        """Yield how the same call was recorded by earlier code, and which arguments it lacked.

        They can have been added if they have their default now. Then those that had no default,
        and were recorded by place; then those that had one, and were recorded by name.
        """
        added = [
            name for name in self.defaults if name in kwargs and self._has_default(name, kwargs)
        ]
        subsets = (
            names
            for count in range(1, len(added) + 1)
            for names in combinations(reversed(added), count)
        )
        for names in islice(subsets, _ALTERNATIVES):
            left = {name: each for name, each in kwargs.items() if name not in names}
            yield frozenset(names), args, left
        if self._is_variadic:
            return
        movable = [name for name in self.defaults if self._could_have_place(name)]
        for count in range(1, len(movable) + 1):
            moved = tuple(kwargs[name] for name in movable[:count])
            left = {name: each for name, each in kwargs.items() if name not in movable[:count]}
            yield frozenset(), args + moved, left
        for count in range(1, len(self.by_place) + 1):
            named = dict(zip(self.by_place[-count:], args[-count:], strict=True))
            yield frozenset(), args[:-count], {**named, **kwargs}

    def _could_have_place(self, name: str) -> bool:
        return self.signature.parameters[name].kind is inspect.Parameter.POSITIONAL_OR_KEYWORD

    def _has_default(self, name: str, kwargs: dict[str, Any]) -> bool:
        default = self.defaults[name]
        if kwargs[name] is default:
            return True
        return codec.canonical_digest(kwargs[name]) == codec.canonical_digest(default)

    def default_digests(self) -> dict[str, str]:
        """Return a few digits of each default's digest: enough to see that it was changed."""
        found: dict[str, str] = {}
        for name, default in self.defaults.items():
            try:
                found[name] = codec.canonical_digest(default).hex()[:12]
            except EncodeError:  # so is each call that uses it
                continue
        return found

    # --- errors ---

    def unencodable(self, error: EncodeError) -> EncodeError:
        """Return the error about an argument that cannot be encoded, by its name."""
        path = error.path
        for number, name in enumerate(self.by_place):
            path = path.replace(f"input.args[{number}]", f"input.{name}", 1)
        path = path.replace("input.kwargs", "input", 1)
        first = next(iter(self.signature.parameters), "")
        if self.is_method and path.startswith(f"input.{first}"):
            return EncodeError(path, f"{error.reason}. {_how_to_identify(self._step, first)}")
        name = path.removeprefix("input.").split(".")[0].split("[")[0]
        return EncodeError(
            path,
            f"{error.reason}. Or leave it out of the identity of step {self._step!r} with"
            f' ignore=("{name}",), or give the step a key=',
        )


def is_in_class(function: object) -> bool:
    """Return whether a function was defined in the body of a class."""
    outer = str(getattr(function, "__qualname__", "")).rpartition(".")[0]
    return bool(outer) and not outer.endswith("<locals>")


class Instance(NamedTuple):
    """An object whose method is a step, and the text that identifies it."""

    value: Any
    identity: str


def identified(instance: Any, step: str, *, has_key: bool) -> Instance | None:
    """Return an instance with the name that it gives itself; None where its encoding says it."""
    kind = instance if isinstance(instance, type) else type(instance)
    class_name = kind.__qualname__.rpartition("<locals>.")[2]
    if isinstance(instance, type):
        return Instance(instance, class_name)
    given = getattr(instance, STEP_IDENTITY, None)
    if given is None:
        return Instance(instance, class_name) if has_key else None
    if not isinstance(given, str) or not given:
        raise ConfigurationError(
            f"the {STEP_IDENTITY} of a {kind.__qualname__}, whose method is the step {step!r}, must be"
            f" a text that is not empty, not {given!r}"
        )
    return Instance(instance, f"{class_name} {given}")


def _how_to_identify(step: str, first: str) -> str:
    return (
        f"The step {step!r} is a method, and its instance is part of its identity: make the class a"
        f" dataclass or a pydantic model, register how it is stored, give it an attribute"
        f" {STEP_IDENTITY} (a text that is the same after a restart), or leave the instance out with"
        f' ignore=("{first}",)'
    )


def _by_place(function: Callable[..., Any], names: tuple[str, ...]) -> Callable[..., Any]:
    """Return a function that gets some arguments by name, and passes them on by place.

    The wrapper that a decorator puts around a function may take them only so.
    """

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, *(kwargs.pop(name) for name in names), **kwargs)

    return call


class _Added(NamedTuple):
    """What a function is given in addition to the recorded arguments."""

    by_place: tuple[tuple[int, tuple[Any, ...]], ...]
    by_name: dict[str, Any]
    #: Whether the first recorded argument only stands for an instance.
    drops_first: bool

    def to(self, function: Callable[..., Any], signature: inspect.Signature) -> Callable[..., Any]:
        """Return a function that is called with the recorded arguments."""

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            given = self.complete(args, kwargs)
            return function(*given.args, **given.kwargs)

        call.__signature__ = signature  # type: ignore[attr-defined]
        setattr(call, _COMPLETES, functools.partial(self.complete, function=function))
        return call

    def complete(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        function: Callable[..., Any] | None = None,
    ) -> Given:
        """Return all arguments, for these that are recorded."""
        places = list(args[1:] if self.drops_first else args)
        for at, values in self.by_place:
            places[at:at] = values
        return Given(tuple(places), {**kwargs, **self.by_name}, function)


def completed(
    task: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Given | None:
    """Return what a task calls with which arguments; None if with these, which are recorded."""
    complete: Callable[..., Given] | None = getattr(task, _COMPLETES, None)
    return None if complete is None else complete(args, kwargs)
