"""JSON copies of runs: when they are written, which one counts, and a journal that is lost."""

from __future__ import annotations

import json
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time
import tracemalloc
from typing import TYPE_CHECKING, Any

import pytest

from maestro_hive.journal import copies as module
from maestro_hive.journal import transfer
from maestro_hive.journal.checkpoints import CheckpointFolder, CheckpointName, new_checkpoint_id
from maestro_hive.journal.copies import Copies, CopyFolder
from maestro_hive.journal.maintenance import purge
from maestro_hive.journal.run_document import RunText, take_copy
from maestro_hive.journal.store import open_store
from maestro_hive.kernel.errors import (
    AtomicWriteError,
    ConfigurationError,
    DocumentCorruptError,
    FolderError,
    InvalidIdentifierError,
    UnknownRunError,
)
from tests.journal import recorded as runs
from tests.journal.conftest import opened

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from maestro_hive.journal.store import RunLease, Store

SECONDS = 30.0


def eventually(holds: Callable[[], bool]) -> bool:
    """Return whether something holds within some seconds: a thread has to be waited for."""
    until = time.monotonic() + SECONDS
    while not holds():
        if time.monotonic() > until:
            return False
        time.sleep(0.005)
    return True


@pytest.fixture
def copies(store: Store, copy_folder: CopyFolder) -> Iterator[Copies]:
    made = Copies(store, copy_folder, first_after=0)
    yield made
    made.close()


def body_of(folder: CopyFolder, run_id: str = "r") -> dict[str, Any]:
    found: dict[str, Any] = json.loads(folder.state_path(run_id).read_bytes())["document"]
    return found


def checkpoints(folder: CopyFolder, run_id: str = "r") -> list[str]:
    return [each.checkpoint_id for each in folder.checkpoints.names(run_id)]


def copied(store: Store, folder: CopyFolder, name: str = "r", *, steps: int = 3) -> RunLease:
    run = runs.recorded(store, name, steps, is_ended=False)
    made = Copies(store, folder)
    made.released(run.number)
    made.close()
    return run


# --- when they are written ------------------------------------------------------------------------


def test_a_run_that_changes_is_copied_while_it_is_executed(
    store: Store, copies: Copies, copy_folder: CopyFolder
) -> None:
    run = runs.start(store, "r")
    runs.complete(store, run, 1)
    copies.changed(run.number)
    assert eventually(lambda: len(checkpoints(copy_folder)) == 1)
    assert body_of(copy_folder)["steps_completed"] == 1
    assert body_of(copy_folder)["status"] == "running"
    assert checkpoints(copy_folder)[0].startswith("auto_")


def test_copies_are_written_at_the_interval_while_something_changes(
    store: Store, copy_folder: CopyFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_REST_FACTOR", 0)
    copies = Copies(store, copy_folder, interval=0.02, first_after=0)
    run = runs.start(store, "r")

    def changes() -> bool:
        copies.changed(run.number)
        return len(checkpoints(copy_folder)) >= 4

    assert eventually(changes)
    copies.close()


def test_the_last_change_is_copied_although_nothing_follows_it(
    store: Store, copy_folder: CopyFolder
) -> None:
    copies = Copies(store, copy_folder, interval=0.3, first_after=0)
    run = runs.start(store, "r")
    before = time.monotonic()
    copies.changed(run.number)
    assert eventually(lambda: len(checkpoints(copy_folder)) == 1)
    runs.complete(store, run, 1)
    copies.changed(run.number)
    assert eventually(lambda: len(checkpoints(copy_folder)) == 2)
    assert time.monotonic() - before >= 0.3, "at the interval, and not at once"
    assert body_of(copy_folder)["steps_completed"] == 1
    copies.close()


def test_a_run_that_ends_at_once_is_copied_once_at_its_end(
    store: Store, copy_folder: CopyFolder
) -> None:
    copies = Copies(store, copy_folder, first_after=60)
    run = runs.start(store, "r")
    copies.changed(run.number)
    runs.end(store, run)
    copies.changed(run.number)
    copies.released(run.number)
    assert eventually(lambda: copy_folder.state_path("r").exists())
    copies.close()
    assert body_of(copy_folder)["status"] == "success"
    assert checkpoints(copy_folder) == []


def test_without_an_interval_a_run_is_copied_at_its_end_alone(
    store: Store, copy_folder: CopyFolder
) -> None:
    copies = Copies(store, copy_folder, interval=0)
    run = runs.start(store, "r")
    copies.changed(run.number)
    copies.close()
    assert not copy_folder.has_copies("r")
    copies = Copies(store, copy_folder, interval=0)
    copies.released(run.number)
    copies.close()
    assert copy_folder.state_path("r").exists()
    assert checkpoints(copy_folder) == []


def test_a_copy_that_is_due_later_does_not_delay_one_that_is_due_now(
    store: Store, copy_folder: CopyFolder
) -> None:
    copies = Copies(store, copy_folder, first_after=60)
    later, now = runs.start(store, "later"), runs.recorded(store, "now")
    copies.changed(later.number)
    copies.released(now.number)
    assert eventually(lambda: copy_folder.state_path("now").exists())
    assert not copy_folder.has_copies("later")
    copies.close()


def test_what_is_due_later_is_written_when_copies_are_closed(
    store: Store, copy_folder: CopyFolder
) -> None:
    copies = Copies(store, copy_folder, first_after=60)
    copies.changed(runs.start(store, "r").number)
    copies.close()
    assert copy_folder.state_path("r").exists()


def test_a_death_in_the_first_minute_leaves_a_copy_to_resume_from(folder: Path) -> None:
    program = """
import os, sys, time
from pathlib import Path
from maestro_hive.journal.copies import Copies, CopyFolder
from maestro_hive.journal.store import open_store
from tests.journal import recorded as runs
store = open_store(sys.argv[1])
copies = Copies(store, CopyFolder(Path(sys.argv[1])), first_after=0)
run = runs.start(store, "r")
runs.complete(store, run, 1, "paid for")
copies.changed(run.number)
while not list((Path(sys.argv[1]) / "checkpoints" / "r").glob("*.json")):
    time.sleep(0.01)
os.kill(os.getpid(), 9)
"""
    ended = subprocess.run([sys.executable, "-c", program, str(folder)], check=False, timeout=60)
    assert ended.returncode == -signal.SIGKILL
    lose_journal(folder)
    found = CopyFolder(folder).newest("r")
    assert found is not None
    assert found.copy.steps_completed == 1


def test_a_process_killed_while_it_writes_leaves_the_previous_copy(folder: Path) -> None:
    """The last thing that the process does is half of the write of a copy."""
    program = """
import os, sys
from pathlib import Path
from maestro_hive.journal.copies import Copies, CopyFolder
from maestro_hive.journal.store import open_store
from tests.journal import recorded as runs
store = open_store(sys.argv[1])
copies = Copies(store, CopyFolder(Path(sys.argv[1])), first_after=0)
run = runs.start(store, "r")
runs.complete(store, run, 1)
copies.checkpoint("r", "first")
write = os.write
def half(fd, data):
    write(fd, data[: len(data) // 2])
    os.kill(os.getpid(), 9)
os.write = half
runs.complete(store, run, 2)
copies.checkpoint("r", sys.argv[2])
"""
    for checkpoint_id in ("second", "first"):
        command = [sys.executable, "-c", program, str(folder), checkpoint_id]
        ended = subprocess.run(command, check=False, timeout=60)
        assert ended.returncode == -signal.SIGKILL
        found = CopyFolder(folder).newest("r")
        assert found is not None
        assert (found.damaged, found.copy.steps_completed) == ((), 1)
        shutil.rmtree(folder)


def test_processes_killed_while_they_copy_leave_no_damaged_copy(folder: Path) -> None:
    program = """
import sys
from pathlib import Path
from maestro_hive.journal import copies as module
from maestro_hive.journal.copies import Copies, CopyFolder
from maestro_hive.journal.store import open_store
from tests.journal import recorded as runs
module._REST_FACTOR = 0
store = open_store(sys.argv[1])
copies = Copies(store, CopyFolder(Path(sys.argv[1])), first_after=0, interval=0.0001)
run = runs.start(store, "r")
step = 0
while True:
    step += 1
    runs.complete(store, run, step, "x" * 1000)
    copies.changed(run.number)
"""
    copy_folder = CopyFolder(folder)
    newest: CheckpointName | None = None
    for _ in range(8):
        process = subprocess.Popen([sys.executable, "-c", program, str(folder)])

        def is_newer(than: CheckpointName | None = newest) -> bool:
            names = copy_folder.checkpoints.names("r")
            return len(names) > 3 and names[-1] != than

        assert eventually(is_newer)
        process.kill()
        process.wait()
        newest = copy_folder.checkpoints.names("r")[-1]
        found = copy_folder.newest("r")
        assert found is not None
        assert found.damaged == ()
        assert (found.copy.fence, found.copy.seq) >= (newest.fence, newest.seq)
        assert list(copy_folder.damaged()) == []


# --- the thread -----------------------------------------------------------------------------------


def test_after_a_copy_that_failed_the_next_ones_are_written(
    store: Store, copy_folder: CopyFolder, caplog: pytest.LogCaptureFixture
) -> None:
    copies = Copies(store, copy_folder)
    blocked, other = runs.recorded(store, "blocked"), runs.recorded(store, "other")
    copy_folder.state_path("blocked").mkdir(parents=True)
    copies.released(blocked.number)
    copies.released(other.number)
    assert eventually(lambda: copy_folder.state_path("other").exists())
    assert "a copy could not be written" in caplog.text
    with pytest.raises(AtomicWriteError, match=r"execution_state\.json was not written"):
        copies.close()
    copies.close()


def test_an_error_is_forgotten_when_the_run_is_copied_after_all(
    store: Store, copy_folder: CopyFolder, caplog: pytest.LogCaptureFixture
) -> None:
    copies = Copies(store, copy_folder)
    run = runs.recorded(store)
    copy_folder.state_path("r").mkdir(parents=True)
    copies.released(run.number)
    assert eventually(lambda: "could not be written" in caplog.text and not copies.waiting())
    copy_folder.state_path("r").rmdir()
    copies.released(run.number)
    copies.close()
    assert body_of(copy_folder)["steps_completed"] == 3


def test_copies_that_the_end_does_not_wait_for_are_counted_in_one_line(
    store: Store, copy_folder: CopyFolder, caplog: pytest.LogCaptureFixture
) -> None:
    copies = Copies(store, copy_folder)
    with copy_folder.locked(purging=True):
        for name in "abc":
            copies.released(runs.recorded(store, name).number)
        copies.close(0.01)
    assert [each.getMessage() for each in caplog.records] == [
        f"{store.place}: 3 runs have no new JSON copy, for lack of time; the journal has them"
    ]


def test_a_run_over_the_limit_is_named_once_and_is_no_error(
    store: Store, copy_folder: CopyFolder, caplog: pytest.LogCaptureFixture
) -> None:
    copies = Copies(store, copy_folder, limit=100)
    run = runs.recorded(store)
    copies.released(run.number)
    copies.released(run.number)
    copies.close()
    assert [each.getMessage()[:20] for each in caplog.records] == ["run 'r' has more tha"]
    assert not copy_folder.has_copies("r")


def test_what_waits_to_be_copied_takes_the_memory_of_a_number(
    store: Store, copy_folder: CopyFolder
) -> None:
    copies = Copies(store, copy_folder)
    with copy_folder.locked(purging=True):
        tracemalloc.start()
        for number in range(100_000, 150_000):
            copies.changed(number)
            copies.released(number)
        taken, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert copies.waiting() >= 50_000
        assert taken < 1 << 20
        copies.close(0)


def test_an_idle_thread_is_not_woken(store: Store, copy_folder: CopyFolder) -> None:
    others = set(threading.enumerate())  # of stores that other tests have not closed
    copies = Copies(store, copy_folder)
    copies.released(runs.recorded(store).number)
    assert eventually(lambda: copy_folder.state_path("r").exists() and not copies.waiting())
    (thread,) = {each for each in threading.enumerate() if each.name == "maestro-copies"} - others
    status = f"/proc/self/task/{thread.native_id}/status"

    def switches() -> int:
        with open(status) as lines:  # noqa: PTH123 - of the kernel
            return sum(int(line.split()[1]) for line in lines if "ctxt_switches" in line)

    eventually(lambda: thread_rests(status))
    before = switches()
    time.sleep(0.5)
    assert switches() - before <= 2, "it may still end its rest"
    copies.close()


def thread_rests(status: str) -> bool:
    with open(status) as lines:  # noqa: PTH123 - of the kernel
        return "State:\tS" in lines.read()


# --- purge ----------------------------------------------------------------------------------------


def test_a_copy_waits_for_a_purge_and_finds_its_run_gone(
    store: Store, copy_folder: CopyFolder
) -> None:
    run = runs.recorded(store)
    copies = Copies(store, copy_folder)
    with copy_folder.locked(purging=True):
        copies.released(run.number)
        store.db.write(lambda tx: tx("DELETE FROM runs"), sync=True)
    copies.close()
    assert not copy_folder.has_copies("r")


def test_a_purge_waits_for_a_copy_that_is_being_written(
    store: Store, copy_folder: CopyFolder
) -> None:
    runs.recorded(store)
    purging = threading.Thread(target=purge, args=(store, ["r"], copy_folder))
    with copy_folder.locked():
        purging.start()
        purging.join(0.2)
        assert purging.is_alive()
        copy_folder.write_state(RunText("r", 1, 1, b"the last one"))
    purging.join()
    assert not copy_folder.has_copies("r")


def test_a_run_that_is_purged_while_it_is_read_has_no_copy(
    store: Store, copy_folder: CopyFolder
) -> None:
    """By a process that has another folder for its copies, and so no lock of this one."""
    run = runs.recorded(store)
    row = store.find("r")
    purge(store, ["r"])
    with pytest.raises(UnknownRunError):
        take_copy(store, row)
    copies = Copies(store, copy_folder)
    copies.released(run.number)
    copies.close()
    assert not copy_folder.has_copies("r")


def test_runs_on_a_server_have_copies_in_a_folder_of_their_own(tmp_path: Path) -> None:
    folder = CopyFolder(tmp_path / "copies")
    with opened("postgres", tmp_path) as store:
        copied(store, folder)
    found = folder.newest("r")
    assert found is not None
    with opened("file", tmp_path) as store:
        assert transfer.add_run(store, found.copy, found.source)
        assert runs.texts(store, "r")[-1] == "step 3, attempt 1 completed"


# --- which one counts -----------------------------------------------------------------------------


def lose_journal(folder: Path) -> None:
    for path in [*folder.glob("journal*"), folder / "holders"]:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


def test_a_folder_that_has_only_copies_resumes_from_the_newest(
    folder: Path, copy_folder: CopyFolder
) -> None:
    store = open_store(folder)
    run = runs.start(store, "r")
    copies = Copies(store, copy_folder)
    runs.complete(store, run, 1)
    copies.checkpoint("r", "first")
    runs.complete(store, run, 2)
    copies.released(run.number)
    copies.close()
    store.db.close()
    lose_journal(folder)
    assert copy_folder.run_ids() == ["r"]
    store = open_store(folder)
    found = copy_folder.newest("r")
    assert found is not None
    assert found.source.endswith("execution_state.json")
    assert transfer.add_run(store, found.copy, found.source)
    assert not transfer.add_run(store, found.copy, found.source), "another process was faster"
    assert runs.texts(store, "r")[-1] == "step 2, attempt 1 completed"
    row = store.find("r")
    assert (row.status, row.fence > found.copy.fence) == ("stopped", True)
    store.db.close()


def test_a_checkpoint_that_is_newer_than_the_state_counts(
    store: Store, copy_folder: CopyFolder
) -> None:
    run = copied(store, copy_folder, steps=1)
    assert copy_folder.newest("r") is not None
    run = runs.start(store, "r")
    runs.complete(store, run, 2)
    Copies(store, copy_folder).checkpoint("r", "newer")
    found = copy_folder.newest("r")
    assert found is not None
    assert "newer" in found.source
    assert found.copy.steps_completed == 2


@pytest.mark.parametrize("place", ["state", "checkpoint"])
def test_a_torn_newest_copy_is_named_and_set_aside(
    store: Store, copy_folder: CopyFolder, caplog: pytest.LogCaptureFixture, place: str
) -> None:
    run = runs.start(store, "r")
    copies = Copies(store, copy_folder)
    runs.complete(store, run, 1)
    copies.checkpoint("r", "older")
    runs.complete(store, run, 2)
    if place == "checkpoint":
        copies.checkpoint("r", "newest")
        torn = copy_folder.checkpoints.path("r", copy_folder.checkpoints.names("r")[-1])
    else:
        copies.released(run.number)
        copies.close()
        torn = copy_folder.state_path("r")
    torn.write_bytes(torn.read_bytes()[:-100])
    found = copy_folder.newest("r")
    assert found is not None
    assert "older" in found.source
    (error,) = found.damaged
    assert str(torn) in str(error)
    assert error.moved_to == torn.with_name(f"{torn.name}.damaged-1")
    assert error.moved_to.exists()
    assert not torn.exists()
    assert "cannot be trusted" in caplog.text


def test_a_run_whose_copies_are_all_damaged_does_not_start_over(
    store: Store, copy_folder: CopyFolder
) -> None:
    copied(store, copy_folder)
    path = copy_folder.state_path("r")
    path.write_bytes(b"{}")
    for _ in range(2):
        with pytest.raises(DocumentCorruptError, match="no sound copy of run 'r' is left"):
            copy_folder.newest("r")
    path.with_name(f"{path.name}.damaged-1").unlink()
    assert copy_folder.newest("r") is None


def test_a_copy_of_another_run_is_not_taken_for_one_of_this(
    store: Store, copy_folder: CopyFolder, caplog: pytest.LogCaptureFixture
) -> None:
    copied(store, copy_folder)
    target = copy_folder.state_path("s")
    target.parent.mkdir()
    shutil.copy(copy_folder.state_path("r"), target)
    with pytest.raises(DocumentCorruptError, match="no sound copy of run 's' is left"):
        copy_folder.newest("s")
    assert "it is a copy of run 'r'" in caplog.text


def test_a_run_continues_from_a_checkpoint(store: Store, copy_folder: CopyFolder) -> None:
    run = runs.start(store, "r")
    runs.complete(store, run, 1)
    copies = Copies(store, copy_folder)
    copies.checkpoint("r", "good")
    runs.complete(store, run, 2)
    runs.end(store, run)
    found = copy_folder.checkpoint("r", "good")
    transfer.restore_run(store, found.copy, found.source)
    assert runs.texts(store, "r")[-1] == "step 1, attempt 1 completed"
    assert store.find("r").status == "stopped"
    assert runs.start(store, "r").seq == 10
    with pytest.raises(ConfigurationError, match="has no checkpoint 'bad'; there are good"):
        copy_folder.checkpoint("r", "bad")


def test_a_child_has_copies_of_its_own_below_those_of_its_parent(
    store: Store, copy_folder: CopyFolder
) -> None:
    child = copied(store, copy_folder, "r/work.0123456789")
    assert child.name == "r/work.0123456789"
    path = copy_folder.state_path(child.name)
    assert path.parent.parent == copy_folder.state_path("r").parent
    found = copy_folder.newest(child.name)
    assert found is not None
    assert copy_folder.newest("r") is None


# --- files ----------------------------------------------------------------------------------------


def test_copies_are_private_and_follow_no_links(
    store: Store, copy_folder: CopyFolder, tmp_path: Path
) -> None:
    copied(store, copy_folder)
    path = copy_folder.state_path("r")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    outside = tmp_path / "outside"
    shutil.copytree(path.parent, outside)
    shutil.rmtree(path.parent)
    path.parent.symlink_to(outside)
    with pytest.raises(FolderError, match="is a symbolic link"):
        copy_folder.newest("r")
    copies = Copies(store, copy_folder)
    before = (outside / "execution_state.json").stat().st_mtime_ns
    copies.released(store.find("r").number)
    with pytest.raises(FolderError, match="is a symbolic link"):
        copies.close()
    assert (outside / "execution_state.json").stat().st_mtime_ns == before


@pytest.mark.parametrize("run_id", ["../x", "/x", "", "a//b", "a/../b", "a\0b", "a\nb", "x" * 200])
def test_names_that_lead_elsewhere_are_refused(copy_folder: CopyFolder, run_id: str) -> None:
    for use in (copy_folder.newest, copy_folder.has_copies, copy_folder.remove):
        with pytest.raises(InvalidIdentifierError):
            use(run_id)
    with pytest.raises(InvalidIdentifierError):
        copy_folder.write_state(RunText(run_id, 1, 1, b"{}"))


def test_retention_deletes_automatic_ones_first_and_opens_none(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path, most=3)
    requested = ["one", "two"]
    for number, each in enumerate(requested, 1):
        folder.write("w", CheckpointName(1, number, each), b"not even JSON", 0)
    automatic = [new_checkpoint_id(number, "auto_") for number in range(3, 8)]
    for number, each in enumerate(automatic, 3):
        folder.write("w", CheckpointName(1, number, each), b"", 0)
    assert [each.checkpoint_id for each in folder.names("w")] == [*requested, automatic[-1]]
    folder.write("w", CheckpointName(1, 8, "three"), b"", 0)
    assert [each.checkpoint_id for each in folder.names("w")] == [*requested, "three"]
    again = new_checkpoint_id(9, "auto_")
    folder.write("w", CheckpointName(1, 9, again), b"", 0)
    assert [each.checkpoint_id for each in folder.names("w")] == ["two", "three", again]


def test_a_checkpoint_of_the_same_id_is_replaced_and_expired_ones_go(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    folder.write("w", CheckpointName(1, 1, "short", expires=100), b"", 0)
    folder.write("w", CheckpointName(1, 2, "same"), b"", 0)
    folder.write("w", CheckpointName(1, 3, "same"), b"", 0)
    assert [each.seq for each in folder.names("w")] == [1, 3]
    folder.write("w", CheckpointName(2, 1, "last"), b"", 200)
    assert [each.checkpoint_id for each in folder.names("w")] == ["same", "last"]


def test_a_late_checkpoint_of_a_process_that_was_taken_over_is_not_the_newest(
    tmp_path: Path,
) -> None:
    folder = CheckpointFolder(tmp_path)
    folder.write("w", CheckpointName(5, 1, "new"), b"", 0)
    folder.write("w", CheckpointName(4, 900, "late"), b"", 0)
    assert folder.names("w")[-1].checkpoint_id == "new"


def test_checkpoints_of_one_moment_do_not_overwrite_each_other(
    store: Store, copy_folder: CopyFolder
) -> None:
    runs.recorded(store)
    copies = Copies(store, copy_folder)
    made = {copies.checkpoint("r") for _ in range(5)}
    assert set(checkpoints(copy_folder)) == made
    assert len(made) == 5
