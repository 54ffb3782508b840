"""The programs that faults are injected into: each reports what was acknowledged.

``python -m faults.scenarios NAME FOLDER ACKS`` runs one in FOLDER and adds a line to the file ACKS
(``-`` is standard output) after each operation that returned. Every scenario resumes from what is
in its folder, so it can be started again after any fault.
"""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from faults import hive_scenario
from faults.executor_scenario import execute
from maestro_hive.kernel.errors import FencedError, MaestroError, StoreFailedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from maestro_hive.engine.config import ExecutionConfig
    from maestro_hive.maestro.state.sqlite.store import SqliteStore
    from maestro_hive.maestro.state.store import RunLease, Store

STEPS = 20
#: Reported before closing, where an error may stay unreported: nothing is promised after it.
CLOSING = "~ closing"
RUN = "faulted"
#: Exit codes: completed, an error that is not ours, a store that continued after it failed.
DONE, RAW_ERROR, WENT_ON = 0, 70, 71
#: Environment variable of the control in which our own code does not sync.
NO_SYNCS = "FAULTS_WITHOUT_SYNCS"
#: How often a program opens its folder, the first time included, after our errors.
_OPENINGS = 3


def result_of(step: int) -> dict[str, Any]:
    """Return the result of a step: some fit into their row, some grow, some do neither."""
    return {"step": step, "text": f"{step} " * (step * 61 % 900)}


def first(folder: Path) -> Iterator[str]:
    """Open a folder for the first time."""
    from maestro_hive.maestro.state.sqlite.store import SqliteStore

    store = SqliteStore(folder, busy_seconds=5)
    yield "opened"
    with _refusing(store):
        store.acquire_run(RUN)
        yield "leased"
        yield CLOSING
        store.close()


def steps(folder: Path, run: str = RUN, count: int = STEPS) -> Iterator[str]:
    """Record steps: started without a sync, completed with one."""
    from maestro_hive.maestro.state import codec
    from maestro_hive.maestro.state.records import EntryKind, NewEntry
    from maestro_hive.maestro.state.sqlite.store import SqliteStore

    store = SqliteStore(folder, busy_seconds=5)
    with _refusing(store):
        hold = store.acquire_run(run)
        known = store.entries(hold.run)
        done = sum(entry.kind == EntryKind.STEP_COMPLETED for entry in known)
        for step in range(done + 1, count + 1):
            started = NewEntry(EntryKind.ATTEMPT_STARTED, step, 1, facts=b'{"name":"work"}')
            _append(store, hold, started, sync=False)
            yield f"{run} started {step}"
            value = codec.encode(result_of(step))
            completed = NewEntry(EntryKind.STEP_COMPLETED, step, 1, value=value, family="work")
            _append(store, hold, completed, sync=True)
            yield f"{run} completed {step}"
        yield CLOSING
        store.close()


def long(folder: Path, run: str = RUN) -> Iterator[str]:
    """Record so much that the WAL is checkpointed and overwritten."""
    from maestro_hive.maestro.state.sqlite.store import SqliteStore

    number = 0
    for number, ack in enumerate(steps(folder, run, count=400), start=1):
        yield ack
        if number % 60 == 0:
            store = SqliteStore(folder, busy_seconds=5)
            store.checkpoint()
            store.close()


def starts(folder: Path, run: str = RUN, count: int = 120) -> Iterator[str]:
    """Start many attempts without a sync, in a WAL that has been used before."""
    from maestro_hive.maestro.state.records import EntryKind, NewEntry
    from maestro_hive.maestro.state.sqlite.store import SqliteStore

    yield from list(steps(folder, run))
    store = SqliteStore(folder, busy_seconds=5)
    store.checkpoint()
    hold = store.acquire_run(run)
    for step in range(STEPS + 1, count + 1):
        started = NewEntry(EntryKind.ATTEMPT_STARTED, step, 1, facts=b'{"name":"work"}')
        _append(store, hold, started, sync=False)
        yield f"{run} started {step}"


def _append(store: Store, hold: RunLease, entry: Any, *, sync: bool) -> None:
    from maestro_hive.maestro.state.store import Append

    (refused,) = store.append([Append(hold, [entry])], sync=sync)
    if isinstance(refused, FencedError):
        raise refused


def config_in(folder: Path) -> ExecutionConfig:
    """Return a configuration with both folders inside ``folder``."""
    from maestro_hive.engine.config import (
        ExecutionConfig,
        StateConfig,
    )

    inside = StateConfig(
        state_dir=str(folder / "state"),
        checkpoint_dir=str(folder / "checkpoints"),
        max_checkpoints_per_workflow=3,
    )
    return ExecutionConfig(state=inside)


def checkpoint(folder: Path, count: int = 5) -> Iterator[str]:
    """Complete tasks, and write a checkpoint after each."""
    from maestro_hive.unified_execution.state_persistence import StatePersistence

    state = StatePersistence(config_in(folder), RUN)
    try:
        for task in range(len(state.state.completed_tasks) + 1, count + 1):
            state.mark_task_completed(f"task-{task}", {f"made-{task}": result_of(task)})
            yield f"task {task}"
            state.checkpoint(f"cp-{task}")
            yield f"checkpoint {task}"
        yield CLOSING
    finally:
        state.shutdown()


def manager(folder: Path, count: int = 10) -> Iterator[str]:
    """Set and update values, and write a checkpoint at the end."""
    from maestro_hive.maestro.state.state_manager import StateManager

    values = StateManager(persistence_dir=folder, auto_persist=True)
    try:
        for number in range(values.get_state("count", default=0) + 1, count + 1):
            values.set_state(f"key-{number}", result_of(number))
            yield f"set {number}"
            values.update_state("count", lambda before: (before or 0) + 1)
            yield f"counted {number}"
        values.checkpoint("all-of-it")
        yield "saved"
        yield CLOSING
    finally:
        values.shutdown()


def save(folder: Path, count: int = 6) -> Iterator[str]:
    """Save the state of a feature again and again."""
    from maestro_hive.team.state import ExecutionState, TaskState

    path = folder / ".mahabharatha" / "state.json"
    known = ExecutionState.load(path)
    for level in range(known.current_level + 1 if known else 1, count + 1):
        state = ExecutionState.create("a feature")
        state.current_level = level
        state.tasks = {f"T{n}": TaskState(f"T{n}", error=str(level)) for n in range(30)}
        state.save(path)
        yield f"saved {level}"


def imported(folder: Path) -> Iterator[str]:
    """Import a run of many entries, some with large values, unless it is there."""
    from maestro_hive.admin.transfer import import_run
    from maestro_hive.kernel.errors import ConfigurationError
    from maestro_hive.maestro.state.stores import close_store, open_store

    store = open_store(folder / "state")  # so that it is closed after the report
    try:
        with contextlib.suppress(ConfigurationError):  # a process before this one imported it
            import_run(folder / "state", run_document(), "a file")
        yield "imported"
        yield CLOSING
    finally:
        close_store(store)


def run_document() -> bytes:
    """Return the text of an export: a run of twenty steps."""
    from maestro_hive.admin.transfer import export_run
    from maestro_hive.maestro.state import codec
    from maestro_hive.maestro.state.memory import MemoryStore
    from maestro_hive.maestro.state.records import EntryKind, NewEntry

    store = MemoryStore()
    hold = store.acquire_run(RUN)
    for step in range(1, STEPS + 1):
        started = NewEntry(EntryKind.ATTEMPT_STARTED, step, 1, facts=b'{"name":"work"}')
        value = codec.encode(result_of(step))
        completed = NewEntry(EntryKind.STEP_COMPLETED, step, 1, value=value, family="work")
        for entry in (started, completed):
            _append(store, hold, entry, sync=True)
    return export_run(store, RUN, with_values=True).text


SCENARIOS: dict[str, Callable[[Path], Iterator[str]]] = {
    "first": first,
    "steps": steps,
    "checkpoint": checkpoint,
    "manager": manager,
    "save": save,
    "execute": execute,
    "hive": hive_scenario.run,
    "long": long,
    "starts": starts,
    "second": lambda folder: steps(folder, "second"),
    "imported": imported,
}


class ContinuedAfterFailureError(Exception):
    """A store accepted work after one of its writes had failed."""


@contextmanager
def _refusing(store: SqliteStore) -> Iterator[None]:
    """Check that a store that failed refuses everything afterwards."""
    try:
        yield
    except StoreFailedError:
        for attempt in (lambda: store.acquire_run("another"), store.runs, store.collect):
            try:
                attempt()
            except StoreFailedError:
                continue
            raise ContinuedAfterFailureError("the store continued after a failed write") from None
        store.close()
        raise
    except MaestroError:
        store.close()
        raise


def _disable_syncs() -> None:
    """Acknowledge without syncing: the control that shows that losses are detected."""
    for name in ("fsync", "fdatasync"):
        setattr(os, name, lambda _fd: None)


def main(name: str, folder: Path, acks: str) -> int:
    """Run a scenario to its end; open the folder again after our errors."""
    if os.environ.get(NO_SYNCS):
        _disable_syncs()
    target = 1 if acks == "-" else os.open(acks, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for _ in range(_OPENINGS):
        try:
            for ack in SCENARIOS[name](folder):
                os.write(target, f"{ack}\n".encode())
        except MaestroError as error:
            os.write(target, f"! {type(error).__name__} {error!r}\n".encode())
        except ContinuedAfterFailureError:
            return WENT_ON
        except BaseException:  # noqa: BLE001 - it is reported
            traceback.print_exc()
            return RAW_ERROR
        else:
            return DONE
    return DONE


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2]), sys.argv[3]))
