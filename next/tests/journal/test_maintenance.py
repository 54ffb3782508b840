"""Backup, purge, collect, check and salvage of a journal."""

from __future__ import annotations

import os
import threading
import time
from typing import TYPE_CHECKING

import pytest

from maestro_hive.journal.copies import Copies, CopyFolder
from maestro_hive.journal.effects import Hold
from maestro_hive.journal.entries import ChildStarted, RunStarted
from maestro_hive.journal.maintenance import Finding, back_up, check, collect, purge, purgeable
from maestro_hive.journal.salvage import salvage_journal
from maestro_hive.journal.store import Enqueued, open_store
from maestro_hive.kernel.errors import ConfigurationError, CorruptionError, FolderError
from tests.journal import recorded as runs
from tests.journal.conftest import opened
from tests.stores import SHARED_KINDS

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from maestro_hive.journal.database import Transaction
    from maestro_hive.journal.store import Store

_TABLES = ("runs", "entries", "payloads", "chunks", "messages", "holds", "usage")


@pytest.fixture(params=SHARED_KINDS)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    with opened(request.param, tmp_path) as made:
        yield made


@pytest.fixture
def file(tmp_path: Path) -> Iterator[Store]:
    with opened("file", tmp_path) as made:
        yield made


def counts(store: Store) -> dict[str, int]:
    return {each: store.db.read(f"SELECT count(*) FROM {each}")[0][0] for each in _TABLES}


def copy(store: Store, folder: CopyFolder, *names: str) -> None:
    copies = Copies(store, folder)
    for name in names:
        copies.released(store.find(name).number)
        copies.checkpoint(name)
    copies.close()


# --- backup ---------------------------------------------------------------------------------------


def test_a_backup_is_a_journal_as_of_one_moment(file: Store, tmp_path: Path) -> None:
    runs.recorded(file)
    journal = back_up(file, tmp_path / "backup")
    runs.recorded(file, "later")
    assert journal.stat().st_mode & 0o777 == 0o600
    assert [each.name for each in journal.parent.iterdir()] == ["journal.db"]
    there = open_store(tmp_path / "backup")
    assert [row.run_id for row in there.runs()] == ["r"]
    assert runs.texts(there, "r") == runs.texts(file, "r")
    assert list(check(there)) == []
    runs.recorded(there, "more")
    there.db.close()


def test_a_backup_beside_writers_has_whole_transactions(file: Store, tmp_path: Path) -> None:
    run = runs.start(file, "r")
    step = iter(range(1, 1 << 30))
    for _ in range(300):
        runs.complete(file, run, next(step), "x" * 5000)
    ended = threading.Event()

    def work() -> None:
        while not ended.is_set():
            runs.complete(file, run, next(step), "x" * 5000)

    writer = threading.Thread(target=work)
    writer.start()
    before = run.seq
    back_up(file, tmp_path / "backup")
    after = run.seq
    ended.set()
    writer.join()
    there = open_store(tmp_path / "backup")
    entries = there.entries(there.find("r").number)
    assert before <= len(entries) <= after
    assert entries[-1].kind == "step_completed"
    assert list(check(there)) == []
    there.db.close()


def test_a_backup_replaces_no_journal_and_leaves_nothing_half(
    file: Store, folder: Path, tmp_path: Path
) -> None:
    runs.recorded(file)
    with pytest.raises(FolderError, match="has a journal already; choose a new folder"):
        back_up(file, folder)
    (tmp_path / "killed").mkdir()
    (tmp_path / "killed" / ".journal.db.half").write_bytes(b"half")
    assert back_up(file, tmp_path / "killed").exists()
    memory = open_store(":memory:")
    with pytest.raises(ConfigurationError, match="a journal in memory is not copied"):
        back_up(memory, tmp_path / "memory")
    assert list((tmp_path / "memory").iterdir()) == []
    memory.db.close()


def test_a_backup_of_a_server_is_made_by_its_own_program(tmp_path: Path) -> None:
    with opened("postgres", tmp_path) as store, pytest.raises(ConfigurationError, match="pg_dump"):
        back_up(store, tmp_path / "backup")


# --- purge ----------------------------------------------------------------------------------------


def test_a_purge_leaves_nothing_of_a_run(store: Store, copy_folder: CopyFolder) -> None:
    run = runs.start(store, "r")
    runs.complete(store, run, 1, runs.store_value(store, run, 1, b'"large"'))
    chunk = (run.number << 32 | 1, 1, 1, 1, "written")
    store.db.write(lambda tx: tx(store.sql["ADD_CHUNK"], *chunk), sync=True)
    store.db.write(lambda tx: tx(store.sql["ADD_USAGE"], run.number, "", "", 1, 2, 3, 4), sync=True)
    runs.end(store, run)
    runs.recorded(store, "stays")
    copy(store, copy_folder, "r", "stays")
    assert list(purgeable(store)) == ["r", "stays"]
    assert purge(store, ["r"], copy_folder) == ["r"]
    assert counts(store) == {**dict.fromkeys(_TABLES, 0), "runs": 1, "entries": 8}
    assert (copy_folder.has_copies("r"), copy_folder.has_copies("stays")) == (False, True)
    assert list(check(store, copy_folder)) == []


def test_children_go_with_their_parent_and_not_before_it(
    store: Store, copy_folder: CopyFolder
) -> None:
    parent = runs.start(store, "r")
    child = runs.start(store, "r/work.1", parent="r")
    called = ChildStarted(identity="c", run_id="r/work.1", workflow="build")
    runs.write(store, parent, called)
    runs.end(store, child)
    copy(store, copy_folder, "r/work.1")
    assert list(purgeable(store)) == []
    assert purge(store, ["r"]) == []
    runs.end(store, parent)
    copy(store, copy_folder, "r")
    assert list(purgeable(store)) == ["r"]
    assert purge(store, ["r"], copy_folder) == ["r", "r/work.1"]
    assert set(counts(store).values()) == {0}
    assert copy_folder.run_ids() == []


def test_a_run_stays_while_one_that_it_called_has_not_ended(store: Store) -> None:
    parent = runs.start(store, "r")
    runs.start(store, "r/work.1", parent="r")
    runs.end(store, parent)
    assert purge(store, ["r"]) == []
    assert counts(store)["runs"] == 2


def test_only_runs_that_have_ended_long_ago_are_purged(store: Store) -> None:
    runs.recorded(store)
    runs.recorded(store, "stopped", is_ended=False)
    store.enqueue(Enqueued("queued", RunStarted(workflow="build"), "default"))
    assert list(purgeable(store, older_than=60)) == []
    assert list(purgeable(store, statuses=["failed"])) == []
    assert list(purgeable(store)) == ["r"]
    with pytest.raises(ConfigurationError, match="runs that are 'running' are not purged"):
        list(purgeable(store, statuses=["running"]))
    assert purge(store, ["stopped", "queued", "unknown"]) == []
    assert counts(store)["runs"] == 3


def test_many_runs_are_purged_in_pages(store: Store) -> None:
    for number in range(250):
        runs.recorded(store, f"r{number}", steps=0)
    names = list(purgeable(store))
    assert len(names) == 250
    assert purge(store, names) == names
    assert set(counts(store).values()) == {0}


# --- collect and check ----------------------------------------------------------------------------


def test_what_no_run_refers_to_is_collected(store: Store, copy_folder: CopyFolder) -> None:
    run = runs.recorded(store, "gone")
    runs.store_value(store, run, 1, b'"large"')
    runs.recorded(store)
    store.db.write(lambda tx: tx("DELETE FROM runs WHERE name = 'gone'"), sync=True)
    copy(store, copy_folder, "r")
    old = copy_folder.state_path("r").with_name(".execution_state.json.0123.tmp")
    new = old.with_name(".execution_state.json.4567.tmp")
    for each in (old, new):
        each.touch()
    os.utime(old, (0, time.time() - 7200))
    problem = f"run number {run.number} is gone, and rows of it are left"
    assert list(check(store)) == [Finding("run", "", problem)]
    assert collect(store, copy_folder) == 2
    assert collect(store, copy_folder) == 0
    assert list(check(store)) == []
    assert (old.exists(), new.exists()) == (False, True)
    assert runs.texts(store, "r")


def test_a_check_finds_entries_that_are_altered_or_missing(store: Store) -> None:
    runs.recorded(store, "altered")
    runs.recorded(store, "missing")
    runs.recorded(store, "empty")
    runs.recorded(store, "sound")
    first = {name: store.find(name).number << 32 for name in ("altered", "missing", "empty")}

    def damage(tx: Transaction) -> None:
        text = "UPDATE entries SET entry = replace(entry, 'done', 'gone') WHERE id = $1"
        tx(text, first["altered"] | 3)
        tx("DELETE FROM entries WHERE id = $1", first["missing"] | 4)
        tx("DELETE FROM entries WHERE id BETWEEN $1 AND $2", first["empty"], first["empty"] | 99)

    store.db.write(damage, sync=True)
    found = {each.name: each for each in check(store)}
    assert set(found) == {"altered", "missing", "empty"}
    assert {each.kind for each in found.values()} == {"run"}
    assert found["altered"].problem.startswith("entry 3 of run number")
    assert found["missing"].problem.startswith("entry 4 of run number")
    assert found["empty"].problem == "it has no entries"


def test_a_check_finds_values_and_accounts_that_are_wrong(store: Store) -> None:
    run = runs.start(store, "r")
    runs.store_value(store, run, 1, b'"large"')
    runs.store_value(store, run, 2, b'"larger"', base=b'"large"')
    store.define_account("limit", 5)
    runs.write(store, run, effects=[Hold(1, "limit", 2)])
    assert list(check(store)) == []

    def change(statement: str) -> list[Finding]:
        store.db.write(lambda tx: tx(statement), sync=True)
        return list(check(store))

    (account,) = change("UPDATE accounts SET held = 3")
    assert account == Finding("account", "limit", "it holds 3, and what is under way holds 2")
    value, _ = change("UPDATE payloads SET sha256 = data WHERE base IS NOT NULL")
    assert (value.kind, value.name) == ("value", "r")
    assert value.problem.startswith("value 2 of the run cannot be trusted")
    value, _ = change("UPDATE payloads SET data = sha256 WHERE base IS NULL")
    assert value.problem.startswith("value 1 of the run cannot be trusted")
    value, _ = change("DELETE FROM payloads WHERE base IS NULL")
    assert value.problem.endswith("row 1, which it needs, is missing")


def test_a_check_finds_damaged_copies_and_changes_none(
    store: Store, copy_folder: CopyFolder
) -> None:
    runs.recorded(store)
    copy(store, copy_folder, "r")
    path = copy_folder.state_path("r")
    path.write_bytes(path.read_bytes()[:-9])
    path.with_name("execution_state.json.damaged-1").touch()
    found = list(check(store, copy_folder))
    assert [each.kind for each in found] == ["copy", "copy"]
    assert "its digest does not match" in found[0].problem
    assert "was set aside" in found[1].problem
    assert path.exists()


def test_a_check_finds_damaged_pages(folder: Path) -> None:
    store = open_store(folder)
    for number in range(40):
        runs.recorded(store, f"r{number}", steps=20)
    run = runs.recorded(store, "last", steps=20)
    store.update_document("circuit_breakers", "p", lambda _: b'{"state":"open"}')
    chunk = (run.number << 32 | 1, 1, 1, 1, "a chunk that was written")
    store.db.write(lambda tx: tx(store.sql["ADD_CHUNK"], *chunk), sync=True)
    store.db.close()
    for text in (b'"identity":"s20"', b'"state":"open"', b"a chunk that was written"):
        flip_page_of(folder, text)
    store = open_store(folder)
    found = list(check(store))
    assert "pages" in [each.kind for each in found]
    assert len([each for each in found if each.name == run.name]) == 2, "entries and chunks"
    store.db.close()


def flip_page_of(folder: Path, text: bytes) -> None:
    """Flip a bit in the last page that has a text."""
    journal = folder / "journal.db"
    data = bytearray(journal.read_bytes())
    at = data.rindex(text)
    data[at] ^= 0x20
    journal.write_bytes(data)


# --- salvage --------------------------------------------------------------------------------------


def test_what_can_be_read_of_a_damaged_journal_is_salvaged(
    folder: Path, tmp_path: Path, copy_folder: CopyFolder
) -> None:
    store = open_store(folder)
    for number in range(30):
        runs.recorded(store, f"r{number}", steps=20)
    copy(store, copy_folder, "r29")
    store.update_document("circuit_breakers", "p", lambda _: b"{}")
    store.define_account("limit", 5)
    whole = runs.texts(store, "r29")
    store.db.close()
    flip_page_of(folder, b'"identity":"s20"')
    target = open_store(tmp_path / "new")
    found = salvage_journal(folder / "journal.db", target)
    assert found.lost
    broken = {each.name for each in found.lost if each.kind == "run"}
    assert broken
    assert broken <= {"r28", "r29"}, "the others have other pages"
    assert set(found.runs) >= {f"r{number}" for number in range(28)}
    assert runs.texts(target, "r0") == [*whole[:-1], "run ended: success"]
    assert target.document("circuit_breakers", "p") == (1, b"{}")
    assert target.account("limit") == (0, 0, 5)
    assert [each for each in check(target) if each.kind != "run"] == []
    target.db.close()


def test_a_copy_that_has_more_than_the_damaged_journal_is_used(
    folder: Path, tmp_path: Path, copy_folder: CopyFolder
) -> None:
    store = open_store(folder)
    runs.recorded(store, steps=40)
    runs.recorded(store, "only-a-copy")
    copy(store, copy_folder, "r", "only-a-copy")
    whole = runs.texts(store, "r")
    number = store.find("only-a-copy").number
    store.db.write(lambda tx: tx("DELETE FROM runs WHERE id = $1", number), sync=True)
    store.db.close()
    flip_page_of(folder, b'"identity":"s20"')
    target = open_store(tmp_path / "new")
    found = salvage_journal(folder / "journal.db", target, copy_folder)
    assert sorted(found.runs) == ["only-a-copy", "r"]
    assert runs.texts(target, "r") == whole
    assert list(check(target)) == []
    with pytest.raises(ConfigurationError, match="is salvaged into a new folder"):
        salvage_journal(folder / "journal.db", target)
    target.db.close()


@pytest.mark.parametrize("damage", ["cut", "header", "garbage"])
def test_a_journal_that_cannot_be_opened_is_salvaged_as_far_as_possible(
    folder: Path, tmp_path: Path, copy_folder: CopyFolder, damage: str
) -> None:
    store = open_store(folder)
    for number in range(30):
        runs.recorded(store, f"r{number}", steps=20)
    copy(store, copy_folder, "r29")
    whole = runs.texts(store, "r0")
    store.db.close()
    journal = folder / "journal.db"
    data = bytearray(journal.read_bytes())
    match damage:
        case "cut":
            del data[-3 * 4096 - 100 :]
        case "header":
            data[95] ^= 1
        case _:
            data[:100] = bytes(100)
    journal.write_bytes(data)
    with pytest.raises(CorruptionError):
        open_store(folder)
    target = open_store(tmp_path / "new")
    found = salvage_journal(journal, target, copy_folder)
    assert runs.texts(target, "r29") == whole
    assert [each for each in check(target) if each.kind != "run"] == []
    if damage == "garbage":
        assert found.runs == ["r29"], "its copy"
        assert "nothing of" in found.lost[0].problem
    else:
        assert runs.texts(target, "r0") == whole
        assert len(found.runs) > 25
    target.db.close()
