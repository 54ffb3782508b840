"""Row 16: the user's own code reads every file of the folder, and opens it with another SQLite.

Whatever closes a file of SQLite drops the locks that its process has on it.
"""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
from collections import Counter
from typing import TYPE_CHECKING

from faults.registry import Outcome, Plan, row
from faults.scenarios import verify
from faults.strace import ROOT, read_acks

if TYPE_CHECKING:
    from pathlib import Path

WRITERS = ("one", "two", "three")
_STEPS = 40

_WRITE = """
import sqlite3, sys
from pathlib import Path
from faults.scenarios import Acks, acquire, append
from maestro_hive.journal import sqlite
from maestro_hive.journal.store import open_store
sqlite.CHECKPOINT_PAGES = 40
folder, name, acks = Path(sys.argv[1]), sys.argv[2], Acks(sys.argv[3])
store = open_store(folder)
run = acquire(store, name)
while run.seq < int(sys.argv[4]):
    for path in folder.rglob("*"):
        try:
            path.is_file() and path.read_bytes()
        except OSError:  # deleted just now
            continue
    db = sqlite3.connect(folder / "journal.db", timeout=60)
    db.execute("SELECT count(*) FROM entries").fetchall()
    db.execute("BEGIN IMMEDIATE")
    db.rollback()
    db.close()
    acks(f"{name} {append(store, run)}")
store.db.close()
"""
_VISIT = """
import sys
from pathlib import Path
from maestro_hive.journal.store import open_store
visits = 0
while not Path(sys.argv[2]).exists():
    open_store(sys.argv[1]).db.close()
    visits += 1
print(visits)
"""


@row(16, "the user's own code cannot break our locks", "200 rounds, 0 lost, 0 errors at opening")
def readers(plan: Plan, outcome: Outcome) -> None:
    """Three writers, one of them killed and started again, with two visitors."""
    rounds, rng = plan.amount(quick=6, full=200), random.Random(plan.seed)
    totals: Counter[str] = Counter()
    for number in plan.track("rounds", range(rounds), rounds):
        folder = plan.scratch / f"readers-{number}"
        totals += _round(folder, rng, outcome, f"round {number}")
        shutil.rmtree(folder)
    outcome.ran.append(f"{rounds} rounds of 3 writers that read the folder, one of them killed")
    outcome.ran.append(f"{totals['visits']} times opened and closed by others")
    outcome.measured.append(f"{totals['acknowledged']} acknowledged, {outcome.failed} lost, errors")


def _round(folder: Path, rng: random.Random, outcome: Outcome, name: str) -> Counter[str]:
    acks, stop = folder.with_name(f"{folder.name}.acks"), folder.with_name(f"{folder.name}.stop")

    def start(code: str, *words: object) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", code, *map(str, words)]
        return subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    writers = {each: start(_WRITE, folder, each, acks, _STEPS) for each in WRITERS}
    visitors = [start(_VISIT, folder, stop) for _ in range(2)]
    victim, after = rng.choice(WRITERS), rng.randint(1, _STEPS * 2)
    while len(read_acks(acks)) < after and any(each.poll() is None for each in writers.values()):
        pass
    writers[victim].kill()
    writers[victim].communicate()
    writers[victim] = start(_WRITE, folder, victim, acks, _STEPS)
    visits = 0
    for each in (*writers.values(), *visitors):
        if each is visitors[0]:
            stop.touch()
        output, errors = each.communicate(timeout=300)
        outcome.require(each.returncode == 0, f"{name}: a process failed: {errors[-500:]}")
        visits += int(output or 0)
    acknowledged = read_acks(acks)
    for wrong in verify(folder, acknowledged):
        outcome.fail(f"{name}: {wrong}")
    return Counter(visits=visits, acknowledged=len(acknowledged))
