"""The dispatch rows in SQLite: what they cost, and what becomes of them in copies of a folder."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import apsw
import pytest

from maestro_hive.admin.doctor import examine, repair
from maestro_hive.admin.transfer import export_run, import_run
from maestro_hive.maestro.state.codec import encode
from maestro_hive.maestro.state.records import DispatchState, EntryKind, NewDispatch, NewEntry
from maestro_hive.maestro.state.sqlite import dispatch
from maestro_hive.maestro.state.sqlite.connection import connect
from maestro_hive.maestro.state.sqlite.store import SqliteStore
from maestro_hive.maestro.state.store import Append, NewRun
from tests.tables import for_each

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from maestro_hive.maestro.state.store import RunLease, Store

ENTRY = NewEntry(EntryKind.TASK_COMPLETED, facts=encode({"task": "a"}).data)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SqliteStore]:
    store = SqliteStore(tmp_path / "state")
    yield store
    store.close()


def enqueue(store: Store, *names: str, due: float | None = 0.0) -> None:
    dispatch = NewDispatch(due=due)
    store.create_runs([NewRun(name, "mail", [ENTRY], "pending", dispatch) for name in names])


def claim(store: Store) -> list[RunLease]:
    return store.claim_runs(queue="default", workflows={"mail"}, limit=100)


def queries() -> list[str]:
    """Return the statements that are executed often, or while writers wait."""
    listings = {"_LIST", "_COUNT", "_SELECT", "_WITHOUT_RUN", "_REBASE"}
    return [
        sql
        for name, sql in vars(dispatch).items()
        if isinstance(sql, str)
        and re.match(r"(SELECT|UPDATE|DELETE) ", sql)
        and name not in listings
    ]


@for_each("sql", queries())
def test_no_query_reads_the_whole_table(store: SqliteStore, sql: str) -> None:
    """But for the leases: only those that are held have a row."""
    plan = store._file.rows(f"EXPLAIN QUERY PLAN {sql}", ("x",) * placeholders(sql))
    scanned = [row[3] for row in plan if row[3].startswith("SCAN") and "CONSTANT" not in row[3]]
    assert [each for each in scanned if each.split()[1] == "dispatch"] == []


def placeholders(sql: str) -> int:
    numbered = [int(number) for number in re.findall(r"\?(\d+)", sql)]
    return max(numbered) if numbered else sql.count("?")


def test_a_run_without_a_row_takes_no_statement_more(store: SqliteStore) -> None:
    """The hot path of a caller's run: taking it, appending, its end, and releasing it."""
    store.release_run(store.acquire_run("run-1"))  # what is done once in a process
    executed: list[str] = []

    def trace(_: apsw.Cursor, sql: str, bindings: Any) -> bool:
        executed.append(sql)
        return True

    store._file._db.exec_trace = trace
    for name in ("run-1", "run-2"):
        run = store.acquire_run(name, "mail", [ENTRY], "running")
        store.append([Append(run, [ENTRY])])
        store.append([Append(run, [ENTRY], "success", release=True)])
        run = store.acquire_run(name)
        store.release_run(run, None)
    store._file._db.exec_trace = None
    found = [sql for sql in executed if re.search(r"\bdispatch\b", sql)]
    assert len(executed) > 20
    assert all(sql.startswith("SELECT id, (SELECT deaths FROM dispatch") for sql in found)
    assert len(found) == 4


def test_a_backup_has_the_rows_and_its_workers_recover_them(
    store: SqliteStore, tmp_path: Path
) -> None:
    enqueue(store, "active", "other")
    enqueue(store, "held", due=None)
    claim(store)
    store.backup(tmp_path / "copy")
    copy = SqliteStore(tmp_path / "copy")
    assert sorted(copy.recover_runs(lambda _: None)) == ["active", "other"]
    states = {row.run_id: row.state for row in copy.dispatches()}
    assert states == {
        "active": DispatchState.READY,
        "other": DispatchState.READY,
        "held": DispatchState.HELD,
    }
    copy.close()
    found = store.dispatch("active")
    assert found is not None
    assert found.state is DispatchState.ACTIVE


def test_an_imported_run_belongs_to_nobody(store: SqliteStore, tmp_path: Path) -> None:
    started = NewEntry(
        EntryKind.RUN_STARTED,
        facts=encode({"workflow": "mail", "parameters": [], "parent": "root"}).data,
        identity=b"1" * 32,
        value=encode({"args": [], "kwargs": {}}),
    )
    run = NewRun("run-1", "mail", [started], "pending", NewDispatch(), parent="root")
    store.create_runs([run])
    text = export_run(store, "run-1", with_values=True).text
    import_run(tmp_path / "other", text, "file")
    other = SqliteStore(tmp_path / "other")
    found = other.run("run-1")
    assert found is not None
    assert (found.workflow, found.parent, other.dispatches()) == ("mail", "root", [])
    other.close()


# --- the doctor -------------------------------------------------------------------------------


def change(folder: Path, sql: str) -> None:
    db = connect(folder / "journal.db", apsw.SQLITE_OPEN_READWRITE)
    db.execute(sql)
    db.close()


def test_rows_of_unfinished_runs_are_in_order(store: SqliteStore) -> None:
    enqueue(store, "ready", "active")
    enqueue(store, "held", due=None)
    claim(store)
    store.close()
    store = SqliteStore(store.folder)
    (lease, _) = claim(store)
    store.release_lease(lease.lease)  # active, and without a lease
    found = examine(store.folder)
    assert (found.problems, found.repairs) == ((), ())
    store.close()


def test_the_doctor_withdraws_a_run_that_has_ended(store: SqliteStore) -> None:
    enqueue(store, "run-1", "run-2")
    store.close()
    change(store.folder, "UPDATE runs SET status = 'success' WHERE name = 'run-1'")
    assert examine(store.folder).repairs == (
        "withdraw run 'run-1', which has ended, from its queue",
    )
    found = repair(store.folder)
    assert "run 'run-1' has ended, and was still in a queue: withdrawn" in found.repaired
    store = SqliteStore(store.folder)
    assert [row.run_id for row in store.dispatches()] == ["run-2"]
    store.close()


def test_the_doctor_finds_a_row_without_a_run(store: SqliteStore) -> None:
    enqueue(store, "run-1")
    store.close()
    change(store.folder, "UPDATE dispatch SET run = 77")
    (problem,) = examine(store.folder).problems
    assert problem == "run number 77 is in a queue, and does not exist"
