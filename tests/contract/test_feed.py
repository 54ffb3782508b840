"""The feed: all entries in the order of commit, so that another process can follow."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from maestro_hive.maestro.state.records import EntryKind
from maestro_hive.maestro.state.store import Append
from tests.contract.stores import add_tasks, task, tasks

if TYPE_CHECKING:
    from maestro_hive.maestro.state.records import Entry
    from maestro_hive.maestro.state.store import Store


def ids(entries: list[Entry]) -> list[int]:
    return [entry.id for entry in entries]


def test_the_feed_has_the_entries_of_all_runs_in_order(store: Store, other: Store) -> None:
    one, two = store.hold_run("run-1"), other.hold_run("run-2")
    for name in "ace":
        store.append([Append(one, [task(name)])])
        other.append([Append(two, [task(chr(ord(name) + 1))])])
    found = store.feed()
    assert tasks(found) == list("abcdef")
    assert [entry.run for entry in found] == [one.run, two.run] * 3
    assert ids(found) == sorted(set(ids(found)))
    assert other.feed() == found
    assert [entry for entry in found if entry.run == one.run] == store.entries(one.run)


def test_a_reader_goes_on_from_any_id(store: Store, other: Store) -> None:
    hold = store.hold_run("run-1")
    add_tasks(store, hold, 5)
    everything = other.feed()
    for number, entry in enumerate(everything):
        assert other.feed(entry.id) == everything[number + 1 :]
    add_tasks(store, hold, 1)
    assert tasks(other.feed(everything[-1].id)) == ["6"]


def test_the_feed_comes_in_portions(store: Store) -> None:
    add_tasks(store, store.hold_run("run-1"), 5)
    read: list[Entry] = []
    while portion := store.feed(read[-1].id if read else 0, 2):
        assert len(portion) <= 2
        read += portion
    assert tasks(read) == ["1", "2", "3", "4", "5"]


def test_a_follower_misses_nothing_while_others_write(store: Store, other: Store) -> None:
    holds = [(store, store.hold_run("run-1")), (other, other.hold_run("run-2"))]
    read: list[Entry] = []

    with ThreadPoolExecutor(2) as pool:
        writing = [pool.submit(add_tasks, *hold, 40, sync=False) for hold in holds]
        while not all(done.done() for done in writing):
            read += store.feed(read[-1].id if read else 0)
        for done in writing:
            done.result()
    read += store.feed(read[-1].id if read else 0)
    assert read == store.feed()
    assert len(read) == 80


def test_a_follower_learns_of_a_purge(store: Store, other: Store) -> None:
    hold = store.hold_run("run-1")
    add_tasks(store, hold, 3)
    store.release_run(hold)
    last = other.feed()[-1].id
    store.purge_run("run-1")
    (told,) = other.feed(last)
    assert (told.kind, told.run) == (EntryKind.PURGED, hold.run)
    assert store.load(told) is None


def test_ids_grow_on_after_a_purge_of_the_last_entries(store: Store, other: Store) -> None:
    kept, gone = store.hold_run("kept"), store.hold_run("gone")
    add_tasks(store, kept, 1)
    add_tasks(store, gone, 4)
    store.release_run(gone)
    last = other.feed()[-1].id
    other.purge_run("gone")
    add_tasks(store, kept, 1)
    following = other.feed(last)
    assert [entry.kind for entry in following] == [EntryKind.PURGED, EntryKind.TASK_COMPLETED]
    assert tasks(following[1:]) == ["2"]
    assert ids(other.feed()) == sorted(set(ids(other.feed())))


def test_ids_grow_on_after_everything_was_purged(store: Store) -> None:
    last = 0
    for _ in range(3):
        hold = store.hold_run("run-1")
        add_tasks(store, hold, 2)
        assert min(ids(store.feed(last))) > last
        last = max(ids(store.feed(last)))
        store.release_run(hold)
        store.purge_run("run-1")
        (purged,) = store.feed(last)
        last = purged.id
