"""The arguments of a step: which of them are its input, its key, and how they are stored.

Arguments without a default are recorded by place, those with one by name, with the default where
none was given: so a default is part of the input.
"""

from __future__ import annotations

import inspect
import string
from itertools import combinations, islice
from typing import TYPE_CHECKING, Any

import msgspec

from maestro_hive.journal.values import encode
from maestro_hive.kernel.errors import ConfigurationError, EncodeError
from maestro_hive.kernel.redaction import REDACTED

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from maestro_hive.journal.values import Encoded

#: The attribute of an instance whose method is a step: its name, the same after a restart.
STEP_IDENTITY = "step_identity"

_KINDS = inspect.Parameter
#: How many earlier records of one call are looked for.
_MOST_EARLIER = 64


class Given(msgspec.Struct, frozen=True, eq=False):
    """The arguments of one call, as they are recorded."""

    args: list[Any]
    kwargs: dict[str, Any]
    #: Arguments that are not recorded, with their places and names; ``args`` stand around them.
    left_out: tuple[tuple[int, Any], ...] = ()
    unnamed: dict[str, Any] = {}
    #: Whether the first recorded argument only names the instance, which is left out.
    names_instance: bool = False

    def complete(self, args: list[Any], kwargs: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """Return all arguments of the body, for these that are recorded."""
        places = args[1:] if self.names_instance else args
        for place, value in self.left_out:
            places.insert(place, value)
        return places, {**kwargs, **self.unnamed} if self.unnamed else kwargs


class Parameters:
    """The parameters of one step's function."""

    def __init__(
        self,
        body: Callable[..., Any],
        step: str,
        ignore: tuple[str, ...],
        redact: bool | tuple[str, ...],
        key: str | Callable[..., str] | None,
    ) -> None:
        self.signature = inspect.signature(body)
        self._step, self._ignored, self._redacted, self._key = step, ignore, redact, key
        known = self.signature.parameters
        first = next(iter(known), "")
        self._is_method = first in ("self", "cls") and is_in_class(body) and first not in ignore
        self._is_variadic = any(each.kind is _KINDS.VAR_POSITIONAL for each in known.values())
        takes_any = any(each.kind is _KINDS.VAR_KEYWORD for each in known.values())
        self._refuse_unknown("ignore", ignore)
        if not takes_any:
            self._refuse_unknown("redact", () if isinstance(redact, bool) else redact)
            self._refuse_unknown("key", _names_in(key) if isinstance(key, str) else ())
        #: Optional arguments that a decorator's wrapper may take by place alone.
        self.by_place: tuple[str, ...] = ()
        if hasattr(body, "__wrapped__") and not self._is_variadic:
            optional = [each for each in known.values() if each.default is not each.empty]
            self.by_place = tuple(
                each.name for each in optional if each.kind is _KINDS.POSITIONAL_OR_KEYWORD
            )
        #: How many arguments a call has that needs no binding; -1 where each call is bound.
        self.arity = -1
        plain = all(
            each.kind is _KINDS.POSITIONAL_OR_KEYWORD and each.default is each.empty
            for each in known.values()
        )
        if plain and not (self._is_method or ignore or redact or key):
            self.arity = len(known)

    def _refuse_unknown(self, option: str, names: tuple[str, ...]) -> None:
        known = self.signature.parameters
        unknown = ", ".join(repr(name) for name in names if name not in known)
        if unknown:
            raise ConfigurationError(
                f"step {self._step!r}: {option} names {unknown}, which is not an argument; its"
                f" arguments are {', '.join(known) or 'none'}"
            )

    def _has_place(self, parameter: inspect.Parameter) -> bool:
        if parameter.kind is _KINDS.POSITIONAL_OR_KEYWORD:
            return parameter.default is parameter.empty or self._is_variadic
        return parameter.kind in (_KINDS.POSITIONAL_ONLY, _KINDS.VAR_POSITIONAL)

    # --- one call ---

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Given, str | None]:
        """Return the arguments as they are recorded, and the call's key; TypeError if unfit."""
        bound = self.signature.bind(*args, **kwargs)
        bound.apply_defaults()
        key = None if self._key is None else self._made_key(bound)
        return self._recorded(bound), key

    def _recorded(self, bound: inspect.BoundArguments) -> Given:
        places: list[Any] = []
        named: dict[str, Any] = {}
        left_out: list[tuple[int, Any]] = []
        unnamed: dict[str, Any] = {}
        place = 0
        for name, value in bound.arguments.items():
            parameter = self.signature.parameters[name]
            is_ignored = name in self._ignored
            if self._has_place(parameter):
                values = value if parameter.kind is _KINDS.VAR_POSITIONAL else (value,)
                if is_ignored:
                    left_out += [(place + number, each) for number, each in enumerate(values)]
                else:
                    places += values
                place += len(values)
            else:
                values = value if parameter.kind is _KINDS.VAR_KEYWORD else {name: value}
                (unnamed if is_ignored else named).update(values)
        identity = self._instance(places[0]) if self._is_method else None
        if identity is not None:
            left_out.insert(0, (0, places[0]))
            places[0] = identity
        return Given(places, named, tuple(left_out), unnamed, identity is not None)

    def _instance(self, instance: Any) -> str | None:
        """Return the name of the instance whose method is called; None: its encoding identifies."""
        kind = instance if isinstance(instance, type) else type(instance)
        class_name = kind.__qualname__.rpartition("<locals>.")[2]
        if isinstance(instance, type):
            return class_name
        given = getattr(instance, STEP_IDENTITY, None)
        if given is None:
            return class_name if self._key is not None else None
        if not isinstance(given, str) or not given:
            raise ConfigurationError(
                f"the {STEP_IDENTITY} of a {kind.__qualname__}, whose method is the step"
                f" {self._step!r}, must be a text that is not empty, not {given!r}"
            )
        return f"{class_name} {given}"

    def _made_key(self, bound: inspect.BoundArguments) -> str:
        if isinstance(self._key, str):
            values = dict(bound.arguments)
            for name, parameter in self.signature.parameters.items():
                if parameter.kind is _KINDS.VAR_KEYWORD:
                    values.update(values.pop(name))
            try:
                key: object = self._key.format_map(values)
            except (LookupError, AttributeError, ValueError, TypeError) as error:
                raise ConfigurationError(
                    f"the key {self._key!r} of step {self._step!r} cannot be made of its"
                    f" arguments: {type(error).__name__}: {error}"
                ) from error
        else:
            assert self._key is not None
            key = self._key(*bound.args, **bound.kwargs)
        if not isinstance(key, str) or not key or (not key.isascii() and _has_half(key)):
            raise ConfigurationError(
                f"the key of step {self._step!r} is {key!r}, and must be a text that is not empty"
            )
        return key

    def earlier(
        self, args: Sequence[Encoded], kwargs: Mapping[str, Encoded]
    ) -> Iterator[tuple[Sequence[Encoded], Mapping[str, Encoded]]]:
        """Yield the arguments by which earlier code may have recorded the same call.

        It lacked arguments that have their default now; or arguments that have a default now had
        none, and were recorded by place, or the other way round.
        """
        known = self.signature.parameters
        optional = [n for n in kwargs if n in known and known[n].default is not _KINDS.empty]
        added = [n for n in optional if _is_equal(kwargs[n], known[n].default)]
        subsets = (names for count in range(len(added)) for names in combinations(added, count + 1))
        for names in islice(subsets, _MOST_EARLIER):
            yield args, {name: each for name, each in kwargs.items() if name not in names}
        if not self._is_variadic:
            for count in range(1, len(optional) + 1):
                moved = [kwargs[name] for name in optional[:count]]
                left = {name: kwargs[name] for name in kwargs if name not in optional[:count]}
                yield [*args, *moved], left
            places = self._places()
            for count in range(1, len(args) + 1):
                named = dict(zip(places[len(args) - count :], args[-count:], strict=False))
                yield args[:-count], {**named, **kwargs}

    # --- what is stored ---

    def stored(self, given: Given) -> tuple[list[Any], dict[str, Any]]:
        """Return the arguments as they are stored, without those that are redacted."""
        args = [REDACTED if self._hides(name) else each for name, each in self._by_place(given)]
        named = {name: REDACTED if self._hides(name) else v for name, v in given.kwargs.items()}
        return args, named

    def hidden_texts(self, given: Given) -> tuple[str, ...]:
        """Return the texts among the arguments that are redacted."""
        pairs = [*self._by_place(given), *given.kwargs.items()]
        return tuple(v for name, v in pairs if isinstance(v, str) and v and self._hides(name))

    def _hides(self, name: str) -> bool:
        return self._redacted is True or (self._redacted is not False and name in self._redacted)

    def _by_place(self, given: Given) -> list[tuple[str, Any]]:
        names = self._places()
        last = names[-1] if names else ""  # what takes all further ones
        names += [last] * (len(given.args) - len(names))
        return list(zip(names, given.args, strict=False))

    def _places(self) -> list[str]:
        """Return the names of what is recorded by place."""
        known = self.signature.parameters.items()
        return [n for n, each in known if self._has_place(each) and n not in self._ignored]

    # --- errors ---

    def unencodable(self, error: EncodeError) -> EncodeError:
        """Return the error about an argument that cannot be encoded, by its name."""
        path = error.path.replace("input.kwargs", "input", 1)
        for place, name in enumerate(self._places()):
            path = path.replace(f"input.args[{place}]", f"input.{name}", 1)
        first = next(iter(self.signature.parameters), "")
        if self._is_method and path.startswith(f"input.{first}"):
            return EncodeError(
                path,
                f"{error.reason}. The step {self._step!r} is a method, and its instance is part of"
                " its identity: make the class a dataclass or a pydantic model, register how it is"
                f" stored (register_codec), give it an attribute {STEP_IDENTITY} (a text that is"
                f' the same after a restart), or leave the instance out with ignore=("{first}",)',
            )
        name = path.removeprefix("input.").split(".")[0].split("[")[0]
        return EncodeError(
            path,
            f"{error.reason}. Or leave it out of the identity of step {self._step!r} with"
            f' ignore=("{name}",), or give the step a key=',
        )


def _is_equal(encoded: Encoded, default: object) -> bool:
    try:
        return encoded.identity() == encode(default).identity()
    except EncodeError:
        return False


def is_in_class(function: object) -> bool:
    """Return whether a function was defined in the body of a class."""
    outer = str(getattr(function, "__qualname__", "")).rpartition(".")[0]
    return bool(outer) and not outer.endswith("<locals>")


def _names_in(template: str) -> tuple[str, ...]:
    """Return the names of arguments that a key's text has in braces."""
    try:
        fields = [
            field for _, field, _, _ in string.Formatter().parse(template) if field is not None
        ]
    except ValueError as error:
        raise ConfigurationError(f"the key {template!r} cannot be read: {error}") from None
    return tuple(field.split(".")[0].split("[")[0] for field in fields)


def _has_half(text: str) -> bool:
    """Return whether a text has half a surrogate pair, and so no form in UTF-8."""
    return any("\ud800" <= each <= "\udfff" for each in text)
