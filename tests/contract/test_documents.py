"""A value under a namespace and a key, changed by one at a time."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest

from maestro_hive.maestro.state.codec import Encoded, decode, encode

if TYPE_CHECKING:
    from collections.abc import Callable

    from maestro_hive.maestro.state.records import Document
    from maestro_hive.maestro.state.store import Store
    from maestro_hive.testing import ManualClock


class TroubleError(Exception):
    pass


def to(value: Any) -> Callable[[bytes | None], Encoded]:
    return lambda _before: encode(value)


def one_more(before: bytes | None) -> Encoded:
    return encode(1 if before is None else decode(before) + 1)


def names(documents: list[Document]) -> list[tuple[str, str]]:
    return [(document.namespace, document.key) for document in documents]


def test_a_document_that_nobody_wrote_is_none(store: Store) -> None:
    assert store.document("default", "key") is None
    assert store.documents() == []
    assert store.documents("default") == []


def test_a_document_is_what_was_written_for_everybody(
    store: Store, other: Store, clock: ManualClock
) -> None:
    value = encode({"text": "grün 🐝", "many": list(range(2000))})
    written = store.update_document("space", "key", lambda _: value)
    assert written is not None
    assert (written.namespace, written.key, written.version) == ("space", "key", 1)
    assert (written.value, written.sha256) == value
    assert written.updated_at == clock.now()
    assert other.document("space", "key") == written
    assert other.document("space", "other") is None
    assert other.document("other", "key") is None


def test_the_version_grows_with_each_change(store: Store, other: Store) -> None:
    versions = []
    for number in range(6):
        written = (store, other)[number % 2].update_document("space", "key", one_more)
        assert written is not None
        assert decode(written.value) == number + 1
        versions.append(written.version)
    assert versions == [1, 2, 3, 4, 5, 6]


def test_a_change_sees_the_latest_value(store: Store, other: Store) -> None:
    seen: list[bytes | None] = []

    def change(before: bytes | None) -> Encoded:
        seen.append(before)
        return encode(len(seen))

    for writer in (store, other, store):
        writer.update_document("space", "key", change)
    assert seen == [None, b"1", b"2"]


def test_threads_and_processes_lose_no_update(store: Store, other: Store) -> None:
    def work(writer: Store) -> list[int]:
        made = [writer.update_document("space", "key", one_more) for _ in range(15)]
        return [document.version for document in made if document]

    with ThreadPoolExecutor(4) as pool:
        versions = [version for part in pool.map(work, [store, other] * 2) for version in part]
    assert sorted(versions) == list(range(1, 61))
    found = store.document("space", "key")
    assert found is not None
    assert decode(found.value) == found.version == 60


def test_what_is_returned_is_what_this_change_made(store: Store, other: Store) -> None:
    store.notifications.add(lambda _: other.update_document("space", "key", to("somebody else's")))
    written = store.update_document("space", "key", to("mine"))
    assert written is not None
    assert (decode(written.value), written.version) == ("mine", 1)
    found = store.document("space", "key")
    assert found is not None
    assert (decode(found.value), found.version) == ("somebody else's", 2)


@pytest.mark.timeout(60)
def test_a_reader_sees_the_old_value_while_a_change_is_made(store: Store, other: Store) -> None:
    store.update_document("space", "key", to("old"))
    seen: list[Document | None] = []

    def change(_before: bytes | None) -> Encoded:
        reader = threading.Thread(target=lambda: seen.append(other.document("space", "key")))
        reader.start()
        reader.join()
        return encode("new")

    store.update_document("space", "key", change)
    (found,) = seen
    assert found is not None
    assert decode(found.value) == "old"


def test_a_change_that_raises_leaves_everything_as_it_was(store: Store, other: Store) -> None:
    store.update_document("space", "key", to("old"))
    before = store.documents()

    def trouble(_before: bytes | None) -> Encoded:
        raise TroubleError

    for key in ("key", "new key"):
        with pytest.raises(TroubleError):
            store.update_document("space", key, trouble)
    assert store.documents() == other.documents() == before
    written = other.update_document("space", "key", to("new"))
    assert written is not None
    assert written.version == 2


def test_a_change_to_none_deletes(store: Store, other: Store) -> None:
    store.update_document("space", "key", to("old"))
    assert store.update_document("space", "key", lambda _: None) is None
    assert other.document("space", "key") is None
    assert other.documents() == []
    assert store.update_document("space", "never there", lambda _: None) is None


def test_a_document_may_hold_null(store: Store) -> None:
    store.update_document("space", "key", to(None))
    found = store.document("space", "key")
    assert found is not None
    assert found.value == b"null"


def test_documents_come_by_namespace_and_key(store: Store, other: Store) -> None:
    for namespace, key in [("b", "2"), ("a", "z"), ("b", "1"), ("a", "y"), ("c", "ü/../ \n")]:
        store.update_document(namespace, key, to(key))
    assert names(other.documents()) == [
        ("a", "y"),
        ("a", "z"),
        ("b", "1"),
        ("b", "2"),
        ("c", "ü/../ \n"),
    ]
    assert names(other.documents("b")) == [("b", "1"), ("b", "2")]
    assert [decode(found.value) for found in other.documents("c")] == ["ü/../ \n"]
    assert other.documents("d") == []


def test_many_documents_are_set_at_once(store: Store, other: Store) -> None:
    store.update_document("a", "old", to("old"))
    store.update_document("a", "gone", to("gone"))
    new = {("a", "old"): encode("new"), ("b", "1"): encode(1), ("a", "gone"): None}
    store.set_documents(new)
    assert names(other.documents()) == [("a", "old"), ("b", "1")]
    changed = other.document("a", "old")
    assert changed is not None
    assert (changed.value, changed.version) == (b'"new"', 2)


def test_documents_of_one_namespace_can_be_deleted(store: Store, other: Store) -> None:
    for namespace in ("a", "b"):
        for key in ("1", "2"):
            store.update_document(namespace, key, to(key))
    assert store.delete_documents("a") == 2
    assert store.delete_documents("a") == 0
    assert names(other.documents()) == [("b", "1"), ("b", "2")]


def test_all_documents_can_be_deleted(store: Store, other: Store) -> None:
    for namespace in ("a", "b"):
        store.update_document(namespace, "key", to(1))
    hold = store.acquire_run("run-1")
    assert store.delete_documents() == 2
    assert other.documents() == []
    assert other.run("run-1") is not None
    assert store.acquire_run("run-1") is hold
