"""Steps recorded from an event loop: one after another, many at once, behind a busy loop."""

from __future__ import annotations

import asyncio
import time
from functools import partial
from typing import TYPE_CHECKING

from benchmarks import steps
from benchmarks.contender import Contender, Figures, measured
from maestro_hive.maestro.state.recorder import Recorder
from maestro_hive.maestro.state.sqlite.store import SqliteStore

if TYPE_CHECKING:
    from pathlib import Path

_SEQUENTIAL_STEPS = 1_000
_BUSY_STEPS = 400
_BUSY_SECONDS = 0.0003


def _record(folder: Path, *, at_once: int, each: int, runs: int = 1) -> Figures:
    """Let ``at_once`` tasks record ``each`` steps, spread over ``runs`` runs."""

    async def main() -> Figures:
        store = SqliteStore(folder)
        recorder = Recorder(store)
        await steps.warm(store, recorder)
        holds = [store.acquire_run(f"run-{number}") for number in range(runs)]

        async def task(number: int) -> None:
            for step in range(each):
                await steps.record(recorder, holds[number % runs], step * at_once + number + 1)

        with measured() as span:
            await asyncio.gather(*(task(number) for number in range(at_once)))
        store.close()
        return {"steps": at_once * each, "rate": at_once * each / span.seconds}

    return asyncio.run(main())


def _behind_a_busy_loop(folder: Path) -> Figures:
    async def main() -> Figures:
        store = SqliteStore(folder)
        recorder = Recorder(store)
        await steps.warm(store, recorder)
        hold = store.acquire_run("run")
        busy = asyncio.create_task(_stay_busy())
        with measured() as span:
            for number in range(1, _BUSY_STEPS + 1):
                await steps.record(recorder, hold, number)
        busy.cancel()
        store.close()
        return {"steps": _BUSY_STEPS, "rate": _BUSY_STEPS / span.seconds}

    return asyncio.run(main())


async def _stay_busy() -> None:
    while True:
        until = time.perf_counter() + _BUSY_SECONDS
        while time.perf_counter() < until:
            pass
        await asyncio.sleep(0)


CONTENDERS = (
    Contender(
        name="one-by-one",
        group="record",
        measure=partial(_record, at_once=1, each=_SEQUENTIAL_STEPS),
        durable="power cut (begun: kill -9)",
    ),
    Contender(
        name="64-at-once",
        group="record",
        measure=partial(_record, at_once=64, each=100),
        durable="power cut (begun: kill -9)",
    ),
    Contender(
        name="512-at-once",
        group="record",
        measure=partial(_record, at_once=512, each=20),
        durable="power cut (begun: kill -9)",
    ),
    Contender(
        name="64-runs-at-once",
        group="record",
        measure=partial(_record, at_once=64, each=100, runs=64),
        durable="power cut (begun: kill -9)",
    ),
    Contender(
        name="busy-loop",
        group="record",
        measure=_behind_a_busy_loop,
        durable="power cut (begun: kill -9)",
    ),
)
