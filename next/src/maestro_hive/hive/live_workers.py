"""The workers of a store: each one has a document for as long as its process lives."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
from msgspec import Struct

if TYPE_CHECKING:
    from maestro_hive.journal.store import RunRow, Store

NAMESPACE = "workers"


class LiveWorker(Struct, frozen=True, kw_only=True):
    """A worker, and which runs it takes."""

    id: str
    #: The process that it belongs to.
    holder: str
    #: None: all queues.
    queues: tuple[str, ...] | None
    workflows: tuple[str, ...]
    concurrency: int
    version: str | None = None
    started_at: float = 0.0

    def takes(self, run: RunRow) -> bool:
        """Return whether it takes a run when that is due."""
        return (
            run.queue is not None
            and (self.queues is None or run.queue in self.queues)
            and run.workflow in self.workflows
            and run.version in (None, self.version)
        )


def record_worker(store: Store, worker: LiveWorker) -> None:
    """Record a worker, or another list of its workflows."""
    data = msgspec.json.encode(worker)
    store.update_document(NAMESPACE, worker.id, lambda _: data)


def remove_worker(store: Store, worker_id: str) -> None:
    """Remove a worker that ends."""
    version, text = store.document(NAMESPACE, worker_id)
    if text is not None:
        store.drop_document(NAMESPACE, worker_id, version)


def live_workers(store: Store) -> list[LiveWorker]:
    """Return the workers whose processes live."""
    found = [
        msgspec.json.decode(text, type=LiveWorker) for text in store.documents(NAMESPACE).values()
    ]
    return [each for each in found if store.db.alive(each.holder)]


def remove_dead_workers(store: Store) -> None:
    """Remove the workers whose processes have died."""
    alive = {each.id for each in live_workers(store)}
    for worker_id in store.documents(NAMESPACE).keys() - alive:
        remove_worker(store, worker_id)


def is_taken(store: Store, run: RunRow) -> bool:
    """Return whether a worker that lives takes a run when that is due."""
    return any(each.takes(run) for each in live_workers(store))
