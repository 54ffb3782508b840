"""The matrix as text."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from faults.registry import Outcome, Row

_HEADS = ("row", "promise", "what was run", "target", "measured", "verdict")
_WIDTHS = (3, 26, 32, 22, 44, 8)


def show(done: list[tuple[Row, Outcome, float]], title: str) -> str:
    """Return the table of what was run, what it found, and what could not be run."""
    lines = [title, "", _line(_HEADS)[0], _rule()]
    for row, outcome, seconds in done:
        cells = (
            str(row.number),
            row.promise,
            "; ".join([*outcome.ran, f"{seconds:.0f} s"]),
            row.target,
            "; ".join(outcome.measured) or "-",
            outcome.verdict,
        )
        lines += [*_line(cells), _rule()]
    for row, outcome, _ in done:
        lines += [f"row {row.number}: not run: {reason}" for reason in outcome.not_run]
        lines += [f"row {row.number}: MISSED: {failure}" for failure in outcome.failures]
        if outcome.failed > len(outcome.failures):
            lines.append(f"row {row.number}: and {outcome.failed - len(outcome.failures)} more")
    return "\n".join(lines)


def _line(cells: tuple[str, ...]) -> list[str]:
    wrapped = [
        textwrap.wrap(cell, width) or [""] for cell, width in zip(cells, _WIDTHS, strict=True)
    ]
    height = max(len(cell) for cell in wrapped)
    return [
        " | ".join(
            (cell[at] if at < len(cell) else "").ljust(width)
            for cell, width in zip(wrapped, _WIDTHS, strict=True)
        ).rstrip()
        for at in range(height)
    ]


def _rule() -> str:
    return "-+-".join("-" * width for width in _WIDTHS)
