"""Through ``Hive``: a workflow that calls steps, one after another, many at once, in short runs."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any

from benchmarks import work
from benchmarks.contender import Contender, Figures, measured
from maestro_hive import Hive

if TYPE_CHECKING:
    from pathlib import Path

    from benchmarks.work import Runs, Work

#: So many that the log has grown to its size and begun again.
_WARM_STEPS = 500
_WARM_RUNS = 5
DURABLE = "power cut (started: kill -9)"


async def warm(hive: Hive) -> None:
    """Execute what is not measured: until the log has its size, and all is imported."""

    @hive.step(persona="writer", name="warm_step")
    async def step(number: int) -> dict[str, object]:
        return work.result(number)

    @hive.workflow(name="warm_workflow")
    async def run(count: int) -> None:
        for number in range(count):
            await step(number)

    await hive.run(run, _WARM_STEPS)
    for _ in range(_WARM_RUNS):
        await hive.run(run, 1)


def _step(hive: Hive, job: Work, *, plain: bool = False) -> Any:
    if plain:

        def draft(given: Any) -> Any:
            return job.task(given)

        return hive.step(persona="writer")(draft)

    async def draft_async(given: Any) -> Any:
        return job.task(given)

    return hive.step(persona="writer", name="draft")(draft_async)


def _spending_step(hive: Hive, job: Work) -> Any:
    """Return a step whose result says what it used."""

    async def draft_async(given: Any) -> Any:
        return {**job.task(given), "tokens_used": 100}

    return hive.step(persona="writer", name="draft", max_tokens=100)(draft_async)


def _sequence(
    folder: Path, *, job: Work, plain: bool = False, spends: bool = False, limits: int = 0
) -> Figures:
    """Let one run do its steps one after another; what they spend may be limited."""
    hive = Hive(folder)
    step = _spending_step(hive, job) if spends else _step(hive, job, plain=plain)
    for limit in ({"persona": "writer"}, {"run": "*"}, {"day": True})[:limits]:
        hive.budget.set_limit(10**12, **limit)
    found: list[Figures] = []

    @hive.workflow
    async def run(count: int) -> int:
        before = None
        with measured():
            laps = work.Laps()
            for number in range(1, count + 1):
                before = await step(job.given(number, before))
                laps.lap()
        found.append(laps.figures(job))
        return count

    async def main() -> None:
        async with hive:
            await warm(hive)
            await hive.run(run, job.count)

    asyncio.run(main())
    return found[0]


def _at_once(folder: Path, *, runs: int) -> Figures:
    """Let 64 chains of steps go on at once, all in one run or each in its own."""
    hive = Hive(folder)
    step = _step(hive, work.SMALL)
    gates: list[asyncio.Barrier] = []
    each = work.STEPS_AT_ONCE

    async def chain(number: int) -> None:
        for place in range(each):
            await step(place * work.AT_ONCE + number)

    @hive.workflow
    async def run(first: int, last: int) -> None:
        await gates[0].wait()  # all have begun
        await asyncio.gather(*(chain(number) for number in range(first, last)))
        await gates[0].wait()

    async def main() -> Figures:
        gates.append(asyncio.Barrier(runs + 1))
        width = work.AT_ONCE // runs
        async with hive:
            await warm(hive)
            handles = [
                await hive.start(run, first, first + width)
                for first in range(0, work.AT_ONCE, width)
            ]
            await gates[0].wait()
            with measured() as span:
                await gates[0].wait()
            for handle in handles:
                await handle.result()
        count = work.AT_ONCE * each
        return {"steps": count, "seconds": span.seconds / count}

    return asyncio.run(main())


def _short_runs(folder: Path, *, runs: Runs) -> Figures:
    """Start runs, let each do its steps, and wait until they are finished."""
    hive = Hive(folder)
    step = _step(hive, work.SMALL)

    @hive.workflow
    async def run(count: int) -> int:
        for number in range(count):
            await step(number)
        return count

    async def main() -> Figures:
        async with hive:
            await warm(hive)
            with measured() as span:
                for _ in range(runs.sequential):
                    await hive.run(run, runs.steps)
                for _ in range(runs.waves):
                    await asyncio.gather(*(hive.run(run, runs.steps) for _ in range(work.AT_ONCE)))
        return {"steps": runs.total, "seconds": span.seconds / runs.total}

    return asyncio.run(main())


CONTENDERS = (
    Contender(
        name="hive/steps",
        group="hive-steps",
        measure=partial(_sequence, job=work.SMALL),
        durable=DURABLE,
    ),
    Contender(
        name="hive/plain-steps",
        group="hive-steps",
        measure=partial(_sequence, job=work.SMALL, plain=True),
        durable=DURABLE,
    ),
    Contender(
        name="hive/spending-steps",
        group="hive-steps",
        measure=partial(_sequence, job=work.SMALL, spends=True),
        durable=DURABLE,
    ),
    Contender(
        name="hive/limited-steps",
        group="hive-steps",
        measure=partial(_sequence, job=work.SMALL, spends=True, limits=1),
        durable=DURABLE,
    ),
    Contender(
        name="hive/limited-thrice",
        group="hive-steps",
        measure=partial(_sequence, job=work.SMALL, spends=True, limits=3),
        durable=DURABLE,
    ),
    Contender(name="hive/64", group="hive-64", measure=partial(_at_once, runs=1), durable=DURABLE),
    Contender(
        name="hive/64-runs",
        group="hive-64",
        measure=partial(_at_once, runs=work.AT_ONCE),
    ),
    Contender(
        name="hive/answer",
        group="hive-payload",
        measure=partial(_sequence, job=work.ANSWER),
    ),
    Contender(
        name="hive/report",
        group="hive-payload",
        measure=partial(_sequence, job=work.REPORT),
    ),
    Contender(
        name="hive/runs-of-1",
        group="hive-runs",
        measure=partial(_short_runs, runs=work.RUNS_OF_1),
    ),
    Contender(
        name="hive/runs-of-3",
        group="hive-runs",
        measure=partial(_short_runs, runs=work.RUNS_OF_3),
        durable=DURABLE,
        unit="run",
    ),
    Contender(
        name="hive/64-runs-of-3",
        group="hive-runs",
        measure=partial(_short_runs, runs=work.RUNS_OF_3_AT_ONCE),
        durable=DURABLE,
        unit="run",
    ),
    Contender(
        name="hive/growing", group="hive-growth", measure=partial(_sequence, job=work.GROWING)
    ),
)
