"""Fifty steps at once, killed twenty times at random moments: none is lost, none done twice."""

from __future__ import annotations

import random
import signal
import sys
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

from faults.child_processes import PATIENCE, ChildProcesses, Scene, names_of

if TYPE_CHECKING:
    from pathlib import Path

    from maestro_hive.maestro.state.projections import RunState

SEED = 2030
STEPS, KILLS, LONGEST = 50, 20, 0.6


def open_steps(state: RunState) -> int:
    return sum(step.open_attempt > 0 for step in state.steps.values())


def options(seed: int) -> dict[str, Any]:
    return {"seed": seed, "steps": STEPS, "kills": KILLS, "longest": LONGEST}


def test_fifty_steps_at_once_survive_twenty_kills(tmp_path: Path) -> None:
    scene, rng = Scene(tmp_path, {}), random.Random(SEED)
    landed: list[int] = []
    with ChildProcesses("tests.crash.executor_workflows") as children:
        for life_number in range(KILLS):
            kept_before = kept(scene)
            first_start = len(scene.starts())
            life = children.start("crowd", tmp_path, **options(life_number))
            life.wait_until_it_says("up")
            more = rng.choice((0, 1, 2, 3)) if len(kept_before) < 38 else 0
            wait_for_kept(scene, len(kept_before) + more)
            time.sleep(rng.uniform(0, 0.02))
            life.kill()
            assert life.end() == -signal.SIGKILL, "it was done before it was killed"
            state = scene.journal()
            landed.append(open_steps(state))
            began = scene.starts()[first_start:]
            assert not kept_before & set(began), "an acknowledged step was started again"
            assert kept(scene) <= kept_in(state)
        end = children.run("crowd", tmp_path, **options(KILLS))
    sys.stdout.write(f"begun and not recorded at each kill, seed {SEED}: {landed}\n")
    assert landed[-1] < landed[0], "nothing was kept between the kills"
    assert sum(each > 0 for each in landed) >= 0.8 * KILLS
    assert end["squares"] == [number * number for number in range(STEPS)]
    assert sorted(end["completed"]) == sorted(f"s{number}" for number in range(STEPS))
    check_notes(end)
    check_limits(scene, scene.journal())


def wait_for_kept(scene: Scene, count: int) -> None:
    """Wait until that many steps were acknowledged: a slow machine is killed no earlier."""
    deadline = time.monotonic() + PATIENCE
    while len(kept(scene)) < count:
        assert time.monotonic() < deadline
        time.sleep(0.001)


def check_notes(end: dict[str, Any]) -> None:
    """What the steps noted is there; what was noted just before a kill may be there twice."""
    persona = end["persona"]
    assert set(persona["history"]) == set(range(STEPS))
    assert sorted(persona["memory"], key=int) == [str(number) for number in range(STEPS)]
    assert STEPS <= end["tokens"] <= len(persona["history"]) <= STEPS + KILLS


def kept(scene: Scene) -> set[str]:
    """Return the steps that were acknowledged."""
    return {f"s{line['kept']}" for line in scene.said() if "kept" in line}


def kept_in(state: RunState) -> set[str]:
    names = names_of(state)
    return {names[number] for number, step in state.steps.items() if step.completed is not None}


def check_limits(scene: Scene, state: RunState) -> None:
    """The journal knows of every start, and nobody was started more often than allowed."""
    starts = Counter(scene.starts())
    for number, name in names_of(state).items():
        step = state.steps[number]
        assert 0 <= step.starts - starts[name] <= KILLS, "a start is not in the journal"
        assert step.interruptions <= KILLS
        assert step.starts <= 3 + KILLS
        assert step.failures == (int(name[1:]) % 7 == 0)
        assert step.starts == 1 + step.failures + step.interruptions
