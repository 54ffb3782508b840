"""Values to JSON text and back: what goes in comes out, of the same type and in the same order.

Plain data (dictionaries with texts as keys, lists, texts, numbers, booleans, None) goes through the
C encoder as it is; everything else becomes a tree of plain JSON with tags first
(``tree_codec``). The text keeps the order of dictionaries; digests that identify something are
those of the canonical form, which is the same whatever the order. One object in two places of a
value comes back as two equal ones.

``encode_large`` and ``decode_large`` are for worker threads: they give the same result in pieces,
and no piece keeps other threads waiting for long.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, NamedTuple

from maestro_hive.kernel.errors import ConfigurationError, DecodeError, EncodeError
from maestro_hive.maestro.state.codec_classes import (
    TAG,
    Model,
    UnknownClassAtPathError,
    UnknownClassError,
    register_codec,
)
from maestro_hive.maestro.state.strict_json import (
    DOCUMENT_DEPTH,
    LONG_TEXT,
    MAX_BYTES,
    MAX_DEPTH,
    SCALARS,
    TEXT,
    WHOLE_DEPTH,
    AtPathError,
    Json,
    PlainCopy,
    Value,
    check_size,
    decode_error,
    dump,
    dump_canonical,
    is_plain,
    is_sorted,
    parse,
    parse_text,
    plain_copy,
    write,
    write_long,
    write_sorted,
    writer_for,
)
from maestro_hive.maestro.state.tree_codec import (
    TreeChecker,
    TreeDecoder,
    TreeEncoder,
    canonical_tree,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = [
    "DOCUMENT_DEPTH",
    "MAX_BYTES",
    "MAX_DEPTH",
    "TAG",
    "WHOLE_DEPTH",
    "Encoded",
    "EncodedCall",
    "Json",
    "Model",
    "PlainCopy",
    "UnknownClassError",
    "call_of_tree",
    "canonical_digest",
    "decode",
    "decode_tree",
    "dump",
    "dump_canonical",
    "encode",
    "encode_call",
    "encode_copy",
    "encode_flat",
    "encoded",
    "parse",
    "plain_copy",
    "register_codec",
]

_sha256 = hashlib.sha256
#: In the text of plain data: a dictionary with the key that marks a tag.
TAG_AS_KEY = f'"{TAG}":'
#: A tag takes up to three levels of text.
_TAGGED_DEPTH = 3 * (MAX_DEPTH + 1)


class Encoded(NamedTuple):
    """A value's bytes and their SHA-256; a tuple, because one is made for every step."""

    data: bytes
    sha256: bytes

    @property
    def hexdigest(self) -> str:
        """The digest as people write it."""
        return self.sha256.hex()


class EncodedCall(NamedTuple):
    """The arguments of a call, as a value to be stored, and what identifies the call.

    ``digest`` is the same for equal arguments, in whatever order their dictionaries and the
    keywords are.
    """

    value: Encoded
    digest: bytes


#: Nothing can be changed inside of these.
IMMUTABLE = frozenset({str, int, float, bool, bytes, type(None)})
#: Longer texts take too long for an event loop.
_SHORT = 256 * 1024
#: So many scalars are encoded on an event loop, whatever they are.
_FEW = 64
#: So many values of plain data are copied on an event loop.
FEW_TO_COPY = 20_000


def is_small(values: Iterable[Value]) -> bool:
    """Return whether values are immutable, and short enough to be encoded on an event loop."""
    for value in values:
        kind = type(value)
        if kind not in IMMUTABLE or ((kind is str or kind is bytes) and len(value) > _SHORT):
            return False
    return True


# --- encoding -------------------------------------------------------------------------------------


def encode(value: object, path: str = "value", *, depth: int = MAX_DEPTH) -> Encoded:
    """Return the bytes of ``value``; ``path`` names it in errors."""
    if type(value) in SCALARS:
        data = _plain_text(value, len(value) if isinstance(value, str) else 0)
    else:
        data = _plain_data(value, depth)
    if data is None:
        tree, _ = tree_of(value, path, depth)
        data = _tree_data(tree, value, path, depth)
    return Encoded(data, _sha256(_checked(data, path) if len(data) > MAX_BYTES else data).digest())


def encode_flat(value: Value) -> Encoded | None:
    """Return what ``encode`` does for a scalar or a few scalars in a container; None for all else.

    By the shortest way: that is what most steps return. It never takes long, and a container comes
    back as a shallow copy of it would be.
    """
    kind = type(value)
    items: Iterable[Value] = value
    if kind is dict:
        if len(value) > _FEW or TAG in value or not TEXT.issuperset(map(type, value)):
            return None
        items = value.values()
    elif kind is not list:
        items = (value,)
    elif len(value) > _FEW:
        return None
    if not SCALARS.issuperset(map(type, items)):
        return None
    size = 0
    for each in items:
        if type(each) is str:
            size += len(each)
    if size > _SHORT:
        return None
    try:
        data = "".join((write if size < LONG_TEXT else write_long)(value, 0)).encode()
    except ValueError:  # NaN, or no form at all
        return None
    return Encoded(data, _sha256(data).digest())


def encoded(data: bytes) -> Encoded:
    """Return bytes, made elsewhere, with their digest."""
    return Encoded(data, _sha256(data).digest())


def encode_copy(copied: PlainCopy, path: str = "value") -> Encoded:
    """Return what ``encode`` does, of what ``plain_copy`` has looked at already."""
    data = _plain_text(copied.value, copied.characters)
    return encode(copied.value, path) if data is None else encoded(data)


def encode_call(
    args: tuple[Value, ...],
    kwargs: dict[str, Value],
    path: str = "input",
    *,
    characters: int | None = None,
) -> EncodedCall:
    """Return the bytes of a call's arguments and the digest that identifies them.

    ``characters`` says how many plain ones have: then nobody need look whether they are plain.
    """
    if SCALARS.issuperset(map(type, args)) and SCALARS.issuperset(map(type, kwargs.values())):
        call = _call_with_scalars(args, kwargs)
        if call is not None:
            return call
    tree: Json = {"args": list(args), "kwargs": kwargs}
    has_pairs = False
    data = None if characters is None else _plain_text(tree, characters)
    data = _plain_data(tree, MAX_DEPTH) if data is None else data
    if data is None:
        value = tree
        tree, has_pairs = tree_of(value, path, MAX_DEPTH)
        data = _tree_data(tree, value, path, MAX_DEPTH)
    digest = sha256 = _sha256(_checked(data, path)).digest()
    if has_pairs or not is_sorted(tree):
        tree = canonical_tree(tree) if has_pairs else tree
        text = "".join(writer_for(tree, canonical=True)(tree, 0))
        digest = _sha256(text.encode()).digest()
    return EncodedCall(Encoded(data, sha256), digest)


def _call_with_scalars(args: tuple[Value, ...], kwargs: dict[str, Value]) -> EncodedCall | None:
    """Return the most common kind of call by the shortest way; None if it cannot be written so."""
    try:
        written = "".join(write(args, 0)), "".join(write(kwargs, 0)) if kwargs else "{}"
        data = f'{{"args":{written[0]},"kwargs":{written[1]}}}'.encode()
    except ValueError:  # NaN, or no form at all
        return None
    if len(data) > MAX_BYTES or (
        kwargs and (TAG in kwargs or not TEXT.issuperset(map(type, kwargs)))
    ):
        return None
    digest = sha256 = _sha256(data).digest()
    if len(kwargs) > 1 and list(kwargs) != sorted(kwargs):
        ordered = "".join(write_sorted(kwargs, 0))
        digest = _sha256(f'{{"args":{written[0]},"kwargs":{ordered}}}'.encode()).digest()
    return EncodedCall(Encoded(data, sha256), digest)


def call_of_tree(tree: Json) -> EncodedCall:
    """Return the arguments of a call whose text was parsed, and perhaps changed."""
    return EncodedCall(encoded(dump(tree)), _sha256(dump_canonical(canonical_tree(tree))).digest())


def canonical_digest(value: object, path: str = "value", *, depth: int = MAX_DEPTH) -> bytes:
    """Return the SHA-256 of a value's canonical form: the same for every order of its keys."""
    data = _plain_data(value, depth, canonical=True)
    if data is None:
        tree, has_pairs = tree_of(value, path, depth)
        tree = canonical_tree(tree) if has_pairs else tree
        data = _tree_data(tree, value, path, depth, canonical=True)
    return _sha256(_checked(data, path)).digest()


def _checked(data: bytes, path: str) -> bytes:
    if len(data) > MAX_BYTES:
        raise EncodeError(path, f"{len(data):,} bytes is over the limit of {MAX_BYTES:,}")
    return data


def _plain_data(value: Value, depth: int, *, canonical: bool = False) -> bytes | None:
    """Return the text of plain data; None if it is not, or has no text."""
    kind = type(value)
    if kind in SCALARS:
        return _plain_text(value, LONG_TEXT, canonical=canonical)
    try:
        if (kind is dict or kind is list) and is_plain(value, depth):
            return _plain_text(value, LONG_TEXT, canonical=canonical)
    except RuntimeError:
        pass  # it is changed meanwhile: the longer way says so
    return None


def _plain_text(value: Value, characters: int, *, canonical: bool = False) -> bytes | None:
    """Return the text of plain data with so many characters; None if it has none, or a key is a tag."""
    short = write_sorted if canonical else write
    writer = short if characters < LONG_TEXT else writer_for(value, canonical=canonical)
    try:
        text = "".join(writer(value, 0))
        # One character first: searching for more is slow in long texts.
        return None if TAG in text and TAG_AS_KEY in text else text.encode()
    except (ValueError, RuntimeError):
        return None  # NaN, or no form at all: the longer way makes the one and names the other


def tree_of(
    value: object, path: str, depth: int, encoder: TreeEncoder | None = None
) -> tuple[Json, bool]:
    """Return the tree of a value, and whether it has pairs."""
    encoder = encoder or TreeEncoder()
    try:
        return encoder.convert(value, depth), encoder.has_pairs
    except AtPathError as error:
        raise EncodeError(path + error.where(), error.reason) from error.__cause__
    except RecursionError:
        raise EncodeError(path, "nested too deep for the room left on the stack") from None
    except RuntimeError as error:  # a dictionary or set of another size than a moment ago
        raise EncodeError(path, f"it was changed while it was encoded: {error}") from None
    except ConfigurationError:  # it is a ValueError too
        raise
    except ValueError as error:
        raise no_text(value, path, depth, error) from None


def _tree_data(
    tree: Json, value: object, path: str, depth: int, *, canonical: bool = False
) -> bytes:
    """Return the text of a value's tree, or name what in it has none."""
    try:
        return "".join(writer_for(tree, canonical=canonical)(tree, 0)).encode()
    except RecursionError:
        raise EncodeError(path, "nested too deep for the room left on the stack") from None
    except ValueError as error:
        raise no_text(value, path, depth, error) from None


def no_text(value: object, path: str, depth: int, error: ValueError) -> EncodeError:
    """Return the error for a value with something that has no text, found only now."""
    try:
        tree_of(value, path, depth, TreeChecker())
    except EncodeError as named:
        return named
    return EncodeError(path, f"it was changed while it was encoded: {error}")


# --- decoding -------------------------------------------------------------------------------------


def decode(data: bytes, path: str = "value") -> Value:
    """Return the value whose bytes are ``data``."""
    if len(data) > MAX_BYTES:
        check_size(data, path)
    try:
        text = str(data, "utf-8")
        has_tags = (TAG in text or "\\" in text) and may_have_tags(text)
        tree = parse_text(text, _TAGGED_DEPTH if has_tags else MAX_DEPTH)
    except (AtPathError, RecursionError, ValueError) as error:
        raise decode_error(error, path, MAX_DEPTH) from None
    return decode_tree(tree, path) if has_tags else tree


def may_have_tags(text: str) -> bool:
    """Return whether a text may hold a tag; one character is searched for first, which is fast."""
    return (TAG in text and '"$"' in text) or ("\\" in text and "\\u0024" in text)


def decode_tree(tree: Json, path: str = "value", *, depth: int = MAX_DEPTH) -> Value:
    """Return the value of a tree of plain JSON with tags; the tree is left as it is."""
    try:
        return TreeDecoder().convert(tree, depth)
    except UnknownClassAtPathError as error:
        raise UnknownClassError(path + error.where(), error.reason) from None
    except AtPathError as error:
        raise DecodeError(path + error.where(), error.reason) from None
    except RecursionError:
        raise DecodeError(path, "nested too deep for the room left on the stack") from None
