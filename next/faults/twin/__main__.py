"""``python -m faults.twin``: run generated programs, or replay one, and print the differences."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from faults.twin.comparison import KINDS_OF_LOOP, Kind
from faults.twin.processes import Processes
from faults.twin.programs import generate, is_ordered, render
from faults.twin.reduce import reduced
from faults.twin.sabotage import SABOTAGES
from faults.twin.suite import LANES, describe, faults_of, few, figures, run_all

if TYPE_CHECKING:
    from faults.twin.programs import Node


def main() -> int:
    """Run some programs; 1 if there is a difference, or the kills say little."""
    options = _options()
    if options.replay is not None:
        spec = json.loads(options.replay.read_text())
        print(render(spec), f"# ordered: {is_ordered(spec)}", sep="\n")
        specs = [spec] * options.times
    else:
        specs = (few if options.few else generate)(options.count, options.seed)
    kinds = [Kind(options.loop, worker=options.worker, sabotage=options.sabotage)]
    if options.each:
        kinds = [Kind(loop) for loop in KINDS_OF_LOOP] + [Kind(worker=True)]
    faults = [_run(kind, specs, options) for kind in kinds]
    return int(any(faults))


def _run(kind: Kind, specs: list[Node], options: argparse.Namespace) -> bool:
    """Run programs in one way, print the figures, and return whether there is a fault."""
    folder = Path(tempfile.mkdtemp(prefix="twin-", dir=options.folder))
    started = time.monotonic()
    reports = run_all(specs, folder, kind, lanes=options.lanes)
    failed = [each for each in reports if each.differences]
    shown = [each for each in failed if not options.only or options.only in each.categories]
    for each in shown[: options.show]:
        with Processes() as processes:
            least = reduced(each, folder / "reduced", processes, options.reduce)
        print(describe(least), end="\n\n")
    print(f"{kind}, seed {options.seed}, {time.monotonic() - started:.0f} s: {figures(reports)}")
    if faults := faults_of(reports):
        print(f"{'; '.join(faults)}; the folders of those that differ are in {folder}", flush=True)
    return bool(faults)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m faults.twin", description=__doc__)
    add = parser.add_argument
    add("--count", type=int, default=30, help="how many programs (default 30)")
    add("--seed", type=int, default=2030, help="seed of everything random")
    add("--few", action="store_true", help="choose those with most kinds of nodes")
    add("--lanes", type=int, default=LANES, help="programs at once")
    add("--loop", choices=KINDS_OF_LOOP, default="asyncio", help="how they are executed")
    add("--each", action="store_true", help="execute them in every way, one after the other")
    add("--worker", action="store_true", help="enqueue the disturbed runs, for workers")
    add("--sabotage", choices=["", *SABOTAGES], default="", help="break something on purpose")
    add("--replay", type=Path, metavar="SPEC", help="run this program again")
    add("--times", type=int, default=4, help="how often to replay it (default 4)")
    add("--reduce", type=float, default=0, help="seconds to make each one smaller")
    add("--show", type=int, default=3, help="how many differing programs to print")
    add("--only", default="", help="print those with this kind of difference")
    add("--folder", type=Path, help="where the folders of the runs are")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
