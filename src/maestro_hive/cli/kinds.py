"""Kinds of arguments that click does not know."""

from __future__ import annotations

import re

import click

_SECONDS = {"": 1, "s": 1, "m": 60, "min": 60, "h": 3600, "d": 86_400, "w": 604_800}
_DURATION = re.compile(r"(\d{1,12}(?:\.\d{1,6})?)\s*(s|m|min|h|d|w|)")
_LONGEST = 1000 * 366 * 86_400


def duration(text: str) -> float:
    """Read a duration as seconds: ``90``, ``10m``, ``2h``, ``30d``, ``4w``."""
    found = _DURATION.fullmatch(text.strip())
    seconds = float(found[1]) * _SECONDS[found[2]] if found else 0.0
    if not 0 < seconds <= _LONGEST:
        raise click.BadParameter(f"{text!r} is no duration such as 90, 10m, 2h or 30d.")
    return seconds
