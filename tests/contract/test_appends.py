"""Appends with conditions: guards, releases, and the first entries of a run."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from maestro_hive.kernel.errors import (
    ConfigurationError,
    FencedError,
    RunLeasedError,
    StaleDocumentError,
)
from maestro_hive.maestro.state.codec import encode
from maestro_hive.maestro.state.records import DocumentChanged
from maestro_hive.maestro.state.store import Append, DocumentChange, DocumentGuard
from tests.contract.stores import add_tasks, numbers, task, tasks

if TYPE_CHECKING:
    from maestro_hive.maestro.state.codec import Encoded
    from maestro_hive.maestro.state.records import EntriesAppended, Notification
    from maestro_hive.maestro.state.store import Store

LARGE = "x" * 5000


def change(store: Store, value: object) -> int:
    document = store.update_document("breakers", "api", lambda _: encode(value))
    assert document is not None
    return document.version


# --- guards ---


@pytest.mark.parametrize("value", [None, "small", LARGE], ids=["none", "small", "large"])
def test_an_append_is_accepted_while_its_document_has_the_expected_version(
    store: Store, value: str | None
) -> None:
    run = store.acquire_run("run-1")
    absent = DocumentGuard("breakers", "api", 0)
    outcome = store.append([Append(run, [task("a", value)], guard=absent)])
    guard = DocumentGuard("breakers", "api", change(store, 1))
    outcome += store.append([Append(run, [task("b", value)], guard=guard)], sync=False)
    assert outcome == [[entry] for entry in store.entries(run.run)]
    assert tasks(store.entries(run.run)) == ["a", "b"]


@pytest.mark.parametrize("value", ["small", LARGE], ids=["small", "large"])
@pytest.mark.parametrize("expected", [0, 1, 3])
def test_an_append_is_refused_when_its_document_has_another_version(
    store: Store, other: Store, expected: int, value: str
) -> None:
    run = store.acquire_run("run-1")
    add_tasks(store, run, 1)
    change(other, 1)
    change(other, 2)
    guard = DocumentGuard("breakers", "api", expected)
    (refused,) = store.append([Append(run, [task("a", value)], guard=guard)])
    assert isinstance(refused, StaleDocumentError)
    assert (refused.namespace, refused.key) == ("breakers", "api")
    assert (refused.expected, refused.version) == (expected, 2)
    assert run.seq == 1
    assert numbers(store.entries(run.run)) == [1]


def test_a_deleted_document_has_version_0(store: Store) -> None:
    run = store.acquire_run("run-1")
    guard = DocumentGuard("breakers", "api", change(store, 1))
    store.delete_documents("breakers")
    (refused,) = store.append([Append(run, [task("a")], guard=guard)])
    assert isinstance(refused, StaleDocumentError)
    assert refused.version == 0


def test_a_stale_append_is_refused_alone(store: Store) -> None:
    one, two = store.acquire_run("run-1"), store.acquire_run("run-2")
    change(store, 1)
    stale, good = DocumentGuard("breakers", "api", 0), DocumentGuard("breakers", "api", 1)
    outcome = store.append(
        [
            Append(one, [task("a")], "running", guard=stale),
            Append(one, [task("b")], guard=good),
            Append(two, [task("c")]),
        ]
    )
    assert isinstance(outcome[0], StaleDocumentError)
    assert outcome[1:] == [store.entries(one.run), store.entries(two.run)]
    assert tasks(store.entries(one.run)) == ["b"]
    record = store.run("run-1")
    assert record is not None
    assert record.status == "pending"


def test_an_append_under_a_lost_lease_is_fenced_before_it_is_stale(
    store: Store, other: Store
) -> None:
    run = store.acquire_run("run-1")
    store.release_run(run)
    other.acquire_run("run-1")
    guard = DocumentGuard("breakers", "api", 7)
    (refused,) = store.append([Append(run, [task("a")], guard=guard)])
    assert isinstance(refused, FencedError)


# --- releases ---


@pytest.mark.parametrize("entries", [[], [task("a")], [task("a", LARGE), task("b")]])
def test_the_last_append_of_a_run_releases_its_lease(
    store: Store, other: Store, entries: list[object]
) -> None:
    run = store.acquire_run("run-1")
    with pytest.raises(RunLeasedError):
        other.acquire_run("run-1")
    store.append([Append(run, entries, "success", release=True)])  # type: ignore[arg-type]
    assert store.lease("run/run-1") is None
    assert store.run_leases() == {}
    taken = other.acquire_run("run-1")
    assert taken.seq == len(entries)
    assert taken.lease.fence > run.lease.fence
    (late,) = store.append([Append(run, [task("late")])])
    assert isinstance(late, FencedError)


def test_a_released_run_can_be_acquired_again_by_the_same_process(store: Store) -> None:
    run = store.acquire_run("run-1")
    store.append([Append(run, [task("a")], release=True)])
    again = store.acquire_run("run-1")
    assert again is not run
    assert again.lease.fence > run.lease.fence
    add_tasks(store, again, 1)
    assert numbers(store.entries(again.run)) == [1, 2]


def test_a_shared_lease_is_released_by_its_last_user(store: Store, other: Store) -> None:
    run = store.acquire_run("run-1")
    assert store.acquire_run("run-1") is run
    store.append([Append(run, [task("a")], release=True)])
    with pytest.raises(RunLeasedError):
        other.acquire_run("run-1")
    add_tasks(store, run, 1)
    store.append([Append(run, [], release=True)])
    assert other.acquire_run("run-1").seq == 2


def test_two_users_may_release_a_lease_in_one_batch(store: Store, other: Store) -> None:
    run = store.acquire_run("run-1")
    store.acquire_run("run-1")
    outcome = store.append(
        [
            Append(run, [task("a")], release=True),
            Append(run, [task("b")], release=True),
            Append(run, [task("late")]),
        ]
    )
    assert outcome[:2] == [[entry] for entry in store.entries(run.run)]
    assert isinstance(outcome[2], FencedError)
    assert other.acquire_run("run-1").seq == 2


def test_a_refused_append_releases_nothing(store: Store, other: Store) -> None:
    run = store.acquire_run("run-1")
    guard = DocumentGuard("breakers", "api", 1)
    (refused,) = store.append([Append(run, [task("a")], guard=guard, release=True)])
    assert isinstance(refused, StaleDocumentError)
    with pytest.raises(RunLeasedError):
        other.acquire_run("run-1")
    add_tasks(store, run, 1)


# --- the first entries ---


def test_a_new_run_is_acquired_with_its_first_entries_and_status(
    store: Store, other: Store
) -> None:
    run = store.acquire_run("run-1", "build", [task("a", "small"), task("b", LARGE)], "running")
    assert (run.seq, run.created) == (2, True)
    (record,) = other.runs()
    assert (record.workflow, record.status) == ("build", "running")
    entries = other.entries(record.id)
    assert tasks(entries) == ["a", "b"]
    assert [other.load(entry) for entry in entries] == [encode("small").data, encode(LARGE).data]
    add_tasks(store, run, 1)
    assert numbers(other.entries(record.id)) == [1, 2, 3]


def test_a_run_that_has_entries_is_acquired_as_it_is(store: Store, other: Store) -> None:
    run = store.acquire_run("run-1", "build", [task("a")], "running")
    store.append([Append(run, [task("b")], "waiting", release=True)])
    again = other.acquire_run("run-1", "other", [task("c")], "running")
    assert (again.seq, again.created) == (2, False)
    (record,) = store.runs()
    assert (record.workflow, record.status) == ("build", "waiting")
    assert tasks(store.entries(record.id)) == ["a", "b"]


def test_a_run_that_was_only_created_gets_its_first_entries_later(store: Store) -> None:
    store.release_run(store.acquire_run("run-1", "build"))
    run = store.acquire_run("run-1", "build", [task("a")], "running")
    assert (run.seq, run.created) == (1, True)
    (record,) = store.runs()
    assert record.status == "running"


def test_a_second_user_appends_the_first_entries_only_if_there_are_none(store: Store) -> None:
    run = store.acquire_run("run-1")
    assert store.acquire_run("run-1", entries=[task("a")], status="running") is run
    assert store.acquire_run("run-1", entries=[task("b")], status="waiting") is run
    assert (run.seq, run.users) == (1, 3)
    assert tasks(store.entries(run.run)) == ["a"]
    (record,) = store.runs()
    assert record.status == "running"


def test_a_run_held_elsewhere_gets_no_entries(store: Store, other: Store) -> None:
    run = store.acquire_run("run-1")
    with pytest.raises(RunLeasedError):
        other.acquire_run("run-1", entries=[task("a")], status="running")
    assert store.entries(run.run) == []


def test_the_first_entries_are_announced(store: Store) -> None:
    seen: list[Notification] = []
    store.notifications.add(seen.append)
    store.acquire_run("run-1", entries=[task("a"), task("b")])
    (event,) = seen
    appended: EntriesAppended = event  # type: ignore[assignment]
    assert (appended.run_id, appended.first, appended.seq) == ("run-1", 1, 2)


# --- listings ---


def test_runs_are_chosen_and_counted_by_status_and_workflow(store: Store) -> None:
    for number in range(6):
        status = "failed" if number % 2 else "success"
        store.acquire_run(f"run-{number}", f"flow-{number % 3}", status=status)
    chosen = store.runs(status="failed", workflow="flow-0")
    assert [run.name for run in chosen] == ["run-3"]
    assert [run.name for run in store.runs(workflow="flow-1", limit=1)] == ["run-4"]
    assert store.runs(limit=0) == []
    assert store.count_runs() == 6
    assert store.count_runs(status="failed") == 3
    assert store.count_runs(status="failed", workflow="flow-2") == 1
    assert store.status_counts()["failed"] == 3
    assert sum(store.status_counts().values()) == 6


def test_the_last_change_of_a_run_is_its_last_entry_or_status(store: Store) -> None:
    run = store.acquire_run("run-1")
    (record,) = store.runs()
    assert store.last_change(record) == record.created_at
    entry = task("a")._replace(at=4_000_000_000_000_000)
    store.append([Append(run, [entry])])
    assert store.last_change(record) == store.entries(run.run)[0].when


# --- documents that are changed with an append ---


def value_of(store: Store, key: str = "box") -> object:
    document = store.document("space", key)
    return None if document is None else json.loads(document.value)


def added(item: object) -> DocumentChange:
    def change(before: bytes | None) -> Encoded:
        return encode([*json.loads(before or b"[]"), item])

    return DocumentChange("space", "box", change)


def test_a_document_is_changed_with_the_entries_of_an_append(store: Store, other: Store) -> None:
    run = store.acquire_run("run-1")
    heard: list[Notification] = []
    store.notifications.add(heard.append)
    first, second = (Append(run, [task(name)], change=added(name)) for name in "ab")
    outcome = store.append([first, Append(run, [task("between")]), second])
    assert outcome == [[entry] for entry in other.entries(run.run)]
    assert value_of(other) == ["a", "b"]
    assert any(isinstance(each, DocumentChanged) for each in heard)
    gone = DocumentChange("space", "box", lambda _: None)
    store.append([Append(run, [task("c")], change=gone)], sync=False)
    assert value_of(other) is None
    store.append([Append(run, [task("d")], change=gone)])  # there is none any more
    assert tasks(other.entries(run.run)) == ["a", "between", "b", "c", "d"]


def test_an_append_that_is_refused_changes_no_document(store: Store, other: Store) -> None:
    run = store.acquire_run("run-1")
    guard = DocumentGuard("breakers", "api", 7)
    (refused,) = store.append([Append(run, [task("a")], guard=guard, change=added("a"))])
    assert isinstance(refused, StaleDocumentError)
    assert value_of(other) is None


def test_a_change_that_raises_refuses_its_append_alone(store: Store, other: Store) -> None:
    run = store.acquire_run("run-1")

    def refuse(_: bytes | None) -> Encoded:
        raise ConfigurationError("there is an answer already")

    change = DocumentChange("space", "box", refuse)
    good, bad = Append(run, [task("a")], change=added("a")), Append(run, [task("b")], change=change)
    first, refused, last = store.append([good, bad, Append(run, [task("c")])])
    assert isinstance(refused, ConfigurationError)
    assert isinstance(first, list)
    assert isinstance(last, list)
    assert tasks(other.entries(run.run)) == ["a", "c"]
    assert value_of(other) == ["a"]


def test_a_change_sees_what_others_recorded_before_it(store: Store, other: Store) -> None:
    run = store.acquire_run("run-1")
    seen: list[list[str]] = []

    def change(_: bytes | None) -> None:
        seen.append(tasks(other.entries(run.run)))

    store.append([Append(run, [task("a")])])
    other.update_document("space", "box", change)
    store.append([Append(run, [task("b")])])
    other.update_document("space", "box", change)
    assert seen == [["a"], ["a", "b"]]
