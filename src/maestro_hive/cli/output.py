"""What is printed: lines, tables and JSON, for a terminal or for another program.

In a terminal a table has a heading, colours and relative times. Elsewhere it is one line per item,
columns separated by tabs and times as ISO 8601, for ``grep``, ``cut`` and ``sort``. Text of runs is
made harmless: it cannot control a terminal, and its secrets are replaced, unless ``--with-values`` is
given.
"""

from __future__ import annotations

import json
import math
import os
import re
import sys
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import click

from maestro_hive.kernel.errors import CodecError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

#: Between two columns.
GAP = 2
#: No column has to be wider than this; longer words, such as ids, are folded.
_LONGEST_WORD = 12

#: The colours of statuses.
_STATUS_STYLES = {
    "running": "cyan",
    "waiting": "yellow",
    "retrying": "yellow",
    "half_open": "yellow",
    "success": "green",
    "recovered": "green",
    "closed": "green",
    "failed": "red",
    "bankrupt": "red",
    "help_needed": "red",
    "interrupted": "red",
    "open": "red",
    "not_passed": "yellow",
    "stopped": "magenta",
}


class Styled(NamedTuple):
    """A text, and how rich shows it where there are colours: ``Styled("open", "red")``."""

    text: str
    style: str


Cell = str | int | datetime | Styled | None


def line(text: str = "") -> None:
    """Print a line of text; a text of several lines is printed as such."""
    click.echo(printable(text))


def note(text: str) -> None:
    """Print a note on stderr, dim."""
    with suppress(OSError):  # as of a terminal that was closed: there is nobody to tell
        click.secho(printable(text), dim=True, err=True, color=_colour(sys.stderr.isatty()))


def complain(sentence: str) -> None:
    """Print an error on stderr, in one line."""
    with suppress(OSError):  # as above
        click.echo(f"maestro: {printable(sentence)}", err=True)


def end_typed_line() -> None:
    """End the line of a terminal on which it wrote ^C."""
    if sys.stderr.isatty():
        with suppress(OSError):
            click.echo(err=True)


def heading(text: str) -> None:
    """Print the heading of a part."""
    click.secho(printable(text), bold=True, color=_colour(is_terminal()))


def to_json(value: object, indent: int | None = None) -> str:
    """Return a value as JSON that cannot control a terminal, without secrets; times as ISO 8601.

    What JSON has no form for is written in the form in which it is stored.
    """
    value = without_secrets(value)
    try:
        text = json.dumps(
            value,
            indent=indent,
            ensure_ascii=False,
            allow_nan=False,
            default=lambda each: without_secrets(_stored(each)),
        )
    except (TypeError, ValueError):  # a key that is not text, or NaN
        text = json.dumps(without_secrets(_plain(value)), indent=indent, ensure_ascii=False)
    return _UNPRINTABLE.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def table(columns: Sequence[str], rows: Iterable[Sequence[Cell]], *, empty: str = "") -> None:
    """Print rows under their columns; if there are none, the note ``empty``."""
    found = list(rows)
    if not found:
        if empty:
            note(empty)
    elif is_terminal():
        _rich_table(columns, found)
    else:
        is_safe = _have_no_secrets(found)
        lines = ("\t".join([shown(cell, is_safe=is_safe) for cell in row]) for row in found)
        click.echo("\n".join(lines))


def is_terminal() -> bool:
    """Return whether stdout is a terminal."""
    return sys.stdout.isatty()


def status(text: str) -> Styled:
    """Return a status in its colour."""
    return Styled(text.replace("_", " "), _STATUS_STYLES.get(text, ""))


def moment(when: datetime) -> str:
    """Return a time: relative in a terminal, as ISO 8601 elsewhere."""
    return ago(when, datetime.now(UTC)) if is_terminal() else when.isoformat()


def took(seconds: float) -> str:
    """Return how long something took: ``12 ms``, ``3.1 s``, ``3 min 5 s``."""
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    return f"{seconds:.1f} s" if seconds < 10 else duration(seconds)


def shortened(text: str | None, most: int) -> str | None:
    """Return a text of at most so many characters, cut after its secrets were replaced."""
    text = text and redacted(text)
    return text if text is None or len(text) <= most else f"{text[: most - 1]}…"


def console() -> Console:
    """Return the terminal, for what rich shows."""
    from rich.console import Console

    coloured = "auto" if _colour(terminal=True) else None
    return Console(color_system=coloured, highlight=False, emoji=False)  # type: ignore[arg-type]


def short_table(columns: Sequence[str], rows: Iterable[Sequence[Cell]]) -> Table:
    """Return a table with a line for each row: what is too long for the terminal is cut."""
    from rich.table import Table

    made = Table(box=None, pad_edge=False, padding=(0, GAP, 0, 0), header_style="bold")
    for column in columns:
        made.add_column(column, no_wrap=True, overflow="ellipsis")
    for row in rows:
        made.add_row(*map(_text, row))
    return made


def _text(cell: Cell, *, is_safe: bool = False) -> Text:
    from rich.text import Text

    return Text(shown(cell, is_safe=is_safe), cell.style if isinstance(cell, Styled) else "")


def _rich_table(columns: Sequence[str], rows: list[Sequence[Cell]]) -> None:
    is_safe = _have_no_secrets(rows)
    cells = [[_text(cell, is_safe=is_safe) for cell in row] for row in rows]
    terminal = console()
    widths = _widths(columns, cells, terminal.width)
    if widths is None:
        terminal.print(_blocks(columns, cells))
        return
    from rich.table import Table

    made = Table(box=None, pad_edge=False, padding=(0, GAP, 0, 0), header_style="bold")
    for number, (column, width) in enumerate(zip(columns, widths, strict=True)):
        right = all(isinstance(row[number], int | None) for row in rows)
        justify = "right" if right else "left"
        made.add_column(column, width=width, justify=justify, overflow="fold")  # type: ignore[arg-type]
    for row in cells:
        made.add_row(*row)
    terminal.print(made)


def _widths(columns: Sequence[str], rows: list[list[Text]], most: int) -> list[int] | None:
    """Return the width of each column, so that no word is broken; None if there is no room.

    The widest columns are narrowed first.
    """
    from rich.text import Text

    room = most - GAP * (len(columns) - 1)
    parts = list(zip(map(Text, columns), *rows, strict=True))
    widths = [min(room, max(part.cell_len for part in column)) for column in parts]
    least = [min(_LONGEST_WORD, max(map(_longest_word, column))) for column in parts]
    if sum(least) > room:
        return None
    while sum(widths) > room:
        _, widest = max((w, at) for at, w in enumerate(widths) if w > least[at])
        widths[widest] -= 1
    return widths


def _longest_word(text: Text) -> int:
    return max((word.cell_len for word in text.split(" ")), default=0)


def _blocks(columns: Sequence[str], rows: list[list[Text]]) -> Table:
    """Return rows below one another, each cell in a line of its own."""
    from rich.table import Table

    shown = Table(box=None, pad_edge=False, padding=(0, GAP, 0, 0), show_header=False)
    shown.add_column(style="bold", no_wrap=True)
    shown.add_column(overflow="fold")
    for row in rows:
        if shown.row_count:
            shown.add_row()
        for column, cell in zip(columns, row, strict=True):
            if cell:
                shown.add_row(column, cell)
    return shown


def shown(cell: Cell, *, is_safe: bool = False) -> str:
    """Return what is printed of a cell, in one line; ``is_safe``: it is known to have no secret."""
    text = _plain_text(cell)
    return _one_line(text if is_safe or isinstance(cell, datetime) else redacted(text))


def _plain_text(cell: Cell) -> str:
    match cell:
        case None:
            return ""
        case Styled():
            return cell.text
        case datetime():
            return moment(cell)
        case _:
            return str(cell)


def _have_no_secrets(rows: Sequence[Sequence[Cell]]) -> bool:
    """Return whether no cell has a secret: looking at all of them at once takes a tenth of the time."""
    text = "\n".join([_plain_text(cell) for row in rows for cell in row])
    return redacted(text) == text


def _stored(value: object) -> object:
    """Return a value that JSON does not know as plain JSON."""
    from maestro_hive.maestro.state import codec

    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    try:
        return json.loads(codec.encode(value).data)
    except CodecError:
        return str(value)


def _plain(value: object) -> object:
    match value:
        case dict():
            return {str(key): _plain(each) for key, each in value.items()}
        case list() | tuple():
            return [_plain(each) for each in value]
        case float() if not math.isfinite(value):
            return str(value)
        case None | bool() | int() | float() | str():
            return value
        case _:
            return _stored(value)


def may_use_colours() -> bool:
    """Return whether escapes may be sent to a terminal."""
    return not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def has_screen() -> bool:
    """Return whether the terminal can be drawn on again."""
    return os.environ.get("TERM") not in (None, "", "dumb", "unknown")


def _colour(terminal: bool) -> bool:
    return terminal and may_use_colours()


# --- secrets --------------------------------------------------------------------------------------

#: Where a call of ``maestro`` says that it prints values with their secrets.
_WITH_VALUES = "maestro_hive.with_values"


def keep_values(context: click.Context) -> None:
    """Print values as they are stored in this call, also secrets."""
    context.meta[_WITH_VALUES] = True


@contextmanager
def printing_values() -> Iterator[None]:
    """Print values as they are meanwhile: what a program reads must be what it was given."""
    meta = click.get_current_context().meta
    already = _WITH_VALUES in meta
    meta[_WITH_VALUES] = True
    try:
        yield
    finally:
        if not already:
            del meta[_WITH_VALUES]


def keeps_values() -> bool:
    """Return whether this call prints values as they are stored."""
    context = click.get_current_context(silent=True)
    return context is not None and _WITH_VALUES in context.meta


def redacted(text: str) -> str:
    """Return a text in which secrets are replaced, unless this call prints them."""
    from maestro_hive.kernel.redaction import redact_text

    return text if keeps_values() else redact_text(text)


def without_secrets(value: object) -> object:
    """Return a value in which secrets are replaced, unless this call prints them."""
    from maestro_hive.kernel.redaction import redact_value

    return value if keeps_values() else redact_value(value)


# --- texts, times and sizes -----------------------------------------------------------------------

_UNITS = {"d": 86_400, "h": 3600, "min": 60, "s": 1}

#: What could move the cursor, change colours or reverse the direction of writing.
_UNPRINTABLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\u2028\u2029]"
)


def printable(text: str) -> str:
    """Return a text that cannot control a terminal: what could is shown as its number.

    What a run stores comes from models and other programs; line ends and tabs stay. Secrets do not.
    """
    return _escaped(redacted(text))


def _escaped(text: str) -> str:
    return _UNPRINTABLE.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def in_one_line(text: str) -> str:
    r"""Return a printable text without line ends and tabs: they are shown as ``\n`` and ``\t``."""
    return _one_line(redacted(text))


def _one_line(text: str) -> str:
    if text.isprintable():  # as most are
        return text
    one = text.replace("\\", "\\\\") if "\n" in text or "\t" in text else text
    return _escaped(one.replace("\n", "\\n").replace("\t", "\\t"))


def cell_width(text: str) -> int:
    """Return how many columns of a terminal a text takes: of some characters, two each."""
    if text.isascii():
        return len(text)
    from rich.cells import cell_len

    return cell_len(text)


def duration(seconds: float) -> str:
    """Return a duration in its largest unit or two: ``45 s``, ``3 min 5 s``, ``2 h``."""
    whole = round(seconds)
    for (unit, length), (smaller, part) in pairwise(_UNITS.items()):
        if whole >= length:
            count, rest = whole // length, whole % length // part
            both = rest and (count < 10 or unit == "h")
            return f"{count} {unit} {rest} {smaller}" if both else f"{count} {unit}"
    return f"{whole} s"


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


def listed(names: Sequence[str], most: int) -> str:
    """Return names in a list: ``a, b and 3 more``."""
    rest = len(names) - most
    return f"{', '.join(names[:most])}{f' and {rest} more' if rest > 0 else ''}"


def many(count: int, one: str, more: str | None = None) -> str:
    """Return a number with its noun: ``1 run``, ``3 runs``."""
    return f"{count:,} {one if count == 1 else more or one + 's'}"
