"""Runs that belong to workers: recorded once, taken once, and never lost."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest

from maestro_hive.kernel.errors import FencedError, RunLeasedError
from maestro_hive.maestro.state.codec import encode
from maestro_hive.maestro.state.records import (
    RESETS_DEATHS,
    DispatchState,
    EntryKind,
    NewDispatch,
    NewEntry,
)
from maestro_hive.maestro.state.store import Append, DocumentChange, DocumentGuard, NewRun
from tests.contract.stores import add_tasks, numbers, task, tasks
from tests.tables import for_each

if TYPE_CHECKING:
    from maestro_hive.maestro.state.records import Dispatch
    from maestro_hive.maestro.state.store import RunLease, Store
    from maestro_hive.testing import ManualClock
    from tests.contract.stores import Stores

READY, SCHEDULED, ACTIVE, HELD = DispatchState


def new_run(name: str, workflow: str = "mail", **dispatch: object) -> NewRun:
    return NewRun(name, workflow, [task("start")], "pending", NewDispatch(**dispatch))  # type: ignore[arg-type]


def enqueue(store: Store, *names: str, **dispatch: object) -> None:
    assert all(store.create_runs([new_run(name, **dispatch) for name in names]))  # type: ignore[arg-type]


def claim(
    store: Store,
    limit: int = 10,
    *,
    queue: str = "default",
    workflows: tuple[str, ...] = ("mail",),
    version: str | None = None,
) -> list[RunLease]:
    return store.claim_runs(queue=queue, workflows=workflows, version=version, limit=limit)


def names(leases: list[RunLease]) -> list[str]:
    return [lease.name for lease in leases]


def row(store: Store, name: str) -> Dispatch:
    found = store.dispatch(name)
    assert found is not None
    return found


def nobody(name: str) -> NewDispatch | None:
    return None


# --- creating ---------------------------------------------------------------------------------


def test_a_run_is_recorded_with_its_entries_and_its_row(
    store: Store, other: Store, clock: ManualClock
) -> None:
    dispatch = NewDispatch(queue="fast", priority=3, due=60.0, version="v2")
    run = NewRun("run-1", "mail", [task("a"), task("b")], "pending", dispatch, parent="run-0")
    assert store.create_runs([run]) == [True]
    record = other.run("run-1")
    assert record is not None
    assert (record.workflow, record.status, record.parent) == ("mail", "pending", "run-0")
    assert tasks(other.entries(record.id)) == ["a", "b"]
    found = row(other, "run-1")
    assert (found.run_id, found.workflow, found.queue) == ("run-1", "mail", "fast")
    assert (found.priority, found.version, found.deaths) == (3, "v2", 0)
    assert (found.state, found.due_at) == (SCHEDULED, clock.now() + timedelta(seconds=60))
    assert found.enqueued_at == clock.now()
    assert other.lease("run/run-1") is None


def test_a_run_that_exists_is_left_as_it_is(store: Store, other: Store) -> None:
    enqueue(store, "run-1", queue="first")
    again = [new_run("run-1", queue="second"), new_run("run-2"), new_run("run-2", queue="third")]
    assert other.create_runs(again) == [False, True, False]
    assert row(store, "run-1").queue == "first"
    assert row(store, "run-2").queue == "default"
    for name in ("run-1", "run-2"):
        record = store.run(name)
        assert record is not None
        assert numbers(store.entries(record.id)) == [1]


def test_a_run_without_entries_is_started_unless_a_process_holds_it(
    store: Store, other: Store
) -> None:
    hold = store.acquire_run("run-1")
    assert other.create_runs([new_run("run-1")]) == [False]
    store.release_run(hold)
    assert other.create_runs([new_run("run-1")]) == [True]
    record = store.run("run-1")
    assert record is not None
    assert (record.workflow, record.status) == ("mail", "pending")
    assert names(claim(store)) == ["run-1"]


def test_creating_nothing_is_no_error(store: Store) -> None:
    assert store.create_runs([]) == []


def test_one_name_that_is_no_identifier_refuses_all(store: Store) -> None:
    with pytest.raises(ValueError, match="run id"):
        store.create_runs([new_run("run-1"), new_run("../run-2")])
    assert store.run("run-1") is None


# --- claiming ---------------------------------------------------------------------------------


def test_a_run_is_taken_once(store: Store, other: Store) -> None:
    enqueue(store, "run-1")
    (lease,) = claim(store)
    assert (lease.name, lease.seq, lease.created, lease.dispatched) == ("run-1", 1, False, True)
    assert row(other, "run-1").state is ACTIVE
    assert claim(other) == claim(store) == []
    with pytest.raises(RunLeasedError):
        other.acquire_run("run-1")
    add_tasks(store, lease, 1)
    assert lease.seq == 2


def test_within_a_process_a_claimed_run_is_shared(store: Store) -> None:
    enqueue(store, "run-1")
    (lease,) = claim(store)
    assert store.acquire_run("run-1") is lease
    assert lease.users == 2


def test_no_more_are_taken_than_asked_for(store: Store) -> None:
    enqueue(store, "run-1", "run-2", "run-3")
    assert names(claim(store, 2)) == ["run-1", "run-2"]
    assert claim(store, 0) == []
    assert names(claim(store, 2)) == ["run-3"]


def test_first_come_first_served_over_workflows(store: Store, clock: ManualClock) -> None:
    for number, workflow in enumerate(["b", "a", "c", "a", "b"]):
        store.create_runs([new_run(f"run-{number}", workflow)])
        clock.advance(1)
    taken = claim(store, 3, workflows=("a", "b", "c"))
    assert names(taken) == ["run-0", "run-1", "run-2"]
    assert names(claim(store, workflows=("a", "b"))) == ["run-3", "run-4"]


def test_a_priority_is_worth_a_minute_of_waiting(store: Store, clock: ManualClock) -> None:
    enqueue(store, "first")
    clock.advance(59)
    enqueue(store, "ahead", priority=1)
    clock.advance(2)
    enqueue(store, "too-late", priority=1)
    enqueue(store, "last", priority=-1)
    assert names(claim(store)) == ["ahead", "first", "too-late", "last"]


def test_workflows_that_a_worker_does_not_know_are_left(store: Store) -> None:
    for name, workflow in {"run-1": "a", "run-2": "b", "run-3": "c"}.items():
        store.create_runs([new_run(name, workflow)])
    assert claim(store, workflows=()) == claim(store, workflows=("d", "aa")) == []
    assert names(claim(store, workflows=("c", "z", "0"))) == ["run-3"]
    assert names(claim(store, workflows=("a", "b", "c"))) == ["run-1", "run-2"]


def test_queues_are_apart(store: Store) -> None:
    enqueue(store, "run-1", queue="fast")
    assert claim(store) == []
    assert names(claim(store, queue="fast")) == ["run-1"]


def test_a_run_may_ask_for_a_version(store: Store, clock: ManualClock) -> None:
    enqueue(store, "run-1", version="v2")
    clock.advance(1)
    enqueue(store, "run-2")
    enqueue(store, "run-3", version="v1")
    assert names(claim(store)) == ["run-2"]
    assert claim(store, version="v3") == []
    enqueue(store, "run-4")
    assert names(claim(store, version="v2")) == ["run-1", "run-4"]


def test_a_run_that_is_changed_by_hand_meanwhile_is_left(store: Store, other: Store) -> None:
    enqueue(store, "run-1", "run-2")
    lease = other.take_lease("run/run-1")
    assert names(claim(store)) == ["run-2"]
    other.release_lease(lease)
    assert names(claim(store)) == ["run-1"]


def test_workers_that_take_at_the_same_time_get_different_runs(store: Store, other: Store) -> None:
    everything = [f"run-{number}" for number in range(60)]
    enqueue(store, *everything)
    taken: list[str] = []

    def take(worker: Store) -> None:
        for _ in range(30):
            taken.extend(names(claim(worker, 2)))

    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(take, worker) for worker in (store, other, store, other)]:
            done.result(timeout=60)
    assert sorted(taken) == sorted(everything)


# --- when it is due ---------------------------------------------------------------------------


def test_a_delayed_run_is_taken_when_it_is_due(store: Store, clock: ManualClock) -> None:
    enqueue(store, "run-1", due=60.0)
    assert store.seconds_to_next() == pytest.approx(60)
    clock.jump(3600)
    clock.advance(59)
    assert claim(store) == []
    assert store.seconds_to_next() == pytest.approx(1)
    clock.sleep_machine(1)
    assert store.seconds_to_next() == 0.0
    assert names(claim(store)) == ["run-1"]
    assert store.seconds_to_next() is None


def test_a_held_run_waits_until_it_is_woken(store: Store, other: Store) -> None:
    enqueue(store, "run-1", due=None)
    assert (claim(store), store.seconds_to_next(), row(store, "run-1").state) == ([], None, HELD)
    assert other.wake_run("run-1")
    assert (store.seconds_to_next(), row(store, "run-1").state) == (0.0, READY)
    assert not other.wake_run("run-1")
    assert names(claim(store)) == ["run-1"]


def test_a_run_that_is_due_is_not_ahead_for_having_been_delayed(
    store: Store, clock: ManualClock
) -> None:
    enqueue(store, "delayed", due=100.0)
    clock.advance(50)
    enqueue(store, "run-1")
    clock.advance(50)
    assert names(claim(store)) == ["run-1", "delayed"]


@pytest.mark.parametrize("due", [0.0, -5.0, float("nan")])
def test_what_is_not_due_later_is_ready(store: Store, due: float) -> None:
    enqueue(store, "run-1", due=due)
    assert row(store, "run-1").state is READY


def test_a_wait_without_end_is_scheduled(store: Store) -> None:
    enqueue(store, "run-1", due=float("inf"))
    found = row(store, "run-1")
    assert found.state is SCHEDULED
    assert found.due_at is not None
    assert found.due_at.year > 2300


def test_the_earliest_of_all_queues_is_next(store: Store) -> None:
    assert store.seconds_to_next() is None
    enqueue(store, "run-1", due=60.0)
    enqueue(store, "run-2", due=30.0, queue="other")
    enqueue(store, "run-3", due=None)
    assert store.seconds_to_next() == pytest.approx(30)
    enqueue(store, "run-4", queue="third")
    assert store.seconds_to_next() == 0.0


# --- another boot -----------------------------------------------------------------------------


def test_after_a_reboot_a_run_is_due_by_wall_time(stores: Stores, clock: ManualClock) -> None:
    store = stores.open()
    enqueue(store, "soon", due=100.0)
    enqueue(store, "later", due=1000.0)
    store.close()
    clock.reboot(200)
    store = stores.open()
    assert store.seconds_to_next() == 0.0
    assert store.recover_runs(nobody) == []
    assert names(claim(store)) == ["soon"]
    assert store.seconds_to_next() == pytest.approx(800)
    clock.advance(800)
    assert names(claim(store)) == ["later"]


def test_after_a_reboot_no_wait_is_longer_than_all_of_it(
    stores: Stores, clock: ManualClock
) -> None:
    store = stores.open()
    enqueue(store, "run-1", due=100.0)
    store.close()
    clock.reboot(10)
    clock.jump(-1_000_000)
    store = stores.open()
    assert claim(store) == []
    assert store.seconds_to_next() == pytest.approx(100)
    clock.jump(-1_000_000)
    clock.advance(100)
    assert names(claim(store)) == ["run-1"]


# --- releasing --------------------------------------------------------------------------------


def test_a_released_run_is_ready_for_the_next(store: Store, other: Store) -> None:
    enqueue(store, "run-1")
    (lease,) = claim(store)
    store.release_run(lease)
    assert store.lease("run/run-1") is None
    assert names(claim(other)) == ["run-1"]


def test_a_released_run_is_due_when_the_release_says(store: Store, clock: ManualClock) -> None:
    enqueue(store, "run-1", "run-2")
    first, second = claim(store)
    store.release_run(first, 60.0)
    store.release_run(second, None)
    assert row(store, "run-1").due_at == clock.now() + timedelta(seconds=60)
    assert row(store, "run-2").state is HELD
    assert claim(store) == []
    clock.advance(60)
    assert names(claim(store)) == ["run-1"]


def test_only_the_last_user_releases(store: Store) -> None:
    enqueue(store, "run-1")
    (lease,) = claim(store)
    store.acquire_run("run-1")
    store.release_run(lease, None)
    assert row(store, "run-1").state is ACTIVE
    store.release_run(lease, 60.0)
    assert row(store, "run-1").state is SCHEDULED


def test_closing_a_store_makes_its_runs_ready(store: Store, other: Store) -> None:
    enqueue(store, "run-1")
    claim(store)
    store.close()
    assert row(other, "run-1").deaths == 0
    assert names(claim(other)) == ["run-1"]


def test_a_release_after_a_takeover_changes_nothing(
    stores: Stores, store: Store, other: Store, clock: ManualClock
) -> None:
    enqueue(store, "run-1")
    (lease,) = claim(store)
    clock.advance(1_000_000)
    other.acquire_run("run-1")
    store.release_run(lease, None)
    assert row(store, "run-1").state is ACTIVE


def test_a_run_without_a_row_gets_none_by_being_released(store: Store) -> None:
    hold = store.acquire_run("run-1", "mail", [task("start")], "pending")
    assert not hold.dispatched
    store.release_run(hold, 60.0)
    assert (store.dispatch("run-1"), store.dispatches(), store.seconds_to_next()) == (
        None,
        [],
        None,
    )


def test_an_append_releases_a_run_until_it_is_due(store: Store) -> None:
    enqueue(store, "run-1")
    (lease,) = claim(store)
    store.append([Append(lease, [task("a")], "waiting", release=True, due=60.0)])
    assert row(store, "run-1").state is SCHEDULED
    assert store.lease("run/run-1") is None


# --- waking -----------------------------------------------------------------------------------


def test_an_active_run_that_is_woken_is_ready_when_it_is_released(
    store: Store, other: Store
) -> None:
    enqueue(store, "run-1", "run-2")
    first, second = claim(store)
    assert other.wake_run("run-1")
    assert not other.wake_run("run-1")
    assert row(store, "run-1").state is ACTIVE
    store.release_run(first, None)
    store.append([Append(second, [], release=True, due=None)])
    assert (row(store, "run-1").state, row(store, "run-2").state) == (READY, HELD)


def test_being_woken_counts_once(store: Store, other: Store) -> None:
    enqueue(store, "run-1")
    (lease,) = claim(store)
    other.wake_run("run-1")
    store.release_run(lease, None)
    (lease,) = claim(store)
    store.release_run(lease, None)
    assert row(store, "run-1").state is HELD


def test_a_scheduled_run_is_woken_before_it_is_due(store: Store) -> None:
    enqueue(store, "run-1", due=60.0)
    assert store.wake_run("run-1")
    assert (row(store, "run-1").state, row(store, "run-1").due_at) == (READY, None)
    assert names(claim(store)) == ["run-1"]


def test_waking_a_run_that_does_not_belong_to_workers_does_nothing(store: Store) -> None:
    store.acquire_run("run-1", "mail", [task("start")])
    assert not store.wake_run("run-1")
    assert not store.wake_run("run-2")
    assert store.dispatches() == []


def test_a_document_wakes_a_run_in_its_own_transaction(store: Store, other: Store) -> None:
    enqueue(store, "run-1", "run-2", due=None)
    other.update_document("inbox", "run-1", lambda _: encode("answer"), "run-1")
    assert row(store, "run-1").state is READY

    def fails(before: bytes | None) -> None:
        raise LookupError

    with pytest.raises(LookupError):
        other.update_document("inbox", "run-2", fails, "run-2")
    assert row(store, "run-2").state is HELD


def test_an_append_that_changes_a_document_wakes_a_run(store: Store) -> None:
    enqueue(store, "run-1", "run-2", due=None)
    hold = store.acquire_run("sender")

    def refused(before: bytes | None) -> None:
        raise FencedError("sender", fence=1, current=2)

    accepted = DocumentChange("inbox", "run-1", lambda _: encode("answer"), wake="run-1")
    not_accepted = DocumentChange("inbox", "run-2", refused, wake="run-2")
    store.append([Append(hold, [task("sent")], change=accepted)])
    store.append([Append(hold, [task("sent")], change=not_accepted)])
    assert (row(store, "run-1").state, row(store, "run-2").state) == (READY, HELD)


# --- started by a caller ----------------------------------------------------------------------


def test_a_new_run_may_belong_to_workers_while_its_caller_executes_it(
    store: Store, other: Store
) -> None:
    dispatch = NewDispatch(queue="fast")
    hold = store.acquire_run(
        "run-1", "mail", [task("start")], "pending", dispatch=dispatch, sync=True
    )
    assert hold.dispatched
    assert (row(other, "run-1").state, row(other, "run-1").queue) == (ACTIVE, "fast")
    assert claim(other, queue="fast") == []
    store.release_run(hold)
    assert names(claim(other, queue="fast")) == ["run-1"]


def test_a_run_with_entries_is_not_given_to_workers_by_being_acquired(store: Store) -> None:
    store.release_run(store.acquire_run("run-1", "mail", [task("start")]))
    hold = store.acquire_run("run-1", "mail", [task("start")], dispatch=NewDispatch())
    assert (hold.dispatched, store.dispatch("run-1")) == (False, None)


def test_taking_the_lease_of_a_run_that_waits_makes_it_active(store: Store, other: Store) -> None:
    enqueue(store, "run-1", due=None)
    hold = other.acquire_run("run-1")
    assert (hold.dispatched, row(store, "run-1").state) == (True, ACTIVE)
    other.release_run(hold, None)
    assert row(store, "run-1").state is HELD


def test_a_run_shared_in_its_process_gets_its_first_entries_and_its_row(store: Store) -> None:
    store.acquire_run("run-1")
    dispatch = NewDispatch()
    hold = store.acquire_run(
        "run-1", "mail", [task("start")], "pending", dispatch=dispatch, parent="run-0"
    )
    assert (hold.users, hold.seq, hold.dispatched) == (2, 1, True)
    assert (row(store, "run-1").state, row(store, "run-1").workflow) == (ACTIVE, "mail")
    record = store.run("run-1")
    assert record is not None
    assert (record.workflow, record.status, record.parent) == ("mail", "pending", "run-0")


# --- appending --------------------------------------------------------------------------------


def test_an_append_gives_a_run_to_workers(store: Store) -> None:
    hold = store.acquire_run("run-1", "mail", [task("start")], "pending")
    store.append([Append(hold, [task("a")], dispatch=NewDispatch(queue="fast"))])
    assert hold.dispatched
    assert (row(store, "run-1").state, row(store, "run-1").queue) == (ACTIVE, "fast")
    store.append([Append(hold, [task("b")], dispatch=NewDispatch(queue="other"))])
    assert row(store, "run-1").queue == "fast"


def test_an_append_that_also_releases_makes_it_due(store: Store) -> None:
    hold = store.acquire_run("run-1", "mail", [task("start")], "pending")
    dispatch = NewDispatch(due=60.0)
    store.append([Append(hold, [], "stopped", release=True, dispatch=dispatch)])
    assert row(store, "run-1").state is SCHEDULED


@pytest.mark.parametrize("status", ["success", "failed", "cancelled"])
@pytest.mark.parametrize("release", [False, True])
def test_the_row_goes_when_the_run_ends(store: Store, status: str, release: bool) -> None:
    enqueue(store, "run-1")
    (lease,) = claim(store)
    store.append([Append(lease, [task("end")], status, release=release)])
    assert (lease.dispatched, store.dispatch("run-1")) == (False, None)
    if not release:
        store.release_run(lease)
    assert (store.dispatches(), claim(store)) == ([], [])


def test_another_status_keeps_the_row(store: Store) -> None:
    enqueue(store, "run-1")
    (lease,) = claim(store)
    store.append([Append(lease, [task("a")], "waiting")])
    assert row(store, "run-1").state is ACTIVE


def test_a_run_that_ended_may_be_given_to_workers_again(store: Store) -> None:
    enqueue(store, "run-1")
    (lease,) = claim(store)
    end = Append(lease, [task("end")], "failed")
    retried = Append(lease, [task("retry")], "stopped", dispatch=NewDispatch())
    store.append([end, retried])
    assert (lease.dispatched, row(store, "run-1").state) == (True, ACTIVE)


def test_a_refused_append_changes_no_row(store: Store, other: Store, clock: ManualClock) -> None:
    enqueue(store, "run-1")
    (lease,) = claim(store)
    clock.advance(1_000_000)
    other.acquire_run("run-1")
    (refused,) = store.append([Append(lease, [task("end")], "success", release=True)])
    assert isinstance(refused, FencedError)
    assert row(store, "run-1").state is ACTIVE


# --- recovering -------------------------------------------------------------------------------


def test_the_runs_of_a_dead_process_are_taken_like_others(stores: Stores, store: Store) -> None:
    enqueue(store, "run-1", "run-2")
    process = stores.process_holding("run-1")
    assert store.recover_runs(nobody) == []
    process.kill()
    assert store.recover_runs(nobody) == ["run-1"]
    assert (row(store, "run-1").state, row(store, "run-1").deaths) == (READY, 1)
    assert store.lease("run/run-1") is None
    assert claim(store, workflows=("other",)) == []
    leases = claim(store)
    assert names(leases) == ["run-1", "run-2"]
    assert [lease.deaths for lease in leases] == [1, 0]


def die(stores: Stores, store: Store, name: str) -> None:
    stores.process_holding(name).kill()
    assert store.recover_runs(nobody) == [name]


def outcome(kind: EntryKind = EntryKind.WAIT_ENDED) -> NewEntry:
    return NewEntry(kind, step=1, attempt=1, identity=b"1" * 32)


def test_deaths_add_up(stores: Stores, store: Store) -> None:
    enqueue(store, "run-1")
    for deaths in (1, 2):
        die(stores, store, "run-1")
        assert row(store, "run-1").deaths == deaths
    assert store.acquire_run("run-1").deaths == 2


@for_each("kind", sorted(RESETS_DEATHS))
def test_deaths_count_from_0_again_after_an_outcome(
    stores: Stores, store: Store, kind: EntryKind
) -> None:
    name = kind.name.lower()
    enqueue(store, name)
    die(stores, store, name)
    lease = store.acquire_run(name)
    store.append([Append(lease, [task("a")])])
    assert row(store, name).deaths == lease.deaths == 1
    store.append([Append(lease, [outcome(kind)])])
    assert row(store, name).deaths == lease.deaths == 0
    store.release_run(lease)
    die(stores, store, name)
    assert row(store, name).deaths == 1


def test_an_outcome_of_a_child_counts_for_the_run_that_workers_take(
    stores: Stores, store: Store
) -> None:
    enqueue(store, "run-1")
    die(stores, store, "run-1")
    child = store.acquire_run("run-1.child", "mail", [task("start")], parent="run-1")
    child.root = store.acquire_run("run-1")
    store.append([Append(child, [outcome()])])
    assert row(store, "run-1").deaths == child.root.deaths == 0


def test_an_outcome_that_is_refused_leaves_the_deaths(stores: Stores, store: Store) -> None:
    enqueue(store, "run-1")
    die(stores, store, "run-1")
    lease = store.acquire_run("run-1")
    store.append([Append(lease, [outcome()], guard=DocumentGuard("inbox", "none", 1))])
    assert row(store, "run-1").deaths == lease.deaths == 1


def test_a_dead_caller_s_run_is_adopted_if_a_worker_wants_it(stores: Stores, store: Store) -> None:
    processes = [stores.process_holding(name, tasks=1) for name in ("run-1", "run-2")]
    assert store.recover_runs(lambda _: NewDispatch()) == []
    for process in processes:
        process.kill()
    asked: list[str] = []

    def adopt(name: str) -> NewDispatch | None:
        asked.append(name)
        record = store.run(name)
        assert record is not None
        assert store.entries(record.id)
        return NewDispatch(queue="fast") if name == "run-1" else None

    assert store.recover_runs(adopt) == ["run-1"]
    assert sorted(asked) == ["run-1", "run-2"]
    found = row(store, "run-1")
    assert (found.state, found.queue, found.deaths) == (READY, "fast", 1)
    assert store.dispatch("run-2") is None
    assert [lease.name for lease in store.leases()] == ["run/run-2"]
    assert store.recover_runs(nobody) == []


def test_an_active_run_without_a_lease_is_ready_again(store: Store, other: Store) -> None:
    enqueue(store, "run-1")
    (lease,) = claim(store)
    store.release_lease(lease.lease)
    assert other.recover_runs(nobody) == ["run-1"]
    assert (row(store, "run-1").state, row(store, "run-1").deaths) == (READY, 0)


def test_a_run_that_is_executed_is_not_recovered(
    store: Store, other: Store, clock: ManualClock
) -> None:
    enqueue(store, "run-1", "run-2", due=None)
    store.acquire_run("run-1")
    clock.advance(1_000_000)
    assert other.recover_runs(nobody) == []
    assert row(store, "run-1").state is ACTIVE


def test_the_run_of_a_process_that_hangs_is_recovered_after_a_last_chance(
    store: Store, other: Store, clock: ManualClock
) -> None:
    enqueue(store, "run-1", "run-2", due=None)
    hold = store.acquire_run("run-1")
    store.acquire_run("run-2")
    clock.advance(1_000_000)
    assert other.recover_runs(nobody) == []
    clock.advance(0.4)
    assert other.recover_runs(nobody) == []
    clock.advance(0.2)
    assert sorted(other.recover_runs(nobody)) == ["run-1", "run-2"]
    assert (row(store, "run-1").state, row(store, "run-1").deaths) == (READY, 1)
    # It goes on, and is refused: what it releases is no longer its own.
    assert len(claim(other)) == 2
    assert isinstance(store.append([Append(hold, [task("late")])])[0], FencedError)
    store.release_run(hold, None)
    assert row(store, "run-1").state is ACTIVE


def test_a_process_that_renews_late_keeps_its_runs(
    store: Store, other: Store, clock: ManualClock
) -> None:
    enqueue(store, "run-1", due=None)
    store.acquire_run("run-1")
    clock.advance(1_000_000)
    assert other.recover_runs(nobody) == []
    store.renew_leases()
    clock.advance(1)
    assert other.recover_runs(nobody) == []
    assert row(store, "run-1").state is ACTIVE


def test_after_a_reboot_the_runs_that_were_active_are_recovered(
    stores: Stores, clock: ManualClock
) -> None:
    store = stores.open()
    enqueue(store, "run-1")
    process = stores.process_holding("run-1")
    process.kill()
    clock.reboot()
    assert stores.open().recover_runs(nobody) == ["run-1"]


def test_being_woken_is_not_lost_with_the_process(stores: Stores, store: Store) -> None:
    enqueue(store, "run-1")
    process = stores.process_holding("run-1")
    store.wake_run("run-1")
    process.kill()
    store.recover_runs(nobody)
    (lease,) = claim(store)
    store.release_run(lease, None)
    assert row(store, "run-1").state is HELD


# --- reading ----------------------------------------------------------------------------------


def test_rows_are_listed_in_the_order_in_which_they_are_taken(
    store: Store, clock: ManualClock
) -> None:
    enqueue(store, "run-1")
    clock.advance(1)
    enqueue(store, "run-2", "run-3", queue="fast")
    enqueue(store, "run-4", priority=1)
    enqueue(store, "run-5", due=None)
    claim(store, 1, queue="fast")

    def listed(**chosen: object) -> list[str]:
        return [found.run_id for found in store.dispatches(**chosen)]  # type: ignore[arg-type]

    assert listed() == ["run-4", "run-1", "run-2", "run-3", "run-5"]
    assert listed(queue="fast") == ["run-2", "run-3"]
    assert listed(state=READY) == ["run-4", "run-1", "run-3"]
    assert listed(queue="default", state=HELD) == ["run-5"]
    assert listed(limit=1) == ["run-4"]
    assert store.dispatch_counts() == {
        ("default", READY): 2,
        ("default", HELD): 1,
        ("fast", ACTIVE): 1,
        ("fast", READY): 1,
    }


def test_roots_are_the_runs_without_a_parent(store: Store) -> None:
    store.acquire_run("root", "mail", [task("start")], "pending")
    store.acquire_run("child", "mail", [task("start")], "pending", parent="root")
    child = store.run("child")
    assert child is not None
    assert child.parent == "root"
    assert [run.name for run in store.runs(roots=True)] == ["root"]
    assert [run.name for run in store.runs(workflow="mail")] == ["child", "root"]
    assert (store.count_runs(roots=True), store.count_runs()) == (1, 2)
    assert store.count_runs(status="success", roots=True) == 0
    assert sum(store.status_counts(roots=True).values()) == 1


def test_a_purged_run_has_no_row(store: Store) -> None:
    enqueue(store, "run-1", "run-2", due=None)
    assert store.purge_runs(["run-1"]) == 1
    assert [found.run_id for found in store.dispatches()] == ["run-2"]
    enqueue(store, "run-1")
    assert names(claim(store)) == ["run-1"]
