"""News, closing, and forked children."""

from __future__ import annotations

import os
import signal
import threading
import traceback
import warnings
from typing import TYPE_CHECKING, Any

import pytest

from maestro_hive.kernel.errors import RunLeasedError, StoreClosedError
from maestro_hive.maestro.state.codec import encode
from maestro_hive.maestro.state.records import DocumentChanged, EntriesAppended
from maestro_hive.maestro.state.store import Append
from tests.contract.stores import LEASE, add_tasks, numbers, task

if TYPE_CHECKING:
    from collections.abc import Callable

    from maestro_hive.maestro.state.records import Notification
    from maestro_hive.maestro.state.store import RunLease, Store
    from maestro_hive.testing import ManualClock
    from tests.contract.stores import Stores


# --- news --------------------------------------------------------------------------------------


def test_listeners_hear_of_entries(store: Store, other: Store) -> None:
    heard: list[Notification] = []
    store.notifications.add(heard.append)
    one, two = store.acquire_run("run-1"), store.acquire_run("run-2")
    store.append([Append(one, [task("a"), task("b")]), Append(two, [task("c")])])
    add_tasks(store, one, 1)
    add_tasks(other, other.acquire_run("run-3"), 1)
    assert heard == [
        EntriesAppended(run_id="run-1", first=1, seq=2),
        EntriesAppended(run_id="run-2", first=1, seq=1),
        EntriesAppended(run_id="run-1", first=3, seq=3),
    ]


def test_listeners_do_not_hear_of_what_was_refused(
    store: Store, other: Store, clock: ManualClock
) -> None:
    lost, kept = store.acquire_run("lost"), store.acquire_run("kept")
    clock.advance(LEASE + 1)
    other.acquire_run("lost")
    heard: list[Notification] = []
    store.notifications.add(heard.append)
    store.append([Append(lost, [task("a")]), Append(kept, [task("b")])])
    assert heard == [EntriesAppended(run_id="kept", first=1, seq=1)]


def test_what_listeners_hear_of_can_be_read(store: Store, other: Store) -> None:
    hold = store.acquire_run("run-1")
    seen: list[list[int]] = []
    store.notifications.add(lambda _: seen.append(numbers(other.entries(hold.run))))
    add_tasks(store, hold, 2)
    assert seen == [[1], [1, 2]]


def test_listeners_hear_of_documents(store: Store) -> None:
    heard: list[Notification] = []
    store.notifications.add(heard.append)
    store.update_document("space", "key", lambda _: encode(1))
    store.update_document("space", "key", lambda _: encode(2))
    store.update_document("space", "key", lambda _: None)
    store.update_document("space", "a", lambda _: encode("a"))
    store.update_document("space", "b", lambda _: encode("b"))
    store.delete_documents("space")
    assert heard == [
        DocumentChanged(namespace="space", key=key, before=before, after=after)
        for key, before, after in [
            ("key", None, b"1"),
            ("key", b"1", b"2"),
            ("key", b"2", None),
            ("a", None, b'"a"'),
            ("b", None, b'"b"'),
            ("a", b'"a"', None),
            ("b", b'"b"', None),
        ]
    ]


def test_a_listener_that_raises_does_not_undo_what_was_written(store: Store) -> None:
    def complain(_event: Notification) -> None:
        raise ValueError("a listener's own trouble")

    store.notifications.add(complain)
    hold = store.acquire_run("run-1")
    add_tasks(store, hold, 2)
    assert store.update_document("space", "key", lambda _: encode(1)) is not None
    assert numbers(store.entries(hold.run)) == [1, 2]


# --- closing -----------------------------------------------------------------------------------

CALLS: dict[str, Callable[[Store, RunLease], Any]] = {
    "acquire_run": lambda store, _: store.acquire_run("run-1"),
    "acquire_run of another": lambda store, _: store.acquire_run("run-2"),
    "run": lambda store, _: store.run("run-1"),
    "runs": lambda store, _: store.runs(),
    "append": lambda store, hold: store.append([Append(hold, [task("a")])]),
    "entries": lambda store, hold: store.entries(hold.run),
    "values_of": lambda store, hold: list(store.values_of(hold.run)),
    "purge_runs": lambda store, _: store.purge_runs(["run-1"]),
    "document": lambda store, _: store.document("space", "key"),
    "documents": lambda store, _: store.documents(),
    "update_document": lambda store, _: store.update_document("s", "k", lambda _: encode(1)),
    "set_documents": lambda store, _: store.set_documents({("s", "k"): encode(1)}),
    "delete_documents": lambda store, _: store.delete_documents(),
    "take_lease": lambda store, _: store.take_lease("probe"),
    "renew_leases": lambda store, _: store.renew_leases(),
    "lease": lambda store, _: store.lease("run/run-1"),
    "collect": lambda store, _: store.collect(),
    "check": lambda store, _: store.check(),
}


def refusals(store: Store, hold: RunLease) -> dict[str, str]:
    """Make every call; return what came instead of StoreClosedError."""
    wrong = {}
    for name, call in CALLS.items():
        try:
            wrong[name] = f"returned {call(store, hold)!r}"
        except StoreClosedError:
            pass
        except BaseException:  # noqa: BLE001 - whatever it is, it is not what was promised
            wrong[name] = traceback.format_exc()
    return wrong


def test_a_closed_store_says_so(store: Store, other: Store) -> None:
    hold = store.acquire_run("run-1")
    add_tasks(store, hold, 1)
    store.close()
    assert refusals(store, hold) == {}
    assert numbers(other.entries(hold.run)) == [1]


def test_closing_twice_is_no_error(store: Store, other: Store) -> None:
    store.acquire_run("run-1")
    store.close()
    taken = other.acquire_run("run-1")
    store.close()
    add_tasks(other, taken, 1)


def test_what_was_written_is_there_for_the_next_one(stores: Stores, store: Store) -> None:
    hold = store.acquire_run("run-1")
    add_tasks(store, hold, 3)
    store.update_document("space", "key", lambda _: encode(1))
    store.close()
    again = stores.open()
    assert again.acquire_run("run-1").seq == 3
    assert again.document("space", "key") is not None
    assert again.location == store.location


# --- forked children ---------------------------------------------------------------------------


def in_forked_child(work: Callable[[], object]) -> str:
    """Run ``work`` in a forked child and return what it returned, as text."""
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forking with threads: on purpose
        child = os.fork()
    if child == 0:
        signal.alarm(60)  # a child that hangs is ended, and the parent sees it
        try:
            answer = str(work())
        except BaseException:  # noqa: BLE001 - the parent looks at it
            answer = traceback.format_exc()
        os.write(writing, answer.encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        answer = pipe.read()
    assert os.waitpid(child, 0) == (child, 0)
    return answer


def test_a_forked_child_is_told_to_open_its_own(store: Store, other: Store) -> None:
    hold = store.acquire_run("run-1")
    assert in_forked_child(lambda: refusals(store, hold)) == "{}"
    add_tasks(store, hold, 1)
    with pytest.raises(RunLeasedError):
        other.acquire_run("run-1")


def test_a_forked_child_that_closes_takes_nothing_from_its_parent(
    store: Store, other: Store
) -> None:
    hold = store.acquire_run("run-1")
    assert in_forked_child(store.close) == "None"
    with pytest.raises(RunLeasedError):
        other.acquire_run("run-1")
    add_tasks(store, hold, 1)
    assert numbers(other.entries(hold.run)) == [1]


@pytest.mark.timeout(100)
def test_a_child_forked_in_the_middle_of_a_write_does_not_hang(store: Store) -> None:
    hold = store.acquire_run("run-1")
    inside, forked = threading.Event(), threading.Event()

    def slowly(_before: bytes | None) -> Any:
        inside.set()
        forked.wait(100)
        return encode(1)

    writer = threading.Thread(target=lambda: store.update_document("space", "key", slowly))
    writer.start()
    assert inside.wait(30)
    try:
        answer = in_forked_child(lambda: refusals(store, hold))
        closed = in_forked_child(store.close)
    finally:
        forked.set()
        writer.join()
    assert (answer, closed) == ("{}", "None")
    add_tasks(store, hold, 1)
