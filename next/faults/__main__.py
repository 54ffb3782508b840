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

from faults.registry import MODULES, ROWS, Outcome, Plan, Row, table


def main() -> int:
    """Run the selected rows; 1 if a target was missed."""
    # Its warnings are expected here.
    logging.getLogger("maestro_hive").addHandler(logging.NullHandler())
    for each in (signal.SIGTERM, signal.SIGINT):  # so that file systems are unmounted
        signal.signal(each, lambda *_: sys.exit(130))
    for module in sorted(set(MODULES.values())):
        importlib.import_module(f"faults.{module}")
    options = _options()
    if options.list:
        for number, row in sorted(ROWS.items()):
            print(f"{number:3}  {row.promise}  [{row.target}]")
        return 0
    selected = [ROWS[number] for number in sorted(options.row or ROWS)]
    done = [(row, *_run(row, options)) for row in selected]
    layer = "quick" if options.quick else "full"
    print(table(done, f"faults, {layer} layer, seed {options.seed}"))
    return int(any(outcome.failed for _, outcome, _ in done))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m faults", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="run a sample of each row, for CI")
    parser.add_argument("--list", action="store_true", help="print the rows and exit")
    parser.add_argument(
        "--row", type=int, action="append", choices=sorted(ROWS), help="run only this row"
    )
    parser.add_argument("--seed", type=int, default=2030, help="seed of everything random")
    parser.add_argument(
        "--scratch", type=Path, help="folder to work in (default: a temporary folder)"
    )
    return parser.parse_args()


def _run(row: Row, options: argparse.Namespace) -> tuple[Outcome, float]:
    print(f"row {row.number}: {row.promise}", file=sys.stderr, flush=True)
    scratch = Path(tempfile.mkdtemp(prefix="faults-", dir=options.scratch or "/var/tmp"))
    outcome = Outcome()
    started = time.monotonic()
    try:
        row.run(Plan(quick=options.quick, seed=options.seed, scratch=scratch), outcome)
    except Exception as error:  # noqa: BLE001 - this row has failed, and the others still run
        traceback.print_exc()
        outcome.fail(f"the row itself failed: {type(error).__name__}: {error}")
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    for failure in outcome.failures:
        print(f"    FAILED {failure}", file=sys.stderr, flush=True)
    return outcome, time.monotonic() - started


if __name__ == "__main__":
    sys.exit(main())
