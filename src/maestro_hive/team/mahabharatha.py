"""The states that MAHABHARATHA itself writes, in both of its generations.

The older one is ``.mahabharatha/state.json``: tasks with five statuses, or, from its orchestrator, the ids of
the tasks that are completed. The newer one is ``.mahabharatha/state/FEATURE.json``: tasks by id, with nine
statuses, levels and a log. Only what is complete is taken of them; the rest is executed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from maestro_hive.kernel.errors import ConfigurationError, DecodeError
from maestro_hive.maestro.state import codec
from maestro_hive.team.restoring import Restored, restored_from
from maestro_hive.team.state import ExecutionState, TaskState, TaskStatus, read_time

if TYPE_CHECKING:
    from datetime import datetime
    from pathlib import Path

    from maestro_hive.maestro.state.strict_json import Json

#: The statuses of both generations; ``completed`` is what its agents write, too.
_COMPLETE = ("complete", "completed")
_OTHERS = (
    *("todo", "pending", "claimed", "running", "in_progress", "verifying"),
    *("failed", "blocked", "paused"),
)
_MOST_PROBLEMS = 20


def read_foreign(data: bytes, path: Path, feature: str | None = None) -> Restored:
    """Return what a state says; raise ``ConfigurationError`` with all that is wrong with it.

    ``feature`` is that of its graph, where the state has none.
    """
    try:
        tree = codec.parse(data, str(path))
    except DecodeError as error:
        raise ConfigurationError(f"{error}; it is neither an exported run nor a state") from error
    if not isinstance(tree, dict) or not {"tasks", "completed_tasks"} & tree.keys():
        raise ConfigurationError(
            f"{path} is neither a run that 'maestro export --with-values' wrote nor a state of"
            " MAHABHARATHA: that has 'tasks' or 'completed_tasks'"
        )
    problems: list[str] = []
    state = _state(tree, feature, problems)
    if problems:
        more = len(problems) - _MOST_PROBLEMS
        lines = "".join(f"\n  {each}" for each in problems[:_MOST_PROBLEMS])
        rest = f"\n  and {more} more" if more > 0 else ""
        raise ConfigurationError(
            f"{path} is no state of MAHABHARATHA; nothing was imported:{lines}{rest}"
        )
    if "sha256" in tree:  # it is one of ours, which has to be as it was written
        return restored_from(ExecutionState.parse(data, str(path)), path)
    return restored_from(state, path)


def _state(tree: dict[str, Json], feature: str | None, problems: list[str]) -> ExecutionState:
    named = tree.get("feature", feature)
    if not isinstance(named, str) or not named:
        problems.append("$.feature: it must be a text; give the graph with --graph if it has none")
    state = ExecutionState.create(str(named))
    tasks = tree.get("tasks")
    if tasks is None and "completed_tasks" in tree:
        tasks = _completed(tree["completed_tasks"], problems)
    if not isinstance(tasks, dict):
        problems.append(f"$.tasks: it must be a map of tasks by id, and is {_kind(tasks)}")
        return state
    for name, value in tasks.items():
        state.tasks[name] = _task(name, value, problems)
    names = tree.get("checkpoints", [])
    if not isinstance(names, list) or not all(isinstance(each, str) for each in names):
        problems.append("$.checkpoints: it must be a list of names of files")
    else:
        state.checkpoints = names
    return state


def _completed(value: Json, problems: list[str]) -> dict[str, Json]:
    if isinstance(value, list) and all(isinstance(each, str) for each in value):
        return {each: {"status": "complete"} for each in value}
    problems.append("$.completed_tasks: it must be a list of ids of tasks")
    return {}


def _task(name: str, value: Json, problems: list[str]) -> TaskState:
    at = f"$.tasks[{name!r:.80}]"
    task = TaskState(name)
    if not isinstance(value, dict):
        problems.append(f"{at}: it must be an object with a status, and is {_kind(value)}")
        return task
    if value.get("id", name) != name:
        problems.append(
            f"{at}.id: it is {value['id']!r:.80}, and must be the name that it is under"
        )
    status = value.get("status")
    if status in _COMPLETE:
        task.status = TaskStatus.COMPLETE
    elif status not in _OTHERS:
        known = ", ".join((*_COMPLETE, *_OTHERS))
        problems.append(f"{at}.status: {status!r:.80} is none of {known}")
    worker = value.get("worker_id")
    task.worker_id = None if worker is None else str(worker)
    task.started_at, task.completed_at = (
        _time(value.get(each)) for each in ("started_at", "completed_at")
    )
    return task


def _time(value: Json) -> datetime | None:
    """Return a time; None if it is none, since nothing depends on it."""
    try:
        return read_time(value) if isinstance(value, str) else None
    except ValueError:
        return None


def _kind(value: Json) -> str:
    return "nothing" if value is None else f"a {type(value).__name__}"
