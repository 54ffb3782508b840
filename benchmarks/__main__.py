"""``make bench``: measure, show progress, print one table."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks import figures, machine, peers, postgres
from benchmarks.contest import Contest, Results
from benchmarks.registry import ANCHOR, Registry

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
needs them. Where that fails, their rows say so and everything else is measured. Absurd needs a
Postgres server, too: one is started for it on loopback, where Postgres is installed.
"""

_GROUPS = """\
groups for --only, which also takes the beginning of several, such as hive:
  raw           write + fdatasync, and SQLite's own commit; measured in any case

 through Hive, a workflow that calls steps:
  hive-steps*   steps one by one, coroutines and plain functions: DBOS, LangGraph, Absurd, Burr
  hive-64*      64 at once, in one run and in 64 runs: DBOS, LangGraph, Absurd
  hive-payload* 2 KB in and 8 KB out, 100 KB out: LangGraph, DBOS, Burr, Absurd
  hive-runs*    runs of 3 steps and of 1 step, one by one and 64 at once: LangGraph, Absurd, DBOS
  hive-rows     12 MB of rows, with dates and enums too: against json.dumps, and the loop blocked
  hive-resume   completed steps on replay; 100,000 of them in all (filled once, about a minute)
  hive-start    importing Hive; `maestro runs` with 200 and with 50,000 runs
  queue*        runs that workers take, 1 and 4 processes: rate, and latency from enqueue: DBOS
  hive-growth*  a list that grows by 4 KB a step: LangGraph, Burr, DBOS
  team          a graph of 1,000 trivial tasks beside as many steps, by TeamRunner and `maestro run`;
                its memory; `maestro status` of it; a graph of 10,000 tasks, planned

 below Hive:
  record        steps recorded one by one, 64 and 512 at once, behind a busy loop
  execute*      steps through the executor, one by one and 64 at once: DBOS, LangGraph
  resume*       a run of 10,000 finished steps gone through again in a fresh process: DBOS
                (filling it for DBOS takes a minute, once)
  retry*        what retrying adds in memory to a call that succeeds: tenacity, stamina; the breaker
  processes     four processes on one folder: in all, fairness, worst wait
  history       the ten-thousandth step and task against the hundredth
  open          a run of 10,000 finished steps opened in a fresh process
  import        importing the package, and `maestro --version`
  growth        a list that grows by 4 KB a step, as stored; checkpoint files
                (5,000 steps of it take a minute or two)

examples:
  make bench                                         everything, 5 rounds
  make bench ARGS="--only hive-steps --quick"        one scenario, in less than a minute
  make bench ARGS="--only hive --rounds 9"           all through Hive, thoroughly
  make bench ARGS="--json figures.json"              keep every figure of every round
  make bench-walk                                    count the calls that one step makes

A target that is not reached is said in the table; the exit status is 0 all the same. It is 1 when
a contender failed; everything else is measured then, too.
"""


def main() -> None:
    """Read the words, hold the contest, print the table."""
    registry = Registry()
    words = _read_words(registry.groups)
    if words.quick:
        os.environ["MAESTRO_BENCH_QUICK"] = "1"  # for the processes of the contenders
    folder: Path = words.folder
    folder.mkdir(parents=True, exist_ok=True)
    print(machine.describe(folder), flush=True)
    for module, why in registry.broken.items():
        print(f"measured without benchmarks.contenders.{module}: {why}", flush=True)
    groups = [ANCHOR, *(words.only or registry.groups)]
    chosen = [each for each in registry.contenders if each.group in groups]
    results = _measure(registry, chosen, words)
    table = figures.rows(results)
    print(f"\nmedians of {words.rounds} rounds{_noise(results)}\n\n{figures.as_text(table)}")
    if results.syncs:
        print(f"\n{_durability(results, chosen)}")
    if words.json:
        _write_json(words.json, results, table, machine.describe(folder))
    if any(why.startswith("FAILED") for why in results.absent.values()):
        sys.exit(1)


def _measure(registry: Registry, chosen: list[Contender], words: argparse.Namespace) -> Results:
    folder: Path = words.folder
    without = _without_peers(chosen, wanted=words.peers)
    with ExitStack() as stack:
        if any(each.postgres and each.name not in without for each in chosen):
            try:
                stack.enter_context(postgres.server(folder.resolve()))
            except postgres.NoPostgresError as error:
                print(f"measured without Postgres: {error}", flush=True)
                without |= {each.name: postgres.MISSING for each in chosen if each.postgres}
        place = stack.enter_context(tempfile.TemporaryDirectory(dir=folder, prefix="bench-"))
        contest = Contest(registry, Path(place), words.quiet, lambda line: print(line, flush=True))
        measured = [each for each in chosen if each.name not in without]
        results = contest.hold(measured, words.rounds, count_syncs=not words.quick)
    results.absent |= without
    return results


def _without_peers(chosen: list[Contender], *, wanted: bool) -> dict[str, str]:
    """Return the contenders whose peer is not to be had, after trying, and what their rows say."""
    needing = [each.name for each in chosen if each.peer]
    if not needing:
        return {}
    if wanted and peers.make_ready():
        print(peers.describe(), flush=True)
        return {}
    why = "they could not be installed" if wanted else "--no-peers"
    print(f"measured without peers: {why}", flush=True)
    return dict.fromkeys(needing, peers.MISSING)


def _read_words(groups: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=_ABOUT,
        epilog=_GROUPS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rounds", type=_positive, help="how many (default: 5, or 1 if quick)")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="one round, smaller numbers, no waiting and no strace: to see whether it works",
    )
    parser.add_argument(
        "--only",
        action="append",
        metavar="GROUP",
        help="a group, or the beginning of several; may be given repeatedly",
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
        metavar="SECONDS",
        help="wait up to this long in each round for a quiet machine (default: 30, or 0 if quick)",
    )
    words = parser.parse_args()
    words.rounds = words.rounds or (1 if words.quick else 5)
    words.quiet = words.quiet if words.quiet is not None else (0.0 if words.quick else 30.0)
    if words.only:
        unknown = [start for start in words.only if not _beginning_with(start, groups)]
        if unknown:
            parser.error(f"no group begins with {unknown[0]!r}; there are {', '.join(groups)}")
        words.only = [each for start in words.only for each in _beginning_with(start, groups)]
    return words


def _beginning_with(start: str, groups: list[str]) -> list[str]:
    """Return the group of that name, or all whose names begin with it."""
    return [start] if start in groups else [each for each in groups if each.startswith(start)]


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


def _durability(results: Results, chosen: list[Contender]) -> str:
    lines = ["what a record survives once it is acknowledged, and the syncs that took (strace):"]
    for each in chosen:
        if each.durable and results.has(each.name):
            count = results.syncs.get(each.name)
            syncs = "not counted" if count is None else f"{count:6.3f} syncs a {each.unit}"
            lines.append(f"  {each.name:<22} {syncs:<20} {each.durable}")
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
