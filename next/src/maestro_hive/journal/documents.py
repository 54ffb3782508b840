"""JSON documents with a digest and a format number: complete, checked, or named as damaged.

A document is one line of JSON, or several: ``{"document":{…},"sha256":"…"}``. The digest is of the
bytes of ``{…}``, exactly as they stand there.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import msgspec
from msgspec import Struct

from maestro_hive.journal.database import FORMAT
from maestro_hive.kernel import files
from maestro_hive.kernel.errors import DocumentCorruptError, FormatError
from maestro_hive.kernel.logs import get_log

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

T = TypeVar("T")
logger = get_log(__name__)

_HEAD, _MIDDLE, _TAIL = b'{"document":', b',"sha256":"', b'"}\n'
_AFTER = len(_MIDDLE) + 64 + len(_TAIL)


class _Kind(Struct):
    format: int
    kind: str


class Sealed(NamedTuple):
    """A document whose digest and format are right."""

    name: str
    kind: str
    body: memoryview


def seal(kind: str, members: Iterable[bytes | bytearray]) -> bytes:
    """Return a document of JSON members, given in pieces, from the first one's ``"name":`` on."""
    head = b'{"format":%d,"kind":"%s",' % (FORMAT, kind.encode())
    pieces, digest = [head, *members, b"}"], hashlib.sha256()
    for piece in pieces:
        digest.update(piece)
    return b"".join((_HEAD, *pieces, _MIDDLE, digest.hexdigest().encode(), _TAIL))


def unseal(data: bytes, name: str) -> Sealed:
    """Return a document; raise if it is torn or altered, or of another format."""
    body, after = memoryview(data)[len(_HEAD) : -_AFTER], data[-_AFTER:]
    digest = hashlib.sha256(body).hexdigest().encode()
    if not data.startswith(_HEAD) or after != _MIDDLE + digest + _TAIL:
        raise DocumentCorruptError(name, "its digest does not match its text")
    found = decoded(body, _Kind, name)
    if found.format != FORMAT:
        raise FormatError(name, found.format, FORMAT)
    return Sealed(name, found.kind, body)


def decoded(body: memoryview, kind: type[T], name: str) -> T:
    """Return JSON as a type; raise if it has another form."""
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise DocumentCorruptError(name, str(error)) from error


def read(path: Path, limit: int = files.MAX_FILE_BYTES) -> Sealed:
    """Return the document in a file."""
    return unseal(files.read_whole(path, limit), str(path))


def set_aside(path: Path, error: DocumentCorruptError) -> DocumentCorruptError:
    """Rename a damaged document, so that it is not found again; return and log the error."""
    moved = DocumentCorruptError(error.name, error.reason, moved_to=files.set_aside(path))
    logger.warning("%s", moved)
    return moved
