"""Values are stored once, and what grew as what was added."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest

from maestro_hive.kernel.errors import CorruptionError, StorageError
from maestro_hive.maestro.state.codec import encode
from maestro_hive.maestro.state.records import EntryKind, NewEntry
from maestro_hive.maestro.state.sqlite.entries import INLINE_BYTES
from maestro_hive.maestro.state.sqlite.store import SqliteStore
from maestro_hive.maestro.state.store import Append
from tests.contract.stores import Made

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from maestro_hive.maestro.state.records import Entry
    from maestro_hive.maestro.state.store import RunLease


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SqliteStore]:
    opened = SqliteStore(tmp_path / "state")
    yield opened
    opened.close()


def message(number: int) -> dict[str, Any]:
    text = "".join(random.Random(number).choices('abcdefgh "ü🐝\n', k=1000))
    return {"role": "user", "number": number, "text": text}


MESSAGES = [message(number) for number in range(300)]


def keep(store: SqliteStore, hold: RunLease, *values: Any, family: str = "messages") -> None:
    for value in values:
        entry = NewEntry(EntryKind.STEP_COMPLETED, value=encode(value), family=family)
        (written,) = store.append([Append(hold, [entry])], sync=False)
        assert written == store.entries(hold.run, after=hold.seq - 1)


def stored(store: SqliteStore) -> list[tuple[Any, ...]]:
    return store._file.rows("SELECT id, base, length(data), size FROM payloads ORDER BY id")


def stored_bytes(store: SqliteStore) -> int:
    return sum(row[2] for row in stored(store))


def test_a_small_value_stays_in_its_row(store: SqliteStore) -> None:
    hold = store.acquire_run("run-1")
    keep(store, hold, "x" * (INLINE_BYTES - 2))
    assert stored(store) == []
    keep(store, hold, "x" * (INLINE_BYTES - 1))
    assert len(stored(store)) == 1


def test_the_same_value_is_stored_once_whatever_refers_to_it(store: SqliteStore) -> None:
    value = MESSAGES[:20]
    for name in ("run-1", "run-2"):
        hold = store.acquire_run(name)
        keep(store, hold, value, value, family="a")
        keep(store, hold, value, family="b")
    assert len(stored(store)) == 1
    assert stored_bytes(store) == len(encode(value).data)


def test_a_growing_value_is_stored_at_most_three_times(store: SqliteStore) -> None:
    hold = store.acquire_run("run-1")
    for count in range(1, 301):
        keep(store, hold, MESSAGES[:count])
    whole = len(encode(MESSAGES).data)
    assert stored_bytes(store) <= 3 * whole
    # With whole copies now and then, so that no chain becomes endless.
    wholes = [row for row in stored(store) if row[1] is None]
    assert 2 <= len(wholes) <= 40


def test_a_growing_value_with_a_counter_on_both_sides_is_stored_at_most_three_times(
    store: SqliteStore,
) -> None:
    hold = store.acquire_run("run-1")
    for count in range(1, 301):
        keep(store, hold, {"a": count, "messages": MESSAGES[:count], "z": [count, count]})
    assert stored_bytes(store) <= 3 * len(encode(MESSAGES).data)


def test_any_value_of_a_chain_can_be_read(store: SqliteStore) -> None:
    hold = store.acquire_run("run-1")
    values = [MESSAGES[:count] for count in range(1, 120)]
    keep(store, hold, *values)
    entries = store.entries(hold.run)
    for at in (0, 1, 59, 60, 117, 118):
        assert store.load(entries[at]) == encode(values[at]).data


def test_after_a_restart_values_grow_from_the_last_one(tmp_path: Path) -> None:
    values = [MESSAGES[:count] for count in range(1, 40)]
    for value in values:
        store = SqliteStore(tmp_path / "state")
        keep(store, store.acquire_run("run-1"), value)
        store.close()
    store = SqliteStore(tmp_path / "state")
    assert stored_bytes(store) <= 3 * len(encode(values[-1]).data)
    hold = store.acquire_run("run-1")
    found = [store.load(entry) for entry in store.entries(hold.run)]
    assert found == [encode(value).data for value in values]
    store.close()


def test_after_a_failed_batch_values_grow_from_the_one_before(store: SqliteStore) -> None:
    hold = store.acquire_run("run-1")
    keep(store, hold, MESSAGES[:50])
    before = stored(store)

    def trouble(number: int) -> NewEntry:
        value = encode(MESSAGES[: 60 // number])
        return NewEntry(EntryKind.STEP_COMPLETED, value=value, family="messages")

    with pytest.raises(ZeroDivisionError):
        store.append([Append(hold, Made([1, 0], trouble))])
    assert stored(store) == before
    keep(store, hold, MESSAGES[:61])
    assert stored(store)[1][1] == before[0][0]
    assert store.check() == []


def test_values_that_have_nothing_in_common_are_stored_whole(store: SqliteStore) -> None:
    hold = store.acquire_run("run-1")
    keep(store, hold, *(MESSAGES[at : at + 5] for at in range(0, 50, 5)))
    assert [row[1] for row in stored(store)] == [None] * 10


def test_collecting_keeps_what_a_difference_builds_on(store: SqliteStore) -> None:
    hold = store.acquire_run("run-1")
    values = [MESSAGES[:count] for count in range(50, 60)]
    keep(store, hold, *values)
    keep(store, hold, "y" * 5000, family="another")
    sql = "UPDATE entries SET payload = NULL, sha256 = NULL WHERE id & 0xFFFFFFFF <> 6"
    store._file.write(lambda db: db.execute(sql))  # as retention of entries will do one day
    assert store.collect() == 5  # the four after the sixth, and the other one
    (kept,) = [entry for entry in store.entries(hold.run) if entry.payload]
    assert store.load(kept) == encode(values[5]).data
    assert len(stored(store)) == 6
    keep(store, hold, MESSAGES[:61])  # and nothing is built on what was deleted
    assert store.load(store.entries(hold.run)[-1]) == encode(MESSAGES[:61]).data
    assert store.check() == []


# --- damage -------------------------------------------------------------------------------------


def damaged(store: SqliteStore, sql: str, *bindings: Any) -> Entry:
    """Keep three values that grew, change a stored one, and return the last entry."""
    hold = store.acquire_run("run-1")
    keep(store, hold, MESSAGES[:50], MESSAGES[:51], MESSAGES[:52])
    store._file.write(lambda db: db.execute(sql, bindings))
    return store.entries(hold.run)[-1]


DAMAGES: dict[str, tuple[Any, ...]] = {
    "its base is gone": ("DELETE FROM payloads WHERE id = 1",),
    "it is gone": ("DELETE FROM payloads WHERE id = 3",),
    "it builds on itself": ("UPDATE payloads SET base = 3, data = ? WHERE id = 3", b"[[0, 10]]"),
    "it builds on itself wholly": (
        "UPDATE payloads SET base = 3, data = CAST('[[0,' || size || ']]' AS BLOB) WHERE id = 3",
    ),
    "it goes round in a circle": (
        "UPDATE payloads SET base = 5 - id, size = 9, data = x'5b5b302c395d5d' WHERE id IN (2, 3)",
    ),
    "it is no JSON": ("UPDATE payloads SET data = ? WHERE id = 2", b"[[0,"),
    "it is no UTF-8": ("UPDATE payloads SET data = ? WHERE id = 2", b"\xff\xff\xff"),
    "it is no difference": ("UPDATE payloads SET data = ? WHERE id = 2", b'{"a":1}'),
    "it is nested endlessly": ("UPDATE payloads SET data = ? WHERE id = 2", b"[" * 100_000),
    "it reaches too far": ("UPDATE payloads SET data = ? WHERE id = 2", b"[[0, 99999999]]"),
    "it is empty": ("UPDATE payloads SET data = ? WHERE id = 2", b"[]"),
    "its size is wrong": ("UPDATE payloads SET size = 7 WHERE id = 3",),
    "its size is endless": ("UPDATE payloads SET size = 1 << 60 WHERE id = 3",),
    "its size is negative": ("UPDATE payloads SET size = -1 WHERE id = 3",),
    "the whole one was changed": (
        "UPDATE payloads SET data = zeroblob(length(data)) WHERE id = 1",
    ),
    "its digest is another": ("UPDATE entries SET sha256 = zeroblob(32)",),
}


@pytest.mark.timeout(20)
@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_value_is_found_and_never_given_out(
    store: SqliteStore, damage: tuple[Any, ...]
) -> None:
    entry = damaged(store, *damage)
    with pytest.raises(CorruptionError):
        store.load(entry)
    assert store.check() != []


@pytest.mark.parametrize("family", ["messages", ""])
def test_values_that_are_purged_while_they_are_read_are_an_error_of_ours(
    store: SqliteStore, family: str
) -> None:
    hold = store.acquire_run("run-1")
    keep(store, hold, MESSAGES[:20], MESSAGES[50:80], MESSAGES[:40], family=family)
    values = store.values_of(hold.run)
    next(values)
    store.release_run(hold)
    store.purge_runs(["run-1"])
    with pytest.raises(StorageError, match="purged while it was read"):
        list(values)
