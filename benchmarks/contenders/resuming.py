"""Going on with a run of 10,000 finished steps, in a fresh process, after its last one was killed.

From before anything is opened until the workflow has gone through all its kept steps again. Imports
are not counted, neither ours nor a peer's: they do not grow with the run, and ours are the smaller.
"""

from __future__ import annotations

import asyncio
import os
import time
from typing import TYPE_CHECKING

from benchmarks import steps
from benchmarks.contender import Contender, Figures
from benchmarks.contenders.executing import executor_on

if TYPE_CHECKING:
    from pathlib import Path

COUNT = 10_000
_BATCH = 500
_called: list[int] = []


async def _draft(number: int) -> dict[str, object]:
    _called.append(number)
    return steps.result(number)


def _fill(folder: Path) -> None:
    async def main() -> None:
        executor = executor_on(folder, "bench")
        for first in range(1, COUNT + 1, _BATCH):
            numbers = range(first, first + _BATCH)
            await asyncio.gather(*(executor.execute(_draft, "draft", each) for each in numbers))
        os._exit(0)  # as a killed process ends: nothing is closed, nothing is tidied up

    asyncio.run(main())


def _resume(folder: Path) -> Figures:
    async def main() -> Figures:
        started = time.perf_counter()
        executor = executor_on(folder, "bench")
        await executor.execute(_draft, "draft", 1)
        opened = time.perf_counter()
        for number in range(2, COUNT + 1):
            await executor.execute(_draft, "draft", number)
        ended = time.perf_counter()
        executor.close()
        assert not _called, "a finished step was run again"
        return {
            "seconds": ended - started,
            "open": opened - started,
            "kept": (ended - opened) / (COUNT - 1),
        }

    return asyncio.run(main())


CONTENDERS = (
    Contender(name="resume", group="resume", measure=_resume, prepare=_fill, filled=True),
)
