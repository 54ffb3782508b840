"""File locks: they end with their process, however that ends, and no fork carries them away."""

from __future__ import annotations

import gc
import os
import resource
import stat
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from maestro_hive.kernel.errors import FolderError, StorageError, StoreClosedError
from maestro_hive.kernel.files import FileLock, is_locked
from tests.python_processes import PythonProcess, suspend

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

HOLD = """
import os, subprocess, sys
from pathlib import Path
from maestro_hive.kernel.files import FileLock
lock = FileLock(Path(sys.argv[1]))
assert lock.acquire()
lock.write(b"held")
"""
#: Processes wait at their input, so that all of them end with the test.
WAIT = """
print("ready", flush=True)
sys.stdin.read()
"""


@contextmanager
def running(code: str, *args: object) -> Iterator[PythonProcess]:
    """Run ``code`` in a process of its own until the block ends; wait for its first line."""
    with PythonProcess(code, *args) as process:
        assert process.line() == "ready"
        try:
            yield process
        finally:
            process.kill()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run.lock"


@contextmanager
def held(path: Path) -> Iterator[FileLock]:
    lock = FileLock(path)
    try:
        yield lock
    finally:
        lock.close()


# --- one holder ------------------------------------------------------------------------------


def test_only_one_has_it(path: Path) -> None:
    with held(path) as first, held(path) as second:
        assert first.acquire()
        assert not second.acquire()
        assert is_locked(path)
        first.release()
        assert not is_locked(path)
        assert second.acquire()
        assert not first.acquire()


def test_taking_it_twice_is_having_it_once(path: Path) -> None:
    with held(path) as lock, held(path) as other:
        assert lock.acquire()
        assert lock.acquire()
        lock.release()
        assert other.acquire()


def test_a_closed_lock_is_free_and_closing_twice_is_no_error(path: Path) -> None:
    lock = FileLock(path)
    assert lock.acquire()
    lock.close()
    lock.close()
    assert not is_locked(path)


def test_a_forgotten_lock_is_free(path: Path) -> None:
    lock = FileLock(path)
    assert lock.acquire()
    del lock
    gc.collect()
    assert not is_locked(path)


@pytest.mark.parametrize("use", ["acquire", "share", "release"])
def test_a_closed_lock_says_that_it_is_closed(path: Path, use: str) -> None:
    lock = FileLock(path)
    lock.close()
    with pytest.raises(StoreClosedError, match="closed"):
        getattr(lock, use)()


def test_a_shared_lock_keeps_out_who_wants_it_alone_and_is_not_called_locked(path: Path) -> None:
    with held(path) as first, held(path) as second, held(path) as third:
        assert first.share()
        assert second.share()
        assert not third.acquire()
        assert not is_locked(path)
        first.release()
        second.release()
        assert third.acquire()


def test_waiting_ends_when_the_lock_is_free(path: Path) -> None:
    with held(path) as lock, running(HOLD + WAIT, path) as holder:
        started = time.monotonic()
        assert not lock.acquire(0.05)
        assert time.monotonic() - started >= 0.05
        holder.kill()
        assert lock.acquire(30)


def test_waiting_for_a_free_lock_takes_no_time(path: Path) -> None:
    with held(path) as lock:
        assert lock.acquire(0)


# --- the file --------------------------------------------------------------------------------


@pytest.mark.parametrize("umask", [0o000, 0o077])
def test_a_lock_file_is_private(path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        FileLock(path).close()
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_what_the_holder_says_replaces_what_the_last_one_said(path: Path) -> None:
    with held(path) as lock:
        lock.write(b"a longer text about the first")
        lock.write(b"second")
    assert path.read_bytes() == b"second"


def a_folder(path: Path) -> None:
    path.mkdir()


def a_link(path: Path) -> None:
    path.with_name("victim").write_text("theirs")
    path.symlink_to("victim")


def a_link_to_nowhere(path: Path) -> None:
    path.symlink_to("victim")


def a_pipe(path: Path) -> None:
    os.mkfifo(path)


@pytest.mark.parametrize("thing", [a_folder, a_link, a_link_to_nowhere, a_pipe])
def test_what_is_no_regular_file_is_no_lock(path: Path, thing: Callable[[Path], None]) -> None:
    thing(path)
    before = sorted(path.parent.iterdir())
    with pytest.raises(FolderError) as caught:
        FileLock(path)
    assert caught.value.path == path
    assert sorted(path.parent.iterdir()) == before


@pytest.mark.parametrize("thing", [a_folder, a_link, a_link_to_nowhere, a_pipe])
def test_what_is_no_regular_file_is_not_locked_and_nobody_waits_for_it(
    path: Path, thing: Callable[[Path], None]
) -> None:
    thing(path)
    assert not is_locked(path)


def test_a_lock_that_cannot_be_made_is_a_folder_error(tmp_path: Path) -> None:
    with pytest.raises(FolderError):
        FileLock(tmp_path / "missing" / "run.lock")


def test_a_missing_lock_file_is_not_locked_and_not_made(path: Path) -> None:
    assert not is_locked(path)
    assert not path.exists()


# --- between processes -----------------------------------------------------------------------


def test_another_process_is_kept_out_until_the_holder_is_killed(path: Path) -> None:
    with held(path) as lock, running(HOLD + WAIT, path) as holder:
        assert not lock.acquire()
        assert is_locked(path)
        assert path.read_bytes() == b"held"
        holder.kill()
        holder.wait()
        assert not is_locked(path)
        assert lock.acquire()


def test_a_stopped_holder_keeps_it_and_nobody_waits_for_ever(path: Path) -> None:
    with held(path) as lock, running(HOLD + WAIT, path) as holder:
        suspend(holder.pid)
        assert not lock.acquire(0.05)
        assert is_locked(path)


def test_a_child_that_outlives_the_holder_does_not_keep_the_lock(path: Path) -> None:
    child = """
if os.fork() == 0:
    print("ready", flush=True)
    sys.stdin.read()
    os._exit(0)
"""
    with held(path) as lock, running(HOLD + child + "sys.stdin.read()", path) as holder:
        assert not lock.acquire()
        holder.kill()
        holder.wait()
        assert lock.acquire()


def test_a_child_that_ends_does_not_free_the_lock(path: Path) -> None:
    child = """
if os.fork() == 0:
    sys.exit(0)
os.wait()
"""
    with held(path) as lock, running(HOLD + child + WAIT, path):
        assert not lock.acquire()


def test_a_child_that_releases_does_not_free_the_lock(path: Path) -> None:
    child = """
if os.fork() == 0:
    try:
        lock.release()
    except Exception as error:
        os._exit(0 if type(error).__name__ == "StoreClosedError" else 2)
    os._exit(1)
assert os.waitstatus_to_exitcode(os.wait()[1]) == 0
"""
    with held(path) as lock, running(HOLD + child + WAIT, path):
        assert not lock.acquire()


def test_a_program_started_by_the_holder_does_not_keep_the_lock(path: Path) -> None:
    program = "subprocess.Popen(['cat'], close_fds=False)"
    with held(path) as lock, running(HOLD + program + WAIT, path) as holder:
        holder.kill()
        holder.wait()
        assert lock.acquire()


PROBE = """
import sys
from pathlib import Path
from maestro_hive.kernel.files import is_locked
print("ready", flush=True)
while True:
    is_locked(Path(sys.argv[1]))
"""


def test_looking_at_a_lock_keeps_nobody_from_acquiring_it(path: Path) -> None:
    with held(path) as lock, running(PROBE, path):
        end = time.monotonic() + 1
        while time.monotonic() < end:
            assert lock.acquire(30)
            lock.release()


ADD_ONE = """
import sys
from pathlib import Path
from maestro_hive.kernel.files import FileLock
path = Path(sys.argv[1])
lock = FileLock(path)
counter = path.with_name("counter")
for _ in range(100):
    assert lock.acquire(60)
    counter.write_text(str(int(counter.read_text()) + 1))
    lock.release()
"""


def test_four_processes_count_together_and_lose_nothing(path: Path) -> None:
    path.with_name("counter").write_text("0")
    workers = [PythonProcess(ADD_ONE, path) for _ in range(4)]
    for worker in workers:
        worker.communicate(timeout=60)
    assert [worker.wait() for worker in workers] == [0] * 4
    assert path.with_name("counter").read_text() == "400"


def test_a_living_process_is_not_taken_for_dead_when_no_more_files_can_be_opened(
    tmp_path: Path,
) -> None:
    path = tmp_path / "lock"
    lock = FileLock(path)
    assert lock.acquire(timeout=1)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        with pytest.raises(StorageError, match="whether its process lives is unknown"):
            is_locked(path)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert is_locked(path)
    lock.close()


# --- shared locks, and locks on folders ------------------------------------------------------


def test_a_lock_is_shared_by_some_or_held_by_one(tmp_path: Path) -> None:
    one, two = FileLock(tmp_path / "lock"), FileLock(tmp_path / "lock", create=False)
    assert one.share(0)
    assert two.share(0)
    assert not one.acquire(0.01)
    assert two.share(0)  # an upgrade that fails has released the share of the other only
    two.release()
    assert one.acquire(0)
    assert not two.share(0.01)
    one.close()
    assert two.share(0)
    two.close()


def test_a_lock_file_that_must_exist_is_not_created(tmp_path: Path) -> None:
    with pytest.raises(FolderError, match="No such file"):
        FileLock(tmp_path / "lock", create=False)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_is_locked_itself_and_not_changed(tmp_path: Path) -> None:
    with held(tmp_path / "file"):
        pass
    one, two = FileLock(tmp_path, create=False), FileLock(tmp_path, create=False)
    assert one.acquire()
    assert not two.acquire()
    one.close()
    assert two.acquire()
    two.close()
    assert [each.name for each in tmp_path.iterdir()] == ["file"]
