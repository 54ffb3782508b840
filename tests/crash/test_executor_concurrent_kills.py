"""Fifty steps at once, killed twenty times at random moments: none is lost, none done twice."""

from __future__ import annotations

import random
import signal
import sys
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

from faults.child_processes import MAX_SECONDS, ChildProcesses, ObservedRun, names_of

if TYPE_CHECKING:
    from pathlib import Path

    from maestro_hive.maestro.state.projections import RunState

SEED = 2030
STEPS, KILLS, LONGEST = 50, 20, 0.6


def open_steps(state: RunState) -> int:
    return sum(step.open_attempt > 0 for step in state.steps.values())


def options(seed: int, most: int) -> dict[str, Any]:
    return {"seed": seed, "steps": STEPS, "kills": KILLS, "longest": LONGEST, "most": most}


def test_fifty_steps_at_once_survive_twenty_kills(tmp_path: Path) -> None:
    observed, rng = ObservedRun(tmp_path, {}), random.Random(SEED)
    landed: list[int] = []
    with ChildProcesses("tests.crash.executor_workflows") as children:
        for start_number in range(KILLS):
            acknowledged_before = acknowledged(observed)
            first_start = len(observed.starts())
            more = rng.choice((0, 1, 2, 3)) if len(acknowledged_before) < 38 else 0
            left = STEPS - len(completed_in(observed.journal())) if start_number else STEPS
            most = min(more + 2, left - 1)  # however late the kill is, it finds something to do
            process = children.start("concurrent_steps", tmp_path, **options(start_number, most))
            process.wait_for_report("up")
            wait_for_acknowledged(observed, len(acknowledged_before) + more)
            time.sleep(rng.uniform(0, 0.02))
            process.kill()
            assert process.end() == -signal.SIGKILL, "it was done before it was killed"
            state = observed.journal()
            landed.append(open_steps(state))
            started = observed.starts()[first_start:]
            assert not acknowledged_before & set(started), "an acknowledged step was started again"
            assert acknowledged(observed) <= completed_in(state)
        end = children.run("concurrent_steps", tmp_path, **options(KILLS, STEPS))
    sys.stdout.write(f"begun and not recorded at each kill, seed {SEED}: {landed}\n")
    assert landed[-1] < landed[0], "nothing was kept between the kills"
    assert sum(each > 0 for each in landed) >= 0.8 * KILLS
    assert end["squares"] == [number * number for number in range(STEPS)]
    assert sorted(end["completed"]) == sorted(f"s{number}" for number in range(STEPS))
    check_notes(end)
    check_limits(observed, observed.journal())


def wait_for_acknowledged(observed: ObservedRun, count: int) -> None:
    """Wait until that many steps were acknowledged: a slow machine is killed no earlier."""
    deadline = time.monotonic() + MAX_SECONDS
    while len(acknowledged(observed)) < count:
        assert time.monotonic() < deadline
        time.sleep(0.001)


def check_notes(end: dict[str, Any]) -> None:
    """What the steps noted is there; what was noted just before a kill may be there twice."""
    persona = end["persona"]
    assert set(persona["history"]) == set(range(STEPS))
    assert sorted(persona["memory"], key=int) == [str(number) for number in range(STEPS)]
    assert STEPS <= end["tokens"] <= len(persona["history"]) <= STEPS + KILLS


def acknowledged(observed: ObservedRun) -> set[str]:
    """Return the steps that were acknowledged."""
    return {f"s{line['acknowledged']}" for line in observed.reports() if "acknowledged" in line}


def completed_in(state: RunState) -> set[str]:
    names = names_of(state)
    return {names[number] for number, step in state.steps.items() if step.completed is not None}


def check_limits(observed: ObservedRun, state: RunState) -> None:
    """The journal knows of every start, and nobody was started more often than allowed."""
    starts = Counter(observed.starts())
    for number, name in names_of(state).items():
        step = state.steps[number]
        assert 0 <= step.starts - starts[name] <= KILLS, "a start is not in the journal"
        assert step.interruptions <= KILLS
        assert step.starts <= 3 + KILLS
        assert step.failures == (int(name[1:]) % 7 == 0)
        assert step.starts == 1 + step.failures + step.interruptions
