"""Runs of an empty workflow that workers take from a queue: ``hive.enqueue``, ``hive.worker``."""

from __future__ import annotations

import asyncio
import logging
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.contender import Contender
from benchmarks.contenders import queue_workers
from benchmarks.contenders.queue_workers import Bodies, Queue
from maestro_hive import Hive

if TYPE_CHECKING:
    from benchmarks.contender import Figures

_MODULE = "hive_queue"
_DURABLE = "power cut"


def _measure(folder: Path, *, workers: int) -> Figures:
    with Hive(folder / "state") as hive:
        store, enqueued = hive._open(), 0  # noqa: SLF001 - to count without listing

        def enqueue(number: str) -> None:
            nonlocal enqueued
            hive.enqueue("empty", number=number)
            enqueued += 1

        def ended() -> int:
            return enqueued - sum(store.dispatch_counts().values())

        queue = Queue(enqueue, ended)
        return queue_workers.measure(queue, _MODULE, folder, workers=workers)


def _serve(folder: Path, place: Path) -> None:
    bodies, hive = Bodies(), Hive(folder / "state")

    @hive.workflow
    async def empty(number: str) -> None:
        bodies.begin(number)

    async def main() -> None:
        loop = asyncio.get_running_loop()
        started = asyncio.Event()

        def start() -> None:
            loop.call_soon_threadsafe(started.set)

        ended = loop.run_in_executor(None, bodies.serve, place, start)
        await started.wait()
        async with hive.worker():
            await ended

    # That it closes before all JSON copies are written is not the point here.
    logging.getLogger("maestro_hive").addHandler(logging.NullHandler())
    with hive:
        asyncio.run(main())


CONTENDERS = tuple(
    Contender(
        name=f"hive/queue-{workers}",
        group="queue",
        measure=partial(_measure, workers=workers),
        durable=_DURABLE,
        unit="run",
    )
    for workers in (1, 4)
)

if __name__ == "__main__":
    _serve(Path(sys.argv[1]), Path(sys.argv[2]))
