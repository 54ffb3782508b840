"""What is printed: lines, tables and JSON, for a terminal or for another program.

In a terminal a table has a heading, colours and relative times. Elsewhere it is one line per item,
columns parted by tabs and times as ISO 8601, for ``grep``, ``cut`` and ``sort``.
"""

from __future__ import annotations

import json
import math
import os
import sys
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from maestro_hive.cli.words import ago, in_one_line, printable, printable_json
from maestro_hive.kernel.errors import CodecError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from rich.table import Table
    from rich.text import Text

#: Between two columns.
_GAP = 2
#: No column has to be wider than this; longer words, such as ids, are folded.
_LONGEST_WORD = 12


class Styled(NamedTuple):
    """A text, and how rich shows it where there are colours: ``Styled("open", "red")``."""

    text: str
    style: str


Cell = str | int | float | datetime | Styled | None


def line(text: str = "") -> None:
    """Print a line of text; a text of several lines is printed as such."""
    click.echo(printable(text))


def note(text: str) -> None:
    """Say something beside the answer, on stderr and dim."""
    click.secho(printable(text), dim=True, err=True, color=_colour(sys.stderr.isatty()))


def heading(text: str) -> None:
    """Print the heading of a part."""
    click.secho(printable(text), bold=True, color=_colour(is_terminal()))


def as_json(value: Any) -> None:
    """Print JSON; moments as ISO 8601."""
    click.echo(to_json(value, indent=2))


def to_json(value: Any, indent: int | None = None) -> str:
    """Return a value as JSON that cannot command a terminal.

    What JSON has no form for stands in it in the form it is stored in.
    """
    try:
        text = json.dumps(
            value, indent=indent, ensure_ascii=False, allow_nan=False, default=_stored
        )
    except (TypeError, ValueError):  # a key that is no text, or a number that is none
        text = json.dumps(_plain(value), indent=indent, ensure_ascii=False)
    return printable_json(text)


def table(columns: Sequence[str], rows: Iterable[Sequence[Cell]], *, empty: str = "") -> None:
    """Print rows under their columns; ``empty`` is said, beside the answer, if there are none."""
    found = list(rows)
    if not found:
        if empty:
            note(empty)
    elif is_terminal():
        _rich_table(columns, found)
    else:
        click.echo("\n".join("\t".join(map(_in_a_pipe, row)) for row in found))


def is_terminal() -> bool:
    """Return whether a person looks at stdout."""
    return sys.stdout.isatty()


def _rich_table(columns: Sequence[str], rows: list[Sequence[Cell]]) -> None:
    from rich.console import Console  # noqa: PLC0415 - slow to import, and for terminals only

    now = datetime.now(UTC)
    cells = [[_in_a_terminal(cell, now) for cell in row] for row in rows]
    coloured = "auto" if _colour(terminal=True) else None
    console = Console(color_system=coloured, highlight=False, emoji=False)  # type: ignore[arg-type]
    widths = _widths(columns, cells, console.width)
    if widths is None:
        console.print(_blocks(columns, cells))
        return
    from rich.table import Table  # noqa: PLC0415 - as above

    shown = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style="bold")
    for number, (column, width) in enumerate(zip(columns, widths, strict=True)):
        right = all(isinstance(row[number], int | float | None) for row in rows)
        justify = "right" if right else "left"
        shown.add_column(column, width=width, justify=justify, overflow="fold")  # type: ignore[arg-type]
    for row in cells:
        shown.add_row(*row)
    console.print(shown)


def _widths(columns: Sequence[str], rows: list[list[Text]], most: int) -> list[int] | None:
    """Return how wide each column is, so that words stay whole; None if there is no room for that.

    The widest give way first.
    """
    from rich.text import Text  # noqa: PLC0415 - as above

    room = most - _GAP * (len(columns) - 1)
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
    from rich.table import Table  # noqa: PLC0415 - as above

    shown = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), show_header=False)
    shown.add_column(style="bold", no_wrap=True)
    shown.add_column(overflow="fold")
    for row in rows:
        if shown.row_count:
            shown.add_row()
        for column, cell in zip(columns, row, strict=True):
            if cell:
                shown.add_row(column, cell)
    return shown


def _in_a_terminal(cell: Cell, now: datetime) -> Text:
    from rich.text import Text  # noqa: PLC0415 - as above

    match cell:
        case None:
            return Text("")
        case Styled():
            return Text(in_one_line(cell.text), style=cell.style)
        case datetime():
            return Text(ago(cell, now))
        case float():
            return Text(f"{cell:.3g}")
        case _:
            return Text(in_one_line(str(cell)))


def _in_a_pipe(cell: Cell) -> str:
    match cell:
        case None:
            return ""
        case Styled():
            return in_one_line(cell.text)
        case datetime():
            return cell.isoformat()
        case _:
            return in_one_line(str(cell))


def _stored(value: object) -> object:
    """Return a value that JSON does not know as plain JSON."""
    from maestro_hive.maestro.state import codec  # noqa: PLC0415 - for what users' steps returned

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


def colours_are_welcome() -> bool:
    """Return whether a terminal may be sent escapes: it knows them, and nobody minds."""
    return not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def _colour(terminal: bool) -> bool:
    return terminal and colours_are_welcome()
