"""A line of the table, and how its figures are written."""

from __future__ import annotations

from typing import NamedTuple


class Row(NamedTuple):
    """One line of the table; ``reached`` is None where there is no target."""

    what: str
    figure: str
    ratio: str = ""
    target: str = ""
    reached: bool | None = None


def rate(per_second: float) -> str:
    """Write how often something happens."""
    return f"{per_second:,.0f} /s"


def milliseconds(seconds: float) -> str:
    """Write how long something takes."""
    return f"{seconds * 1000:.2f} ms" if seconds < 0.01 else f"{seconds * 1000:.0f} ms"


def microseconds(seconds: float) -> str:
    """Write how long something short takes."""
    return f"{seconds * 1e6:.2f} us"


def short_time(seconds: float) -> str:
    """Write a time in the unit that suits it."""
    return f"{seconds * 1e6:,.1f} us" if seconds < 0.001 else f"{seconds * 1000:.2f} ms"
