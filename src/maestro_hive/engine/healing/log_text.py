"""Reads failures out of a log: its tracebacks, and the errors that it has no traceback of."""

from __future__ import annotations

import re
from datetime import datetime

from maestro_hive.engine.healing.pytest_text import Found

_HEAD = "Traceback (most recent call last):"
_FRAME = re.compile(r"\s*File \"(?P<path>.+)\", line (?P<line>\d{1,9})(?:, in (?P<function>.+))?$")
_RAISED = re.compile(r"(?P<error>[A-Za-z_][\w.]*)(?:: (?P<message>.*))?$")
_LEVEL = re.compile(r"\b(?:ERROR|CRITICAL|FATAL)\b[\s:\]|-]*(?P<message>.*)$")
_TIME = re.compile(r"\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d(?:[.,]\d{1,6})?(?:Z|[+-]\d\d:?\d\d)?")
_CHAINED = ("The above exception", "During handling of the above exception")


def failures_in(text: str, since: datetime | None) -> list[Found]:
    """Return the failures in a log; those before ``since``, by the time of their line, are left out."""
    lines = text.splitlines()
    found: list[Found] = []
    at, time = 0, None
    while at < len(lines):
        line = lines[at]
        time = _time(line) or time
        start = line.find(_HEAD)
        error = _LEVEL.search(line)
        if start >= 0:
            made, at = _traceback(lines, at, start)
        elif error is not None and not _is_followed_by_traceback(lines, at):
            made, at = Found(None, error["message"] or line.strip(), context={"log": line}), at + 1
        else:
            made, at = None, at + 1
        if made is not None and not (since and time and time < since):
            found.append(made)
    return found


def _time(line: str) -> datetime | None:
    match = _TIME.search(line)
    if match is None:
        return None
    try:
        return datetime.fromisoformat(match[0].replace(",", ".")).astimezone()
    except ValueError:
        return None


def _is_followed_by_traceback(lines: list[str], at: int) -> bool:
    return at + 1 < len(lines) and lines[at + 1].lstrip().startswith(_HEAD)


def _traceback(lines: list[str], at: int, margin: int) -> tuple[Found | None, int]:
    """Return the failure whose traceback starts at a line, and the line after it.

    Of errors that were raised from one another the last one counts.
    """
    first = at
    raised: re.Match[str] | None = None
    more: list[str] = []
    at += 1
    while at < len(lines):
        line = lines[at][margin:] if lines[at][:margin].strip() == "" else lines[at]
        if line.startswith((" ", "\t")):
            at += 1
            continue
        if raised is None:
            raised = _RAISED.match(line)
            if raised is None:
                break  # not Python's
            at += 1
            continue
        if _is_chained(lines, at):
            raised, more = None, []
            at = next(n for n in range(at, len(lines)) if _HEAD in lines[n]) + 1
            continue
        if not line or _time(line) or _LEVEL.search(line) or _HEAD in line:
            break
        more.append(line)  # a message of several lines
        at += 1
    if raised is None:
        return None, max(at, first + 1)
    block = "\n".join(lines[first:at])
    path, number, function = last_place(block)
    message = "\n".join([raised["message"] or raised["error"], *more])
    return Found(raised["error"], message, block, path, number, function), at


def _is_chained(lines: list[str], at: int) -> bool:
    """Return whether the next text is that another error was raised from this one."""
    text = next((line for line in lines[at : at + 2] if line.strip()), "").strip()
    follows = any(_HEAD in line for line in lines[at : at + 5])
    return text.startswith(_CHAINED) and follows


def last_place(trace: str) -> tuple[str | None, int | None, str | None]:
    """Return the last file, line and function that a traceback names."""
    places = [match for line in trace.splitlines() if (match := _FRAME.match(line))]
    if not places:
        return None, None, None
    last = places[-1]
    return last["path"], int(last["line"]), last["function"]
