"""Resumes a team run from ``.mahabharatha/state.json`` alone, when its journal is gone.

The file says which tasks are complete, with their results as far as it has them, and beside it are the
worker checkpoints of others. From these a new run is made. Its arguments have what was restored, so it is
as durable as all else, and tasks that the graph has changed since are executed again.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from maestro_hive.kernel.errors import ConfigurationError, MaestroError, StorageError
from maestro_hive.kernel.files import explained, make_private_folder, read_whole, write_atomically
from maestro_hive.team.graph import check_graph
from maestro_hive.team.inputs import digest_of, digests, task_input
from maestro_hive.team.progress import checkpoint_text, read_checkpoint
from maestro_hive.team.state import MAX_STATE_BYTES, Checkpoint, ExecutionState, TaskStatus

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
    from contextlib import AbstractContextManager

    from maestro_hive.maestro.state.strict_json import Json
    from maestro_hive.team.graph import Graph, Plan, Task

FOLDER = Path(".mahabharatha")
STATE, GRAPH, CHECKPOINTS = FOLDER / "state.json", FOLDER / "run-graph.json", "checkpoints"
#: The members that a team run adds to the state: its run, the state folder that this is in.
RUN, STORE = "run", "store"
#: The members that it adds to a complete task: its result, and the digest of its input.
RESULT, INPUT = "result", "input"


class Restored(NamedTuple):
    """What a state says: complete tasks and worker checkpoints, by task."""

    source: str
    feature: str
    tasks: dict[str, Json]
    checkpoints: dict[str, Json]
    #: The run that wrote it, and the folder of its journal; None if that was another program.
    run_id: str | None = None
    store: str | None = None
    #: All tasks that it has, and those that were executed, whatever has become of that.
    ids: frozenset[str] = frozenset()
    executed: frozenset[str] = frozenset()

    def arguments(self, graph: Graph, folder: Path, apart: Collection[str] = ()) -> dict[str, Json]:
        """Return what is recorded of it: the argument of a run.

        A result that the state does not have is made of the files as they are now, but for those in
        the folders ``apart``, which are given by their real paths.
        """
        owned = {task.id: list(task.files.owned) for task in graph.tasks}
        tasks = {
            name: task
            if _is_result(task.get(RESULT))
            else {**task, RESULT: {"files": digests(folder, owned.get(name, []), apart)}}
            for name, task in self.tasks.items()
        }
        return {"from": self.source, "tasks": tasks, "checkpoints": self.checkpoints}


def _is_result(value: Json) -> bool:
    return isinstance(value, dict) and isinstance(value.get("files"), dict)


def read_state(folder: Path) -> Restored | None:
    """Return what the state file in the folder of a run says; None if there is none.

    Raises ``ConfigurationError`` with the way out if it cannot be read.
    """
    from jsonschema import ValidationError

    path = folder / STATE
    try:
        state = ExecutionState.load(path)
    except (MaestroError, ValidationError) as error:
        raise ConfigurationError(
            f"{error}. The file may be all that is left of a run: repair it, or start a new run with"
            " --force, which replaces it"
        ) from error
    return None if state is None else restored_from(state, path)


def restored_from(state: ExecutionState, path: Path) -> Restored:
    """Return what a state says."""
    run, store = state.extra.get(RUN), state.extra.get(STORE)
    return Restored(
        source=str(path),
        feature=state.feature,
        tasks={
            name: task.to_dict()
            for name, task in state.tasks.items()
            if task.status is TaskStatus.COMPLETE
        },
        checkpoints=dict(_checkpoints(state, path.parent)),
        run_id=run if isinstance(run, str) else None,
        store=store if isinstance(store, str) else None,
        ids=frozenset(state.tasks),
        executed=frozenset(
            name
            for name, task in state.tasks.items()
            if task.started_at is not None or task.status is TaskStatus.COMPLETE
        ),
    )


def _checkpoints(state: ExecutionState, folder: Path) -> Iterator[tuple[str, Json]]:
    """Yield the worker checkpoints that a state names, by task; those that cannot be read are none."""
    from jsonschema import ValidationError

    for name in state.checkpoints:
        for path in (
            folder / name,
            folder / CHECKPOINTS / name,
            folder / CHECKPOINTS / f"{name}.json",
        ):
            try:
                data = read_checkpoint(read_whole(path, MAX_STATE_BYTES), str(path))
                found = Checkpoint.from_dict(data)
            except (OSError, MaestroError, ValidationError, TypeError, ValueError):
                continue  # also of a name that no file can have
            if found.task_id in state.tasks:
                yield found.task_id, found.to_dict()
            break


def is_other_graph(restored: Restored, graph: Graph) -> bool:
    """Return whether a state is of another feature, or has none of the tasks of a graph."""
    ids = {task.id for task in graph.tasks}
    return restored.feature != graph.feature or (bool(restored.ids) and not ids & restored.ids)


def taken(plan: Plan, restored: Json) -> dict[str, Json]:
    """Return the results of the tasks that are taken as complete from what was restored.

    These are the ones whose input is the same as then, as far as that is known, and whose dependencies
    are taken as well.
    """
    tasks: Mapping[str, Json] = restored["tasks"] if restored else {}
    results: dict[str, Json] = {}
    for at in plan.order if tasks else ():
        task = plan.graph.tasks[at]
        found = tasks.get(task.id)
        if found is None or not all(each in results for each in task.dependencies):
            continue
        then, now = found.get(INPUT), input_digest(plan.graph, task)
        if then is None or now is None or then == now:
            results[task.id] = found[RESULT]
    return results


def input_digest(graph: Graph, task: Task) -> str | None:
    """Return the SHA-256 of what a task is executed with, without the results of others.

    None if it has no persona yet: then nobody can say whether it is the same as before.
    """
    return None if graph.persona_of(task) is None else digest_of(task_input(graph, task))


def has_moved(before: Path, folder: Path, run_id: str) -> bool:
    """Return whether a folder is the one that a run was executed in, under another name."""
    if before == folder or before.exists():
        return False
    found = read_state(folder)
    return found is not None and found.run_id == run_id


# --- the files beside the state -------------------------------------------------------------------


class CheckpointFiles:
    """The worker checkpoints of a run, each in a file; for those who have nothing but the state."""

    def __init__(self, folder: Path, tasks: Iterable[str], current: Iterable[str]) -> None:
        """Keep the files of the ``current`` tasks, and remove those of others."""
        self._folder = folder / FOLDER / CHECKPOINTS
        #: Called when there is another file: the state names it.
        self.on_change: Callable[[], None] = lambda: None
        wanted = set(current)
        with _explained(self._folder):
            left = list(tasks) if self._folder.is_dir() else []
            found = [each for each in left if each in wanted and self._path(each).is_file()]
        self._names: dict[str, None] = dict.fromkeys(found)
        for each in left:
            if each not in self._names:
                self._remove(each)

    def names(self) -> list[str]:
        """Return the names of the files, as the state has them."""
        return [f"{CHECKPOINTS}/{each}.json" for each in self._names]

    def write(self, task: str, checkpoint: dict[str, Json]) -> None:
        """Write a checkpoint, completely and durably."""
        make_private_folder(self._folder)
        write_atomically(self._path(task), checkpoint_text(checkpoint))
        self._names[task] = None
        self.on_change()

    def remove(self, task: str) -> None:
        """Remove a checkpoint: its task is complete."""
        if task in self._names:
            del self._names[task]
            self._remove(task)

    def _remove(self, task: str) -> None:
        path = self._path(task)
        with _explained(path):
            path.unlink(missing_ok=True)

    def _path(self, task: str) -> Path:
        return self._folder / f"{task}.json"


def _explained(path: Path) -> AbstractContextManager[None]:
    """Raise, for an error of the system, one that says which file of a checkpoint is in the way."""
    return explained(
        lambda reason: StorageError(
            f"{path} cannot be used for the checkpoint of a worker: {reason}; remove it, or make it"
            " writable, and resume the run"
        )
    )


def write_graph(folder: Path, document: Json) -> None:
    """Write the graph of a run, unless it is there: the state alone does not say what to execute."""
    path, text = folder / GRAPH, _as_text(document)
    make_private_folder(path.parent)
    try:
        if read_whole(path, MAX_STATE_BYTES) == text:
            return
    except (OSError, MaestroError):
        pass
    write_atomically(path, text)


def recorded_graph(folder: Path) -> Graph | None:
    """Return the graph of the run whose state is in a folder; None if it is not there."""
    try:
        text = read_whole(folder / GRAPH, MAX_STATE_BYTES)
    except (OSError, MaestroError):
        return None
    return check_graph(text, "json").graph


def _as_text(value: Json) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=True) + "\n").encode()
