"""Types that hold no other values, one line each: how they are written and made again."""

from __future__ import annotations

from base64 import b64encode
from datetime import date, timedelta, timezone
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple
from uuid import UUID

if TYPE_CHECKING:
    from collections.abc import Callable


class Leaf(NamedTuple):
    """A type that holds no other values."""

    kind: type
    tag: str
    write: Callable[[Any], Any]
    #: The type that msgspec makes of what was written, or refuses it.
    shape: Any
    make: Callable[[Any], Any]


def base64_of(value: Any) -> str:
    """Return bytes as Base64."""
    return b64encode(value).decode()


def timezone_arguments(value: timezone) -> list[Any]:
    """Return days, seconds, microseconds, and the name if the zone has one of its own."""
    offset, *name = value.__getinitargs__()  # type: ignore[attr-defined]
    return [offset.days, offset.seconds, offset.microseconds, *name]


_THREE = tuple[int, int, int]
LEAVES = (
    Leaf(float, "float", repr, Literal["nan", "inf", "-inf"], float),
    Leaf(range, "range", lambda v: [v.start, v.stop, v.step], _THREE, lambda v: range(*v)),
    Leaf(bytes, "bytes", base64_of, bytes, bytes),
    Leaf(bytearray, "bytearray", base64_of, bytearray, lambda v: v),
    Leaf(date, "date", date.isoformat, str, date.fromisoformat),
    Leaf(
        timedelta,
        "timedelta",
        lambda v: [v.days, v.seconds, v.microseconds],
        _THREE,
        lambda v: timedelta(*v),
    ),
    Leaf(
        timezone,
        "timezone",
        timezone_arguments,
        list[int | str],
        lambda v: timezone(timedelta(*v[:3]), *v[3:]),
    ),
    Leaf(Decimal, "decimal", str, str, Decimal),
    Leaf(
        Fraction,
        "fraction",
        lambda v: [v.numerator, v.denominator],
        tuple[int, int],
        lambda v: Fraction(*v),
    ),
    Leaf(UUID, "uuid", str, str, UUID),
    Leaf(type(Path()), "path", str, str, Path),
)
