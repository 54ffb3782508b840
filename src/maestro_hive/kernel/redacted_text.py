"""Text that comes in pieces, with secrets replaced: also those that are in two pieces."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

#: What no key has in it: a blank, or another letter than those of keys.
_BETWEEN_WORDS = re.compile(r"[\s\u0080-\U0010ffff]")
#: A frame, as of a private key, and its end.
_FRAME, _FRAME_END = "-----BEGIN", re.compile(r"-----END[^\n-]{0,60}-----")
#: How much is held back at most, and how much of a line that was released is looked at with what follows.
_MOST_HELD = 65_536
_MOST_BEFORE = 4_096


class RedactedText:
    """One text in pieces: a word is held back until its end is known, a framed key until its frame is.

    Each word is redacted together with its line before it, where the name of a setting may be.
    """

    def __init__(self, redact: Callable[[str], str]) -> None:
        self._redact = redact
        self._held = ""
        #: What was released of the line, and how that was shown.
        self._line = self._shown = ""

    @property
    def held(self) -> int:
        """How many characters are held back."""
        return len(self._held)

    def add(self, piece: str) -> int:
        """Add a piece; return how many of the characters that are held back may be released."""
        self._held += piece
        held = self._held
        end = _last_break(held, len(held))
        opened = held.rfind(_FRAME, 0, end)
        if opened >= 0 and not _FRAME_END.search(held, opened, end):
            end = _last_break(held, opened)
        return len(held) if len(held) - end > _MOST_HELD else end

    def release(self, count: int | None = None) -> str:
        """Return so many characters of what is held back, or all of it, without secrets."""
        count = len(self._held) if count is None else count
        raw, self._held = self._held[:count], self._held[count:]
        line = self._line + raw
        shown = self._redact(line)
        released = shown[_equal(shown, self._shown) :]
        last = line[line.rfind("\n") + 1 :]
        if last != line or len(last) > _MOST_BEFORE:
            line = last[-_MOST_BEFORE:]
            shown = self._redact(line)
        self._line, self._shown = line, shown
        return released


def _last_break(text: str, end: int) -> int:
    """Return the last place before ``end`` at which a word has ended; 0 if there is none."""
    while end and not _BETWEEN_WORDS.match(text[end - 1]):
        end -= 1
    return end


def _equal(one: str, other: str) -> int:
    """Return how many characters two texts start with that are the same."""
    if one.startswith(other):
        return len(other)
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (left, right) in pairs if left != right), len(one))
