"""``python -m faults.twin``: run generated programs, or replay one, and print the differences."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from faults.child_processes import ChildProcesses
from faults.twin.driver import MODULE
from faults.twin.program import SABOTAGE
from faults.twin.programs import generate, is_ordered, render
from faults.twin.reduce import reduced
from faults.twin.row import LANES, describe, few, run_all


def main() -> int:
    """Run what is asked for; 1 if there is a difference."""
    options = _options()
    if options.replay is not None:
        spec = json.loads(options.replay.read_text())
        print(render(spec), f"# ordered: {is_ordered(spec)}", sep="\n")
        specs = [spec] * options.times
    elif options.few:
        specs = few(options.count, options.seed)
    else:
        specs = generate(options.count, options.seed)
    folder = Path(tempfile.mkdtemp(prefix="twin-"))
    started = time.monotonic()
    reports = run_all(
        specs, folder, lanes=options.lanes, sabotage=options.sabotage, workers=options.workers
    )
    seconds = time.monotonic() - started
    failed = [each for each in reports if each.differences]
    shown = [each for each in failed if not options.only or options.only in each.categories]
    for each in shown[: options.show]:
        with ChildProcesses(MODULE, environment={SABOTAGE: options.sabotage}) as children:
            least = reduced(each, folder / "reduced", children, options.reduce)
        print(describe(least), end="\n\n")
    categories = Counter(name for each in failed for name in each.categories)
    landed = sum((each.landed for each in reports), Counter[str]())
    print(f"{len(failed)} of {len(reports)} programs differ: {dict(categories.most_common())}")
    print(f"{seconds:.0f} s, {60 * len(reports) / seconds:.0f} a minute; landed: {dict(landed)}")
    print(f"the folders of those that differ are in {folder}")
    return int(bool(failed))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m faults.twin", description=__doc__)
    parser.add_argument("--count", type=int, default=30, help="how many programs (default 30)")
    parser.add_argument("--seed", type=int, default=2030, help="seed of everything random")
    parser.add_argument("--few", action="store_true", help="choose those with most kinds of nodes")
    parser.add_argument("--lanes", type=int, default=LANES, help="programs at once")
    parser.add_argument(
        "--workers", action="store_true", help="enqueue the disturbed runs, for workers"
    )
    parser.add_argument("--replay", type=Path, metavar="SPEC", help="run this program again")
    parser.add_argument("--times", type=int, default=4, help="how often to replay it (default 4)")
    parser.add_argument("--reduce", type=float, default=0, help="seconds to make each one smaller")
    parser.add_argument("--show", type=int, default=3, help="how many differing programs to print")
    parser.add_argument("--only", default="", help="print those with this kind of difference")
    parser.add_argument("--sabotage", default="", help="break something: see program.sabotage")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
