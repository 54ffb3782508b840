"""DBOS on SQLite, as it comes: a database in the contender's folder, all other settings its own.

It speaks to nobody: it is given no key for its service. Its steps are measured as coroutines and as
plain functions, which are the faster ones; resuming is measured with those.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from typing import TYPE_CHECKING, Any

from benchmarks import steps
from benchmarks.contender import Contender, Figures, measured
from benchmarks.contenders.executing import AT_ONCE, SEQUENTIAL_STEPS, draft
from benchmarks.contenders.resuming import COUNT

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

_STEPS_AT_ONCE = 10
_WARM_STEPS = 50
_DURABLE = "power cut (rollback journal, synchronous=FULL: SQLite's defaults)"
_RESUME_SECONDS = 600


def _dbos() -> Any:
    os.environ["DBOS__CLOUD"] = "false"  # where it is true, it connects to its service
    from dbos import DBOS  # type: ignore[import-not-found]

    return DBOS


def _launch(folder: Path) -> None:
    """Start DBOS; what shall run, or go on, must have been registered before."""
    dbos = _dbos()
    dbos(
        config={
            "name": "bench",
            "system_database_url": f"sqlite:///{folder / 'dbos.sqlite'}",
            "application_version": "1",
            "executor_id": "bench",
            "log_level": "WARNING",
        }
    )
    dbos.launch()


def _one_by_one(folder: Path) -> Figures:
    dbos = _dbos()
    step = dbos.step()(draft)

    async def run(count: int) -> None:
        for number in range(1, count + 1):
            await step(number)

    async def timed(count: int) -> float:
        with measured() as span:  # in here: only its steps, not what beginning and ending take
            await run(count)
        return span.seconds

    warm, workflow = dbos.workflow()(run), dbos.workflow()(timed)
    _launch(folder)

    async def main() -> Figures:
        await warm(_WARM_STEPS)
        seconds = await workflow(SEQUENTIAL_STEPS)
        return {"steps": SEQUENTIAL_STEPS, "rate": SEQUENTIAL_STEPS / seconds}

    found = asyncio.run(main())
    dbos.destroy()
    return found


def _one_by_one_plain(folder: Path) -> Figures:
    dbos = _dbos()
    step = dbos.step()(steps.result)

    def run(count: int) -> None:
        for number in range(1, count + 1):
            step(number)

    def timed(count: int) -> float:
        with measured() as span:
            run(count)
        return span.seconds

    warm, workflow = dbos.workflow()(run), dbos.workflow()(timed)
    _launch(folder)
    warm(_WARM_STEPS)
    seconds = workflow(SEQUENTIAL_STEPS)
    dbos.destroy()
    return {"steps": SEQUENTIAL_STEPS, "rate": SEQUENTIAL_STEPS / seconds}


def _many_at_once(folder: Path) -> Figures:
    """Let 64 workflows, all begun before, do their steps at once."""
    dbos = _dbos()
    step = dbos.step()(draft)
    gates: list[asyncio.Barrier] = []

    async def run(count: int) -> None:
        for number in range(1, count + 1):
            await step(number)

    async def gated(count: int) -> None:
        await gates[0].wait()
        await run(count)
        await gates[0].wait()

    warm, workflow = dbos.workflow()(run), dbos.workflow()(gated)
    _launch(folder)

    async def main() -> Figures:
        gates.append(asyncio.Barrier(AT_ONCE + 1))
        await warm(_WARM_STEPS)
        tasks = [asyncio.ensure_future(workflow(_STEPS_AT_ONCE)) for _ in range(AT_ONCE)]
        await gates[0].wait()
        with measured() as span:
            await gates[0].wait()
        await asyncio.gather(*tasks)
        count = AT_ONCE * _STEPS_AT_ONCE
        return {"steps": count, "rate": count / span.seconds}

    found = asyncio.run(main())
    dbos.destroy()
    return found


def _resumable(called: list[int], at_end: Callable[[], None]) -> Any:
    """Return a workflow of 10,000 steps, and then whatever ends it."""

    def write(number: int) -> dict[str, object]:
        called.append(number)
        return steps.result(number)

    step = _dbos().step()(write)

    def run() -> None:
        for number in range(1, COUNT + 1):
            step(number)
        at_end()

    return _dbos().workflow()(run)


def _fill(folder: Path) -> None:
    workflow = _resumable([], lambda: os._exit(0))  # as a killed process ends
    _launch(folder)
    workflow()


def _resume(folder: Path) -> Figures:
    called: list[int] = []
    finished = threading.Event()
    _resumable(called, finished.set)
    started = time.perf_counter()
    _launch(folder)  # which goes on with what was interrupted, by itself
    assert finished.wait(_RESUME_SECONDS), "DBOS did not go on with its workflow"
    seconds = time.perf_counter() - started
    assert not called, "a finished step was run again"
    _dbos().destroy()
    return {"seconds": seconds}


CONTENDERS = (
    Contender(name="dbos", group="execute", peer="DBOS", measure=_one_by_one, durable=_DURABLE),
    Contender(
        name="dbos-plain", group="execute", peer="DBOS", measure=_one_by_one_plain, durable=_DURABLE
    ),
    Contender(
        name="dbos-64", group="execute", peer="DBOS", measure=_many_at_once, durable=_DURABLE
    ),
    Contender(
        name="dbos-resume", group="resume", peer="DBOS", measure=_resume, prepare=_fill, filled=True
    ),
)
