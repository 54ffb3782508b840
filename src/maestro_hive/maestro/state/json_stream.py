"""Long JSON texts, read strictly and value by value, so that only one value is in memory.

``JsonStream`` walks through a text; ``StreamedItems`` and ``StreamedMembers`` are a list and an object
in it, whose values are read when they are asked for.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator, Mapping
from typing import Protocol

from maestro_hive.kernel.errors import DecodeError
from maestro_hive.maestro.state.strict_json import (
    DOCUMENT_DEPTH,
    MAX_BYTES,
    AtPathError,
    Json,
    check,
    decode_error,
    dump,
    scan_once,
)

#: How many bytes are read at a time; a longer value takes as many as it needs.
_READ_BYTES = 1 << 20
#: A value is not longer than what can be encoded, and what is around it.
_MOST_BYTES = MAX_BYTES + (1 << 20)
#: What is cut at the end of a text is reported at most so many characters before it.
_LONGEST_WORD = 16
_SPACE = " \t\n\r"


class Source(Protocol):
    """Bytes that are read by their place."""

    name: str
    size: int

    def read_at(self, start: int, length: int) -> bytes:
        """Return so many bytes from a place on."""


class BytesSource:
    """Bytes in memory."""

    def __init__(self, data: bytes, name: str) -> None:
        self.name = name
        self.size = len(data)
        self._data = data

    def read_at(self, start: int, length: int) -> bytes:
        """Return so many bytes from a place on."""
        return self._data[start : start + length]


class JsonStream:
    """A JSON text between two places of a source; errors are ``DecodeError``."""

    def __init__(self, source: Source, start: int, end: int) -> None:
        self._source = source
        self._next, self._end = start, end
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self._text = ""
        self._at = 0
        #: The place of the next character in the source.
        self.place = start

    def peek(self) -> str:
        """Return the next character that is not space; empty at the end."""
        while True:
            text, at = self._text, self._at
            while at < len(text) and text[at] in _SPACE:
                at += 1
            self._advance(at)
            if at < len(text):
                return text[at]
            if not self._read():
                return ""

    def take(self, expected: str) -> None:
        """Go past this character."""
        found = self.peek()
        if found != expected:
            shown = repr(found) if found else "the end"
            raise DecodeError(
                self._source.name, f"not JSON of ours: {shown} is where {expected} should be"
            )
        self._advance(self._at + 1)

    def value(self, depth: int = DOCUMENT_DEPTH, *, will_be_written: bool = False) -> Json:
        """Return the next value; one that ``will_be_written`` is checked for bad characters then."""
        self.peek()
        try:
            tree, end = self._scanned()
            if not will_be_written:
                _check_escapes(tree, self._text, self._at, end)
            check(tree, depth)
        except DecodeError:
            raise
        except (AtPathError, RecursionError, ValueError) as error:
            raise decode_error(error, self._source.name, depth) from None
        self._advance(end)
        return tree

    def members(self) -> Iterator[str]:
        """Go through an object: yield each name, and go on when its value was taken."""
        seen: set[str] = set()
        self.take("{")
        while self.peek() != "}":
            if seen:
                self.take(",")
            name = self.value()
            if not isinstance(name, str) or name in seen:
                reason = f"{str(name)[:40]!r} is no name, or stands twice in one object"
                raise DecodeError(self._source.name, reason)
            seen.add(name)
            self.take(":")
            yield name
        self.take("}")

    def items(self) -> Iterator[int]:
        """Go through a list: yield the number of each item, and go on when it was taken."""
        number = 0
        self.take("[")
        while self.peek() != "]":
            if number:
                self.take(",")
            yield number
            number += 1
        self.take("]")

    def finish(self) -> None:
        """Raise if there is more."""
        if self.peek():
            raise DecodeError(self._source.name, "not JSON of ours: there is more behind it")

    def _scanned(self) -> tuple[Json, int]:
        """Return the value that starts here and where it ends; more is read until it is whole."""
        while True:
            cut = len(self._text)
            try:
                tree, end = scan_once(self._text, self._at)
                if end < cut or not self._read():  # a number at the end may go on
                    return tree, end
            except StopIteration as stop:
                if stop.value < cut - _LONGEST_WORD or not self._read():
                    raise ValueError(f"there is no value at byte {self.place}") from None
            except json.JSONDecodeError as error:
                is_cut = error.msg.startswith("Unterminated") or error.pos >= cut - _LONGEST_WORD
                if not is_cut or not self._read():
                    raise

    def _advance(self, to: int) -> None:
        text, at = self._text, self._at
        self.place += to - at if text.isascii() else len(text[at:to].encode())
        self._at = to

    def _read(self) -> bool:
        """Read more of the text, at least as much as is waiting; False at its end."""
        rest = self._text[self._at :]
        length = min(max(_READ_BYTES, len(rest)), self._end - self._next)
        if length <= 0:
            return False
        if len(rest) > _MOST_BYTES:
            raise ValueError(f"a value is longer than {_MOST_BYTES:,} bytes")
        data = self._source.read_at(self._next, length)
        self._next += length
        try:
            self._text = rest + self._decoder.decode(data, final=self._next == self._end)
        except UnicodeDecodeError as error:
            raise DecodeError(self._source.name, f"not JSON of ours: {error}") from None
        self._at = 0
        return True


def _check_escapes(tree: Json, text: str, start: int, end: int) -> None:
    """Raise an error for half a surrogate pair, which only an escape can bring into a text."""
    if any(text.find(half, start, end) >= 0 for half in ("\\ud", "\\uD")):
        dump(tree)


class StreamedItems:
    """A list in a source: its items, which will be written, are read each time they are iterated."""

    def __init__(self, source: Source, stream: JsonStream, end: int) -> None:
        """Go through the list at which a stream is."""
        stream.peek()
        self._source, self._start, self._end = source, stream.place, end
        self._count = 0
        for _ in stream.items():
            stream.value(will_be_written=True)
            self._count += 1

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Json]:
        stream = JsonStream(self._source, self._start, self._end)
        for _ in stream.items():
            yield stream.value(will_be_written=True)


class StreamedMembers(Mapping[str, Json]):
    """An object in a source: its members, which will be written, are read when they are asked for."""

    def __init__(self, source: Source, stream: JsonStream) -> None:
        """Go through the object at which a stream is."""
        self._source = source
        self._places: dict[str, tuple[int, int]] = {}
        for name in stream.members():
            stream.peek()
            start = stream.place
            stream.value(will_be_written=True)
            self._places[name] = start, stream.place

    def __getitem__(self, name: str) -> Json:
        return JsonStream(self._source, *self._places[name]).value(will_be_written=True)

    def __contains__(self, name: object) -> bool:  # without reading it
        return name in self._places

    def __len__(self) -> int:
        return len(self._places)

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)
