"""Processes that are killed, stopped or out of space while they write to a journal."""

from __future__ import annotations

import os
import random
import signal
import sqlite3
from typing import TYPE_CHECKING

import pytest

from maestro_hive.journal.sqlite import SqliteFile
from maestro_hive.journal.store import open_store
from tests import stores
from tests.programs import Program, run_together

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

#: Writes rows of its own, and reports the number of each one that is durable.
WRITER = """
import sys
from maestro_hive.journal.store import open_store
db = open_store(sys.argv[1]).db
add = "INSERT INTO documents (namespace, key, version, value) VALUES ($1, $2, 1, $3)"
for number in range(int(sys.argv[3]), 1_000_000):
    key = f"{number:09}"
    if number % 3:
        db.once(add, (sys.argv[2], key, "x" * 500), sync=True)
    else:
        db.write(lambda tx: tx(add, sys.argv[2], key, "x" * 2000), sync=True)
    sys.stdout.write(f"{number}\\n")
    sys.stdout.flush()
"""
KEYS = "SELECT key FROM documents WHERE namespace = $1 ORDER BY key"


@pytest.fixture(params=stores.SHARED_KINDS)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    with stores.place(request.param, tmp_path) as found:
        yield found


def numbers_in(place: str, writer: str) -> list[int]:
    database = open_store(place).db
    found = [int(key) for (key,) in database.read(KEYS, writer)]
    database.close()
    return found


def test_a_kill_inside_a_write_loses_nothing_that_was_acknowledged(place: str) -> None:
    rng, acknowledged = random.Random(16), {"one": -1, "two": -1}
    for _ in range(8):
        started = {name: number + 1 for name, number in acknowledged.items()}
        writers = {name: Program(WRITER, place, name, start) for name, start in started.items()}
        victim, other = rng.sample(sorted(writers), 2)
        for _ in range(rng.randint(1, 120)):
            writers[victim]()
        for name in (victim, other):  # the other one writes on, and is killed then
            lines = writers[name].end_by_kill().splitlines(keepends=True)
            reported = [int(line) for line in lines if line.endswith("\n")]
            found = numbers_in(place, name)
            assert found == list(range(len(found)))
            assert len(found) > max(reported, default=started[name] - 1)
            acknowledged[name] = len(found) - 1


def test_a_process_that_is_stopped_inside_its_turn_does_not_lose_what_others_wrote(
    tmp_path: Path,
) -> None:
    place = str(tmp_path / "state")
    with Program(WRITER, place, "one", 0) as one, Program(WRITER, place, "two", 0) as two:
        for _ in range(10):
            os.kill(one.pid, signal.SIGSTOP)
            os.kill(one.pid, signal.SIGCONT)
            two()
        last = int(two())
        one.end_by_kill()
        two.end_by_kill()
    assert len(numbers_in(place, "two")) > last


READER = """
import pathlib, sqlite3, sys, threading
from maestro_hive.journal.store import open_store
place = pathlib.Path(sys.argv[1])
stop = threading.Event()

def read():
    while not stop.is_set():
        for each in place.iterdir():
            if each.is_file():
                each.read_bytes()
        db = sqlite3.connect(place / "journal.db")
        db.execute("SELECT count(*) FROM documents").fetchall()
        db.close()

db = open_store(place).db
thread = threading.Thread(target=read)
thread.start()
add = "INSERT INTO documents (namespace, key, version, value) VALUES ($1, $2, 1, $3)"
for number in range(60):
    db.once(add, (sys.argv[2], f"{number:09}", "x" * 900), sync=True)
stop.set()
thread.join()
db.close()
"""
VISITOR = """
import sys
from maestro_hive.journal.store import open_store
for _ in range(12):
    open_store(sys.argv[1]).db.close()
"""


@pytest.mark.parametrize("number", range(20))
def test_user_code_that_opens_the_files_with_another_sqlite_loses_nothing(
    tmp_path: Path, number: int
) -> None:
    place = tmp_path / "state"
    open_store(place).db.close()
    code = "exec(__import__('sys').argv.pop(1))"
    programs = [(READER, place, "one"), (READER, place, "two"), (VISITOR, place)]
    run_together(code, programs)
    for writer in ("one", "two"):
        assert numbers_in(str(place), writer) == list(range(60))
    with sqlite3.connect(place / "journal.db") as db:
        assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    db.close()


# --- disks that fail ------------------------------------------------------------------------------

FULL = """
import resource, sys
from maestro_hive.journal.store import open_store
from maestro_hive.kernel.errors import MaestroError
db = open_store(sys.argv[1]).db
bytes = int(sys.argv[2])
resource.setrlimit(resource.RLIMIT_FSIZE, (bytes, bytes))
add = "INSERT INTO documents (namespace, key, version, value) VALUES ($1, $2, 1, $3)"
for number in range(1_000_000):
    try:
        db.once(add, ("one", f"{number:09}", "x" * 900), sync=True)
    except MaestroError as error:
        print(f"{type(error).__name__}: {error}", flush=True)
        break
    print(number, flush=True)
try:
    db.once(add, ("one", "more", "x"), sync=True)
except MaestroError as error:
    print(f"{type(error).__name__}: {error}", flush=True)
"""


@pytest.mark.parametrize("kilobytes", [64, 65, 70, 200, 1000])
def test_a_file_that_cannot_grow_is_an_error_and_loses_nothing(
    tmp_path: Path, kilobytes: int
) -> None:
    with Program(FULL, tmp_path / "state", kilobytes * 1024) as program:
        lines = program.end().split("\n")
    acknowledged = [int(line) for line in lines if line.isdigit()]
    (first, *_) = [line for line in lines if line and not line.isdigit()]
    assert first.startswith("StoreFailedError: the journal")
    assert numbers_in(str(tmp_path / "state"), "one")[: len(acknowledged)] == acknowledged


FAILING = """
import errno, sys
from maestro_hive.journal import sqlite
from maestro_hive.journal.store import open_store
from maestro_hive.kernel.errors import MaestroError
db = open_store(sys.argv[1]).db
add = "INSERT INTO documents (namespace, key, version, value) VALUES ('one', $1, 1, $2)"
sync, fails = sqlite.sync_fd, False

def sync_or_fail(fd):
    if fails:
        raise OSError(errno.EIO, "Input/output error")
    sync(fd)

sqlite.sync_fd = sync_or_fail
for number in range(10):
    fails = number == 5
    try:
        db.once(add, (f"{number:09}", "x"), sync=True)
        print(number)
    except MaestroError as error:
        print(type(error).__name__, error)
db.close()
"""


def test_after_a_failed_sync_a_journal_refuses_until_it_is_opened_again(tmp_path: Path) -> None:
    with Program(FAILING, tmp_path / "state") as program:
        lines = program.end().strip().split("\n")
    assert lines[:5] == ["0", "1", "2", "3", "4"]
    assert len(lines) == 10
    refused = "StoreFailedError the journal cannot be synced: [Errno 5]"
    assert all(line.startswith(refused) and line.endswith("open it again") for line in lines[5:])
    database = SqliteFile(tmp_path / "state" / "journal.db")
    found = [int(key) for (key,) in database.read(KEYS, "one")]
    assert found[:5] == [0, 1, 2, 3, 4]
    database.once("DELETE FROM documents", (), sync=True)
    database.close()
