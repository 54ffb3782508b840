"""Row 22: a task graph that is executed by a team, and whose engine is killed.

Each command writes when it starts to a file that all of them add to; the journal says what was recorded
as completed at the time of a kill. A fourth of the kills is aimed at the guard as well: then the next
engine has to end what the dead one left. Next to it, the same graph is executed undisturbed.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from faults.child_processes import ChildProcesses
from faults.registry import Outcome, Plan, row
from maestro_hive import Hive
from maestro_hive.engine.config import ExecutionConfig, Level1Config, Level2Config
from maestro_hive.kernel.errors import MaestroError
from maestro_hive.maestro.state import events
from maestro_hive.team.graph import check_graph
from maestro_hive.team.runner import TeamRunner
from maestro_hive.team.state import ExecutionState, TaskStatus
from maestro_hive.team.state_file import PATH

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from faults.child_processes import ChildProcess, ObservedRun
    from maestro_hive.team.graph import Graph

LEVELS, IN_LEVEL, WORKERS = 5, 6, 8
#: Which part of the kills is aimed at the guard, too.
_GUARDS_TOO = 0.25
_PATIENCE = 60.0

#: What a task does: says that it started, takes its time, and makes its file of those before it.
_SCRIPT = """
echo "$MAESTRO_TASK_ID" >> ../ledger
(sleep {seconds}; exit 0) & wait
{{ echo "$MAESTRO_TASK_ID"; cat /dev/null {inputs} | cksum; }} > {output}
"""


def make_graph(seed: int, step_seconds: float) -> Graph:
    """Return a graph of 30 tasks in 5 levels, each after two or three of the level before."""
    rng = random.Random(seed)
    tasks: list[dict[str, Any]] = []
    before: list[str] = []
    for level in range(1, LEVELS + 1):
        names = [f"T-L{level}-{number}" for number in range(1, IN_LEVEL + 1)]
        for name in names:
            after = sorted(rng.sample(before, rng.randint(2, 3))) if before else []
            script = _SCRIPT.format(
                seconds=round(rng.uniform(step_seconds / 4, step_seconds), 3),
                inputs=" ".join(f"out/{each}" for each in after),
                output=f"out/{name}",
            )
            tasks.append(
                {
                    "id": name,
                    "title": name,
                    "level": level,
                    "dependencies": after,
                    "files": {"create": [f"out/{name}"]},
                    "persona": {"command": ["sh", "-c", script]},
                    "verification": {"command": f"test -s out/{name}"},
                }
            )
        before = names
    gate = {"name": "half", "command": "test $(ls out | wc -l) -ge 12"}
    levels = {
        str(number): {
            "name": f"level {number}",
            "tasks": [each["id"] for each in tasks if each["level"] == number],
            "gates": [gate] if number == 2 else [],
        }
        for number in range(1, LEVELS + 1)
    }
    checked = check_graph(
        json.dumps({"feature": "kills", "tasks": tasks, "levels": levels}).encode()
    )
    assert checked.graph is not None, checked.errors
    return checked.graph


def make_hive(folder: Path) -> Hive:
    """Return the hive of an engine."""
    config = ExecutionConfig(
        # Many: twenty kills may all hit the same task.
        level1=Level1Config(base_delay_seconds=0, max_interruptions=1000),
        level2=Level2Config(base_delay_seconds=0),
    )
    return Hive(folder / "state", config)


async def execute(observed: ObservedRun) -> None:
    """Execute the graph to its end, or until this process is killed."""
    options = observed.options
    graph = make_graph(options["seed"], options["step_seconds"])
    hive = make_hive(observed.folder)
    runner = TeamRunner(hive, workers=WORKERS)
    work = observed.folder / "work"
    result = await runner.run(graph, run_id=options["run"], folder=work)
    observed.report(result=result)


WORKFLOWS = {"engine": execute}


# --- the kills ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Attack:
    """How often an engine is killed."""

    seed: int
    kills: int
    #: How long a task takes at most.
    step_seconds: float = 0.4


@dataclass(slots=True, kw_only=True)
class Seen:
    """What was left, and what was seen meanwhile."""

    folder: Path
    run: str
    result: Any = None
    twin: Any = None
    kills: int = 0
    guards_killed: int = 0
    #: How many tasks the kills cut off.
    cut_off: int = 0
    #: What was completed at a kill, and how much of the ledger there was.
    completed: list[tuple[set[str], int]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def attack_team(
    attack: Attack, folder: Path, track: Callable[[Iterable[int]], Iterable[int]] = iter
) -> Seen:
    """Kill the engine of a team run as often as wanted, then let it end; next to it, leave one alone."""
    rng = random.Random(attack.seed)
    seen = Seen(folder=folder, run=f"killed-{attack.seed}-{os.getpid()}-{time.monotonic_ns()}")
    given = {"seed": attack.seed, "step_seconds": attack.step_seconds}
    for name in ("twin", "killed"):
        (folder / name / "work" / "out").mkdir(parents=True)
    with ChildProcesses("faults.team_kills") as children:
        twin = {**given, "step_seconds": 0.01} if attack.kills < 10 else given
        seen.twin = _result(children.start("engine", folder / "twin", run="twin", **twin))
        for kill in track(range(attack.kills)):
            engine = children.start("engine", folder / "killed", run=seen.run, **given)
            left = attack.kills - kill
            _kill(engine, seen, rng, attack.step_seconds, left)
            engine.end()
        seen.result = _result(children.start("engine", folder / "killed", run=seen.run, **given))
    everything = {task.id for task in make_graph(attack.seed, attack.step_seconds).tasks}
    _check_state_file(seen, everything)
    if left_alive := processes_of(seen.run):
        seen.problems.append(f"alive after the last engine: {left_alive}")
    return seen


def _result(engine: ChildProcess) -> Any:
    return engine.finish()["result"]


def _kill(
    engine: ChildProcess, seen: Seen, rng: random.Random, step_seconds: float, left: int
) -> None:
    """Kill an engine while it executes tasks."""
    before = len(_ledger(seen))
    survivors = processes_of(seen.run)
    _wait_until(lambda: len(_ledger(seen)) > before, f"no task started: {engine.reports()}")
    if alive := [each for each in survivors if is_alive(each)]:
        seen.problems.append(f"alive when the next attempts started: {alive}")
    done = max((len(each) for each, _ in seen.completed), default=0)
    share = min(1.0, (LEVELS * IN_LEVEL - done) / (2 * left))
    time.sleep(rng.uniform(0, 1.2 * step_seconds) * share)
    if rng.random() < _GUARDS_TOO:
        guards = guards_of(engine.pid)
        seen.guards_killed += len(guards)
        for guard in guards:
            os.kill(guard, signal.SIGKILL)
        engine.kill()
    else:
        engine.kill()
        _wait_until(lambda: not processes_of(seen.run), "the guard has left processes")
    seen.kills += 1
    completed = completed_of(seen)
    started = _ledger(seen)
    seen.cut_off += len(set(started[before:]) - completed)
    seen.completed.append((completed, len(started)))
    _check_state_file(seen, completed)


def _check_state_file(seen: Seen, completed: set[str]) -> None:
    """Note it if the state file is not valid, or says that more is complete than is recorded."""
    try:
        state = ExecutionState.load(seen.folder / "killed" / "work" / PATH)
    except (MaestroError, ValueError) as error:
        seen.problems.append(f"the state file is not valid: {error}")
        return
    tasks = {} if state is None else state.tasks
    found = {each for each, task in tasks.items() if task.status is TaskStatus.COMPLETE}
    if not found <= completed:
        seen.problems.append(f"the state file is ahead of the journal: {found - completed}")


def _wait_until(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + _PATIENCE
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.002)


def _ledger(seen: Seen) -> list[str]:
    path = seen.folder / "killed" / "ledger"
    return path.read_text().split("\n")[:-1] if path.exists() else []


def _events(seen: Seen) -> list[events.RunEvent]:
    async def read() -> list[events.RunEvent]:
        with make_hive(seen.folder / "killed") as hive:
            return [each async for each in hive.events(seen.run, follow=False)]

    return asyncio.run(read())


def completed_of(seen: Seen) -> set[str]:
    """Return the tasks that are recorded as completed."""
    return {each.name for each in _events(seen) if isinstance(each, events.StepCompleted)}


def processes_of(run: str) -> list[int]:
    """Return the processes that were started by a run, and are alive."""
    mark = f"MAESTRO_RUN_ID={run}".encode()
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            is_of_run = mark in (process / "environ").read_bytes().split(b"\0")
            if is_of_run and is_alive(int(process.name)):
                found.append(int(process.name))
    return found


def is_alive(pid: int) -> bool:
    """Return whether a process executes; one that nobody has waited for does not."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return text.rpartition(")")[2].split()[0] not in "ZX"


def guards_of(engine: int) -> list[int]:
    """Return the processes that read the pipes which an engine writes to."""
    pipes = set()
    for file in Path(f"/proc/{engine}/fd").iterdir():
        with suppress(OSError):  # it was closed meanwhile
            pipes.add(str(file.readlink()))
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            is_guard = "groups" in (process / "cmdline").read_text()
            if is_guard and str((process / "fd/0").readlink()) in pipes:
                found.append(int(process.name))
    return found


# --- what was promised ----------------------------------------------------------------------------


def check_team(seen: Seen, outcome: Outcome) -> None:
    """Compare what was left with what is promised, and with the twin."""
    require = outcome.require
    for problem in seen.problems:
        outcome.fail(problem)
    ledger = _ledger(seen)
    again = [
        name
        for completed, length in seen.completed
        for name in ledger[length:]
        if name in completed
    ]
    require(not again, f"completed, and executed again: {again[:5]}")
    late = _started_after_completion(seen)
    require(not late, f"started after their completion was recorded: {late[:5]}")
    require(seen.result == seen.twin, "the result is not that of the undisturbed twin")
    made, expected = (_files(seen.folder / name / "work" / "out") for name in ("killed", "twin"))
    require(made == expected, f"files differ: {sorted(made.items() ^ expected.items())[:5]}")
    require(len(expected) == LEVELS * IN_LEVEL, f"the twin has {len(expected)} files")
    outcome.measured.append(
        f"{seen.kills} kills ({seen.guards_killed} guards, too) cut {seen.cut_off} tasks off;"
        f" {len(ledger)} bodies of {len(expected)} tasks, {len(again) + len(late)} after completion;"
        f" {len(made)} files as those of the twin; 0 processes left"
    )


def _started_after_completion(seen: Seen) -> list[str]:
    completed: set[int] = set()
    late = []
    for event in _events(seen):
        if isinstance(event, events.StepCompleted):
            completed.add(event.step)
        elif isinstance(event, events.StepStarted) and event.step in completed:
            late.append(event.name)
    return late


def _files(folder: Path) -> dict[str, str]:
    return {each.name: each.read_text() for each in folder.iterdir()}


@row(
    22,
    "a killed team run does no task twice and leaves no process",
    "0 after completion, 0 differences, 0 processes",
)
def killed_teams(plan: Plan, outcome: Outcome) -> None:
    """Kill the engine of a graph of 30 tasks with 8 workers 20 times; in full, of ten graphs."""
    graphs, kills = plan.amount(quick=1, full=10), 20
    for number in range(graphs):
        attack = Attack(seed=plan.seed + number, kills=kills)
        seen = attack_team(
            attack,
            plan.scratch / f"team-{number}",
            lambda each: plan.track("kills of the engine", each, kills),
        )
        check_team(seen, outcome)
        outcome.require(seen.cut_off >= 0.8 * seen.kills, f"only {seen.cut_off} tasks were cut off")
    outcome.ran.append(f"{graphs} graphs of {LEVELS * IN_LEVEL} tasks, {kills} kills each")
