"""The table: what was measured, what it is compared with, and what it was meant to be."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks import figures_hive
from benchmarks.contest import NotMeasuredError
from benchmarks.figures_executing import executing, resuming, retrying
from benchmarks.figures_team import team
from benchmarks.peers import MISSING
from benchmarks.row import Row, milliseconds, rate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from benchmarks.contest import Results


def rows(results: Results) -> list[Row]:
    """Return a line for everything that was measured."""
    table: list[Row] = []
    for part in _PARTS:
        try:
            for row in part(results):
                table.append(row)  # noqa: PERF402 - those before one that fails are kept
        except NotMeasuredError as error:
            table.append(Row(error.name, results.absent.get(error.name, MISSING)))
    return table


def _raw(results: Results) -> Iterator[Row]:
    yield Row("write + fdatasync, file of fixed size", rate(results.median("fdatasync", "rate")))
    ratio = results.ratio("sqlite", "rate", "fdatasync", "rate")
    figure = rate(results.median("sqlite", "rate"))
    yield Row("SQLite WAL+FULL, one row a commit", figure, f"{ratio:.2f} x fdatasync")


def _recording(results: Results) -> Iterator[Row]:
    if not results.has("one-by-one"):
        return
    ratio = results.ratio("one-by-one", "rate", "sqlite", "rate")
    yield Row(
        "a step recorded, one by one",
        rate(results.median("one-by-one", "rate")),
        f"{ratio:.2f} x SQLite",
        ">= 0.60",
        ratio >= 0.60,
    )
    ratio = results.ratio("64-at-once", "rate", "one-by-one", "rate")
    yield Row(
        "64 recording at once",
        rate(results.median("64-at-once", "rate")),
        f"{ratio:.1f} x one by one",
        ">= 10",
        ratio >= 10,
    )
    ratio = results.ratio("512-at-once", "rate", "64-at-once", "rate")
    yield Row(
        "512 recording at once",
        rate(results.median("512-at-once", "rate")),
        f"{ratio:.2f} x 64 at once",
        ">= 1.00",
        ratio >= 1,
    )
    ratio = results.ratio("64-runs-at-once", "rate", "one-by-one", "rate")
    figure = rate(results.median("64-runs-at-once", "rate"))
    yield Row("64 at once, each its own run", figure, f"{ratio:.1f} x one by one")
    ratio = results.ratio("busy-loop", "rate", "sqlite", "rate")
    yield Row(
        "behind a busy loop (300 us chunks)",
        rate(results.median("busy-loop", "rate")),
        f"{ratio:.3f} x SQLite",
        ">= 0.125",
        ratio >= 1 / 8,
    )


def _processes(results: Results) -> Iterator[Row]:
    if not results.has("four-processes"):
        return
    ratio = results.ratio("four-processes", "rate", "one-process", "rate")
    figure = rate(results.median("four-processes", "rate"))
    yield Row("four processes, one folder: in all", figure, f"{ratio:.2f} x one process")
    ratio = results.ratio("four-processes", "slowest", "four-processes", "fastest")
    yield Row(
        "four processes: slowest",
        rate(results.median("four-processes", "slowest")),
        f"{ratio:.2f} x fastest",
        ">= 0.70",
        ratio >= 0.7,
    )
    worst = results.worst("four-processes", "worst_wait")
    alone = results.worst("four-raw-files", "worst_wait")
    yield Row(
        "four processes: worst wait of all",
        milliseconds(worst),
        f"raw files: {milliseconds(alone)}",
        "<= 50 ms",
        worst <= 0.05,
    )


def _history(results: Results) -> Iterator[Row]:
    names = {"late-step": "step 10,000", "late-task": "mark_task_completed, task 10,000"}
    for name, what in names.items():
        if results.has(name):
            ratio = results.ratio(name, "late", name, "early")
            figure = milliseconds(results.median(name, "late"))
            yield Row(what, figure, f"{ratio:.2f} x the 100th", "<= 1.20", ratio <= 1.2)


def _opening(results: Results) -> Iterator[Row]:
    if not results.has("open-steps"):
        return
    parts = {part: results.median("open-entries", part) for part in ("hold", "entries", "fold")}
    shown = " + ".join(f"{part} {seconds * 1000:.0f}" for part, seconds in parts.items())
    names = {
        "open-entries": "open 10,000 steps: read them",
        "open-steps": "open 10,000 steps: StatePersistence()",
        "open-tasks": "open 10,000 tasks: StatePersistence()",
    }
    for name, what in names.items():
        seconds = results.median(name, "seconds")
        ratio = shown if name == "open-entries" else ""
        if name == "open-tasks":
            yield Row(what, milliseconds(seconds))
        else:
            yield Row(what, milliseconds(seconds), ratio, "<= 100 ms", seconds <= 0.1)


def _growth(results: Results) -> Iterator[Row]:
    for count in (400, 5_000):
        name = f"grow-{count}"
        if results.has(name):
            ratio = results.median(name, "ratio")
            journal, log = results.median(name, "journal"), results.median(name, "log")
            yield Row(
                f"+4 KB a step, {count:,} steps: stored",
                f"{journal / 1e6:.1f} MB",
                f"{ratio:.2f} x its data",
                "<= 3.00",
                ratio <= 3,
            )
            shown = "copied and used again; deleted by the last to close"
            yield Row("  its log while it is open", f"{log / 1e6:.1f} MB", shown)
            encode, store = results.median(name, "encode"), results.median(name, "store")
            shown = f"encode {encode * 1000:.1f} + store {store * 1000:.1f}"
            yield Row("  a step at the end of it", milliseconds(encode + store), shown)
    if results.has("checkpoints"):
        files = results.median("checkpoints", "files")
        yield Row("checkpoint files after 15", f"{files:.0f}", "", "<= 10", files <= 10)


def _start(results: Results) -> Iterator[Row]:
    if not results.has("start"):
        return
    seconds = results.median("start", "package")
    over = "over a bare interpreter"
    yield Row("import maestro_hive", milliseconds(seconds), over, "<= 100 ms", seconds <= 0.1)
    seconds = results.median("start", "unified_execution")
    yield Row("import maestro_hive.unified_execution", milliseconds(seconds), over)
    yield Row("maestro --version", milliseconds(results.median("start", "version")), "in all")


_PARTS: tuple[Callable[[Results], Iterator[Row]], ...] = (
    _raw,
    *figures_hive.PARTS,
    team,
    _recording,
    executing,
    resuming,
    retrying,
    _processes,
    _history,
    _opening,
    _growth,
    _start,
)


def as_text(table: list[Row]) -> str:
    """Return the table as it is printed."""
    marks = {None: "", True: "reached", False: "NOT REACHED"}
    lines = [("what", "figure", "ratio", "target", "")]
    lines += [(row.what, row.figure, row.ratio, row.target, marks[row.reached]) for row in table]
    widths = [max(len(line[column]) for line in lines) for column in range(5)]
    return "\n".join(
        "  ".join(word.ljust(width) for word, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )
