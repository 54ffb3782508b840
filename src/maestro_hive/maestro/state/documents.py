"""A JSON document that proves itself: one object, its format, and a SHA-256 over all of it.

The text is ``{"document":{…},"sha256":"…"}`` and a line feed; the digest is that of the bytes of
``{…}`` exactly as they stand. So any change to any byte is found, and anybody can check a file
with a JSON parser and a hash function (docs/storage-format.md shows how).
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, cast

from maestro_hive.kernel.errors import DecodeError, DocumentCorruptError, NewerFormatError
from maestro_hive.maestro.state import codec

if TYPE_CHECKING:
    from maestro_hive.maestro.state.codec import Json

#: The format of the documents this version writes, and the newest it reads.
DOCUMENT_FORMAT = 1

_HEAD = b'{"document":'
_MIDDLE = b',"sha256":"'
_TAIL = b'"}\n'
_DIGEST_LENGTH = 64


def seal(kind: str, body: dict[str, Json], raw: dict[str, bytes] | None = None) -> bytes:
    """Return the text of a document with these members; ``raw`` ones are JSON text already."""
    texts = {name: codec.dump_canonical(value) for name, value in body.items()}
    texts |= raw or {}
    texts["format"] = b"%d" % DOCUMENT_FORMAT
    texts["kind"] = codec.dump_canonical(kind)
    members = (codec.dump_canonical(name) + b":" + texts[name] for name in sorted(texts))
    document = b"{" + b",".join(members) + b"}"
    digest = hashlib.sha256(document).hexdigest().encode()
    return b"".join((_HEAD, document, _MIDDLE, digest, _TAIL))


def unseal(text: bytes, kind: str, name: str, *, verify: bool = True) -> dict[str, Json]:
    """Return the members of a document, or raise an error that says what is wrong with it.

    ``verify=False`` leaves the digest unchecked, for callers who were asked to; all else holds.
    """
    end = len(text) - len(_TAIL) - _DIGEST_LENGTH
    middle = end - len(_MIDDLE)
    whole = (
        text.startswith(_HEAD)
        and text.endswith(_TAIL)
        and middle > len(_HEAD)
        and text[middle:end] == _MIDDLE
    )
    if not whole:
        raise DocumentCorruptError(name, "it is torn, or not a document of ours")
    document = text[len(_HEAD) : middle]
    if verify and hashlib.sha256(document).hexdigest().encode() != text[end : -len(_TAIL)]:
        raise DocumentCorruptError(name, "its SHA-256 does not match: it was altered")
    return _check_members(document, kind, name)


def _check_members(document: bytes, kind: str, name: str) -> dict[str, Json]:
    try:
        body = codec.parse(document, name, depth=codec.DOCUMENT_DEPTH)
    except DecodeError as error:
        raise DocumentCorruptError(name, error.reason) from error
    if not isinstance(body, dict):
        raise DocumentCorruptError(name, "it is not an object")
    found = body.pop("format", None)
    if type(found) is not int or found < 1:
        raise DocumentCorruptError(name, f"its format number is {found!r}")
    if found > DOCUMENT_FORMAT:
        raise NewerFormatError(name, found, DOCUMENT_FORMAT)
    if body.pop("kind", None) != kind:
        raise DocumentCorruptError(name, f"it is not a {kind} document")
    return cast("dict[str, Json]", body)
