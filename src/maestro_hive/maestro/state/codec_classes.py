"""Classes of the user's: how they are named and found again, their codecs, and those of libraries.

Nothing is imported by a stored name: a class is found among the modules that are imported already.
"""

from __future__ import annotations

import base64
import re
import sys
from importlib import import_module
from math import prod
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar, runtime_checkable

from maestro_hive.kernel.errors import ConfigurationError, DecodeError
from maestro_hive.maestro.state.strict_json import AtPathError, Json, Value

if TYPE_CHECKING:
    from collections.abc import Callable

    from maestro_hive.maestro.state.tree_codec import TreeDecoder, TreeEncoder

T = TypeVar("T")
Node = dict[str, Json]
TAG = "$"
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
    encode: Callable[[Value], object]
    decode: Callable[[Value], object]


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
        from importlib.metadata import entry_points

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


# --- parts of a form ------------------------------------------------------------------------------

#: Base64 is made in pieces of this size, so that none takes long.
_BASE64_PIECE = 3 * (1 << 18)


def text_of(node: Node) -> str:
    """Return a form that is one text."""
    if type(node["v"]) is not str:
        raise AtPathError(f"not a valid {node[TAG]}: it is made of a text")
    return node["v"]


def base64_of(data: Value) -> str:
    """Return bytes as Base64."""
    if len(data) <= _BASE64_PIECE:
        return base64.b64encode(data).decode()
    view = memoryview(data)
    return "".join(
        base64.b64encode(view[at : at + _BASE64_PIECE]).decode()
        for at in range(0, len(view), _BASE64_PIECE)
    )


def bytes_of(node: Node) -> bytes:
    """Return the bytes of a form that is Base64."""
    text = text_of(node)
    step = _BASE64_PIECE // 3 * 4
    if len(text) <= step:
        return base64.b64decode(text, validate=True)
    pieces = (text[at : at + step] for at in range(0, len(text), step))
    return b"".join(base64.b64decode(piece, validate=True) for piece in pieces)


# --- pydantic models ------------------------------------------------------------------------------


def encode_model(name: str, encoder: TreeEncoder, value: Value, room: int) -> Json:
    """Return the tree of a model, if it comes back from its fields as it is."""
    kind = type(value)
    fields = _model_fields(value)
    node: Node = {TAG: "model", "t": name, "v": encoder.members(fields, room)}
    try:
        back = _make_model(kind, fields)
    except ValueError as error:
        raise AtPathError(f"the model does not come back from its fields: {error}") from None
    if TAG in fields or (
        _model_fields(back) != fields and encoder.members(_model_fields(back), room) != node["v"]
    ):
        raise AtPathError("the model comes back from its fields with other values")
    unset = sorted(kind.model_fields.keys() - value.model_fields_set)
    if unset:
        node["unset"] = unset
    known = back.__pydantic_private__ or {}
    private = {
        name: item
        for name, item in (value.__pydantic_private__ or {}).items()
        if name not in known or known[name] != item
    }
    if private:
        node["private"] = encoder.members(private, room)
    return node


def _model_fields(model: Value) -> dict[str, object]:
    """Return the fields by the names that the model is made with, and what it has besides."""
    fields: dict[str, object] = {}
    for name, info in type(model).model_fields.items():
        alias = info.validation_alias
        alias = getattr(alias, "choices", [alias])[0]
        fields[alias if isinstance(alias, str) else name] = getattr(model, name)
    return fields | (model.model_extra or {})


def _make_model(kind: Value, fields: dict[str, Value]) -> Value:
    """Return a pydantic model with these fields, validated."""
    if getattr(kind, "__pydantic_root_model__", False):
        return kind.model_validate(fields["root"])
    return kind.model_validate(fields)


def decode_model(decoder: TreeDecoder, node: Node, room: int) -> Value:
    """Return the model that was encoded."""
    kind = decoder.class_of(node)
    if not issubclass(kind, Model):
        raise AtPathError(f"{node['t']} is not a pydantic model")
    made = _make_model(kind, decoder.fields(node, room))
    if "unset" in node:
        made.model_fields_set.difference_update(node["unset"])
    if "private" in node:
        for name, value in decoder.fields(node, room, "private").items():
            made.__pydantic_private__[name] = value
    return made


# --- numpy ----------------------------------------------------------------------------------------


def numpy_encoder(value: Value) -> Callable[[TreeEncoder, Value, int], Json] | None:
    """Return the encoder for an array or a number."""
    numpy: Value = sys.modules["numpy"]
    if type(value) is numpy.ndarray:
        return _encode_array
    return _encode_numpy_scalar if isinstance(value, numpy.generic) else None


def _dtype(value: Value) -> str:
    text: str = value.dtype.str
    if value.dtype.itemsize == 0 or _DTYPE.fullmatch(text) is None:
        raise AtPathError(f"a numpy value of type {value.dtype} has no form of its own")
    return text


#: Booleans, numbers, texts, bytes and times; not objects, not structures.
_DTYPE = re.compile(r"[<>|][biufcSUmM][0-9]{1,9}(\[[0-9]{0,9}[a-zA-Z]{1,2}\])?")


def _encode_numpy_scalar(encoder: TreeEncoder, value: Value, room: int) -> Json:
    dtype = _dtype(value)
    small = value.dtype.kind in "biuf" and value.dtype.itemsize <= 8
    written = encoder.convert(value.item(), room + 1) if small else base64_of(value.tobytes())
    return {TAG: "numpy", "t": dtype, "v": written}


def _encode_array(_encoder: TreeEncoder, value: Value, _room: int) -> Json:
    node = {TAG: "ndarray", "t": _dtype(value), "shape": list(value.shape)}
    return {**node, "v": base64_of(value.tobytes())}


def _numpy_dtype(node: Node) -> tuple[Value, Value]:
    try:  # by this name alone, and only if there is such a value
        numpy: Value = import_module("numpy")
    except ImportError as error:
        raise UnknownClassAtPathError(
            f"it is a value of numpy's ({error}); install numpy"
        ) from error
    if type(node["t"]) is not str or _DTYPE.fullmatch(node["t"]) is None:
        raise AtPathError(f"{str(node['t'])[:40]!r} is not a type of numpy's")
    return numpy, numpy.dtype(node["t"])


def decode_numpy_scalar(decoder: TreeDecoder, node: Node, room: int) -> Value:
    """Return the number that was encoded."""
    numpy, dtype = _numpy_dtype(node)
    if dtype.kind in "biuf" and dtype.itemsize <= 8:
        value = decoder.convert(node["v"], room + 1)
        if type(value) is not {"b": bool, "f": float}.get(dtype.kind, int):
            raise AtPathError(f"{str(value)[:40]} is not of the type {dtype}")
        return dtype.type(value)
    (value,) = numpy.frombuffer(bytes_of(node), dtype)
    return value


def decode_array(_decoder: TreeDecoder, node: Node, _room: int) -> Value:
    """Return the array that was encoded."""
    numpy, dtype = _numpy_dtype(node)
    shape, data = node["shape"], bytearray(bytes_of(node))
    if any(type(length) is not int or length < 0 for length in shape):
        raise AtPathError("not a valid array: its shape is made of whole numbers")
    if prod(shape) * dtype.itemsize != len(data):
        raise AtPathError("not a valid array: its shape is not that of its data")
    return numpy.frombuffer(data, dtype).reshape(shape)  # writable, since a bytearray is
