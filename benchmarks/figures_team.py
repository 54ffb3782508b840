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
        for each, what in (("team/steps-alone", "one by one"), (step, "8 at once")):
            yield Row(f"  a step like it, {what}", short_time(results.median(each, "seconds")))
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
    """Return what a task takes beside a step made alone, and beside one of as many at once."""
    ratio = results.ratio(name, "seconds", "team/steps-alone", "seconds")
    at_once = results.ratio(name, "seconds", "team/steps", "seconds")
    cpu = results.ratio(name, "cpu", "team/steps", "cpu")
    shown = f"{ratio:.2f} x a step; 8 at once: {at_once:.2f} x, CPU {cpu:.2f} x"
    figure = short_time(results.median(name, "seconds"))
    if target is None:
        return Row(what, figure, shown)
    return Row(what, figure, shown, f"<= {target:.2f}", ratio <= target)
