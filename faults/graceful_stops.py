"""Row 9: SIGTERM and SIGINT at random moments; no attempt is used up, and the run resumes."""

from __future__ import annotations

import random
import signal
import time
from collections import Counter
from itertools import count
from typing import TYPE_CHECKING

from faults.child_processes import ChildProcesses, ObservedRun, names_of
from faults.executor_workflows import BACKOFF, FLAKY, STEPS, WORK
from faults.registry import Outcome, Plan, row

if TYPE_CHECKING:
    from faults.child_processes import ChildProcess
    from maestro_hive.maestro.state.projections import RunState

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_LONGEST = 5.0
#: Seconds that a busy run takes when it is not stopped.
_RUN_SECONDS = 7 * WORK + BACKOFF + 0.1


@row(
    9,
    "a graceful stop is quick, resumable, and uses up no attempt",
    "200 stops, exit within 5 s, no attempt used up",
)
def graceful_stops(plan: Plan, outcome: Outcome) -> None:
    """Stop busy runs and sleeping steps, resume them, and check the counts."""
    rng = random.Random(plan.seed)
    stops = _Stops(outcome)
    with ChildProcesses("faults.executor_workflows") as children:
        wanted = plan.amount(quick=20, full=200)
        for number in plan.track("runs stopped", count(1), wanted):
            folder = plan.scratch / f"busy-{number}"
            _stop_until_completed(stops, children, ObservedRun(folder, {}), rng)
            if stops.landed.total() >= wanted:
                break
        sleepers = plan.amount(quick=4, full=40)
        for number in plan.track("sleeping threads stopped", range(sleepers), sleepers):
            _stop_sleeper(
                stops, children, ObservedRun(plan.scratch / f"sleeping-{number}", {}), rng
            )
    stops.report(plan.seed)


class _Stops:
    """What was measured of all stops."""

    def __init__(self, outcome: Outcome) -> None:
        self.outcome = outcome
        self.landed: Counter[str] = Counter()
        self.by_signal: Counter[str] = Counter()
        self.slowest = 0.0
        self.too_late = 0
        self.sleepers = 0

    def stop(self, process: ChildProcess, how: signal.Signals, where: str) -> bool:
        """Send the signal and wait for the end; return whether the signal ended it."""
        asked = time.monotonic()
        process.kill(how)
        code = process.end()
        seconds = time.monotonic() - asked
        self.slowest = max(self.slowest, seconds)
        require = self.outcome.require
        require(seconds < _LONGEST, f"{where}: {how.name} ended it after {seconds:.1f} s")
        if (
            "over" in process.reports()[-1] or "done" in process.reports()[-1]
        ):  # its signal handlers were already removed
            self.too_late += 1
            return False
        require(code == 128 + how, f"{where}: after {how.name} it ended with {code}")
        self.by_signal[how.name] += 1
        return True

    def report(self, seed: int) -> None:
        """Record what was measured."""
        signals = ", ".join(f"{number} {name}" for name, number in sorted(self.by_signal.items()))
        places = ", ".join(f"{place} {number}" for place, number in self.landed.most_common())
        self.outcome.ran += [
            f"{self.landed.total()} stops of busy runs at random moments, seed {seed}",
            f"{self.sleepers} of a thread in time.sleep(60)",
        ]
        self.outcome.measured += [
            f"{self.outcome.failed} wrong; exit after at most {self.slowest:.2f} s",
            signals,
            f"landed in: {places}; {self.too_late} after the run's end",
        ]


def _stop_until_completed(
    stops: _Stops, children: ChildProcesses, observed: ObservedRun, rng: random.Random
) -> None:
    """Stop and resume a run until it completes."""
    for number in range(100):
        process = children.start("busy", observed.folder)
        process.wait_for_report("up")
        time.sleep(rng.uniform(0, _RUN_SECONDS / 3))
        where = f"{observed.folder.name}, start {number}"
        if not stops.stop(process, rng.choice(_SIGNALS), where):
            break
        run = observed.journal()
        stops.landed[_place(run)] += 1
        _check_nothing_used_up(stops.outcome, run, observed, where)
    outputs = {
        line["step_completed"]: line["output"]
        for line in observed.reports()
        if "step_completed" in line
    }
    right = outputs == {name: name.upper() for name in STEPS}
    stops.outcome.require(right, f"{observed.folder.name}: the outputs are {outputs}")
    _check_repetitions(stops.outcome, observed)


def _place(run: RunState) -> str:
    """Return what a run was doing when it was stopped."""
    if not run.steps:
        return "nothing yet"
    last = max(run.steps.values(), key=lambda step: step.seq)
    if last.completed is not None:
        return "between steps"
    if last.log and last.log[-1] is last.last_failure:
        return "a backoff"
    return "a step"


def _check_nothing_used_up(
    outcome: Outcome, run: RunState, observed: ObservedRun, where: str
) -> None:
    names = names_of(run)
    failed = sum("fails" in line for line in observed.reports())
    for number, step in run.steps.items():
        name = names[number]
        outcome.require(not step.open_attempt, f"{where}: the end of {name} is not recorded")
        outcome.require(step.interruptions == 0, f"{where}: {name} used up an interruption")
        fair = step.failures == (failed if name == FLAKY else 0)
        outcome.require(fair, f"{where}: {name} has {step.failures} failures")
        seen = observed.starts().count(name)
        outcome.require(step.starts >= seen, f"{where}: {name} has {seen} starts, not recorded")
    completed = {names[number] for number, step in run.steps.items() if step.completed is not None}
    reported = {line["step_completed"] for line in observed.reports() if "step_completed" in line}
    lost = reported - completed
    outcome.require(not lost, f"{where}: {sorted(lost)} were acknowledged, and are lost")


def _check_repetitions(outcome: Outcome, observed: ObservedRun) -> None:
    """At the end every start has ended: by success, by failure or by a stop."""
    run = observed.journal()
    for number, name in names_of(run).items():
        step = run.steps[number]
        ended = step.failures + step.stops + 1
        right = step.completed is not None and step.starts == ended
        outcome.require(
            right, f"{observed.folder.name}: {name} started {step.starts} times, not {ended}"
        )


def _stop_sleeper(
    stops: _Stops, children: ChildProcesses, observed: ObservedRun, rng: random.Random
) -> None:
    for _ in range(2):
        process = children.start("sleeping", observed.folder)
        process.wait_for_report("sleeps")
        time.sleep(rng.uniform(0, 0.2))
        stopped = stops.stop(process, rng.choice(_SIGNALS), observed.folder.name)
        stops.outcome.require(stopped, f"{observed.folder.name}: the sleeper was not stopped")
        stops.sleepers += 1
        _check_nothing_used_up(stops.outcome, observed.journal(), observed, observed.folder.name)
    end = children.run("sleeping", observed.folder, awake=True)
    stops.outcome.require(
        end["completed"] == ["s1"], f"{observed.folder.name}: it did not complete"
    )
