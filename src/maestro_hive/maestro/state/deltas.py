"""Differences: a text as copies of parts of an older one and the little that is new.

A list of messages that grows by one is nearly the same bytes again. ``difference`` finds the
parts that can be copied; ``Pieces`` follows a chain of such differences back to whole texts
without building anything in between.
"""

from __future__ import annotations

from itertools import product
from typing import Literal, NamedTuple

from maestro_hive.maestro.state.codec import MAX_BYTES

#: Shorter runs than this are not worth a copy instruction.
_ANCHOR = 48
#: How far ahead of a difference an equal part is searched again, and how far in the older text.
_PROBES = (0, 16, 64, 256, 1024, 4096)
_WINDOWS = (1 << 12, 1 << 20)
#: How many bytes are searched in vain at most, as a multiple of the text: then the rest is new.
_EFFORT = 8
#: Blocks up to this size are compared as numbers, which shows where they differ.
_NUMBER_BYTES = 512


class Copy(NamedTuple):
    """Bytes to take from the older text."""

    start: int
    length: int


Instruction = Copy | bytes


def difference(old: bytes, new: bytes) -> list[Instruction]:
    """Return instructions that make ``new`` out of ``old``; copies never cut a character."""
    found: list[Instruction] = []
    tail = _common_suffix(old, new)
    old_end, new_end = len(old) - tail, len(new) - tail
    at_old = at_new = literal = 0
    search = _Search(old, old_end, new, new_end)
    while at_new < new_end:
        length = _same_bytes(old, at_old, new, at_new, min(old_end - at_old, new_end - at_new))
        length = _whole_characters(new, at_new, length)
        if length >= _ANCHOR or (length and at_new == literal == 0):
            _add_literal(found, new, literal, at_new)
            found.append(Copy(at_old, length))
            at_old, at_new = at_old + length, at_new + length
            literal = at_new
        found_again = search.next_equal(at_old, at_new)
        if found_again is None:
            break
        at_old, at_new = found_again
    _add_literal(found, new, literal, new_end)
    if tail:
        found.append(Copy(old_end, tail))
    return found


def size(instructions: list[Instruction]) -> int:
    """Return how long the text is that these instructions make."""
    return sum(len(step) if isinstance(step, bytes) else step.length for step in instructions)


def literal_size(instructions: list[Instruction]) -> int:
    """Return how many bytes are new."""
    return sum(len(step) for step in instructions if isinstance(step, bytes))


def _add_literal(found: list[Instruction], new: bytes, start: int, end: int) -> None:
    if end > start:
        found.append(new[start:end])


class _Search:
    """Finds where two texts are equal again, with a limited effort."""

    def __init__(self, old: bytes, old_end: int, new: bytes, new_end: int) -> None:
        self._old, self._old_end = old, old_end
        self._new, self._new_end = new, new_end
        self._left = _EFFORT * (len(new) + _WINDOWS[-1])

    def next_equal(self, at_old: int, at_new: int) -> tuple[int, int] | None:
        """Return the next positions of an equal part, trying a few distances."""
        if at_new + _ANCHOR > self._new_end:
            return None
        for window, ahead in product(_WINDOWS, _PROBES):
            end = min(self._old_end, at_old + window)
            start = self._character(at_new + ahead)
            if self._left <= 0:
                return None
            if start + _ANCHOR > self._new_end:
                continue
            found = self._old.find(self._new[start : start + _ANCHOR], at_old, end)
            if found >= 0:
                return found, start
            self._left -= end - at_old
        return None

    def _character(self, at: int) -> int:
        """Return where the next character begins."""
        while at < self._new_end and self._new[at] & 0xC0 == 0x80:
            at += 1
        return at


def _common_suffix(old: bytes, new: bytes) -> int:
    i, j = len(old), len(new)
    same = _same_bytes(old, i, new, j, min(i, j), back=True)
    while same and new[j - same] & 0xC0 == 0x80:
        same -= 1
    return same


def _same_bytes(old: bytes, i: int, new: bytes, j: int, limit: int, *, back: bool = False) -> int:
    """Return how many bytes after two places are equal, or before them, ``limit`` at most.

    They are compared by blocks that grow. Slices are copied, and still faster than views: these are
    compared item by item.
    """
    same, block = 0, 64
    order: Literal["little", "big"] = "little" if back else "big"
    while same < limit:
        size = min(block, limit - same)
        at = -same - size if back else same
        one, two = old[i + at : i + at + size], new[j + at : j + at + size]
        if one == two:
            same += size
            block = min(block * 4, 1 << 16)
        elif size <= _NUMBER_BYTES:
            different = int.from_bytes(one, order) ^ int.from_bytes(two, order)
            return same + size - (different.bit_length() + 7) // 8
        else:
            block, limit = size // 8, same + size
    return same


def _whole_characters(text: bytes, start: int, length: int) -> int:
    while length and start + length < len(text) and text[start + length] & 0xC0 == 0x80:
        length -= 1
    return length


def to_json(instructions: list[Instruction]) -> list[str | list[int]]:
    """Write copies as [start, length] and new bytes as text."""
    return [step.decode() if isinstance(step, bytes) else list(step) for step in instructions]


def from_json(written: object) -> list[Instruction]:
    """Read what ``to_json`` wrote; ValueError if it is something else.

    Copies only ever move forward, so a text is never longer than the older one and what is new: a
    small document cannot make a large value.
    """
    if not isinstance(written, list):
        raise ValueError("a difference is a list")  # noqa: TRY004 - the text is wrong, not the call
    instructions = [_instruction(step) for step in written]
    copied = 0
    for step in instructions:
        if isinstance(step, Copy):
            if step.start < copied:
                raise ValueError("a difference copies the same bytes twice")
            copied = step.start + step.length
    return instructions


def _instruction(step: object) -> Instruction:
    match step:
        case str():
            return step.encode()
        case [int(start), int(length)] if start >= 0 and length > 0:
            return Copy(start, length)
        case _:
            raise ValueError(f"not a piece of a difference: {str(step)[:40]}")


class Pieces:
    """A text that is put together from a chain of differences, newest first.

    New bytes are written to their place at once; of the rest only the missing ranges are known. So
    the cost is the number of links, not the number of links times the size.
    """

    def __init__(self, size: int) -> None:
        if size > MAX_BYTES:
            raise ValueError(f"a difference makes {size:,} bytes; the limit is {MAX_BYTES:,}")
        self._text = bytearray(size)
        self._missing = [(0, 0, size)] if size else []

    def apply(self, instructions: list[Instruction]) -> None:
        """Replace what is missing of this link by what it is made of."""
        missing: list[tuple[int, int, int]] = []
        for target, start, length in self._missing:
            filled = self._fill(instructions, target, start, start + length, missing)
            if filled != length:
                raise ValueError("a difference is shorter than the text it describes")
        self._missing = missing

    def _fill(
        self,
        instructions: list[Instruction],
        target: int,
        start: int,
        end: int,
        missing: list[tuple[int, int, int]],
    ) -> int:
        filled = at = 0
        for step in instructions:
            size = len(step) if isinstance(step, bytes) else step.length
            low, high = max(start, at), min(end, at + size)
            if low < high:
                place = target + low - start
                if isinstance(step, bytes):
                    self._text[place : place + high - low] = step[low - at : high - at]
                else:
                    missing.append((place, step.start + low - at, high - low))
                filled += high - low
            at += size
        return filled

    def finish(self, whole: bytes) -> bytes:
        """Take the missing ranges from the whole text at the end of the chain."""
        for target, start, length in self._missing:
            if start + length > len(whole):
                raise ValueError("a difference reaches beyond the text it builds on")
            self._text[target : target + length] = whole[start : start + length]
        return bytes(self._text)
