"""The workers that live: who they are, what they take, and which code they have.

Each holds a lease, ``worker/ID``, which ends with its process, and has a document that says the rest.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from maestro_hive.kernel.clock import from_micros
from maestro_hive.kernel.errors import CodecError, MaestroError
from maestro_hive.maestro.state import codec

if TYPE_CHECKING:
    from datetime import datetime

    from maestro_hive.maestro.state.records import Dispatch, Lease
    from maestro_hive.maestro.state.store import Reader, Store

#: With a dollar: ``StateManager`` does not show it, and does not clear it.
NAMESPACE = "$workers"
_PREFIX = "worker/"


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveWorker:
    """One worker: what it takes, and the process it is in."""

    id: str
    #: None: all queues.
    queues: tuple[str, ...] | None
    concurrency: int
    version: str | None
    workflows: tuple[str, ...]
    started_at: int
    host: str = ""
    pid: int = 0

    @property
    def since(self) -> datetime:
        """When it was started."""
        return from_micros(self.started_at)

    def takes(self, queue: str, workflow: str, version: str | None) -> bool:
        """Return whether it takes runs like this."""
        return (
            workflow in self.workflows
            and (self.queues is None or queue in self.queues)
            and version in (None, self.version)
        )


def register(store: Store, worker: LiveWorker) -> Lease:
    """Show a worker, until its lease ends."""
    _forget_dead(store)
    lease = store.take_lease(f"{_PREFIX}{worker.id}")
    facts = {name: value for name, value in asdict(worker).items() if name not in ("host", "pid")}
    store.update_document(NAMESPACE, worker.id, lambda _: codec.encode(facts, worker.id))
    return lease


def unregister(store: Store, worker: LiveWorker, lease: Lease) -> None:
    """Show it no more."""
    with suppress(MaestroError):  # a store that failed: its lease ends with the process
        store.release_lease(lease)
        store.update_document(NAMESPACE, worker.id, lambda _: None)


def live_workers(reader: Reader) -> list[LiveWorker]:
    """Return the workers whose processes live, in any process on the store."""
    found = []
    for each in reader.documents(NAMESPACE):
        lease = reader.lease(f"{_PREFIX}{each.key}")
        if lease is None or not reader.is_alive(lease):
            continue
        with suppress(CodecError, TypeError):  # of a newer version
            facts = codec.decode(each.value, each.key)
            holder = {"host": lease.holder.host, "pid": lease.holder.pid}
            found.append(LiveWorker(**{**facts, **holder}))
    return found


def is_taken(reader: Reader, run: Dispatch) -> bool:
    """Return whether a worker lives that takes a run: with its queue, its workflow and its version."""
    return any(each.takes(run.queue, run.workflow, run.version) for each in live_workers(reader))


def _forget_dead(store: Store) -> None:
    """Release the leases of workers whose processes died, and delete what says what they took."""
    for lease in store.leases():
        if lease.name.startswith(_PREFIX) and not store.is_alive(lease):
            store.release_lease(lease)
    for each in store.documents(NAMESPACE):
        if not _is_alive(store, each.key):
            store.update_document(NAMESPACE, each.key, lambda _: None)


def _is_alive(reader: Reader, worker: str) -> bool:
    lease = reader.lease(f"{_PREFIX}{worker}")
    return lease is not None and reader.is_alive(lease)
