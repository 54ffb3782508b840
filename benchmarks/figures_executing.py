"""The lines about execution, beside its peers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks.peers import MISSING
from benchmarks.row import Row, microseconds, milliseconds, rate

if TYPE_CHECKING:
    from collections.abc import Iterator

    from benchmarks.contest import Results

_STEP = "a step executed, one by one"


def executing(results: Results) -> Iterator[Row]:
    """Yield the lines about steps through the whole executor."""
    if not results.has("execute"):
        return
    figure = rate(results.median("execute", "rate"))
    ratio = results.ratio("execute", "rate", "sqlite", "rate")
    yield Row(_STEP, figure, f"{ratio:.2f} x SQLite", ">= 0.50", ratio >= 0.5)
    yield _peer(results, "dbos", "  DBOS", "execute", 5)
    yield _peer(results, "dbos-plain", "  DBOS, plain functions", "execute", 5)
    yield _peer(results, "langgraph", "  LangGraph", "execute", 2.5)
    yield _peer(results, "langgraph-plain", "  LangGraph, plain functions", "execute", 2.5)
    figure = rate(results.median("execute-64", "rate"))
    ratio = results.ratio("execute-64", "rate", "execute", "rate")
    yield Row("64 executing at once", figure, f"{ratio:.1f} x one by one")
    yield _peer(results, "dbos-64", "  DBOS", "execute-64", 50)
    yield _peer(results, "langgraph-64", "  LangGraph", "execute-64")
    figure = rate(results.median("execute-64-runs", "rate"))
    ratio = results.ratio("execute-64-runs", "rate", "execute", "rate")
    yield Row("64 executing at once, each its own run", figure, f"{ratio:.1f} x one by one")
    yield _peer(results, "dbos-64", "  DBOS, the same as above", "execute-64-runs", 50)


def _peer(results: Results, name: str, what: str, ours: str, target: float | None = None) -> Row:
    """Return a peer's line: its rate, and how many times that ours is."""
    if not results.has(name):
        return Row(what, MISSING)
    figure = rate(results.median(name, "rate"))
    ratio = results.ratio(ours, "rate", name, "rate")
    shown = f"ours: {ratio:.1f} x as fast"
    if target is None:
        return Row(what, figure, shown)
    return Row(what, figure, shown, f">= {target:g}", ratio >= target)


def resuming(results: Results) -> Iterator[Row]:
    """Yield the lines about a run of 10,000 finished steps."""
    if not results.has("resume"):
        return
    seconds, opened = results.median("resume", "seconds"), results.median("resume", "open")
    shown = f"its first step after {milliseconds(opened)}"
    yield Row("resume 10,000 finished steps", milliseconds(seconds), shown)
    if results.has("dbos-resume"):
        ratio = results.ratio("dbos-resume", "seconds", "resume", "seconds")
        figure = milliseconds(results.median("dbos-resume", "seconds"))
        yield Row("  DBOS", figure, f"ours: {ratio:.1f} x as fast", ">= 20", ratio >= 20)
    else:
        yield Row("  DBOS", MISSING)
    kept = results.median("resume", "kept")
    yield Row("a kept step returned, of 10,000", microseconds(kept), "", "<= 20 us", kept <= 20e-6)


def retrying(results: Results) -> Iterator[Row]:
    """Yield the lines about what is added to a call in memory."""
    if not results.has("retry"):
        return
    yield Row("executed in memory: added to a call", microseconds(results.median("retry", "added")))
    for name, target in (("tenacity", 0.5), ("stamina", None)):
        if not results.has(name):
            yield Row(f"  {name}", MISSING)
            continue
        figure = microseconds(results.median(name, "added"))
        ratio = results.ratio("retry", "added", name, "added")
        shown = f"ours: {ratio:.2f} x of it"
        if target is None:
            yield Row(f"  {name}", figure, shown)
        else:
            yield Row(f"  {name}", figure, shown, f"<= {target:.2f}", ratio <= target)
    for name, what in (("asked", "is_open, record_success"), ("permit", "acquire, succeeded")):
        seconds = results.median("breaker", name)
        shown = "in memory, closed"
        yield Row(f"breaker: {what}", microseconds(seconds), shown, "<= 1 us", seconds <= 1e-6)
