"""``maestro watch``: the runs of a state folder, or one of them, on a screen that stays up to date."""

from __future__ import annotations

import signal
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

import click

from maestro_hive.admin.events import FamilyFeed
from maestro_hive.admin.watch import RunsWatch, RunWatch, is_over
from maestro_hive.cli import output
from maestro_hive.cli.command import run_ids, verb
from maestro_hive.cli.events import event_line
from maestro_hive.cli.show import (
    CHILD_COLUMNS,
    STEP_COLUMNS,
    child_row,
    generations,
    hidden_children,
    holder_text,
    next_actions,
    queue_text,
    run_row,
    step_row,
)
from maestro_hive.maestro.state.views import COMPLETED, OVER

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from rich.console import Console, Group, RenderableType

    from maestro_hive.admin.runs import RunSummary
    from maestro_hive.admin.watch import Overview
    from maestro_hive.cli.command import Call
    from maestro_hive.maestro.state.run_view import RunView, StepView
    from maestro_hive.maestro.state.store import Reader

#: How often the journal is read, in seconds, and how seldom at most.
_SHORTEST, _LONGEST = 0.5, 10.0
#: Reading and drawing take at most this part of the time: where nothing changes, and where it does.
_IDLE_PART, _BUSY_PART = 0.01, 0.2
#: How many runs are looked at where there is no screen that limits them.
_MOST_RUNS = 200
#: How many lines say what a run needs to go on.
_MOST_NEEDED = 5
#: The columns that a narrow screen does not have, the first ones first.
_SPARED = ("executed by", "updated", "persona", "tokens", "started", "workflow", "took", "step")
#: A table has a line for its title, one for its columns, and one for what is left out.
_AROUND_A_TABLE = 3


@verb("watch")
@click.argument("run_id", metavar="[RUN]", required=False, shell_complete=run_ids)
@click.option("--plain", is_flag=True, help="Print a line for each change, as in a pipe.")
def watch_command(call: Call, run_id: str | None, *, plain: bool) -> None:
    """Watch the runs, or one run, as they go on.

    Without RUN the screen has the runs, those that are not finished first, and how many there are
    with each status. With RUN it has its steps, the runs that it started, what it waits for and what
    it spent, and ends when the run does. Ctrl+C ends it. In a pipe, and with --plain, each change is
    a line: of a run, its events and those of its children. Nothing is changed by watching.

    Examples:
        maestro watch                          all runs
        maestro watch checkout-42              one run, until it ends
        maestro watch checkout-42 | tee log    its events, as lines
    """
    on_screen = output.is_terminal() and output.has_screen() and not plain
    with call.reading() as reader:
        if on_screen:
            _show(_frames_of_run(call, reader, run_id) if run_id else _frames_of_runs(reader))
        elif run_id is None:
            _print_changes(reader)
        else:
            _print_events(reader, run_id)


# --- lines ----------------------------------------------------------------------------------------


def _print_changes(reader: Reader) -> None:
    watched, pause = RunsWatch(reader), _Pause()
    while True:
        changed = watched.changes(_MOST_RUNS)
        _print_lines([_change_line(reader, run) for run in changed])
        pause.after(changed=bool(changed))


def _change_line(reader: Reader, run: RunSummary) -> str:
    now = reader.clock.now()
    row = [run.run_id, run.workflow, run.status, ", ".join(wait.name for wait in run.waits_for)]
    cells = [output.shown(each) for each in row]
    if output.is_terminal():
        return "  ".join([f"{now:%Y-%m-%d %H:%M:%S}", *filter(None, cells)])
    return "\t".join([now.isoformat(), *cells])


def _print_events(reader: Reader, run_id: str) -> None:
    feed, watched, pause = FamilyFeed(reader, run_id), RunWatch(reader, run_id), _Pause()
    while True:
        over = is_over(watched.view(most_steps=1, most_children=0))  # before its last events
        found, _ = feed.next_batch()
        _print_lines([event_line(event, with_run=True) for event in found])
        if over:
            return
        pause.after(changed=bool(found))


def _print_lines(lines: list[str]) -> None:
    if lines:
        click.echo("\n".join(lines))


class _Pause:
    """Waits between two looks, so long that looking takes but a small part of the time."""

    def __init__(self) -> None:
        self._used = time.process_time()

    def after(self, *, changed: bool) -> None:
        """Wait, after a look that found something new, or nothing."""
        now = time.process_time()
        time.sleep(pause_seconds(now - self._used, changed=changed))
        self._used = now


def pause_seconds(cost: float, *, changed: bool) -> float:
    """Return how long to wait after a look that took so many seconds of a core."""
    part = _BUSY_PART if changed else _IDLE_PART
    return min(_LONGEST, max(_SHORTEST, cost / part))


# --- screens --------------------------------------------------------------------------------------


class _Table(NamedTuple):
    """A table of a screen; ``left_out`` counts the rows that there is no room for."""

    title: str
    columns: Sequence[str]
    rows: list[list[output.Cell]]
    left_out: int


class _Frame(NamedTuple):
    """What a screen shows.

    ``news`` is another one when something happened; the rest is, too, when only time passed.
    ``is_last`` if nothing more will happen.
    """

    heading: str
    lines: list[str]
    tables: list[_Table]
    news: object
    is_last: bool = False


@contextmanager
def _left_by_signals() -> Iterator[list[int]]:
    """Let SIGTERM and SIGHUP leave the block, so that the terminal is as it was before.

    What came is also in the list: Python drops an error that is raised while an object is deleted.
    """
    received: list[int] = []

    def leave(number: int, _: object) -> None:
        received.append(number)
        raise SystemExit(128 + number)

    defaults = [
        each for each in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(each) is signal.SIG_DFL
    ]
    for each in defaults:
        signal.signal(each, leave)
    try:
        yield received
    finally:
        for each in defaults:
            signal.signal(each, signal.SIG_DFL)


def _show(frame_of: Callable[[Console], _Frame]) -> None:
    """Show frames until the last one; each is drawn if it differs from the one before."""
    from rich.live import Live

    console, pause = output.console(), _Pause()
    drawn, news = None, None
    screen = Live(console=console, screen=True, auto_refresh=False, redirect_stderr=False)
    with _left_by_signals() as received, screen as live:
        while True:
            if received:
                raise SystemExit(128 + received[0])
            frame = frame_of(console)
            if (console.size, frame) != drawn:
                drawn = console.size, frame
                live.update(_drawn(frame, console.width), refresh=True)
            if frame.is_last:
                break
            pause.after(changed=frame.news != news)
            news = frame.news
    console.print(_drawn(frame, console.width))  # it stays when the screen is gone


def _drawn(frame: _Frame, width: int) -> Group:
    from rich.console import Group
    from rich.text import Text

    parts: list[RenderableType] = [
        Text(output.in_one_line(frame.heading), "bold", no_wrap=True, overflow="ellipsis")
    ]
    parts += [Text(output.in_one_line(line)) for line in frame.lines]
    for table in frame.tables:
        parts.append(Text(table.title, "bold"))
        parts.append(output.short_table(*_fitting(table, width)))
        if table.left_out:
            parts.append(Text(f"… and {table.left_out:,} more", "dim"))
    return Group(*parts)


def _fitting(table: _Table, width: int) -> tuple[Sequence[str], list[list[output.Cell]]]:
    """Return columns and rows without the columns that can be spared and there is no room for."""
    cells = [table.columns, *([output.shown(cell) for cell in row] for row in table.rows)]
    sizes = [max(map(len, column)) + output.GAP for column in zip(*cells, strict=True)]
    chosen = set(range(len(sizes)))
    for name in _SPARED:
        if sum(sizes[number] for number in chosen) <= width:
            break
        chosen -= {number for number, column in enumerate(table.columns) if column == name}
    columns = [column for number, column in enumerate(table.columns) if number in chosen]
    rows = [[row[number] for number in sorted(chosen)] for row in table.rows]
    return columns, rows


def _lines_of(lines: list[str], width: int) -> int:
    """Return how many lines of a screen texts take."""
    return sum(max(1, -(-len(line) // max(1, width))) for line in lines)


def _texts(row: list[output.Cell]) -> list[output.Cell]:
    """Return a row as it is shown now: times as texts."""
    return [cell if isinstance(cell, output.Styled) else output.shown(cell) for cell in row]


# --- all runs -------------------------------------------------------------------------------------


def _frames_of_runs(reader: Reader) -> Callable[[Console], _Frame]:
    watched = RunsWatch(reader)

    def frame(console: Console) -> _Frame:
        room = max(1, console.height - 1 - _AROUND_A_TABLE)
        return _frame_of_runs(reader.location, watched.overview(room))

    return frame


def _frame_of_runs(location: str, found: Overview) -> _Frame:
    counts = ", ".join(f"{count:,} {status}" for status, count in found.counts.items())
    columns = ["run", "workflow", "status", "started", "updated", "executed by", "waits for"]
    rows = [_texts(_run_row(run)) for run in found.runs]
    left_out = max(0, found.total - len(rows))
    return _Frame(
        heading=f"{counts or 'no runs'} in {location}",
        lines=[],
        tables=[_Table("runs", columns, rows, left_out)] if rows else [],
        news=(found.counts, found.runs),
    )


def _run_row(run: RunSummary) -> list[output.Cell]:
    *row, waits = run_row(run)
    return [*row, f"process {run.holder.pid}" if run.holder else None, waits]


# --- one run --------------------------------------------------------------------------------------


def _frames_of_run(call: Call, reader: Reader, run_id: str) -> Callable[[Console], _Frame]:
    watched = RunWatch(reader, run_id)

    def frame(console: Console) -> _Frame:
        room = max(1, console.height)
        view = watched.view(most_steps=room, most_children=room)
        return _frame_of_run(call, view, console.width, console.height)

    return frame


def _frame_of_run(call: Call, run: RunView, width: int, height: int) -> _Frame:
    lines = [*_head(run), *next_actions(call, run)[:_MOST_NEEDED]]
    room = height - 1 - _lines_of(lines, width) - _AROUND_A_TABLE
    children = _table_of_children(run, max(1, room // 3))
    if children is not None:
        room -= len(children.rows) + _AROUND_A_TABLE
    tables = [_table_of_steps(run, max(1, room)), children]
    return _Frame(
        heading=f"run {run.run_id}: {run.status.replace('_', ' ')}",
        lines=lines,
        tables=[table for table in tables if table is not None],
        news=(run.updated_at, run.status, run.executed, _news_of_children(run)),
        is_last=is_over(run),
    )


def _table_of_steps(run: RunView, room: int) -> _Table | None:
    rows = [_texts(step_row(step)) for step in _chosen(run.steps, room)]
    return _Table("steps", STEP_COLUMNS, rows, run.total_steps - len(rows)) if rows else None


def _table_of_children(run: RunView, room: int) -> _Table | None:
    found = list(generations(run))
    numbers = sorted(range(len(found)), key=lambda number: found[number][2].status in OVER)
    shown = [found[number] for number in sorted(numbers[:room])]  # the unfinished, and the first
    rows = [_texts(child_row(child, indent=depth)) for depth, _, child in shown]
    left_out = hidden_children(run) + len(found) - len(rows)
    return _Table("children", CHILD_COLUMNS, rows, left_out) if rows else None


def _head(run: RunView) -> list[str]:
    """Return what a run is, and how far it has come, in few lines."""
    facts = [
        run.workflow and f"workflow {run.workflow}",
        f"elapsed {output.took(run.took_seconds)}",
        output.many(run.total_steps, "step"),
        f"{run.tokens:,} tokens" if run.tokens else None,
        f"started by run {run.parent}" if run.parent else None,
    ]
    queue, suspended = queue_text(run), run.suspended
    lines = [
        ", ".join(filter(None, facts)),
        (holder := holder_text(run)) and f"executed by {holder}",
        queue and f"queue {queue}",
        suspended and f"suspended by {suspended.error_type}: {suspended.message}",
        run.error and f"error: {run.error.get('type')}: {run.error.get('message')}",
        run.reason and f"reason: {run.reason}",
    ]
    return [line for line in lines if line]


def _chosen(steps: Sequence[StepView], most: int) -> list[StepView]:
    """Return the steps that there is room for: those not completed first, and the last ones."""
    ordered = sorted(steps, key=lambda step: (step.status not in COMPLETED, step.step))
    return sorted(ordered[-most:], key=lambda step: step.step)


def _news_of_children(run: RunView) -> list[tuple[object, ...]]:
    return [(each.run_id, each.status, each.waits_for) for _, _, each in generations(run)]
