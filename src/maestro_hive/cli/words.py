"""Times, sizes and foreign text, as people read them."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from datetime import datetime

_MINUTE, _HOUR, _DAY = 60, 3600, 86_400

#: What could move the cursor, change colours or reverse the direction of writing.
_UNPRINTABLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\u2028\u2029]"
)


def printable(text: str) -> str:
    """Return a text that cannot command a terminal: what would is shown as its number.

    What a run stores comes from models and from other programs; line ends and tabs stay.
    """
    return _UNPRINTABLE.sub(_as_number, text)


def printable_json(text: str) -> str:
    """Return JSON that means the same and cannot command a terminal."""
    return _UNPRINTABLE.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def in_one_line(text: str) -> str:
    r"""Return a printable text without line ends and tabs: they are shown as ``\n`` and ``\t``."""
    one = text.replace("\\", "\\\\") if "\n" in text or "\t" in text else text
    return printable(one.replace("\n", "\\n").replace("\t", "\\t"))


def _as_number(found: re.Match[str]) -> str:
    code = ord(found[0])
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


def duration(seconds: float) -> str:
    """Return a duration in its largest unit or two: ``45 s``, ``3 min 5 s``, ``2 h``."""
    whole = round(seconds)
    if whole < _MINUTE:
        return f"{whole} s"
    if whole < 10 * _MINUTE and whole % _MINUTE:
        return f"{whole // _MINUTE} min {whole % _MINUTE} s"
    if whole < _HOUR:
        return f"{whole // _MINUTE} min"
    if whole < _DAY:
        hours, minutes = whole // _HOUR, whole % _HOUR // _MINUTE
        return f"{hours} h {minutes} min" if minutes else f"{hours} h"
    days, hours = whole // _DAY, whole % _DAY // _HOUR
    return f"{days} d {hours} h" if hours and days < 10 else f"{days} d"


def ago(moment: datetime, now: datetime) -> str:
    """Return how long ago something was; ``in 5 s`` for what is still to come."""
    seconds = (now - moment).total_seconds()
    if seconds < 0:
        return f"in {_roughly(-seconds)}"
    return "now" if seconds < 1 else f"{_roughly(seconds)} ago"


def _roughly(seconds: float) -> str:
    number, unit, *_ = duration(seconds).split()
    return f"{number} {unit}"


def size(count: int) -> str:
    """Return a number of bytes: ``812 B``, ``4.2 MB``."""
    if count < 1000:
        return f"{count} B"
    for unit, bytes_each in (("kB", 1e3), ("MB", 1e6)):
        if count < 999.5 * bytes_each:
            return f"{count / bytes_each:.3g} {unit}"
    return f"{count / 1e9:.1f} GB"


def many(count: int, one: str, more: str | None = None) -> str:
    """Return a number with its noun: ``1 run``, ``3 runs``."""
    return f"{count:,} {one if count == 1 else more or one + 's'}"
