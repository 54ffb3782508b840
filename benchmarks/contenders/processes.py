"""Several processes on one folder, each recording its own run, one step at a time."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import time
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from benchmarks import steps
from benchmarks.contender import Contender, Figures
from maestro_hive.maestro.state.recorder import Recorder
from maestro_hive.maestro.state.sqlite.store import SqliteStore

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.queues import Queue
    from multiprocessing.synchronize import Barrier
    from pathlib import Path

_SECONDS = 2.0


class _Done(NamedTuple):
    steps: int
    worst: float


def _compete(folder: Path, *, processes: int, worker: Callable[..., None]) -> Figures:
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(processes)
    results: Queue[_Done] = context.Queue()
    workers = [
        context.Process(target=worker, args=(folder, number, barrier, results))
        for number in range(processes)
    ]
    for process in workers:
        process.start()
    done = [results.get(timeout=120) for _ in workers]
    for process in workers:
        process.join()
    counts = [each.steps for each in done]
    return {
        "rate": sum(counts) / _SECONDS,
        "slowest": min(counts) / _SECONDS,
        "fastest": max(counts) / _SECONDS,
        "worst_wait": max(each.worst for each in done),
    }


def _record_steps(folder: Path, number: int, barrier: Barrier, results: Queue[_Done]) -> None:
    asyncio.run(_record_for_a_while(folder, number, barrier, results))


async def _record_for_a_while(
    folder: Path, number: int, barrier: Barrier, results: Queue[_Done]
) -> None:
    store = SqliteStore(folder)
    recorder = Recorder(store)
    if number == 0:
        await steps.warm(store, recorder)
    hold = store.acquire_run(f"run-{number}")
    barrier.wait()
    count, worst = 0, 0.0
    now = time.perf_counter()
    until = now + _SECONDS
    while now < until:
        count += 1
        for entry, sync in ((steps.started(count), False), (steps.completed(count), True)):
            asked = time.perf_counter()
            await recorder.append(hold, [entry], sync=sync)
            now = time.perf_counter()
            worst = max(worst, now - asked)
    results.put(_Done(count, worst))
    barrier.wait()  # so that nobody closes while others are still measured
    store.close()


def _sync_files(folder: Path, number: int, barrier: Barrier, results: Queue[_Done]) -> None:
    """Do the same with nothing but a file of one's own: what the machine itself makes one wait."""
    fd = os.open(folder / f"file-{number}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    row = os.urandom(200)
    barrier.wait()
    count, worst = 0, 0.0
    now = time.perf_counter()
    until = now + _SECONDS
    while now < until:
        count += 1
        asked = time.perf_counter()
        os.write(fd, row)
        os.fdatasync(fd)
        now = time.perf_counter()
        worst = max(worst, now - asked)
    results.put(_Done(count, worst))
    barrier.wait()
    os.close(fd)


CONTENDERS = (
    Contender(
        name="one-process",
        group="processes",
        measure=partial(_compete, processes=1, worker=_record_steps),
    ),
    Contender(
        name="four-processes",
        group="processes",
        measure=partial(_compete, processes=4, worker=_record_steps),
    ),
    Contender(
        name="four-raw-files",
        group="processes",
        measure=partial(_compete, processes=4, worker=_sync_files),
    ),
)
