"""Classes of the user's: the names they are stored under, and the codecs registered for them.

Nothing is imported by a stored name: a class is found among the modules that are imported already.
"""

from __future__ import annotations

import reprlib
import sys
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from maestro_hive.kernel.errors import ConfigurationError, DecodeError, UnknownClassError

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")

#: Types with a form of their own, which no codec replaces; ``tagged_values`` fills it.
BUILT_IN: set[type] = set()


# --- problems ---------------------------------------------------------------------------------


class AtPathError(Exception):
    """A problem in a value; it learns its path on the way out, so that good values pay nothing."""

    decode_error: type[DecodeError] = DecodeError

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason
        #: From the innermost place to the outermost one.
        self.steps: list[str] = []

    @property
    def path(self) -> str:
        """The place in the value, such as ``.users[3].photo``."""
        return "".join(reversed(self.steps))


class UnknownClassAtPathError(AtPathError):
    """A class or a codec is not in this process."""

    decode_error = UnknownClassError


_short = reprlib.Repr()
_short.maxstring = _short.maxother = 100


def step_to(key: object) -> str:
    """Return the step of a path to the item at a key or an index."""
    if type(key) is str and key.isidentifier():
        return f".{key}"
    try:
        return f"[{_short.repr(key)}]"
    except ValueError:  # an integer of thousands of digits
        return f"[a {type(key).__name__}]"


# --- names ------------------------------------------------------------------------------------


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
    """Return ``module:name`` of a class."""
    return f"{module_name(kind.__module__)}:{kind.__qualname__}"


def find_classes(name: str) -> list[type]:
    """Return the classes known as ``module:name``, without loading anything late.

    The program that was started has two names, and may have been imported by its other one.
    """
    module, _, qualname = name.partition(":")
    found: list[type] = []
    for each in [module] if module_name("__main__") != module else ["__main__", module]:
        at: object = sys.modules.get(each)
        for part in qualname.split("."):
            at = vars(at).get(part) if isinstance(at, ModuleType | type) else None
        if isinstance(at, type):
            found.append(at)
    return found


def stored_name(kind: type) -> str:
    """Return the name to store; raise an error if the class would not be found by it."""
    name = class_name(kind)
    if "<locals>" in name:
        raise AtPathError(
            f"{kind.__qualname__} is defined inside a function and could not be found again;"
            " define it in a module"
        )
    if kind not in find_classes(name):
        raise AtPathError(f"its type is not what is found as {name}; define it there by that name")
    return name


def known_class(name: str, base: type = object) -> type:
    """Return the class of that name; raise an error with the reason if there is none."""
    found = find_classes(name)
    if found:
        if not issubclass(found[0], base):
            raise AtPathError(f"{name} is now something else than a kind of {base.__name__}")
        return found[0]
    module = name.partition(":")[0]
    if module not in sys.modules and module_name("__main__") != module:
        raise UnknownClassAtPathError(f"its type {name} is not imported; import {module} first")
    raise UnknownClassAtPathError(
        f"its type {name} is not in this process: the module {module} has no such class here;"
        " read it with the program that stored it, or give the class back its name"
    )


# --- codecs -----------------------------------------------------------------------------------


class Codec(NamedTuple):
    """How instances of one class are stored, registered under a name."""

    name: str
    kind: type
    encode: Callable[[Any], object]
    decode: Callable[[Any], object]


class Codecs:
    """The registered codecs, by class and by name; those of installed packages on first miss."""

    def __init__(self) -> None:
        self._by_key: dict[object, Codec] = {}
        self._are_loaded = False

    def add(self, codec: Codec) -> None:
        """Add a codec, or replace the codec of its class."""
        known = self._by_key.get(codec.name)
        if known is not None and class_name(known.kind) != class_name(codec.kind):
            raise ConfigurationError(
                f"a codec named {codec.name!r} is registered already, for"
                f" {class_name(known.kind)}; give this one another name"
            )
        before = self._by_key.pop(codec.kind, None)
        if before is not None:
            self._by_key.pop(before.name, None)
        self._by_key[codec.kind] = self._by_key[codec.name] = codec

    def find(self, key: type | str, *, load: bool = True) -> Codec | None:
        """Return the codec of a class or of a name; ``load`` searches installed packages too."""
        if load and key not in self._by_key and not self._are_loaded:
            self._load()
        return self._by_key.get(key)

    def _load(self) -> None:
        """Call the functions that installed packages name as ``maestro_hive.codecs``, once."""
        from importlib.metadata import entry_points

        for each in entry_points(group="maestro_hive.codecs"):
            try:
                each.load()()
            except Exception as error:
                raise ConfigurationError(
                    f"the codecs of {each.value} cannot be loaded: {error}"
                ) from error
        self._are_loaded = True


codecs = Codecs()


def register_codec(
    cls: type[T],
    encode: Callable[[T], object],
    decode: Callable[[Any], T],
    *,
    name: str | None = None,
) -> None:
    """Store instances of exactly this class as ``encode`` returns; ``decode`` makes them again.

    ``encode`` may return anything that can be stored. ``name`` is written with every value, and
    finds the codec when it is read: it must stay the same (default: ``module:name`` of the class).
    """
    if cls in BUILT_IN:
        raise ConfigurationError(f"{cls.__name__} has a form already, which cannot be replaced")
    codecs.add(Codec(name or class_name(cls), cls, encode, decode))
