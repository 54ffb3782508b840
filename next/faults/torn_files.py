"""Row 4: a torn or altered file is found: the journal, its log, its locks."""

from __future__ import annotations

import random
import shutil
import subprocess
from collections import Counter
from typing import TYPE_CHECKING

from faults.registry import Outcome, Plan, row
from faults.scenarios import entries_in
from faults.strace import ROOT, command, read_acks
from maestro_hive.journal.store import open_store
from maestro_hive.kernel.errors import MaestroError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def _flip(path: Path, rng: random.Random) -> None:
    data = bytearray(path.read_bytes())
    used = len(bytes(data).rstrip(b"\0"))
    data[rng.randrange(max(1, used))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)


def _cut(path: Path, rng: random.Random) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: rng.randrange(len(data.rstrip(b"\0")))])


def _zero(path: Path, rng: random.Random) -> None:
    data = bytearray(path.read_bytes())
    at = rng.randrange(max(1, len(bytes(data).rstrip(b"\0")))) // 512 * 512
    data[at : at + 512] = bytes(len(data[at : at + 512]))
    path.write_bytes(data)


def _delete(path: Path, _: random.Random) -> None:
    path.unlink()


_HARMS: dict[str, Callable[[Path, random.Random], None]] = {
    "flipped": _flip,
    "cut": _cut,
    "zeroed": _zero,
    "deleted": _delete,
}
_FILES = ("journal.db", "journal.db-wal", "journal.db", "journal.db-wal", "journal.lock", "holder")


@row(
    4,
    "a torn or altered file is found",
    "journal and log: a read gives what was written, or our error; 0 silent losses",
)
def torn_files(plan: Plan, outcome: Outcome) -> None:
    """Harm a file of a journal that was killed or closed, and read all of it."""
    rng, ends = random.Random(plan.seed), Counter[str]()
    amount = plan.amount(quick=96, full=600)
    made = {name: _leave(plan.scratch / name, name) for name in ("closed", "killed", "copied")}
    for number in plan.track("harms", range(amount), amount):
        name = rng.choice(sorted(made))
        folder, written = made[name]
        file, harm = _FILES[number % len(_FILES)], rng.choice(sorted(_HARMS))
        target = plan.scratch / f"harmed-{number}"
        shutil.copytree(folder, target)
        paths = list((target / "holders").iterdir()) if file == "holder" else [target / file]
        if not paths:
            continue
        _HARMS[harm](rng.choice(paths), rng)
        where = f"{number}: {name} journal, {file} {harm}"
        ends[_read(target, written, outcome, where)] += 1
        shutil.rmtree(target)
    outcome.ran.append(f"{ends.total()} files flipped, cut, zeroed or deleted")
    outcome.measured += [f"{count} {end}" for end, count in ends.most_common()]


def _leave(folder: Path, name: str) -> tuple[Path, int]:
    """Leave a journal with entries that were acknowledged; return how many."""
    acks = folder.with_name(f"{name}.acks")
    scenario = {"closed": "steps", "killed": "first", "copied": "steps"}[name]
    if name == "closed":
        subprocess.run(command(scenario, folder, str(acks)), cwd=ROOT, check=True, timeout=60)
    else:
        code = _KILLED_AFTER[name]
        words = [command("first", folder, "-")[0], "-c", code, str(folder), str(acks)]
        subprocess.run(words, cwd=ROOT, check=False, timeout=60)
    last = [line for line in read_acks(acks) if " " in line][-1]
    return folder, int(last.split()[1])


_WRITE_AND_DIE = """
import os, signal, sys
from faults.scenarios import Acks, acquire, append
from maestro_hive.journal import sqlite
from maestro_hive.journal.store import open_store
sqlite.CHECKPOINT_PAGES = {pages}
store, acks = open_store(sys.argv[1]), Acks(sys.argv[2])
run = acquire(store, "steps")
for number in range({count}):
    acks(f"steps {{append(store, run)}}")
os.kill(os.getpid(), signal.SIGKILL)
"""
_KILLED_AFTER = {
    "killed": _WRITE_AND_DIE.format(pages=1000, count=60),
    #: Most of the log is copied into the database when it is killed.
    "copied": _WRITE_AND_DIE.format(pages=20, count=75),
}


def _read(folder: Path, written: int, outcome: Outcome, where: str) -> str:
    """Read everything: what was written, or our error."""
    try:
        store = open_store(folder)
    except MaestroError:
        return "refused at opening"
    try:
        found = entries_in(store, "steps")
        whole = store.db.read("PRAGMA integrity_check") == [("ok",)]
    except MaestroError:
        return "refused when read"
    finally:
        store.db.close()
    if found < written:
        outcome.fail(f"{where}: {found} of {written} entries, silently")
        return "silent"
    return "unharmed" if whole else "found by the check of the database"
