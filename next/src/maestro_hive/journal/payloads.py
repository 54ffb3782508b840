"""Large values of a run, apart from its entries; one that grew is stored as what was added.

An entry has a reference instead, with the digest of the text:
``{"$":"payload","v":[3,102400,"9f…"]}``; a value of the user's is never written like that. The
rows travel with the entry, in its transaction: a refused entry leaves none, and none is missing.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from maestro_hive.journal.differences import apply, common_start, difference, is_like
from maestro_hive.journal.values import LARGE_BYTES, MAX_BYTES
from maestro_hive.kernel.errors import ValueCorruptError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

#: How many texts of a run stay in memory, and how many bytes of them: values that grow side by
#: side, as in the branches of a gather, each find their own last text.
_RECENT = 8
_RECENT_BYTES = 32 << 20
#: How many of them a new text is compared with.
_TRIES = 3
#: A text is stored whole again when the differences since are as long as this many whole ones.
_WHOLE_AGAIN = 3
#: A difference counts at least this part of its text, so that no chain has very many links.
_SHORTEST_LINK = 256
#: How a reference starts.
START = b'{"$":"payload"'


class Row(NamedTuple):
    """A row of the table of payloads."""

    #: Which one it is among those of its run: 1, 2, 3, …
    number: int
    #: The number of the value that ``data`` is a difference to; None: ``data`` is the text.
    base: int | None
    #: SHA-256 of the whole text.
    sha256: bytes
    data: bytes


class Reference(NamedTuple):
    """Stands in an entry for a value that is stored apart."""

    number: int
    size: int
    sha256: bytes

    def text(self) -> bytes:
        """Return the reference as an entry has it."""
        return b'%s,"v":[%d,%d,"%s"]}' % (
            START,
            self.number,
            self.size,
            self.sha256.hex().encode(),
        )


class Placed(NamedTuple):
    """A value as it is written."""

    #: The text that stands in the entry: the value itself, or a reference.
    text: bytes
    #: The rows that it needs and that are not known to be written: they are inserted with the
    #: entry, unless they exist. Several entries may bring the same row.
    rows: tuple[Row, ...]


class _Reference(msgspec.Struct):
    v: tuple[int, int, str]


def reference_of(text: bytes) -> Reference | None:
    """Return the reference that stands in an entry for a value; None for a value itself."""
    if not text.startswith(START):
        return None
    number, size, sha256 = msgspec.json.decode(text, type=_Reference).v
    return Reference(number, size, bytes.fromhex(sha256))


@dataclass(slots=True)
class _Known:
    """A text of the run that is in memory."""

    reference: Reference
    text: bytes
    #: How long the last whole text of its chain was, and the differences since.
    whole: int
    since: int
    #: Its rows that are not known to be written.
    rows: tuple[Row, ...]


class Payloads:
    """The large values of one run, in the process that executes it; for one thread."""

    def __init__(self, last: int = 0) -> None:
        #: The highest number of a row of the run.
        self._last = last
        self._recent: list[_Known] = []

    def place(self, text: bytes) -> Placed:
        """Return what to write for a value's text: as it is, as a reference, with the rows for it.

        A text that is in memory is not stored again: what a step returned, and the next one gets.
        """
        if len(text) < LARGE_BYTES:
            return Placed(text, ())
        known = next((each for each in self._recent if each.text == text), None)
        known = known or self._add(text)
        self._remember(known)
        return Placed(known.reference.text(), known.rows)

    def written(self, rows: Iterable[Row]) -> None:
        """Mark rows as written for good: entries that refer to them need not bring them."""
        numbers = {each.number for each in rows}
        for known in self._recent:
            known.rows = tuple(each for each in known.rows if each.number not in numbers)

    def read(self, reference: Reference, chain: Callable[[int], Iterable[Row]]) -> bytes:
        """Return the text of a value that is stored apart, checked by its digest.

        ``chain`` returns the row of a number, then the row of its base, and so on; it is read as
        far as it is needed.
        """
        known = self._find(reference.number)
        if known is None or known.reference != reference:
            known = self._rebuild(reference, chain)
        self._remember(known)
        return known.text

    def _add(self, text: bytes) -> _Known:
        self._last += 1
        number, size = self._last, len(text)
        reference = Reference(number, size, hashlib.sha256(text).digest())
        for base in self._likely_bases(text):
            data = difference(base.text, text) if is_like(base.text, text) else text
            if len(data) * 2 >= size:
                continue
            since = base.since + max(len(data), size // _SHORTEST_LINK)
            if since >= _WHOLE_AGAIN * base.whole:
                break
            row = Row(number, base.reference.number, reference.sha256, data)
            return _Known(reference, text, base.whole, since, (*base.rows, row))
        return _Known(reference, text, size, 0, (Row(number, None, reference.sha256, text),))

    def _likely_bases(self, text: bytes) -> list[_Known]:
        """Return the texts in memory that a text may have grown from, the likeliest first."""
        size = len(text)
        found = [each for each in self._recent if size // 4 < each.reference.size < size * 4]
        found.sort(key=lambda each: -common_start(each.text, text))
        return found[:_TRIES]

    def _rebuild(self, reference: Reference, chain: Callable[[int], Iterable[Row]]) -> _Known:
        """Return a text put together from its rows, or from those since a text in memory."""
        number: int | None = reference.number
        links: list[bytes] = []
        base: _Known | None = None
        for row in chain(reference.number):
            if row.number != number or (row.base or 0) >= number:
                raise ValueCorruptError(reference.number, f"row {row.number} is not of its chain")
            links.append(row.data)
            number = row.base
            base = None if number is None else self._find(number)
            if number is None or base is not None:
                break
        if number is not None and base is None:
            raise ValueCorruptError(reference.number, f"row {number}, which it needs, is missing")
        whole = links.pop() if base is None else base.text
        links.reverse()
        try:
            text = apply(whole, links, MAX_BYTES)
        except ValueError as error:
            raise ValueCorruptError(reference.number, f"{error}") from error
        if hashlib.sha256(text).digest() != reference.sha256:
            raise ValueCorruptError(reference.number, "its bytes do not have its digest")
        since = sum(max(len(each), len(text) // _SHORTEST_LINK) for each in links)
        if base is None:
            return _Known(reference, text, len(whole), since, ())
        return _Known(reference, text, base.whole, base.since + since, base.rows)

    def _find(self, number: int) -> _Known | None:
        return next((each for each in self._recent if each.reference.number == number), None)

    def _remember(self, known: _Known) -> None:
        others = [each for each in self._recent if each is not known]
        self._recent, room = [], _RECENT_BYTES
        for each in [known, *others][:_RECENT]:
            if len(each.text) <= room:
                room -= len(each.text)
                self._recent.append(each)
