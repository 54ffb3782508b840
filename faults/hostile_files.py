"""Row 10: hostile files are refused, quickly and with an error of ours."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

from faults.registry import Outcome, Plan, row
from faults.strace import ROOT

if TYPE_CHECKING:
    from pathlib import Path

_MOST_SECONDS, _MOST_BYTES = 1.0, 100 << 20


@row(
    10,
    "hostile files are refused",
    "≥ 150 files and a fuzzer: only errors of ours, ≤ 1 s and ≤ 100 MB each",
)
def hostile_files(plan: Plan, outcome: Outcome) -> None:
    """Offer each hostile file at each door, in processes whose time and memory are measured."""
    before = outcome.failed
    reports = _readings(plan, "files", 240)
    slowest = max((each["seconds"] for each in reports), default=0.0)
    largest = max((each["grown"] for each in reports), default=0)
    for each in reports:
        what = f"{each['file']} as {each['door']}"
        outcome.require(each["end"] != "raw", f"{what}: {each['error']}")
        outcome.require(each["end"] != "taken", f"{what}: it was taken")
        outcome.require(each["seconds"] <= _MOST_SECONDS, f"{what}: {each['seconds']:.1f} s")
        outcome.require(each["grown"] <= _MOST_BYTES, f"{what}: {each['grown'] >> 20} MB")
    outcome.ran.append(f"{len(reports)} hostile files at 4 doors")
    outcome.require(len(reports) >= 150, f"only {len(reports)} files were tried")
    outcome.measured.append(
        f"{outcome.failed - before} wrong; slowest {slowest:.2f} s; most memory {largest >> 20} MB"
    )
    _fuzz(plan, outcome)


def _fuzz(plan: Plan, outcome: Outcome) -> None:
    seconds = plan.amount(quick=20, full=600)
    plan.say(f"fuzzing for {seconds} s")
    (report,) = _readings(plan, f"fuzz:{plan.seed}:{seconds}", seconds + 240)
    for error in report["errors"]:
        outcome.fail(f"fuzzer: {error}")
    outcome.ran.append(f"a seeded mutation fuzzer for {seconds} s")
    outcome.measured.append(
        f"{report['tried']:,} mutants, {len(report['errors'])} raw errors,"
        f" slowest {report['slowest']:.2f} s"
    )
    outcome.require(report["slowest"] <= _MOST_SECONDS, "a mutant took more than 1 s")


def _readings(plan: Plan, work: str, seconds: float) -> list[dict[str, Any]]:
    folder: Path = plan.scratch / work.partition(":")[0]
    folder.mkdir()
    done = subprocess.run(
        [sys.executable, "-m", "faults.doors", work, str(folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=seconds,
    )
    if done.returncode:
        raise RuntimeError(f"the reader ended with {done.returncode}: {done.stderr[-500:]}")
    return [json.loads(line) for line in done.stdout.splitlines()]
