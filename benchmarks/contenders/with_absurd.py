"""Absurd on a Postgres server of the benchmark's own, over TCP on loopback, a database per contender.

One connection does one thing at a time, so that for many at once there are several clients, each
with a connection of its own. Tasks are claimed with ``work_batch``, which does not wait to poll.
"""

from __future__ import annotations

import asyncio
import os
import time
import uuid
from functools import partial
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from benchmarks import postgres, work
from benchmarks.contender import Contender, Figures, measured

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from pathlib import Path

    from benchmarks.work import Runs, Work

_PEER = "Absurd"
_QUEUE = "bench"
_WARM_STEPS = 300
_WARM_RUNS = 5
_CLIENTS = 8
_DURABLE = "power cut (Postgres, synchronous_commit=on: its defaults)"


def _new_database() -> str:
    """Make a database with Absurd's schema, and return its address."""
    import absurdctl  # type: ignore[import-not-found]
    import psycopg  # type: ignore[import-not-found]

    name, server = f"bench_{uuid.uuid4().hex}", os.environ[postgres.VARIABLE]
    with psycopg.connect(server, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}")
    address = urlsplit(server)._replace(path=f"/{name}").geturl()
    with psycopg.connect(address, autocommit=True) as connection:
        connection.execute(absurdctl.BUNDLED_SCHEMA_SQL)
    return address


def _client(address: str) -> Any:
    """Return a client that can execute a task of a number of small steps."""
    import absurd_sdk  # type: ignore[import-not-found]

    client = absurd_sdk.AsyncAbsurd(address, queue_name=_QUEUE)

    async def run(count: int, context: Any) -> int:
        for number in range(count):
            await context.step("draft", _call(work.SMALL, number))
        return count

    client.register_task("run")(run)
    return client


def _call(job: Work, given: Any) -> Callable[[], Coroutine[Any, Any, Any]]:
    async def draft() -> Any:
        return job.task(given)

    return draft


async def _warm_client(address: str) -> Any:
    client = _client(address)
    await client.create_queue()
    for count in (_WARM_STEPS, *[1] * _WARM_RUNS):
        await client.spawn("run", count)
        await client.work_batch()
    return client


def _sequence(_folder: Path, *, job: Work) -> Figures:
    found: list[Figures] = []

    async def timed(count: int, context: Any) -> int:
        before = None
        with measured():
            laps = work.Laps()
            for number in range(1, count + 1):
                before = await context.step("draft", _call(job, job.given(number, before)))
                laps.lap()
        found.append(laps.figures(job))
        return count

    async def main() -> None:
        client = await _warm_client(_new_database())
        client.register_task("timed")(timed)
        await client.spawn("timed", job.count)
        await client.work_batch()
        await client.close()

    asyncio.run(main())
    return found[0]


async def _warm_clients() -> list[Any]:
    address = _new_database()
    first = await _warm_client(address)
    others = [_client(address) for _ in range(_CLIENTS - 1)]
    for client in others:
        await client.spawn("run", 1)
        await client.work_batch()
    return [first, *others]


async def _execute_at_once(clients: list[Any], steps: int) -> None:
    each = work.AT_ONCE // len(clients)
    await asyncio.gather(*(client.spawn("run", steps) for client in clients for _ in range(each)))
    await asyncio.gather(*(client.work_batch(batch_size=each) for client in clients))


async def _check_finished(client: Any, spawned: Any) -> None:
    snapshot = await client.fetch_task_result(spawned["task_id"])
    assert snapshot.state == "completed", snapshot


def _short_runs(_folder: Path, *, runs: Runs) -> Figures:
    async def main() -> Figures:
        clients = await _warm_clients()
        with measured() as span:
            for _ in range(runs.sequential):
                spawned = await clients[0].spawn("run", runs.steps)
                await clients[0].work_batch()
                await _check_finished(clients[0], spawned)
            for _ in range(runs.waves):
                await _execute_at_once(clients, runs.steps)
        for client in clients:
            await client.close()
        return {"steps": runs.total, "seconds": span.seconds / runs.total}

    return asyncio.run(main())


def _at_once(_folder: Path) -> Figures:
    """Let 64 tasks do their steps, as many at once as there are connections."""

    async def main() -> Figures:
        clients = await _warm_clients()
        begun: list[float] = []
        ended: list[float] = []

        async def timed(count: int, context: Any) -> int:
            begun.append(time.perf_counter())
            for number in range(count):
                await context.step("draft", _call(work.SMALL, number))
            ended.append(time.perf_counter())
            return count

        for client in clients:
            client.register_task("run")(timed)
        await _execute_at_once(clients, work.STEPS_AT_ONCE)
        for client in clients:
            await client.close()
        count = work.AT_ONCE * work.STEPS_AT_ONCE
        return {"steps": count, "seconds": (max(ended) - min(begun)) / count}

    return asyncio.run(main())


CONTENDERS = (
    *(
        Contender(
            name=f"absurd/{name}",
            group=group,
            peer=_PEER,
            postgres=True,
            measure=partial(_sequence, job=job),
            durable=durable,
        )
        for name, group, job, durable in (
            ("steps", "hive-steps", work.SMALL, _DURABLE),
            ("answer", "hive-payload", work.ANSWER, ""),
            ("report", "hive-payload", work.REPORT, ""),
        )
    ),
    Contender(name="absurd/64-runs", group="hive-64", peer=_PEER, postgres=True, measure=_at_once),
    *(
        Contender(
            name=f"absurd/{name}",
            group="hive-runs",
            peer=_PEER,
            postgres=True,
            measure=partial(_short_runs, runs=runs),
        )
        for name, runs in (
            ("runs-of-1", work.RUNS_OF_1),
            ("runs-of-3", work.RUNS_OF_3),
            ("64-runs-of-3", work.RUNS_OF_3_AT_ONCE),
        )
    ),
)
