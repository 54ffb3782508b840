"""Rows 5 and 6: many processes share a folder, and zombies are fenced."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING

from faults.registry import Outcome, Plan, row
from faults.scenarios import acquire, append, entries_in
from faults.strace import ROOT
from maestro_hive.journal.store import open_store
from maestro_hive.kernel.errors import FencedError, StoreFailedError

if TYPE_CHECKING:
    from pathlib import Path

_UPDATE = """
import sys
from maestro_hive.journal.store import open_store
store = open_store(sys.argv[1])
store.define_account("budget", 10**9)
for number in range(int(sys.argv[2])):
    store.update_document("counters", "shared", lambda old: b"%d" % (int(old or 0) + 1))
    store.db.write(
        lambda tx: tx("UPDATE accounts SET used = used + 1 WHERE account = 'budget'"),
        sync=number % 2 == 0)
store.db.close()
"""


@row(
    5,
    "many processes share one folder",
    "16 processes x 1,000 updates of one document and one account: exact, 0 locked",
)
def shared_folder(plan: Plan, outcome: Outcome) -> None:
    """Update one document and one account from many processes."""
    count, updates = plan.amount(quick=8, full=16), plan.amount(quick=50, full=1000)
    folder = plan.scratch / "shared"
    words = [sys.executable, "-c", _UPDATE, str(folder), str(updates)]
    running = [
        subprocess.Popen(words, cwd=ROOT, stderr=subprocess.PIPE, text=True) for _ in range(count)
    ]
    for process in running:
        _, errors = process.communicate(timeout=1800)
        outcome.require(process.returncode == 0, f"a process failed: {errors[-500:]}")
    store = open_store(folder)
    _, value = store.document("counters", "shared")
    used, *_ = store.account("budget")
    store.db.close()
    outcome.ran.append(f"{count} processes x {updates} updates")
    outcome.measured.append(f"document {value!r}, account {used}, of {count * updates}")
    outcome.require(int(value or 0) == used == count * updates, f"{value!r} and {used}")


_ZOMBIE = """
import sys
from faults.scenarios import acquire, append
from maestro_hive.journal.store import open_store
store = open_store(sys.argv[1])
run = acquire(store, "run")
while True:
    append(store, run)
    print(run.fence, run.seq, flush=True)
"""


@row(6, "zombies are fenced", "500 rounds, 0 stale writes in the journal")
def zombies(plan: Plan, outcome: Outcome) -> None:
    """Stop a process while it writes, take its run over, continue it: its appends are refused."""
    rounds, rng = plan.amount(quick=10, full=500), random.Random(plan.seed)
    refused = 0
    for number in plan.track("zombies", range(rounds), rounds):
        refused += _round(plan.scratch / f"zombie-{number}", rng, outcome)
    outcome.ran.append(f"{rounds} rounds of SIGSTOP, takeover and SIGCONT")
    outcome.measured.append(f"{refused} zombies refused, {outcome.failed} stale writes")


def _round(folder: Path, rng: random.Random, outcome: Outcome) -> bool:
    words = [sys.executable, "-c", _ZOMBIE, str(folder)]
    process = subprocess.Popen(
        words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    for _ in range(rng.randint(1, 40)):
        process.stdout.readline()
    store = open_store(folder)
    while True:
        os.kill(process.pid, signal.SIGSTOP)
        time.sleep(rng.uniform(0, 0.01))
        try:
            store.db.write(lambda tx: tx("UPDATE runs SET expires = 0"), sync=True)
            break
        except StoreFailedError:  # it was stopped inside a write, and holds the folder's lock
            os.kill(process.pid, signal.SIGCONT)
            process.stdout.readline()
    run = acquire(store, "run")
    before = run.seq
    own = [append(store, run) for _ in range(5)]
    os.kill(process.pid, signal.SIGCONT)
    _, errors = process.communicate(timeout=60)
    own += [append(store, run) for _ in range(5)]
    found = entries_in(store, "run")
    store.db.close()
    outcome.require(own == list(range(before + 1, before + 11)), f"numbers {own}")
    outcome.require(found == before + 10, f"{found} entries of {before + 10}")
    outcome.require(FencedError.__name__ in errors, f"the zombie ended with: {errors[-300:]}")
    return FencedError.__name__ in errors
