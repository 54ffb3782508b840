"""A log that lost its end in a crash is sound; one that lost its middle is damaged, and says so."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import apsw
import pytest

from maestro_hive.maestro.state.codec import encode
from maestro_hive.maestro.state.records import EntryKind, NewEntry
from maestro_hive.maestro.state.sqlite import wal
from maestro_hive.maestro.state.sqlite.store import SqliteStore
from maestro_hive.maestro.state.sqlite.wal import DamagedJournalWarning, recorded_damage
from maestro_hive.maestro.state.store import Append
from maestro_hive.testing import ManualClock

if TYPE_CHECKING:
    from maestro_hive.maestro.state.store import RunLease

PAGE = 4096
FRAME = 24 + PAGE
TASKS = 12


def add_tasks(store: SqliteStore, hold: RunLease, count: int) -> None:
    for _ in range(count):
        entry = NewEntry(EntryKind.PROGRESS_SAVED, value=encode("x" * 500))
        (written,) = store.append([Append(hold, [entry])])
        assert written == store.entries(hold.run, after=hold.seq - 1)


def copy_as_a_crash_leaves_it(source: Path, target: Path) -> Path:
    """Copy a journal whose store is open: what is in its log is not in the database yet."""
    target.mkdir(mode=0o700)
    for name in ("journal.db", "journal.db-wal"):
        shutil.copy(source / name, target / name)
    return target


@pytest.fixture
def crashed(tmp_path: Path) -> Path:
    """The folder of a new journal with everything in its log."""
    store = SqliteStore(tmp_path / "original")
    add_tasks(store, store.acquire_run("run-1"), TASKS)
    folder = copy_as_a_crash_leaves_it(tmp_path / "original", tmp_path / "crashed")
    store.close()
    return folder


@pytest.fixture
def crashed_later(tmp_path: Path) -> Path:
    """The folder of a journal that was checkpointed, so that the log has an older generation."""
    store = SqliteStore(tmp_path / "original")
    hold = store.acquire_run("run-1")
    add_tasks(store, hold, 3 * TASKS)
    store.checkpoint()
    add_tasks(store, hold, TASKS)
    folder = copy_as_a_crash_leaves_it(tmp_path / "original", tmp_path / "crashed")
    store.close()
    return folder


def log_of(folder: Path) -> Path:
    return folder / "journal.db-wal"


def frames(folder: Path) -> int:
    size = log_of(folder).stat().st_size - 32
    assert size % FRAME == 0
    return size // FRAME


def flip(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 0x40]))


def flip_frame(folder: Path, number: int) -> None:
    flip(log_of(folder), 32 + number * FRAME + 24 + 1000)


def tasks_in(folder: Path) -> int:
    """Open the store, expecting no warning, and count the entries of its run."""
    store = SqliteStore(folder)
    try:
        assert store.damage == ()
        run = store.run("run-1")
        return len(store.entries(run.id)) if run else 0
    finally:
        store.close()


# --- the log by itself --------------------------------------------------------------------------


def commits(folder: Path, first: int) -> int:
    """Count the frames from number ``first`` on that end a commit: those that name a size."""
    log = log_of(folder).read_bytes()
    return sum(
        log[at + 4 : at + 8] != bytes(4) for at in range(32 + first * FRAME, len(log), FRAME)
    )


def test_half_a_transaction_that_the_next_one_wrote_over_is_nothing_lost(crashed: Path) -> None:
    """A kill leaves frames without a commit; another process then writes over the first of them."""
    log = log_of(crashed)
    count = frames(crashed)
    data = bytearray(log.read_bytes())
    for number in range(count - 5, count):  # the rest of a large transaction that was killed
        data[32 + number * FRAME + 4 : 32 + number * FRAME + 8] = bytes(4)
    data[32 + (count - 5) * FRAME + 100] ^= 1
    log.write_bytes(data)
    assert wal.lost_commits(log, count - 5, PAGE) == 0


def test_a_sound_log_lost_nothing(crashed: Path) -> None:
    count = frames(crashed)
    assert count > TASKS
    assert wal.lost_commits(log_of(crashed), count, PAGE) == 0


def test_a_sound_log_that_ends_in_half_a_transaction_lost_nothing(crashed: Path) -> None:
    for recovered in range(frames(crashed)):
        assert wal.lost_commits(log_of(crashed), recovered, PAGE) == 0


def test_a_torn_last_frame_is_nothing_lost(crashed: Path) -> None:
    count = frames(crashed)
    log = log_of(crashed)
    whole = log.read_bytes()
    for cut in (1, 24, 1000, FRAME - 1):
        log.write_bytes(whole[:-cut])
        assert wal.lost_commits(log, count - 1, PAGE) == 0
    log.write_bytes(whole[:-1000] + bytes(1000))
    assert wal.lost_commits(log, count - 1, PAGE) == 0


def test_what_follows_a_flipped_frame_is_lost(crashed: Path) -> None:
    count = frames(crashed)
    for number in (0, 1, count // 2, count - 2):
        flip_frame(crashed, number)
        assert wal.lost_commits(log_of(crashed), number, PAGE) == commits(crashed, number + 1)
        flip_frame(crashed, number)


@pytest.mark.parametrize("at", [0, 5, 12, 17, 25])
def test_everything_behind_a_damaged_header_is_lost(crashed: Path, at: int) -> None:
    flip(log_of(crashed), at)
    assert wal.lost_commits(log_of(crashed), 0, PAGE) == commits(crashed, 0) > 0


@pytest.mark.parametrize("content", [None, b"", b"\0" * 32, b"\0" * 50_000, b"x" * 31])
def test_no_log_lost_nothing(tmp_path: Path, content: bytes | None) -> None:
    log = tmp_path / "journal.db-wal"
    if content is not None:
        log.write_bytes(content)
    assert wal.lost_commits(log, 0, PAGE) == 0


def test_frames_of_an_older_generation_are_not_missed(crashed_later: Path) -> None:
    db = apsw.Connection(str(crashed_later / "journal.db"))
    db.pragma("user_version")
    recovered, _ = db.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_NOOP)
    db.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 1)
    assert 0 < recovered < frames(crashed_later)
    assert wal.lost_commits(log_of(crashed_later), recovered, PAGE) == 0
    db.close()


# --- through the store --------------------------------------------------------------------------


def test_after_a_crash_everything_is_there(crashed: Path) -> None:
    assert tasks_in(crashed) == TASKS


def test_after_a_crash_in_a_later_generation_everything_is_there(crashed_later: Path) -> None:
    assert tasks_in(crashed_later) == 4 * TASKS


@pytest.mark.parametrize("cut", [1, 24, 2000, FRAME - 1, FRAME])
def test_a_torn_end_costs_the_last_transaction_and_no_alarm(crashed: Path, cut: int) -> None:
    log = log_of(crashed)
    log.write_bytes(log.read_bytes()[:-cut])
    assert tasks_in(crashed) == TASKS - 1


def open_damaged(folder: Path) -> SqliteStore:
    with pytest.warns(DamagedJournalWarning, match=r"log is damaged.*copied to") as caught:
        store = SqliteStore(folder, clock=ManualClock())
    assert len(caught) == 1
    return store


@pytest.mark.parametrize("later", [False, True])
def test_a_flipped_middle_is_reported_and_kept_and_the_rest_is_used(
    request: pytest.FixtureRequest, later: bool
) -> None:
    folder: Path = request.getfixturevalue("crashed_later" if later else "crashed")
    flip_frame(folder, 8 if later else frames(folder) - 4)
    damaged = log_of(folder).read_bytes()
    store = open_damaged(folder)
    (damage,) = store.damage
    assert damage.file == str(folder / "journal.db")
    assert damage.found_at == store.clock.now()
    assert "commit(s)" in damage.reason
    kept = folder / "damaged" / damage.moved_to.rpartition("/")[2]
    assert str(kept) == damage.moved_to
    assert kept.read_bytes() == damaged
    assert kept.stat().st_mode & 0o777 == 0o600
    hold = store.acquire_run("run-1")
    assert 0 < hold.seq < (4 if later else 1) * TASKS
    add_tasks(store, hold, 1)
    assert len(store.entries(hold.run)) == hold.seq
    assert store.check() == []
    (told,) = recorded_damage(folder)
    assert damage.reason in told
    store.close()
    assert tasks_in(folder) == hold.seq  # and the next opening has nothing new to report


@pytest.mark.parametrize("later", [False, True])
def test_a_damaged_header_is_reported_and_kept(request: pytest.FixtureRequest, later: bool) -> None:
    folder: Path = request.getfixturevalue("crashed_later" if later else "crashed")
    flip(log_of(folder), 17)
    damaged = log_of(folder).read_bytes()
    store = open_damaged(folder)
    (damage,) = store.damage
    assert (folder / "damaged" / damage.moved_to.rpartition("/")[2]).read_bytes() == damaged
    add_tasks(store, store.acquire_run("run-2"), 1)
    store.close()


def test_a_note_about_damage_that_is_damaged_itself_is_told_too(crashed: Path) -> None:
    flip_frame(crashed, frames(crashed) - 4)
    open_damaged(crashed).close()
    (note,) = (crashed / "damaged").glob("*.json")
    flip(note, 30)
    (told,) = recorded_damage(crashed)
    assert note.name in told


def test_a_log_whose_database_is_gone_is_kept(crashed: Path) -> None:
    (crashed / "journal.db").unlink()
    log = log_of(crashed).read_bytes()
    with pytest.warns(DamagedJournalWarning, match="only its log was left"):
        store = SqliteStore(crashed)
    (damage,) = store.damage
    assert Path(damage.moved_to).read_bytes() == log
    assert store.runs() == []
    assert store.check() == []
    store.close()
