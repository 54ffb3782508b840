"""DBOS's queues on SQLite: the same runs of an empty workflow, with its journal and with WAL.

It polls once a second, as it does by default. A worker takes all that waits at once; of four each may
take a quarter, so that the first one to look does not take all.
"""

from __future__ import annotations

import sqlite3
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.contender import Contender
from benchmarks.contenders import queue_workers
from benchmarks.contenders.queue_workers import RUNS, Bodies, Queue
from benchmarks.contenders.with_dbos import dbos_of, use_wal

if TYPE_CHECKING:
    from benchmarks.contender import Figures

_MODULE = "dbos_queue"
_QUEUE = "bench"
_COUNT = "SELECT count(*) FROM workflow_status WHERE status = 'SUCCESS'"


def _with_workflow(folder: Path, executor: str) -> tuple[Any, Bodies]:
    dbos, bodies = dbos_of(folder, executor), Bodies()

    async def empty(number: str) -> None:
        bodies.begin(number)

    dbos.workflow(name="empty")(empty)
    return dbos, bodies


def _measure(folder: Path, *, workers: int, wal: bool = False) -> Figures:
    place = folder / "dbos.sqlite"
    if wal:
        use_wal(folder)
    dbos, _ = _with_workflow(folder, "parent")
    dbos.listen_queues([])
    dbos.launch()
    dbos.register_queue(_QUEUE, worker_concurrency=None if workers == 1 else RUNS // workers)
    from dbos import DBOSClient  # type: ignore[import-not-found]

    client = DBOSClient(system_database_url=f"sqlite:///{place}")
    options = {"queue_name": _QUEUE, "workflow_name": "empty", "app_version": "1"}
    reader = sqlite3.connect(place, timeout=30)
    queue = Queue(
        partial(client.enqueue, options), lambda: int(reader.execute(_COUNT).fetchone()[0])
    )
    found = queue_workers.measure(queue, _MODULE, folder, workers=workers)
    reader.close()
    client.destroy()
    dbos.destroy()
    return found


def _serve(folder: Path, place: Path) -> None:
    dbos, bodies = _with_workflow(folder, place.stem)
    dbos.listen_queues([_QUEUE])
    bodies.serve(place, dbos.launch)
    dbos.destroy()


CONTENDERS = tuple(
    Contender(
        name=f"{name}/queue-{workers}",
        group="queue",
        peer="DBOS",
        measure=partial(_measure, workers=workers, wal=wal),
    )
    for name, wal in (("dbos", False), ("dbos-wal", True))
    for workers in (1, 4)
)

if __name__ == "__main__":
    _serve(Path(sys.argv[1]), Path(sys.argv[2]))
