"""Which run executes a graph in a folder: an earlier one, a fork of it, one from a state file, or a new one.

It is decided from what a state folder has, so that a dry run, which opens it only to read, says the
same as the run.
"""

from __future__ import annotations

import os
import re
import shlex
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from maestro_hive.kernel.errors import ConfigurationError, MaestroError
from maestro_hive.maestro.state.stores import open_reader
from maestro_hive.team.graph import make_plan
from maestro_hive.team.plans import WORKFLOW, gate_name
from maestro_hive.team.restoring import (
    INPUT,
    has_moved,
    input_digest,
    is_other_graph,
    read_state,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from maestro_hive.maestro.state.strict_json import Json
    from maestro_hive.team.graph import Graph, Task
    from maestro_hive.team.restoring import Restored

_NOT_IN_IDS = re.compile(r"[^A-Za-z0-9_-]+")
_LONGEST_NAME = 80
#: How many tasks an error names.
_NAMED = 8


class ChosenRun(NamedTuple):
    """Which run executes a graph."""

    run_id: str
    #: Whether it is there already, and the run that it goes on from with a changed graph.
    exists: bool
    forked_from: str | None = None
    #: The tasks and gates that it executes again, although that run has completed them.
    again: frozenset[str] = frozenset()
    #: Where the folder of that run is now, if it was moved.
    folder: Path | None = None
    #: The other run that has executed tasks otherwise in the folder since.
    replaced_by: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedRuns:
    """The runs of a state folder."""

    store: Path
    #: The workflow of each run, by its id.
    workflows: Mapping[str, str]
    #: Returns the graph and the folder that a team run was started with.
    arguments: Callable[[str], tuple[dict[str, Json], Path]]

    def has_team_run(self, run_id: str) -> bool:
        """Return whether there is a team run with this id."""
        return self.workflows.get(run_id) == WORKFLOW


def choose_run(
    runs: RecordedRuns,
    graph: Graph,
    folder: Path,
    *,
    run_id: str | None = None,
    force: bool = False,
    is_part: bool = False,
) -> ChosenRun:
    """Return the run that executes a graph in a folder: the one with ``run_id``, if that is given.

    Else that is the last run of its feature there. If the graph has changed since, or the folder
    was moved, it is a new run that has what that one completed, as far as its input is the same.
    With ``force`` it is a new one; of a graph that is a part of another one it has what that one
    completed of the rest.
    """
    if run_id is not None:
        return _named(runs, run_id, graph, folder, force=force)
    slug = _NOT_IN_IDS.sub("-", graph.feature).strip("-")[:_LONGEST_NAME] or "graph"
    numbered = re.compile(rf"{re.escape(slug)}(?:-(\d{{1,6}}))?")
    taken = {}
    for name in runs.workflows:
        if found := numbered.fullmatch(name):
            taken[int(found[1] or 1)] = name
    number = max(taken, default=0) + 1
    fresh = slug if number == 1 else f"{slug}-{number}"
    if force and not is_part:
        return ChosenRun(fresh, exists=False)
    for each in sorted(taken, reverse=True):
        name = taken[each]
        if not runs.has_team_run(name):
            continue
        document, place = runs.arguments(name)
        moved = folder if has_moved(place, folder, name) else None
        if document.get("feature") != graph.feature or folder not in (place, moved):
            continue
        other, again = _executed_otherwise(runs, graph, folder, name)
        if moved is None and not (force or again) and document == graph.to_document():
            return ChosenRun(name, exists=True)
        if force:
            other, again = None, frozenset(_names(graph))
        return ChosenRun(fresh, False, name, again, moved, other)
    return ChosenRun(fresh, exists=False)


def _executed_otherwise(
    runs: RecordedRuns, graph: Graph, folder: Path, run_id: str
) -> tuple[str | None, frozenset[str]]:
    """Return the tasks that another run has executed in a folder after this one, with another input.

    What they made is in the folder. Its state file tells which run was executed there last, wherever the
    journal of that is.
    """
    nothing = None, frozenset[str]()
    try:
        found = read_state(folder)
    except MaestroError:  # then the journal is all that is known
        return nothing
    if found is None or found.run_id is None or found.feature != graph.feature:
        return nothing
    store = Path(found.store or "")
    is_here = os.path.realpath(store) == os.path.realpath(runs.store) or not store.exists()
    if found.run_id == run_id and is_here:
        return nothing
    tasks = [task for task in graph.tasks if task.id in found.executed]
    if all(_is_complete_with(found, graph, task) for task in tasks):
        return nothing
    again: set[str] = set()
    for task in (graph.tasks[at] for at in make_plan(graph).order):
        # What the tasks before it have made is a part of its input.
        is_after = not again.isdisjoint(task.dependencies)
        if task.id in found.executed and (is_after or not _is_complete_with(found, graph, task)):
            again.add(task.id)
    return found.run_id, frozenset(again)


def _is_complete_with(found: Restored, graph: Graph, task: Task) -> bool:
    """Return whether a task is complete by a state, with what the graph says of it."""
    then = found.tasks.get(task.id)
    return then is not None and then.get(INPUT) == input_digest(graph, task)


def _named(
    runs: RecordedRuns, run_id: str, graph: Graph, folder: Path, *, force: bool
) -> ChosenRun:
    exists = runs.has_team_run(run_id)
    if exists and force:
        raise ConfigurationError(
            f"run {run_id!r} exists, and --force starts a new one: give another --run-id, or none, or"
            f" delete it first: 'maestro purge {run_id}'"
        )
    if exists and runs.arguments(run_id) == (graph.to_document(), folder):
        other, again = _executed_otherwise(runs, graph, folder, run_id)
        if again:
            raise ConfigurationError(
                f"run {other} has executed {', '.join(sorted(again)[:_NAMED])} with another input in this"
                f" folder after run {run_id!r}. Leave --run-id out: a new run goes on with what is"
                " unchanged; or give another id"
            )
    return ChosenRun(run_id, exists=exists)


def restorable(runs: RecordedRuns, graph: Graph, folder: Path) -> Restored | None:
    """Return what the state file of a folder has of a run of this graph whose journal is gone.

    Raises ``ConfigurationError`` if that file is all that is left of something else, or if what is
    complete by it is in another state folder: here it would be done, and paid for, once more.
    """
    found = read_state(folder)
    if found is None:
        return None
    if found.run_id is None:
        if not found.tasks:
            return None
        raise ConfigurationError(
            f"{found.source} has complete tasks, and no run of maestro wrote it; to go on from it:"
            f" 'maestro import {found.source} --graph GRAPH', or start a new run with --force, which"
            " replaces it"
        )
    is_other = is_other_graph(found, graph)
    if _has_journal(runs, found):
        if found.tasks and not is_other and not runs.has_team_run(found.run_id):
            raise _is_elsewhere(found)
        return None
    if is_other:
        if len(found.tasks) in (0, len(found.ids)):
            return None  # nothing is lost with it
        raise ConfigurationError(
            f"{found.source} is of another graph, of the feature {found.feature!r}, whose run"
            f" {found.run_id} is not in {runs.store}: it is all that is left of that run. Move"
            " it away, or start a new run with --force, which replaces it"
        )
    return found


def _is_elsewhere(found: Restored) -> ConfigurationError:
    count = len(found.tasks)
    return ConfigurationError(
        f"{count:,} {'task' if count == 1 else 'tasks'} of this graph {'is' if count == 1 else 'are'}"
        f" complete in run {found.run_id} of another state folder. Go on there:"
        f" --store {shlex.quote(found.store or '')}; or execute all of them again in a new run: --force"
    )


def _has_journal(runs: RecordedRuns, found: Restored) -> bool:
    """Return whether the run that a state is of is in a journal: that is the truth, then."""
    if found.run_id is not None and runs.has_team_run(found.run_id):
        return True
    folder = Path(found.store or "")
    if found.store is None or not (folder / "journal.db").exists():
        return False
    try:
        with closing(open_reader(folder)) as reader:
            return reader.run(found.run_id or "") is not None
    except MaestroError:
        return False


def _names(graph: Graph) -> Iterator[str]:
    """Yield the names of the steps of a graph: its tasks and gates."""
    for level in graph.levels:
        yield from level.tasks
        yield from (gate_name(level, gate) for gate in level.gates)
