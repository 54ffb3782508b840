"""What must be left of a scenario.

Everything that was acknowledged, nothing that was not done, and a folder that opens, is intact and
accepts the next write. After a power cut (``power``) "started" may be lost, "completed" may not.
"""

from __future__ import annotations

import shutil
import warnings
from typing import TYPE_CHECKING, Any

from faults.executor_scenario import check_execution
from faults.hive_scenario import check_runs
from faults.registry import BrokenPromiseError, require
from faults.scenarios import RUN, STEPS, config_in, imported, result_of
from maestro_hive.kernel import files
from maestro_hive.kernel.errors import FencedError, MaestroError
from maestro_hive.maestro.state import codec
from maestro_hive.maestro.state import run_document as documents
from maestro_hive.maestro.state.checkpoint import CheckpointManager
from maestro_hive.maestro.state.records import EntryKind, NewEntry
from maestro_hive.maestro.state.sqlite.store import SqliteStore
from maestro_hive.maestro.state.sqlite.wal import DamagedJournalWarning
from maestro_hive.maestro.state.store import Append
from maestro_hive.team.state import ExecutionState
from maestro_hive.unified_execution.state_persistence import StatePersistence

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


class Acknowledged:
    """What a scenario acknowledged: before a power cut (``certain``), and during it."""

    def __init__(self, certain: list[str], late: list[str]) -> None:
        self.openings = 1 + sum(ack.startswith("!") for ack in certain)
        self.certain = [ack for ack in certain if ack[0] not in "!~"]
        self.all = [*self.certain, *(ack for ack in late if ack[0] not in "!~")]

    def least(self, what: str) -> int:
        """Return the highest number that must be there."""
        return _highest(self.certain, what)

    def most(self, what: str) -> int:
        """Return the highest number that may be there: one operation may have been running."""
        return _highest(self.all, what) + 1

    def numbers(self, what: str) -> list[int]:
        """Return every number that must be there."""
        return _numbers(self.certain, what)

    def runs(self) -> list[str]:
        """Return the runs that were named."""
        return sorted({ack.split(" ", 1)[0] for ack in self.all} | {RUN})


def _highest(acks: list[str], what: str) -> int:
    return max(_numbers(acks, what), default=0)


def _numbers(acks: list[str], what: str) -> list[int]:
    return [int(ack.rsplit(" ", 1)[1]) for ack in acks if ack.startswith(f"{what} ")]


def verify(
    name: str, folder: Path, acks: list[str], *, late: list[str] | None = None, power: bool = False
) -> list[str]:
    """Return what is wrong with the folder of a scenario; empty if nothing is."""
    acked = Acknowledged(acks, late or [])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DamagedJournalWarning)
        try:
            _CHECKS[name](folder, acked, power)
        except (BrokenPromiseError, MaestroError) as error:
            return [f"{type(error).__name__}: {error}"]
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            return [f"a raw {type(error).__name__}: {error}"]
    return []


def false_alarm(folder: Path) -> bool:
    """Return whether a folder was reported as damaged when it was opened."""
    return any(folder.rglob("damaged/*.json"))


# --- the journal -------------------------------------------------------------------------------


def _check_first(folder: Path, _acked: Acknowledged, _power: bool) -> None:
    _check_intact(folder)


def _check_steps(folder: Path, acked: Acknowledged, power: bool) -> None:
    store = SqliteStore(folder, busy_seconds=5)
    try:
        for run in acked.runs():
            _check_run(store, run, acked, power=power)
    finally:
        store.close()
    _check_intact(folder)


def _check_run(store: SqliteStore, run: str, acked: Acknowledged, *, power: bool) -> None:
    record = store.run(run)
    entries = store.entries(record.id) if record else []
    completed = [entry for entry in entries if entry.kind == EntryKind.STEP_COMPLETED]
    started = {entry.step for entry in entries if entry.kind == EntryKind.ATTEMPT_STARTED}
    least, most = acked.least(f"{run} completed"), acked.most(f"{run} completed")
    require(
        least <= len(completed) <= most,
        f"{run}: {least} steps were acknowledged and {len(completed)} are there",
    )
    if not power:
        acknowledged = set(range(1, acked.least(f"{run} started") + 1))
        require(started >= acknowledged, f"{run}: a started attempt is lost")
    unknown = max(started, default=0) > acked.most(f"{run} started")
    require(not unknown, f"{run}: there is an attempt that never started")
    for number, entry in enumerate(completed, start=1):
        require(entry.step == number and number in started, f"{run}: step {number} is out of order")
        data = store.load(entry)
        right = data == codec.encode(result_of(number)).data
        require(right, f"{run}: step {number} has another result")


def _check_intact(folder: Path) -> None:
    """The folder opens, is intact, and accepts the next write."""
    store = SqliteStore(folder, busy_seconds=5)
    try:
        wrong = store.check()
        require(not wrong, f"check found {wrong}")
        hold = store.acquire_run(RUN)
        note = NewEntry(EntryKind.PROGRESS_SAVED, STEPS + 1, 1, value=codec.encode("next"))
        (refused,) = store.append([Append(hold, [note])])
        require(not isinstance(refused, FencedError), f"the next write was refused: {refused}")
        last = store.entries(hold.run)[-1]
        require(store.load(last) == b'"next"', "the next write is not there")
    finally:
        store.close()


def _check_executed(folder: Path, acked: Acknowledged, _power: bool) -> None:
    check_execution(folder, acked.certain, acked.openings)
    _check_intact(folder / "state")


def _check_hive(folder: Path, acked: Acknowledged, _power: bool) -> None:
    check_runs(folder, acked.certain, acked.openings)
    _check_intact(folder / "state")


# --- checkpoints -------------------------------------------------------------------------------


def _check_checkpoint(folder: Path, acked: Acknowledged, _power: bool) -> None:
    tasks, written = acked.least("task"), acked.least("checkpoint")
    _check_files(folder, acked.numbers("checkpoint"))
    with StatePersistence(config_in(folder), RUN) as state:
        _check_tasks(state, tasks, acked.most("task"))
        require(state.restored is None or not tasks, "the journal was not used")
        state.mark_task_completed("next")
        state.checkpoint("next")
    if written:
        _check_copies(folder, written)


def _check_tasks(state: StatePersistence, least: int, most: int) -> None:
    done = state.state.completed_tasks
    require(done == [f"task-{n + 1}" for n in range(len(done))], f"tasks are {done}")
    require(least <= len(done) <= most, f"{least} tasks acknowledged, {len(done)} are there")
    for number in range(1, len(done) + 1):
        right = state.state.artifacts.get(f"made-{number}") == result_of(number)
        require(right, f"the artifacts of task {number} are not there")


def _check_files(folder: Path, written: list[int]) -> None:
    found = CheckpointManager(folder / "checkpoints", max_checkpoints=3)
    health = found.health_check()
    require(health["healthy"], f"checkpoints are damaged: {health['damaged']}")
    ids = found.checkpoint_ids(RUN)
    wanted = [f"cp-{n}" for n in written[-2:]][::-1]
    require([i for i in ids if i in wanted] == wanted, f"of {wanted} only {ids} are there")
    copy = folder / "state" / "runs" / RUN / "execution_state.json"
    if written or copy.exists():
        documents.unseal(files.read_whole(copy), "execution_state", str(copy))


def _check_copies(folder: Path, written: int) -> None:
    """Without its journal the run resumes from its newest copy."""
    alone = folder.with_name(f"{folder.name}-copies")
    shutil.copytree(folder, alone, ignore=shutil.ignore_patterns("journal*", "holders"))
    try:
        with StatePersistence(config_in(alone), RUN) as state:
            require(state.restored is not None, "the copies were not used")
            tasks = state.state.completed_tasks
            require(len(tasks) >= written, f"only {len(tasks)} of {written} tasks in the copies")
    finally:
        shutil.rmtree(alone)


# --- values and features -----------------------------------------------------------------------


def _check_manager(folder: Path, acked: Acknowledged, _power: bool) -> None:
    store = SqliteStore(folder, busy_seconds=5)
    try:
        found = {d.key: codec.decode(d.value) for d in store.documents("default")}
    finally:
        store.close()
    count = found.pop("count", 0)
    least, most = acked.least("counted"), acked.most("counted")
    require(least <= count <= most, f"{least} counted, and the count is {count}")
    possible: dict[str, Any] = {f"key-{n}": result_of(n) for n in range(1, acked.most("set") + 1)}
    wanted = {f"key-{n}" for n in range(1, acked.least("set") + 1)}
    require(wanted <= found.keys(), "a value that was set is lost")
    unknown = [key for key, value in found.items() if possible.get(key) != value]
    require(not unknown, f"values that were never set: {unknown}")
    saved = folder / "checkpoints" / "all-of-it.json"
    if "saved" in acked.certain or saved.exists():
        documents.unseal(files.read_whole(saved), "state_manager_checkpoint", str(saved))
    _check_intact(folder)


def _check_save(folder: Path, acked: Acknowledged, _power: bool) -> None:
    path = folder / ".mahabharatha" / "state.json"
    state = ExecutionState.load(path)
    level = state.current_level if state else 0
    least, most = acked.least("saved"), acked.most("saved")
    require(least <= level <= most, f"level {least} was saved, and level {level} is there")
    if state:
        mixed = {task.error for task in state.tasks.values()} != {str(level)}
        require(not mixed, "two states are mixed")
    following = ExecutionState.create("next")
    following.save(path)
    loaded = ExecutionState.load(path)
    require(loaded is not None and loaded.feature == "next", "the next save is not there")


def _check_imported(folder: Path, acked: Acknowledged, _power: bool) -> None:
    """Check that a run was imported completely or not at all, and can be imported in the latter case."""
    state = folder / "state"
    count = _entries_of_import(state) if (state / "journal.db").exists() else None
    require(count is not None or not acked.certain, "an imported run is gone")
    require(count in (None, 2 * STEPS + 1), f"a killed import left a run of {count} entries")
    if count is None:
        require("imported" in list(imported(folder)), "it cannot be imported any more")
        require(_entries_of_import(state) == 2 * STEPS + 1, "it was not imported")
    _check_intact(state)


def _entries_of_import(state: Path) -> int | None:
    store = SqliteStore(state)
    try:
        record = store.run(RUN)
        return None if record is None else len(store.entries(record.id))
    finally:
        store.close()


_CHECKS: dict[str, Callable[[Path, Acknowledged, bool], None]] = {
    "first": _check_first,
    "steps": _check_steps,
    "second": _check_steps,
    "long": _check_steps,
    "starts": _check_steps,
    "execute": _check_executed,
    "hive": _check_hive,
    "checkpoint": _check_checkpoint,
    "manager": _check_manager,
    "save": _check_save,
    "imported": _check_imported,
}
