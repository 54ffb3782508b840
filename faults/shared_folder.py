"""Rows 5 and 6: many processes on one folder, and holders whose lease has expired."""

from __future__ import annotations

import os
import random
import shutil
import signal
import statistics
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from faults.registry import Outcome, Plan, row
from faults.scenarios import RUN, config_in
from faults.workers import LEASE_SECONDS, TOKENS, Worker
from maestro_hive.kernel.errors import FencedError, MaestroError, RunLeasedError, StoreBusyError
from maestro_hive.maestro.state import codec
from maestro_hive.maestro.state.records import EntryKind, NewEntry
from maestro_hive.maestro.state.shared_records import BREAKERS
from maestro_hive.maestro.state.sqlite.store import SqliteStore
from maestro_hive.maestro.state.store import Append
from maestro_hive.unified_execution.state_persistence import StatePersistence
from tests.python_processes import suspend

if TYPE_CHECKING:
    from pathlib import Path

    from maestro_hive.maestro.state.store import RunLease


_SECONDS = 900


@row(5, "many processes share one folder", "16 x 1,000 updates: exact totals, 0 locked")
def concurrent_updates(plan: Plan, outcome: Outcome) -> None:
    """Update the same key, breaker and count of tokens from many processes, and compare the totals."""
    members, updates = plan.amount(quick=8, full=16), plan.amount(quick=100, full=1000)
    folder = plan.scratch / "shared"
    started = time.monotonic()
    with ExitStack() as stack:
        workers = [stack.enter_context(Worker("update", folder, updates)) for _ in range(members)]
        for worker in workers:
            worker.receive(120)
        ready = time.monotonic()
        for worker in workers:
            worker.start()
        answers = [
            worker.receive(_SECONDS) for worker in plan.track("processes done", workers, members)
        ]
        took = time.monotonic() - ready
    errors = [error for each in answers for error in each["errors"]]
    for error in errors:
        outcome.fail(error)
    wanted = members * updates
    totals = _totals(folder)
    for name, total in totals.items():
        outcome.require(total == wanted, f"{name}: {total} of {wanted} updates counted")
    outcome.ran.append(f"{members} processes x {updates:,} updates of a key, a breaker, a count")
    outcome.measured.append(f"totals {sorted(set(totals.values()))} of {wanted:,}")
    outcome.measured.append(f"{sum(each['count'] for each in answers)} errors")
    outcome.measured.append(f"longest wait for three updates {_longest(answers) * 1000:.0f} ms")
    outcome.measured.append(f"{3 * wanted / took:,.0f} updates/s")
    plan.show(f"start-up took {ready - started:.1f} s")


def _longest(answers: list[dict[str, Any]]) -> float:
    return max(float(each["longest"]) for each in answers)


def _totals(folder: Path) -> dict[str, int]:
    store = SqliteStore(folder)
    try:
        document = store.document("default", "total")
        assert document is not None
        return {
            "key": codec.decode(document.value),
            "breaker": BREAKERS.all(store)["anthropic"].consecutive_failures,
            "tokens": TOKENS.all(store)["shared"] // 3,
            "check": -1 if store.check() else codec.decode(document.value),
        }
    finally:
        store.close()


_TAKEOVER = codec.encode({"by": "successor"})


@row(
    6,
    "stale holders are fenced; a dead holder's run is free at once; a second opener learns the holder",
    "500 rounds, 0 stale writes; stale files ignored",
)
def stale_holders(plan: Plan, outcome: Outcome) -> None:
    """Stop, take over, continue; then dead holders, second openers and stale files."""
    _stop_and_continue(plan, outcome)
    _replace_dead_holders(plan, outcome)
    _ignore_stale_files(plan, outcome)


# --- stopped holders ---------------------------------------------------------------------------


def _stop_and_continue(plan: Plan, outcome: Outcome) -> None:
    rounds = plan.amount(quick=20, full=500)
    rng = random.Random(plan.seed)
    folder = plan.scratch / "stale-holders"
    store = SqliteStore(folder, lease_seconds=5, busy_seconds=LEASE_SECONDS * 2)
    inside = stale = 0
    with Worker("stale", folder, rounds) as worker:
        worker.receive(60)
        for number in plan.track("stale holders", range(rounds), rounds):
            worker.start()
            fence = worker.receive(30)["fence"]
            time.sleep(rng.uniform(0, 0.03))
            hold, waited = _take_over_stopped(store, worker, f"round-{number}")
            inside += waited
            answer = worker.receive(30)
            fenced = answer.get("fenced") == fence and hold.lease.fence > fence
            outcome.require(
                fenced, f"round {number}: continued with fence {fence}, it answered {answer}"
            )
            stale += _stale_entries(store, hold)
            store.release_run(hold)
    outcome.require(stale == 0, f"{stale} entries were written by stale holders after a takeover")
    outcome.require(not store.check(), f"check found {store.check()}")
    store.close()
    outcome.ran.append(f"{rounds} holders stopped past their lease, taken over, continued")
    outcome.measured.append(f"{stale} stale writes; {inside} stopped inside a write")


def _take_over_stopped(store: SqliteStore, worker: Worker, run: str) -> tuple[RunLease, bool]:
    """Stop the worker, take over its run after the lease, write, and continue it."""
    suspend(worker.process.pid)
    time.sleep(LEASE_SECONDS * 1.3)
    try:
        hold = store.acquire_run(run)
        inside = False
    except StoreBusyError:  # stopped inside a commit: it blocks all writers
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
        suspend(worker.process.pid)
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
    """Count what the stale holder wrote after its successor had written."""
    taken, stale = False, 0
    for entry in store.entries(hold.run):
        if entry.value == _TAKEOVER.data:
            taken = True
        elif taken:
            stale += 1
    return stale


# --- dead holders, second openers --------------------------------------------------------------


def _replace_dead_holders(plan: Plan, outcome: Outcome) -> None:
    rounds = plan.amount(quick=3, full=20)
    waits: list[float] = []
    for number in plan.track("dead holders", range(rounds), rounds):
        folder = plan.scratch / f"dead-{number}"
        with Worker("holder", folder) as holder:
            holder.receive(60)
            with Worker("opener", folder) as second, Worker("opener", folder) as third:
                second.receive(60)
                third.receive(60)
                second.start()
                answer = second.receive(60)
                right = (answer.get("pid"), answer.get("host")) == (
                    holder.process.pid,
                    os.uname()[1],
                )
                outcome.require(right and "since" in answer, f"a second opener got {answer}")
                holder.process.kill()
                holder.process.wait()
                third.start()
                given = third.receive(60)
                outcome.require(given.get("fence") == 2, f"after kill -9 the next got {given}")
                waits.append(float(given.get("seconds", 99)))
    outcome.ran.append(f"{rounds} holders killed, each with a second opener before")
    outcome.measured.append(
        f"after kill -9 the next has the run in at most {max(waits) * 1000:.1f} ms"
    )
    # Who waits for something does so each time, and who waits for a processor does not.
    usual = statistics.median(waits)
    outcome.require(usual < 1, f"the successors of dead holders waited {usual:.1f} s")


def _ignore_stale_files(plan: Plan, outcome: Outcome) -> None:
    """A checkpoint that a stale holder wrote late has a lower fence, and is not resumed from."""
    folder = plan.scratch / "stale"
    config = config_in(folder)
    with StatePersistence(config, RUN) as stale:
        stale.mark_task_completed("old")
        stale.checkpoint("late")
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
    outcome.ran.append("a stale checkpoint file and a good one")
    outcome.measured.append("the stale file was ignored")


def _rewrite_late(folder: Path) -> None:
    """Give the stale file the newest time and version, as writing it late would."""
    (late,) = (folder / "checkpoints" / RUN).glob("*~late.json")
    fence, _, rest = late.name.partition(".")
    late.rename(late.with_name(f"{fence}.{int(rest[:8]) + 50:08d}{rest[8:]}"))
