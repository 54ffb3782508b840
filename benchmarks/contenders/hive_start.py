"""What starting costs: ``from maestro_hive import Hive``, and listing the newest of many runs.

The runs are made by copying the rows of one run of ``Hive`` within the journal. Executing so many
would take minutes, and the listing sees no difference.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import apsw

from benchmarks import work
from benchmarks.contender import Contender, Figures
from maestro_hive import Hive

FEW, MANY = 200, 50_000
_TIMES = 5 if work.QUICK else 11
_CHECKSUMS = "cksmvfs"
_RUN_ROOM = 2**32  # an entry's id is its run's id times this, and its place


def _import(folder: Path) -> Figures:
    bare = median_seconds([sys.executable, "-c", "pass"], folder)
    ours = median_seconds([sys.executable, "-c", "from maestro_hive import Hive"], folder)
    return {"seconds": ours - bare}


def median_seconds(command: list[str], folder: Path) -> float:
    """Return what a program takes that was started before: its bytecode is there."""
    env = {**os.environ, "PYTHONPYCACHEPREFIX": str(folder.with_name("bytecode"))}
    env.pop("PYTHONDONTWRITEBYTECODE", None)
    subprocess.run(command, check=True, capture_output=True, env=env)
    took = []
    for _ in range(_TIMES):
        started = time.perf_counter()
        subprocess.run(command, check=True, capture_output=True, env=env)
        took.append(time.perf_counter() - started)
    return statistics.median(took)


def _list(folder: Path) -> Figures:
    maestro = str(Path(sys.executable).with_name("maestro"))
    command = [maestro, "runs", "--limit", "20", "--store", str(folder)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert "copy-" in done.stdout, done.stdout
    return {"seconds": median_seconds(command, folder)}


def _fill(folder: Path, *, count: int) -> None:
    asyncio.run(_execute_one(folder))
    db = _open(folder / "journal.db")
    first: int = db.execute("SELECT max(id) FROM runs").get
    places = "WITH RECURSIVE new(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM new WHERE n < ?)"
    with db:
        for table, own in (
            ("runs", {"id": "old.id + n", "name": "'copy-' || n"}),
            ("entries", {"id": f"old.id + n * {_RUN_ROOM}"}),
        ):
            columns = [str(row[1]) for row in db.execute(f"PRAGMA table_info({table})")]
            values = ", ".join(own.get(column, f"old.{column}") for column in columns)
            where = f"old.id / {1 if table == 'runs' else _RUN_ROOM} = ?"
            db.execute(
                f"{places} INSERT INTO {table} SELECT {values} FROM new, {table} AS old WHERE {where}",
                (count - 1, first),
            )
    db.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_TRUNCATE)
    db.close()


async def _execute_one(folder: Path) -> None:
    hive = Hive(folder)

    @hive.step(persona="writer")
    async def draft(number: int) -> dict[str, object]:
        return work.result(number)

    @hive.workflow
    async def run(count: int) -> int:
        for number in range(count):
            await draft(number)
        return count

    async with hive:
        await hive.run(run, 3)


def _open(path: Path) -> apsw.Connection:
    """Open a journal as Hive did in this process: with the checksums of its pages, if it has any."""
    names = apsw.vfs_names()
    return apsw.Connection(str(path), vfs=_CHECKSUMS if _CHECKSUMS in names else names[0])


CONTENDERS = (
    Contender(name="hive/import", group="hive-start", measure=_import),
    Contender(
        name="hive/list-few",
        group="hive-start",
        measure=_list,
        prepare=partial(_fill, count=FEW),
        filled=True,
    ),
    Contender(
        name="hive/list-many",
        group="hive-start",
        measure=_list,
        prepare=partial(_fill, count=MANY),
        filled=True,
    ),
)
