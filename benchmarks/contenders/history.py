"""What a step costs when thousands came before it."""

from __future__ import annotations

import asyncio
import statistics
import time
from typing import TYPE_CHECKING

from benchmarks import steps
from benchmarks.contender import Contender, Figures
from maestro_hive import ExecutionConfig, StatePersistence
from maestro_hive.engine.config import StateConfig
from maestro_hive.maestro.state.recorder import Recorder
from maestro_hive.maestro.state.sqlite.store import SqliteStore

if TYPE_CHECKING:
    from pathlib import Path

_EARLY, _LATE = 100, 10_000
#: Steps measured before and after each of these.
_AROUND = 80


def _steps(folder: Path) -> Figures:
    async def main() -> Figures:
        store = SqliteStore(folder)
        recorder = Recorder(store)
        await steps.warm(store, recorder)
        hold = store.acquire_run("run")
        found: Figures = {}
        done = 0
        for name, middle in (("early", _EARLY), ("late", _LATE)):
            steps.fill(store, hold, done + 1, middle - _AROUND)
            await asyncio.to_thread(store.checkpoint)  # both windows begin with an empty log
            took = []
            for number in range(middle - _AROUND + 1, middle + _AROUND + 1):
                started = time.perf_counter()
                await steps.record(recorder, hold, number)
                took.append(time.perf_counter() - started)
            found[name] = statistics.median(took)
            done = middle + _AROUND
        store.close()
        return found

    return asyncio.run(main())


def _tasks(folder: Path) -> Figures:
    config = ExecutionConfig(
        state=StateConfig(state_dir=str(folder), checkpoint_dir=str(folder / "checkpoints"))
    )
    with StatePersistence(config, "warm-up") as other:
        for number in range(600):
            other.mark_task_completed(f"task-{number}")
    took = []
    with StatePersistence(config, "run") as persistence:
        for number in range(1, _LATE + _AROUND + 1):
            started = time.perf_counter()
            persistence.mark_task_completed(f"task-{number}", {f"artifact-{number}": "report.md"})
            took.append(time.perf_counter() - started)
    return {
        name: statistics.median(took[middle - _AROUND : middle + _AROUND])
        for name, middle in (("early", _EARLY), ("late", _LATE))
    }


CONTENDERS = (
    Contender(name="late-step", group="history", measure=_steps),
    Contender(name="late-task", group="history", measure=_tasks),
)
