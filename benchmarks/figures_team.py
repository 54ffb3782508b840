"""The lines about task graphs, beside steps of a hive."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks.row import Row, milliseconds, short_time

if TYPE_CHECKING:
    from collections.abc import Iterator

    from benchmarks.contest import Results


def team(results: Results) -> Iterator[Row]:
    """Yield what a task takes, what it leaves in memory, and what looking at it takes."""
    ours, step = "team/tasks", "team/steps"
    if results.has(ours, step):
        yield _task(results, ours, "a task of a graph, 8 workers", target=2.0)
        alone = results.ratio("team/steps-alone", "seconds", step, "seconds")
        shown = f"one by one: {alone:.2f} x that"
        yield Row("  a step like it, 8 at once", short_time(results.median(step, "seconds")), shown)
        yield _task(results, "team/command", "  the same by maestro run, with its start")
        grown = results.worst(ours, "grown")
        what = "  memory from task 100 to the last"
        yield Row(what, f"{grown:.1f} MB", "", "<= 10 MB", grown <= 10)
    for name, what, most in (
        ("team/status", "maestro status of that run", 0.5),
        ("team/plan", "10,000 tasks read, checked, planned", 2.0),
    ):
        if results.has(name):
            seconds = results.median(name, "seconds")
            shown = f"<= {most:g} s"
            yield Row(what, milliseconds(seconds), "", shown, seconds <= most)


def _task(results: Results, name: str, what: str, target: float | None = None) -> Row:
    step = "team/steps"
    ratio = results.ratio(name, "seconds", step, "seconds")
    cpu = results.ratio(name, "cpu", step, "cpu")
    alone = results.ratio(name, "seconds", "team/steps-alone", "seconds")
    shown = f"{ratio:.2f} x a step, CPU {cpu:.2f} x, {alone:.2f} x one by one"
    figure = short_time(results.median(name, "seconds"))
    if target is None:
        return Row(what, figure, shown)
    return Row(what, figure, shown, f"<= {target:.2f}", ratio <= target)
