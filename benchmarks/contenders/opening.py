"""Opening a run of 10,000 finished steps in a fresh process."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from benchmarks import steps
from benchmarks.contender import Contender, Figures
from maestro_hive import ExecutionConfig, StatePersistence
from maestro_hive.engine.config import StateConfig
from maestro_hive.maestro.state import codec
from maestro_hive.maestro.state.projections import fold
from maestro_hive.maestro.state.records import EntryKind, NewEntry
from maestro_hive.maestro.state.sqlite.store import SqliteStore
from maestro_hive.maestro.state.store import Append

if TYPE_CHECKING:
    from pathlib import Path

_COUNT = 10_000


def _with_steps(folder: Path) -> None:
    store = SqliteStore(folder)
    steps.fill(store, store.acquire_run("run"), 1, _COUNT)
    store.close()


def _with_tasks(folder: Path) -> None:
    store = SqliteStore(folder)
    hold = store.acquire_run("run")
    tasks = [
        NewEntry(
            EntryKind.TASK_COMPLETED,
            facts=codec.dump_canonical({"task": f"task-{number}"}),
            value=codec.encode({f"artifact-{number}": "report.md"}),
        )
        for number in range(_COUNT)
    ]
    store.append([Append(hold, tasks)])
    store.close()


def _read(folder: Path) -> Figures:
    """Take the run, read its entries, add them up."""
    store = SqliteStore(folder)
    started = time.perf_counter()
    hold = store.acquire_run("run")
    held = time.perf_counter()
    entries = store.entries(hold.run)
    read = time.perf_counter()
    state = fold(entries, store.load)
    folded = time.perf_counter()
    assert sum(step.completed is not None for step in state.steps.values()) == _COUNT
    store.close()
    return {
        "hold": held - started,
        "entries": read - held,
        "fold": folded - read,
        "seconds": folded - started,
    }


def _construct(folder: Path) -> Figures:
    """Make a ``StatePersistence``, the store's own opening included."""
    config = ExecutionConfig(
        state=StateConfig(state_dir=str(folder), checkpoint_dir=str(folder / "checkpoints"))
    )
    started = time.perf_counter()
    persistence = StatePersistence(config, "run")
    took = time.perf_counter() - started
    persistence.shutdown()
    return {"seconds": took}


CONTENDERS = (
    Contender(name="open-entries", group="open", measure=_read, prepare=_with_steps),
    Contender(name="open-steps", group="open", measure=_construct, prepare=_with_steps),
    Contender(name="open-tasks", group="open", measure=_construct, prepare=_with_tasks),
)
