"""The lines about steps and runs through ``Hive``, beside the limits and its peers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks.peers import MISSING
from benchmarks.row import Row, milliseconds, short_time

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from benchmarks.contest import Results

_JSON = "x json.dumps + SHA-256"


def _steps(results: Results) -> Iterator[Row]:
    ours = "hive/steps"
    if not results.asked(ours):
        return
    yield _ours(results, ours, "a step through Hive, one by one", "pairs/steps", 0.5)
    yield _limit(results, "pairs/steps", "  unsynced + synced SQLite commit")
    yield _peer(results, "dbos/steps", "  DBOS", ours, 8)
    yield _peer(results, "dbos-wal/steps", "  DBOS, WAL", ours)
    yield _peer(results, "langgraph/steps", "  LangGraph functional API", ours, 4)
    yield _peer(results, "langgraph/plain-steps", "  LangGraph, plain functions", ours, 4)
    yield _peer(results, "absurd/steps", "  Absurd", ours, 3)
    yield _peer(results, "burr/steps", "  Burr", ours)
    yield _ours(results, "hive/plain-steps", "a step that is a plain function", "pairs/steps")
    yield from _budgets(results)


def _budgets(results: Results) -> Iterator[Row]:
    """The cost of counting what a step spends, and of admitting it under limits."""
    for name, what, target in (
        ("hive/spending-steps", "  one whose spending is counted", None),
        ("hive/limited-steps", "  one under a budget: admitted, settled", 1.15),
        ("hive/limited-thrice", "  under those of persona, run and day", None),
    ):
        if not results.has(name, "hive/steps"):
            yield from _missing(results, name, what)
            continue
        ratio = results.ratio(name, "seconds", "hive/steps", "seconds")
        syncs = [results.syncs.get(each) for each in (name, "hive/steps")]
        counted = "" if None in syncs else f", {syncs[0]:.3f} syncs ({syncs[1]:.3f})"
        figure = short_time(results.median(name, "seconds"))
        shown = f"{ratio:.2f} x a step{counted}"
        if target is None:
            yield Row(what, figure, shown)
        else:
            yield Row(what, figure, shown, f"<= {target:.2f}", ratio <= target)


def _at_once(results: Results) -> Iterator[Row]:
    for ours, what in (
        ("hive/64", "64 at once in one run"),
        ("hive/64-runs", "64 at once in 64 runs"),
    ):
        if not results.asked(ours):
            continue
        yield _ours(results, ours, what, "sqlite", 2)
        yield _peer(results, "dbos/64-runs", "  DBOS, 64 workflows", ours, 80)
        yield _peer(results, "langgraph/64", "  LangGraph, one entrypoint", ours)
        yield _peer(results, "absurd/64-runs", "  Absurd, 64 tasks, 8 connections", ours)


def _payloads(results: Results) -> Iterator[Row]:
    for name, what in (("answer", "2 KB in, 8 KB out"), ("report", "100 KB out")):
        ours = f"hive/{name}"
        if not results.asked(ours):
            continue
        yield _ours(results, ours, what, f"pairs/{name}")
        yield _peer(results, f"langgraph/{name}", "  LangGraph", ours, 3)
        yield _peer(results, f"dbos/{name}", "  DBOS", ours)
        yield _peer(results, f"burr/{name}", "  Burr", ours)
        yield _peer(results, f"absurd/{name}", "  Absurd", ours)


def _runs(results: Results) -> Iterator[Row]:
    targets = {
        "runs-of-3": ("a run of 3 steps, one by one", {"langgraph": 3, "absurd": 3}),
        "64-runs-of-3": ("a run of 3 steps, 64 at once", {"absurd": 4}),
        "runs-of-1": ("a run of 1 step, one by one", {}),
    }
    peers = {"langgraph": "LangGraph", "absurd": "Absurd", "dbos": "DBOS"}
    for name, (what, target) in targets.items():
        ours = f"hive/{name}"
        if results.asked(ours):
            yield _ours(results, ours, what)
            for peer, shown in peers.items():
                yield _peer(results, f"{peer}/{name}", f"  {shown}", ours, target.get(peer))


def _rows(results: Results) -> Iterator[Row]:
    if results.has("hive/rows"):
        ratio = results.ratio("hive/rows", "seconds", "hive/rows", "json")
        size = results.median("hive/rows", "bytes") / 1e6
        figure = milliseconds(results.median("hive/rows", "seconds"))
        what = f"{size:.0f} MB of rows returned by a step"
        yield Row(what, figure, f"{ratio:.1f} {_JSON}", "<= 4", ratio <= 4)
        yield _blocked(results, "hive/rows")
    if results.has("hive/rows", "hive/dated-rows"):
        ratio = results.ratio("hive/dated-rows", "seconds", "hive/rows", "seconds")
        raw = results.ratio("hive/dated-rows", "seconds", "hive/dated-rows", "json")
        figure = milliseconds(results.median("hive/dated-rows", "seconds"))
        shown = f"{ratio:.1f} x plain rows, {raw:.1f} {_JSON}"
        yield Row("  with dates and enums", figure, shown, "<= 5", ratio <= 5)
        yield _blocked(results, "hive/dated-rows")
    if results.has("hive/rows-in"):
        ratio = results.ratio("hive/rows-in", "seconds", "hive/rows-in", "json")
        figure = milliseconds(results.median("hive/rows-in", "seconds"))
        yield Row("  as the input of a step", figure, f"{ratio:.1f} {_JSON}")
        yield _blocked(results, "hive/rows-in")
    for name in ("hive/rows", "hive/dated-rows", "hive/rows-in"):
        if not results.has(name):
            yield from _missing(results, name, name)


def _blocked(results: Results, name: str) -> Row:
    longest = results.median(name, "blocked")
    figure = milliseconds(longest)
    return Row("  the loop was blocked for", figure, "at most", "<= 50 ms", longest <= 0.05)


def _resume(results: Results) -> Iterator[Row]:
    if results.has("hive/resume"):
        step = results.median("hive/resume", "step")
        shown = f"of {results.median('hive/resume', 'steps'):,.0f}"
        what = "a completed step on replay"
        yield Row(what, short_time(step), shown, "<= 20 us", step <= 20e-6)
    name = "hive/resume-many"
    if not results.has(name):
        yield from _missing(results, name, "resume of many steps")
        return
    count, seconds = results.median(name, "steps"), results.median(name, "seconds")
    parts = (f"{part} {results.median(name, part):.2f}" for part in ("open", "replay", "finish"))
    target = 3 * count / 100_000
    yield Row(
        f"resume {count:,.0f} completed steps",
        f"{seconds:.2f} s",
        " + ".join(parts),
        f"<= {target:g} s",
        seconds <= target,
    )


def _start(results: Results) -> Iterator[Row]:
    if results.has("hive/import"):
        seconds = results.median("hive/import", "seconds")
        over, reached = "over a bare interpreter", seconds <= 0.15
        what = "from maestro_hive import Hive"
        yield Row(what, milliseconds(seconds), over, "<= 150 ms", reached)
    if not results.has("hive/list-few", "hive/list-many"):
        yield from _missing(results, "hive/list-many", "maestro runs --limit 20")
        return
    few = milliseconds(results.median("hive/list-few", "seconds"))
    yield Row("maestro runs --limit 20, 200 runs", few)
    ratio = results.ratio("hive/list-many", "seconds", "hive/list-few", "seconds")
    many = milliseconds(results.median("hive/list-many", "seconds"))
    yield Row("  50,000 runs", many, f"{ratio:.2f} x 200 runs", "<= 1.20", ratio <= 1.2)


def _queues(results: Results) -> Iterator[Row]:
    for workers in (1, 4):
        ours = f"hive/queue-{workers}"
        if not results.asked(ours):
            continue
        what = f"an empty run through {workers} worker{'s'[: workers - 1]}"
        yield _ours(results, ours, what)
        yield _peer(results, f"dbos/queue-{workers}", "  DBOS", ours, 5)
        yield _peer(results, f"dbos-wal/queue-{workers}", "  DBOS, WAL", ours)
        for name in (ours, f"dbos/queue-{workers}"):
            if results.has(name):
                yield from _latency(results, name, has_target=name == ours)


def _latency(results: Results, name: str, *, has_target: bool) -> Iterator[Row]:
    """Yield the lines about the time from enqueuing a run to its body, across processes."""
    for figure, shown, target in (("median", "median", 0.05), ("p99", "99 %", 0.5)):
        seconds = results.median(name, figure)
        what = f"  enqueued to started, {shown}" if has_target else f"  DBOS, {shown}"
        if has_target:
            limit = f"<= {target * 1000:.0f} ms"
            yield Row(what, milliseconds(seconds), "", limit, seconds <= target)
        else:
            yield Row(what, milliseconds(seconds))


def _growing(results: Results) -> Iterator[Row]:
    ours = "hive/growing"
    if not results.has(ours):
        yield from _missing(results, ours, "+4 KB a step")
        return
    seconds = results.median(ours, "seconds")
    what = "+4 KB a step, the last of 300"
    yield Row(what, milliseconds(seconds), "", "<= 10 ms", seconds <= 0.01)
    for peer, shown in (("langgraph", "LangGraph"), ("burr", "Burr"), ("dbos", "DBOS")):
        yield _peer(results, f"{peer}/growing", f"  {shown}", ours)


def _ours(
    results: Results, name: str, what: str, limit: str = "", target: float | None = None
) -> Row:
    """Return a line of ours: its time, and its rate as a part of the limit's."""
    if not results.has(name):
        return _absent(results, name, what)
    figure = short_time(results.median(name, "seconds"))
    if not results.has(limit):
        return Row(what, figure)
    ratio = results.ratio(limit, "seconds", name, "seconds")
    shown = f"{ratio:.2f} x {'SQLite' if limit == 'sqlite' else 'unsynced + synced commit'}"
    if target is None:
        return Row(what, figure, shown)
    return Row(what, figure, shown, f">= {target:.2f}", ratio >= target)


def _limit(results: Results, name: str, what: str) -> Row:
    if not results.has(name):
        return _absent(results, name, what)
    return Row(what, short_time(results.median(name, "seconds")))


def _peer(results: Results, name: str, what: str, ours: str, target: float | None = None) -> Row:
    """Return a peer's line: its time, and how many times as fast ours is."""
    if not results.has(name):
        return _absent(results, name, what)
    figure = short_time(results.median(name, "seconds"))
    if not results.has(ours):
        return Row(what, figure)
    ratio = results.ratio(name, "seconds", ours, "seconds")
    shown = f"ours: {ratio:.1f} x as fast" if ratio >= 1 else f"ours: {ratio:.2f} x as fast"
    if target is None:
        return Row(what, figure, shown)
    return Row(what, figure, shown, f">= {target:g}", ratio >= target)


def _absent(results: Results, name: str, what: str) -> Row:
    return Row(what, results.absent.get(name, MISSING))


def _missing(results: Results, name: str, what: str) -> Iterator[Row]:
    if results.asked(name):
        yield _absent(results, name, what)


PARTS: tuple[Callable[[Results], Iterator[Row]], ...] = (
    _steps,
    _at_once,
    _payloads,
    _runs,
    _rows,
    _resume,
    _start,
    _queues,
    _growing,
)
