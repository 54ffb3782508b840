"""A run as one document: what is exported can be imported, and says by itself what it is."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

import pytest

from maestro_hive.journal import entries, transfer
from maestro_hive.journal.database import FORMAT
from maestro_hive.journal.effects import Usage
from maestro_hive.journal.entries import FieldsSet, Restored, Spent
from maestro_hive.journal.maintenance import purge
from maestro_hive.journal.run_document import CopyTooLargeError, take_copy
from maestro_hive.journal.transfer import export_run, read_run
from maestro_hive.kernel.errors import (
    ConfigurationError,
    DocumentCorruptError,
    FormatError,
    InvalidIdentifierError,
    RunLeasedError,
    RunMismatchError,
    UnknownRunError,
)
from tests.journal import recorded as runs
from tests.journal.conftest import opened

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from maestro_hive.journal.store import Store


#: From each kind of journal to another one.
_WAYS = [("memory", "file"), ("file", "postgres"), ("postgres", "memory")]


@pytest.fixture(params=_WAYS, ids="-".join)
def way(request: pytest.FixtureRequest) -> tuple[str, str]:
    found: tuple[str, str] = request.param
    return found


@pytest.fixture
def store(way: tuple[str, str], tmp_path: Path) -> Iterator[Store]:
    with opened(way[0], tmp_path / "from") as made:
        yield made


@pytest.fixture
def other(way: tuple[str, str], tmp_path: Path) -> Iterator[Store]:
    with opened(way[1], tmp_path / "to") as made:
        yield made


def moved(store: Store, other: Store, name: str = "r", run_id: str | None = None) -> str:
    copy = read_run(export_run(store, name), "a file")
    return transfer.import_run(other, copy, "a file", run_id)


def test_an_export_is_json_with_what_people_read_first(store: Store) -> None:
    run = runs.start(store, "r")
    runs.complete(store, run, 1)
    runs.write(store, run, FieldsSet(fields={"phase": runs.raw("building")}))
    runs.end(store, run)
    text = export_run(store, "r")
    document = json.loads(text)["document"]
    assert document["run_id"] == "r"
    assert (document["workflow"], document["status"]) == ("build", "success")
    assert (document["steps_completed"], document["fields"]) == (1, {"phase": "building"})
    assert list(document)[:4] == ["format", "kind", "run_id", "workflow"]
    lines = [line.strip(b",\n") for line in text.splitlines()]
    recorded = [each.encode() for _, each in store.texts(run.number)]
    assert lines[1 : len(recorded) + 1] == recorded, "an entry is a line, as the journal has it"


def test_an_imported_run_has_its_entries_and_times_behind_a_mark(
    store: Store, other: Store
) -> None:
    runs.recorded(store)
    assert moved(store, other) == "r"
    number = other.find("r").number
    there, before = other.entries(number), store.entries(store.find("r").number)
    assert [each.text() for each in there] == [each.text() for each in before]
    assert [each.at for each in there] == [each.at for each in before]
    assert [each.seq for each in there] == list(range(2, len(before) + 2))
    mark = entries.decode(next(other.texts(number))[1])
    assert isinstance(mark, Restored)
    assert mark.source == "a file"
    assert other.find("r").status == "success"


def test_an_export_of_an_imported_run_has_no_mark_and_the_same_entries(
    store: Store, other: Store
) -> None:
    runs.recorded(store, is_ended=False)
    moved(store, other)
    again = json.loads(export_run(other, "r"))["document"]["entries"]
    assert again[0]["kind"] == "run_started"
    assert moved(other, store, run_id="second") == "second"
    assert runs.texts(store, "second") == runs.texts(store, "r")
    assert store.find("second").status == "stopped"


def test_a_clash_of_ids_is_refused_and_another_id_is_taken(store: Store) -> None:
    runs.recorded(store)
    with pytest.raises(ConfigurationError, match="has a run 'r' already; import this one under"):
        moved(store, store)
    assert moved(store, store, run_id="s") == "s"
    assert runs.texts(store, "s") == runs.texts(store, "r")
    with pytest.raises(InvalidIdentifierError):
        moved(store, store, run_id="../x")


def test_a_run_that_is_executed_can_be_exported(store: Store, other: Store) -> None:
    run = runs.start(store, "r")
    runs.complete(store, run, 1)
    moved(store, other)
    assert other.find("r").status == "stopped"
    with pytest.raises(UnknownRunError):
        export_run(store, "another")


def test_large_values_move_whole_and_as_differences(store: Store, other: Store) -> None:
    run = runs.start(store, "r")
    text = b'["' + b"x" * 20_000 + b'"]'
    runs.complete(store, run, 1, runs.store_value(store, run, 1, text))
    grown = runs.store_value(store, run, 2, text[:-1] + b',"more"]', base=text)
    runs.complete(store, run, 2, grown)
    runs.end(store, run)
    moved(store, other)
    number = other.find("r").number
    for at in (1, 2):
        (found,) = other.db.read(other.sql["PAYLOAD"], number << 32 | at)
        (before,) = store.db.read(store.sql["PAYLOAD"], run.number << 32 | at)
        assert found == before
    document = json.loads(export_run(store, "r"))["document"]
    assert document["payloads"][0]["value"] == ["x" * 20_000], "readable as it is"
    assert document["payloads"][1]["base"] == 1


def test_a_restore_that_has_other_values_is_refused_and_can_be_imported(store: Store) -> None:
    run = runs.start(store, "r")
    runs.complete(store, run, 1, runs.store_value(store, run, 1, b'"of the first"'))
    runs.end(store, run)
    first = read_run(export_run(store, "r"), "a file")
    purge(store, ["r"])
    run = runs.start(store, "r")
    runs.complete(store, run, 1, runs.store_value(store, run, 1, b'"of the second"'))
    runs.stop(store, run)
    before = runs.texts(store, "r")
    with pytest.raises(RunMismatchError, match="other large values than the copy; import the copy"):
        transfer.restore_run(store, first, "a file")
    assert runs.texts(store, "r") == before
    assert transfer.import_run(store, first, "a file", "s") == "s"
    assert read_run(export_run(store, "s"), "again").payloads == first.payloads


def test_a_restore_adds_the_values_that_the_run_has_not(store: Store) -> None:
    run = runs.start(store, "r")
    runs.complete(store, run, 1, runs.store_value(store, run, 1, b'"large"'))
    runs.stop(store, run)
    copy = read_run(export_run(store, "r"), "a file")
    store.db.write(lambda tx: tx("DELETE FROM payloads"), sync=True)
    transfer.restore_run(store, copy, "a file")
    assert read_run(export_run(store, "r"), "again").payloads == copy.payloads


def test_a_restore_of_the_same_run_stores_no_value_twice(store: Store) -> None:
    run = runs.start(store, "r")
    runs.complete(store, run, 1, runs.store_value(store, run, 1, b'"large"'))
    copy = read_run(export_run(store, "r"), "a file")
    runs.complete(store, run, 2)
    with pytest.raises(RunLeasedError, match="being executed"):
        transfer.restore_run(store, copy, "a file")
    runs.stop(store, run)
    transfer.restore_run(store, copy, "a file")
    assert runs.texts(store, "r")[-1] == "step 1, attempt 1 completed"
    assert store.db.read("SELECT count(*) FROM payloads") == [(1,)]


def test_what_an_imported_run_has_spent_counts(store: Store, other: Store) -> None:
    run = runs.start(store, "r")
    runs.write(store, run, Spent(step=1, persona="p", model="m", tokens=7, micros=5))
    runs.write(store, run, Spent(step=1, persona="p", model="m", tokens=2), effects=[Usage("p")])
    runs.stop(store, run)
    moved(store, other)
    found = other.db.read("SELECT persona, model, tokens, micros FROM usage")
    assert found == [("p", "m", 9, 5)]


# --- damage ---------------------------------------------------------------------------------------


def test_an_export_cut_at_any_byte_is_found(store: Store) -> None:
    runs.recorded(store, steps=1)
    text = export_run(store, "r")
    for end in range(len(text)):
        with pytest.raises(DocumentCorruptError, match="a file cannot be trusted"):
            read_run(text[:end], "a file")


def test_an_export_with_any_byte_flipped_is_found(store: Store) -> None:
    runs.recorded(store, steps=1)
    text = bytearray(export_run(store, "r"))
    for at in range(len(text)):
        for bit in (0x01, 0x80):
            text[at] ^= bit
            with pytest.raises(DocumentCorruptError, match="a file cannot be trusted"):
                read_run(bytes(text), "a file")
            text[at] ^= bit
    assert read_run(bytes(text), "a file").run_id == "r"


def sealed(store: Store, old: bytes, new: bytes) -> bytes:
    """Return an export with another text and the digest of that: what a hostile file has."""
    from maestro_hive.journal import documents

    text = export_run(store, "r")
    assert old in text
    body = text[text.index(b'"run_id"') : -len(b'},"sha256":""}\n') - 64]
    return documents.seal("run", [body.replace(old, new)])


@pytest.mark.parametrize(
    "old, new",
    [
        (b'"kind":"run_started"', b'"kind":"of_tomorrow"'),
        (b'"kind":"run_started"', b'"kind":"run_ended","status":"success"'),
        (b'"seq":2', b'"seq":7'),
        (b'"seq":2', b'"seq":-2'),
        (b'"seq":2', b'"seq":1e999'),
        (b'"result":"done"', b'"result":NaN'),
        (b'"workflow":"build","input"', b'"workflow":"other","input"'),
        (b'"kind":"attempt_started"', b'"kind":"attempt_failed"'),
        (b'"run_id":"r"', b'"run_id":["r"]'),
        (b'"run_id":"r"', b'"run_id":"\xff"'),
        (b'"result":"done"', b'"result":{"$":"payload","v":[1,2,"' + b"0" * 64 + b'"]}'),
        (b'"payloads":[\n]', b'"payloads":[{"number":1,"sha256":"' + b"0" * 64 + b'","value":1}]'),
        (b'"payloads":[\n]', b'"payloads":[{"number":1,"sha256":"' + b"0" * 64 + b'","base":1}]'),
        (b'"result":"done"', b'"result":' + b"[" * 200_000 + b"]" * 200_000),
    ],
    ids=lambda each: each[:40].decode(errors="replace"),
)
def test_a_document_that_makes_no_run_is_refused(store: Store, old: bytes, new: bytes) -> None:
    runs.recorded(store, steps=1)
    with pytest.raises(DocumentCorruptError, match="a file cannot be trusted"):
        read_run(sealed(store, old, new), "a file")


def test_a_document_of_another_format_is_refused_by_name(store: Store) -> None:
    import hashlib

    body = b'{"format":%d,"kind":"run","text":"of tomorrow"}' % (FORMAT + 1)
    digest = hashlib.sha256(body).hexdigest().encode()
    text = b'{"document":' + body + b',"sha256":"' + digest + b'"}\n'
    with pytest.raises(
        FormatError, match=f"a file has format {FORMAT + 1}, and this version reads"
    ):
        read_run(text, "a file")


def test_a_run_over_the_limit_has_no_document_and_the_error_says_what_to_do(store: Store) -> None:
    run = runs.start(store, "r")
    runs.complete(store, run, 1, runs.store_value(store, run, 1, b'"' + b"x" * 1000 + b'"'))
    runs.end(store, run)
    size = len(export_run(store, "r"))
    row = store.find("r")
    assert len(take_copy(store, row, size).data) == size
    for limit in (100, 1500, size - 1):  # in its entries, its values, and in the rest
        with pytest.raises(
            CopyTooLargeError, match=r"no new JSON copy; it continues\. `maestro ba"
        ):
            take_copy(store, row, limit)


def test_random_bytes_are_no_run() -> None:
    for size in (0, 1, 100, 10_000):
        with pytest.raises(DocumentCorruptError):
            read_run(os.urandom(size), "a file")
