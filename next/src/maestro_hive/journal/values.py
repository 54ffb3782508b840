"""Values to JSON text and back: what goes in comes out, of the same type and in the same order.

Plain data is written by msgspec as it is; everything else becomes a tree with tags first
(``tagged_values``). ``encode`` also returns the value as it is read back: a workflow gets that one,
before a restart too. One object in two places of a value comes back as two equal ones.

What identifies a value is its canonical text: the same for equal values, in whatever order their
dictionaries are. The stored text keeps that order.
"""

from __future__ import annotations

import hashlib
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import msgspec

from maestro_hive.journal.plain_data import (
    LARGE,
    TAG_AS_KEY,
    dump,
    dump_sorted,
    load,
    load_large,
    plain,
)
from maestro_hive.journal.tagged_values import Reader, TextChecker, Writer
from maestro_hive.journal.user_classes import AtPathError
from maestro_hive.kernel.errors import CodecError, ConfigurationError, DecodeError, EncodeError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

MAX_BYTES = 256 * 1024 * 1024
#: A text from this size on is stored apart from its entry, and identified by its digest.
LARGE_BYTES = 16 * 1024


class Encoded(msgspec.Struct, eq=False):
    """The text of a value, and the value as it is read back from it."""

    data: bytes
    _back: Any
    _is_taken: bool = False

    def take(self) -> Any:
        """Return the value as it is read back: each call returns one of its own."""
        if self._is_taken:
            return decode(self.data)
        self._is_taken = True
        back, self._back = self._back, None
        return back

    def identity(self) -> bytes:
        """Return the canonical text: keys sorted; of a large one, its SHA-256, as an object."""
        text = self.data
        if b"{" in text:
            back = decode(text) if self._is_taken else self._back
            if b"$" in text and TAG_AS_KEY in text:
                text = _dump_tree(back, "value", canonical=True)
            else:
                text = dump_sorted(back)
        if len(text) < LARGE_BYTES:
            return text
        return b'{"$":"sha256","v":"%s"}' % hashlib.sha256(text).hexdigest().encode()


_data_of = attrgetter("data")


class EncodedCall(msgspec.Struct, eq=False):
    """The arguments of a call, each of them encoded, and the SHA-256 that identifies the call."""

    args: tuple[Encoded, ...]
    kwargs: dict[str, Encoded]
    digest: bytes

    def text(self) -> bytes:
        """Return the text of all arguments: a list of those by place, then those by name."""
        placed = b",".join(map(_data_of, self.args))
        if not self.kwargs:
            return b"[[%s],{}]" % placed
        named = [encode(name).data + b":" + each.data for name, each in self.kwargs.items()]
        return b"[[%s],{%s}]" % (placed, b",".join(named))

    def take(self) -> tuple[list[Any], dict[str, Any]]:
        """Return the arguments as they are read back: each call returns some of its own."""
        args = list(map(Encoded.take, self.args))
        if not self.kwargs:
            return args, {}
        return args, {name: each.take() for name, each in self.kwargs.items()}


# --- encoding ---------------------------------------------------------------------------------


def encode(value: Any, path: str = "value") -> Encoded:
    """Return the text of a value, and the value as it is read back; ``path`` names it in errors."""
    found = plain(value)
    data = _dump_tree(value, path) if found is None else found[0]
    if len(data) > MAX_BYTES:
        raise EncodeError(path, _too_large(data))
    if found is not None:
        return Encoded(data, found[1])
    try:
        return Encoded(data, decode(data, path))
    except CodecError as error:
        raise EncodeError(error.path, f"it cannot be read back: {error.reason}") from error


def _dump_tree(value: Any, path: str, *, canonical: bool = False) -> bytes:
    try:
        return (dump_sorted if canonical else dump)(Writer(canonical=canonical).convert(value))
    except AtPathError as error:
        raise EncodeError(path + error.path, error.reason) from error.__cause__
    except RecursionError:
        raise EncodeError(path, "nested too deep for the room left on the stack") from None
    except RuntimeError as error:  # a dictionary or set of another size than a moment ago
        raise EncodeError(path, f"it was changed while it was encoded: {error}") from None
    except ConfigurationError:  # a ValueError too
        raise
    except ValueError as error:
        raise _no_text(value, path, error) from None


def _no_text(value: Any, path: str, error: ValueError) -> EncodeError:
    """Return the error for a value with a part that has no text, such as half a surrogate pair."""
    try:
        TextChecker().convert(value)
    except AtPathError as found:
        return EncodeError(path + found.path, found.reason)
    return EncodeError(path, f"it was changed while it was encoded: {error}")


def _too_large(data: bytes) -> str:
    return f"{len(data):,} bytes is over the limit of {MAX_BYTES:,}"


# --- identity ---------------------------------------------------------------------------------


def encode_call(args: Iterable[Any], kwargs: Mapping[str, Any], path: str = "input") -> EncodedCall:
    """Return the arguments of a call, encoded one by one, and the digest of all of them."""
    positional = tuple([encode(value, f"{path}.args[{at}]") for at, value in enumerate(args)])
    named = {}
    if kwargs:
        named = {name: encode(value, f"{path}.{name}") for name, value in kwargs.items()}
    return EncodedCall(positional, named, digest_of_call(positional, named))


def digest_of_call(args: Iterable[Encoded], kwargs: Mapping[str, Encoded]) -> bytes:
    """Return the SHA-256 that identifies a call: equal for equal arguments, keywords in any order.

    A large argument counts by the digest of its canonical text.
    """
    placed, named = b",".join(map(Encoded.identity, args)), b""
    if kwargs:
        named = b",".join(
            [encode(name).data + b":" + kwargs[name].identity() for name in sorted(kwargs)]
        )
    return hashlib.sha256(b'{"args":[%s],"kwargs":{%s}}' % (placed, named)).digest()


def short_digest(data: bytes) -> str:
    """Return 16 hexadecimal digits of the SHA-256 of a text."""
    return hashlib.sha256(data).hexdigest()[:16]


# --- decoding ---------------------------------------------------------------------------------


def decode(data: bytes, path: str = "value") -> Any:
    """Return the value of a text; ``path`` names it in errors."""
    if len(data) > MAX_BYTES:
        raise DecodeError(path, _too_large(data))
    try:
        tree = load(data) if len(data) < LARGE else load_large(data)
    except RecursionError:
        raise DecodeError(path, "nested too deep for the room left on the stack") from None
    except ValueError as error:
        raise DecodeError(path, f"not a text that maestro-hive wrote: {error}") from None
    return tree if b"$" not in data or b'"$"' not in data else decode_tree(tree, path)


def decode_tree(tree: Any, path: str = "value") -> Any:
    """Return the value of a text that was read as JSON already, such as a part of an entry."""
    try:
        return Reader().convert(tree)
    except AtPathError as error:
        raise error.decode_error(path + error.path, error.reason) from None
    except RecursionError:
        raise DecodeError(path, "nested too deep for the room left on the stack") from None
