"""A task graph of trivial tasks, through ``TeamRunner`` and ``maestro run``, beside steps of a hive.

The steps have values like those of tasks, and are executed one by one, which is what a task is
compared with, and as many at once as the team has workers.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import work
from benchmarks.contender import Contender, Figures, measured
from benchmarks.contenders.hive_start import median_seconds
from benchmarks.contenders.hive_steps import DURABLE, warm
from maestro_hive import Hive
from maestro_hive.team.graph import check_graph
from maestro_hive.team.runner import TeamRunner

if TYPE_CHECKING:
    from maestro_hive.team.personas import Assignment

TASKS = 300 if work.QUICK else 1_000
#: Memory is compared between the starts of these tasks.
EARLY, LATE = 100, TASKS
MANY_TASKS = 10_000
WORKERS = 8
#: How many tasks are in a row of the graph; each depends on the one above it.
_WIDTH = 100
_RUN = "team"
_seen: list[float] = []


async def task(call: Assignment) -> dict[str, object]:
    """Do what a task does: return about 100 bytes."""
    _seen.append(_megabytes() if len(_seen) + 1 in (EARLY, LATE) else 0.0)
    return work.result(int(call.id[1:]))


def _megabytes() -> float:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def _document(tasks: int) -> bytes:
    made = [
        {
            "id": f"T{number}",
            "title": f"Task {number}",
            "description": "",
            "dependencies": [f"T{number - _WIDTH}"] if number >= _WIDTH else [],
        }
        for number in range(tasks)
    ]
    persona = {"python": f"{__name__}:task"}
    return json.dumps({"feature": "bench", "persona": persona, "tasks": made}).encode()


def _tasks(folder: Path) -> Figures:
    """Execute the graph by ``TeamRunner``."""
    graph = check_graph(_document(TASKS)).graph
    assert graph is not None
    _seen.clear()

    async def main() -> Figures:
        async with Hive(folder / "state") as hive:
            await warm(hive)
            runner, cpu = TeamRunner(hive, workers=WORKERS), time.process_time()
            with measured() as span:
                await runner.run(graph, run_id=_RUN, folder=folder)
            cpu = time.process_time() - cpu
        return {
            "steps": TASKS,
            "seconds": span.seconds / TASKS,
            "cpu": cpu / TASKS,
            "grown": _seen[LATE - 1] - _seen[EARLY - 1],
        }

    return asyncio.run(main())


def _input(number: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what a task of the graph is executed with."""
    given = {
        "id": f"T{number}",
        "title": f"Task {number}",
        "prompt": f"T{number}: Task {number}\n",
        "persona": {"python": f"{__name__}:task"},
        "files": [],
    }
    above = number - _WIDTH
    results = {f"T{above}": {"files": {}, "value": work.result(above)}} if above >= 0 else {}
    return given, results


def _steps(folder: Path, *, at_once: int) -> Figures:
    """Let one run do as many steps with values like those of the tasks."""
    hive = Hive(folder)

    @hive.step(persona="writer")
    async def draft(given: dict[str, Any], results: dict[str, Any]) -> dict[str, Any]:
        return {"files": {}, "value": work.result(int(given["id"][1:]) + 0 * len(results))}

    @hive.workflow
    async def run(count: int) -> None:
        numbers = iter(range(count))

        async def chain() -> None:
            for number in numbers:
                await draft(*_input(number))

        await asyncio.gather(*(chain() for _ in range(at_once)))

    async def main() -> Figures:
        async with hive:
            await warm(hive)
            cpu = time.process_time()
            with measured() as span:
                await hive.run(run, TASKS)
            cpu = time.process_time() - cpu
        return {"steps": TASKS, "seconds": span.seconds / TASKS, "cpu": cpu / TASKS}

    return asyncio.run(main())


# --- the command ----------------------------------------------------------------------------------


def _maestro(folder: Path, *words: str) -> list[str]:
    maestro = str(Path(sys.executable).with_name("maestro"))
    return [maestro, *words, "--store", str(folder.resolve() / "state")]


def _run_command(folder: Path) -> None:
    path = folder.resolve() / "graph.json"
    path.write_bytes(_document(TASKS))
    command = _maestro(folder, "run", str(path), "--run-id", _RUN, "--workers", str(WORKERS))
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    subprocess.run(command, check=True, capture_output=True, cwd=folder, env=env)


def _command(folder: Path) -> Figures:
    """Execute the graph by ``maestro run``, with all that it prints, from its start to its end."""
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    _run_command(folder)
    seconds = time.perf_counter() - started
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"steps": TASKS, "seconds": seconds / TASKS, "cpu": cpu / TASKS}


def _status(folder: Path) -> Figures:
    return {"seconds": median_seconds(_maestro(folder, "status", _RUN), folder)}


def _plan(_: Path) -> Figures:
    data = _document(MANY_TASKS)
    started, cpu = time.perf_counter(), time.process_time()
    plan = check_graph(data).plan
    assert plan is not None
    seconds = time.perf_counter() - started
    return {"seconds": seconds, "cpu": time.process_time() - cpu}


CONTENDERS = (
    Contender(name="team/tasks", group="team", measure=_tasks, durable=DURABLE, unit="task"),
    Contender(
        name="team/steps",
        group="team",
        measure=partial(_steps, at_once=WORKERS),
        durable=DURABLE,
    ),
    Contender(name="team/steps-alone", group="team", measure=partial(_steps, at_once=1)),
    Contender(name="team/command", group="team", measure=_command),
    Contender(name="team/status", group="team", measure=_status, prepare=_run_command, filled=True),
    Contender(name="team/plan", group="team", measure=_plan),
)
