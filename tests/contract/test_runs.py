"""Runs have names and show themselves in listings."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

import pytest

from maestro_hive.kernel.errors import FencedError, InvalidIdentifierError, RunLeasedError
from maestro_hive.maestro.state.codec import encode
from maestro_hive.maestro.state.records import EntryKind
from maestro_hive.maestro.state.store import Append
from tests.contract.stores import LEASE, add_tasks, numbers, task, tasks
from tests.tables import for_each

if TYPE_CHECKING:
    from maestro_hive.maestro.state.store import Store
    from maestro_hive.testing import ManualClock


def test_a_run_that_nobody_started_is_not_found(store: Store) -> None:
    assert store.run("run-1") is None
    assert store.runs() == []


def test_holding_a_new_run_creates_it_for_everybody(
    store: Store, other: Store, clock: ManualClock
) -> None:
    hold = store.acquire_run("run-1", "build")
    record = other.run("run-1")
    assert record is not None
    assert (record.id, record.name, record.workflow) == (hold.run, "run-1", "build")
    assert record.status == "pending"
    assert record.created_at == record.updated_at == clock.now()
    assert other.runs() == [record]


def test_holding_a_run_again_does_not_make_it_anew(
    store: Store, other: Store, clock: ManualClock
) -> None:
    store.release_run(store.acquire_run("run-1", "build"))
    before = store.run("run-1")
    clock.advance(60)
    other.acquire_run("run-1", "something else")
    assert other.run("run-1") == before


def test_runs_are_listed_newest_first(store: Store) -> None:
    for name in ("b", "c", "a"):
        store.acquire_run(name)
    assert [run.name for run in store.runs()] == ["a", "c", "b"]
    assert [run.name for run in store.runs(limit=2)] == ["a", "c"]
    assert store.runs(limit=0) == []


def test_the_status_given_with_entries_is_the_runs_in_listings(
    store: Store, other: Store, clock: ManualClock
) -> None:
    started = clock.now()
    hold = store.acquire_run("run-1")
    clock.advance(5)
    store.append([Append(hold, [task("a")], "running")])
    record = other.run("run-1")
    assert record is not None
    assert record.status == "running"
    assert record.created_at == started
    assert record.updated_at == started + timedelta(seconds=5)
    store.append([Append(hold, [task("b")])])
    assert other.run("run-1") == record


def test_a_status_may_come_without_entries(store: Store) -> None:
    hold = store.acquire_run("run-1")
    store.append([Append(hold, [], "success")])
    assert [run.status for run in store.runs()] == ["success"]
    assert hold.seq == 0


def test_runs_can_be_listed_by_status(store: Store) -> None:
    for number in range(6):
        hold = store.acquire_run(f"run-{number}")
        store.append([Append(hold, [], "failed" if number % 2 else "success")])
    assert [run.name for run in store.runs(status="failed")] == ["run-5", "run-3", "run-1"]
    assert [run.name for run in store.runs(status="failed", limit=1)] == ["run-5"]
    assert store.runs(status="no such status") == []


@for_each(
    "name", ["", "../x", "a/b", ".hidden", "a b", "a\0b", "-rf", "ü", "x" * 129, "a\n", None, 7]
)
def test_a_name_that_is_no_safe_file_name_is_refused(store: Store, name: str) -> None:
    with pytest.raises(InvalidIdentifierError) as caught:
        store.acquire_run(name)
    assert caught.value.value == name
    assert store.runs() == []


@for_each("name", ["a", "A-1_b.c:d", "x" * 128, "7"])
def test_a_safe_name_is_taken(store: Store, name: str) -> None:
    assert store.acquire_run(name).name == name


# --- purging -----------------------------------------------------------------------------------


def test_purging_a_run_that_is_not_there_says_so(store: Store) -> None:
    assert store.purge_runs(["run-1"]) == 0


def test_a_purged_run_is_forgotten_and_others_are_not(store: Store, other: Store) -> None:
    gone, kept = store.acquire_run("gone"), store.acquire_run("kept")
    add_tasks(store, gone, 3)
    add_tasks(store, kept, 2)
    store.release_run(gone)
    assert other.purge_runs(["gone"]) == 1
    for seen_by in (store, other):
        assert seen_by.run("gone") is None
        assert [run.name for run in seen_by.runs()] == ["kept"]
        assert numbers(seen_by.entries(kept.run)) == [1, 2]
        assert EntryKind.TASK_COMPLETED not in [e.kind for e in seen_by.entries(gone.run)]
        assert seen_by.entries(gone.run) == []


def test_a_run_of_a_purged_name_starts_anew(store: Store) -> None:
    old = store.acquire_run("run-1", "first")
    add_tasks(store, old, 3)
    store.append([Append(old, [], "failed")])
    store.release_run(old)
    store.purge_runs(["run-1"])
    new = store.acquire_run("run-1", "second")
    assert new.seq == 0
    assert new.run != old.run
    store.append([Append(new, [task("new")])])
    assert tasks(store.entries(new.run)) == ["new"]
    assert numbers(store.entries(new.run)) == [1]
    record = store.run("run-1")
    assert record is not None
    assert (record.workflow, record.status) == ("second", "pending")


def test_runs_are_purged_together_with_their_documents_or_not_at_all(
    store: Store, other: Store
) -> None:
    for name in ("parent", "child"):
        run = store.acquire_run(name)
        add_tasks(store, run, 1)
        store.release_run(run)
        store.update_document("space", name, lambda _: encode(1))
    documents = [("space", "parent"), ("space", "child"), ("space", "none")]
    held = other.acquire_run("child")
    with pytest.raises(RunLeasedError):
        store.purge_runs(["parent", "child"], None, documents)
    assert len(store.runs()) == len(store.documents("space")) == 2
    other.release_run(held)
    calls: list[int] = []
    count = store.purge_runs(
        ["parent", "child"], lambda: calls.append(len(other.runs())), documents
    )
    assert (count, calls) == (2, [2])
    assert other.runs() == []
    assert other.documents("space") == []
    assert other.leases() == []


def test_a_held_run_is_not_purged(store: Store, other: Store) -> None:
    hold = store.acquire_run("run-1")
    add_tasks(store, hold, 2)
    for purger in (other, store):
        with pytest.raises(RunLeasedError):
            purger.purge_runs(["run-1"])
    add_tasks(store, hold, 1)
    assert numbers(store.entries(hold.run)) == [1, 2, 3]


def test_who_was_purged_while_it_hung_cannot_write(
    store: Store, other: Store, clock: ManualClock
) -> None:
    hold = store.acquire_run("run-1")
    add_tasks(store, hold, 2)
    clock.advance(LEASE + 1)
    assert other.purge_runs(["run-1"])
    (refused,) = store.append([Append(hold, [task("late")], "success")])
    assert isinstance(refused, FencedError)
    assert other.run("run-1") is None
    again = store.acquire_run("run-1")
    assert (again.run != hold.run, again.seq) == (True, 0)
    add_tasks(store, again, 1)
