"""The small locks of a journal's folder, without a database."""

from __future__ import annotations

import os
import sqlite3
import sys
from typing import TYPE_CHECKING

import pytest

from maestro_hive.journal.sqlite_locks import (
    FolderLock,
    Guards,
    Mark,
    Presence,
    inodes,
    open_private,
    sync_fd,
)
from maestro_hive.kernel.clock import ManualClock
from maestro_hive.kernel.errors import FolderError
from tests.programs import Program

if TYPE_CHECKING:
    from pathlib import Path

A, B = b"salts--a", b"salts--b"


class Processes:
    """Presences in a folder, each as one process has it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.lock = FolderLock(folder / "journal.lock")
        self._open: list[Presence] = []

    def start(self) -> Presence:
        self._open.append(Presence(self._folder, FolderLock(self.lock_path)))
        return self._open[-1]

    @property
    def lock_path(self) -> Path:
        return self._folder / "journal.lock"

    def kill(self, presence: Presence) -> None:
        """End it as a kill does: the file stays, and its lock is gone."""
        presence.close(inherited=True)


@pytest.fixture
def processes(tmp_path: Path) -> Processes:
    return Processes(tmp_path)


# --- files ----------------------------------------------------------------------------------------


def test_a_file_is_private_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        os.close(open_private(tmp_path / "file", os.O_CREAT))
    finally:
        os.umask(before)
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o600


def test_a_symbolic_link_in_place_of_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "target").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "target")
    with pytest.raises(FolderError, match="symbolic link"):
        open_private(tmp_path / "link", os.O_CREAT)


def test_a_missing_file_has_no_inode(tmp_path: Path) -> None:
    (tmp_path / "one").touch()
    found = inodes((tmp_path / "one", tmp_path / "two"))
    assert found == ((tmp_path / "one").stat().st_ino, 0)


def test_a_file_is_synced_on_this_platform(tmp_path: Path) -> None:
    fd = open_private(tmp_path / "file", os.O_CREAT)
    sync_fd(fd)
    os.close(fd)
    with pytest.raises(OSError, match="descriptor"):
        sync_fd(fd)


# --- marks ----------------------------------------------------------------------------------------


def test_a_log_with_all_that_was_synced_lost_nothing(processes: Processes) -> None:
    dead, next_one = processes.start(), processes.start()
    dead.note(Mark(A, 10, 0))
    processes.kill(dead)
    assert next_one.lost(A, 10) is None
    assert next_one.lost(A, 12) is None


@pytest.mark.parametrize("frames", [0, 1, 9])
def test_a_log_that_was_cut_is_noticed(processes: Processes, frames: int) -> None:
    dead, next_one = processes.start(), processes.start()
    dead.note(Mark(A, 10, 0))
    processes.kill(dead)
    assert next_one.lost(A, frames) == Mark(A, 10, 0)


def test_a_log_that_is_gone_is_noticed_unless_it_was_copied(processes: Processes) -> None:
    dead, next_one = processes.start(), processes.start()
    dead.note(Mark(A, 10, 0))
    assert next_one.lost(None, 0) == Mark(A, 10, 0)
    dead.note(Mark(A, 10, 10))
    assert next_one.lost(None, 0) is None


def test_the_first_part_of_a_copied_log_is_noticed(processes: Processes) -> None:
    dead, next_one = processes.start(), processes.start()
    dead.note(Mark(A, 10, 10))
    assert next_one.lost(A, 4) == Mark(A, 10, 10)


def test_a_log_that_was_started_again_lost_nothing(processes: Processes) -> None:
    dead, next_one = processes.start(), processes.start()
    dead.note(Mark(A, 10, 10))
    assert next_one.lost(B, 2) is None


def test_the_marks_of_all_processes_count(processes: Processes) -> None:
    one, two, next_one = processes.start(), processes.start(), processes.start()
    one.note(Mark(A, 10, 5))
    two.note(Mark(A, 7, 6))
    assert next_one.lost(A, 8) == Mark(A, 10, 6)


def test_a_process_that_closes_leaves_its_mark_in_the_lock_file(processes: Processes) -> None:
    one, two = processes.start(), processes.start()
    one.note(Mark(A, 10, 3))
    one.leave_mark()
    two.note(Mark(A, 8, 5))
    two.leave_mark()
    one.close()
    two.close()
    assert processes.lock.marks() == [Mark(A, 10, 5)]
    assert processes.start().lost(A, 9) == Mark(A, 10, 5)


def test_an_old_mark_does_not_replace_a_newer_one(processes: Processes) -> None:
    one, two = processes.start(), processes.start()
    one.note(Mark(B, 3, 0))
    one.leave_mark()
    two.note(Mark(A, 90, 90))
    two.leave_mark()
    assert processes.lock.marks() == [Mark(B, 3, 0)]


def test_a_torn_mark_is_no_mark(processes: Processes, tmp_path: Path) -> None:
    dead, next_one = processes.start(), processes.start()
    dead.note(Mark(A, 10, 0))
    (path,) = (tmp_path / "holders").glob(dead.holder.token)
    with path.open("r+b") as file:
        file.seek(9)
        file.write(b"\xff")
    assert next_one.lost(A, 0) is None


def test_foreign_files_among_the_holders_are_left_alone(
    processes: Processes, tmp_path: Path
) -> None:
    one = processes.start()
    (tmp_path / "holders" / ".DS_Store").write_text("x")
    (tmp_path / "holders" / "folder").mkdir()
    assert one.others() == []
    assert one.is_alone()
    one.remove_dead()
    assert (tmp_path / "holders" / ".DS_Store").exists()


# --- liveness -------------------------------------------------------------------------------------


def test_a_process_lives_until_its_lock_is_gone(processes: Processes) -> None:
    one, two = processes.start(), processes.start()
    assert two.lives(one.holder.token)
    assert not two.is_alone()
    processes.kill(one)
    assert not two.lives(one.holder.token)
    assert two.is_alone()
    two.remove_dead()
    assert two.others() == []


@pytest.mark.parametrize("token", ["../journal.lock", "", "nothing", "0" * 16])
def test_a_token_that_no_process_has_is_dead(processes: Processes, token: str) -> None:
    assert not processes.start().lives(token)


def test_the_files_that_living_processes_use_are_known(processes: Processes) -> None:
    one, two, new = processes.start(), processes.start(), processes.start()
    one.use((1, 2, 3, 4))
    two.use((1, 2, 9, 4))
    assert new.files_of_others() == {(1, 2, 3, 4), (1, 2, 9, 4)}
    processes.kill(two)
    assert new.files_of_others() == {(1, 2, 3, 4)}


# --- the clock ------------------------------------------------------------------------------------


def test_all_processes_of_a_boot_share_one_clock(processes: Processes) -> None:
    clock = ManualClock()
    first = processes.lock.clock_offset(clock)
    clock.advance(10)
    clock.jump(3600)  # the wall clock is set
    assert processes.lock.clock_offset(clock) == first
    assert FolderLock(processes.lock_path).clock_offset(clock) == first


def test_after_a_reboot_the_wall_clock_counts(processes: Processes) -> None:
    clock = ManualClock()
    processes.lock.clock_offset(clock)
    clock.jump(3600)
    clock.reboot(60)
    offset = processes.lock.clock_offset(clock)
    assert offset + clock.boot_seconds() == clock.now().timestamp()


# --- guards ---------------------------------------------------------------------------------------


@pytest.mark.skipif(sys.platform != "linux", reason="reads what Linux reports of locks")
def test_guards_keep_another_sqlite_from_deleting_the_log(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    db = sqlite3.connect(path)
    db.execute("PRAGMA journal_mode = wal")
    db.execute("CREATE TABLE t (x)")
    db.execute("INSERT INTO t VALUES (1)")
    db.commit()
    guards = Guards(path, tmp_path / "journal.db-shm")
    guards.lock()
    db.close()  # the last connection: it would delete the log
    assert (tmp_path / "journal.db-wal").stat().st_size > 0
    guards.close()
    sqlite3.connect(path).execute("SELECT * FROM t").connection.close()
    assert not (tmp_path / "journal.db-wal").exists()


def test_guards_see_whether_sqlite_locks_where_they_expect_it(tmp_path: Path) -> None:
    path, index = tmp_path / "journal.db", tmp_path / "journal.db-shm"
    code = """
import sqlite3, sys
db = sqlite3.connect(sys.argv[1])
db.execute("PRAGMA journal_mode = wal")
db.execute("CREATE TABLE t (x)")
print("open", flush=True)
sys.stdin.read()
"""
    with Program(code, path) as program:
        assert program() == "open"
        guards = Guards(path, index)
        assert guards.sqlite_holds()
        assert guards.index_is_used()
        program.end_by_kill()
        assert not guards.sqlite_holds()
        assert not guards.index_is_used()
        guards.close()
