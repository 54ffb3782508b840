"""The queues of a state folder, and the workers that take runs from them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from maestro_hive.hive.live_workers import live_workers
from maestro_hive.maestro.state.records import DispatchState

if TYPE_CHECKING:
    from datetime import datetime

    from maestro_hive.hive.live_workers import LiveWorker
    from maestro_hive.maestro.state.records import Dispatch
    from maestro_hive.maestro.state.store import Reader

#: How many runs that are ready are looked through for such that no worker takes.
_MOST = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueView:
    """How many unfinished runs a queue has: ready, due later, executed, and held until woken."""

    name: str
    ready: int
    scheduled: int
    active: int
    held: int
    #: Those of the ready ones whose process died; they are executed alone.
    #: When the first of the ready ones was enqueued.
    oldest: datetime | None


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerView:
    """A worker that lives; ``queues`` is None if it takes from all."""

    id: str
    host: str
    pid: int
    since: datetime
    queues: tuple[str, ...] | None
    concurrency: int
    version: str | None
    workflows: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftRuns:
    """Ready runs that no living worker takes: none has their workflow, their queue or their version."""

    workflow: str
    queue: str
    version: str | None
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuesView:
    """All queues with unfinished runs, all workers, and what none of them takes."""

    queues: list[QueueView]
    workers: list[WorkerView]
    left: list[LeftRuns]


def show_queues(reader: Reader) -> QueuesView:
    """Return what waits, and for whom."""
    counts, workers = reader.dispatch_counts(), live_workers(reader)
    ready = reader.dispatches(state=DispatchState.READY, limit=_MOST)
    return QueuesView(
        queues=[_queue(name, counts, ready) for name in sorted({name for name, _ in counts})],
        workers=[_worker(each) for each in sorted(workers, key=lambda each: each.started_at)],
        left=_left(ready, workers),
    )


def _queue(
    name: str, counts: dict[tuple[str, DispatchState], int], ready: list[Dispatch]
) -> QueueView:
    own = [each for each in ready if each.queue == name]
    return QueueView(
        name=name,
        ready=counts.get((name, DispatchState.READY), 0),
        scheduled=counts.get((name, DispatchState.SCHEDULED), 0),
        active=counts.get((name, DispatchState.ACTIVE), 0),
        held=counts.get((name, DispatchState.HELD), 0),
        oldest=min((each.enqueued_at for each in own), default=None),
    )


def _worker(each: LiveWorker) -> WorkerView:
    return WorkerView(
        id=each.id,
        host=each.host,
        pid=each.pid,
        since=each.since,
        queues=each.queues,
        concurrency=each.concurrency,
        version=each.version,
        workflows=each.workflows,
    )


def _left(ready: list[Dispatch], workers: list[LiveWorker]) -> list[LeftRuns]:
    found: dict[tuple[str, str, str | None], int] = {}
    for each in ready:
        if not any(worker.takes(each.queue, each.workflow, each.version) for worker in workers):
            kind = (each.workflow, each.queue, each.version)
            found[kind] = found.get(kind, 0) + 1
    return [
        LeftRuns(workflow=workflow, queue=queue, version=version, count=count)
        for (workflow, queue, version), count in found.items()
    ]
