"""Texts as ticket systems accept them: their characters, their length, and their parts."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Callable

_CUT = "\n\n[… shortened; the journal has the whole text …]\n\n"
_FENCE = "```"
#: No system displays these, and some refuse them.
_CONTROL = re.compile(r"[\x00-\x08\x0e-\x1b\x1f\x7f-\x84\x86-\x9f\ufffe\uffff]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Lines of a text that belong together; ``list`` has its items without their dashes."""

    kind: Literal["paragraph", "list", "code"]
    lines: tuple[str, ...]


def clean(text: str) -> str:
    r"""Return a text with ``\n`` between its lines, and without characters that cannot be sent."""
    sendable = text.encode("utf-8", "replace").decode("utf-8")
    return "\n".join(_CONTROL.sub("", line) for line in sendable.splitlines())


def one_line(text: str, limit: int) -> str:
    """Return a text as one line of at most ``limit`` characters."""
    line = " ".join(clean(text).split())
    return line if length(line) <= limit else _head(line, limit - 1) + "…"


def length(text: str) -> int:
    """Return how many characters a text has as Java and JavaScript count them."""
    return len(text.encode("utf-16-le")) // 2


def _head(text: str, limit: int) -> str:
    return text.encode("utf-16-le")[: 2 * limit].decode("utf-16-le", "ignore")


def fitting(text: str, limit: int, size: Callable[[str], int] = length) -> str:
    """Return the text, shortened in its middle until ``size`` of it is at most ``limit``.

    The end is preserved, because it says what to do; the start says what happened.
    """
    shown, count = text, len(text)
    if count > limit:
        shown, count = _without_middle(text, limit), limit
    while count > 0 and (measured := size(shown)) > limit:
        count = min(count * limit // measured, count - 1)
        shown = _without_middle(text, count)
    return shown


def _without_middle(text: str, count: int) -> str:
    tail = count // 3
    return text[: count - tail] + _CUT + (text[-tail:] if tail else "")


def blocks(text: str) -> list[Block]:
    """Return the parts of a text: paragraphs, lists of lines that start with a dash, and code."""
    found: list[Block] = []
    kind: Literal["paragraph", "list", "code"] | None = None
    lines: list[str] = []

    def end() -> None:
        if kind is not None and lines:
            found.append(Block(kind=kind, lines=tuple(lines)))
        lines.clear()

    for line in clean(text).split("\n"):
        if line.strip().startswith(_FENCE):
            end()
            kind = None if kind == "code" else "code"
        elif kind == "code":
            lines.append(line)
        elif not line.strip():
            end()
            kind = None
        else:
            wanted: Literal["paragraph", "list"]
            wanted = "list" if line.startswith("- ") else "paragraph"
            if kind != wanted:
                end()
                kind = wanted
            lines.append(line[2:] if wanted == "list" else line)
    end()
    return found
