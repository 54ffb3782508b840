"""Runs are append-only lists, numbered without gaps, and seen by everybody at once."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest

from maestro_hive.kernel.clock import to_micros
from maestro_hive.maestro.state.codec import encode
from maestro_hive.maestro.state.records import EntryKind, NewEntry
from maestro_hive.maestro.state.store import Append
from tests.contract.stores import Made, add_tasks, numbers, task, tasks

if TYPE_CHECKING:
    from collections.abc import Iterator

    from maestro_hive.maestro.state.store import Store
    from maestro_hive.testing import ManualClock
    from tests.contract.stores import Stores


class TroubleError(Exception):
    pass


@pytest.fixture
def eager_threads() -> Iterator[None]:
    """Let threads in between wherever they can get in."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def two_and_then_trouble(name: str) -> NewEntry:
    if name == "trouble":
        raise TroubleError
    return task(name)


def test_a_new_run_has_no_entries(store: Store) -> None:
    hold = store.acquire_run("run-1")
    assert hold.seq == 0
    assert store.entries(hold.run) == []


def test_entries_are_numbered_from_one_without_gaps(store: Store) -> None:
    hold = store.acquire_run("run-1")
    store.append([Append(hold, [task("a"), task("b"), task("c")])])
    store.append([Append(hold, [task("d")])])
    assert hold.seq == 4
    found = store.entries(hold.run)
    assert numbers(found) == [1, 2, 3, 4]
    assert tasks(found) == ["a", "b", "c", "d"]


def test_each_run_has_numbers_of_its_own(store: Store) -> None:
    one, two = store.acquire_run("run-1"), store.acquire_run("run-2")
    for _ in range(3):
        store.append([Append(one, [task("one")]), Append(two, [task("two"), task("two")])])
    assert numbers(store.entries(one.run)) == [1, 2, 3]
    assert numbers(store.entries(two.run)) == [1, 2, 3, 4, 5, 6]
    assert set(tasks(store.entries(one.run))) == {"one"}
    assert set(tasks(store.entries(two.run))) == {"two"}


def test_appends_to_the_same_run_in_one_batch_follow_each_other(store: Store) -> None:
    hold = store.acquire_run("run-1")
    outcome = store.append([Append(hold, [task("a")]), Append(hold, [task("b")])])
    assert outcome == [[entry] for entry in store.entries(hold.run)]
    assert tasks(store.entries(hold.run)) == ["a", "b"]
    assert numbers(store.entries(hold.run)) == [1, 2]


def test_numbers_go_on_where_another_process_stopped(store: Store, other: Store) -> None:
    hold = store.acquire_run("run-1")
    add_tasks(store, hold, 2)
    store.release_run(hold)
    taken = other.acquire_run("run-1")
    assert (taken.run, taken.seq) == (hold.run, 2)
    add_tasks(other, taken, 1)
    assert numbers(store.entries(hold.run)) == [1, 2, 3]


@pytest.mark.usefixtures("eager_threads")
def test_threads_that_append_to_one_run_leave_no_gap(store: Store) -> None:
    hold = store.acquire_run("run-1")

    def work(name: int) -> None:
        for _ in range(25):
            (written,) = store.append([Append(hold, [task(name), task(name)])], sync=False)
            assert isinstance(written, list)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    found = store.entries(hold.run)
    assert numbers(found) == list(range(1, 201))
    assert sorted(tasks(found)) == sorted(str(name) for name in range(4) for _ in range(50))


@pytest.mark.parametrize("sync", [True, False])
def test_another_process_sees_entries_as_soon_as_append_returns(
    store: Store, other: Store, sync: bool
) -> None:
    hold = store.acquire_run("run-1")
    for count in range(1, 4):
        add_tasks(store, hold, 1, sync=sync)
        assert len(other.entries(hold.run)) == count
        assert len(other.entries(hold.run)) == count


def test_entries_that_were_not_synced_survive_the_death_of_their_process(
    stores: Stores, store: Store
) -> None:
    process = stores.process_holding("run-1", tasks=5)
    process.kill()
    run = store.run("run-1")
    assert run is not None
    assert tasks(store.entries(run.id)) == ["1", "2", "3", "4", "5"]


def test_an_entry_comes_back_as_it_was_given(store: Store, other: Store) -> None:
    hold = store.acquire_run("run-1")
    value = encode({"text": "grün 🐝"})
    given = NewEntry(
        EntryKind.ATTEMPT_STARTED,
        step=7,
        attempt=2,
        facts=b'{"persona":"architect"}',
        value=value,
        identity=b"\x00\xff" * 16,
        at=1_234_567,
    )
    store.append([Append(hold, [given])])
    (found,) = other.entries(hold.run)
    assert (found.seq, found.at) == (1, 1_234_567)
    assert (found.kind, found.step, found.attempt) == (EntryKind.ATTEMPT_STARTED, 7, 2)
    assert (found.facts, found.identity) == (given.facts, given.identity)
    assert (found.value, found.sha256) == value


def test_an_entry_without_a_time_is_from_now(store: Store, clock: ManualClock) -> None:
    hold = store.acquire_run("run-1")
    before = clock.now()
    add_tasks(store, hold, 1)
    clock.advance(90)
    add_tasks(store, hold, 1)
    first, second = store.entries(hold.run)
    assert (first.at, first.when) == (to_micros(before), before)
    assert second.when == before + timedelta(seconds=90)


@pytest.mark.parametrize("after, expected", [(0, [1, 2, 3]), (2, [3]), (3, []), (9, [])])
def test_entries_can_be_read_from_any_number_on(
    store: Store, after: int, expected: list[int]
) -> None:
    hold = store.acquire_run("run-1")
    add_tasks(store, hold, 3)
    assert numbers(store.entries(hold.run, after)) == expected


def test_entries_may_be_made_while_they_are_read(store: Store) -> None:
    hold = store.acquire_run("run-1")
    store.append([Append(hold, Made(["a", "b", "c"], task))])
    assert tasks(store.entries(hold.run)) == ["a", "b", "c"]


def test_appending_nothing_is_nothing(store: Store) -> None:
    hold = store.acquire_run("run-1")
    assert store.append([]) == []
    assert store.append([Append(hold, [])]) == [[]]
    assert store.entries(hold.run) == []


def test_a_batch_that_fails_leaves_nothing_and_the_next_goes_on(store: Store, other: Store) -> None:
    one, two = store.acquire_run("run-1"), store.acquire_run("run-2")
    add_tasks(store, one, 1)
    trouble = Made(["half", "done", "trouble"], two_and_then_trouble)
    with pytest.raises(TroubleError):
        store.append([Append(one, [task("first")], "running"), Append(two, trouble)])
    for seen_by in (store, other):
        assert numbers(seen_by.entries(one.run)) == [1]
        assert seen_by.entries(two.run) == []
        assert [run.status for run in seen_by.runs()] == ["pending", "pending"]
    assert (one.seq, two.seq) == (1, 0)
    add_tasks(store, one, 1)
    add_tasks(store, two, 1)
    assert numbers(store.entries(one.run)) == [1, 2]
    assert numbers(store.entries(two.run)) == [1]
