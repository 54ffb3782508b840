"""What must be left of a scenario.

All that was acknowledged, nothing invented, and a folder that opens, is sound and takes the next
write.

``power`` is for a cut that reaches the disk: there "begun" may be lost, "kept" may not.
"""

from __future__ import annotations

import shutil
import warnings
from typing import TYPE_CHECKING, Any

from faults.executing import check_execution
from faults.hive_runs import check_runs
from faults.lost import LostError, require
from faults.scenarios import RUN, STEPS, config_in, result_of
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


class Said:
    """What a scenario acknowledged: for certain, and perhaps only after the power was gone."""

    def __init__(self, certain: list[str], late: list[str]) -> None:
        self.openings = 1 + sum(ack.startswith("!") for ack in certain)
        self.certain = [ack for ack in certain if ack[0] not in "!~"]
        self.all = [*self.certain, *(ack for ack in late if ack[0] not in "!~")]

    def least(self, what: str) -> int:
        """Return the highest number that must be there."""
        return _highest(self.certain, what)

    def most(self, what: str) -> int:
        """Return the highest number that may be there: one may have been under way."""
        return _highest(self.all, what) + 1

    def numbers(self, what: str) -> list[int]:
        """Return every number that must be there."""
        return _numbers(self.certain, what)

    def runs(self) -> list[str]:
        """Return the runs that are spoken of."""
        return sorted({ack.split(" ", 1)[0] for ack in self.all} | {RUN})


def _highest(acks: list[str], what: str) -> int:
    return max(_numbers(acks, what), default=0)


def _numbers(acks: list[str], what: str) -> list[int]:
    return [int(ack.rsplit(" ", 1)[1]) for ack in acks if ack.startswith(f"{what} ")]


def verify(
    name: str, folder: Path, acks: list[str], *, late: list[str] | None = None, power: bool = False
) -> list[str]:
    """Return what is wrong with the folder a scenario left, in words; empty is good."""
    said = Said(acks, late or [])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DamagedJournalWarning)
        try:
            _CHECKS[name](folder, said, power)
        except (LostError, MaestroError) as error:
            return [f"{type(error).__name__}: {error}"]
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            return [f"a raw {type(error).__name__}: {error}"]
    return []


def false_alarm(folder: Path) -> bool:
    """Return whether a folder was found damaged when it was opened."""
    return any(folder.rglob("damaged/*.json"))


# --- the journal -------------------------------------------------------------------------------


def _check_first(folder: Path, _said: Said, _power: bool) -> None:
    _check_sound(folder)


def _check_steps(folder: Path, said: Said, power: bool) -> None:
    store = SqliteStore(folder, busy_seconds=5)
    try:
        for run in said.runs():
            _check_run(store, run, said, power=power)
    finally:
        store.close()
    _check_sound(folder)


def _check_run(store: SqliteStore, run: str, said: Said, *, power: bool) -> None:
    record = store.run(run)
    entries = store.entries(record.id) if record else []
    kept = [entry for entry in entries if entry.kind == EntryKind.STEP_COMPLETED]
    begun = {entry.step for entry in entries if entry.kind == EntryKind.ATTEMPT_STARTED}
    least, most = said.least(f"{run} kept"), said.most(f"{run} kept")
    require(
        least <= len(kept) <= most,
        f"{run}: {least} steps were acknowledged and {len(kept)} are there",
    )
    if not power:
        acknowledged = set(range(1, said.least(f"{run} begun") + 1))
        require(begun >= acknowledged, f"{run}: a begun attempt is lost")
    invented = max(begun, default=0) > said.most(f"{run} begun")
    require(not invented, f"{run}: an attempt was invented")
    for number, entry in enumerate(kept, start=1):
        require(entry.step == number and number in begun, f"{run}: step {number} is out of order")
        data = store.load(entry)
        right = data == codec.encode(result_of(number)).data
        require(right, f"{run}: step {number} has another result")


def _check_sound(folder: Path) -> None:
    """The folder opens, has nothing wrong in it, and takes the next write."""
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


def _check_executed(folder: Path, said: Said, _power: bool) -> None:
    check_execution(folder, said.certain, said.openings)
    _check_sound(folder / "state")


def _check_hive(folder: Path, said: Said, _power: bool) -> None:
    check_runs(folder, said.certain, said.openings)
    _check_sound(folder / "state")


# --- checkpoints -------------------------------------------------------------------------------


def _check_checkpoint(folder: Path, said: Said, _power: bool) -> None:
    tasks, written = said.least("task"), said.least("checkpoint")
    _check_files(folder, said.numbers("checkpoint"))
    with StatePersistence(config_in(folder), RUN) as state:
        _check_tasks(state, tasks, said.most("task"))
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
        require(right, f"what task {number} made is not there")


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
    """Without its journal the run resumes from what was written last."""
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


def _check_manager(folder: Path, said: Said, _power: bool) -> None:
    store = SqliteStore(folder, busy_seconds=5)
    try:
        found = {d.key: codec.decode(d.value) for d in store.documents("default")}
    finally:
        store.close()
    count = found.pop("count", 0)
    least, most = said.least("counted"), said.most("counted")
    require(least <= count <= most, f"{least} counted, and the count is {count}")
    possible: dict[str, Any] = {f"key-{n}": result_of(n) for n in range(1, said.most("set") + 1)}
    wanted = {f"key-{n}" for n in range(1, said.least("set") + 1)}
    require(wanted <= found.keys(), "a value that was set is lost")
    strange = [key for key, value in found.items() if possible.get(key) != value]
    require(not strange, f"values were invented: {strange}")
    saved = folder / "checkpoints" / "all-of-it.json"
    if "saved" in said.certain or saved.exists():
        documents.unseal(files.read_whole(saved), "state_manager_checkpoint", str(saved))
    _check_sound(folder)


def _check_save(folder: Path, said: Said, _power: bool) -> None:
    path = folder / ".mahabharatha" / "state.json"
    state = ExecutionState.load(path)
    level = state.current_level if state else 0
    least, most = said.least("saved"), said.most("saved")
    require(least <= level <= most, f"level {least} was saved, and level {level} is there")
    if state:
        mixed = {task.error for task in state.tasks.values()} != {str(level)}
        require(not mixed, "two states are mixed")
    following = ExecutionState.create("next")
    following.save(path)
    loaded = ExecutionState.load(path)
    require(loaded is not None and loaded.feature == "next", "the next save is not there")


_CHECKS: dict[str, Callable[[Path, Said, bool], None]] = {
    "first": _check_first,
    "steps": _check_steps,
    "second": _check_steps,
    "long": _check_steps,
    "begins": _check_steps,
    "execute": _check_executed,
    "hive": _check_hive,
    "checkpoint": _check_checkpoint,
    "manager": _check_manager,
    "save": _check_save,
}
