"""Row 6: a holder that hangs past its lease is taken over, and cannot write when it wakes."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from typing import TYPE_CHECKING

from faults.processes import Worker
from faults.registry import Outcome, Plan, row
from faults.scenarios import RUN, config_in
from faults.workers import LEASE_SECONDS
from maestro_hive.kernel.errors import FencedError, MaestroError, RunLeasedError, StoreBusyError
from maestro_hive.maestro.state import codec
from maestro_hive.maestro.state.records import EntryKind, NewEntry
from maestro_hive.maestro.state.sqlite.store import SqliteStore
from maestro_hive.maestro.state.store import Append
from maestro_hive.unified_execution.state_persistence import StatePersistence

if TYPE_CHECKING:
    from pathlib import Path

    from maestro_hive.maestro.state.store import RunLease

_TAKEOVER = codec.encode({"by": "successor"})


@row(
    6,
    "zombies are fenced; the dead are succeeded at once; a second opener is told who is first",
    "500 rounds, 0 stale writes; stale files ignored",
)
def zombies(plan: Plan, outcome: Outcome) -> None:
    """Stop, take over, wake; then the dead, the second opener and the stale file."""
    _stop_and_wake(plan, outcome)
    _succeed_the_dead(plan, outcome)
    _ignore_stale_files(plan, outcome)


# --- stopped holders ---------------------------------------------------------------------------


def _stop_and_wake(plan: Plan, outcome: Outcome) -> None:
    rounds = plan.amount(quick=20, full=500)
    chance = random.Random(plan.seed)
    folder = plan.scratch / "zombies"
    store = SqliteStore(folder, lease_seconds=5, busy_seconds=LEASE_SECONDS * 2)
    inside = stale = 0
    with Worker("zombie", folder, rounds) as worker:
        worker.hear(60)
        for number in plan.watch("zombie rounds", range(rounds), rounds):
            worker.tell()
            fence = worker.hear(30)["fence"]
            time.sleep(chance.uniform(0, 0.03))
            hold, waited = _take_over_stopped(store, worker, f"round-{number}")
            inside += waited
            said = worker.hear(30)
            fenced = said.get("fenced") == fence and hold.lease.fence > fence
            outcome.require(fenced, f"round {number}: woken with fence {fence}, it said {said}")
            stale += _stale_entries(store, hold)
            store.release_run(hold)
    outcome.require(stale == 0, f"{stale} entries were written by zombies after a takeover")
    outcome.require(not store.check(), f"check found {store.check()}")
    store.close()
    outcome.ran.append(f"{rounds} holders stopped past their lease, taken over, woken")
    outcome.measured.append(f"{stale} stale writes; {inside} stopped inside a write")


def _take_over_stopped(store: SqliteStore, worker: Worker, run: str) -> tuple[RunLease, bool]:
    """Stop the worker, take its run after the lease, write, and wake it."""
    os.kill(worker.process.pid, signal.SIGSTOP)
    time.sleep(LEASE_SECONDS * 1.3)
    try:
        hold = store.acquire_run(run)
        inside = False
    except StoreBusyError:  # stopped inside a commit: nobody can write until it goes on
        os.kill(worker.process.pid, signal.SIGCONT)
        hold = _stop_again(store, worker, run)
        inside = True
    _append(store, hold)
    os.kill(worker.process.pid, signal.SIGCONT)
    _append(store, hold)
    return hold, inside


def _stop_again(store: SqliteStore, worker: Worker, run: str) -> RunLease:
    last: MaestroError | None = None
    for attempt in range(20):
        time.sleep(0.003 * attempt)
        os.kill(worker.process.pid, signal.SIGSTOP)
        time.sleep(LEASE_SECONDS * 1.3)
        try:
            return store.acquire_run(run)
        except (StoreBusyError, RunLeasedError) as error:
            last = error
            os.kill(worker.process.pid, signal.SIGCONT)
    raise AssertionError(f"{run} could not be taken over: {last}")


def _append(store: SqliteStore, hold: RunLease) -> None:
    (refused,) = store.append([Append(hold, [NewEntry(EntryKind.SPENT, value=_TAKEOVER)])])
    if isinstance(refused, FencedError):
        raise refused


def _stale_entries(store: SqliteStore, hold: RunLease) -> int:
    """Count what the zombie wrote after its successor had written."""
    taken, stale = False, 0
    for entry in store.entries(hold.run):
        if entry.value == _TAKEOVER.data:
            taken = True
        elif taken:
            stale += 1
    return stale


# --- dead holders, second openers --------------------------------------------------------------


def _succeed_the_dead(plan: Plan, outcome: Outcome) -> None:
    rounds = plan.amount(quick=3, full=20)
    slowest = 0.0
    for number in plan.watch("dead holders", range(rounds), rounds):
        folder = plan.scratch / f"dead-{number}"
        with Worker("holder", folder) as holder:
            holder.hear(60)
            with Worker("opener", folder) as second, Worker("opener", folder) as third:
                second.hear(60)
                third.hear(60)
                second.tell()
                told = second.hear(60)
                right = (told.get("pid"), told.get("host")) == (holder.process.pid, os.uname()[1])
                outcome.require(right and "since" in told, f"a second opener was told {told}")
                holder.process.kill()
                holder.process.wait()
                third.tell()
                given = third.hear(60)
                outcome.require(given.get("fence") == 2, f"after kill -9 the next got {given}")
                slowest = max(slowest, float(given.get("seconds", 99)))
    outcome.ran.append(f"{rounds} holders killed, second openers asked before")
    outcome.measured.append(
        f"after kill -9 the next has the run in at most {slowest * 1000:.1f} ms"
    )
    outcome.require(slowest < 1, f"the successor of the dead waited {slowest:.1f} s")


def _ignore_stale_files(plan: Plan, outcome: Outcome) -> None:
    """A checkpoint that a zombie wrote late has a lower number, and is not resumed from."""
    folder = plan.scratch / "stale"
    config = config_in(folder)
    with StatePersistence(config, RUN) as zombie:
        zombie.mark_task_completed("old")
        zombie.checkpoint("late")
    with StatePersistence(config, RUN) as successor:
        successor.mark_task_completed("new")
        successor.checkpoint("right")
    _rewrite_late(folder)
    for journal in (folder / "state").glob("journal*"):
        journal.unlink()
    shutil.rmtree(folder / "state" / "runs")
    with StatePersistence(config, RUN) as resumed:
        done = resumed.state.completed_tasks
    outcome.require(done == ["old", "new"], f"a stale checkpoint was resumed from: {done}")
    outcome.ran.append("a stale checkpoint file beside a good one")
    outcome.measured.append("the stale file was ignored")


def _rewrite_late(folder: Path) -> None:
    """Give the zombie's file the newest time and version, as writing it late would."""
    (late,) = (folder / "checkpoints" / RUN).glob("*~late.json")
    fence, _, rest = late.name.partition(".")
    late.rename(late.with_name(f"{fence}.{int(rest[:8]) + 50:08d}{rest[8:]}"))
