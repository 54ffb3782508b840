"""``python -m faults``: run rows of the matrix and print what was measured."""

from __future__ import annotations

import argparse
import importlib
import logging
import shutil
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path

from faults.registry import ROWS, Outcome, Plan, Row
from faults.table import show

#: The modules that hold the rows.
_MODULES = (
    "kills",
    "power_cuts",
    "io_errors",
    "torn_files",
    "crowds",
    "zombies",
    "hostile_files",
    "hostile_ids",
    "clocks",
    "polite_stops",
    "model",
)


def main() -> int:
    """Run what was asked for; 1 if a target was missed."""
    logging.getLogger("maestro_hive").addHandler(logging.NullHandler())  # its warnings are expected
    for each in (signal.SIGTERM, signal.SIGINT):  # so that mounts are undone
        signal.signal(each, lambda *_: sys.exit(130))
    for module in _MODULES:
        importlib.import_module(f"faults.{module}")
    options = _options()
    if options.list:
        for number, row in sorted(ROWS.items()):
            print(f"{number:3}  {row.promise}  [{row.target}]")
        return 0
    chosen = [ROWS[number] for number in sorted(options.row or ROWS)]
    done = [(row, *_run(row, options)) for row in chosen]
    layer = "quick" if options.quick else "full"
    print(show(done, f"faults, {layer} layer, seed {options.seed}"))
    return int(any(outcome.failed for _, outcome, _ in done))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m faults", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a sample of each row, for CI")
    parser.add_argument("--list", action="store_true", help="show the rows and stop")
    parser.add_argument("--row", type=int, action="append", choices=sorted(ROWS), help="only this")
    parser.add_argument("--seed", type=int, default=2030, help="of all that is random")
    parser.add_argument(
        "--scratch", type=Path, help="where to work; a temporary folder if not given"
    )
    return parser.parse_args()


def _run(row: Row, options: argparse.Namespace) -> tuple[Outcome, float]:
    print(f"row {row.number}: {row.promise}", file=sys.stderr, flush=True)
    scratch = Path(tempfile.mkdtemp(prefix="faults-", dir=options.scratch))
    outcome = Outcome()
    started = time.monotonic()
    try:
        row.run(Plan(quick=options.quick, seed=options.seed, scratch=scratch), outcome)
    except Exception as error:  # noqa: BLE001 - the other rows go on, and this one has failed
        traceback.print_exc()
        outcome.fail(f"the row itself broke off: {type(error).__name__}: {error}")
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    for failure in outcome.failures:
        print(f"    MISSED {failure}", file=sys.stderr, flush=True)
    return outcome, time.monotonic() - started


if __name__ == "__main__":
    sys.exit(main())
