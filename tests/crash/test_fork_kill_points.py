"""A fork that is killed at any of its writes: the new run is whole, or there is none."""

from __future__ import annotations

import shutil
import signal
from typing import TYPE_CHECKING

from maestro_hive.maestro.state.sqlite.store import SqliteStore
from tests.python_processes import run_python

if TYPE_CHECKING:
    from pathlib import Path

_RUN = """
import sys
from maestro_hive import Hive

hive = Hive(sys.argv[1])

@hive.step
async def work(number):
    return "x" * number

@hive.workflow
async def child(number):
    return await work(number)

@hive.workflow
async def all_of_it():
    return [len(await work(number)) for number in (1, 5_000, 50_000)] + [len(await child(20_000))]

hive.run_sync(all_of_it, run_id="r")
"""

_FORK = """
import sys
from pathlib import Path
from tests.crash.fault_injector import CALLS, CountingVFS, _wrap_os, injector
from maestro_hive.hive.control import fork
from maestro_hive.maestro.state.sqlite.store import SqliteStore

vfs = CountingVFS()
_wrap_os(CALLS)
store = SqliteStore(Path(sys.argv[1]))
injector.log = 1
injector.calls, injector.fail_at = 0, int(sys.argv[2])
fork(store, "r", new_id="s")
print("forked", flush=True)
"""
_MOST_POINTS = 200


def test_a_fork_that_is_killed_at_any_write_is_whole_or_not_there(tmp_path: Path) -> None:
    source, folder = tmp_path / "source", tmp_path / "state"
    run_python(_RUN, source, check=True)
    found: set[int] = set()
    point = entries = 0
    for point in range(1, _MOST_POINTS, 3):
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(source, folder)
        done = run_python(_FORK, folder, point)
        store = SqliteStore(folder)
        record = store.run("s")
        entries = 0 if record is None else len(store.entries(record.id))
        assert (record is None) == (entries == 0), (point, done.stdout)
        assert store.check() == []
        store.close()
        found.add(entries)
        if "forked" in done.stdout:
            break
        assert done.returncode == -signal.SIGKILL, done.stderr
    assert point > 3
    assert found == {0, entries}
    assert entries > 8
