"""A process that is killed at any commit while it takes messages: none is lost, or taken twice."""

from __future__ import annotations

import shutil
import signal
from typing import TYPE_CHECKING

import pytest

from maestro_hive.journal.store import open_store
from tests.python_processes import run_python

if TYPE_CHECKING:
    from pathlib import Path

_PROGRAM = """
import os, sys
from maestro_hive.hive.hive import Hive
from maestro_hive.journal.sqlite import SqliteFile

if sys.argv[2].isdecimal():
    left = int(sys.argv[2])

    def counted(commit):
        def call(*args, **options):
            global left
            left -= 1
            if left == 0 and sys.argv[3] == "before":
                os.kill(os.getpid(), 9)
            found = commit(*args, **options)
            if left == 0:
                os.kill(os.getpid(), 9)
            return found

        return call

    SqliteFile.write, SqliteFile.once = counted(SqliteFile.write), counted(SqliteFile.once)

hive = Hive(sys.argv[1])

@hive.step
async def pay() -> int:
    if sys.argv[2] == "killed":
        os.kill(os.getpid(), 9)
    return 7

@hive.workflow
async def ask():
    paid = await pay()
    return [paid, await hive.wait_for("n", type=int), await hive.wait_for("m", type=int)]

print(hive.run_sync(ask, run_id="r"), flush=True)
"""
#: As those of other processes, while the killed one had the run.
_MESSAGES = """
import sys
from maestro_hive.hive.hive import Hive

hive = Hive(sys.argv[1])
hive.answer("r", "n", 1, early=True)
hive.answer("r", "m", 2, early=True)
"""
_MOST_POINTS = 60


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_message_is_taken_once_whenever_the_process_is_killed(
    tmp_path: Path, moment: str
) -> None:
    source, folder = tmp_path / "source", tmp_path / "state"
    assert run_python(_PROGRAM, source, "killed").returncode == -signal.SIGKILL
    run_python(_MESSAGES, source, check=True)
    codes = []
    for point in range(1, _MOST_POINTS):
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(source, folder)
        codes.append(run_python(_PROGRAM, folder, point, moment).returncode)
        done = run_python(_PROGRAM, folder, "resumed")
        assert done.stdout == "[7, 1, 2]\n", (point, done.stderr)
        _check_taken_once(folder)
        if codes[-1] != -signal.SIGKILL:
            break
    assert codes[-1] == 0
    assert len(codes) > 5


def _check_taken_once(folder: Path) -> None:
    store = open_store(folder)
    row = store.find("r")
    kinds = [entry.kind for entry in store.entries(row.number)]
    assert kinds.count("wait_ended") == 2
    assert kinds.count("step_completed") == 1
    assert store.messages_of(row) == []
    store.db.close()
