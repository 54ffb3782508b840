"""Row 17: generated workflows, undisturbed next to killed and resumed."""

from __future__ import annotations

import json
import queue
import sys
import threading
from collections import Counter
from typing import TYPE_CHECKING
from zlib import crc32

from faults.child_processes import ROOT, ChildProcesses
from faults.registry import Outcome, Plan, row
from faults.twin.driver import MODULE, compare
from faults.twin.program import SABOTAGE
from faults.twin.programs import generate, is_ordered, render, select
from faults.twin.reduce import reduced

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from faults.twin.driver import Report
    from faults.twin.programs import Node

#: Programs that are run at once: they wait most of the time.
LANES = 4
#: How many failing programs are made smaller, and for how long each.
_REDUCED, _SECONDS = 3, 60.0
#: Of so many generated programs, the few are chosen that together have the most kinds of nodes.
_CHOICE = 40
#: Where failing programs are stored.
FOLDER = ROOT / "build" / "twin"


@row(17, "killed or not, the same run", "300 programs, and 60 through workers: 0 differences")
def twins(plan: Plan, outcome: Outcome) -> None:
    """Compare generated programs, and report those that differ as programs to replay."""
    _compare_many(plan, outcome, plan.amount(quick=8, full=300), workers=False)
    _compare_many(plan, outcome, plan.amount(quick=4, full=60), workers=True)


def _compare_many(plan: Plan, outcome: Outcome, count: int, *, workers: bool) -> None:
    specs = few(count, plan.seed) if plan.quick else generate(count, plan.seed)
    reports = run_all(
        specs,
        plan.scratch,
        workers=workers,
        done=lambda done: _show_progress(plan, done, count),
    )
    failed = [each for each in reports if each.differences]
    for number, each in enumerate(failed):
        path = save(each.spec, f"seed-{plan.seed}-{number}")
        outcome.fail(f"{path}: {each.differences[0]}")
    for each in failed[:_REDUCED]:
        with ChildProcesses(MODULE) as children:
            least = reduced(each, plan.scratch / "reduced", children, _SECONDS)
        print(describe(least), file=sys.stderr, flush=True)
    landed = sum((each.landed for each in reports), Counter[str]())
    how = " enqueued for workers" if workers else ""
    outcome.ran.append(
        f"{len(reports)} programs{how}, {sum(map(is_ordered, specs))} depend on order"
    )
    outcome.ran.append(f"{sum(each.lives for each in reports)} processes, seed {plan.seed}")
    outcome.measured.append(f"{len(failed)} programs{how} differ")
    outcome.measured.append("landed: " + ", ".join(f"{n} {at}" for at, n in landed.most_common()))


def few(count: int, seed: int) -> list[Node]:
    """Return some programs that together have as many kinds of nodes as possible."""
    return select(generate(_CHOICE, seed), count)


def run_all(
    specs: list[Node],
    folder: Path,
    *,
    lanes: int = LANES,
    sabotage: str = "",
    workers: bool = False,
    done: Callable[[int], object] = lambda _: None,
) -> list[Report]:
    """Compare all programs, some at a time, and return the reports in order."""
    left: queue.SimpleQueue[tuple[int, Node]] = queue.SimpleQueue()
    for item in enumerate(specs):
        left.put(item)
    reports: dict[int, Report] = {}

    def work() -> None:
        with ChildProcesses(MODULE, environment={SABOTAGE: sabotage}) as children:
            while True:
                try:
                    number, spec = left.get_nowait()
                except queue.Empty:
                    return
                place = folder / f"program-{number}"
                reports[number] = compare(spec, place, children, workers=workers)
                done(len(reports))

    threads = [threading.Thread(target=work) for _ in range(min(lanes, len(specs)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [reports[number] for number in range(len(specs))]


def describe(report: Report) -> str:
    """Return what a person needs to look into a difference: the program, and how it differs."""
    path = save(report.spec, "reduced")
    lines = [render(report.spec), *(f"  {each}" for each in report.differences[:12])]
    replay = f"python -m faults.twin{' --workers' if report.workers else ''} --replay {path}"
    return "\n".join([*lines, f"  {json.dumps(report.spec)}", f"  replay it: {replay}"])


def save(spec: Node, name: str) -> Path:
    """Store a program, and return where."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    text = json.dumps(spec, indent=1)
    path = FOLDER / f"{name}-{crc32(text.encode()):08x}.json"
    path.write_text(text)
    return path.relative_to(ROOT)


def _show_progress(plan: Plan, done: int, count: int) -> None:
    if done % 25 == 0 or done == count:
        plan.show(f"programs: {done} of {count}")
