"""A run of many completed steps, killed, and resumed through ``Hive`` in a fresh process.

From before the state folder is opened until ``hive.run`` has returned; imports are not counted.
"""

from __future__ import annotations

import asyncio
import os
import time
from functools import partial
from typing import TYPE_CHECKING, Any

from benchmarks import work
from benchmarks.contender import Contender, Figures
from maestro_hive import Hive

if TYPE_CHECKING:
    from pathlib import Path

_RUN = "bench"
FEW = 10_000
MANY = 20_000 if work.QUICK else 100_000


class _Resumed:
    """A workflow of so many steps, and what was seen of it."""

    def __init__(self, folder: Path) -> None:
        self.hive = Hive(folder)
        self.executed = 0
        self.filling = False
        self.first = self.last = 0.0
        self._step = self.hive.step(persona="writer")(self._draft())
        self.workflow = self.hive.workflow(self._run())

    def _draft(self) -> Any:
        async def draft(number: int) -> dict[str, object]:
            self.executed += 1
            return work.result(number)

        return draft

    def _run(self) -> Any:
        async def run(count: int) -> int:
            await self._step(1)
            self.first = time.perf_counter()
            for number in range(2, count + 1):
                await self._step(number)
            if self.filling:
                os._exit(0)  # as a killed process ends: nothing is closed, nothing is tidied up
            self.last = time.perf_counter()
            return count

        return run


def _fill(folder: Path, *, count: int) -> None:
    filled = _Resumed(folder)
    filled.filling = True
    filled.hive.run_sync(filled.workflow, count, run_id=_RUN)


def _resume(folder: Path, *, count: int) -> Figures:
    async def main() -> Figures:
        started = time.perf_counter()
        resumed = _Resumed(folder)
        await resumed.hive.run(resumed.workflow, count, run_id=_RUN)
        ended = time.perf_counter()
        assert not resumed.executed, "a completed step was executed again"
        resumed.hive.close()
        return {
            "steps": count,
            "seconds": ended - started,
            "open": resumed.first - started,
            "replay": resumed.last - resumed.first,
            "finish": ended - resumed.last,
            "step": (resumed.last - resumed.first) / (count - 1),
        }

    return asyncio.run(main())


CONTENDERS = (
    Contender(
        name="hive/resume",
        group="hive-resume",
        measure=partial(_resume, count=FEW),
        prepare=partial(_fill, count=FEW),
        filled=True,
    ),
    Contender(
        name="hive/resume-many",
        group="hive-resume",
        measure=partial(_resume, count=MANY),
        prepare=partial(_fill, count=MANY),
        filled=True,
        once=True,
    ),
)
