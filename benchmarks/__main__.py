"""``make bench``: measure, show progress, print one table."""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks import figures, machine, peers
from benchmarks.contenders import ANCHOR, CONTENDERS, GROUPS, find
from benchmarks.contest import Contest, Results

if TYPE_CHECKING:
    from benchmarks.contender import Contender
    from benchmarks.row import Row

_ABOUT = """\
Measure maestro-hive beside the raw limits of this machine, and beside its peers.

Every contender runs in a fresh process on a folder of its own. They take turns, round after round;
ratios are taken within a round, and the median over the rounds counts. Rounds during which
something else kept the machine busy are left out, if at least 3 are left. Compare nothing across
machines, nor across runs.

Groups marked with a star compare with peers, which are installed into .venv-bench when a run first
needs them. Where that fails, their rows say so and everything else is measured.
"""

_GROUPS = """\
groups for --only:
  raw        append + fdatasync, and SQLite's own commit; measured in any case
  record     steps recorded one by one, 64 and 512 at once, behind a busy loop
  execute*   steps through the whole executor, one by one and 64 at once: DBOS, LangGraph
  resume*    a run of 10,000 finished steps gone through again in a fresh process: DBOS
             (filling it for DBOS takes a minute, once)
  retry*     what retrying adds in memory to a call that succeeds: tenacity, stamina; the breaker
  processes  four processes on one folder: in all, fairness, worst wait
  history    the ten-thousandth step and task against the hundredth
  open       a run of 10,000 finished steps opened in a fresh process
  import     importing the package, and `maestro --version`
  growth     a list that grows by 4 KB a step, as stored; checkpoint files
             (5,000 steps of it take a minute or two)

examples:
  make bench                                    everything, 5 rounds
  make bench ARGS="--only record --rounds 9"    one group, thoroughly
  make bench ARGS="--json figures.json"         keep every figure of every round

A target that is not reached is said in the table; the exit status is 0 all the same.
"""


def main() -> None:
    """Read the words, hold the contest, print the table."""
    words = _read_words()
    folder: Path = words.folder
    folder.mkdir(parents=True, exist_ok=True)
    print(machine.describe(folder), flush=True)
    chosen = _choose([ANCHOR, *(words.only or GROUPS)], with_peers=words.peers)
    with tempfile.TemporaryDirectory(dir=folder, prefix="bench-") as place:
        contest = Contest(Path(place), words.quiet, lambda line: print(line, flush=True))
        results = contest.hold(chosen, words.rounds)
    table = figures.rows(results)
    print(f"\nmedians of {words.rounds} rounds{_noise(results)}\n\n{figures.as_text(table)}")
    if results.syncs:
        print(f"\n{_durability(results)}")
    if words.json:
        _write_json(words.json, results, table, machine.describe(folder))


def _choose(groups: list[str], *, with_peers: bool) -> list[Contender]:
    """Return the contenders of these groups, without those whose peer is not to be had."""
    chosen = [each for each in CONTENDERS if each.group in groups]
    if not any(each.peer for each in chosen):
        return chosen
    if with_peers and peers.make_ready():
        print(peers.describe(), flush=True)
        return chosen
    why = "they could not be installed" if with_peers else "--no-peers"
    print(f"measured without peers: {why}", flush=True)
    return [each for each in chosen if not each.peer]


def _read_words() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=_ABOUT,
        epilog=_GROUPS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rounds", type=_positive, default=5, help="how many (default: 5)")
    parser.add_argument(
        "--only", action="append", choices=GROUPS, metavar="GROUP", help="may be given repeatedly"
    )
    parser.add_argument(
        "--no-peers", dest="peers", action="store_false", help="neither install nor measure peers"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write every figure there")
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path("build"),
        help="where to write; its disk is the one that is measured (default: build)",
    )
    parser.add_argument(
        "--quiet",
        type=float,
        default=30.0,
        metavar="SECONDS",
        help="wait up to this long in each round for a quiet machine (default: 30)",
    )
    return parser.parse_args()


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("at least one round is needed")
    return number


def _noise(results: Results) -> str:
    loud = len(results.quiet) - len(results.quiet_rounds)
    if not loud:
        return ", all of them on a quiet machine"
    counted = len(results.counted("fdatasync"))
    told = "they do not count" if counted < len(results.quiet) else "too many to leave them out"
    return f"; in {loud} of them the machine was busy with something else: {told}"


def _durability(results: Results) -> str:
    lines = ["what a record survives once it is acknowledged, and the syncs that took (strace):"]
    lines += [
        f"  {name:<16} {count:6.3f} syncs a step   {find(name).durable}"
        for name, count in results.syncs.items()
    ]
    return "\n".join(lines)


def _write_json(path: Path, results: Results, table: list[Row], about: str) -> None:
    written = {
        "machine": about,
        "table": [row._asdict() for row in table],
        "rounds": results.figures,
        "syncs_per_step": results.syncs,
        "quiet": [quiet._asdict() for quiet in results.quiet],
    }
    path.write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
