"""A process that is killed at any write while it takes messages: none is lost, or taken twice."""

from __future__ import annotations

import shutil
import signal
from typing import TYPE_CHECKING

from maestro_hive.maestro.state.projections import facts_of
from maestro_hive.maestro.state.records import EntryKind
from maestro_hive.maestro.state.sqlite.store import SqliteStore
from tests.python_processes import run_python

if TYPE_CHECKING:
    from pathlib import Path

_PROGRAM = """
import os, sys
from maestro_hive import Hive

if sys.argv[2].isdecimal():
    from tests.crash.fault_injector import CALLS, CountingVFS, _wrap_os, injector

    vfs = CountingVFS()
    _wrap_os(CALLS)
    injector.log, injector.fail_at = 1, int(sys.argv[2])

hive = Hive(sys.argv[1])

@hive.step(on_ambiguous="ask")
async def pay() -> int:
    if sys.argv[2] == "killed":
        os.kill(os.getpid(), 9)
    return 0

@hive.workflow
async def ask():
    paid = await pay()
    return [paid, await hive.wait_for("n", type=int), await hive.wait_for("m", type=int)]

print(hive.run_sync(ask, run_id="r"), flush=True)
"""
#: As those of other processes, while the killed one had the run.
_MESSAGES = """
import sys
from maestro_hive import Hive
from maestro_hive.hive.inbox import Inbox, Resolution
from maestro_hive.hive.runs import read_run

hive = Hive(sys.argv[1])
step = read_run(hive._open(), "r").steps[1]
given = Resolution(step=step.identity.hex(), attempt=1, rerun=False, value=7)
Inbox(hive._open()).post("r", lambda messages: messages.resolutions.append(given))
hive.answer("r", "n", 1, early=True)
hive.answer("r", "m", 2, early=True)
"""
_STRIDE, _MOST_POINTS = 11, 400


def test_a_message_is_taken_once_whenever_the_process_is_killed(tmp_path: Path) -> None:
    source, folder = tmp_path / "source", tmp_path / "state"
    assert run_python(_PROGRAM, source, "killed").returncode == -signal.SIGKILL
    run_python(_MESSAGES, source, check=True)
    codes = []
    for point in range(1, _MOST_POINTS, _STRIDE):
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(source, folder)
        codes.append(run_python(_PROGRAM, folder, point).returncode)
        done = run_python(_PROGRAM, folder, "resumed")
        assert done.stdout == "[7, 1, 2]\n", (point, done.stderr)
        _check_taken_once(folder)
        if codes[-1] != -signal.SIGKILL:
            break
    assert codes[-1] == 0
    assert len(codes) > 10


def _check_taken_once(folder: Path) -> None:
    store = SqliteStore(folder)
    record = store.run("r")
    assert record is not None
    entries = store.entries(record.id)
    answered = [entry for entry in entries if entry.kind == EntryKind.WAIT_ENDED]
    assert [facts_of(entry)["how"] for entry in answered] == ["answered"] * 2
    assert sum(entry.kind == EntryKind.STEP_COMPLETED for entry in entries) == 1
    assert store.documents("$inbox") == []
    store.close()
