"""DBOS on SQLite: workflows of coroutine steps, with its default journal and with SQLite's WAL."""

from __future__ import annotations

import asyncio
import os
import sqlite3
from functools import partial
from typing import TYPE_CHECKING, Any

from benchmarks import work
from benchmarks.contender import Contender, Figures, measured

if TYPE_CHECKING:
    from pathlib import Path

    from benchmarks.work import Runs, Work

_PEER = "DBOS"
_WARM_STEPS = 50
_WARM_RUNS = 5
_DURABLE = "power cut (rollback journal, synchronous=FULL: SQLite's defaults)"
_DURABLE_WAL = "power cut (WAL, synchronous=FULL)"


def _dbos() -> Any:
    os.environ["DBOS__CLOUD"] = "false"  # where it is true, it connects to its service
    from dbos import DBOS  # type: ignore[import-not-found]

    return DBOS


def _launch(folder: Path, *, wal: bool = False) -> None:
    """Start DBOS on a new database, in WAL mode if asked for: the file itself remembers it."""
    if wal:
        use_wal(folder)
    dbos_of(folder, "bench").launch()


def use_wal(folder: Path) -> None:
    """Have the database in a folder in WAL mode: the file itself remembers it."""
    db = sqlite3.connect(folder / "dbos.sqlite")
    db.execute("PRAGMA journal_mode=WAL")
    db.close()


def dbos_of(folder: Path, executor: str) -> Any:
    """Return DBOS over the database in a folder, for one process; it is still to be launched."""
    dbos = _dbos()
    dbos(
        config={
            "name": "bench",
            "system_database_url": f"sqlite:///{folder / 'dbos.sqlite'}",
            "application_version": "1",
            "executor_id": executor,
            "log_level": "WARNING",
        }
    )
    return dbos


def _step(job: Work, name: str) -> Any:
    async def draft(given: Any) -> Any:
        return job.task(given)

    return _dbos().step(name=name)(draft)


def _plain_run(job: Work) -> Any:
    """Return a workflow of a number of steps."""
    step = _step(job, "plain_draft")

    async def run(count: int) -> int:
        for number in range(count):
            await step(number)
        return count

    return _dbos().workflow()(run)


def _sequence(folder: Path, *, job: Work, wal: bool = False) -> Figures:
    warm, step = _plain_run(work.SMALL), _step(job, "draft")
    found: list[Figures] = []

    async def timed(count: int) -> int:
        before = None
        with measured():
            laps = work.Laps()
            for number in range(1, count + 1):
                before = await step(job.given(number, before))
                laps.lap()
        found.append(laps.figures(job))
        return count

    workflow = _dbos().workflow()(timed)
    _launch(folder, wal=wal)

    async def main() -> None:
        await warm(_WARM_STEPS)
        await workflow(job.count)

    asyncio.run(main())
    _dbos().destroy()
    return found[0]


def _at_once(folder: Path) -> Figures:
    """Let 64 workflows, all begun before, do their steps at once."""
    warm, step = _plain_run(work.SMALL), _step(work.SMALL, "draft")
    gates: list[asyncio.Barrier] = []

    async def gated(count: int) -> None:
        await gates[0].wait()
        for number in range(count):
            await step(number)
        await gates[0].wait()

    workflow = _dbos().workflow()(gated)
    _launch(folder)

    async def main() -> Figures:
        gates.append(asyncio.Barrier(work.AT_ONCE + 1))
        await warm(_WARM_STEPS)
        tasks = [asyncio.ensure_future(workflow(work.STEPS_AT_ONCE)) for _ in range(work.AT_ONCE)]
        await gates[0].wait()
        with measured() as span:
            await gates[0].wait()
        await asyncio.gather(*tasks)
        count = work.AT_ONCE * work.STEPS_AT_ONCE
        return {"steps": count, "seconds": span.seconds / count}

    found = asyncio.run(main())
    _dbos().destroy()
    return found


def _short_runs(folder: Path, *, runs: Runs) -> Figures:
    run = _plain_run(work.SMALL)
    _launch(folder)

    async def main() -> Figures:
        for _ in range(_WARM_RUNS):
            await run(runs.steps)
        with measured() as span:
            for _ in range(runs.sequential):
                await run(runs.steps)
            for _ in range(runs.waves):
                await asyncio.gather(*(run(runs.steps) for _ in range(work.AT_ONCE)))
        return {"steps": runs.total, "seconds": span.seconds / runs.total}

    found = asyncio.run(main())
    _dbos().destroy()
    return found


CONTENDERS = (
    Contender(
        name="dbos/steps",
        group="hive-steps",
        peer=_PEER,
        measure=partial(_sequence, job=work.SMALL),
        durable=_DURABLE,
    ),
    Contender(
        name="dbos-wal/steps",
        group="hive-steps",
        peer=_PEER,
        measure=partial(_sequence, job=work.SMALL, wal=True),
        durable=_DURABLE_WAL,
    ),
    Contender(name="dbos/64-runs", group="hive-64", peer=_PEER, measure=_at_once),
    *(
        Contender(name=f"dbos/{name}", group=group, peer=_PEER, measure=partial(_sequence, job=job))
        for name, group, job in (
            ("answer", "hive-payload", work.ANSWER),
            ("report", "hive-payload", work.REPORT),
            ("growing", "hive-growth", work.GROWING),
        )
    ),
    *(
        Contender(
            name=f"dbos/{name}",
            group="hive-runs",
            peer=_PEER,
            measure=partial(_short_runs, runs=runs),
        )
        for name, runs in (
            ("runs-of-1", work.RUNS_OF_1),
            ("runs-of-3", work.RUNS_OF_3),
            ("64-runs-of-3", work.RUNS_OF_3_AT_ONCE),
        )
    ),
)
