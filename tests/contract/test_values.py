"""Values come back exactly, whatever their size, and whatever they grew from."""

from __future__ import annotations

import functools
import json
import random
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from maestro_hive.maestro.state import deltas
from maestro_hive.maestro.state.codec import decode, encode
from maestro_hive.maestro.state.store import Append
from tests.contract.stores import Made, add_tasks, task

if TYPE_CHECKING:
    from maestro_hive.maestro.state.records import StoredValue
    from maestro_hive.maestro.state.store import RunLease, Store

VALUES = [
    None,
    0,
    "",
    "grün 🐝" * 1000,
    {"when": datetime(2030, 1, 1, tzinfo=UTC), "where": Path("a/b"), "raw": bytes(range(256)) * 50},
    {("a", 1): {1, 2, 3}},
    ["x" * 1022],  # on this side of the limit of a row, and on that one
    ["x" * 1020],
    ["x" * 1021],
    [{"deep": [[[[{"$": "not a tag"}]]]]}] * 200,
    "x" * 3_000_000,
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: repr(value)[:20])
def test_a_value_comes_back_as_it_was(store: Store, other: Store, value: Any) -> None:
    hold = store.acquire_run("run-1")
    encoded = encode(value)
    store.append([Append(hold, [task("a")._replace(value=encoded)])])
    (entry,) = other.entries(hold.run)
    assert entry.sha256 == encoded.sha256
    assert other.load(entry) == encoded.data
    assert decode(encoded.data) == value


def test_an_entry_without_a_value_has_none(store: Store) -> None:
    hold = store.acquire_run("run-1")
    add_tasks(store, hold, 1)
    (entry,) = store.entries(hold.run)
    assert entry.value is None
    assert entry.sha256 is None
    assert store.load(entry) is None


@functools.cache
def text_of(number: int) -> str:
    return "".join(random.Random(number).choices('abcdefgh ü🐝\n"\\', k=500))


def message(number: int) -> dict[str, Any]:
    return {"role": "user", "number": number, "text": text_of(number)}


def grow(store: Store, hold: RunLease, values: list[Any], family: str = "messages") -> None:
    for number, value in enumerate(values):
        store.append([Append(hold, [task(number, value, family)])], sync=False)


GROWTHS: dict[str, list[Any]] = {
    "a list of messages": [[message(n) for n in range(count)] for count in range(1, 40)],
    "a list with a counter on both sides": [
        {"a": count, "messages": [message(n) for n in range(count)], "z": -count}
        for count in range(1, 40)
    ],
    "a window that slides": [[message(n) for n in range(at, at + 12)] for at in range(30)],
    "one that shrinks again": [[message(n) for n in range(abs(20 - at))] for at in range(40)],
    "values that have nothing in common": [[message(at * 10)] * 3 for at in range(20)],
    "the same again and again": [[message(n) for n in range(10)]] * 10,
    "two in turn": [[message(at % 2 * 7 + n) for n in range(10)] for at in range(10)],
    "multibyte characters": [["é🐝" * count, "ü" * (40 - count)] * 20 for count in range(1, 40)],
}


@pytest.mark.parametrize("values", GROWTHS.values(), ids=GROWTHS)
def test_values_that_grew_come_back_exact(store: Store, other: Store, values: list[Any]) -> None:
    hold = store.acquire_run("run-1")
    grow(store, hold, values)
    entries = other.entries(hold.run)
    assert len(entries) == len(values)
    for entry, value in zip(entries, values, strict=True):
        assert other.load(entry) == encode(value).data


def test_values_go_on_growing_in_another_process(store: Store, other: Store) -> None:
    values = GROWTHS["a list of messages"]
    for at in range(0, len(values), 5):
        writer = (store, other)[at // 5 % 2]
        hold = writer.acquire_run("run-1")
        grow(writer, hold, values[at : at + 5])
        writer.release_run(hold)
    entries = store.entries(store.acquire_run("run-1").run)
    assert [store.load(entry) for entry in entries] == [encode(value).data for value in values]


def test_a_batch_that_failed_is_nothing_to_grow_from(store: Store) -> None:
    hold = store.acquire_run("run-1")
    values = GROWTHS["a list of messages"]
    grow(store, hold, values[:10])
    made = Made(range(3), lambda n: task(n, values[10 + n // (2 - n)], "messages"))
    with pytest.raises(ZeroDivisionError):
        store.append([Append(hold, made)])
    grow(store, hold, values[10:20])
    found = [store.load(entry) for entry in store.entries(hold.run)]
    assert found == [encode(value).data for value in values[:20]]
    assert store.check() == []


def test_several_values_of_a_family_may_come_in_one_batch(store: Store) -> None:
    hold = store.acquire_run("run-1")
    values = GROWTHS["a list of messages"]
    store.append(
        [
            Append(hold, [task(n, value, "messages") for n, value in enumerate(part)])
            for part in (values[:15], values[15:])
        ]
    )
    found = [store.load(entry) for entry in store.entries(hold.run)]
    assert found == [encode(value).data for value in values]


def test_runs_with_the_same_values_do_not_disturb_each_other(store: Store) -> None:
    values = GROWTHS["a list of messages"]
    holds = [store.acquire_run(f"run-{number}") for number in range(3)]
    for value in values:
        store.append([Append(hold, [task("a", value, "messages")]) for hold in holds])
    for hold in holds:
        found = [store.load(entry) for entry in store.entries(hold.run)]
        assert found == [encode(value).data for value in values]


# --- as they are stored ------------------------------------------------------------------------


def rebuild(stored: list[StoredValue]) -> dict[bytes, bytes]:
    """Put values together as a reader of the portable copies does, in the order they came."""
    whole: dict[bytes, bytes] = {}
    for value in stored:
        if value.base is None:
            whole[value.sha256] = value.data
            continue
        instructions = deltas.from_json(json.loads(value.data))
        pieces = deltas.Pieces(deltas.size(instructions))
        pieces.apply(instructions)
        whole[value.sha256] = pieces.finish(whole[value.base])
    return whole


def test_large_values_can_be_had_as_they_are_stored(store: Store) -> None:
    mine, theirs = store.acquire_run("run-1"), store.acquire_run("run-2")
    values = GROWTHS["a list of messages"]
    for value in values:  # mine after theirs: what I refer to may build on what they refer to
        store.append([Append(theirs, [task("a", value, "m")]), Append(mine, [task("a", value)])])
    grow(store, theirs, GROWTHS["a window that slides"])
    stored = list(store.values_of(mine.run))
    whole = rebuild(stored)
    for entry in store.entries(mine.run):
        assert entry.sha256 is not None
        assert (entry.value or whole[entry.sha256]) == store.load(entry)
    assert len(stored) == len({value.sha256 for value in stored})
    assert sum(len(value.data) for value in stored) < 3 * len(encode(values[-1]).data)


def test_a_run_without_large_values_has_none_as_stored(store: Store) -> None:
    hold = store.acquire_run("run-1")
    grow(store, hold, ["small", "values", "only"])
    assert list(store.values_of(hold.run)) == []
    assert list(store.values_of(hold.run + 1)) == []


# --- keeping house -----------------------------------------------------------------------------


def test_collecting_deletes_only_what_nothing_refers_to(store: Store, other: Store) -> None:
    shared = GROWTHS["a list of messages"]
    gone, kept = store.acquire_run("gone"), store.acquire_run("kept")
    for at, value in enumerate(shared):
        store.append([Append(gone, [task("a", value, "m")])])
        if at % 5 == 0:
            store.append([Append(kept, [task("a", value, "k")])])
    grow(store, gone, GROWTHS["a window that slides"])
    assert store.collect() == 0
    store.release_run(gone)
    other.purge_runs(["gone"])
    other.collect()
    assert store.collect() == 0
    expected = [encode(value).data for value in shared[::5]]
    assert [store.load(entry) for entry in store.entries(kept.run)] == expected
    grow(store, kept, shared[-3:], "k")
    found = [other.load(entry) for entry in other.entries(kept.run)]
    assert found == expected + [encode(value).data for value in shared[-3:]]
    assert store.check() == other.check() == []


def test_nothing_is_wrong_with_a_store_in_use(store: Store, other: Store) -> None:
    assert store.check() == []
    hold = store.acquire_run("run-1")
    grow(store, hold, GROWTHS["a list with a counter on both sides"])
    store.update_document("space", "key", lambda _: encode({"a": 1}))
    store.release_run(store.acquire_run("gone"))
    store.purge_runs(["gone"])
    assert store.damage == ()
    assert store.check() == other.check() == []
