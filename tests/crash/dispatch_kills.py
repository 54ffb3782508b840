"""A process that creates, takes, releases, wakes and recovers runs, killed at its Nth call to the disk.

``python dispatch_kills.py SOURCE FOLDER STRIDE`` tries every STRIDE-th call on a copy of the
folder SOURCE, each in a process of its own, and prints as JSON how each ended, and what is wrong with
what was left.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from maestro_hive.maestro.state.codec import encode
from maestro_hive.maestro.state.records import OVER, DispatchState, EntryKind, NewDispatch, NewEntry
from maestro_hive.maestro.state.sqlite.store import SqliteStore
from maestro_hive.maestro.state.store import Append, NewRun
from tests.crash.fault_injector import CALLS, CountingVFS, _fork, _wrap_os, injector

if TYPE_CHECKING:
    from collections.abc import Iterator

    from maestro_hive.maestro.state.store import RunLease, Store

_MOST_POINTS = 3000
_WORKFLOW = "mail"
_START = NewEntry(EntryKind.TASK_COMPLETED, facts=encode({"task": "start"}).data)
_RETRIED = NewEntry(EntryKind.RETRIED)


def _new(name: str, due: float | None = 0.0) -> NewRun:
    return NewRun(name, _WORKFLOW, [_START], "pending", NewDispatch(due=due))


def _claim(store: Store, limit: int) -> dict[str, RunLease]:
    leases = store.claim_runs(queue="default", workflows={_WORKFLOW}, limit=limit)
    return {lease.name: lease for lease in leases}


def _adopt(_: str) -> NewDispatch:
    return NewDispatch()


# --- what is killed -------------------------------------------------------------------------------


def leave_dead_runs(folder: Path) -> int:
    """Make a folder in which a dead process holds a run of workers, and one that is its own."""
    store = SqliteStore(folder)
    store.create_runs([_new("abandoned"), _new("left-ready")])
    _claim(store, 1)
    store.acquire_run("dead-caller", _WORKFLOW, [_START], "running", sync=True)
    return 0


def dispatching(folder: Path) -> Iterator[str]:
    """Yield, after each change, the run that it is about and what is known of it from then on."""
    store = SqliteStore(folder)
    store.recover_runs(_adopt)
    yield "dead-caller created"
    store.create_runs([_new("ends"), _new("held"), _new("woken", None), _new("later", 3600.0)])
    yield "ends created"
    yield "held created"
    yield "woken created"
    yield "later created"
    leases = _claim(store, 10)
    store.append([Append(leases["held"], [_START], "waiting")])
    store.release_run(leases["held"], None)
    store.update_document("inbox", "woken", lambda _: encode(1), "woken")
    yield "woken ready"
    store.append([Append(leases["ends"], [_START], "success", release=True)])
    yield "ends ended"
    store.append([Append(leases["abandoned"], [_START], "stopped", release=True, due=60.0)])
    store.append([Append(leases["dead-caller"], [_RETRIED])])
    store.release_run(leases["dead-caller"])
    store.acquire_run("started", _WORKFLOW, [_START], "running", dispatch=NewDispatch(), sync=True)
    yield "started created"
    store.wake_run("held")
    yield "held ready"
    store.close()


# --- what must be left ----------------------------------------------------------------------------


def wrong_with_dispatch(folder: Path, acks: list[str]) -> Iterator[str]:
    """Yield what is wrong: a run that is lost, or that no worker can take and end."""
    store = SqliteStore(folder)
    known = {name: fact for name, _, fact in (ack.partition(" ") for ack in acks)}
    store.recover_runs(_adopt)
    rows = {row.run_id: row for row in store.dispatches()}
    over = {run.name for run in store.runs() if run.status in OVER}
    for name, fact in known.items():
        record = store.run(name)
        if record is None or not store.entries(record.id):
            yield f"{name} is lost"
        elif (name in rows) is (name in over):
            yield f"{name} has a row and has ended, or has neither"
        elif fact == "ended" and name not in over:
            yield f"{name} had ended"
        elif fact == "ready" and rows[name].state is not DispatchState.READY:
            yield f"{name} was woken and is {rows[name].state.name}"
    yield from _not_ended(store, list(rows))
    store.close()


def _not_ended(store: Store, names: list[str]) -> Iterator[str]:
    """Have a worker end these runs; yield those that it did not get."""
    active = [row.run_id for row in store.dispatches(state=DispatchState.ACTIVE)]
    if active:
        yield f"{active} are active, and nobody executes them"
    for name in names:
        store.wake_run(name)
    leases = _claim(store, 100)
    if leases.keys() != set(names):
        yield f"of {names} only {list(leases)} were taken"
    for lease in leases.values():
        store.append([Append(lease, [_START], "success", release=True)])
    if store.dispatches() or store.leases():
        yield f"left over: {store.dispatches()} {store.leases()}"


# --- trying ---------------------------------------------------------------------------------------


def _killed_at(point: int, folder: Path) -> tuple[int, list[str]]:
    def work(acks: int) -> int:
        vfs, write = CountingVFS(), os.write
        _wrap_os(CALLS)
        injector.log, injector.fail_at = acks, point
        for ack in dispatching(folder):
            write(acks, f"{ack}\n".encode())
        del vfs
        return 0

    return _fork(work)


def _checked(folder: Path, acks: list[str]) -> tuple[int, list[str]]:
    def work(writer: int) -> int:
        for wrong in wrong_with_dispatch(folder, acks):
            os.write(writer, f"{wrong}\n".encode())
        return 0

    return _fork(work)


def _try(source: Path, folder: Path, point: int) -> dict[str, object]:
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(source, folder)
    end, lines = _killed_at(point, folder)
    acks = [line for line in lines if not line.startswith("@")]
    checked, wrong = _checked(folder, acks)
    if checked:
        wrong.append(f"the check ended with {checked}")
    at = [line[1:] for line in lines if line.startswith("@")]
    return {"point": point, "end": end, "at": at, "wrong": wrong}


def main(source: str, folder: str, stride: str) -> None:
    """Try every ``stride``-th point until the scenario ends by itself."""
    logging.getLogger("maestro_hive").addHandler(logging.NullHandler())
    code, _ = _fork(lambda _: leave_dead_runs(Path(source)))
    assert code == 0
    found = []
    for point in range(1, _MOST_POINTS, int(stride)):
        found.append(_try(Path(source), Path(folder), point))
        if found[-1]["end"] == 0:
            break
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main(*sys.argv[1:])
