"""One process holds a run; another is told who, or takes over and fences the first one off."""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING

import pytest

from maestro_hive.kernel.errors import FencedError, RunLeasedError
from maestro_hive.maestro.state.store import Append
from tests.contract.stores import LEASE, add_tasks, numbers, task, tasks

if TYPE_CHECKING:
    from maestro_hive.maestro.state.store import Store
    from maestro_hive.testing import ManualClock
    from tests.contract.stores import Stores


def test_holding_is_shared_within_a_process(store: Store) -> None:
    first, second = store.acquire_run("run-1"), store.acquire_run("run-1")
    assert first is second
    add_tasks(store, first, 1)
    add_tasks(store, second, 1)
    assert first.seq == second.seq == 2


def test_holding_is_counted_within_a_process(store: Store, other: Store) -> None:
    hold, _, _ = (store.acquire_run("run-1") for _ in range(3))
    for _ in range(2):
        store.release_run(hold)
        with pytest.raises(RunLeasedError):
            other.acquire_run("run-1")
        add_tasks(store, hold, 1)
    store.release_run(hold)
    other.acquire_run("run-1")


def test_whoever_comes_second_is_told_who_holds_the_run_and_since_when(
    store: Store, other: Store, clock: ManualClock
) -> None:
    clock.advance(100)
    since = clock.now()
    store.acquire_run("run-1")
    clock.advance(10)
    with pytest.raises(RunLeasedError) as caught:
        other.acquire_run("run-1")
    error = caught.value
    assert error.run_id == "run-1"
    assert (error.host, error.pid, error.since) == (socket.gethostname(), os.getpid(), since)
    assert "'run-1'" in str(error)
    assert str(os.getpid()) in str(error)


def test_the_process_that_is_named_is_the_one_that_holds(stores: Stores, store: Store) -> None:
    process = stores.process_holding("run-1")
    with pytest.raises(RunLeasedError) as caught:
        store.acquire_run("run-1")
    assert caught.value.pid == process.pid


def test_being_refused_changes_nothing_for_the_holder(store: Store, other: Store) -> None:
    hold = store.acquire_run("run-1")
    with pytest.raises(RunLeasedError):
        other.acquire_run("run-1")
    add_tasks(store, hold, 1)
    assert numbers(other.entries(hold.run)) == [1]


def test_other_runs_are_free(store: Store, other: Store) -> None:
    store.acquire_run("run-1")
    add_tasks(other, other.acquire_run("run-2"), 1)


def test_readers_need_no_hold(store: Store, other: Store) -> None:
    hold = store.acquire_run("run-1")
    add_tasks(store, hold, 2)
    assert numbers(other.entries(hold.run)) == [1, 2]
    assert other.run("run-1") is not None


def test_a_run_given_back_is_free_at_once(store: Store, other: Store) -> None:
    hold = store.acquire_run("run-1")
    store.release_run(hold)
    taken = other.acquire_run("run-1")
    assert taken.lease.fence > hold.lease.fence


def test_who_gave_a_run_back_cannot_write(store: Store, other: Store) -> None:
    hold = store.acquire_run("run-1")
    store.release_run(hold)
    (refused,) = store.append([Append(hold, [task("late")])])
    assert isinstance(refused, FencedError)
    assert other.entries(hold.run) == []


def test_the_same_process_can_take_it_again(store: Store) -> None:
    first = store.acquire_run("run-1")
    add_tasks(store, first, 2)
    store.release_run(first)
    second = store.acquire_run("run-1")
    assert second is not first
    assert second.lease.fence > first.lease.fence
    add_tasks(store, second, 1)
    assert numbers(store.entries(second.run)) == [1, 2, 3]


def test_a_run_whose_holder_died_is_free_at_once(stores: Stores, store: Store) -> None:
    process = stores.process_holding("run-1", tasks=2)
    before = store.lease("run/run-1")
    assert before is not None
    process.kill()
    hold = store.acquire_run("run-1")
    assert hold.seq == 2
    assert hold.lease.fence > before.fence
    add_tasks(store, hold, 1)
    assert numbers(store.entries(hold.run)) == [1, 2, 3]


def test_closing_a_store_frees_what_it_held(store: Store, other: Store) -> None:
    store.acquire_run("run-1")
    store.acquire_run("run-1")
    store.take_lease("probe")
    store.close()
    other.acquire_run("run-1")
    other.take_lease("probe")


# --- expiry ------------------------------------------------------------------------------------


def test_a_lease_holds_until_it_expires(store: Store, other: Store, clock: ManualClock) -> None:
    store.acquire_run("run-1")
    clock.advance(LEASE - 0.5)
    with pytest.raises(RunLeasedError):
        other.acquire_run("run-1")
    clock.advance(1)
    other.acquire_run("run-1")


def test_who_was_taken_over_cannot_write(store: Store, other: Store, clock: ManualClock) -> None:
    hold = store.acquire_run("run-1")
    add_tasks(store, hold, 1)
    clock.advance(LEASE + 1)
    taken = other.acquire_run("run-1")
    add_tasks(other, taken, 1)
    (refused,) = store.append([Append(hold, [task("late")], "failed")])
    assert isinstance(refused, FencedError)
    assert refused.run_id == "run-1"
    assert (refused.fence, refused.current) == (hold.lease.fence, taken.lease.fence)
    assert refused.fence < refused.current
    assert tasks(other.entries(hold.run)) == ["1", "2"]
    record = other.run("run-1")
    assert record is not None
    assert record.status == "pending"
    assert hold.seq == 1


def test_who_was_taken_over_is_told_by_whom_when_it_asks_for_the_run_again(
    store: Store, other: Store, clock: ManualClock
) -> None:
    store.acquire_run("run-1")
    clock.advance(LEASE + 1)
    taken = other.acquire_run("run-1")
    with pytest.raises(RunLeasedError) as caught:
        store.acquire_run("run-1")
    assert caught.value.since == taken.lease.holder.since
    other.release_run(taken)
    add_tasks(store, store.acquire_run("run-1"), 1)


def test_giving_back_what_was_taken_over_disturbs_nobody(
    store: Store, other: Store, clock: ManualClock
) -> None:
    hold = store.acquire_run("run-1")
    clock.advance(LEASE + 1)
    taken = other.acquire_run("run-1")
    store.release_run(hold)
    add_tasks(other, taken, 1)
    with pytest.raises(RunLeasedError):
        store.acquire_run("run-1")


def test_only_the_fenced_append_of_a_batch_is_refused(
    store: Store, other: Store, clock: ManualClock
) -> None:
    lost, kept, last = (store.acquire_run(name) for name in ("lost", "kept", "last"))
    clock.advance(LEASE + 1)
    other.acquire_run("lost")
    outcome = store.append(
        [
            Append(kept, [task("a")], "running"),
            Append(lost, [task("b")], "running"),
            Append(last, [task("c"), task("d")]),
            Append(lost, [task("e")]),
            Append(kept, [task("f")]),
        ]
    )
    assert [type(each) for each in outcome] == [
        list,
        FencedError,
        list,
        FencedError,
        list,
    ]
    assert tasks(other.entries(kept.run)) == ["a", "f"]
    assert tasks(other.entries(last.run)) == ["c", "d"]
    assert other.entries(lost.run) == []
    assert {run.name: run.status for run in other.runs()} == {
        "lost": "pending",
        "kept": "running",
        "last": "pending",
    }


def test_an_expired_lease_that_nobody_took_goes_on(
    store: Store, other: Store, clock: ManualClock
) -> None:
    hold = store.acquire_run("run-1")
    clock.advance(10 * LEASE)
    add_tasks(store, hold, 1)
    assert store.acquire_run("run-1") is hold
    store.renew_leases()
    with pytest.raises(RunLeasedError):
        other.acquire_run("run-1")


def test_renewing_keeps_everything_this_store_holds(
    store: Store, other: Store, clock: ManualClock
) -> None:
    store.acquire_run("run-1")
    store.take_lease("probe", LEASE)
    for _ in range(4):
        clock.advance(LEASE - 1)
        store.renew_leases()
    with pytest.raises(RunLeasedError):
        other.acquire_run("run-1")
    with pytest.raises(RunLeasedError):
        other.take_lease("probe")


def test_renewing_does_not_take_back_what_was_taken_over(
    store: Store, other: Store, clock: ManualClock
) -> None:
    hold = store.acquire_run("run-1")
    clock.advance(LEASE + 1)
    taken = other.acquire_run("run-1")
    store.renew_leases()
    assert isinstance(store.append([Append(hold, [task("late")])])[0], FencedError)
    add_tasks(other, taken, 1)
    clock.advance(LEASE + 1)  # what was renewed by the wrong one is not renewed
    store.acquire_run("run-1")


def test_a_machine_that_slept_did_not_hang(store: Store, other: Store, clock: ManualClock) -> None:
    store.acquire_run("run-1")
    clock.sleep_machine(100 * LEASE)
    with pytest.raises(RunLeasedError):
        other.acquire_run("run-1")


@pytest.mark.parametrize("seconds", [1e6, -1e6])
def test_a_wall_clock_that_was_set_changes_no_lease(
    store: Store, other: Store, clock: ManualClock, seconds: float
) -> None:
    store.acquire_run("run-1")
    clock.jump(seconds)
    with pytest.raises(RunLeasedError):
        other.acquire_run("run-1")


def test_a_reboot_frees_every_lease(store: Store, other: Store, clock: ManualClock) -> None:
    hold = store.acquire_run("run-1")
    clock.reboot()
    taken = other.acquire_run("run-1")
    assert taken.lease.fence > hold.lease.fence


def test_the_fence_only_grows(stores: Stores, store: Store, clock: ManualClock) -> None:
    other = stores.open()
    fences = []
    for turn in range(4):
        for taker in (store, other):
            hold = taker.acquire_run("run-1")
            fences.append(hold.lease.fence)
            if turn % 2:
                taker.release_run(hold)
            else:
                clock.advance(LEASE + 1)
    store.purge_runs(["run-1"])
    fences.append(other.acquire_run("run-1").lease.fence)
    assert fences == sorted(set(fences))


# --- leases of any name ------------------------------------------------------------------------


def test_a_lease_that_nobody_has_is_none(store: Store) -> None:
    assert store.lease("probe") is None


def test_a_lease_shows_who_has_it(store: Store, other: Store, clock: ManualClock) -> None:
    taken = store.take_lease("probe", 60)
    shown = other.lease("probe")
    assert shown == taken
    assert shown is not None
    assert shown.name == "probe"
    assert (shown.holder.host, shown.holder.pid) == (socket.gethostname(), os.getpid())
    assert shown.holder.since == clock.now()
    assert shown.expires == clock.awake_seconds() + 60


def test_a_lease_is_exclusive_even_within_a_process(store: Store, other: Store) -> None:
    store.take_lease("probe", LEASE)
    for second in (store, other):
        with pytest.raises(RunLeasedError) as caught:
            second.take_lease("probe")
        assert caught.value.run_id == "probe"


def test_a_lease_given_back_is_free(store: Store, other: Store) -> None:
    first = store.take_lease("probe", LEASE)
    store.release_lease(first)
    assert other.lease("probe") is None
    assert other.take_lease("probe").fence > first.fence


def test_a_lease_lasts_as_long_as_was_asked(store: Store, other: Store, clock: ManualClock) -> None:
    store.take_lease("probe", 60)
    clock.advance(59)
    with pytest.raises(RunLeasedError):
        other.take_lease("probe")
    clock.advance(2)
    other.take_lease("probe")


def test_giving_back_a_lease_that_was_taken_over_does_nothing(
    store: Store, other: Store, clock: ManualClock
) -> None:
    first = store.take_lease("probe", 60)
    clock.advance(61)
    second = other.take_lease("probe", 60)
    store.release_lease(first)
    assert other.lease("probe") == second


# --- all of them at once -----------------------------------------------------------------------


def test_nobody_holds_a_run_to_begin_with(store: Store) -> None:
    assert store.run_leases() == {}


def test_held_runs_are_listed_with_their_holders(store: Store, other: Store) -> None:
    first, second = store.acquire_run("run-1"), other.acquire_run("run-2")
    store.take_lease("probe")
    store.release_run(store.acquire_run("free"))
    for looker in (store, other):
        assert looker.run_leases() == {"run-1": first.lease, "run-2": second.lease}


def test_a_run_whose_holder_died_is_not_held(stores: Stores, store: Store) -> None:
    kept = store.acquire_run("kept")
    process = stores.process_holding("run-1")
    assert store.run_leases()["run-1"].holder.pid == process.pid
    process.kill()
    assert store.run_leases() == {"kept": kept.lease}


def test_a_run_is_held_by_who_is_late_until_somebody_takes_it(
    store: Store, other: Store, clock: ManualClock
) -> None:
    late = store.acquire_run("run-1")
    clock.advance(LEASE + 1)
    assert other.run_leases() == {"run-1": late.lease}
    taken = other.acquire_run("run-1")
    assert store.run_leases() == {"run-1": taken.lease}


def test_after_a_reboot_no_run_is_held(store: Store, other: Store, clock: ManualClock) -> None:
    store.acquire_run("run-1")
    clock.reboot()
    assert other.run_leases() == {}


def test_a_lease_that_is_retained_is_not_released_by_closing_the_store(
    store: Store, other: Store
) -> None:
    retained, released = store.take_lease("retained"), store.take_lease("released")
    store.retain_lease(retained)
    store.retain_lease(released)
    store.release_lease(released)
    store.close()
    with pytest.raises(RunLeasedError):
        other.take_lease("retained")
    assert other.is_alive(retained)
    other.take_lease("released")
