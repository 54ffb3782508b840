"""The table of a team run, as lines of a terminal: by level, and below it how far the run has come."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import click

from maestro_hive.admin.teams import WAITING
from maestro_hive.cli import output
from maestro_hive.cli.team_progress import RUNNING, UNSUCCESSFUL

if TYPE_CHECKING:
    from collections.abc import Callable

    from maestro_hive.cli.team_progress import Progress, Row

_COLUMNS = ("level", "task", "status", "worker", "attempt", "elapsed", "tokens", "title")
#: Those that are numbers, and stand to the right.
_RIGHT = frozenset({"level", "worker", "attempt", "elapsed", "tokens"})
#: The columns that a narrow terminal does not have, the first ones first.
_SPARED = ("tokens", "level", "worker", "attempt", "title", "elapsed")
#: No id and no title needs more.
_LONGEST = {"task": 24, "title": 60}
#: How much room the last column needs, to be there.
_LEAST_TITLE = 8
_LONGEST_BAR, _SHORTEST_BAR = 30, 6
#: The table has at most this part of the screen: above it are the lines of what has ended.
_PART = 2 / 3
#: A smaller terminal has the last line alone.
_LEAST_LINES, _LEAST_COLUMNS = 5, 12
#: The colours of statuses that are not those of a step.
_STYLES = {"complete": "green", "over budget": "red", "blocked": "magenta", "parked": "yellow"}


class Look(NamedTuple):
    """How the table is drawn: the size of the terminal, and what it can show."""

    columns: int
    lines: int
    colours: bool = False
    unicode: bool = True


def table_lines(
    progress: Progress, look: Look, now: float, worker_of: Callable[[str], int], note: str = ""
) -> list[str]:
    """Return the lines that show a run: none is wider than the terminal, nor are there too many."""
    room = max(0, int(look.lines * _PART) - 3)
    rows = progress.chosen(room)
    has_room = look.lines >= _LEAST_LINES and look.columns >= _LEAST_COLUMNS
    lines = _table(rows, look, now, worker_of) if rows and has_room else []
    if lines and (rest := _left_out(progress, rows)):
        lines.append(_cut(rest, look.columns - 1))
    return [*lines, _bar_line(progress, look, now, note)]


def _left_out(progress: Progress, rows: list[Row]) -> str:
    """Return what there is no room for, in words."""
    counts = progress.counts()
    for row in rows:
        counts[row.status] -= 1
    left = [f"{count:,} {status.replace('_', ' ')}" for status, count in counts.items() if count]
    return f"… and {', '.join(left)}" if left else ""


# --- rows -----------------------------------------------------------------------------------------


def _table(rows: list[Row], look: Look, now: float, worker_of: Callable[[str], int]) -> list[str]:
    cells = [_cells(row, now, worker_of(row.id)) for row in rows]
    widths = {
        name: min(
            _LONGEST.get(name, look.columns),
            max(len(name), *(output.cell_width(row[name]) for row in cells)),
        )
        for name in _COLUMNS
    }
    _fit(widths, look.columns - 1)
    heading = _line({name: name for name in widths}, widths)
    lines = [click.style(heading, bold=True) if look.colours else heading]
    for row, shown in zip(rows, cells, strict=True):
        style = _STYLES.get(row.status) or output.status(row.status).style
        lines.append(_line(shown, widths, style if look.colours else ""))
    return lines


def _cells(row: Row, now: float, worker: int) -> dict[str, str]:
    elapsed = row.elapsed(now)
    whole = row.status == RUNNING  # or the line would change all the time
    return {
        "level": str(row.level),
        "task": output.in_one_line(row.id),
        "status": row.status.replace("_", " "),
        "worker": str(worker or ""),
        "attempt": str(row.attempt or ""),
        "elapsed": "" if elapsed is None else _elapsed(elapsed, whole=whole),
        "tokens": f"{row.tokens:,}" if row.tokens else "",
        "title": output.in_one_line(row.title),
    }


def _elapsed(seconds: float, *, whole: bool) -> str:
    return output.duration(int(seconds)) if whole else output.took(seconds)


def _fit(widths: dict[str, int], room: int) -> None:
    """Remove the columns that can be spared, and narrow the last ones, until the rest fits."""

    def excess() -> int:
        return sum(widths.values()) + output.GAP * (len(widths) - 1) - room

    title = widths["title"]
    widths["title"] = min(title, _LEAST_TITLE)
    for name in _SPARED:
        if excess() <= 0:
            break
        del widths[name]
    if "title" in widths:
        widths["title"] = min(title, widths["title"] + max(0, -excess()))
    for name in ("task", "status"):
        widths[name] = max(1, widths[name] - max(0, excess()))


def _line(cells: dict[str, str], widths: dict[str, int], style: str = "") -> str:
    parts = []
    for name, width in widths.items():
        text = _cut(cells[name], width)
        pad = " " * (width - output.cell_width(text))
        text = pad + text if name in _RIGHT else text + pad
        parts.append(click.style(text, fg=style) if style and name == "status" else text)
    return (" " * output.GAP).join(parts).rstrip()


def _cut(text: str, width: int) -> str:
    """Return a text of at most so many columns of a terminal."""
    if output.cell_width(text) <= width:
        return text
    while text and output.cell_width(text) > width - 1:
        text = text[:-1]
    return f"{text}…" if width > 0 else ""


# --- how far it has come --------------------------------------------------------------------------


def _bar_line(progress: Progress, look: Look, now: float, note: str) -> str:
    """Return the feature, a bar, how many tasks are complete, and the time left; as far as it fits."""
    counts = progress.counts()
    waiting = counts.get(WAITING, 0)
    failed = sum(counts.get(each, 0) for each in UNSUCCESSFUL)
    facts = [
        note or None,
        f"{progress.complete_tasks:,}/{progress.total:,} tasks",
        None if note else _time_left(progress, now),
        f"{counts[RUNNING]:,} running" if RUNNING in counts else None,
        f"{waiting:,} {'waits' if waiting == 1 else 'wait'} for an answer" if waiting else None,
        f"{failed:,} failed" if failed else None,
        f"{progress.tokens:,} tokens" if progress.tokens else None,
    ]
    room = look.columns - 1
    told = [each for each in facts if each is not None]
    while len(told) > 1 and len(", ".join(told)) > room:
        told.pop()
    text = _cut(", ".join(told), room)
    room -= output.cell_width(text) + 1
    if room < _SHORTEST_BAR:
        return text
    bar = _bar(progress.part(), min(_LONGEST_BAR, room), look)
    feature = output.in_one_line(progress.feature)
    room -= min(_LONGEST_BAR, room) + 1
    return f"{feature} {bar} {text}" if output.cell_width(feature) <= room else f"{bar} {text}"


def _time_left(progress: Progress, now: float) -> str | None:
    """Return how long the rest takes, in words; None if that is unknown."""
    left = progress.seconds_left(now)
    if left is None:
        return None
    late = progress.late(now)
    if not late:
        return f"about {output.duration(left)} left"
    if left >= 1:
        return f"at least {output.duration(left)} left"
    # Where the graph says nothing, other tasks were the measure, and that is no estimate of anyone.
    return "longer than estimated" if any(row.is_estimated for row in late) else None


def _bar(part: float, width: int, look: Look) -> str:
    full, empty = ("█", "░") if look.unicode else ("#", "-")
    count = int(part * width + 1e-9)
    bar = full * count
    return (click.style(bar, fg="green") if look.colours and bar else bar) + empty * (width - count)
