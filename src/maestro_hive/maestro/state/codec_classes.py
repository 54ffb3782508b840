"""How the classes of stored values are named and found again, and the codecs of the user's own.

Nothing is imported by a stored name: a class is found among the modules that are imported already.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar, runtime_checkable

from maestro_hive.kernel.errors import ConfigurationError, DecodeError
from maestro_hive.maestro.state.strict_json import AtPathError

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")
#: The types that have a form of their own, which no codec of the user's replaces.
BUILT_IN: set[type] = set()


@runtime_checkable
class Model(Protocol):
    """What a pydantic model offers; pydantic itself is never imported here."""

    def model_dump(self, *, mode: str, by_alias: bool, round_trip: bool) -> dict[str, object]:
        """Return the fields as plain data."""

    @classmethod
    def model_validate(cls, obj: object) -> object:
        """Return the model that these fields describe."""


class UnknownClassError(DecodeError):
    """A value is whole, and of a class that this process does not have: its own program does."""


class UnknownClassAtPathError(AtPathError):
    """What becomes an ``UnknownClassError`` when its path is known."""


# --- names of classes -----------------------------------------------------------------------------


def module_name(module: str) -> str:
    """Return the name by which others import a module, also of the program that was started."""
    if module not in ("__main__", "__mp_main__"):
        return module
    main = sys.modules.get(module)
    spec, file = getattr(main, "__spec__", None), getattr(main, "__file__", None)
    if spec is not None:
        return str(spec.name)
    return Path(file).stem if file else "__main__"


def class_name(kind: type) -> str:
    """Return ``module:name`` of a class, by which ``find_classes`` finds it again."""
    return f"{module_name(kind.__module__)}:{kind.__qualname__}"


def find_classes(name: str) -> list[type]:
    """Return what is known as ``module:name`` without importing anything or loading it late.

    The program that was started has two names, and may have been imported by its other one.
    """
    module, _, qualname = name.partition(":")
    known = [module] if module_name("__main__") != module else ["__main__", module]
    found = (_find(sys.modules.get(each), qualname) for each in known)
    return [kind for kind in found if isinstance(kind, type)]


def _find(found: object, qualname: str) -> object:
    for part in qualname.split("."):
        found = vars(found).get(part) if isinstance(found, ModuleType | type) else None
    return found


def stored_name(kind: type) -> str:
    """Return the name to store, or raise an error if the class is not found by it."""
    if "<locals>" in kind.__qualname__:
        raise AtPathError(
            f"{kind.__qualname__} is defined inside a function and could not be found again;"
            " define it in a module"
        )
    name = class_name(kind)
    if kind not in find_classes(name):
        raise AtPathError(f"its type is not what is found as {name}; define it there by that name")
    return name


def known_class(name: str) -> type:
    """Return the class of that name, or raise an error that says why there is none."""
    found = find_classes(name)
    if found:
        return found[0]
    module = name.partition(":")[0]
    if module not in sys.modules and module_name("__main__") != module:
        raise UnknownClassAtPathError(f"its type {name} is not imported; import {module} first")
    raise UnknownClassAtPathError(
        f"its type {name} is not in this process: the module {module} has no such class here;"
        " read it with the program that stored it, or give the class back its name"
    )


# --- codecs of the user's -------------------------------------------------------------------------


class Codec(NamedTuple):
    """How instances of one class are stored: registered under a name."""

    name: str
    kind: type
    encode: Callable[[Any], object]
    decode: Callable[[Any], object]


class Codecs:
    """The registered codecs, by class and by name; those of installed packages on first miss."""

    def __init__(self) -> None:
        self._by_type: dict[type, Codec] = {}
        self._by_name: dict[str, Codec] = {}
        self._loaded = False

    def add(self, codec: Codec) -> None:
        """Add a codec, or replace the one that its class has."""
        known = self._by_name.get(codec.name)
        if known is not None and class_name(known.kind) != class_name(codec.kind):
            raise ConfigurationError(
                f"a codec named {codec.name!r} is registered already, for"
                f" {class_name(known.kind)}; give this one another name"
            )
        before = self._by_type.pop(codec.kind, None)
        if before is not None:
            self._by_name.pop(before.name, None)
        self._by_type[codec.kind] = self._by_name[codec.name] = codec

    def of_type(self, kind: type, *, load: bool = False) -> Codec | None:
        """Return the codec of a class; ``load`` searches the installed packages as well."""
        if load and kind not in self._by_type:
            self._load()
        return self._by_type.get(kind)

    def of_name(self, name: object) -> Codec | None:
        """Return the codec that was registered by a name."""
        if not isinstance(name, str):
            return None
        if name not in self._by_name:
            self._load()
        return self._by_name.get(name)

    def _load(self) -> None:
        """Call the functions that installed packages name as ``maestro_hive.codecs``, once."""
        if self._loaded:
            return
        from importlib.metadata import entry_points  # noqa: PLC0415 - slow, and rarely needed

        for each in entry_points(group="maestro_hive.codecs"):
            try:
                each.load()()
            except Exception as error:
                raise ConfigurationError(
                    f"the codecs of {each.value} cannot be loaded: {error}"
                ) from error
        self._loaded = True


codecs = Codecs()


def register_codec(
    cls: type[T],
    encode: Callable[[T], object],
    decode: Callable[[Any], T],
    *,
    name: str | None = None,
) -> None:
    """Store instances of exactly this class as what ``encode`` returns; ``decode`` makes them again.

    ``encode`` may return anything that can be stored. ``name`` is written with every value, and
    finds the codec when it is read: it must stay the same (default: ``module:name`` of the class).
    """
    if cls in BUILT_IN:
        raise ConfigurationError(f"{cls.__name__} has a form already, which cannot be replaced")
    codecs.add(Codec(name or class_name(cls), cls, encode, decode))
