"""Values as canonical JSON and back, the same value giving the same bytes.

What JSON has no form for is written as an object with the key ``$``: a datetime is
``{"$":"datetime","v":"2030-01-01T00:00:00+00:00"}`` and comes back as a datetime. A dictionary
that has that key itself, or keys that are no strings, is written as pairs.

Nothing is guessed: a value that would not come back equal and of the same type is an error that
names its path. Reading trusts nothing: no NaN, no duplicate keys, limits on size and depth, and a
class is only ever looked up among modules that are imported already, never imported.
"""

from __future__ import annotations

import hashlib
from typing import Any, NamedTuple

from maestro_hive.kernel.errors import DecodeError, EncodeError
from maestro_hive.maestro.state.lowering import PLAIN_SCALARS, TAG, lower
from maestro_hive.maestro.state.raising import (
    UnknownClassAtPathError,
    UnknownClassError,
    raise_up,
)
from maestro_hive.maestro.state.strict_json import (
    DOCUMENT_DEPTH,
    MAX_BYTES,
    MAX_DEPTH,
    WHOLE_DEPTH,
    AtPathError,
    Json,
    dump_canonical,
    member,
    parse,
    parse_any_depth,
    to_text,
)

__all__ = [
    "DOCUMENT_DEPTH",
    "MAX_BYTES",
    "MAX_DEPTH",
    "TAG",
    "WHOLE_DEPTH",
    "Encoded",
    "Json",
    "decode",
    "dump_canonical",
    "encode",
    "encode_call",
    "encoded",
    "parse",
    "revive",
]


class Encoded(NamedTuple):
    """A value's canonical bytes and their SHA-256; a tuple, because one is made for every step."""

    data: bytes
    sha256: bytes

    @property
    def hexdigest(self) -> str:
        """The digest as people write it."""
        return self.sha256.hex()


def encode(value: object, path: str = "value", *, depth: int = MAX_DEPTH) -> Encoded:
    """Return the canonical bytes of ``value``; ``path`` names it in errors."""
    try:
        tree = value if type(value) in PLAIN_SCALARS else lower(value, depth)
        data = to_text(tree).encode()
    except AtPathError as error:
        raise EncodeError(path + error.where(), error.reason) from None
    except RecursionError:
        raise EncodeError(path, "nested too deep for the room left on the stack") from None
    except ValueError as error:
        raise EncodeError(
            path + _path_to_culprit(lower(value, depth)), _text_reason(error)
        ) from None
    if len(data) > MAX_BYTES:
        raise EncodeError(path, f"{len(data):,} bytes is over the limit of {MAX_BYTES:,}")
    return Encoded(data, hashlib.sha256(data).digest())


def encoded(data: bytes) -> Encoded:
    """Return canonical bytes, made elsewhere, with their digest."""
    return Encoded(data, hashlib.sha256(data).digest())


def encode_call(args: tuple[Any, ...], kwargs: dict[str, Any], path: str = "input") -> Encoded:
    """Return what ``encode`` makes of a call's arguments; plain ones need no second look."""
    if kwargs or not PLAIN_SCALARS.issuperset(map(type, args)):
        return encode({"args": list(args), "kwargs": kwargs}, path)
    try:
        data = b'{"args":%b,"kwargs":{}}' % to_text(args).encode()
    except ValueError:
        data = b""
    if not data or len(data) > MAX_BYTES:  # it says which of them cannot be written, and why
        return encode({"args": list(args), "kwargs": kwargs}, path)
    return Encoded(data, hashlib.sha256(data).digest())


def _text_reason(error: ValueError) -> str:
    if isinstance(error, UnicodeEncodeError):
        return "a text with half a surrogate pair has no form in UTF-8"
    return f"an integer is too long: {error}"


def _path_to_culprit(tree: Json) -> str:
    """Find the innermost value that cannot be written as text; looked for only on failure."""
    for step, item in _inside(tree):
        try:
            dump_canonical(item)
        except ValueError:
            return step + _path_to_culprit(item)
    return ""


def _inside(tree: Json) -> list[tuple[str, Json]]:
    """Return what a value has inside, by the step that leads there; a tag is no step."""
    if type(tree) is dict and TAG in tree:
        if tree[TAG] == "dict":
            return [(f"[{key!r}]", item) for key, item in tree["v"]]
        return _inside(tree["v"])
    if type(tree) is dict:
        return [(member(key), item) for key, item in tree.items()]
    return [(f"[{at}]", item) for at, item in enumerate(tree)] if type(tree) is list else []


def decode(data: bytes, path: str = "value") -> Any:
    """Return the value whose canonical bytes are ``data``."""
    return revive(parse_any_depth(data, path), path)


def revive(tree: Json, path: str = "value", *, depth: int = MAX_DEPTH) -> Any:
    """Turn tags back into the values they stand for."""
    try:
        return raise_up(tree, depth)
    except UnknownClassAtPathError as error:
        raise UnknownClassError(path + error.where(), error.reason) from None
    except AtPathError as error:
        raise DecodeError(path + error.where(), error.reason) from None
    except RecursionError:
        raise DecodeError(path, "nested too deep for the room left on the stack") from None
