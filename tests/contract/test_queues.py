"""Which queues have something to take, and which runs are suspects."""

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
    assert not any([has_ready(queue="mail", version="2"), has_ready(version="2", suspects=True)])
    stores.process_holding("run-1").kill()
    store.recover_runs(nobody)
    assert has_ready(version="2", suspects=True)
    assert not has_ready(version="2")


def test_suspects_are_the_ready_runs_whose_process_died(stores: Stores, store: Store) -> None:
    enqueue(store, "run-1", "run-2")
    stores.process_holding("run-2").kill()
    assert store.suspects("default") == []
    store.recover_runs(nobody)
    assert [(each.run_id, each.deaths) for each in store.suspects("default")] == [("run-2", 1)]
    assert store.suspects("mail") == []
    claim(store, suspects=True)
    assert store.suspects("default") == []
