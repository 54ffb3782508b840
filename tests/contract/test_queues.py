"""Which queues have something to take."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.contract.test_dispatch import claim, enqueue, nobody

if TYPE_CHECKING:
    from maestro_hive.maestro.state.store import Store
    from maestro_hive.testing import ManualClock
    from tests.contract.stores import Stores


def test_queues_with_ready_runs_are_named(store: Store, clock: ManualClock) -> None:
    assert store.ready_queues() == []
    enqueue(store, "run-1")
    enqueue(store, "run-2", "run-3", queue="mail")
    enqueue(store, "run-4", queue="held", due=None)
    enqueue(store, "run-5", queue="later", due=5.0)
    assert store.ready_queues() == ["default", "mail"]
    claim(store)
    assert store.ready_queues() == ["mail"]
    clock.advance(5)
    assert claim(store, 0) == []  # which makes ready what is due
    assert store.ready_queues() == ["later", "mail"]


def test_it_is_known_whether_there_is_a_run_to_claim(stores: Stores, store: Store) -> None:
    enqueue(store, "run-1", version="2")

    def has_ready(workflow: str = "mail", **chosen: Any) -> bool:
        return store.has_ready(**{"queue": "default", "workflows": [workflow], **chosen})

    assert has_ready(version="2")
    assert not any([has_ready(), has_ready(version="1"), has_ready("other", version="2")])
    assert not has_ready(queue="mail", version="2")
    process = stores.process_holding("run-1")
    assert not has_ready(version="2")
    process.kill()
    store.recover_runs(nobody)
    assert has_ready(version="2")
