"""The file under the journal: failed writes, other writers, private files, shared fsyncs."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import subprocess
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

from maestro_hive.kernel.errors import (
    CorruptionError,
    MaestroError,
    StorageError,
    StoreBusyError,
    StoreClosedError,
    StoreFailedError,
)
from maestro_hive.maestro.state.codec import Encoded, encode
from maestro_hive.maestro.state.records import EntryKind, NewEntry
from maestro_hive.maestro.state.sqlite.store import SqliteStore
from maestro_hive.maestro.state.store import Append

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    import apsw

    from maestro_hive.maestro.state.store import RunLease


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "state"


@pytest.fixture
def store(folder: Path) -> Iterator[SqliteStore]:
    opened = SqliteStore(folder)
    yield opened
    opened.close()


def saved_entry(value: Any) -> NewEntry:
    return NewEntry(EntryKind.PROGRESS_SAVED, value=encode(value))


def save(store: SqliteStore, hold: RunLease, value: Any = "x", *, sync: bool = True) -> None:
    (written,) = store.append([Append(hold, [saved_entry(value)])], sync=sync)
    assert isinstance(written, list)


def one(_before: bytes | None) -> Encoded:
    return encode(1)


# --- failed writes ------------------------------------------------------------------------------


def fail_to_sync(_fd: int) -> None:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


WRITES: dict[str, Callable[[SqliteStore, RunLease], Any]] = {
    "append": save,
    "update_document": lambda store, _: store.update_document("space", "key", one),
    "delete_documents": lambda store, _: store.delete_documents(),
    "purge_runs": lambda store, _: store.purge_runs(["gone"]),
    "collect": lambda store, _: store.collect(),
}


def test_leases_are_taken_and_released_without_a_sync(
    store: SqliteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fdatasync", fail_to_sync)
    run = store.acquire_run("run-1", "w", [saved_entry("first")], "running")
    store.append([Append(run, [saved_entry("last")], "success", release=True)], sync=False)
    store.release_run(store.acquire_run("run-1"))
    store.release_lease(store.take_lease("probe"))
    assert store.usable


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_a_failed_fsync_is_a_failed_write_and_the_store_is_done(
    store: SqliteStore,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    write: Callable[[SqliteStore, RunLease], Any],
) -> None:
    hold = store.acquire_run("run-1")
    store.release_run(store.acquire_run("gone"))
    save(store, hold, "safe")
    with monkeypatch.context() as broken:
        broken.setattr(os, "fdatasync", fail_to_sync)
        with pytest.raises(StoreFailedError, match="Input/output error") as caught:
            write(store, hold)
    assert "reopen" in str(caught.value)
    assert not store.usable
    # The disk works again, and still nothing is accepted: nobody knows what is on it.
    refused: list[Callable[[], Any]] = [
        lambda: save(store, hold),
        lambda: save(store, hold, sync=False),
        lambda: store.update_document("space", "key", one),
        lambda: store.acquire_run("run-3"),
        lambda: store.entries(hold.run),
        store.runs,
        store.documents,
        store.renew_leases,
        store.check,
    ]
    for call in refused:
        with pytest.raises(StoreFailedError):
            call()
    store.close()
    again = SqliteStore(folder)
    taken = again.acquire_run("run-1")
    assert again.load(again.entries(taken.run)[0]) == encode("safe").data
    save(again, taken, "after")
    assert again.check() == []
    again.close()


def test_an_append_that_needs_no_sync_does_not_sync(
    store: SqliteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    hold = store.acquire_run("run-1")
    monkeypatch.setattr(os, "fdatasync", fail_to_sync)
    save(store, hold, sync=False)
    assert store.usable
    with pytest.raises(StoreFailedError):
        save(store, hold)
    monkeypatch.undo()


def test_a_folder_deleted_under_the_store_is_a_failed_write(
    store: SqliteStore, folder: Path
) -> None:
    """What goes into a file without a name is lost when the process ends."""
    hold = store.acquire_run("run-1")
    shutil.rmtree(folder)
    with pytest.raises(StoreFailedError, match="deleted while it was open"):
        save(store, hold)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MB, really."""
    point = tmp_path / "small"
    point.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m,mode=0700", "tmpfs", str(point)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("only root may mount a small file system")
    yield point
    subprocess.run(["umount", "-l", str(point)], check=True)


def test_a_full_disk_is_a_failed_write_and_nothing_acknowledged_is_lost(small_disk: Path) -> None:
    store = SqliteStore(small_disk / "state")
    hold = store.acquire_run("run-1")
    acknowledged, failure = 0, ""
    while not failure:
        try:
            save(store, hold, f"{acknowledged:05}" * 1000)
            acknowledged += 1
        except StoreFailedError as error:
            failure = str(error)
    assert "the disk is full" in failure
    assert acknowledged > 5
    with pytest.raises(StoreFailedError):
        save(store, hold, "small")
    store.close()
    subprocess.run(["mount", "-o", "remount,size=16m", str(small_disk)], check=True)
    again = SqliteStore(small_disk / "state")
    taken = again.acquire_run("run-1")
    values = [again.load(entry) for entry in again.entries(taken.run)]
    assert values[:acknowledged] == [
        encode(f"{number:05}" * 1000).data for number in range(acknowledged)
    ]
    save(again, taken, "goes on")
    assert again.check() == []
    again.close()


def test_a_disk_too_full_to_begin_is_an_error_of_ours(small_disk: Path) -> None:
    filler = small_disk / "filler"
    with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        for _ in range(1000):
            file.write(bytes(4096))
    with pytest.raises(MaestroError):
        SqliteStore(small_disk / "state")
    filler.unlink()
    store = SqliteStore(small_disk / "state")
    save(store, store.acquire_run("run-1"))
    store.close()


def test_a_change_that_writes_to_the_store_itself_is_refused_and_harms_nothing(
    store: SqliteStore,
) -> None:
    hold = store.acquire_run("run-1")
    inner: list[Callable[[], Any]] = [
        lambda: save(store, hold),
        lambda: store.update_document("space", "other", one),
        lambda: store.acquire_run("run-2"),
    ]
    for write in inner:

        def change(_before: bytes | None, write: Callable[[], Any] = write) -> Encoded:
            write()
            return encode(1)

        with pytest.raises(StorageError, match="must not write"):
            store.update_document("space", "key", change)
    assert store.documents() == []
    assert store.entries(hold.run) == []
    save(store, hold)
    assert store.update_document("space", "key", one) is not None


# --- damage -------------------------------------------------------------------------------------


def test_a_changed_page_is_found_when_it_is_read(folder: Path) -> None:
    store = SqliteStore(folder)
    hold = store.acquire_run("run-1")
    for number in range(40):
        save(store, hold, f"{number}" * 400)
    store.checkpoint()
    store.close()
    found = 0
    pages = (folder / "journal.db").stat().st_size // 4096
    whole = (folder / "journal.db").read_bytes()
    for page in range(1, pages, 3):
        changed = bytearray(whole)
        changed[page * 4096 + 2000] ^= 0x10
        (folder / "journal.db").write_bytes(changed)
        (folder / "journal.db-wal").write_bytes(b"")
        try:
            damaged = SqliteStore(folder)
        except CorruptionError:
            found += 1
            continue
        found += damaged.check() != []
        damaged.close()
    assert found == len(range(1, pages, 3))


# --- other writers ------------------------------------------------------------------------------


def test_who_waits_too_long_for_another_writer_is_told(folder: Path, store: SqliteStore) -> None:
    other = SqliteStore(folder, busy_seconds=0.1)

    def while_it_writes(_db: apsw.Connection) -> None:
        started = time.monotonic()
        with pytest.raises(StoreBusyError, match=r"journal\.lock"):
            other.update_document("space", "key", one)
        assert time.monotonic() - started < 30  # it is told, and does not wait for ever
        assert other.runs() == []  # readers wait for nobody
        with pytest.raises(StoreBusyError):
            SqliteStore(folder, busy_seconds=0.1)

    store._file.write(while_it_writes)
    assert other.update_document("space", "key", one) is not None
    other.close()


def test_a_writer_waits_for_another_and_then_goes_on(folder: Path, store: SqliteStore) -> None:
    other = SqliteStore(folder)
    written = threading.Event()

    def write() -> None:
        other.update_document("space", "key", one)
        written.set()

    thread = threading.Thread(target=write)

    def while_it_writes(_db: apsw.Connection) -> None:
        thread.start()
        assert not written.wait(0.1)

    store._file.write(while_it_writes)
    assert written.wait(60)
    thread.join()
    other.close()


def test_a_transaction_that_raises_lets_the_next_one_in(folder: Path, store: SqliteStore) -> None:
    other = SqliteStore(folder, busy_seconds=1)
    with pytest.raises(ZeroDivisionError):
        store._file.write(lambda _db: 1 // 0)
    assert other.update_document("space", "key", one) is not None
    assert store.update_document("space", "key", one) is not None
    other.close()


def test_what_an_interrupt_left_open_is_cleared_away_by_the_next_write(
    folder: Path, store: SqliteStore
) -> None:
    """Ctrl+C may strike between any two lines, also between a BEGIN and its clean-up."""
    store._file._queue.acquire(1)
    store._file._db.execute("BEGIN IMMEDIATE")
    assert store.update_document("space", "key", one) is not None
    other = SqliteStore(folder, busy_seconds=1)
    assert other.update_document("space", "key", one) is not None
    other.close()


def test_a_number_that_an_interrupt_kept_from_moving_on_does_no_harm(store: SqliteStore) -> None:
    hold = store.acquire_run("run-1")
    save(store, hold, "first")
    hold.seq = 0
    save(store, hold, "second")
    hold.seq = 0
    store.append([Append(hold, [saved_entry("third"), saved_entry("fourth")])])
    values = [store.load(entry) for entry in store.entries(hold.run)]
    assert values == [encode(word).data for word in ("first", "second", "third", "fourth")]
    assert hold.seq == 4


# --- shared fsyncs ------------------------------------------------------------------------------


def test_commits_that_come_during_an_fsync_share_the_next_one(
    store: SqliteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    hold = store.acquire_run("run-1")
    syncs: list[int] = []
    go_on = threading.Event()

    def slowly(fd: int) -> None:
        syncs.append(fd)
        assert go_on.wait(60)

    monkeypatch.setattr(os, "fdatasync", slowly)
    before = store._file.committed
    threads = [threading.Thread(target=save, args=(store, hold, at)) for at in range(5)]
    threads[0].start()
    wait_until(lambda: len(syncs) == 1)
    for thread in threads[1:]:
        thread.start()
    wait_until(lambda: store._file.committed == before + 5)
    go_on.set()
    for thread in threads:
        thread.join()
    assert len(syncs) == 2
    assert len(store.entries(hold.run)) == 5
    monkeypatch.undo()


def test_nobody_returns_before_the_fsync_that_covers_it(
    store: SqliteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    hold = store.acquire_run("run-1")
    go_on, begun = threading.Event(), threading.Event()

    def slowly(_fd: int) -> None:
        begun.set()
        assert go_on.wait(60)

    monkeypatch.setattr(os, "fdatasync", slowly)
    thread = threading.Thread(target=save, args=(store, hold))
    thread.start()
    assert begun.wait(60)
    thread.join(0.05)
    assert thread.is_alive()
    assert len(store.entries(hold.run)) == 1  # committed, but not acknowledged
    go_on.set()
    thread.join()
    monkeypatch.undo()


def test_a_second_thread_does_not_use_the_numbers_of_the_first(
    store: SqliteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    hold = store.acquire_run("run-1")
    commit = store._file.insert
    second = threading.Thread(target=save, args=(store, hold, "second"))

    def commit_and_let_the_other_in(*arguments: Any) -> int | None:
        done = commit(*arguments)
        if not second.ident:
            second.start()
            second.join(0.2)  # it has to wait, or the numbers would cross
        return done

    monkeypatch.setattr(store._file, "insert", commit_and_let_the_other_in)
    save(store, hold, "first")
    second.join()
    values = [store.load(entry) for entry in store.entries(hold.run)]
    assert values == [encode("first").data, encode("second").data]


def wait_until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.001)


# --- private files ------------------------------------------------------------------------------


@pytest.mark.parametrize("umask", [0o000, 0o077, 0o022])
def test_files_are_private_whatever_the_umask(folder: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        store = SqliteStore(folder / "deeper")
        save(store, store.acquire_run("run-1"), "x" * 5000)
        store.backup(folder / "copy")
        modes = {
            path.relative_to(folder).as_posix(): path.stat().st_mode & 0o777
            for path in [folder, *folder.rglob("*")]
        }
        store.close()
    finally:
        os.umask(before)
    assert {"deeper/journal.db", "deeper/journal.db-wal", "copy/journal.db"} <= modes.keys()
    for path, mode in modes.items():
        expected = 0o700 if (folder / path).is_dir() or path == "deeper/holders" else 0o600
        assert (path, oct(mode)) == (path, oct(expected))


def test_a_journal_that_others_may_read_is_made_private(folder: Path) -> None:
    SqliteStore(folder).close()
    (folder / "journal.db").chmod(0o644)
    SqliteStore(folder).close()
    assert (folder / "journal.db").stat().st_mode & 0o777 == 0o600


# --- the whole ----------------------------------------------------------------------------------


def test_a_copy_of_a_live_journal_is_whole(folder: Path, tmp_path: Path) -> None:
    store = SqliteStore(folder)
    hold = store.acquire_run("run-1")
    stop = threading.Event()

    def write() -> None:
        while not stop.is_set():
            save(store, hold, "x" * 2000, sync=False)

    for _ in range(20):
        save(store, hold)
    writer = threading.Thread(target=write)
    writer.start()
    store.backup(tmp_path / "copy")
    stop.set()
    writer.join()
    store.close()
    copy = SqliteStore(tmp_path / "copy")
    assert copy.acquire_run("run-1").seq >= 20
    assert copy.check() == []
    copy.close()


def test_a_copy_goes_to_a_new_folder_only(store: SqliteStore, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "precious").touch()
    with pytest.raises(StorageError, match="not empty"):
        store.backup(tmp_path / "full")
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["precious"]


def test_the_log_does_not_grow_for_ever(folder: Path) -> None:
    store = SqliteStore(folder)
    hold = store.acquire_run("run-1")
    for _ in range(30):
        entries = [NewEntry(EntryKind.PROGRESS_SAVED, value=encode("x" * 900))] * 300
        store.append([Append(hold, entries)], sync=False)
        store.checkpoint()
    assert (folder / "journal.db-wal").stat().st_size < 3_000_000
    assert (folder / "journal.db").stat().st_size > 8_000_000
    assert len(store.entries(hold.run)) == 9000
    store.close()


def test_after_closing_everything_says_so(folder: Path) -> None:
    store = SqliteStore(folder)
    store.close()
    assert not store.usable
    for call in (store.checkpoint, store.runs, store.renew_leases):
        with pytest.raises(StoreClosedError):
            call()


# --- forks --------------------------------------------------------------------------------------


def test_a_forked_child_cannot_open_what_its_parent_has_open(
    folder: Path, store: SqliteStore
) -> None:
    """SQLite would take no locks there, and another process might start the log anew under it."""
    assert in_a_forked_child(lambda: SqliteStore(folder)) == "StoreClosedError"
    assert in_a_forked_child(lambda: SqliteStore(folder.with_name("another")).close()) == "fine"
    store.close()
    assert in_a_forked_child(lambda: SqliteStore(folder).close()) == "fine"


def in_a_forked_child(action: Callable[[], object]) -> str:
    """Return the name of what the child raised, or "fine"."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        said = "fine"
        try:
            action()
        except BaseException as error:  # noqa: BLE001 - its name is what is asked for
            said = type(error).__name__
        os.write(writing, said.encode())
        os._exit(0)
    os.close(writing)
    os.waitpid(child, 0)
    said = os.read(reading, 100).decode()
    os.close(reading)
    return said


def test_a_read_does_not_wait_for_one_that_takes_long(store: SqliteStore) -> None:
    store.acquire_run("run-1")
    with store._file._read_mutex:  # as a long read of another thread holds it
        assert [run.name for run in store.runs()] == ["run-1"]
        assert store.run("run-1") is not None


@pytest.mark.parametrize("gone", [1, 700, 4000])
def test_a_file_that_ends_in_the_middle_of_a_page_is_an_error(tmp_path: Path, gone: int) -> None:
    store = SqliteStore(tmp_path)
    run = store.acquire_run("run")
    entries = [NewEntry(EntryKind.TASK_PENDING, facts=b'{"task":"t%d"}' % n) for n in range(200)]
    store.append([Append(run, entries)])
    store.close()
    path = tmp_path / "journal.db"
    path.write_bytes(path.read_bytes()[:-gone])
    with pytest.raises(CorruptionError):
        SqliteStore(tmp_path)
