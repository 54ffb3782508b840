"""Many programs at once, and the report about them."""

from __future__ import annotations

import json
import queue
import threading
import traceback
from collections import Counter
from typing import TYPE_CHECKING
from zlib import crc32

from faults.twin.comparison import Difference, Kind, Report, compare
from faults.twin.processes import ROOT, Processes
from faults.twin.programs import generate, is_ordered, render, select

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from faults.twin.programs import Node

#: Programs that are run at once: they wait most of the time.
LANES = 4
#: Of that many generated programs, the few are chosen that together have the most kinds of nodes.
_CHOICE = 40
#: How many programs may be void, and how many kills have to land inside a step.
MOST_VOID, LEAST_INSIDE = 0.05, 0.8
#: Where failing programs are stored.
FOLDER = ROOT / "build" / "twin"


def few(count: int, seed: int) -> list[Node]:
    """Return some programs that together have as many kinds of nodes as possible."""
    return select(generate(_CHOICE, seed), count)


def run_all(
    specs: list[Node], folder: Path, kind: Kind | None = None, *, lanes: int = LANES
) -> list[Report]:
    """Compare all programs, some at a time, and return the reports in order."""
    left: queue.SimpleQueue[tuple[int, Node]] = queue.SimpleQueue()
    for item in enumerate(specs):
        left.put(item)
    reports: dict[int, Report] = {}

    def work() -> None:
        with Processes() as processes:
            while True:
                try:
                    number, spec = left.get_nowait()
                except queue.Empty:
                    return
                place = folder / f"program-{number}"
                reports[number] = _compare(spec, place, processes, kind or Kind())

    threads = [threading.Thread(target=work) for _ in range(min(lanes, len(specs)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [reports[number] for number in range(len(specs))]


def _compare(spec: Node, folder: Path, processes: Processes, kind: Kind) -> Report:
    """Compare one program; an error of the suite is a difference, too."""
    try:
        return compare(spec, folder, processes, kind)
    except Exception:  # noqa: BLE001 - or the other programs would be lost
        return Report(spec, [Difference("suite", traceback.format_exc())], kind=kind)


def kills(reports: list[Report]) -> tuple[int, int]:
    """Return how many signals landed inside a step, and how many landed at all."""
    landed = landings(reports)
    inside = landed["in a step"]
    return inside, inside + landed["elsewhere"]


def landings(reports: list[Report]) -> Counter[str]:
    """Return where signals landed, and how often runs were released."""
    return sum((each.landed for each in reports), Counter[str]())


def killed_at_commits(spec: Node, numbers: Iterable[int]) -> list[Node]:
    """Return a program for each of these commits, which is killed right after it."""
    stop = {"signal": "SIGKILL", "on": "commit", "delay": 0}
    return [{**spec, "stops": [{**stop, "number": number}]} for number in numbers]


def faults_of(reports: list[Report]) -> list[str]:
    """Return why a run of the suite is not passed: differences, or kills that say little."""
    differ = sum(bool(each.differences) for each in reports)
    found = [f"{differ} programs differ"] if differ else []
    void = sum(each.is_void for each in reports)
    if void > MOST_VOID * len(reports):
        found.append(f"{void} programs are void")
    inside, landed = kills(reports)
    if inside < LEAST_INSIDE * landed:
        found.append(f"only {inside} of {landed} kills landed inside a step")
    return found


def figures(reports: list[Report]) -> str:
    """Return the figures of a run of the suite as a line."""
    failed = [each for each in reports if each.differences]
    categories = Counter(name for each in failed for name in each.categories)
    inside, landed = kills(reports)
    void = sum(each.is_void for each in reports)
    ordered = sum(is_ordered(each.spec) for each in reports)
    parts = [
        f"{len(failed)} of {len(reports)} programs differ {dict(categories.most_common())}",
        f"{ordered} depend on order",
        f"{sum(each.lives for each in reports)} processes",
        f"kills inside a step {inside} of {landed} ({inside / max(1, landed):.0%})",
        f"void {void} ({void / max(1, len(reports)):.0%})",
        f"{dict(landings(reports))}",
    ]
    return "; ".join(parts)


def describe(report: Report) -> str:
    """Return the program of a difference and how it differs, for people."""
    path = save(report.spec, "differs")
    lines = [render(report.spec), *(f"  {each}" for each in report.differences[:12])]
    kind = f" --loop {report.kind.loop}{' --worker' if report.kind.worker else ''}"
    replay = f"python -m faults.twin{kind} --replay {path}"
    return "\n".join([*lines, f"  {json.dumps(report.spec)}", f"  replay it: {replay}"])


def save(spec: Node, name: str) -> Path:
    """Store a program, and return where."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    text = json.dumps(spec, indent=1)
    path = FOLDER / f"{name}-{crc32(text.encode()):08x}.json"
    path.write_text(text)
    return path.relative_to(ROOT)
